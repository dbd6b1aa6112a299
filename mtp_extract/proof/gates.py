"""Between gate, up and the down projection: activation(gate) · up, and nothing that a number could be told by.

What lies there may be written in many ways, but it must act element by element, with single numbers for constants, be
linear in up, and bend the gate by one function only. Then it is one function of one number, and is held against the
config's at thousands of them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mtp_extract.errors import ProofError, UnsupportedError
from mtp_extract.graph.arrays import gelu
from mtp_extract.graph.drafter import Walk
from mtp_extract.graph.evaluate import Samples, Stacked, evaluate
from mtp_extract.graph.flat import FlatGraph, Node, Value, ancestors
from mtp_extract.graph.moving import LAYOUT

_BENDS = frozenset({"GELU", "TANH", "LOGISTIC", "EXP"})
_POLYNOMIAL = frozenset({"MUL", "ADD", "SUB", "NEG", "SQUARE", "POW", "SQUARED_DIFFERENCE"})
_HANDS_ON = frozenset({"CAST", "QUANTIZE", "DEQUANTIZE", *LAYOUT})
_LARGEST = 1e4
_DRAWN = 1 << 13
_SAME = 4e-6
"""Of a number, and of 1: what float32 leaves of a cubic under a hyperbolic tangent."""
_UPS = (1.0, -3.7, 250.0)


def check_gates(graph: FlatGraph, walk: Walk, activation: str, seed: int) -> None:
    """Hold the gated product of every layer against ``activation``, transformers' name of it.

    Raises:
        UnsupportedError: an operator there is none that such a product needs.
        ProofError: it is another function.
    """
    results = {role.role: role.result for role in walk.roles}
    points = _points(np.random.default_rng(seed))
    for index in range(len(walk.layers)):
        gate, up, down = (results[f"layers.{index}.{name}_proj"] for name in ("gate", "up", "down"))
        assert gate is not None and up is not None and down is not None and down.producer is not None
        product = down.producer.operand(0)
        _check_operators(graph, product, gate, up)
        _check_function(graph, product, gate, up, activation, points, f"layers.{index}.gate_proj")


def _points(random: np.random.Generator) -> npt.NDArray[np.float32]:
    """Numbers of either sign up to 10 000: spaced evenly near 0 and by their size, every one with a jitter."""
    near = random.uniform(-12, 12, _DRAWN)
    far = np.exp(random.uniform(np.log(1e-6), np.log(_LARGEST), _DRAWN)) * random.choice([-1, 1], _DRAWN)
    return np.concatenate([[0.0], near, far]).astype(np.float32)


def _check_operators(graph: FlatGraph, product: Value, gate: Value, up: Value) -> None:
    stops = frozenset({id(gate), id(up)})
    ups, bends = {id(up)}, list[Node]()
    inside = {id(v.producer) for v in ancestors(product, stops) if v.producer is not None and id(v) not in stops}
    for node in graph.nodes:
        if id(node) not in inside:
            continue
        above = [id(v) in ups for v in node.inputs if v is not None]
        if all(v.same is not None for v in node.outputs):
            # It hands one operand on as it is: a 0 is added, nothing is cut.
            ups |= {id(v) for v in node.outputs if any(above)}
            continue
        if node.kind in _BENDS:
            bends.append(node)
        elif node.kind == "DIV":
            if node.binary and id(node.operand(1)) in ups:
                raise _refused(node, "divides by what should only be multiplied")
        elif node.kind not in _POLYNOMIAL | _HANDS_ON:
            raise _refused(node, "is none that a gated product needs")
        if any(above):
            if sum(above) > 1 or node.kind not in {"MUL", "DIV", "NEG"} | _HANDS_ON:
                raise _refused(node, "is not linear in what comes from up_proj")
            ups |= {id(v) for v in node.outputs}
        _check_constants(graph, node)
    if len(bends) != 1:
        raise _refused(bends[0] if bends else graph.nodes[0], f"is one of {len(bends)} that bend the gate: one does")


def _check_constants(graph: FlatGraph, node: Node) -> None:
    for position, value in enumerate(node.inputs):
        if value is None or not value.constant or (node.kind in LAYOUT and position not in LAYOUT[node.kind]):
            continue
        if value.tensor.elements > 1 and np.ptp(graph.floats(value)):
            raise _refused(node, "treats one element of a gated product otherwise than another")


def _check_function(
    graph: FlatGraph,
    product: Value,
    gate: Value,
    up: Value,
    activation: str,
    points: npt.NDArray[np.float32],
    role: str,
) -> None:
    size = gate.tensor.elements
    rows = -(-points.size // size)
    numbers = np.resize(points, (rows, *gate.tensor.shape)).astype(np.float32)
    expected = gelu(numbers, tanh=activation == "gelu_pytorch_tanh")
    for factor in _UPS:
        given: list[tuple[Value, Samples]] = [
            (gate, Stacked(numbers)),
            (up, (np.full(up.tensor.shape, factor, np.float32),)),
        ]
        found = np.asarray(evaluate(graph, {}, [product], given)[0]).reshape(expected.shape)
        wrong = ~(np.abs(found / np.float32(factor) - expected) <= _SAME * (1 + np.abs(numbers)))
        if wrong.any():
            at = tuple(np.argwhere(wrong)[0])
            raise ProofError(
                f"{role}: the graph makes {found[at] / factor:.7g} of {numbers[at]:.7g}, times what up_proj gives, "
                f"and {activation} is {expected[at]:.7g}. Nothing is written. Please report the file."
            )


def _refused(node: Node, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"{node.op.label}, between gate_proj, up_proj and down_proj, {why}. Nothing is written. Please report the file."
    )
