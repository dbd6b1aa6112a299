"""What a measurement asks of whatever generates text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mtp_extract.speculate.codec import Prompt
from mtp_extract.speculate.generate import Options
from mtp_extract.speculate.result import Generation

__all__ = ["Engine"]


class Engine(Protocol):
    """A base with its drafter, ready to be asked."""

    def generate(self, prompts: Sequence[Prompt], options: Options) -> list[Generation]:
        """Continue every prompt; results in their order. How many at a time is the engine's affair.

        ``options.drafts`` of 0 asks for the base alone.
        """
