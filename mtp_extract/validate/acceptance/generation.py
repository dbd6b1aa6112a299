"""Speculative against plain greedy decoding: the same text, and what it costs.

Whether the text is the same, and how many drafts are accepted, is counted over all prompts, in batches. Times
are of a batch of one, where drafting pays, over a few prompts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from mtp_extract.evaluate.agreement import Continuations
from mtp_extract.evaluate.batches import generate_in_batches
from mtp_extract.speculate.arithmetic import Proportion
from mtp_extract.speculate.generate import Options, SpeculativeGenerator
from mtp_extract.speculate.intervals import Interval, share_interval
from mtp_extract.speculate.result import Generation, Round, conditional_by_step, unconditional_by_step
from mtp_extract.speculate.target import Base
from mtp_extract.speculate.teacher import Text
from mtp_extract.validate.acceptance.drafting import Drafting

FASTER = 0.9  # of the time of one token: what chance alone does not make of the time of a round
_FLOAT32_TIE = 1e-3  # what the order of additions over a whole model can move a logit by, in float32

_MOST_MOVED = 8  # roundings of the head at most: a base that disagrees with itself by more excuses nothing


@dataclass(frozen=True)
class Divergence:
    """Where a text first differs from the base's own."""

    prompt: int  # index
    token: int  # index among the generated tokens
    # logit of the base's token less that of the other, in one forward over the text. Near 0 the two tie, and the shape
    # of a matrix product decides. None where one text only ends earlier.
    margin: float | None
    tie: bool  # whether the margin is within what the base's dtype can tell apart, through all of its layers


@dataclass(frozen=True, kw_only=True)
class DraftLengthResult(Drafting):
    """One chain, or one tree, and what generating with it showed."""

    accepted: int  # over all prompts but those whose text repeats another's
    drafted: int  # steps of the drafter in these rounds; in a chain each is one draft
    rounds: int  # over the same prompts, that drafted something
    acceptance: float  # accepted / drafted
    mean_accepted_length: float  # 1 + accepted / rounds
    mean_accepted_interval: Interval | None  # 95 % of that, over prompts; None with too few
    elsewhere: float | None  # mean accepted length of the prompts that did not choose the tree; None where none did
    # by step, drafts that stand together with all before them, of rounds that drafted it
    unconditional: tuple[Proportion, ...]
    conditional: tuple[Proportion, ...]  # by step, of those that accepted all before it
    prompts: int
    identical_prompts: int  # texts equal to the base's, of ``prompts``
    divergences: tuple[Divergence, ...]  # the others
    base_tokens_per_s: float  # batch of one, after the first token
    speculative_tokens_per_s: float  # likewise
    verify_ms: float  # mean of a round, batch of one
    draft_ms: float  # likewise

    @property
    def identical(self) -> bool:
        return self.identical_prompts == self.prompts

    @property
    def accepted_by_step(self) -> tuple[float, ...]:
        """Share of all rounds that accepted a draft at each step; together, mean accepted length less one."""
        return tuple(share.successes / self.rounds for share in self.unconditional)

    @property
    def wrong_text(self) -> bool:
        """Whether a text is another than the base's where the base is sure."""
        return any(not divergence.tie for divergence in self.divergences)

    @property
    def measured_speedup(self) -> float:
        """In tokens a second, over the prompts that were timed; NaN where nothing was."""
        return self.speculative_tokens_per_s / self.base_tokens_per_s if self.base_tokens_per_s else math.nan

    def predicted_speedup(self, base_ms: float) -> float:
        """By the mean accepted length over all prompts and the time of a round, where a token takes the base
        ``base_ms``; NaN where nothing was timed.
        """
        return self.mean_accepted_length * base_ms / (self.verify_ms + self.draft_ms)


@dataclass(frozen=True)
class GenerationResult:
    """All chains, then all trees."""

    lengths: tuple[DraftLengthResult, ...]  # one each, of different names
    timed: int  # prompts behind the times
    base_ms: float  # one forward of the base over one token

    @property
    def chains(self) -> tuple[DraftLengthResult, ...]:
        return tuple(result for result in self.lengths if result.tree is None)

    @property
    def best_drafts(self) -> int:
        """The K of a chain worth drafting, by the predicted speedup; 0 for none."""
        return max(self._gains, key=lambda drafts: (self._gains[drafts], -drafts))

    @property
    def predicted_speedup(self) -> float:
        """At that K."""
        return self._gains[self.best_drafts]

    @property
    def break_even_drafts(self) -> int:
        """The largest K that is still predicted to be faster than none; 0 where none is."""
        return max(drafts for drafts, gain in self._gains.items() if not drafts or gain > 1)

    @property
    def disturbed(self) -> bool:
        """Whether the times cannot be right: a round that drafts and verifies took less than one token of the base."""
        return any(found.verify_ms + found.draft_ms < FASTER * self.base_ms for found in self.lengths)

    @property
    def _gains(self) -> dict[int, float]:
        gains = {result.drafts: result.predicted_speedup(self.base_ms) for result in self.chains}
        return {0: 1.0} | {drafts: gain for drafts, gain in gains.items() if not math.isnan(gain)}


def measure_generation(
    generator: SpeculativeGenerator,
    continuations: Continuations,
    draftings: Sequence[Drafting],
    *,
    batch: int,
    new_tokens: int,
    timed: int,
    done: Callable[[], None] = lambda: None,
) -> GenerationResult:
    """Generate with each of ``draftings``.

    Args:
        continuations: what the base alone wrote; texts must equal these.
        batch: prompts at a time, where nothing is timed.
        new_tokens: as the continuations were made with.
        timed: how many prompts to time, spread over the workloads.
        done: called after each batch where nothing is timed.
    """
    texts, chosen = continuations.texts, _spread(continuations, timed)

    def run(
        indices: Sequence[int], drafting: Drafting | None, done: Callable[[], None] = lambda: None
    ) -> list[Generation]:
        options = Options(max_new_tokens=new_tokens, drafts=0 if drafting is None else drafting.what)
        return generate_in_batches(generator, [texts[i].prompt for i in indices], options, batch=batch, done=done)

    def one_by_one(drafting: Drafting | None) -> list[Generation]:
        return [result for index in chosen for result in run([index], drafting)]

    # Kernels are chosen and memory is taken in the first call.
    run(chosen[:1], max(draftings, key=lambda drafting: drafting.drafts))
    plain = one_by_one(None)
    results = []
    for drafting in draftings:
        together, alone = run(range(len(texts)), drafting, done), one_by_one(drafting)
        differing = {i: r.tokens for i, r in enumerate(together) if r.tokens != texts[i].continuation}
        # A batch of one is compared with a batch of one: the sums may be ordered otherwise than in a larger one.
        own = dict(enumerate(texts))
        for index, fast, slow in zip(chosen, alone, plain, strict=True):
            if fast.tokens != slow.tokens and index not in differing:
                differing[index] = fast.tokens
                own[index] = dataclasses.replace(texts[index], tokens=texts[index].prompt + slow.tokens)
        wrong = [_divergence(generator.base, own[i], i, tokens) for i, tokens in differing.items()]
        counted = {i: result for i, result in enumerate(together) if i not in continuations.repeats}
        others = [result for i, result in counted.items() if i not in drafting.chosen_on]
        rounds, timed_rounds = _drafting_rounds(counted.values()), _drafting_rounds(alone)
        accepted, drafted = sum(r.accepted for r in rounds), sum(r.drafted for r in rounds)
        results.append(
            DraftLengthResult(
                **vars(drafting),
                accepted=accepted,
                drafted=drafted,
                rounds=len(rounds),
                acceptance=accepted / drafted if drafted else math.nan,
                mean_accepted_length=_mean_length(rounds),
                mean_accepted_interval=_interval(counted.values(), drafting.depth),
                elsewhere=_mean_length(_drafting_rounds(others)) if drafting.chosen_on else None,
                unconditional=tuple(unconditional_by_step(rounds)),
                conditional=tuple(conditional_by_step(rounds)),
                prompts=len(together),
                identical_prompts=len(together) - len(wrong),
                divergences=tuple(wrong),
                base_tokens_per_s=_rate(plain),
                speculative_tokens_per_s=_rate(alone),
                verify_ms=_mean([r.verify_ms for r in timed_rounds]),
                draft_ms=_mean([r.draft_ms for r in timed_rounds]),
            )
        )
    base_ms = _mean([r.verify_ms for result in plain for r in result.rounds])
    return GenerationResult(tuple(results), len(chosen), base_ms)


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan


def _drafting_rounds(results: Iterable[Generation]) -> list[Round]:
    return [r for result in results for r in result.rounds if r.drafted]


def _mean_length(rounds: Sequence[Round]) -> float:
    return 1 + sum(r.accepted for r in rounds) / len(rounds) if rounds else math.nan


def _interval(results: Iterable[Generation], depth: int) -> Interval | None:
    """Of the mean accepted length, 95 % over prompts, of rounds of at most ``depth`` steps; None with too few."""
    prompts = [_drafting_rounds([result]) for result in results]
    found = share_interval([sum(r.accepted for r in rounds) / depth for rounds in prompts], list(map(len, prompts)))
    return found and found.scaled(depth, 1.0)


def _spread(continuations: Continuations, count: int) -> list[int]:
    """Indices of ``count`` prompts, the workloads in turn, those that leave something to draft first."""
    queues = [
        sorted(continuations.of_workload(name), key=lambda i: not continuations.texts[i].anchors)
        for name in continuations.workloads
    ]
    order = [queue[turn] for turn in range(max(map(len, queues))) for queue in queues if turn < len(queue)]
    return order[:count]


@torch.inference_mode()
def _divergence(base: Base, text: Text, prompt: int, found: tuple[int, ...]) -> Divergence:
    """Where ``found`` leaves the base's own ``text``, and how near the two tokens were there."""
    own = text.continuation
    at = next((i for i in range(min(len(own), len(found))) if own[i] != found[i]), None)
    if at is None:
        return Divergence(prompt, min(len(own), len(found)), None, False)
    before = torch.tensor([text.tokens[: text.prompt_length + at]], device=base.device)
    logits = base.logits(base.full_pass(before).hidden[:, -1])[0]
    margin = float(logits[own[at]] - logits[found[at]])
    # Two roundings of the head's result, at the size these logits have; and what rounding in all the layers before it
    # does, which is more the more there are, and is asked of the base.
    coarse = torch.finfo(base.model.get_input_embeddings().weight.dtype).eps
    resolution = 2 * coarse * float(logits[[own[at], found[at]]].abs().max())
    moved = float((_stepped(base, before) - logits).abs().max()) if before.shape[1] > 1 else 0.0
    tie = abs(margin) <= max(resolution, min(moved, _MOST_MOVED * resolution), _FLOAT32_TIE)
    return Divergence(prompt, at, margin, tie)


def _stepped(base: Base, tokens: Tensor) -> Tensor:
    """Logits [vocabulary] after ``tokens`` [1, length], the last of them fed by itself.

    The cache is transformers' own: what may be wrong with a loop's text does not say how much is forgiven.
    """
    body = base.model.model
    cache = body(input_ids=tokens[:, :-1], use_cache=True).past_key_values
    fed = body(input_ids=tokens[:, -1:], past_key_values=cache, use_cache=True)
    return base.logits(fed.last_hidden_state[:, -1])[0]


def _rate(results: Sequence[Generation]) -> float:
    """Tokens after the first, per second, over several texts."""
    milliseconds = sum(r.draft_ms + r.verify_ms for r in results)
    return 1e3 * sum(len(r.tokens) - 1 for r in results) / milliseconds if milliseconds else math.nan
