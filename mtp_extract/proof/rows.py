"""Which slots a query sees: every row of the mask, and both values that a mask input can have at a slot.

An attention is linear in K and V but for its softmax (:mod:`mtp_extract.proof.operators`), so what its masks do shows on
two sorts of caches: where K is 0 a score is what the mask alone makes of it, and where every slot holds a number of its own
the weights and the result say which slots they are of. Where there are too many rows to try all, those at the edges are
tried and others drawn anew, and the record says how many.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_extract.errors import ProofError
from mtp_extract.graph.arrays import Array
from mtp_extract.graph.evaluate import Samples, Stacked, evaluate, inputs_of
from mtp_extract.graph.flat import MASK, MASK_LOCAL, Value
from mtp_extract.graph.rope import frequencies
from mtp_extract.proof.forward import rotate
from mtp_extract.proof.inputs import Bools, Interface, Layouts
from mtp_extract.proof.operators import Span
from mtp_extract.proof.tables import Tables, feed

_MOST_SCORES = 1 << 26
"""Scores that are looked at in all: every row of a small cache, some of a large one."""
_AT_ONCE = 1 << 20
_QUIET = 1.2
"""Standard deviation of scores: every slot that is seen has a say."""
_QUIET_CODE = 10
_ALIKE = 2e-4
"""Of scores and of weights: what float32 leaves."""
_SAME = 2e-5

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Rows:
    """How many rows were tried, of how many, each with two masks; the score that counts as hidden, by layer."""

    tried: int
    of: int
    hidden_below: tuple[float, ...]


def check_rows(
    interface: Interface, spans: Sequence[Span], tables: Tables, layouts: Layouts, additive: bool, seed: int
) -> Rows:
    """Hold what every attention sees against the config, row by row.

    Args:
        spans: the attentions, by layer.
        tables: the values that turn queries, in closed form.
        layouts: of the caches.
        additive: whether a mask of floats is 0 and a large negative number, or 1 and 0.
        seed: of the rows that are drawn, of masks and caches.

    Raises:
        ProofError: a slot is seen that should not be, or the other way round, or weighed otherwise.
    """
    config, random = interface.config, np.random.default_rng(seed)
    row = config.num_heads * interface.slots * interface.queries * len(spans)
    rows = _chosen(interface, max(64, _MOST_SCORES // row), random)
    step = max(1, _AT_ONCE // (row // len(spans)))
    for at in range(0, len(rows), step):
        positions = np.repeat(rows[at : at + step], 2)
        shown = interface.drawn_masks(positions, random)
        for name, mask in shown.items():
            _turn_over(mask, positions, interface, local=name == MASK_LOCAL)
        for index, span in enumerate(spans):
            _Check(interface, span, index, tables, layouts, additive, random).run(positions, shown)
    return Rows(len(rows), interface.last + 1, tuple(span.hidden_below for span in spans))


def _chosen(interface: Interface, most: int, random: np.random.Generator) -> npt.NDArray[np.int64]:
    """Positions of first queries: all, or those at edges and others drawn anew."""
    count, window = interface.last + 1, interface.window or 1
    if count <= most:
        return np.arange(count)
    edges = {base + by for base in (0, window, 2 * window, count - 1) for by in (-2, -1, 0, 1, 2)}
    kept = [p for p in sorted(edges) if 0 <= p < count]
    return np.unique(np.concatenate([kept, random.integers(0, count, max(most - len(kept), 0))]))


def _turn_over(mask: Bools, positions: npt.NDArray[np.int64], interface: Interface, *, local: bool) -> None:
    """Of every two masks of a row, let the second show what the first hides: each slot has both values."""
    at, slots = (positions[1::2, None] + np.arange(interface.queries))[..., None], np.arange(interface.slots)
    allowed = slots <= at
    if local:
        allowed &= slots > at - (interface.window or interface.slots)
    mask[1::2] = ~mask[::2] & allowed
    # A query that sees nothing is none that a runtime asks for. Where its own slot is its only one, it stays.
    np.put_along_axis(mask[1::2], at, np.take_along_axis(mask[1::2], at, -1) | ~mask[1::2].any(-1, keepdims=True), -1)


@dataclass(frozen=True)
class _Check:
    interface: Interface
    span: Span
    index: int
    tables: Tables
    layouts: Layouts
    additive: bool
    random: np.random.Generator

    def run(self, positions: npt.NDArray[np.int64], shown: dict[str, Bools]) -> None:
        """Try the rows of ``positions`` with the masks ``shown``."""
        seen = self.interface.seen(self.index, positions, shown)
        # Where a window leaves nothing of a mask with holes, engines agree on nothing.
        asked = seen.any(-1).all(-1)
        positions, seen = positions[asked], seen[asked]
        shown = {name: mask[asked] for name, mask in shown.items()}
        if not len(positions):
            return
        layer, span = self.interface.config.layers[self.index], self.span
        kv, slots = layer.num_kv_heads, self.interface.slots
        key, value = span.layer.key, span.layer.value
        codes = self.random.integers(-_QUIET_CODE, _QUIET_CODE, (kv, slots), np.int8, endpoint=True)
        marks = self.random.integers(-100, 100, (kv, slots), np.int8, endpoint=True)
        scale = 1 / _QUIET_CODE
        quiet = self._caches(codes, marks, scale)
        turned, query = self._query(positions, quiet[1])
        given = [*self.tables.given(positions), (span.layer.query, Stacked(query))]
        inputs = self._inputs(positions, shown)
        hidden = self._evaluate({**inputs, **self._caches(np.zeros_like(codes), marks, scale)[0]}, [span.scores], given)[0]
        scores, weights, mixed = self._evaluate(
            {**inputs, **quiet[0]}, [span.scores, span.weights, span.layer.mixed], given
        )
        grid = quiet[1][key]
        groups = np.repeat(codes.astype(np.float32) * grid, self.interface.config.num_heads // kv, 0)
        expected = turned.sum(-1, dtype=np.float32)[..., None] * groups
        alone, scored, weighed = (self._by_slot(values) for values in (hidden, scores, weights))
        self._scores(alone, scored, expected, seen, positions)
        softmax = _softmax(expected, seen)
        self._weights(weighed, softmax, seen, positions)
        kept = np.repeat(marks.astype(np.float32) * quiet[1][value], self.interface.config.num_heads // kv, 0)
        result = np.repeat((softmax * kept).sum(-1)[..., None], layer.head_dim, -1)
        apart = np.abs(np.asarray(mixed).reshape(result.shape) - result).max((1, 2, 3))
        if not (apart <= _SAME * np.ptp(result)).all():
            self._refuse(int(positions[int(np.argmax(~(apart <= _SAME * np.ptp(result))))]), "mixes other slots of V than it weighs")

    def _caches(self, codes: Array, marks: Array, scale: float) -> tuple[dict[str, Samples], dict[str, float]]:
        """K and V with one number a slot; and the scales of both."""
        fed, scales = dict[str, Samples](), dict[str, float]()
        width = self.interface.config.layers[self.index].head_dim
        for name, numbers in ((self.span.layer.key, codes), (self.span.layer.value, marks)):
            wide = np.broadcast_to(numbers[..., None], (*numbers.shape, width))
            made, cache = self.interface.cache(name, self.layouts, wide, scale)
            fed[name], scales[name] = (made,), cache.scale
        return fed, scales

    def _query(self, positions: npt.NDArray[np.int64], scales: dict[str, float]) -> tuple[Floats, Floats]:
        """The turned query, the same at all positions and of one sign; and what it is before it is turned."""
        config, layer = self.interface.config, self.interface.config.layers[self.index]
        spread = _QUIET / (_QUIET_CODE * 0.58 * scales[self.span.layer.key] * layer.head_dim)
        turned = self.random.uniform(0.5, 1.5, (config.num_heads, layer.head_dim)).astype(np.float32) * np.float32(spread)
        at = positions[:, None] + np.arange(self.interface.queries)
        every = np.broadcast_to(turned, (*at.shape, *turned.shape))
        query = rotate(every, -at, frequencies(layer.rope, layer.head_dim).astype(np.float32))
        return np.asarray(every), query.reshape(len(positions), *self.span.layer.query.tensor.shape)

    def _inputs(self, positions: npt.NDArray[np.int64], shown: dict[str, Bools]) -> dict[str, Samples]:
        fed = feed(self.interface.graph, [self.span.layer.mixed], positions, self.interface.queries)
        return {**fed, **self.interface.masks(shown, self.additive)}

    def _evaluate(
        self, inputs: dict[str, Samples], wanted: list[Value], given: list[tuple[Value, Samples]]
    ) -> list[Array]:
        needed = inputs_of(wanted)
        fed = {name: numbers for name, numbers in inputs.items() if name in needed}
        return [np.asarray(found) for found in evaluate(self.interface.graph, fed, wanted, given)]

    def _by_slot(self, values: Array) -> Floats:
        """``[samples, queries, heads, slots]``."""
        count, queries, slots = len(values), self.interface.queries, self.interface.slots
        heads = self.interface.config.num_heads
        if values.size != count * queries * heads * slots:
            self._refuse(None, f"weighs {values.size // count} slots, and {queries * heads * slots} are there")
        if queries == 1:
            return values.reshape(count, 1, heads, slots)
        return np.swapaxes(values.reshape(count, heads, queries, slots), 1, 2)

    def _scores(self, alone: Floats, scored: Floats, expected: Floats, seen: Bools, positions: Array) -> None:
        """With K at 0 all slots in view score alike and all others far below; else those in view score q · K."""
        view = np.broadcast_to(seen[:, :, None], alone.shape)
        with np.errstate(invalid="ignore"):
            base = np.max(alone, -1, keepdims=True, where=view, initial=-np.inf)
            far = alone - base
            wrong = np.where(view, ~(np.abs(far) <= _ALIKE), ~(far <= self.span.hidden_below))
            if wrong.any():
                sample, _, _, slot = np.argwhere(wrong)[0]
                if view[tuple(np.argwhere(wrong)[0])]:
                    what = f"hides slot {slot}, or scores it otherwise than the slots beside it"
                else:
                    what = (
                        f"shows slot {slot}: its score is {far[tuple(np.argwhere(wrong)[0])]:.4g} below what is seen, where "
                        f"{-self.span.hidden_below:.4g} would hide it whatever K is"
                    )
                self._refuse(int(positions[sample]), f"the graph {what}; the config and the mask input do not")
            moved = scored - alone
            base = np.max(moved - expected, -1, keepdims=True, where=view, initial=-np.inf)
            slack = _ALIKE * (1 + np.abs(base)) + np.where(view, 0, np.abs(alone) * 2.0**-21)
            free = np.where(view, 0, np.abs(expected) * 2 + np.abs(base) * 2)
            wrong = ~(np.abs(moved - expected - base) <= slack + free) & np.isfinite(alone)
        if wrong.any():
            sample, _, _, slot = np.argwhere(wrong)[0]
            self._refuse(int(positions[sample]), f"slot {slot} is scored otherwise than by q · K")

    def _weights(self, weighed: Floats, softmax: Floats, seen: Bools, positions: Array) -> None:
        """What is hidden weighs nothing at all; what is seen weighs as the softmax has it, up to a common factor."""
        view = np.broadcast_to(seen[:, :, None], weighed.shape)
        ratio = np.where(view, weighed / np.where(view, softmax, 1), 1)
        common = np.max(ratio, -1, keepdims=True, where=view, initial=0)
        wrong = np.where(view, ~(np.abs(ratio - common) <= _ALIKE * 4 * common), weighed != 0)
        if wrong.any():
            sample, _, _, slot = np.argwhere(wrong)[0]
            self._refuse(int(positions[sample]), f"slot {slot} weighs otherwise than a softmax of the scores has it")

    def _refuse(self, position: int | None, what: str) -> None:
        where = "" if position is None else f" at position {position}"
        raise ProofError(
            f"layers.{self.index}.attention: the graph and the checkpoint part here{where}: {what}. No checkpoint of this "
            "kind computes that; nothing is written. Please report the file."
        )


def _softmax(scores: Floats, seen: Bools) -> Floats:
    view = np.broadcast_to(seen[:, :, None], (len(seen), seen.shape[1], *scores.shape[-2:]))
    kept = np.where(view, scores, np.float32(-np.inf))
    raised = np.exp(kept - kept.max(-1, keepdims=True))
    made: Floats = raised / raised.sum(-1, keepdims=True)
    return made
