"""Draft steps to compare on, in the terms of the model, and as both programs take them.

Random cases need no base: positions from 1 to well past the window, numbers as large as the section's own integers
expect (a quarter of what they can hold), or of unit size where it has floats. Cases from a base are what a runtime
would pass. Where the signature takes integers, a case holds numbers that those can represent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mtp_extract.architecture.config import DrafterConfig
from mtp_extract.bundle import Shard
from mtp_extract.drafter.arguments import DraftArguments
from mtp_extract.drafter.masks import position_masks
from mtp_extract.errors import UnsupportedError, few
from mtp_extract.graph.drafter import ACTIVATIONS
from mtp_extract.graph.flat import INPUT_POS, MASK, MASK_LOCAL, PARAM_TENSOR
from mtp_extract.litertlm import tflite
from mtp_extract.litertlm.storage import Floats

if TYPE_CHECKING:
    from mtp_extract.speculate.target import Base
    from mtp_extract.speculate.teacher import Text

_DTYPES: dict[tflite.TensorType | None, np.dtype[Any]] = {
    tflite.TensorType.INT8: np.dtype(np.int8),
    tflite.TensorType.INT16: np.dtype(np.int16),
}
_LONGEST = 768  # slots; random contents of the 32003 of a published file prove nothing more
_SHARE_OF_RANGE = 0.25
# Queries have the length √head_dim: keys of this over √head_dim spread attention logits by as much.
_KEY_SPREAD = 3.0


@dataclass(frozen=True)
class Case:
    """One draft step."""

    label: str  # where it is from
    embedding: Floats  # [base width], scaled
    hidden: Floats  # [base width]
    kv: Mapping[str, tuple[Floats, Floats]]  # layer type → K and V, each [KV heads, position + 1, head_dim]
    position: int  # of the query, and of the last visible slot


@dataclass(frozen=True)
class Codes:
    """Integers of ``dtype`` that stand for ``scale · (code − zero_point)``."""

    scale: float
    zero_point: int
    dtype: np.dtype[Any]

    @property
    def largest(self) -> float:
        """The largest number that fits."""
        return self.scale * (int(np.iinfo(self.dtype).max) - self.zero_point)

    def encode(self, values: Floats) -> NDArray[Any]:
        """Nearest codes, ties to even, clipped."""
        limits = np.iinfo(self.dtype)
        codes = np.rint(values / np.float32(self.scale)) + self.zero_point
        stored: NDArray[Any] = np.clip(codes, limits.min, limits.max).astype(self.dtype)
        return stored

    def decode(self, codes: NDArray[Any]) -> Floats:
        """The numbers that ``codes`` stand for, float32."""
        values: Floats = (codes.astype(np.float32) - np.float32(self.zero_point)) * np.float32(self.scale)
        return values


def codes_of(tensor: tflite.Tensor) -> Codes | None:
    """How a tensor's numbers are stored; None for floats, and for integers without a scale of their own."""
    known = tensor.quantization
    if tensor.type not in _DTYPES or known is None or not known.scales.count:
        return None
    zero_point = int(known.zero_point[0]) if known.zero_point.size else 0
    return Codes(float(known.scale[0]), zero_point, _DTYPES[tensor.type])


def input_codes(source: Shard, name: str) -> Codes | None:
    """How the signature takes the numbers of the input ``name``; None for floats.

    Raises:
        UnsupportedError: in integers, and nothing says by what scale.
    """
    tensor = source.model.tensor(source.signature.subgraph, source.signature.inputs[name])
    found = codes_of(tensor)
    if found is None and tensor.type in _DTYPES:
        if name not in source.walk.cache_scales:
            raise UnsupportedError(f"{source.model.region.source.name}: {tensor.label} holds integers without a scale.")
        return Codes(source.walk.cache_scales[name], 0, _DTYPES[tensor.type])
    if found is None and tensor.type is not tflite.TensorType.FLOAT32:
        raise UnsupportedError(
            f"{source.model.region.source.name}: expected {tensor.label} in FLOAT32, INT8 or INT16, which this "
            "release fills."
        )
    return found


def cache_names(source: Shard) -> dict[str, tuple[str, str]]:
    """The names of the inputs for K and V, by layer type."""
    pairs = zip(source.config.layer_types, source.walk.layers, strict=True)
    return {kind: (layer.key, layer.value) for kind, layer in pairs}


def slots_of(source: Shard) -> int:
    """How many positions the caches hold."""
    return max(source.walk.caches[key].shape[2] for key, _ in cache_names(source).values())


def random_cases(source: Shard, count: int, seed: int) -> list[Case]:
    """``count`` random cases at positions spread from 1 to the end of the caches; the same for the same seed."""
    random, config, names = np.random.default_rng(seed), source.config, cache_names(source)
    first = next(role.input for role in source.walk.roles if role.role == "pre_projection")
    unit = first.scale * np.iinfo(first.type).max * _SHARE_OF_RANGE if first else 1.0

    def draw(spread: float, *shape: int) -> Floats:
        return (random.standard_normal(shape) * spread).astype(np.float32)

    def cache(name: str, otherwise: float, *shape: int) -> Floats:
        codes = input_codes(source, name)
        return draw(codes.largest * _SHARE_OF_RANGE if codes else otherwise, *shape)

    positions = np.geomspace(1, min(slots_of(source), _LONGEST) - 1, count).round().astype(int).tolist()
    cases = []
    for index, position in enumerate(positions):
        embedding, hidden = (draw(unit, config.backbone_hidden_size) for _ in range(2))
        kv = {}
        for kind, layer in config.kv_layers.items():
            shape = (layer.num_kv_heads, position + 1, layer.head_dim)
            key, value = names[kind]
            kv[kind] = (cache(key, _KEY_SPREAD / layer.head_dim**0.5, *shape), cache(value, 1.0, *shape))
        cases.append(Case(f"random {index}", embedding, hidden, kv, position))
    return cases


@torch.inference_mode()
def base_cases(base: Base, source: Shard, texts: Sequence[Text], count: int) -> list[Case]:
    """Cases from the base's states over ``texts``, at ``count`` anchors spread over them, where they fit the caches."""
    anchors = [(i, n) for i, text in enumerate(texts) for n in text.anchors if n <= slots_of(source)]
    chosen = [anchors[round(k)] for k in np.linspace(0, len(anchors) - 1, min(count, len(anchors))).tolist()]
    cases = []
    for index in sorted({i for i, _ in chosen}):
        tokens = torch.tensor([texts[index].tokens], device=base.device)
        full, embedded = base.full_pass(tokens), base.embed(tokens)
        for anchor in (n for i, n in chosen if i == index):
            kv = {
                kind: (_array(full.shared_kv[kind][0][0, :, :anchor]), _array(full.shared_kv[kind][1][0, :, :anchor]))
                for kind in source.config.kv_layers
            }
            parts = _array(embedded[0, anchor]), _array(full.hidden[0, anchor - 1])
            cases.append(Case(f"text {index}, token {anchor}", *parts, kv, anchor - 1))
    return cases


def _array(tensor: Tensor) -> Floats:
    return tensor.detach().float().cpu().numpy()


def signature_inputs(source: Shard, case: Case, *, floats: bool) -> dict[str, NDArray[Any]]:
    """What the signature takes for ``case``; caches are zero past the position.

    Args:
        floats: of the section in floats, where no input has scales of its own.

    Raises:
        UnsupportedError: the signature has an input that this release does not know.
    """
    slots = np.arange(slots_of(source))
    seen = slots <= case.position
    local = seen & (slots > case.position - (source.config.sliding_window or len(slots)))
    # [start, end, end]: the newest slot, and one past the last that may be read.
    param = [case.position, case.position + 1, case.position + 1, 0, 0, 0, 0]
    inputs: dict[str, NDArray[Any]] = {
        ACTIVATIONS: np.concatenate([case.embedding, case.hidden])[None, None],
        INPUT_POS: np.array([case.position], np.int32),
        MASK: seen[None, None, None],
        MASK_LOCAL: local[None, None, None],
        PARAM_TENSOR: np.array([[[param]]], np.int32),
    }
    for kind, (key, value) in cache_names(source).items():
        shapes = source.walk.caches[key].shape, source.walk.caches[value].shape
        # Where a square cache leaves it open, V is transposed, as in every published file.
        transposed = shapes[0] != shapes[1] or shapes[1][2] == shapes[1][3]
        for name, values, turned in ((key, case.kv[kind][0], False), (value, case.kv[kind][1], transposed)):
            whole = np.zeros(source.walk.caches[name].shape, np.float32)
            (whole.swapaxes(2, 3) if turned else whole)[0, :, : case.position + 1] = values
            inputs[name] = whole
    if unknown := sorted(set(source.signature.inputs) - set(inputs)):
        raise UnsupportedError(
            f"{source.model.region.source.name}: expected the inputs of a known drafter, found also {few(unknown)}, "
            "which this release cannot fill. Look for a newer release."
        )
    return {name: _taken(source, name, inputs[name], floats) for name in source.signature.inputs}


def _taken(source: Shard, name: str, values: NDArray[Any], floats: bool) -> NDArray[Any]:
    """``values`` of an input, real numbers in the integers that the section takes them in."""
    tensor = source.model.tensor(source.signature.subgraph, source.signature.inputs[name])
    if values.dtype != np.float32 or (floats and codes_of(tensor) is not None):
        return values
    codes = input_codes(source, name)
    return codes.encode(values) if codes is not None else values


def reference_arguments(case: Case, config: DrafterConfig) -> DraftArguments:
    """What the drafter takes for ``case``, without the slots that it may not see."""
    newest, slots = torch.tensor([[case.position]]), torch.arange(case.position + 1)[None]
    return DraftArguments(
        embedding=torch.from_numpy(case.embedding)[None, None],
        hidden=torch.from_numpy(case.hidden)[None, None],
        shared_kv={
            kind: (torch.from_numpy(case.kv[kind][0])[None], torch.from_numpy(case.kv[kind][1])[None])
            for kind in config.kv_layers
        },
        position_ids=newest,
        masks=position_masks(config, dict.fromkeys(config.kv_layers, slots), newest),
    )
