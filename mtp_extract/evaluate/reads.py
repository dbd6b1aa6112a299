"""What one draft step reads of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mtp_extract.architecture.config import DrafterConfig
from mtp_extract.architecture.eagle3 import Eagle3Config
from mtp_extract.architecture.roles import HEAD_ROLES, ORDERING, Config
from mtp_extract.checkpoint.arranged import arrange
from mtp_extract.checkpoint.checkpoint import CODES, Checkpoint
from mtp_extract.checkpoint.dtypes import DTYPES
from mtp_extract.checkpoint.stored import stored_of
from mtp_extract.formats import FORMATS, format_named

_HEAD = ("lm_head", *HEAD_ROLES)
_CHOSEN = ("lm_head", ORDERING)  # of these an ordered head reads the part of the clusters it chose

_EMBEDDING, _TARGETS, _FUSING = "embed_tokens", "d2t", ("fc", "fc_norm", "input_norm")
"""Of an EAGLE-3 head: a table of its own, the base's token of each row, and what fuses the base's states."""

_INDEX = 8  # bytes of one


@dataclass(frozen=True)
class Reads:
    """What of the drafter's own weights one step of one sequence reads, each once; in bytes, or in parameters.

    What is the base's is not among them: its K and V, its embedding of a token, its hidden states.
    """

    body: int  # everything but the head
    # all rows of a dense one; of an ordered one the centroids, and the rows and indices of ``top_k`` clusters
    head: int
    once_a_round: int  # beside its steps, however many they are: of an EAGLE-3 head, what fuses the base's states
    stored: int  # all weights

    @property
    def total(self) -> int:
        return self.body + self.head


@dataclass(frozen=True)
class StepReads:
    """The same in two units."""

    bytes: Reads  # as they are stored: codes with their scales, floats with the size of their type
    parameters: Reads  # numbers of the network, whatever a number is stored as; neither scales nor indices


@dataclass(frozen=True)
class _Weight:
    """Of one tensor, or what is stored of one."""

    role: str
    bytes: int
    parameters: int


def reads_of_a_step(layout: str, checkpoint: Checkpoint) -> StepReads:
    """What a step reads of ``checkpoint``, which was read from a directory of the format ``layout``."""
    weights = list(
        _of_a_head(checkpoint) if isinstance(checkpoint.config, Eagle3Config) else _of_mtp(layout, checkpoint)
    )
    return StepReads(
        _sum(checkpoint.config, [(weight.role, weight.bytes) for weight in weights]),
        _sum(checkpoint.config, [(weight.role, weight.parameters) for weight in weights]),
    )


def _of_mtp(layout: str, checkpoint: Checkpoint) -> Iterator[_Weight]:
    coded = any(tensor.scheme is not None for tensor in checkpoint.tensors.values())
    dtype = CODES if coded and CODES in FORMATS[layout].dtypes else checkpoint.dtype
    for file in arrange(format_named(layout), checkpoint, dtype).files:
        for planned in file.tensors:
            tensor = checkpoint.tensors.get(planned.role)
            stored = stored_of(tensor) if tensor is not None else None
            # An assistant of others may mix types, which a plan does not.
            yield _Weight(planned.role, stored.tensor.length if stored is not None else planned.length, 0)
    for role, tensor in checkpoint.tensors.items():
        yield _Weight(role, 0, 0 if role == ORDERING else math.prod(tensor.shape))


def _of_a_head(checkpoint: Checkpoint) -> Iterator[_Weight]:
    size = DTYPES[checkpoint.dtype].size
    for role, tensor in checkpoint.tensors.items():
        numbers = math.prod(tensor.shape)
        yield _Weight(role, numbers * _INDEX, 0) if role == _TARGETS else _Weight(role, numbers * size, numbers)


def _sum(config: Config, sizes: Sequence[tuple[str, int]]) -> Reads:
    ordered = config.ordered_head if isinstance(config, DrafterConfig) else None
    body = head = once = 0
    for role, size in sizes:
        if role.split(".")[0] in _FUSING:
            once += size
        elif role in _HEAD:
            head += size // ordered.num_centroids * ordered.top_k if ordered and role in _CHOSEN else size
        elif role not in (_EMBEDDING, _TARGETS):
            # One row of the table is read, and the map of tokens only where a draft is looked up in it.
            body += size
    return Reads(body, head, once, sum(size for _, size in sizes))
