"""How a checkpoint is to be written: what extracting and converting both ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from mtp_extract.architecture.roles import GEMMA4_MTP
from mtp_extract.errors import UnsupportedError, either
from mtp_extract.formats import ENGINES, EVERY, FORMATS, choose
from mtp_extract.options import About, check_values

_RULES = "; ".join(
    f"{name}: {', '.join(listed.rules)}" for name, listed in FORMATS.items() if listed.rules and not listed.variant
)


def _every(field: str) -> tuple[str, ...]:
    """What the formats list under ``field``, each once."""
    return tuple(dict.fromkeys(name for listed in FORMATS.values() for name in getattr(listed, field)))


@dataclass(frozen=True)
class WritingPlan:
    """As :func:`~mtp_extract.pipeline.extraction.extract` explains it."""

    engine: Annotated[
        str | None,
        About("Choose the format by what is to serve the drafter.", names=("--for",), choices=tuple(ENGINES)),
    ] = None
    dtype: Annotated[
        str | None,
        About("Type of the numbers; f32 is exact. By default the first that the format has.", choices=_every("dtypes")),
    ] = None
    codes: Annotated[bool, About("Also write the stored integers, scales and zero points.")] = False
    exact: Annotated[bool, About("Write nothing that is rounded; say what would be.")] = False
    quantize: Annotated[
        str | None,
        About(
            f"Round matrices that have no integers to such, by a rule the format holds ({_RULES}; its usual one "
            "first).",
            choices=_every("rules"),
        ),
    ] = None

    def choose(self, format_: str | None, architecture: str = GEMMA4_MTP) -> str:
        """The name of the format that is to be written, which can be written so.

        Args:
            format_: as the user has it; None for the engine's best.
            architecture: of the drafter, for that.

        Raises:
            ValueError: an unknown name, type or rule, or an engine that does not load the format.
            UnsupportedError: rounding and exactness at once.
        """
        name = choose(format_, self.engine, architecture)
        if self.exact and self.quantize:
            raise UnsupportedError(
                f"Rounding by {self.quantize} is not exact. Leave one of the two out.", remedies=("exact", "quantize")
            )
        listed = EVERY[name]
        if self.dtype is not None and self.dtype not in listed.dtypes:
            held = either(listed.dtypes)
            raise ValueError(
                f"dtype {self.dtype!r}: the {name} format is written in {held}. Choose that, or another format."
            )
        check_values(self)
        return name
