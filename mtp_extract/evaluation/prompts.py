"""Prompts and texts: the one reader of the files they come in, and their tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from mtp_extract.errors import MtpExtractError, escape
from mtp_extract.io.files import read_regular

if TYPE_CHECKING:
    from mtp_extract.speculate.codec import Codec

T = TypeVar("T")

LARGEST = 1 << 28
"""Bytes of a file of prompts."""

FEW = 20
"""Of every shipped workload so many, where all of them would take long."""

_SHIPPED = Path(__file__).resolve().parent.parent / "data" / "prompts.jsonl"
_FORM = (
    "prompts in UTF-8, as .txt, one a line, or as .jsonl, an object a line such as "
    '{"prompt": "…"}, {"messages": [{"role": "user", "content": "…"}]} or {"turns": ["…"]}'
)

Messages = tuple[Mapping[str, Any], ...]
"""A chat up to what is to be answered: dicts with ``role`` and ``content``."""


@dataclass(frozen=True)
class Prompt:
    """A prompt, or a text by people."""

    workload: str  # what it is an example of
    content: str | Messages
    source: str = ""  # where it comes from: all of one source are on one side of a training; by default its own
    completion: str | None = None  # what was answered, where that is known

    def __post_init__(self) -> None:
        if not self.source:
            object.__setattr__(self, "source", self.content if isinstance(self.content, str) else self.key)

    @property
    def text(self) -> str:
        """The prompt as plain text.

        Raises:
            MtpExtractError: it consists of messages, which are no text until a chat template has written them.
        """
        if isinstance(self.content, str):
            return self.content
        raise MtpExtractError(
            f"expected prompts of plain text where no chat template is applied, found messages, {escape(self.key)}; "
            "apply the chat template, or give text",
            remedies=("prompts",),
        )

    @property
    def key(self) -> str:
        """Equal for equal prompts."""
        return json.dumps(self.content, sort_keys=True, ensure_ascii=True)


def shipped_prompts(each: int | None = None) -> tuple[Prompt, ...]:
    """The prompts that come with the package: chat, code, math, prose, json.

    Args:
        each: of every workload so many, evenly spaced; None for all.
    """
    prompts = read_prompts(_SHIPPED)
    workloads = ([*found] for _, found in groupby(prompts, key=lambda prompt: prompt.workload))
    return tuple(prompt for found in workloads for prompt in spread(found, each or len(prompts)))


def spread(items: Sequence[T], count: int) -> list[T]:
    """``count`` of ``items``, evenly spaced, or all of them where there are no more."""
    return [items[len(items) * number // count] for number in range(count)] if count < len(items) else list(items)


def prompts_or_shipped(path: Path | None, *, chat_template: bool = True) -> tuple[Prompt, ...]:
    """Those of the file at ``path``, see :func:`read_prompts`; without one about 100 of those that are shipped.

    Raises:
        MtpExtractError: as of :func:`read_prompts`; or messages where no ``chat_template`` is applied.
    """
    prompts = shipped_prompts(FEW) if path is None else read_prompts(path)
    if not chat_template:
        _ = [prompt.text for prompt in prompts]  # so that messages are refused before any work is done
    return prompts


class _Row(msgspec.Struct):
    """An object of a ``.jsonl`` file; other fields are not read."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    turns: list[str] | None = None
    completion: str | None = None
    workload: str | None = None
    source: str | int | None = None


def _prompt_of(line: bytes, number: int, workload: str) -> Prompt:
    """The prompt in this line of a ``.jsonl`` file, by default of ``workload``.

    Raises:
        ValueError: it has another form, or asks nothing.
    """
    try:
        row = msgspec.json.decode(line, type=_Row)
        asked: Any = row.messages or row.prompt or (row.turns or [""])[0]
        answer = row.completion
        if answer is None and row.messages and row.messages[-1].get("role") == "assistant":
            *asked, last = row.messages
            answer = msgspec.convert(last.get("content"), str | None)
        if not (asked.strip() if isinstance(asked, str) else asked):
            raise ValueError("no prompt, no messages and no turns in which something is asked")
    except ValueError as error:
        raise ValueError(f"line {number}: {error}, in {line.decode(errors='replace').strip()}") from error
    content = asked if isinstance(asked, str) else tuple(asked)
    return Prompt(row.workload or workload, content, str(row.source or ""), answer or None)


def read_prompts(path: Path) -> tuple[Prompt, ...]:
    """Prompts, or texts, from a file of UTF-8, by the end of its name.

    - ``.txt``: one a line; blank lines are left out.
    - ``.jsonl``: an object a line, with ``prompt``, a text; ``messages`` with ``role`` and ``content`` (OpenAI), where
      an answer that the assistant gives last is the completion; or ``turns`` (MT-Bench), of which the first is the
      prompt. If wanted ``completion``, a text; ``workload``, by default the file's name; ``source``, by default the
      prompt itself.

    Raises:
        MtpExtractError: the file cannot be read, has another form, or holds no prompt.
    """
    suffix = path.suffix.lower()
    try:
        if suffix not in (".txt", ".jsonl"):
            raise ValueError(f"a name that ends in {suffix}" if suffix else "a name without an ending")
        stored = read_regular(path, LARGEST).removeprefix(b"\xef\xbb\xbf")
        if suffix == ".txt":
            lines = re.split(r"\r\n|\r|\n", stored.decode())
            prompts = tuple(Prompt(path.stem, line) for line in lines if line.strip())
        else:
            rows = enumerate(stored.splitlines(), 1)
            prompts = tuple(_prompt_of(row, number, path.stem) for number, row in rows if row.strip())
    except OSError as error:
        raise MtpExtractError(
            f"{escape(path)}: expected prompts in a file that can be read, found: {error.strerror}. Check the path.",
            remedies=("prompts",),
        ) from error
    except (ValueError, RecursionError) as error:
        raise MtpExtractError(f"{escape(path)}: expected {_FORM}, found: {escape(error)}. Write it so.") from error
    if not prompts:
        raise MtpExtractError(f"{escape(path)}: expected at least one prompt, found none. Give {_FORM}.")
    return prompts


def encode_prompts(prompts: Iterable[Prompt], codec: Codec, *, chat_template: bool) -> list[tuple[int, ...]]:
    """Token ids of each prompt, in the base's chat format where asked for and defined.

    Raises:
        MtpExtractError: a prompt of messages where no chat template is applied.
        PairError: a prompt cannot be encoded.
    """
    contents = [prompt.content if chat_template else prompt.text for prompt in prompts]
    return [codec.encode(content, chat_template=chat_template and codec.has_template) for content in contents]
