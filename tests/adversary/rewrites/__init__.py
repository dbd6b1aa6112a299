"""Other ways of writing the same function, as exporters and optimizers do.

A rewrite may be refused, and must not be extracted into something else. ``ACCEPTED`` in the tests lists those that are
read today; what leaves it is listed in docs/proof.md.
"""

from __future__ import annotations

from adversary.edits import cases
from adversary.mutations.attention import windowed
from adversary.rewrites import second, spelled

_WINDOWS = cases("same: windows of slots", {"scored_and_weighed": windowed(32, 32)})

REWRITES = (*spelled.CASES, *second.CASES, *_WINDOWS)
