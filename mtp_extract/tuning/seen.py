"""Where drafts continue what training has seen: the sequences of tokens around them that a trained text has too.

A drafter that was tuned on a text repeats it: what it gains there says nothing of text that nobody trained on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mtp_extract.evaluate.measured import Measured
from mtp_extract.speculate.teacher import Text

LENGTH = 8
"""Tokens of a sequence: the last drafts of a round that fit, the pending token and those before it."""

Numbers = NDArray[np.uint64]


def seen(measured: Measured, texts: Sequence[Text], known: Numbers) -> Tensor:
    """Bool [N]: of each anchor, whether the 8 tokens that end with its last draft stand in a trained text.

    Prompts count. Near the beginning of a text that it begins there is one of the tokens. Of more than 7 drafts, those
    up to the seventh.

    Args:
        measured: over anchors of ``texts``.
        known: :func:`sequences` of what was trained on.
    """
    ends, around = measured.anchor + min(measured.stands.shape[1], LENGTH - 1), np.zeros(len(measured.text), np.uint64)
    for index in torch.unique(measured.text).tolist():
        rows = (measured.text == index).numpy()
        around[rows] = _sequences(texts[index].tokens)[ends[rows].numpy()]
    return torch.from_numpy(np.isin(around, known))


def sequences(texts: Sequence[Text]) -> Numbers:
    """Of all tokens of ``texts``: a number for each sequence that stands in one, once."""
    return np.unique(np.concatenate([np.zeros(0, np.uint64), *(_sequences(text.tokens) for text in texts)]))


def _sequences(tokens: Sequence[int]) -> Numbers:
    """A number for the sequence that ends with each token: equal for equal ones, and else by a chance of 2^-60."""
    # 0 stands for what is before a text.
    padded = np.concatenate([np.zeros(LENGTH - 1, np.int64), np.asarray(tokens, np.int64) + 1]).astype(np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(padded, LENGTH)
    factors = np.random.default_rng(LENGTH).integers(1 << 63, size=LENGTH, dtype=np.uint64) * 2 + 1
    numbers: Numbers = (windows * factors).sum(axis=1, dtype=np.uint64)
    return numbers
