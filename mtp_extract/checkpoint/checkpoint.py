"""Weights with a config, wherever they came from and wherever they go; and what a format is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mtp_extract.architecture.config import DrafterConfig
from mtp_extract.checkpoint.lazy import LazyTensor, Scheme
from mtp_extract.checkpoint.planned import OutputFile

__all__ = ["Checkpoint", "Format"]


@dataclass(frozen=True)
class Checkpoint:
    """What a bundle, a directory or a training holds; what formats write and read.

    Attributes:
        architecture: a key of the role table, "gemma4-mtp".
        tensors: role → weight. Optional roles may be absent.
        dtype: what its floats are stored in, "f32", "bf16" or "f16"; a bundle's are F32.
    """

    architecture: str
    config: DrafterConfig
    tensors: Mapping[str, LazyTensor]
    dtype: str


class Format(Protocol):
    """A directory layout that engines load. One module in :mod:`mtp_extract.checkpoint.formats` each.

    Attributes:
        name: as users call it, and as the role table's column is called.
        marker: the file by which a directory of this format is known.
        weights_file: the file with the weights.
    """

    name: str
    marker: str
    weights_file: str

    def refuses(self, scheme: Scheme | None) -> str | None:
        """Why a weight stored so cannot be held exactly; None where it can."""

    def plan(self, checkpoint: Checkpoint, dtype: str) -> Sequence[OutputFile]:
        """The files to write, the weights first.

        Raises:
            UnsupportedError: something of ``checkpoint`` that the format cannot express.
        """

    def read_config(self, directory: Path) -> DrafterConfig:
        """What the directory's configuration says, strictly.

        Raises:
            DrafterError: it is damaged, incomplete, or another model's.
        """

    def read(self, directory: Path) -> Checkpoint:
        """What the directory holds; weights are read when asked for.

        Raises:
            DrafterError, CheckpointError: it is damaged, or a tensor is missing, unexpected or of another shape.
        """
