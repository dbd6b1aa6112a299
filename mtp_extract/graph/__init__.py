"""From a TFLite graph to the drafter's roles: :func:`walk` over :func:`flatten`."""

from __future__ import annotations

from mtp_extract.graph.blocks import Activation, FoundRole, SetAside
from mtp_extract.graph.drafter import Layer, Walk, walk
from mtp_extract.graph.flat import FlatGraph, flatten

__all__ = ["Activation", "FlatGraph", "FoundRole", "Layer", "SetAside", "Walk", "flatten", "walk"]
