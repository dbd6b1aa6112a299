"""One look or one extraction, in a process of its own: a request as JSON on stdin, lines of JSON on stdout.

They are ``{"progress": [done, total]}``, and in the end ``{"result": …}`` or ``{"refused": "a message"}``.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

from job import check_size

import mtp_extract
from mtp_extract.cli._writing import is_rounded
from mtp_extract.pipeline.extraction import default_directory
from mtp_extract.pipeline.inspection import inspect
from mtp_extract.proof.words import in_words

_ONE = threading.Lock()
_PAUSE = 0.2  # seconds between two words on how far it is


def say(**what: Any) -> None:
    with _ONE:  # progress is told by threads
        print(json.dumps(what), flush=True)


def work(request: dict[str, Any]) -> dict[str, Any]:
    last = 0.0

    def told(done: int, total: int) -> None:
        nonlocal last
        if done == total or time.monotonic() - last > _PAUSE:
            last = time.monotonic()
            say(progress=[done, total])

    # Without a token of the user's none is sent, rather than one that lies about on this machine.
    with mtp_extract.open(request["source"], token=request["token"] or False, progress=told) as bundle:
        if request["what"] == "look":
            return inspect(bundle).as_json
        # Raises what is wrong with it, where looking only says so.
        bundle.drafter()
        check_size(inspect(bundle).as_json["drafter"], request["largest"])
        out = Path(request["folder"], default_directory(bundle.source.name))
        made = mtp_extract.extract(bundle, out, format=request["format"], progress=told)
    return {
        "directory": str(made.directory),
        "files": made.files,
        "layout": made.record["layout"],
        "notes": made.notes,
        "proof": in_words(made.record["proof"]),
        "rounded": is_rounded(made.record),
    }


def main() -> None:
    try:
        say(result=work(json.load(sys.stdin)))
    except mtp_extract.MtpExtractError as error:
        say(refused=str(error))


if __name__ == "__main__":
    main()
