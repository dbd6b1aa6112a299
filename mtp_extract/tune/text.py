"""The text a drafter is tuned on: what the base itself writes after prompts, or text by people.

What the base writes is kept in files of lines, one a continuation, a batch at a time. A run that was interrupted
resumes with the same text, since batches and their random numbers depend on the prompts and the seed alone.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from mtp_extract.errors import CheckpointError, PairError, escape
from mtp_extract.evaluate.batches import base_texts, groups
from mtp_extract.evaluate.progress import Show, silent
from mtp_extract.evaluate.prompts import Prompt, encode_prompts
from mtp_extract.io.files import open_regular
from mtp_extract.speculate.loop import SpeculativeGenerator
from mtp_extract.speculate.teacher import Text
from mtp_extract.tune.work import writing_to

BRANCHES = 3
"""Positions of a text from which the base continues once more."""

Tokens = tuple[int, ...]
"""A prompt as the base is fed it."""

Item = Prompt | Tokens
"""What is continued: a prompt, or tokens."""


@dataclass(frozen=True)
class Writer:
    """The base, writing."""

    generator: SpeculativeGenerator  # the base, with its tokenizer
    folder: Path  # where text is kept
    fingerprint: str  # of the base: text of another one is never taken for its own
    new_tokens: int  # most tokens of a continuation
    temperature: float  # 0 for greedy
    seed: int  # of sampled text
    batch: int  # prompts at a time
    chat_template: bool  # take text as what a user says in a chat, where the base has a chat format
    share: tuple[int, int] = (0, 1)  # (index of this process, number of processes)
    by: str = "the base"

    def prepare(self, items: Sequence[Item], tell: Show = silent) -> None:
        """Write what is not stored yet, of this process's share; ``tell`` is called after every batch.

        Raises:
            CheckpointError: a file of text is damaged.
            OutputError: the folder cannot be written.
            PairError: a prompt cannot be encoded, or does not fit the base's context.
        """
        number, processes = self.share
        batches, stored = self._batches(items)[number::processes], self._stored()
        done, total = 0, sum(len(batch) for _, batch in batches)
        for seed, batch in batches:
            if any(self._name(prompt) not in stored for _, prompt in batch):
                self._keep(self._continued(seed, batch))
            done += len(batch)
            tell(f"text {done} of {total}", done, total)

    def texts(self, items: Sequence[Item]) -> list[Text]:
        """The text of each, once every process has prepared its share."""
        stored = self._stored()
        return [stored[self._name(prompt)] for prompt in self._encoded(items)]

    def rows(self, items: Sequence[Item]) -> list[dict[str, Any]]:
        """What is stored of each, once every process has prepared its share."""
        stored = {row["name"]: row for path in self._paths() for row in _rows(path)}
        return [stored[name] for name in dict.fromkeys(self._name(prompt) for prompt in self._encoded(items))]

    def fitting(self, items: Sequence[Prompt]) -> list[Prompt]:
        """Those after which all new tokens fit the base's context."""
        room = (self._context or math.inf) - self.new_tokens
        encoded = self._encoded(items)
        return [item for item, prompt in zip(items, encoded, strict=True) if len(prompt) <= room]

    def branches(self, texts: Sequence[Text]) -> tuple[Writer, list[Tokens]]:
        """What writes half as many tokens after random positions of ``texts``, and what it is to continue there.

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

    def check_length(self, given: int, new: int, remedies: tuple[str, ...]) -> None:
        """Check that a prompt of ``given`` tokens and ``new`` ones after it fit the base's context.

        Raises:
            PairError: they do not.
        """
        if self._context is not None and given + new > self._context:
            raise PairError(
                f"expected prompts that fit the base's {self._context} tokens, found one of {given}, and {new} new "
                "ones; give shorter prompts",
                remedies=remedies,
            )

    def _continued(self, seed: int, batch: Sequence[tuple[Item, Tokens]]) -> list[Mapping[str, Any]]:
        """What is to be kept of each of ``batch``."""
        prompts, base, codec = [prompt for _, prompt in batch], self.generator.base, self.generator.codec
        written = base_texts(
            base, prompts, new_tokens=self.new_tokens, batch=len(prompts), temperature=self.temperature, seed=seed
        )
        return [
            self._line(prompt, tokens, codec.decode(tokens)) for prompt, tokens in zip(prompts, written, strict=True)
        ]

    def _line(self, prompt: Tokens, tokens: Sequence[int], text: str | None) -> dict[str, Any]:
        return {
            "name": self._name(prompt),
            "prompt_length": len(prompt),
            "tokens": [*prompt, *tokens],
            "text": text,
        }

    def _encoded(self, items: Sequence[Item]) -> list[Tokens]:
        prompts = [item for item in items if isinstance(item, Prompt)]
        encoded = iter(encode_prompts(prompts, self.generator.codec, chat_template=self.chat_template))
        return [next(encoded) if isinstance(item, Prompt) else item for item in items]

    def _batches(self, items: Sequence[Item]) -> list[tuple[int, list[tuple[Item, Tokens]]]]:
        """Different prompts in batches, each with the seed of its random numbers."""
        encoded = zip(items, self._encoded(items), strict=True)
        pairs = list({prompt: (item, prompt) for item, prompt in encoded}.values())
        lengths = [len(prompt) for _, prompt in pairs]
        self.check_length(max(lengths), self.new_tokens, ("prompts", "new_tokens"))
        # Rows of a batch draw other numbers from one seed; batches need seeds of their own.
        batches = [[pairs[index] for index in group] for group in groups(lengths, self.batch)]
        return [(_number([self._seed, *(prompt for _, prompt in batch)]), batch) for batch in batches]

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
    def _made_with(self) -> list[Any]:
        """What the text depends on."""
        stop = getattr(getattr(self.generator.base.model, "generation_config", None), "eos_token_id", None)
        return [self.fingerprint, self.new_tokens, self.temperature, stop]

    @property
    def _key(self) -> str:
        return sha256(json.dumps(self._made_with).encode()).hexdigest()[:16]

    def _paths(self) -> list[Path]:
        """Files of text, of every process."""
        return sorted(self.folder.glob(f"texts-{self._key}-*.jsonl"))

    def _stored(self) -> dict[str, Text]:
        return {row["name"]: row["text"] for path in self._paths() for row in map(_text_row, _rows(path))}

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


def _text_row(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": row["name"], "text": Text(tuple(row["tokens"]), row["prompt_length"])}


def _rows(path: Path) -> list[dict[str, Any]]:
    """What the whole lines of a file of texts hold.

    Raises:
        CheckpointError: it is damaged.
    """
    try:
        rows = [json.loads(line) for line in _whole_lines(path)]
        return [
            {**row, "tokens": [*map(int, row["tokens"])], "prompt_length": int(row["prompt_length"])} for row in rows
        ]
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{escape(path)}: expected text that the base wrote, found a file that cannot be read. Remove it to have "
            "it written again."
        ) from error


def _whole_lines(path: Path) -> Iterator[bytes]:
    with open_regular(path) as file:
        yield from (line for line in file if line.endswith(b"\n"))


def _number(parts: Sequence[Any]) -> int:
    """48 bits that depend on ``parts`` alone."""
    return int.from_bytes(sha256(json.dumps(parts).encode()).digest()[:6], "big")


def people_texts(items: Sequence[Prompt], writer: Writer) -> list[tuple[Prompt, Text]]:
    """Each item, a text by people or a prompt with their answer, in windows of ``writer.new_tokens``.

    Drafts aim at every token of a text but BOS, each window standing alone. With a prompt they aim at the answer's
    tokens, and each window has before it all that was there: the prompt as ``writer`` would encode it, and the answer
    so far. What a chat template puts after an answer is no part of it.

    Raises:
        PairError: a text cannot be encoded, messages have no answer, or an answer does not fit the base's context.
        MtpExtractError: messages where no chat template is applied.
    """
    codec, length = writer.generator.codec, writer.new_tokens
    answered = [item for item in items if item.completion is not None]
    alone = [item for item in items if item.completion is None]
    if chats := [item for item in alone if not isinstance(item.content, str)]:
        raise PairError(
            "expected texts by people, or messages that end in an answer, found messages without one, "
            f"{escape(chats[0].key)}; give those as prompts",
            remedies=("prompts",),
        )
    prompts = iter(encode_prompts(answered, codec, chat_template=writer.chat_template))
    texts = iter(encode_prompts(alone, codec, chat_template=False))
    found = []
    for item in items:
        if item.completion is None:
            encoded = next(texts)
            opened = encoded[0] == getattr(codec.tokenizer, "bos_token_id", None)
            given, tokens = encoded[:opened], encoded[opened:]
        else:
            given, tokens = next(prompts), codec.continued(item.completion)
            writer.check_length(len(given), len(tokens), ("text",))
        found += [(item, text) for text in _windows(given, tokens, length, alone=item.completion is None)]
    return found


def _windows(given: tuple[int, ...], tokens: tuple[int, ...], length: int, *, alone: bool) -> Iterator[Text]:
    """Texts of which drafts aim at ``length`` of the ``tokens``; with all that stands before them unless ``alone``."""
    for at in range(0, len(tokens), length):
        window, before = tokens[at : at + length], given if alone else given + tokens[:at]
        if not alone or len(window) > 2:
            yield Text((*before, *window), max(1, len(before)))
