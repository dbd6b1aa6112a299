"""Does a bundle hold the weights of this base? Role by role, from equal to how far apart.

Weights alone are compared, not what the graphs compute with them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np

from mtp_extract.base.checkpoint import BaseCheckpoint, read_base
from mtp_extract.base.distance import (
    DIFFERENT,
    EQUAL,
    EQUAL_CODES,
    HALF_STEP,
    Distance,
    differs_at_once,
    measure_columns,
    measure_distance,
)
from mtp_extract.base.places import BundledBase, Place, find_base, grouped
from mtp_extract.bundle import Opened
from mtp_extract.checkpoint.constant import Constant, constant_of
from mtp_extract.checkpoint.stored import stored_of
from mtp_extract.checkpoint.weight import Weight, filled
from mtp_extract.errors import PairError, escape, few
from mtp_extract.insert.fit import differences
from mtp_extract.io.source import Progress, counter
from mtp_extract.io.threads import cores

NOT_FOUND = "not found"
_VERDICTS = (EQUAL, EQUAL_CODES, HALF_STEP, DIFFERENT, NOT_FOUND)
_LAYER_SCALAR = ".layer_scalar"
# What exporters compute constants in, and configurations round them to.
_NUMBERS_ALIKE = 1e-5

# Of a role that differs: how much is read, and how many others are tried, to say what it holds instead.
_LARGEST_GUESS = 1 << 24
_MOST_GUESSES = 8


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
        return asdict(self) | {"steps": _finite(self.steps), "error": _finite(self.error), "why": self.why or None}


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


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
    unused: tuple[str, ...]
    others: Mapping[str, int]
    """``unused`` and ``others`` as in :class:`BaseCheckpoint`."""

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
        return {
            "bundle": self.bundle,
            "checkpoint": str(self.checkpoint),
            "architecture": "gemma4",
            "layers": self.layers,
            "tensors": self.tensors,
            "tensors_found": self.tensors_found,
            "verdicts": self.counts,
            "not_loaded": list(self.unused),
            "not_compared": dict(self.others),
            "roles": [role.as_json() for role in self.roles],
        }


def compare_base(opened: Opened, directory: Path, progress: Progress = lambda done, total: None) -> BaseComparison:
    """Hold the base in ``opened`` against the checkpoint in ``directory``.

    Raises:
        CheckpointError: the directory is no complete checkpoint of a Gemma 4 base.
        PairError: the two are not of one geometry.
        RoleError, UnsupportedError: the bundle's graphs cannot be read.
    """
    checkpoint = read_base(directory)
    base = find_base(opened)
    check_geometry(base, checkpoint)
    tick = counter(progress, sum(map(_length, checkpoint.weights.values())))
    verdicts = []
    with ThreadPoolExecutor(cores()) as pool:
        for match in matches(base, checkpoint):
            verdicts.append(_verdict(match, pool))
            tick(match.length)
    verdicts += [
        RoleVerdict(name, name, (), NOT_FOUND, why="the bundle has no place for this tensor")
        for name in checkpoint.unknown
    ]
    own = [verdict for verdict in verdicts if verdict.tensor is not None and verdict.role in checkpoint.names]
    return BaseComparison(
        opened.source.name,
        directory,
        base.walk.layers,
        tuple(_explained(verdicts, base, checkpoint)),
        len(checkpoint.names) + len(checkpoint.unknown),
        sum(verdict.verdict != NOT_FOUND for verdict in own),
        checkpoint.unused,
        checkpoint.others,
    )


def check_geometry(base: BundledBase, checkpoint: BaseCheckpoint) -> None:
    """Whether the two are of one shape, and compute norms and logits alike.

    Raises:
        PairError: they are not; the message lists what differs.
    """
    expected = {
        "num_hidden_layers": base.walk.layers,
        "hidden_size": base.walk.width,
        "vocab_size": base.places["embed_tokens"][0].found.shape[0],
        "rms_norm_eps": base.walk.rms_norm_eps,
        "final_logit_softcapping": base.walk.soft_cap,
    }
    text = checkpoint.text
    wrong = differences([(key, value, text.get(key, value)) for key, value in expected.items()], _NUMBERS_ALIKE)
    if wrong:
        raise PairError(
            f"{escape(checkpoint.directory)} is another model than the base in {base.opened.source.name}: it has "
            f"{'; '.join(wrong)}. Give the base that the bundle is of, or one tuned from it."
        )


@dataclass(frozen=True)
class Match:
    """A role of a base: its weight in the checkpoint, and where the bundle holds it."""

    role: str
    name: str | None
    """Of its tensor in the checkpoint; None where the checkpoint has none."""
    weight: Weight | None
    """None where the checkpoint does not say what it is."""
    places: tuple[Place, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight that the bundle holds, whose columns may lie in several places; ``[1]`` of a layer scalar that
        no graph multiplies by.
        """
        if not self.places:
            return (1,)
        ends = [place.columns[1] for place in self.places if place.columns is not None]
        shape = self.places[0].found.shape
        return (shape[0], max(ends)) if ends else shape

    @property
    def length(self) -> int:
        """Bytes of the weight in the checkpoint; 0 where none lie there."""
        return _length(self.weight) if self.weight is not None else 0

    @property
    def problem(self) -> str:
        """Why the two cannot be compared; empty where they can."""
        if self.weight is None:
            return "the checkpoint has no such tensor"
        if not self.places and not self.role.endswith(_LAYER_SCALAR):
            return "no graph of the bundle reads it"
        if self.shape != self.weight.shape:
            return f"the checkpoint's is {list(self.weight.shape)}, the bundle's {list(self.shape)}"
        return ""


def _length(weight: Weight) -> int:
    stored = stored_of(weight)
    return stored.tensor.length if stored is not None else 0


def matches(base: BundledBase, checkpoint: BaseCheckpoint) -> Iterator[Match]:
    """Every role of either. A head that the checkpoint ties is its embedding table; a scalar that it lacks is 1."""
    for role in dict.fromkeys((*checkpoint.weights, *base.places)):
        tied = role == "lm_head" and checkpoint.tied
        name = checkpoint.names.get("embed_tokens" if tied else role)
        weight: Weight | None = checkpoint.weights.get("embed_tokens" if tied else role)
        if weight is None and role.endswith(_LAYER_SCALAR):
            weight = filled((1,))
        yield Match(role, name, weight, base.places.get(role, ()))


def _verdict(match: Match, pool: Executor) -> RoleVerdict:
    role, name, weight, places = match.role, match.name, match.weight, match.places
    if weight is None:
        return RoleVerdict(role, None, places[0].found.shape, NOT_FOUND, why=match.problem)
    types = tuple(sorted({p.found.tensor.type_name for p in places if p.found.tensor is not None}))
    made = RoleVerdict(role, name, weight.shape, DIFFERENT, types, tuple(dict.fromkeys(p.signature for p in places)))
    if match.problem:
        return replace(made, verdict=DIFFERENT if places else NOT_FOUND, why=match.problem)
    if not places:
        found = measure_distance(filled((1,)), weight)
        why = "" if found.verdict == EQUAL else "the graphs have no layer scalar, which is one of 1"
        return replace(made, verdict=found.verdict, error=found.error, why=why)
    found = reduce(Distance.worse, _distances([place for place, *_ in grouped(places)], weight, pool))
    return replace(made, **vars(found))


def _distances(places: Sequence[Place], weight: Weight, pool: Executor) -> Iterator[Distance]:
    """Of each place; tables that hold columns of the weight are held against its rows together."""
    tables: list[tuple[Constant, Weight]] = []
    for place in places:
        stored, part = place.stored, place.part_of(weight)
        constant = constant_of(stored)
        if place.columns is not None and part is not weight and constant is not None and constant.by_rows:
            tables.append((constant, part))
        else:
            yield measure_distance(stored, part, pool)
    if tables:
        yield from measure_columns(tables, pool)


def _explained(verdicts: Sequence[RoleVerdict], base: BundledBase, checkpoint: BaseCheckpoint) -> Iterator[RoleVerdict]:
    """``verdicts``, and of those that differ what the bundle holds instead, where that is known."""
    differing = [v.role for v in verdicts if v.verdict == DIFFERENT and v.role in checkpoint.weights]
    for verdict in verdicts:
        guess = None
        if verdict.role in differing and math.prod(verdict.shape) <= _LARGEST_GUESS and base.places.get(verdict.role):
            guess = _guess(verdict.role, base.places[verdict.role][0].stored, differing, checkpoint)
        yield replace(verdict, why=f"{verdict.why}; {guess}") if guess else verdict


def _guess(role: str, stored: Weight, differing: Sequence[str], checkpoint: BaseCheckpoint) -> str | None:
    """What ``stored`` is instead of the weight of ``role``: another role's, or the same written otherwise."""
    own = checkpoint.weights[role]
    if stored.shape != own.shape:
        return None
    alike = [r for r in differing if r != role and checkpoint.weights[r].shape == own.shape][:_MOST_GUESSES]
    for other, weight in ((other, checkpoint.weights[other]) for other in alike):
        if not differs_at_once(stored, weight) and measure_distance(stored, weight).verdict != DIFFERENT:
            return f"it holds the checkpoint's {checkpoint.names[other]}"
    if len(own.shape) == 1 and np.allclose(stored.array(), own.array() + 1, rtol=1e-2, atol=1e-6):
        return "it holds the checkpoint's plus 1"
    if len(own.shape) == 2 and own.shape[0] == own.shape[1]:
        values = own.array()
        if np.abs(stored.array() - values.T).max() <= 1e-2 * np.abs(values).max():
            return "it holds the checkpoint's transposed"
    return None
