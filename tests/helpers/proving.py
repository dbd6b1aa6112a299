"""A drafter held against the checkpoint that would be written of it, or against one with a planted fault."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mtp_extract.architecture.config import DrafterConfig
from mtp_extract.architecture.roles import shapes_of
from mtp_extract.bundle import open_bundle
from mtp_extract.checkpoint.lazy import FilledTensor
from mtp_extract.io.source import Source
from mtp_extract.pipeline.extraction import checkpoint_of
from mtp_extract.proof.proof import Proof, prove

__all__ = ["Read", "held"]

Floats = npt.NDArray[np.float32]
Read = Callable[[str], Iterable[Floats]]
Reconfigure = Callable[[DrafterConfig], DrafterConfig]
Reread = Callable[[Read], Read]


def held(source: Path | Source, config: Reconfigure = lambda config: config, read: Reread = lambda read: read) -> Proof:
    """The proof of the drafter in ``source``; ``config`` and ``read`` plant faults in its checkpoint."""
    with open_bundle(source) as opened:
        drafter = opened.drafter()
        checkpoint = checkpoint_of(drafter)
        tensors = {role.name: FilledTensor(shape) for role, shape in shapes_of(drafter.config).items()}
        tensors.update(checkpoint.tensors)
        return prove(drafter.graph, drafter.walk, config(drafter.config), read(lambda role: tensors[role].floats()))
