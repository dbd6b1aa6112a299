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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from mtp_extract._version import __version__
from mtp_extract.errors import ProofError, UnsupportedError
from mtp_extract.graph.call import code_range, grid_of
from mtp_extract.graph.drafter import LOGITS, PROJECTED, Walk
from mtp_extract.graph.evaluate import evaluate, inputs_of
from mtp_extract.graph.flat import FlatGraph, Value, ancestors
from mtp_extract.litertlm.storage import Floats
from mtp_extract.litertlm.tflite import TensorType
from mtp_extract.proof.compare import TOLERANCE, differences, first_difference
from mtp_extract.proof.forward import Read, Step, Written, forward, logits
from mtp_extract.proof.gates import check_gates
from mtp_extract.proof.inputs import signature_inputs
from mtp_extract.proof.operators import OperatorFindings, check_operators
from mtp_extract.proof.rows import Rows, check_rows
from mtp_extract.proof.samples import Drawing, Sample
from mtp_extract.proof.tables import Coarse, Tables, check_tables

if TYPE_CHECKING:
    from mtp_extract.architecture.config import DrafterConfig

_SPREAD = 8.0
"""How many times what a random rounding does, the rounding that was written may do: it is one draw of such."""

_MOST_EXPLAINED = 4
_READ = 1 << 20
_COARSE_POSITIONS = 48
_MOST_CUT_OFF = 0.2
"""Google's own quantizer leaves out up to 13 % of the numbers that random inputs give; its ranges are of real ones."""
_MOST_POWER_CUT_OFF = 0.3
"""Of the sum of their squares."""
_HALF_PRECISION = 65504.0 / 64
"""Beyond 65 504 half precision is infinite: numbers of ordinary size must be far from it."""


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
    allowed: OperatorFindings = field(compare=False)
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


class _Proving:
    def __init__(self, graph: FlatGraph, walk: Walk, checkpoint: Written, seed: int) -> None:
        self.graph, self.walk, self.checkpoint, self.seed = graph, walk, checkpoint, seed
        self.outputs = [graph.outputs[PROJECTED], graph.outputs[LOGITS]]
        self.interface = signature_inputs(graph, walk, checkpoint.config, inputs_of(self.outputs))
        self.drawing = Drawing(self.interface, checkpoint, walk.rms_norm_eps, seed)

    def run(self, rounding: Rounding | None) -> Proof:
        config = self.checkpoint.config
        allowed = check_operators(self.graph, self.walk, self.outputs)
        check_gates(self.graph, self.walk, config.hidden_activation, self.seed)
        ropes = [layer.rope for layer in config.layers]
        tables = check_tables(
            self.graph, allowed.attentions, ropes, self.interface.slots, self.interface.queries, self.seed
        )
        tried: list[tuple[float, Sample]] = []
        for sample in self.drawing.every_reading():
            given = tables.given(sample.positions)
            found_projected, found_logits = evaluate(self.graph, sample.fed, self.outputs, given)
            state, projected = forward(self.checkpoint, sample.step)
            projected_differences = differences(found_projected, projected)
            if max(projected_differences) > TOLERANCE:
                tried.append((max(projected_differences), sample))
                continue
            scored = logits(self.checkpoint, state)
            logit_differences = differences(found_logits, scored)
            if max(logit_differences) > TOLERANCE:
                raise self._explain(sample, tables)[1]
            proof = Proof(
                self.seed,
                tuple(int(p) for p in sample.positions),
                self.interface.slots,
                sample.layouts.axes,
                any(self.interface.masked(i) for i, la in enumerate(config.layers) if la.sliding_window),
                logit_differences,
                projected_differences,
                TOLERANCE,
                allowed,
                tables,
                check_rows(self.interface, allowed.attentions, tables, sample.layouts, sample.additive, self.seed),
                self._cut_off(allowed.narrowed, sample, tables),
                tuple(self._coarse(table, sample) for table in tables.coarse),
            )
            return _rounded(proof, self.checkpoint, sample.step, (projected, scored), rounding)
        # Of several ways to read the inputs, the right one is taken to be that which agrees for the most roles.
        nearest = sorted(tried, key=lambda way: way[0])[:_MOST_EXPLAINED]
        raise max((self._explain(sample, tables) for _, sample in nearest), key=lambda why: why[0])[1]

    def _explain(self, sample: Sample, tables: Tables) -> tuple[int, ProofError]:
        return first_difference(self.graph, self.walk, self.checkpoint, sample, tables.given(sample.positions))

    def _cut_off(self, narrowed: Sequence[Value], sample: Sample, tables: Tables) -> float:
        """The largest share of activations of ordinary size that lies beyond the grid that holds them.

        Raises:
            UnsupportedError: more than calibration leaves out.
        """
        if not narrowed:
            return 0.0
        ordinary = self.drawing.sample(sample.positions, sample.layouts, sample.additive, ordinary=True)
        # What goes in is what comes out: activations are evaluated as real numbers.
        found = evaluate(self.graph, ordinary.fed, narrowed, tables.given(ordinary.positions))
        head = next(role.result for role in self.walk.roles if role.role == "lm_head")
        scored = {id(v) for v in ancestors(self.outputs[1], frozenset({id(head)}))}
        largest = 0.0
        for value, numbers in zip(narrowed, found, strict=True):
            tensor, flat = value.tensor, np.concatenate([np.asarray(n, np.float64).reshape(-1) for n in numbers])
            grid = grid_of(tensor)
            low, high = -_HALF_PRECISION, _HALF_PRECISION
            if grid is not None and tensor.type is not None:
                low, high = ((end - grid[1]) * grid[0] for end in code_range(tensor.type))
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

    def _coarse(self, table: Coarse, sample: Sample) -> CoarseTable:
        """What a file's own table does to the outputs, run as it is."""
        random = np.random.default_rng(self.seed)
        drawn = random.integers(0, self.interface.last + 1, _COARSE_POSITIONS)
        positions = np.unique(np.append(drawn, [table.position, self.interface.last]))
        ordinary = self.drawing.sample(positions, sample.layouts, sample.additive, ordinary=True)
        found = evaluate(self.graph, ordinary.fed, self.outputs)
        state, projected = forward(self.checkpoint, ordinary.step)
        scored = logits(self.checkpoint, state)
        moved = np.maximum(differences(found[0], projected), differences(found[1], scored))
        return CoarseTable(table, float(moved.max()), int(positions[int(moved.argmax())]))


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
        moved.append(max(differences(projected, exact[0]) + differences(logits(other, state), exact[1])))
    found, allowed = moved[0], TOLERANCE + _SPREAD * moved[1]
    if not found <= allowed:
        raise ProofError(
            f"Rounded as it would be written, the drafter's outputs move by {found:.2g} of their range, where rounding "
            f"of that size explains {allowed:.2g}. Nothing is written. Please report the file."
        )
    return replace(proof, rounded=found, rounded_tolerance=allowed)
