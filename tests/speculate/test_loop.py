"""The loop: greedy text is the base's own, whatever is drafted; the account adds up."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from helpers.first_pair import first_bundle
from helpers.random_heads import head_config, random_head
from helpers.random_pairs import KINDS, Pair, base_alone, random_base, random_drafter
from transformers import Gemma4AssistantForCausalLM
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

import mtp_extract
from mtp_extract.drafter.mtp import LITERT, TRANSFORMERS, FaultyDrafter
from mtp_extract.speculate.drafts import AdaptiveDrafts, DraftTree
from mtp_extract.speculate.loop import Drafts, SpeculativeGenerator
from mtp_extract.speculate.teacher import Text, draft_teacher_forced

TOKENS = 80
"""Generated in most tests: five windows of the trained base."""

TREE = DraftTree.parse("3x2x2x1")
ADAPTIVE = AdaptiveDrafts(most=8, cost_ratio=0.05)


@pytest.mark.parametrize("drafts", [0, 1, 4, 8, TREE, ADAPTIVE], ids=str)
def test_greedy_text_is_the_base_s_own(pair: Pair, drafts: Drafts) -> None:
    """Whatever is drafted; and the account adds up."""
    lengths = set[int]()
    for prompt in pair.prompts():
        result = pair.generator.generate(prompt, max_new_tokens=TOKENS, drafts=drafts)
        assert result.tokens == pair.alone(prompt, TOKENS)
        assert result.text == pair.tokenizer.decode(result.tokens, skip_special_tokens=True)
        assert result.prompt_tokens == prompt
        assert all(0 <= r.accepted <= r.drafted and len(r.tokens) == r.accepted + 1 for r in result.rounds)
        assert result.tokens[1:] == tuple(token for r in result.rounds for token in r.tokens)
        assert all(r.draft_ms >= 0 < r.verify_ms for r in result.rounds) and result.prefill_ms > 0
        lengths |= {r.drafted for r in result.rounds[:-8]}
    assert (
        len(lengths) > 1
        if drafts == ADAPTIVE
        else lengths == {drafts.depth if isinstance(drafts, DraftTree) else drafts}
    )


BASES: dict[str, dict[str, Any]] = {
    **KINDS,
    "a window smaller than the tree": {"sliding_window": 2},
    "no soft cap": {"final_logit_softcapping": None},
    "K for V": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
}


@pytest.mark.parametrize("kind", BASES)
@pytest.mark.parametrize("head", [False, True], ids=["mtp", "eagle3"])
def test_it_is_beside_other_bases(kind: str, head: bool) -> None:
    """Random ones, of six tokens so that some drafts stand: rounds roll back everywhere, past the windows too."""
    base = random_base(tie_word_embeddings=False, vocab_size=6, vocab_size_per_layer_input=6, **BASES[kind])
    drafter = random_head(head_config(vocab_size=6, draft_vocab_size=5)) if head else random_drafter(base)
    generator = SpeculativeGenerator(base, drafter)
    for prompt in ((1,), tuple(n % 6 for n in range(17))):
        expected = base_alone(base, prompt, 36)
        for drafts in (4, TREE, AdaptiveDrafts(most=6)):
            result = generator.generate(prompt, max_new_tokens=36, drafts=drafts)
            assert result.tokens == expected


@pytest.mark.parametrize("convention", [LITERT, TRANSFORMERS])
def test_acceptance_of_the_sample(pair: Pair, convention: Any) -> None:
    """Google's runtime, whose cache holds 256 tokens, prints 0.6625 here: 159 of 80 rounds of 3, BOS first.

    Its base is quantized and its text differs a little; transformers' own loop over this base gives 0.675.
    """
    generator = SpeculativeGenerator(pair.base, FaultyDrafter(pair.drafter, convention), pair.tokenizer)
    prompt = pair.prompts()[0]
    assert pair.tokenizer.decode(prompt[1:]) == "class Foo(object):"
    result = generator.generate(prompt, max_new_tokens=256 - len(prompt), drafts=3)
    assert result.accepted / result.drafted == pytest.approx(0.66, abs=0.03)
    assert all(r.drafted == 3 for r in result.rounds[:-1])
    assert result.tokens_per_round == pytest.approx(1 + 3 * 0.66, abs=0.1)


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
            kwargs = {"attention_mask": torch.ones_like(known)}
            given = {
                "assistant_model": assistant,
                "target_model_input_embeddings": pair.base.get_input_embeddings(),
                "generation_config": config,
                # Of transformers before 5.24.
                "input_ids": known,
                "model_kwargs": kwargs,
            }
            wanted = inspect.signature(SinglePositionMultiTokenCandidateGenerator).parameters.keys() & given.keys()
            theirs = SinglePositionMultiTokenCandidateGenerator(**{name: given[name] for name in wanted})
            theirs.main_model_max_length = 10_000
            # Before 5.24 it takes the first state that it is not told to pass over, of a whole prompt, too.
            last = len(prompt) - 1
            candidates, _ = theirs.get_candidates(known, kwargs, out, is_first_iteration=False, n_last_matches=last)
        expected = candidates[0, known.shape[1] :].tolist()
        text = Text((*known[0].tolist(), 0), len(prompt))
        ours = draft_teacher_forced(pair.generator.base, FaultyDrafter(pair.drafter, TRANSFORMERS), [text], 5)
        seen.append(ours.drafts.tolist()[0])
        assert seen[-1] == expected
    assert len({tuple(drafts) for drafts in seen}) > 2


def test_sampled_text_is_that_of_its_seed(pair: Pair) -> None:
    prompt = pair.prompts()[0]
    for drafts in (3, DraftTree.parse("2x1")):
        made = [
            pair.generator.generate(prompt, max_new_tokens=30, temperature=1.0, seed=seed, drafts=drafts).tokens
            for seed in (7, 7, 8, -5)
        ]
        assert made[0] == made[1]
        assert len(set(made)) == 3


def test_no_draft_is_made_that_could_not_be_emitted(pair: Pair) -> None:
    """As in transformers: with n tokens left to generate at most n - 1 are drafted."""
    prompt = pair.prompts()[0]
    for drafts in (5, DraftTree.parse("1x1x1x1x1")):
        for tokens in (1, 2, 3):  # the first comes with the prompt
            result = pair.generator.generate(prompt, max_new_tokens=tokens, drafts=drafts)
            assert len(result.tokens) == tokens
            left = tokens - 1
            for r in result.rounds:
                assert r.drafted == left - 1
                left -= len(r.tokens)


@pytest.mark.parametrize("drafts", [4, DraftTree.parse("2x1x1x1")], ids=str)
def test_a_stop_token_ends_the_text_where_it_falls(pair: Pair, drafts: Drafts, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first token, at the base's own after a round, and among accepted drafts; by default those of the base."""
    prompt = pair.prompts()[1]
    whole = pair.alone(prompt, TOKENS)
    ends = set()
    for place in range(12):
        expected = whole[: whole.index(whole[place]) + 1]
        stops = [whole[place]]
        result = pair.generator.generate(prompt, max_new_tokens=TOKENS, drafts=drafts, stop_token_ids=stops)
        monkeypatch.setattr(pair.base.generation_config, "eos_token_id", stops)
        assert result.tokens == pair.generator.generate(prompt, max_new_tokens=TOKENS).tokens == expected
        assert len(result.tokens) == 1 + sum(len(r.tokens) for r in result.rounds)
        assert all(len(r.tokens) == r.accepted + 1 for r in result.rounds[:-1])
        ends |= {len(r.tokens) - r.accepted for r in result.rounds[-1:]}
    assert ends == {0, 1}


def test_a_bfloat16_drafter_serves_a_float32_base(pair: Pair) -> None:
    state = {name: tensor.bfloat16() for name, tensor in pair.drafter.state_dict().items()}
    half = pair.drafter.with_tensors(state)
    prompt = pair.prompts()[0]
    result = SpeculativeGenerator(pair.base, half, pair.tokenizer).generate(prompt, max_new_tokens=TOKENS)
    assert result.tokens == pair.alone(prompt, TOKENS)
    assert result.accepted / result.drafted > 0.6
