"""The prompts: named workloads, each a list of texts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp_extract.errors import MtpExtractError, escape

__all__ = ["Prompt", "encode_prompts", "read_prompts", "shipped_prompts"]

_SHIPPED = Path(__file__).resolve().parent.parent / "data" / "prompts.json"


@dataclass(frozen=True)
class Prompt:
    """A text and the workload it belongs to."""

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
        text = path.read_text(encoding="utf-8")
        parsed: Any = json.loads(text) if path.suffix == ".json" else {path.stem: text.splitlines()}
    except (OSError, ValueError) as error:
        raise MtpExtractError(
            f'expected prompts in {escape(path)}, as JSON {{"workload": ["prompt", …]}} or one a line in a .txt file, '
            f"found: {escape(error)}"
        ) from error
    if not isinstance(parsed, Mapping) or not all(
        isinstance(texts, list) and all(isinstance(text, str) for text in texts) for texts in parsed.values()
    ):
        raise MtpExtractError(f'{escape(path)}: expected JSON of the form {{"workload": ["prompt", …], …}}')
    prompts = tuple(Prompt(name, text) for name, texts in parsed.items() for text in texts if text.strip())
    if not prompts:
        raise MtpExtractError(f"{escape(path)}: expected at least one prompt, found none")
    return prompts


def encode_prompts(prompts: Iterable[Prompt], tokenizer: Any, *, chat_template: bool) -> list[tuple[int, ...]]:
    """Token ids of each prompt, in the base's chat format where asked for and defined.

    Args:
        prompts: texts.
        tokenizer: the base's.
        chat_template: apply the tokenizer's chat template, if it has one.
    """
    templated = chat_template and bool(getattr(tokenizer, "chat_template", None))
    encoded = []
    for prompt in prompts:
        if templated:
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt.text}], add_generation_prompt=True, tokenize=False
            )
            # The template writes the special tokens itself.
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            ids = tokenizer(prompt.text)["input_ids"]
            # Not every tokenizer opens a text by itself, and a base has seen none that is not opened.
            bos = getattr(tokenizer, "bos_token_id", None)
            ids = ids if bos is None or ids[:1] == [bos] else [bos, *ids]
        encoded.append(tuple(int(token) for token in ids))
    return encoded
