"""The text a drafter is tuned on: what the base itself writes after the user's prompts.

Text is written once and kept in files of lines, one a continuation, a batch at a time. A run that was interrupted
resumes with the same text, since batches and their random numbers depend on the prompts and the seed alone.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from mtp_extract.errors import CheckpointError, PairError, escape
from mtp_extract.evaluate.batches import base_texts, groups
from mtp_extract.evaluate.prompts import Prompt, encode_prompts
from mtp_extract.io.files import open_regular
from mtp_extract.speculate.loop import SpeculativeGenerator
from mtp_extract.speculate.teacher import Text
from mtp_extract.tune.status import Status
from mtp_extract.tune.work import writing_to

Tokens = tuple[int, ...]
"""A prompt as the base is fed it."""

BRANCHES = 3
"""Of a text, places from which the base goes on."""


@dataclass(frozen=True)
class Writing:
    generator: SpeculativeGenerator  # the base, with its tokenizer
    folder: Path  # where text is kept
    fingerprint: str  # of the base: text of another one is never taken for its own
    new_tokens: int  # most tokens of a continuation
    temperature: float  # 0 for greedy
    seed: int  # of sampled text
    batch: int  # prompts at a time
    chat_template: bool  # take text as what a user says in a chat, where the base has a chat format
    share: tuple[int, int] = (0, 1)  # (index of this process, number of processes)

    @property
    def author(self) -> str:
        """Who writes, for whoever waits."""
        return "the base"

    def prepare(self, items: Sequence[Prompt | Tokens], tell: Callable[[Status], None] = lambda status: None) -> None:
        """Write what is not stored yet, of this process's share; ``tell`` is called after every batch.

        Raises:
            CheckpointError: a file of text is damaged.
            OutputError: the folder cannot be written.
            PairError: a prompt cannot be encoded, or does not fit the base's context.
        """
        number, processes = self.share
        batches, stored = self._batches(items)[number::processes], self._stored()
        missing = [
            (seed, prompts) for seed, prompts in batches if any(self._name(prompt) not in stored for prompt in prompts)
        ]
        total, left = (sum(len(prompts) for _, prompts in some) for some in (batches, missing))
        written = 0
        for seed, prompts in missing:
            self._write(seed, prompts)
            written += len(prompts)
            tell(Status("text", total - left + written, total))

    def texts(self, items: Sequence[Prompt | Tokens]) -> list[Text]:
        """The text of each, once every process has prepared its share."""
        stored = self._stored()
        return [stored[self._name(prompt)] for prompt in self._encoded(items)]

    def checked(self, items: Sequence[Prompt | Tokens]) -> Mapping[str, Any] | None:
        """Who wrote the texts, for the record; None for the base at hand."""
        return None

    def fitting(self, items: Sequence[Prompt]) -> list[Prompt]:
        """Those after which all new tokens fit the base's context."""
        room = (self._context or math.inf) - self.new_tokens
        encoded = self._encoded(items)
        return [item for item, prompt in zip(items, encoded, strict=True) if len(prompt) <= room]

    def branches(self, texts: Sequence[Text]) -> tuple[Writing, list[Tokens]]:
        """What writes half as many tokens after random places of ``texts``, and what it is to continue there.

        Text that is written greedily soon repeats itself, and the base has little else to say after a prompt: from
        within text that was drawn it has more.
        """
        short = replace(self, new_tokens=max(2, self.new_tokens // 2))
        room = (self._context or math.inf) - short.new_tokens
        found = []
        for text in texts:
            places = range(text.prompt_length, int(min(len(text.tokens), room + 1)))
            draw = torch.Generator().manual_seed(_number([self.seed, *text.tokens]))
            chosen = torch.randperm(len(places), generator=draw)[:BRANCHES].sort().values.tolist()
            found += [text.tokens[: places[index]] for index in chosen]
        return short, found

    def _encoded(self, items: Sequence[Prompt | Tokens]) -> list[Tokens]:
        prompts = [item for item in items if isinstance(item, Prompt)]
        encoded = iter(encode_prompts(prompts, self.generator.codec, chat_template=self.chat_template))
        return [next(encoded) if isinstance(item, Prompt) else item for item in items]

    def _batches(self, items: Sequence[Prompt | Tokens]) -> list[tuple[int, list[Tokens]]]:
        """Different prompts in batches, each with the seed of its random numbers."""
        prompts = list(dict.fromkeys(self._encoded(items)))
        self.check_length(max(map(len, prompts)), self.new_tokens, ("prompts", "new_tokens"))
        parts = groups(list(map(len, prompts)), self.batch)
        # Rows of a batch draw other numbers from one seed; batches need seeds of their own.
        batches = [[prompts[index] for index in group] for group in parts]
        return [(_number([self._seed, *batch]), batch) for batch in batches]

    def check_length(self, given: int, new: int, remedies: tuple[str, ...]) -> None:
        """Whether a prompt of ``given`` tokens and ``new`` ones after it fit the base's context.

        Raises:
            PairError: they do not.
        """
        if self._context is not None and given + new > self._context:
            raise PairError(
                f"expected prompts that fit the base's {self._context} tokens, found one of {given}, and {new} new "
                "ones; give shorter prompts",
                remedies=remedies,
            )

    @property
    def _context(self) -> int | None:
        """Most tokens of a text; None where the base does not say."""
        found: int | None = getattr(self.generator.base.config, "max_position_embeddings", None)
        return found

    @property
    def _seed(self) -> int:
        """Greedy text has none."""
        return self.seed if self.temperature > 0 else 0

    def _name(self, prompt: Tokens) -> str:
        return sha256(json.dumps([self._seed, *prompt]).encode()).hexdigest()[:32]

    @property
    def _key(self) -> str:
        stop = getattr(getattr(self.generator.base.model, "generation_config", None), "eos_token_id", None)
        made_with = [self.fingerprint, self.new_tokens, self.temperature, stop]
        return sha256(json.dumps(made_with).encode()).hexdigest()[:16]

    def _stored(self) -> dict[str, Text]:
        found = {}
        for path in self._paths():
            found.update(_read(path))
        return found

    def _paths(self) -> list[Path]:
        """Files of text, of every process."""
        return sorted(self.folder.glob(f"texts-{self._key}-*.jsonl"))

    def _write(self, seed: int, prompts: Sequence[Tokens]) -> None:
        written = base_texts(
            self.generator.base,
            prompts,
            new_tokens=self.new_tokens,
            batch=len(prompts),
            temperature=self.temperature,
            seed=seed,
        )
        lines = [
            {
                "name": self._name(prompt),
                "prompt_length": len(prompt),
                "tokens": [*prompt, *tokens],
                "text": self.generator.codec.decode(tokens),
            }
            for prompt, tokens in zip(prompts, written, strict=True)
        ]
        self._keep(lines)

    def _keep(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Add texts to those that are stored."""
        path = self.folder / f"texts-{self._key}-{self.share[0]}.jsonl"
        size = sum(len(line) for line in _whole_lines(path)) if path.is_file() else 0
        with writing_to(self.folder), open(path, "ab") as file:
            # A line that was cut off is overwritten.
            file.truncate(size)
            file.write("".join(json.dumps(line, ensure_ascii=True) + "\n" for line in lines).encode())
            file.flush()
            os.fsync(file.fileno())


def _read(path: Path) -> dict[str, Text]:
    try:
        rows = stored_rows(path)
        return {row["name"]: Text(tuple(map(int, row["tokens"])), int(row["prompt_length"])) for row in rows}
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{escape(path)}: expected text that the base wrote, found a file that cannot be read. Remove it to have "
            "it written again."
        ) from error


def stored_rows(path: Path) -> list[Any]:
    """What the whole lines of a file of texts hold."""
    return [json.loads(line) for line in _whole_lines(path)]


def _whole_lines(path: Path) -> Iterator[bytes]:
    with open_regular(path) as file:
        yield from (line for line in file if line.endswith(b"\n"))


def _number(parts: Sequence[Any]) -> int:
    """48 bits that depend on ``parts`` alone."""
    return int.from_bytes(sha256(json.dumps(parts).encode()).digest()[:6], "big")


def people_texts(items: Sequence[Prompt], writing: Writing) -> list[tuple[Prompt, Text]]:
    """Each item, a text by people or a prompt with their answer, in windows of ``writing.new_tokens``.

    Drafts aim at every token of a text but BOS, each window standing alone. With a prompt they aim at the answer's
    tokens, and each window has before it all that was there: the prompt as ``writing`` would encode it, and the answer
    so far. What a chat template puts after an answer is no part of it.

    Raises:
        PairError: a text cannot be encoded, messages have no answer, or an answer does not fit the base's context.
        MtpExtractError: messages where no chat template is applied.
    """
    codec, length = writing.generator.codec, writing.new_tokens
    answered = [item for item in items if item.completion is not None]
    alone = [item for item in items if item.completion is None]
    if chats := [item for item in alone if not isinstance(item.content, str)]:
        raise PairError(
            "expected texts by people, or messages that end in an answer, found messages without one, "
            f"{escape(chats[0].key)}; give those as prompts",
            remedies=("prompts",),
        )
    prompts = iter(encode_prompts(answered, codec, chat_template=writing.chat_template))
    texts = iter(encode_prompts(alone, codec, chat_template=False))
    found = []
    for item in items:
        if item.completion is None:
            encoded = next(texts)
            opened = encoded[0] == getattr(codec.tokenizer, "bos_token_id", None)
            given, tokens = encoded[:opened], encoded[opened:]
        else:
            given, tokens = next(prompts), codec.continued(item.completion)
            writing.check_length(len(given), len(tokens), ("text",))
        found += [(item, text) for text in _windows(given, tokens, length, alone=item.completion is None)]
    return found


def _windows(given: tuple[int, ...], tokens: tuple[int, ...], length: int, *, alone: bool) -> Iterator[Text]:
    """Texts of which drafts aim at ``length`` of the ``tokens``; with all that stands before them unless ``alone``."""
    for at in range(0, len(tokens), length):
        window, before = tokens[at : at + length], given if alone else given + tokens[:at]
        if not alone or len(window) > 2:
            yield Text((*before, *window), max(1, len(before)))
