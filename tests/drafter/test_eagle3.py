"""The EAGLE-3 head is the function that engines and trainers define, and drafts by the protocol alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from helpers.random_heads import head_config, random_head
from helpers.random_pairs import base_alone, random_base
from helpers.stepping import teacher_forced_by_stepping
from torch import Tensor

from mtp_extract.drafter.eagle3 import Eagle3Drafter
from mtp_extract.drafter.protocol import BaseOutput, RoundStart
from mtp_extract.errors import DrafterError, PairError
from mtp_extract.speculate.drafts import DraftTree
from mtp_extract.speculate.loop import Drafts, SpeculativeGenerator
from mtp_extract.speculate.target import Base
from mtp_extract.speculate.teacher import Text, draft_teacher_forced

FLAGS = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output", "own_embedding")
PROMPTS = ((1,), tuple(range(17)), (7, 3, 5, 9))


def normalize(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


class Transcribed:
    """vLLM's ``LlamaModel`` of EAGLE-3 with its Llama attention, over one sequence, all at once, in F64.

    It has no cache: every step runs over the whole sequence again.
    """

    def __init__(self, head: Eagle3Drafter) -> None:
        self.config = head.config
        self.w = {name: tensor.double() for name, tensor in head.state_dict().items()}

    def combine(self, aux: list[Tensor]) -> Tensor:
        c, x = self.config, torch.cat(aux, dim=-1)
        if c.norm_before_fc:
            x = normalize(x, self.w["input_norm.weight"], c.rms_norm_eps)
        if c.fc_norm:
            parts = x.chunk(3, dim=-1)
            x = torch.cat(
                [normalize(p, self.w[f"fc_norm.{i}.weight"], c.rms_norm_eps) for i, p in enumerate(parts)], dim=-1
            )
        return x @ self.w["fc.weight"].T

    def forward(self, embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """From [length, width] each, compute the logits over the base's vocabulary and the state that is fed back."""
        c, w, eps = self.config, self.w, self.config.rms_norm_eps
        layer = "layers.0."
        embeds = normalize(embeds, w[layer + "embedding_norm.weight"], eps)
        residual = hidden
        hidden = normalize(hidden, w[layer + "hidden_norm.weight"], eps)
        if c.norm_before_residual:
            residual = hidden
        x = torch.cat([embeds, hidden], dim=-1)
        length = len(x)
        q, k, v = (
            (x @ w[f"{layer}{name}_proj.weight"].T).view(length, -1, c.head_dim).transpose(0, 1) for name in "qkv"
        )
        inverse = 1.0 / c.rope_theta ** (torch.arange(0, c.head_dim, 2).double() / c.head_dim)
        angles = torch.outer(torch.arange(length).double(), inverse)
        cos, sin = (torch.cat((f(angles), f(angles)), dim=-1) for f in (torch.cos, torch.sin))
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        groups = c.num_heads // c.num_kv_heads
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        scores = q @ k.transpose(1, 2) / math.sqrt(c.head_dim)
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
        attended = (scores.softmax(-1) @ v).transpose(0, 1).reshape(length, -1) @ w[layer + "o_proj.weight"].T
        residual = residual + attended
        y = normalize(residual, w[layer + "post_attention_norm.weight"], eps)
        gate = y @ w[layer + "gate_proj.weight"].T
        mlp = (gate * gate.sigmoid() * (y @ w[layer + "up_proj.weight"].T)) @ w[layer + "down_proj.weight"].T
        prenorm = residual + mlp
        normed = normalize(prenorm, w["final_norm.weight"], eps)
        logits = normed @ w["lm_head.weight"].T
        if c.reduced:
            base_logits = torch.full((length, c.vocab_size), -math.inf, dtype=torch.double)
            base_logits[:, torch.arange(c.draft_vocab_size) + w["d2t"].long()] = logits
            logits = base_logits
        return logits, normed if c.norm_output else prenorm

    def drafts(self, tokens: list[int], aux: Mapping[int, Tensor], table: Tensor, chosen: list[int]) -> list[Tensor]:
        """Compute the logits of every step after ``tokens``, whose last has no state; ``chosen`` are the drafts."""
        embed = self.w.get("embed_tokens.weight", table.double())
        hidden = self.combine([aux[i].double() for i in self.config.base_layers])
        step_logits, text = [], list(tokens)
        for token in chosen:
            logits, out = self.forward(embed[text[1:]], hidden)
            step_logits.append(logits[-1])
            hidden, text = torch.cat((hidden, out[-1:])), [*text, token]
        return step_logits


@pytest.mark.parametrize("flags", list(itertools.product([False, True], repeat=len(FLAGS))))
def test_it_computes_what_vllm_computes(flags: tuple[bool, ...]) -> None:
    """With every combination of flags, in two rounds, the second over the tokens that the base verified."""
    enabled = dict(zip(FLAGS, flags, strict=True))
    wide = 48 if enabled["own_embedding"] else 32
    config = head_config(**enabled, backbone_hidden_size=wide, draft_vocab_size=40 if enabled["fc_norm"] else 24)
    head = random_head(config)
    theirs = Transcribed(head)
    generator = torch.Generator().manual_seed(7)
    table = torch.randn(40, wide, generator=generator)
    text = torch.randint(0, 40, (1, 14), generator=generator)
    # As in Gemma, states differ in size from layer to layer.
    states = {i: torch.randn(1, 14, wide, generator=generator) * 10 ** (i - 2) for i in config.base_layers}
    previous = None
    for begin, end in ((0, 9), (9, 13)):
        part = {layer: state[:, begin:end] for layer, state in states.items()}
        fed = BaseOutput(text[:, begin:end], torch.arange(begin, end)[None], torch.empty(1, end - begin, 0), part)
        # As a base gives them: embeddings times the root of its width.
        state = previous = head.start(RoundStart(fed, torch.tensor([[end]]), lambda t: table[t] * wide**0.5, previous))
        token, chosen, step_logits = text[:, end : end + 1], [], []
        for _ in range(3):
            logits, state = head.step(state, token)
            token = logits.argmax(-1)
            chosen.append(int(token))
            step_logits.append(logits[0, 0])
        seen = {layer: state[0, :end] for layer, state in states.items()}
        expected = theirs.drafts(text[0, : end + 1].tolist(), seen, table, chosen)
        for actual, reference in zip(step_logits, expected, strict=True):
            allowed = 1e-5 * float(reference[reference.isfinite()].abs().max())
            torch.testing.assert_close(actual.double(), reference, atol=allowed, rtol=0)


@pytest.fixture(scope="module")
def model() -> Any:
    """A small base; with tied embeddings it would repeat its last token for ever."""
    return random_base(tie_word_embeddings=False)


def test_a_round_is_drafted_from_the_text_alone(model: Any) -> None:
    """Drafting does not depend on earlier rounds: stepping with a cache agrees with one pass over the text."""
    head = random_head(head_config())
    texts = [Text(prompt + base_alone(model, prompt, 12), len(prompt)) for prompt in PROMPTS]
    at_once = draft_teacher_forced(Base(model), head, texts, 4)
    stepping = teacher_forced_by_stepping(Base(model), head, texts, 4)
    assert torch.equal(at_once.anchor, stepping.anchor)
    assert (at_once.drafts == stepping.drafts).float().mean() > 0.99


@pytest.mark.parametrize("drafts", [3, DraftTree.parse("2x2x1")], ids=str)
def test_what_generation_drafts_is_what_teacher_forcing_says(model: Any, drafts: Drafts) -> None:
    """After accepted and rejected drafts the cache holds what the base verified, and nothing else."""
    head = random_head(head_config())
    seen: list[tuple[int, int]] = []
    prompt = PROMPTS[2]
    text = prompt + base_alone(model, prompt, 30)
    base = Base(model)
    forced = draft_teacher_forced(base, head, [Text(text, len(prompt))], 1)
    expected = dict(zip(forced.anchor.tolist(), forced.drafts[:, 0].tolist(), strict=True))
    step = head.step

    def step_with_help(state: Any, token: Tensor) -> tuple[Tensor, Any]:
        """Draft the base's next token now and then, so that rounds end at different places."""
        logits, following = step(state, token)
        at = int(state.positions[0, 0]) + 1
        if state.step_kv is None:
            seen.append((at, int(logits.argmax())))
        if at % 4 and at + 1 < len(text):
            logits = torch.zeros_like(logits)
            logits[..., text[at + 1]] = 1
        return logits, following

    head.step = step_with_help  # type: ignore[method-assign]
    result = SpeculativeGenerator(model, head).generate(prompt, max_new_tokens=30, drafts=drafts, stop_token_ids=[])
    assert result.tokens == text[len(prompt) :]
    assert 0 < result.accepted < result.drafted
    agreements = [expected[at] == first for at, first in seen if at in expected]
    assert len(agreements) > 5 and all(agreements)


def test_a_base_of_fewer_layers(model: Any) -> None:
    with pytest.raises(PairError, match="layer 6, found 5"):
        SpeculativeGenerator(model, random_head(head_config(base_layers=(1, 3, 6))))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base_layers": (3, 1, 5)}, r"the lowest first, found \[3, 1, 5\]"),
        ({"base_layers": (1, 1, 5)}, "3 different layers"),
        ({"base_layers": (1, 5)}, "expected 3 different layers"),
        ({"draft_vocab_size": 41}, "at most the base's 40 tokens, found a draft_vocab_size of 41"),
        ({"num_kv_heads": 3}, "KV heads that divide the 8 query heads"),
        ({"head_dim": 7}, "of an even width, found 2 of 7"),
        ({"backbone_hidden_size": 48}, "a head of width 32 beside a base of 48, found none"),
    ],
)
def test_shapes_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DrafterError, match=message):
        head_config(**changes)
