"""Google's interpreter on the drafter section, with a view of every operator that reads a weight.

``ai-edge-litert`` runs the section by itself, with the CPU kernels that LiteRT-LM uses. By default these are
XNNPACK's; without its delegate the interpreter falls back to kernels of its own. The two differ in one thing
that matters here: how a row of float activations is quantized before it meets integer weights
(:mod:`~mtp_extract.validate.parity.emulation`).

Values inside the graph are not readable under a delegate, so the tensors to watch are made outputs of the
subgraph: the vector that lists the outputs is written anew at the end of the flatbuffer, and one offset is
turned to it. No operator, and no number, changes.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtp_extract.architecture.roles import shapes_of
from mtp_extract.bundle import Shard
from mtp_extract.errors import UnsupportedError, escape
from mtp_extract.evaluate.extras import unusable
from mtp_extract.graph.drafter import LOGITS, PROJECTED
from mtp_extract.graph.flat import Node, Value, flatten
from mtp_extract.litertlm.flatbuffer import FlatBuffer
from mtp_extract.litertlm.tflite import Tensor
from mtp_extract.validate.parity.interface import codes_of

# Slots of the TFLite schema.
_MODEL_SUBGRAPHS = 2
_SUBGRAPH_OUTPUTS = 2
_ALIGNMENT = 16


class Kernels(Enum):
    """Which of the interpreter's CPU kernels."""

    XNNPACK = "xnnpack"
    BUILTIN = "builtin"


@dataclass(frozen=True)
class Reading:
    """The operator that reads a role's constant."""

    role: str  # "layers.0.q_proj", …
    node: Node  # the operator
    tensor: Tensor | None  # its result in the signature's own subgraph; None when it stays inside a composite
    operand: Tensor | None  # what it multiplies the constant with, likewise
    factor: float  # the graph computes ``factor`` times the reference's value


def readings(source: Shard) -> dict[str, Reading]:
    """For every role whose operator can be told, that operator; in order of execution."""
    graph = flatten(source.model, source.signature)
    sharing: dict[tuple[int, int], list[str]] = {}
    factors = {role.role: role.factor for role in source.walk.roles}
    for role in source.walk.roles:
        if role.tensor is not None:
            sharing.setdefault((role.tensor.subgraph, role.tensor.index), []).append(role.role)
    order = {id(node): index for index, node in enumerate(graph.nodes)}
    # The table of roles is in the order of execution. Equal constants are stored once, and then only this order tells
    # whose operator is whose.
    execution = {role.name: index for index, role in enumerate(shapes_of(source.config))}
    shapes = {role.role: role.shape for role in source.walk.roles}
    parts = {role.role: role.result for role in source.walk.roles if role.first is not None}
    subgraph = source.signature.subgraph
    found: dict[str, Reading] = {}
    for key, roles in sharing.items():
        value = graph.constants.get(key)
        nodes = sorted(_readers(value.consumers) if value else [], key=lambda node: order[id(node)])
        if len(nodes) == 1 and parts.keys() >= set(roles):
            # One operator multiplies by all of them; each has its part of the result.
            nodes *= len(roles)
        if len(nodes) != len(roles):
            continue
        for name, node in zip(sorted(roles, key=execution.__getitem__), nodes, strict=True):
            if len(shapes[name]) == 1 and not _finishes(node):
                continue
            operand = node.inputs[0] if node.kind == "FULLY_CONNECTED" else None
            found[name] = Reading(
                name,
                node,
                _in_subgraph(parts.get(name) or node.outputs[0], subgraph),
                _in_subgraph(operand, subgraph),
                factors[name],
            )
    return dict(sorted(found.items(), key=lambda item: execution[item[0]]))


def attention_products(source: Shard) -> dict[str, tuple[Value, ...]]:
    """Layer ("layers.0") → operand and result of its Q·K and of its P·V, where they are integers; empty where none are.

    Raises:
        UnsupportedError: only some products do.
    """
    graph = flatten(source.model, source.signature)
    rounding = [n for n in graph.nodes if n.kind == "BATCH_MATMUL" and codes_of(n.outputs[0].tensor) is not None]
    if not rounding:
        return {}
    layers = source.config.num_layers
    if len(rounding) != 2 * layers:
        raise UnsupportedError(
            f"{source.model.region.source.name}: {len(rounding)} of the {2 * layers} products of attention are rounded "
            "to integers; this release emulates all or none."
        )
    ends = [(node.operand(0), node.outputs[0]) for node in rounding]
    return {f"layers.{i}": (*ends[2 * i], *ends[2 * i + 1]) for i in range(layers)}


def _in_subgraph(value: Value | None, subgraph: int) -> Tensor | None:
    return next((t for t in value.tensors if t.subgraph == subgraph), None) if value else None


def _finishes(node: Node) -> bool:
    """Whether a norm's weight is multiplied last: its partner is the normed vector, not one number a row."""
    result = node.outputs[0].tensor.elements
    partners = [value for value in node.inputs if value is not None and value.depends]
    return bool(partners) and all(value.tensor.elements == result for value in partners)


def _readers(consumers: list[tuple[Node, int]]) -> list[Node]:
    """The operators that compute with a constant, past those that only unpack or reshape it."""
    nodes = []
    for node, _ in consumers:
        if node.kind in ("DEQUANTIZE", "RESHAPE", "CAST", "BROADCAST_TO", "EXPAND_DIMS", "SQUEEZE"):
            nodes += _readers(node.outputs[0].consumers)
        else:
            nodes.append(node)
    return nodes


@dataclass(frozen=True)
class OracleRun:
    """What the interpreter computed, as float32, flattened."""

    logits: NDArray[np.float32]  # [vocabulary]
    projected: NDArray[np.float32]  # [base width]
    watched: Mapping[str, NDArray[np.float32]]  # role → the result of its operator, divided by the role's factor
    operands: Mapping[str, NDArray[np.float32]]  # role of a matrix → what it was multiplied with
    # layer → operand and result of Q·K, operand and result of P·V, where they are integers; in their shapes
    products: Mapping[str, tuple[NDArray[np.float32] | None, ...]]


class Oracle:
    """An interpreter that holds the drafter of ``source``, which must stay open while this is built.

    Raises:
        UnsupportedError: its weights lie in another section, or the interpreter refuses the graph, or is not there.
    """

    def __init__(self, source: Shard, kernels: Kernels = Kernels.XNNPACK, threads: int = 1) -> None:
        name = source.model.region.source.name
        if why := unusable("ai_edge_litert.interpreter", "Interpreter", "OpResolverType"):
            raise UnsupportedError(f"{name}: Google's interpreter cannot be asked: {why}.")
        from ai_edge_litert.interpreter import Interpreter, OpResolverType

        if source.model.weights is not None:
            raise UnsupportedError(
                f"{name}: the drafter's weights lie in a section of their own, which the interpreter cannot be given. "
                "Parity is possible for files that hold them in the drafter's section."
            )
        found = readings(source)
        self._source = source
        self._factors = {role: np.float32(reading.factor) for role, reading in found.items()}
        self._watched = {role: reading.tensor for role, reading in found.items() if reading.tensor is not None}
        self._operands = {role: reading.operand for role, reading in found.items() if reading.operand is not None}
        self._products = {
            layer: tuple(_in_subgraph(value, source.signature.subgraph) for value in ends)
            for layer, ends in attention_products(source).items()
        }
        seen = (
            *self._watched.values(),
            *self._operands.values(),
            *(t for ends in self._products.values() for t in ends),
        )
        indices = [tensor.index for tensor in seen if tensor is not None]
        resolver = {
            Kernels.XNNPACK: OpResolverType.AUTO,
            Kernels.BUILTIN: OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
        }[kernels]
        content = with_outputs(source, indices)
        try:
            with _quiet():
                self._interpreter = Interpreter(
                    model_content=content, experimental_op_resolver_type=resolver, num_threads=threads
                )
                self._interpreter.allocate_tensors()
                self._run = self._interpreter.get_signature_runner(source.signature.key)
        except Exception as error:  # What a tool of another release raises has no class of its own.
            raise UnsupportedError(f"{name}: Google's interpreter refuses the drafter: {escape(error)}.") from error

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> OracleRun:
        """One call of the signature.

        Raises:
            UnsupportedError: the interpreter fails.
        """
        try:
            with _quiet():
                self._run(**inputs)
        except Exception as error:
            raise UnsupportedError(
                f"{self._source.model.region.source.name}: Google's interpreter fails: {escape(error)}."
            ) from error
        signature = self._source.signature
        tensors = self._source.model.subgraphs[signature.subgraph].tensors
        logits, projected = (self._read(tensors[signature.outputs[name]]) for name in (LOGITS, PROJECTED))
        return OracleRun(
            logits,
            projected,
            {role: self._read(tensor) / self._factors[role] for role, tensor in self._watched.items()},
            {role: self._read(tensor) for role, tensor in self._operands.items()},
            {
                layer: tuple(None if t is None else self._read(t).reshape(t.shape) for t in ends)
                for layer, ends in self._products.items()
            },
        )

    def _read(self, tensor: Tensor) -> NDArray[np.float32]:
        values = self._interpreter.get_tensor(tensor.index, tensor.subgraph)
        codes = codes_of(tensor)
        return (codes.decode(values) if codes else values.astype(np.float32)).reshape(-1)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the interpreter's C++ writes to stderr; what goes wrong comes as an exception too."""
    sys.stderr.flush()
    kept = os.dup(2)
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def with_outputs(source: Shard, tensors: list[int]) -> bytes:
    """The section's bytes, with ``tensors`` of the signature's subgraph among the subgraph's outputs."""
    region = source.model.region
    graph = source.model.subgraphs[source.signature.subgraph]
    readable = {*graph.outputs, *graph.inputs}
    outputs = [*graph.outputs, *dict.fromkeys(index for index in tensors if index not in readable)]
    table = list(FlatBuffer(region).root().tables(_MODEL_SUBGRAPHS))[graph.index]
    field = table.position + table.slots[_SUBGRAPH_OUTPUTS]
    content = bytearray(region.read(0, region.size))
    content += bytes(-len(content) % _ALIGNMENT)
    struct.pack_into("<I", content, field, len(content) - field)
    content += struct.pack(f"<I{len(outputs)}i", len(outputs), *outputs)
    content += bytes(-len(content) % _ALIGNMENT)
    return bytes(content)
