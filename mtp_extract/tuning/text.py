"""The text a drafter is tuned on: what the base, or a server that has it, writes after prompts; or text by people.

What is written is kept in files of lines, one a continuation, a file a batch. A run that was interrupted resumes
with the same text, since batches and their random numbers depend on the prompts and the seed alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path

import msgspec
import torch

from mtp_extract.errors import CheckpointError, PairError, escape
from mtp_extract.evaluate.agreement import base_texts, groups
from mtp_extract.evaluate.progress import Show, silent
from mtp_extract.evaluate.prompts import Prompt, encode_prompts
from mtp_extract.io.files import read_regular
from mtp_extract.speculate.teacher import Text
from mtp_extract.tuning.pair import Pair
from mtp_extract.tuning.plan import TuningPlan
from mtp_extract.tuning.served import TextServer
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
    text: str | None  # of the continuation

    @property
    def as_text(self) -> Text:
        """For a drafter."""
        return Text(self.tokens, self.prompt_length)


@dataclass(frozen=True)
class Writer:
    """The pair's base, or a server, writing as ``plan`` says."""

    pair: Pair
    plan: TuningPlan
    server: TextServer | None = None

    def lines(self, items: Sequence[Prompt | Tokens], tell: Show = silent, what: str = "prompts") -> list[Line]:
        """What follows each of ``items``: what is not stored yet is written, by all processes, a share each.

        Args:
            tell: called after every batch.
            what: ``items`` are, in words.

        Raises:
            CheckpointError: a file of text is damaged.
            OutputError: the folder cannot be written.
            PairError: a prompt cannot be encoded, or does not fit the base's context.
        """
        if not items:
            return []
        plan, accelerator, folder = self.plan, self.pair.accelerator, self.plan.kept_in / "text"
        by = f"{self.server.kind}'s {escape(self.server.model)}" if self.server else "the base"
        self.pair.say(f"continuing {len(items)} {what} with {by} at temperature {plan.temperature:g}")
        prompts = self.encoded(items)
        pairs = list({prompt: (item, prompt) for item, prompt in zip(items, prompts, strict=True)}.values())
        lengths = [len(prompt) for _, prompt in pairs]
        self.check_length(max(lengths), plan.new_tokens, ("prompts", "new_tokens"))
        batches = [[pairs[index] for index in group] for group in groups(lengths, plan.batch)]
        batches = batches[accelerator.process_index :: accelerator.num_processes]
        stored, done, total = _stored(folder), 0, sum(map(len, batches))
        for batch in batches:
            if missing := {name for _, prompt in batch if (name := self._name(prompt)) not in stored}:
                lines = [line for line in self._written(batch) if line.name in missing]
                with written_whole(folder / f"{_number(sorted(missing)):012x}.jsonl") as file:
                    file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
            done += len(batch)
            tell(f"text {done} of {total}", done, total)
        accelerator.wait_for_everyone()
        stored = _stored(folder)
        return [stored[self._name(prompt)] for prompt in prompts]

    def encoded(self, items: Sequence[Prompt | Tokens]) -> list[Tokens]:
        """Of each, what the base is fed."""
        prompts = [item for item in items if isinstance(item, Prompt)]
        found = iter(encode_prompts(prompts, self.pair.codec, chat_template=self.plan.chat_template))
        return [next(found) if isinstance(item, Prompt) else item for item in items]

    def fitting(self, items: Sequence[Prompt]) -> list[Prompt]:
        """Those after which all new tokens fit the base's context."""
        room = self._context - self.plan.new_tokens
        return [item for item, prompt in zip(items, self.encoded(items), strict=True) if len(prompt) <= room]

    def branches(self, texts: Sequence[Text]) -> tuple[Writer, list[Tokens]]:
        """What writes half as many tokens after random positions of ``texts``, and what it is to continue there.

        Text that is written greedily soon repeats itself, and the base has little else to say after a prompt: from
        within text that was drawn it has more.
        """
        short, found = replace(self.plan, new_tokens=max(2, self.plan.new_tokens // 2)), []
        for text in texts:
            places = range(text.prompt_length, int(min(len(text.tokens), self._context - short.new_tokens + 1)))
            draw = torch.Generator().manual_seed(_number([self.plan.seed, *text.tokens]))
            chosen = torch.randperm(len(places), generator=draw)[:BRANCHES].sort().values.tolist()
            found += [text.tokens[: places[index]] for index in chosen]
        return replace(self, plan=short), found

    def check_length(self, given: int, new: int, remedies: tuple[str, ...]) -> None:
        """Raise PairError where ``given`` tokens and ``new`` ones after them do not fit the base's context."""
        if given + new > self._context:
            raise PairError(
                f"expected prompts that fit the base's {self._context} tokens, found one of {given}, and {new} new "
                "ones; give shorter prompts",
                remedies=remedies,
            )

    def _written(self, batch: Sequence[tuple[Prompt | Tokens, Tokens]]) -> list[Line]:
        """What follows each of ``batch``, whose rows draw other numbers from one seed."""
        plan, base, codec, prompts = self.plan, self.pair.base, self.pair.codec, [prompt for _, prompt in batch]
        names = list(map(self._name, prompts))
        if self.server is not None:
            contents = [item.content for item, _ in batch if isinstance(item, Prompt)]
            seeds = [int(name[:7], 16) for name in names]
            found = self.server.answers(plan, contents, seeds, codec, base.vocab_size)
        else:
            made = base_texts(
                base,
                prompts,
                new_tokens=plan.new_tokens,
                batch=len(prompts),
                temperature=plan.temperature,
                seed=_number([self._seed, *prompts]),
            )
            found = [(tokens, codec.decode(tokens)) for tokens in made]
        return [
            Line(name, len(prompt), (*prompt, *tokens), text)
            for name, prompt, (tokens, text) in zip(names, prompts, found, strict=True)
        ]

    @property
    def _context(self) -> float:
        """Most tokens of a text."""
        return getattr(self.pair.base.config, "max_position_embeddings", None) or math.inf

    @property
    def _seed(self) -> int:
        """Greedy text has none."""
        return self.plan.seed if self.plan.temperature > 0 else 0

    @cached_property
    def _made_with(self) -> list[object]:
        """What a text depends on besides its prompt."""
        made_with: list[object] = [self._seed, self.pair.base_fingerprint, self.plan.new_tokens, self.plan.temperature]
        if self.server is None:
            return [*made_with, list(self.pair.base.stop_token_ids)]
        # The base at hand has the tokenizer that made tokens of the text.
        return [*made_with, self.server.kind, self.server.model, self.plan.chat_template]

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


def people_texts(items: Sequence[Prompt], writer: Writer) -> list[tuple[Prompt, Text]]:
    """Each item, a text by people or a prompt with their answer, in windows of ``new_tokens``.

    Drafts aim at every token of a text but BOS, each window standing alone. With a prompt they aim at the answer's
    tokens, and each window has before it all that was there: the prompt as ``writer`` would encode it, and the answer
    so far. What a chat template puts after an answer is no part of it.

    Raises:
        PairError: a text cannot be encoded, messages have no answer, or an answer does not fit the base's context.
        MtpExtractError: messages where no chat template is applied.
    """
    codec, length, found = writer.pair.codec, writer.plan.new_tokens, list[tuple[Prompt, Text]]()
    for item in items:
        if item.completion is not None:
            (given,), tokens = writer.encoded([item]), codec.continued(item.completion)
            writer.check_length(len(given), len(tokens), ("text",))
        elif isinstance(item.content, str):
            (encoded,) = encode_prompts([item], codec, chat_template=False)
            opened = encoded[0] == getattr(codec.tokenizer, "bos_token_id", None)
            given, tokens = encoded[:opened], encoded[opened:]
        else:
            raise PairError(
                "expected texts by people, or messages that end in an answer, found messages without one, "
                f"{escape(item.key)}; give those as prompts",
                remedies=("prompts",),
            )
        for at in range(0, len(tokens), length):
            window = tokens[at : at + length]
            before = given if item.completion is None else (*given, *tokens[:at])
            if item.completion is not None or len(window) > 2:
                found.append((item, Text((*before, *window), max(1, len(before)))))
    return found
