"""How much there is to do beside a base, and how long that will take."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from mtp_extract.drafter.load import Network
from mtp_extract.drafter.mtp import MtpDrafter
from mtp_extract.evaluate.batches import groups
from mtp_extract.evaluate.pace import Pace, Status, duration

_TEXT, _AGREEMENT, _GENERATION = "the base's own text", "drafts after every token", "text with drafts"

_WORTH_SAYING = 60.0  # seconds
_ROWS = 32
_TOP = 5


class Effort:
    """A validation's batches: what a draft takes is measured, and after the first batch of text it is said how long
    everything will take.

    Args:
        ways: in which each of ``networks`` generates.
        drafts: that all of them, and what is broken on purpose, draft after the tokens of the texts.
        show: told after each batch.
    """

    def __init__(
        self,
        networks: Sequence[Network],
        prompts: int,
        batch: int,
        *,
        ways: int,
        drafts: float,
        say: Callable[[str], None],
        show: Callable[[Status], None],
    ) -> None:
        batches, said = len(list(groups([0] * prompts, batch))), False

        def told(status: Status) -> None:
            nonlocal said
            if not said and status.seconds_left is not None:
                said = True
                if status.seconds_left > _WORTH_SAYING:
                    say(
                        f"about {duration(status.seconds_left)} for all of it; fewer prompts, new tokens or numbers of "
                        "drafts, or controls at fewer positions, take less"
                    )
            show(status)

        parts = {_TEXT: batches, _AGREEMENT: batches, _GENERATION: batches * ways * len(networks)}
        # Text with drafts is taken to cost what it costs without.
        self._pace = Pace(parts, told, {_GENERATION: _TEXT})
        known = [network for network in networks if isinstance(network, MtpDrafter)]
        if known:
            self._pace.expect(_AGREEMENT, drafts * max(map(seconds_a_draft, known)))

    def text(self) -> Callable[[], None]:
        """The base writes its text; what is returned is to be called after each batch."""
        self._pace.begin()
        return partial(self._pace.done, _TEXT)

    def agreement(self) -> Callable[[], None]:
        """The same of drafting after every token."""
        self._pace.finish(_TEXT)
        self._pace.begin()
        return partial(self._pace.done, _AGREEMENT)

    def generation(self) -> Callable[[], None]:
        """The same of text with drafts."""
        self._pace.finish(_AGREEMENT)
        self._pace.begin()
        return partial(self._pace.done, _GENERATION)


@torch.inference_mode()
def seconds_a_draft(drafter: MtpDrafter) -> float:
    """Of the head and of looking for the likeliest tokens, which on a large vocabulary is nearly all, measured."""
    weight = drafter.lm_head.weight
    state = torch.zeros(1, _ROWS, drafter.config.hidden_size, dtype=weight.dtype, device=weight.device)
    taken = []
    for _ in range(2):  # kernels are chosen in the first
        start = time.perf_counter()
        logits = drafter.logits(state)
        int(logits.argmax(-1).sum() + logits.topk(min(_TOP, logits.shape[-1]), dim=-1).indices.sum())
        taken.append(time.perf_counter() - start)
    return taken[-1] / _ROWS
