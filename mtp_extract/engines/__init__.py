"""What generates text from prompts: the loop of this package; servers have the same protocol."""

from __future__ import annotations

from mtp_extract.engines.local import LocalEngine
from mtp_extract.engines.protocol import Engine

__all__ = ["Engine", "LocalEngine"]
