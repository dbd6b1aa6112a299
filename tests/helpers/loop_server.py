"""A server of models on loopback whose answers the package's own loop writes, and counts.

What is served is a :class:`SpeculativeGenerator`, so a base or drafter with a fault is served as a sound one is.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from helpers.model_server import ModelServer, Written, model_server, prompt_of
from mtp_extract.speculate.codec import Codec
from mtp_extract.speculate.loop import Generation, Round, SpeculativeGenerator


def account_of(tokens: int, rounds: Sequence[Round]) -> Mapping[str, int]:
    """What a server counts of an answer: rounds in which nothing is drafted are none."""
    drafting = [one for one in rounds if one.drafted]
    counted = Counter(requests=1, tokens=tokens, rounds=len(drafting), drafted=0, accepted=0)
    for one in drafting:
        counted.update(drafted=one.drafted, accepted=one.accepted)
        counted.update(f"accepted_{step}" for step in range(one.accepted))
    return counted


def writer(generator: SpeculativeGenerator, drafts: int = 3) -> Callable[[dict[str, Any]], Written]:
    """What ``generator`` writes after the prompt of a request, ``drafts`` a round."""
    alone = threading.Lock()  # torch with one thread: requests wait for each other

    def write(asked: dict[str, Any]) -> Written:
        codec = generator.codec
        if "messages" in asked and (codec.has_template or len(asked["messages"]) > 1):
            prompt = codec.encode(asked["messages"])
        else:
            prompt = codec.encode(prompt_of(asked))
        options: Any = {"temperature": asked.get("temperature", 1.0), "seed": asked.get("seed", 0), "drafts": drafts}
        with alone:
            made = generator.generate(prompt, max_new_tokens=asked["max_tokens"], **options)
        parts = [made.tokens[:1], *(one.tokens for one in made.rounds)]
        return Written(
            pieces=list(_pieces(codec, parts)),
            sizes=[len(part) for part in parts],
            counted=account_of(len(made.tokens), made.rounds),
            finish="length" if len(made.tokens) == asked["max_tokens"] else "stop",
            ids=parts,
            prompt_tokens=len(prompt),
        )

    return write


def _pieces(codec: Codec, rounds: Sequence[Sequence[int]]) -> Iterator[str]:
    """What each round adds to the text; half a character waits for its other half."""
    given, tokens = "", list[int]()
    for number, new in enumerate(rounds):
        tokens += new
        text = codec.decode(tokens) or ""
        text = text if number == len(rounds) - 1 else text.rstrip("\ufffd")
        yield text[len(given) :]
        given = text if len(text) > len(given) else given


def played(result: Generation, *, ids: bool = False) -> Written:
    """What a loop made, counted as a server does; ``ids``: whether it can tell tokens."""
    tokens, told = len(result.tokens), [result.tokens] if ids else None
    counted, given = account_of(tokens, result.rounds), len(result.prompt_tokens)
    prompt = result.prompt_tokens if ids else None
    return Written([result.text or ""], [tokens], counted, ids=told, prompt_tokens=given, prompt_ids=prompt)


@contextmanager
def counting_server(answers: Mapping[str, Written], kind: str = "vLLM") -> Iterator[ModelServer]:
    """Of ``answers`` by prompt, made before it listens. A llama-server is one without ``--metrics``, by default."""
    with model_server(kind) as server:
        server.write = lambda asked: answers[prompt_of(asked)]
        if kind == "llama-server":
            server.overrides["/metrics"] = lambda handler: handler.json({}, 501)
        yield server
