"""The loop: draft K tokens, verify them in one forward of the base, keep the accepted ones and one more.

A sequence is always in this state: the base has seen all its tokens but the last, the *pending* one; their
K and V are in the cache, and ``hidden`` is the base's state that predicted the pending token. A round

1. drafts K tokens from the pending one,
2. feeds the pending token and the drafts to the base, in one forward,
3. keeps the drafts the base agrees with, and the base's own token after them, which is the new pending one.

Greedy text is the base's own, token for token. Sampled text has the base's distribution.

Drafts are a chain or a tree. A tree's nodes are fed together, each seeing its ancestors alone; afterwards the cache and
what is known of the base keep the way down that was accepted, as if it had been a chain.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mtp_extract.drafter.protocol import BaseState, Drafter, DraftState
from mtp_extract.errors import DrafterError, MtpExtractError, escape
from mtp_extract.speculate.adaptive import AdaptiveDrafts, DraftLength
from mtp_extract.speculate.codec import Codec, Prompt
from mtp_extract.speculate.growing import FixedTree, Nodes, grow_by_confidence, grow_fixed
from mtp_extract.speculate.numbers import count
from mtp_extract.speculate.result import Chunk, Generation, Round
from mtp_extract.speculate.sampling import (
    NOT_DRAWN,
    Sampling,
    Verdict,
    draw,
    verify_greedy,
    verify_sampled,
    verify_tree,
)
from mtp_extract.speculate.state import ActiveSequence, LoopState, Marks, RandomNumbers, at_index
from mtp_extract.speculate.target import Base, check_pair
from mtp_extract.speculate.trees import AutoTree, Tree


@dataclass(frozen=True)
class Options:
    max_new_tokens: int = 256  # most tokens to generate, at least 1
    # K, how to adapt it, or a tree. 0 decodes with the base alone, in this same loop.
    drafts: int | AdaptiveDrafts | Tree | AutoTree = 3
    sampling: Sampling = field(default_factory=Sampling)  # greedy by default
    # tokens that end the text; None takes the base's ``generation_config.eos_token_id``
    stop_token_ids: Sequence[int] | None = None
    # of the random numbers, any whole number. A sequence's numbers depend on the seed and its place in the batch alone.
    seed: int = 0
    stop: str | Sequence[str] = ()  # texts that end the text, and are not part of it; they need a tokenizer
    chat_template: bool = False  # take a prompt that is text as what a user says in a chat

    def __post_init__(self) -> None:
        count("max_new_tokens", self.max_new_tokens, least=1)
        count("seed", self.seed, least=-(1 << 63))
        DraftLength(self.drafts)
        ids = self.stop_token_ids
        if ids is not None and (isinstance(ids, str) or not isinstance(ids, Iterable)):
            raise MtpExtractError(f"expected a list of stop_token_ids, found {escape(ids)}; put it in a list")
        for token in ids or ():
            count("a stop token", token, least=0)
        if not all(isinstance(text, str) and text for text in self.stop_strings):
            raise MtpExtractError(f"expected stop strings of at least one character, found {escape(self.stop)}")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop``, also when it is one."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


_RoundResult = tuple[LoopState, list[list[int]], tuple[float, float]]
"""The state after a round; of each sequence drafts accepted, the token after them, steps drafted, and the drafts, in a
tree followed by their ranks; and the times of drafting and verifying, in ms."""


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
        drafts: int | AdaptiveDrafts | Tree | AutoTree = 3,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop: str | Sequence[str] = (),
        stop_token_ids: Sequence[int] | None = None,
        seed: int = 0,
        chat_template: bool = False,
    ) -> Generation:
        """Continue one prompt: text, token ids, or messages; see :class:`Options` and :class:`~.sampling.Sampling`.

        Raises:
            PairError: text or messages that cannot be encoded, a stop string without a tokenizer, an empty prompt,
                or a token the base does not have.
            MtpExtractError: an option out of range.
        """
        sampling = Sampling(temperature, top_k, top_p)
        options = Options(max_new_tokens, drafts, sampling, stop_token_ids, seed, stop, chat_template)
        return self.generate_batch([prompt], options)[0]

    def generate_batch(self, prompts: Sequence[Prompt], options: Options | None = None) -> list[Generation]:
        """Continue several prompts at once; results in their order. Sequences leave the batch as they finish.

        Raises:
            PairError: as :meth:`generate`.
        """
        run = _Run(self, prompts, options or Options())
        for _ in run.rounds():
            pass
        return [run.result(row) for row in range(len(prompts))]

    def stream(self, prompt: Prompt, options: Options | None = None) -> Iterator[Chunk]:
        """Continue one prompt, giving out each round's tokens and text as they come.

        The chunks' texts joined are the text :meth:`generate` returns.

        Raises:
            PairError: as :meth:`generate`.
        """
        run = _Run(self, [prompt], options or Options())
        given = 0
        for tokens, account in run.rounds():
            text = run.text_so_far(0)
            yield Chunk(text[given:], tokens, account)
            given = max(given, len(text))


class _Run:
    def __init__(self, owner: SpeculativeGenerator, prompts: Sequence[Prompt], options: Options) -> None:
        self.base, self.drafter, self.codec, self.options = owner.base, owner.drafter, owner.codec, options
        self.length = DraftLength(options.drafts)
        if isinstance(options.drafts, Tree) and options.drafts.width > self.base.vocab_size:
            raise MtpExtractError(
                f"expected a tree that looks at no more choices than the {self.base.vocab_size} tokens "
                f"there are, found one that looks at {options.drafts.width}; make it narrower"
            )
        self.stop = options.stop_strings
        if self.stop:
            self.codec.require("stop strings")
        stops = self.base.stop_token_ids if options.stop_token_ids is None else options.stop_token_ids
        # A stop string that is a special token never shows in the text.
        special = [token for token in map(self.codec.special, self.stop) if token is not None]
        self.stop_tokens = frozenset((*stops, *special))
        encoded = self.codec.encode_all(prompts, chat_template=options.chat_template)
        self.sequences = [
            ActiveSequence(prompt, torch.Generator().manual_seed((options.seed * 1_000_003 + row) % (1 << 64)))
            for row, prompt in enumerate(encoded)
        ]
        self.active = list(self.sequences)
        self.prefill_ms = 0.0
        self._previous: DraftState = None
        self._rows: list[int] | None = None
        self._shapes: dict[int, FixedTree] = {}

    def ends(self, tokens: list[int]) -> bool:
        """Whether the last of ``tokens`` ends the text."""
        return tokens[-1] in self.stop_tokens or self.codec.ended(tokens, self.stop)

    def text_so_far(self, row: int) -> str:
        """What can be shown of a sequence: all of it when it has ended."""
        sequence = self.sequences[row]
        if sequence.finish_reason:
            return self.codec.decode(sequence.tokens, self.stop) or ""
        return self.codec.settled(sequence.tokens, self.stop)

    def result(self, row: int) -> Generation:
        sequence = self.sequences[row]
        return Generation(
            prompt_tokens=sequence.prompt.tokens,
            bos=sequence.prompt.bos,
            tokens=tuple(sequence.tokens),
            text=self.codec.decode(sequence.tokens, self.stop),
            finish_reason=sequence.finish_reason,
            rounds=tuple(sequence.rounds),
            prefill_ms=self.prefill_ms,
        )

    @torch.inference_mode()
    def rounds(self) -> Iterator[tuple[tuple[int, ...], Round | None]]:
        """Run to the end, round by round: the tokens of each sequence and its account, None for the first token."""
        if not self.active:
            return
        loop, first = self._prefill()
        for sequence, (token,) in zip(self.active, first, strict=True):
            added = sequence.add([token], self.ends, self.options.max_new_tokens)
            yield tuple(added), None
        while True:
            rows = [i for i, sequence in enumerate(self.active) if not sequence.finish_reason]
            if len(rows) < len(self.active):
                self.active = [self.active[i] for i in rows]
                if not self.active:
                    return
                loop = loop.keep(self._upload(torch.tensor(rows)))
                self._rows = rows if self._previous is not None else None
            loop, emitted = self._round(loop)
            for added, account in emitted:
                yield tuple(added), account

    def _prefill(self) -> tuple[LoopState, list[list[int]]]:
        """Feed the prompts: where the sequences stand then, and the first new token of each."""
        prompts = [torch.tensor(sequence.prompt.tokens) for sequence in self.active]
        tokens = self._upload(torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True))
        lengths = self._upload(torch.tensor([len(prompt) for prompt in prompts]))
        batch, longest = tokens.shape
        queries, most = self.length.verified + 1, self.options.max_new_tokens
        cache = self.base.new_cache(batch=batch, capacity=longest + most + queries, queries=queries)
        numbers = RandomNumbers(most + self.length.most if self.length.tree else 2 * self.length.most + 1, self._upload)
        marks = Marks(self.base.device)
        marks.mark()
        fed = self.base.forward(tokens, torch.zeros_like(lengths), cache, lengths, self.drafter.needs.layers)
        hidden = at_index(fed.hidden, lengths - 1)
        logits = self.base.logits(hidden)
        if self.options.sampling.greedy:
            first = logits.argmax(-1)
        else:
            first = draw(self.options.sampling.probabilities(logits), numbers.first(self.active))
        marks.mark()
        found = self._to_host(first[:, None])
        self.prefill_ms = sum(marks.milliseconds())
        return LoopState(cache, fed, hidden, first, lengths, torch.full_like(lengths, most - 1), numbers), found

    def _round(self, loop: LoopState) -> tuple[LoopState, list[tuple[list[int], Round]]]:
        most = self.options.max_new_tokens
        limits = [min(self.length.value, most - len(sequence.tokens) - 1) for sequence in self.active]
        drafted = max(limits)
        marks = Marks(self.base.device)
        marks.mark()
        one_round = self._tree_round if self.length.tree else self._chain_round
        following, table, (draft_ms, verify_ms) = one_round(loop, drafted, marks)
        emitted = []
        for sequence, most_steps, (held, new, steps, *rest) in zip(self.active, limits, table, strict=True):
            limit = min(most_steps, steps)
            added = sequence.add([*rest[:held], new], self.ends, most)
            accepted, ranks = min(held, len(added)), tuple(rest[drafted : drafted + held])
            account = Round(limit, accepted, len(added), draft_ms if limit else 0.0, verify_ms, ranks[:accepted])
            sequence.rounds.append(account)
            emitted.append((added, account))
        self.length.observe(
            [(account.drafted, account.accepted) for _, account in emitted],
            draft_ms_per_step=draft_ms / drafted if drafted else 0.0,
            verify_ms=verify_ms,
        )
        return following, emitted

    def _chain_round(self, loop: LoopState, drafted: int, marks: Marks) -> _RoundResult:
        sampling = self.options.sampling
        uniform = None if sampling.greedy else loop.numbers.next(self.active)
        drawn, q = self._draft(loop, drafted, uniform)
        drafts = drawn if uniform is None else drawn.clamp(min=0)
        marks.mark()
        tokens = torch.cat((loop.pending[:, None], drafts), dim=1)
        fed = self.base.forward(tokens, loop.position, loop.cache, layers=self.drafter.needs.layers)
        logits = self.base.logits(fed.hidden)
        limit = (loop.left - 1).clamp(max=self.length.value)
        if uniform is None:
            verdict = verify_greedy(logits.argmax(-1), drafts, limit)
        else:
            judge = uniform[:, self.length.most :]
            judge = torch.cat((judge[:, :drafted], judge[:, -1:]), dim=1)
            verdict = verify_sampled(sampling.probabilities(logits), q, drafts, limit, judge)
        steps = torch.full_like(verdict.accepted, drafted)
        return self._read_back(loop.after(fed, verdict), verdict, steps, [drawn], marks)

    def _tree_round(self, loop: LoopState, drafted: int, marks: Marks) -> _RoundResult:
        sampling, cache, position = self.options.sampling, loop.cache, loop.position
        nodes = self._tree(loop, drafted)
        marks.mark()
        fed = self.base.forward(nodes.tokens, position, cache, layers=self.drafter.needs.layers, tree=nodes)
        logits = self.base.logits(fed.hidden)
        if sampling.greedy:
            choices = logits.argmax(-1)
        else:
            place = (self.options.max_new_tokens - 1 - loop.left)[:, None] + nodes.depth
            choices = draw(sampling.probabilities(logits), loop.numbers.of_tokens(self.active, place))
        verdict, path = verify_tree(choices, nodes, loop.left - 1, drafted)
        cache.take(position, path)
        fed = fed.along(path, position[:, None] + torch.arange(drafted + 1, device=position.device))
        steps = nodes.depth.amax(1).expand(len(path))
        ranks = nodes.rank.expand(len(path), -1).gather(1, path)
        return self._read_back(loop.after(fed, verdict), verdict, steps, [fed.tokens[:, 1:], ranks[:, 1:]], marks)

    def _read_back(
        self, following: LoopState, verdict: Verdict, steps: Tensor, drafts: list[Tensor], marks: Marks
    ) -> _RoundResult:
        """Take to the host what it has to know of a round."""
        marks.mark()
        heads = [part[:, None] for part in (verdict.accepted, verdict.following, steps)]
        table = self._to_host(torch.cat((*heads, *drafts), dim=1))
        draft_ms, verify_ms = marks.milliseconds()
        return following, table, (draft_ms, verify_ms)

    def _tree(self, loop: LoopState, depth: int) -> Nodes:
        """Drafts of at most ``depth`` steps."""
        tree, pending = self.length.tree, loop.pending
        if not depth:
            return Nodes.root(pending)
        state = self._start(loop)
        if isinstance(tree, AutoTree):
            heat = self.options.sampling.temperature
            return grow_by_confidence(self.drafter, state, pending, tree, tree.widths(depth), heat)
        assert tree is not None
        if depth not in self._shapes:
            self._shapes[depth] = FixedTree(tree.to_depth(depth), pending.device)
        return grow_fixed(self.drafter, state, pending, self._shapes[depth])

    def _draft(self, loop: LoopState, drafted: int, uniform: Tensor | None) -> tuple[Tensor, Tensor]:
        """Drafts [batch, K], and the distributions [batch, K, vocabulary] drawn from (empty if greedy)."""
        device, pending = self.base.device, loop.pending
        tokens, distributions = [], []
        nothing = torch.empty(len(pending), 0, self.base.vocab_size, device=device)
        if not drafted:
            return torch.empty(len(pending), 0, dtype=torch.long, device=device), nothing
        state = self._start(loop)
        token = pending
        for step in range(drafted):
            logits, state = self.drafter.step(state, token[:, None])
            last = logits[:, -1].to(device)
            if uniform is None:
                token = last.argmax(-1)
                tokens.append(token)
            else:
                distributions.append(self.options.sampling.probabilities(last))
                tokens.append(draw(distributions[-1], uniform[:, step]))
                token = tokens[-1].clamp(min=0)
        return torch.stack(tokens, dim=1), torch.stack(distributions, dim=1) if distributions else nothing

    def _start(self, loop: LoopState) -> DraftState:
        known = BaseState(
            loop.position[:, None],
            loop.hidden[:, None],
            self.base.embed,
            *self.base.read_kv(loop.cache, self.drafter.needs.shared_kv),
            loop.fed,
            self._previous,
            self._rows,
        )
        state = self.drafter.start(known)
        if self.drafter.needs.own_cache:
            self._previous, self._rows = state, None
        return state

    def _upload(self, table: Tensor) -> Tensor:
        """To the device of the tokens, which need not wait for it."""
        device = self.base.device
        return (table.pin_memory() if device.type == "cuda" else table).to(device, non_blocking=True)

    def _to_host(self, table: Tensor) -> list[list[int]]:
        """int64 [batch, …] as numbers: one copy from the device, the round's only wait.

        Raises:
            DrafterError: a token could not be drawn.
        """
        rows: list[list[int]] = table.tolist()
        if any(NOT_DRAWN in row for row in rows):
            raise DrafterError(
                "expected logits to draw a token from, found some that are no numbers: a weight is damaged, or the "
                "type that drafter or base computes in is too small; prove the checkpoint, or compute in bfloat16"
            )
        return rows
