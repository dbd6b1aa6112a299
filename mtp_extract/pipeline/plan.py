"""How a checkpoint is to be written: what extracting and converting both ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from mtp_extract.architecture.roles import GEMMA4_MTP
from mtp_extract.errors import UnsupportedError, either, escape, nearest
from mtp_extract.formats import ENGINES, EVERY, FORMATS, NAMES, choose
from mtp_extract.options import check_values

DtypeName = Literal["bf16", "f16", "f32", "codes"]
"""Every type that a format is written in."""

RuleName = Literal["q4_0", "q8_0", "int4", "int8"]
"""Every rule that makes codes of floats: the names in :data:`~mtp_extract.checkpoint.rounding.RULES`."""

_FORMATS = "; ".join(f"{name} ({listed.about})" for name, listed in EVERY.items())
_RULES = "; ".join(
    f"{name}: {', '.join(listed.rules)}" for name, listed in FORMATS.items() if listed.rules and not listed.read_as
)


_FOR = typer.Option(
    "--for",
    help=f"Engine that is to load it: {', '.join(ENGINES)}. Or a format: {_FORMATS}.",
    metavar="NAME",
    autocompletion=lambda incomplete: [name for name in NAMES if name.startswith(incomplete)],
)


@dataclass(frozen=True)
class WritingPlan:
    """As :func:`~mtp_extract.pipeline.extraction.extract` explains it."""

    format: Annotated[str | None, _FOR] = None
    dtype: Annotated[
        DtypeName | None,
        typer.Option(help="Type of the numbers; f32 is exact. By default the format's usual one."),
    ] = None
    codes: Annotated[bool, typer.Option("--codes", help="Write the stored integers, scales and zero points too.")] = (
        False
    )
    quantize: Annotated[
        RuleName | None,
        typer.Option(
            help=f"Round matrices that have no integers to integers, by a rule of the format ({_RULES}; its usual one "
            "first)."
        ),
    ] = None

    def __post_init__(self) -> None:
        """Raise ValueError where a name is none of its choices."""
        check_values(self)
        if self.format is not None and self.format.lower() not in (*ENGINES, *EVERY):
            raise ValueError(f"format {escape(self.format)!r}: expected {either(NAMES)}.{nearest(self.format, NAMES)}")

    def choose(self, architecture: str = GEMMA4_MTP) -> str:
        """The name of the format that is to be written, which can be written so.

        Args:
            architecture: of the drafter; an engine loads each in a format of its own.

        Raises:
            UnsupportedError: the engine loads no such drafter, or the format has no such type.
        """
        name = choose(self.format, architecture)
        listed = EVERY[name]
        if self.dtype not in (None, *listed.dtypes):
            raise UnsupportedError(
                f"The {name} format is written in {either(listed.dtypes)}, not in {self.dtype}. Choose another of the "
                "two.",
                remedies=("format", "dtype"),
            )
        return name
