"""Wall time of phases, without making a GPU wait for the clock."""

from __future__ import annotations

import time
from itertools import pairwise

import torch


class Marks:
    """Points in time on a device; the differences are read once the device has passed them.

    On CUDA the marks are events in the current stream, so taking one does not synchronize; elsewhere they
    are readings of the clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        self._marks: list[float | torch.cuda.Event] = []

    def mark(self) -> None:
        """Take a point in time."""
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
