"""The sample with a drafter twice as wide that computes the same: one that llama.cpp loads.

llama.cpp takes a drafter's file for one only if the base's hidden width differs from its own ("requires
embedding_length_out to carry the target hidden size"). In the sample both are 64. Here the drafter's hidden width is
padded with zeros: codes of 0 in the new rows and columns, and norm weights times ``sqrt(1/2)``, because the mean of
the squares is over twice as many numbers. Codes stay codes, and rows still divide by 32. Every other section of the
bundle is the sample's::

    PYTHONPATH=.:tests python -m helpers.twin TWIN.litertlm
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from ai_edge_litert import schema_py_generated as schema

from helpers.first_pair import first_bundle
from helpers.make_bundle import Memory, bundle, kind, load, pack, parts_of, set_buffer
from mtp_extract.bundle import open_bundle

__all__ = ["twin"]

Array = npt.NDArray[Any]

_ROWS = ("pre_projection", "o_proj", "down_proj")
"""Matrices that write the hidden state; every other one reads it."""

_ELEMENTWISE = ("ADD", "MUL", "SUB")


def twin(source: Path) -> bytes:
    """The bundle at ``source`` with its drafter's hidden width doubled. The same source gives the same bytes.

    Its matrices must be INT4 or INT8, symmetric, with a scale per row.
    """
    parts = parts_of(source)
    at = next(i for i, part in enumerate(parts) if "mtp_drafter" in part.items.get("model_type", ""))
    parts[at] = replace(parts[at], data=_widened(parts[at].data))
    return bundle(parts)


def _widened(data: bytes) -> bytes:
    drafter = open_bundle(Memory(data)).drafter()
    model = load(data)
    roles = {role.tensor.index: role.role for role in drafter.walk.roles if role.tensor is not None}
    _widen(model, model.subgraphs[0], drafter.config.hidden_size, set(), roles)
    return pack(model)


def _widen(model: Any, graph: Any, hidden: int, wide: set[int], roles: dict[int, str]) -> None:
    """Double what is of the hidden width in ``graph``; ``wide`` are such inputs, and in the end all such tensors."""
    for op in graph.operators:
        name, outputs = kind(model, op), [int(i) for i in op.outputs]
        read = [int(i) for i in op.inputs if int(i) in wide]
        if name == "FULLY_CONNECTED":
            weight = int(op.inputs[1])
            writes = roles[weight].endswith(_ROWS)
            _pad_matrix(model, graph.tensors[weight], rows=hidden * writes, columns=hidden * bool(read))
            wide.update(outputs if writes else ())
        elif not read:
            continue
        elif name in ("SUM", "MEAN"):
            for factor in _factors(model, graph, outputs[0]) if name == "SUM" else ():
                _change(model, factor, lambda values: values / 2)
        elif name == "STABLEHLO_COMPOSITE":
            for constant in (int(i) for i in op.inputs if int(i) in roles):
                _change(model, graph.tensors[constant], _as_norm)
                read.append(constant)
            body = model.subgraphs[op.builtinOptions2.decompositionSubgraphIndex]
            places = dict(zip(map(int, op.inputs), map(int, body.inputs), strict=True))
            inside = {places[i] for i in read}
            _widen(model, body, hidden, inside, {})
            for tensor in inside:
                body.tensors[tensor].shape = _doubled(body.tensors[tensor].shape, hidden)
            wide.update(o for o, i in zip(outputs, map(int, body.outputs), strict=True) if i in inside)
        else:
            assert name in _ELEMENTWISE, f"{name} of the hidden state"
            wide.update(outputs)
    for tensor in wide if roles else ():
        graph.tensors[tensor].shape = _doubled(graph.tensors[tensor].shape, hidden)


def _factors(model: Any, graph: Any, tensor: int) -> list[Any]:
    """The constants that ``tensor``, a sum, is multiplied with to make a mean of it."""
    found = [op for op in graph.operators if tensor in list(op.inputs)]
    assert [kind(model, op) for op in found] == ["MUL"]
    return [graph.tensors[int(i)] for i in found[0].inputs if int(i) != tensor]


def _doubled(shape: Any, hidden: int) -> list[int]:
    assert shape[-1] == hidden, f"{shape} is not of the hidden width"
    return [*map(int, shape[:-1]), 2 * hidden]


def _as_norm(weight: Array) -> Array:
    return np.pad(weight * np.sqrt(0.5, dtype=np.float32), (0, weight.size))


def _change(model: Any, tensor: Any, change: Callable[[Array], Array]) -> None:
    """Give ``tensor``, a constant of floats, a buffer of its own with its changed values."""
    changed = change(np.frombuffer(bytes(model.buffers[tensor.buffer].data), np.float32))
    if len(tensor.shape) == 1:
        tensor.shape = [changed.size]
    set_buffer(model, tensor, changed.tobytes())


def _pad_matrix(model: Any, tensor: Any, rows: int, columns: int) -> None:
    data = np.frombuffer(bytes(model.buffers[tensor.buffer].data), np.int8)
    packed = tensor.type == schema.TensorType.INT4
    codes = np.stack([data << 4 >> 4, data >> 4], -1) if packed else data
    codes = np.pad(codes.reshape(tensor.shape), ((0, rows), (0, columns)))
    tensor.shape = list(codes.shape)
    if packed:
        low, high = codes.reshape(-1, 2).T
        codes = low & 15 | high << 4
    set_buffer(model, tensor, codes.astype(np.int8).tobytes())
    quantization = tensor.quantization
    # Whatever the scale, a code of 0 is a weight of 0.
    quantization.scale = np.pad(quantization.scale, (0, rows), mode="edge")
    quantization.zeroPoint = np.pad(quantization.zeroPoint, (0, rows), mode="edge")


if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(twin(first_bundle()))
