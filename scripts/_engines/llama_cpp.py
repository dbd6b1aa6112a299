"""llama.cpp's server: started with a base and perhaps a drafter, asked once, and ended."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DRAFTS = 3
# K and V in F16, the default, are not those of the base elsewhere. Two threads that wait for each other on a busy
# machine take minutes.
_OPTIONS = ("-ctk", "f32", "-ctv", "f32", "-t", "1", "-np", "1")
_GREEDY = {"temperature": 0, "top_k": 1, "cache_prompt": False}
_SECONDS_TO_START = 120


def ask_llama(server: Path, base: Path, drafter: Path | None, prompt: str, tokens: int) -> dict[str, Any]:
    """Ask the server for its answer to ``prompt``.

    Raises:
        RuntimeError: it ended before it was ready; with the first error that it told.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [str(server), "-m", str(base), *_OPTIONS, "--port", str(port)]
    if drafter is not None:
        command += ["-md", str(drafter), "--spec-type", "draft-mtp", "--spec-draft-n-max", str(DRAFTS)]
    address = f"http://127.0.0.1:{port}"
    request = json.dumps({"prompt": prompt, "n_predict": tokens, **_GREEDY}).encode()
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        running = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            for _ in range(_SECONDS_TO_START * 10):
                if running.poll() is not None:
                    log.seek(0)
                    raise RuntimeError(find_reason(log.read()))
                try:
                    urllib.request.urlopen(f"{address}/health").close()
                    break
                except urllib.error.URLError:
                    time.sleep(0.1)
            with urllib.request.urlopen(f"{address}/completion", request) as reply:
                answer: dict[str, Any] = json.load(reply)
                return answer
        finally:
            running.kill()
            running.wait()


def read_draft_counts(answer: Mapping[str, Any]) -> tuple[int, int]:
    """Return (drafted, accepted) of an answer, which leaves both out if nothing was drafted."""
    return int(answer["timings"].get("draft_n", 0)), int(answer["timings"].get("draft_n_accepted", 0))


def shorten_version(printed: str) -> str:
    """Cut what ``llama-server --version`` prints to the commit that was built."""
    match = re.search(r"version: (\S+).*?(?:commit |\()([0-9a-f]{7,})\)", printed)
    return f"{match[1]} {match[2]}" if match else printed.strip()


def find_reason(log: str) -> str:
    """Return the first error in a server's log, or its last line."""
    errors = [line for line in log.splitlines() if " E " in line and "this warning is normal" not in line]
    return errors[0].partition(" E ")[2].strip() if errors else log.strip().rpartition("\n")[2]
