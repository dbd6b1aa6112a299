"""Names of the files of a validation report, which a checkpoint's directory may contain."""

from __future__ import annotations

from mtp_extract.io.place import make_own_files

REPORT = "report.json"
PAGE_FILE = "report.html"
PAIR = "pair.json"
REPORT_FILES = frozenset({REPORT, PAGE_FILE, PAIR})
REPORT_LISTED = make_own_files(REPORT, REPORT_FILES)
"""The files in a report's directory that may be overwritten."""
