"""What a file rounds while it computes: how many activations, to which types, and how coarsely.

The rounding is the runtime's, and no checkpoint in floats has it; what it costs depends on what real activations are,
which no file says. So all of it is said, and none of it is a reason to refuse (docs/proof.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mtp_extract.errors import escape, several
from mtp_extract.graph.call import activation_scale, range_of_codes
from mtp_extract.graph.drafter import LOGITS, Walk
from mtp_extract.graph.flat import FlatGraph, Value, ancestors


def list_rounded(graph: FlatGraph, walk: Walk) -> list[dict[str, Any]]:
    """The activations that ``graph`` rounds, and the weights that an operator does, an entry for each type of tensor.

    Returns:
        per type: ``of`` ("activation" or "weight"), ``type``, ``count``, and whether ``logits`` are among them; of
        codes also ``steps``, the smallest and the largest step, and ``narrowest``, the lowest and the highest number of
        the shortest range. Both are None of floats.

    Raises:
        UnsupportedError, FormatError: as :func:`~mtp_extract.graph.call.activation_scale`.
    """
    head = next(role.result for role in walk.roles if role.role == "lm_head")
    logits = {id(value) for value in ancestors(graph.outputs[LOGITS], frozenset({id(head)}))}
    kinds: dict[tuple[str, str], list[Value]] = {}
    for value in walk.rounded:
        of = "activation" if value.depends else "weight"
        kinds.setdefault((of, value.tensor.type_name), []).append(value)
    return [
        {"of": of, "type": name, "count": len(values), "logits": any(id(value) in logits for value in values)}
        | _summarize_grids(values)
        for (of, name), values in sorted(kinds.items())
    ]


def _summarize_grids(values: Sequence[Value]) -> dict[str, Any]:
    """The steps and the shortest range of ``values`` of one type."""
    steps, ranges = list[float](), list[tuple[float, float]]()
    for value in values:
        activation = activation_scale(value.tensor)
        ends = range_of_codes(value.tensor)
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
    """``number`` with three digits: a printed figure, not one to compute with."""
    return float(np.format_float_positional(number, 3, fractional=False))


def rounding_in_words(entries: Sequence[Mapping[str, Any]], *, ranges: bool = False) -> str:
    """What :func:`list_rounded` lists, such as ``18 activations are INT8 in the bundle (steps 0.0073 to 0.19)``; empty
    where it lists none. With ``ranges`` the shortest range is said, too.
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
        what = f"{several(entry['count'], entry['of'])} {'is' if entry['count'] == 1 else 'are'}"
        place = "" if parts else " in the bundle"
        parts.append(f"{what} {escape(entry['type'])}{place}" + (f" ({', '.join(details)})" if details else ""))
    return ", ".join(parts)
