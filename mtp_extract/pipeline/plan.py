"""How a checkpoint is to be written: what extracting and converting both ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from mtp_extract.architecture.roles import GEMMA4_MTP
from mtp_extract.errors import UnsupportedError, either
from mtp_extract.formats import ENGINES, EVERY, FORMATS, HEADS, NAMES, choose
from mtp_extract.options import About, check_values

_FORMATS = "; ".join(f"{name} ({listed.about})" for name, listed in (FORMATS | HEADS).items())
_RULES = "; ".join(
    f"{name}: {', '.join(listed.rules)}" for name, listed in FORMATS.items() if listed.rules and not listed.read_as
)


def _every(field: str) -> tuple[str, ...]:
    """What the formats list under ``field``, each once."""
    return tuple(dict.fromkeys(name for listed in FORMATS.values() for name in getattr(listed, field)))


@dataclass(frozen=True)
class WritingPlan:
    """As :func:`~mtp_extract.pipeline.extraction.extract` explains it."""

    format: Annotated[
        str | None,
        About(
            f"The engine that is to load it: {', '.join(ENGINES)}. Or a format: {_FORMATS}.",
            names=("--for",),
            metavar="NAME",
            choices=NAMES,
        ),
    ] = None
    dtype: Annotated[
        str | None,
        About("Type of the numbers; f32 is exact. By default the first that the format has.", choices=_every("dtypes")),
    ] = None
    codes: Annotated[bool, About("Also write the stored integers, scales and zero points.")] = False
    quantize: Annotated[
        str | None,
        About(
            f"Round matrices that have no integers to such, by a rule the format holds ({_RULES}; its usual one "
            "first).",
            choices=_every("rules"),
        ),
    ] = None

    def __post_init__(self) -> None:
        """Raise ValueError where a name is none of its choices."""
        check_values(self)

    def choose(self, architecture: str = GEMMA4_MTP) -> str:
        """The name of the format that is to be written, which can be written so.

        Args:
            architecture: of the drafter; an engine loads each in a format of its own.

        Raises:
            UnsupportedError: the engine loads no such drafter, or the format has no such type.
        """
        name = choose(self.format, architecture)
        listed = EVERY[name]
        if self.dtype is not None and self.dtype not in listed.dtypes:
            raise UnsupportedError(
                f"The {name} format is written in {either(listed.dtypes)}, not in {self.dtype}. Choose another of the "
                "two.",
                remedies=("format", "dtype"),
            )
        return name
