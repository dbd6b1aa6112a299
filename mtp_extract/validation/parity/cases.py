"""Draft steps to compare on, in the terms of the model and as both programs take them; and a drafter known to be right.

Cases are random: positions from 1 to well past the window, numbers as large as the section's own integers expect (a
quarter of what they can hold), or of unit size where it has floats.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from mtp_extract.architecture.config import DrafterConfig
from mtp_extract.bundle import Shard, open_bundle
from mtp_extract.checkpoint.arranged import arrange
from mtp_extract.checkpoint.files import write_file
from mtp_extract.data import sample_bundle
from mtp_extract.drafter.load import load_drafter
from mtp_extract.drafter.masks import position_masks
from mtp_extract.drafter.mtp import DraftArguments, MtpDrafter
from mtp_extract.errors import UnsupportedError, few
from mtp_extract.formats import format_named
from mtp_extract.graph.drafter import ACTIVATIONS
from mtp_extract.graph.flat import INPUT_POS, MASK, MASK_LOCAL, PARAM_TENSOR
from mtp_extract.litertlm.storage import CODE_TYPES, Floats
from mtp_extract.pipeline.extraction import checkpoint_of

_LONGEST = 768  # slots; random contents of the 32003 of a published file prove nothing more
_SHARE_OF_RANGE = 0.25
_KEY_SPREAD = 3.0  # queries have the length √head_dim: keys of this over √head_dim spread attention logits by as much


@dataclass(frozen=True)
class Case:
    """One draft step."""

    embedding: Floats  # [base width], scaled
    hidden: Floats  # [base width]
    kv: Mapping[str, tuple[Floats, Floats]]  # layer type → K and V, each [KV heads, position + 1, head_dim]
    position: int  # of the query, and of the last visible slot


class Codes(NamedTuple):
    """Integers of ``dtype`` that stand for ``scale · (code − zero_point)``."""

    scale: float
    zero_point: int
    dtype: np.dtype[Any]

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


def codes_of(source: Shard, name: str) -> Codes | None:
    """How the signature has its input or output ``name``; None for floats.

    Raises:
        UnsupportedError: in integers, and nothing says by what scale.
    """
    signature = source.signature
    tensor = source.model.tensor(signature.subgraph, {**signature.inputs, **signature.outputs}[name])
    packing, known = CODE_TYPES.get(tensor.type) if tensor.type is not None else None, tensor.quantization
    if packing is None:
        return None
    if known is None or not known.scales.count:
        raise UnsupportedError(f"{source.model.region.source.name}: {tensor.label} holds integers without a scale.")
    return Codes(float(known.scale[0]), int(known.zero_point[0]) if known.zero_point.size else 0, packing.dtype)


def caches_of(source: Shard) -> dict[str, tuple[str, str]]:
    """The names of the inputs for K and V, by layer type."""
    pairs = zip(source.config.layer_types, source.walk.layers, strict=True)
    return {kind: (layer.key, layer.value) for kind, layer in pairs}


def slots_of(source: Shard) -> int:
    """How many positions the caches hold."""
    return max(source.walk.caches[key].shape[2] for key, _ in caches_of(source).values())


def random_cases(source: Shard, count: int, seed: int = 0) -> list[Case]:
    """``count`` random cases at positions spread from 1 to the end of the caches; the same for the same seed."""
    random, config = np.random.default_rng(seed), source.config
    first = next(role.input for role in source.walk.roles if role.role == "pre_projection")
    unit = first.scale * np.iinfo(first.type).max * _SHARE_OF_RANGE if first else 1.0

    def draw(spread: float, *shape: int) -> Floats:
        return (random.standard_normal(shape) * spread).astype(np.float32)

    def cache(name: str, otherwise: float, *shape: int) -> Floats:
        codes = codes_of(source, name)
        largest = codes.scale * (int(np.iinfo(codes.dtype).max) - codes.zero_point) if codes else 0.0
        return draw(largest * _SHARE_OF_RANGE if codes else otherwise, *shape)

    cases = list[Case]()
    for position in np.geomspace(1, min(slots_of(source), _LONGEST) - 1, count).round().astype(int).tolist():
        embedding, hidden = (draw(unit, config.backbone_hidden_size) for _ in range(2))
        kv = {}
        for kind, (key, value) in caches_of(source).items():
            layer = config.kv_layers[kind]
            shape = (layer.num_kv_heads, position + 1, layer.head_dim)
            kv[kind] = (cache(key, _KEY_SPREAD / layer.head_dim**0.5, *shape), cache(value, 1.0, *shape))
        cases.append(Case(embedding, hidden, kv, position))
    return cases


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
    for kind, names in caches_of(source).items():
        shapes = [source.walk.caches[name].shape for name in names]
        # Where a square cache leaves it open, V is transposed, as in every published file.
        turned = (False, shapes[0] != shapes[1] or shapes[1][2] == shapes[1][3])
        for name, shape, values, transposed in zip(names, shapes, case.kv[kind], turned, strict=True):
            whole = np.zeros(shape, np.float32)
            (whole.swapaxes(2, 3) if transposed else whole)[0, :, : case.position + 1] = values
            inputs[name] = whole
    if unknown := sorted(set(source.signature.inputs) - set(inputs)):
        raise UnsupportedError(
            f"{source.model.region.source.name}: expected the inputs of a known drafter, found also {few(unknown)}, "
            "which this release cannot fill. Look for a newer release."
        )
    for name in source.signature.inputs:
        codes = codes_of(source, name) if inputs[name].dtype == np.float32 else None
        if codes is not None and not floats:
            inputs[name] = codes.encode(inputs[name])
    return {name: inputs[name] for name in source.signature.inputs}


def reference_arguments(case: Case, config: DrafterConfig) -> DraftArguments:
    """What the drafter takes for ``case``, without the slots that it may not see."""
    newest, slots = torch.tensor([[case.position]]), torch.arange(case.position + 1)[None]
    return DraftArguments(
        embedding=torch.from_numpy(case.embedding)[None, None],
        hidden=torch.from_numpy(case.hidden)[None, None],
        shared_kv={kind: (torch.from_numpy(k)[None], torch.from_numpy(v)[None]) for kind, (k, v) in case.kv.items()},
        position_ids=newest,
        masks=position_masks(config, dict.fromkeys(config.kv_layers, slots), newest),
    )


@contextmanager
def known_drafter() -> Iterator[tuple[Path, MtpDrafter, Shard]]:
    """The sample's directory, its drafter in F32, and that in its file.

    Another program may judge a drafter while it calls this one right, which is known to be right.
    """
    with tempfile.TemporaryDirectory() as folder, open_bundle(sample_bundle()) as opened:
        place, source = Path(folder), opened.drafter()
        for file in arrange(format_named("transformers"), checkpoint_of(source), "f32").files:
            write_file(place, file)
        yield place, load_drafter(place), source
