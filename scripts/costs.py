"""Measure what the costly parts of the commands cost at the sizes of a real model.

    python scripts/costs.py [NAME …]

NAME is one of the measurements; without one, all are made. Time is CPU time of the process, so that other programs on
the machine do not count. Needs what the tests need.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import math
import os
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

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

    class Converted(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
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
        with Converted() as counted:  # type: ignore[no-untyped-call]
            next(rounds)
        converted = f"{counted.nbytes / 1e6:.2f} MB converted"
        rows.append((f"drafting, a round of three steps beside {slots} slots", f"{spent:.1f} ms, {converted}"))
    return rows


def constants(work: Path) -> Iterator[tuple[Any, ...]]:
    """Of a drafter of E4B's shape: role, matrix in codes, the same in BF16, and in BF16 with every number moved."""
    import bench

    from mtp_extract.bundle import open_bundle
    from mtp_extract.checkpoint.constant import Constant
    from mtp_extract.checkpoint.dtypes import DTYPES
    from mtp_extract.checkpoint.stored import StoredTensor, stored_weight

    source, random = work / "e4b-shaped.litertlm", np.random.default_rng(0)
    bench.write_e4b_shaped(source)
    with open_bundle(source) as opened:
        drafter = opened.drafter()
        for found in drafter.walk.roles:
            if found.tensor is None or len(found.shape) < 2:
                continue
            constant = Constant.of(drafter.model, found)
            made: list[Any] = []
            for name, amount in (("same", 0.0), ("moved", 0.05)):
                path, size = work / f"{found.role}.{name}", math.prod(found.shape)
                with path.open("wb") as file:
                    for chunk in constant.weight.chunks():
                        moved = chunk * (1 + amount * random.standard_normal(chunk.size, np.float32))
                        file.write(DTYPES["bf16"].narrow(moved, name).tobytes())
                made.append(stored_weight(path, StoredTensor("BF16", found.shape, 0, 2 * size)))
            yield found.role, constant, *made


def comparing() -> Rows:
    """``mtp-inspect --against``: every matrix of a drafter of E4B's shape against itself, and against other weights."""
    from mtp_extract.checkpoint import distance

    rows = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        threads = (pool,) if "pool" in inspect.signature(distance.measure_distance).parameters else ()
        for what, index in (("equal weights", 2), ("other weights", 3)):
            numbers, spent, clock = 0, 0.0, 0.0
            for entry in constants(Path(folder)):
                start = time.perf_counter()
                spent += cpu_seconds(partial(distance.measure_distance, entry[1].weight, entry[index], *threads))
                clock += time.perf_counter() - start
                numbers += math.prod(entry[1].shape)
            figure = f"{1e9 * spent / numbers:.1f} ns of CPU a number, {1e9 * clock / numbers:.1f} on the clock"
            rows.append((f"`--against`, {what}, {numbers / 1e6:.0f} M", figure))
    return rows


def tables() -> Rows:
    """``mtp-inspect --against``: tables of 256 columns, side by side in one matrix of the checkpoint."""
    from mtp_extract.checkpoint import distance
    from mtp_extract.checkpoint.stored import StoredTensor, columns_of, stored_weight

    count = 8
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for role, head, same, _ in constants(work):
            if role == "lm_head":
                rows, columns = head.shape
                beside = np.fromfile(same.source.path, np.uint16).reshape(rows, columns)
                path = work / "beside"
                with path.open("wb") as file:
                    for row in range(0, rows, 4096):
                        np.tile(beside[row : row + 4096], (1, count)).tofile(file)
                whole = stored_weight(path, StoredTensor("BF16", (rows, count * columns), 0, path.stat().st_size))
                held = [(head, columns_of(whole, at * columns, (at + 1) * columns)) for at in range(count)]

                together = getattr(distance, "measure_columns", partial(itertools.starmap, distance.measure_distance))
                start = time.process_time()
                deque(together(held), maxlen=0)
                spent = time.process_time() - start
                numbers = count * rows * columns
                figure = f"{1e9 * spent / numbers:.1f} ns of CPU a number"
                return [(f"`--against`, {count} tables of {columns} columns, {numbers / 1e6:.0f} M", figure)]
    raise AssertionError("the drafter has a head")


def inserting() -> Rows:
    """``mtp-insert``: every matrix of a drafter of E4B's shape moved, encoded and held against what it became."""
    from mtp_extract.insert.decision import decide
    from mtp_extract.io.threads import in_turn

    numbers, planned, encoded = 0, 0.0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        for role, constant, _, moved in constants(Path(folder)):
            start = time.process_time()
            content = in_turn([decide(role, constant, moved, "bf16")])[0].content
            planned += time.process_time() - start
            encoded += cpu_seconds(partial(deque, content.produce(), maxlen=0))
            numbers += math.prod(constant.shape)
    spent = f"{1e9 * planned / numbers:.1f} ns of CPU a number to plan, {1e9 * encoded / numbers:.1f} to encode"
    return [(f"`mtp-insert`, other weights, {numbers / 1e6:.0f} M", spent)]


def controls() -> Rows:
    """``mtp-validate``: agreement and controls over the sample's prompts, and one row of E4B's logits in its head."""
    from helpers.first_pair import first_base, first_bundle

    import mtp_extract
    from mtp_extract.drafter.load import load_drafter
    from mtp_extract.evaluate import agreement
    from mtp_extract.evaluate.base_model import load_base
    from mtp_extract.evaluate.prompts import encode_prompts, shipped_prompts
    from mtp_extract.speculate.generate import SpeculativeGenerator
    from mtp_extract.speculate.target import Base
    from mtp_extract.validate.acceptance import controls as module

    with tempfile.TemporaryDirectory() as folder:
        mtp_extract.extract(first_bundle(), Path(folder) / "drafter")
        loaded = load_base(str(first_base()), "cpu")
        drafter = load_drafter(Path(folder) / "drafter", dtype=loaded.drafter_dtype)
    generator = SpeculativeGenerator(loaded.model, drafter, loaded.tokenizer)
    prompts = shipped_prompts()[:32]
    encoded = encode_prompts(prompts, generator.codec, chat_template=False)
    written = agreement.continue_greedily(generator, prompts, encoded, new_tokens=48, batch=16)
    passes, full_pass = [], Base.full_pass
    spent_in_base = 0.0

    def counted(self: Base, tokens: Any, layers: Any = ()) -> Any:
        nonlocal spent_in_base
        start = time.process_time()
        found = full_pass(self, tokens, layers)
        spent_in_base += time.process_time() - start
        passes.append(tokens.numel())
        return found

    def run() -> None:
        if hasattr(module, "draft_together"):
            module.draft_together(generator.base, [drafter], written, 8, batch=16)
        else:
            real = agreement.measure_agreement(generator.base, drafter, written, 8, batch=16)
            vars(module)["run_controls"](generator.base, drafter, written, real, batch=16)

    setattr(Base, "full_pass", counted)  # noqa: B010 - mypy takes no other assignment to a method
    spent = cpu_seconds(run)
    read = f"{sum(passes)} tokens read by the base in {spent_in_base:.2f} s of {spent:.2f}"
    return [("`mtp-validate`, agreement and controls, 32 prompts of the sample", read)]


def finite() -> Rows:
    """Loading a base: whether a parameter of 256 M numbers in BF16 is finite, and the memory that asking takes."""
    import resource

    import torch

    from mtp_extract.evaluate import base_model

    def peak() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    torch.set_num_threads(1)
    whole = torch.zeros(1 << 28, dtype=torch.bfloat16)
    ask = getattr(base_model, "_is_finite", lambda tensor: bool(torch.isfinite(tensor).all()))
    before, spent = peak(), cpu_seconds(partial(ask, whole))
    figure = f"{1e9 * spent / whole.numel():.2f} ns a number, {(peak() - before) / 1e6:.0f} MB on top of 537 MB"
    return [("loading a base: whether a parameter is finite", figure)]


MEASUREMENTS: dict[str, Callable[[], Rows]] = {
    "drafting": drafting,
    "comparing": comparing,
    "tables": tables,
    "inserting": inserting,
    "controls": controls,
    "finite": finite,
}


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
