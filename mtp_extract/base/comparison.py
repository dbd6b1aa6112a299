"""Does a bundle hold the weights of this base? Role by role, from equal to how far apart.

Weights alone are compared, not what the graphs compute with them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_128_hexdigest

from mtp_extract.base.checkpoint import BaseCheckpoint, read_base
from mtp_extract.base.places import BundledBase, Place, find_base
from mtp_extract.bundle import Opened
from mtp_extract.checkpoint.distance import DIFFERENT, EQUAL, EQUAL_CODES, HALF_STEP, Distance, measure_distance
from mtp_extract.checkpoint.lazy import ConstantTensor, FilledTensor, LazyTensor, read_floats
from mtp_extract.checkpoint.stored import StoredColumns, StoredWeight
from mtp_extract.errors import PairError, escape, few

NOT_FOUND = "not found"
_VERDICTS = (EQUAL, EQUAL_CODES, HALF_STEP, DIFFERENT, NOT_FOUND)

Progress = Callable[[int, int], None]

# Of a role that differs: how much is read, and how many others are tried, to say what it holds instead.
_LARGEST_GUESS = 1 << 24
_MOST_GUESSES = 8


@dataclass(frozen=True)
class RoleVerdict:
    """What is to be said of one role.

    Attributes:
        tensor: its name in the checkpoint; None where the checkpoint has none.
        verdict: :data:`EQUAL` … :data:`NOT_FOUND`.
        types: how the bundle stores it; empty where nothing does.
        signatures: where the graphs read it.
        steps: largest distance in steps of the stored codes; None for floats.
        error: root mean square of the difference, as a share of the checkpoint's.
        codes_apart: codes that quantizing the checkpoint gives otherwise; None for floats.
        why: of a verdict that needs one.
    """

    role: str
    tensor: str | None
    shape: tuple[int, ...]
    verdict: str
    types: tuple[str, ...] = ()
    signatures: tuple[str, ...] = ()
    steps: float | None = None
    error: float | None = None
    codes_apart: int | None = None
    why: str = ""


@dataclass(frozen=True)
class BaseComparison:
    """A bundle's base beside a checkpoint.

    Attributes:
        roles: one verdict a role.
        tensors: how many tensors of the checkpoint were looked for.
        tensors_found: how many of them the bundle holds, whether equal or not.
        layers: of the base.
        unused, others: as in :class:`BaseCheckpoint`.
    """

    bundle: str
    checkpoint: Path
    layers: int
    roles: tuple[RoleVerdict, ...]
    tensors: int
    tensors_found: int
    unused: tuple[str, ...]
    others: dict[str, int]

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
            "not_compared": self.others,
            "roles": [
                {
                    "role": r.role,
                    "tensor": r.tensor,
                    "shape": list(r.shape),
                    "verdict": r.verdict,
                    "stored": list(r.types),
                    "signatures": list(r.signatures),
                    "steps": _finite(r.steps),
                    "error": _finite(r.error),
                    "codes_apart": r.codes_apart,
                    "why": r.why or None,
                }
                for r in self.roles
            ],
        }


def _finite(number: float | None) -> float | None:
    """``number``, as far as JSON can say it."""
    return number if number is not None and math.isfinite(number) else None


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
    total = sum(weight.stored.length for weight in checkpoint.weights.values())
    done = 0
    verdicts = []
    for role, tensor, weight in wanted(base, checkpoint):
        verdicts.append(_verdict(role, tensor, weight, base.places.get(role, ())))
        done += weight.stored.length if isinstance(weight, StoredWeight) else 0
        progress(min(done, total), total)
    verdicts += [
        RoleVerdict(name, name, (), NOT_FOUND, why="the bundle has no place for this tensor")
        for name in checkpoint.unknown
    ]
    opened.source.confirm()
    own = [verdict for verdict in verdicts if verdict.tensor is not None and verdict.role in checkpoint.names]
    return BaseComparison(
        opened.source.name,
        directory,
        base.layers,
        tuple(_explained(verdicts, base, checkpoint)),
        len(checkpoint.names) + len(checkpoint.unknown),
        sum(verdict.verdict != NOT_FOUND for verdict in own),
        checkpoint.unused,
        dict(checkpoint.others),
    )


def check_geometry(base: BundledBase, checkpoint: BaseCheckpoint) -> None:
    """Whether the two are of one shape, and compute norms and logits alike.

    Raises:
        PairError: they are not; the message lists what differs.
    """
    text = checkpoint.text
    pairs = (
        ("num_hidden_layers", base.layers),
        ("hidden_size", base.width),
        ("vocab_size", base.vocab_size),
        ("rms_norm_eps", base.rms_norm_eps),
        ("final_logit_softcapping", base.soft_cap),
    )
    wrong = [f"{key} {escape(text[key])} instead of {mine}" for key, mine in pairs if not _alike(text, key, mine)]
    if wrong:
        raise PairError(
            f"{escape(checkpoint.directory)} is another model than the base in {base.opened.source.name}: it has "
            f"{'; '.join(wrong)}."
        )


def _alike(text: Any, key: str, mine: float | None) -> bool:
    if key not in text:
        return True
    theirs = text[key]
    if not isinstance(theirs, int | float) or mine is None:
        return bool(theirs == mine)
    return math.isclose(theirs, mine, rel_tol=1e-5)


def wanted(base: BundledBase, checkpoint: BaseCheckpoint) -> Iterator[tuple[str, str | None, LazyTensor | None]]:
    """Every role of either, the name of its tensor, and what it is to hold; None where the checkpoint says nothing.

    A head that the checkpoint ties is its embedding table; a scalar that it lacks is 1.
    """
    roles = [*checkpoint.weights, *(role for role in base.places if role not in checkpoint.weights)]
    for role in roles:
        weight: LazyTensor | None = checkpoint.weights.get(role)
        name = checkpoint.names.get(role)
        if weight is None and role == "lm_head":
            weight, name = checkpoint.weights["embed_tokens"], checkpoint.names["embed_tokens"]
        elif weight is None and role.endswith(".layer_scalar"):
            weight = FilledTensor((1,))
        yield role, name, weight


def whole_shape(places: Sequence[Place]) -> tuple[int, ...]:
    """The shape of the weight whose parts ``places`` hold, each perhaps in several signatures."""
    ends = [place.columns[1] for place in places if place.columns is not None]
    return (places[0].found.shape[0], max(ends)) if ends else places[0].found.shape


def stored_as(place: Place) -> LazyTensor:
    """What ``place`` holds, as a weight."""
    found = place.found
    if found.tensor is None:
        return FilledTensor(found.shape)
    return ConstantTensor.of(place.model, found)


def of_place(weight: LazyTensor, place: Place) -> LazyTensor:
    """The part of ``weight`` that ``place`` holds."""
    if place.columns is None or not isinstance(weight, StoredWeight):
        return weight
    return StoredColumns(weight, *place.columns)


def _verdict(role: str, name: str | None, weight: LazyTensor | None, places: Sequence[Place]) -> RoleVerdict:
    if weight is None:
        return RoleVerdict(role, None, places[0].found.shape, NOT_FOUND, why="the checkpoint has no such tensor")
    shape = weight.shape
    if not places:
        if not role.endswith(".layer_scalar"):
            return RoleVerdict(role, name, shape, NOT_FOUND, why="no graph of the bundle reads it")
        compared = measure_distance(FilledTensor((1,)), weight)
        why = "" if compared.verdict == EQUAL else "the graphs have no layer scalar, which is one of 1"
        return RoleVerdict(role, name, shape, compared.verdict, error=compared.error, why=why)
    types = tuple(sorted({p.found.tensor.type_name for p in places if p.found.tensor is not None}))
    signatures = tuple(dict.fromkeys(p.signature for p in places))
    whole = whole_shape(places)
    if whole != shape:
        why = f"the checkpoint's is {list(shape)}, the bundle's {list(whole)}"
        return RoleVerdict(role, name, shape, DIFFERENT, types, signatures, why=why)
    worst: Distance | None = None
    for place, *_ in grouped(places):
        compared = measure_distance(stored_as(place), of_place(weight, place))
        worst = compared if worst is None else worst.worse(compared)
    assert worst is not None
    return RoleVerdict(
        role, name, shape, worst.verdict, types, signatures, worst.steps, worst.error, worst.codes_apart, worst.why
    )


def grouped(places: Sequence[Place]) -> list[tuple[Place, ...]]:
    """``places``, those together that hold the same bytes, scales and factors: signatures share most of them."""
    found: dict[object, list[Place]] = {}
    for place in places:
        stored = stored_as(place)
        key: object = None
        if isinstance(stored, ConstantTensor):
            where = stored.source.location.file_offset
            # Summed, since a vocabulary has a scale a row and a table a layer.
            sums = (xxh3_128_hexdigest(np.ascontiguousarray(a).data) for a in (stored.scale, stored.zero_point))
            key = where, *sums, stored.factor, stored.transposed, stored.offset
        found.setdefault((key, place.columns), []).append(place)
    return [tuple(group) for group in found.values()]


def _explained(verdicts: Sequence[RoleVerdict], base: BundledBase, checkpoint: BaseCheckpoint) -> Iterator[RoleVerdict]:
    """``verdicts``, and of those that differ what the bundle holds instead, where that is known."""
    apart = [v.role for v in verdicts if v.verdict == DIFFERENT and v.role in checkpoint.weights]
    for verdict in verdicts:
        guess = None
        if verdict.role in apart and math.prod(verdict.shape) <= _LARGEST_GUESS and base.places.get(verdict.role):
            guess = _guess(verdict.role, stored_as(base.places[verdict.role][0]), apart, checkpoint)
        yield replace(verdict, why=f"{verdict.why}; {guess}") if guess else verdict


def _guess(role: str, stored: LazyTensor, apart: Sequence[str], checkpoint: BaseCheckpoint) -> str | None:
    """What ``stored`` is instead of the weight of ``role``: another role's, or the same written otherwise."""
    own = checkpoint.weights[role]
    if stored.shape != own.shape:
        return None
    alike = [r for r in apart if r != role and checkpoint.weights[r].shape == own.shape][:_MOST_GUESSES]
    for other in alike:
        if measure_distance(stored, checkpoint.weights[other]).verdict != DIFFERENT:
            return f"it holds the checkpoint's {checkpoint.names[other]}"
    values = read_floats(own)
    if values.ndim == 1 and np.allclose(read_floats(stored), values + 1, rtol=1e-2, atol=1e-6):
        return "it holds the checkpoint's plus 1"
    square = values.ndim == 2 and values.shape[0] == values.shape[1]
    if square and np.abs(read_floats(stored) - values.T).max() <= 1e-2 * np.abs(values).max():
        return "it holds the checkpoint's transposed"
    return None
