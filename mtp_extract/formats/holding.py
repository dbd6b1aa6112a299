"""How weights are held and written, where formats agree on it."""

from __future__ import annotations

from dataclasses import replace

from mtp_extract.architecture.roles import INDEX, SCALAR, Role
from mtp_extract.checkpoint.checkpoint import FLOATS, Checkpoint, Holding
from mtp_extract.checkpoint.dtypes import DTYPES, ROUNDED_TO
from mtp_extract.checkpoint.planned import PlannedTensor, plan_array, plan_floats
from mtp_extract.checkpoint.weight import Weight, filled
from mtp_extract.errors import CheckpointError


def hold_floats(tensor: Weight, dtype: str, why: str = "the format holds floats only") -> Holding:
    """In ``dtype``, "f32", "bf16" or "f16"; ``why`` says why codes, if there are any, are not kept."""
    rounded_to = ROUNDED_TO[dtype]
    return Holding(
        FLOATS, rounded_to, DTYPES[dtype].roundoff if rounded_to else 0.0, why if tensor.scheme is not None else ""
    )


def weight_of(checkpoint: Checkpoint, role: Role, shape: tuple[int, ...]) -> Weight:
    """The weight of ``role``; a layer scalar that is not there is 1, as every engine wants it to be there.

    Raises:
        CheckpointError: ``checkpoint`` lacks it.
    """
    tensor = checkpoint.tensors.get(role.name)
    if tensor is None and role.kind != SCALAR:
        raise CheckpointError(f"{role.name}: expected a weight of shape {list(shape)}, found none.")
    return tensor or filled(shape)


def plan_weight(checkpoint: Checkpoint, role: Role, shape: tuple[int, ...], name: str, dtype: str) -> PlannedTensor:
    """The floats or indices of ``role``, called ``name``.

    Raises:
        CheckpointError: as :func:`weight_of`.
    """
    tensor = weight_of(checkpoint, role, shape)
    if role.kind == INDEX:
        return replace(plan_array(name, tensor.indices()), role=role.name)
    return plan_floats(name, role.name, tensor, dtype)
