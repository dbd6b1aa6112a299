"""Names of the files of a validation report, which a checkpoint's directory may contain."""

from __future__ import annotations

from mtp_extract.io.place import listing

REPORT = "report.json"
PAGE_FILE = "report.html"
PAIR = "pair.json"
REPORT_FILES = frozenset({REPORT, PAGE_FILE, PAIR})
REPORT_LISTED = listing(REPORT, REPORT_FILES)
"""The files in a report's directory that may be overwritten."""
