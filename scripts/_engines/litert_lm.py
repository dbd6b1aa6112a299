"""LiteRT-LM runs the bundle itself, with and without speculation."""

from __future__ import annotations

import re
from pathlib import Path

from .outcome import Outcome, last_line, run

__all__ = ["check", "success_rate"]

_RATE = re.compile(r"MTP Drafter - Success rate: ([0-9.]+)")


def success_rate(log: str) -> str:
    """What the runtime's verbose log says of the drafter.

    Raises:
        ValueError: nothing.
    """
    found = _RATE.search(log)
    if found is None:
        raise ValueError(f"LiteRT-LM: expected a success rate in its log, found {last_line(log)!r}.")
    return found[1]


def check(program: Path, bundle: Path, prompt: str) -> Outcome:
    """The runtime's greedy text with and without the drafter, and its success rate."""
    version = run([str(program), "--version"]).stdout.strip().split(" ")[-1]
    command = [str(program), "run", str(bundle), "--backend", "cpu", "--no-template", "--prompt", prompt]
    command += ["--cache", "no", "--top-k", "1", "--verbose", "--speculative-decoding"]
    plain, assisted = (run([*command, wanted]) for wanted in ("false", "true"))
    if assisted.returncode or plain.returncode:
        failed = assisted if assisted.returncode else plain
        return Outcome("litert-lm", "bundle", version, loads=False, note=last_line(failed.stderr))
    note = f"success rate {success_rate(assisted.stderr)}"
    return Outcome("litert-lm", "bundle", version, True, plain.stdout == assisted.stdout, note=note)
