"""Texts by people, and the prompts that they answer, as tokens; and what counts where texts repeat one another."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from helpers.first_pair import first_base

from mtp_extract.errors import PairError
from mtp_extract.evaluation.agreement import Acceptance
from mtp_extract.evaluation.prompts import Prompt
from mtp_extract.speculate.codec import Codec
from mtp_extract.speculate.teacher import Text
from mtp_extract.tuning import corpus
from mtp_extract.tuning.corpus import HELD_OUT, TRAINED, WATCHED, Corpus, gather_texts, was_trained_on
from mtp_extract.tuning.pair import Pair
from mtp_extract.tuning.plan import TuningPlan
from mtp_extract.tuning.text import Writer, encode_human_texts

from .conftest import Plans, choose_sources, write_rows

ANSWER = "It is the light that comes from all sides, scattered by the air.\n"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(first_base())


def make_writer(tokenizer: Any, *, chat: bool = True, length: int = 100) -> Writer:
    pair: Any = SimpleNamespace(
        codec=Codec(tokenizer, len(tokenizer)), plan=TuningPlan(Path("drafter"), "base", chat_template=chat)
    )
    return Writer(pair, 0.0, length)


def encode_chat(tokenizer: Any, *messages: dict[str, str]) -> tuple[int, ...]:
    text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_an_answer_is_the_target(tokenizer: Any) -> None:
    """It follows the prompt, with the chat template or without."""
    user, system = {"role": "user", "content": "Why?"}, {"role": "system", "content": "Be brief."}
    answer = tuple(tokenizer(ANSWER, add_special_tokens=False)["input_ids"])
    short, long = Prompt("w", "Why?", completion=ANSWER), Prompt("w", (system, user), completion=ANSWER)
    plain = (tokenizer.bos_token_id, *tokenizer("Why?", add_special_tokens=False)["input_ids"])
    for item, chatting, prompt in (
        (short, True, encode_chat(tokenizer, user)),
        (long, True, encode_chat(tokenizer, system, user)),
        (short, False, plain),
    ):
        assert encode_human_texts(item, make_writer(tokenizer, chat=chatting)) == [
            Text((*prompt, *answer), len(prompt))
        ]
    assert encode_human_texts(Prompt("w", "Why?"), make_writer(tokenizer)) == [Text(plain, 1)]
    with pytest.raises(PairError, match=r"messages that end in an answer, found messages without one, .*Why"):
        encode_human_texts(Prompt("w", (user,)), make_writer(tokenizer))


def test_human_text_is_cut_into_windows_and_an_answer_is_not(tokenizer: Any) -> None:
    text, answered = Prompt("w", ANSWER), Prompt("w", "Why?", completion=ANSWER)
    short = make_writer(tokenizer, length=5)
    assert encode_human_texts(answered, short) == encode_human_texts(answered, make_writer(tokenizer))
    (complete,), windows = encode_human_texts(text, make_writer(tokenizer)), encode_human_texts(text, short)
    assert len(windows) > 3 and {len(window.continuation) for window in windows[:-1]} == {5}
    assert [token for window in windows for token in window.continuation] == list(complete.continuation)
    assert {window.tokens[0] for window in windows} == {tokenizer.bos_token_id}


def test_repeated_texts_are_dropped(plan: Plans, tmp_path: Path) -> None:
    """Texts that end alike are repeats, on whichever side they are."""
    tail = "".join(f"    self.item_{number} = {number}\n" for number in range(8))
    rows = []
    for sources in choose_sources(map("file {}".format, range(1000)), {TRAINED: 7, WATCHED: 8, HELD_OUT: 9}):
        for number, source in enumerate(sources):
            # The first two of each side end alike, and the next two.
            ending = (tail, tail, tail[::-1], tail[::-1])[number] if number < 4 else source * 16
            rows.append({"prompt": f"class {source}:\n{ending}", "source": source})
    path = write_rows(tmp_path / "texts.jsonl", rows)
    texts = gather_texts(Pair(plan(tmp_path / "tuned", prompts=None, text=path, new_tokens=160)))
    # Of those that end alike the first trained ones are left.
    assert (len(texts.trained), len(texts.watched), texts.own_count) == (7 - 2, 8 - 4, 9 - 4)
    tails = [text.tokens[-48:] for text in (*texts.trained, *texts.watched, *(text for _, text in texts.held_out))]
    assert len(set(tails)) == len(tails)


def test_held_out_text_repeats_no_other_kind(plan: Plans, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A held-out text may end like sampled text, or like text written from within that."""
    pair = Pair(plan(tmp_path / "tuned"))
    once = gather_texts(pair)
    monkeypatch.setattr(corpus, "_write_further_kinds", lambda *of: [[once.held_out[0][1]]])
    again = gather_texts(pair)
    assert again.kinds[1] == (once.held_out[0][1],) and again.held_out == once.held_out[1:]


def test_kinds_of_text(plan: Plans, tmp_path: Path) -> None:
    """Greedy serving has greedy text, sampled text, and greedy text from within the sampled one."""
    texts = gather_texts(Pair(plan(tmp_path / "tuned")))
    served, drawn, branches = texts.kinds
    assert texts.trained == (*served, *drawn, *branches)
    assert {text.prompt_length for text in drawn} == {1}
    assert {text.prompt_length for text in served} != {1}
    for branch in branches:
        assert 0 < len(branch.continuation) <= 8
        assert any(branch.prompt == text.tokens[: branch.prompt_length] for text in drawn)
    # The base goes on greedily from there, which is seldom what it drew.
    assert any(branch.tokens[: len(text.tokens)] != text.tokens for branch in branches for text in drawn)
    sampled = gather_texts(Pair(plan(tmp_path / "tuned", temperature=0.7)))
    assert len(sampled.kinds) == 2 and {text.prompt_length for text in sampled.kinds[1]} == {1}


def test_half_of_the_score_is_where_training_has_seen_nothing() -> None:
    """A drafter that is perfect on trained text and useless elsewhere has the middle score."""
    untrained = [Text(tuple(range(100 + 40 * n, 130 + 40 * n)), 1) for n in range(5)]
    watched = (*(Text((*range(30), 300 + n), 1) for n in range(5)), *untrained)
    trained, text = Corpus(((Text(tuple(range(30)), 1),),), watched, (), 0), torch.arange(10).repeat_interleave(10)
    measured = Acceptance.from_stands(text, torch.arange(10, 20).repeat(10), (text < 5).double()[:, None].expand(-1, 3))
    assert trained.compute_score(measured) == pytest.approx((4 + 1) / 2)
    few = measured.of([0, 1, 2, 3, 4, 5])
    assert trained.compute_score(few) == few.teacher_forced > 4 - 1


@pytest.mark.parametrize("steps", [1, 3, 7, 9])
def test_eight_tokens_decide_what_was_trained_on(steps: int) -> None:
    generator = torch.Generator().manual_seed(1)

    def drawn(length: int) -> Text:
        return Text(tuple(torch.randint(3, (length,), generator=generator).tolist()), 2)

    trained, texts = [drawn(60) for _ in range(40)], [drawn(length) for length in (30, 12, 50)]
    # What begins a text, and is shorter than eight, is seen where another begins with it.
    texts.append(Text((*trained[0].tokens[:6], *texts[0].tokens), 2))
    places = [(index, n) for index, text in enumerate(texts) for n in text.anchors if n + steps < len(text.tokens)]
    index, anchor = torch.tensor(places).T
    nothing = torch.zeros(len(places), steps, dtype=torch.double)
    on_trained = was_trained_on(
        Acceptance.from_stands(index, anchor, nothing), texts, Corpus((tuple(trained),), (), (), 0).sequences
    )

    def stands(number: int, n: int) -> bool:
        last = n + min(steps, 7)
        tokens, at = texts[number].tokens[max(0, last - 7) : last + 1], range(53 if last >= 7 else 1)
        return any(text.tokens[first : first + len(tokens)] == tokens for text in trained for first in at)

    assert on_trained.tolist() == [stands(number, n) for number, n in places]
    assert 0.1 < float(on_trained.double().mean()) < 0.9
    assert not was_trained_on(
        Acceptance.from_stands(index, anchor, nothing), texts, Corpus((), (), (), 0).sequences
    ).any()
