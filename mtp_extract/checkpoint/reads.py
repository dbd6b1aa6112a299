"""What one draft step reads of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from mtp_extract.architecture.roles import HEAD_ROLES, ORDERING
from mtp_extract.checkpoint.checkpoint import CODES, Checkpoint
from mtp_extract.checkpoint.formats import FORMATS, format_named
from mtp_extract.checkpoint.stored import StoredWeight

__all__ = ["StepBytes", "bytes_a_step"]

_HEAD = ("lm_head", *HEAD_ROLES)
_CHOSEN = ("lm_head", ORDERING)
"""Of these an ordered head reads the part of the clusters it chose."""


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
    """What a step reads of ``checkpoint``, which was read from a directory of the format ``layout``."""
    coded = any(tensor.scheme is not None for tensor in checkpoint.tensors.values())
    dtype = CODES if coded and CODES in FORMATS[layout].dtypes else checkpoint.dtype
    ordered = checkpoint.config.ordered_head
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
