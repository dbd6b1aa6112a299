"""Makes the pictures of ``docs/pictures/``: a validation of the sample, as Chromium shows its page::

    python scripts/pictures.py [REPORT.html]

Without the page of a report that is there already, the sample is validated first, which takes a minute or two.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from PIL import Image

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"
VALIDATE = ("validate", "--sample", "--draft-steps", "1,2,4,8", "--tree", "2x2x2", "--report")
LEAST = 500
"""Pixels: no window of Chromium is narrower."""


class Picture(NamedTuple):
    width: int
    height: int


SHOWN = {"report": Picture(1280, 900), "report-768": Picture(768, 1500), "report-390": Picture(390, 1400)}


def take(page: Path, picture: Picture, target: Path, folder: Path) -> None:
    """Show the top of ``page`` in a frame as wide as ``picture``, and write it as a PNG of 256 colours."""
    width, height = picture
    frame = (
        f'<body style="margin:0"><iframe srcdoc="{escape(page.read_text(encoding="utf-8"))}" width="{width}" '
        f'height="{height}" scrolling="no" style="border:0;display:block"></iframe>'
    )
    (folder / "frame.html").write_text(f"<!doctype html><meta charset=utf-8>{frame}", encoding="utf-8")
    options = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync"
    size = f"--window-size={max(width, LEAST)},{height + 200}"
    command = [find_chromium(), *options.split(), "--hide-scrollbars", size, f"--user-data-dir={folder / 'profile'}"]
    subprocess.run([*command, "--screenshot=shot.png", "frame.html"], cwd=folder, check=True, capture_output=True)
    with Image.open(folder / "shot.png") as shot:
        shot.convert("RGB").crop((0, 0, width, height)).quantize(256).save(target, optimize=True)


def find_chromium() -> str:
    """Its program.

    Raises:
        SystemExit: there is none.
    """
    found = shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        raise SystemExit("pictures: expected chromium or google-chrome on the PATH, found neither. Install one.")
    return found


def main(arguments: list[str]) -> None:
    find_chromium()
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        page = Path(arguments[0]) if arguments else folder / "report" / "report.html"
        if not arguments:
            subprocess.run([sys.executable, "-m", "mtp_extract", *VALIDATE, str(page.parent)], check=True)
        PICTURES.mkdir(exist_ok=True)
        for name, picture in SHOWN.items():
            target = PICTURES / f"{name}.png"
            take(page, picture, target, folder)
            print(f"{target.name}: {picture.width} x {picture.height}, {target.stat().st_size} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
