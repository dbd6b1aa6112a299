"""Slots: constants of a bundle, each matched with the weight of a checkpoint; rows are processed on all cores.

A drafter is treated as a base with one signature. Where a base's checkpoint has one tensor, a bundle may have several
tables, one a layer, which are its columns. Slots of one such tensor are processed together, so that its rows, which may
be many gigabytes, are read once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
from xxhash import xxh3_128_hexdigest

from mtp_extract.checkpoint.dtypes import DTYPES
from mtp_extract.checkpoint.stored import FileWeight, find_common_dtype
from mtp_extract.checkpoint.weight import BundleWeight, Weight, build_constant_weight, split_rows
from mtp_extract.errors import CheckpointError, PairError, UnsupportedError
from mtp_extract.graph.roles import FoundRole
from mtp_extract.io.threads import map_on_all_cores
from mtp_extract.litertlm.storage import Floats, Storage
from mtp_extract.litertlm.tflite import TfliteModel

_T = TypeVar("_T")
_SCALAR = ".layer_scalar"
_SMALLEST_BUFFER = 16  # elements
# Elements of a weight at a time: with fewer, threads wait for each other between array operations; with more, their
# arrays leave the cache.
_ELEMENTS = 1 << 19


@dataclass(frozen=True)
class Location:
    """A constant that plays a role in the graph of one signature."""

    model: TfliteModel
    found: FoundRole
    columns: tuple[int, int] | None = None  # of the role's weight, ``[begin, end)``; None for all

    @property
    def constant(self) -> BundleWeight | None:
        """None if the converter folded a weight of ones away."""
        return None if self.found.tensor is None else BundleWeight(self.model, self.found)

    @property
    def content(self) -> tuple[Any, ...]:
        """A key that is equal for locations with equal columns, bytes, scales and factor."""
        if (constant := self.constant) is None:
            return (self.columns,)
        source = constant.source
        # Hashed, because an embedding has a scale for each row, and a table for each layer.
        scales = (xxh3_128_hexdigest(np.ascontiguousarray(a).data) for a in (source.scale, source.zero_point))
        return self.columns, source.storage, source.location.begin, *scales, constant.factor


@dataclass(frozen=True, eq=False)
class WeightSlot:
    """Locations with equal content, and the weight of the checkpoint, or its columns, that belongs there."""

    role: str
    places: tuple[Location, ...]  # empty if a weight of ones was folded away
    new: Weight
    dtype: str  # the type to which the checkpoint's floats were rounded, a name in DTYPES

    @cached_property
    def constant(self) -> BundleWeight | None:
        """The constant in the bundle; None if it was folded away."""
        return self.places[0].constant if self.places else None

    @property
    def label(self) -> str:
        """The role, and the layer of a table that one layer has of it."""
        columns = self.places[0].columns if self.places else None
        return self.role if columns is None else f"{self.role}, layer {columns[0] // (columns[1] - columns[0])}"

    @property
    def stored_constant(self) -> BundleWeight:
        """:attr:`constant` of a slot that has one."""
        assert self.constant is not None
        return self.constant

    @property
    def storage(self) -> Storage:
        """Element type, shape and grouping of the constant in the file."""
        return self.stored_constant.source.storage

    def read_stored_bytes(self, first: int, last: int) -> bytes:
        """Read the bytes of rows ``[first, last)`` from the bundle."""
        part = self.find_slice(self.storage.length, first, last)
        return self.stored_constant.source.location.read(part.start, part.stop - part.start)

    @cached_property
    def stored_weight(self) -> Weight:
        """The weight in the bundle: ones if nothing is stored."""
        return self.constant or build_constant_weight(self.new.shape)

    @cached_property
    def needs_all_rows(self) -> bool:
        """Whether all rows have to be processed together, because a scale does not belong to one row."""
        if self.constant is None or self.storage.packing is None:
            return False
        return not (self.constant.by_rows and self.new.columns % self.storage.columns == 0)

    def list_row_ranges(self) -> Iterable[tuple[int, int]]:
        """Split the rows into ranges ``[first, last)`` that are processed at a time."""
        return [(0, self.new.rows)] if self.needs_all_rows else split_rows(self.new, _ELEMENTS)

    def find_slice(self, total: int, first: int, last: int) -> slice:
        """Return the slice of ``total`` stored bytes, codes or scales that belongs to rows ``[first, last)``."""
        return slice(total * first // self.new.rows, total * last // self.new.rows)

    def compute_stored_values(self, first: int, last: int) -> Floats:
        """Return rows ``[first, last)`` of the new weight times the converter's factor, F32, flat.

        Raises:
            CheckpointError: a number is not finite.
            UnsupportedError: the file stores one number for all, and the new ones differ.
        """
        values, factor = self.new.floats(first, last), self.stored_constant.factor
        if not math.isfinite(sum_squares(values)):
            raise CheckpointError(
                f"{self.role}: holds values that are not finite. It was damaged, or the training diverged: fetch it "
                "again, or train it again."
            )
        if self.stored_constant.folded:
            if np.ptp(values):
                raise UnsupportedError(f"{self.role}: expected equal numbers, as the file stores one. Keep them equal.")
            values = values[:, :1]
        if factor == 1.0:
            return values.reshape(-1)
        with np.errstate(over="ignore"):
            return (values.reshape(-1).astype(np.float64) * factor).astype(np.float32)


class RoleMatch(NamedTuple):
    """A role of a bundle or a checkpoint, with its slots."""

    role: str
    name: str | None  # of its tensor in a base's checkpoint; None if it has none
    shape: tuple[int, ...]  # of the weight in the checkpoint, or else in the bundle
    places: tuple[Location, ...]
    slots: list[WeightSlot]  # one for each different constant, or columns of one; empty if there is a problem
    problem: str  # why bundle and checkpoint cannot be compared; empty if they can

    def require_slots(self) -> list[WeightSlot]:
        """Return the slots; raise PairError if bundle or checkpoint lacks the role, or their shapes differ."""
        if self.problem:
            raise PairError(f"{self.role}: {self.problem}. Give a checkpoint of the model that the bundle holds.")
        return self.slots


def match_roles(
    places: Mapping[str, tuple[Location, ...]], weights: Mapping[str, Weight], dtype: str | None = None
) -> Iterator[RoleMatch]:
    """Match every role of the bundle or the checkpoint.

    A tied head is the embedding. If the checkpoint has no layer scalar at all, each is 1.

    Args:
        dtype: the type to which the checkpoint's floats were rounded; by default the type each tensor is stored in.
    """
    without_scalars = not any(role.endswith(_SCALAR) for role in weights)
    for role in dict.fromkeys((*weights, *places)):
        weight = weights.get("embed_tokens" if role == "lm_head" and role not in weights else role)
        candidates = _choose_factor(places.get(role, ()), weight)
        is_scalar = role.endswith(_SCALAR)
        if weight is None and is_scalar and without_scalars:
            weight = build_constant_weight((1,))
        shape = _find_shape(candidates)
        problem = _describe_problem(weight, shape, is_read=bool(candidates) or is_scalar)
        slots = list[WeightSlot]()
        if weight is not None and not problem:
            slots = _build_slots(role, candidates, weight, dtype or find_common_dtype([weight]))
        name = weight.name if isinstance(weight, FileWeight) else None
        yield RoleMatch(role, name, weight.shape if weight else shape, candidates, slots, problem)


def _describe_problem(weight: Weight | None, shape: tuple[int, ...], is_read: bool) -> str:
    """Say why ``weight`` cannot be compared with a bundle's weight of ``shape``; empty if it can."""
    if weight is None:
        return "the checkpoint has no such tensor"
    if not is_read:
        return "no graph of the bundle reads it"
    return "" if shape == weight.shape else f"the checkpoint's is {list(weight.shape)}, the bundle's {list(shape)}"


def _find_shape(places: Sequence[Location]) -> tuple[int, ...]:
    """Return the shape of the weight at ``places``: tables side by side are one; without any it is a layer scalar."""
    if not places:
        return (1,)
    shape = places[0].found.shape
    ends = [place.columns[1] for place in places if place.columns is not None]
    return (shape[0], max(ends)) if ends else shape


def _choose_factor(places: tuple[Location, ...], weight: Weight | None) -> tuple[Location, ...]:
    """Return ``places`` with the possible folded factor that brings their norm closest to that of ``weight``.

    Where RMSNorm follows, the graph computes the same with any factor; only the numbers tell which was folded in.
    """
    constant = places[0].constant if places else None
    if constant is None or weight is None or not places[0].found.other_factors or constant.shape != weight.shape:
        return places
    sums = [(sum_squares(constant.floats(*rows)), sum_squares(weight.floats(*rows))) for rows in split_rows(weight)]
    norm_stored, norm_wanted = (math.sqrt(sum(part)) for part in zip(*sums, strict=True))
    if not 0 < norm_stored < math.inf or not 0 < norm_wanted < math.inf:
        return places

    def measure_distance(factor: float) -> float:
        return abs(math.log(norm_stored * constant.factor / factor / norm_wanted))

    best = min((constant.factor, *places[0].found.other_factors), key=measure_distance)
    return tuple(replace(place, found=replace(place.found, factor=best)) for place in places)


def _build_slots(role: str, places: Iterable[Location], weight: Weight, dtype: str) -> list[WeightSlot]:
    """Build one slot for all ``places`` with equal content; one without a location if there are none."""
    groups: dict[tuple[Any, ...], list[Location]] = defaultdict(list)
    for place in places:
        groups[place.content].append(place)
    slots = []
    for (columns, *_), group in groups.items():
        part_of_weight = (
            weight.cut_columns(*columns) if columns is not None and isinstance(weight, FileWeight) else weight
        )
        slots.append(WeightSlot(role, tuple(group), part_of_weight, dtype))
    return slots or [WeightSlot(role, (), weight, dtype)]


def map_rows(slots: Sequence[WeightSlot], step: Callable[[WeightSlot, int, int], _T]) -> dict[WeightSlot, list[_T]]:
    """Call ``step(slot, first, last)`` for all rows of ``slots`` on all cores; return the results of each slot in the
    order of its rows."""
    groups = defaultdict[object, list[WeightSlot]](list)
    for slot in slots:
        new = slot.new
        if isinstance(new, FileWeight) and new.cut is not None and not slot.needs_all_rows:
            # Columns of the same rows of a file: read together.
            groups[new.path, new.tensor.offset, new.columns].append(slot)
        else:
            groups[slot].append(slot)
    tasks = [(group, *rows) for group in groups.values() for rows in group[0].list_row_ranges()]

    def process(task: tuple[list[WeightSlot], int, int]) -> list[_T]:
        group, first, last = task
        # NumPy copies scales that are broadcast over rows shorter than its buffer, which takes as long as multiplying
        # by them. The buffer size is a setting of the thread.
        np.setbufsize(_SMALLEST_BUFFER)
        return [step(slot, first, last) for slot in group]

    results = {slot: list[_T]() for slot in slots}
    for (group, *_), results_of_group in zip(tasks, map_on_all_cores(process, tasks), strict=True):
        for slot, result in zip(group, results_of_group, strict=True):
            results[slot].append(result)
    return results


def are_equal(stored: Floats, wanted: Floats, dtype: str) -> bool:
    """Whether ``stored``, unchanged or rounded to ``dtype``, equals ``wanted`` to the bit."""
    bits, rounding = wanted.reshape(-1).view(np.uint32), DTYPES[dtype]
    if np.array_equal(stored.reshape(-1).view(np.uint32), bits):
        return True
    try:
        rounded = rounding.widen(rounding.narrow(stored.reshape(-1), "a weight").tobytes())
    except UnsupportedError:  # a number beyond the range of ``dtype``, in which all wanted ones are
        return False
    return np.array_equal(rounded.view(np.uint32), bits)


def sum_squares(values: Floats) -> float:
    """Sum the squares of ``values``, in float64 if they overflow or vanish in float32."""
    flat = values.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        fast = float(np.dot(flat, flat))
    if 1e-20 < fast < 1e20:
        return fast
    return float(np.einsum("i,i->", flat, flat, dtype=np.float64))


def compute_relative_error(difference: float, size: float) -> float:
    """Return sqrt(``difference`` / ``size``), both sums of squares: the relative root mean square of a difference."""
    return math.sqrt(difference / size) if size else math.inf if difference else 0.0
