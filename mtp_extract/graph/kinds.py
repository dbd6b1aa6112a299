"""Drafters of other kinds that a section called ``mtp_drafter`` may hold, known by their inputs and outputs."""

from __future__ import annotations

import re

from mtp_extract.errors import UnsupportedError, escape
from mtp_extract.graph.flat import MASK, MASK_LOCAL, FlatGraph
from mtp_extract.graph.positions import caches_of
from mtp_extract.litertlm.storage import FLOAT_TYPES

OWN_CACHES_SIGNATURE = "draft"
"""The signature of published Qwen3.5 drafters: one layer that computes K and V of its own."""

_ROTATION = re.compile(r"(^|_)(cos|sin|rope)(_|$)")


def another_kind(reason: str) -> str:
    """The end of a message that refuses a drafter of another kind."""
    return (
        f"a drafter of another kind ({reason}), which this release does not read. It reads drafters of Gemma 4 for CPU "
        "and GPU, which take K and V of whole caches from their base."
    )


def require_kind(graph: FlatGraph) -> None:
    """Check that ``graph`` is of the kind that this release reads: queries alone, rotated in the graph, whole caches.

    Raises:
        UnsupportedError: it is of another kind that is known; the message says which.
    """
    reason = _npu(graph) or _own_caches(graph) or _ring_buffers(graph)
    if reason is not None:
        raise UnsupportedError(f"The signature {escape(graph.signature.key)!r} is {another_kind(reason)}")


def _npu(graph: FlatGraph) -> str | None:
    """NPU drafters have RoPE and masks computed by a section ``mtp_aux``."""
    tables = [n for n, v in graph.inputs.items() if _ROTATION.search(n) and v.tensor.type in FLOAT_TYPES]
    return f"for an NPU: RoPE is handed over as the input {escape(tables[0])!r}" if tables else None


def _own_caches(graph: FlatGraph) -> str | None:
    written = [name for name in graph.outputs if name.startswith(("kv_cache_", "kv_slice_"))]
    return f"K and V of its own: it has the output {escape(written[0])!r}" if written else None


def _ring_buffers(graph: FlatGraph) -> str | None:
    """Where caches of sliding layers are ring buffers, the local mask is as long as these: shorter than the other."""
    lengths = {name: graph.inputs[name].tensor.shape[-1:] for name in (MASK, MASK_LOCAL) if name in graph.inputs}
    if len(set(lengths.values())) > 1:
        slots = {name: next(iter(length), 0) for name, length in lengths.items()}
        return f"ring-buffer caches: its local mask is of {slots[MASK_LOCAL]} slots, the other of {slots[MASK]}"
    if MASK not in lengths:
        return None
    (length,) = set(lengths.values())
    short = [name for name, value in caches_of(graph.inputs).items() if not set(length) & set(value.tensor.shape)]
    return f"ring-buffer caches: {escape(short[0])!r} has other slots than the mask" if short else None
