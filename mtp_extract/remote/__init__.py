"""Bundles that are not on this machine: ``hf://org/repo/file[@revision]`` and ``https://`` URLs.

Only byte ranges are fetched, each once. What identifies the bytes (commit, ETag, SHA-256 where the Hub
tells it) is pinned at the first answer and checked at every later one.
"""

from __future__ import annotations

from mtp_extract.remote.policy import Policy, Progress
from mtp_extract.remote.source import RemoteSource, open_remote
from mtp_extract.remote.transport import NoRangesError

__all__ = ["NoRangesError", "Policy", "Progress", "RemoteSource", "open_remote"]
