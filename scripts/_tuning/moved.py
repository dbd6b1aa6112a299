"""A base that was fine-tuned on something else than the drafter was made for."""

# The tools below carry no type hints.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _sample.corpus import batches, encode
from torch.nn import functional
from transformers import AutoTokenizer, Gemma4ForConditionalGeneration

__all__ = ["fine_tuned"]

BATCH, LENGTH = 12, 128
RATE, WARM_UP = 2e-3, 20


def fine_tuned(base: Path, texts: Sequence[str], out: Path, steps: int, seed: int = 0) -> dict[str, float]:
    """Train every weight of ``base`` on ``texts`` and write it to ``out``: first and last loss, and CPU seconds."""
    began = time.process_time()
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    model: Any = Gemma4ForConditionalGeneration.from_pretrained(base, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(base)
    tokens = encode(tokenizer, list(texts))
    random = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.01)
    model.train()
    losses = []
    for step in range(steps):
        warm = min(1.0, (step + 1) / WARM_UP)
        for group in optimizer.param_groups:
            group["lr"] = RATE * warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        batch = batches(tokens, LENGTH, BATCH, random)
        logits = model(input_ids=batch, use_cache=False).logits
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval().save_pretrained(out)
    tokenizer.save_pretrained(out)
    few = max(1, steps // 20)
    first, last = (sum(part) / few for part in (losses[:few], losses[-few:]))
    return {"first": first, "last": last, "seconds": time.process_time() - began}
