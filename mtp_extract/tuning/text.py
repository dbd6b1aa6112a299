"""The text for a tuning: written by the base, by a server with the same base, or by people.

Written text is stored in ``texts.jsonl``, a line for each batch. An interrupted run resumes with the same text, since
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
from mtp_extract.evaluation.base_texts import continue_prompts, group_by_length, require_context
from mtp_extract.evaluation.prompts import Messages, Prompt
from mtp_extract.io.files import read_regular
from mtp_extract.progress import SILENT, Reporter
from mtp_extract.serving.client import Server, build_request
from mtp_extract.speculate.target import Base
from mtp_extract.speculate.teacher import Text
from mtp_extract.tuning.loss import find_argmax_tokens
from mtp_extract.tuning.pair import Pair
from mtp_extract.tuning.plan import TuningPlan
from mtp_extract.tuning.work import replace_file

_LEAST_AGREEMENT = 0.9  # of a server's greedy text: a base in 4 bits agrees with itself in 16 bits at 0.93 to 0.97
_LARGEST = 1 << 34  # bytes of `texts.jsonl`
_LOOKED_AT = 32  # texts that are compared with the base
_ARGUMENTS = {"key": "text_key", "model": "text_model"}  # a server's argument → its name in a plan

PromptTokens = tuple[int, ...]
"""The tokens of a prompt."""


class TextBatch(msgspec.Struct, frozen=True):
    """A line of ``texts.jsonl``: the continuations of a batch of prompts."""

    name: str  # hash of all that the text depends on
    tokens: list[PromptTokens]


@dataclass(frozen=True)
class Writer:
    """Continues prompts with the pair's base, or with a server that has the same base."""

    pair: Pair
    temperature: float
    new_tokens: int  # at most, for each prompt
    server: Server | None = None
    # text or messages of each prompt, which a server gets in place of tokens
    contents: Mapping[PromptTokens, str | Messages] = field(default_factory=dict)

    def write_texts(
        self, prompts: Sequence[PromptTokens], reporter: Reporter = SILENT, what: str = "prompts"
    ) -> list[Text]:
        """Return each of ``prompts`` with its continuation; ``what`` names them in progress reports.

        Stored continuations are reused. The others are written now, by all processes, a batch each at a time.

        Raises:
            CheckpointError, OutputError: the file of texts is damaged, or cannot be written.
            PairError: a prompt does not fit the base's context.
        """
        writer = f"{self.server.kind.name}'s {escape(self.server.model)}" if self.server else "the base"
        self.pair.say(f"continuing {len(prompts)} {what} with {writer} at temperature {self.temperature:g}")
        require_context(self.pair.base, prompts, self.new_tokens)
        distinct = list(dict.fromkeys(prompts))
        grouped = group_by_length([len(prompt) for prompt in distinct], self.pair.plan.batch)
        written = self._read_or_write([[distinct[index] for index in group] for group in grouped], reporter)
        return [Text((*prompt, *written[prompt]), len(prompt)) for prompt in prompts]

    def _read_or_write(
        self, batches: Sequence[Sequence[PromptTokens]], reporter: Reporter
    ) -> dict[PromptTokens, PromptTokens]:
        """Return the continuation of each prompt; new ones are appended to ``texts.jsonl``."""
        accelerator = self.pair.accelerator
        path = self.pair.plan.kept_in / "texts.jsonl"
        stored, size = _read_stored_batches(path)
        named = [(self._hash_batch(batch), batch) for batch in batches]
        prompts = sum(map(len, batches))
        done = 0
        for first in range(0, len(batches), accelerator.num_processes):
            # Each process continues a batch, and the first process writes all their lines.
            step_batches = named[first : first + accelerator.num_processes]
            own_batch = step_batches[accelerator.process_index :][:1]
            new = [TextBatch(name, self._continue_batch(batch)) for name, batch in own_batch if name not in stored]
            lines: list[TextBatch] = gather_object(new)
            if lines and accelerator.is_main_process:
                with replace_file(path, size) as file:
                    size += file.write(msgspec.json.Encoder().encode_lines(lines))
            stored.update({line.name: line.tokens for line in lines})
            done += sum(len(batch) for _, batch in step_batches)
            reporter.report_progress(f"text {done} of {prompts}", done, prompts)
        return dict(chain.from_iterable(zip(batch, stored[name], strict=True) for name, batch in named))

    def _continue_batch(self, prompts: Sequence[PromptTokens]) -> list[PromptTokens]:
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
        """Return the tokens of ``server``'s answers to a batch.

        An answer without token ids is encoded from its text. One with thoughts then counts as empty, since a server
        leaves out the marker tokens around them.

        Raises:
            PairError: a token is outside the base's vocabulary.
        """
        vocab_size = self.pair.base.vocab_size
        chat_template = self.pair.plan.chat_template
        questions: list[dict[str, Any]] = []
        for prompt in prompts:
            seed = compute_stable_hash([self._seed, prompt]) >> 20
            options = {"temperature": self.temperature, "seed": seed, **server.kind.ids}
            questions.append(build_request(self.contents[prompt], self.new_tokens, chat_template, **options))

        answers: list[PromptTokens] = []
        for answer in server.ask(questions, len(questions)):
            tokens = answer.token_ids or (() if answer.reasoning else self.pair.codec.encode_continuation(answer.text))
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
        """Return a name that is equal for batches with the same continuations."""
        pair = self.pair
        server = self.server
        # The base's fingerprint counts for a server's text too, as the base's tokenizer encodes that.
        by = [server.kind.name, server.model, pair.plan.chat_template] if server else list(pair.base.stop_token_ids)
        depends_on = [pair.base_fingerprint, self._seed, self.temperature, self.new_tokens, by, batch]
        return sha256(json.dumps(depends_on).encode()).hexdigest()


def _read_stored_batches(path: Path) -> tuple[dict[str, list[PromptTokens]], int]:
    """Read the texts in the file at ``path`` by batch name, and the size in bytes of its complete lines."""
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
    """Return 48 bits that are the same for the same ``parts`` in every process and run."""
    return int.from_bytes(sha256(json.dumps(parts).encode()).digest()[:6], "big")


def encode_human_texts(item: Prompt, writer: Writer) -> list[Text]:
    """Encode ``item``, a human text or a prompt with a human answer.

    A text is cut into independent windows of ``writer.new_tokens``, whose tokens but BOS are all draft targets. After a
    prompt, the answer's tokens are the targets, without what a chat template puts after an answer.

    Raises:
        PairError: a text cannot be encoded, or messages have no answer.
        MtpExtractError: messages are given without a chat template.
    """
    codec = writer.pair.codec
    if item.completion is not None:
        prompt = codec.encode(item.content, chat_template=writer.pair.plan.chat_template)
        return [Text((*prompt, *codec.encode_continuation(item.completion)), len(prompt))]
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
    """Connect to the server that ``plan`` names, if any; errors name the plan's arguments as remedies."""
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
        ``kind`` of the writer, and a server's ``model``; how many ``texts`` and ``positions`` were compared;
        ``agreement``, the share of tokens that are the base's choice.

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
