"""The base's K and V by position, for sequences of different lengths that accept at different rates.

transformers' ``DynamicCache`` can be cropped (its sliding layers too, after ``activate_past_recording``),
but only by the same number of tokens in every sequence. Here each position has its slot: ``position``
itself in full layers, ``position mod size`` in sliding ones. Rolling back to the accepted prefix is then
no operation at all: what a rejected draft left behind holds a position later than any query, is masked for
that reason, and is overwritten when the sequence gets there. The LiteRT runtime does the same.

A tree has several nodes at one position, so they are written as if they stood one after the other; then what the
accepted ones wrote is moved to the slots of their positions, and all is as after a chain.

What reads a layer in F32 gets a copy that follows every write, so that a round converts what is new and not the
whole context.

A sliding ring of ``window + queries`` slots is enough: the newest write of a round, at ``n + queries - 1``
for the first query's position n, then falls on positions before ``n - window``, which neither the base nor
the drafter looks at again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mtp_extract.drafter.protocol import KV

NEVER = torch.iinfo(torch.int64).max
"""The position held by a slot that was never written: later than any query."""


@dataclass
class _Kind:
    """The slots of all layers with the same window."""

    positions: Tensor  # int64 [batch, slots], the position each slot holds
    # int64 [batch, 1, writes, 1], indices into the queries that are to be stored; None stores all
    source: Tensor | None = None
    target: Tensor | None = None  # int64 [batch, 1, writes, 1], the slot of each

    @property
    def size(self) -> int:
        """Slots a sequence."""
        return self.positions.shape[1]


class SlotCache:
    """Stands in for transformers' ``Cache`` in a Gemma 4 forward, which only calls :meth:`update`.

    Before each forward :meth:`begin` says which positions it will write.

    Args:
        windows: per layer with K and V of its own, its sliding window, or None for full attention.
        capacity: positions a sequence can reach.
        queries: most tokens a sequence is fed after its prompt in one forward.
        device: where positions are kept, and copies in F32; K and V stay where their layer puts them.
    """

    def __init__(
        self, windows: Sequence[int | None], *, batch: int, capacity: int, queries: int, device: torch.device
    ) -> None:
        self._windows, self._device = tuple(windows), device
        self._kept: dict[int, KV] = {}
        self._wide: dict[int, KV] = {}  # copies in F32, of layers that were read so
        self._filled = False
        self._kinds: dict[int | None, _Kind] = {}
        for window in set(self._windows):
            size = capacity if window is None else min(capacity, window + queries)
            self._kinds[window] = _Kind(torch.full((batch, size), NEVER, device=device))

    @property
    def nbytes(self) -> int:
        """Bytes of all K and V, without copies."""
        return sum(part.numel() * part.element_size() for kept in self._kept.values() for part in kept)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """[batch, KV heads, slots, head_dim] of each layer's K, in order of layers."""
        return [tuple(self._kept[layer][0].shape) for layer in sorted(self._kept)]

    def begin(self, starts: Tensor, queries: int, lengths: Tensor | None = None) -> Tensor:
        """Announce a forward over ``queries`` tokens a sequence, from position ``starts[b]`` on.

        Args:
            starts: int64 [batch], first position of each sequence.
            lengths: int64 [batch], in the first forward, the true length of each right-padded prompt.

        Returns:
            int64 [batch, queries], the position of each token.
        """
        if self._filled == (lengths is not None):
            raise ValueError("prompt lengths are given in the first forward, and only there")
        positions = starts[:, None] + torch.arange(queries, device=starts.device)
        for kind in self._kinds.values():
            written, kind.source = positions, None
            if lengths is not None and queries > kind.size:
                # The end of each prompt, which is all that is looked at again.
                kept = (lengths - kind.size).clamp(min=0)[:, None] + torch.arange(kind.size, device=starts.device)
                written, kind.source = positions.gather(1, kept), kept[:, None, :, None]
            target = written % kind.size
            kind.positions.scatter_(1, target, written)
            kind.target = target[:, None, :, None]
        return positions

    def key_positions(self, window: int | None, query_positions: Tensor) -> Tensor:
        """int64 [batch, slots]: positions of the K and V :meth:`update` hands to layers of this window."""
        return self._kinds[window].positions if self._filled else query_positions

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Store K and V, each [batch, KV heads, queries, head_dim], and return what this forward attends to.

        That is the prompt itself in the first forward, even where a sliding layer keeps only its end;
        later all slots, so that shapes stay the same from round to round.
        """
        kind = self._kinds[self._windows[layer]]
        if layer not in self._kept:
            # Zeros, not uninitialized memory: a masked slot has weight 0, and 0 · NaN is NaN.
            key, value = (new.new_zeros(*new.shape[:2], kind.size, new.shape[3]) for new in (keys, values))
            self._kept[layer] = key, value
        for copies in (self._kept, self._wide):
            if layer in copies:
                for store, new in zip(copies[layer], (keys, values), strict=True):
                    _store(store, new, kind)
        return self._kept[layer] if self._filled else (keys, values)

    def end(self) -> None:
        """Say that the forward announced by :meth:`begin` is done."""
        self._filled = True

    def take(self, starts: Tensor, path: Tensor) -> None:
        """Of a tree that was written from ``starts`` on, keep one way down: its K and V move to their positions' slots.

        Args:
            starts: int64 [batch], position of the root.
            path: int64 [batch, depth + 1], the node at each depth; past the end of the way, the node of that number.
        """
        sources, targets = (
            starts[:, None] + path[:, 1:],
            starts[:, None] + torch.arange(1, path.shape[1], device=starts.device),
        )
        moves = {
            window: ((sources % kind.size)[:, None, :, None], (targets % kind.size)[:, None, :, None])
            for window, kind in self._kinds.items()
        }
        for copies in (self._kept, self._wide):
            for layer, parts in copies.items():
                for stored in parts:
                    source, target = (slots.to(stored.device) for slots in moves[self._windows[layer]])
                    heads = (-1, stored.shape[1], -1, stored.shape[3])
                    stored.scatter_(2, target.expand(heads), stored.gather(2, source.expand(heads)))

    def read(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """K, V, [batch, KV heads, slots, head_dim], and the positions in the slots, int64 [batch, slots]."""
        return *self._kept[layer], self._kinds[self._windows[layer]].positions

    def read_wide(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """As :meth:`read`, in F32. The first call copies the whole layer; from then on the copy follows every write."""
        *kept, positions = self.read(layer)
        if layer not in self._wide:
            keys, values = (part.to(self._device, torch.float32) for part in kept)
            if keys is kept[0]:
                return keys, values, positions
            self._wide[layer] = keys, values
        return *self._wide[layer], positions

    def keep(self, rows: Tensor) -> None:
        """Keep only these sequences, int64 [kept], in this order."""
        for kind in self._kinds.values():
            kind.positions = kind.positions[rows]
        for copies in (self._kept, self._wide):
            for layer, (keys, values) in copies.items():
                index = rows.to(keys.device)
                copies[layer] = keys[index], values[index]

    def get_seq_length(self, *_: object) -> int:
        """Asked by transformers only when no position_ids are given, which never happens here."""
        raise NotImplementedError("a SlotCache holds sequences of different lengths; pass position_ids")


def _store(store: Tensor, new: Tensor, kind: _Kind) -> None:
    assert kind.target is not None, "begin() comes before every forward"
    if kind.source is not None:
        new = new.gather(2, kind.source.to(new.device).expand(*new.shape[:2], -1, new.shape[3]))
    store.scatter_(2, kind.target.to(store.device).expand_as(new), new.to(store))
