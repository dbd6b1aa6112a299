"""Does a drafter fit a base, whose drafter is it, and what will an engine do with its directory?"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch

from mtp_extract.architecture.config import DrafterConfig, known_drafter
from mtp_extract.architecture.eagle3 import Eagle3Config
from mtp_extract.doctor.fields import Check, Engine, Identity, Made
from mtp_extract.drafter.load import Network
from mtp_extract.errors import escape
from mtp_extract.evaluate.base_model import LoadedBase
from mtp_extract.formats import ENGINES, EVERY, engines_for, format_of, variant_for
from mtp_extract.formats.eagle3 import findings_of
from mtp_extract.pipeline.check import read_record, with_record
from mtp_extract.pipeline.staging import RECORD
from mtp_extract.pipeline.unexpected import unexpected_in
from mtp_extract.report.files import REPORT_FILES
from mtp_extract.speculate.target import Base
from mtp_extract.validate.acceptance.drafters import facts_of

_TOKENIZER, _TEMPLATE = "tokenizer.json", "chat_template.jinja"
_ADAPTER = "adapter_config.json"
_ENGINES = {"vLLM": "vllm", "SGLang": "sglang", "llama-server": "llama.cpp", "mlx-vlm": "mlx-vlm"}
"""Kind of a server → the engine, as formats call it."""


def identify(place: Path, name: str) -> Identity:
    """What is in ``place``.

    Raises:
        CheckpointError: it is damaged, or holds no drafter.
    """
    facts, record = facts_of(place, name), _record(place)
    config = format_of(place).read_config(place)
    known = known_drafter(config) if isinstance(config, DrafterConfig) else None
    made_for = (record.get("tuning") or record.get("ordered_head") or {}).get("base")
    if isinstance(config, Eagle3Config):
        made_for = made_for or config.base
    elif known:
        made_for = made_for or known["base_model"]
    return Identity(name, facts.format, cast(Made, facts.made), known["name"] if known else None, made_for)


def engines_of(place: Path, kind: str | None) -> Iterator[Engine]:
    """What engines do with the directory: of every engine, or of the one that a server of ``kind`` is.

    Raises:
        CheckpointError: it is damaged.
    """
    layout, asked = format_of(place).name, _ENGINES.get(kind or "")
    for engine in (asked,) if asked else ("transformers", *_ENGINES.values()):
        same = (name for name in ENGINES[engine].formats if EVERY[name].architecture == EVERY[layout].architecture)
        others = [name for name in same if variant_for(name, engine) == name]
        if engine in engines_for(layout):
            yield Engine(engine, True, f"loads the {layout} layout")
        elif others:
            yield Engine(engine, False, f"does not load the {layout} layout: convert it to {' or '.join(others)}")
    for finding in findings_of(place):
        yield Engine(finding.engine, False if finding.is_error else None, f"{finding.effect}: {finding.what}")
    for what in unexpected_in(place, REPORT_FILES):
        yield Engine("engines", None, f"may read more than the drafter there: {what}")
    for note in _record(place).get("notes", ()):
        yield Engine("engines", None, str(note))


def _record(place: Path) -> Mapping[str, Any]:
    folder = with_record(place)
    return read_record(folder) if (folder / RECORD).is_file() else {}


def check_fit(place: Path, identity: Identity, drafter: Network, loaded: LoadedBase) -> list[Check]:
    """Everything that has to agree, each by itself: what is wrong in one does not hide another.

    Raises:
        PairError: the base is no Gemma 4 model that the reference can run.
    """
    base = Base(loaded.model)
    checks = [
        _same("width", drafter.needs.width, base.width),
        _same("vocabulary", drafter.needs.vocab_size, base.vocab_size),
        *_shared(drafter, base),
    ]
    if isinstance(drafter.config, DrafterConfig):
        checks += _attention(drafter.config, base)
    else:
        lost = [layer for layer in drafter.needs.layers if layer > base.num_layers]
        checks.append(Check("layers read", not lost, f"{list(drafter.needs.layers)} of {base.num_layers}"))
    return [*checks, *_tokenizers(place, loaded, base), *_generation(identity, loaded)]


def _same(name: str, drafter: object, base: object, otherwise: bool | None = False, so: str = "") -> Check:
    """``otherwise``: what it comes to where they differ."""
    if drafter == base:
        return Check(name, True, f"{escape(base)}")
    return Check(name, otherwise, f"the drafter has {escape(drafter)}, the base {escape(base)}{so}")


def _shared(drafter: Network, base: Base) -> Iterator[Check]:
    """K and V, as a forward of one token gives them."""
    if not drafter.needs.shared_kv:
        return
    with torch.inference_mode():
        shared = base.full_pass(torch.zeros(1, 1, dtype=torch.long, device=base.device)).shared_kv
    for kind, wanted in drafter.needs.shared_kv.items():
        if kind not in shared:
            yield Check(f"K and V, {kind}", False, "the base computes none of its own for it")
            continue
        found = tuple(shared[kind][0].shape[axis] for axis in (1, 3))
        told = f"{found[0]} heads of {found[1]}, of layer {base.kv_providers.get(kind)} of {base.num_layers}"
        wrong = f"the drafter reads {wanted[0]} heads of {wanted[1]}, the base has {told}"
        yield Check(f"K and V, {kind}", found == wanted, told if found == wanted else wrong)


def _attention(config: DrafterConfig, base: Base) -> Iterator[Check]:
    ropes = getattr(base.config, "rope_parameters", None) or {}
    for kind, layer in config.kv_layers.items():
        own = ropes.get(kind)
        if isinstance(own, Mapping):
            found = own.get("rope_theta"), own.get("partial_rotary_factor", 1.0)
            yield _same(f"RoPE, {kind}", (layer.rope.theta, layer.rope.partial_rotary_factor), found)
        if layer.sliding_window is not None:
            yield _same("sliding window", layer.sliding_window, base.windows.get(kind))
    theirs = getattr(base.config, "final_logit_softcapping", None) or None
    so = ": greedy drafts are the same, drawn ones are not"
    yield _same("soft cap", config.final_logit_softcap or None, theirs, None, so)


def _tokenizers(place: Path, loaded: LoadedBase, base: Base) -> Iterator[Check]:
    size = len(loaded.tokenizer)
    yield Check("tokenizer's size", size <= base.vocab_size, f"{size} tokens, {base.vocab_size} in the base")
    own = place / _TOKENIZER if place.is_dir() else place
    if own.name == _TOKENIZER and own.is_file():
        theirs = loaded.tokenizer.get_vocab()
        read = json.loads(own.read_bytes())
        listed = dict(read.get("model", {}).get("vocab", {})) if isinstance(read.get("model", {}), Mapping) else {}
        listed |= {token["content"]: token["id"] for token in read.get("added_tokens", ())}
        other = [token for token, number in listed.items() if theirs.get(token) != number]
        yield Check(
            "tokenizer", not other, f"{len(other)} tokens otherwise than the base's" if other else "the base's own"
        )
    stops = set(base.stop_token_ids)
    eos = loaded.tokenizer.eos_token_id
    told = f"text ends at {sorted(stops)}, the tokenizer's EOS is {eos}"
    yield Check("special tokens", True if not stops or eos in stops else None, told)
    template, file = getattr(loaded.tokenizer, "chat_template", None), place / _TEMPLATE
    found, fits = ("the base has one", True) if template else ("the base has none", None)
    if template and place.is_dir() and file.is_file():
        same = file.read_text(encoding="utf-8").strip() == str(template).strip()
        found, fits = ("the base's own", True) if same else ("another than the base's", None)
    yield Check("chat template", fits, found)


def _generation(identity: Identity, loaded: LoadedBase) -> Iterator[Check]:
    """Which base it is, as far as names and configurations say."""
    config, folder = loaded.model.config, Path(loaded.name)
    if quantized := getattr(config, "quantization_config", None):
        method = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized.quant_method
        what = f"{escape(str(method))}: its states are not quite those that the drafter was made for"
        yield Check("quantization of the base", None, what)
    if hasattr(loaded.model, "peft_config") or (folder / _ADAPTER).is_file():
        what = "an adapter lies beside the base: the reference runs without it unless it is merged"
        yield Check("adapter", None, what)
    named = str(loaded.name).partition("@")[0].rstrip("/").rpartition("/")[2]
    wanted = (identity.made_for or "").rpartition("/")[2]
    revision = getattr(config, "_commit_hash", None)
    told = f"{named}{f', revision {revision[:12]}' if revision else ''}, {loaded.dtype}"
    if named == wanted:
        yield Check("made for this base", True, escape(told))
        return
    what = f"it was made for {identity.made_for}" if wanted else "nothing names the base it was made for"
    yield Check("made for this base", None, escape(f"{what}; here it is {told}"))
