"""Recognize other kinds of drafters that a section called ``mtp_drafter`` may hold, by their inputs and outputs."""

from __future__ import annotations

import re

from mtp_extract.errors import AnotherKindError, escape
from mtp_extract.graph.flat import CACHE_PREFIX, MASK, MASK_LOCAL, FlatGraph
from mtp_extract.litertlm.storage import FLOAT_TYPES

OWN_CACHES_SIGNATURE = "draft"
"""The signature of published Qwen3.5 drafters, whose one layer computes its own K and V."""

_ROTATION = re.compile(r"(^|_)(cos|sin|rope)(_|$)")


def describe_other_kind(reason: str) -> str:
    """Return the end of a message that refuses a drafter of another kind."""
    return (
        f"a drafter of another kind ({reason}), which this release does not read. It reads drafters of Gemma 4 for CPU "
        "and GPU, which take K and V of whole caches from their base."
    )


def require_kind(graph: FlatGraph) -> None:
    """Raise AnotherKindError, which names the other kind, unless this release reads such drafters: they compute only
    queries, rotate them in the graph, and read whole caches.
    """
    # For NPUs, RoPE and masks are computed by the section ``mtp_aux``.
    tables = [n for n, v in graph.inputs.items() if _ROTATION.search(n) and v.tensor.type in FLOAT_TYPES]
    written = [name for name in graph.outputs if name.startswith((CACHE_PREFIX, "kv_slice_"))]
    if tables:
        reason: str | None = f"for an NPU: RoPE is handed over as the input {escape(tables[0])!r}"
    elif written:
        reason = f"K and V of its own: it has the output {escape(written[0])!r}"
    else:
        reason = _find_ring_buffers(graph)
    if reason is not None:
        raise AnotherKindError(f"The signature {escape(graph.signature.key)!r} is {describe_other_kind(reason)}")


def _find_ring_buffers(graph: FlatGraph) -> str | None:
    """Return why sliding layers have ring buffers, caches with fewer slots than the mask; None if they have none."""
    lengths = {name: graph.inputs[name].tensor.shape[-1:] for name in (MASK, MASK_LOCAL) if name in graph.inputs}
    if len(set(lengths.values())) > 1:
        slots = {name: next(iter(length), 0) for name, length in lengths.items()}
        return f"ring-buffer caches: its local mask is of {slots[MASK_LOCAL]} slots, the other of {slots[MASK]}"
    if MASK not in lengths:
        return None
    (length,) = set(lengths.values())
    caches = {name: value.tensor.shape for name, value in graph.inputs.items() if name.startswith(CACHE_PREFIX)}
    short = [name for name, shape in caches.items() if not set(length) & set(shape)]
    return f"ring-buffer caches: {escape(short[0])!r} has other slots than the mask" if short else None
