"""What is said of a kind of drafter, whichever it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from mtp_extract.architecture.roles import Shapes


@dataclass(frozen=True)
class Architecture:
    """A kind of drafter. What computes or reads is named as ``module:name``, and imported when it is used."""

    name: str  # in records, and of its formats (FormatInfo.architecture)
    title: str  # what users call such a drafter
    long_title: str  # the same for the card, which explains it
    config: type[Any]  # its shape; a Config
    shapes: Callable[[Any], Shapes]  # its roles, of a config, with the shapes of their tensors
    network: str  # a DrafterNetwork, made of a config
    describe: Callable[[Mapping[str, Any]], Sequence[str]]  # lines for the terminal, of a config as JSON
    tags: tuple[str, ...] = ()  # of the card
    # Blocks of report/serving.md for the card, of the engines that load the directory and the config as JSON.
    serving: Callable[[Sequence[str], Mapping[str, Any]], Sequence[str]] = lambda engines, geometry: ("none",)
    pair_role: str = "drafter"  # what pair.json calls it
    known_as: Callable[[Any], str | None] = lambda config: None  # the name of a known shape
    # Whether bundles hold such drafters, which graph/ reads: one is extracted, and compared with its bundle.
    is_bundled: bool = False
    faults: str | None = None  # Controls of a validation, each a fault to measure; None where none are known

    @property
    def with_article(self) -> str:
        """One such drafter, in a sentence."""
        return f"{'an' if self.long_title[0] in 'AEIOUaeiou' else 'a'} {self.long_title}"

    def network_class(self) -> Any:
        """The class of its network, a DrafterNetwork; imports PyTorch."""
        return resolve_name(self.network)

    def controls(self) -> Sequence[Any]:
        """The faults that a validation measures such a drafter with."""
        return resolve_name(self.faults) if self.faults else ()
