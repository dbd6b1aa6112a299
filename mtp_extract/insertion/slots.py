"""Constants of a bundle, each with the weight of a checkpoint that it holds or is to hold; all cores over their rows.

A base's checkpoint may have one tensor where the bundle has several tables, one a layer: its columns. Slots that read
one such tensor are worked on together, so that its rows, which may be many gigabytes, are read once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_hexdigest

from mtp_extract.checkpoint.constant import Constant, constant_of
from mtp_extract.checkpoint.dtypes import DTYPES
from mtp_extract.checkpoint.rounding import SCALES, rounded_again
from mtp_extract.checkpoint.stored import columns_of, stored_of
from mtp_extract.checkpoint.weight import Weight, filled, row_ranges
from mtp_extract.errors import CheckpointError, UnsupportedError
from mtp_extract.graph.roles import FoundRole
from mtp_extract.io.threads import on_all_cores
from mtp_extract.litertlm.storage import CHUNK_ELEMENTS, FLOAT_TYPES, Floats, Storage
from mtp_extract.litertlm.tflite import Tensor, TfliteModel

_T = TypeVar("_T")


@dataclass(frozen=True)
class Place:
    """A constant that plays a role in the graph of one signature."""

    signature: str
    model: TfliteModel
    found: FoundRole
    columns: tuple[int, int] | None = None
    """Which columns ``[begin, end)`` of the role's weight it holds; None for all."""

    @property
    def tensor(self) -> Tensor:
        """The constant of a role that has one."""
        assert self.found.tensor is not None
        return self.found.tensor

    @property
    def stored(self) -> Weight:
        """What it holds; ones where the converter folded them away."""
        if self.found.tensor is None:
            return filled(self.found.shape)
        return Constant.of(self.model, self.found).weight

    @property
    def key(self) -> object:
        """Equal for places that hold the same columns in the same bytes, with the same scales and factors."""
        stored = constant_of(self.stored)
        if stored is None:
            return self.columns
        # Summed, since a vocabulary has a scale a row and a table a layer.
        scales = stored.source.scale, stored.source.zero_point
        sums = (xxh3_128_hexdigest(np.ascontiguousarray(a).data) for a in scales)
        return self.columns, stored.source.location.begin, *sums, stored.factor, stored.transposed


def grouped(places: Iterable[Place]) -> list[tuple[Place, ...]]:
    """``places``, those together that hold the same: signatures share most of what they read."""
    found: dict[object, list[Place]] = defaultdict(list)
    for place in places:
        found[place.key].append(place)
    return [tuple(group) for group in found.values()]


@dataclass(frozen=True, eq=False)
class Slot:
    """Places that hold the same, and the weight of a checkpoint, or its columns, that they hold or are to hold."""

    role: str
    places: tuple[Place, ...]
    new: Weight
    dtype: str
    """What the checkpoint's floats were rounded to, a name in :data:`~mtp_extract.checkpoint.dtypes.DTYPES`."""

    @classmethod
    def of(cls, role: str, places: tuple[Place, ...], weight: Weight, dtype: str) -> Slot:
        """A slot for the columns of ``weight`` that ``places`` hold."""
        columns = places[0].columns
        part = weight if columns is None or stored_of(weight) is None else columns_of(weight, *columns)
        return cls(role, places, part, dtype)

    @cached_property
    def held(self) -> Weight:
        """What the bundle holds."""
        return self.places[0].stored

    @cached_property
    def constant(self) -> Constant:
        """The same as a constant, of a role that has one."""
        found = constant_of(self.held)
        assert found is not None
        return found

    @cached_property
    def readings(self) -> tuple[tuple[Weight, str], ...]:
        """What a checkpoint may hold that nobody changed, each with the type its floats are rounded to: what the bundle
        holds; or, of integers, the same with the folded factor divided out and scales in F32 or FP16, as formats keep
        them.
        """
        found = [(self.held, self.dtype)]
        if self.new.scheme is not None:
            # Without codes, or with scales that run across the rows: no format keeps such integers.
            with suppress(CheckpointError, UnsupportedError):
                found += [(rounded_again(self.held, (f"{scales}{SCALES}",)), "f32") for scales in ("F32", "FP16")]
        return tuple(found)

    @cached_property
    def target(self) -> tuple[Storage, Weight]:
        """How the new weight is to lie, and it: where a vector of equal numbers was stored as one, one or a vector.

        Raises:
            UnsupportedError: the one number is an integer.
        """
        storage = self.constant.source.storage
        if storage.elements == math.prod(self.new.shape):
            return storage, self.new
        if storage.type not in FLOAT_TYPES:
            raise UnsupportedError(
                f"{self.role}: is stored as one {storage.type.name} number, which cannot become a vector."
            )
        values = self.new.array().reshape(-1)
        if (values == values[0]).all():
            return storage, filled((1,), float(values[0]))
        return replace(storage, shape=(values.size,)), self.new

    @cached_property
    def whole(self) -> bool:
        """Whether its rows are worked on together: they are stored turned, or their scales do not lie by rows."""
        constant = constant_of(self.held)
        if self.held.whole or self.new.whole or constant is None:
            return self.held.whole or self.new.whole
        storage = constant.source.storage
        return storage.packing is not None and not (storage.by_rows and self.new.columns % storage.columns == 0)

    def ranges(self, elements: int) -> Iterator[tuple[int, int]]:
        """Rows ``[first, last)`` after each other, about ``elements`` elements at a time."""
        return iter([(0, self.new.rows)]) if self.whole else row_ranges(self.new, elements=elements)

    def part(self, total: int, first: int, last: int) -> slice:
        """Which of ``total`` stored things (bytes, codes, scales) are those of rows ``[first, last)``."""
        return slice(total * first // self.new.rows, total * last // self.new.rows)

    def ordered(self, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Rows of the weight, flat, in the order in which they are stored."""
        return (np.ascontiguousarray(rows.T) if self.constant.transposed else rows).reshape(-1)

    def scaled(self, rows: Floats) -> Floats:
        """The same times the folded factor."""
        values, factor = self.ordered(rows), self.constant.factor
        if factor == 1.0:
            return values
        with np.errstate(over="ignore"):
            return (values.astype(np.float64) * factor).astype(np.float32)

    def numbers(self, first: int, last: int) -> Floats:
        """Rows of the new weight as they are to be stored, flat.

        Raises:
            CheckpointError: one is not finite.
        """
        values = self.target[1].floats(first, last)
        if not np.isfinite(values).all():
            raise CheckpointError(f"{self.role}: holds values that are not finite. Train it again.")
        return self.scaled(values)

    @property
    def read_together(self) -> object:
        """Equal for slots whose new weights are columns of one tensor, and whose rows are taken alike."""
        stored = stored_of(self.new)
        if stored is None or stored.columns is None or self.whole:
            return id(self)
        return stored.path, stored.tensor.offset, self.new.columns


def over_rows(
    slots: Sequence[Slot], step: Callable[[Slot, int, int], _T], elements: int = CHUNK_ELEMENTS
) -> list[list[_T]]:
    """For each slot what ``step(slot, first, last)`` gives of its rows, about ``elements`` at a time, in order.

    An error in one ends all.
    """
    groups: dict[object, list[Slot]] = defaultdict(list)
    for slot in slots:
        groups[slot.read_together].append(slot)
    tasks = [(group, *rows) for group in groups.values() for rows in group[0].ranges(elements)]

    def work(task: tuple[list[Slot], int, int]) -> list[_T]:
        group, first, last = task
        return [step(slot, first, last) for slot in group]

    found: dict[Slot, list[_T]] = {slot: [] for slot in slots}
    for (group, *_), results in zip(tasks, on_all_cores(work, tasks), strict=True):
        for slot, result in zip(group, results, strict=True):
            found[slot].append(result)
    return list(found.values())


def passing(slots: Iterable[Slot], test: Callable[[Slot, int, int], bool]) -> list[Slot]:
    """The slots of which ``test`` holds for all rows."""
    # Most weights that differ show it in their first rows.
    likely = [slot for slot in slots if test(slot, *next(slot.ranges(1)))]
    failed = set[Slot]()

    def unless_failed(slot: Slot, first: int, last: int) -> bool:
        if slot in failed:
            return False
        if not (passed := test(slot, first, last)):
            failed.add(slot)
        return passed

    return [slot for slot, parts in zip(likely, over_rows(likely, unless_failed), strict=True) if all(parts)]


def unchanged(slots: Iterable[Slot]) -> list[Slot]:
    """The slots whose new weight is what the bundle holds, in one of its readings, as it is or rounded, to the bit."""
    found, left = list[Slot](), list(slots)
    for reading in range(3):
        passed = passing(left, partial(_is_reading, reading))
        found += passed
        left = [slot for slot in left if slot not in passed]
    return found


def _is_reading(reading: int, slot: Slot, first: int, last: int) -> bool:
    if len(slot.readings) <= reading or (slot.held.rows, slot.held.columns) != (slot.new.rows, slot.new.columns):
        return False
    held, dtype = slot.readings[reading]
    with np.errstate(over="ignore", invalid="ignore"):
        return are_alike(held.floats(first, last), slot.new.floats(first, last), dtype)


def require_ones(role: str, shape: tuple[int, ...], new: Weight, dtype: str) -> None:
    """Check that ``new`` is of ones, as a weight has to be that no constant of the graph holds.

    Raises:
        UnsupportedError: it is not.
    """
    if new.shape != shape or not are_alike(filled(shape).array(), new.array(), dtype):
        raise UnsupportedError(
            f"{role}: the graph multiplies by nothing here, because the weight was 1 when it was exported and was "
            "folded away; the checkpoint has another. Keep it at 1, or take a bundle whose graph has it."
        )


def are_alike(held: Floats, wanted: Floats, dtype: str) -> bool:
    """Whether ``held``, as it is or rounded to ``dtype``, is ``wanted``, to the bit."""
    bits = wanted.reshape(-1).view(np.uint32)
    if np.array_equal(held.reshape(-1).view(np.uint32), bits):
        return True
    try:
        rounded = DTYPES[dtype].widen(DTYPES[dtype].narrow(held.reshape(-1), "a weight").tobytes())
    except UnsupportedError:  # beyond the type, in which the other one is
        return False
    return np.array_equal(rounded.view(np.uint32), bits)
