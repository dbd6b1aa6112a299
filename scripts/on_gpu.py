"""What a pair of Gemma 4's real geometry does on a GPU, in one run of at most nine minutes, written as a page.

    python scripts/on_gpu.py --shape e4b --device cuda --out docs/gpu.md

Base and drafter have random weights, so that no draft is accepted but by chance: measured is what a round costs, not
what it yields. A round with K drafts pays where it emits more tokens, on average, than it takes times the base alone.
Our loop and transformers' ``assistant_model=`` are asked in turn, and the median is shown. The page is written anew
after every section, so that a run that is stopped leaves what it has; what there was no time for is said.

On a CPU, with ``--shape tiny``, everything but CUDA's own runs as well: the tests do that.
"""

from __future__ import annotations

import argparse
import gc
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
import transformers
from _rehearsal.base import write_base
from _rehearsal.commands import Place, write_prompts
from _rehearsal.pair import CHAIN, SHORT, Pair, elapsed, synchronize, write_assistant
from _rehearsal.shapes import SHAPES, Shape

from mtp_extract.speculate.trees import Tree
from mtp_extract.tuning.plan import TuningPlan
from mtp_extract.tuning.run import run_tuning

ROOT = Path(__file__).resolve().parent.parent
CHAINS = range(9)
TREES = {"2x2x1": Tree.parse("2x2x1"), "4x2x1": Tree.parse("4x2x1")}
CONTEXTS = (1024, 4096, 8192, 16384, 32768)
_REPEATS = 3
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")
_TUNED_STEPS = 12
_TUNING_S, _TESTS_S = 90.0, 45.0  # seconds that must be left for either to begin

Row = tuple[str, ...]


class TimeIsUpError(Exception):
    """No time is left for more rows."""


@dataclass
class Page:
    """What has been found, and until when there is time."""

    out: Path
    end: float
    parts: list[str] = field(default_factory=list)

    def table(self, title: str, header: Row, rows: Iterator[Row]) -> None:
        """Add a section; a row is one measurement."""
        print(title, flush=True)
        lines = [f"\n## {title}\n", f"| {' | '.join(header)} |", f"|{' --- |' * len(header)}"]
        try:
            for row in rows:
                print("  " + "  ".join(row), flush=True)
                lines.append(f"| {' | '.join(row)} |")
        except TimeIsUpError:
            lines.append("\nThere was no time for more.")
        self.parts += lines
        self.out.write_text("\n".join(self.parts) + "\n", encoding="utf-8")

    def require_time(self, seconds: float = 0.0) -> None:
        """Raise where no ``seconds`` are left."""
        if time.monotonic() + seconds > self.end:
            raise TimeIsUpError


def peak(device: torch.device) -> str:
    """The most memory that tensors took since this was last asked."""
    if device.type != "cuda":
        return "–"
    most = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return f"{most / 1e9:.2f} GB"


def by_drafts(pair: Pair, page: Page, rounds: int) -> Iterator[Row]:
    """K and trees, ours and transformers' in turn."""
    prompt, alone = pair.prompt(SHORT), 0.0
    shapes: dict[str, int | Tree] = {**{str(k): k for k in CHAINS}, **TREES}
    for name, drafts in shapes.items():
        page.require_time()
        own: list[tuple[float, float, float]] = []
        other: list[float] = []
        for turn in range(1 + _REPEATS):  # the first sets things up
            own.append(pair.ours(prompt, drafts, rounds))
            if isinstance(drafts, int):
                other.append(pair.theirs(prompt, drafts, rounds))
            del own[: turn == 1], other[: turn == 1]
        draft, verify = median(o[0] for o in own), median(o[1] for o in own)
        alone = alone or draft + verify
        beside = f"{median(other):.2f}" if other else "–"
        yield name, f"{draft:.2f}", f"{verify:.2f}", f"{draft + verify:.2f}", beside, f"{(draft + verify) / alone:.2f}"


def by_context(pair: Pair, page: Page, rounds: int, lengths: Sequence[int]) -> Iterator[Row]:
    """After prompts of these lengths."""
    for length in lengths:
        page.require_time()
        peak(pair.device)
        prompt = pair.prompt(length)
        pair.ours(prompt, CHAIN, CHAIN + 2)
        draft, verify, prefill = pair.ours(prompt, CHAIN, rounds)
        alone = pair.ours(prompt, 0, rounds)[1]
        numbers = (f"{ms:.2f}" for ms in (prefill, draft, verify, alone))
        yield str(length), *numbers, f"{(draft + verify) / alone:.2f}", peak(pair.device)


def launches(pair: Pair, page: Page) -> Iterator[Row]:
    """Of a draft step and of a round's drafting: operators, launches, time; and captured in a CUDA graph."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if pair.device.type == "cuda" else []
    for name, call in zip(("a draft step", f"{CHAIN} draft steps"), pair.a_step(), strict=True):
        page.require_time()
        ways = {name: call}
        if pair.device.type == "cuda":
            ways[f"{name}, in a CUDA graph"] = captured(call)
        for way, run in ways.items():
            run()
            with torch.profiler.profile(activities=activities) as profile:
                run()
                synchronize(pair.device)
            events = profile.events()
            operators = sum(event.name.startswith("aten::") and event.cpu_parent is None for event in events)
            launched = sum(event.name.startswith(_LAUNCHES) for event in events)
            took = median(elapsed(run, pair.device) for _ in range(20))
            yield way, str(operators), str(launched) if pair.device.type == "cuda" else "–", f"{took:.3f}"


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """``call`` in a CUDA graph, replayed."""
    beside: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):  # a capture wants everything set up once before
        call()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def tuning(page: Page, place: Place, drafter: Path, device: str) -> Iterator[Row]:
    """Steps a second of a tuning, from the end of its first to the end of its last."""
    for mode in ("norms", "float"):
        page.require_time(_TUNING_S)
        times: list[float] = []
        gc.collect()
        peak(torch.device(device))
        out, work = place.root / f"tuned-{mode}", place.root / "work"
        plan = TuningPlan(
            drafter,
            str(place.base),
            out,
            work,
            mode=mode,
            prompts=place.texts,
            new_tokens=64,
            steps=_TUNED_STEPS,
            device=device,
            force=True,
        )

        def tell(line: str, done: int, total: int, ends: list[float] = times) -> None:
            if line.startswith("step"):
                ends.append(time.monotonic())

        run_tuning(plan, tell=tell)
        a_second = (len(times) - 1) / (times[-1] - times[0])
        yield mode, f"{a_second:.2f}", str(plan.batch), str(plan.draft_steps), peak(torch.device(device))


def marked_tests(page: Page) -> Iterator[Row]:
    """The tests that need a GPU."""
    page.require_time(_TESTS_S)
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    yield str(done.returncode), (done.stdout.strip().splitlines() or [done.stderr.strip()[-200:]])[-1]


def heading(shape: Shape, device: torch.device) -> str:
    """What was measured on what."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"a CPU ({platform.machine()})"
    return (
        f"# On a GPU\n\nMade by `python scripts/on_gpu.py --shape {shape.name}`: a pair of this geometry with random "
        f"weights in BF16 ({shape.layers} layers), on {name}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}. No draft is accepted but by chance: these are costs of rounds, not what they "
        "yield. Times are milliseconds."
    )


SECTIONS = ("drafts", "contexts", "launches", "tuning", "tests")


def measure(shape: Shape, device: str, out: Path, minutes: float, only: Sequence[str], root: Path) -> None:
    """Make the pair in ``root``, measure, and write the page."""
    page = Page(out, time.monotonic() + 60 * minutes)
    place, drafter = Place(root), root / "drafter"
    write_base(shape, place.base)
    write_prompts(place)
    write_assistant(shape, drafter)
    start = time.monotonic()
    pair = Pair(place.base, drafter, device)
    page.parts.append(heading(shape, pair.device))
    page.parts.append(f"\nBoth were loaded in {time.monotonic() - start:.1f} s; memory: {peak(pair.device)}.")
    rounds = 16 if pair.device.type == "cuda" else 4
    contexts = [length for length in CONTEXTS if length + 64 <= shape.positions]
    sized = ("tokens of the prompt", "prefill", "drafting", "verifying", "base alone", "round / base", "memory")
    sections: dict[str, tuple[str, Row, Iterator[Row]]] = {
        "drafts": (
            "Drafts a round",
            ("drafts", "drafting", "verifying", "a round", "transformers' round", "pays above a length of"),
            by_drafts(pair, page, rounds),
        ),
        "contexts": (f"Contexts, {CHAIN} drafts", sized, by_context(pair, page, rounds, contexts or [4 * SHORT])),
        "launches": ("Launches", ("what", "operators", "launches", "time"), launches(pair, page)),
    }
    for name, (title, header, rows) in sections.items():
        if name in only:
            page.table(title, header, rows)
    sections.clear()
    del pair, rows
    if "tuning" in only:
        header = ("mode", "steps a second", "texts a step", "drafts", "memory")
        page.table("Tuning", header, tuning(page, place, drafter, device))
    if "tests" in only:
        page.table("Tests that need a GPU", ("exit status", "what pytest says"), marked_tests(page))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="e4b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "gpu.md")
    parser.add_argument("--minutes", type=float, default=9.0, help="no measurement begins later (default 9)")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        measure(SHAPES[options.shape], options.device, options.out, options.minutes, options.only, Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
