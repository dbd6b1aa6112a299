"""What one draft step reads of a checkpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mtp_extract.architecture.eagle3 import Eagle3Config
from mtp_extract.architecture.roles import HEAD_ROLES, ORDERING
from mtp_extract.checkpoint.checkpoint import CODES, Checkpoint
from mtp_extract.checkpoint.dtypes import DTYPES
from mtp_extract.checkpoint.formats import FORMATS, format_named
from mtp_extract.checkpoint.stored import StoredWeight

__all__ = ["StepBytes", "bytes_a_step"]

_HEAD = ("lm_head", *HEAD_ROLES)
_CHOSEN = ("lm_head", ORDERING)
"""Of these an ordered head reads the part of the clusters it chose."""

_INDEX = 8
"""Bytes of one."""


@dataclass(frozen=True)
class StepBytes:
    """Bytes of the drafter's own weights that one step of one sequence reads, each once.

    Codes count with their scales, floats with the size of their type, both as they are stored. What is the base's is
    not among them: its K and V, its embedding of a token, its hidden state.

    Attributes:
        body: everything but the head.
        head: all rows of a dense one; of an ordered one the centroids, and the rows and indices of ``top_k`` clusters.
        stored: bytes of all weights.
    """

    body: int
    head: int
    stored: int

    @property
    def total(self) -> int:
        """Body and head."""
        return self.body + self.head


def bytes_a_step(layout: str, checkpoint: Checkpoint) -> StepBytes:
    """What a step reads of ``checkpoint``, which was read from a directory of the format ``layout``.

    Of an EAGLE-3 head the first step of a round: later ones do without what fuses the base's states.
    """
    if isinstance(checkpoint.config, Eagle3Config):
        return _of_a_head(checkpoint)
    coded = any(tensor.scheme is not None for tensor in checkpoint.tensors.values())
    dtype = CODES if coded and CODES in FORMATS[layout].dtypes else checkpoint.dtype
    ordered = checkpoint.mtp.ordered_head
    body = head = stored = 0
    for file in format_named(layout).plan(checkpoint, dtype):
        for planned in file.tensors:
            tensor = checkpoint.tensors.get(planned.role)
            # An assistant of others may mix types, which a plan does not.
            length = tensor.stored.length if isinstance(tensor, StoredWeight) else planned.length
            stored += length
            if planned.role not in _HEAD:
                body += length
            elif ordered is not None and planned.role in _CHOSEN:
                head += length // ordered.num_centroids * ordered.top_k
            else:
                head += length
    return StepBytes(body, head, stored)


def _of_a_head(checkpoint: Checkpoint) -> StepBytes:
    size = DTYPES[checkpoint.dtype].size
    lengths = {
        role: math.prod(tensor.shape) * (_INDEX if role == "d2t" else size)
        for role, tensor in checkpoint.tensors.items()
    }
    stored, head, table = sum(lengths.values()), lengths["lm_head"], lengths.get("embed_tokens", 0)
    # One row of the table is read, and the map of tokens only where a draft is looked up in it.
    return StepBytes(stored - head - table - lengths.get("d2t", 0), head, stored)
