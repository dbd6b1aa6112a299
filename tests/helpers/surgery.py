"""Surgery on a drafter's graph: find a place by what it means, and change what happens there.

A :class:`Graph` is a model of the schema's object API with the constants' roles known. Places are tensors with a
meaning (``g.layer(0).scores``, ``g.norm("final_norm").x``); a change is made by computing something new from them and
letting their readers read that::

    g = sound("torch")
    layer = g.layer(0)
    g.insert(layer.scores, lambda scores: g.call("MUL", scores, 0.125))
    path.write_bytes(g.data())

Order of operators and what nothing reads any more are put right when the model is packed.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from ai_edge_litert import schema_py_generated as schema
from seam import read

from helpers.make_bundle import Memory, add_buffer, added, kind, load, pack
from helpers.subgraph import Subgraph
from helpers.variant_files import variant

STYLES = {"torch": "torch_plain_norm", "jax": "jax_kv_mixed"}
"""How an exporter writes: plain operators with torch's names, or composites with those of Google's own code."""

Array = npt.NDArray[Any]
Change = Callable[[int], int]


class Norm:
    """One RMSNorm: tensors ``x``, ``out`` and ``weight``; operators ``square`` (x·x), ``average`` (mean in torch, sum
    in jax), ``add`` (+ epsilon), ``root`` (1/sqrt), ``scale`` (x times that), ``weigh`` (times the weight).
    """

    def __init__(self, g: Graph, role: str) -> None:
        self.weight = weight = g.roles[role]
        if g.kind(g.reader(weight)) == "STABLEHLO_COMPOSITE":
            g.open(g.reader(weight))
        self.weigh = g.reader(weight)
        self.out, self.scale = int(self.weigh.outputs[0]), g.producer(_other(self.weigh, weight))
        factors = [op for op in map(g.producer, self.scale.inputs) if op is not None]
        (self.root,) = [op for op in factors if g.kind(op) in ("RSQRT", "POW")]
        self.x = _other(self.scale, int(self.root.outputs[0]))
        # The nearest ADD, mean and square before the root are its own; what is further back is not.
        back = list(g.before(int(self.root.inputs[0])))
        self.add = next(op for op in back if g.kind(op) == "ADD")
        self.average = next(op for op in back if g.kind(op) in ("MEAN", "SUM"))
        self.square = g.producer(int(self.average.inputs[0]))


class Layer:
    """The places of one layer: tensors, and operators where it says so.

    ``visible`` is the mask that the operator ``select`` selects by; the operator ``masker`` applies it to the scores,
    which makes them ``masked``. ``rotated`` is the query after RoPE, ``queries`` the same by KV heads. Operators are
    also ``softmax``, the products ``score`` and ``mix``, the residual additions ``first`` and ``second``, ``scaler``.
    """

    def __init__(self, g: Graph, index: int) -> None:
        name = f"layers.{index}"
        self._find_sums(g, name)
        self._find_attention(g, name)
        self.select = next(op for op in g.before(self.masked, self.scores) if g.kind(op) == "SELECT_V2")
        self.visible = int(self.select.inputs[0])
        self._find_rotation(g)
        self._find_feed_forward(g, name)

    def _find_sums(self, g: Graph, name: str) -> None:
        """From the layer's result back to its stream: the scalar, the second sum and the first."""
        factor = g.roles[f"{name}.layer_scalar"]
        self.scaler = g.reader(factor)
        self.out = int(self.scaler.outputs[0])
        self.summed = _other(self.scaler, factor)

        self.second = g.producer(self.summed)
        self.ffw_branch = g.normed(f"{name}.post_ffw_norm")
        self.middle = _other(self.second, self.ffw_branch)

        self.first = g.producer(self.middle)
        self.attention_branch = g.normed(f"{name}.post_attention_norm")
        self.stream = _other(self.first, self.attention_branch)

    def _find_attention(self, g: Graph, name: str) -> None:
        """From the o projection back to the q projection: both products, and the softmax between them."""
        attend, query = g.linear(f"{name}.o_proj"), g.linear(f"{name}.q_proj")
        self.merged, self.attention_out = int(attend.inputs[0]), int(attend.outputs[0])
        self.attended = int(g.producer(self.merged).inputs[0])
        self.mix = g.producer(self.attended)
        self.probabilities, self.value = (int(operand) for operand in self.mix.inputs)

        self.softmax = g.producer(self.probabilities)
        self.masked = int(self.softmax.inputs[0])
        self.masker = g.producer(self.masked)
        self.scores = int(self.masker.inputs[1 if g.kind(self.masker) == "SELECT_V2" else 0])
        self.score = g.producer(self.scores)
        self.queries, self.key = (int(operand) for operand in self.score.inputs)

        self.query = int(query.outputs[0])
        self.query_normed = g.normed(f"{name}.q_norm")

    def _find_rotation(self, g: Graph) -> None:
        grouping = g.producer(self.queries)
        self.rotated = int(grouping.inputs[0]) if g.kind(grouping) == "RESHAPE" else self.queries
        turning = list(g.before(self.rotated, self.query_normed))
        self.cos, self.sin = (next(int(op.outputs[0]) for op in turning if g.kind(op) == k) for k in ("COS", "SIN"))
        self.angle = int(g.producer(self.cos).inputs[0])

    def _find_feed_forward(self, g: Graph, name: str) -> None:
        gate, up, down = (g.linear(f"{name}.{role}_proj") for role in ("gate", "up", "down"))
        self.ffw_in, self.gate, self.up = int(gate.inputs[0]), int(gate.outputs[0]), int(up.outputs[0])
        self.product, self.down = int(down.inputs[0]), int(down.outputs[0])
        self.activated = _other(g.producer(self.product), self.up)


@dataclass
class Graph(Subgraph):
    """A model that can be changed."""

    model: Any  # the schema's ``ModelT``
    roles: dict[str, int]  # role → index of its constant in the main subgraph, of the sound model
    adapt: dict[str, Callable[[Array], Array]] = field(default_factory=dict)
    """Signature input → how the sound model's array becomes this one's, where a rewrite changed an input."""

    # What is there.

    @property
    def ops(self) -> list[Any]:
        return self.main.operators  # type: ignore[no-any-return]

    def kind(self, op: Any) -> str:
        return kind(self.model, op)

    def producer(self, tensor: int) -> Any:
        """The operator that computes ``tensor``; None of an input or a constant."""
        return next((op for op in self.ops if tensor in list(op.outputs)), None)

    def readers(self, tensor: int) -> list[Any]:
        return [op for op in self.ops if tensor in list(op.inputs)]

    def reader(self, tensor: int) -> Any:
        """The one operator that reads ``tensor``."""
        (op,) = self.readers(tensor)
        return op

    def is_constant(self, tensor: int) -> bool:
        data = self.model.buffers[self.main.tensors[tensor].buffer].data
        return data is not None and len(data) > 0

    def value(self, tensor: int) -> Array:
        """The numbers of a constant, as stored."""
        data = self.model.buffers[self.main.tensors[tensor].buffer].data
        return np.frombuffer(bytes(data), self.dtype(tensor)).reshape(self.shape(tensor))

    def floats(self, tensor: int) -> Array:
        """The numbers of a weight: INT8 or INT4 codes times scales along the first axis, or floats as they are."""
        described = self.main.tensors[tensor]
        if described.type == schema.TensorType.FLOAT32:
            return self.value(tensor)
        data = np.frombuffer(bytes(self.model.buffers[described.buffer].data), np.int8)
        if described.type == schema.TensorType.INT4:
            data = np.stack([data << 4 >> 4, data >> 4], -1).reshape(-1)
        rows, width = self.shape(tensor)
        codes = data[: rows * width].reshape(rows, width).astype(np.float32)
        return codes * np.asarray(described.quantization.scale, np.float32).reshape(-1, 1)

    def input(self, name: str) -> int:
        """The tensor of the signature's input ``name``."""
        return next(int(m.tensorIndex) for m in self.model.signatureDefs[0].inputs if m.name.decode() == name)

    def output(self, name: str) -> int:
        """The tensor of the signature's output ``name``."""
        return next(int(m.tensorIndex) for m in self.model.signatureDefs[0].outputs if m.name.decode() == name)

    def before(self, tensor: int, stop: int | None = None) -> Iterator[Any]:
        """The operators that ``tensor`` is computed by, nearest first, without what ``stop`` is computed by."""
        producers = {int(i): op for op in self.ops for i in op.outputs}
        visited: set[int] = set()
        queue = [tensor]
        while queue:
            current = queue.pop(0)
            op = None if current == stop else producers.get(current)
            if op is not None and id(op) not in visited:
                visited.add(id(op))
                yield op
                queue.extend(int(i) for i in op.inputs)

    # Places.

    def linear(self, role: str) -> Any:
        """The FULLY_CONNECTED that multiplies by ``role``."""
        return self.reader(self.roles[role])

    def normed(self, role: str) -> int:
        """The result of the norm whose weight is ``role``."""
        return int(self.reader(self.roles[role]).outputs[0])

    def norm(self, role: str) -> Norm:
        """The operators of the norm whose weight is ``role``; its composite is opened."""
        return Norm(self, role)

    def layer(self, index: int) -> Layer:
        return Layer(self, index)

    # Changes.

    def buffer(self, data: bytes) -> int:
        return add_buffer(self.model, data)

    def set_value(self, tensor: int, values: npt.ArrayLike) -> None:
        """Give a constant of its own to ``tensor``: other tensors may share its buffer."""
        array = np.asarray(values, self.dtype(tensor)).reshape(self.shape(tensor))
        self.main.tensors[tensor].buffer = self.buffer(array.tobytes())

    def insert(self, tensor: int, change: Change, into: Iterable[Any] | None = None) -> int:
        """Let the readers of ``tensor`` (or only those of ``into``) read ``change(tensor)``; returns that.

        Without ``into``, the signature's outputs change with them.
        """
        readers = self.readers(tensor) if into is None else list(into)
        new = change(tensor)
        for op in readers:
            op.inputs = [new if i == tensor else int(i) for i in op.inputs]
        if into is None:
            self.main.outputs = [new if i == tensor else int(i) for i in self.main.outputs]
            for entry in self.model.signatureDefs[0].outputs:
                entry.tensorIndex = new if entry.tensorIndex == tensor else entry.tensorIndex
        return new

    def rewire(self, old: int, new: int, into: Iterable[Any] | None = None) -> None:
        """Let the readers of ``old`` (or only those of ``into``) read ``new``."""
        self.insert(old, lambda _: new, into)

    def recode(self, op: Any, name: str) -> None:
        """Make ``op`` another operator, with that one's default options."""
        other = self.emit(name, op.inputs, op.outputs)
        self.ops.remove(other)
        op.opcodeIndex = other.opcodeIndex
        op.builtinOptions, op.builtinOptionsType = other.builtinOptions, other.builtinOptionsType

    def set_input(self, op: Any, position: int, tensor: int) -> None:
        inputs = [int(i) for i in op.inputs]
        inputs[position] = tensor
        op.inputs = inputs

    def open(self, op: Any) -> None:
        """Replace a composite by the operators of its body."""
        body = self.model.subgraphs[op.builtinOptions2.decompositionSubgraphIndex]
        places = dict(zip(map(int, body.inputs), map(int, op.inputs), strict=True))
        places |= zip(map(int, body.outputs), map(int, op.outputs), strict=True)
        for index, tensor in enumerate(body.tensors):
            if index not in places:
                places[index] = added(self.main.tensors, copy.deepcopy(tensor))
        at = self.ops.index(op)
        self.ops[at : at + 1] = operators = [copy.deepcopy(inner) for inner in body.operators]
        for inner in operators:
            inner.inputs = [places[int(i)] if i >= 0 else -1 for i in inner.inputs]
            inner.outputs = [places[int(i)] for i in inner.outputs]

    def open_all(self) -> bool:
        """Replace every composite of the main subgraph; False if there was none."""
        composites = [op for op in self.ops if self.kind(op) == "STABLEHLO_COMPOSITE"]
        for op in composites:
            self.open(op)
        return bool(composites) and (self.open_all() or True)

    def body(self, op: Any) -> Graph:
        """The body of the composite ``op``, as a graph of its own that can be changed; it has no roles."""
        model = copy.copy(self.model)
        model.subgraphs = [self.model.subgraphs[op.builtinOptions2.decompositionSubgraphIndex]]
        return Graph(model, {})

    # The file.

    def tidy(self) -> None:
        """Bring operators into an order of execution, and drop operators and tensors that nothing reads."""
        graph = self.main
        computing = {id(op) for output in graph.outputs for op in self.before(int(output))}
        waiting = [op for op in self.ops if id(op) in computing]
        kept = {int(i) for i in (*graph.inputs, *graph.outputs)}
        kept |= {int(i) for op in waiting for i in (*op.inputs, *op.outputs)} - {-1}
        blocks = [details for tensor in kept if (details := _blocks(graph.tensors[tensor])) is not None]
        kept |= {int(i) for details in blocks for i in (details.scales, details.zeroPoints)} - {-1}

        ready = {-1, *range(len(graph.tensors))} - {int(i) for op in waiting for i in op.outputs}
        graph.operators = []
        while waiting:
            op = next(op for op in waiting if ready.issuperset(map(int, op.inputs)))
            waiting.remove(op)
            graph.operators.append(op)
            ready.update(map(int, op.outputs))
        self._renumber(sorted(kept))
        self._drop_bodies()
        self._drop_buffers()

    def _renumber(self, kept: Sequence[int]) -> None:
        """Leave only the tensors ``kept``, under new numbers wherever one is named."""
        place = {-1: -1, **{old: new for new, old in enumerate(kept)}}
        graph = self.main
        graph.tensors = [graph.tensors[old] for old in kept]
        for details in filter(None, map(_blocks, graph.tensors)):
            details.scales, details.zeroPoints = place[details.scales], place[details.zeroPoints]
        for ends in (graph, *graph.operators):
            ends.inputs = [place[int(i)] for i in ends.inputs]
            ends.outputs = [place[int(i)] for i in ends.outputs]
        for entry in (*self.model.signatureDefs[0].inputs, *self.model.signatureDefs[0].outputs):
            entry.tensorIndex = place[int(entry.tensorIndex)]
        self.roles = {role: place[index] for role, index in self.roles.items() if index in place}

    def _drop_bodies(self) -> None:
        second = [op.builtinOptions2 for graph in self.model.subgraphs for op in graph.operators]
        # Several operators may share one object.
        composites = {id(options): options for options in second if hasattr(options, "decompositionSubgraphIndex")}
        kept = sorted({0, *(int(options.decompositionSubgraphIndex) for options in composites.values())})
        for options in composites.values():
            options.decompositionSubgraphIndex = kept.index(int(options.decompositionSubgraphIndex))
        self.model.subgraphs = [self.model.subgraphs[old] for old in kept]

    def _drop_buffers(self) -> None:
        tensors = [tensor for graph in self.model.subgraphs for tensor in graph.tensors]
        kept = sorted({0, *(int(tensor.buffer) for tensor in tensors)})
        place = {old: new for new, old in enumerate(kept)}
        for tensor in tensors:
            tensor.buffer = place[int(tensor.buffer)]
        self.model.buffers = [self.model.buffers[old] for old in kept]
        self.model.metadata = None

    def data(self) -> bytes:
        """The model as a file."""
        self.tidy()
        return pack(self.model)


def _blocks(tensor: Any) -> Any:
    """What a tensor says of blocks with scales of their own; None of most."""
    return None if tensor.quantization is None else tensor.quantization.details


def _other(op: Any, tensor: int) -> int:
    """The operand of a binary operator that is not ``tensor``."""
    left, right = (int(i) for i in op.inputs)
    return right if left == tensor else left


@cache
def _base(style: str, layers: tuple[int, ...]) -> bytes:
    data = variant(STYLES[style]).read_bytes()
    roles = read(Memory(data)).structure.roles
    graph = Graph(load(data), {role.role: role.tensor.index for role in roles if role.tensor is not None})
    _keep_layers(graph, layers)
    graph.tidy()
    # Five times as fast to copy as the objects themselves.
    return pickle.dumps(graph)


def _keep_layers(graph: Graph, layers: tuple[int, ...]) -> None:
    """Drop the layers not in ``layers``, and give those left their new numbers, in names too."""
    count = sum(role.endswith(".q_proj") for role in graph.roles)
    dropped = [graph.layer(index) for index in range(count) if index not in layers]
    for layer in reversed(dropped):
        graph.rewire(layer.out, layer.stream)
    renamed = {}
    for role, tensor in graph.roles.items():
        first, _, rest = role.partition(".")
        number, _, name = rest.partition(".")
        if first != "layers":
            renamed[role] = tensor
        elif int(number) in layers:
            renamed[f"layers.{layers.index(int(number))}.{name}"] = tensor
    graph.roles = renamed
    for new, old in enumerate(layers):
        for part in graph.model.subgraphs:
            for tensor in part.tensors:
                tensor.name = tensor.name.replace(b"layer_%d" % old, b"layer_%d" % new)


def sound(style: str, layers: tuple[int, ...] = (0, 3)) -> Graph:
    """A fresh copy of the drafter of ``style`` ("torch" or "jax"), cut down to ``layers``: one sliding, one full."""
    graph: Graph = pickle.loads(_base(style, layers))
    return graph
