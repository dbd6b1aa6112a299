"""Prompts, and which of them are trained on, watched, or held out: a hash of their source decides.

So it stays the same when prompts are added.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from mtp_extract.errors import MtpExtractError, escape
from mtp_extract.evaluate.prompts import LARGEST, Prompt, read_prompts
from mtp_extract.io.regular import read_regular

TRAINED, WATCHED, HELD_OUT = "trained", "watched", "held out"
"""Trained on; measured during training, to keep the best; measured before and after, to accept or refuse."""

_SHARES = ((0.08, WATCHED), (0.2, HELD_OUT))  # upper bounds of the hash, as shares of its range


@dataclass(frozen=True)
class Item:
    """A prompt, or a text by people."""

    workload: str  # what it is an example of
    source: str  # where it comes from; all of one source are on one side
    prompt: Any  # text, or messages

    @property
    def side(self) -> str:
        """:data:`TRAINED`, :data:`WATCHED` or :data:`HELD_OUT`."""
        return side_of(self.source)

    @property
    def key(self) -> str:
        """Equal for equal prompts."""
        return json.dumps(self.prompt, sort_keys=True, ensure_ascii=True)


def side_of(source: str) -> str:
    share = int.from_bytes(sha256(source.encode("utf-8", "backslashreplace")).digest()[:8], "big") / 2**64
    return next((side for bound, side in _SHARES if share < bound), TRAINED)


def read_items(path: Path) -> list[Item]:
    """Prompts, or texts, from a file.

    A ``.jsonl`` has one object a line: ``prompt``, a text or a list of messages, and, if wanted, ``workload`` and
    ``source``. Other files are those of :func:`~mtp_extract.evaluate.prompts.read_prompts`; there every prompt is a
    source of its own.

    Raises:
        MtpExtractError: it cannot be read, has another form, or holds nothing.
    """
    if path.suffix != ".jsonl":
        return of_prompts(read_prompts(path))
    try:
        lines = read_regular(path, LARGEST).decode("utf-8").splitlines()
        rows = [(number, json.loads(line)) for number, line in enumerate(lines, 1) if line.strip()]
    except (OSError, ValueError, RecursionError) as error:
        raise MtpExtractError(
            f'expected prompts in {escape(path)}, one a line as JSON {{"prompt": "…"}}, found: {escape(error)}'
        ) from error
    if not rows:
        raise MtpExtractError(f"{escape(path)}: expected at least one prompt, found none")
    return [_item(path, number, row) for number, row in rows]


def _item(path: Path, number: int, row: Any) -> Item:
    prompt = row.get("prompt") if isinstance(row, dict) else None
    messages = isinstance(prompt, list) and prompt and all(isinstance(part, dict) for part in prompt)
    if not messages and not (isinstance(prompt, str) and prompt.strip()):
        raise MtpExtractError(
            f"{escape(path)}: line {number}: expected an object with a prompt, a text or a list of messages, found "
            f"{escape(row)}"
        )
    workload, source = row.get("workload", path.stem), row.get("source")
    item = Item(str(workload), "", prompt)
    return replace(item, source=item.key if source is None else str(source))


def of_prompts(prompts: Sequence[Prompt]) -> list[Item]:
    """As items, each a source of its own."""
    return [Item(prompt.workload, prompt.text, prompt.text) for prompt in prompts]
