"""What mtp-doctor says of engines with planted faults, and of sound ones: the figures of docs/measure.md.

    PYTHONPATH=tests python scripts/doctor_faults.py [SOUND RUNS [DIR BASE PROMPTS]]

Our own loop is the engine, with a fault of ``_planted_faults.py`` in it, on the packaged sample or on the
pair that is given. Counters are told by step, as by vLLM, or as totals, as by llama-server; as they are, or with noise:
rounds of other requests (Poisson, 0.5 a text), and three drafts in a hundred not counted. Every second prompt is asked.
With SOUND RUNS, which take a third of the prompts each, drawn by their number, nothing is planted.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _planted_faults import PLANTED, scale_residual_stream
from helpers.loop_server import played

from mtp_extract import extract
from mtp_extract.data import sample_base, sample_bundle, sample_prompts
from mtp_extract.doctor.counts import Counts
from mtp_extract.doctor.faults import ExpectedCounts, count_expected
from mtp_extract.doctor.plan import DoctorPlan
from mtp_extract.doctor.result import Diagnosis, Identity, Serving
from mtp_extract.doctor.run import compare_with_served
from mtp_extract.doctor.texts import count_served, measure_text_fit, read_samples
from mtp_extract.doctor.verdict import judge_diagnosis
from mtp_extract.drafter.load import load_drafter
from mtp_extract.evaluation.base_model import load_base
from mtp_extract.evaluation.prompts import read_prompts
from mtp_extract.serving.client import Answer
from mtp_extract.serving.counters import Counters
from mtp_extract.speculate.loop import SpeculativeGenerator

STEPS, NEW_TOKENS = 3, 48
OVERFLOWS = 2.0**14
"""By how much the residual stream of the drafter that is computed in FP16 is larger."""


class Bench:
    """A pair, and what is known of it along texts that have been looked along already."""

    def __init__(self, directory: Path, base: str, prompts: Path) -> None:
        loaded = load_base(base, "cpu")
        self.tokenizer, self.drafter = loaded.tokenizer, load_drafter(directory)
        self.generator = SpeculativeGenerator(loaded.model, self.drafter, loaded.tokenizer)
        self.encoded = [self.generator.codec.encode(prompt.content) for prompt in read_prompts(prompts)]
        self._known: dict[Any, ExpectedCounts] = {}

    def diagnoses(self, planted: str, rows: Sequence[int]) -> Iterator[tuple[str, Diagnosis]]:
        """Diagnose the fault ``planted``, or ``sound``: by the counters reported, with noise or without."""
        base = self.generator.base
        drafter = scale_residual_stream(self.drafter, OVERFLOWS) if planted == "fp16_overflow" else self.drafter
        engine = drafter if planted == "sound" else PLANTED[planted](drafter, base)
        loop, answers = SpeculativeGenerator(base, engine, self.tokenizer), list[Answer]()
        for row in rows:
            reply = played(loop.generate(self.encoded[row], max_new_tokens=NEW_TOKENS, drafts=STEPS))
            positions = tuple(reply.counted.get(f"accepted_{step}", 0) for step in range(STEPS))
            rounds, drafted, accepted, tokens = (
                reply.counted[name] for name in ("rounds", "drafted", "accepted", "tokens")
            )
            counted = Counters(rounds=rounds, drafted=drafted, accepted=accepted, positions=positions)
            answers.append(Answer(reply.pieces[0], tokens, None, 0.0, counted=counted))
        plan = DoctorPlan("the pair", "the base", max_tokens=NEW_TOKENS)
        chosen = read_samples(self.generator, [self.encoded[row] for row in rows], answers, plan)
        clean, text = count_served(chosen, STEPS, base.stop_token_ids), measure_text_fit(self.generator, chosen)
        assert clean is not None
        key = (id(drafter), tuple(sample.text.tokens for sample in chosen), max(1, round(clean.tokens_per_round)))
        if key not in self._known:
            along = [sample.text for sample in chosen]
            self._known[key] = count_expected(drafter, base, along, STEPS, lag=clean.tokens_per_round)
        for noise, served in (("no", clean), ("yes", _add_noise(clean))):
            for tells, has in (("steps", served), ("totals", replace(served, by_step=None))):
                diagnosis = Diagnosis(
                    drafter=Identity("the pair", "transformers", None),
                    base="the base",
                    settings={"drafts": STEPS, "drafts_known": True},
                    serving=Serving("the engine", "vLLM"),
                    text=text,
                )
                compare_with_served(diagnosis, self._known[key], has)
                yield f"{tells} | {noise}", judge_diagnosis(diagnosis)


def _add_noise(counts: Counts) -> Counts:
    generator = np.random.default_rng(3)
    assert counts.by_step is not None
    rounds = counts.rounds + generator.poisson(0.5, len(counts.rounds))
    by_step = generator.binomial(counts.by_step.astype(int), 0.97).astype(float)
    by_step = np.minimum.accumulate(by_step, axis=1)
    return Counts(counts.tokens, rounds, by_step.sum(1), by_step)


def diagnose_planted_faults(bench: Bench) -> None:
    """Print a line a fault, and how many suspects are right."""
    print("| planted | told | noise | verdict | suspect | rank |\n|" + " --- |" * 6)
    right = Counter[str]()
    for planted in PLANTED:
        for counters, diagnosis in bench.diagnoses(planted, range(0, len(bench.encoded), 2)):
            names = [fit.name for fit in diagnosis.fits]
            rank = names.index(planted) + 1 if planted in names else 0
            right[counters] += diagnosis.suspect == planted
            print(f"| {planted} | {counters} | {diagnosis.outcome} | {diagnosis.suspect or ''} | {rank} |", flush=True)
    for counters, count in right.items():
        print("right suspect:", counters, f"{count} of {len(PLANTED)}")


def diagnose_sound_runs(bench: Bench, runs: int) -> None:
    """Print how often each verdict is given where nothing is wrong."""
    tally = Counter[str]()
    for number in range(runs):
        order = np.random.default_rng(number).permutation(len(bench.encoded))
        for counters, diagnosis in bench.diagnoses("sound", sorted(order[: len(order) // 3].tolist())):
            tally[f"{counters} | {diagnosis.outcome} | {diagnosis.suspect or ''}"] += 1
    for key, count in sorted(tally.items()):
        print("sound:", key, count)


def main(runs: int = 0, *pair: str) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        directory, base, prompts = pair or (f"{folder}/drafter", str(sample_base()), str(sample_prompts()))
        if not pair:
            extract(str(sample_bundle()), Path(directory), format="transformers", dtype="f32")
        bench = Bench(Path(directory), base, Path(prompts))
        diagnose_sound_runs(bench, runs) if runs else diagnose_planted_faults(bench)


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 0, *sys.argv[2:5])
