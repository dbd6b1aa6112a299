"""Weights with a config, wherever they came from and wherever they go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from mtp_extract.architecture.config import DrafterConfig
from mtp_extract.architecture.roles import SCALAR, Config, shapes_of
from mtp_extract.checkpoint.weight import Weight, filled
from mtp_extract.errors import CheckpointError, UnsupportedError
from mtp_extract.graph.roles import Activation

CODES = "codes"
"""The output type that keeps the stored integers; what has none is written in F32."""

Activations = tuple[Activation | None, Activation | None]
"""The static quantization of what goes into a matrix and of what comes out; None where it is float."""


@dataclass(frozen=True)
class Checkpoint:
    """What a bundle, a directory or a training holds; what formats write and read.

    Attributes:
        architecture: a key of the role table, "gemma4-mtp" or "eagle3".
        tensors: role → weight. Optional roles may be absent.
        dtype: what its floats are stored in, "f32", "bf16" or "f16"; a bundle's are F32.
        provenance: where it came from, as text by name, for formats with room for it inside the weights file.
        activations: by role of a matrix, where a graph has static quantization there.
    """

    architecture: str
    config: Config
    tensors: Mapping[str, Weight]
    dtype: str
    provenance: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    activations: Mapping[str, Activations] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def mtp(self) -> DrafterConfig:
        """The shape of an MTP drafter.

        Raises:
            UnsupportedError: it is an EAGLE-3 head's.
        """
        if not isinstance(self.config, DrafterConfig):
            raise UnsupportedError(
                "Expected an MTP drafter, found an EAGLE-3 head, which no LiteRT bundle holds. Give a drafter that "
                "came from one.",
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
                tensors.setdefault(role.name, filled(shape))
            elif role.name not in tensors:
                raise CheckpointError(f"{role.name}: expected a weight of shape {list(shape)}, found none.")
        return replace(self, tensors=MappingProxyType(tensors))
