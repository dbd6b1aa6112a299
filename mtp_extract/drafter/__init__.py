"""The reference drafter: the function a checkpoint stands for, in PyTorch.

>>> drafter = load_drafter("DIR")                                     # doctest: +SKIP
>>> logits, projected = drafter(inputs, shared_kv, position_ids)      # doctest: +SKIP

``config`` reads the geometry (no torch needed), ``model`` is the network, ``masks`` says what a query may
see, ``load`` reads checkpoints strictly, ``signature`` translates the inputs of LiteRT's ``mtp_drafter``.
"""

from __future__ import annotations

from mtp_extract.architecture.config import DrafterConfig, LayerConfig, OrderedHeadConfig, RopeConfig
from mtp_extract.drafter.arguments import DraftArguments
from mtp_extract.drafter.load import build_drafter, load_drafter
from mtp_extract.drafter.masks import position_masks, signature_masks, trailing_masks
from mtp_extract.drafter.mtp import Drafter, DrafterOutput
from mtp_extract.drafter.signature import kv_names, signature_arguments

__all__ = [
    "DraftArguments",
    "Drafter",
    "DrafterConfig",
    "DrafterOutput",
    "LayerConfig",
    "OrderedHeadConfig",
    "RopeConfig",
    "build_drafter",
    "kv_names",
    "load_drafter",
    "position_masks",
    "signature_arguments",
    "signature_masks",
    "trailing_masks",
]
