"""Masks against what they say, slot by slot."""

from __future__ import annotations

import torch
from helpers.random_assistants import GEOMETRIES
from helpers.signature import signature_masks
from helpers.trailing_masks import trailing_masks

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


def test_trailing_masks_are_window_plus_one_from_the_end() -> None:
    masks = trailing_masks(CONFIG, {"full_attention": 12, "sliding_attention": 9})
    assert masks["full_attention"].tolist() == [[[True] * 12]]
    assert masks["sliding_attention"].tolist() == [[[False] * 3 + [True] * 6]]


def test_signature_masks_join_mask_and_window() -> None:
    given = torch.tensor([[[[False, True, True, True, True, True, True, False, False, False]]]])
    masks = signature_masks(CONFIG, given, torch.tensor([6], dtype=torch.int32))
    assert masks["full_attention"][0, 0].tolist() == given[0, 0, 0].tolist()
    assert masks["sliding_attention"][0, 0].nonzero().flatten().tolist() == [2, 3, 4, 5, 6]
    # The signature's mask also cuts the sliding layers.
    given[0, 0, 0, 4] = False
    masks = signature_masks(CONFIG, given, torch.tensor([6]))
    assert masks["sliding_attention"][0, 0].nonzero().flatten().tolist() == [2, 3, 5, 6]
