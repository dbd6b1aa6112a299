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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

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
        self.drafter, self.codec = drafter, Codec(tokenizer, self.base.vocab_size)
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
        sampling = Sampling(temperature, top_k, top_p)
        random = torch.Generator(self.base.device).manual_seed(seed)

        running_length = RunningLength(drafts) if isinstance(drafts, AdaptiveDrafts) else None
        longest = drafts.most if isinstance(drafts, AdaptiveDrafts) else drafts
        full_tree = longest if isinstance(longest, DraftTree) else DraftTree((1,) * longest)

        # The prompt's own forward gives the first token.
        started = self._clock()
        cache = self.base.new_cache()
        fed = self._prefill(prompt_tokens, cache)
        tokens = _to_host(sampling.choose(self.base.logits(fed.hidden[0, -1:]), random))
        prefill_ms = 1e3 * (self._clock() - started)

        rounds: list[Round] = []
        draft_state = None
        while len(tokens) < max_new_tokens and tokens[-1] not in stop_tokens:
            # Of the tokens that may still come, one is the base's own.
            most_drafts = max_new_tokens - len(tokens) - 1
            depth = min(most_drafts, running_length.value if running_length else full_tree.depth)
            tree = full_tree.to_depth(depth)

            started = drafted = self._clock()
            nodes = torch.tensor([tokens[-1:]], device=self.base.device)
            distributions: list[Tensor] = []
            if tree.depth:
                round_start = RoundStart(fed, fed.positions[:, -1:] + 1, self.base.embed, draft_state)
                draft_state = self.drafter.start(round_start)
                nodes, distributions = self._draft(draft_state, nodes, tree, sampling, random)
                drafted = self._clock()

            fed = self.base.feed(nodes, self.drafter.needs.layers, cache, tree=tree)
            logits = self.base.logits(fed.hidden[0])
            accepted_path, new_tokens = _verify(nodes[0], logits, distributions, tree, sampling, random)
            fed = self.base.keep(cache, fed, accepted_path)
            verified = self._clock()

            accepted = len(accepted_path) - 1
            draft_ms = 1e3 * (drafted - started)
            verify_ms = 1e3 * (verified - drafted)
            if running_length:
                running_length.observe(tree.depth, accepted, draft_ms, verify_ms)

            new_tokens = _until_stop(new_tokens, stop_tokens)
            accepted = min(accepted, len(new_tokens))
            rounds.append(Round(tuple(new_tokens), tree.depth, accepted, draft_ms, verify_ms))
            tokens += new_tokens
        return Generation(prompt_tokens, tuple(tokens), self.codec.decode(tokens), tuple(rounds), prefill_ms)

    def _prefill(self, prompt_tokens: Sequence[int], cache: DynamicCache) -> BaseOutput:
        """Run the base over the prompt; all of it stays in ``cache``."""
        prompt = torch.tensor([prompt_tokens], device=self.base.device)
        fed = self.base.feed(prompt, self.drafter.needs.layers, cache)
        return self.base.keep(cache, fed, range(len(prompt_tokens)))

    def _draft(
        self, state: Any, pending: Tensor, tree: DraftTree, sampling: Sampling, random: torch.Generator
    ) -> tuple[Tensor, list[Tensor]]:
        """The tokens of a tree's nodes, int64 [1, nodes], and the distribution that each drawn draft was drawn from.

        Drafts are drawn in a chain of sampled text alone: a tree has the drafter's likeliest tokens.
        """
        levels = [pending]
        distributions: list[Tensor] = []
        for depth, width in enumerate(tree.widths, 1):
            logits, state = self.drafter.step(state, levels[-1])
            logits = logits[0].to(pending.device)
            if sampling.greedy or tree.width > 1:
                drafts = logits.topk(width, dim=-1).indices if width > 1 else logits.argmax(-1)
            else:
                distributions.append(sampling.probabilities(logits))
                drafts = draw(distributions[-1], random).clamp(min=0)
            levels.append(drafts.view(1, -1))
            if width > 1 and depth < tree.depth:
                state = state.fork(width)
        return torch.cat(levels, dim=1), distributions

    def _clock(self) -> float:
        """Seconds, once the device has done what it was given."""
        if self.base.device.type == "cuda":
            torch.cuda.synchronize(self.base.device)
        return time.perf_counter()


def _verify(
    nodes: Tensor,
    logits: Tensor,
    distributions: Sequence[Tensor],
    tree: DraftTree,
    sampling: Sampling,
    random: torch.Generator,
) -> tuple[list[int], list[int]]:
    """Judge the drafts of a round by the base's logits.

    Args:
        nodes: int64 [nodes], the pending token and the drafts after it.
        logits: [nodes, vocabulary], the base's, after each node.
        distributions: what the drafts of a sampled chain were drawn from; empty where they are the likeliest tokens.

    Returns:
        the accepted nodes, the pending token's first, and the new tokens: the accepted drafts and the base's own.
    """
    if distributions:
        # Speculative sampling: draft x stands with probability min(1, p(x) / q(x)).
        accepted, following = accept_drafts(sampling.probabilities(logits), nodes[1:], distributions, random)
        count, *drafts, last = _to_host(torch.cat((accepted[None], nodes[1:], following[None])))
        return list(range(count + 1)), [*drafts[:count], last]

    # The base chooses a token after every node; a draft stands while it is the one that the base chose.
    both = _to_host(torch.cat((nodes, sampling.choose(logits, random))))
    tokens = both[: len(nodes)]
    choices = both[len(nodes) :]
    accepted_path = tree.followed(tokens, choices)
    return accepted_path, [choices[node] for node in accepted_path]


def _until_stop(tokens: list[int], stop_tokens: Sequence[int]) -> list[int]:
    """``tokens`` up to the first stop token, which is included."""
    for place, token in enumerate(tokens):
        if token in stop_tokens:
            return tokens[: place + 1]
    return tokens


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
