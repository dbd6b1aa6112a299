"""A drafter held against the checkpoint that would be written of it, or against one with a planted fault."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mtp_extract.architecture.config import DrafterConfig
from mtp_extract.bundle import Drafter, open_bundle
from mtp_extract.checkpoint.formats import transformers
from mtp_extract.checkpoint.proof import Proof, prove
from mtp_extract.graph import flatten, walk
from mtp_extract.io.source import Source
from mtp_extract.litertlm.quantized import QuantizedTensor

__all__ = ["Read", "held"]

Floats = npt.NDArray[np.float32]
Read = Callable[[str], Iterable[Floats]]
Reconfigure = Callable[[DrafterConfig], DrafterConfig]
Reread = Callable[[Read], Read]


def held(source: Path | Source, config: Reconfigure = lambda config: config, read: Reread = lambda read: read) -> Proof:
    """The proof of the drafter in ``source``; ``config`` and ``read`` plant faults in its checkpoint."""
    with open_bundle(source) as opened:
        drafter = opened.drafter()
        graph = flatten(drafter.model, drafter.signature)
        written = DrafterConfig.from_transformers(transformers.config(drafter.geometry, "float32", drafter.known))
        return prove(graph, walk(graph), config(written), read(_tensors(drafter)))


def _tensors(drafter: Drafter) -> Read:
    """What is written in float32, by role."""
    roles = {role.role: role for role in drafter.walk.roles}

    def read(name: str) -> Iterator[Floats]:
        role = roles.get(name)
        if role is None or role.tensor is None:
            # A scalar that the graph lacks, and a norm whose weights of 1 were folded away.
            yield np.ones(role.shape if role else 1, np.float32)
            return
        source = QuantizedTensor.of(drafter.model, role.tensor)
        for chunk in source.chunks():
            spread = np.full(role.shape, chunk[0]) if role.tensor.elements == 1 else chunk
            yield (spread / np.float32(role.factor)).astype(np.float32)

    return read
