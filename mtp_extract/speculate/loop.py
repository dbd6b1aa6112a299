"""The loop: draft K tokens, verify them in one forward of the base, keep the accepted ones and one more.

The base has seen all of a text but its last token, the *pending* one; their K and V are in transformers' own cache.
What rejected drafts wrote is cropped from it.

A round drafts K tokens (fewer when fewer could still be emitted, as in transformers); acceptance is accepted over
drafted, the "success rate" LiteRT-LM prints, where every round counts K. The first token comes from the prompt's
forward and belongs to no round. A draft after a stop token is drafted, not accepted.

Greedy text is the base's own, token for token. Sampled text has the base's distribution.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mtp_extract.drafter.protocol import BaseOutput, Drafter, RoundStart
from mtp_extract.errors import DrafterError
from mtp_extract.speculate.adaptive import AdaptiveDrafts, RunningLength
from mtp_extract.speculate.codec import Codec, PromptInput
from mtp_extract.speculate.sampling import NOT_DRAWN, Sampling, accept_drafts, draw
from mtp_extract.speculate.target import Base, check_pair
from mtp_extract.speculate.trees import DraftTree

Drafts = int | AdaptiveDrafts | DraftTree
"""What is drafted a round: a chain of K, a chain whose K is adapted, or a tree. 0 decodes with the base alone."""


@dataclass(frozen=True)
class Round:
    """What one forward of the base gave."""

    tokens: tuple[int, ...]  # accepted drafts and the base's own token after them; fewer where the text ended
    drafted: int  # drafts that were judged; of a tree, its steps
    accepted: int  # drafts that stand and are part of the text
    draft_ms: float  # wall time of all draft steps
    verify_ms: float  # wall time of the base's forward and the judgement

    def until_stop(self, stop_tokens: Sequence[int]) -> Round:
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
            temperature, top_k, top_p: as of :class:`~.sampling.Sampling`; 0 is greedy.
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
        deepest = _deepest_tree(drafts)

        # The prompt's own forward gives the first token.
        started = _clock(self.base.device)
        text = _GrowingText(self.base, self.drafter, Sampling(temperature, top_k, top_p), seed)
        tokens = [text.read_prompt(prompt_tokens)]
        prefill_ms = 1e3 * (_clock(self.base.device) - started)

        rounds: list[Round] = []
        while len(tokens) < max_new_tokens and tokens[-1] not in stop_tokens:
            # Of the tokens that may still come, one is the base's own.
            most = max_new_tokens - len(tokens) - 1
            tree = deepest.to_depth(min(most, adaptive.value if adaptive else deepest.depth))
            latest = text.draft_and_verify(tokens[-1], tree)
            if adaptive:
                adaptive.observe(latest.drafted, latest.accepted, latest.draft_ms, latest.verify_ms)
            rounds.append(latest.until_stop(stop_tokens))
            tokens += rounds[-1].tokens
        return Generation(prompt_tokens, tuple(tokens), self.codec.decode(tokens), tuple(rounds), prefill_ms)


def _clock(device: torch.device) -> float:
    """Seconds, once ``device`` has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _deepest_tree(drafts: Drafts) -> DraftTree:
    """The shape of a round where nothing is cut short; a chain is a tree, too."""
    if isinstance(drafts, DraftTree):
        return drafts
    longest = drafts.most if isinstance(drafts, AdaptiveDrafts) else drafts
    return DraftTree((1,) * longest)


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
        self._feed(torch.tensor([prompt_tokens], device=self.base.device))
        self._keep(range(len(prompt_tokens)))
        (first,) = _to_host(self.sampling.choose(self.base.logits(self.fed.hidden[0, -1:]), self.random))
        return first

    def draft_and_verify(self, pending: int, tree: DraftTree) -> Round:
        """A round after the token ``pending``: what stands of the drafts of ``tree``, and the base's own token."""
        started = _clock(self.base.device)
        nodes, distributions = self._draft(pending, tree)
        drafted = _clock(self.base.device)

        # One forward of the base judges all drafts.
        self._feed(nodes, tree)
        logits = self.base.logits(self.fed.hidden[0])
        if distributions:
            # Sampled: a draft x that was drawn from q stands with probability min(1, p(x) / q(x)), and the first that
            # does not is replaced by a draw from max(0, p - q).
            p = self.sampling.probabilities(logits)
            path, tokens = _verify_drawn(nodes[0], *accept_drafts(p, nodes[0, 1:], distributions, self.random))
        else:
            # Greedy, and a tree: a draft stands while it is the token that the base chooses there.
            path, tokens = _verify_chosen(nodes[0], self.sampling.choose(logits, self.random), tree)
        self._keep(path)
        verified = _clock(self.base.device)
        return Round(tuple(tokens), tree.depth, len(path) - 1, 1e3 * (drafted - started), 1e3 * (verified - drafted))

    def _draft(self, pending: int, tree: DraftTree) -> tuple[Tensor, list[Tensor]]:
        """The tokens of a tree's nodes, int64 [1, nodes], and the distribution that each drawn draft was drawn from.

        Drafts are drawn in a chain of sampled text alone: a tree has the drafter's likeliest tokens.
        """
        levels = [torch.tensor([[pending]], device=self.base.device)]
        distributions: list[Tensor] = []
        state = self._start_round() if tree.depth else None
        for depth, width in enumerate(tree.widths, 1):
            logits, state = self.drafter.step(state, levels[-1])
            logits = logits[0].to(self.base.device)
            if self.sampling.greedy or tree.width > 1:
                drafts = _likeliest(logits, width)
            else:
                distributions.append(self.sampling.probabilities(logits))
                drafts = draw(distributions[-1], self.random).clamp(min=0)
            levels.append(drafts.view(1, -1))
            if width > 1 and depth < tree.depth:
                state = state.fork(width)
        return torch.cat(levels, dim=1), distributions

    def _start_round(self) -> Any:
        """The drafter's state after what stands."""
        pending = self.fed.positions[:, -1:] + 1
        self.draft_state = self.drafter.start(RoundStart(self.fed, pending, self.base.embed, self.draft_state))
        return self.draft_state

    def _feed(self, tokens: Tensor, tree: DraftTree | None = None) -> None:
        self.fed = self.base.feed(tokens, self.drafter.needs.layers, self.cache, tree=tree)

    def _keep(self, path: Sequence[int]) -> None:
        self.fed = self.base.keep(self.cache, self.fed, path)


def _likeliest(logits: Tensor, count: int) -> Tensor:
    """int64 [nodes · count]: after each node the ``count`` likeliest tokens, by ``logits`` [nodes, vocabulary]."""
    return logits.topk(count, dim=-1).indices.flatten() if count > 1 else logits.argmax(-1)


def _verify_drawn(nodes: Tensor, accepted: Tensor, following: Tensor) -> tuple[list[int], list[int]]:
    """The accepted path of a chain ``nodes``, int64 [nodes], and the new tokens: so many drafts, and the one after."""
    count, *drafts, last = _to_host(torch.cat((accepted[None], nodes[1:], following[None])))
    return list(range(count + 1)), [*drafts[:count], last]


def _verify_chosen(nodes: Tensor, choices: Tensor, tree: DraftTree) -> tuple[list[int], list[int]]:
    """The accepted path of ``nodes``, and the new tokens, by the base's choice after each; int64 [nodes] both."""
    both = _to_host(torch.cat((nodes, choices)))
    chosen = both[len(nodes) :]
    path = tree.followed(both[: len(nodes)], chosen)
    return path, [chosen[node] for node in path]


def _to_host(tokens: Tensor) -> list[int]:
    """int64 [n] as numbers.

    Raises:
        DrafterError: a token could not be drawn.
    """
    numbers: list[int] = tokens.tolist()
    if NOT_DRAWN in numbers:
        raise DrafterError(
            "expected logits to draw a token from, found some that are no numbers: a weight is damaged, or the type "
            "that drafter or base computes in is too small; prove the checkpoint, or compute in bfloat16"
        )
    return numbers
