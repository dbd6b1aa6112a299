"""Texts of similar length together, so that little of a batch is padding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from mtp_extract.speculate.codec import Prompt
from mtp_extract.speculate.generate import Options, SpeculativeGenerator
from mtp_extract.speculate.numbers import count
from mtp_extract.speculate.result import Generation


def groups(lengths: Sequence[int], batch: int) -> Iterator[list[int]]:
    """Indices in groups of similar length. A last group of one joins the one before: some controls need two texts.

    Raises:
        MtpExtractError: ``batch`` is no number of at least 1.
    """
    count("batch", batch, least=1)
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    made = [order[at : at + batch] for at in range(0, len(order), batch)]
    if batch > 1 and len(made) > 1 and len(made[-1]) == 1:
        alone = made.pop()
        made[-1] += alone
    yield from made


def generate_in_batches(
    generator: SpeculativeGenerator,
    prompts: Sequence[Prompt],
    options: Options,
    *,
    batch: int,
    done: Callable[[], None] = lambda: None,
) -> list[Generation]:
    """Continue every prompt, ``batch`` of them at a time; results in their order. ``done`` is called after each batch.

    Raises:
        PairError: a prompt cannot be encoded.
    """
    encoded = generator.codec.encode_all(prompts, chat_template=options.chat_template)
    found: dict[int, Generation] = {}
    for number, group in enumerate(groups([len(prompt.tokens) for prompt in encoded], batch)):
        # Rows of a batch draw other numbers from one seed; batches need seeds of their own, far from a user's next
        # one, and within the 32 bits that torch's generator looks at.
        own = dataclasses.replace(options, seed=options.seed + (number << 20))
        results = generator.generate_batch([encoded[index] for index in group], own)
        found.update(zip(group, results, strict=True))
        done()
    return [found[index] for index in range(len(prompts))]
