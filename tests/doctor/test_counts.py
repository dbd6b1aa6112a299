"""Expected counts against the loop itself, and against rounds that are gone through one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.counting_server import played

from mtp_extract.doctor.counts import _along, expected_counts
from mtp_extract.doctor.faults import FAULTS, Setting
from mtp_extract.doctor.server import Reply
from mtp_extract.doctor.texts import Sample, served_counts
from mtp_extract.drafter.masks import LITERT
from mtp_extract.drafter.mtp import MtpDrafter
from mtp_extract.serving.counters import Counters
from mtp_extract.speculate.loop import SpeculativeGenerator
from mtp_extract.speculate.teacher import Along, Text, chances_of_base, chances_of_text

NEW_TOKENS, STEPS = 32, 3


def test_greedy_counts_are_what_the_loop_counts(
    generator: SpeculativeGenerator, drafter: MtpDrafter, encoded: list[tuple[int, ...]]
) -> None:
    """Text by text and step by step, for the drafter as it is and with each thing broken that the loop can run."""
    setting = Setting(drafter, generator.base.num_layers, LITERT, 2)
    broken = {fault.name: fault.make(setting) for fault in FAULTS}
    chosen = {"sound": drafter, **{name: broken[name] for name in ("early_state", "unscaled_embedding")}}
    for name, engine in chosen.items():
        loop = SpeculativeGenerator(generator.base, engine, generator.codec.tokenizer)
        results = [loop.generate(one, max_new_tokens=NEW_TOKENS, drafts=STEPS) for one in encoded[:8]]
        along = [Text((*r.prompt_tokens, *r.tokens), len(r.prompt_tokens)) for r in results]
        (pattern,) = expected_counts(generator.base, [engine], along, STEPS, batch=8)
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
        found = served_counts([Sample(0, text, Reply("", tokens, told), own=True)], STEPS, stops)
        assert found is not None and found.tokens.tolist() == [9] and found.rounds.tolist() == [5]
        return float(found.accepted[0]), found.by_step[0].tolist() if found.by_step is not None else None

    assert counts(2, 1, 0) == (3, [2, 1, 0]), "a round without drafts is not counted by all"
    assert counts(2, 1, 1) == (4, [2, 1, 1])
    assert counts(3, 2, 1) == (4, [3, 1, 0])
    assert counts(3, 2, 0) == (4, [3, 1, 0]) and counts(3, 2, 0, stops=(13,)) == (5, [3, 2, 0])
    assert counts(4, 2, 1, tokens=11) == (6, [4, 2, 0]), "the token that ended the text is missing in it"
    assert counts(5, 5, 5) == (4, None), "no single round has so many"


def test_expected_rounds_are_those_of_every_outcome() -> None:
    """All outcomes of four places, each with its probability, gone through round by round."""
    generator = np.random.default_rng(1)
    stands = np.cumprod(generator.random((4, 2)), axis=1)
    wanted_rounds, wanted = 0.0, np.zeros(2)

    def go(at: int, chance: float) -> None:
        nonlocal wanted_rounds
        if at >= 4:
            return
        room = min(2, 4 - at - 1)
        wanted_rounds += chance * (room > 0)
        for accepted in range(room + 1):
            reached = 1.0 if accepted == 0 else stands[at, accepted - 1]
            more = stands[at, accepted] if accepted < room else 0.0
            wanted[:accepted] += chance * (reached - more)
            go(at + accepted + 1, chance * (reached - more))

    go(0, 1.0)
    # Chances of each step by itself, at the four anchors of a text of which one token was given.
    alone = torch.from_numpy(stands).clone()
    alone[:, 1] /= alone[:, 0]
    along = Along(torch.zeros(4, dtype=torch.long), torch.arange(1, 5), alone)
    found = _along([Text((7,) * 6, 1)], along, frozenset())
    assert found[0] == pytest.approx([wanted_rounds, *wanted])


def test_drawn_drafts_stand_as_often_as_expected(
    generator: SpeculativeGenerator, drafter: MtpDrafter, encoded: list[tuple[int, ...]]
) -> None:
    """Over texts that the loop drew, with drafts that it drew: counts lie within four standard errors."""
    options: Any = {"max_new_tokens": NEW_TOKENS, "drafts": STEPS, "temperature": 0.7}
    results = [generator.generate(one, seed=row, **options) for row, one in enumerate(encoded)]
    along = [Text((*r.prompt_tokens, *r.tokens), len(r.prompt_tokens)) for r in results]
    (pattern,) = expected_counts(generator.base, [drafter], along, STEPS, temperature=0.7, batch=24)
    apart = np.array([r.accepted for r in results]) - pattern.accepted
    assert abs(apart.sum()) < 4 * np.sqrt((apart**2).sum())
    (greedy,) = expected_counts(generator.base, [drafter], along, STEPS, batch=24)
    assert abs(np.array([r.accepted for r in results]).sum() - greedy.accepted.sum()) > 2 * abs(apart.sum())


def test_chances_are_ratios_of_the_two_distributions(
    generator: SpeculativeGenerator, drafter: MtpDrafter, encoded: list[tuple[int, ...]]
) -> None:
    """At one anchor of one text, from logits that are computed here."""
    result = generator.generate(encoded[0], max_new_tokens=8, drafts=0)
    text = Text((*result.prompt_tokens, *result.tokens), len(result.prompt_tokens))
    found = chances_of_text(generator.base, drafter, [text], 1, temperature=2.0)
    own = chances_of_base(generator.base, [text], 2.0)
    anchor = text.prompt_length + 2
    base = generator.base
    with torch.inference_mode():
        hidden = base.full_pass(torch.tensor([text.tokens])).hidden[0]
        p = torch.softmax(base.logits(hidden[anchor]) / 2.0, -1)[text.tokens[anchor + 1]]
    assert own.chance[0, anchor] == pytest.approx(float(p), rel=1e-5)
    assert bool(own.likeliest[0, anchor])
    at = found.anchor.tolist().index(anchor)
    assert 0 < float(found.values[at, 0]) <= 1
    assert found.values.shape == (len(text.anchors), 1)
