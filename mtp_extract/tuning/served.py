"""A server that has the base and writes its text; and how far any text is what the base at hand would write."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mtp_extract.errors import PairError, ServerError, escape
from mtp_extract.serving.client import Server
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
    by = (server.kind.name, server.version, server.model) if server else ("people", None, None)
    found: dict[str, Any] = dict(zip(("kind", "version", "model"), by, strict=True))
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
