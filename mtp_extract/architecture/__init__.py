"""What a drafter is, as data: its shape, the roles its weights play, and all that is said of its kind.

:data:`ARCHITECTURES` is the one place that knows which kinds there are. Nothing here reads a file or computes. The
graph finds these facts, formats write and read them, the network runs them.
"""

from __future__ import annotations

from mtp_extract.architecture.architecture import Architecture
from mtp_extract.architecture.config import MTP, Config
from mtp_extract.architecture.eagle3 import EAGLE3_HEAD
from mtp_extract.architecture.roles import Shapes

ARCHITECTURES: dict[str, Architecture] = {row.name: row for row in (MTP, EAGLE3_HEAD)}
"""Every kind of drafter by name."""


def architecture_of(config: Config) -> Architecture:
    """The architecture of a drafter of this shape; KeyError where it is in no row of :data:`ARCHITECTURES`."""
    for architecture in ARCHITECTURES.values():
        if isinstance(config, architecture.config):
            return architecture
    raise KeyError(type(config).__name__)


def shapes_of(config: Config) -> Shapes:
    """The roles of a drafter of this shape, in order, each with the shape of its tensor."""
    return architecture_of(config).shapes(config)
