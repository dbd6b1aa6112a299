"""Weights with a config, wherever they came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from mtp_extract.architecture import architecture_of, shapes_of
from mtp_extract.architecture.activation import Activation
from mtp_extract.architecture.architecture import Architecture
from mtp_extract.architecture.config import Config, DrafterConfig
from mtp_extract.architecture.roles import SCALAR
from mtp_extract.checkpoint.weight import Weight, constant_weight
from mtp_extract.errors import CheckpointError, UnsupportedError, few

CODES = "codes"
"""The output type that keeps the stored integers; what has none is written in F32."""

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
        """The shape of an MTP drafter; UnsupportedError where it is another drafter's."""
        if not isinstance(self.config, DrafterConfig):
            raise UnsupportedError(
                f"Expected an MTP drafter, found {self.architecture.with_article}, which no LiteRT bundle holds. "
                "Give a drafter that came from one.",
                remedies=("source",),
            )
        return self.config

    def whole(self) -> Checkpoint:
        """The same with every role, in order: a layer scalar that nothing states is 1, as every engine wants it there.

        Raises:
            CheckpointError: it lacks a weight that no engine does without.
        """
        tensors: dict[str, Weight] = {}
        for role, shape in shapes_of(self.config).items():
            if role.kind != SCALAR and role.name not in self.tensors:
                raise CheckpointError(f"{role.name}: expected a weight of shape {list(shape)}, found none.")
            tensors[role.name] = self.tensors.get(role.name) or constant_weight(shape)
        return replace(self, tensors=MappingProxyType(tensors))
