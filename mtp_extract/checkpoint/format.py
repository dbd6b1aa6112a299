"""The protocol of a format, and its plan for a checkpoint: how each weight is stored, and the files to write.

How a weight is stored is decided once, for writing, comparing and the record.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from mtp_extract.architecture import list_shapes
from mtp_extract.architecture.roles import Role
from mtp_extract.checkpoint.checkpoint import CODES, Checkpoint
from mtp_extract.checkpoint.dtypes import DTYPES, ROUNDED_TO
from mtp_extract.checkpoint.files import OutputFile, PlannedTensor, plan_array, plan_rows
from mtp_extract.checkpoint.rounding import SCALES, round_weight
from mtp_extract.checkpoint.weight import Rows, Weight, has_same_ends, is_same_weight
from mtp_extract.errors import CheckpointError, escape, list_few

FLOATS = "floats"
INDICES = "indices"
NOTHING = "nothing"
"""Ways to store a weight, beside :data:`CODES`: INDICES are the integers of an ordered head, NOTHING leaves it out."""


@dataclass(frozen=True)
class StoredAs:
    """How a format stores a weight.

    Attributes:
        how: :data:`CODES`, :data:`FLOATS`, :data:`INDICES` or :data:`NOTHING`.
        weight: has the codes and scales that are written, or the floats before rounding.
        rounded_to: the type to which its floats or the scales of its codes are rounded ("BF16", "FP16", "F32"), or "".
        why: the reason for which the weight or its codes are not stored, and what stores them; else empty.
    """

    how: str
    weight: Weight = field(repr=False)
    rounded_to: str = ""
    why: str = ""

    @property
    def written(self) -> Weight:
        """The weight as it reads back, to the bit."""
        return round_weight(self.weight, self.rounded_to) if self.how == FLOATS else self.weight

    def list_changes(self) -> Iterator[tuple[str, str]]:
        """Yield each way in which it is not stored as it is, with the reason or the size of the change."""
        if self.why:
            yield "Left out" if self.how == NOTHING else "In floats", f"because {self.why}"
        if self.rounded_to:
            numbers = "scales of codes" if self.how == CODES else "numbers"
            roundoff = ROUNDED_TO.get(self.rounded_to, DTYPES["f32"]).roundoff
            yield "Rounded", f"{numbers} to {self.rounded_to}, by at most {roundoff:.1e} of each"

    def tensor(self, name: str) -> PlannedTensor:
        """Plan its rounded floats, or indices, as a tensor called ``name``; an infinity or NaN is an error."""
        if self.how == INDICES:
            return plan_array(name, self.weight.indices())
        dtype = ROUNDED_TO[self.rounded_to]

        def round_rows(first: int, last: int) -> Rows:
            numbers = self.weight.floats(first, last).reshape(-1)
            if not np.isfinite(numbers).all():
                why = "expected finite numbers, found others: what it was read from is damaged."
                raise CheckpointError(f"{escape(name)}: {why}")
            return dtype.narrow(numbers, name)

        return plan_rows(name, self.weight, dtype.safetensors, round_rows)


def store_floats(weight: Weight, dtype: str, why: str = "the format holds floats only") -> StoredAs:
    """Store floats in ``dtype``, "f32", "bf16" or "f16"; ``why`` is the reason for not storing the codes, if any."""
    return StoredAs(FLOATS, weight, DTYPES[dtype].rounding, why if weight.scheme is not None else "")


class Format(Protocol):
    """A directory layout that engines load; every format is an object in :mod:`mtp_extract.formats`."""

    name: str  # as users call it
    marker: str  # name of the file with the config, or a pattern
    weights_file: str  # name of the file with the weights, or a pattern
    further_files: tuple[str, ...]  # names of the other files

    def store(self, role: Role, weight: Weight, dtype: str) -> StoredAs:
        """Decide how a weight will be stored."""

    def plan(self, checkpoint: Checkpoint, dtype: str) -> Plan:
        """Plan the files of ``checkpoint`` in ``dtype``: "f32", "bf16", "f16", or "codes" for a format of integers.

        Raises:
            UnsupportedError: the format cannot express the checkpoint.
            CheckpointError: a required weight is missing.
        """

    def read(self, directory: Path) -> Checkpoint:
        """Read the checkpoint in ``directory``; the weights themselves are read when they are used.

        Raises:
            CheckpointError: the config is damaged, incomplete, another model's, or changes the drafter's function; or
                a tensor is missing, unexpected or of the wrong shape.
        """


@dataclass(frozen=True)
class Plan:
    """A checkpoint as a format will hold it.

    Attributes:
        layout: the format's name.
        dtype: as passed to :meth:`Format.plan`.
        stored: role → how it is stored, for every role of the architecture.
        roles: name of a tensor of floats or indices → one of the roles that it holds.
        files: the files to write, the weights first.
    """

    layout: str
    checkpoint: Checkpoint
    dtype: str
    stored: Mapping[str, StoredAs]
    roles: Mapping[str, str]
    files: tuple[OutputFile, ...]

    def has(self, how: str) -> bool:
        """Whether any weight is stored in the way ``how``."""
        return any(stored_as.how == how for stored_as in self.stored.values())

    @property
    def limits(self) -> tuple[str, ...]:
        """Notes of the format on engines that do not do what the checkpoint says."""
        return self.files[0].notes

    @property
    def rounded(self) -> list[str]:
        """The types to which floats, or scales of codes, are rounded, even if codes lie beside the floats."""
        rounded = [stored_as for stored_as in self.stored.values() if stored_as.rounded_to]
        return sorted({stored_as.rounded_to + SCALES * (stored_as.how == CODES) for stored_as in rounded})

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user on weights that are left out, or not stored as the codes that were asked for."""
        has_codes = self.has(CODES)
        roles_by_change = defaultdict[tuple[str, str], list[str]](list)
        for role, stored_as in self.stored.items():
            if has_codes or stored_as.how == NOTHING:
                for change in stored_as.list_changes():
                    roles_by_change[change].append(role)
        notes = [f"{change}: {list_few(roles, 4)}, {why}." for (change, why), roles in roles_by_change.items()]
        if self.dtype == CODES and not has_codes:
            notes.append("All is in floats: no matrix has integers that the format holds (--quantize makes them).")
        return tuple(notes)


def store_all(
    store: Callable[[Role, Weight, str], StoredAs], checkpoint: Checkpoint, dtype: str
) -> dict[str, StoredAs]:
    """Decide by ``store`` how each role is stored, in order; CheckpointError if a required weight is missing."""
    tensors = checkpoint.complete().tensors
    return {role.name: store(role, tensors[role.name], dtype) for role in list_shapes(checkpoint.config)}


def require_same(plan: Plan, back: Checkpoint, *, every_float: bool = True) -> None:
    """Require that the checkpoint that was read ``back`` has the planned weights, bit for bit.

    Args:
        every_float: compare all floats; if False, only those of the first and the last rows of each weight, which show
            that roles are not mixed up.

    Raises:
        CheckpointError: a weight differs; the text names its role.
    """
    same_floats = is_same_weight if every_float else has_same_ends
    for role, stored_as in plan.stored.items():
        if stored_as.how == NOTHING:
            continue
        read_back = back.tensors[role]
        if stored_as.how == INDICES:
            is_same = np.array_equal(stored_as.weight.indices(), read_back.indices())
        elif stored_as.how == CODES:
            is_same = read_back.scheme is not None and is_same_weight(stored_as.written, read_back)
        else:
            is_same = read_back.scheme is None and same_floats(stored_as.written, read_back)
        if not is_same:
            raise CheckpointError(f"{role}: the {stored_as.how} read back differ from those that were to be written.")
