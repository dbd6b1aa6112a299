"""What is written, number by number, against what the graph holds: the config's own numbers, and every tensor."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from mtp_extract.architecture.config import DrafterConfig
from mtp_extract.architecture.roles import shapes_of
from mtp_extract.checkpoint.weight import Weight, row_ranges
from mtp_extract.errors import CheckpointError, ProofError
from mtp_extract.graph.drafter import Walk
from mtp_extract.graph.matrices import LARGEST
from mtp_extract.graph.roles import FoundRole
from mtp_extract.litertlm.storage import FLOAT_TYPES, Floats, QuantizedTensor
from mtp_extract.litertlm.tflite import TfliteModel

Read = Callable[[str], Weight]
"""Role → its tensor as written."""

_ROUNDING = 1e-6


def hold_config(walk: Walk, config: DrafterConfig) -> None:
    """Hold the numbers of ``config`` that no attention has.

    Raises:
        ProofError: one is another than the graph's.
    """
    heads = [(layer.heads, layer.head_dim, layer.kv_heads) for layer in walk.layers]
    written = [(config.num_heads, layer.head_dim, layer.num_kv_heads) for layer in config.layers]
    for name, one, other in (
        ("rms_norm_eps", walk.rms_norm_eps, config.rms_norm_eps),
        ("final_logit_softcap", walk.soft_cap, config.final_logit_softcap),
        ("hidden_activation", walk.hidden_activation, config.hidden_activation),
        ("heads", heads, written),
    ):
        if one != other:
            raise ProofError(f"{name}: the graph has {one}, the config {other}. Nothing is written.")


def hold_tensors(model: TfliteModel, walk: Walk, config: DrafterConfig, read: Read) -> None:
    """Hold every tensor against the constant that plays its role, some rows at a time.

    Raises:
        ProofError: a number is another one, or none that a drafter has.
        CheckpointError: a tensor has another size.
    """
    roles = {role.role: role for role in walk.roles}
    for wanted, shape in shapes_of(config).items():
        name, weight, role = wanted.name, read(wanted.name), roles.get(wanted.name)
        if math.prod(weight.shape) != math.prod(shape):
            raise CheckpointError(f"{name}: expected {math.prod(shape)} numbers, found {math.prod(weight.shape)}.")
        stored = _numbers_of(model, role)
        # Of integers the scales were held when they were read.
        integers = role is not None and role.tensor is not None and role.tensor.type not in FLOAT_TYPES
        for first, last in row_ranges(weight):
            at, other = first * weight.columns, weight.floats(first, last).reshape(-1)
            one = stored(at, at + other.size)
            if (integers or float(np.abs(one).max()) < LARGEST) and np.array_equal(one, other):
                continue
            wrong = ~((np.abs(one - other) <= np.float32(_ROUNDING) * np.abs(one)) & (np.abs(one) < LARGEST))
            if wrong.any():
                where = int(wrong.argmax())
                raise ProofError(
                    f"{name}: the graph and the checkpoint part here: number {at + where} is {one[where]:.6g} in the "
                    f"graph and {other[where]:.6g} in the checkpoint. Nothing is written."
                )


def _numbers_of(model: TfliteModel, role: FoundRole | None) -> Callable[[int, int], Floats]:
    """Numbers ``[begin, end)`` of a weight, flat: stored = factor × weight, solved for it."""
    if role is None or role.tensor is None:
        return lambda begin, end: np.ones(end - begin, np.float32)
    source, factor = QuantizedTensor.of(model, role.tensor), np.float32(role.factor)
    read = source.floats
    if role.tensor.elements == 1:
        whole = np.broadcast_to(source.floats(), math.prod(role.shape))

        def read(begin: int = 0, end: int | None = None) -> Floats:
            return whole[begin:end]

    return read if role.factor == 1 else lambda begin, end: read(begin, end) / factor
