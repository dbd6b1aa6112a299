"""Which prompts are trained on, watched, or held out: a hash of their source decides.

So it stays the same when prompts are added.
"""

from __future__ import annotations

from hashlib import sha256

TRAINED, WATCHED, HELD_OUT = "trained", "watched", "held out"
"""Trained on; measured during training, to keep the best; measured before and after, to accept or refuse."""

_SHARES = ((0.08, WATCHED), (0.2, HELD_OUT))  # upper bounds of the hash, as shares of its range


def side_of(source: str) -> str:
    """:data:`TRAINED`, :data:`WATCHED` or :data:`HELD_OUT`."""
    share = int.from_bytes(sha256(source.encode("utf-8", "backslashreplace")).digest()[:8], "big") / 2**64
    return next((side for bound, side in _SHARES if share < bound), TRAINED)
