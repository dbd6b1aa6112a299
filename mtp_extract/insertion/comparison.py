"""Does a bundle hold the weights of this base? Role by role, from equal to how far apart.

Weights alone are compared, not what the graphs compute with them. One in codes is compared three ways, the strongest
answer first: what is stored, rounded to the checkpoint's type, is the weight; the weight, quantized by the rule of
:mod:`mtp_extract.litertlm.storage`, gives the stored codes and scales; every number lies within half a step of what is
stored, so that it may have been rounded to it. One pass over the rows answers all three.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mtp_extract.bundle import Opened
from mtp_extract.checkpoint.constant import constant_of
from mtp_extract.checkpoint.dtypes import DTYPES
from mtp_extract.errors import PairError, escape, few
from mtp_extract.insertion.base import Match, check_geometry, find_base, matches
from mtp_extract.insertion.base_checkpoint import read_base
from mtp_extract.insertion.slots import Slot, over_rows
from mtp_extract.io.source import Progress, counter
from mtp_extract.litertlm.storage import Floats

EQUAL, EQUAL_CODES, HALF_STEP, DIFFERENT, NOT_FOUND = (
    "equal",
    "equal codes",
    "within half a step",
    "different",
    "not found",
)
_VERDICTS = (EQUAL, EQUAL_CODES, HALF_STEP, DIFFERENT, NOT_FOUND)

# Rounding of float32 along the way, in steps: the largest code is 127.
_HALF = 0.5 + 1e-4
_SCALES_ALIKE = 1e-6
# What is looked at together: it stays in a core's own cache.
_ELEMENTS = 1 << 17
_JOINS: tuple[Callable[[Any], Any], ...] = (all, all, sum, sum, max, sum, sum, all)


@dataclass(frozen=True)
class RoleVerdict:
    """How a role's weights in the bundle compare with the checkpoint's."""

    role: str
    tensor: str | None
    """Its name in the checkpoint; None where the checkpoint has none."""
    shape: tuple[int, ...]
    verdict: str
    """:data:`EQUAL` … :data:`NOT_FOUND`."""
    stored: tuple[str, ...] = ()
    """The types in which the bundle stores it; empty where nothing does."""
    signatures: tuple[str, ...] = ()
    """Those whose graphs read it."""
    steps: float | None = None
    """The largest distance in steps of the stored codes; None for floats."""
    error: float | None = None
    """Root mean square of the difference, as a share of the checkpoint's."""
    codes_apart: int | None = None
    """How many codes quantizing the checkpoint gives otherwise; None for floats."""
    why: str = ""
    """Of a verdict that needs a reason."""

    def as_json(self) -> dict[str, Any]:
        """All fields; None for what JSON cannot say, numbers that are not finite."""
        values = asdict(self) | {"why": self.why or None}
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


@dataclass(frozen=True)
class BaseComparison:
    """A bundle's base beside a checkpoint."""

    bundle: str
    checkpoint: Path
    layers: int
    """Of the base."""
    roles: tuple[RoleVerdict, ...]
    tensors: int
    """How many tensors of the checkpoint were looked for."""
    tensors_found: int
    """How many of them the bundle holds, whether equal or not."""
    not_loaded: tuple[str, ...]
    not_compared: Mapping[str, int]
    """What a :class:`~mtp_extract.insertion.base_checkpoint.BaseCheckpoint` calls ``unused`` and ``others``."""

    @property
    def counts(self) -> dict[str, int]:
        """How many roles have each verdict."""
        counted = Counter(role.verdict for role in self.roles)
        return {verdict: counted[verdict] for verdict in _VERDICTS if counted[verdict]}

    @property
    def problem(self) -> PairError | None:
        """The error that says which roles differ; None when none does."""
        wrong = [r for r in self.roles if r.verdict in (DIFFERENT, NOT_FOUND)]
        if not wrong:
            return None
        listed = few((f"{r.role}: {r.why or r.verdict}" for r in wrong), separator="; ")
        return PairError(
            f"{self.bundle}: {len(wrong)} of {len(self.roles)} roles are not the weights of {escape(self.checkpoint)}: "
            f"{listed}."
        )

    def as_json(self) -> dict[str, Any]:
        """The whole of it, as JSON has it."""
        found = {"verdicts": self.counts, "roles": [role.as_json() for role in self.roles]}
        return {**vars(self), "checkpoint": str(self.checkpoint), "architecture": "gemma4", **found}


def compare_base(opened: Opened, directory: Path, progress: Progress = lambda done, total: None) -> BaseComparison:
    """Hold the base in ``opened`` against the checkpoint in ``directory``.

    Raises:
        CheckpointError: the directory is no complete checkpoint of a Gemma 4 base.
        PairError: the two are not of one geometry.
        RoleError, UnsupportedError: the bundle's graphs cannot be read.
    """
    checkpoint, base = read_base(directory), find_base(opened)
    check_geometry(base, checkpoint)
    found = [(match, match.slots) for match in matches(base, checkpoint)]
    looks = look_at([slot for _, own in found for slot in own], progress)
    verdicts = [_verdict(match, [looks[slot] for slot in own]) for match, own in found]
    verdicts += [
        RoleVerdict(name, name, (), NOT_FOUND, why="the bundle has no place for this tensor")
        for name in checkpoint.unknown
    ]
    return BaseComparison(
        opened.source.name,
        directory,
        base.walk.layers,
        tuple(verdicts),
        len(checkpoint.names) + len(checkpoint.unknown),
        sum(verdict.role in checkpoint.names and verdict.verdict != NOT_FOUND for verdict in verdicts),
        checkpoint.unused,
        checkpoint.others,
    )


class Look(NamedTuple):
    """What some rows of a slot have shown."""

    finite: bool = True
    same: bool = True
    """Whether what is stored, rounded to the checkpoint's type, is the weight."""
    squares: float = 0.0
    reference: float = 0.0
    """Sums of squares of the difference, and of the weight."""
    steps: float = -1.0
    """The largest difference in steps of the codes; −1 of floats."""
    outside: int = 0
    """Weights further from what is stored than half a step and what rounding to the checkpoint's type explains."""
    codes_apart: int = 0
    """Codes that quantizing the weight gives otherwise."""
    scales_alike: bool = True

    @classmethod
    def of_all(cls, looks: Iterable[Look]) -> Look:
        """What all rows have shown."""
        columns: list[Any] = [*zip(*looks, strict=True)]
        return cls(*(join(column) for join, column in zip(_JOINS, columns, strict=True)))

    def verdict(self) -> dict[str, Any]:
        """The fields of a :class:`RoleVerdict` that say how far apart the two are."""
        if not self.finite:
            return _apart(DIFFERENT, math.inf, why="the checkpoint holds values that are not finite")
        error = math.sqrt(self.squares / self.reference) if self.reference else math.inf if self.squares else 0.0
        if self.steps < 0:
            return (
                _apart(EQUAL, error) if self.same else _apart(DIFFERENT, error, why=f"apart by {error:.3g} of its size")
            )
        verdict, why = EQUAL if self.same else EQUAL_CODES, ""
        if not self.same and (self.codes_apart or not self.scales_alike):
            verdict, why = HALF_STEP, f"{self.codes_apart} codes differ" if self.codes_apart else "scales differ"
            if self.outside:
                verdict = DIFFERENT
                why = f"{self.outside} weights lie up to {self.steps:.3g} steps apart, {error:.3g} of its size"
        return _apart(verdict, error, self.steps, self.codes_apart, why)


def _apart(
    verdict: str, error: float, steps: float | None = None, codes_apart: int | None = None, why: str = ""
) -> dict[str, Any]:
    return {"verdict": verdict, "error": error, "steps": steps, "codes_apart": codes_apart, "why": why}


def look_at(slots: Sequence[Slot], progress: Progress = lambda done, total: None) -> dict[Slot, Look]:
    """How far what each of ``slots`` holds is from its weight."""
    tick = counter(progress, sum(math.prod(slot.new.shape) for slot in slots))
    # Rounding to the checkpoint's type is the dearest, and weights that are not equal show it in their first rows.
    same = {slot: _look(slot, *next(slot.ranges(1)), True).same for slot in slots}

    def step(slot: Slot, first: int, last: int) -> Look:
        found = _look(slot, first, last, same[slot])
        same[slot] = found.same
        tick((last - first) * slot.new.columns)
        return found

    return {slot: Look.of_all(parts) for slot, parts in zip(slots, over_rows(slots, step, _ELEMENTS), strict=True)}


def _look(slot: Slot, first: int, last: int, ask: bool) -> Look:
    """Of rows ``[first, last)``; whether they are the same only if that is to be asked."""
    given, constant = slot.new.floats(first, last), constant_of(slot.held)
    if not np.isfinite(given).all():
        return Look(finite=False, same=False)
    if constant is not None and slot.held.scheme is not None and not constant.folded:
        same = ask and _is_same(slot.held.floats(first, last), given, slot.dtype)
        return _look_at_codes(slot, given, first, last)._replace(same=same)
    return _look_at_floats(slot.held.floats(first, last), given, slot.dtype)


def _is_same(held: Floats, given: Floats, dtype: str) -> bool:
    """Whether ``held``, rounded to ``dtype``, is ``given``."""
    rounding = DTYPES[dtype]
    return bool((rounding.widen(rounding.narrow(held.reshape(-1), "").tobytes()) == given.reshape(-1)).all())


def _look_at_floats(held: Floats, given: Floats, dtype: str) -> Look:
    return Look(same=_is_same(held, given, dtype), squares=_squares(given - held), reference=_squares(given))


def _squares(values: Floats) -> float:
    # Squares of floats overflow and vanish in float32.
    return float(np.einsum("ij,ij->", values, values, dtype=np.float64))


def _look_at_codes(slot: Slot, given: Floats, first: int, last: int) -> Look:
    source, wanted = slot.constant.source, slot.scaled(given)
    storage, part = source.storage, slot.part(source.storage.elements, first, last)
    groups = slot.part(storage.groups, first, last)
    held_scale, held_zero = source.scale.reshape(-1)[groups], source.zero_point.reshape(-1)[groups]
    codes, rows = source.codes(part.start, part.stop).astype(np.float32), (-1, held_scale.size, storage.columns)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        scale, zero_point, made = storage.quantized(wanted)
        apart = int(np.count_nonzero(made != codes))
        alike = np.allclose(scale, held_scale, rtol=_SCALES_ALIKE, atol=0) and np.array_equal(zero_point, held_zero)
        if held_zero.any():
            codes.reshape(rows)[...] -= held_zero.astype(np.float32)[:, None]
        # In steps: neither overflows nor vanishes where the weights do.
        steps = wanted.reshape(rows) / held_scale[:, None]
        steps -= codes.reshape(rows)
        most = float(np.abs(steps, out=steps).max())
        outside = 0
        if not most <= _HALF:
            # What was rounded to the checkpoint's type may have lain closer before.
            slack = DTYPES[slot.dtype].roundoff * np.abs(wanted).reshape(rows) / held_scale[:, None] + np.float32(_HALF)
            outside = int(np.count_nonzero(steps > slack))
        by_group = np.einsum("ijk,ijk->j", steps, steps, dtype=np.float64)
        squares = float(np.dot(by_group, np.square(held_scale, dtype=np.float64)))
    reference = float(np.einsum("i,i->", wanted, wanted, dtype=np.float64))
    return Look(True, True, squares, reference, most, outside, apart, alike)


def _verdict(match: Match, looks: Sequence[Look]) -> RoleVerdict:
    places = match.places
    types = tuple(sorted({place.found.tensor.type_name for place in places if place.found.tensor is not None}))
    signatures = tuple(dict.fromkeys(place.signature for place in places))
    made = RoleVerdict(match.role, match.name, match.shape, DIFFERENT, types, signatures)
    if match.problem or match.weight is None:
        return replace(made, verdict=DIFFERENT if places and match.name else NOT_FOUND, why=match.problem)
    if not places:
        found = _look_at_floats(np.ones((1, 1), np.float32), match.weight.floats(), "f32").verdict()
        why = "" if found["verdict"] == EQUAL else "the graphs have no layer scalar, which is one of 1"
        return replace(made, **found | {"why": why})
    each = [look.verdict() for look in looks]
    worst = max(each, key=lambda found: (_VERDICTS.index(found["verdict"]), found["error"]))
    joined: dict[str, Any] = {"error": max(found["error"] for found in each)}
    for name, join in (("steps", max), ("codes_apart", sum)):
        own = [found[name] for found in each]
        joined[name] = None if None in own else join(own)
    return replace(made, **worst | joined)
