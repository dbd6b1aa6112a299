"""Text of a server that has the base: written as it is served, a batch of prompts at a time, and kept like the base's.

The server applies its own chat template and its own sampling. Whether its base is the one at hand is checked before
anything is trained: greedy text by the share of its tokens that the base at hand would have written, sampled text by
how likely it is to it, beside what that base writes itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from mtp_extract.errors import PairError, ServerError, escape
from mtp_extract.evaluate.prompts import Prompt
from mtp_extract.serving.client import Answer, Question, Server
from mtp_extract.speculate.target import Base
from mtp_extract.speculate.teacher import Text
from mtp_extract.tune.loss import LOGITS_AT_ONCE
from mtp_extract.tune.plan import TuningPlan
from mtp_extract.tune.text import Item, Tokens, Writer

LEAST_AGREEMENT = 0.9
"""Of greedy text: a base in four bits agrees with itself in sixteen at 0.93 to 0.97."""

MOST_SURPRISE = 0.25
"""Nats a token, of sampled text."""

_ARGUMENTS = {"key": "text_key", "model": "text_model", "concurrency": "batch"}
"""What a server's arguments are called in a plan."""

_LOOKED_AT = 32  # texts


@dataclass(frozen=True)
class ServerWriter(Writer):
    """As :class:`~mtp_extract.tune.text.Writer`, by a server."""

    connect: Callable[[], Server] = field(kw_only=True)
    kind: str = field(kw_only=True)
    version: str | None = field(kw_only=True)
    model: str = field(kw_only=True)

    @classmethod
    def of(cls, writer: Writer, plan: TuningPlan) -> ServerWriter:
        """In place of ``writer``, by the server that ``plan`` names.

        Raises:
            MtpExtractError: it cannot be reached, or is no server of models.
        """
        url = plan.text_from
        assert url is not None

        def connect() -> Server:
            return Server(url, model=plan.text_model, key=plan.text_key)

        with _arguments(), connect() as server:
            kind, version, model = server.kind.name, server.version, server.model
        same = {one.name: getattr(writer, one.name) for one in fields(Writer)}
        same["by"] = f"{kind}'s {escape(model)}"
        return cls(**same, connect=connect, kind=kind, version=version, model=model)

    @property
    def _made_with(self) -> list[Any]:
        # The base at hand has the tokenizer that made tokens of the text.
        made_with = ["served", self.kind, self.model, self.fingerprint, self.new_tokens, self.temperature]
        return [*made_with, self.chat_template]

    def _continued(self, seed: int, batch: Sequence[tuple[Item, Tokens]]) -> list[Mapping[str, Any]]:
        lines: dict[int, Mapping[str, Any]] = {}

        def answered(at: int, answer: Answer) -> None:
            lines[at] = self._answered(batch[at][1], answer)

        with _arguments(), self.connect() as server:
            questions = []
            for item, prompt in batch:
                assert isinstance(item, Prompt)
                own = int(self._name(prompt)[:7], 16)
                more = {"temperature": self.temperature, "seed": own, **server.kind.ids}
                questions.append(Question(item.content, self.new_tokens, self.chat_template, more))
            try:
                server.ask(questions, len(batch), answered)
            except BaseException:
                self._keep([lines[at] for at in sorted(lines)])
                raise
        return [lines[at] for at in range(len(batch))]

    def _answered(self, prompt: Tokens, answer: Answer) -> Mapping[str, Any]:
        """What is kept of one answer.

        A server leaves out the marks around thoughts, so nobody knows which tokens they were: then there is a text only
        where the server says its tokens.
        """
        tokens: Sequence[int] | None = answer.token_ids
        if tokens is None:
            tokens = () if answer.reasoning else self.generator.codec.continued(answer.text)
        size = self.generator.base.vocab_size
        if (most := max(tokens, default=0)) >= size:
            raise PairError(
                f"expected {self.by} to write tokens below {size}, found {most}: it has another base. Name that one.",
                remedies=("base",),
            )
        told = {"tokens_told": answer.token_ids is not None, "prompt_tokens": answer.prompt_tokens}
        return self._line(prompt, tokens, answer.text) | told

    def checked(self, items: Sequence[Item]) -> Mapping[str, Any]:
        """Who wrote the texts of ``items``, and how far that is the base at hand.

        Raises:
            PairError: it is another one.
        """
        rows = self.rows(items)
        texts = [Text(tuple(row["tokens"]), row["prompt_length"]) for row in rows]
        written = [text for text in texts if text.continuation]
        chosen = written[:: -(-len(written) // _LOOKED_AT) or 1]
        hits, surprise, positions = _likelihood(self.generator.base, chosen, self.temperature)
        lengths = [row["prompt_tokens"] == row["prompt_length"] for row in rows if row["prompt_tokens"] is not None]
        greedy = self.temperature == 0
        found = {
            "kind": self.kind,
            "version": self.version,
            "model": self.model,
            "texts": len(chosen),
            "positions": positions,
            "agreement": round(hits, 4) if greedy and positions else None,
            "surprise": round(surprise, 4) if positions and not greedy else None,
            "prompts_alike": round(sum(lengths) / len(lengths), 4) if lengths else None,
            "tokens_told": round(sum(row["tokens_told"] for row in rows) / len(rows), 4),
        }
        if positions and (hits < LEAST_AGREEMENT if greedy else surprise > MOST_SURPRISE):
            bound = f"at least {LEAST_AGREEMENT:.0%} of tokens" if greedy else f"at most {MOST_SURPRISE} nats a token"
            raise PairError(
                f"expected texts of the base at hand ({bound}), found others. {in_words(found)} Serve this base, with "
                "its own chat template, or name the one that is served.",
                remedies=("base",),
            )
        return found


@torch.no_grad()
def _likelihood(base: Base, texts: Sequence[Text], temperature: float) -> tuple[float, float, int]:
    """The share of the texts' tokens that the base would have written; by how many nats a token they are less likely
    than what it writes at ``temperature`` on the mean; and how many tokens there are."""
    hits, surprise, positions = 0, 0.0, 0
    rows = max(1, LOGITS_AT_ONCE // base.vocab_size)
    for text in texts:
        hidden = base.full_pass(torch.tensor([text.tokens], device=base.device)).hidden[0]
        written = torch.tensor(text.continuation, device=base.device)
        before: Tensor = hidden[text.prompt_length - 1 : -1]
        for part, tokens in zip(torch.split(before, rows), torch.split(written, rows), strict=True):
            logits = base.logits(part)
            likely = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
            entropy = -(likely.exp() * likely).sum(-1)
            hits += int((logits.argmax(-1) == tokens).sum())
            surprise += float((-likely.gather(1, tokens[:, None])[:, 0] - entropy).sum())
            positions += len(tokens)
    return hits / max(positions, 1), surprise / max(positions, 1), positions


@contextmanager
def _arguments() -> Iterator[None]:
    """Errors of a server inside name the arguments of a plan."""
    try:
        yield
    except ServerError as error:
        raise ServerError(str(error), remedies=tuple(_ARGUMENTS.get(name, name) for name in error.remedies)) from None


def in_words(text_from: Mapping[str, Any]) -> str:
    """What :meth:`ServerWriter.checked` found, in a sentence."""
    who = f"{text_from['kind']}{' ' + escape(text_from['version']) if text_from['version'] else ''}"
    where = f"{text_from['positions']} tokens of {text_from['texts']} texts that {who} wrote"
    if text_from["agreement"] is not None:
        said = f"The base at hand would have written {text_from['agreement']:.1%} of {where}."
    elif text_from["surprise"] is None:
        said = f"There were {where}."
    else:
        said = (
            f"The {where} are {text_from['surprise']:+.3f} nats a token less likely to the base at hand than its own."
        )
    alike = text_from["prompts_alike"]
    if alike is not None and alike < 1:
        said += (
            f" Of the prompts {1 - alike:.1%} have another number of tokens there: its chat template is another one."
        )
    return said
