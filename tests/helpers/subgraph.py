"""A subgraph that operators are added to: their constants, options and results are worked out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partialmethod
from typing import Any

import numpy as np
import numpy.typing as npt
from ai_edge_litert import schema_py_generated as schema

from helpers.make_bundle import DTYPES, add_buffer, added, code_of, type_of

Operand = int | float | npt.NDArray[Any]

_COMPARISONS = ("EQUAL", "NOT_EQUAL", "GREATER", "GREATER_EQUAL", "LESS", "LESS_EQUAL")
_OPTIONS = dict.fromkeys(("MEAN", "SUM", "REDUCE_MAX", "REDUCE_MIN", "REDUCE_ANY"), "Reducer")
_OPTIONS |= {"BATCH_MATMUL": "BatchMatMul", "CONV_2D": "Conv2D"}


class Subgraph:
    """The subgraph ``index`` of ``model``, a ``ModelT`` of the schema; values are the indices of its tensors."""

    index = 0
    add: Callable[..., int]
    mul: Callable[..., int]

    def __init__(self, model: Any, index: int = 0) -> None:
        self.model, self.index = model, index

    @property
    def main(self) -> Any:
        return self.model.subgraphs[self.index]

    def shape(self, tensor: int) -> list[int]:
        shape = self.main.tensors[tensor].shape
        return [] if shape is None else [int(size) for size in shape]

    def dtype(self, tensor: int) -> np.dtype[Any]:
        return DTYPES[self.main.tensors[tensor].type]

    def tensor(self, shape: Sequence[int], dtype: npt.DTypeLike = np.float32, name: str = "") -> int:
        label = (name or f"t{len(self.main.tensors)}").encode()
        return added(self.main.tensors, schema.TensorT(name=label, shape=list(shape), buffer=0, type=type_of(dtype)))

    def constant(self, values: npt.ArrayLike, dtype: npt.DTypeLike = np.float32) -> int:
        index = self.tensor(np.shape(values), dtype)
        self.main.tensors[index].buffer = add_buffer(self.model, np.asarray(values, dtype).tobytes())
        return index

    def emit(self, name: str, inputs: Iterable[int], outputs: Iterable[int], **options: Any) -> Any:
        """Append the operator ``name``, with its default options but for ``options``."""
        code = code_of(self.model, name, 2 if name == "BROADCAST_TO" else 1)
        op = schema.OperatorT(opcodeIndex=code, inputs=list(inputs), outputs=list(outputs))
        title = _OPTIONS.get(name) or "".join(part.capitalize() for part in name.split("_"))
        if hasattr(schema, f"{title}OptionsT") and hasattr(schema.BuiltinOptions, f"{title}Options"):
            op.builtinOptions = getattr(schema, f"{title}OptionsT")()
            op.builtinOptionsType = getattr(schema.BuiltinOptions, f"{title}Options")
        for key, setting in options.items():
            assert hasattr(op.builtinOptions, key), f"{title}Options has no {key}"
            setattr(op.builtinOptions, key, setting)
        self.main.operators.append(op)
        return op

    def call(
        self, name: str, *operands: Operand, shape: Sequence[int] | None = None, dtype: Any = None, **options: Any
    ) -> int:
        """The result of a new operator.

        ``operands`` are tensors (int), or numbers and arrays (float, array) that become constants. Without ``shape``
        the operands are broadcast; without ``dtype`` the result has that of the first, or bool of a comparison.
        """
        inputs = [
            operand
            if isinstance(operand, (int, np.integer))
            else self.constant(operand, operand.dtype if isinstance(operand, np.ndarray) else np.float32)
            for operand in operands
        ]
        if shape is None:
            shape = np.broadcast_shapes(*(tuple(self.shape(i)) for i in inputs if i >= 0))
        if dtype is None:
            first = inputs[1] if name.startswith("SELECT") else inputs[0]
            dtype = np.bool_ if name in _COMPARISONS else self.dtype(first)
        result = self.tensor(shape, dtype)
        self.emit(name, inputs, [result], **options)
        return result

    def reshape(self, x: int, shape: Sequence[int]) -> int:
        return self.call("RESHAPE", x, np.array(shape, np.int32), shape=shape)

    def transpose(self, x: int, order: Sequence[int]) -> int:
        shape = self.shape(x)
        return self.call("TRANSPOSE", x, np.array(order, np.int32), shape=[shape[i] for i in order])

    def slice(self, x: int, begin: Sequence[int], size: Sequence[int]) -> int:
        return self.call("SLICE", x, np.array(begin, np.int32), np.array(size, np.int32), shape=size)

    def part(self, x: int, begin: int, size: int, axis: int = -1) -> int:
        """``size`` elements of ``x`` along ``axis``."""
        shape = self.shape(x)
        at = [0] * len(shape)
        at[axis], shape[axis] = begin, size
        return self.slice(x, at, shape)

    def join(self, parts: Sequence[int], axis: int = -1) -> int:
        shape = self.shape(parts[0])
        shape[axis] = sum(self.shape(part)[axis] for part in parts)
        return self.call("CONCATENATION", *parts, shape=shape, axis=axis % len(shape))

    def reduce(self, name: str, x: int, axis: int) -> int:
        shape = self.shape(x)
        shape[axis] = 1
        return self.call(name, x, np.array([axis % len(shape)], np.int32), shape=shape, keepDims=True)

    def cast(self, x: int, dtype: npt.DTypeLike) -> int:
        return self.call("CAST", x, shape=self.shape(x), dtype=dtype)

    def gather(self, x: int, indices: Sequence[int], axis: int) -> int:
        """``x`` with ``indices`` along ``axis``."""
        shape = self.shape(x)
        shape[axis] = len(indices)
        return self.call("GATHER", x, np.array(indices, np.int32), shape=shape, axis=axis % len(shape))

    def product(self, x: int, weight: int) -> int:
        """FULLY_CONNECTED of ``x`` with ``weight``, without a bias."""
        shape = [*self.shape(x)[:-1], self.shape(weight)[0]]
        return self.call("FULLY_CONNECTED", x, weight, -1, shape=shape, keepNumDims=True)


# ``g.mul(x, 0.5)`` is ``g.call("MUL", x, 0.5)``.
for _name in (
    *("ADD", "SUB", "MUL", "DIV", "POW", "MINIMUM", "MAXIMUM", "LOGICAL_AND", "LOGICAL_OR", *_COMPARISONS),
    *("NEG", "ABS", "EXP", "LOG", "SQUARE", "SQRT", "RSQRT", "TANH", "LOGISTIC", "RELU", "COS", "SIN", "LOGICAL_NOT"),
    *("FLOOR", "ROUND", "SIGN"),
):
    setattr(Subgraph, _name.lower(), partialmethod(Subgraph.call, _name))
