"""The options of writing a checkpoint, for extracting and converting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from mtp_extract.architecture.roles import GEMMA4_MTP
from mtp_extract.errors import UnsupportedError, format_choice
from mtp_extract.formats import ALL_FORMATS, choose_format, list_choices
from mtp_extract.options import check_choice

DtypeName = Literal["bf16", "f16", "f32", "codes"]
"""Every type that a format is written in."""

RuleName = Literal["q4_0", "q8_0", "int4", "int8"]
"""Every rule that rounds floats to codes: the keys of :data:`~mtp_extract.checkpoint.rounding.RULES`."""


@dataclass(frozen=True)
class WritingPlan:
    """Options of writing a checkpoint; :func:`~mtp_extract.api.extract` explains them."""

    format: str | None = None
    dtype: DtypeName | None = None
    codes: bool = False
    quantize: RuleName | None = None

    def __post_init__(self) -> None:
        """Raise PlanError if an option is none of its choices."""
        check_choice("dtype", self.dtype, get_args(DtypeName))
        check_choice("quantize", self.quantize, get_args(RuleName))
        if self.format is not None and self.format.lower() not in list_choices():
            check_choice("format", self.format, list_choices())

    def choose(self, architecture: str = GEMMA4_MTP) -> str:
        """Return the name of the format to write.

        Args:
            architecture: of the drafter; an engine loads each architecture in its own format.

        Raises:
            UnsupportedError: the engine does not load the architecture, or the format does not have the dtype.
        """
        name = choose_format(self.format, architecture)
        listed = ALL_FORMATS[name]
        if self.dtype not in (None, *listed.dtypes):
            raise UnsupportedError(
                f"The {name} format is written in {format_choice(listed.dtypes)}, not in {self.dtype}. Choose another "
                "format or type.",
                remedies=("format", "dtype"),
            )
        return name
