"""Files of prompts for tests."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from mtp_extract.evaluation.prompts import Prompt


def write_prompts(path: Path, prompts: Mapping[str, Iterable[str]]) -> Path:
    """A ``.jsonl`` file of the prompts of each workload."""
    rows = [{"prompt": text, "workload": name} for name, texts in prompts.items() for text in texts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def few_of(prompts: Iterable[Prompt], step: int) -> dict[str, list[str]]:
    """Of each workload every so many prompts, from the first on."""
    found: dict[str, list[str]] = {}
    for prompt in prompts:
        found.setdefault(prompt.workload, []).append(str(prompt.content))
    return {name: texts[::step] for name, texts in found.items()}
