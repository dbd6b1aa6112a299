"""The text a drafter is tuned on: what the base, or a server that has it, writes after prompts; or text by people.

What is written is kept in ``texts.jsonl``, a line a text, and added to it batch by batch. A run that was interrupted
resumes with the same text, since batches and their random numbers depend on the prompts and the seed alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import torch
from accelerate.utils import gather_object

from mtp_extract.errors import CheckpointError, PairError, ServerError, escape
from mtp_extract.evaluation.agreement import base_texts, groups
from mtp_extract.evaluation.progress import Show, silent
from mtp_extract.evaluation.prompts import Messages, Prompt, encode_prompts
from mtp_extract.io.files import read_regular
from mtp_extract.serving.client import Server, question
from mtp_extract.speculate.target import Base
from mtp_extract.speculate.teacher import Text
from mtp_extract.tuning.loss import LOGITS_AT_ONCE
from mtp_extract.tuning.pair import Pair
from mtp_extract.tuning.plan import TuningPlan
from mtp_extract.tuning.work import added_to

LEAST_AGREEMENT = 0.9
"""Of greedy text by a server: a base in four bits agrees with itself in sixteen at 0.93 to 0.97."""
MOST_SURPRISE = 0.25
"""Nats a token, of sampled text by a server."""

_LARGEST = 1 << 34  # bytes of all texts
_LOOKED_AT = 32  # texts, to see whose they are
_ARGUMENTS = {"key": "text_key", "model": "text_model"}  # of a server, as a plan calls them

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
        """What follows each of ``prompts``: what is not kept yet is written, by all processes, a batch each at a time.

        Args:
            tell: called after every batch.
            what: ``prompts`` are, in words.

        Raises:
            CheckpointError: the file of texts is damaged.
            OutputError: it cannot be written.
            PairError: a prompt does not fit the base's context.
        """
        if not prompts:
            return []
        accelerator, path = self.pair.accelerator, self.pair.plan.kept_in / "texts.jsonl"
        by = f"{self.server.kind.name}'s {escape(self.server.model)}" if self.server else "the base"
        self.pair.say(f"continuing {len(prompts)} {what} with {by} at temperature {self.temperature:g}")
        self.check_length(max(map(len, prompts)), self.new_tokens, ("prompts", "new_tokens"))
        once, (kept, size), done = list(dict.fromkeys(prompts)), _kept(path), 0
        batches = [[once[index] for index in group] for group in groups(list(map(len, once)), self.pair.plan.batch)]
        for at in range(0, len(batches), accelerator.num_processes):
            together = batches[at : at + accelerator.num_processes]
            own = together[accelerator.process_index :][:1]
            lines = gather_object([line for batch in own for line in self._missing(batch, kept)])
            if lines and accelerator.is_main_process:
                with added_to(path, size) as file:
                    size += file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
            kept |= {line.name: line for line in lines}
            done += sum(map(len, together))
            tell(f"text {done} of {len(once)}", done, len(once))
        return [Text(kept[self._name(prompt)].tokens, len(prompt)) for prompt in prompts]

    def _missing(self, batch: Sequence[Tokens], kept: Container[str]) -> list[Line]:
        """What follows the prompts of ``batch``, as far as it is not ``kept``."""
        names = list(map(self._name, batch))
        if all(name in kept for name in names):
            return []
        # All of them are written, since what a batch draws depends on all of its prompts.
        rows = zip(names, batch, self._continued(batch), strict=True)
        return [Line(name, len(prompt), (*prompt, *tokens)) for name, prompt, tokens in rows if name not in kept]

    def check_length(self, prompt: int, new: int, remedies: tuple[str, ...]) -> None:
        """Raise PairError where so many tokens, and ``new`` ones after them, do not fit the base's context."""
        if prompt + new > self.context:
            raise PairError(
                f"expected prompts that fit the base's {self.context} tokens, found one of {prompt}, and {new} new "
                "ones. Give shorter prompts.",
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
            batch, seed = len(prompts), number([self._seed, *prompts])
            drawn: dict[str, Any] = {"new_tokens": self.new_tokens, "temperature": self.temperature, "seed": seed}
            return base_texts(base, prompts, batch=batch, **drawn)
        questions, found = list[dict[str, Any]](), list[Tokens]()
        for prompt in prompts:
            more = {"temperature": self.temperature, "seed": int(self._name(prompt)[:7], 16), **server.kind.ids}
            questions.append(question(self.contents[prompt], self.new_tokens, self.pair.plan.chat_template, **more))
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


def _kept(path: Path) -> tuple[dict[str, Line], int]:
    """By name, the texts in the file at ``path``, and its bytes up to the end of the last one that is whole.

    Raises:
        CheckpointError: it is damaged.
    """
    try:
        stored = read_regular(path, _LARGEST)
        # What a killed run was writing is not whole.
        size = stored.rfind(b"\n") + 1
        return {line.name: line for line in msgspec.json.Decoder(Line).decode_lines(stored[:size])}, size
    except FileNotFoundError:
        return {}, 0
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{escape(path)}: expected text that the base wrote, found a file that cannot be read. Remove it to have "
            "it written again."
        ) from error


def number(parts: Sequence[object]) -> int:
    """48 bits that depend on ``parts`` alone."""
    return int.from_bytes(sha256(json.dumps(parts).encode()).digest()[:6], "big")


def people_texts(item: Prompt, writer: Writer) -> list[Text]:
    """``item``, a text by people or a prompt with their answer.

    Of a text drafts aim at every token but BOS, in windows of ``writer.new_tokens`` that stand alone. With a prompt, as
    the base is asked it, they aim at the answer's tokens. What a chat template puts after an answer is no part of it.

    Raises:
        PairError: a text cannot be encoded, messages have no answer, or an answer does not fit the base's context.
        MtpExtractError: messages where no chat template is applied.
    """
    codec, length = writer.pair.codec, writer.new_tokens
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
            f"{escape(item.key)}. Give those as prompts.",
            remedies=("prompts",),
        )
    return [Text((*given, *window), max(1, len(given))) for window in windows]


# Whose text it is


@contextmanager
def connected(plan: TuningPlan) -> Iterator[Server | None]:
    """The server that ``plan`` names, if it names one; its errors name the arguments of a plan."""
    if plan.text_from is None:
        yield None
        return
    try:
        with Server(plan.text_from, model=plan.text_model, key=plan.text_key) as server:
            yield server
    except ServerError as error:
        raise ServerError(str(error), remedies=tuple(_ARGUMENTS.get(name, name) for name in error.remedies)) from None


@torch.no_grad()
def agreement(base: Base, texts: Sequence[Text], temperature: float, server: Server | None) -> dict[str, Any]:
    """How far ``texts``, by a server or by people, are what ``base`` would write, over some of them.

    Returns:
        Who wrote; ``texts`` and ``positions`` looked at; greedily ``agreement``, the share of tokens that ``base``
        would have written; else ``surprise``, by how many nats a token they are less likely than what it writes.

    Raises:
        PairError: a server has another base.
    """
    written = [text for text in texts if text.continuation]
    chosen = written[:: -(-len(written) // _LOOKED_AT) or 1]
    hits, surprise, positions = 0, 0.0, 0
    for text in chosen:
        hidden = base.feed(torch.tensor([text.tokens], device=base.device)).hidden[0, text.prompt_length - 1 : -1]
        following, rows = torch.tensor(text.continuation, device=base.device), max(1, LOGITS_AT_ONCE // base.vocab_size)
        for part, tokens in zip(torch.split(hidden, rows), torch.split(following, rows), strict=True):
            logits = base.logits(part)
            likely = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
            hits += int((logits.argmax(-1) == tokens).sum())
            surprise -= float(likely.gather(1, tokens[:, None]).sum() - (likely.exp() * likely).sum())
            positions += len(tokens)
    found: dict[str, Any] = {"kind": server.kind.name, "model": server.model} if server else {"kind": "people"}
    found |= {"texts": len(chosen), "positions": positions}
    if not positions:
        return found
    name, value = ("surprise", surprise / positions) if temperature else ("agreement", hits / positions)
    found[name] = value
    if server is not None and (value > MOST_SURPRISE if temperature else value < LEAST_AGREEMENT):
        bound = f"at most {MOST_SURPRISE} nats a token" if temperature else f"at least {LEAST_AGREEMENT:.0%} of tokens"
        raise PairError(
            f"expected texts of the base at hand ({bound}), found others. {in_words(found)} Serve this base, with its "
            "own chat template, or name the one that is served.",
            remedies=("base",),
        )
    return found


def in_words(found: Mapping[str, Any]) -> str:
    """What :func:`agreement` found, in a sentence."""
    where = f"{found['positions']} tokens of {found['texts']} texts that {escape(found['kind'])} wrote"
    if "agreement" in found:
        return f"The base at hand would have written {found['agreement']:.1%} of {where}."
    surprise = f"{found.get('surprise', 0):+.3f}"
    return f"The {where} are {surprise} nats a token less likely to the base at hand than its own."
