"""A server of models on loopback whose answers the package's own loop writes, and counts.

What is served is a :class:`SpeculativeGenerator`, so a base or drafter with a fault is served as a sound one is.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from helpers.model_server import ModelServer, Written, model_server
from mtp_extract.evaluate.prompts import Prompt, encode_prompts
from mtp_extract.speculate.generate import Options, SpeculativeGenerator
from mtp_extract.speculate.result import Round
from mtp_extract.speculate.sampling import Sampling


def account_of(tokens: int, rounds: Sequence[Round]) -> Mapping[str, int]:
    """What a server counts of an answer: rounds in which nothing is drafted are none."""
    made = [one for one in rounds if one.drafted]
    counted = Counter(
        requests=1,
        tokens=tokens,
        rounds=len(made),
        drafted=sum(one.drafted for one in made),
        accepted=sum(one.accepted for one in made),
    )
    counted.update(f"accepted_{step}" for one in made for step in range(one.accepted))
    return counted


def writer(
    generator: SpeculativeGenerator, *, drafts: int = 3, ids: bool = True
) -> Callable[[dict[str, Any]], Written]:
    """What ``generator`` writes after the prompt of a request, ``drafts`` a round; ``ids``: whether it tells tokens."""
    alone = threading.Lock()  # torch with one thread: requests wait for each other

    def write(asked: dict[str, Any]) -> Written:
        codec = generator.codec
        if "messages" in asked and (codec.has_template or len(asked["messages"]) > 1):
            prompt = codec.encode(asked["messages"])
        else:
            text = asked["messages"][0]["content"] if "messages" in asked else asked["prompt"]
            (prompt,) = encode_prompts([Prompt("", text)], codec, chat_template=False)
        sampling = Sampling(asked.get("temperature", 1.0))
        options = Options(asked["max_tokens"], drafts, sampling, seed=asked.get("seed", 0))
        with alone:
            chunks = list(generator.stream(prompt, options))
        tokens = [token for chunk in chunks for token in chunk.tokens]
        return Written(
            pieces=[chunk.text for chunk in chunks],
            sizes=[len(chunk.tokens) for chunk in chunks],
            counted=account_of(len(tokens), [chunk.round for chunk in chunks if chunk.round is not None]),
            finish="length" if len(tokens) == asked["max_tokens"] else "stop",
            ids=[chunk.tokens for chunk in chunks] if ids else None,
            prompt_tokens=len(prompt.tokens),
        )

    return write


@contextmanager
def loop_server(
    generator: SpeculativeGenerator, kind: str = "vLLM", *, drafts: int = 3, ids: bool = True
) -> Iterator[ModelServer]:
    """``generator``, served as ``kind`` would; 0 drafts for the base alone."""
    with model_server(kind, drafts=drafts > 0) as server:
        server.write = writer(generator, drafts=drafts, ids=ids)
        yield server
