"""The sample's trained pair."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import transformers
from helpers.first_pair import first_base, first_bundle
from helpers.random_pairs import Pair
from helpers.threads import one_thread

import mtp_extract
from mtp_extract.drafter.load import load_drafter


@pytest.fixture(scope="session", autouse=True)
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    directory = tmp_path_factory.mktemp("pair") / "drafter"
    mtp_extract.extract(first_bundle(), directory, format="transformers", dtype="f32")
    base = transformers.Gemma4ForConditionalGeneration.from_pretrained(first_base()).eval()
    return Pair(base, load_drafter(directory), transformers.AutoTokenizer.from_pretrained(first_base()))
