"""What one draft step reads of a checkpoint."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from mtp_extract.architecture.config import DrafterConfig
from mtp_extract.architecture.eagle3 import Eagle3Config
from mtp_extract.architecture.roles import HEAD_ROLES, ORDERING
from mtp_extract.checkpoint.arranged import arrange
from mtp_extract.checkpoint.checkpoint import CODES, Checkpoint
from mtp_extract.checkpoint.dtypes import DTYPES
from mtp_extract.checkpoint.stored import stored_of
from mtp_extract.formats import FORMATS, format_named

_FUSING = ("fc", "fc_norm", "input_norm")  # of an EAGLE-3 head: what fuses the base's states, once a round
_LOOKED_UP = ("embed_tokens", "d2t")  # likewise: a row of the one and an index of the other are next to nothing
_INDEX = 8  # bytes of one


@dataclass(frozen=True)
class Reads:
    """Bytes of the drafter's own weights as they are stored: codes with their scales, floats with their type's size.

    What is the base's is not among them: its K and V, its embedding of a token, its hidden states.
    """

    body: int  # of a step, everything but the head
    head: int  # all rows; of an ordered one the centroids, and the rows and indices of ``top_k`` clusters
    once_a_round: int  # beside its steps, however many they are
    stored: int  # all weights

    @property
    def total(self) -> int:
        """Of a step."""
        return self.body + self.head


def reads_of_a_step(layout: str, checkpoint: Checkpoint) -> Reads:
    """What a step of one sequence reads of ``checkpoint``, which was read from a directory of the format ``layout``."""
    config = checkpoint.config
    sizes = _of_head(checkpoint) if isinstance(config, Eagle3Config) else _of_mtp(layout, checkpoint)
    ordered = config.ordered_head if isinstance(config, DrafterConfig) else None
    roles = ("lm_head", *HEAD_ROLES)
    head = sum(sizes[role] for role in roles)
    once = sum(size for role, size in sizes.items() if role.split(".")[0] in _FUSING)
    body = sizes.total() - head - once - sum(sizes[role] for role in _LOOKED_UP)
    if ordered is not None:
        clusters = sizes["lm_head"] + sizes[ORDERING]
        head += clusters // ordered.num_centroids * ordered.top_k - clusters
    return Reads(body, head, once, sizes.total())


def _of_mtp(layout: str, checkpoint: Checkpoint) -> Counter[str]:
    coded = any(tensor.scheme is not None for tensor in checkpoint.tensors.values())
    dtype = CODES if coded and CODES in FORMATS[layout].dtypes else checkpoint.dtype
    sizes = Counter[str]()
    for file in arrange(format_named(layout), checkpoint, dtype).files:
        for planned in file.tensors:
            tensor = checkpoint.tensors.get(planned.role)
            stored = stored_of(tensor) if tensor is not None else None
            # An assistant of others may mix types, which a plan does not.
            sizes[planned.role] += stored.tensor.length if stored is not None else planned.length
    return sizes


def _of_head(checkpoint: Checkpoint) -> Counter[str]:
    size = DTYPES[checkpoint.dtype].size
    shapes = {role: tensor.shape for role, tensor in checkpoint.tensors.items()}
    return Counter({role: math.prod(shape) * (_INDEX if role == "d2t" else size) for role, shape in shapes.items()})
