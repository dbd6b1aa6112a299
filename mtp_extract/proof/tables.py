"""What the position alone decides: the tables that turn a query, entry by entry, at every position of the caches.

Each entry of such a value must be a number, or a number times the cosine or the sine of position × frequency. Which one
is found at some positions and held at all of them. Then the values are known in closed form, and the rest of the proof
takes them as the *config's* frequencies make them. How far the file's own table is from those, because its type is a
coarse one, is measured and told.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mtp_extract.architecture.config import RopeConfig
from mtp_extract.errors import FormatError, ProofError
from mtp_extract.graph.arrays import Array
from mtp_extract.graph.call import grid_of
from mtp_extract.graph.evaluate import Samples, Stacked, evaluate, inputs_of
from mtp_extract.graph.fill import fill_param, fill_position
from mtp_extract.graph.flat import INPUT_POS, PARAM_TENSOR, FlatGraph, Value, ancestors
from mtp_extract.graph.moving import LAYOUT
from mtp_extract.graph.rope import frequencies
from mtp_extract.litertlm.storage import CODE_TYPES, FLOAT_TYPES, NUMBER_TYPES, Floats
from mtp_extract.litertlm.tflite import TensorType
from mtp_extract.proof.attentions import AttentionOps, Side

_AT_ONCE = 1 << 17
"""Numbers of a table computed side by side: half a MiB, which stays in a core's own cache."""
_PROBED = 48
_ROUNDING = 6e-7
"""Of an angle, and of a cosine: what float32 leaves of a product and of a function of it."""
_SHARES = {TensorType.FLOAT16: 2.0**-12 * 1.001, TensorType.BFLOAT16: 2.0**-9 * 1.001}
"""How far a number below 1 is rounded by a type."""
_TAKES = {**LAYOUT, "EMBEDDING_LOOKUP": (1,), **dict.fromkeys(("CAST", "DEQUANTIZE", "QUANTIZE"), (0,))}
"""Operators that hand elements on, and which operands they are of."""
_FINE = 2.0**-21
"""A frequency this close to the config's is the config's in float32."""


@dataclass(frozen=True)
class PositionTable:
    """A value that the position decides.

    Attributes:
        value: of the graph.
        amplitude, function: per entry, the factor, and what it is multiplied with: cosines by frequency, then sines,
            then the number 1.
        queries: of a step, whose entries follow one another; 1 where all share them.
        own: the frequencies that the graph has, float32 ``[head_dim / 2]``; ``config`` those of the config.
        share: how far a number may be off because the table is stored in few bits.
    """

    value: Value
    amplitude: Floats
    function: npt.NDArray[np.int64]
    queries: int
    own: Floats
    config: Floats
    share: float

    def at(self, positions: npt.NDArray[np.int64]) -> Floats:
        """Its numbers as the config has them, ``[samples, *shape]``; ``positions`` is of the first queries."""
        return self.made(_functions(positions, self.queries, self.config)).reshape(-1, *self.value.tensor.shape)

    def made(self, functions: Floats) -> Floats:
        """``[samples, entries]`` of ``functions`` as :func:`_functions` makes them."""
        entries, first = self.function.size // self.queries, int(self.function[0])
        if self.queries == 1 and np.array_equal(self.function, np.arange(first, first + entries)):
            # As most are: all cosines, or all sines.
            made: Floats = functions[:, 0, first : first + entries]
        else:
            parts = [functions[:, q, self.function[q * entries : (q + 1) * entries]] for q in range(self.queries)]
            made = np.concatenate(parts, 1)
        return made if (self.amplitude == 1).all() else made * self.amplitude


def _functions(positions: npt.NDArray[np.int64], queries: int, inverse: Floats) -> Floats:
    """Cosines, sines and 1 at the positions of every query, ``[samples, queries, 2 · frequencies + 1]``."""
    angles = (positions[:, None] + np.arange(queries)).astype(np.float32)[..., None] * inverse
    return np.concatenate([np.cos(angles), np.sin(angles), np.ones_like(angles[..., :1])], -1)


@dataclass(frozen=True)
class Coarse:
    """A file's own table that is a coarser form of the config's.

    Attributes:
        layer: whose.
        kind: the types that it is held in.
        moved: by how much a cosine or sine differs at most, and at which position.
    """

    layer: int
    kind: str
    moved: float
    position: int


@dataclass(frozen=True)
class Tables:
    """All of a graph's, how many positions were tried, and the coarse ones."""

    tables: tuple[PositionTable, ...]
    positions: int
    coarse: tuple[Coarse, ...]

    def given(self, positions: npt.NDArray[np.int64]) -> list[tuple[Value, Samples]]:
        """What to hand to the evaluator for these positions, in place of the graph's own."""
        return [(table.value, Stacked(table.at(positions))) for table in self.tables]


def check_tables(
    graph: FlatGraph,
    attentions: Sequence[AttentionOps],
    ropes: Sequence[RopeConfig],
    slots: int,
    queries: int,
    seed: int,
) -> Tables:
    """Hold every value that turns a query against cosines and sines, at every position that the caches have.

    Args:
        ropes: of the config, by layer.
        slots: of the caches.
        queries: of a step.
        seed: of the positions that are tried first.

    Raises:
        ProofError: an entry is neither a number nor a cosine or sine of the position.
        UnsupportedError: numbers do not fit the type that they are held in.
    """
    last = slots - queries
    by_layer = [list(_turning(attention)) for attention in attentions]
    tables: dict[int, PositionTable] = {}
    for index, (attention, rope, values) in enumerate(zip(attentions, ropes, by_layer, strict=True)):
        own = attention.layer.inverse_frequencies.astype(np.float32)
        exact = frequencies(rope, attention.layer.head_dim)
        config = exact.astype(np.float32)
        measured = attention.layer.inverse_frequencies
        off = np.abs(measured - exact)
        if (off > np.maximum(attention.layer.frequency_rounding, exact * _FINE)).any():
            worst = int(off.argmax())
            raise ProofError(
                f"layers.{index}.attention: a query is turned by {measured[worst]:.6g} from position to position where "
                f"the config's RoPE has {exact[worst]:.6g}: more than the type of the file's table explains. Nothing "
                "is written. Please report the file."
            )
        for value in values:
            if id(value) not in tables:
                tables[id(value)] = _identify(graph, value, f"layers.{index}", own, config, last, queries, seed)
    made = tuple(tables.values())
    # A table that is stored in few bits is held as the numbers it stores, and how it is computed with is measured; any
    # other as it is computed.
    for coarsely in (False, True):
        some = tuple(table for table in made if bool(_stored_in(table.value)) == coarsely)
        for positions, found in _values(graph, some, last, queries, rounds=not coarsely):
            _hold(some, positions, found)
    coarse = []
    for index, values in enumerate(by_layer):
        mine = [tables[id(v)] for v in values]
        kinds = _stored_in(*values)
        if kinds or any(t.share or (np.abs(t.own - t.config) > t.config * _FINE).any() for t in mine):
            # Few bits may lie in a wide type: numbers of half precision, made floats by a converter.
            coarse.append(Coarse(index, kinds or "few bits", *_furthest(graph, mine, last, queries)))
    return Tables(made, last + 1, tuple(coarse))


def _turning(attention: AttentionOps) -> Iterator[Value]:
    """Values that see no activation and meet the query before K does."""
    seen = set()
    for node in attention.nodes:
        if attention.sides[id(node.outputs[0])] != Side.QUERY:
            continue
        for value in node.inputs:
            if value is not None and value.depends and id(value) not in attention.sides and id(value) not in seen:
                seen.add(id(value))
                yield value


def feed(
    graph: FlatGraph, needed: frozenset[str], positions: npt.NDArray[np.int64], queries: int
) -> dict[str, Samples]:
    """Those inputs of ``needed`` that say the position, for steps whose first queries are at ``positions``."""
    fed = dict[str, Samples]()
    for name, fill in ((INPUT_POS, fill_position), (PARAM_TENSOR, fill_param)):
        if name in needed:
            tensor = graph.inputs[name].tensor
            # What is filled grows by one where the position does.
            still, moved = (np.asarray(fill(tensor, np.arange(at, at + queries))) for at in (0, 1))
            steps = positions.reshape(-1, *(1,) * still.ndim)
            fed[name] = Stacked((still + steps * (moved - still)).astype(still.dtype))
    return fed


def _values(
    graph: FlatGraph, tables: Sequence[PositionTable], last: int, queries: int, *, rounds: bool = False
) -> Iterator[tuple[npt.NDArray[np.int64], list[Array]]]:
    """Positions, and what the values of ``tables`` are at them, ``[positions, entries]`` each."""
    values = [table.value for table in tables]
    step = max(1, _AT_ONCE // max((v.tensor.elements for v in values), default=1))
    needed = inputs_of(values)
    for at in range(0, last + 1, step) if values else ():
        positions = np.arange(at, min(at + step, last + 1))
        found = evaluate(graph, feed(graph, needed, positions, queries), values, rounds=rounds)
        yield positions, [np.asarray(numbers).reshape(len(positions), -1) for numbers in found]


def _hold(tables: Sequence[PositionTable], positions: npt.NDArray[np.int64], found: Sequence[Array]) -> None:
    """Every entry of every table at ``positions`` against its function."""
    functions: dict[bytes, tuple[Floats, Floats]] = {}
    for table, numbers in zip(tables, found, strict=True):
        key = table.own.tobytes()
        if key not in functions:
            # How far rounding may go: an angle's grows with the angle.
            angles = np.float32(positions[-1] + table.queries) * table.own
            functions[key] = _functions(positions, table.queries, table.own), _allowed(angles)
        made, allowed = table.made(functions[key][0]), functions[key][1][table.function]
        apart = numbers - made
        wrong = ~(np.abs(apart, out=apart) <= np.abs(table.amplitude) * (allowed + np.float32(table.share)))
        if wrong.any():
            row, entry = (int(i) for i in np.argwhere(wrong)[0])
            raise ProofError(
                f"{table.value.label}, which turns a query by the position, holds {numbers[row, entry]:.6g} at "
                f"position {positions[row]} (entry {entry}), where its RoPE would have {made[row, entry]:.6g}. Nothing "
                "is written. Please report the file."
            )


def _allowed(angles: Floats) -> Floats:
    """What float32 leaves of cosines and sines of ``angles``, and of numbers, in the order of :func:`_functions`."""
    one = np.float32(_ROUNDING) * (1 + np.abs(angles))
    return np.concatenate([one, one, np.array([_ROUNDING], np.float32)])


def _identify(
    graph: FlatGraph, value: Value, layer: str, own: Floats, config: Floats, last: int, queries: int, seed: int
) -> PositionTable:
    """Which function each entry is of.

    Raises:
        ProofError: one is neither a number nor a cosine or sine of a frequency of the layer.
    """
    tried = np.unique(
        np.append(np.random.default_rng(seed).integers(0, last + 1, _PROBED), np.arange(min(16, last + 1)))
    )
    fed = feed(graph, inputs_of([value]), tried, queries)
    found = np.asarray(evaluate(graph, fed, [value], rounds=False)[0], np.float64).reshape(len(tried), -1)
    if found.shape[1] != value.tensor.elements:
        raise FormatError(f"{value.label} is computed with {found.shape[1]} elements: the file is damaged.")
    shape, half, share = value.tensor.shape, own.size, _share(graph, value)
    if share:
        # Of stored cosines the frequencies can be read but roughly: those are held as the config has them.
        own = config
    several = queries > 1 and queries in shape[:-1] and found.shape[1] % queries == 0
    entries = found.shape[1] // (queries if several else 1)
    functions = _functions(tried, queries if several else 1, own).astype(np.float64)
    angles = np.float32(tried.max() + queries) * own
    allowed = 2 * (_allowed(angles).astype(np.float64) + share)
    width = shape[-1] if shape else 1
    likely = np.arange(entries) % width % half
    amplitude, function = np.zeros(found.shape[1]), np.zeros(found.shape[1], np.int64)
    reach = np.maximum(np.abs(functions).max(0), 1e-9)
    for query in range(queries if several else 1):
        columns = slice(query * entries, (query + 1) * entries)
        numbers, open_ = found[:, columns], np.arange(entries)
        for guess in _guesses(likely, half):
            chosen = functions[:, query, guess[open_]]
            scale = (chosen * numbers[:, open_]).sum(0) / np.maximum((chosen * chosen).sum(0), 1e-30)
            fits = (np.abs(numbers[:, open_] - chosen * scale) <= np.abs(scale) * allowed[guess[open_]]).all(0)
            # A factor of 1 or -1 is just that, but for rounding.
            doubt = (share + 1e-5) / reach[query, guess[open_]]
            scale = np.where(np.abs(np.abs(scale) - 1) <= doubt, np.sign(scale), scale)
            amplitude[columns][open_[fits]], function[columns][open_[fits]] = scale[fits], guess[open_[fits]]
            open_ = open_[~fits]
            if not open_.size:
                break
        if open_.size:
            entry = open_[0]
            likeliest = functions[:, query, [likely[entry], likely[entry] + half]]
            apart = np.abs(np.abs(numbers[:, [entry]]) - np.abs(likeliest))
            where = tried[int(apart[:, apart.max(0).argmin()].argmax())]
            raise ProofError(
                f"{layer}.attention: {value.label} meets its query, and depends on the position otherwise than a "
                f"cosine or a sine of its RoPE does (entry {entry}, at position {where} if not elsewhere). No "
                "checkpoint computes that; nothing is written. Please report the file."
            )
    factors = amplitude.astype(np.float32)
    return PositionTable(
        value, factors, function, queries if several else 1, own, config, share + _rounded_after(value)
    )


def _guesses(likely: npt.NDArray[np.int64], half: int) -> Iterator[npt.NDArray[np.int64]]:
    """Functions that entries may be of, the likeliest first: entry i of a half has frequency i."""
    yield likely
    yield likely + half
    yield np.full_like(likely, 2 * half)
    for index in range(2 * half):
        yield np.full_like(likely, index)


def _share(graph: FlatGraph, value: Value) -> float:
    """How far the numbers of a stored table of cosines or sines may be off, by the type of that table."""
    found = 0.0
    for table in _stored_tables(value):
        tensor = table.tensor
        if tensor.type in FLOAT_TYPES:
            # Converters turn constants of half precision into float32: that all are such is no chance.
            half = tensor.type is TensorType.FLOAT32 and _half(graph, table)
            found = max(found, _SHARES[TensorType.FLOAT16] if half else _SHARES.get(tensor.type, 0.0))
        elif tensor.quantization is not None and tensor.quantization.scale_count:
            found = max(found, float(np.max(tensor.quantization.scale)) * 0.51)
    return found


def _stored_tables(value: Value) -> Iterator[Value]:
    """The constants that ``value`` takes its elements from, without computing anything of them."""
    node = value.producer
    if value.constant and value.tensor.elements > 1 and value.tensor.type in NUMBER_TYPES:
        yield value
    elif node is not None and node.kind in _TAKES:
        for position, source in enumerate(node.inputs):
            if source is not None and position in _TAKES[node.kind]:
                yield from _stored_tables(source)


def _half(graph: FlatGraph, value: Value) -> bool:
    if value.tensor.elements > 1 << 20:
        return False
    numbers = graph.floats(value)
    with np.errstate(over="ignore"):
        return bool(np.array_equal(numbers, numbers.astype(np.float16).astype(np.float32)))


def _stored_in(*values: Value) -> str:
    """The types of few bits that tables of frequencies are stored in, joined; empty where there are none."""
    kinds = {
        source.tensor.type_name
        for value in values
        for source in ancestors(value)
        if source.constant and source.tensor.elements > 1 and _narrow(source.tensor.type)
    }
    return " and ".join(sorted(kinds))


def _narrow(kind: TensorType | None) -> bool:
    return kind in _SHARES or kind in CODE_TYPES or kind is TensorType.INT16


def _rounded_after(value: Value) -> float:
    """How far cosines and sines are rounded once they are computed: by the types that they pass through."""
    stops = frozenset(
        id(v) for v in ancestors(value) if v.producer is not None and v.producer.kind in ("SIN", "COS", "GATHER")
    )
    found = 0.0
    for source in ancestors(value, stops):
        grid = grid_of(source.tensor) if not source.constant else None
        if grid is not None:
            found += grid[0] * 0.51
        elif not source.constant:
            found += _SHARES.get(source.tensor.type or TensorType.FLOAT32, 0.0)
    return found


def _furthest(graph: FlatGraph, tables: Sequence[PositionTable], last: int, queries: int) -> tuple[float, int]:
    """The largest difference between a file's own tables, as they are rounded there, and the config's; and where."""
    largest, where = 0.0, 0
    for positions, found in _values(graph, tables, last, queries, rounds=True):
        for table, numbers in zip(tables, found, strict=True):
            apart = np.abs(numbers - table.at(positions).reshape(len(positions), -1)).max(1)
            row = int(np.argmax(apart))
            if apart[row] > largest:
                largest, where = float(apart[row]), int(positions[row])
    return largest, where
