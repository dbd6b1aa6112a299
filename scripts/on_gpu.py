"""What a pair of Gemma 4's real geometry does on a GPU, in one run of at most nine minutes, written as a page.

    python scripts/on_gpu.py --shape e4b --device cuda --out gpu.md

Base and drafter have random weights, so that no draft is accepted but by chance: measured is what a round costs, not
what it yields. A round with K drafts pays where it emits more tokens, on average, than it takes times the base alone.
Our loop and transformers' ``assistant_model=`` are asked in turn, and the median is shown. The page is written anew
after every section, so that a run that is stopped leaves what it has; what there was no time for is said.

On a CPU, with ``--shape tiny``, everything runs as well: the tests do that.
"""

from __future__ import annotations

import argparse
import gc
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import transformers
from _rehearsal.base import write_base
from _rehearsal.commands import write_prompts
from _rehearsal.shapes import FULL, SHAPES, SLIDING, Shape

from mtp_extract.drafter.load import load_any_drafter
from mtp_extract.evaluation.base_model import load_base
from mtp_extract.progress import Reporter
from mtp_extract.speculate.drafts import DraftTree
from mtp_extract.speculate.loop import SpeculativeGenerator
from mtp_extract.tuning.plan import TuningPlan
from mtp_extract.tuning.run import run_tuning

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from helpers.random_assistants import Geometry, random_assistant  # noqa: E402 - it lies beside the tests

CHAINS = range(9)
TREES = {"2x2x1": DraftTree.parse("2x2x1"), "4x2x1": DraftTree.parse("4x2x1")}
CONTEXTS = (1024, 4096, 8192, 16384, 32768)
CHAIN, SHORT = 4, 32
"""Drafts a round, and tokens of a prompt, where it is not their number that is varied."""
_REPEATS = 3
_TUNED_STEPS = 12
_TUNING_S, _TESTS_S = 90.0, 45.0  # seconds that must be left for either to begin
SECTIONS = ("drafts", "contexts", "tuning", "tests")

Row = tuple[str, ...]


class TimeIsUpError(Exception):
    """No time is left for more rows."""


@dataclass
class Page:
    """The measurements so far, and the time that is left."""

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


class Pair:
    """Base and drafter on the device, and the same drafter as transformers' own."""

    def __init__(self, base: Path, drafter: Path, device: str) -> None:
        loaded = load_base(str(base), device)
        self.base, self.device = loaded.model, loaded.device
        network = load_any_drafter(drafter, dtype=loaded.drafter_dtype, device=loaded.device)
        self.generator = SpeculativeGenerator(self.base, network)
        assistant: Any = transformers.AutoModelForCausalLM.from_pretrained(drafter, dtype=loaded.drafter_dtype)
        self.assistant = assistant.to(loaded.device).eval()
        self.random = torch.Generator().manual_seed(0)

    def prompt(self, length: int) -> list[int]:
        """Random tokens, none of them special."""
        most = self.generator.base.vocab_size
        tokens: list[int] = torch.randint(300, most, (length,), generator=self.random).tolist()
        return tokens

    def ours(self, prompt: list[int], drafts: int | DraftTree, tokens: int) -> tuple[float, float, float]:
        """Milliseconds of drafting and of verifying in a round, and of the prompts' own forward."""
        generation = self.generator.generate(prompt, max_new_tokens=tokens, drafts=drafts, stop_token_ids=[])
        full = [r for r in generation.rounds if r.drafted or drafts == 0]
        return fmean(r.draft_ms for r in full), fmean(r.verify_ms for r in full), generation.prefill_ms

    def theirs(self, prompt: list[int], drafts: int, tokens: int) -> float:
        """Milliseconds a round by transformers' own loop: a round is a forward of the base."""
        ids = torch.tensor([prompt], device=self.device)
        more = {"assistant_model": self.assistant} if drafts else {}
        self.assistant.generation_config.num_assistant_tokens = drafts or 1
        self.assistant.generation_config.num_assistant_tokens_schedule = "constant"
        settings = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, **more}
        rounds: list[int] = []
        hook = self.base.register_forward_pre_hook(lambda *_: rounds.append(1))
        try:
            _synchronize(self.device)
            start = time.perf_counter()
            self.base.generate(ids, attention_mask=torch.ones_like(ids), **settings)
            _synchronize(self.device)
            return 1e3 * (time.perf_counter() - start) / len(rounds)
        finally:
            hook.remove()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def write_assistant(shape: Shape, out: Path) -> None:
    """A random drafter for ``shape`` as transformers writes an assistant."""
    geometry = Geometry(
        backbone=shape.width,
        hidden=shape.drafter_width,
        intermediate=shape.drafter_ffn,
        layers=(SLIDING,) * 3 + (FULL,),
        heads=shape.drafter_heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        full_head_dim=shape.full_head_dim,
        window=shape.window,
        vocabulary=shape.vocab,
    )
    random_assistant(geometry).to(torch.bfloat16).save_pretrained(out)


def read_peak_memory(device: torch.device) -> str:
    """Return the most memory that tensors took since the last call."""
    if device.type != "cuda":
        return "–"
    most = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return f"{most / 1e9:.2f} GB"


def measure_by_drafts(pair: Pair, page: Page, rounds: int) -> Iterator[Row]:
    """Measure K and trees, our loop and transformers' in turn."""
    prompt, alone = pair.prompt(SHORT), 0.0
    shapes: dict[str, int | DraftTree] = {**{str(k): k for k in CHAINS}, **TREES}
    for name, drafts in shapes.items():
        page.require_time()
        ours: list[tuple[float, float, float]] = []
        theirs: list[float] = []
        for turn in range(1 + _REPEATS):  # the first sets things up
            ours.append(pair.ours(prompt, drafts, rounds))
            if isinstance(drafts, int):
                theirs.append(pair.theirs(prompt, drafts, rounds))
            del ours[: turn == 1], theirs[: turn == 1]
        draft, verify = median(o[0] for o in ours), median(o[1] for o in ours)
        alone = alone or draft + verify
        beside = f"{median(theirs):.2f}" if theirs else "–"
        yield name, f"{draft:.2f}", f"{verify:.2f}", f"{draft + verify:.2f}", beside, f"{(draft + verify) / alone:.2f}"


def measure_by_context(pair: Pair, page: Page, rounds: int, lengths: Sequence[int]) -> Iterator[Row]:
    """Measure after prompts of these lengths."""
    for length in lengths:
        page.require_time()
        read_peak_memory(pair.device)
        prompt = pair.prompt(length)
        pair.ours(prompt, CHAIN, CHAIN + 2)
        draft, verify, prefill = pair.ours(prompt, CHAIN, rounds)
        alone = pair.ours(prompt, 0, rounds)[1]
        numbers = (f"{ms:.2f}" for ms in (prefill, draft, verify, alone))
        yield str(length), *numbers, f"{(draft + verify) / alone:.2f}", read_peak_memory(pair.device)


class _StepTimes(Reporter):
    """Notes when each step of a training ends."""

    def __init__(self, ends: list[float]) -> None:
        self._ends = ends

    def report_progress(self, part: str, number: int, total: int, unit: str = "") -> None:
        if part.startswith("step"):
            self._ends.append(time.monotonic())


def measure_tuning(page: Page, root: Path, drafter: Path, device: str) -> Iterator[Row]:
    """Measure the steps per second of a tuning, from the end of its first to the end of its last."""
    for mode in ("norms", "float"):
        page.require_time(_TUNING_S)
        times: list[float] = []
        gc.collect()
        read_peak_memory(torch.device(device))
        settings: dict[str, Any] = {"prompts": root / "texts.jsonl", "new_tokens": 64, "steps": _TUNED_STEPS}
        settings |= {"mode": mode, "device": device, "force": True}
        plan = TuningPlan(drafter, str(root / "base"), root / f"tuned-{mode}", root / "work", **settings)

        run_tuning(plan, _StepTimes(times))
        a_second = (len(times) - 1) / (times[-1] - times[0])
        yield mode, f"{a_second:.2f}", str(plan.batch), str(plan.draft_steps), read_peak_memory(torch.device(device))


def run_marked_tests(page: Page) -> Iterator[Row]:
    """Run the tests that need a GPU."""
    page.require_time(_TESTS_S)
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    yield str(done.returncode), (done.stdout.strip().splitlines() or [done.stderr.strip()[-200:]])[-1]


def format_heading(shape: Shape, device: torch.device) -> str:
    """Format the heading: what was measured on which device."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"a CPU ({platform.machine()})"
    return (
        f"# On a GPU\n\nMade by `python scripts/on_gpu.py --shape {shape.name}`: a pair of this geometry with random "
        f"weights in BF16 ({shape.layers} layers), on {name}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}. No draft is accepted but by chance: these are costs of rounds, not what they "
        "yield. Times are milliseconds."
    )


def measure(shape: Shape, device: str, out: Path, minutes: float, only: Sequence[str], root: Path) -> None:
    """Make the pair in ``root``, measure, and write the page."""
    page, drafter = Page(out, time.monotonic() + 60 * minutes), root / "drafter"
    write_base(shape, root / "base")
    write_prompts(root)
    write_assistant(shape, drafter)
    start = time.monotonic()
    pair = Pair(root / "base", drafter, device)
    page.parts.append(format_heading(shape, pair.device))
    page.parts.append(
        f"\nBoth were loaded in {time.monotonic() - start:.1f} s; memory: {read_peak_memory(pair.device)}."
    )
    rounds = 16 if pair.device.type == "cuda" else 4
    if "drafts" in only:
        header: Row = ("drafts", "drafting", "verifying", "a round", "transformers' round", "pays above a length of")
        page.table("Drafts a round", header, measure_by_drafts(pair, page, rounds))
    if "contexts" in only:
        lengths = [length for length in CONTEXTS if length + 64 <= shape.positions] or [4 * SHORT]
        header = ("tokens of the prompt", "prefill", "drafting", "verifying", "base alone", "round / base", "memory")
        page.table(f"Contexts, {CHAIN} drafts", header, measure_by_context(pair, page, rounds, lengths))
    del pair
    if "tuning" in only:
        header = ("mode", "steps a second", "texts a step", "drafts", "memory")
        page.table("Tuning", header, measure_tuning(page, root, drafter, device))
    if "tests" in only:
        page.table("Tests that need a GPU", ("exit status", "what pytest says"), run_marked_tests(page))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="e4b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=ROOT / "gpu.md")
    parser.add_argument("--minutes", type=float, default=9.0, help="no measurement begins later (default 9)")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        measure(SHAPES[options.shape], options.device, options.out, options.minutes, options.only, Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
