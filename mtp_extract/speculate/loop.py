"""The loop: draft K tokens, verify them in one forward of the base, keep the accepted ones and one more.

The base has seen all of a text but its last token, the *pending* one; their K and V are in transformers' own cache. A
round

1. drafts K tokens from the pending one,
2. feeds the pending token and the drafts to the base, in one forward,
3. keeps the drafts that the base agrees with, and the base's own token after them, which is the new pending one; what
   the others wrote is cropped from the cache.

Greedy text is the base's own, token for token. Sampled text has the base's distribution.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mtp_extract.drafter.protocol import BaseState, Drafter, DraftState
from mtp_extract.errors import DrafterError, MtpExtractError, escape
from mtp_extract.speculate.adaptive import AdaptiveDrafts, RunningLength
from mtp_extract.speculate.codec import Codec, Prompt
from mtp_extract.speculate.numbers import count
from mtp_extract.speculate.sampling import NOT_DRAWN, Sampling, draw, judge
from mtp_extract.speculate.target import Base, check_pair
from mtp_extract.speculate.trees import Tree, followed, grow

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
    finish_reason: str  # ``stop`` at a stop token, ``length`` at ``max_new_tokens``
    rounds: tuple[Round, ...]  # without the prompt's own forward, which gives the first token
    prefill_ms: float  # wall time of the prompt's forward

    @property
    def drafted(self) -> int:
        """Drafts proposed and judged."""
        return sum(r.drafted for r in self.rounds)

    @property
    def accepted(self) -> int:
        """Drafts that stand."""
        return sum(r.accepted for r in self.rounds)

    @property
    def acceptance(self) -> float:
        """``accepted / drafted``; NaN when nothing was drafted. The success rate LiteRT-LM prints."""
        return self.accepted / self.drafted if self.drafted else math.nan

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
        check_pair(self.base, drafter, tokenizer)

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
            MtpExtractError: an option out of range.
        """
        tokens = self.codec.encode(prompt, chat_template=chat_template)
        sampling = Sampling(temperature, top_k, top_p)
        first, *rounds = self.rounds(
            tokens,
            max_new_tokens=max_new_tokens,
            drafts=drafts,
            sampling=sampling,
            stop_token_ids=stop_token_ids,
            seed=seed,
        )
        new = tuple(token for r in (first, *rounds) for token in r.tokens)
        reason = "stop" if new[-1] in self._stops(stop_token_ids) else "length"
        return Generation(tokens, new, self.codec.decode(new), reason, tuple(rounds), first.verify_ms)

    def rounds(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int = 256,
        drafts: Drafts = 3,
        sampling: Sampling | None = None,
        stop_token_ids: Sequence[int] | None = None,
        seed: int = 0,
    ) -> Iterator[Round]:
        """Continue the token ids ``prompt`` round by round; arguments as of :meth:`generate`.

        The first round is the prompt's own forward: one token, nothing drafted.

        Raises:
            MtpExtractError: an option out of range.
            DrafterError: a token cannot be drawn, as logits are no numbers.
        """
        count("max_new_tokens", max_new_tokens, least=1)
        random = torch.Generator(self.base.device).manual_seed(count("seed", seed, least=-(1 << 63)) % (1 << 64))
        text = _Text(self.base, self.drafter, sampling or Sampling(), random)
        adaptive = RunningLength(drafts) if isinstance(drafts, AdaptiveDrafts) else None
        fixed = _checked(drafts, self.base.vocab_size) if not isinstance(drafts, AdaptiveDrafts) else 0
        stops = self._stops(stop_token_ids)
        last, left = text.begin(prompt), max_new_tokens - 1
        yield last
        while left and last.tokens[-1] not in stops:
            # Of n tokens that are left, one is the base's own.
            made = text.round(_shortened(adaptive.value if adaptive else fixed, left - 1))
            if adaptive:
                adaptive.observe(made.drafted, made.accepted, made.draft_ms, made.verify_ms)
            last = _until(made, stops)
            left -= len(last.tokens)
            yield last

    def _stops(self, given: Sequence[int] | None) -> frozenset[int]:
        stops = self.base.stop_token_ids if given is None else given
        return frozenset(count("a stop token", token, least=0) for token in stops)


class _Text:
    """One text as it grows: the base's cache, what the base was fed last, and where the text stands."""

    def __init__(self, base: Base, drafter: Drafter, sampling: Sampling, random: torch.Generator) -> None:
        self._base, self._drafter, self._sampling, self._random = base, drafter, sampling, random
        self._cache = base.new_cache()
        self._previous: DraftState = None

    @torch.inference_mode()
    def begin(self, prompt: Sequence[int]) -> Round:
        """Feed the prompt, and choose the first token."""
        start = self._clock()
        tokens = torch.tensor([list(prompt)], device=self._base.device)
        fed = self._base.feed(tokens, self._cache, self._drafter.needs.layers)
        self._fed = self._base.keep(self._cache, fed, range(len(prompt)))
        self._at = len(prompt)  # the position of the pending token
        self._pending = self._sampling.choose(self._base.logits(fed.hidden[0, -1:]), self._random)
        return Round(tuple(_to_host(self._pending)), 0, 0, 0.0, 1e3 * (self._clock() - start))

    @torch.inference_mode()
    def round(self, drafts: int | Tree) -> Round:
        """Draft, verify, accept."""
        start, tree = self._clock(), drafts if isinstance(drafts, Tree) else None
        levels, q = [self._pending[None]], list[Tensor]()
        if isinstance(drafts, Tree):
            levels = grow(self._drafter, self._start(), self._pending[None], drafts)
        elif drafts:
            levels, q = self._chain(drafts)
        tokens, middle = torch.cat(levels, dim=1), self._clock()
        fed = self._base.feed(tokens, self._cache, self._drafter.needs.layers, tree=tree)
        logits = self._base.logits(fed.hidden[0])
        if tree is not None:
            way, new = self._judge_tree(tree, tokens[0], logits)
        else:
            way, new = self._judge_chain(tokens[0, 1:], logits, q)
        self._fed = self._base.keep(self._cache, fed, way)
        self._at += len(way)
        self._pending = torch.tensor(new[-1:], device=self._base.device)
        draft_ms = 1e3 * (middle - start) if drafts else 0.0
        return Round(tuple(new), len(levels) - 1, len(way) - 1, draft_ms, 1e3 * (self._clock() - middle))

    def _chain(self, drafts: int) -> tuple[list[Tensor], list[Tensor]]:
        """The pending token and the drafts int64 [1, 1] each, and the distributions the drafts were drawn from."""
        state, tokens, q = self._start(), [self._pending[None]], list[Tensor]()
        for _ in range(drafts):
            logits, state = self._drafter.step(state, tokens[-1])
            scores = logits[0].to(self._base.device)
            if self._sampling.greedy:
                tokens.append(scores.argmax(-1)[None])
            else:
                q.append(self._sampling.probabilities(scores))
                tokens.append(draw(q[-1], self._random)[None].clamp(min=0))
        return tokens, q

    def _start(self) -> DraftState:
        position = torch.tensor([[self._at]], device=self._base.device)
        state = self._drafter.start(BaseState.after(self._fed, position, self._base.embed, self._previous))
        self._previous = state if self._drafter.needs.own_cache else None
        return state

    def _judge_chain(self, drafts: Tensor, logits: Tensor, q: list[Tensor]) -> tuple[list[int], list[int]]:
        """The places of the tokens that stand, the pending one first; and the tokens that are new."""
        accepted, following = judge(logits, drafts, q, self._sampling, self._random)
        held, *tokens, last = _to_host(torch.cat((accepted[None], drafts, following[None])))
        return list(range(held + 1)), [*tokens[:held], last]

    def _judge_tree(self, tree: Tree, nodes: Tensor, logits: Tensor) -> tuple[list[int], list[int]]:
        """The nodes that stand, the root first; and the tokens that are new.

        The base chooses a token after every node, and the tree is followed as long as it holds that token: the text is
        what the base would choose alone.
        """
        both = _to_host(torch.cat((nodes, self._sampling.choose(logits, self._random))))
        tokens, choices = both[: len(nodes)], both[len(nodes) :]
        way = followed(tree, tokens, choices)
        return way, [*(tokens[node] for node in way[1:]), choices[way[-1]]]

    def _clock(self) -> float:
        """Seconds, once the device has done what it was given."""
        if self._base.device.type == "cuda":
            torch.cuda.synchronize(self._base.device)
        return time.perf_counter()


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


def _checked(drafts: int | Tree, vocabulary: int) -> int | Tree:
    if not isinstance(drafts, Tree):
        return count("drafts", drafts, least=0, advice="0 decodes without a drafter")
    if drafts.width > vocabulary:
        raise MtpExtractError(
            f"expected a tree that looks at no more choices than the {vocabulary} tokens there are, found one that "
            f"looks at {escape(drafts.width)}; make it narrower"
        )
    return drafts


def _shortened(drafts: int | Tree, most: int) -> int | Tree:
    """At most ``most`` steps of ``drafts``."""
    if isinstance(drafts, Tree):
        return drafts.to_depth(most) if most else 0
    return min(drafts, most)


def _until(made: Round, stops: frozenset[int]) -> Round:
    """What of a round belongs to the text: all up to the first stop token."""
    ends = next((place + 1 for place, token in enumerate(made.tokens) if token in stops), len(made.tokens))
    return Round(made.tokens[:ends], made.drafted, min(made.accepted, ends), made.draft_ms, made.verify_ms)
