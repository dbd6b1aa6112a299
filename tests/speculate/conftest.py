"""The sample's trained pair."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from helpers.first_pair import first_base
from helpers.random_pairs import Pair
from helpers.threads import single_thread  # noqa: F401 - a fixture

from mtp_extract.drafter.load import load_drafter


@pytest.fixture(scope="session")
def pair(extracted: Path) -> Pair:
    base = transformers.Gemma4ForConditionalGeneration.from_pretrained(first_base()).eval()
    return Pair(base, load_drafter(extracted), transformers.AutoTokenizer.from_pretrained(first_base()))
