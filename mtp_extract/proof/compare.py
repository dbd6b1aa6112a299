"""How far graph and checkpoint are apart, and the first role at which they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_extract.architecture.roles import roles_of
from mtp_extract.errors import ProofError
from mtp_extract.graph.drafter import LOGITS, Walk
from mtp_extract.graph.evaluate import Samples, evaluate
from mtp_extract.graph.flat import FlatGraph, Value, ancestors
from mtp_extract.litertlm.storage import Floats
from mtp_extract.proof.forward import Written, forward, logits
from mtp_extract.proof.samples import Sample

TOLERANCE = 1e-5
"""Of the range of an output: what two orders of summation in float32 leave, and no more."""


def differences(found: Sequence[npt.NDArray[Any]] | npt.NDArray[Any], expected: Floats) -> tuple[float, ...]:
    """Per sample, the largest difference as a share of the range of ``expected``; infinite where shapes differ."""
    return tuple(_difference(a, b) for a, b in zip(found, expected, strict=True))


def _difference(found: npt.NDArray[Any], expected: npt.NDArray[Any]) -> float:
    if found.size != expected.size:
        return float("inf")
    span = float(np.ptp(expected)) or float(np.abs(expected).max()) or 1.0
    with np.errstate(invalid="ignore"):
        furthest = float(np.abs(found.reshape(-1) - expected.reshape(-1)).max()) / span
    return furthest if np.isfinite(furthest) else float("inf")


@dataclass(frozen=True)
class _Compared:
    """Where graph and checkpoint can be held side by side: ``value`` of the graph is ``factor`` × what ``name`` is."""

    name: str
    value: Value
    factor: float = 1.0


_AFTER = {"q_norm": ("weights", "attention"), "up_proj": ("gelu",), "lm_head": (LOGITS,)}
_WHAT = {
    "attention": "P·V: the order of V's heads or dimensions, or the slots it is read from",
    "gelu": "the activation between gate and up, and their product",
    LOGITS: "the soft cap",
}


def first_difference(
    graph: FlatGraph, walk: Walk, checkpoint: Written, sample: Sample, given: Sequence[tuple[Value, Samples]]
) -> tuple[int, ProofError]:
    """How many places agree, in the order of execution, and the error that names the first role that does not.

    Args:
        given: values of the graph that are known in closed form.
    """
    trace: dict[str, Any] = {}
    state, _ = forward(checkpoint, replace(sample.step, trace=trace))
    trace[LOGITS] = logits(checkpoint, state, trace)
    places = [p for p in _places(graph, walk) if p.name in trace]
    results = evaluate(graph, sample.fed, [p.value for p in places], given)
    moved = [
        differences([f / np.float32(p.factor) for f in r], trace[p.name]) for p, r in zip(places, results, strict=True)
    ]
    # Where none is beyond what is allowed, the largest step is to blame: rounding that grew from role to role.
    first = next((i for i, a in enumerate(moved) if max(a) > TOLERANCE), int(np.argmax([max(a) for a in moved])))
    name, at = places[first].name, int(np.argmax(moved[first]))
    position = int(sample.positions[at])
    what = _WHAT.get(name.rsplit(".", 1)[-1], "")
    if name.endswith(".weights"):
        what = _scores(name.removesuffix(".weights"), results[first][at], trace[name][at], position)
        name = name.removesuffix("weights") + "attention"
    return first, ProofError(
        f"{name}: the graph and the checkpoint part here{what and f' ({what})'}, by {moved[first][at]:.2g} of the "
        f"range at position {position}, where {TOLERANCE:g} is allowed. The graph computes something that no "
        "checkpoint of this kind does; nothing is written. Please report the file."
    )


def _places(graph: FlatGraph, walk: Walk) -> Iterator[_Compared]:
    """All places, in the order in which a drafter computes them."""
    found = {
        role.role: _Compared(role.role, role.result, role.factor) for role in walk.roles if role.result is not None
    }
    for index in range(len(walk.layers)):
        layer = f"layers.{index}"
        for place, role in (("attention", "o_proj"), ("gelu", "down_proj")):
            node = found[f"{layer}.{role}"].value.producer
            if node is not None and node.inputs:
                found[f"{layer}.{place}"] = _Compared(f"{layer}.{place}", node.operand(0))
        if f"{layer}.attention" in found and (weights := _softmax_before(found[f"{layer}.attention"].value)):
            found[f"{layer}.weights"] = _Compared(f"{layer}.weights", weights)
    found[LOGITS] = _Compared(LOGITS, graph.outputs[LOGITS])
    # The table of roles is in the order of execution; what has no weight comes after what it is made of.
    for entry in roles_of(len(walk.layers)):
        after = _AFTER.get(entry.name.rsplit(".", 1)[-1], ())
        for place in (entry.name, *(part if part == LOGITS else f"layers.{entry.layer}.{part}" for part in after)):
            if place in found:
                yield found[place]


def _softmax_before(value: Value) -> Value | None:
    return next((v for v in ancestors(value) if v.producer is not None and v.producer.kind == "SOFTMAX"), None)


def _scores(layer: str, found: npt.NDArray[Any], expected: npt.NDArray[Any], position: int) -> str:
    """How the weights of attention differ: other slots are seen, or the same ones are scored otherwise."""
    if found.size != expected.size:
        return f"{found.size} scores for {expected.size}"
    by_graph, by_config = (w.reshape(-1, expected.shape[-1]).max(0) > 0 for w in (found, expected))
    for seen, hidden, what in ((by_graph, by_config, "the graph sees"), (by_config, by_graph, "the graph hides")):
        slots = np.flatnonzero(seen & ~hidden)
        if slots.size:
            return f"the mask: at position {position} {what} slot {slots[-1]}, the config and the mask input do not"
    return f"{layer}.q_norm's result is turned or scored otherwise: RoPE, a scale, or the order of heads or dimensions"
