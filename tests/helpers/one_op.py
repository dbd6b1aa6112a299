"""A TFLite model of one operator, what Google's interpreter makes of it, and what the evaluator does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter, OpResolverType
from seam import FlatGraph, evaluate, flat

from helpers.make_bundle import add_buffer, added, code_of, pack


@dataclass(frozen=True)
class Grid:
    """Quantization of a tensor: scales along ``axis``, zero points."""

    scale: Sequence[float]
    zero_point: Sequence[int]
    axis: int = 0


@dataclass(frozen=True)
class const:  # noqa: N801 - reads as a word in tables of cases
    """An operand that is stored in the model."""

    values: npt.NDArray[Any]
    grid: Grid | None = None


@dataclass(frozen=True)
class OneOp:
    """An operator with its operands: arrays are inputs, :class:`const` are constants, None is absent."""

    kind: str
    operands: tuple[Any, ...]
    options: Any = None
    results: tuple[str, ...] = ("float32",)
    result_grid: Grid | None = None
    input_grid: Grid | None = None
    result_shape: tuple[int, ...] = (1,)

    def model(self, shapes: Sequence[Sequence[int]] = ()) -> bytes:
        """The model, packed; without ``shapes`` of results the runtime finds them, unless it asks for them."""
        op = schema.OperatorT(opcodeIndex=0, inputs=[], outputs=[])
        graph = schema.SubGraphT(name=b"main", tensors=[], inputs=[], operators=[op])
        model = schema.ModelT(version=3, description=b"one op", operatorCodes=[], buffers=[schema.BufferT()])
        code_of(model, self.kind, {"FULLY_CONNECTED": 4, "BATCH_MATMUL": 4, "BROADCAST_TO": 2}.get(self.kind, 1))
        for position, operand in enumerate(self.operands):
            if operand is None:
                op.inputs.append(-1)
                continue
            stored = isinstance(operand, const)
            values = operand.values if stored else operand
            grid = operand.grid if stored else self.input_grid if values.dtype.kind == "i" else None
            tensor = _tensor(f"i{position}", values.shape, str(values.dtype), grid)
            if stored:
                tensor.buffer = add_buffer(model, values.tobytes())
            else:
                graph.inputs.append(len(graph.tensors))
            op.inputs.append(added(graph.tensors, tensor))
        for position, kind in enumerate(self.results):
            shape = shapes[position] if shapes else self.result_shape
            op.outputs.append(added(graph.tensors, _tensor(f"o{position}", shape, kind, self.result_grid)))
        if self.options is not None:
            op.builtinOptions = self.options
            op.builtinOptionsType = getattr(schema.BuiltinOptions, type(self.options).__name__.removesuffix("T"))
        graph.outputs = op.outputs
        signature = schema.SignatureDefT(signatureKey=b"main", subgraphIndex=0)
        signature.inputs, signature.outputs = (
            [schema.TensorMapT(name=graph.tensors[i].name, tensorIndex=i) for i in ends]
            for ends in (graph.inputs, graph.outputs)
        )
        model.subgraphs, model.signatureDefs = [graph], [signature]
        return pack(model)

    def inputs(self) -> dict[str, npt.NDArray[Any]]:
        """The operands that are inputs, by name."""
        return {f"i{n}": v for n, v in enumerate(self.operands) if isinstance(v, np.ndarray)}

    def interpreted(self) -> list[npt.NDArray[Any]]:
        """The results of Google's interpreter, with its builtin kernels; of codes, the real numbers."""
        interpreter = Interpreter(
            model_content=self.model(), experimental_op_resolver_type=OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
        )
        interpreter.allocate_tensors()
        for detail in interpreter.get_input_details():
            interpreter.set_tensor(detail["index"], self.inputs()[detail["name"]])
        interpreter.invoke()
        results = [interpreter.get_tensor(detail["index"]) for detail in interpreter.get_output_details()]
        return [_real(values, self.result_grid) for values in results]

    def flat(self) -> FlatGraph:
        """The graph of the model, whose results have the shapes that the interpreter finds, if it runs."""
        try:
            shapes = [result.shape for result in self.interpreted()]
        except (RuntimeError, ValueError):
            shapes = []
        return flat(self.model(shapes))

    def samples(self, count: int = 1) -> dict[str, npt.NDArray[Any]]:
        """What the evaluator is given, ``[count, *shape]`` an input: each sample has the elements in another order."""
        real = {name: _real(values, self.input_grid) for name, values in self.inputs().items()}
        return {name: np.stack([np.roll(values, by) for by in range(count)]) for name, values in real.items()}

    def evaluated(self) -> list[npt.NDArray[Any]]:
        """The evaluator's results."""
        graph = self.flat()
        return [values[0] for values in evaluate(graph, self.samples(), list(graph.outputs.values()))]


def _real(values: npt.NDArray[Any], grid: Grid | None) -> npt.NDArray[Any]:
    if grid is None or values.dtype.kind not in "iu":
        return values
    return (values.astype(np.float32) - np.float32(grid.zero_point[0])) * np.float32(grid.scale[0])


def _tensor(name: str, shape: Sequence[int], kind: str, grid: Grid | None) -> Any:
    number = getattr(schema.TensorType, kind.upper())
    tensor = schema.TensorT(name=name.encode(), shape=list(shape), type=number, buffer=0)
    if grid is not None:
        quantization = tensor.quantization = schema.QuantizationParametersT(quantizedDimension=grid.axis)
        quantization.scale = np.array(grid.scale, np.float32)
        quantization.zeroPoint = np.array(grid.zero_point, np.int64)
    return tensor
