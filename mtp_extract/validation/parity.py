"""Another program as a witness: it runs draft steps that the reference runs too, and the outputs are compared.

The steps are random: positions from 1 to well past the window, numbers as large as the section's own integers expect (a
quarter of what they can hold), or of unit size where it has floats. A program may fail with this drafter because its
release is broken: it refutes a drafter only if it passes one that is known to be right.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from mtp_extract.bundle import Shard, open_bundle
from mtp_extract.checkpoint.arranged import arrange
from mtp_extract.checkpoint.files import write_file
from mtp_extract.data import sample_bundle
from mtp_extract.drafter.load import load_drafter
from mtp_extract.drafter.masks import position_masks
from mtp_extract.drafter.mtp import MtpDrafter, MtpState
from mtp_extract.formats import format_named
from mtp_extract.litertlm.storage import CODE_TYPES, Floats
from mtp_extract.pipeline.check import Check
from mtp_extract.pipeline.extraction import checkpoint_of

_LONGEST = 768  # slots; random contents of the 32003 of a published file prove nothing more
_SHARE_OF_RANGE = 0.25
_KEY_SPREAD = 3.0  # queries have the length √head_dim: keys of this over √head_dim spread attention logits by as much

Outputs = tuple[Floats, Floats]
"""Logits [vocabulary] and projected state [base width] of one case."""

Examination = Callable[[Path, MtpDrafter, Shard], tuple[bool | None, str]]
"""Directory, its drafter in float32, and the file's drafter → whether a program agrees, and the evidence."""


@dataclass(frozen=True)
class Case:
    """One draft step."""

    embedding: Floats  # [base width], scaled
    hidden: Floats  # [base width]
    kv: Mapping[str, tuple[Floats, Floats]]  # layer type → K and V, each [KV heads, position + 1, head_dim]
    position: int  # of the query, and of the last visible slot


@dataclass(frozen=True)
class Apart:
    """How far two programs' outputs are from each other, over all cases."""

    logits: float  # largest difference, as a share of that case's range; infinite where a number is none
    state: float  # likewise
    correlation: float  # mean over the cases, of the output where it is less
    top1: int  # cases with the same largest logit

    @property
    def worst(self) -> float:
        """The larger difference of the two outputs."""
        return max(self.logits, self.state)


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
        tensor = source.walk.caches[name]
        packing, known = CODE_TYPES.get(tensor.type) if tensor.type is not None else None, tensor.quantization
        if packing is None or known is None or not known.scales.count:
            return draw(otherwise, *shape)
        zero = int(known.zero_point[0]) if known.zero_point.size else 0
        return draw(float(known.scale[0]) * (packing.highest - zero) * _SHARE_OF_RANGE, *shape)

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


@torch.inference_mode()
def reference_output(drafter: MtpDrafter, case: Case) -> Outputs:
    """What ``drafter``, float32 on the CPU, computes of ``case``, without the slots that it may not see."""
    position, slots = torch.tensor([[case.position]]), torch.arange(case.position + 1)[None]
    embedding, hidden = (torch.from_numpy(part)[None, None] for part in (case.embedding, case.hidden))
    kv = {kind: (torch.from_numpy(k)[None], torch.from_numpy(v)[None]) for kind, (k, v) in case.kv.items()}
    masks = position_masks(drafter.config, dict.fromkeys(kv, slots), position)
    logits, after = drafter.step(MtpState(lambda _: embedding, hidden, drafter.views(kv, position, masks)), position)
    return logits.numpy().reshape(-1), after.hidden.numpy().reshape(-1)


@np.errstate(all="ignore")
def apart(ours: Sequence[Outputs], theirs: Sequence[Outputs]) -> Apart:
    """How far ``ours`` are from ``theirs``, case by case."""
    far, alike = list[float](), list[float]()
    for mine, other in zip(zip(*ours, strict=True), zip(*theirs, strict=True), strict=True):
        pairs = [(a, b.astype(np.float64)) for a, b in zip(mine, other, strict=True)]
        gaps = [float(np.abs(a - b).max() / np.ptp(b)) for a, b in pairs]
        far.append(max(gap if math.isfinite(gap) else math.inf for gap in gaps))
        alike.append(float(np.mean([np.corrcoef(a, b)[0, 1] for a, b in pairs])))
    top1 = sum(int(a[0].argmax() == b[0].argmax()) for a, b in zip(ours, theirs, strict=True))
    return Apart(far[0], far[1], min(alike), top1)


def examined(name: str, what: str, examine: Examination, directory: Path, drafter: MtpDrafter, source: Shard) -> Check:
    """The check ``name``: passed or not as ``examine`` says; open where it calls the sample's drafter wrong, too."""
    passed, evidence = examine(directory, drafter, source)
    if passed is False:
        with known_drafter() as known:
            if not examine(*known)[0]:
                passed, evidence = None, f"it fails with a drafter that is known to be right, too: {evidence}"
    return Check(name, what, passed, evidence)


@contextmanager
def known_drafter() -> Iterator[tuple[Path, MtpDrafter, Shard]]:
    """The sample's directory, its drafter in float32, and that in its file."""
    with tempfile.TemporaryDirectory() as folder, open_bundle(sample_bundle()) as opened:
        place, source = Path(folder), opened.drafter()
        for file in arrange(format_named("transformers"), checkpoint_of(source), "f32").files:
            write_file(place, file)
        yield place, load_drafter(place), source
