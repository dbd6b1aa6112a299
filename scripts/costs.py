"""Measure what the costly parts of the commands cost at the sizes of a real model, and print docs/performance.md's table.

    python scripts/costs.py [NAME …]

NAME is one of the measurements; without one, all are made. Time is CPU time of the process, so that other programs on
the machine do not count. Needs what the tests need.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
Rows = list[tuple[str, str]]


def cpu_seconds(run: Callable[[], object]) -> float:
    """CPU time of one run, all threads."""
    start = time.process_time()
    run()
    return time.process_time() - start


def drafting() -> Rows:
    """A round of drafting beside caches of different lengths, with E4B's K and V in BF16 and little else."""
    import torch
    from helpers.random_pairs import random_base, random_drafter
    from torch.utils._python_dispatch import TorchDispatchMode

    from mtp_extract.speculate.generate import Options, SpeculativeGenerator

    class Converted(TorchDispatchMode):
        nbytes = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func._overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.to) and out.dtype != args[0].dtype:
                self.nbytes += out.numel() * out.element_size() * out.is_floating_point()
            return out

    torch.set_num_threads(1)
    base = random_base(head_dim=256, global_head_dim=512, sliding_window=512).to(torch.bfloat16)
    generator = SpeculativeGenerator(base, random_drafter(base).to(torch.bfloat16))
    rows = []
    for slots in (1024, 32768):
        rounds = generator.stream((1, 2, 3), Options(slots, 3, stop_token_ids=[]))
        spent = statistics.median(c.round.draft_ms for c in islice(rounds, 3, 14) if c.round is not None)
        with Converted() as counted:
            next(rounds)
        converted = f"{counted.nbytes / 1e6:.2f} MB converted"
        rows.append((f"drafting, a round of three steps beside {slots} slots", f"{spent:.1f} ms, {converted}"))
    return rows


MEASUREMENTS: dict[str, Callable[[], Rows]] = {"drafting": drafting}


def main() -> None:
    """Measure, and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MEASUREMENTS))
    chosen = parser.parse_args().names or list(MEASUREMENTS)
    sys.path.insert(0, str(ROOT / "tests"))
    print("| what | measured |\n| --- | --- |")
    for name in chosen:
        for what, figure in MEASUREMENTS[name]():
            print(f"| {what} | {figure} |", flush=True)


if __name__ == "__main__":
    main()
