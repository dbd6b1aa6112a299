"""A tokenizer as keys of GGUF, as llama.cpp's converter writes one of Gemma 4.

A drafter needs none: the base's is used. With one, tools that open a single GGUF can show its tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from mtp_extract.checkpoint.json_file import read_object
from mtp_extract.errors import CheckpointError, UnsupportedError, escape
from mtp_extract.formats import reading

MODEL, TOKENS = "tokenizer.ggml.model", "tokenizer.ggml.tokens"
NO_TOKENIZER = "no_vocab"

_FILE, _CONFIG = "tokenizer.json", "tokenizer_config.json"
_LARGEST = 1 << 27
"""Bytes of a file of tokens: Gemma 4's has 32 MB."""

_SCORE = -1000.0
"""Of every token: the merges say the order."""

_NORMAL, _CONTROL, _USER_DEFINED, _BYTE = 1, 3, 4, 6
"""``llama_token_type``."""

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_SHOWN = frozenset(
    {"<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>'}
)
"""Special tokens that llama.cpp's chat parser reads, and that are therefore always shown."""


def tokenizer_metadata(directory: Path, vocabulary: int) -> dict[str, Any]:
    """The keys for the tokenizer in ``directory`` (``tokenizer.json``, ``tokenizer_config.json``).

    Raises:
        UnsupportedError: it is not there or damaged, of another kind than Gemma 4's, or has not ``vocabulary`` tokens.
    """
    try:
        tokens, added = _tokens(read_object(directory / _FILE, "", largest=_LARGEST))
        special = _special(read_object(directory / _CONFIG, ""))
        if len(tokens) != vocabulary:
            raise CheckpointError(f"expected {vocabulary} tokens, as the drafter has, found {len(tokens)}")
    except CheckpointError as error:
        # What to do about a drafter is nothing to do about a tokenizer.
        raise _refused(directory, str(error).partition("; ")[0].rstrip(". ")) from error
    made = {
        MODEL: "gemma4",
        TOKENS: tokens,
        "tokenizer.ggml.scores": [_SCORE] * len(tokens),
        "tokenizer.ggml.token_type": [_type(token, token in special, token in added) for token in tokens],
        **_special_keys(directory, vocabulary),
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": True,
    }
    try:
        json.dumps(made, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise _refused(directory, "expected text, found half of a character (a lone surrogate)") from error
    return made


def _refused(directory: Path, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"{escape(directory)}: {why}. Give the base's own tokenizer, or leave it out: llama.cpp drafts without.",
        remedies=("tokenizer",),
    )


class _Added(Struct):
    content: str
    id: int


def _tokens(document: Mapping[str, Any]) -> tuple[list[str], set[str]]:
    """All tokens by their number, and those that were added after the vocabulary.

    Raises:
        CheckpointError: another kind of tokenizer, or tokens that are not numbered from 0 on.
    """
    found = reading.Keys(document)
    model = found.within("model")
    model("type", Literal["BPE"])
    if not model("byte_fallback", bool):
        raise CheckpointError("expected a BPE tokenizer that falls back to bytes, as Gemma 4's, found another kind")
    vocabulary = model("vocab", dict[str, int])
    added = {entry.content: entry.id for entry in found("added_tokens", list[_Added] | None, None) or []}
    numbers = {**vocabulary, **added}
    tokens = sorted(numbers, key=lambda token: numbers[token])
    if [numbers[token] for token in tokens] != list(range(len(tokens))):
        raise CheckpointError(f"expected its {len(tokens)} tokens to be numbered from 0 on, found other numbers")
    return tokens, added.keys() - vocabulary.keys()


def _type(token: str, special: bool, added: bool) -> int:
    if token in _SHOWN:
        return _USER_DEFINED
    if _BYTE_TOKEN.fullmatch(token) and not added:
        return _BYTE
    if special:
        return _CONTROL
    return _USER_DEFINED if added else _NORMAL


def _special(config: Mapping[str, Any]) -> set[str]:
    """The tokens that transformers calls special: those with a name of their own, and the further ones."""
    found: list[Any] = [value for key, value in config.items() if key.endswith("_token")]
    for key in ("extra_special_tokens", "additional_special_tokens", "model_specific_special_tokens"):
        more = config.get(key)
        found += more.values() if isinstance(more, dict) else more if isinstance(more, list) else []
    texts = (entry.get("content") if isinstance(entry, dict) else entry for entry in found)
    return {text for text in texts if isinstance(text, str)}


def _special_keys(directory: Path, vocabulary: int) -> dict[str, Any]:
    """Merges, numbers of special tokens, chat template: what gguf's own ``SpecialVocab`` makes of the files."""
    from gguf import GGUFWriter, SpecialVocab

    try:
        special = SpecialVocab(directory, load_merges=True, n_vocab=vocabulary)
        writer = GGUFWriter(None, "")
        special.add_to_gguf(writer, quiet=True)
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise _refused(directory, f"its special tokens cannot be read ({escape(error)})") from error
    return {key: entry.value for key, entry in writer.kv_data[0].items() if key.startswith("tokenizer.")}
