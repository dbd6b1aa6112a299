"""What a format makes of a checkpoint: how each weight is kept, decided once for writing, checking and the record."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import numpy as np

from mtp_extract.architecture.roles import Role, shapes_of
from mtp_extract.checkpoint.checkpoint import CODES, Checkpoint
from mtp_extract.checkpoint.codes import plan_codes
from mtp_extract.checkpoint.dtypes import DTYPES, ROUNDED_TO
from mtp_extract.checkpoint.planned import OutputFile, PlannedTensor, plan_array, plan_rows
from mtp_extract.checkpoint.rounding import narrowed
from mtp_extract.checkpoint.weight import Rows, Weight, same_weight
from mtp_extract.errors import CheckpointError, escape, few

FLOATS, INDICES, NOTHING = "floats", "indices", "nothing"
"""What else than codes may be kept of a weight; indices are those of an ordered head, which are no numbers."""

_MOST_NAMED = 4


@dataclass(frozen=True)
class Kept:
    """How a format keeps a weight.

    Attributes:
        how: :data:`~mtp_extract.checkpoint.checkpoint.CODES`, :data:`FLOATS`, :data:`INDICES`, or :data:`NOTHING` where
            the weight is left out.
        weight: with the codes that are written, as :func:`~mtp_extract.checkpoint.weight.row_codes` makes them, and
            their scales; or with the numbers that are rounded.
        rounded_to: what its numbers, or the scales of its codes, are rounded to ("BF16", "FP16", "F32"); empty if
            nothing is.
        why: why it or its codes are not kept, and what keeps them; empty where they are, or where it has none.
    """

    how: str
    weight: Weight = field(repr=False)
    rounded_to: str = ""
    why: str = ""

    @property
    def written(self) -> Weight:
        """What reading it back gives, to the bit."""
        return narrowed(self.weight, self.rounded_to) if self.how == FLOATS else self.weight

    def tensor(self, name: str, role: Role) -> PlannedTensor:
        """Its numbers, rounded, or indices, as a tensor called ``name``; infinities and NaN are refused."""
        if self.how == INDICES:
            return plan_array(name, self.weight.indices(), role.name)
        dtype = ROUNDED_TO[self.rounded_to]

        def rounded(first: int, last: int) -> Rows:
            numbers = self.weight.floats(first, last).reshape(-1)
            if not np.isfinite(numbers).all():
                raise CheckpointError(
                    f"{escape(name)}: expected finite numbers, found others: what it was read from is damaged."
                )
            return dtype.narrow(numbers, name)

        return plan_rows(name, role.name, self.weight, dtype.safetensors, rounded)


def keep_floats(weight: Weight, dtype: str, why: str = "the format holds floats only") -> Kept:
    """In ``dtype``, "f32", "bf16" or "f16"; ``why`` says why codes, if there are any, are not kept."""
    return Kept(FLOATS, weight, DTYPES[dtype].rounding, why if weight.scheme is not None else "")


class Format(Protocol):
    """A directory layout that engines load. One object in :mod:`mtp_extract.formats` each.

    Attributes:
        name: as users call it.
        marker: the file with the configuration.
        weights_file: the file with the weights; of both a pattern where the name says more than the format's.
        further_files: names of what else is written.
    """

    name: str
    marker: str
    weights_file: str
    further_files: tuple[str, ...]

    def keep(self, role: Role, weight: Weight, dtype: str) -> Kept:
        """How a weight will be kept, before a byte is written."""

    def files(self, arranged: Arranged) -> Sequence[OutputFile]:
        """The files to write, the weights first, each weight as :meth:`keep` says.

        Raises:
            UnsupportedError: something that the format cannot express.
        """

    def read(self, directory: Path) -> Checkpoint:
        """What the directory holds; weights are read when asked for.

        Raises:
            CheckpointError: its configuration is damaged, incomplete, another model's, or says something else than
                would be written of what was read from it; or a tensor is missing, unexpected or of another shape.
        """


@dataclass(frozen=True)
class Arranged:
    """A checkpoint as a format holds it.

    Attributes:
        dtype: what was asked for: "f32", "bf16", "f16", or "codes" where the format keeps integers.
        kept: by role.
        with_codes: whether stored integers are written beside what is kept in floats.
    """

    format: Format
    checkpoint: Checkpoint
    dtype: str
    kept: Mapping[str, Kept]
    with_codes: bool = False

    @cached_property
    def files(self) -> tuple[OutputFile, ...]:
        """The files to write, the weights first; raises as :meth:`Format.files`."""
        weights, *others = self.format.files(self)
        floats = {role: kept.weight for role, kept in self.kept.items() if kept.how == FLOATS}
        return (weights, *(plan_codes(weights, floats) if self.with_codes else ()), *others)

    def notes(self) -> tuple[str, ...]:
        """What a user should know of how the weights are kept, where codes were to be."""
        coded = any(kept.how == CODES for kept in self.kept.values())
        whys = defaultdict[tuple[str, str], list[str]](list)
        for role, kept in self.kept.items():
            if kept.how == NOTHING or (kept.why and coded):
                whys["Left out" if kept.how == NOTHING else "In floats", f"because {kept.why}"].append(role)
        for role, kept in self.kept.items():
            if kept.rounded_to and coded:
                what = "scales of codes" if kept.how == CODES else "numbers"
                most = ROUNDED_TO.get(kept.rounded_to, DTYPES["f32"]).roundoff
                whys["Rounded", f"{what} to {kept.rounded_to}, by at most {most:.1e} of each"].append(role)
        notes = [f"{how}: {few(roles, _MOST_NAMED)}, {why}." for (how, why), roles in whys.items()]
        if self.dtype == CODES and not coded:
            notes.append("All is in floats: no matrix has integers that the format holds (--quantize makes them).")
        return tuple(notes)

    def require_same(self, back: Checkpoint, *, rounded: bool = True) -> None:
        """Compare what was read ``back`` with what was to be written, bit for bit.

        Args:
            rounded: whether floats that were rounded are compared, too.

        Raises:
            CheckpointError: names the first role of which something else was read.
        """
        for role, kept in self.kept.items():
            if kept.how == NOTHING or (kept.how == FLOATS and kept.rounded_to and not rounded):
                continue
            found = back.tensors[role]
            if kept.how == INDICES:
                same = np.array_equal(kept.weight.indices(), found.indices())
            else:
                same = (found.scheme is not None) == (kept.how == CODES) and same_weight(kept.written, found)
            if not same:
                raise CheckpointError(f"{role}: what was written holds other {kept.how} than it was made of.")


def arrange(format_: Format, checkpoint: Checkpoint, dtype: str, *, with_codes: bool = False) -> Arranged:
    """``checkpoint`` as ``format_`` holds it in ``dtype``.

    Raises:
        CheckpointError: it lacks a weight that no engine does without.
    """
    tensors = checkpoint.whole().tensors
    kept = {role.name: format_.keep(role, tensors[role.name], dtype) for role in shapes_of(checkpoint.config)}
    return Arranged(format_, checkpoint, dtype, MappingProxyType(kept), with_codes)
