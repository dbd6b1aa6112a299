"""Read how the graph of an attention rotates its queries, and find the config's RoPE that does the same.

For each dimension ``d`` of K, a row of scores has a sum of number · query element · table of the position. It has to be
an amplitude times ``q[d] · cos − q[d + half] · sin`` below half, and ``q[d] · cos + q[d − half] · sin`` above.
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
"""The largest error of a cosine in float32, or of an angle computed from one."""
_MOST_THETA_DIGITS = 7
_LARGEST_THETA_EXPONENT = 12
# The relative error of a frequency in float32 that was computed by a power, a reciprocal or a sine.
_RELATIVE_ERROR = 2e-6
_HALF_PRECISION_ERROR = 2.0**-11
_SUBNORMAL_ERROR = 2.0**-25


_HALVES = ((0, 0, 1), (0, 1, 1), (1, 0, -1), (1, 1, 1))
"""Cosines below and above half, then sines below and above half: part (see Rotation.number), side, sign in RoPE."""


class _Sum(NamedTuple):
    """Sum over terms of number · column of a table, ``[dimensions, terms]``; if ``by`` is 0, of the number alone."""

    number: Floats
    columns: Ids
    by: Ids

    @property
    def key(self) -> tuple[bytes, ...]:
        return tuple(part.tobytes() for part in self)

    def evaluate(self, table: Floats) -> Floats:
        """Return the sum for every row of ``table``, ``[positions, dimensions]``."""
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
    """The coefficients that rotate a query head: of each dimension, and of the other dimension of its pair."""

    amplitude: float  # a factor of all coefficients
    # ``[2, dimensions, terms]``, of the dimension itself (part 0) and of the other of its pair (part 1): numbers, and
    # the elements of the position's tables that they are multiplied by (0 for none)
    number: Floats
    by: Ids
    positions: Positions

    @property
    def values(self) -> list[Value]:
        """The tables of the position that the coefficients are computed from."""
        return self.positions.find_values(self.by)

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for equal rotations of heads of one size."""
        return self.number.shape, self.number.tobytes(), self.by.tobytes()

    def at(self, positions: Ids | None = None, *, last_bits: int = 0) -> Iterator[tuple[Ids, list[Floats]]]:
        """Yield positions, and there the cosines below and above half, and the sines below and above half.

        Each is an array ``[positions, half]``; equal ones are one array.

        Args:
            positions: where to compute them; None for all positions.
            last_bits: as for :func:`~mtp_extract.graph.evaluate.evaluate`.

        Raises:
            UnsupportedError: nothing depends on the position: there is no RoPE.
        """
        values = self.values
        if not values:
            raise UnsupportedError("A query is not rotated by the position: it has no RoPE.")
        columns = self._number_columns(values)
        sums = [self._build_sum(columns, *half) for half in _HALVES]
        # Usually both halves are rotated by the same numbers, which are then computed once.
        distinct = {term_sum.key: term_sum for term_sum in sums}
        everywhere = np.arange(self.positions.slots) if positions is None else positions
        for chunk, tables in self.positions.evaluate_in_batches(everywhere, values, last_bits=last_bits):
            table = np.concatenate(tables, 1) if len(tables) > 1 else tables[0]
            coefficients = {key: term_sum.evaluate(table) for key, term_sum in distinct.items()}
            yield chunk, [coefficients[term_sum.key] for term_sum in sums]

    def _number_columns(self, values: Sequence[Value]) -> Ids:
        """Return, for each element of the position's tables, its column in the tables of ``values`` side by side."""
        columns = np.zeros(self.positions.count, np.int64)
        begin = 0
        for value in values:
            elements = self.positions.number_elements(value).reshape(-1)
            columns[elements] = np.arange(begin, begin + elements.size)
            begin += elements.size
        return columns

    def _build_sum(self, columns: Ids, part: int, side: int, sign: int) -> _Sum:
        """Return the coefficients of one part for the dimensions below (``side`` 0) or above half."""
        size = self.number.shape[1] // 2
        half = slice(side * size, (side + 1) * size)
        by = self.by[part, half]
        return _Sum(self.number[part, half] * sign, columns[by], by)

    def measure_frequencies(self) -> tuple[Doubles, Doubles]:
        """Return the angles by which a query turns from one position to the next, ``[half]``, and their largest errors.

        They are measured at positions 1, 2, 4, …: the farther the position, the smaller the error of an angle per step.
        A pair that does not turn has exactly 0.

        Raises:
            FormatError: a cosine or sine is not finite.
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
    """Return the frequencies, ``[half]``, of ``angles`` between −π and π at ``positions``, each twice the one before.

    The frequency measured so far tells how many whole turns an angle lacks.
    """
    frequency = np.zeros(angles.shape[1])
    for position, angle in zip(positions, angles, strict=True):
        turns = np.rint((frequency * position - angle) / (2 * np.pi)) if position > 1 else 0.0
        frequency = (angle + 2 * np.pi * turns) / max(position, 1)
    return frequency


def read_rotation(name: str, scores: ScoreRows, heads: int, kv_heads: int, positions: Positions) -> Rotation:
    """Return the rotation that all rows of a layer's scores have; ``name`` is the layer's, for messages.

    Raises:
        RoleError: a row is not one query head rotated in RoPE's pairs of dimensions, or rows are rotated differently.
    """
    rotated = scores.rotated
    head = np.where(rotated.number != 0, rotated.element // rotated.number.shape[1], 0).max((1, 2))
    _check_heads(name, scores, head, heads, kv_heads)

    number, by = _split_terms_by_pair(name, rotated, head)
    first = number[0, 0]
    amplitude = float(first[np.abs(first).argmax()])
    if not amplitude:
        raise RoleError(f"{name}.attention: a dimension of its query has no part in its scores.")
    terms = (number != 0).any((0, 1))
    return Rotation(amplitude, (number[..., terms] / amplitude).astype(np.float32), by[..., terms], positions)


def _split_terms_by_pair(name: str, rotated: QueryTerms, head: Ids) -> tuple[Doubles, Ids]:
    """Return numbers and elements of tables, ``[2, dimensions, terms]``, that all rows share, as :class:`Rotation` has
    them.
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
    """Return, ``[rows, 2, dimensions, terms]``, which terms of a dimension are of its own element, and which of the
    other of its pair. ``element`` is ``[rows, dimensions, terms]``.
    """
    dimensions = np.arange(element.shape[1])[:, None]
    return np.stack([element == dimensions, element == np.roll(dimensions, dimensions.size // 2, 0)], 1)


def _check_heads(name: str, scores: ScoreRows, head: Ids, heads: int, kv_heads: int) -> None:
    """Raise RoleError unless every row is another query head, with the KV head that a checkpoint gives it."""
    if not np.array_equal(np.sort(head), np.arange(heads)):
        raise RoleError(f"{name}.attention: expected one row of scores for each query head.")
    if heads % kv_heads or not np.array_equal(scores.head, head // (heads // kv_heads)):
        raise RoleError(f"{name}.attention: query heads read other heads of K than a checkpoint's do.")


# The config's RoPE that makes a table of frequencies.


def compute_frequencies(rope: RopeConfig, head_dim: int) -> Doubles:
    """Return ``theta^(−2i / head_dim)``, and 0 past the rotated share: float64 ``[head_dim / 2]``."""
    index = np.arange(head_dim // 2)
    rotated = int(rope.partial_rotary_factor * head_dim // 2)
    by_dimension: Doubles = rope.theta ** (-2.0 * index / head_dim) / rope.factor * (index < rotated)
    return by_dimension


def _bound_rounding(table: Doubles, doubt: Doubles) -> Doubles:
    """Return how far each entry of ``table``, measured up to ``doubt``, may be from the exact frequency.

    Models compute frequencies in F32, or store them in F16.
    """
    # Converters store F16 constants as F32; frequencies that are all exact in F16 come from such a model.
    with np.errstate(over="ignore"):
        half = table.astype(np.float16).astype(np.float64)
    if (np.abs(table - half) <= doubt).all():
        return np.maximum(doubt, np.abs(table) * _HALF_PRECISION_ERROR + _SUBNORMAL_ERROR)
    return np.maximum(doubt, np.abs(table) * _RELATIVE_ERROR)


def read_rope(name: str, table: Doubles, allowed: Doubles, head_dim: int) -> RopeConfig:
    """Return the theta and the rotated share that make every entry of a table of ``head_dim / 2`` frequencies.

    Args:
        name: of the layer, for messages.
        allowed: the largest error of each entry, as :meth:`Rotation.measure_frequencies` returns it.

    Raises:
        UnsupportedError: no theta and share make this table.
    """
    rotated_count = _count_rotated(name, table, allowed)
    exponent = _estimate_theta_exponent(table[:rotated_count], allowed[:rotated_count], head_dim)
    if exponent > _LARGEST_THETA_EXPONENT:
        raise UnsupportedError(f"{name}: its RoPE table would need a theta of 1e{exponent:.0f}.")
    # Several thetas may fit within the errors: the one with the fewest digits comes first.
    rounded = (float(f"{10**exponent:.{digits}e}") for digits in range(_MOST_THETA_DIGITS))
    for theta in (10.0 ** round(exponent), *rounded):
        # Entries of 0 are not rotated, or by less than the type of the table can hold.
        for rotated in (head_dim // 2, rotated_count):
            rope = RopeConfig(theta, 2 * rotated / head_dim)
            expected = compute_frequencies(rope, head_dim)
            if bool((np.abs(table - expected) <= np.maximum(allowed, expected * _RELATIVE_ERROR)).all()):
                return rope
    raise UnsupportedError(f"{name}: its RoPE table does not follow theta^(-2i/{head_dim}) for any theta.")


def _count_rotated(name: str, table: Doubles, allowed: Doubles) -> int:
    """Return how many entries are rotated: the first is 1, none is larger, and all others are 0."""
    count = int(np.count_nonzero(table))
    is_share = (table >= 0).all() and (table <= 1 + allowed).all()
    if count < 2 or table[count:].any() or not is_share or abs(table[0] - 1.0) > _RELATIVE_ERROR + allowed[0]:
        raise UnsupportedError(f"{name}: its RoPE table is neither default nor proportional.")
    return count


def _estimate_theta_exponent(table: Doubles, allowed: Doubles, head_dim: int) -> float:
    """Return log10 of theta, of ``table[i] = theta^(−2i / head_dim)``."""
    index = np.arange(1, table.size)
    # The entry whose error changes theta least: it is far from 1, and large beside its error.
    best = int(index[np.argmin(allowed[1:] / table[1:] / index)])
    return -math.log10(table[best]) * head_dim / (2 * best)
