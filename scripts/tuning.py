"""Tune a drafter with ``mtp-tune`` and show what that is worth: tables, with 95 % intervals over held-out texts.

    python scripts/tuning.py BUNDLE BASE FLOATS.npz --work WORK [--only greedy moved sampled engines]

BUNDLE holds the drafter, BASE the base as transformers has it, trained on the source of the Python standard library;
FLOATS has the drafter's weights before they were quantized, by transformers name. Prompts are lines of the standard
library; which files are held out is decided by mtp-tune's own hash. WORK keeps what was made: a run that was stopped
goes on from there.

    greedy   three seeds in two modes: mean accepted length, transformers' own loop, CPU seconds of the whole command
    moved    the same drafter for a base that was fine-tuned on another language, here
    sampled  qat with three objectives for serving at temperature 1, each judged at 1 and greedily
    engines  the tuned drafter in every format that keeps integers, in every engine given (options as engines.py has
             them), and put back into the bundle for Google's runtime (``--python litert-lm=…``)
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import engines
import insertion
import numpy as np
from _engines import run_transformers
from _engines.outcome import Outcome
from _sample.corpus import standard_library_files
from _tuning import moved, prompts
from base_insertion import PROMPTS as RUNTIME_PROMPTS

from mtp_extract.pipeline.conversion import convert
from mtp_extract.pipeline.extraction import extract
from mtp_extract.pipeline.staging import RECORD
from mtp_extract.report.markdown import table

COMMAND = "from mtp_extract.cli.tune import main; main()"
COUNT = 420
NEW_TOKENS = 96
LOOP_TOKENS = 150
MODES = ("qat", "norms")
OBJECTIVES = ("ce", "kl", "tv")
MOVED_STEPS = 300
PARTS = ("greedy", "moved", "sampled", "engines")
EVERYTHING = 1 << 40


@dataclass(frozen=True)
class Run:
    """What one ``mtp-tune`` said.

    Attributes:
        tuning: of its record.
        seconds: CPU time of the whole command, of the system's too.
    """

    directory: Path
    tuning: Mapping[str, Any]
    seconds: float

    def figure(self, when: str, workload: str | None = None) -> str:
        """``before``, ``after`` or ``change``, with its interval."""
        found = self.tuning["overall"] if workload is None else self.tuning["workloads"][workload]
        return figure(found[when])

    def length(self, when: str) -> float:
        """Mean accepted length."""
        return float(self.tuning["overall"][when]["mean_accepted_length"])


def figure(found: Mapping[str, Any]) -> str:
    """A mean accepted length, or a change of it, with its interval."""
    change = "mean" in found
    form = "+.3f" if change else ".3f"
    mean = found["mean" if change else "mean_accepted_length"]
    bounds = found["interval"]
    return f"{mean:{form}}" + (f" ({bounds[0]:{form}} to {bounds[1]:{form}})" if bounds else "")


def spread(values: Sequence[float]) -> str:
    """Mean, standard deviation and range."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.3f} ± {deviation:.3f} ({min(values):.3f} to {max(values):.3f})"


def seconds_of(command: Sequence[str], log: Path) -> tuple[str, float]:
    """What ``command`` prints, and its CPU seconds, on one thread.

    Raises:
        SystemExit: it failed; what it said is in ``log``.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with open(log, "w", encoding="utf-8") as errors:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"mtp-tune failed, see {log}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done.stdout, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def tuned(work: Path, name: str, directory: Path, base: Path, asked: Path, *options: str) -> Run:
    """``mtp-tune`` of ``directory`` to ``work/name``, unless it is there; every run writes its own text."""
    record, out = work / f"{name}.json", work / name
    if not record.is_file():
        words = [str(directory), "--base", str(base), "--prompts", str(asked), "-o", str(out)]
        words += ["--new-tokens", str(NEW_TOKENS), "--no-chat-template", "--device", "cpu", "--json", "--overwrite"]
        printed, seconds = seconds_of([sys.executable, "-c", COMMAND, *words, *options], work / f"{name}.log")
        record.write_text(json.dumps({"tuning": json.loads(printed)["tuning"], "seconds": seconds}, indent=2))
    found = json.loads(record.read_text())
    return Run(out, found["tuning"], found["seconds"])


def as_it_is(work: Path, name: str, directory: Path, base: Path, asked: Path, *options: str) -> Run:
    """What a tuning says of ``directory`` before its first step."""
    one = ("--steps", "1", "--force", *shared_text(work))
    return tuned(work, f"{name} as it is", directory, base, asked, *one, *options)


def shared_text(work: Path) -> tuple[str, str]:
    """The option for a run that takes the text another one wrote."""
    return ("--work", str(work / "text"))


def accepted(base: Path, directory: Path) -> tuple[int, int]:
    """Accepted and drafted in transformers' own loop over :data:`~_tuning.prompts.LAB`.

    Raises:
        SystemExit: the text is not the base's own.
    """
    found = [run_transformers.check(str(base), str(directory), prompt, LOOP_TOKENS) for prompt in prompts.LAB]
    if not all(told["identical"] for told in found):
        raise SystemExit(f"{directory}: the text with it is not the base's own")
    return sum(told["accepted"] for told in found), sum(told["drafted"] for told in found)


class Pair:
    """What the parts share."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.base, self.work = options, options.base, options.work
        self.work.mkdir(parents=True, exist_ok=True)
        self.checkpoint = self._made("as-extracted", lambda out: extract(options.bundle, out, dtype="f32", codes=True))
        files = standard_library_files(EVERYTHING)
        self.texts = prompts.read(files, Path(os.__file__).parent)
        self.prompts = self._asked("prompts", str)

    def _made(self, name: str, make: Callable[[Path], object]) -> Path:
        out: Path = self.work / name
        if not out.exists():
            make(out)
        return out

    def _asked(self, name: str, change: Callable[[str], str]) -> Path:
        path: Path = self.work / f"{name}.jsonl"
        rows = prompts.prompts_of(self.texts, COUNT, change=change)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    @property
    def floats(self) -> Path:
        """The checkpoint with the weights it had before they were quantized."""
        with np.load(self.options.floats) as stored:
            weights = {name: stored[name].astype(np.float32) for name in stored.files}
        plain = self._made("plain", lambda out: extract(self.options.bundle, out, dtype="f32"))
        out = self._made(
            "floats",
            lambda out: insertion.changed(plain, out, lambda name, tensor: weights[name].reshape(tensor.shape)),
        )
        # Its record is of other weights.
        (out / RECORD).unlink(missing_ok=True)
        return out

    def tune(self, mode: str, seed: int) -> Run:
        """On the base's greedy text."""
        return tuned(
            self.work,
            f"{mode}-{seed}",
            self.checkpoint,
            self.base,
            self.prompts,
            *("--mode", mode, "--seed", str(seed)),
        )

    def greedy(self) -> Iterator[Sequence[str]]:
        """Drafter, mean accepted length, its change, accepted of drafted in transformers, CPU seconds."""
        yield ("drafter", "mean accepted length", "change", "transformers' loop", "CPU s")
        for name, directory in (("float original", self.floats), ("as extracted", self.checkpoint)):
            run = as_it_is(self.work, directory.name, directory, self.base, self.prompts)
            yield (name, run.figure("before"), "", share(accepted(self.base, directory)), "")
        for mode in MODES:
            lengths, shares = [], []
            for seed in range(self.options.seeds):
                run = self.tune(mode, seed)
                lengths.append(run.length("after"))
                hits, drafted = accepted(self.base, run.directory)
                shares.append(hits / drafted)
                yield (
                    f"{mode}, seed {seed}",
                    run.figure("after"),
                    run.figure("change"),
                    share((hits, drafted)),
                    f"{run.seconds:.0f}",
                )
            yield (f"{mode}, over seeds", spread(lengths), "", spread(shares), "")

    def moved(self) -> Iterator[Sequence[str]]:
        """Drafter, base, mean accepted length, its change, CPU seconds."""
        base = self.work / "moved-base"
        record = self.work / "moved-base.json"
        if not record.is_file():
            told = moved.fine_tuned(
                self.base, [prompts.translated(text) for text in self.texts.values()], base, MOVED_STEPS
            )
            record.write_text(json.dumps(told))
        told = json.loads(record.read_text())
        asked = self._asked("moved-prompts", prompts.translated)
        yield ("drafter", "base", "mean accepted length", "change", "CPU s")
        for name, directory in (("float original", self.floats), ("as extracted", self.checkpoint)):
            own = as_it_is(self.work, directory.name, directory, self.base, self.prompts)
            yield (name, "its own", own.figure("before"), "", "")
            there = as_it_is(self.work, f"moved {directory.name}", directory, base, asked)
            yield (name, "moved", there.figure("before"), "", "")
        for mode in MODES:
            run = tuned(self.work, f"moved-{mode}", self.checkpoint, base, asked, "--mode", mode)
            yield (f"tuned, {mode}", "moved", run.figure("after"), run.figure("change"), f"{run.seconds:.0f}")
        yield (f"(the base: loss {told['first']:.2f} to {told['last']:.2f})", "", "", "", f"{told['seconds']:.0f}")

    def sampled(self) -> Iterator[Sequence[str]]:
        """Objective, mean accepted length at temperature 1, its change, the greedy one."""
        yield ("trained for", "at temperature 1", "change", "greedy")
        warm = ("--temperature", "1")
        for objective in OBJECTIVES:
            run = tuned(
                self.work,
                f"sampled-{objective}",
                self.checkpoint,
                self.base,
                self.prompts,
                *("--mode", "qat", "--objective", objective, "--force", *warm, *shared_text(self.work)),
            )
            cold = as_it_is(self.work, run.directory.name, run.directory, self.base, self.prompts)
            yield (f"{objective} at 1", run.figure("after"), run.figure("change"), cold.figure("before"))
        greedy = self.tune("qat", 0)
        there = as_it_is(self.work, f"{greedy.directory.name} at 1", greedy.directory, self.base, self.prompts, *warm)
        yield ("ce, greedy", there.figure("before"), "", greedy.figure("after"))
        cold = as_it_is(self.work, self.checkpoint.name, self.checkpoint, self.base, self.prompts)
        run = as_it_is(self.work, "as-extracted at 1", self.checkpoint, self.base, self.prompts, *warm)
        yield ("as extracted", run.figure("before"), "", cold.figure("before"))

    def engines(self) -> Iterator[Sequence[str]]:
        """Engine, format, and for both drafters accepted of drafted and whether the text is the base's own."""
        yield ("engine", "format", "as extracted", "tuned", "text the base's own")
        qat = self.tune("qat", 0).directory
        bundle = self.work / "tuned.litertlm"
        if not bundle.exists():
            insertion.inserted(qat, self.options.bundle, bundle)
        for old, new in zip(*map(self._outcomes, (self.checkpoint, qat)), strict=True):
            fine = {True: "yes", False: "no", None: "not run"}[new.identical if old.identical is not False else False]
            yield (f"{new.engine} {new.version}", new.format, told_of(old), told_of(new), fine)
        program = Path(self.options.python.get("litert-lm", "litert-lm")).with_name("litert-lm")
        if program.is_file():
            for prompt in RUNTIME_PROMPTS:
                yield self._in_the_runtime(str(program), bundle, prompt)

    def _outcomes(self, directory: Path) -> Iterator[Outcome]:
        options, python = self.options, self.options.python
        folder = self.work / f"{directory.name} formats"
        drafter = Converted(directory, folder)
        for name in engines.SCRIPTED:
            yield from engines.scripted(name, python.get(name, sys.executable), self.base, drafter)
        if options.llama and options.llama_source:
            with tempfile.TemporaryDirectory() as name:
                yield from engines.in_llama(
                    options.llama, options.llama_source, sys.executable, self.base, drafter, Path(name)
                )

    def _in_the_runtime(self, program: str, bundle: Path, prompt: str) -> Sequence[str]:
        plain, _ = insertion.run(program, self.options.bundle, prompt, False)
        rates, texts = [], []
        for source in (self.options.bundle, bundle):
            text, rate = insertion.run(program, source, prompt, True)
            rates.append("–" if rate is None else f"{rate:.4f}")
            texts.append(insertion.compared(text, plain))
        return ("litert-lm", f"bundle, {prompt!r}", *rates, "; ".join(dict.fromkeys(texts)))


class Converted(engines.Drafter):
    """A checkpoint, converted to each format when it is first asked for."""

    def written(self, name: str) -> Path:
        """The directory of what :data:`engines.WRITTEN` calls ``name``."""
        made = self._folder / name.replace(" ", "-")
        if not made.exists():
            self._folder.mkdir(exist_ok=True)
            format_, dtype = engines.WRITTEN[name]
            convert(self.source, made, format=format_, dtype=dtype)
        return made


def told_of(outcome: Outcome) -> str:
    """In a cell."""
    if not outcome.loads:
        return outcome.note
    return "loads" if outcome.drafted is None else share((outcome.accepted or 0, outcome.drafted))


def share(found: tuple[int, int]) -> str:
    """Accepted of drafted, with the quotient."""
    return f"{found[0]} of {found[1]}, {found[0] / found[1]:.3f}"


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("base", type=Path)
    parser.add_argument("floats", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--python", action="append", default=[], metavar="ENGINE=PATH")
    parser.add_argument("--llama", type=Path, help="where llama.cpp's programs are")
    parser.add_argument("--llama-source", type=Path)
    options = parser.parse_args(words)
    options.python = dict(pair.partition("=")[::2] for pair in options.python)
    return options


def main() -> None:
    """Every part that is wanted, as a table."""
    options = arguments()
    pair = Pair(options)
    for part in options.only:
        rows = getattr(pair, part)()
        print(f"\n{part}\n\n{table(next(rows), [])}", flush=True)
        for row in rows:
            print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
