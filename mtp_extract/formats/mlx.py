"""MLX's affine quantization, as mlx-vlm loads it: ``X.weight`` packed in uint32, ``X.scales`` and ``X.biases``, one a
group; ``stored · scale + bias``, the bias being half the range of the codes below 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from mtp_extract._version import __version__
from mtp_extract.architecture.roles import Role
from mtp_extract.checkpoint.integers import RowCodes
from mtp_extract.checkpoint.packing import row_bytes
from mtp_extract.errors import CheckpointError, NoCodesError, escape
from mtp_extract.formats import reading
from mtp_extract.formats.packed import GROUPS, PackedFormat, group_of
from mtp_extract.formats.parts import Packed, Part

_MODE = "affine"


class MlxFormat(PackedFormat):
    """``config.json`` with ``quantization``, ``generation_config.json`` and ``model.safetensors``."""

    name = "mlx"
    key = "quantization"
    unties = False
    metadata = MappingProxyType({"format": "mlx", "mtp_extract": __version__})

    def fit(self, role: Role, codes: RowCodes) -> int:
        group = group_of(codes)
        if group is None:
            raise NoCodesError(
                f"its steps are shared by {codes.steps.block} elements, where MLX has groups of 32, 64 or 128; "
                "the compressed-tensors format keeps whole rows of any length"
            )
        return group

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

    def packed_modules(
        self, document: Mapping[str, Any], modules: Mapping[str, tuple[int, ...]]
    ) -> dict[str, tuple[int, int]]:
        found = {}
        for module, entry in document.items():
            if module in ("group_size", "bits") or (module, entry) == ("mode", _MODE):
                continue
            if module not in modules or not isinstance(entry, dict) or entry.get("mode", _MODE) != _MODE:
                raise CheckpointError(
                    f"expected affine quantization of a matrix of the drafter under {self.key}, found "
                    f"{escape(module)}: {escape(entry)}; extract the drafter anew"
                )
            bits, group = (reading.positive_integer(entry, key) for key in ("bits", "group_size"))
            if group not in GROUPS:
                raise CheckpointError(
                    f"{escape(module)}: expected groups of 32, 64 or 128, found {group}; check the config"
                )
            found[module] = bits, group
        return found


FORMAT = MlxFormat()
