"""The prompts: named workloads, each a list of texts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtp_extract.errors import MtpExtractError, escape
from mtp_extract.io.regular import read_regular

if TYPE_CHECKING:
    from mtp_extract.speculate.codec import Codec, Encoded

LARGEST = 1 << 28
"""Bytes of a file of prompts."""

_SHIPPED = Path(__file__).resolve().parent.parent / "data" / "prompts.json"


@dataclass(frozen=True)
class Prompt:
    workload: str
    text: str


def shipped_prompts() -> tuple[Prompt, ...]:
    """The prompts that come with the package: chat, code, math, prose, json."""
    return read_prompts(_SHIPPED)


def read_prompts(path: Path) -> tuple[Prompt, ...]:
    """Prompts from a JSON file, ``{"workload": ["prompt", …], …}``, or from a text file, one a line.

    Raises:
        MtpExtractError: the file cannot be read, has another form, or holds no prompt.
    """
    try:
        text = read_regular(path, LARGEST).decode("utf-8")
        parsed: Any = json.loads(text) if path.suffix == ".json" else {path.stem: text.splitlines()}
    except (OSError, ValueError, RecursionError) as error:
        raise MtpExtractError(
            f'expected prompts in {escape(path)}, as JSON {{"workload": ["prompt", …]}} or one a line in a .txt file, '
            f"found: {escape(error)}"
        ) from error
    if not isinstance(parsed, Mapping) or not all(
        isinstance(texts, list) and all(isinstance(text, str) for text in texts) for texts in parsed.values()
    ):
        raise MtpExtractError(f'{escape(path)}: expected JSON of the form {{"workload": ["prompt", …], …}}')
    try:
        "".join((*parsed, *(text for texts in parsed.values() for text in texts))).encode()
    except UnicodeEncodeError as error:
        raise MtpExtractError(
            f"{escape(path)}: expected text, found half a character, {escape(error.object[error.start])}"
        ) from error
    prompts = tuple(Prompt(name, text) for name, texts in parsed.items() for text in texts if text.strip())
    if not prompts:
        raise MtpExtractError(f"{escape(path)}: expected at least one prompt, found none")
    return prompts


def encode_prompts(prompts: Iterable[Prompt], codec: Codec, *, chat_template: bool) -> list[Encoded]:
    """Token ids of each prompt, in the base's chat format where asked for and defined."""
    templated = chat_template and codec.has_template
    bos = getattr(codec.tokenizer, "bos_token_id", None)
    encoded = codec.encode_all([prompt.text for prompt in prompts], chat_template=templated)
    if bos is None or templated:
        return encoded
    # Not every tokenizer opens a text by itself, and a base has seen none that is not opened.
    return [
        found if found.bos is not None else replace(found, tokens=(bos, *found.tokens), bos="prompt")
        for found in encoded
    ]
