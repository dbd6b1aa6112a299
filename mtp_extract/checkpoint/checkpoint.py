"""Weights with a config, wherever they came from, and what a format makes of them.

How each weight is kept is decided once, for writing, checking and the record.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import numpy as np

from mtp_extract.architecture import architecture_of, shapes_of
from mtp_extract.architecture.activation import Activation
from mtp_extract.architecture.architecture import Architecture
from mtp_extract.architecture.config import Config, DrafterConfig
from mtp_extract.architecture.roles import SCALAR, Role
from mtp_extract.checkpoint.codes import plan_codes
from mtp_extract.checkpoint.dtypes import DTYPES, ROUNDED_TO
from mtp_extract.checkpoint.files import OutputFile, PlannedTensor, plan_array, plan_rows
from mtp_extract.checkpoint.rounding import SCALES, round_weight
from mtp_extract.checkpoint.weight import Rows, Weight, constant_weight, same_weight
from mtp_extract.errors import CheckpointError, UnsupportedError, escape, few

CODES = "codes"
"""The output type that keeps the stored integers; what has none is written in F32."""

FLOATS = "floats"
INDICES = "indices"
NOTHING = "nothing"
"""What else than codes may be kept of a weight; indices are those of an ordered head, which are no numbers."""

Activations = tuple[Activation | None, Activation | None]
"""The static quantization of what goes into a matrix and of what comes out; None where it is float."""


@dataclass(frozen=True)
class Finding:
    """Another function that an engine takes a drafter for."""

    engine: str
    what: str  # why, and what to do
    is_error: bool  # whether its layout is made for that engine

    def __str__(self) -> str:
        return f"{self.engine} loads it wrongly: {self.what}"


@dataclass(frozen=True)
class Checkpoint:
    """What a bundle, a directory or a training holds; what formats write and read.

    Attributes:
        config: the drafter's shape, which says its architecture.
        tensors: role → weight. Optional roles may be absent.
        dtype: what its floats are stored in, "f32", "bf16" or "f16"; a bundle's are F32.
        provenance: where it came from, as text by name, for formats with room for it inside the weights file.
        activations: by role of a matrix, where a graph has static quantization there.
        unread: what lies or stands beside it, and what is missing there, that changes none of it; each as a clause.
        findings: of a directory, what engines take for another function than it says.
    """

    config: Config
    tensors: Mapping[str, Weight]
    dtype: str
    provenance: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    activations: Mapping[str, Activations] = field(default_factory=lambda: MappingProxyType({}))
    unread: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()

    @property
    def architecture(self) -> Architecture:
        """Which kind of drafter it is."""
        return architecture_of(self.config)

    @property
    def notes(self) -> tuple[str, ...]:
        """For the user: what was passed over."""
        return (f"Passed over: {few(self.unread, separator='; ')}.",) if self.unread else ()

    @property
    def mtp(self) -> DrafterConfig:
        """The shape of an MTP drafter.

        Raises:
            UnsupportedError: it is another drafter's.
        """
        if not isinstance(self.config, DrafterConfig):
            raise UnsupportedError(
                f"Expected an MTP drafter, found {self.architecture.with_article}, which no LiteRT bundle holds. "
                "Give a drafter that came from one.",
                remedies=("source",),
            )
        return self.config

    def whole(self) -> Checkpoint:
        """The same with every role there is: a layer scalar that nothing states is 1, as every engine wants it there.

        Raises:
            CheckpointError: it lacks a weight that no engine does without.
        """
        tensors = dict(self.tensors)
        for role, shape in shapes_of(self.config).items():
            if role.kind == SCALAR:
                tensors.setdefault(role.name, constant_weight(shape))
            elif role.name not in tensors:
                raise CheckpointError(f"{role.name}: expected a weight of shape {list(shape)}, found none.")
        return replace(self, tensors=MappingProxyType(tensors))


@dataclass(frozen=True)
class Kept:
    """How a format keeps a weight.

    Attributes:
        how: "codes", :data:`AS_FLOATS`, :data:`INDICES`, or :data:`NOTHING` where the weight is left out.
        weight: with the codes and scales that are written, or with the numbers that are rounded.
        rounded_to: to what its numbers or the scales of its codes are ("BF16", "FP16", "F32"); empty if they are not.
        why: why it or its codes are not kept, and what keeps them; empty where they are, or where it has none.
    """

    how: str
    weight: Weight = field(repr=False)
    rounded_to: str = ""
    why: str = ""

    @property
    def written(self) -> Weight:
        """What reading it back gives, to the bit."""
        return round_weight(self.weight, self.rounded_to) if self.how == FLOATS else self.weight

    def tensor(self, name: str, role: Role) -> PlannedTensor:
        """Its numbers, rounded, or indices, as a tensor called ``name``; infinities and NaN are refused."""
        if self.how == INDICES:
            return plan_array(name, self.weight.indices(), role.name)
        dtype = ROUNDED_TO[self.rounded_to]

        def rounded(first: int, last: int) -> Rows:
            numbers = self.weight.floats(first, last).reshape(-1)
            if not np.isfinite(numbers).all():
                why = "expected finite numbers, found others: what it was read from is damaged."
                raise CheckpointError(f"{escape(name)}: {why}")
            return dtype.narrow(numbers, name)

        return plan_rows(name, role.name, self.weight, dtype.safetensors, rounded)


def keep_floats(weight: Weight, dtype: str, why: str = "the format holds floats only") -> Kept:
    """In ``dtype``, "f32", "bf16" or "f16"; ``why`` says why codes, if there are any, are not kept."""
    return Kept(FLOATS, weight, DTYPES[dtype].rounding, why if weight.scheme is not None else "")


class Format(Protocol):
    """A directory layout that engines load. One object in :mod:`mtp_extract.formats` each."""

    name: str  # as users call it
    marker: str  # the file with the configuration; a pattern where its name says more than the format's
    weights_file: str  # the file with the weights, likewise
    further_files: tuple[str, ...]  # names of what else is written

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
            CheckpointError: its configuration is damaged, incomplete, another model's, or says what makes another
                function of the drafter; or a tensor is missing, unexpected or of another shape.
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
        floats = {role: stored_as.weight for role, stored_as in self.kept.items() if stored_as.how == FLOATS}
        return (weights, *(plan_codes(weights, floats) if self.with_codes else ()), *others)

    @property
    def rounded(self) -> list[str]:
        """What the numbers that engines load are rounded to, and the scales of codes; whether codes lie beside them or
        not."""
        return sorted(
            {
                stored_as.rounded_to + SCALES * (stored_as.how == CODES)
                for stored_as in self.kept.values()
                if stored_as.rounded_to
            }
        )

    def notes(self) -> tuple[str, ...]:
        """What a user should know of how the weights are kept, where codes were to be."""
        coded = any(stored_as.how == CODES for stored_as in self.kept.values())
        whys = defaultdict[tuple[str, str], list[str]](list)
        for role, stored_as in self.kept.items():
            if stored_as.how == NOTHING or (stored_as.why and coded):
                whys["Left out" if stored_as.how == NOTHING else "In floats", f"because {stored_as.why}"].append(role)
            if stored_as.rounded_to and coded:
                what = "scales of codes" if stored_as.how == CODES else "numbers"
                most = ROUNDED_TO.get(stored_as.rounded_to, DTYPES["f32"]).roundoff
                whys["Rounded", f"{what} to {stored_as.rounded_to}, by at most {most:.1e} of each"].append(role)
        notes = [f"{how}: {few(roles, 4)}, {why}." for (how, why), roles in whys.items()]
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
        for role, stored_as in self.kept.items():
            if stored_as.how == NOTHING or (stored_as.how == FLOATS and stored_as.rounded_to and not rounded):
                continue
            read_back = back.tensors[role]
            if stored_as.how == INDICES:
                same = np.array_equal(stored_as.weight.indices(), read_back.indices())
            else:
                same = (read_back.scheme is not None) == (stored_as.how == CODES) and same_weight(
                    stored_as.written, read_back
                )
            if not same:
                raise CheckpointError(f"{role}: what was written holds other {stored_as.how} than it was made of.")


def arrange(format_: Format, checkpoint: Checkpoint, dtype: str, *, with_codes: bool = False) -> Arranged:
    """``checkpoint`` as ``format_`` holds it in ``dtype``.

    Raises:
        CheckpointError: it lacks a weight that no engine does without.
    """
    tensors = checkpoint.whole().tensors
    by_role = {role.name: format_.keep(role, tensors[role.name], dtype) for role in shapes_of(checkpoint.config)}
    return Arranged(format_, checkpoint, dtype, MappingProxyType(by_role), with_codes)
