"""The text a drafter is tuned on: what the base, or a server that has it, writes after prompts; or text by people.

What is written is kept in files of lines, one a continuation, a file a batch. A run that was interrupted resumes
with the same text, since batches and their random numbers depend on the prompts and the seed alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import torch

from mtp_extract.errors import CheckpointError, PairError, escape
from mtp_extract.evaluation.agreement import base_texts, groups
from mtp_extract.evaluation.progress import Show, silent
from mtp_extract.evaluation.prompts import Messages, Prompt, encode_prompts
from mtp_extract.io.files import read_regular
from mtp_extract.serving.client import Question, Server
from mtp_extract.speculate.teacher import Text
from mtp_extract.tuning.pair import Pair
from mtp_extract.tuning.writing import written_whole

BRANCHES = 3
"""Positions of a text from which the base continues once more."""

_LARGEST = 1 << 28  # bytes of a file of texts

Tokens = tuple[int, ...]
"""A prompt as the base is fed it."""


class Line(msgspec.Struct, frozen=True):
    """A text as it is kept."""

    name: str  # of all that it depends on
    prompt_length: int
    tokens: Tokens


@dataclass(frozen=True)
class Writer:
    """The pair's base, or a server that has it, writing."""

    pair: Pair
    temperature: float
    new_tokens: int  # most of them of a text
    server: Server | None = None
    contents: Mapping[Tokens, str | Messages] = field(default_factory=dict)  # of each prompt, as a server is asked it

    def texts(self, prompts: Sequence[Tokens], tell: Show = silent, what: str = "prompts") -> list[Text]:
        """What follows each of ``prompts``: what is not stored yet is written, by all processes, a share each.

        Args:
            tell: called after every batch.
            what: ``prompts`` are, in words.

        Raises:
            CheckpointError: a file of text is damaged.
            OutputError: the folder cannot be written.
            PairError: a prompt does not fit the base's context.
        """
        if not prompts:
            return []
        accelerator, folder = self.pair.accelerator, self.pair.plan.kept_in / "text"
        by = f"{self.server.kind.name}'s {escape(self.server.model)}" if self.server else "the base"
        self.pair.say(f"continuing {len(prompts)} {what} with {by} at temperature {self.temperature:g}")
        self.check_length(max(map(len, prompts)), self.new_tokens, ("prompts", "new_tokens"))
        names = {prompt: self._name(prompt) for prompt in prompts}
        once = list(names)
        batches = [[once[index] for index in group] for group in groups(list(map(len, once)), self.pair.plan.batch)]
        batches = batches[accelerator.process_index :: accelerator.num_processes]
        stored, done, total = _stored(folder), 0, sum(map(len, batches))
        for batch in batches:
            if missing := {names[prompt] for prompt in batch} - stored.keys():
                # All of them, since what a batch draws depends on all of its prompts.
                lines = (
                    Line(names[prompt], len(prompt), (*prompt, *tokens))
                    for prompt, tokens in zip(batch, self._continued(batch), strict=True)
                )
                with written_whole(folder / f"{_number(sorted(missing)):012x}.jsonl") as file:
                    file.writelines(msgspec.json.encode(line) + b"\n" for line in lines if line.name in missing)
            done += len(batch)
            tell(f"text {done} of {total}", done, total)
        accelerator.wait_for_everyone()
        stored = _stored(folder)
        found = (stored[names[prompt]] for prompt in prompts)
        return [Text(line.tokens, line.prompt_length) for line in found]

    def check_length(self, prompt: int, new: int, remedies: tuple[str, ...]) -> None:
        """Raise PairError where so many tokens, and ``new`` ones after them, do not fit the base's context."""
        if prompt + new > self.context:
            raise PairError(
                f"expected prompts that fit the base's {self.context} tokens, found one of {prompt}, and {new} new "
                "ones; give shorter prompts",
                remedies=remedies,
            )

    def _continued(self, prompts: Sequence[Tokens]) -> list[Tokens]:
        """What follows each of a batch, whose rows draw other numbers from one seed.

        A server leaves out the marks around thoughts, so nobody knows which tokens they were: then there are tokens
        only where it gives them.

        Raises:
            ServerError: there is no answer.
            PairError: a server writes tokens that the base at hand does not have.
        """
        base, codec, server = self.pair.base, self.pair.codec, self.server
        if server is None:
            batch, seed = len(prompts), _number([self._seed, *prompts])
            drawn: dict[str, Any] = {"new_tokens": self.new_tokens, "temperature": self.temperature, "seed": seed}
            return base_texts(base, prompts, batch=batch, **drawn)
        questions, found = list[Question](), list[Tokens]()
        for prompt in prompts:
            more = {"temperature": self.temperature, "seed": int(self._name(prompt)[:7], 16), **server.kind.ids}
            questions.append(Question(self.contents[prompt], self.new_tokens, self.pair.plan.chat_template, more))
        for answer in server.ask(questions, len(questions)):
            tokens = answer.token_ids or (() if answer.reasoning else codec.continued(answer.text))
            if (most := max(tokens, default=0)) >= base.vocab_size:
                raise PairError(
                    f"expected {escape(server.model)} to write tokens below {base.vocab_size}, found {most}: it has "
                    "another base. Name that one.",
                    remedies=("base",),
                )
            found.append(tokens)
        return found

    @property
    def context(self) -> float:
        """Most tokens of a text."""
        return getattr(self.pair.base.config, "max_position_embeddings", None) or math.inf

    @property
    def _seed(self) -> int:
        """Greedy text has none."""
        return self.pair.plan.seed if self.temperature > 0 else 0

    @cached_property
    def _made_with(self) -> list[object]:
        """What a text depends on besides its prompt."""
        made_with: list[object] = [self._seed, self.pair.base_fingerprint, self.new_tokens, self.temperature]
        if self.server is None:
            return [*made_with, list(self.pair.base.stop_token_ids)]
        # The base at hand has the tokenizer that made tokens of the text.
        return [*made_with, self.server.kind.name, self.server.model, self.pair.plan.chat_template]

    def _name(self, prompt: Tokens) -> str:
        return sha256(json.dumps([self._made_with, prompt]).encode()).hexdigest()[:32]


def _stored(folder: Path) -> dict[str, Line]:
    """By name, the texts in the files of every run and process.

    Raises:
        CheckpointError: a file is damaged.
    """
    found = {}
    for path in sorted(folder.glob("*.jsonl")):
        try:
            lines = msgspec.json.Decoder(Line).decode_lines(read_regular(path, _LARGEST))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{escape(path)}: expected text that the base wrote, found a file that cannot be read. Remove it to "
                "have it written again."
            ) from error
        found.update({line.name: line for line in lines})
    return found


def _number(parts: Sequence[object]) -> int:
    """48 bits that depend on ``parts`` alone."""
    return int.from_bytes(sha256(json.dumps(parts).encode()).digest()[:6], "big")


def branched(writer: Writer, texts: Sequence[Text], tell: Show) -> list[Text]:
    """What ``writer`` writes, half as many tokens, after random positions of ``texts``.

    Text that is written greedily soon repeats itself, and the base has little else to say after a prompt: from within
    text that was drawn it has more.
    """
    short, places = replace(writer, new_tokens=max(2, writer.new_tokens // 2)), list[Tokens]()
    for text in texts:
        ends = range(text.prompt_length, int(min(len(text.tokens), writer.context - short.new_tokens + 1)))
        draw = torch.Generator().manual_seed(_number([writer.pair.plan.seed, *text.tokens]))
        chosen = torch.randperm(len(ends), generator=draw)[:BRANCHES].sort().values.tolist()
        places += [text.tokens[: ends[index]] for index in chosen]
    return short.texts(places, tell, "positions within these")


def people_texts(items: Sequence[Prompt], writer: Writer) -> list[tuple[Prompt, Text]]:
    """Each item, a text by people or a prompt with their answer.

    Of a text drafts aim at every token but BOS, in windows of ``writer.new_tokens`` that stand alone. With a prompt, as
    the base is asked it, they aim at the answer's tokens. What a chat template puts after an answer is no part of it.

    Raises:
        PairError: a text cannot be encoded, messages have no answer, or an answer does not fit the base's context.
        MtpExtractError: messages where no chat template is applied.
    """
    codec, length, found = writer.pair.codec, writer.new_tokens, list[tuple[Prompt, Text]]()
    for item in items:
        if item.completion is not None:
            (given,) = encode_prompts([item], codec, chat_template=writer.pair.plan.chat_template)
            windows = [codec.continued(item.completion)]
            writer.check_length(len(given), len(windows[0]), ("text",))
        elif isinstance(item.content, str):
            (encoded,) = encode_prompts([item], codec, chat_template=False)
            opened = encoded[0] == getattr(codec.tokenizer, "bos_token_id", None)
            given, tokens = encoded[:opened], encoded[opened:]
            windows = [tokens[at : at + length] for at in range(0, len(tokens), length)]
        else:
            raise PairError(
                "expected texts by people, or messages that end in an answer, found messages without one, "
                f"{escape(item.key)}; give those as prompts",
                remedies=("prompts",),
            )
        found += [(item, Text((*given, *window), max(1, len(given)))) for window in windows]
    return found
