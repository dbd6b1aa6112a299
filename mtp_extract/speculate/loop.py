"""The loop: draft K tokens, verify them in one forward of the base, keep the accepted ones and one more.

The base has seen all of a text but its last token, the *pending* one; their K and V are in transformers' own cache.
What rejected drafts wrote is cropped from it.

A round drafts K tokens (fewer when fewer could still be emitted, as in transformers); acceptance is accepted over
drafted, the "success rate" LiteRT-LM prints, where every round counts K. The first token comes from the prompt's
forward and belongs to no round. A draft after a stop token is drafted, not accepted.

Greedy text is the base's own, token for token. Sampled text has the base's distribution, by speculative sampling
(Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318): a draft x, *drawn from* the drafter's
distribution q, is accepted with probability min(1, p(x) / q(x)); the first rejected one is replaced by a draw from
max(0, p - q), normalized. What comes out is then distributed as p, whatever q is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from mtp_extract.drafter.protocol import BaseOutput, Drafter, RoundStart
from mtp_extract.errors import DrafterError
from mtp_extract.speculate.codec import Codec, PromptInput
from mtp_extract.speculate.drafts import AdaptiveDrafts, Drafts, DraftTree, RunningLength, build_deepest_tree
from mtp_extract.speculate.target import Base, check_pair

_NOT_DRAWN = -1  # in place of a token, where weights are no numbers


@dataclass(frozen=True)
class Round:
    """What one forward of the base gave."""

    tokens: tuple[int, ...]  # accepted drafts and the base's own token after them; fewer where the text ended
    drafted: int  # drafts that were judged; of a tree, its steps
    accepted: int  # drafts that stand and are part of the text
    draft_ms: float  # wall time of all draft steps
    verify_ms: float  # wall time of the base's forward and the judgement

    def cut_at_stop(self, stop_tokens: Sequence[int]) -> Round:
        """The round up to its first stop token, which is included."""
        for place, token in enumerate(self.tokens):
            if token in stop_tokens:
                return replace(self, tokens=self.tokens[: place + 1], accepted=min(self.accepted, place + 1))
        return self


@dataclass(frozen=True)
class Generation:
    """The result for one prompt."""

    prompt_tokens: tuple[int, ...]  # as fed to the base
    tokens: tuple[int, ...]  # generated, a stop token included
    text: str | None  # ``tokens`` decoded without special tokens; None without a tokenizer
    rounds: tuple[Round, ...]  # without the prompt's own forward, which gives the first token
    prefill_ms: float  # wall time of the prompt's forward

    @property
    def drafted(self) -> int:
        """Drafts that were judged."""
        return sum(r.drafted for r in self.rounds)

    @property
    def accepted(self) -> int:
        """Drafts that stand."""
        return sum(r.accepted for r in self.rounds)

    @property
    def tokens_per_round(self) -> float:
        """1 + accepted / rounds with drafts; NaN without any."""
        rounds = sum(r.drafted > 0 for r in self.rounds)
        return 1 + self.accepted / rounds if rounds else math.nan


class SpeculativeGenerator:
    """A base model and a drafter, ready to generate.

    Args:
        base: a Gemma 4 model of transformers, on one or several devices.
        drafter: from :func:`mtp_extract.drafter.load.load_any`, or any other, on any device.
        tokenizer: the base's; only needed for prompts and results as text.

    Raises:
        PairError: the two do not belong together.
    """

    def __init__(self, base: Any, drafter: Drafter, tokenizer: Any = None) -> None:
        self.base = base if isinstance(base, Base) else Base(base)
        self.drafter = drafter
        self.codec = Codec(tokenizer, self.base.vocab_size)
        check_pair(self.base, drafter)

    @torch.inference_mode()
    def generate(
        self,
        prompt: PromptInput,
        *,
        max_new_tokens: int = 256,
        drafts: Drafts = 3,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop_token_ids: Sequence[int] | None = None,
        seed: int = 0,
        chat_template: bool = False,
    ) -> Generation:
        """Continue one prompt: text, token ids, or messages.

        Args:
            drafts: K, how to adapt it, or a tree.
            temperature, top_k, top_p: as of :class:`Sampling`; 0 is greedy.
            stop_token_ids: tokens that end the text; None takes the base's ``generation_config.eos_token_id``.
            seed: of the random numbers.
            chat_template: take a prompt that is text as what a user says in a chat.

        Raises:
            PairError: text or messages that cannot be encoded, an empty prompt, or a token the base does not have.
            DrafterError: a token cannot be drawn, as logits are no numbers.
        """
        prompt_tokens = self.codec.encode(prompt, chat_template=chat_template)
        stop_tokens = self.base.stop_token_ids if stop_token_ids is None else stop_token_ids
        adaptive = RunningLength(drafts) if isinstance(drafts, AdaptiveDrafts) else None
        deepest = build_deepest_tree(drafts)

        # The prompt's own forward gives the first token.
        started = _read_clock(self.base.device)
        text = _GrowingText(self.base, self.drafter, Sampling(temperature, top_k, top_p), seed)
        tokens = [text.read_prompt(prompt_tokens)]
        prefill_ms = 1e3 * (_read_clock(self.base.device) - started)

        rounds: list[Round] = []
        while len(tokens) < max_new_tokens and tokens[-1] not in stop_tokens:
            # Of the tokens that may still come, one is the base's own.
            most = max_new_tokens - len(tokens) - 1
            tree = deepest.crop_to_depth(min(most, adaptive.value if adaptive else deepest.depth))
            latest = text.draft_and_verify(tokens[-1], tree)
            if adaptive:
                adaptive.observe(latest.drafted, latest.accepted, latest.draft_ms, latest.verify_ms)
            rounds.append(latest.cut_at_stop(stop_tokens))
            tokens += rounds[-1].tokens
        return Generation(prompt_tokens, tuple(tokens), self.codec.decode(tokens), tuple(rounds), prefill_ms)


class _GrowingText:
    """One text: what the base has in its cache of it, and the drafter's state."""

    def __init__(self, base: Base, drafter: Drafter, sampling: Sampling, seed: int) -> None:
        self.base = base
        self.drafter = drafter
        self.sampling = sampling
        self.random = torch.Generator(base.device).manual_seed(seed)
        self.cache = base.new_cache()
        self.draft_state: Any = None
        self.fed: BaseOutput  # the tokens that the base was fed last, and that stand

    def read_prompt(self, prompt_tokens: Sequence[int]) -> int:
        """Run the base over the prompt; the token after it."""
        tokens = torch.tensor([prompt_tokens], device=self.base.device)
        fed = self.base.feed(tokens, self.drafter.needs.layers, self.cache)
        self.fed = self.base.keep(self.cache, fed, range(len(prompt_tokens)))
        (first,) = _read_tokens(self.sampling.choose(self.base.logits(self.fed.hidden[0, -1:]), self.random))
        return first

    def draft_and_verify(self, pending: int, tree: DraftTree) -> Round:
        """A round after the token ``pending``: what stands of the drafts of ``tree``, and the base's own token."""
        started = _read_clock(self.base.device)
        nodes, distributions = self._draft(pending, tree)
        drafted = _read_clock(self.base.device)
        # One forward of the base judges all drafts.
        self.fed = self.base.feed(nodes[None], self.drafter.needs.layers, self.cache, tree=tree)
        path, tokens = self._judge(nodes, distributions, tree)
        self.fed = self.base.keep(self.cache, self.fed, path)
        verified = _read_clock(self.base.device)
        return Round(tuple(tokens), tree.depth, len(path) - 1, 1e3 * (drafted - started), 1e3 * (verified - drafted))

    def _draft(self, pending: int, tree: DraftTree) -> tuple[Tensor, list[Tensor]]:
        """The tokens of a tree's nodes, int64 [nodes], and the distribution that each drawn draft was drawn from.

        Drafts are drawn in a chain of sampled text alone: a tree has the drafter's likeliest tokens.
        """
        levels = [torch.tensor([[pending]], device=self.base.device)]
        distributions: list[Tensor] = []
        if tree.depth:
            position = self.fed.positions[:, -1:] + 1
            self.draft_state = self.drafter.start(RoundStart(self.fed, position, self.base.embed, self.draft_state))
        state = self.draft_state
        for depth, width in enumerate(tree.widths, 1):
            logits, state = self.drafter.step(state, levels[-1])
            logits = logits[0].to(self.base.device)
            if self.sampling.greedy or tree.width > 1:
                drafts = logits.topk(width, dim=-1).indices if width > 1 else logits.argmax(-1)
            else:
                distributions.append(self.sampling.probabilities(logits))
                drafts = draw(distributions[-1], self.random).clamp(min=0)
            levels.append(drafts.reshape(1, -1))
            if width > 1 and depth < tree.depth:
                state = state.fork(width)
        return torch.cat(levels, dim=1)[0], distributions

    def _judge(
        self, nodes: Tensor, distributions: Sequence[Tensor], tree: DraftTree
    ) -> tuple[Sequence[int], list[int]]:
        """The accepted path of ``nodes``, which the base was fed, and the new tokens: the base's own last."""
        logits = self.base.logits(self.fed.hidden[0])
        if distributions:
            p = self.sampling.probabilities(logits)
            accepted, following = accept_drafts(p, nodes[1:], distributions, self.random)
            count, *drafts, last = _read_tokens(torch.cat((accepted[None], nodes[1:], following[None])))
            return range(count + 1), [*drafts[:count], last]

        # Greedy, and a tree: a draft stands while it is the token that the base chooses there.
        both = _read_tokens(torch.cat((nodes, self.sampling.choose(logits, self.random))))
        choices = both[len(nodes) :]
        path = tree.find_accepted_path(both, choices)
        return path, [choices[node] for node in path]


def _read_tokens(tokens: Tensor) -> list[int]:
    """int64 [n] as numbers; DrafterError where a token could not be drawn."""
    numbers: list[int] = tokens.tolist()
    if _NOT_DRAWN in numbers:
        raise DrafterError(
            "expected logits to draw a token from, found some that are no numbers: a weight is damaged, or the type "
            "that drafter or base computes in is too small; prove the checkpoint, or compute in bfloat16"
        )
    return numbers


def _read_clock(device: torch.device) -> float:
    """Seconds, once ``device`` has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; the same for base and drafter. transformers raises ValueError for what is out of range."""

    temperature: float = 0.0  # logits are divided by it. 0 is greedy: the argmax, and nothing is random.
    top_k: int | None = None  # keep the k most likely tokens; None keeps all
    top_p: float | None = None  # keep the smallest set of most likely tokens whose mass reaches it; None keeps all

    @property
    def greedy(self) -> bool:
        """Whether nothing is random. Logits of Gemma 4 are below 30: the likeliest token then has all probability."""
        return 0 <= self.temperature < 1e-5

    def probabilities(self, logits: Tensor) -> Tensor:
        """The distribution that tokens are drawn from: F32 [n, vocabulary], of ``logits`` of the same shape.

        By transformers' own warpers: temperature, then top-k, then top-p. Not where greedy.
        """
        warp: Any = LogitsProcessorList([TemperatureLogitsWarper(float(self.temperature))])
        warp += [] if self.top_k is None else [TopKLogitsWarper(self.top_k)]
        warp += [] if self.top_p is None else [TopPLogitsWarper(float(self.top_p))]
        no_text: Any = None  # these warpers do not look at it
        warped: Tensor = warp(no_text, logits.float())
        return warped.softmax(-1)

    def choose(self, logits: Tensor, random: torch.Generator) -> Tensor:
        """A token for each row of ``logits`` [n, vocabulary]: int64 [n]."""
        return logits.argmax(-1) if self.greedy else draw(self.probabilities(logits), random)


def draw(weights: Tensor, random: torch.Generator) -> Tensor:
    """A token for each row of ``weights`` [n, vocabulary], of any sum: int64 [n].

    The least of exponential waiting times, each of its weight's rate. No weight is looked at in Python, which would
    wait for the device; where their sum is no number above 0, the token is :data:`_NOT_DRAWN`.
    """
    token = (weights / torch.empty_like(weights).exponential_(generator=random)).argmax(-1)
    total = weights.sum(-1)
    return torch.where((total > 0) & total.isfinite(), token, _NOT_DRAWN)


def accept_drafts(p: Tensor, drafts: Tensor, q: Sequence[Tensor], random: torch.Generator) -> tuple[Tensor, Tensor]:
    """How many drafts of a chain stand, and the token after them: int64 [] each.

    Args:
        p: [K + 1, vocabulary], the base's distribution after the pending token and after each draft.
        drafts: int64 [K].
        q: of each draft, [1, vocabulary], the distribution it was drawn from.
    """
    # After the last draft nothing was drawn that could be rejected.
    drawn_from = torch.cat((*q, torch.zeros_like(p[:1])))
    index = drafts[:, None]
    chance = torch.rand(len(drafts), 1, generator=random, device=p.device)
    accepted = (chance * drawn_from[:-1].gather(1, index) < p[:-1].gather(1, index)).cumprod(0).sum()
    residual = (p[accepted] - drawn_from[accepted]).clamp(min=0)
    # p <= q everywhere means p = q: the residual then vanishes but for rounding, and p is its limit. Where q is no
    # number, neither is it, and nothing is drawn.
    return accepted, draw(torch.where(residual.sum() <= 0, p[accepted], residual)[None], random)[0]
