"""The facts about an architecture that the rest of the package needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from mtp_extract.architecture.roles import Shapes


@dataclass(frozen=True)
class Architecture:
    """An architecture of drafters. Code is named as ``module:name`` and imported when it is used."""

    name: str  # in records and in FormatInfo.architecture
    title: str  # short name for users
    long_title: str  # explained name for the model card
    config: type[Any]  # the Config class
    shapes: Callable[[Any], Shapes]  # config → its roles with the shapes of their tensors
    network: str  # the DrafterNetwork class, which is created from a config
    describe: Callable[[Mapping[str, Any]], Sequence[str]]  # config as JSON → lines for the terminal
    tags: tuple[str, ...] = ()  # of the model card
    # Engines that load the directory, config as JSON → blocks of report/serving.md for the model card.
    serving: Callable[[Sequence[str], Mapping[str, Any]], Sequence[str]] = lambda engines, geometry: ("none",)
    pair_role: str = "drafter"  # its name in pair.json
    known_as: Callable[[Any], str | None] = lambda config: None  # config → name of the published drafter, if known
    is_bundled: bool = False  # whether bundles hold such drafters, so that they are extracted and compared with them
    faults: str | None = None  # the Controls whose faults a validation measures; None if there are none

    @property
    def with_article(self) -> str:
        """The long title with "a" or "an", for use in a sentence."""
        return f"{'an' if self.long_title[0] in 'AEIOUaeiou' else 'a'} {self.long_title}"

    def import_network(self) -> Any:
        """Return the class of its network, a DrafterNetwork; imports PyTorch."""
        return resolve_name(self.network)

    def import_controls(self) -> Sequence[Any]:
        """Return the faults that a validation measures such a drafter with."""
        return resolve_name(self.faults) if self.faults else ()
