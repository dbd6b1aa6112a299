"""Agreement: whose text is drafted for, how it is counted, and what its intervals are."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from helpers.agreement import measure_agreement
from helpers.stepping import teacher_forced_by_stepping

from mtp_extract.errors import MtpExtractError, PairError
from mtp_extract.evaluate.agreement import (
    Continuations,
    figures,
)
from mtp_extract.evaluate.intervals import difference_interval, share_interval
from mtp_extract.evaluate.measured import Measured, compare, difference_over_texts, share_over_texts
from mtp_extract.evaluate.prompts import Prompt, encode_prompts
from mtp_extract.io.typed import Figure
from mtp_extract.speculate.codec import Codec
from mtp_extract.speculate.loop import SpeculativeGenerator
from mtp_extract.speculate.teacher import Agreement, Text
from mtp_extract.validation.acceptance.trivial import compare_trivial

# They share the pair, and a whole validation of it.
pytestmark = pytest.mark.xdist_group("validation")

STEPS = 3
NOTHING = Agreement(*torch.zeros(2, 5, dtype=torch.long), *torch.zeros(3, 5, 1, dtype=torch.long))


@pytest.fixture(scope="module")
def agreement(generator: SpeculativeGenerator, continuations: Continuations) -> Agreement:
    return measure_agreement(generator.base, generator.drafter, continuations, STEPS, batch=3)


def test_texts_are_the_bases_own(generator: SpeculativeGenerator, continuations: Continuations) -> None:
    for text in continuations.texts:
        length = text.prompt_length
        inputs = torch.tensor([text.tokens[:length]])
        own = generator.base.model.generate(inputs, max_new_tokens=len(text.tokens) - length, do_sample=False)
        assert own[0].tolist() == list(text.tokens)


def test_order_and_batches_change_nothing(
    generator: SpeculativeGenerator, continuations: Continuations, agreement: Agreement
) -> None:
    stepped = teacher_forced_by_stepping(generator.base, generator.drafter, list(continuations.texts), STEPS)
    order = torch.argsort(agreement.text * 10_000 + agreement.anchor)
    assert torch.equal(agreement.text[order], stepped.text)
    assert torch.equal(agreement.anchor[order], stepped.anchor)
    assert torch.equal(agreement.drafts[order], stepped.drafts)
    assert torch.equal(agreement.targets[order], stepped.targets)


def test_workloads_add_up(continuations: Continuations, agreement: Agreement) -> None:
    whole = figures(agreement)
    parts = [figures(agreement, continuations.of_workload(name)) for name in continuations.workloads]
    assert continuations.workloads == ("code", "prose")
    assert [part.texts for part in parts] == [4, 3]
    assert sum(part.n for part in parts) == whole.n == len(agreement.text)
    for step in range(STEPS):
        for name in ("top1", "top5", "conditional"):
            counted = [getattr(part.steps[step], name) for part in parts]
            total = getattr(whole.steps[step], name)
            assert sum(p.value * p.n for p in counted) == pytest.approx(total.value * total.n)
            assert sum(p.n for p in counted) == total.n


def test_figures_by_hand() -> None:
    drafts = torch.tensor([[1, 2], [1, 9], [9, 2], [1, 2]])
    targets = torch.tensor([[1, 2], [1, 2], [1, 2], [1, -1]])
    found = figures(
        Agreement(torch.tensor([0, 0, 1, 1]), torch.arange(4), drafts, targets, torch.tensor([[True, False]] * 4))
    )
    first, second = found.steps
    assert (first.top1.value, first.top1.n) == (3 / 4, 4)
    assert (first.top5.value, second.top5.value) == (1, 0)
    assert (second.top1.value, second.top1.n) == (2 / 3, 3)
    assert (second.conditional.value, second.conditional.n) == (1 / 2, 2)
    # Of the three rounds that have both targets: 2, 1 and 0 drafts.
    assert found.teacher_forced == Figure(1 + 3 / 3, 3)
    assert (found.texts, found.n) == (2, 4)


def test_nothing_to_draft_from(generator: SpeculativeGenerator) -> None:
    from mtp_extract.errors import PairError

    short = Continuations((Prompt("w", "a"),), (Text((2, 3), 1),))
    with pytest.raises(PairError, match="generate longer continuations"):
        measure_agreement(generator.base, generator.drafter, short, 1, batch=2)


def test_interval_over_texts() -> None:
    # One value a text is one draw a text, and the same value many times in a text says no more than once.
    values = torch.tensor([1.0, 0.0, 0.5, 1.0, 0.25, 0.75])
    found = share_over_texts(torch.arange(6), values)
    assert found is not None
    assert found == share_interval(values.tolist(), [1] * 6)
    repeated = share_over_texts(torch.arange(6).repeat_interleave(50), values.repeat_interleave(50))
    assert repeated is not None
    assert repeated == pytest.approx(found, abs=0.08)
    assert share_over_texts(torch.arange(4).repeat_interleave(5), torch.ones(20)) is None
    gap = difference_over_texts(torch.arange(6), values - 0.5)
    assert gap == difference_interval([0.5, 0, 0, 0.5, 0, 0.25], [0, 0.5, 0, 0, 0.25, 0], [1] * 6)


def test_a_text_that_repeats_another_is_not_counted(
    generator: SpeculativeGenerator, continuations: Continuations
) -> None:
    """Neither in shares and lengths, nor in their intervals, nor by a trivial drafter, which would know its future."""
    twice = Continuations(continuations.prompts * 2, continuations.texts * 2)
    assert continuations.repeats == frozenset()
    assert twice.repeats == set(range(7, 14))
    once, again = (
        measure_agreement(generator.base, generator.drafter, one, STEPS, batch=3) for one in (continuations, twice)
    )
    assert figures(once) == figures(again)
    assert compare_trivial(continuations, once) == compare_trivial(twice, again)


def test_prompts_are_opened_once(generator: SpeculativeGenerator) -> None:
    codec, tokenizer = generator.codec, generator.codec.tokenizer
    plain, chat = (encode_prompts([Prompt("w", "hello")], codec, chat_template=on)[0] for on in (False, True))
    assert plain[0] == chat[0] == tokenizer.bos_token_id
    assert plain.count(tokenizer.bos_token_id) == chat.count(tokenizer.bos_token_id) == 1
    assert tokenizer.decode(chat[1:]) == "<|turn>user\nhello<turn|>\n<|turn>model\n"


def test_messages_go_through_the_chat_template(generator: SpeculativeGenerator) -> None:
    said = Prompt("w", ({"role": "user", "content": "hello"},))
    both = encode_prompts([Prompt("w", "hello"), said], generator.codec, chat_template=True)
    assert both[0] == both[1]
    with pytest.raises(MtpExtractError, match="where no chat template is applied, found messages"):
        encode_prompts([said], generator.codec, chat_template=False)
    bare = Codec(SimpleNamespace(bos_token_id=2), 512)
    with pytest.raises(PairError, match="expected a tokenizer with a chat template for messages"):
        encode_prompts([said], bare, chat_template=True)


def test_what_repeats_in_the_continuation_alone() -> None:
    prompt = tuple(range(12))
    loop, fresh, short = ((*prompt, *new) for new in ([5, 6] * 10, prompt, range(7)))
    prompts = (Prompt("any", "text"),) * 3
    assert Continuations(prompts[:1], (Text(loop, 12),)).repeated == 11 / 13
    assert Continuations(prompts[:1], (Text(fresh, 12),)).repeated == 0
    assert Continuations(prompts, (Text(loop, 12), Text(fresh, 12), Text(short, 12))).repeated == 11 / 18


def test_an_interval_stays_within_what_can_be() -> None:
    """Few texts that differ much say little: not that a round of 3 drafts may have -5 or 13 tokens."""
    stands = torch.tensor([[0.0, 0, 0]] * 12 + [[1.0, 1, 1]] * 12, dtype=torch.double)
    text = torch.arange(6).repeat_interleave(4)
    interval = Measured.over(text, torch.arange(24), stands).interval
    assert interval is not None
    assert 1 < interval.low < 1.6
    assert 3.4 < interval.high < 4
    assert Measured.over(text[:16], torch.arange(16), stands[:16]).interval is None


def test_what_too_few_texts_compare_is_not_decided() -> None:
    """Two texts that both get worse by as much gave an interval of no width, and a verdict."""
    before, after = (torch.full((24, 2), value, dtype=torch.double) for value in (1.0, 0.0))
    text = torch.arange(2).repeat_interleave(12)
    few = compare(Measured.over(text, torch.arange(24), before), Measured.over(text, torch.arange(24), after))
    assert (few.mean, few.interval, few.texts) == (-2, None, 2)
    assert not few.worse
    assert not few.better
    text = torch.arange(24)
    many = compare(Measured.over(text, text, before), Measured.over(text, text, after))
    assert many.worse
