"""What a format is, and what it makes of a checkpoint: how each weight is stored, and the files to write.

How each weight is stored is decided once, for writing, comparing and the record.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from mtp_extract.architecture import shapes_of
from mtp_extract.architecture.roles import Role
from mtp_extract.checkpoint.checkpoint import CODES, Checkpoint
from mtp_extract.checkpoint.dtypes import DTYPES, ROUNDED_TO
from mtp_extract.checkpoint.files import OutputFile, PlannedTensor, plan_array, plan_rows
from mtp_extract.checkpoint.rounding import SCALES, round_weight
from mtp_extract.checkpoint.weight import Rows, Weight, has_same_ends, same_weight
from mtp_extract.errors import CheckpointError, escape, few

FLOATS = "floats"
INDICES = "indices"
NOTHING = "nothing"
"""What else than codes may be stored of a weight; indices are those of an ordered head, which are no numbers."""


@dataclass(frozen=True)
class StoredAs:
    """How a format stores a weight.

    Attributes:
        how: :data:`CODES`, :data:`FLOATS`, :data:`INDICES`, or :data:`NOTHING` where the weight is left out.
        weight: with the codes and scales that are written, or with the numbers that are rounded.
        rounded_to: to what its numbers or the scales of its codes are ("BF16", "FP16", "F32"); empty if they are not.
        why: why it or its codes are not stored, and what stores them; empty where they are, or where it has none.
    """

    how: str
    weight: Weight = field(repr=False)
    rounded_to: str = ""
    why: str = ""

    @property
    def written(self) -> Weight:
        """What reading it back gives, to the bit."""
        return round_weight(self.weight, self.rounded_to) if self.how == FLOATS else self.weight

    def remarks(self) -> Iterator[tuple[str, str]]:
        """What was done to it, and why or how, where one expects it to be stored as it is."""
        if self.why:
            yield "Left out" if self.how == NOTHING else "In floats", f"because {self.why}"
        if self.rounded_to:
            what = "scales of codes" if self.how == CODES else "numbers"
            most = ROUNDED_TO.get(self.rounded_to, DTYPES["f32"]).roundoff
            yield "Rounded", f"{what} to {self.rounded_to}, by at most {most:.1e} of each"

    def tensor(self, name: str) -> PlannedTensor:
        """Its numbers, rounded, or indices, as a tensor called ``name``; infinities and NaN are refused."""
        if self.how == INDICES:
            return plan_array(name, self.weight.indices())
        dtype = ROUNDED_TO[self.rounded_to]

        def rounded(first: int, last: int) -> Rows:
            numbers = self.weight.floats(first, last).reshape(-1)
            if not np.isfinite(numbers).all():
                why = "expected finite numbers, found others: what it was read from is damaged."
                raise CheckpointError(f"{escape(name)}: {why}")
            return dtype.narrow(numbers, name)

        return plan_rows(name, self.weight, dtype.safetensors, rounded)


def store_floats(weight: Weight, dtype: str, why: str = "the format holds floats only") -> StoredAs:
    """In ``dtype``, "f32", "bf16" or "f16"; ``why`` says why codes, if there are any, are not stored."""
    return StoredAs(FLOATS, weight, DTYPES[dtype].rounding, why if weight.scheme is not None else "")


class Format(Protocol):
    """A directory layout that engines load. One object in :mod:`mtp_extract.formats` each."""

    name: str  # as users call it
    marker: str  # the file with the configuration; a pattern where its name says more than the format's
    weights_file: str  # the file with the weights, likewise
    further_files: tuple[str, ...]  # names of what else is written

    def store(self, role: Role, weight: Weight, dtype: str) -> StoredAs:
        """How a weight will be stored, before a byte is written."""

    def plan(self, checkpoint: Checkpoint, dtype: str) -> Plan:
        """``checkpoint`` as it will be written in ``dtype``, "f32", "bf16", "f16", or "codes" for a format of integers.

        Raises:
            UnsupportedError: something that the format cannot express.
            CheckpointError: the checkpoint lacks a weight that no engine does without.
        """

    def read(self, directory: Path) -> Checkpoint:
        """What the directory holds; weights are read when asked for.

        Raises:
            CheckpointError: its configuration is damaged, incomplete, another model's, or says what makes another
                function of the drafter; or a tensor is missing, unexpected or of another shape.
        """


@dataclass(frozen=True)
class Plan:
    """A checkpoint as a format will hold it.

    Attributes:
        layout: the format's name.
        dtype: what was asked for, as of :meth:`Format.plan`.
        stored: by role, every role that the architecture has.
        roles: of each tensor that holds a weight in floats, or indices: the role; several may share a tensor.
        files: the files to write, the weights first.
    """

    layout: str
    checkpoint: Checkpoint
    dtype: str
    stored: Mapping[str, StoredAs]
    roles: Mapping[str, str]
    files: tuple[OutputFile, ...]

    def has(self, how: str) -> bool:
        """Whether any weight is stored so."""
        return any(stored_as.how == how for stored_as in self.stored.values())

    @property
    def limits(self) -> tuple[str, ...]:
        """Where engines do not do what the checkpoint says, as the format notes it."""
        return self.files[0].notes

    @property
    def rounded(self) -> list[str]:
        """What the numbers that engines load are rounded to, and the scales of codes; whether codes lie beside them or
        not."""
        rounded = [stored_as for stored_as in self.stored.values() if stored_as.rounded_to]
        return sorted({stored_as.rounded_to + SCALES * (stored_as.how == CODES) for stored_as in rounded})

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of how the weights are stored, where codes were to be."""
        has_codes = self.has(CODES)
        roles_by_remark = defaultdict[tuple[str, str], list[str]](list)
        for role, stored_as in self.stored.items():
            if has_codes or stored_as.how == NOTHING:
                for remark in stored_as.remarks():
                    roles_by_remark[remark].append(role)
        notes = [f"{what}: {few(roles, 4)}, {why}." for (what, why), roles in roles_by_remark.items()]
        if self.dtype == CODES and not has_codes:
            notes.append("All is in floats: no matrix has integers that the format holds (--quantize makes them).")
        return tuple(notes)


def store_all(
    store: Callable[[Role, Weight, str], StoredAs], checkpoint: Checkpoint, dtype: str
) -> dict[str, StoredAs]:
    """How each weight of ``checkpoint`` will be stored, by role, in order; ``store`` is a format's. Raises as
    :meth:`Checkpoint.whole`."""
    tensors = checkpoint.whole().tensors
    return {role.name: store(role, tensors[role.name], dtype) for role in shapes_of(checkpoint.config)}


def require_same(plan: Plan, back: Checkpoint, *, every_float: bool = True) -> None:
    """Compare what was read ``back`` with what was to be written, bit for bit.

    Args:
        every_float: whether all floats are made again and compared, or those of the first and the last rows of each
            weight, which show that it is the role's.

    Raises:
        CheckpointError: names the first role of which something else was read.
    """
    same_floats = same_weight if every_float else has_same_ends
    for role, stored_as in plan.stored.items():
        if stored_as.how == NOTHING:
            continue
        read_back = back.tensors[role]
        if stored_as.how == INDICES:
            is_same = np.array_equal(stored_as.weight.indices(), read_back.indices())
        elif stored_as.how == CODES:
            is_same = read_back.scheme is not None and same_weight(stored_as.written, read_back)
        else:
            is_same = read_back.scheme is None and same_floats(stored_as.written, read_back)
        if not is_same:
            raise CheckpointError(f"{role}: what was written holds other {stored_as.how} than it was made of.")
