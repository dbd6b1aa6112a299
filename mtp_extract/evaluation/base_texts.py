"""The base's own text after prompts, and which of these texts are usable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.nn.utils import rnn

from mtp_extract.errors import PairError
from mtp_extract.evaluation.intervals import find_repeats
from mtp_extract.evaluation.prompts import Prompt
from mtp_extract.progress import SILENT, Reporter, report_each
from mtp_extract.speculate.codec import Codec
from mtp_extract.speculate.target import Base
from mtp_extract.speculate.teacher import Text


@dataclass(frozen=True)
class Continuations:
    """The base's greedy continuations of prompts, one per prompt, in order."""

    prompts: tuple[Prompt, ...]
    texts: tuple[Text, ...]  # prompt and continuation

    @cached_property
    def usable(self) -> list[int]:
        """Indices of texts that have an anchor and repeat no text before them."""
        repeats = find_repeats([text.tokens for text in self.texts])
        return [index for index, text in enumerate(self.texts) if text.anchors and index not in repeats]

    @property
    def workloads(self) -> dict[str, list[int]]:
        """Indices of the texts of each workload, in order of first appearance."""
        indices: dict[str, list[int]] = {}
        for index, prompt in enumerate(self.prompts):
            indices.setdefault(prompt.workload, []).append(index)
        return indices


def group_by_length(lengths: Sequence[int], batch: int) -> list[list[int]]:
    """Group indices by similar length, so that little of a batch is padding.

    A last group of one text joins the group before: some controls need two texts.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    batches = [order[start : start + batch] for start in range(0, len(order), batch)]
    if batch > 1 and len(batches) > 1 and len(batches[-1]) == 1:
        batches[-2:] = [batches[-2] + batches[-1]]
    return batches


@torch.inference_mode()
def continue_prompts(
    base: Base,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    batch: int,
    temperature: float = 0.0,
    seed: int = 0,
    reporter: Reporter = SILENT,
) -> list[tuple[int, ...]]:
    """Return the token ids that the base generates after each prompt, a stop token included."""
    options: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": temperature > 0}
    if temperature:
        options |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
    continuations: dict[int, tuple[int, ...]] = {}
    batches = group_by_length(list(map(len, prompts)), batch)
    for number, group in enumerate(report_each(batches, reporter, "the base's text")):
        written = _generate(base, [prompts[index] for index in group], seed + (number << 20), options)
        continuations.update(zip(group, written, strict=True))
    return [continuations[index] for index in range(len(prompts))]


def _generate(
    base: Base, prompts: Sequence[Sequence[int]], seed: int, options: Mapping[str, Any]
) -> Iterator[tuple[int, ...]]:
    device = base.device
    rows = [torch.tensor(prompt, device=device) for prompt in prompts]
    tokens = rnn.pad_sequence(rows, batch_first=True, padding_value=-1, padding_side="left")
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        generated = base.model.generate(
            input_ids=tokens.clamp(min=0), attention_mask=(tokens >= 0).long(), pad_token_id=0, **options
        )
    stop_tokens = frozenset(base.stop_token_ids)
    for row in generated[:, tokens.shape[1] :].tolist():
        # Tokens after a stop token are padding.
        end = next((count for count, token in enumerate(row, 1) if token in stop_tokens), len(row))
        yield tuple(row[:end])


def require_context(base: Base, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
    """Raise PairError if a prompt and ``new_tokens`` after it exceed the base's context."""
    longest = max(map(len, prompts), default=0) + new_tokens
    context = base.config.max_position_embeddings
    if longest > context:
        raise PairError(
            f"expected at most the base's {context} tokens, found {longest}, {new_tokens} new ones among them. Give "
            "shorter prompts.",
            remedies=("prompts", "new_tokens"),
        )


def write_texts(
    base: Base,
    codec: Codec,
    prompts: Sequence[Prompt],
    *,
    new_tokens: int,
    batch: int,
    chat_template: bool,
    reporter: Reporter = SILENT,
) -> Continuations:
    """Continue ``prompts`` greedily with the base; PairError if its context is too short."""
    encoded = [codec.encode(prompt.content, chat_template=chat_template) for prompt in prompts]
    require_context(base, encoded, new_tokens)
    reporter.say(f"continuing {len(prompts)} prompts with the base alone")
    written = continue_prompts(base, encoded, new_tokens=new_tokens, batch=batch, reporter=reporter)
    texts = (Text((*prompt, *new), len(prompt)) for prompt, new in zip(encoded, written, strict=True))
    return Continuations(tuple(prompts), tuple(texts))
