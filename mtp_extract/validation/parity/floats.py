"""The drafter's section in floats: the same graph, with every tensor of codes as float32.

Constants become the numbers that their codes stand for, activations and caches lose their scales, and QUANTIZE and
DEQUANTIZE between two floats become CAST, which does nothing. What Google's interpreter computes of it is the graph's
function, rounded nowhere but in float additions. Google's own classes of the schema take the section apart and write
it again. The float32 constants follow the flatbuffer, some rows at a time: what they need is disk, not memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mtp_extract.io.files import aligned
from mtp_extract.litertlm.container import TFLITE_IDENTIFIER
from mtp_extract.litertlm.storage import QuantizedTensor
from mtp_extract.litertlm.tflite import Tensor, TensorType, TfliteModel

_CAST = 53
_ALIGNMENT = 16
_ELEMENTS = 1 << 20  # numbers that are made at a time


def write_in_floats(model: TfliteModel, path: Path) -> None:
    """Write the section of ``model`` in floats to ``path``.

    Raises:
        UnsupportedError: it has codes that this release cannot read.
        FormatError: damaged quantization.
    """
    from ai_edge_litert import schema_py_generated as schema

    made = schema.ModelT.InitFromPackedBuf(model.region.read(0, model.region.size))
    cast, constants = len(made.operatorCodes), list[tuple[Any, QuantizedTensor]]()
    made.operatorCodes.append(schema.OperatorCodeT(deprecatedBuiltinCode=_CAST, version=1, builtinCode=_CAST))
    for graph, known in zip(made.subgraphs, model.subgraphs, strict=True):
        for tensor, was in zip(graph.tensors, known.tensors, strict=True):
            if is_coded(was):
                tensor.type, tensor.quantization = int(TensorType.FLOAT32), None
                if model.has_data(was):
                    tensor.buffer = len(made.buffers)
                    made.buffers.append(schema.BufferT(offset=1, size=4 * was.elements))
                    constants.append((made.buffers[-1], QuantizedTensor.of(model, was)))
        for node, operator in zip(graph.operators, known.operators, strict=True):
            ends = {graph.tensors[index].type for index in (*operator.inputs, *operator.outputs)}
            if operator.kind in ("QUANTIZE", "DEQUANTIZE") and ends == {int(TensorType.FLOAT32)}:
                node.opcodeIndex, node.builtinOptionsType, node.builtinOptions = cast, 0, None
    _keep_what_is_read(made, model)
    end = len(_packed(made))  # no number changes its length
    for buffer, _ in constants:
        buffer.offset = aligned(end, _ALIGNMENT)
        end = buffer.offset + buffer.size
    with path.open("wb") as file:
        file.write(_packed(made))
        for buffer, constant in constants:
            file.seek(buffer.offset)
            for at in range(0, constant.tensor.elements, _ELEMENTS):
                file.write(constant.floats(at, min(at + _ELEMENTS, constant.tensor.elements)).data)


def _keep_what_is_read(made: Any, model: TfliteModel) -> None:
    """Leave out data that nothing reads any more, and bring in what lies behind the old flatbuffer."""
    read = {tensor.buffer for graph in made.subgraphs for tensor in graph.tensors}
    read |= {entry.buffer for entry in made.metadata or ()}
    for index, buffer in enumerate(made.buffers):
        if index not in read:
            buffer.data, buffer.offset, buffer.size = None, 0, 0
        elif buffer.data is None and buffer.offset > 1:
            buffer.data = np.frombuffer(model.region.read(buffer.offset, buffer.size), np.uint8)
            buffer.offset = buffer.size = 0


def _packed(made: Any) -> bytes:
    import flatbuffers

    builder = flatbuffers.Builder(1 << 20)
    builder.Finish(made.Pack(builder), TFLITE_IDENTIFIER)
    return bytes(builder.Output())


def is_coded(tensor: Tensor) -> bool:
    """Whether the integers of ``tensor`` stand for real numbers by scales of its own."""
    scales = tensor.quantization
    integers = tensor.type not in (TensorType.FLOAT32, TensorType.FLOAT16, TensorType.BFLOAT16)
    return integers and scales is not None and (scales.scales.count > 0 or scales.details != "none")
