"""A server of models on loopback whose answers our own loop made before it listens.

Sound, or with a fault planted in the loop; what is measured of it costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from helpers.loop_server import account_of
from helpers.model_server import ModelServer, Written, model_server, prompt_of
from mtp_extract.speculate.loop import Generation


def played(result: Generation, *, ids: bool = False) -> Written:
    """What the loop made, counted as a server does; ``ids``: whether it can tell tokens."""
    tokens, told = len(result.tokens), [result.tokens] if ids else None
    counted, given = account_of(tokens, result.rounds), len(result.prompt_tokens)
    prompt = result.prompt_tokens if ids else None
    return Written([result.text or ""], [tokens], counted, ids=told, prompt_tokens=given, prompt_ids=prompt)


@contextmanager
def counting_server(answers: Mapping[str, Written], kind: str = "vLLM") -> Iterator[ModelServer]:
    """A running one; ``answers`` by prompt. A llama-server is one without ``--metrics``, as it is by default."""
    with model_server(kind) as server:
        server.write = lambda asked: answers[prompt_of(asked)]
        if kind == "llama-server":
            server.overrides["/metrics"] = lambda handler: handler.json({}, 501)
        yield server
