"""Text of a server that has the base, and how far any text is what the base at hand would write."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from mtp_extract.errors import PairError, ServerError, escape
from mtp_extract.serving.client import Prompt, Question, Server
from mtp_extract.speculate.codec import Codec
from mtp_extract.speculate.target import Base
from mtp_extract.speculate.teacher import Text
from mtp_extract.tuning.loss import LOGITS_AT_ONCE
from mtp_extract.tuning.plan import TuningPlan

LEAST_AGREEMENT = 0.9
"""Of greedy text by a server: a base in four bits agrees with itself in sixteen at 0.93 to 0.97."""

MOST_SURPRISE = 0.25
"""Nats a token, of sampled text by a server."""

_ARGUMENTS = {"key": "text_key", "model": "text_model", "concurrency": "batch"}  # of a server, as a plan calls them
_LOOKED_AT = 32  # texts


@contextmanager
def _connected(plan: TuningPlan) -> Iterator[Server]:
    """The server that ``plan`` names; its errors name the arguments of a plan."""
    assert plan.text_from is not None
    try:
        with Server(plan.text_from, model=plan.text_model, key=plan.text_key) as server:
            yield server
    except ServerError as error:
        raise ServerError(str(error), remedies=tuple(_ARGUMENTS.get(name, name) for name in error.remedies)) from None


@dataclass(frozen=True)
class TextServer:
    """What a server of text says of itself. It applies its own chat template and its own sampling."""

    kind: str
    version: str | None
    model: str

    @classmethod
    def of(cls, plan: TuningPlan) -> TextServer:
        """The one that ``plan`` names.

        Raises:
            ServerError: it cannot be reached, or is no server of models.
        """
        with _connected(plan) as server:
            return cls(server.kind.name, server.version, server.model)

    def answers(
        self, plan: TuningPlan, prompts: Sequence[Prompt], seeds: Sequence[int], codec: Codec, vocabulary: int
    ) -> list[tuple[tuple[int, ...], str | None]]:
        """Tokens and text that it writes after each prompt, all of them asked at once.

        It leaves out the marks around thoughts, so nobody knows which tokens they were: then there is text only where
        it gives its tokens.

        Raises:
            ServerError: there is no answer.
            PairError: it writes tokens that the base at hand, with so large a ``vocabulary``, does not have.
        """
        with _connected(plan) as server:
            questions = []
            for prompt, seed in zip(prompts, seeds, strict=True):
                more = {"temperature": plan.temperature, "seed": seed, **server.kind.ids}
                questions.append(Question(prompt, plan.new_tokens, plan.chat_template, more))
            answers, found = server.ask(questions, len(questions)), list[tuple[tuple[int, ...], str | None]]()
        for answer in answers:
            tokens, given = answer.token_ids or (), answer.token_ids is not None
            if (most := max(tokens, default=0)) >= vocabulary:
                raise PairError(
                    f"expected {escape(self.model)} to write tokens below {vocabulary}, found {most}: it has another "
                    "base. Name that one.",
                    remedies=("base",),
                )
            if not given and not answer.reasoning:
                tokens = codec.continued(answer.text)
            found.append((tokens, answer.text))
        return found


@torch.no_grad()
def agreement(base: Base, texts: Sequence[Text], temperature: float, server: TextServer | None) -> dict[str, Any]:
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
        hidden = base.full_pass(torch.tensor([text.tokens], device=base.device)).hidden[0, text.prompt_length - 1 : -1]
        following = torch.tensor(text.continuation, device=base.device)
        rows = max(1, LOGITS_AT_ONCE // base.vocab_size)
        for part, tokens in zip(torch.split(hidden, rows), torch.split(following, rows), strict=True):
            logits = base.logits(part)
            likely = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
            entropy = -(likely.exp() * likely).sum(-1)
            hits += int((logits.argmax(-1) == tokens).sum())
            surprise += float((-likely.gather(1, tokens[:, None])[:, 0] - entropy).sum())
            positions += len(tokens)
    found = asdict(server) if server else {"kind": "people", "version": None, "model": None}
    found |= {"texts": len(chosen), "positions": positions, "agreement": None, "surprise": None}
    if not positions:
        return found
    share, mean = hits / positions, surprise / positions
    found |= {"surprise": mean} if temperature else {"agreement": share}
    if server is not None and (mean > MOST_SURPRISE if temperature else share < LEAST_AGREEMENT):
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
    if found["agreement"] is not None:
        return f"The base at hand would have written {found['agreement']:.1%} of {where}."
    if found["surprise"] is None:
        return f"There were {where}."
    return f"The {where} are {found['surprise']:+.3f} nats a token less likely to the base at hand than its own."
