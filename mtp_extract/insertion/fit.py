"""Whether a checkpoint fits what a bundle holds, and a drafter its base: asked before a byte is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import astuple

from mtp_extract.architecture.config import DrafterConfig
from mtp_extract.bundle import Shard
from mtp_extract.checkpoint.documents import differences
from mtp_extract.errors import PairError, escape
from mtp_extract.graph.drafter import ACTIVATIONS, LOGITS, PROJECTED
from mtp_extract.insertion.base import BundledBase
from mtp_extract.insertion.base_checkpoint import BaseCheckpoint
from mtp_extract.litertlm.container import TFLITE_MODEL
from mtp_extract.litertlm.tflite import Tensor

_BASE = "prefill_decode"

# What exporters compute constants in, and configurations round them to.
_ALIKE, _BASES_ALIKE = 1e-6, 1e-5

_COMPARED = (
    *("backbone_hidden_size", "hidden_size", "intermediate_size", "vocab_size", "num_heads", "num_layers"),
    *("layer_types", "head_dims", "num_kv_heads", "sliding_window", "rms_norm_eps", "attention_scale"),
    "hidden_activation",
)


def check_drafter(checkpoint: DrafterConfig, graph: DrafterConfig, name: str) -> list[str]:
    """What is worth a note of weights that stand in the graph of another drafter, of ``name``.

    The graph computes with its own constants (RoPE, epsilon, soft cap): what a checkpoint's config says is lost.

    Raises:
        PairError: they are not of one shape, or compute differently; the message lists how.
    """
    expected = {key: getattr(checkpoint, key) for key in _COMPARED}
    of_graph = {key: getattr(graph, key) for key in _COMPARED}
    for layer_type, rope in graph.rope.items():
        for key in ("theta", "partial_rotary_factor", "factor"):
            place = f"RoPE's {key} in {layer_type}"
            expected[place] = getattr(checkpoint.rope.get(layer_type), key, None)
            of_graph[place] = getattr(rope, key)
    if wrong := _describe_differences(expected, of_graph, _ALIKE):
        raise PairError(
            f"{name}: the checkpoint does not fit its drafter, which has {wrong}. Give the checkpoint of a drafter for "
            "this bundle."
        )
    notes = []
    if (cap_of_checkpoint := checkpoint.final_logit_softcap) != (cap := graph.final_logit_softcap):
        notes.append(
            f"The graph's soft cap ({cap}) stays; the checkpoint's is {cap_of_checkpoint}. The best token is the same."
        )
    if checkpoint.ordered_head is not None:
        notes.append("The checkpoint's centroid head stays behind: the graph's head is dense.")
    return notes


def check_base(checkpoint: BaseCheckpoint, base: BundledBase) -> None:
    """Check that the two bases are of one shape, and compute norms and logits alike.

    Raises:
        PairError: they are not; the message lists what differs.
    """
    walk = base.walk
    graph = {
        "num_hidden_layers": walk.layers,
        "hidden_size": walk.width,
        "vocab_size": base.places["embed_tokens"][0].found.shape[0],
        "rms_norm_eps": walk.rms_norm_eps,
        "final_logit_softcapping": walk.soft_cap,
    }
    stated = {key: checkpoint.text.get(key, value) for key, value in graph.items()}
    if wrong := _describe_differences(graph, stated, _BASES_ALIKE):
        raise PairError(
            f"{escape(checkpoint.directory)} is another model than the base in {base.opened.source.name}: it has "
            f"{wrong}. Give the base that the bundle is of, or one tuned from it."
        )


def _describe_differences(expected: Mapping[str, object], actual: Mapping[str, object], close: float) -> str:
    """What differs, floats by more than the share ``close``; empty if nothing does."""
    different = map(astuple, differences(expected, actual, close))
    return "; ".join(f"{place} {escape(value)} instead of {escape(wanted)}" for place, wanted, value in different)


def base_misfits(drafter: Shard) -> Iterator[str]:
    """Why the base in the bundle of ``drafter`` could not run it; none where it can, or there is none to ask.

    LiteRT-LM asks for the same: without ``verify`` it fails, with caches of other names it aborts, with others sizes
    the drafter's graph cannot be invoked.
    """
    sections = [s for s in drafter.opened.sections if s.data_type == TFLITE_MODEL and s.model_type == _BASE]
    if not sections:
        return
    model = drafter.opened.model(sections[0])
    signatures = [s for key in ("decode", "verify") if (s := model.signature(key)) and ACTIVATIONS in s.outputs]
    if len(signatures) < 2:
        yield f"the base has no signatures decode and verify that both have an output {ACTIVATIONS!r}"
        return
    outputs = {name: model.tensor(signatures[0].subgraph, index) for name, index in signatures[0].outputs.items()}
    wanted = {name: _form(cache) for name, cache in drafter.walk.caches.items()}
    forms = {name: _form(outputs[name]) if name in outputs else "missing" for name in wanted}
    for name, output in ((ACTIVATIONS, PROJECTED), (LOGITS, LOGITS)):
        if name in outputs:
            drafter_shape, theirs = drafter.graph.outputs[output].tensor.shape, outputs[name].shape
            wanted[name], forms[name] = (f"{next(reversed(shape), 0)} wide" for shape in (drafter_shape, theirs))
    for name, form in wanted.items():
        if forms[name] != form:
            yield f"{escape(name)} is {forms[name]} in the base and {form} in the drafter"


def _form(tensor: Tensor) -> str:
    return f"{tensor.type_name} {list(tensor.shape)}"
