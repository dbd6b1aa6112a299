"""The reference drafter: the function a checkpoint stands for, in PyTorch.

>>> drafter = load_drafter("DIR")                                     # doctest: +SKIP
>>> logits, projected = drafter(inputs, shared_kv, position_ids)      # doctest: +SKIP

``protocol`` says what any drafter is to the loop, ``mtp`` and ``eagle3`` are the networks, ``masks`` says what a query
may see, ``heads`` has the centroid head, ``load`` reads checkpoints strictly.
"""

from __future__ import annotations

from mtp_extract.architecture.config import DrafterConfig, LayerConfig, OrderedHeadConfig, RopeConfig
from mtp_extract.architecture.eagle3 import Eagle3Config
from mtp_extract.drafter.arguments import DraftArguments, Transform
from mtp_extract.drafter.eagle3 import Eagle3Drafter
from mtp_extract.drafter.load import Network, build_drafter, drafter_of, load_any, load_drafter, network_of
from mtp_extract.drafter.masks import LITERT, TRANSFORMERS, Convention, position_masks
from mtp_extract.drafter.mtp import Altered, DrafterOutput, MtpDrafter
from mtp_extract.drafter.protocol import BaseState, Drafter, DraftState, Fed, Needs

__all__ = [
    "LITERT",
    "TRANSFORMERS",
    "Altered",
    "BaseState",
    "Convention",
    "DraftArguments",
    "DraftState",
    "Drafter",
    "DrafterConfig",
    "DrafterOutput",
    "Eagle3Config",
    "Eagle3Drafter",
    "Fed",
    "LayerConfig",
    "MtpDrafter",
    "Needs",
    "Network",
    "OrderedHeadConfig",
    "RopeConfig",
    "Transform",
    "build_drafter",
    "drafter_of",
    "load_any",
    "load_drafter",
    "network_of",
    "position_masks",
]
