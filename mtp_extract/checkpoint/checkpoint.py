"""A checkpoint: the config and the weights of a drafter, whatever file they are in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from mtp_extract.architecture import find_architecture, list_shapes
from mtp_extract.architecture.activation import Activation
from mtp_extract.architecture.architecture import Architecture
from mtp_extract.architecture.config import Config, DrafterConfig
from mtp_extract.architecture.roles import SCALAR
from mtp_extract.checkpoint.weight import Weight, build_constant_weight
from mtp_extract.errors import CheckpointError, UnsupportedError, list_few

CODES = "codes"
"""The output type that keeps stored integers; weights without integers are written in F32."""

Activations = tuple[Activation | None, Activation | None]
"""Static quantization of the input and the output of a matrix; None for a float activation."""


@dataclass(frozen=True)
class Finding:
    """An engine that silently computes something else than the checkpoint says."""

    engine: str
    what: str  # why, and what to do
    is_error: bool  # whether the layout is made for that engine

    def __str__(self) -> str:
        return f"{self.engine} loads it wrongly: {self.what}"


@dataclass(frozen=True)
class Checkpoint:
    """A drafter of a bundle, a directory or a training; formats read and write it.

    Attributes:
        config: the drafter's shape; its type determines the architecture.
        tensors: role → weight. Optional roles may be absent.
        dtype: the stored type of floats, "f32", "bf16" or "f16"; "f32" for a bundle.
        provenance: where it came from, as text by name, for formats that keep it inside the weights file.
        activations: role of a matrix → static quantization of its activations, where the graph has it.
        unread: clauses on files and keys that are extra or missing, and do not change the function.
        findings: engines that load the directory wrongly.
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
        """The kind of drafter."""
        return find_architecture(self.config)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user on what was passed over."""
        return (f"Passed over: {list_few(self.unread, separator='; ')}.",) if self.unread else ()

    @property
    def mtp(self) -> DrafterConfig:
        """The config of an MTP drafter; UnsupportedError if the architecture is another."""
        if not isinstance(self.config, DrafterConfig):
            raise UnsupportedError(
                f"Expected an MTP drafter, found {self.architecture.with_article}, which no LiteRT bundle holds. "
                "Give a drafter that came from one.",
                remedies=("source",),
            )
        return self.config

    def complete(self) -> Checkpoint:
        """Return the checkpoint with every role, in order. A layer scalar that is not stored becomes 1.

        Raises:
            CheckpointError: a required weight is missing.
        """
        tensors: dict[str, Weight] = {}
        for role, shape in list_shapes(self.config).items():
            if role.kind != SCALAR and role.name not in self.tensors:
                raise CheckpointError(f"{role.name}: expected a weight of shape {list(shape)}, found none.")
            tensors[role.name] = self.tensors.get(role.name) or build_constant_weight(shape)
        return replace(self, tensors=MappingProxyType(tensors))
