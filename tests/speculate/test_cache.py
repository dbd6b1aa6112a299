"""The slot cache: whatever is fed, rejected and fed again, the base computes what it does without a cache."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from helpers.random_pairs import random_base

from mtp_extract.speculate.cache import SlotCache
from mtp_extract.speculate.target import Base


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sliding_window": 2},
        {"sliding_window": 100},
        {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
        {"hidden_size_per_layer_input": 6},
        {"num_kv_shared_layers": 0},
    ],
)
@torch.inference_mode()
def test_ragged_rounds_with_rollback(attention: str, changes: dict[str, Any]) -> None:
    """Prompts of different lengths accept at different rates; states, K and V stay those of a plain forward."""
    base = Base(random_base(attention=attention, **changes))
    numbers = random.Random(0)
    texts = torch.randint(0, 40, (3, 60), generator=torch.Generator().manual_seed(0))
    plain = [base.full_pass(row[None]) for row in texts]
    lengths, queries = [1, 13, 6], 4
    prompts = torch.zeros(3, 13, dtype=torch.long)
    for row, length in enumerate(lengths):
        prompts[row, :length] = texts[row, :length]
    cache = base.new_cache(batch=3, capacity=60, queries=queries)
    states = base.forward(prompts, torch.zeros(3, dtype=torch.long), cache, torch.tensor(lengths)).hidden
    for row, length in enumerate(lengths):
        torch.testing.assert_close(states[row, :length], plain[row].hidden[0, :length], atol=2e-5, rtol=2e-5)
    starts, rows = list(lengths), [0, 1, 2]
    for turn in range(11):
        if turn == 7:  # a sequence leaves the batch
            cache.keep(torch.tensor([0, 2]))
            rows, starts = [0, 2], [starts[0], starts[2]]
        width = numbers.choice([1, 2, queries])
        right = [numbers.randint(1, width) for _ in rows]
        fed = torch.stack([texts[row, start : start + width] for row, start in zip(rows, starts, strict=True)])
        for i, count in enumerate(right):
            fed[i, count:] = (fed[i, count:] + 1) % 40  # rejected drafts: other tokens than the text's
        states = base.forward(fed, torch.tensor(starts), cache).hidden
        for i, (row, start) in enumerate(zip(rows, starts, strict=True)):
            expected = plain[row].hidden[0, start : start + right[i]]
            torch.testing.assert_close(states[i, : right[i]], expected, atol=2e-5, rtol=2e-5)
        starts = [start + count for start, count in zip(starts, right, strict=True)]
        kv, positions = base.read_kv(cache, base.kv_providers)
        for kind, (keys, values) in kv.items():
            window = base.windows[kind]
            for i, row in enumerate(rows):
                last = starts[i] - 1
                first = (
                    0 if window is None else max(0, last - window)
                )  # one more than the window: transformers' drafter
                for position in range(first, last + 1):
                    slot = (positions[kind][i] == position).nonzero()
                    assert len(slot) == 1
                    for stored, whole in zip((keys, values), plain[row].shared_kv[kind], strict=True):
                        torch.testing.assert_close(
                            stored[i, :, slot.item()], whole[0, :, position], atol=2e-5, rtol=2e-5
                        )


@torch.inference_mode()
def test_sliding_layers_keep_a_window_only() -> None:
    base = Base(random_base())
    cache = base.new_cache(batch=1, capacity=500, queries=4)
    base.forward(torch.zeros(1, 300, dtype=torch.long), torch.tensor([0]), cache, torch.tensor([300]))
    assert sorted(shape[2] for shape in cache.shapes) == [9, 9, 500]
    assert cache.nbytes == 4 * 2 * (2 * 2 * 9 * 8 + 2 * 500 * 12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_copy_in_f32_follows_every_write(dtype: torch.dtype) -> None:
    """Prompts, drafts that are overwritten, trees, and sequences that leave: as if all were converted anew."""
    numbers = torch.Generator().manual_seed(0)
    windows, queries = (3, None), 4
    cache = SlotCache(windows, batch=3, capacity=40, queries=queries, device=torch.device("cpu"))

    def feed(starts: torch.Tensor, width: int, lengths: torch.Tensor | None = None) -> None:
        cache.begin(starts, width, lengths)
        for layer in range(len(windows)):
            cache.update(*torch.randn(2, len(starts), 2, width, 8, generator=numbers).to(dtype), layer)
        cache.end()

    def same() -> None:
        for layer in range(len(windows)):
            for wide, kept in zip(cache.read_wide(layer), cache.read(layer), strict=True):
                assert wide.dtype == (torch.int64 if kept.dtype == torch.int64 else torch.float32)
                assert torch.equal(wide, kept.to(wide.dtype))

    starts = torch.tensor([11, 5, 9])
    feed(torch.zeros_like(starts), 11, starts)
    same()
    feed(starts, queries)
    feed(starts + torch.tensor([1, 0, 4]), queries)  # over what was rejected
    same()
    cache.take(starts, torch.tensor([[0, 2, 3], [0, 1, 2], [0, 3, 2]]))
    same()
    cache.keep(torch.tensor([2, 0]))
    same()
    feed(starts[[2, 0]] + 2, 2)
    same()


@torch.inference_mode()
def test_logits_are_those_of_the_whole_model() -> None:
    model = random_base(hidden_size_per_layer_input=6)
    base = Base(model)
    tokens = torch.arange(12)[None]
    assert torch.equal(base.logits(base.full_pass(tokens).hidden), model(tokens).logits)
    assert base.embed(tokens).square().mean() == pytest.approx(32.0, rel=0.1), "embeddings are scaled by sqrt(width)"
