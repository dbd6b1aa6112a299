"""Read prompts and texts from files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from mtp_extract.errors import MtpExtractError, escape
from mtp_extract.io.files import read_regular
from mtp_extract.speculate.codec import extract_text

_Item = TypeVar("_Item")

LARGEST_PROMPTS_FILE = 1 << 28  # bytes
_DEEPEST = 64  # nesting of messages
FEW_PER_WORKLOAD = 20  # prompts of each shipped workload, for commands that would take long with all
_SHIPPED = Path(__file__).resolve().parent.parent / "data" / "prompts.jsonl"
_FORM = (
    "prompts in UTF-8, as .txt, one a line, or as .jsonl, an object a line such as "
    '{"prompt": "…"}, {"messages": [{"role": "user", "content": "…"}]} or {"turns": ["…"]}'
)

Messages = tuple[Mapping[str, Any], ...]  # with ``role`` and ``content``; the last is to be answered


@dataclass(frozen=True)
class Prompt:
    """A prompt, or a human-written text."""

    workload: str  # kind of text, such as code
    content: str | Messages
    source: str = ""  # prompts of one source stay on one side of a training split; by default its own
    completion: str | None = None  # the answer, if known

    def __post_init__(self) -> None:
        if not self.source:
            object.__setattr__(self, "source", self.content if isinstance(self.content, str) else self.key)

    @property
    def key(self) -> str:
        """A string that is equal for equal prompts."""
        return json.dumps(self.content, sort_keys=True, ensure_ascii=True)


def load_shipped_prompts(each: int | None = None) -> tuple[Prompt, ...]:
    """Return the package's prompts: all, or ``each`` of chat, code, math, prose and json, evenly spaced."""
    prompts = read_prompts(_SHIPPED)
    chosen: list[Prompt] = []
    for _, of_workload in groupby(prompts, key=lambda prompt: prompt.workload):
        chosen += pick_evenly(list(of_workload), each or len(prompts))
    return tuple(chosen)


def hash_prompts(path: Path | None) -> str:
    """Return the SHA-256 of a file of prompts, in hex; of the shipped prompts for None.

    Raise OSError or ValueError if it cannot be read or is too large.
    """
    return sha256(read_regular(path or _SHIPPED, LARGEST_PROMPTS_FILE)).hexdigest()


def pick_evenly(items: Sequence[_Item], count: int) -> list[_Item]:
    """Pick ``count`` of ``items``, evenly spaced, or all if there are no more."""
    return [items[len(items) * number // count] for number in range(count)] if count < len(items) else list(items)


class _Row(msgspec.Struct):
    """An object of a ``.jsonl`` file; other fields are ignored."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    turns: list[str] | None = None
    completion: str | None = None
    workload: str | None = None
    source: str | int | None = None


def _parse_lines(stored: bytes, workload: str, *, chat_template: bool, text_alone: bool) -> Iterator[Prompt]:
    """Parse the prompts of a ``.jsonl`` file; ValueError names the line of a faulty one."""
    for number, line in enumerate(stored.splitlines(), 1):
        if line.strip():
            try:
                yield _parse_prompt(line, workload, chat_template=chat_template, text_alone=text_alone)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"line {number}: {error}") from error


def _parse_prompt(line: bytes, workload: str, *, chat_template: bool, text_alone: bool) -> Prompt:
    row = msgspec.json.decode(line, type=_Row)
    _require_shallow(row.messages)
    content: Any = row.prompt or (row.turns or [""])[0]
    answer = row.completion
    if row.messages:
        if not chat_template:
            raise ValueError("messages where no chat template is applied")
        messages = [_parse_message(message, text_alone=text_alone) for message in row.messages]
        if answer is None and messages[-1]["role"] == "assistant":
            answer = extract_text(messages.pop()["content"])
        content = tuple(messages) if any(message["content"] for message in messages) else ""
    if not (content.strip() if isinstance(content, str) else content):
        raise ValueError("no prompt, no messages and no turns in which something is asked")
    return Prompt(row.workload or workload, content, str(row.source or ""), answer or None)


def _require_shallow(messages: object) -> None:
    # Templates and servers cannot read deeper messages.
    values = [messages]
    for _ in range(_DEEPEST):
        holders = [value for value in values if isinstance(value, (dict, list))]
        values = [item for holder in holders for item in (holder.values() if isinstance(holder, dict) else holder)]
    if values:
        raise ValueError(f"messages nested more than {_DEEPEST} deep")


def _parse_message(message: Mapping[str, Any], *, text_alone: bool) -> dict[str, Any]:
    """Return ``message`` with its text joined; ValueError if it is not a message, or has parts that cannot be read."""
    if not isinstance(message.get("role"), str) or "content" not in message:
        raise ValueError("messages without a role or content")
    try:
        return {**message, "content": extract_text(message["content"])}
    except ValueError as error:
        if text_alone or not isinstance(message["content"], list):
            raise ValueError(f"{error}, and only text can be read") from None
        return dict(message)


def read_prompts(path: Path | None, *, chat_template: bool = True, text_alone: bool = True) -> tuple[Prompt, ...]:
    """Read prompts or texts from a UTF-8 file; about 100 shipped prompts for None. The suffix gives the form:

    - ``.txt``: one prompt per line; blank lines are skipped.
    - ``.jsonl``: one object per line with ``prompt``, a string; or ``messages`` with ``role`` and ``content`` (OpenAI),
      whose last message, if the assistant's, is the completion; or ``turns`` (MT-Bench), of which the first is the
      prompt. Optional: ``completion``, a string; ``workload``, by default the file's name; ``source``, by default the
      prompt itself. Without ``chat_template``, messages are refused. The text parts of a message are joined; others,
      such as images, are refused if ``text_alone``.

    Raises:
        MtpExtractError: the file cannot be read, has another form, or holds no prompt.
    """
    if path is None:
        return load_shipped_prompts(FEW_PER_WORKLOAD)
    suffix = path.suffix.lower()
    try:
        if suffix not in (".txt", ".jsonl"):
            raise ValueError(f"a name that ends in {suffix}" if suffix else "a name without an ending")
        stored = read_regular(path, LARGEST_PROMPTS_FILE).removeprefix(b"\xef\xbb\xbf")
        if suffix == ".txt":
            lines = re.split(r"\r\n|\r|\n", stored.decode())
            prompts = [Prompt(path.stem, text) for text in lines if text.strip()]
        else:
            prompts = list(_parse_lines(stored, path.stem, chat_template=chat_template, text_alone=text_alone))
    except OSError as error:
        raise MtpExtractError(
            f"{escape(path)}: expected prompts in a file that can be read, found: {error.strerror}. Check the path.",
            remedies=("prompts",),
        ) from error
    except (ValueError, RecursionError) as error:
        raise MtpExtractError(f"{escape(path)}: expected {_FORM}, found: {escape(error)}. Write it so.") from error
    if not prompts:
        raise MtpExtractError(f"{escape(path)}: expected at least one prompt, found none. Give {_FORM}.")
    return tuple(prompts)
