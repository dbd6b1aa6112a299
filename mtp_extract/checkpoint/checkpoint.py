"""Weights with a config, wherever they came from and wherever they go; and what a format is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from mtp_extract.architecture.config import DrafterConfig
from mtp_extract.architecture.roles import Config, Role, shapes_of
from mtp_extract.checkpoint.planned import OutputFile
from mtp_extract.checkpoint.weight import Weight, filled
from mtp_extract.errors import UnsupportedError
from mtp_extract.graph.roles import Activation

CODES = "codes"
"""The output type that keeps the stored integers; what has none is written in F32."""

FLOATS, INDICES, NOTHING = "floats", "indices", "nothing"
"""What else may be kept of a weight; indices are those of an ordered head, which are no numbers."""


def require_mtp(config: Config) -> DrafterConfig:
    """``config``, where it is an MTP drafter's.

    Raises:
        UnsupportedError: it is an EAGLE-3 head's.
    """
    if not isinstance(config, DrafterConfig):
        raise UnsupportedError(
            "Expected an MTP drafter, found an EAGLE-3 head, which no LiteRT bundle holds. Give a drafter that came "
            "from one.",
            remedies=("source",),
        )
    return config


@dataclass(frozen=True)
class Checkpoint:
    """What a bundle, a directory or a training holds; what formats write and read.

    Attributes:
        architecture: a key of the role table, "gemma4-mtp" or "eagle3".
        tensors: role → weight. Optional roles may be absent.
        dtype: what its floats are stored in, "f32", "bf16" or "f16"; a bundle's are F32.
        provenance: where it came from, as text by name, for formats with room for it inside the weights file.
        activations: role of a matrix → the static quantization of what goes into it and what comes out, where a graph
            has one.
        tokenizer: the directory of its base's tokenizer, for formats that keep one; None to leave it out.
    """

    architecture: str
    config: Config
    tensors: Mapping[str, Weight]
    dtype: str
    provenance: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    activations: Mapping[str, tuple[Activation | None, Activation | None]] = field(
        default_factory=lambda: MappingProxyType({})
    )
    tokenizer: Path | None = None

    @property
    def mtp(self) -> DrafterConfig:
        """The shape of an MTP drafter; as :func:`require_mtp`."""
        return require_mtp(self.config)

    def whole(self) -> Checkpoint:
        """The same with every role there is: an optional one that nothing states is of ones."""
        implied: dict[str, Weight] = {
            role.name: filled(shape) for role, shape in shapes_of(self.config).items() if role.optional
        }
        return replace(self, tensors=MappingProxyType({**implied, **self.tensors}))


@dataclass(frozen=True)
class Holding:
    """How a format holds a weight.

    Attributes:
        kept: :data:`CODES`, :data:`FLOATS`, :data:`INDICES`, or :data:`NOTHING` where the weight is left out.
        rounded_to: what its numbers, or the scales of its codes, are rounded to ("BF16", "FP16"); empty if nothing is.
        bound: the most by which that changes a number, as a share of it; 0 if nothing is rounded.
        why: why it or its codes are not kept, and what keeps them; empty where they are, or where it has none.
    """

    kept: str
    rounded_to: str = ""
    bound: float = 0.0
    why: str = ""


class Format(Protocol):
    """A directory layout that engines load. One module in :mod:`mtp_extract.formats` each.

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

    def recognizes(self, directory: Path) -> bool:
        """Whether ``directory`` is of this format, from a look at its marker; that it is sound, reading will show."""

    def hold(self, role: Role, tensor: Weight, dtype: str) -> Holding:
        """How a weight will be held, before a byte is written."""

    def plan(self, checkpoint: Checkpoint, dtype: str) -> Sequence[OutputFile]:
        """The files to write, the weights first, each weight as :meth:`hold` says.

        Raises:
            UnsupportedError: something of ``checkpoint`` that the format cannot express.
        """

    def read_config(self, directory: Path) -> Config:
        """What the directory's configuration says.

        Raises:
            CheckpointError: it is damaged, incomplete, another model's, or says something else than would be written
                of what was read from it.
        """

    def read(self, directory: Path) -> Checkpoint:
        """What the directory holds; weights are read when asked for.

        Raises:
            CheckpointError: as :meth:`read_config`, or a tensor is missing, unexpected or of another shape.
        """
