"""Masks against what they say, slot by slot."""

from __future__ import annotations

import torch
from helpers.random_assistants import GEOMETRIES

from mtp_extract.drafter.masks import position_masks
from mtp_extract.formats.transformers import parse_config

CONFIG = parse_config(GEOMETRIES["dense"].config())
WINDOW = 5


def test_position_masks_follow_positions_not_slots() -> None:
    never = torch.iinfo(torch.int64).max
    stored = torch.tensor([[8, 9, 3, 4, 5, 6, 7, never]])
    newest = torch.tensor([[7, 9]])
    for extra in (0, 1):
        masks = position_masks(CONFIG, dict.fromkeys(CONFIG.kv_layers, stored), newest, window_extra=extra)
        for query, last in enumerate(newest[0].tolist()):
            full = [p <= last for p in stored[0].tolist()]
            sliding = [last - WINDOW - extra < p <= last for p in stored[0].tolist()]
            assert masks["full_attention"][0, query].tolist() == full
            assert masks["sliding_attention"][0, query].tolist() == sliding
