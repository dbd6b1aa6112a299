"""The loop: draft K tokens, verify them in one forward of the base, keep the accepted drafts and one token of the base.

The base has seen all tokens of a text but the last, the *pending* token; their K and V are in transformers' own cache,
from which those of rejected drafts are cropped.

A round drafts K tokens, or fewer if fewer may still be emitted, as in transformers. Acceptance is accepted over
drafted, the "success rate" that LiteRT-LM prints, where every round counts K. The first token comes from the prompt's
forward and belongs to no round. A draft after a stop token counts as drafted, not as accepted.

Greedy text is the base's own, token for token. Sampled text has the base's distribution, by speculative sampling
(Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318): a draft x, drawn from the drafter's
distribution q, is accepted with probability min(1, p(x) / q(x)); the first rejected draft is replaced by a draw from
max(0, p - q), normalized. The emitted tokens are then distributed as p, whatever q is.
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

_NOT_DRAWN = -1  # stands for a token that could not be drawn: see :func:`draw`


@dataclass(frozen=True)
class Round:
    """One round: drafts, and the forward of the base that judged them."""

    tokens: tuple[int, ...]  # accepted drafts and the base's own token after them; cut after a stop token
    drafted: int  # drafts that were judged; the number of steps of a tree
    accepted: int  # accepted drafts that are part of the text
    draft_ms: float  # wall time of all draft steps
    verify_ms: float  # wall time of the base's forward and the judgement

    def cut_at_stop(self, stop_tokens: Sequence[int]) -> Round:
        """Return the round up to and including its first stop token."""
        for count, token in enumerate(self.tokens, 1):
            if token in stop_tokens:
                return replace(self, tokens=self.tokens[:count], accepted=min(self.accepted, count))
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
        """Drafts that were judged, over all rounds."""
        return sum(r.drafted for r in self.rounds)

    @property
    def accepted(self) -> int:
        """Accepted drafts, over all rounds."""
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
        drafter: from :func:`mtp_extract.drafter.load.load_any_drafter`, or any other, on any device.
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
            temperature, top_k, top_p: see :class:`Sampling`; temperature 0 is greedy.
            stop_token_ids: tokens that end the text; None takes the base's ``generation_config.eos_token_id``.
            seed: seed of the random numbers.
            chat_template: wrap a text prompt as a user's message of a chat.

        Raises:
            PairError: text or messages that cannot be encoded, an empty prompt, or a token the base does not have.
            DrafterError: logits hold NaN or +∞, so no token can be drawn.
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
            # One of the tokens that may still come is the base's own.
            most = max_new_tokens - len(tokens) - 1
            tree = deepest.crop_to_depth(min(most, adaptive.value if adaptive else deepest.depth))
            latest = text.draft_and_verify(tokens[-1], tree)
            if adaptive:
                adaptive.observe(latest.drafted, latest.accepted, latest.draft_ms, latest.verify_ms)
            rounds.append(latest.cut_at_stop(stop_tokens))
            tokens += rounds[-1].tokens
        return Generation(prompt_tokens, tuple(tokens), self.codec.decode(tokens), tuple(rounds), prefill_ms)


class _GrowingText:
    """A text in generation: the base's cache, the drafter's state, and the random numbers."""

    def __init__(self, base: Base, drafter: Drafter, sampling: Sampling, seed: int) -> None:
        self.base = base
        self.drafter = drafter
        self.sampling = sampling
        self.random = torch.Generator(base.device).manual_seed(seed)
        self.cache = base.build_cache()
        self.draft_state: Any = None
        self.fed: BaseOutput  # the accepted tokens of the base's latest forward

    def read_prompt(self, prompt_tokens: Sequence[int]) -> int:
        """Run the base over the prompt and return the token that follows."""
        tokens = torch.tensor([prompt_tokens], device=self.base.device)
        fed = self.base.feed(tokens, self.drafter.needs.layers, self.cache)
        self.fed = self.base.keep(self.cache, fed, range(len(prompt_tokens)))
        (first,) = _read_tokens(self.sampling.choose(self.base.logits(self.fed.hidden[0, -1:]), self.random))
        return first

    def draft_and_verify(self, pending: int, tree: DraftTree) -> Round:
        """Draft ``tree`` after the token ``pending``, and verify it in one forward of the base."""
        started = _read_clock(self.base.device)
        nodes, distributions = self._draft(pending, tree)
        drafted = _read_clock(self.base.device)
        self.fed = self.base.feed(nodes[None], self.drafter.needs.layers, self.cache, tree=tree)
        path, tokens = self._judge(nodes, distributions, tree)
        self.fed = self.base.keep(self.cache, self.fed, path)
        verified = _read_clock(self.base.device)
        return Round(tuple(tokens), tree.depth, len(path) - 1, 1e3 * (drafted - started), 1e3 * (verified - drafted))

    def _draft(self, pending: int, tree: DraftTree) -> tuple[Tensor, list[Tensor]]:
        """Return the tokens of a tree's nodes, int64 [nodes], and the distribution [1, vocabulary] of each drawn draft.

        Only a chain of sampled text draws its drafts; a tree takes the drafter's likeliest tokens.
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
                distributions.append(self.sampling.compute_probabilities(logits))
                drafts = draw(distributions[-1], self.random).clamp(min=0)
            levels.append(drafts.reshape(1, -1))
            if width > 1 and depth < tree.depth:
                state = state.fork(width)
        return torch.cat(levels, dim=1)[0], distributions

    def _judge(
        self, nodes: Tensor, distributions: Sequence[Tensor], tree: DraftTree
    ) -> tuple[Sequence[int], list[int]]:
        """Return the accepted path of ``nodes``, and the new tokens: accepted drafts, then the base's own token."""
        logits = self.base.logits(self.fed.hidden[0])
        if distributions:
            p = self.sampling.compute_probabilities(logits)
            accepted, following = accept_drafts(p, nodes[1:], distributions, self.random)
            count, *drafts, last = _read_tokens(torch.cat((accepted[None], nodes[1:], following[None])))
            return range(count + 1), [*drafts[:count], last]

        # Greedy text or a tree: a draft is accepted if it is the token that the base chooses there.
        drafts_and_choices = _read_tokens(torch.cat((nodes, self.sampling.choose(logits, self.random))))
        choices = drafts_and_choices[len(nodes) :]
        path = tree.find_accepted_path(drafts_and_choices[: len(nodes)], choices)
        return path, [choices[node] for node in path]


def _read_tokens(tokens: Tensor) -> list[int]:
    """Copy int64 [n] to the host; raise DrafterError if a token could not be drawn."""
    numbers: list[int] = tokens.tolist()
    if _NOT_DRAWN in numbers:
        raise DrafterError(
            "expected finite logits to draw a token from, found NaN or infinity: a weight is damaged, or the dtype of "
            "drafter or base is too small; prove the checkpoint, or compute in bfloat16"
        )
    return numbers


def _read_clock(device: torch.device) -> float:
    """Wait for ``device`` to finish, and return the time in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@dataclass(frozen=True)
class Sampling:
    """How base and drafter choose tokens. transformers raises ValueError for a value out of range."""

    temperature: float = 0.0  # divides the logits; 0 is greedy: the argmax, and nothing is random
    top_k: int | None = None  # keep the k most likely tokens; None keeps all
    top_p: float | None = None  # keep the smallest set of most likely tokens whose mass reaches it; None keeps all

    @property
    def greedy(self) -> bool:
        """Whether nothing is random: logits of Gemma 4 are below 30, so below 1e-5 one token has all probability."""
        return 0 <= self.temperature < 1e-5

    def compute_probabilities(self, logits: Tensor) -> Tensor:
        """Return the distribution that tokens are drawn from, F32 [n, vocabulary], of ``logits`` [n, vocabulary].

        transformers' own warpers apply temperature, then top-k, then top-p. Not for greedy text.
        """
        warp: Any = LogitsProcessorList([TemperatureLogitsWarper(float(self.temperature))])
        warp += [] if self.top_k is None else [TopKLogitsWarper(self.top_k)]
        warp += [] if self.top_p is None else [TopPLogitsWarper(float(self.top_p))]
        no_text: Any = None  # these warpers do not look at it
        warped: Tensor = warp(no_text, logits.float())
        return warped.softmax(-1)

    def choose(self, logits: Tensor, random: torch.Generator) -> Tensor:
        """Choose a token for each row of ``logits`` [n, vocabulary]: int64 [n]."""
        return logits.argmax(-1) if self.greedy else draw(self.compute_probabilities(logits), random)


def draw(weights: Tensor, random: torch.Generator) -> Tensor:
    """Draw a token for each row of ``weights`` [n, vocabulary], of any sum: int64 [n].

    A token is :data:`_NOT_DRAWN` if the sum of its row is not finite or not positive. Python does not look at weights,
    which would make it wait for the device.
    """
    # With Eᵢ ~ Exp(1), argmin Eᵢ / wᵢ = argmax wᵢ / Eᵢ is i with probability wᵢ / Σ w.
    token = (weights / torch.empty_like(weights).exponential_(generator=random)).argmax(-1)
    total = weights.sum(-1)
    return torch.where((total > 0) & total.isfinite(), token, _NOT_DRAWN)


def accept_drafts(p: Tensor, drafts: Tensor, q: Sequence[Tensor], random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return how many drafts of a chain are accepted, and the token after them: int64 [] each.

    Args:
        p: [K + 1, vocabulary], the base's distribution after the pending token and after each draft.
        drafts: int64 [K].
        q: the distribution [1, vocabulary] that each draft was drawn from.
    """
    # No draft follows the last one: there q = 0, and the residual is p itself.
    drawn_from = torch.cat((*q, torch.zeros_like(p[:1])))
    index = drafts[:, None]
    chance = torch.rand(len(drafts), 1, generator=random, device=p.device)
    # A draft x is accepted with probability min(1, p(x) / q(x)): if u · q(x) < p(x), with u uniform in [0, 1). Drafts
    # after a rejected one are rejected, too.
    accepted = (chance * drawn_from[:-1].gather(1, index) < p[:-1].gather(1, index)).cumprod(0).sum()
    # The token after them is drawn from max(0, p - q), normalized.
    residual = (p[accepted] - drawn_from[accepted]).clamp(min=0)
    # p <= q everywhere means p = q: the residual is then 0 but for rounding, and p is its limit. If q is NaN, so is the
    # residual, and nothing is drawn.
    return accepted, draw(torch.where(residual.sum() <= 0, p[accepted], residual)[None], random)[0]
