"""Speculative against plain greedy decoding: the same text, and what it costs.

Whether the text is the same, and how many drafts are accepted, is counted over all prompts, in batches. Times
are of a batch of one, where drafting pays, over a few prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch

from mtp_extract.engines import Engine
from mtp_extract.speculate import Base, Buffer, Generation, Options, speedup
from mtp_extract.validate.acceptance.agreement import Continuations

__all__ = ["Divergence", "DraftLengthResult", "GenerationResult", "measure_generation"]


# What the order of additions over a whole model can move a logit by, in float32.
_FLOAT32_TIE = 1e-3


@dataclass(frozen=True)
class Divergence:
    """Where a text first differs from the base's own.

    Attributes:
        prompt: index.
        token: index among the generated tokens.
        tie: whether the margin is within what the base's dtype can tell apart.
        margin: logit of the base's token less that of the other, in one forward over the text. Near 0 the two
            tie, and the shape of a matrix product decides. None where one text only ends earlier.
    """

    prompt: int
    token: int
    margin: float | None
    tie: bool


@dataclass(frozen=True)
class DraftLengthResult:
    """One K.

    Attributes:
        accepted, drafted, rounds: over all prompts.
        acceptance: accepted / drafted.
        mean_accepted_length: 1 + accepted / rounds.
        identical_prompts: texts equal to the base's, of ``prompts``.
        divergences: the others.
        base_tokens_per_s, speculative_tokens_per_s: batch of one, after the first token.
        verify_ms, draft_ms: mean of a round, batch of one.
        buffers: of a batch of one, at their largest.
    """

    drafts: int
    accepted: int
    drafted: int
    rounds: int
    acceptance: float
    mean_accepted_length: float
    prompts: int
    identical_prompts: int
    divergences: tuple[Divergence, ...]
    base_tokens_per_s: float
    speculative_tokens_per_s: float
    verify_ms: float
    draft_ms: float
    buffers: tuple[Buffer, ...]

    @property
    def identical(self) -> bool:
        """Whether every text is the base's."""
        return self.identical_prompts == self.prompts


@dataclass(frozen=True)
class GenerationResult:
    """All K.

    Attributes:
        timed: prompts behind the times.
        base_ms: one forward of the base over one token.
        best_drafts: the K worth drafting by the arithmetic, from measured acceptance and cost; 0 for none.
        predicted_speedup: at that K.
        break_even_drafts: the largest K that is still predicted to be faster than none; 0 where none is.
    """

    lengths: tuple[DraftLengthResult, ...]
    timed: int
    base_ms: float
    best_drafts: int
    predicted_speedup: float
    break_even_drafts: int


def measure_generation(
    engine: Engine,
    base: Base,
    continuations: Continuations,
    lengths: Sequence[int],
    conditional: Sequence[float],
    *,
    new_tokens: int,
    timed: int,
) -> GenerationResult:
    """Generate with every K of ``lengths``.

    Args:
        engine: generates.
        base: its base, which says how near two tokens were where texts part.
        continuations: what the base alone wrote; texts must equal these.
        lengths: values of K.
        conditional: acceptance by step, for the arithmetic.
        new_tokens: as the continuations were made with.
        timed: how many prompts to time, spread over the workloads.
    """
    prompts = [text.tokens[: text.prompt_length] for text in continuations.texts]
    chosen = _spread(continuations, timed)

    def run(indices: Sequence[int], drafts: int) -> list[Generation]:
        return engine.generate([prompts[i] for i in indices], Options(max_new_tokens=new_tokens, drafts=drafts))

    def one_by_one(drafts: int) -> list[Generation]:
        return [result for index in chosen for result in run([index], drafts)]

    run(chosen[:1], max(lengths))  # Kernels are chosen and memory is taken in the first call.
    plain = one_by_one(0)
    results = []
    for drafts in lengths:
        together = run(range(len(prompts)), drafts)
        alone = one_by_one(drafts)
        wrong = [
            _divergence(base, continuations, index, result.tokens)
            for index, result in enumerate(together)
            if result.tokens != _own(continuations, index)
        ]
        # A batch of one is compared with a batch of one: the sums may be ordered otherwise than in a larger one.
        wrong += [
            _divergence(base, continuations, index, fast.tokens)
            for index, fast, slow in zip(chosen, alone, plain, strict=True)
            if fast.tokens != slow.tokens and index not in {d.prompt for d in wrong}
        ]
        rounds = [r for result in together for r in result.rounds if r.drafted]
        timed_rounds = [r for result in alone for r in result.rounds if r.drafted]
        accepted, drafted = sum(r.accepted for r in rounds), sum(r.drafted for r in rounds)
        results.append(
            DraftLengthResult(
                drafts=drafts,
                accepted=accepted,
                drafted=drafted,
                rounds=len(rounds),
                acceptance=accepted / drafted if drafted else float("nan"),
                mean_accepted_length=1 + accepted / len(rounds) if rounds else float("nan"),
                prompts=len(together),
                identical_prompts=len(together) - len(wrong),
                divergences=tuple(wrong),
                base_tokens_per_s=_rate(plain),
                speculative_tokens_per_s=_rate(alone),
                verify_ms=fmean(r.verify_ms for r in timed_rounds) if timed_rounds else float("nan"),
                draft_ms=fmean(r.draft_ms for r in timed_rounds) if timed_rounds else float("nan"),
                buffers=max(alone, key=lambda g: sum(b.nbytes for b in g.buffers)).buffers,
            )
        )
    base_rounds = [r.verify_ms for result in plain for r in result.rounds]
    base_ms = fmean(base_rounds) if base_rounds else float("nan")
    gains = _gains(results, conditional, base_ms)
    best = max(gains, key=lambda drafts: (gains[drafts], -drafts))
    pays = max(drafts for drafts, gain in gains.items() if not drafts or gain > 1)
    return GenerationResult(tuple(results), len(chosen), base_ms, best, gains[best], pays)


def _own(continuations: Continuations, index: int) -> tuple[int, ...]:
    text = continuations.texts[index]
    return text.tokens[text.prompt_length :]


def _spread(continuations: Continuations, count: int) -> list[int]:
    """Indices of ``count`` prompts, the workloads in turn, those that leave something to draft first."""
    queues = [
        sorted(continuations.of_workload(name), key=lambda i: not continuations.texts[i].anchors)
        for name in continuations.workloads
    ]
    order = [queue[turn] for turn in range(max(map(len, queues))) for queue in queues if turn < len(queue)]
    return order[:count]


@torch.inference_mode()
def _divergence(base: Base, continuations: Continuations, prompt: int, found: tuple[int, ...]) -> Divergence:
    """Where ``found`` leaves the base's own text, and how near the two tokens were there."""
    text, own = continuations.texts[prompt], _own(continuations, prompt)
    at = next((i for i in range(min(len(own), len(found))) if own[i] != found[i]), None)
    if at is None:
        return Divergence(prompt, min(len(own), len(found)), None, False)
    before = torch.tensor([text.tokens[: text.prompt_length + at]], device=base.device)
    logits = base.logits(base.full_pass(before).hidden[:, -1])[0]
    margin = float(logits[own[at]] - logits[found[at]])
    # Two roundings of the head's result, at the size these logits have.
    coarse = torch.finfo(base.model.get_input_embeddings().weight.dtype).eps
    resolution = 2 * coarse * float(logits[[own[at], found[at]]].abs().max())
    return Divergence(prompt, at, margin, abs(margin) <= max(resolution, _FLOAT32_TIE))


def _rate(results: Sequence[Generation]) -> float:
    """Tokens after the first, per second, over several texts."""
    milliseconds = sum(r.draft_ms + r.verify_ms for r in results)
    return 1e3 * sum(len(r.tokens) - 1 for r in results) / milliseconds if milliseconds else float("nan")


def _gains(results: Sequence[DraftLengthResult], conditional: Sequence[float], base_ms: float) -> dict[int, float]:
    """By K, of 0 and those measured: the speedup by the arithmetic, each with its own cost."""
    gains = {0: 1.0}
    for result in results:
        if result.draft_ms == result.draft_ms:
            gains[result.drafts] = speedup(
                conditional[: result.drafts],
                draft_cost=result.draft_ms / result.drafts,
                verify_cost=base_ms,
                verify_cost_per_draft=(result.verify_ms - base_ms) / result.drafts,
            )
    return gains
