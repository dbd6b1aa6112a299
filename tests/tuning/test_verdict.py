"""What is kept: what takes fewer rounds, and harms nothing that was measured; too few texts decide neither."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import typer
from torch import Tensor

from mtp_extract.cli import tune
from mtp_extract.cli.tune import _show_comparisons
from mtp_extract.evaluation.agreement import Acceptance
from mtp_extract.evaluation.prompts import Prompt
from mtp_extract.speculate.teacher import Text
from mtp_extract.tuning.corpus import Corpus
from mtp_extract.tuning.plan import TuningPlan
from mtp_extract.tuning.run import Outcome
from mtp_extract.tuning.verdict import Comparisons

ANCHORS, K = 30, 2


def measure(texts: int, accepted: float | Tensor) -> Acceptance:
    """Return rounds of two drafts, both accepted in the share ``accepted``: of all texts, or of each."""
    rates = torch.as_tensor(accepted).expand(texts).repeat_interleave(ANCHORS)
    stands = (torch.arange(texts * ANCHORS) % 10 < 10 * rates).double()
    text = torch.arange(texts).repeat_interleave(ANCHORS)
    return Acceptance.from_stands(text, 1 + torch.arange(len(text)) % ANCHORS, stands[:, None].expand(-1, K).clone())


def make_text(number: int, words: int = 3 * ANCHORS) -> Text:
    """Return a text that shares no eight tokens with another."""
    return Text(tuple(number * 1000 + index for index in range(words)), 1)


def compare(
    workloads: Sequence[str], own_count: int, before: Acceptance, after: Acceptance, trained: Sequence[Text] = ()
) -> Comparisons:
    held_out = tuple((Prompt(name, f"text {number}"), make_text(number)) for number, name in enumerate(workloads))
    return Comparisons.of(Corpus((tuple(trained),), (), held_out, own_count), before, after)


def test_few_texts_show_no_gain() -> None:
    few, many = (compare(("code",) * n, n, measure(n, 0.3), measure(n, 0.8)) for n in (4, 20))
    (reason,) = few.list_refusals()
    assert reason.startswith("it is not shown to take fewer rounds on held-out text (")
    assert reason.endswith("teacher-forced +1.000, not decided: 4 texts, at least 5 are needed)")
    assert not list(many.list_refusals())


def test_undecided_harm_is_noted() -> None:
    """Nothing is decided on a workload of one text, nor where training has seen every position."""
    both, trained = (measure(37, 0.3), measure(37, 0.8)), [make_text(number) for number in range(37)]
    of = (*["code"] * 30, "prose", *["chat (shipped)"] * 6), ("code",) * 37
    few, enough, known = compare(of[0], 30, *both), compare(of[1], 30, *both), compare(of[1], 37, *both, trained)
    assert not [*few.list_refusals(), *enough.list_refusals(), *known.list_refusals()]
    assert "too few held-out texts: prose (1)." in "".join(few.describe_undecided()) and not list(
        enough.describe_undecided()
    )
    assert known.unseen is None and "what no training text has (0)" in "".join(known.describe_undecided())


def test_harm_on_a_workload_refuses() -> None:
    before, after = measure(40, 0.5), measure(40, torch.tensor([0.9] * 20 + [0.0] * 20))
    comparisons = compare(
        (*["code"] * 20, *["prose"] * 20), 20, before, after, [make_text(number) for number in range(40)]
    )
    (reason,) = comparisons.list_refusals()
    assert reason.startswith("it is worse on prose (-1.000, -")


def test_longer_drafts_in_as_many_rounds_are_no_gain() -> None:
    """Drafts improve only where no round begins."""
    even = (torch.arange(20 * ANCHORS) % 2 == 0)[:, None]
    both, places = torch.ones(20 * ANCHORS, K, dtype=torch.double), measure(20, 0.0)
    before = Acceptance.from_stands(places.text, places.anchor, both * even * torch.tensor([1, 0]))
    after = Acceptance.from_stands(places.text, places.anchor, both * ~even)
    comparisons = compare(("code",) * 20, 20, before, after)
    assert comparisons.overall.change.interval and comparisons.overall.change.interval.low > 0
    (reason,) = comparisons.list_refusals()
    assert "(300 before, 320 after: ratio 0.938, 0." in reason


def test_a_gain_on_trained_sequences_alone_refuses() -> None:
    """Half of each text stands in a trained one: there it gains, and elsewhere it loses a little too much."""
    before, halves = measure(40, 0.5), torch.arange(40 * ANCHORS) % ANCHORS < ANCHORS // 2
    stands = before.stands.clone()
    stands[halves] = 1
    lost = torch.arange(40 * ANCHORS) % ANCHORS == ANCHORS - 6
    assert bool(stands[lost].all())
    stands[lost] = 0
    after = Acceptance.from_stands(before.text, before.anchor, stands)
    # Sequences of eight that end at most at an anchor in the first half, and two drafts.
    trained = [Text(make_text(number).tokens[: 1 + ANCHORS // 2 + K], 1) for number in range(40)]
    comparisons = compare(("code",) * 40, 40, before, after, trained)
    assert comparisons.unseen and comparisons.unseen.anchors == 20 * ANCHORS
    assert comparisons.unseen.change.interval and comparisons.unseen.change.interval.high < 0
    (reason,) = comparisons.list_refusals()
    assert reason.startswith("it may lose more than 0.05 teacher-forced tokens per round where drafts continue what no")
    assert not list(compare(("code",) * 40, 40, before, after, [make_text(n) for n in range(40)]).list_refusals())


def test_it_is_shown_on_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    """Rounds come first; lines have at most 100 columns with any names."""
    before, after = measure(40, 0.5), measure(40, torch.tensor([0.9] * 20 + [0.0] * 20))
    comparisons = compare((*["code" * 20] * 20, *["prose\x1b[2J"] * 20), 20, before, after)
    _show_comparisons(comparisons, TuningPlan(Path("drafter"), "base"))
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert "\x1b" not in shown and max(map(len, lines)) <= 100 and len(lines) < 24
    assert " ".join(lines[2].split()) == "rounds, before for one after 20 360 240 x 1.500 (1.500 to 1.500)"
    assert shown.count("text 2") == 3


def test_a_tuning_in_which_nothing_changed_says_so_without_a_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    same = compare(("code",) * 20, 20, measure(20, 0.5), measure(20, 0.5))
    corpus = Corpus(((make_text(0),),), (), (), 0)
    record = {"best_step": 0, "steps_done": 40, "numbers": 8, "interrupted": False}
    refused = tuple(same.list_refusals())
    outcome = Outcome(None, refused, same, corpus, record, ("of the base",))
    monkeypatch.setattr("mtp_extract.api.tune", lambda *_: outcome)
    with pytest.raises(typer.Exit) as end:
        tune.tune_command(directory=Path("drafter"), base="base", out=Path("tuned"))
    assert end.value.exit_code == 1
    shown = capsys.readouterr()
    first, *others = " ".join(shown.out.split()).split(" Note: ")
    assert first == (
        "Nothing changed: no step of 40 made it draft better on the watched texts. It stays as it was: 1.667 tokens "
        "per round on 20 held-out texts."
    )
    assert others == ["of the base"]
    assert "tuned: nothing was saved: nothing changed. Tune on more or other text" in " ".join(shown.err.split())
