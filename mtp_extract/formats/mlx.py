"""MLX's affine quantization, as mlx-vlm loads it: ``X.weight`` packed in uint32, ``X.scales`` and ``X.biases``, one a
group; ``stored · scale + bias``, the bias being half the range of the codes below 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from mtp_extract._version import __version__
from mtp_extract.checkpoint.keys import some
from mtp_extract.checkpoint.packing import row_bytes
from mtp_extract.formats.packed import GROUPS, PackedFormat
from mtp_extract.formats.parts import Packed, Part

_MODE = "affine"


class MlxFormat(PackedFormat):
    """``config.json`` with ``quantization``, ``generation_config.json`` and ``model.safetensors``."""

    name = "mlx"
    key = "quantization"
    groups = GROUPS
    rows = False
    unfit = (
        "its steps are shared by {block} elements, where MLX has groups of 32, 64 or 128; the compressed-tensors "
        "format keeps whole rows of any length"
    )
    unties = False
    tolerated = MappingProxyType({"mode": some(None), "*.mode": some(None)})  # affine where nothing is said
    metadata = MappingProxyType({"format": "mlx", "mtp_extract": __version__})

    def parts(self, packed: Packed) -> Sequence[Part]:
        columns = row_bytes(packed.shape[1], packed.bits, 4) // 4
        return (
            Part(".weight", "codes", "U32", (packed.shape[0], columns)),
            Part(".scales", "scales", "F32", packed.scales),
            Part(".biases", "biases", "F32", packed.scales),
        )

    def document(self, packed: Mapping[str, Packed], floats: Sequence[str]) -> dict[str, Any]:
        entries = {module: {"group_size": how.group, "bits": how.bits, "mode": _MODE} for module, how in packed.items()}
        # What counts for modules without an entry of their own, of which there are none.
        return {**next(iter(entries.values())), **entries}


FORMAT = MlxFormat()
