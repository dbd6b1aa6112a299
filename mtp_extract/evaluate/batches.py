"""Texts of similar length together, so that little of a batch is padding; and what the base writes so."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from mtp_extract.speculate.numbers import count
from mtp_extract.speculate.target import Base


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


def base_texts(
    base: Base,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    batch: int,
    temperature: float = 0.0,
    seed: int = 0,
    done: Callable[[], None] = lambda: None,
) -> list[tuple[int, ...]]:
    """What the base writes after each prompt, by transformers' own generation: new token ids, a stop token included.

    Args:
        prompts: token ids.
        batch: prompts at a time.
        temperature: 0 is greedy.
        seed: of the random numbers, with the number of the batch.
        done: called after each batch.
    """
    found: dict[int, tuple[int, ...]] = {}
    for number, group in enumerate(groups(list(map(len, prompts)), batch)):
        texts = _written(base, [prompts[index] for index in group], new_tokens, temperature, seed + (number << 20))
        found.update(zip(group, texts, strict=True))
        done()
    return [found[index] for index in range(len(prompts))]


@torch.inference_mode()
def _written(
    base: Base, prompts: Sequence[Sequence[int]], new_tokens: int, temperature: float, seed: int
) -> list[tuple[int, ...]]:
    longest, device = max(map(len, prompts)), base.device
    tokens = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    real = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    drawn = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        made = base.model.generate(
            input_ids=tokens,
            attention_mask=real,
            max_new_tokens=new_tokens,
            do_sample=temperature > 0,
            pad_token_id=0,
            **drawn,
        )
    stops, texts = frozenset(base.stop_token_ids), []
    for row in made[:, longest:].tolist():
        # What comes after a stop token is padding.
        ends = next((place + 1 for place, token in enumerate(row) if token in stops), len(row))
        texts.append(tuple(row[:ends]))
    return texts
