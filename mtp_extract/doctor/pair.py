"""Does a drafter fit a base, and whose drafter is it?"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from mtp_extract.architecture.config import DrafterConfig, known_drafter
from mtp_extract.doctor.result import Check, Identity
from mtp_extract.drafter.load import Network
from mtp_extract.errors import escape
from mtp_extract.evaluate.base_model import LoadedBase
from mtp_extract.formats import format_of
from mtp_extract.pipeline.check import read_record, with_record
from mtp_extract.pipeline.staging import RECORD
from mtp_extract.speculate.target import Base, compared

_TOKENIZER = "tokenizer.json"


def identify(place: Path, name: str) -> Identity:
    """What is in ``place``.

    Raises:
        CheckpointError: it is damaged, or holds no drafter.
    """
    layout, folder = format_of(place), with_record(place)
    config = layout.read_config(place)
    record = read_record(folder) if (folder / RECORD).is_file() else {}
    known = known_drafter(config) if isinstance(config, DrafterConfig) else {"base_model": config.base}
    made_for = (record.get("tuning") or record.get("ordered_head") or {}).get("base") or (known or {}).get("base_model")
    return Identity(name, layout.name, made_for)


def check_fit(place: Path, identity: Identity, drafter: Network, loaded: LoadedBase) -> list[Check]:
    """Everything that has to agree, each by itself: what is wrong in one does not hide another.

    Raises:
        PairError: the base is no Gemma 4 model that the reference can run.
    """
    base = Base(loaded.model)
    with torch.inference_mode():
        checks = [_same(what.removesuffix(" of"), *both) for what, *both in compared(base, drafter.needs)]
    if isinstance(drafter.config, DrafterConfig):
        checks += _attention(drafter.config, base)
    return [*checks, *_tokenizers(place, loaded, base), _named(identity, loaded)]


def _same(name: str, drafter: object, base: object) -> Check:
    if drafter == base:
        return Check(name, True, f"{escape(base)}")
    return Check(name, False, f"the drafter has {escape(drafter)}, the base {escape(base)}")


def _attention(config: DrafterConfig, base: Base) -> Iterator[Check]:
    ropes = getattr(base.config, "rope_parameters", None) or {}
    for kind, layer in config.kv_layers.items():
        own = ropes.get(kind)
        if isinstance(own, Mapping):
            found = own.get("rope_theta"), own.get("partial_rotary_factor", 1.0)
            yield _same(f"RoPE, {kind}", (layer.rope.theta, layer.rope.partial_rotary_factor), found)
        if layer.sliding_window is not None:
            yield _same("sliding window", layer.sliding_window, base.windows.get(kind))
    cap, theirs = config.final_logit_softcap or None, getattr(base.config, "final_logit_softcapping", None) or None
    so = ": greedy drafts are the same, drawn ones are not"
    yield Check("soft cap", True if cap == theirs else None, f"{cap} and {theirs}{'' if cap == theirs else so}")


def _tokenizers(place: Path, loaded: LoadedBase, base: Base) -> Iterator[Check]:
    size = len(loaded.tokenizer)
    yield Check("tokenizer's size", size <= base.vocab_size, f"{size} tokens, {base.vocab_size} in the base")
    if (place / _TOKENIZER).is_file():
        yield _tokenizer(place / _TOKENIZER, loaded.tokenizer.get_vocab())


def _tokenizer(file: Path, base: Mapping[str, int]) -> Check:
    """The drafter's own against the base's, token by token."""
    try:
        read = json.loads(file.read_bytes())
        listed = {**read["model"]["vocab"], **{token["content"]: token["id"] for token in read["added_tokens"]}}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        return Check("tokenizer", None, f"it lists no tokens by number: {escape(error)}")
    other = sum(base.get(token) != number for token, number in listed.items())
    return Check("tokenizer", not other, f"{other} tokens differ from the base's" if other else "the base's own")


def _named(identity: Identity, loaded: LoadedBase) -> Check:
    """Which base it is, as far as names say."""
    named = str(loaded.name).partition("@")[0].rstrip("/").rpartition("/")[2]
    wanted = (identity.made_for or "").rpartition("/")[2]
    what = f"made for {identity.made_for or 'a base that is not known'}; here it is {named}, {loaded.dtype}"
    return Check("made for this base", True if named == wanted else None, escape(what))
