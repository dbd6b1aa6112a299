"""The text a drafter is tuned on: what the base, or a server that has it, writes after prompts; or text by people.

What is written is kept in ``texts.jsonl``, a line a batch. A run that was interrupted resumes with the same text, since
batches and their random numbers depend on the prompts and the seed alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import chain
from operator import eq
from pathlib import Path
from typing import Any

import msgspec
import torch
from accelerate.utils import gather_object

from mtp_extract.errors import CheckpointError, PairError, ServerError, escape
from mtp_extract.evaluation.base_texts import continue_prompts, groups, require_context
from mtp_extract.evaluation.prompts import Messages, Prompt
from mtp_extract.io.files import read_regular
from mtp_extract.progress import SILENT, Reporter
from mtp_extract.serving.client import Server, question
from mtp_extract.speculate.target import Base
from mtp_extract.speculate.teacher import Text
from mtp_extract.tuning.loss import find_argmax_tokens
from mtp_extract.tuning.pair import Pair
from mtp_extract.tuning.plan import TuningPlan
from mtp_extract.tuning.work import replace_file

_LEAST_AGREEMENT = 0.9  # of greedy text by a server: a base in four bits agrees with itself in sixteen at 0.93 to 0.97
_LARGEST = 1 << 34  # bytes of all texts
_LOOKED_AT = 32  # texts, to see whose they are
_ARGUMENTS = {"key": "text_key", "model": "text_model"}  # of a server, as a plan calls them

PromptTokens = tuple[int, ...]
"""A prompt as the base is fed it."""


class TextBatch(msgspec.Struct, frozen=True):
    """What follows the prompts of a batch, as it is kept."""

    name: str  # of all that it depends on
    tokens: list[PromptTokens]


@dataclass(frozen=True)
class Writer:
    """The pair's base, or a server that has it, writing."""

    pair: Pair
    temperature: float
    new_tokens: int  # most of them of a text
    server: Server | None = None
    # of each prompt, as a server is asked it
    contents: Mapping[PromptTokens, str | Messages] = field(default_factory=dict)

    def write_texts(
        self, prompts: Sequence[PromptTokens], reporter: Reporter = SILENT, what: str = "prompts"
    ) -> list[Text]:
        """What follows each of ``prompts``, which are ``what``: what is not kept yet is written, by all processes, a
        batch each at a time.

        Raises:
            CheckpointError, OutputError: the file of texts is damaged, or cannot be written.
            PairError: a prompt does not fit the base's context.
        """
        writer = f"{self.server.kind.name}'s {escape(self.server.model)}" if self.server else "the base"
        self.pair.say(f"continuing {len(prompts)} {what} with {writer} at temperature {self.temperature:g}")
        require_context(self.pair.base, prompts, self.new_tokens)
        distinct = list(dict.fromkeys(prompts))
        grouped = groups([len(prompt) for prompt in distinct], self.pair.plan.batch)
        written = self._read_or_write([[distinct[index] for index in group] for group in grouped], reporter)
        return [Text((*prompt, *written[prompt]), len(prompt)) for prompt in prompts]

    def _read_or_write(
        self, batches: Sequence[Sequence[PromptTokens]], reporter: Reporter
    ) -> dict[PromptTokens, PromptTokens]:
        """What follows each prompt of ``batches``: read from the file of texts, or written now and added to it."""
        accelerator = self.pair.accelerator
        path = self.pair.plan.kept_in / "texts.jsonl"
        stored, size = _read_stored_batches(path)
        named = [(self._hash_batch(batch), batch) for batch in batches]
        prompts = sum(map(len, batches))
        done = 0
        for first in range(0, len(batches), accelerator.num_processes):
            # A batch for each process, whose lines the first of them writes.
            together = named[first : first + accelerator.num_processes]
            mine = together[accelerator.process_index :][:1]
            new = [TextBatch(name, self._continue_batch(batch)) for name, batch in mine if name not in stored]
            lines: list[TextBatch] = gather_object(new)
            if lines and accelerator.is_main_process:
                with replace_file(path, size) as file:
                    size += file.write(msgspec.json.Encoder().encode_lines(lines))
            stored.update({line.name: line.tokens for line in lines})
            done += sum(len(batch) for _, batch in together)
            reporter.done(f"text {done} of {prompts}", done, prompts)
        return dict(chain.from_iterable(zip(batch, stored[name], strict=True) for name, batch in named))

    def _continue_batch(self, prompts: Sequence[PromptTokens]) -> list[PromptTokens]:
        """What follows each of a batch, whose rows draw other numbers from one seed."""
        if self.server is not None:
            return self._ask_server(self.server, prompts)
        return continue_prompts(
            self.pair.base,
            prompts,
            new_tokens=self.new_tokens,
            batch=len(prompts),
            temperature=self.temperature,
            seed=compute_stable_hash([self._seed, *prompts]),
        )

    def _ask_server(self, server: Server, prompts: Sequence[PromptTokens]) -> list[PromptTokens]:
        """What ``server`` answers to each of a batch.

        A server leaves out the marks around thoughts, so nobody knows which tokens they were: then there are tokens
        only where it gives them. Raises PairError where it writes tokens that the base at hand does not have.
        """
        vocab_size = self.pair.base.vocab_size
        chat_template = self.pair.plan.chat_template
        questions: list[dict[str, Any]] = []
        for prompt in prompts:
            seed = compute_stable_hash([self._seed, prompt]) >> 20
            options = {"temperature": self.temperature, "seed": seed, **server.kind.ids}
            questions.append(question(self.contents[prompt], self.new_tokens, chat_template, **options))

        answers: list[PromptTokens] = []
        for answer in server.ask(questions, len(questions)):
            tokens = answer.token_ids or (() if answer.reasoning else self.pair.codec.continued(answer.text))
            highest = max(tokens, default=0)
            if highest >= vocab_size:
                raise PairError(
                    f"expected {escape(server.model)} to write tokens below {vocab_size}, found {highest}: it has "
                    "another base. Name that one.",
                    remedies=("base",),
                )
            answers.append(tokens)
        return answers

    @property
    def _seed(self) -> int:
        return self.pair.plan.seed if self.temperature > 0 else 0

    def _hash_batch(self, batch: Sequence[PromptTokens]) -> str:
        """Of a batch: equal where the same text would be written again."""
        pair = self.pair
        server = self.server
        # A server's text is made tokens by the tokenizer of the base at hand.
        by = [server.kind.name, server.model, pair.plan.chat_template] if server else list(pair.base.stop_token_ids)
        depends_on = [pair.base_fingerprint, self._seed, self.temperature, self.new_tokens, by, batch]
        return sha256(json.dumps(depends_on).encode()).hexdigest()


def _read_stored_batches(path: Path) -> tuple[dict[str, list[PromptTokens]], int]:
    """What is in the file at ``path``, by name of the batch; and its bytes up to the end of the last complete line."""
    try:
        stored = read_regular(path, _LARGEST)
        # A killed run may have left an incomplete line.
        size = stored.rfind(b"\n") + 1
        return {line.name: line.tokens for line in msgspec.json.Decoder(TextBatch).decode_lines(stored[:size])}, size
    except FileNotFoundError:
        return {}, 0
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{escape(path)}: expected text that the base wrote, found a file that cannot be read. Remove it."
        ) from error


def compute_stable_hash(parts: Sequence[object]) -> int:
    """48 bits that depend on ``parts`` alone."""
    return int.from_bytes(sha256(json.dumps(parts).encode()).digest()[:6], "big")


def encode_human_texts(item: Prompt, writer: Writer) -> list[Text]:
    """``item``, a text by people or a prompt with their answer.

    Of a text drafts aim at every token but BOS, in windows of ``writer.new_tokens`` that stand alone. With a prompt, as
    the base is asked it, they aim at the answer's tokens. What a chat template puts after an answer is no part of it.

    Raises:
        PairError: a text cannot be encoded, or messages have no answer.
        MtpExtractError: messages where no chat template is applied.
    """
    codec = writer.pair.codec
    if item.completion is not None:
        prompt = codec.encode(item.content, chat_template=writer.pair.plan.chat_template)
        return [Text((*prompt, *codec.continued(item.completion)), len(prompt))]
    if not isinstance(item.content, str):
        raise PairError(
            "expected texts by people, or messages that end in an answer, found messages without one, "
            f"{escape(item.key)}. Give those as prompts.",
            remedies=("prompts",),
        )
    encoded = codec.encode(item.content)
    has_bos = encoded[0] == getattr(codec.tokenizer, "bos_token_id", None)
    bos = encoded[:has_bos]
    tokens = encoded[has_bos:]
    length = writer.new_tokens
    return [Text((*bos, *tokens[start : start + length]), 1) for start in range(0, len(tokens), length)]


@contextmanager
def connect_writer(plan: TuningPlan) -> Iterator[Server | None]:
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
def _count_agreeing_tokens(base: Base, text: Text) -> int:
    hidden = base.feed(torch.tensor([text.tokens], device=base.device)).hidden[0, text.prompt_length - 1 : -1]
    choices = find_argmax_tokens(base.logits, hidden, base.vocab_size).tolist()
    return sum(map(eq, choices, text.continuation))


def compare_with_base(base: Base, texts: Sequence[Text], server: Server | None) -> dict[str, Any]:
    """Measure on some of the greedy ``texts`` of a server, or of people, how often each token is what ``base`` chooses.

    Returns:
        ``kind`` and ``model`` of the writer; how many ``texts`` and ``positions`` were compared; ``agreement``, the
        share of tokens that are the base's choice.

    Raises:
        PairError: the server has another base.
    """
    chosen = texts[:: -(-len(texts) // _LOOKED_AT) or 1]
    positions = sum(len(text.continuation) for text in chosen)
    share = sum(_count_agreeing_tokens(base, text) for text in chosen) / max(1, positions)
    name = server.kind.name if server else "people"
    if server and share < _LEAST_AGREEMENT and positions:
        raise PairError(
            f"expected {name} to write at least {_LEAST_AGREEMENT:.0%} of tokens as the base at hand would, found "
            f"{share:.1%} of {positions}. Serve this base, with its own chat template, or name the one that is served.",
            remedies=("base",),
        )
    by = {"kind": name, "model": server.model} if server else {"kind": name}
    return {**by, "texts": len(chosen), "positions": positions, "agreement": share}
