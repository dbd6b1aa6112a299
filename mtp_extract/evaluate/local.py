"""The loop of this package as an engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from mtp_extract.speculate.batches import groups
from mtp_extract.speculate.codec import Prompt
from mtp_extract.speculate.generate import Options, SpeculativeGenerator
from mtp_extract.speculate.result import Generation


@dataclass(frozen=True)
class LocalEngine:
    """Generates in batches of prompts of similar length."""

    generator: SpeculativeGenerator  # base, drafter and tokenizer
    batch: int = 16  # prompts at a time

    def generate(self, prompts: Sequence[Prompt], options: Options) -> list[Generation]:
        """Continue every prompt; results in their order.

        Raises:
            PairError: a prompt cannot be encoded.
        """
        codec = self.generator.codec
        encoded = codec.encode_all(prompts, chat_template=options.chat_template)
        found: dict[int, Generation] = {}
        for number, group in enumerate(groups([len(prompt.tokens) for prompt in encoded], self.batch)):
            # Rows of a batch draw other numbers from one seed; batches need seeds of their own, far from a user's next
            # one, and within the 32 bits that torch's generator looks at.
            own = dataclasses.replace(options, seed=options.seed + (number << 20))
            results = self.generator.generate_batch([encoded[index] for index in group], own)
            found.update(zip(group, results, strict=True))
        return [found[index] for index in range(len(prompts))]
