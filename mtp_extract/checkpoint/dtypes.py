"""The types of tensors in files; of those of floats, the conversions between them and float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_extract.errors import UnsupportedError
from mtp_extract.litertlm.storage import Floats, narrowed, widened
from mtp_extract.litertlm.tflite import TensorType


@dataclass(frozen=True)
class Dtype:
    """A floating-point type."""

    type: TensorType
    safetensors: str  # its name there
    transformers: str  # and there
    rounding: str  # what a record calls a rounding to it; empty for F32, in which everything is computed
    roundoff: float  # the most by which rounding changes a number, as a share of it (FP16: while it is normal)
    wider: tuple[str, ...] = ()  # names of the types with a larger range

    def narrow(self, values: Floats, name: str) -> npt.NDArray[np.generic]:
        """Finite numbers, flat, rounded to the nearest, ties to even; BF16 as uint16.

        Args:
            name: of the tensor, for the message.

        Raises:
            UnsupportedError: a number leaves the type's range.
        """
        try:
            return narrowed(values, self.type)
        except OverflowError as error:
            raise UnsupportedError(
                f"{name} holds values beyond {self.transformers}'s range. Choose {' or '.join(self.wider)}.",
                remedies=tuple(f"dtype={wider}" for wider in self.wider),
            ) from error

    def widen(self, stored: bytes | memoryview) -> Floats:
        """Stored little-endian bytes as float32, exactly."""
        return widened(stored, self.type)


DTYPES = MappingProxyType(
    {
        "f32": Dtype(TensorType.FLOAT32, "F32", "float32", "", 2.0**-24),
        "bf16": Dtype(TensorType.BFLOAT16, "BF16", "bfloat16", "BF16", 2.0**-8, ("f32",)),
        "f16": Dtype(TensorType.FLOAT16, "F16", "float16", "FP16", 2.0**-11, ("bf16", "f32")),
    }
)
"""Output types by their name on the command line."""

ROUNDED_TO = MappingProxyType({dtype.rounding: dtype for dtype in DTYPES.values()})
"""The same by what a record calls a rounding to the type."""

BLOCKS = MappingProxyType(
    {
        **dict.fromkeys(("F64", "I64"), (1, 8)),
        **dict.fromkeys(("F32", "I32", "U32"), (1, 4)),
        **dict.fromkeys(("F16", "BF16", "I16"), (1, 2)),
        **dict.fromkeys(("I8", "U8", "BOOL"), (1, 1)),
        "Q4_0": (32, 18),
        "Q8_0": (32, 34),
    }
)
"""Elements and bytes of the least piece of every type, by its name in safetensors and GGUF."""

ARRAYS: Mapping[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "I64": np.dtype("<i8"), "BOOL": np.dtype(np.bool_)}
"""Types of small arrays, which are written and read as a whole."""
