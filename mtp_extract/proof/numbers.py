"""What is written, number by number, against what the graph holds: the config's own numbers, and every tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from mtp_extract.architecture.config import DrafterConfig
from mtp_extract.architecture.roles import shapes_of
from mtp_extract.errors import CheckpointError, ProofError
from mtp_extract.graph.drafter import Walk
from mtp_extract.graph.matrices import LARGEST
from mtp_extract.graph.roles import FoundRole
from mtp_extract.litertlm.storage import CHUNK_ELEMENTS, FLOAT_TYPES, Floats, QuantizedTensor
from mtp_extract.litertlm.tflite import TfliteModel

Read = Callable[[str], Iterable[Floats]]
"""Role → its tensor as written, in flat chunks of float32."""

_ROUNDING = 1e-6
_CONFIG = 1e-5
_NOTHING: Floats = np.empty(0, np.float32)


def hold_config(walk: Walk, config: DrafterConfig) -> None:
    """Hold the numbers of ``config`` that no attention has.

    Raises:
        ProofError: one is another than the graph's.
    """
    found = {
        "rms_norm_eps": walk.rms_norm_eps,
        "final_logit_softcap": walk.soft_cap,
        "hidden_activation": walk.hidden_activation,
        "heads": [(layer.heads, layer.head_dim, layer.kv_heads) for layer in walk.layers],
    }
    expected = {
        "rms_norm_eps": config.rms_norm_eps,
        "final_logit_softcap": config.final_logit_softcap,
        "hidden_activation": config.hidden_activation,
        "heads": [(config.num_heads, layer.head_dim, layer.num_kv_heads) for layer in config.layers],
    }
    for name, one in found.items():
        other = expected[name]
        numbers = isinstance(one, float) and isinstance(other, float | int)
        if not (math.isclose(one, other, rel_tol=_CONFIG) if numbers else one == other):  # type: ignore[arg-type]
            raise ProofError(f"{name}: the graph has {one}, the config {other}. Nothing is written.")


def hold_tensors(model: TfliteModel, walk: Walk, config: DrafterConfig, read: Read) -> None:
    """Hold every tensor that is read against the constant that plays its role.

    Raises:
        ProofError: a number is another one, or none that a drafter has.
        CheckpointError: a tensor has another size.
    """
    roles = {role.role: role for role in walk.roles}
    for wanted, shape in shapes_of(config).items():
        role, size = roles.get(wanted.name), math.prod(shape)
        stored = _numbers_of(model, role) if role is not None else iter((np.ones(size, np.float32),))
        offset = np.float32(abs(role.offset) if role is not None else 0.0)
        # Of integers the scales were held when they were read.
        integers = role is not None and role.tensor is not None and role.tensor.type not in FLOAT_TYPES
        at = 0
        for one, other in _side_by_side(wanted.name, stored, read(wanted.name)):
            at += one.size
            if (integers or float(np.abs(one).max()) < LARGEST) and np.array_equal(one, other):
                continue
            apart, sizes = np.abs(one - other), np.abs(one) + offset
            wrong = ~((apart <= np.float32(_ROUNDING) * sizes) & (sizes < LARGEST))
            if wrong.any():
                first = int(wrong.argmax())
                raise ProofError(
                    f"{wanted.name}: the graph and the checkpoint part here: number {at - one.size + first} is "
                    f"{one[first]:.6g} in the graph and {other[first]:.6g} in the checkpoint. Nothing is written."
                )
        if at != size:
            raise CheckpointError(f"{wanted.name}: expected {size} numbers, found {at}.")


def _numbers_of(model: TfliteModel, role: FoundRole) -> Iterator[Floats]:
    """stored = factor × (weight − offset), solved for the weight."""
    if role.tensor is None:
        yield np.ones(math.prod(role.shape), np.float32)
        return
    source = QuantizedTensor.of(model, role.tensor)
    if role.first is not None:
        source = source.rows(role.first, role.shape[0])
    size = math.prod(role.shape)
    chunks: Iterable[Floats]
    if role.transposed:
        chunks = [np.ascontiguousarray(source.floats().reshape(role.shape[::-1]).T).reshape(-1)]
    elif source.tensor.elements == 1:
        chunks = [np.full(size, source.floats()[0])]
    else:
        chunks = (source.floats(at, min(at + CHUNK_ELEMENTS, size)) for at in range(0, size, CHUNK_ELEMENTS))
    for chunk in chunks:
        plain = role.factor == 1 and not role.offset
        yield chunk if plain else chunk / np.float32(role.factor) + np.float32(role.offset)


def _side_by_side(name: str, one: Iterable[Floats], other: Iterable[Floats]) -> Iterator[tuple[Floats, Floats]]:
    """Pieces of the same size of two streams of numbers.

    Raises:
        CheckpointError: one ends before the other.
    """
    streams, rest = [iter(one), iter(other)], [_NOTHING, _NOTHING]
    while True:
        for i in (0, 1):
            if not rest[i].size:
                rest[i] = np.asarray(next((c for c in streams[i] if np.size(c)), _NOTHING), np.float32).reshape(-1)
        size = min(rest[0].size, rest[1].size)
        if not size:
            if rest[0].size != rest[1].size:
                raise CheckpointError(f"{name}: it has {'fewer' if rest[0].size else 'more'} numbers than the graph's.")
            return
        yield rest[0][:size], rest[1][:size]
        rest = [rest[0][size:], rest[1][size:]]
