"""The loop: draft K tokens, verify them in one forward of the base, keep the accepted ones and one more.

A sequence is always in this state: the base has seen all its tokens but the last, the *pending* one; their
K and V are in the cache, and ``hidden`` is the base's state that predicted the pending token. A round

1. drafts K tokens from the pending one (:mod:`~mtp_extract.speculate.draft`),
2. feeds the pending token and the drafts to the base, in one forward,
3. keeps the drafts the base agrees with, and the base's own token after them, which is the new pending one.

Greedy text is the base's own, token for token. Sampled text has the base's distribution.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mtp_extract.drafter import Drafter
from mtp_extract.errors import MtpExtractError, PairError
from mtp_extract.speculate.adaptive import AdaptiveDrafts, DraftLength
from mtp_extract.speculate.base import Base, check_pair
from mtp_extract.speculate.cache import SlotCache
from mtp_extract.speculate.draft import LITERT, Convention, Transform, draft_step, round_arguments
from mtp_extract.speculate.result import Buffer, Chunk, Generation, Round
from mtp_extract.speculate.sampling import Sampling, Verdict, draw, verify_greedy, verify_sampled
from mtp_extract.speculate.timing import Marks

__all__ = ["Options", "SpeculativeGenerator"]

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Options:
    """How to generate.

    Attributes:
        max_new_tokens: most tokens to generate, at least 1.
        drafts: K, or how to adapt it. 0 decodes with the base alone, in this same loop.
        sampling: greedy by default.
        stop_token_ids: tokens that end the text; None takes the base's ``generation_config.eos_token_id``.
        seed: of the random numbers. A sequence's numbers depend on the seed and its place in the batch alone.
    """

    max_new_tokens: int = 256
    drafts: int | AdaptiveDrafts = 3
    sampling: Sampling = field(default_factory=Sampling)
    stop_token_ids: Sequence[int] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise MtpExtractError(f"expected max_new_tokens of at least 1, found {self.max_new_tokens}")


@dataclass
class _Sequence:
    """A sequence under way. ``generator`` lives on the CPU: its numbers are the same on every device."""

    row: int
    prompt: tuple[int, ...]
    generator: torch.Generator
    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    finish_reason: str = ""

    @property
    def pending_position(self) -> int:
        return len(self.prompt) + len(self.tokens) - 1

    def add(self, tokens: Sequence[int], stops: frozenset[int], most: int) -> list[int]:
        """Append up to the first stop token, and notice the end. Returns what was appended."""
        ends = [i for i, token in enumerate(tokens) if token in stops]
        added = list(tokens[: ends[0] + 1] if ends else tokens)
        self.tokens += added
        self.finish_reason = "stop" if ends else "length" if len(self.tokens) >= most else ""
        return added


@dataclass(frozen=True)
class _Event:
    """Tokens of one sequence in one round; ``account`` is None for the first token."""

    row: int
    tokens: tuple[int, ...]
    account: Round | None


class SpeculativeGenerator:
    """A base model and its drafter, ready to generate.

    >>> generator = SpeculativeGenerator(base, load_drafter("DIR"), tokenizer)      # doctest: +SKIP
    >>> result = generator.generate("class Foo(object):", drafts=3)                 # doctest: +SKIP
    >>> result.text, result.acceptance, result.mean_accepted_length                 # doctest: +SKIP

    Args:
        base: a Gemma 4 model of transformers, on one or several devices.
        drafter: from :func:`mtp_extract.drafter.load_drafter`, on any device.
        tokenizer: the base's; only needed for prompts and results as text.
        convention: where drafting queries stand.
        transform: changes the arguments of every draft step, for controls.

    Raises:
        PairError: the two do not belong together.
    """

    def __init__(
        self,
        base: Any,
        drafter: Drafter,
        tokenizer: Any = None,
        *,
        convention: Convention = LITERT,
        transform: Transform | None = None,
    ) -> None:
        self.base = base if isinstance(base, Base) else Base(base)
        self.drafter = drafter
        self.tokenizer = tokenizer
        self.convention = convention
        self.transform = transform
        check_pair(self.base, drafter, tokenizer)

    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 256,
        drafts: int | AdaptiveDrafts = 3,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop_token_ids: Sequence[int] | None = None,
        seed: int = 0,
    ) -> Generation:
        """Continue one prompt, text or token ids; see :class:`Options` and :class:`~.sampling.Sampling`.

        Raises:
            PairError: a text prompt without a tokenizer, an empty prompt, or a token the base does not have.
            MtpExtractError: an option out of range.
        """
        sampling = Sampling(temperature, top_k, top_p)
        return self.generate_batch([prompt], Options(max_new_tokens, drafts, sampling, stop_token_ids, seed))[0]

    def generate_batch(self, prompts: Sequence[Prompt], options: Options | None = None) -> list[Generation]:
        """Continue several prompts at once; results in their order. Sequences leave the batch as they finish.

        Raises:
            PairError: as :meth:`generate`.
        """
        run = _Run(self, [self.encode(prompt) for prompt in prompts], options or Options())
        for _ in run.events():
            pass
        return [run.result(row) for row in range(len(prompts))]

    def stream(self, prompt: Prompt, options: Options | None = None) -> Iterator[Chunk]:
        """Continue one prompt, giving out each round's tokens and text as they come.

        The chunks' texts joined are the text :meth:`generate` returns.

        Raises:
            PairError: as :meth:`generate`.
        """
        run = _Run(self, [self.encode(prompt)], options or Options())
        tokens: list[int] = []
        given = ""
        for event in run.events():
            tokens += event.tokens
            text = self.decode(tokens) or ""
            # A character split over tokens decodes to U+FFFD until its last byte is there.
            if text.endswith("\ufffd") and not run.done:
                text = given
            yield Chunk(text[len(given) :], event.tokens, event.account)
            given = text

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a prompt: as the tokenizer makes them, or as given.

        Raises:
            PairError: text without a tokenizer, an empty prompt, or a token outside the base's vocabulary.
        """
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise PairError(
                    "expected a tokenizer for a text prompt, found none; pass the base's tokenizer, or token ids"
                )
            ids = tuple(int(token) for token in self.tokenizer(prompt)["input_ids"])
        else:
            ids = tuple(int(token) for token in prompt)
        if not ids:
            raise PairError("expected a prompt of at least one token, found an empty one; begin with the BOS token")
        if outside := [token for token in ids if not 0 <= token < self.base.vocab_size]:
            raise PairError(
                f"expected tokens below {self.base.vocab_size}, found {outside[0]}; tokenize with the "
                "base's own tokenizer"
            )
        return ids

    def decode(self, tokens: Sequence[int]) -> str | None:
        """Text of generated tokens, special tokens left out; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))


class _Run:
    """One call's state."""

    def __init__(self, owner: SpeculativeGenerator, prompts: Sequence[tuple[int, ...]], options: Options) -> None:
        self.owner, self.options = owner, options
        self.base, self.drafter = owner.base, owner.drafter
        self.length = DraftLength(options.drafts)
        stops = options.stop_token_ids
        if stops is None:
            configured = getattr(getattr(self.base.model, "generation_config", None), "eos_token_id", None)
            stops = [configured] if isinstance(configured, int) else configured or []
        self.stops = frozenset(stops)
        self.sequences = [
            _Sequence(row, prompt, torch.Generator().manual_seed(options.seed * 1_000_003 + row))
            for row, prompt in enumerate(prompts)
        ]
        self.active = list(self.sequences)
        self.prefill_ms = 0.0
        self.buffers: dict[str, Buffer] = {}

    @property
    def done(self) -> bool:
        return all(sequence.finish_reason for sequence in self.sequences)

    def result(self, row: int) -> Generation:
        sequence = self.sequences[row]
        return Generation(
            prompt_tokens=sequence.prompt,
            tokens=tuple(sequence.tokens),
            text=self.owner.decode(sequence.tokens),
            finish_reason=sequence.finish_reason,
            rounds=tuple(sequence.rounds),
            prefill_ms=self.prefill_ms,
            buffers=tuple(self.buffers.values()),
        )

    @torch.inference_mode()
    def events(self) -> Iterator[_Event]:
        """Run to the end, yielding each sequence's tokens round by round."""
        if not self.active:
            return
        cache, hidden, first = self._prefill()
        for sequence, token in zip(self.active, first.tolist(), strict=True):
            added = sequence.add([token], self.stops, self.options.max_new_tokens)
            yield _Event(sequence.row, tuple(added), None)
        pending = first
        while True:
            rows = [i for i, sequence in enumerate(self.active) if not sequence.finish_reason]
            if len(rows) < len(self.active):
                self.active = [self.active[i] for i in rows]
                if not self.active:
                    return
                cache.keep(rows)
                hidden, pending = hidden[rows], pending[rows]
            hidden, pending, emitted = self._round(cache, hidden, pending)
            for sequence, added, account in emitted:
                yield _Event(sequence.row, tuple(added), account)

    def _prefill(self) -> tuple[SlotCache, Tensor, Tensor]:
        """Feed the prompts: cache, states [batch, width] at their ends, first new tokens [batch]."""
        lengths = [len(sequence.prompt) for sequence in self.active]
        tokens = torch.zeros(len(lengths), max(lengths), dtype=torch.long, device=self.base.device)
        for row, sequence in enumerate(self.active):
            tokens[row, : lengths[row]] = torch.tensor(sequence.prompt)
        queries = self.length.most + 1
        cache = self.base.new_cache(
            batch=len(lengths), capacity=max(lengths) + self.options.max_new_tokens + queries, queries=queries
        )
        marks = Marks(self.base.device)
        marks.mark()
        states = self.base.forward(tokens, [0] * len(lengths), cache, lengths)
        hidden = states[
            torch.arange(len(lengths), device=states.device), torch.tensor(lengths, device=states.device) - 1
        ]
        logits = self.base.logits(hidden)
        if self.options.sampling.greedy:
            first = logits.argmax(-1)
        else:
            first = draw(self.options.sampling.probabilities(logits), self._uniform(1).squeeze(1))
        marks.mark()
        self.prefill_ms = sum(marks.milliseconds())
        for shape in dict.fromkeys(cache.shapes):
            self._note(f"base_kv_cache{list(shape[1:])}", shape, states.dtype, 2 * cache.shapes.count(shape))
        return cache, hidden, first

    def _round(
        self, cache: SlotCache, hidden: Tensor, pending: Tensor
    ) -> tuple[Tensor, Tensor, list[tuple[_Sequence, list[int], Round]]]:
        """One round of all active sequences. ``hidden`` [batch, width], ``pending`` [batch], in and out."""
        sampling, most = self.options.sampling, self.options.max_new_tokens
        limits = [min(self.length.value, most - len(sequence.tokens) - 1) for sequence in self.active]
        drafted = max(limits)
        starts = [sequence.pending_position for sequence in self.active]
        uniform = None if sampling.greedy else self._uniform(2 * self.length.most + 1)

        marks = Marks(self.base.device)
        marks.mark()
        drafts, q = self._draft(cache, hidden, pending, starts, drafted, uniform)
        marks.mark()
        states = self.base.forward(torch.cat((pending[:, None], drafts), dim=1), starts, cache)
        logits = self.base.logits(states)
        limit = torch.tensor(limits, device=logits.device)
        if uniform is None:
            verdict = verify_greedy(logits.argmax(-1), drafts, limit)
        else:
            judge = uniform[:, self.length.most :]
            judge = torch.cat((judge[:, :drafted], judge[:, -1:]), dim=1)
            verdict = verify_sampled(sampling.probabilities(logits), q, drafts, limit, judge)
        accepted, tokens = self._to_host(verdict, drafts)
        marks.mark()
        draft_ms, verify_ms = marks.milliseconds()
        self._note("target_hidden", states.shape, states.dtype)
        self._note("target_logits", logits.shape, logits.dtype)
        self._note("candidate_tokens", drafts.shape, drafts.dtype)

        emitted = []
        for sequence, limit_, count, new in zip(self.active, limits, accepted, tokens, strict=True):
            added = sequence.add(new, self.stops, most)
            account = Round(limit_, min(count, len(added)), len(added), draft_ms if limit_ else 0.0, verify_ms)
            sequence.rounds.append(account)
            emitted.append((sequence, added, account))
        self.length.observe(
            [(account.drafted, account.accepted) for _, _, account in emitted],
            draft_ms_per_step=draft_ms / drafted if drafted else 0.0,
            verify_ms=verify_ms,
        )
        row = torch.arange(len(starts), device=states.device)
        return states[row, verdict.accepted.to(states.device)], verdict.following, emitted

    def _draft(
        self,
        cache: SlotCache,
        hidden: Tensor,
        pending: Tensor,
        starts: Sequence[int],
        drafted: int,
        uniform: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Drafts [batch, K], and the distributions [batch, K, vocabulary] drawn from (empty if greedy)."""
        device = self.base.device
        tokens, distributions = [], []
        nothing = torch.empty(len(starts), 0, self.base.vocab_size, device=device)
        if not drafted:
            return torch.empty(len(starts), 0, dtype=torch.long, device=device), nothing
        shared_kv, slots = self.base.read_kv(cache)
        position = torch.tensor(starts, device=device)[:, None]
        arguments = round_arguments(
            self.base,
            self.drafter,
            self.owner.convention,
            pending[:, None],
            position,
            hidden[:, None],
            shared_kv,
            slots,
        )
        self._note("drafter_input", (*arguments.hidden.shape[:2], 2 * self.base.width), arguments.hidden.dtype)
        for step in range(drafted):
            logits, arguments = draft_step(self.drafter, arguments, step, self.owner.transform)
            self._note("draft_logits", logits.shape, logits.dtype)
            last = logits[:, -1].to(device)
            if uniform is None:
                token = last.argmax(-1)
            else:
                distributions.append(self.options.sampling.probabilities(last))
                token = draw(distributions[-1], uniform[:, step])
            tokens.append(token)
            if step + 1 < drafted:
                embedding = self.base.embed(token[:, None]).to(arguments.hidden)
                arguments = dataclasses.replace(arguments, embedding=embedding)
        return torch.stack(tokens, dim=1), torch.stack(distributions, dim=1) if distributions else nothing

    def _to_host(self, verdict: Verdict, drafts: Tensor) -> tuple[list[int], list[list[int]]]:
        """Accepted counts and new tokens: one copy from the device, the round's only wait."""
        table = torch.cat((verdict.accepted[:, None], verdict.following[:, None], drafts), dim=1).tolist()
        accepted = [row[0] for row in table]
        return accepted, [[*row[2 : 2 + row[0]], row[1]] for row in table]

    def _uniform(self, count: int) -> Tensor:
        """F64 [batch, count] in [0, 1), each sequence from its own generator."""
        rows = [torch.rand(count, generator=sequence.generator, dtype=torch.float64) for sequence in self.active]
        return torch.stack(rows).to(self.base.device)

    def _note(self, name: str, shape: Sequence[int], dtype: torch.dtype, copies: int = 1) -> None:
        """Record a buffer, at its largest."""
        size = copies * dtype.itemsize * torch.Size(shape).numel()
        if name not in self.buffers or self.buffers[name].nbytes < size:
            self.buffers[name] = Buffer(name, tuple(shape), str(dtype).removeprefix("torch."), size)
