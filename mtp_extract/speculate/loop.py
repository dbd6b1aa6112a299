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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mtp_extract.drafter.protocol import BaseState, Drafter
from mtp_extract.errors import DrafterError
from mtp_extract.speculate.adaptive import AdaptiveDrafts, RunningLength
from mtp_extract.speculate.codec import Codec, Prompt, count
from mtp_extract.speculate.sampling import NOT_DRAWN, Sampling, draw, judge
from mtp_extract.speculate.target import Base, check_pair
from mtp_extract.speculate.trees import Tree, grow

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
        stops = self.base.stop_token_ids if stop_token_ids is None else stop_token_ids
        sampling = Sampling(temperature, top_k, top_p)
        first, *rounds = self.rounds(tokens, max_new_tokens, drafts, sampling, stops, seed)
        new = tuple(token for r in (first, *rounds) for token in r.tokens)
        reason = "stop" if new[-1] in stops else "length"
        return Generation(tokens, new, self.codec.decode(new), reason, tuple(rounds), first.verify_ms)

    @torch.inference_mode()
    def rounds(
        self,
        prompt: Sequence[int],
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
        base, drafter, left = self.base, self.drafter, count("max_new_tokens", max_new_tokens, least=1)
        sampling, device, layers = sampling or Sampling(), base.device, drafter.needs.layers
        stops = frozenset(base.stop_token_ids if stop_token_ids is None else stop_token_ids)
        random = torch.Generator(device).manual_seed(count("seed", seed, least=-(1 << 63)) % (1 << 64))
        running = RunningLength(drafts) if isinstance(drafts, AdaptiveDrafts) else None
        chain = drafts.most if isinstance(drafts, AdaptiveDrafts) else drafts
        whole = chain if isinstance(chain, Tree) else Tree((1,) * count("drafts", chain, least=0))
        whole.require_tokens(base.vocab_size)
        drawn: list[Tensor] = []  # of each draft of a chain, the distribution it was drawn from

        def choose(logits: Tensor, width: int) -> Tensor:
            if sampling.greedy or whole.width > 1:
                return logits.topk(width, dim=-1).indices if width > 1 else logits.argmax(-1)
            drawn.append(sampling.probabilities(logits))
            return draw(drawn[-1], random).clamp(min=0)

        cache, start = base.new_cache(), self._clock()
        fed = base.feed(torch.tensor([list(prompt)], device=device), layers, cache)
        fed, previous = base.keep(cache, fed, range(len(prompt))), None
        new = _to_host(sampling.choose(base.logits(fed.hidden[0, -1:]), random))
        yield Round(tuple(new), 0, 0, 0.0, 1e3 * (self._clock() - start))
        while (left := left - len(new)) and new[-1] not in stops:
            start = middle = self._clock()
            nodes = torch.tensor([new[-1:]], device=device)
            # Of the tokens that are left, one is the base's own.
            tree = whole.to_depth(min(left - 1, running.value if running else whole.depth))
            if tree.depth:
                previous = drafter.start(BaseState.after(fed, fed.positions[:, -1:] + 1, base.embed, previous))
                nodes = grow(drafter, previous, nodes, tree, choose)
                middle = self._clock()
            fed = base.feed(nodes, layers, cache, tree=tree)
            logits = base.logits(fed.hidden[0])
            if drawn:
                accepted, following = judge(sampling.probabilities(logits), nodes[0, 1:], drawn, random)
                held, *tokens, last = _to_host(torch.cat((accepted[None], nodes[0, 1:], following[None])))
                way, new = [*range(held + 1)], [*tokens[:held], last]
                drawn.clear()
            else:
                # The base chooses a token after every node, and the tree is followed as long as it holds that token.
                both = _to_host(torch.cat((nodes[0], sampling.choose(logits, random))))
                tokens, choices = both[: nodes.shape[1]], both[nodes.shape[1] :]
                way = tree.followed(tokens, choices)
                new = [choices[node] for node in way]
            fed = base.keep(cache, fed, way)
            draft_ms, verify_ms = 1e3 * (middle - start), 1e3 * (self._clock() - middle)
            if running:
                running.observe(tree.depth, len(way) - 1, draft_ms, verify_ms)
            new = new[: next((place + 1 for place, token in enumerate(new) if token in stops), len(new))]
            yield Round(tuple(new), tree.depth, min(len(way) - 1, len(new)), draft_ms, verify_ms)

    def _clock(self) -> float:
        """Seconds, once the device has done what it was given."""
        if self.base.device.type == "cuda":
            torch.cuda.synchronize(self.base.device)
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
