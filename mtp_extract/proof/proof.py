"""Proof by execution: what is written computes what the file computes.

The graph is evaluated operator by operator, the checkpoint's own forward runs beside it, on the same inputs. Patterns
propose what a graph is; this decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mtp_extract.errors import ProofError
from mtp_extract.graph.drafter import LOGITS, PROJECTED, Walk
from mtp_extract.graph.evaluate import evaluate, inputs_of
from mtp_extract.graph.fill import MASK, MASK_LOCAL
from mtp_extract.graph.flat import FlatGraph, Value, ancestors
from mtp_extract.graph.rope import frequencies
from mtp_extract.litertlm.tflite import TensorType
from mtp_extract.proof.forward import Read, Step, Written, forward, logits
from mtp_extract.proof.inputs import Inputs, Reading, draw

if TYPE_CHECKING:
    from mtp_extract.architecture.config import DrafterConfig

__all__ = ["SEED", "TOLERANCE", "Proof", "Rounding", "prove"]

SEED = 20260101
TOLERANCE = 1e-5
"""Of the range of an output: what two orders of summation in float32 leave, and no more."""

_SPREAD = 8.0
"""How many times what a random rounding does, the rounding that was written may do: it is one draw of such."""

_TINY = 1e-3
_FAR_BELOW = 1e-2
_MOST_EXPLAINED = 4

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Rounding:
    """A second checkpoint, of the same config, whose numbers differ from the first one's by rounding.

    Attributes:
        read: role → its tensor, as for :func:`prove`.
        bounds: role → the most by which a number may differ, as a share of it.
    """

    read: Read
    bounds: Mapping[str, float]


@dataclass(frozen=True)
class _Perturbed(Written):
    """A checkpoint with every row of every matrix a little larger or smaller, at random, by its role's bound."""

    bounds: Mapping[str, float] = field(default_factory=dict)
    seed: int = SEED

    def linear(self, role: str, x: Floats, size: int) -> Floats:
        # A row that is larger by a share makes a result that is larger by that share.
        up = np.random.default_rng(self.seed).choice([-1.0, 1.0], size) * self.bounds.get(role, 0.0)
        made = super().linear(role, x, size)
        made *= (1 + up).astype(np.float32)
        return made


@dataclass(frozen=True)
class Proof:
    """What was tried, and how far graph and checkpoint were apart.

    Attributes:
        seed: of the inputs.
        positions: per sample, of the (first) query.
        slots: of the caches.
        layouts: cache input → which of its axes are KV heads, slots and head_dim.
        sliding_masked: whether sliding layers see the mask input too; the window alone if not.
        logits, projected: largest difference, per sample, as a share of the output's range.
        tolerance: largest share that is accepted.
        rounded: largest difference of logits or state between what was rounded and the numbers before, as a share of
            the range; None where nothing was.
        rounded_tolerance: what is accepted there: a few times what random rounding of the same size does.
    """

    seed: int
    positions: tuple[int, ...]
    slots: int
    layouts: Mapping[str, tuple[int, int, int]]
    sliding_masked: bool
    logits: tuple[float, ...]
    projected: tuple[float, ...]
    tolerance: float
    rounded: float | None = None
    rounded_tolerance: float | None = None

    def as_json(self) -> dict[str, Any]:
        """For ``extraction.json``; ``differences_below`` are shares of the range of each output."""
        return {
            "seed": self.seed,
            "positions": list(self.positions),
            "cache_slots": self.slots,
            "cache_axes": {name: list(axes) for name, axes in self.layouts.items()},
            "sliding_layers_read_mask": self.sliding_masked,
            "differences_below": {"logits": _decade(self.logits), "projected_activations": _decade(self.projected)},
            "tolerance": self.tolerance,
            "rounding": None
            if self.rounded is None or self.rounded_tolerance is None
            else {"difference_below": _decade([self.rounded]), "tolerance": _decade([self.rounded_tolerance])},
        }


def _decade(shares: Sequence[float]) -> float:
    """The power of ten that none of ``shares`` exceeds: the digits differ from processor to processor."""
    largest = max(shares)
    return float(f"1e{math.ceil(math.log10(largest))}") if largest > 0 else 0.0


def prove(
    graph: FlatGraph,
    walk: Walk,
    config: DrafterConfig,
    read: Read,
    seed: int = SEED,
    rounding: Rounding | None = None,
) -> Proof:
    """Hold the checkpoint of ``config`` and ``read`` against ``graph``.

    Args:
        graph: the drafter's operators.
        walk: what was found in it: which inputs are caches, and where each role's result is.
        config: as written.
        read: role → the tensor as written (before it is rounded to the stored type), in flat chunks of float32.
        seed: of the inputs.
        rounding: executed too, and held against the checkpoint.

    Raises:
        ProofError: they part; the message names the first role at which they do.
        UnsupportedError: the graph holds an operator or an input that cannot be evaluated.
        CheckpointError: a tensor does not have the size that the config says.
    """
    checkpoint = Written(config, read, _frequencies(walk, config))
    outputs = [graph.outputs[PROJECTED], graph.outputs[LOGITS]]
    needed = inputs_of(outputs)
    tried: list[tuple[float, Inputs, Reading]] = []
    for inputs in _drawings(graph, walk, checkpoint, needed, seed):
        projected, found = evaluate(graph, inputs.graph, outputs)
        for reading in inputs.readings():
            state, mine = forward(checkpoint, inputs.step(reading))
            apart = _apart(projected, mine)
            if max(apart) <= TOLERANCE:
                mine_too = logits(checkpoint, state)
                proof = _judge(graph, walk, checkpoint, inputs, reading, (found, mine_too), apart)
                return _rounded(proof, checkpoint, inputs.step(reading), (mine, mine_too), rounding)
            tried.append((max(apart), inputs, reading))
    # Of several ways to read the inputs, the one that goes well the longest is meant.
    nearest = sorted(tried, key=lambda way: way[0])[:_MOST_EXPLAINED]
    raise max((_explain(graph, walk, checkpoint, *way[1:]) for way in nearest), key=lambda why: why[0])[1]


def _judge(
    graph: FlatGraph,
    walk: Walk,
    checkpoint: Written,
    inputs: Inputs,
    reading: Reading,
    heads: tuple[list[Floats], Floats],
    projected: tuple[float, ...],
) -> Proof:
    apart = _apart(*heads)
    if max(apart) > TOLERANCE:
        raise _explain(graph, walk, checkpoint, inputs, reading)[1]
    return Proof(
        inputs.seed,
        inputs.positions,
        inputs.slots,
        reading.layouts,
        reading.sliding_masked,
        apart,
        projected,
        TOLERANCE,
    )


def _rounded(
    proof: Proof, checkpoint: Written, step: Step, exact: tuple[Floats, Floats], rounding: Rounding | None
) -> Proof:
    """``proof`` with what ``rounding`` does to ``exact``, the projected state and the logits of ``checkpoint``.

    Raises:
        ProofError: more than random rounding of the same size could.
    """
    if rounding is None:
        return proof
    config, read, turning = checkpoint.config, checkpoint.read, checkpoint.frequencies
    moved = []
    for other in (
        replace(checkpoint, read=rounding.read),
        _Perturbed(config, read, turning, rounding.bounds, proof.seed),
    ):
        state, projected = forward(other, step)
        moved.append(max(_apart([*projected], exact[0]) + _apart([*logits(other, state)], exact[1])))
    found, allowed = moved[0], TOLERANCE + _SPREAD * moved[1]
    if not found <= allowed:
        raise ProofError(
            f"Rounded as it would be written, the drafter's outputs move by {found:.2g} of their range, where rounding "
            f"of that size explains {allowed:.2g}. Nothing is written. Please report the file."
        )
    return replace(proof, rounded=found, rounded_tolerance=allowed)


def _drawings(graph: FlatGraph, walk: Walk, checkpoint: Written, needed: frozenset[str], seed: int) -> Iterator[Inputs]:
    """The inputs, once for every way to write a mask of floats."""
    config = checkpoint.config
    norms = [
        float(np.linalg.norm(checkpoint.vector(f"layers.{i}.q_norm", layer.head_dim)))
        for i, layer in enumerate(config.layers)
    ]
    spread = _small_activations(checkpoint, walk.rms_norm_eps)
    floats = any(
        graph.inputs[name].tensor.type not in (TensorType.BOOL, None) for name in (MASK, MASK_LOCAL) if name in needed
    )
    for additive in (True, False) if floats else (True,):
        yield draw(graph, walk, config, needed, norms, spread, seed, additive)


def _small_activations(checkpoint: Written, epsilon: float) -> float:
    """A spread of activations that leaves the stream's mean square far below ``epsilon``, the graph's.

    A norm takes away what the epsilon of the one before it does to the scale; only where both see next to nothing does
    it show.
    """
    config = checkpoint.config
    unit = np.random.default_rng(0).standard_normal((1, 2 * config.backbone_hidden_size)).astype(np.float32)
    made = checkpoint.linear("pre_projection", unit, config.hidden_size)
    rms = float(np.sqrt(np.mean(np.square(made))))
    spread = _FAR_BELOW * epsilon**0.5 / rms if rms > 0 else 0.0
    return spread if 0 < spread < 1 else _TINY


def _frequencies(walk: Walk, config: DrafterConfig) -> tuple[Floats, ...]:
    """Per layer, the graph's RoPE table where it is the config's in another rounding; else the config's."""
    made = []
    for layer, found in zip(config.layers, walk.layers, strict=True):
        mine, table = frequencies(layer.rope, layer.head_dim), found.inverse_frequencies
        same = table.shape == mine.shape and bool((np.abs(table - mine) <= found.frequency_rounding).all())
        made.append((table if same else mine).astype(np.float32))
    return tuple(made)


def _apart(found: Sequence[npt.NDArray[Any]], mine: Floats) -> tuple[float, ...]:
    """Per sample, the largest difference as a share of the range of ``mine``."""
    return tuple(_distance(a, b) for a, b in zip(found, mine, strict=True))


def _distance(found: npt.NDArray[Any], mine: npt.NDArray[Any]) -> float:
    if found.size != mine.size:
        return float("inf")
    span = float(np.ptp(mine)) or float(np.abs(mine).max()) or 1.0
    with np.errstate(invalid="ignore"):
        furthest = float(np.abs(found.reshape(-1) - mine.reshape(-1)).max()) / span
    return furthest if np.isfinite(furthest) else float("inf")


@dataclass(frozen=True)
class _Place:
    """Where graph and checkpoint can be held side by side: ``value`` of the graph is ``factor`` × what ``name`` is."""

    name: str
    value: Value
    factor: float = 1.0


_LAYER_ORDER = (
    "pre_attention_norm",
    "q_proj",
    "q_norm",
    "weights",
    "attention",
    "o_proj",
    "post_attention_norm",
    "pre_ffw_norm",
    "gate_proj",
    "up_proj",
    "gelu",
    "down_proj",
    "post_ffw_norm",
    "layer_scalar",
)
_WHAT = {
    "attention": "P·V: the order of V's heads or dimensions, or the slots it is read from",
    "gelu": "the activation between gate and up, and their product",
    LOGITS: "the soft cap",
}


def _places(graph: FlatGraph, walk: Walk) -> Iterator[_Place]:
    """All places, in the order in which a drafter computes them."""
    found = {role.role: _Place(role.role, role.result, role.factor) for role in walk.roles if role.result is not None}
    for index in range(len(walk.layers)):
        layer = f"layers.{index}"
        for place, role in (("attention", "o_proj"), ("gelu", "down_proj")):
            node = found[f"{layer}.{role}"].value.producer
            if node is not None and node.inputs:
                found[f"{layer}.{place}"] = _Place(f"{layer}.{place}", node.operand(0))
        if f"{layer}.attention" in found and (weights := _softmax_before(found[f"{layer}.attention"].value)):
            found[f"{layer}.weights"] = _Place(f"{layer}.weights", weights)
    found[LOGITS] = _Place(LOGITS, graph.outputs[LOGITS])
    order = ["pre_projection"]
    order += [f"layers.{index}.{part}" for index in range(len(walk.layers)) for part in _LAYER_ORDER]
    order += ["final_norm", "lm_head", LOGITS, "post_projection"]
    return (found[name] for name in order if name in found)


def _softmax_before(value: Value) -> Value | None:
    return next((v for v in ancestors(value) if v.producer is not None and v.producer.kind == "SOFTMAX"), None)


def _explain(
    graph: FlatGraph, walk: Walk, checkpoint: Written, inputs: Inputs, reading: Reading
) -> tuple[int, ProofError]:
    """How many places agree, and the error that names the first role at which the two part."""
    trace: dict[str, Any] = {}
    state, _ = forward(checkpoint, inputs.step(reading, trace))
    trace[LOGITS] = logits(checkpoint, state, trace)
    places = [p for p in _places(graph, walk) if p.name in trace]
    results = evaluate(graph, inputs.graph, [p.value for p in places])
    apart = [_apart([f / np.float32(p.factor) for f in r], trace[p.name]) for p, r in zip(places, results, strict=True)]
    # Where none is beyond what is allowed, the largest step is to blame: rounding that grew from one role to the next.
    first = next((i for i, a in enumerate(apart) if max(a) > TOLERANCE), int(np.argmax([max(a) for a in apart])))
    name, sample = places[first].name, int(np.argmax(apart[first]))
    position = inputs.positions[sample]
    what = _WHAT.get(name.rsplit(".", 1)[-1], "")
    if name.endswith(".weights"):
        name = name.removesuffix("weights") + "attention"
        mine = trace[places[first].name][sample]
        what = _scores(places[first].name.removesuffix(".weights"), results[first][sample], mine, position)
    return first, ProofError(
        f"{name}: the graph and the checkpoint part here{what and f' ({what})'}, by {apart[first][sample]:.2g} of the "
        f"range at position {position}, where {TOLERANCE:g} is allowed. The graph computes something that no "
        "checkpoint of this kind does; nothing is written. Please report the file."
    )


def _scores(layer: str, found: npt.NDArray[Any], mine: npt.NDArray[Any], position: int) -> str:
    """How the weights of attention differ: other slots are seen, or the same ones are scored otherwise."""
    if found.size != mine.size:
        return f"{found.size} scores for {mine.size}"
    theirs, ours = (w.reshape(-1, mine.shape[-1]).max(0) > 0 for w in (found, mine))
    for seen, hidden, what in ((theirs, ours, "the graph sees"), (ours, theirs, "the graph hides")):
        slots = np.flatnonzero(seen & ~hidden)
        if slots.size:
            return f"the mask: at position {position} {what} slot {slots[-1]}, the config and the mask input do not"
    return f"{layer}.q_norm's result is turned or scored otherwise: RoPE, a scale, or the order of heads or dimensions"
