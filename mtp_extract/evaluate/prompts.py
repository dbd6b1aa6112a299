"""Prompts and texts: the one reader of the files they come in, and their tokens."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, dropwhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mtp_extract.errors import MtpExtractError, escape
from mtp_extract.io.regular import read_regular

if TYPE_CHECKING:
    from mtp_extract.speculate.codec import Codec, Encoded

T = TypeVar("T")

LARGEST = 1 << 28
"""Bytes of a file of prompts."""

FEW = 20
"""Of every shipped workload so many, where all of them would take long."""

_SHIPPED = Path(__file__).resolve().parent.parent / "data" / "prompts.json"

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
    if each is None:
        return prompts
    by_workload: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_workload.setdefault(prompt.workload, []).append(prompt)
    return tuple(chain.from_iterable(spread(found, each) for found in by_workload.values()))


def spread(items: Sequence[T], count: int) -> list[T]:
    """``count`` of ``items``, evenly spaced, or all of them where there are no more."""
    return [items[len(items) * number // count] for number in range(count)] if count < len(items) else list(items)


def prompts_or_shipped(path: Path | None) -> tuple[Prompt, ...]:
    """Those of the file at ``path``, see :func:`read_prompts`; without one about 100 of those that are shipped."""
    return shipped_prompts(FEW) if path is None else read_prompts(path)


def read_prompts(path: Path) -> tuple[Prompt, ...]:
    """Prompts, or texts, from a file of UTF-8, by the end of its name.

    - ``.txt``: one a line; blank lines are left out.
    - ``.json``: ``{"workload": ["prompt", …], …}``, or a list of objects as in ``.jsonl``.
    - ``.jsonl``: an object a line, with one of

      - ``prompt``, a text or a list of messages, and, if wanted, ``completion`` (TRL), ``response`` or
        ``canonical_solution`` (HumanEval), a text or a list that ends in the assistant's message;
      - ``messages`` with ``role`` and ``content`` (OpenAI), or ``conversations`` with ``from`` and ``value``
        (ShareGPT): where the assistant has the last word, that is the completion, and what stands before it the prompt.
        Answers to nothing are left out: what the assistant says first, and a conversation of nothing else;
      - ``turns`` (MT-Bench, Spec-Bench, SPEED-Bench), or ``prompt`` with a list of texts: the first turn is the
        prompt. The others answer an answer that is not there, and are not used.

    - ``.csv``: the first line names the columns, ``prompt`` and others as in ``.jsonl``.

    ``workload`` or ``category`` is the workload, by default the file's name; ``source``, ``task_id``, ``question_id``
    or ``prompt_id`` the source, by default the prompt itself. Beside ``turns`` the source is their ``question_id``
    first: there ``source`` names a data set. Other fields are not read.

    Raises:
        MtpExtractError: the file cannot be read, has another form, or holds no prompt.
    """
    suffix = path.suffix.lower()
    example, rows = _FORMS.get(suffix, (_ALL_FORMS, _unknown))
    try:
        text = read_regular(path, LARGEST).decode("utf-8-sig") if suffix in _FORMS else ""
        prompts = tuple(_whole(prompt) for prompt in rows(text, path) if prompt is not None)
    except OSError as error:
        raise MtpExtractError(
            f"{escape(path)}: expected prompts in a file that can be read, found: {error.strerror}. Check the path.",
            remedies=("prompts",),
        ) from error
    except (ValueError, RecursionError, csv.Error) as error:
        raise MtpExtractError(
            f"{escape(path)}: expected {example}, found: {escape(error)}. Bring it into that form."
        ) from error
    if not prompts:
        raise MtpExtractError(f"{escape(path)}: expected at least one prompt, found none. Give {example}.")
    return prompts


def encode_prompts(prompts: Iterable[Prompt], codec: Codec, *, chat_template: bool) -> list[Encoded]:
    """Token ids of each prompt, in the base's chat format where asked for and defined.

    Raises:
        MtpExtractError: a prompt of messages where no chat template is applied.
        PairError: a prompt cannot be encoded.
    """
    templated = chat_template and codec.has_template
    bos = getattr(codec.tokenizer, "bos_token_id", None)
    contents = [prompt.content if chat_template else prompt.text for prompt in prompts]
    encoded = codec.encode_all(contents, chat_template=templated)
    if bos is None or templated:
        return encoded
    # Not every tokenizer opens a text by itself, and a base has seen none that is not opened.
    return [
        found if found.bos is not None else replace(found, tokens=(bos, *found.tokens), bos="prompt")
        for found in encoded
    ]


_Rows = Callable[[str, Path], Iterator["Prompt | None"]]

_CHATS = ("messages", "conversations", "conversation")
_COMPLETIONS = ("completion", "response", "canonical_solution")
_WORKLOADS = ("workload", "category")
_SOURCES: tuple[str, ...] = ("source", "task_id", "question_id", "prompt_id")
_SOURCES_OF_TURNS = ("question_id", "prompt_id", "source")
_OF_A_MESSAGE = ("name", "tool_calls", "tool_call_id")
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "observation": "tool"}
"""Roles of ShareGPT's conversations, as chat templates name them."""

_WITHHELD = "FULL BENCHMARK DATA SHOULD BE FETCHED"
"""What SPEED-Bench has in place of prompts that are not its own to give."""


def _lines(text: str, path: Path) -> Iterator[Prompt | None]:
    for line in io.StringIO(text, newline=None):
        if line.strip():
            yield Prompt(path.stem, line.rstrip("\n"))


def _json(text: str, path: Path) -> Iterator[Prompt | None]:
    parsed = json.loads(text)
    if isinstance(parsed, list):
        for number, row in enumerate(parsed, 1):
            yield _at(f"entry {number}", row, path.stem)
        return
    if not isinstance(parsed, dict):
        raise ValueError(_short(parsed))
    for workload, prompts in parsed.items():
        if not isinstance(prompts, list) or not all(isinstance(prompt, str) for prompt in prompts):
            raise ValueError(f"{workload}: {_short(prompts)}")
        yield from (Prompt(workload, prompt) for prompt in prompts if prompt.strip())


def _json_lines(text: str, path: Path) -> Iterator[Prompt | None]:
    # Not splitlines: a text in JSON may hold what that takes for the end of a line.
    for number, line in enumerate(io.StringIO(text, newline=None), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"line {number}: {error}, in {line.strip()}") from error
            yield _at(f"line {number}", row, path.stem)


def _csv(text: str, path: Path) -> Iterator[Prompt | None]:
    rows = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    if "prompt" not in (rows.fieldnames or ()):
        raise ValueError(f"line 1: {','.join(rows.fieldnames or ())}")
    for row in rows:
        if None in row or None in row.values():
            raise ValueError(f"line {rows.line_num}: another number of columns than in the first line")
        yield _at(f"line {rows.line_num}", {name: cell for name, cell in row.items() if cell.strip()}, path.stem)


def _unknown(text: str, path: Path) -> Iterator[Prompt | None]:
    raise ValueError(f"a name that ends in {path.suffix}" if path.suffix else "a name without an ending")


_OBJECTS = (
    '{"prompt": "…"}, {"prompt": "…", "completion": "…"}, {"messages": [{"role": "user", "content": "…"}]}, '
    '{"conversations": [{"from": "human", "value": "…"}]} or {"turns": ["…"]}'
)
_FORMS: Mapping[str, tuple[str, _Rows]] = {
    ".txt": ("prompts in UTF-8, one a line", _lines),
    ".json": (f'prompts as JSON, {{"workload": ["prompt", …]}} or a list of objects such as {_OBJECTS}', _json),
    ".jsonl": (f"prompts, one a line as JSON such as {_OBJECTS}", _json_lines),
    ".csv": ("prompts as CSV, with a first line of names such as prompt,workload,source,completion", _csv),
}
_ALL_FORMS = 'prompts as .txt, one a line, .jsonl such as {"prompt": "…"}, .json or .csv'


def _at(place: str, row: Any, workload: str) -> Prompt | None:
    try:
        return _of_row(row, workload)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def _of_row(row: Any, workload: str) -> Prompt | None:
    """The prompt of an object; None for a conversation that asks nothing."""
    if not isinstance(row, dict):
        raise ValueError(_short(row))
    chat = next((row[name] for name in _CHATS if row.get(name) is not None), None)
    turns = row.get("turns") if row.get("turns") is not None else row.get("prompt")
    answer = next((row[name] for name in _COMPLETIONS if row.get(name)), None)
    sources, content, completion = _SOURCES, turns, answer
    if chat is not None:
        content, completion = _divided(chat)
    elif isinstance(turns, list) and turns:
        if all(isinstance(turn, str) for turn in turns):
            sources, content = _SOURCES_OF_TURNS, turns[0]
        elif answer is None or isinstance(answer, list):
            content, completion = _divided([*turns, *(answer or ())])
        else:
            content = _messages(turns)
    if content == ():
        return None
    if not isinstance(content, tuple) and not (isinstance(content, str) and content.strip()):
        raise ValueError(_short(row))
    if not isinstance(completion, str | None):
        raise ValueError(f"the completion {_short(completion)}")
    if isinstance(content, str) and content.startswith(_WITHHELD):
        raise ValueError("what stands for a prompt of SPEED-Bench until its own script has fetched it")
    return Prompt(_name(row, _WORKLOADS) or workload, content, _name(row, sources) or "", completion)


def _name(row: Mapping[str, Any], fields: Sequence[str]) -> str | None:
    """The first of ``fields`` that ``row`` has, a text or a whole number."""
    for field in fields:
        if (found := row.get(field)) not in (None, ""):
            if not isinstance(found, str | int) or isinstance(found, bool):
                raise ValueError(f"{field} {_short(found)}, neither text nor a whole number")
            return str(found)
    return None


def _divided(chat: Any) -> tuple[Messages, str | None]:
    """What is to be answered, and the answer, where the last message is one."""
    messages = tuple(dropwhile(lambda message: message["role"] == "assistant", _messages(chat)))
    if not messages or messages[-1]["role"] != "assistant":
        return messages, None
    content = messages[-1]["content"]
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content)
    return messages[:-1], content or None


def _messages(chat: Any) -> Messages:
    if not isinstance(chat, list):
        raise ValueError(_short(chat))
    return tuple(map(_message, chat))


def _message(found: Any) -> Mapping[str, Any]:
    if not isinstance(found, dict):
        raise ValueError(f"the message {_short(found)}")
    role, content = found.get("role", found.get("from")), found.get("content", found.get("value"))
    parts = isinstance(content, list) and all(isinstance(part, dict) for part in content)
    called = content is None and bool(found.get("tool_calls"))
    if not isinstance(role, str) or not (isinstance(content, str) or parts or called):
        raise ValueError(f"the message {_short(found)}")
    more = {name: found[name] for name in _OF_A_MESSAGE if found.get(name) is not None}
    return {"role": _ROLES.get(role, role), "content": content, **more}


def _whole(prompt: Prompt) -> Prompt:
    """``prompt``, if all of it is text that can be encoded."""
    parts = [prompt.workload, prompt.content, prompt.source, prompt.completion]
    try:
        json.dumps(parts, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"half a character, {escape(error.object[error.start])}") from error
    return prompt


def _short(found: Any) -> str:
    """What was found, as JSON, or as much of it as is shown."""
    return escape(json.dumps(found, ensure_ascii=False))
