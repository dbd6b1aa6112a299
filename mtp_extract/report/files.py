"""Names of the files that a report of a validation consists of. A checkpoint's directory may hold them."""

from __future__ import annotations

from mtp_extract.io.place import listing

REPORT = "report.json"
PAGE_FILE = "report.html"
PAIR = "pair.json"
REPORT_FILES = frozenset({REPORT, PAGE_FILE, PAIR})
REPORT_LISTED = listing(REPORT, REPORT_FILES)
"""What of a report's directory may be replaced."""
