"""List what a file rounds while it computes: how many activations, to which types, and how coarsely.

The runtime does this rounding, a checkpoint in floats does not. Its cost depends on real activations, which no file
contains. So it is reported, and is no reason to refuse a file (docs/proof.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mtp_extract.errors import escape, format_count
from mtp_extract.graph.call import find_representable_range, read_activation_scale
from mtp_extract.graph.drafter import LOGITS, DrafterStructure
from mtp_extract.graph.flat import FlatGraph, Value, walk_ancestors


def list_rounded_tensors(graph: FlatGraph, structure: DrafterStructure) -> list[dict[str, Any]]:
    """List the activations that ``graph`` rounds, and the weights that its operators round, one entry per type.

    Returns:
        entries with ``of`` ("activation" or "weight"), ``type``, ``count``, and ``logits``, whether logits are among
        them. For codes, ``steps`` is the smallest and the largest step, ``narrowest`` the ends of the shortest range;
        for floats both are None.

    Raises:
        UnsupportedError, FormatError: as :func:`~mtp_extract.graph.call.read_activation_scale`.
    """
    head = next(role.result for role in structure.roles if role.role == "lm_head")
    logits = {id(value) for value in walk_ancestors(graph.outputs[LOGITS], frozenset({id(head)}))}
    kinds: dict[tuple[str, str], list[Value]] = {}
    for value in structure.rounded:
        of = "activation" if value.depends else "weight"
        kinds.setdefault((of, value.tensor.type_name), []).append(value)
    return [
        {"of": of, "type": name, "count": len(values), "logits": any(id(value) in logits for value in values)}
        | _summarize_grids(values)
        for (of, name), values in sorted(kinds.items())
    ]


def _summarize_grids(values: Sequence[Value]) -> dict[str, Any]:
    steps, ranges = list[float](), list[tuple[float, float]]()
    for value in values:
        activation = read_activation_scale(value.tensor)
        ends = find_representable_range(value.tensor)
        if activation is None or ends is None:
            return {"steps": None, "narrowest": None}
        steps.append(activation[0])
        ranges.append(ends)
    narrowest = min(ranges, key=lambda ends: ends[1] - ends[0])
    return {
        "steps": [_round_figure(min(steps)), _round_figure(max(steps))],
        "narrowest": [_round_figure(end) for end in narrowest],
    }


def _round_figure(number: float) -> float:
    """Round to three digits, for people."""
    return float(np.format_float_positional(number, 3, fractional=False))


def describe_rounding(entries: Sequence[Mapping[str, Any]], *, ranges: bool = False) -> str:
    """Describe ``entries`` of :func:`list_rounded_tensors`; "" if there are none.

    ``ranges`` adds the shortest range. Example: ``18 activations are INT8 in the bundle (steps 0.0073 to 0.19)``.
    """
    parts = list[str]()
    for entry in entries:
        details = []
        if entry["steps"]:
            low, high = (f"{step:g}" for step in entry["steps"])
            details.append(f"steps {low} to {high}" if low != high else f"steps of {low}")
        if entry["narrowest"] and ranges:
            details.append("the shortest range {:g} to {:g}".format(*entry["narrowest"]))
        if entry["logits"]:
            details.append("logits among them")
        subject = f"{format_count(entry['count'], entry['of'])} {'is' if entry['count'] == 1 else 'are'}"
        place = "" if parts else " in the bundle"
        parts.append(f"{subject} {escape(entry['type'])}{place}" + (f" ({', '.join(details)})" if details else ""))
    return ", ".join(parts)
