"""Memory and time of the chunked loss at the shape of Gemma 4 E4B, against the plain one at a size that fits.

Random states (width 256) against a random head of 262 144 tokens, forward and backward, on one CPU thread; every case
in a process of its own, whose peak memory is that of the case::

    python scripts/bench_loss.py
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time

import torch
from torch.nn import functional

from mtp_extract.tune.loss import OBJECTIVES, Teacher, chunked_loss

VOCABULARY, WIDTH, CAP = 262_144, 256, 30.0
CASES = (
    ("plain", "ce", 128, True),
    ("plain", "ce", 512, True),
    ("chunked", "ce", 512, True),
    ("chunked", "mixed", 1024, True),
    ("chunked", "ce", 1024, False),
    ("chunked", "tv", 1024, False),
    ("chunked", "mixed", 1024, False),
)
"""Which loss, its objective, rows, and whether the head is trained."""


def peak() -> int:
    """Bytes of memory, at most so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(kind: str, name: str, rows: int, trains_head: bool) -> dict[str, float]:
    """Peak memory beside inputs, and CPU seconds, of one forward and backward."""
    torch.set_num_threads(1)
    random = torch.Generator().manual_seed(0)
    states = torch.randn(rows, WIDTH, generator=random, requires_grad=True)
    head = torch.randn(VOCABULARY, WIDTH, generator=random).mul_(0.1).requires_grad_(trains_head)
    choices = torch.randint(VOCABULARY, (rows,), generator=random)
    before, began = peak(), time.process_time()
    if kind == "plain":
        logits = CAP * torch.tanh(states @ head.T / CAP)
        total = functional.cross_entropy(logits, choices, reduction="sum")
    else:
        # The base's logits: of the same cost as the drafter's.
        frozen = head.detach()
        teacher = Teacher(choices, lambda positions: states.detach()[positions] @ frozen.T)
        where, weights = torch.arange(rows), torch.ones(rows)
        total = chunked_loss(states, head, teacher, where, weights, OBJECTIVES[name], cap=CAP).total
    total.backward()  # type: ignore[no-untyped-call]  # untyped in torch
    return {"memory": peak() - before, "seconds": time.process_time() - began, "loss": float(total)}


def main() -> None:
    """Every case, as a table."""
    if len(sys.argv) > 1:
        kind, name, rows, trains_head = json.loads(sys.argv[1])
        print(json.dumps(measure(kind, name, rows, trains_head)))
        return
    print("| loss | objective | rows | head | memory beside the inputs | CPU time | a row | its loss |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for kind, name, rows, trains_head in CASES:
        job = [sys.executable, __file__, json.dumps([kind, name, rows, trains_head])]
        found = json.loads(subprocess.run(job, check=True, capture_output=True, text=True).stdout)
        print(
            f"| {kind} | {name} | {rows} | {'trained' if trains_head else 'frozen'} | {found['memory'] / 1e9:.2f} GB | "
            f"{found['seconds']:.1f} s | {1e3 * found['seconds'] / rows:.0f} ms | {found['loss'] / rows:.6f} |"
        )


if __name__ == "__main__":
    main()
