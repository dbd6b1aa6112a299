"""Proof by execution: what is written computes what the file computes, for every input.

The graph is split by what its values depend on. What the position decides is held against the config at every position
(:mod:`mtp_extract.proof.tables`); what masks decide, row by row and slot by slot (:mod:`mtp_extract.proof.rows`); and
what activations and caches go through has no corner (:mod:`mtp_extract.proof.operators`), so that agreement on random
continuous numbers is agreement on all. Here the graph is evaluated operator by operator, the checkpoint's own forward
runs beside it, and the two are compared. Patterns propose what a graph is; this decides. docs/proof.md is the whole
argument.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from mtp_extract._version import __version__
from mtp_extract.architecture.roles import roles_of
from mtp_extract.errors import ProofError, UnsupportedError
from mtp_extract.graph.call import ends_of, grid_of
from mtp_extract.graph.drafter import ACTIVATIONS, LOGITS, PROJECTED, Walk
from mtp_extract.graph.evaluate import Samples, evaluate, inputs_of
from mtp_extract.graph.flat import MASK, MASK_LOCAL, FlatGraph, Value, ancestors
from mtp_extract.litertlm.storage import FLOAT_TYPES
from mtp_extract.litertlm.tflite import TensorType
from mtp_extract.proof.forward import Cache, Read, Step, Written, forward, logits
from mtp_extract.proof.gates import check_gates
from mtp_extract.proof.inputs import Layouts, drawn_codes, interface_of, reach_of
from mtp_extract.proof.operators import Allowed, check_operators
from mtp_extract.proof.rows import Rows, check_rows
from mtp_extract.proof.tables import Coarse, Tables, check_tables, feed

if TYPE_CHECKING:
    from mtp_extract.architecture.config import DrafterConfig

TOLERANCE = 1e-5
"""Of the range of an output: what two orders of summation in float32 leave, and no more."""

_SPREAD = 8.0
"""How many times what a random rounding does, the rounding that was written may do: it is one draw of such."""

_TINY = 1e-3
_FAR_BELOW = 1e-2
_LOUD = 20.0
_MOST_EXPLAINED = 4
_DRAWN_POSITIONS = 2
_READ = 1 << 20
# Scores of a standard deviation of about one: every slot of a window has a say. V is small, so that the epsilon of the
# norm behind the attention shows.
_QUIET_SCORES = 1.2
_QUIET_CODE = 10
_SMALL_VALUES = 0.01
_COARSE_POSITIONS = 48
_MOST_CUT_OFF = 0.2
"""Google's own quantizer leaves out up to 13 % of the numbers that random inputs give; its ranges are of real ones."""
_MOST_POWER_CUT_OFF = 0.3
"""Of the sum of their squares."""
_HALF_PRECISION = 65504.0 / 64
"""Beyond 65 504 half precision is infinite: numbers of ordinary size must be far from it."""

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
    seed: int = 0

    def linear(self, role: str, x: Floats, size: int) -> Floats:
        # A row that is larger by a share makes a result that is larger by that share.
        up = np.random.default_rng(self.seed).choice([-1.0, 1.0], size) * self.bounds.get(role, 0.0)
        made = super().linear(role, x, size)
        made *= (1 + up).astype(np.float32)
        return made


@dataclass(frozen=True)
class CoarseTable:
    """A RoPE table of the file that is coarser than the config's, and what that does.

    Attributes:
        table: by how much its numbers differ at most.
        outputs: by how much the outputs differ at most, as a share of their range, and at which position.
    """

    table: Coarse
    outputs: float
    position: int


@dataclass(frozen=True)
class Proof:
    """What was tried, and how far graph and checkpoint were apart.

    Attributes:
        seed: of all that was drawn; the file itself gives it.
        positions: per sample, of the (first) query.
        slots: of the caches.
        layouts: cache input → which of its axes are KV heads, slots and head_dim.
        sliding_masked: whether sliding layers see the mask input too; the window alone if not.
        logits, projected: largest difference, per sample, as a share of the output's range.
        tolerance: largest share that is accepted.
        allowed: what the rules for operators found.
        tables: values that the position decides, and at how many positions they were held.
        rows: how many rows of masks were held.
        cut_off: of activations that a grid of the file holds, the largest share that lies beyond it where inputs are of
            ordinary size.
        coarse: RoPE tables of the file that are coarser than the config's.
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
    allowed: Allowed = field(compare=False)
    tables: Tables = field(compare=False)
    rows: Rows
    cut_off: float = 0.0
    coarse: tuple[CoarseTable, ...] = ()
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
            "position_tables": {"values": len(self.tables.tables), "positions": self.tables.positions},
            "mask_rows": {
                "tried": self.rows.tried,
                "with_results": self.rows.moved,
                "of": self.rows.of,
                "alike": self.rows.alike,
                "largest_scores": [float(f"{score:.4g}") for score in self.rows.largest_scores],
            },
            "choosing": {by: dict(kinds) for by, kinds in self.allowed.choosing.items()},
            "idioms": list(self.allowed.idioms),
            "activations_held_in": dict(sorted(Counter(v.tensor.type_name for v in self.allowed.narrowed).items())),
            "largest_share_cut_off": float(f"{self.cut_off:.1g}"),
            "coarse_tables": [
                {
                    "layer": coarse.table.layer,
                    "held_in": coarse.table.kind,
                    "differs_by": float(f"{coarse.table.moved:.2g}"),
                    "at": coarse.table.position,
                    "outputs_move_by": float(f"{coarse.outputs:.2g}"),
                    "outputs_at": coarse.position,
                }
                for coarse in self.coarse
            ],
        }


def _decade(shares: Sequence[float]) -> float:
    """The power of ten that none of ``shares`` exceeds: the digits differ from processor to processor."""
    largest = max(shares)
    return float(f"1e{math.ceil(math.log10(largest))}") if largest > 0 else 0.0


def seed_of(graph: FlatGraph) -> int:
    """What is drawn for a graph: the same for the same bytes and the same release, another for any other."""
    digest, region = xxhash.xxh3_64(__version__.encode()), graph.model.region
    for at in range(0, region.size, _READ):
        digest.update(region.read(at, min(_READ, region.size - at)))
    return digest.intdigest() >> 12


def prove(graph: FlatGraph, walk: Walk, config: DrafterConfig, read: Read, rounding: Rounding | None = None) -> Proof:
    """Hold the checkpoint of ``config`` and ``read`` against ``graph``.

    Args:
        graph: the drafter's operators.
        walk: what was found in it: which inputs are caches, and where each role's result is.
        config: as written.
        read: role → the tensor as written (before it is rounded to the stored type), in flat chunks of float32.
        rounding: executed too, and held against the checkpoint.

    Raises:
        ProofError: they part; the message names the first role at which they do.
        UnsupportedError: the graph holds an operator or an input that cannot be evaluated, or an operator that looks at
            what it must not look at.
        CheckpointError: a tensor does not have the size that the config says.
    """
    return _Proving(graph, walk, Written(config, read), seed_of(graph)).run(rounding)


@dataclass(frozen=True)
class _Sample:
    """One way to read the inputs, and all of them drawn: for the graph by name, for the checkpoint as a step."""

    positions: npt.NDArray[np.int64]
    fed: Mapping[str, Samples]
    step: Step
    layouts: Layouts
    additive: bool


class _Proving:
    def __init__(self, graph: FlatGraph, walk: Walk, checkpoint: Written, seed: int) -> None:
        self.graph, self.walk, self.checkpoint, self.seed = graph, walk, checkpoint, seed
        self.outputs = [graph.outputs[PROJECTED], graph.outputs[LOGITS]]
        self.interface = interface_of(graph, walk, checkpoint.config, inputs_of(self.outputs))

    def run(self, rounding: Rounding | None) -> Proof:
        config = self.checkpoint.config
        allowed = check_operators(self.graph, self.walk, self.outputs)
        check_gates(self.graph, self.walk, config.hidden_activation, self.seed)
        ropes = [layer.rope for layer in config.layers]
        tables = check_tables(self.graph, allowed.spans, ropes, self.interface.slots, self.interface.queries, self.seed)
        tried: list[tuple[float, _Sample]] = []
        for sample in self._samples():
            given = tables.given(sample.positions)
            projected, found = evaluate(self.graph, sample.fed, self.outputs, given)
            state, mine = forward(self.checkpoint, sample.step)
            apart = _apart(projected, mine)
            if max(apart) <= TOLERANCE:
                mine_too = logits(self.checkpoint, state)
                apart_too = _apart(found, mine_too)
                if max(apart_too) > TOLERANCE:
                    raise self._explain(sample, given)[1]
                rows = check_rows(self.interface, allowed.spans, tables, sample.layouts, sample.additive, self.seed)
                proof = Proof(
                    self.seed,
                    tuple(int(p) for p in sample.positions),
                    self.interface.slots,
                    sample.layouts.axes,
                    any(self.interface.masked(i) for i, la in enumerate(config.layers) if la.sliding_window),
                    apart_too,
                    apart,
                    TOLERANCE,
                    allowed,
                    tables,
                    rows,
                    self._cut_off(allowed.narrowed, sample, tables),
                    tuple(self._coarse(table, sample) for table in tables.coarse),
                )
                return _rounded(proof, self.checkpoint, sample.step, (mine, mine_too), rounding)
            tried.append((max(apart), sample))
        # Of several ways to read the inputs, the one that agrees for the most roles is meant.
        nearest = sorted(tried, key=lambda way: way[0])[:_MOST_EXPLAINED]
        explained = [self._explain(sample, tables.given(sample.positions)) for _, sample in nearest]
        raise max(explained, key=lambda why: why[0])[1]

    def _samples(self) -> Iterator[_Sample]:
        """The inputs, once for every way to read caches and to write a mask of floats."""
        positions = self._positions()
        names = [name for name in (MASK, MASK_LOCAL) if name in self.interface.needed]
        floats = any(self.graph.inputs[name].tensor.type in FLOAT_TYPES for name in names)
        for additive in (True, False) if floats else (True,):
            for layouts in self.interface.layouts():
                yield self._sample(positions, layouts, additive)

    def _positions(self) -> npt.NDArray[np.int64]:
        """At the edges of window and caches, and some drawn anew."""
        last, window = self.interface.last, self.interface.window or self.interface.slots // 4
        edges = np.unique([p for p in (1, window - 1, window, last) if 0 <= p <= last])
        others = np.setdiff1d(np.arange(last + 1), edges)
        drawn = np.random.default_rng(self.seed).permutation(others)[:_DRAWN_POSITIONS]
        return np.union1d(edges, drawn).astype(np.int64)

    def _cut_off(self, narrowed: Sequence[Value], sample: _Sample, tables: Tables) -> float:
        """The largest share of activations of ordinary size that lies beyond the grid that holds them.

        Raises:
            UnsupportedError: more than calibration leaves out.
        """
        if not narrowed:
            return 0.0
        mine = self._sample(sample.positions, sample.layouts, sample.additive, ordinary=True)
        # What goes in is what comes out: activations are evaluated as real numbers.
        found = evaluate(self.graph, mine.fed, narrowed, tables.given(mine.positions))
        head = next(role.result for role in self.walk.roles if role.role == "lm_head")
        scored = {id(v) for v in ancestors(self.outputs[1], frozenset({id(head)}))}
        largest = 0.0
        for value, numbers in zip(narrowed, found, strict=True):
            tensor, flat = value.tensor, np.concatenate([np.asarray(n, np.float64).reshape(-1) for n in numbers])
            grid = grid_of(tensor)
            low, high = -_HALF_PRECISION, _HALF_PRECISION
            if grid is not None and tensor.type is not None:
                low, high = ((end - grid[1]) * grid[0] for end in ends_of(tensor.type))
            elif tensor.type is not TensorType.FLOAT16:
                continue
            beyond = flat - np.clip(flat, low, high)
            share = float(np.mean(np.abs(beyond) > (grid[0] if grid else 0)))
            power = float(np.square(beyond).sum() / max(np.square(flat).sum(), 1e-30))
            # Of logits the largest is what counts.
            most, most_power = (0, 0) if id(value) in scored else (_MOST_CUT_OFF, _MOST_POWER_CUT_OFF)
            if not (share <= most and power <= most_power):
                raise UnsupportedError(
                    f"{tensor.label} holds {low:.4g} to {high:.4g}, and of numbers of ordinary size {share:.1%} lie "
                    f"beyond ({power:.1%} of the sum of their squares): they are cut off, which no checkpoint does. "
                    "Nothing is written."
                )
            largest = max(largest, share)
        return largest

    def _sample(
        self, positions: npt.NDArray[np.int64], layouts: Layouts, additive: bool, *, ordinary: bool = False
    ) -> _Sample:
        """Inputs at ``positions``: ordinary ones, or some very quiet, some very loud, and small numbers in V."""
        random, interface, config = np.random.default_rng(self.seed), self.interface, self.checkpoint.config
        shown = interface.drawn_masks(positions, random)
        for name, whole in interface.runtime_masks(positions).items():
            # Every second mask has no holes, as those of runtimes.
            shown[name][::2] = whole[::2]
        shape = (len(positions), interface.queries, 2 * config.backbone_hidden_size)
        activations = random.standard_normal(shape).astype(np.float32)
        if not ordinary:
            activations[0] *= np.float32(_small_activations(self.checkpoint, self.walk.rms_norm_eps))
            activations[-1] *= np.float32(_LOUD)
        fed: dict[str, Samples] = {**feed(self.graph, interface.needed, positions, interface.queries)}
        fed.update(interface.masks(shown, additive))
        tensor = self.graph.inputs[ACTIVATIONS].tensor
        # Of a quantized input too: on the grid, most numbers would leave the calibrated range.
        fed[ACTIVATIONS] = tuple(a.reshape(tensor.shape) for a in activations)
        caches: dict[str, Cache] = {}
        for name in sorted({n for layer in self.walk.layers for n in (layer.key, layer.value)}):
            fed[name], caches[name] = self._cache(name, layouts, random, ordinary)
        step = Step(
            activations,
            positions[:, None] + np.arange(interface.queries),
            [(caches[layer.key], caches[layer.value]) for layer in self.walk.layers],
            [interface.seen(index, positions, shown) for index in range(len(config.layers))],
        )
        return _Sample(positions, fed, step, layouts, additive)

    def _cache(self, name: str, layouts: Layouts, random: np.random.Generator, ordinary: bool) -> tuple[Samples, Cache]:
        """Quiet numbers; of K, so that scores are."""
        layers = zip(self.checkpoint.config.layers, self.walk.layers, strict=True)
        layer = next(la for la, found in layers if name in (found.key, found.value))
        norms = [
            float(np.linalg.norm(self.checkpoint.vector(f"layers.{i}.q_norm", layer.head_dim)))
            for i, found in enumerate(self.walk.layers)
            if found.key == name
        ]
        if not np.isfinite(norms).all():
            raise ProofError("A norm of queries holds numbers that are not finite: the file is damaged.")
        floats = self.graph.inputs[name].tensor.type in FLOAT_TYPES
        target = _QUIET_SCORES / max(*norms, 1e-6) if norms else 1.0 if ordinary else _SMALL_VALUES
        scale = (
            2.0 ** round(math.log2(target / (_QUIET_CODE if norms else 73))) if floats else self.interface.grid(name)[0]
        )
        largest = self.interface.largest_code(name)
        reach = reach_of(target, scale, largest) if norms else largest
        codes = drawn_codes(layer.num_kv_heads, self.interface.slots, layer.head_dim, reach, random)
        numbers, cache = self.interface.cache(name, layouts, codes, scale)
        return (numbers,), cache

    def _coarse(self, table: Coarse, sample: _Sample) -> CoarseTable:
        """What a file's own table does to the outputs, run as it is."""
        random = np.random.default_rng(self.seed)
        drawn = random.integers(0, self.interface.last + 1, _COARSE_POSITIONS)
        positions = np.unique(np.append(drawn, [table.position, self.interface.last]))
        mine = self._sample(positions, sample.layouts, sample.additive, ordinary=True)
        found = evaluate(self.graph, mine.fed, self.outputs)
        state, projected = forward(self.checkpoint, mine.step)
        apart = np.maximum(_apart(found[0], projected), _apart(found[1], logits(self.checkpoint, state)))
        return CoarseTable(table, float(apart.max()), int(positions[int(apart.argmax())]))

    def _explain(self, sample: _Sample, given: Sequence[tuple[Value, Samples]]) -> tuple[int, ProofError]:
        """How many places agree, and the error that names the first role at which the two part."""
        trace: dict[str, Any] = {}
        state, _ = forward(self.checkpoint, replace(sample.step, trace=trace))
        trace[LOGITS] = logits(self.checkpoint, state, trace)
        places = [p for p in _places(self.graph, self.walk) if p.name in trace]
        results = evaluate(self.graph, sample.fed, [p.value for p in places], given)
        apart = [
            _apart([f / np.float32(p.factor) for f in r], trace[p.name]) for p, r in zip(places, results, strict=True)
        ]
        # Where none is beyond what is allowed, the largest step is to blame: rounding that grew from role to role.
        first = next((i for i, a in enumerate(apart) if max(a) > TOLERANCE), int(np.argmax([max(a) for a in apart])))
        name, at = places[first].name, int(np.argmax(apart[first]))
        position = int(sample.positions[at])
        what = _WHAT.get(name.rsplit(".", 1)[-1], "")
        if name.endswith(".weights"):
            name = name.removesuffix("weights") + "attention"
            mine = trace[places[first].name][at]
            what = _scores(places[first].name.removesuffix(".weights"), results[first][at], mine, position)
        return first, ProofError(
            f"{name}: the graph and the checkpoint part here{what and f' ({what})'}, by {apart[first][at]:.2g} of the "
            f"range at position {position}, where {TOLERANCE:g} is allowed. The graph computes something that no "
            "checkpoint of this kind does; nothing is written. Please report the file."
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
    moved = []
    for other in (
        replace(checkpoint, read=rounding.read),
        _Perturbed(checkpoint.config, checkpoint.read, rounding.bounds, proof.seed),
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


def _apart(found: Sequence[npt.NDArray[Any]] | npt.NDArray[Any], mine: Floats) -> tuple[float, ...]:
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


_AFTER = {"q_norm": ("weights", "attention"), "up_proj": ("gelu",), "lm_head": (LOGITS,)}
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
    # The table of roles is in the order of execution; what has no weight comes after what it is made of.
    for entry in roles_of(len(walk.layers)):
        after = _AFTER.get(entry.name.rsplit(".", 1)[-1], ())
        for place in (entry.name, *(part if part == LOGITS else f"layers.{entry.layer}.{part}" for part in after)):
            if place in found:
                yield found[place]


def _softmax_before(value: Value) -> Value | None:
    return next((v for v in ancestors(value) if v.producer is not None and v.producer.kind == "SOFTMAX"), None)


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
