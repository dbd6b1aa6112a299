"""Generation: greedy text is the base's own, in every mode; the account adds up."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from helpers.first_pair import first_bundle
from helpers.random_pairs import Pair, base_alone, random_base, random_drafter
from transformers import Gemma4AssistantForCausalLM
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

import mtp_extract
from mtp_extract.architecture.config import OrderedHeadConfig
from mtp_extract.architecture.roles import roles_of
from mtp_extract.drafter.load import build_drafter
from mtp_extract.drafter.masks import LITERT, TRANSFORMERS
from mtp_extract.drafter.mtp import Altered
from mtp_extract.errors import MtpExtractError
from mtp_extract.speculate.adaptive import AdaptiveDrafts, DraftLength
from mtp_extract.speculate.arithmetic import Proportion
from mtp_extract.speculate.generate import Options, SpeculativeGenerator
from mtp_extract.speculate.result import Generation, Round, conditional_by_step, unconditional_by_step
from mtp_extract.speculate.sampling import Sampling

TOKENS = 80
"""Generated in most tests: five windows of the trained base."""


def counts(result: Generation) -> list[tuple[int, int]]:
    return [(r.drafted, r.accepted) for r in result.rounds]


@pytest.mark.parametrize("drafts", [0, 1, 2, 4, 8])
def test_greedy_text_is_the_base_s_own(pair: Pair, drafts: int) -> None:
    """One by one with four drafts; that a batch is its sequences is a test of its own."""
    generator, prompts = pair.generator, pair.prompts()
    if drafts == 4:
        results = [generator.generate(prompt, max_new_tokens=TOKENS, drafts=drafts) for prompt in prompts]
    else:
        results = generator.generate_batch(prompts, Options(max_new_tokens=TOKENS, drafts=drafts))
    for prompt, result in zip(prompts, results, strict=True):
        assert result.tokens == pair.alone(prompt, TOKENS)
        assert result.text == pair.tokenizer.decode(result.tokens, skip_special_tokens=True)
        assert result.prompt_tokens == prompt
        assert (result.drafted > 0) == (drafts > 0)


@pytest.mark.parametrize("convention", [LITERT, TRANSFORMERS])
def test_acceptance_of_the_sample(pair: Pair, convention: Any) -> None:
    """Google's runtime, whose cache holds 256 tokens, prints 0.6625 here: 159 of 80 rounds of 3, BOS first.

    Its base is quantized and its text differs a little; transformers' own loop over this base gives 0.675.
    """
    generator = SpeculativeGenerator(pair.base, Altered(pair.drafter, convention), pair.tokenizer)
    prompt = pair.prompts()[0]
    assert pair.tokenizer.decode(prompt[1:]) == "class Foo(object):"
    result = generator.generate(prompt, max_new_tokens=256 - len(prompt), drafts=3)
    assert result.acceptance == pytest.approx(0.66, abs=0.03)
    assert result.acceptance == result.accepted / result.drafted
    assert all(r.drafted == 3 for r in result.rounds[:-1])
    assert result.mean_accepted_length == pytest.approx(1 + 3 * 0.66, abs=0.1)


def test_first_round_drafts_are_those_of_transformers(pair: Pair, tmp_path: Any) -> None:
    """Right after the prompt nothing is stale: the TRANSFORMERS convention drafts exactly what transformers does."""
    mtp_extract.extract(first_bundle(), tmp_path / "drafter", format="transformers", dtype="f32")
    assistant = Gemma4AssistantForCausalLM.from_pretrained(tmp_path / "drafter").eval()
    assistant.generation_config.num_assistant_tokens = 5
    seen: list[list[int]] = []
    for prompt in pair.prompts():
        ids = torch.tensor([prompt])
        with torch.no_grad():
            out = pair.base(ids, output_hidden_states=True, return_shared_kv_states=True)
            known = torch.cat((ids, out.logits[:, -1:].argmax(-1)), dim=1)
            config = pair.base.generation_config
            theirs = SinglePositionMultiTokenCandidateGenerator(assistant, pair.base.get_input_embeddings(), config)
            theirs.main_model_max_length = 10_000
            kwargs = {"attention_mask": torch.ones_like(known)}
            candidates, _ = theirs.get_candidates(known, kwargs, out, is_first_iteration=False, n_last_matches=0)
        expected = candidates[0, known.shape[1] :].tolist()
        seen.append(_first_drafts(pair, prompt, 5))
        assert seen[-1] == expected
    assert len({tuple(drafts) for drafts in seen}) > 2


def _first_drafts(pair: Pair, prompt: tuple[int, ...], drafts: int) -> list[int]:
    """What is proposed in the first round, read from the logits of the drafter's LM head."""
    proposed: list[int] = []

    def note(_module: Any, _inputs: Any, logits: torch.Tensor) -> None:
        proposed.append(int(logits[0, -1].argmax()))

    handle = pair.drafter.lm_head.register_forward_hook(note)
    try:
        generator = SpeculativeGenerator(pair.base, Altered(pair.drafter, TRANSFORMERS))
        generator.generate(prompt, max_new_tokens=drafts + 2, drafts=drafts)
    finally:
        handle.remove()
    return proposed[:drafts]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sliding_window": 2},
        {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
        {"hidden_size_per_layer_input": 6, "final_logit_softcapping": None},
        {"num_kv_shared_layers": 0},
    ],
)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_greedy_identity_for_other_bases(attention: str, changes: dict[str, Any]) -> None:
    """Random bases: the drafter is nearly always wrong, so every round rolls back."""
    base = random_base(attention=attention, **changes)
    generator = SpeculativeGenerator(base, random_drafter(base))
    for prompt in ((1,), tuple(range(17))):
        expected = base_alone(base, prompt, 40)
        assert generator.generate(prompt, max_new_tokens=40, drafts=4).tokens == expected


def test_an_ordered_head_drafts_too() -> None:
    base = random_base()
    drafter = random_drafter(base, ordered_head=OrderedHeadConfig(num_centroids=8, top_k=2))
    assert drafter.ordered_head is not None
    drafter.ordered_head.token_ordering.copy_(torch.randperm(40))
    generator = SpeculativeGenerator(base, drafter)
    assert generator.generate((3, 4), max_new_tokens=30).tokens == base_alone(base, (3, 4), 30)


def test_a_batch_is_its_sequences_one_by_one(pair: Pair) -> None:
    """Prompts of different lengths, ends at different times: the same tokens, and the same account of every round."""
    generator = pair.generator
    prompts = pair.prompts()
    lone = [generator.generate(prompt, max_new_tokens=TOKENS, stop_token_ids=[]) for prompt in prompts]
    stop = sorted({token for result in lone for token in result.tokens}, key=lambda t: sum(t in r.tokens for r in lone))
    stops = stop[:4]  # rare tokens, so that some sequences stop early and others run on
    options = Options(max_new_tokens=TOKENS, stop_token_ids=stops)
    together = generator.generate_batch(prompts, options)
    alone = [generator.generate(prompt, max_new_tokens=TOKENS, stop_token_ids=stops) for prompt in prompts]
    assert [r.tokens for r in together] == [r.tokens for r in alone]
    assert [counts(r) for r in together] == [counts(r) for r in alone]
    assert [r.finish_reason for r in together] == [r.finish_reason for r in alone]
    assert {r.finish_reason for r in together} == {"stop", "length"}
    assert len({len(r.rounds) for r in together}) > 2


def test_a_sampled_batch_is_reproducible_and_rows_differ(pair: Pair) -> None:
    prompt = pair.prompts()[0]
    options = Options(max_new_tokens=30, sampling=Sampling(temperature=1.0), seed=7)
    first, again = (pair.generator.generate_batch([prompt] * 3, options) for _ in range(2))
    assert [r.tokens for r in first] == [r.tokens for r in again]
    assert len({r.tokens for r in first}) == 3
    other = pair.generator.generate(prompt, max_new_tokens=30, temperature=1.0, seed=8)
    assert other.tokens != first[0].tokens
    lone = pair.generator.generate(prompt, max_new_tokens=30, temperature=1.0, seed=7)
    assert lone.tokens == first[0].tokens


@pytest.mark.parametrize("drafts", [3, AdaptiveDrafts(most=6)])
def test_the_account_adds_up(pair: Pair, drafts: int | AdaptiveDrafts) -> None:
    for prompt in pair.prompts()[:3]:
        result = pair.generator.generate(prompt, max_new_tokens=TOKENS, drafts=drafts)
        assert len(result.tokens) == 1 + sum(r.emitted for r in result.rounds) == TOKENS
        assert result.finish_reason == "length"
        assert all(0 <= r.accepted <= r.drafted for r in result.rounds)
        assert all(r.emitted == r.accepted + 1 for r in result.rounds)
        assert (result.drafted, result.accepted) == tuple(map(sum, zip(*counts(result), strict=True)))
        steps = result.unconditional
        assert steps[0].trials == sum(r.drafted > 0 for r in result.rounds)
        assert sum(step.successes for step in steps) == result.accepted
        assert result.conditional[0] == steps[0]
        assert result.conditional[1].trials == sum(r.accepted >= 1 and r.drafted >= 2 for r in result.rounds)
        assert result.conditional[1].successes == steps[1].successes
        assert result.draft_ms >= 0 < result.verify_ms
        assert result.prefill_ms > 0


def test_rates_by_step() -> None:
    rounds = [Round(3, n, n + 1, 0.0, 0.0) for n in (3, 1, 0, 3)] + [Round(1, 1, 2, 0.0, 0.0), Round(0, 0, 1, 0.0, 0.0)]
    assert unconditional_by_step(rounds) == [Proportion(4, 5), Proportion(2, 4), Proportion(2, 4)]
    assert conditional_by_step(rounds) == [Proportion(4, 5), Proportion(2, 3), Proportion(2, 2)]


def test_no_draft_is_made_that_could_not_be_emitted(pair: Pair) -> None:
    """As in transformers: with n tokens left to generate at most n - 1 are drafted."""
    prompt = pair.prompts()[0]
    for tokens in (1, 2, 3):
        result = pair.generator.generate(prompt, max_new_tokens=tokens, drafts=5)
        assert len(result.tokens) == tokens
        left = tokens - 1
        for r in result.rounds:
            assert r.drafted == left - 1
            left -= r.emitted


def test_a_stop_token_ends_the_text_wherever_it_falls(pair: Pair) -> None:
    """At the first token, at the base's own after a round, and among accepted drafts."""
    prompt = pair.prompts()[1]
    whole = pair.alone(prompt, TOKENS)
    ends = set()
    for place in range(12):
        expected = whole[: whole.index(whole[place]) + 1]
        stops = [whole[place]]
        result = pair.generator.generate(prompt, max_new_tokens=TOKENS, drafts=4, stop_token_ids=stops)
        assert result.tokens == expected
        assert result.finish_reason == "stop"
        assert len(result.tokens) == 1 + sum(r.emitted for r in result.rounds)
        assert all(r.emitted == r.accepted + 1 for r in result.rounds[:-1])
        ends |= {r.emitted - r.accepted for r in result.rounds[-1:]}
    assert ends == {0, 1}


def test_the_base_s_own_stop_tokens_are_the_default(pair: Pair) -> None:
    assert pair.base.generation_config.eos_token_id == [1, 6]
    generator = pair.generator
    logits = generator.base.logits

    def stopping(hidden: torch.Tensor) -> torch.Tensor:
        out = logits(hidden)
        out[..., 6] = 1e3
        return out

    generator.base.logits = stopping  # type: ignore[method-assign]
    result = generator.generate(pair.prompts()[0])
    assert (result.tokens, result.finish_reason, result.rounds) == ((6,), "stop", ())


def test_streaming_gives_the_same_text_in_pieces(pair: Pair) -> None:
    for prompt in pair.prompts()[:2]:
        options = Options(max_new_tokens=TOKENS, drafts=4)
        chunks = list(pair.generator.stream(prompt, options))
        [whole] = pair.generator.generate_batch([prompt], options)
        assert "".join(chunk.text for chunk in chunks) == whole.text
        assert tuple(token for chunk in chunks for token in chunk.tokens) == whole.tokens
        assert [(c.round.drafted, c.round.accepted) for c in chunks if c.round] == counts(whole)
        assert chunks[0].round is None
        assert len(chunks) == 1 + len(whole.rounds)


def test_a_stream_can_be_left(pair: Pair) -> None:
    stream = pair.generator.stream(pair.prompts()[0])
    first, second = next(stream), next(stream)
    stream.close()
    assert (*first.tokens, *second.tokens) == pair.alone(pair.prompts()[0], len(first.tokens) + len(second.tokens))


def test_a_stream_holds_back_half_a_character() -> None:
    """A character split over two tokens appears once, when its last byte is there."""

    class Bytes:
        def decode(self, tokens: list[int], **_: bool) -> str:
            return bytes([(0xC3, 0xA4)[token % 2] for token in tokens]).decode(errors="replace")

        def __len__(self) -> int:
            return 40

    base = random_base()
    generator = SpeculativeGenerator(base, random_drafter(base), Bytes())
    chunks = list(generator.stream((1, 2), Options(max_new_tokens=20, drafts=1)))
    text = Bytes().decode([t for c in chunks for t in c.tokens])
    assert "".join(chunk.text for chunk in chunks) == text
    assert all(not chunk.text.endswith("\ufffd") for chunk in chunks[:-1])


def test_text_prompts_are_tokenized_as_the_tokenizer_does(pair: Pair) -> None:
    generator = pair.generator
    ids = tuple(pair.tokenizer("import os\n")["input_ids"])
    assert generator.codec.encode("import os\n").tokens == ids
    assert generator.generate("import os\n", max_new_tokens=9).prompt_tokens == ids


def test_adaptive_length_follows_acceptance() -> None:
    costs = {"draft_ms_per_step": 1.0, "verify_ms": 10.0}
    eager = DraftLength(AdaptiveDrafts(most=6, memory=0.9))
    for _ in range(40):
        eager.observe([(eager.value, eager.value)], **costs)
    assert eager.value == 6
    for _ in range(40):
        eager.observe([(eager.value, 0)], **costs)
    assert eager.value == 1
    for _ in range(60):
        eager.observe([(eager.value, eager.value)], **costs)
    assert eager.value == 6, "a length of 1 goes on learning, and comes back"


def test_adaptive_length_follows_cost() -> None:
    lengths = []
    for ratio in (0.02, 0.2, 0.8):
        length = DraftLength(AdaptiveDrafts(most=8, cost_ratio=ratio))
        for _ in range(30):
            length.observe([(length.value, min(2, length.value))], draft_ms_per_step=99.0, verify_ms=1.0)
        lengths.append(length.value)
    assert lengths == sorted(lengths, reverse=True)
    assert len(set(lengths)) > 1
    assert max(lengths) <= 4, "the third draft is never accepted; the fourth, never tried, is taken to be like the rest"


def test_adaptive_length_judges_a_step_by_the_rounds_that_reached_it() -> None:
    length = DraftLength(AdaptiveDrafts(most=4, memory=1.0))
    for _ in range(200):
        length.observe([(4, 1), (4, 4)], draft_ms_per_step=1.0, verify_ms=10.0)
    assert length.conditional == pytest.approx([1.0, 0.5, 1.0, 1.0], abs=0.02)


def test_fixed_length_stays() -> None:
    length = DraftLength(3)
    length.observe([(3, 0)] * 50, draft_ms_per_step=100.0, verify_ms=1.0)
    assert length.value == 3


def test_adaptive_text_is_the_base_s_own(pair: Pair) -> None:
    prompt = pair.prompts()[2]
    result = pair.generator.generate(prompt, max_new_tokens=TOKENS, drafts=AdaptiveDrafts(most=8, cost_ratio=0.05))
    assert result.tokens == pair.alone(prompt, TOKENS)
    assert len({r.drafted for r in result.rounds}) > 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: AdaptiveDrafts(most=0),
        lambda: AdaptiveDrafts(least=0),
        lambda: AdaptiveDrafts(memory=0),
        lambda: AdaptiveDrafts(cost_ratio=-1),
        lambda: DraftLength(-1),
        lambda: Options(max_new_tokens=0),
    ],
)
def test_options_out_of_range(make: Any) -> None:
    with pytest.raises(MtpExtractError, match="expected"):
        make()


def test_a_control_lowers_acceptance_and_not_the_text(pair: Pair) -> None:
    """A drafter fed nonsense costs speed only."""

    def no_hidden(arguments: Any, _step: int) -> Any:
        return dataclasses.replace(arguments, hidden=torch.zeros_like(arguments.hidden))

    prompt = pair.prompts()[0]
    broken = SpeculativeGenerator(pair.base, Altered(pair.drafter, transform=no_hidden), pair.tokenizer)
    worse = broken.generate(prompt, max_new_tokens=TOKENS)
    real = pair.generator.generate(prompt, max_new_tokens=TOKENS)
    assert worse.tokens == real.tokens
    assert worse.acceptance < real.acceptance - 0.2


def test_a_bfloat16_drafter_serves_a_float32_base(pair: Pair) -> None:
    config = pair.drafter.config
    names = {f"{role.name}.weight": role.names["transformers"] for role in roles_of(len(config.layers))}
    names |= {f"layers.{i}.layer_scalar": f"model.layers.{i}.layer_scalar" for i in range(len(config.layers))}
    tensors = {names[path]: tensor for path, tensor in pair.drafter.state_dict().items()}
    half = build_drafter(config, tensors, dtype=torch.bfloat16)
    prompt = pair.prompts()[0]
    result = SpeculativeGenerator(pair.base, half, pair.tokenizer).generate(prompt, max_new_tokens=TOKENS)
    assert result.tokens == pair.alone(prompt, TOKENS)
    assert result.acceptance > 0.6
