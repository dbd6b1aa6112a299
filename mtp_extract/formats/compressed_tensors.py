"""compressed-tensors' ``pack-quantized``, weights only: what vLLM, SGLang and transformers load.

The head is packed, and so a module of its own; the embedding is not stored: a drafter never reads it, and engines
share the base's. Packed, the head is an eighth of what it is in floats, and reading it is most of what a draft costs.
SGLang has no packed head and would leave it as it was made, without a word: for it the head stays in floats, tied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from mtp_extract.architecture.roles import Role
from mtp_extract.checkpoint.keys import anything, is_number, is_text, off, some
from mtp_extract.checkpoint.packing import row_bytes
from mtp_extract.checkpoint.weight import RowCodes
from mtp_extract.errors import NoCodesError
from mtp_extract.formats.packed import GROUPS, HEAD, PackedFormat
from mtp_extract.formats.parts import Packed, Part

_QUERY, _GATE, _UP = "self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj"
_FIXED = {"num_bits": None, "type": "int", "symmetric": True, "strategy": None, "group_size": None, "dynamic": False}
_OFF = ("kv_cache_scheme", "sparsity_config", "transform_config")
"""What would change the numbers that an engine computes."""


class CompressedTensorsFormat(PackedFormat):
    """``config.json`` with ``quantization_config``, ``generation_config.json`` and ``model.safetensors``."""

    key = "quantization_config"
    groups = GROUPS
    rows = True
    unfit = "its blocks of {block} are none that engines have kernels for; the litert format has its floats"
    unties = True
    tolerated = MappingProxyType(
        {
            # Read here, or by nothing that computes.
            **dict.fromkeys(_OFF, off),
            "config_groups.*.format": some("pack-quantized"),
            "config_groups.*.*_activations": off,
            "config_groups.*.weights.observer*": anything,
            "version": is_text,
            "global_compression_ratio": is_number,
        }
    )

    def __init__(self, name: str, dense_head_for: str = "") -> None:
        """With a head in floats, for an engine that takes no other."""
        self.name = name
        self._dense_head_for = dense_head_for

    def fit(self, role: Role, codes: RowCodes) -> int:
        if role.name == HEAD and self._dense_head_for:
            raise NoCodesError(f"{self._dense_head_for} takes a head of floats only; without it the codes are kept")
        return super().fit(role, codes)

    def parts(self, packed: Packed) -> Sequence[Part]:
        columns = row_bytes(packed.shape[1], packed.bits, 4) // 4
        return (
            Part(".weight_packed", "codes", "I32", (packed.shape[0], columns)),
            Part(".weight_scale", "scales", "F32", packed.scales),
            Part(".weight_shape", "shape", "I64", (2,)),
        )

    def document(self, packed: Mapping[str, Packed], floats: Sequence[str]) -> dict[str, Any]:
        groups: dict[tuple[int, int | None], list[str]] = {}
        for module, how in packed.items():
            size = None if how.group == how.shape[1] else how.group
            groups.setdefault((how.bits, size), []).append(
                _target(module, fused=packed.get(_fused_with(module)) == how)
            )
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {
                f"group_{index}": {
                    "targets": targets,
                    "weights": {**_FIXED, "num_bits": bits, **_strategy(size)},
                    "input_activations": None,
                    "output_activations": None,
                }
                for index, ((bits, size), targets) in enumerate(groups.items())
            },
            "ignore": [],
        }


FORMAT = CompressedTensorsFormat("compressed-tensors")
SGLANG = CompressedTensorsFormat("compressed-tensors-sglang", "SGLang")


def _strategy(size: int | None) -> dict[str, Any]:
    return {"strategy": "channel" if size is None else "group", "group_size": size}


def _fused_with(module: str) -> str:
    """The module that engines fuse with a gate; empty for any other."""
    return module.removesuffix(_GATE) + _UP if module.endswith(_GATE) else ""


def _target(module: str, fused: bool) -> str:
    """What finds ``module`` whatever stands before it, as in vLLM, where it is below ``draft_model``; by the names too
    under which engines fuse it with others: vLLM and SGLang gate and up, if ``fused``; SGLang query, key and value.
    """
    name = module.removeprefix("model.")
    for one, every in ((_QUERY, "self_attn.(q|k|v|qkv)_proj"), (_GATE, "mlp.(gate|gate_up)_proj")):
        if name.endswith(one) and (fused or one != _GATE):
            name = name.removesuffix(one) + every
    escaped = name.replace(".", r"\.")
    return f"re:.*{escaped}$"
