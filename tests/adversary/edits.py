"""The words that mutations and rewrites are written in: places of a graph, and what to do to a value there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
from ai_edge_litert import schema_py_generated as schema
from helpers.surgery import Graph, Norm, sound

Change = Callable[[Graph], object]
"""Changes a graph in place; returns ``False`` where it does not apply to this graph."""
Edit = Callable[[Graph, int], int]
"""Computes a new value from one."""
NormEdit = Callable[[Graph, Norm], object]
"""Changes a norm in place."""

P = ParamSpec("P")
Place = TypeVar("Place", int, Norm)
Result = TypeVar("Result")


def a_change(function: Callable[Concatenate[Graph, P], object]) -> Callable[P, Change]:
    """``function`` called without its graph: a change that is still to be made."""
    return lambda *given, **named: lambda g: function(g, *given, **named)


def an_edit(function: Callable[Concatenate[Graph, Place, P], Result]) -> Callable[P, Callable[[Graph, Place], Result]]:
    """``function`` called without its graph and value or norm: an edit of any that is still to be made."""
    return lambda *given, **named: lambda g, place: function(g, place, *given, **named)


WINDOW = 16
"""Slots that the shipped drafters' sliding layers see."""
LOWEST = -1e9
"""What their hidden scores get."""


@dataclass(frozen=True)
class Sample:
    """Inputs on which a case shows, beside those on which every case is tried.

    ``mask`` shows "holes" (some of the past, and the position's own), "past" (all of it, as runtimes make it), "all"
    (what is to come, too) or "one" (its own alone).
    """

    position: int
    activations: float = 1.0  # how many times louder than usual
    keys: float = 1.0
    values: float = 1.0
    mask: str = "holes"
    change: Callable[[dict[str, npt.NDArray[Any]]], object] | None = None  # of the arrays, by name


@dataclass(frozen=True)
class Case:
    """One named change to a sound drafter."""

    family: str
    name: str
    change: Change
    layers: tuple[int, ...] = (0, 3)  # of the shipped drafter's four, kept before the change is made
    why: str = ""  # of a mutation that the interpreter cannot tell or run, what makes it another function
    rounds: bool = False  # of a rewrite, that its weights are its own: rounded, or shared by layers
    shows: tuple[Sample, ...] = ()  # inputs where a mutation that hides elsewhere is another function
    rounding: float = 0.0  # of the outputs' range: a rewrite moves no more, a mutation does
    exact: bool = False  # QUANTIZE and DEQUANTIZE of activations are executed, not taken away
    slots: int = 256  # of the caches, before the change is made

    @property
    def label(self) -> str:
        return f"{self.family}/{self.name}"

    def apply(self, style: str) -> Graph | None:
        """The changed drafter of ``style``; None where the change does not apply to it."""
        graph = sized(style, self.layers, self.slots)
        return None if self.change(graph) is False else graph


def sized(style: str, layers: tuple[int, ...], slots: int) -> Graph:
    """The sound drafter of ``style``, its caches of ``slots``."""
    graph = sound(style, layers)
    if slots == 256:
        return graph
    graph.open_all()
    # The full layer's four heads of 64 are 256 numbers, too.
    widths, longer = ([1, 256], [1, 1, 256]), [1, 1, 1, slots]
    for index, tensor in enumerate(graph.main.tensors):
        shape = graph.shape(index)
        if not graph.is_constant(index) and shape not in widths:
            tensor.shape = [slots if size == 256 else size for size in shape]
        elif shape == [256]:
            first, tensor.shape = graph.value(index)[0], [slots]
            graph.set_value(index, first + np.arange(slots))
        elif shape == [4] and graph.dtype(index) == np.int32 and graph.value(index).tolist() == [1, 1, 1, 256]:
            graph.set_value(index, longer)
    return graph


def cases(
    family: str, changes: Mapping[str, Change | tuple[Change, str]], *shows: Sample, why: str = "", **others: Any
) -> tuple[Case, ...]:
    """A case for each of ``changes``, all told apart by the same inputs; with a change may stand its own ``why``."""
    both = {name: change if isinstance(change, tuple) else (change, why) for name, change in changes.items()}
    return tuple(Case(family, name, change, shows=shows, why=why, **others) for name, (change, why) in both.items())


def at(g: Graph, place: str) -> int:
    """The tensor called ``place``: ``"0.scores"`` of a layer, an input, an output, a projection…"""
    if place in ("activations", "input_pos", "mask", "param_tensor") or place.startswith("kv_cache_"):
        return g.input(place)
    if place in ("logits", "projected_activations"):
        return g.output(place)
    if place == "state":
        return g.normed("final_norm")
    if place in ("pre_projection", "lm_head", "post_projection"):
        return int(g.linear(place).outputs[0])
    index, _, name = place.partition(".")
    return int(getattr(g.layer(int(index)), name))


def edge(place: str, edit: Edit) -> Change:
    """Let everything that reads ``place`` read ``edit`` of it."""
    return lambda g: g.insert(at(g, place), lambda x: edit(g, x))


def edges(table: Mapping[str, Mapping[str, Edit]]) -> dict[str, Change]:
    """Of a table of edits by place, each edit as an :func:`edge` called ``place_name``."""
    return {f"{place}_{name}": edge(place, edit) for place, edits in table.items() for name, edit in edits.items()}


def put(place: str, edit: Edit, reader: Callable[[Graph], Any]) -> Change:
    """Let only the operator ``reader`` read ``edit`` of ``place``."""
    return lambda g: g.insert(at(g, place), lambda x: edit(g, x), [reader(g)])


def unary(name: str) -> Edit:
    return lambda g, x: g.call(name, x)


def with_number(name: str, number: float | np.ndarray) -> Edit:
    return lambda g, x: g.call(name, x, np.asarray(number, np.float32))


def gathered(indices: Sequence[int], axis: int) -> Edit:
    return lambda g, x: g.gather(x, indices, axis)


@an_edit
def chain(g: Graph, x: int, *edits: Edit) -> int:
    for step in edits:
        x = step(g, x)
    return x


def grid(step: float) -> Edit:
    """To the next multiple of ``step``."""
    return chain(with_number("MUL", 1 / step), unary("ROUND"), with_number("MUL", step))


def mul(number: float | np.ndarray) -> Edit:
    return with_number("MUL", number)


def add(number: float | np.ndarray) -> Edit:
    return with_number("ADD", number)


def turn(g: Graph, a: int, b: int, cos: int, sin: int) -> tuple[int, int]:
    left = g.sub(g.mul(a, cos), g.mul(b, sin))
    return left, g.add(g.mul(b, cos), g.mul(a, sin))


def halves(g: Graph, q: int) -> tuple[int, int]:
    half = g.shape(q)[-1] // 2
    return g.part(q, 0, half), g.part(q, half, half)


def through(dtype: Any) -> Edit:
    return lambda g, x: g.cast(g.cast(x, dtype), np.float32)


def parameters(scale: float, zero_point: int = 0) -> Any:
    scales, zero_points = np.array([scale], np.float32), np.array([zero_point], np.int64)
    return schema.QuantizationParametersT(scale=scales, zeroPoint=zero_points)


@a_change
def each(g: Graph, *changes: Change) -> None:
    for step in changes:
        step(g)


def quantized(g: Graph, x: int, scale: float, zero_point: int = 0, dtype: Any = np.int8) -> int:
    """Integer codes of ``x``."""
    codes = g.call("QUANTIZE", x, dtype=dtype)
    g.main.tensors[codes].quantization = parameters(scale, zero_point)
    return codes


def dequantized(g: Graph, x: int) -> int:
    return g.call("DEQUANTIZE", x, dtype=np.float32)


def as_codes(
    g: Graph, name: str, dtype: Any, scale: float, zero_point: int = 0, back: Edit = dequantized, grid: bool = True
) -> None:
    """Let the input ``name`` be integers, which ``back`` makes floats; with ``grid``, the file says what they mean."""
    tensor = g.input(name)
    described, ends, step = g.main.tensors[tensor], np.iinfo(dtype), scale or 1.0
    described.type = {np.int8: schema.TensorType.INT8, np.int16: schema.TensorType.INT16}[dtype]
    if grid:
        described.quantization = parameters(scale, zero_point)
    g.insert(tensor, lambda x: back(g, x))
    g.adapt[name] = lambda a: np.clip(np.round(a / step) + zero_point, ends.min, ends.max).astype(dtype)


def chosen(condition: Edit, then: Edit) -> Edit:
    """``then`` of a value where ``condition`` of it holds, the value elsewhere."""
    return lambda g, x: g.call("SELECT_V2", condition(g, x), then(g, x), x, shape=g.shape(x))


def clamped(bound: float) -> Edit:
    return chain(with_number("MINIMUM", bound), with_number("MAXIMUM", -bound))


def over_int(scale: float, zero_point: int = 0, dtype: Any = np.int8) -> Edit:
    """QUANTIZE and DEQUANTIZE: statically quantized activations, whose numbers are meant to be what they were."""
    return lambda g, x: dequantized(g, quantized(g, x, scale, zero_point, dtype))
