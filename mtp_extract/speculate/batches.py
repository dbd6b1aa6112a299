"""Texts of similar length together, so that little is padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mtp_extract.speculate.numbers import count


def groups(lengths: Sequence[int], batch: int) -> Iterator[list[int]]:
    """Indices in groups of similar length. Never a last group of one: some controls need two texts."""
    count("batch", batch, least=1)
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    made = [order[at : at + batch] for at in range(0, len(order), batch)]
    if len(made) > 1 and len(made[-1]) == 1:
        alone = made.pop()
        made[-1] += alone
    yield from made
