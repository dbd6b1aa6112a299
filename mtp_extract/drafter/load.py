"""Strict loading of a drafter: a tensor that is missing, unexpected or of the wrong shape is an error that names it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from mtp_extract.architecture import find_architecture, list_shapes
from mtp_extract.architecture.roles import INDEX
from mtp_extract.checkpoint.checkpoint import CODES, Checkpoint
from mtp_extract.checkpoint.dtypes import DTYPES
from mtp_extract.drafter.mtp import MtpDrafter
from mtp_extract.drafter.network import DrafterNetwork, build_network
from mtp_extract.errors import DrafterError
from mtp_extract.formats import read_checkpoint

Network = DrafterNetwork  # a drafter of any architecture


def load_any_drafter(
    drafter: Checkpoint | Path | str, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> Network:
    """Load a drafter of any architecture and format, in evaluation mode.

    Args:
        drafter: a checkpoint, or its directory: an extraction's, or an official assistant.
        dtype: float32 or bfloat16; None keeps the stored dtype, or float32 for codes.

    Raises:
        CheckpointError: there are no such files, or a tensor is missing, unexpected, or of another shape.
        DrafterError: the dtype is neither of the two.
    """
    checkpoint = drafter if isinstance(drafter, Checkpoint) else read_checkpoint(drafter)
    config = checkpoint.config
    network: Network = build_network(
        find_architecture(config).import_network(), config, _build_state_dict(checkpoint, dtype, device)
    )
    return network


def load_drafter(
    drafter: Checkpoint | Path | str, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> MtpDrafter:
    """Load an MTP drafter as :func:`load_any_drafter` does; UnsupportedError if it is of another architecture."""
    checkpoint = drafter if isinstance(drafter, Checkpoint) else read_checkpoint(drafter)
    return build_network(MtpDrafter, checkpoint.mtp, _build_state_dict(checkpoint, dtype, device))


def _build_state_dict(
    checkpoint: Checkpoint, dtype: torch.dtype | None, device: torch.device | str
) -> dict[str, Tensor]:
    """Build the network's state_dict. Roles that share a stored constant share a tensor."""
    computed = dtype or getattr(torch, DTYPES["f32" if checkpoint.dtype == CODES else checkpoint.dtype].transformers)
    if computed not in (torch.float32, torch.bfloat16):
        how = "asked for" if dtype else "stored, and no dtype was given"
        raise DrafterError(
            f"expected float32 or bfloat16 to compute in, but {computed} is {how}; pass dtype=torch.bfloat16 or "
            "torch.float32. The activations of Gemma 4 exceed float16's largest number, 65504"
        )
    shared: dict[object, Tensor] = {}
    state: dict[str, Tensor] = {}
    for role in list_shapes(checkpoint.config):
        tensor = checkpoint.tensors[role.name]
        origin = tensor.origin or role.name
        if origin not in shared:
            if role.kind == INDEX:
                shared[origin] = torch.from_numpy(tensor.indices()).to(device)
            else:
                shared[origin] = torch.from_numpy(tensor.array()).to(device, computed)
        state[role.path] = shared[origin]
    return state
