"""Which slots a query sees: every row of the mask, and both values that a mask input can have at a slot.

An attention is linear in K and V but for its softmax (:mod:`mtp_extract.proof.operators`), so what its masks do shows
where every slot holds a number of its own. A score is tried where it would leak: what is hidden is as loud as the norms
allow, and what is seen as low. Where there are too many rows to try all, and all are the same up to a shift
(:mod:`mtp_extract.proof.shifts`), those at the edges are tried and others drawn anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from mtp_extract.errors import ProofError, UnsupportedError
from mtp_extract.graph.arrays import Array, Bools, Numbers
from mtp_extract.graph.evaluate import Samples, Stacked, evaluate
from mtp_extract.graph.flat import MASK_LOCAL, Node, Value
from mtp_extract.graph.kernels import ELEMENTWISE
from mtp_extract.graph.moving import LAYOUT
from mtp_extract.graph.rope import frequencies
from mtp_extract.litertlm.storage import Floats
from mtp_extract.proof.attentions import AttentionOps, Side
from mtp_extract.proof.forward import Cache, rotate
from mtp_extract.proof.inputs import Layouts, SignatureInputs
from mtp_extract.proof.shifts import rows_are_alike
from mtp_extract.proof.tables import Tables, feed

_MOST_SCORES = 1 << 22
"""Slots that are looked at in all layers and rows: every row of a small cache, some of a large one."""
_MOST_RESULTS = 1 << 25
"""Weights that are, where the position or a mask meets K, V or the weights themselves."""
_FEW = 3
"""Rows whose weights and results are held where nothing of the kind does."""
_AT_ONCE = 1 << 17
_QUIET = 1.2
"""Standard deviation of scores: every slot that is seen has a say."""
_QUIET_CODE = 10
_WEIGHS_NOTHING = 104.0
"""How far below another a score is nothing beside it in float32."""
_ALIKE = 1e-3
"""Of a weight, and of a score's distance from another: what float32 leaves."""
_SAME = 2e-5
_LARGEST = 1e6
"""The largest score that float32 tells from its neighbours well enough."""

Positions = npt.NDArray[np.int64]
Shown = dict[str, Bools]


@dataclass(frozen=True)
class Rows:
    """What was tried, every row with two masks.

    Attributes:
        tried: rows of masks.
        moved: rows for which also weights and results were held, of layers that read other slots at other positions.
        of: rows that there are.
        alike: whether all are the same up to a shift, so that the first and the last show all.
        largest_scores: how large |q · K| was taken to be, by layer.
    """

    tried: int
    moved: int
    of: int
    alike: bool
    largest_scores: tuple[float, ...]


def check_rows(
    interface: SignatureInputs,
    attentions: Sequence[AttentionOps],
    tables: Tables,
    layouts: Layouts,
    additive: bool,
    seed: int,
) -> Rows:
    """Hold what every attention sees against the config, row by row.

    Args:
        attentions: the attentions, by layer.
        tables: the values that turn queries, in closed form.
        layouts: of the caches.
        additive: whether a mask of floats is 0 and a large negative number, or 1 and 0.
        seed: of the rows that are drawn, of masks and caches.

    Raises:
        ProofError: a slot is seen that should not be, or the other way round, or weighed otherwise.
        UnsupportedError: rows are neither alike nor few enough to be tried all.
    """
    random = np.random.default_rng(seed)
    size = interface.slots * interface.queries
    most = max(32, _MOST_SCORES // (size * len(attentions)))
    alike = interface.queries == 1 and rows_are_alike(interface.graph, attentions, interface.slots, interface.last)
    # Rows that differ otherwise than by a shift are tried all, which takes a minute where there are 32 003.
    rows = _chosen(interface, most if alike else interface.last + 1, random)
    held = len(rows)
    checks = [
        _Check(interface, attention, index, tables, layouts, additive, random)
        for index, attention in enumerate(attentions)
    ]
    for at in _pieces(rows, size * max(check.width for check in checks)):
        shown = _shown(interface, np.repeat(at, 2), random)
        for check in checks:
            check.scores(np.repeat(at, 2), shown)
    for check in checks:
        most = _MOST_RESULTS // (size * interface.config.num_heads * len(attentions)) if check.meets_caches else 0
        some = rows[np.unique(np.linspace(0, len(rows) - 1, min(max(most, _FEW), len(rows))).astype(int))]
        held = min(held, len(some)) if check.meets_caches else held
        if check.meets_caches and not alike and len(some) <= interface.last:
            raise UnsupportedError(
                f"layers.{check.index}: which slots of its caches it reads follows from the position in a way that "
                f"cannot be followed over {interface.last + 1} rows. Nothing is written. Please report the file."
            )
        for at in _pieces(some, size * interface.config.num_heads):
            check.results(np.repeat(at, 2), _shown(interface, np.repeat(at, 2), random))
        half = random.random(interface.slots) < 1 / 2
        for at in _pieces(some if check.meets_caches else some[-1:], size * interface.config.num_heads):
            for quiet in (half, ~half):
                check.leaks(at, quiet)
    return Rows(len(rows), held, interface.last + 1, alike, tuple(attention.largest_score for attention in attentions))


def _pieces(rows: Positions, size: int) -> Iterator[Positions]:
    step = max(1, _AT_ONCE // size)
    return (rows[at : at + step] for at in range(0, len(rows), step))


def _chosen(interface: SignatureInputs, most: int, random: np.random.Generator) -> Positions:
    """Positions of first queries: all, or those at edges and others drawn anew."""
    count, window = interface.last + 1, interface.window or 1
    if count <= most:
        return np.arange(count)
    edges = {base + by for base in (0, window, 2 * window, count - 1) for by in (-2, -1, 0, 1, 2)}
    kept = [p for p in sorted(edges) if 0 <= p < count]
    return np.unique(np.concatenate([kept, random.integers(0, count, max(most - len(kept), 0))]))


def _shown(interface: SignatureInputs, positions: Positions, random: np.random.Generator) -> Shown:
    """Masks with holes; of every two, the second shows what the first hides, so that each slot has both values."""
    shown = interface.drawn_masks(positions, random)
    at, slots = (positions[1::2, None] + np.arange(interface.queries))[..., None], np.arange(interface.slots)
    for name, mask in shown.items():
        allowed = slots <= at
        if name == MASK_LOCAL:
            allowed &= slots > at - (interface.window or interface.slots)
        mask[1::2] = ~mask[::2] & allowed
        # A query that sees nothing is none that a runtime asks for: where its own slot is its only one, it stays.
        np.put_along_axis(mask[1::2], at, ~mask[1::2].any(-1, keepdims=True), -1)
    return shown


@dataclass(frozen=True)
class _Check:
    interface: SignatureInputs
    attention: AttentionOps
    index: int
    tables: Tables
    layouts: Layouts
    additive: bool
    random: np.random.Generator

    @cached_property
    def chain(self) -> list[Node]:
        """The operators that masks meet on the way to the softmax, the last first: they act slot by slot."""
        found, value = list[Node](), self.attention.scores
        while (node := value.producer) is not None:
            sides = [v for v in node.inputs if v is not None and self.attention.sides.get(id(v), Side(0)) & Side.KEY]
            still = node.kind in LAYOUT and not any(
                v.depends for i, v in enumerate(node.inputs) if v is not None and i not in LAYOUT[node.kind]
            )
            if len(sides) != 1 or node.kind == "BATCH_MATMUL" or not (node.kind in ELEMENTWISE or still):
                break
            found.append(node)
            value = sides[0]
        return found

    @cached_property
    def width(self) -> int:
        """Scores a slot that are looked at: one, or those of all heads where operators arrange them anew."""
        return self.interface.config.num_heads if any(node.kind in LAYOUT for node in self.chain) else 1

    @cached_property
    def meets_caches(self) -> bool:
        """Whether the position or a mask meets K, V, or the weights: other slots may be read at other positions."""
        return any(side != Side.QUERY for side, _ in self._decided_elsewhere())

    @cached_property
    def _masked_before(self) -> bool:
        slots = self.interface.slots
        return any(
            side == Side.QUERY | Side.KEY and value.tensor.shape[-1:] == (slots,)
            for side, value in self._decided_elsewhere()
        )

    def _decided_elsewhere(self) -> Iterator[tuple[Side, Value]]:
        """What the position or a mask decides and operators outside of the chain read, with what they make of it."""
        chained = {id(node) for node in self.chain}
        for node in self.attention.nodes:
            for value in node.inputs:
                if id(node) not in chained and value is not None and value.decided:
                    yield self.attention.sides[id(node.outputs[0])], value

    def scores(self, positions: Positions, shown: Shown) -> None:
        """From where q and K have met: what is seen is scored as it is, what is hidden far below, loud or not."""
        seen, positions, shown = self._asked(positions, shown)
        slots, largest = self.interface.slots, np.float32(min(self.attention.largest_score, _LARGEST))
        cut = self._cut()
        shape = cut.tensor.shape
        axes = [axis for axis, size in enumerate(shape) if size == slots]
        if self._masked_before:
            raise UnsupportedError(
                f"layers.{self.index}: its scores meet a mask before those of all heads are put together; this release "
                "cannot hold its mask against the config."
            )
        if not axes or self.interface.queries > 1:
            raise UnsupportedError(
                f"layers.{self.index}: its scores are no rows of {slots} slots, one query a step, before its softmax; "
                "this release cannot hold its mask against the config."
            )
        drawn = self.random.random(slots, np.float32) * np.float32(0.1)
        low, high = (drawn - 1) * largest, (np.float32(0.9) + drawn) * largest
        # Where a mask bounds scores, what is seen must be let through however loud it is, too.
        bounded = any(node.kind in ("MAXIMUM", "MINIMUM") for node in self.chain)
        for visible in (low, high) if bounded else (low,):
            product = np.where(seen[:, 0], visible, high)
            narrow = [slots if axis == axes[-1] else size if self.width > 1 else 1 for axis, size in enumerate(shape)]
            along = product.reshape(-1, *(slots if axis == axes[-1] else 1 for axis in range(len(shape))))
            given = Stacked(np.broadcast_to(along, (len(positions), *narrow)))
            found = self._evaluate(self._inputs(positions, shown), [self.attention.scores], [(cut, given)])[0]
            self._hold_scores(found.reshape(len(positions), -1, slots), product, seen, positions, visible is low)

    def _hold_scores(self, scored: Floats, product: Floats, seen: Bools, positions: Positions, leaks: bool) -> None:
        largest = np.float32(min(self.attention.largest_score, _LARGEST))
        with np.errstate(invalid="ignore", over="ignore"):
            factor = _slope(scored, product, seen)
            moved = scored - (product if factor == 1 else np.float32(factor) * product)[:, None]
            # A softmax does not see what is added to a whole row.
            first = np.broadcast_to(seen.argmax(-1)[..., None], (*moved.shape[:-1], 1))
            base = np.take_along_axis(moved, first, -1)
            hidden = scored <= base - factor * (largest + _WEIGHS_NOTHING)
            moved -= base
            alike = np.abs(moved, out=moved) <= _ALIKE + 4e-6 * (factor * largest + np.abs(base))
            wrong = ~np.where(seen, alike, hidden | (not leaks))
        if wrong.any():
            sample, head, slot = (int(i) for i in np.argwhere(wrong)[0])
            if seen[sample, 0, slot]:
                what = f"slot {slot} is hidden, or scored otherwise than by q · K"
            else:
                below = float(base[sample, head, 0] + product[sample, slot] - scored[sample, head, slot])
                what = (
                    f"slot {slot} is seen, or its score is lowered by {below:.4g} only, where |q · K| may be "
                    f"{self.attention.largest_score:.4g}"
                )
            self._refuse(int(positions[sample]), what)

    def results(self, positions: Positions, shown: Shown) -> None:
        """All of it, with one number a slot in K and in V: weights, slot by slot, and what is mixed by them."""
        seen, positions, shown = self._asked(positions, shown)
        layer, attention, heads = (
            self.interface.config.layers[self.index],
            self.attention,
            self.interface.config.num_heads,
        )
        kv, slots = layer.num_kv_heads, self.interface.slots
        codes = self.random.integers(-_QUIET_CODE, _QUIET_CODE, (kv, slots), np.int8, endpoint=True)
        marks = self.random.integers(-100, 100, (kv, slots), np.int8, endpoint=True)
        fed, numbers = self._inputs(positions, shown), list[Floats]()
        for name, drawn in ((attention.layer.key, codes), (attention.layer.value, marks)):
            made, cache = self._one_number_a_slot(name, drawn, 1 / _QUIET_CODE)
            fed[name] = (made,)
            numbers.append(np.repeat(drawn.astype(np.float32) * np.float32(cache.scale), heads // kv, 0))
        turned, query = self._query(positions, float(np.abs(numbers[0]).max()) / _QUIET_CODE)
        given = [*self.tables.given(positions), (attention.layer.query, Stacked(query))]
        weights, mixed = self._evaluate(fed, [attention.weights, attention.layer.mixed], given)
        view = np.broadcast_to(seen[:, :, None], (*seen.shape[:2], heads, slots))
        scores = np.where(view, turned.sum(-1)[..., None] * numbers[0], np.float32(-np.inf))
        raised = np.exp(scores - scores.max(-1, keepdims=True))
        softmax = raised / raised.sum(-1, keepdims=True)
        if weights.size == softmax.size:
            # Where a softmax is spelled out, its sum is divided by later; and heads may stand in another order.
            found = weights.reshape(softmax.shape)
            with np.errstate(all="ignore"):
                found = found / found.sum(-1, keepdims=True)
            wrong = _differing(found, softmax, view)
            if wrong.any():
                wrong = _differing(np.sort(found, 2), np.sort(softmax, 2), view)
            if wrong.any():
                sample, _, _, slot = (int(i) for i in np.argwhere(wrong)[0])
                self._refuse(int(positions[sample]), f"slot {slot} weighs otherwise than the softmax of q · K has it")
        expected = (softmax * numbers[1]).sum(-1)[..., None]
        apart = np.abs(mixed.reshape(*expected.shape[:-1], -1) - expected)
        wrong_rows = ~(apart.max((1, 2, 3)) <= _SAME * np.ptp(expected))
        if wrong_rows.any():
            self._refuse(
                int(positions[int(np.argmax(wrong_rows))]), "V is read from other slots than those that are weighed"
            )

    def leaks(self, positions: Positions, quiet: Bools) -> None:
        """No slot acts on another: the slots ``quiet`` hold 0, and the others numbers as large as can be.

        Large numbers of V must change nothing where they weigh nothing, and no score of a quiet slot may move: to the
        last bit, since what is hidden has no bound.
        """
        layer, attention = self.interface.config.layers[self.index], self.attention
        kv, slots, heads = layer.num_kv_heads, self.interface.slots, self.interface.config.num_heads
        shown = self.interface.runtime_masks(positions)
        fed = self._inputs(positions, shown)
        weights = np.where(quiet, self.random.random((heads, slots), np.float32), np.float32(0))
        if attention.weights.tensor.elements != weights.size * self.interface.queries:
            return
        loud = np.broadcast_to(np.where(quiet, np.int8(0), np.int8(100)), (kv, slots))
        given: list[tuple[Value, Samples]] = [(attention.weights, (weights.reshape(attention.weights.tensor.shape),))]
        fed[attention.layer.value] = (self._one_number_a_slot(attention.layer.value, loud, 1e6)[0],)
        mixed = self._evaluate(fed, [attention.layer.mixed], given)[0]
        if np.any(mixed):
            self._refuse(int(positions[0]), "V of slots that weigh nothing changes what is mixed")
        _, query = self._query(positions, 1.0)
        turned: list[tuple[Value, Samples]] = [*self.tables.given(positions), (attention.layer.query, Stacked(query))]
        cut, scores = self._cut(), list[Array]()
        for codes in (np.zeros_like(loud), loud):
            fed[attention.layer.key] = (self._one_number_a_slot(attention.layer.key, codes, 1e6)[0],)
            scores.append(self._evaluate(fed, [cut], turned)[0])
        axis = 1 + max(a for a, size in enumerate(cut.tensor.shape) if size == slots)
        before, after = (np.moveaxis(np.asarray(each), axis, -1)[..., quiet] for each in scores)
        if not np.array_equal(before, after):
            self._refuse(int(positions[0]), "K of a slot changes the scores of other slots")

    def _one_number_a_slot(self, name: str, codes: Array, scale: float) -> tuple[Numbers, Cache]:
        """The cache ``name`` of INT8 ``codes`` ``[KV heads, slots]``, the same along head_dim."""
        width = self.interface.config.layers[self.index].head_dim
        return self.interface.cache(name, self.layouts, np.broadcast_to(codes[..., None], (*codes.shape, width)), scale)

    def _cut(self) -> Value:
        """The score before any mask has met it."""
        if not self.chain:
            return self.attention.scores
        return next(
            v for v in self.chain[-1].inputs if v is not None and self.attention.sides.get(id(v), Side(0)) & Side.KEY
        )

    def _asked(self, positions: Positions, shown: Shown) -> tuple[Bools, Positions, Shown]:
        """What is seen by the config, of the queries that see anything: of others engines agree on nothing."""
        seen = self.interface.seen(self.index, positions, shown)
        asked = seen.any(-1).all(-1)
        return seen[asked], positions[asked], {name: mask[asked] for name, mask in shown.items()}

    def _query(self, positions: Positions, scale: float) -> tuple[Floats, Floats]:
        """A query that is the same at all positions once it is turned, and what it is before."""
        config, layer = self.interface.config, self.interface.config.layers[self.index]
        spread = _QUIET / (_QUIET_CODE * 0.58 * max(scale, 1e-12) * layer.head_dim)
        turned = self.random.uniform(0.5, 1.5, (config.num_heads, layer.head_dim)).astype(np.float32) * np.float32(
            spread
        )
        at = positions[:, None] + np.arange(self.interface.queries)
        every = np.broadcast_to(turned, (*at.shape, *turned.shape))
        query = rotate(every, -at, frequencies(layer.rope, layer.head_dim).astype(np.float32))
        return np.asarray(every), query.reshape(len(positions), *self.attention.layer.query.tensor.shape)

    def _inputs(self, positions: Positions, shown: Shown) -> dict[str, Samples]:
        fed = feed(self.interface.graph, self.interface.needed, positions, self.interface.queries)
        return {**fed, **self.interface.masks(shown, self.additive)}

    def _evaluate(
        self, inputs: dict[str, Samples], wanted: list[Value], given: list[tuple[Value, Samples]]
    ) -> list[Array]:
        return [np.asarray(found) for found in evaluate(self.interface.graph, inputs, wanted, given)]

    def _refuse(self, position: int, what: str) -> None:
        raise ProofError(
            f"layers.{self.index}.attention: the graph and the checkpoint part here (the mask at position {position}): "
            f"{what}. No checkpoint of this kind computes that; nothing is written. Please report the file."
        )


def _differing(found: Floats, expected: Floats, view: Bools) -> Bools:
    wrong: Bools = ~np.where(view, np.abs(found - expected) <= np.float32(_ALIKE) * expected, found == 0)
    return wrong


def _slope(scored: Floats, product: Floats, seen: Bools) -> float:
    """What a score is multiplied with on the way: the same for all slots in view. Where no row shows two, 1."""
    sample = int(seen[:, 0].sum(-1).argmax())
    slots = np.flatnonzero(seen[sample, 0])
    if slots.size < 2:
        return 1.0
    low, high = slots[product[sample, slots].argmin()], slots[product[sample, slots].argmax()]
    rise = float(product[sample, high]) - float(product[sample, low])
    return (float(scored[sample, 0, high]) - float(scored[sample, 0, low])) / (rise or 1.0)
