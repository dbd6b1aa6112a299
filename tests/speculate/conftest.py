"""The sample's trained pair."""

from __future__ import annotations

import pytest
import transformers
from helpers.random_pairs import Pair

import mtp_extract
from mtp_extract.data import sample_base, sample_bundle
from mtp_extract.drafter import load_drafter


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    directory = tmp_path_factory.mktemp("pair") / "drafter"
    mtp_extract.extract(sample_bundle(), directory, format="transformers", dtype="f32")
    base = transformers.Gemma4ForConditionalGeneration.from_pretrained(sample_base()).eval()
    return Pair(base, load_drafter(directory), transformers.AutoTokenizer.from_pretrained(sample_base()))
