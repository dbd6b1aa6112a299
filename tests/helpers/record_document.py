"""Documents for tests that extract and measure nothing; what lies in a directory, and a record that agrees with it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[1] / "data"


def read_files(directory: Path) -> dict[str, bytes]:
    """All files there, by their relative paths."""
    files = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def forge(directory: Path) -> None:
    """Make the record list what lies there, as it is: whoever changes a file can change the sums."""
    path = directory / "extraction.json"
    record = json.loads(path.read_text())
    for name, data in read_files(directory).items():
        record["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    del record["files"]["extraction.json"]
    path.write_text(json.dumps(record))


def tuning(name: str) -> dict[str, Any]:
    """What a card reads of a tuning; every text in it is ``name``."""
    return {
        "mode": "norms",
        "base": name,
        "interrupted": True,
        "refused": [name],
        "overall": {"texts": 7, "rounds": {"ratio": 1.1, "interval": [1.0, 1.2]}},
    }


def ordered_head(name: str) -> dict[str, Any]:
    """What a card reads of an ordered head that was made, of which no mode is told; every text in it is ``name``."""
    shared = {key: value for key, value in tuning(name).items() if key not in ("mode", "interrupted")}
    return shared | dict.fromkeys(("top_k", "centroids", "rows_read", "rows_dense"), 1000)


RECORD: dict[str, Any] = json.loads((DATA / "record.json").read_text(encoding="utf-8"))
"""What ``extraction.json`` holds, for tests that extract nothing."""

REPORT: dict[str, Any] = json.loads((DATA / "report.json").read_text(encoding="utf-8"))
"""What ``report.json`` holds, for tests that measure nothing."""

TUNING = {**tuning("a base"), "mode": "qat"}
"""A tuning."""
