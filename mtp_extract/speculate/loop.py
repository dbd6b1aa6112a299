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

from mtp_extract.drafter.protocol import BaseState, Drafter
from mtp_extract.errors import DrafterError
from mtp_extract.speculate.adaptive import AdaptiveDrafts, RunningLength
from mtp_extract.speculate.codec import Codec, Prompt
from mtp_extract.speculate.sampling import NOT_DRAWN, Sampling, draw, judge
from mtp_extract.speculate.target import Base, check_pair
from mtp_extract.speculate.trees import Tree

Drafts = int | AdaptiveDrafts | Tree
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
        prompt: Prompt,
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
        base, drafter, layers = self.base, self.drafter, self.drafter.needs.layers
        given, sampling = self.codec.encode(prompt, chat_template=chat_template), Sampling(temperature, top_k, top_p)
        random = torch.Generator(base.device).manual_seed(seed)
        stops = base.stop_token_ids if stop_token_ids is None else stop_token_ids
        running = RunningLength(drafts) if isinstance(drafts, AdaptiveDrafts) else None
        most = drafts.most if isinstance(drafts, AdaptiveDrafts) else drafts
        whole = most if isinstance(most, Tree) else Tree((1,) * most)
        cache, previous, rounds, start = base.new_cache(), None, list[Round](), self._clock()
        fed = base.keep(cache, base.feed(torch.tensor([given], device=base.device), layers, cache), range(len(given)))
        tokens = _to_host(sampling.choose(base.logits(fed.hidden[0, -1:]), random))
        prefill_ms = 1e3 * (self._clock() - start)
        while (left := max_new_tokens - len(tokens)) > 0 and tokens[-1] not in stops:
            start = middle = self._clock()
            nodes, drawn = torch.tensor([tokens[-1:]], device=base.device), list[Tensor]()
            # Of the tokens that are left, one is the base's own.
            tree = whole.to_depth(min(left - 1, running.value if running else whole.depth))
            if tree.depth:
                previous = drafter.start(BaseState(fed, fed.positions[:, -1:] + 1, base.embed, previous))
                nodes, drawn = self._drafted(previous, nodes, tree, sampling, random)
                middle = self._clock()
            fed = base.feed(nodes, layers, cache, tree=tree)
            way, new = _verified(nodes[0], base.logits(fed.hidden[0]), drawn, tree, sampling, random)
            fed = base.keep(cache, fed, way)
            draft_ms, verify_ms = 1e3 * (middle - start), 1e3 * (self._clock() - middle)
            if running:
                running.observe(tree.depth, len(way) - 1, draft_ms, verify_ms)
            new = new[: next((place + 1 for place, token in enumerate(new) if token in stops), len(new))]
            rounds.append(Round(tuple(new), tree.depth, min(len(way) - 1, len(new)), draft_ms, verify_ms))
            tokens += new
        return Generation(given, tuple(tokens), self.codec.decode(tokens), tuple(rounds), prefill_ms)

    def _drafted(
        self, state: Any, pending: Tensor, tree: Tree, sampling: Sampling, random: torch.Generator
    ) -> tuple[Tensor, list[Tensor]]:
        """The tokens of a tree's nodes, int64 [1, nodes], and of each draft that was drawn, from which distribution.

        Drafts are drawn in a chain of sampled text alone: a tree has the drafter's likeliest tokens.
        """
        levels, drawn = [pending], list[Tensor]()
        for depth, width in enumerate(tree.widths, 1):
            logits, state = self.drafter.step(state, levels[-1])
            logits = logits[0].to(pending.device)
            if sampling.greedy or tree.width > 1:
                chosen = logits.topk(width, dim=-1).indices if width > 1 else logits.argmax(-1)
            else:
                drawn.append(sampling.probabilities(logits))
                chosen = draw(drawn[-1], random).clamp(min=0)
            levels.append(chosen.view(1, -1))
            if width > 1 and depth < tree.depth:
                state = state.fork(width)
        return torch.cat(levels, dim=1), drawn

    def _clock(self) -> float:
        """Seconds, once the device has done what it was given."""
        if self.base.device.type == "cuda":
            torch.cuda.synchronize(self.base.device)
        return time.perf_counter()


def _verified(
    nodes: Tensor, logits: Tensor, drawn: Sequence[Tensor], tree: Tree, sampling: Sampling, random: torch.Generator
) -> tuple[list[int], list[int]]:
    """The nodes that stand, the root first, and the new tokens: those of the drafts among them, and the base's own."""
    if drawn:
        accepted, following = judge(sampling.probabilities(logits), nodes[1:], drawn, random)
        held, *tokens, last = _to_host(torch.cat((accepted[None], nodes[1:], following[None])))
        return [*range(held + 1)], [*tokens[:held], last]
    # The base chooses a token after every node, and the tree is followed as long as it holds that token.
    both = _to_host(torch.cat((nodes, sampling.choose(logits, random))))
    tokens, choices = both[: len(nodes)], both[len(nodes) :]
    way = tree.followed(tokens, choices)
    return way, [choices[node] for node in way]


def _to_host(tokens: Tensor) -> list[int]:
    """int64 [n] as numbers.

    Raises:
        DrafterError: a token could not be drawn.
    """
    found: list[int] = tokens.tolist()
    if NOT_DRAWN in found:
        raise DrafterError(
            "expected logits to draw a token from, found some that are no numbers: a weight is damaged, or the type "
            "that drafter or base computes in is too small; prove the checkpoint, or compute in bfloat16"
        )
    return found
