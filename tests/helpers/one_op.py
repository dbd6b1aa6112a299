"""A TFLite model of one operator, what Google's interpreter makes of it, and what the evaluator does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from ai_edge_litert.interpreter import Interpreter, OpResolverType
from seam import FlatGraph, evaluate, flat

from helpers.make_bundle import code_of, pack
from helpers.make_graph import Graph, Model


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
        model = Model()
        graph = model.graph("main")
        operands = []
        for position, operand in enumerate(self.operands):
            if operand is None:
                operands.append(-1)
            elif isinstance(operand, const):
                operands.append(graph.constant(operand.values, operand.values.dtype))
                _quantize(graph, operands[-1], operand.grid)
            else:
                operands.append(graph.input(f"i{position}", operand.shape, operand.dtype))
                _quantize(graph, operands[-1], self.input_grid if operand.dtype.kind == "i" else None)
        for position, kind in enumerate(self.results):
            shape, name = shapes[position] if shapes else self.result_shape, f"o{position}"
            graph.outputs[name] = graph.tensor(shape, kind, name)
            _quantize(graph, graph.outputs[name], self.result_grid)
        code_of(model.tree, self.kind, {"FULLY_CONNECTED": 4, "BATCH_MATMUL": 4, "BROADCAST_TO": 2}.get(self.kind, 1))
        op = graph.emit(self.kind, operands, graph.outputs.values())
        if self.options is not None:
            op.builtinOptions = self.options
        graph.sign("main")
        return pack(model.tree)

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


def _quantize(graph: Graph, tensor: int, grid: Grid | None) -> None:
    if grid is not None:
        graph.scaled(tensor, grid.scale)
        quantization = graph.main.tensors[tensor].quantization
        quantization.zeroPoint, quantization.quantizedDimension = np.array(grid.zero_point, np.int64), grid.axis
