"""Whether a checkpoint fits a drafter's graph, and a drafter the base of its bundle: asked before a byte is written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mtp_extract.architecture.config import DrafterConfig
from mtp_extract.bundle import Opened, Shard
from mtp_extract.errors import PairError, escape
from mtp_extract.graph.drafter import ACTIVATIONS, LOGITS, PROJECTED
from mtp_extract.litertlm.container import TFLITE_MODEL
from mtp_extract.litertlm.tflite import Tensor

_BASE = "prefill_decode"
_DECODE, _VERIFY = "decode", "verify"
_CLOSE = 1e-6

_COMPARED = (
    "backbone_hidden_size",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "num_heads",
    "num_layers",
    "layer_types",
    "head_dims",
    "num_kv_heads",
    "sliding_window",
    "rms_norm_eps",
    "attention_scale",
    "hidden_activation",
)


def check_geometry(checkpoint: DrafterConfig, graph: DrafterConfig, name: str) -> list[str]:
    """Check that the weights of one drafter can stand in the graph of another, of ``name``; what is worth a note.

    The graph computes with its own constants (RoPE, epsilon, soft cap), so that what a checkpoint's config says
    otherwise would be lost.

    Raises:
        PairError: they are not of one shape, or compute differently; the message lists how.
    """
    compared = [(name, getattr(checkpoint, name), getattr(graph, name)) for name in _COMPARED]
    for layer_type, rope in graph.rope.items():
        other = checkpoint.rope.get(layer_type)
        compared += [
            (f"RoPE's {key} in {layer_type}", getattr(other, key, None), getattr(rope, key))
            for key in ("theta", "partial_rotary_factor", "factor")
        ]
    if wrong := differences(compared):
        raise PairError(
            f"{name}: the checkpoint does not fit its drafter, which has {'; '.join(wrong)}. Give the checkpoint of a "
            "drafter for this bundle."
        )
    notes = []
    own, cap = (f"of {c.final_logit_softcap:g}" if c.final_logit_softcap else "none" for c in (checkpoint, graph))
    if checkpoint.final_logit_softcap != graph.final_logit_softcap:
        notes.append(f"The graph's soft cap ({cap}) stays; the checkpoint's is {own}. The best token is the same.")
    if checkpoint.ordered_head is not None:
        notes.append("The checkpoint's centroid head stays behind: the graph's head is dense.")
    return notes


def differences(compared: Iterable[tuple[str, object, object]], close: float = _CLOSE) -> list[str]:
    """What differs of ``compared``: (what it is, expected, found), floats by more than the share ``close``."""

    def alike(expected: object, found: object) -> bool:
        if not isinstance(expected, float) or not isinstance(found, int | float):
            return expected == found
        # Not a difference: an integer of a configuration may be too large for a float.
        return expected - close * abs(expected) <= found <= expected + close * abs(expected)

    return [
        f"{what} {escape(found)} instead of {escape(expected)}"
        for what, expected, found in compared
        if not alike(expected, found)
    ]


def base_misfits(opened: Opened, drafter: Shard) -> Iterator[str]:
    """Why the base in the bundle could not run ``drafter``; none where it can, or there is none to ask.

    LiteRT-LM asks for the same: without ``verify`` it fails, with caches of other names it aborts, with others sizes
    the drafter's graph cannot be invoked.
    """
    sections = [s for s in opened.sections if s.data_type == TFLITE_MODEL and s.model_type == _BASE]
    if not sections:
        return
    model = opened.model(sections[0])
    decode, verify = model.signature(_DECODE), model.signature(_VERIFY)
    if decode is None:
        yield f"the base has no signature {_DECODE!r}"
        return
    if verify is None:
        yield f"the base has no signature {_VERIFY!r}, by which it would check drafts"
    for signature in filter(None, (decode, verify)):
        if ACTIVATIONS not in signature.outputs:
            yield f"the base's {signature.key} has no output {ACTIVATIONS!r}, from which a drafter starts"
    outputs = {name: model.tensor(decode.subgraph, index) for name, index in decode.outputs.items()}
    for name, cache in drafter.walk.caches.items():
        if (base := outputs.get(name)) is None:
            yield f"the base has no cache {escape(name)}"
        elif (base.shape, base.type) != (cache.shape, cache.type):
            yield (
                f"the cache {escape(name)} is {base.type_name} {list(base.shape)} in the base and {cache.type_name} "
                f"{list(cache.shape)} in the drafter"
            )
    for name, output, what in ((ACTIVATIONS, PROJECTED, "projected activations"), (LOGITS, LOGITS, "logits")):
        own, width = (_width(tensor) for tensor in (outputs.get(name), drafter.graph.outputs[output].tensor))
        if own is not None and own != width:
            yield f"the base's {name} are {own} wide, the drafter's {what} {width}"


def _width(tensor: Tensor | None) -> int | None:
    return None if tensor is None else next(reversed(tensor.shape), 0)
