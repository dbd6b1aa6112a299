"""Prompts and texts: the one reader of the files they come in, and their tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

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
    prompts, by_workload = read_prompts(_SHIPPED), dict[str, list[Prompt]]()
    for prompt in prompts:
        by_workload.setdefault(prompt.workload, []).append(prompt)
    return tuple(prompt for found in by_workload.values() for prompt in spread(found, each or len(prompts)))


def spread(items: Sequence[T], count: int) -> list[T]:
    """``count`` of ``items``, evenly spaced, or all of them where there are no more."""
    return [items[len(items) * number // count] for number in range(count)] if count < len(items) else list(items)


def prompts_or_shipped(path: Path | None) -> tuple[Prompt, ...]:
    """Those of the file at ``path``, see :func:`read_prompts`; without one about 100 of those that are shipped."""
    return shipped_prompts(FEW) if path is None else read_prompts(path)


def require_texts(prompts: Iterable[Prompt]) -> None:
    """Raise MtpExtractError where a prompt consists of messages: to be asked before work that needs plain text."""
    for prompt in prompts:
        _ = prompt.text


class _Said(TypedDict):
    """One message of a chat, as OpenAI writes it; other fields are not read."""

    role: str
    content: str | list[dict[str, Any]] | None


class _Message(_Said, total=False):
    name: str
    tool_calls: list[Any]
    tool_call_id: str


class _Row(msgspec.Struct):
    """An object of a ``.jsonl`` file; other fields are not read."""

    prompt: str | list[_Message] | None = None
    messages: list[_Message] | None = None
    turns: list[str] | None = None
    completion: str | None = None
    response: str | None = None
    workload: str | None = None
    category: str | None = None
    question_id: str | int | None = None
    task_id: str | int | None = None
    source: str | int | None = None


def _prompt_of(line: bytes, number: int, workload: str) -> Prompt:
    """The prompt in this line of a ``.jsonl`` file, by default of ``workload``.

    Raises:
        ValueError: it has another form, or asks nothing.
    """
    try:
        row = msgspec.json.decode(line, type=_Row)
        asked: Any = row.messages or row.prompt or (row.turns or [""])[0]
        answer = row.completion or row.response or None
        if isinstance(asked, list) and answer is None and asked[-1]["role"] == "assistant":
            *asked, last = asked
            parts = last["content"]
            answer = "".join(str(part.get("text", "")) for part in parts) if isinstance(parts, list) else parts
        if not (asked.strip() if isinstance(asked, str) else asked):
            raise ValueError("no prompt, no messages and no turns in which something is asked")
    except ValueError as error:
        raise ValueError(f"line {number}: {error}, in {line.decode(errors='replace').strip()}") from error
    content = asked if isinstance(asked, str) else tuple(asked)
    source = row.question_id or row.task_id or row.source or ""
    return Prompt(row.workload or row.category or workload, content, str(source), answer or None)


def read_prompts(path: Path) -> tuple[Prompt, ...]:
    """Prompts, or texts, from a file of UTF-8, by the end of its name.

    - ``.txt``: one a line; blank lines are left out.
    - ``.jsonl``: an object a line, with one of

      - ``messages`` with ``role`` and ``content`` (OpenAI): where the assistant has the last word, that is the
        completion, and what stands before it the prompt;
      - ``prompt``, a text or a list of messages, and, if wanted, ``completion`` (TRL) or ``response``, a text;
      - ``turns`` (MT-Bench, Spec-Bench, SPEED-Bench): the first is the prompt. The others answer an answer that is not
        there, and are not used.

    ``workload`` or ``category`` is the workload, by default the file's name; ``question_id``, ``task_id`` or
    ``source`` the source, by default the prompt itself. Other fields are not read.

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
