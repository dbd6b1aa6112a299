"""What mtp-doctor says of engines with planted faults, and of sound ones: the tables of docs/measure.md.

    PYTHONPATH=tests python scripts/doctor_faults.py [SOUND RUNS [DIR BASE PROMPTS]]

Our own loop is the engine, with a fault of ``tests/helpers/planted_faults.py`` in it, on the packaged sample or on the
pair that is given. Texts are greedy, or drawn at temperature 0.5; drafts are the drafter's likeliest tokens. Counters
are told by step, as by vLLM, or as totals, as by llama-server; as they are, or with noise: rounds of other requests
(Poisson, 0.5 a text), and three drafts in a hundred not counted. Every second prompt is asked. With SOUND RUNS, which
differ in their seeds and take a third of the prompts each, nothing is planted.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from helpers.counting_server import played
from helpers.model_server import Written
from helpers.planted_faults import PLANTED, near_overflow

from mtp_extract.data import sample_base, sample_bundle, sample_prompts
from mtp_extract.doctor.counts import Counts, expected_counts
from mtp_extract.doctor.faults import Reference, reference
from mtp_extract.doctor.plan import DoctorPlan
from mtp_extract.doctor.result import Diagnosis, Identity, Serving
from mtp_extract.doctor.run import hold_against
from mtp_extract.doctor.texts import Sample, samples, served_counts, text_fit
from mtp_extract.doctor.verdict import Verdict, judge
from mtp_extract.drafter.load import load_drafter
from mtp_extract.drafter.mtp import MtpDrafter
from mtp_extract.drafter.protocol import Drafter
from mtp_extract.evaluate.base_model import load_base
from mtp_extract.evaluate.prompts import encode_prompts, read_prompts
from mtp_extract.pipeline.extraction import extract
from mtp_extract.serving.client import Answer
from mtp_extract.serving.counters import Counters
from mtp_extract.speculate.loop import SpeculativeGenerator
from mtp_extract.speculate.trees import Tree

STEPS, NEW_TOKENS, BATCH = 3, 48, 32
OVERFLOWS = 2.0**14
"""By how much the residual stream of the drafter that is computed in FP16 is larger."""


class Way(NamedTuple):
    """How an engine drafts."""

    name: str
    temperature: float
    drafts: int | Tree


WAYS = (
    Way("greedy", 0.0, STEPS),
    Way("likeliest", 0.5, Tree.parse("x".join("1" * STEPS))),
)
TELLS = ("steps", "totals")


class Outcome(NamedTuple):
    planted: str
    way: str
    tells: str
    noisy: bool
    texts: int
    served: float  # tokens per round
    expected: float
    rank: int  # of what was planted, among all patterns
    verdict: Verdict


class Bench:
    """A pair, and what is known of it along texts that have been looked along already."""

    def __init__(self, directory: Path, base: str, prompts: Path) -> None:
        loaded = load_base(base, "cpu")
        self.tokenizer, self.drafter = loaded.tokenizer, load_drafter(directory)
        self.generator = SpeculativeGenerator(loaded.model, self.drafter, loaded.tokenizer)
        self.encoded = encode_prompts(read_prompts(prompts), self.generator.codec, chat_template=False)
        self._known: dict[Any, Reference] = {}

    def serve(self, engine: Any, way: Way, seed: int, rows: Sequence[int]) -> list[Answer]:
        """What an engine answers to the prompts ``rows``, and counts."""
        generator = SpeculativeGenerator(self.generator.base, engine, self.tokenizer)
        settings: Any = {"max_new_tokens": NEW_TOKENS, "drafts": way.drafts, "temperature": way.temperature}
        results = [generator.generate(self.encoded[row], seed=seed + row, **settings) for row in rows]
        return [_told(played(result)) for result in results]

    def look(self, drafter: MtpDrafter, way: Way, told: Sequence[Answer], rows: Sequence[int]) -> Iterator[Any]:
        """By tells and noise: texts, reference and verdict."""
        encoded = [self.encoded[row] for row in rows]
        plan = DoctorPlan("the pair", max_tokens=NEW_TOKENS, temperature=way.temperature, batch=BATCH)
        chosen = samples(self.generator, encoded, told, plan)
        clean = served_counts(chosen, STEPS, self.generator.base.stop_token_ids)
        assert clean is not None
        known = self._reference(drafter, chosen, clean.tokens_per_round)
        text = text_fit(self.generator, chosen, plan)
        for noisy in (False, True):
            served = _noisy(clean) if noisy else clean
            for tells in TELLS:
                has = served if tells == "steps" else dataclasses.replace(served, by_step=None)
                found = Diagnosis(
                    drafter=Identity("the pair", "transformers", None),
                    base="the base",
                    settings={"drafts": STEPS, "drafts_known": True},
                    serving=Serving("the engine", "vLLM"),
                    text=text,
                )
                hold_against(found, known, has)
                yield tells, noisy, clean, known, found

    def _reference(self, drafter: MtpDrafter, chosen: Sequence[Sample], lag: float) -> Reference:
        texts = [sample.text for sample in chosen]
        key = (id(drafter), tuple(text.tokens for text in texts), max(1, round(lag)))
        if key not in self._known:

            def along(drafters: Sequence[Drafter]) -> list[Counts]:
                return expected_counts(self.generator.base, drafters, texts, STEPS, batch=BATCH)

            self._known[key] = reference(drafter, self.generator.base, along, lag=lag)
        return self._known[key]


def _told(answer: Written) -> Answer:
    made = answer.counted
    by_step = tuple(made.get(f"accepted_{step}", 0) for step in range(STEPS))
    counted = Counters(rounds=made["rounds"], drafted=made["drafted"], accepted=made["accepted"], positions=by_step)
    return Answer(answer.pieces[0], made["tokens"], 1, None, 0.0, counted=counted)


def _noisy(counts: Counts) -> Counts:
    generator = np.random.default_rng(3)
    assert counts.by_step is not None
    rounds = counts.rounds + generator.poisson(0.5, len(counts.rounds))
    by_step = generator.binomial(counts.by_step.astype(int), 0.97).astype(float)
    by_step = np.minimum.accumulate(by_step, axis=1)
    return Counts(counts.tokens, rounds, by_step.sum(1), by_step)


def outcomes(
    bench: Bench, planted: str, way: Way, *, seed: int = 1, rows: Sequence[int] | None = None
) -> Iterator[Outcome]:
    """What is said of one fault, or of ``sound``, however it is told."""
    drafter = near_overflow(bench.drafter, OVERFLOWS) if planted == "fp16_overflow" else bench.drafter
    engine = drafter if planted == "sound" else PLANTED[planted](drafter, bench.generator.base)
    chosen = range(0, len(bench.encoded), 2) if rows is None else rows
    told = bench.serve(engine, way, seed, chosen)
    for tells, noisy, clean, known, found in bench.look(drafter, way, told, chosen):
        names = [fit.name for fit in found.fits]
        rank = names.index(planted) + 1 if planted in names else 0
        lengths = clean.tokens_per_round, known.sound.tokens_per_round
        yield Outcome(planted, way.name, tells, noisy, len(clean.tokens), *lengths, rank, judge(found))


def _sample(folder: str) -> tuple[Path, str, Path]:
    directory = Path(folder) / "drafter"
    extract(str(sample_bundle()), directory, format="transformers", dtype="f32")
    return directory, str(sample_base()), sample_prompts()


def main(sound_runs: int, pair: Sequence[str]) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        place = (Path(pair[0]), pair[1], Path(pair[2])) if pair else _sample(folder)
        bench = Bench(*place)
        if sound_runs:
            _sound(bench, sound_runs)
        else:
            _planted(bench)


def _planted(bench: Bench) -> None:
    print("| planted | drafts | told | noise | texts | served | expected | verdict | suspect | rank |")
    print("|" + " --- |" * 10)
    right = Counter[tuple[str, ...]]()
    for planted in PLANTED:
        for found in (found for way in WAYS for found in outcomes(bench, planted, way)):
            verdict, noise = found.verdict, "yes" if found.noisy else "no"
            right[found.way, found.tells, noise] += verdict.suspect == planted
            print(
                f"| {planted} | {found.way} | {found.tells} | {noise} | {found.texts} | {found.served:.2f} "
                f"| {found.expected:.2f} | {verdict.outcome} | {verdict.suspect or ''} | {found.rank} |",
                flush=True,
            )
    for key, count in right.items():
        print("right suspect:", *key, f"{count} of {len(PLANTED)}")


def _sound(bench: Bench, runs: int) -> None:
    said: Counter[tuple[str, ...]] = Counter()
    for number in range(runs):
        order = np.random.default_rng(number).permutation(len(bench.encoded))
        rows, way = sorted(order[: len(order) // 3].tolist()), WAYS[number % len(WAYS)]
        for found in outcomes(bench, "sound", way, seed=number, rows=rows):
            noise = "noise" if found.noisy else "none"
            said[found.way, found.tells, noise, found.verdict.outcome, found.verdict.suspect or ""] += 1
    for key, count in sorted(said.items()):
        print("sound:", *key, count)


if __name__ == "__main__":
    numbers, places = (sys.argv[1:2], sys.argv[2:5])
    main(int(numbers[0]) if numbers else 0, places)
