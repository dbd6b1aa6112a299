"""Whether a checkpoint fits what a bundle holds, and a drafter its base: asked before a byte is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mtp_extract.architecture.config import DrafterConfig
from mtp_extract.bundle import Shard
from mtp_extract.errors import PairError, escape
from mtp_extract.graph.drafter import ACTIVATIONS, LOGITS, PROJECTED
from mtp_extract.insertion.base import BundledBase
from mtp_extract.insertion.base_checkpoint import BaseCheckpoint
from mtp_extract.litertlm.container import TFLITE_MODEL

_BASE = "prefill_decode"
_DECODE, _VERIFY = "decode", "verify"

# What exporters compute constants in, and configurations round them to.
_ALIKE, _BASES_ALIKE = 1e-6, 1e-5

_COMPARED = (
    *("backbone_hidden_size", "hidden_size", "intermediate_size", "vocab_size", "num_heads", "num_layers"),
    *("layer_types", "head_dims", "num_kv_heads", "sliding_window", "rms_norm_eps", "attention_scale"),
    "hidden_activation",
)


def check_drafter(checkpoint: DrafterConfig, graph: DrafterConfig, name: str) -> list[str]:
    """Check that the weights of one drafter can stand in the graph of another, of ``name``; what is worth a note.

    The graph computes with its own constants (RoPE, epsilon, soft cap), so that what a checkpoint's config says
    otherwise would be lost.

    Raises:
        PairError: they are not of one shape, or compute differently; the message lists how.
    """
    compared = {key: (getattr(checkpoint, key), getattr(graph, key)) for key in _COMPARED}
    for layer_type, rope in graph.rope.items():
        for key in ("theta", "partial_rotary_factor", "factor"):
            other = getattr(checkpoint.rope.get(layer_type), key, None)
            compared[f"RoPE's {key} in {layer_type}"] = other, getattr(rope, key)
    if wrong := _differences(compared, _ALIKE):
        raise PairError(
            f"{name}: the checkpoint does not fit its drafter, which has {wrong}. Give the checkpoint of a drafter for "
            "this bundle."
        )
    notes = []
    if checkpoint.final_logit_softcap != graph.final_logit_softcap:
        own, cap = (f"of {c.final_logit_softcap:g}" if c.final_logit_softcap else "none" for c in (checkpoint, graph))
        notes.append(f"The graph's soft cap ({cap}) stays; the checkpoint's is {own}. The best token is the same.")
    if checkpoint.ordered_head is not None:
        notes.append("The checkpoint's centroid head stays behind: the graph's head is dense.")
    return notes


def check_base(checkpoint: BaseCheckpoint, base: BundledBase) -> None:
    """Check that the two bases are of one shape, and compute norms and logits alike.

    Raises:
        PairError: they are not; the message lists what differs.
    """
    walk, text = base.walk, checkpoint.text
    graph = {
        "num_hidden_layers": walk.layers,
        "hidden_size": walk.width,
        "vocab_size": base.places["embed_tokens"][0].found.shape[0],
        "rms_norm_eps": walk.rms_norm_eps,
        "final_logit_softcapping": walk.soft_cap,
    }
    if wrong := _differences({key: (value, text.get(key, value)) for key, value in graph.items()}, _BASES_ALIKE):
        raise PairError(
            f"{escape(checkpoint.directory)} is another model than the base in {base.opened.source.name}: it has "
            f"{wrong}. Give the base that the bundle is of, or one tuned from it."
        )


def _differences(compared: Mapping[str, tuple[object, object]], close: float) -> str:
    """What differs of ``compared``, (expected, found) by name, floats by more than the share ``close``."""

    def alike(expected: object, found: object) -> bool:
        if not isinstance(expected, float) or not isinstance(found, int | float):
            return expected == found
        # Not a difference: an integer of a configuration may be too large for a float.
        return expected - close * abs(expected) <= found <= expected + close * abs(expected)

    return "; ".join(
        f"{what} {escape(found)} instead of {escape(expected)}"
        for what, (expected, found) in compared.items()
        if not alike(expected, found)
    )


def base_misfits(drafter: Shard) -> Iterator[str]:
    """Why the base in the bundle of ``drafter`` could not run it; none where it can, or there is none to ask.

    LiteRT-LM asks for the same: without ``verify`` it fails, with caches of other names it aborts, with others sizes
    the drafter's graph cannot be invoked.
    """
    opened = drafter.opened
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
        if (own := outputs.get(name)) is None:
            continue
        given, width = (next(reversed(tensor.shape), 0) for tensor in (own, drafter.graph.outputs[output].tensor))
        if given != width:
            yield f"the base's {name} are {given} wide, the drafter's {what} {width}"
