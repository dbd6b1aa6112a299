"""What engines make of an EAGLE-3 head: what they would load wrongly without a word, and what they refuse.

Read in the sources of vLLM 0.33.0 (``model_executor/models/llama_eagle3.py``, both model runners, ``speculators``'
configurations) and SGLang 0.5.23 (``srt/models/llama_eagle3.py``, ``gemma4_causal.py``), for which the layouts are
made; and, run too, in those of llama.cpp (``conversion/llama.py``, ``src/models/eagle3.cpp``), which converts both, and
mlx-vlm 0.7.10 (``speculative/drafters/eagle3``), which loads one. A rule looks at the parsed ``config.json`` and the
shapes of the tensors, whatever else is wrong with them, so that every finding is reported at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtp_extract.architecture.eagle3 import FUSED
from mtp_extract.errors import escape

IDS = "eagle_aux_hidden_state_layer_ids"
LLAMA = "transformer_layer_config"
"""Key of a ``speculators`` configuration under which that of the layer lies."""

WRONG, REFUSED, CHECK = "loads it wrongly", "refuses it", "loads it as it stands"
"""What an engine does with it: silently another function, an error, or what only its maker can judge."""

VLLM, SGLANG = "vLLM 0.33.0", "SGLang 0.5.23"
LLAMA_CPP, MLX = "llama.cpp 0c1e570", "mlx-vlm 0.7.10"
_EITHER = "one of vLLM and SGLang"
_MADE_FOR = {"eagle3": (VLLM, SGLANG, _EITHER), "speculators": (VLLM,)}
_OTHERS = {"eagle3": (LLAMA_CPP,), "speculators": (LLAMA_CPP, MLX)}
"""Layout → the engines that it is made for, and those that convert or load it as well."""


@dataclass(frozen=True)
class Finding:
    """One thing that an engine makes of a head."""

    engine: str
    effect: str  # WRONG, REFUSED or CHECK
    what: str  # why, and what to do

    @property
    def is_error(self) -> bool:
        """Whether an engine for which the layout is made takes another function for it, and does not say so."""
        return self.effect == WRONG and self.engine not in (LLAMA_CPP, MLX)

    @property
    def forbids(self) -> bool:
        """Whether it is not to be written so: an engine for which the layout is made does not load it as it is."""
        return self.effect != CHECK and self.engine not in (LLAMA_CPP, MLX)

    def __str__(self) -> str:
        return f"{self.engine} {self.effect}: {self.what}"


@dataclass(frozen=True)
class _Head:
    """What a rule looks at: both places of the configuration, which are one in the ``eagle3`` layout, and shapes."""

    layout: str
    top: Mapping[str, Any]
    llama: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def eagle(self) -> Mapping[str, Any]:
        return _table(self.top, "eagle_config")


_BOTH = (VLLM, SGLANG)
Found = tuple[str | Sequence[str], str, str]
"""The engine or engines, the effect, and what; those that do not read the layout do not count."""

Rule = Callable[[_Head], Iterator[Found]]


def lint(layout: str, document: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> tuple[Finding, ...]:
    """What engines that read ``layout`` make of a head.

    Args:
        layout: "eagle3" or "speculators".
        document: its ``config.json``.
        shapes: of its tensors, by name.
    """
    llama = document if layout == "eagle3" else _table(document, LLAMA)
    head = _Head(layout, document, llama, shapes)
    readers = (*_MADE_FOR[layout], *_OTHERS[layout])
    return tuple(
        Finding(engine, effect, what)
        for rule in _RULES
        for engines, effect, what in rule(head)
        for engine in ((engines,) if isinstance(engines, str) else engines)
        if engine in readers
    )


def _table(place: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = place.get(key)
    return found if isinstance(found, Mapping) else {}


def _integer(place: Mapping[str, Any], key: str) -> int | None:
    found = place.get(key)
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def _architecture(head: _Head) -> Iterator[Found]:
    if head.layout == "eagle3":
        known = {"LlamaForCausalLMEagle3": _BOTH, "Eagle3LlamaForCausalLM": (VLLM,)}
        found, place = head.top.get("architectures"), "architectures"
        name = found[0] if isinstance(found, list) and found else None
    else:
        known = {"llama": (VLLM,), "qwen3": (VLLM,)}
        name, place = head.llama.get("model_type", "llama"), f"model_type of {LLAMA}"
    for engine in _BOTH:
        if engine not in known.get(str(name), ()):
            better = [name for name, engines in known.items() if engine in engines]
            yield engine, REFUSED, f"it has no {place} {escape(name)}; write {' or '.join(better)}"


def _activation(head: _Head) -> Iterator[Found]:
    if (found := head.llama.get("hidden_act", "silu")) != "silu":
        yield _BOTH, REFUSED, f"hidden_act is {escape(found)}, and it has silu only"


def _heads(head: _Head) -> Iterator[Found]:
    hidden, heads = _integer(head.llama, "hidden_size"), _integer(head.llama, "num_attention_heads")
    if hidden and heads and heads > 0 and hidden % heads:
        what = f"a hidden_size of {hidden} is no multiple of {heads} heads, as transformers' LlamaConfig wants it"
        yield _BOTH, REFUSED, what


def _rope(head: _Head) -> Iterator[Found]:
    flat = head.llama.get("rope_parameters")
    if flat is None:
        flat = head.llama
    theta = flat.get("rope_theta") if isinstance(flat, Mapping) else None
    if not isinstance(theta, int | float):
        nested = isinstance(flat, Mapping) and any(isinstance(value, Mapping) for value in flat.values())
        how = "RoPE is given by layer type" if nested and flat is not head.llama else "there is no rope_theta"
        yield _BOTH, WRONG, f"{how}, for which it takes 10000; write one rope_theta"


def _layer_ids(head: _Head) -> Iterator[Found]:
    top, inner = head.top.get(IDS), head.eagle.get(IDS)
    default = "it takes 2, n // 2 and n − 3 of a base of n layers"
    if not top and inner:
        how = "it takes those of eagle_config for layers entered, not left, or not at all"
        yield VLLM, WRONG, f"{IDS} is not at the top level, and {how}; write each plus 1 there"
    elif not top:
        yield VLLM, WRONG, f"{IDS} is missing, and {default}; write those it was trained with"
    if not inner:
        add = "write each less 1 there" if top else "write those it was trained with, each less 1"
        yield SGLANG, WRONG, f"{IDS} is missing in eagle_config, and {default}; {add}"
    entered, left = _numbers(top), _numbers(inner)
    if entered and left and [i - 1 for i in entered] != left:
        what = f"{IDS} names layers that are entered at the top level, layers that are left in eagle_config: each is to"
        yield _EITHER, WRONG, f"{what} be one less there; they are {top} and {inner}"
    for engine, ids in ((VLLM, entered), (SGLANG, left)):
        if ids != sorted(set(ids)):
            yield engine, WRONG, f"{IDS} is {ids}, and it reads each layer once, the lowest first"


def _numbers(ids: Any) -> list[int]:
    """``ids``, if they are such; empty otherwise."""
    return ids if isinstance(ids, list) and all(isinstance(i, int) for i in ids) else []


def _norms(head: _Head) -> Iterator[Found]:
    if head.top.get("norm_before_residual"):
        what = "norm_before_residual is true, and it begins the residual before the norm all the same"
        yield SGLANG, WRONG, what
    if head.layout == "speculators" and head.top.get("norm_before_residual") is None:
        what = "norm_before_residual is missing, for which it takes true, and speculators false; write what was trained"
        yield VLLM, WRONG, what
    if head.layout == "eagle3" and head.top.get("norm_output"):
        what = (
            "norm_output is true: engines feed back the normed state; SpecForge trains with the other and writes this"
        )
        yield _BOTH, CHECK, what
    if head.layout == "eagle3" and head.top.get("use_aux_norm") and not head.top.get("fc_norm"):
        yield VLLM, REFUSED, "use_aux_norm is SGLang's old name; write fc_norm"


def _vocabulary(head: _Head) -> Iterator[Found]:
    whole, drafted = _integer(head.llama, "vocab_size"), _integer(head.top, "draft_vocab_size")
    if drafted is None and "draft_vocab_size" in head.top:
        yield SGLANG, WRONG, "draft_vocab_size is null, for which it takes the base's LM head, not this one"
    elif drafted is None:
        yield SGLANG, REFUSED, "it asks for draft_vocab_size"
    reduced = drafted is not None and drafted != whole
    if reduced and "d2t" not in head.shapes:
        yield _BOTH, WRONG, "d2t is missing, and it takes row i of the head for token i of the base"
    if not reduced and "d2t" in head.shapes:
        yield VLLM, REFUSED, "d2t is there though the head has the whole vocabulary; leave it out"


def _fc(head: _Head) -> Iterator[Found]:
    hidden = _integer(head.llama, "hidden_size")
    base = _integer(head.top, "target_hidden_size") or hidden
    shape = head.shapes.get("fc.weight", ())
    if base is None or hidden is None or len(shape) != 2:
        return
    if shape[1] != FUSED * base:
        what = f"fc reads {shape[1]} numbers, {FUSED} states of the base are {FUSED * base}; check target_hidden_size"
        yield _BOTH, REFUSED, what
    elif shape[1] == hidden:
        what = f"the head is as wide as {FUSED} states of the base, {hidden}, and it leaves fc out then"
        yield SGLANG, WRONG, what


def _tensors(head: _Head) -> Iterator[Found]:
    """Beside what reading asks for: tables that engines replace, and tensors that they skip."""
    base, hidden = _integer(head.top, "target_hidden_size"), _integer(head.llama, "hidden_size")
    if "embed_tokens.weight" in head.shapes and base in (None, hidden):
        what = "it takes the base's embeddings for embed_tokens.weight; leave it out if they are the base's"
        yield SGLANG, WRONG, what
    if head.top.get("tie_word_embeddings"):
        yield SGLANG, WRONG, "tie_word_embeddings is true, and it takes the embeddings for the head"
    if biases := sorted(name for name in head.shapes if name.endswith("_proj.bias")):
        yield SGLANG, WRONG, f"it skips {escape(biases[0])}: its head has no biases there"
    norms = {"fc_norm": head.top.get("fc_norm"), "input_norm": head.top.get("norm_before_fc")}
    norms["input_norm"] = head.eagle.get("norm_before_fc", norms["input_norm"])
    for name, there in norms.items():
        if not there and any(tensor.startswith(f"{name}.") for tensor in head.shapes):
            yield SGLANG, WRONG, f"it skips {name}, which the config does not speak of"


def _verifier(head: _Head) -> Iterator[Found]:
    if head.layout == "speculators":
        name = _table(_table(head.top, "speculators_config"), "verifier").get("name_or_path")
        if not name:
            yield VLLM, CHECK, "it names no base, so that it can only be served beside one, not by itself"


def _others(head: _Head) -> Iterator[Found]:
    """What llama.cpp's converter and mlx-vlm know less of."""
    fc_norm = bool(head.top.get("fc_norm")) or any(name.startswith("fc_norm.") for name in head.shapes)
    for engine in (LLAMA_CPP, MLX):
        if fc_norm:
            yield engine, REFUSED, "it has no fc_norm; train one with norm_before_fc for it"
        if head.top.get("norm_output"):
            yield engine, WRONG, "norm_output is true, and it feeds back the state before the norm"
        if not head.top.get(IDS):
            what = f"{IDS} is not at the top level, and it takes 2, n // 2 and n − 3 of n layers; write them there"
            yield engine, WRONG, what
    if 0 in _numbers(head.top.get(IDS)):
        yield MLX, WRONG, "it reads what leaves layer 0 for what enters it"
    if "d2t" in head.shapes:
        yield MLX, WRONG, "it takes the base's best token among the head's for the base's best, so the text changes"
    if "embed_tokens.weight" not in head.shapes:
        yield MLX, REFUSED, "it wants embed_tokens.weight in the file, though it takes the base's; put the base's there"


_RULES: tuple[Rule, ...] = (
    _architecture,
    _activation,
    _heads,
    _rope,
    _layer_ids,
    _norms,
    _vocabulary,
    _fc,
    _tensors,
    _verifier,
    _others,
)
