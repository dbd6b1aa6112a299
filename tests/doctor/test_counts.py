"""Expected counts against the loop itself, and what a server counts cut at the end of its text."""

from __future__ import annotations

from helpers.loop_server import played

from mtp_extract.doctor.counts import expected_counts
from mtp_extract.doctor.faults import break_drafter
from mtp_extract.doctor.texts import Sample, served_counts
from mtp_extract.drafter.mtp import LITERT, MtpDrafter
from mtp_extract.serving.client import Answer
from mtp_extract.serving.counters import Counters
from mtp_extract.speculate.loop import SpeculativeGenerator
from mtp_extract.speculate.teacher import Text

NEW_TOKENS, STEPS = 32, 3


def test_greedy_counts_are_what_the_loop_counts(
    generator: SpeculativeGenerator, drafter: MtpDrafter, encoded: list[tuple[int, ...]]
) -> None:
    """Text by text and step by step, for the drafter as it is and with each thing broken that the loop can run."""
    faulty = break_drafter(drafter, LITERT, generator.base.num_layers, 2)
    chosen = {"sound": drafter, **{name: faulty[name] for name in ("early_state", "unscaled_embedding")}}
    for name, engine in chosen.items():
        loop = SpeculativeGenerator(generator.base, engine, generator.codec.tokenizer)
        results = [loop.generate(one, max_new_tokens=NEW_TOKENS, drafts=STEPS) for one in encoded[:5]]
        along = [Text((*r.prompt_tokens, *r.tokens), len(r.prompt_tokens)) for r in results]
        (pattern,) = expected_counts(generator.base, [engine], along, STEPS)
        counts = [played(result).counted for result in results]
        assert pattern.by_step is not None
        by_step = [[made.get(f"accepted_{step}", 0) for step in range(STEPS)] for made in counts]
        assert pattern.by_step.tolist() == by_step, name
        assert pattern.rounds.tolist() == [made["rounds"] for made in counts]
        assert (pattern.tokens == [made["tokens"] - 1 for made in counts]).all()


def test_drafts_beyond_the_end_of_a_text_do_not_count() -> None:
    """As vLLM counts: of ten tokens, the first is of the prompt's forward, and nine are of five rounds."""
    text = Text(tuple(range(14)), 4)
    assert len(text.anchors) == 9

    def counts(*positions: int, tokens: int = 10, stops: tuple[int, ...] = ()) -> tuple[float, list[float] | None]:
        told = Counters(rounds=5, drafted=15, accepted=sum(positions), positions=positions)
        found = served_counts([Sample(text, Answer("", tokens, None, 0.0, counted=told))], STEPS, stops)
        assert found is not None and found.tokens.tolist() == [9] and found.rounds.tolist() == [5]
        return float(found.accepted[0]), found.by_step[0].tolist() if found.by_step is not None else None

    assert counts(2, 1, 0) == (3, [2, 1, 0]), "a round without drafts is not counted by all"
    assert counts(2, 1, 1) == (4, [2, 1, 1])
    assert counts(3, 2, 1) == (4, [3, 1, 0])
    assert counts(3, 2, 0) == (4, [3, 1, 0]) and counts(3, 2, 0, stops=(13,)) == (5, [3, 2, 0])
    assert counts(4, 2, 1, tokens=11) == (6, [4, 2, 0]), "the token that ended the text is missing in it"
    assert counts(5, 5, 5) == (4, None), "no single round has so many"
