"""What a generation keeps from round to round: sequences, random numbers, where they stand, and the time of phases."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from mtp_extract.drafter.protocol import Fed
from mtp_extract.speculate.cache import SlotCache
from mtp_extract.speculate.codec import Encoded
from mtp_extract.speculate.result import Round
from mtp_extract.speculate.sampling import Verdict


@dataclass
class ActiveSequence:
    """A sequence under way. ``generator`` lives on the CPU: its numbers are the same on every device."""

    prompt: Encoded
    generator: torch.Generator
    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    finish_reason: str = ""

    def add(self, tokens: Sequence[int], ends: Callable[[list[int]], bool], most: int) -> list[int]:
        """Append up to the first token that ends the text, and note why it ended; returns what was appended."""
        before = len(self.tokens)
        for token in tokens:
            self.tokens.append(token)
            if ends(self.tokens):
                self.finish_reason = "stop"
                break
        else:
            self.finish_reason = "length" if len(self.tokens) >= most else ""
        return self.tokens[before:]


class RandomNumbers:
    """Random numbers of the sequences, ``count`` a round, on the device: those of many rounds in one upload."""

    ROUNDS = 16

    def __init__(self, count: int, upload: Callable[[Tensor], Tensor]) -> None:
        self._count, self._upload = count, upload
        self._numbers: list[Tensor] = []

    def first(self, sequences: Sequence[ActiveSequence]) -> Tensor:
        """F64 [batch] in [0, 1), one for each sequence, from its own generator."""
        return self._take(sequences, 1).squeeze(1)

    def next(self, sequences: Sequence[ActiveSequence]) -> Tensor:
        """F64 [batch, count] in [0, 1), those of one round."""
        if not self._numbers:
            self._numbers = list(torch.split(self._take(sequences, self.ROUNDS * self._count), self._count, dim=1))
        return self._numbers.pop(0)

    def of_tokens(self, sequences: Sequence[ActiveSequence], index: Tensor) -> Tensor:
        """F64 [batch, n] in [0, 1), one for each place of ``index`` in the text, counted from the second token.

        A place has its number whatever is drafted. There are ``count`` of them, and no :meth:`next`.
        """
        if not self._numbers:
            self._numbers = [self._take(sequences, self._count)]
        return self._numbers[0].gather(1, index)

    def keep(self, rows: Tensor) -> RandomNumbers:
        """Of these sequences alone, int64 [kept]."""
        self._numbers = [numbers[rows] for numbers in self._numbers]
        return self

    def _take(self, sequences: Sequence[ActiveSequence], count: int) -> Tensor:
        rows = [torch.rand(count, generator=sequence.generator, dtype=torch.float64) for sequence in sequences]
        return self._upload(torch.stack(rows))


@dataclass(frozen=True)
class LoopState:
    """Where the active sequences stand when a round begins, on the device: nothing of it is read in Python."""

    cache: SlotCache  # the base's K and V
    fed: Fed  # what the base was fed last
    hidden: Tensor  # [batch, width], the state that predicted the pending token
    pending: Tensor  # int64 [batch]
    position: Tensor  # int64 [batch], that of the pending token
    left: Tensor  # int64 [batch], tokens that may still be added
    numbers: RandomNumbers  # random ones

    def after(self, fed: Fed, verdict: Verdict) -> LoopState:
        added = verdict.accepted + 1
        hidden = at_index(fed.hidden, verdict.accepted)
        position, left = self.position + added, self.left - added
        return LoopState(self.cache, fed, hidden, verdict.following, position, left, self.numbers)

    def keep(self, rows: Tensor) -> LoopState:
        """These sequences alone, int64 [kept]."""
        self.cache.keep(rows)
        return LoopState(
            self.cache,
            self.fed.keep(rows),
            self.hidden[rows.to(self.hidden.device)],
            self.pending[rows],
            self.position[rows],
            self.left[rows],
            self.numbers.keep(rows),
        )


def at_index(states: Tensor, index: Tensor) -> Tensor:
    """[batch, width]: of ``states`` [batch, length, width], those at ``index`` [batch]."""
    return states[torch.arange(len(states), device=states.device), index.to(states.device)]


class Marks:
    """Points in time on a device; the differences are read once the device has passed them.

    On CUDA the marks are events in the current stream, so taking one does not synchronize; elsewhere they
    are readings of the clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        self._marks: list[float | torch.cuda.Event] = []

    def mark(self) -> None:
        if self._cuda is None:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # untyped in torch
        event.record(torch.cuda.current_stream(self._cuda))
        self._marks.append(event)

    def milliseconds(self) -> list[float]:
        """The times between successive marks, in ms. Waits for the last one."""
        last = self._marks[-1]
        if isinstance(last, torch.cuda.Event):
            last.synchronize()
        spans = []
        for before, after in pairwise(self._marks):
            if isinstance(before, torch.cuda.Event) and isinstance(after, torch.cuda.Event):
                spans.append(float(before.elapsed_time(after)))
            elif isinstance(before, float) and isinstance(after, float):
                spans.append(1e3 * (after - before))
        return spans
