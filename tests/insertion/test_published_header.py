"""Headers as Google's files have them: `author` in lower case, no backend_constraint, no executor metadata."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.make_bundle import DRAFTER, PUBLISHED_ITEMS, bundle, is_drafter, like_published, parts_of

import mtp_extract

HEADER = 16384
"""Bytes before the first section."""


@pytest.fixture(params=[False, True], ids=["may", "april"])
def published(request: pytest.FixtureRequest, sample: Path, tmp_path: Path) -> Path:
    """The sample with the header of Google's files of either month."""
    path = tmp_path / "published.litertlm"
    path.write_bytes(like_published(sample, april=request.param))
    return path


def test_it_is_read_and_stays_as_it_is_when_weights_change(published: Path, noisy: Path, tmp_path: Path) -> None:
    before, new = published.read_bytes(), tmp_path / "new.litertlm"
    mtp_extract.insert(noisy, published, new)
    after = new.read_bytes()
    assert after[:HEADER] == before[:HEADER]
    changed = [i for i, (old, now) in enumerate(zip(parts_of(published), parts_of(new), strict=True)) if old != now]
    with mtp_extract.open(new) as opened:
        assert opened.bundle is not None
        assert (opened.bundle.version, dict(opened.bundle.items)) == ((1, 5, 0), PUBLISHED_ITEMS)
        assert changed == [section.index for section in opened.sections if section.model_type == "mtp_drafter"]
        assert "ExecutorMetadataProto" not in {section.type_name for section in opened.sections}


def test_a_drafter_that_is_added_has_the_items_of_its_template(published: Path, tmp_path: Path) -> None:
    parts = parts_of(published)
    bare, new = tmp_path / "bare.litertlm", tmp_path / "new.litertlm"
    bare.write_bytes(bundle([part for part in parts if not is_drafter(part)], version=(1, 5, 0), items=PUBLISHED_ITEMS))
    mtp_extract.insert(published, bare, new)
    assert parts_of(new) == parts
    assert set(parts[-1].items) in (set(DRAFTER), {*DRAFTER, "backend_constraint"})
    with mtp_extract.open(new) as opened:
        assert opened.bundle is not None
        assert dict(opened.bundle.items) == PUBLISHED_ITEMS
