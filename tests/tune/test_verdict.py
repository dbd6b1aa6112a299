"""What is kept: what is better at 95 %, and worse on no workload; too few texts decide neither."""

from __future__ import annotations

import pytest
import torch

from mtp_extract.evaluate.measured import Measured
from mtp_extract.tune.corpus import Corpus
from mtp_extract.tune.verdict import Comparisons

ANCHORS = 30


def measured(texts: int, accepted: float) -> Measured:
    """Of that many texts, rounds of two drafts of which both stand as often as ``accepted`` says."""
    stands = (torch.arange(texts * ANCHORS) % 10 < 10 * accepted).double()
    text = torch.arange(texts).repeat_interleave(ANCHORS)
    return Measured(text, torch.arange(len(text)), stands[:, None].expand(-1, 2).clone())


def compared(workloads: tuple[str, ...], own: int, before: Measured, after: Measured) -> Comparisons:
    corpus = Corpus((), (), (), workloads, own, tuple(range(len(workloads))))
    return Comparisons.of(corpus, (before, None), (after, None))


@pytest.mark.parametrize(("texts", "kept"), [(4, False), (20, True)])
def test_few_texts_show_no_gain(texts: int, kept: bool) -> None:
    found = compared(("code",) * texts, texts, measured(texts, 0.3), measured(texts, 0.8))
    assert (found.refused() == ()) == kept
    if not kept:
        (reason,) = found.refused()
        assert reason.endswith("(mean accepted length +1.000, not decided: 4 texts, at least 5 are needed)")
        assert found.as_json()["overall"]["change"] == {"mean": 1.0, "interval": None}


def test_harm_that_could_not_be_seen_is_said() -> None:
    """On a workload of one text, nothing is shown of it, and that it is worse on none is not claimed of it."""
    workloads = (*["code"] * 20, "prose", *["chat (shipped)"] * 6)
    found = compared(workloads, 20, measured(27, 0.3), measured(27, 0.8))
    assert found.refused() == ()
    (note,) = found.notes()
    assert "not decided for those of fewer than 5 held-out texts: prose (1)." in note
    none = compared(("code",) * 27, 20, measured(27, 0.3), measured(27, 0.8))
    assert none.notes() == ()


def test_harm_on_a_workload_refuses() -> None:
    before, after = measured(40, 0.5), measured(40, 0.9)
    after.stands[20 * ANCHORS :] = 0
    found = compared((*["code"] * 20, *["prose"] * 20), 20, before, after)
    (reason,) = found.refused()
    assert reason.startswith("it is worse on prose (-1.000, -")
