"""Schemas and tables of the records are made from their types."""

from __future__ import annotations

import pytest
import records
from records import made

from mtp_extract.io.typed import Record


def test_the_docs_are_what_the_types_give() -> None:
    """Else run scripts/records.py."""
    for path, text in made().items():
        assert path.read_text(encoding="utf-8") == text, path.name


class Told(Record):
    """All of it."""

    behind: int  #: what stands behind
    #: what stands above, on
    #: two lines
    above: str


class Untold(Told):
    told: int  #: of this one
    untold: int  # no comment of a field


def test_a_field_without_a_comment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "RECORDS", {"extraction": (Told,)})
    table = "\n## Told\n\nAll of it.\n\n| field | meaning |\n| --- | --- |\n"
    rows = "| `behind` | what stands behind |\n| `above` | what stands above, on two lines |\n"
    assert f"{table}{rows}" in made()[records.DOCS / "records.md"]
    monkeypatch.setattr(records, "RECORDS", {"extraction": (Untold,)})
    with pytest.raises(KeyError, match="untold"):
        made()
    monkeypatch.setattr(records, "RECORDS", {"another": (Told,)})
    with pytest.raises(ValueError, match="marks around the tables of another"):
        made()
