"""Describe drafters as data: their config, the roles of their weights, and the facts about each architecture.

:data:`ARCHITECTURES` lists the architectures. Nothing here reads a checkpoint or computes: the graph finds these facts,
formats write and read them, the network runs them.
"""

from __future__ import annotations

from mtp_extract.architecture.architecture import Architecture
from mtp_extract.architecture.config import MTP, Config
from mtp_extract.architecture.eagle3 import EAGLE3_HEAD
from mtp_extract.architecture.roles import Shapes

ARCHITECTURES: dict[str, Architecture] = {row.name: row for row in (MTP, EAGLE3_HEAD)}
"""Name → architecture."""


def find_architecture(config: Config) -> Architecture:
    """Return the architecture that ``config`` belongs to; raise KeyError if :data:`ARCHITECTURES` lacks it."""
    for architecture in ARCHITECTURES.values():
        if isinstance(config, architecture.config):
            return architecture
    raise KeyError(type(config).__name__)


def list_shapes(config: Config) -> Shapes:
    """Return the roles of a drafter with this config, in order, each with the shape of its tensor."""
    return find_architecture(config).shapes(config)
