"""How an attention rotates its queries, as the graph has it, and the config's RoPE behind that.

A row of a score is, per dimension ``d`` of K, a sum of number · query element · table of the position. It has to be an
amplitude times ``q[d] · cos − q[d + half] · sin`` below half, and ``q[d] · cos + q[d − half] · sin`` above.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mtp_extract.architecture.config import RopeConfig
from mtp_extract.errors import FormatError, RoleError, UnsupportedError
from mtp_extract.graph.expressions import Doubles, Ids
from mtp_extract.graph.flat import Value
from mtp_extract.graph.forms import QueryTerms, ScoreRows
from mtp_extract.graph.mask_trees import Bools
from mtp_extract.graph.positions import Positions
from mtp_extract.litertlm.storage import Floats

_MOST_DOUBLINGS = 20
_COSINE_ERROR = 2e-7
"""What float32 leaves of a cosine, or of an angle that is made of one."""
_MOST_THETA_DIGITS = 7
_LARGEST_THETA_EXPONENT = 12
# A frequency in float32, made by a power, a reciprocal or a sine, is right to this share of itself.
_RELATIVE_ERROR = 2e-6
_HALF_PRECISION_ERROR = 2.0**-11
_SUBNORMAL_ERROR = 2.0**-25


_HALVES = ((0, 0, 1), (0, 1, 1), (1, 0, -1), (1, 1, 1))
"""Cosines below and above half, sines below and above half: part, side, and the sign that RoPE has there."""


class _Sum(NamedTuple):
    """Σ over terms of number · column of a table, ``[dimensions, terms]``; where ``by`` is 0 the number alone."""

    number: Floats
    columns: Ids
    by: Ids

    @property
    def key(self) -> tuple[bytes, ...]:
        """Equal for equal sums."""
        return tuple(part.tobytes() for part in self)

    def evaluate(self, table: Floats) -> Floats:
        """For every row of ``table``: ``[positions, dimensions]``."""
        total: Floats | None = None
        for factors, columns, by in zip(self.number.T, self.columns.T, self.by.T, strict=True):
            if factors.any():
                summand = _multiply_columns(factors, columns, by, table)
                total = summand if total is None else total + summand
        return np.zeros((len(table), len(self.number)), np.float32) if total is None else total


def _multiply_columns(factors: Floats, columns: Ids, by: Ids, table: Floats) -> Floats:
    if not by.any():
        return np.broadcast_to(factors, (len(table), len(factors)))
    first = int(columns[0])
    if by.all() and np.array_equal(columns, np.arange(first, first + len(columns))):
        picked = table[:, first : first + len(columns)]
    else:
        picked = np.where(by > 0, table[:, columns], np.float32(1))
    return picked if (factors == 1).all() else picked * factors


@dataclass(frozen=True, eq=False)
class Rotation:
    """What each dimension of a query head is multiplied by, the other of its pair with it."""

    amplitude: float  # a factor on all of it
    # ``[2, dimensions, terms]``, for the dimension itself and the other of its pair: numbers, and which elements of the
    # position's tables they multiply (0 for none).
    number: Floats
    by: Ids
    positions: Positions

    @property
    def values(self) -> list[Value]:
        """The values of the position that it is made of."""
        return self.positions.values_of(self.by)

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for equal rotations of heads of one size."""
        return self.number.shape, self.number.tobytes(), self.by.tobytes()

    def at(self, positions: Ids | None = None, *, last_bits: int = 0) -> Iterator[tuple[Ids, list[Floats]]]:
        """Cosines below and above half, sines below and above half, ``[positions, half]`` each; at all if None.

        What is the same for several is one array.
        """
        values = self.values
        if not values:
            raise UnsupportedError("A query is not rotated by the position: it has no RoPE.")
        columns = self._number_columns(values)
        sums = [self._build_sum(columns, *half) for half in _HALVES]
        # Most often both halves are turned by the same numbers.
        distinct = {each.key: each for each in sums}
        everywhere = np.arange(self.positions.slots) if positions is None else positions
        for some, tables in self.positions.at(everywhere, values, last_bits=last_bits):
            table = np.concatenate(tables, 1) if len(tables) > 1 else tables[0]
            coefficients = {key: each.evaluate(table) for key, each in distinct.items()}
            yield some, [coefficients[each.key] for each in sums]

    def _number_columns(self, values: Sequence[Value]) -> Ids:
        """Per element of the position's tables, its column where the tables of ``values`` stand side by side."""
        columns = np.zeros(self.positions.count, np.int64)
        begin = 0
        for value in values:
            elements = self.positions.elements(value).reshape(-1)
            columns[elements] = np.arange(begin, begin + elements.size)
            begin += elements.size
        return columns

    def _build_sum(self, columns: Ids, part: int, side: int, sign: int) -> _Sum:
        """What the dimensions below or above half are multiplied by, or the other of their pair (``part`` 1)."""
        size = self.number.shape[1] // 2
        half = slice(side * size, (side + 1) * size)
        by = self.by[part, half]
        return _Sum(self.number[part, half] * sign, columns[by], by)

    def measured(self) -> tuple[Doubles, Doubles]:
        """By how much a query turns from one position to the next, and how far each number may be off.

        The angle is followed from position to position, each twice as far: so little of an error is left. Where
        nothing turns it is exactly 0.
        """
        slots = self.positions.slots
        steps = np.array([1 << k for k in range(_MOST_DOUBLINGS) if 1 << k < slots] or [0])
        rows = [coefficients for _, coefficients in self.at(steps)]
        cos, sin = (np.concatenate([row[part] for row in rows]).astype(np.float64) for part in (0, 2))
        if not (np.isfinite(cos).all() and np.isfinite(sin).all()):
            raise FormatError("A query is rotated by numbers that are not finite: the file is damaged.")
        frequency = _unwrap_frequencies(steps, np.arctan2(sin, cos))
        noise = 2 * float(np.abs(np.hypot(sin, cos) - 1).max())
        return frequency, _bound_rounding(
            frequency, np.full(frequency.size, (noise + _COSINE_ERROR) / max(steps[-1], 1))
        )


def _unwrap_frequencies(positions: Ids, angles: Doubles) -> Doubles:
    """The frequencies, ``[half]``, of ``angles`` between −π and π at ``positions``, each twice the one before: how many
    whole turns an angle is short of follows from the frequency up to there.
    """
    frequency = np.zeros(angles.shape[1])
    for position, angle in zip(positions, angles, strict=True):
        turns = np.rint((frequency * position - angle) / (2 * np.pi)) if position > 1 else 0.0
        frequency = (angle + 2 * np.pi * turns) / max(position, 1)
    return frequency


def rotation_of(name: str, scores: ScoreRows, heads: int, kv_heads: int, positions: Positions) -> Rotation:
    """Take the rows of a layer's scores apart; ``name`` is the layer's, for messages.

    Raises:
        RoleError: rows are made of other elements of the query than of one head's, pair by pair, or not alike.
    """
    rotated = scores.rotated
    head = np.where(rotated.number != 0, rotated.element // rotated.number.shape[1], 0).max((1, 2))
    _check_heads(name, scores, head, heads, kv_heads)

    number, by = _split_terms_by_pair(name, rotated, head)
    first = number[0, 0]
    amplitude = float(first[np.abs(first).argmax()])
    if not amplitude:
        raise RoleError(f"{name}.attention: a dimension of its query does not reach the scores.")
    terms = (number != 0).any((0, 1))
    return Rotation(amplitude, (number[..., terms] / amplitude).astype(np.float32), by[..., terms], positions)


def _split_terms_by_pair(name: str, rotated: QueryTerms, head: Ids) -> tuple[Doubles, Ids]:
    """Numbers of terms and elements of tables, ``[2, dimensions, terms]``, the same for all rows: of the element of the
    query that a dimension has in its head, and of the other of its pair.
    """
    width = rotated.number.shape[1]
    used = rotated.number != 0
    pair = _match_pairs(rotated.element - head[:, None, None] * width)
    if width % 2 or (used & ~pair.any(1)).any():
        raise RoleError(f"{name}.attention: its query is rotated in other pairs of dimensions than a checkpoint's.")
    number = np.where(used[:, None] & pair, rotated.number[:, None], 0)
    by = np.where(number != 0, rotated.by[:, None], 0)
    if (number != number[:1]).any() or (by != by[:1]).any():
        raise RoleError(f"{name}.attention: its heads are rotated differently.")

    return number[0], by[0]


def _match_pairs(element: Ids) -> Bools:
    """Where the terms of each dimension, ``[rows, dimensions, terms]``, are of its own element, and where of the other
    of its pair, ``[rows, 2, dimensions, terms]``.
    """
    dimensions = np.arange(element.shape[1])[:, None]
    return np.stack([element == dimensions, element == np.roll(dimensions, dimensions.size // 2, 0)], 1)


def _check_heads(name: str, scores: ScoreRows, head: Ids, heads: int, kv_heads: int) -> None:
    """Check the query head of every row, and the head of K that meets it."""
    if not np.array_equal(np.sort(head), np.arange(heads)):
        raise RoleError(f"{name}.attention: its scores are not one row a query head.")
    if heads % kv_heads or not np.array_equal(scores.head, head // (heads // kv_heads)):
        raise RoleError(f"{name}.attention: query heads read other heads of K than a checkpoint's do.")


# The config's RoPE behind a table of frequencies.


def frequencies(rope: RopeConfig, head_dim: int) -> Doubles:
    """``theta^(−2i / head_dim)``, 0 past the rotated share; float64 ``[head_dim / 2]``."""
    index = np.arange(head_dim // 2)
    rotated = int(rope.partial_rotary_factor * head_dim // 2)
    by_dimension: Doubles = rope.theta ** (-2.0 * index / head_dim) / rope.factor * (index < rotated)
    return by_dimension


def _bound_rounding(table: Doubles, doubt: Doubles) -> Doubles:
    """How far each entry of ``table``, which is known up to ``doubt``, may be from the number it stands for: it was
    computed in F32, or stored in F16 by models of half precision.
    """
    # Converters turn constants of half precision into float32: that all of them are representable in half is no chance.
    with np.errstate(over="ignore"):
        half = table.astype(np.float16).astype(np.float64)
    if (np.abs(table - half) <= doubt).all():
        return np.maximum(doubt, np.abs(table) * _HALF_PRECISION_ERROR + _SUBNORMAL_ERROR)
    return np.maximum(doubt, np.abs(table) * _RELATIVE_ERROR)


def read_rope(name: str, table: Doubles, allowed: Doubles, head_dim: int) -> RopeConfig:
    """Theta and the rotated share behind a table of ``head_dim / 2`` frequencies, checked against the whole table.

    ``allowed`` is how far an entry may be off, as :meth:`Rotation.measured` says.

    Raises:
        UnsupportedError: no theta and share make this table.
    """
    rotated_count = _count_rotated(name, table, allowed)
    exponent = _estimate_theta_exponent(table[:rotated_count], allowed[:rotated_count], head_dim)
    if exponent > _LARGEST_THETA_EXPONENT:
        raise UnsupportedError(f"{name}: its RoPE table would need a theta of 1e{exponent:.0f}.")
    # The roundest number first: a coarse grid leaves room for several.
    rounded = (float(f"{10**exponent:.{digits}e}") for digits in range(_MOST_THETA_DIGITS))
    for theta in (10.0 ** round(exponent), *rounded):
        # What follows may be not rotated, or rotated by so little that the grid has no step for it.
        for rotated in (head_dim // 2, rotated_count):
            rope = RopeConfig(theta, 2 * rotated / head_dim)
            expected = frequencies(rope, head_dim)
            if bool((np.abs(table - expected) <= np.maximum(allowed, expected * _RELATIVE_ERROR)).all()):
                return rope
    raise UnsupportedError(f"{name}: its RoPE table does not follow theta^(-2i/{head_dim}) for any theta.")


def _count_rotated(name: str, table: Doubles, allowed: Doubles) -> int:
    """How many entries of a table turn: they begin with 1, none is above, and the others are 0."""
    count = int(np.count_nonzero(table))
    is_share = (table >= 0).all() and (table <= 1 + allowed).all()
    if count < 2 or table[count:].any() or not is_share or abs(table[0] - 1.0) > _RELATIVE_ERROR + allowed[0]:
        raise UnsupportedError(f"{name}: its RoPE table is neither default nor proportional.")
    return count


def _estimate_theta_exponent(table: Doubles, allowed: Doubles, head_dim: int) -> float:
    """log10 of theta, by ``table[i] = theta^(−2i / head_dim)``."""
    index = np.arange(1, table.size)
    # The entry whose rounding leaves the least doubt of theta: far from 1, and far above its rounding.
    best = int(index[np.argmin(allowed[1:] / table[1:] / index)])
    return -math.log10(table[best]) * head_dim / (2 * best)
