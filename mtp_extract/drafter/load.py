"""Loading a drafter, strictly: a tensor missing, unexpected or of the wrong shape fails the load by name."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from mtp_extract.architecture.eagle3 import Eagle3Config
from mtp_extract.architecture.roles import INDEX, Role, shapes_of
from mtp_extract.checkpoint.checkpoint import CODES, Checkpoint
from mtp_extract.checkpoint.dtypes import DTYPES
from mtp_extract.drafter.eagle3 import Eagle3Drafter
from mtp_extract.drafter.mtp import MtpDrafter, with_weights
from mtp_extract.errors import DrafterError
from mtp_extract.formats import read_checkpoint

Network = MtpDrafter | Eagle3Drafter
"""A drafter of either architecture."""

_DTYPES = (torch.float32, torch.bfloat16)


def load_drafter(
    directory: Path | str, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> MtpDrafter:
    """The MTP drafter in ``directory``, of whichever format, in evaluation mode.

    Args:
        directory: what an extraction wrote, or an official assistant checkpoint.
        dtype: float32 or bfloat16; None keeps the stored one, which for codes is float32.

    Raises:
        CheckpointError: no such files, or a tensor missing, unexpected, or of another shape.
        DrafterError: FP16 was asked for.
        UnsupportedError: it holds an EAGLE-3 head.
    """
    return drafter_of(read_checkpoint(directory), dtype=dtype, device=device)


def load_any(directory: Path | str, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> Network:
    """As :func:`load_drafter`, of whichever architecture.

    Raises:
        CheckpointError, DrafterError: as there.
    """
    return network_of(read_checkpoint(directory), dtype=dtype, device=device)


def drafter_of(
    checkpoint: Checkpoint, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> MtpDrafter:
    """The MTP drafter that ``checkpoint`` holds; errors as of :func:`load_drafter`."""
    return with_weights(MtpDrafter, checkpoint.mtp, _state(checkpoint, dtype, device))


def network_of(
    checkpoint: Checkpoint, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> Network:
    """The drafter that ``checkpoint`` holds, of whichever architecture; errors as of :func:`load_any`."""
    if isinstance(checkpoint.config, Eagle3Config):
        return with_weights(Eagle3Drafter, checkpoint.config, _state(checkpoint, dtype, device))
    return drafter_of(checkpoint, dtype=dtype, device=device)


def _state(checkpoint: Checkpoint, dtype: torch.dtype | None, device: torch.device | str) -> dict[str, Tensor]:
    """Every weight, by the path of its module."""
    stored = DTYPES["f32" if checkpoint.dtype == CODES else checkpoint.dtype]
    dtype = _computed_in(dtype, getattr(torch, stored.transformers))
    # Roles that are one stored constant stay one tensor.
    shared: dict[object, Tensor] = {}
    state = {}
    for role in shapes_of(checkpoint.config):
        origin = checkpoint.tensors[role.name].origin or role.name
        if origin not in shared:
            shared[origin] = _tensor(checkpoint, role, dtype, device)
        state[role.path] = shared[origin]
    return state


def _tensor(checkpoint: Checkpoint, role: Role, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    tensor = checkpoint.tensors[role.name]
    if role.kind == INDEX:
        return torch.from_numpy(tensor.indices()).to(device)
    return torch.from_numpy(tensor.array()).to(device, dtype)


def _computed_in(asked: torch.dtype | None, stored: torch.dtype) -> torch.dtype:
    dtype = asked or stored
    if dtype is torch.float16:
        how = "float16 was asked for" if asked else "the checkpoint is stored as float16 and no dtype was given"
        raise DrafterError(
            f"expected float32 or bfloat16 to compute in, but {how}. The activations of Gemma 4 exceed float16's "
            "largest number, 65504, and turn into infinities. Pass dtype=torch.bfloat16 or torch.float32"
        )
    if dtype not in _DTYPES:
        raise DrafterError(f"expected float32 or bfloat16 to compute in, found {dtype}; pass dtype=torch.float32")
    return dtype
