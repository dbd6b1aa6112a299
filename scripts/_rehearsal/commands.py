"""The commands of a rehearsal, in the order in which each finds what it needs, and how each is expected to end.

Weights are random: no draft is accepted but by chance, no tuning helps, and two tokens of a base in BF16 may be as
likely as each other. So a validation says "not decided" or "refuted", and a tuning is told to write what is not better.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .shapes import Shape

FORMATS = ("transformers", "litert", "mlx", "compressed-tensors", "gguf", "gemma")
MODES = ("norms", "qat", "float")
_NEW_TOKENS = 8
# What a tuning asks for at least: texts to train on, to watch, and held out.
_SIDES = {"trained": 4, "watched": 4, "held out": 5}


@dataclass(frozen=True)
class Place:
    """Where everything lies."""

    root: Path

    @property
    def base(self) -> Path:
        return self.root / "base"

    @property
    def bundle(self) -> Path:
        return self.root / "bundle.litertlm"

    @property
    def prompts(self) -> Path:
        return self.root / "prompts.json"

    @property
    def texts(self) -> Path:
        """Prompts of a tuning."""
        return self.root / "texts.jsonl"

    def out(self, name: str) -> Path:
        """What the command ``name`` writes."""
        return self.root / "out" / name


@dataclass(frozen=True)
class Command:
    """One command, and what it is expected to print last and to end with."""

    name: str
    """In the table of budgets: up to the first space, its kind."""
    program: str
    arguments: tuple[str | Path, ...]
    says: str
    """A regular expression that its output must match."""
    status: tuple[int, ...] = (0,)
    served: bool = False
    """Whether it asks a server, whose address comes first."""

    @property
    def kind(self) -> str:
        """What its budget is called."""
        return self.name.partition(" ")[0]


def write_prompts(place: Place) -> None:
    """The prompts of validations, and those of tunings: as few as these take."""
    from mtp_extract.tuning.corpus import side_of

    topics = {"chat": ("Name three rivers.", "Why is it dark at night?"), "code": ("def main():", "for line in lines:")}
    place.prompts.write_text(json.dumps(topics))
    lines: list[str] = []
    missing = Counter(_SIDES)
    number = 0
    while missing.total():
        number += 1
        if missing[side_of(f"source {number}")]:
            missing[side_of(f"source {number}")] -= 1
            row = {"prompt": f"Count from {number} to {2 * number}, and say why.", "source": f"source {number}"}
            lines.append(json.dumps(row))
    place.texts.write_text("\n".join(lines))


def commands(place: Place, shape: Shape, device: str) -> Iterator[Command]:
    """All of them."""
    bundle, base, drafter = place.bundle, place.base, place.out("extract-transformers")
    yield Command("inspect", "inspect", (bundle, "--graph"), r"48 roles")
    for form in FORMATS:
        more = ("--codes",) if form == "transformers" else ()
        arguments = (bundle, "--for", form, "-o", place.out(f"extract-{form}"), *more)
        yield Command(f"extract {form}", "extract", arguments, r"Verified")
    yield Command("inspect-drafter", "inspect", (drafter, "--against", bundle), "made anew from it: the same")
    for form in ("mlx", "gguf"):
        arguments = (drafter, "--for", form, "-o", place.out(f"convert-{form}"))
        yield Command(f"convert {form}", "convert", arguments, "Wrote")
    yield Command("insert", "insert", (drafter, bundle, "-o", place.out("drafter.litertlm")), "Verified")
    new = place.out("base.litertlm")
    yield Command("insert-base", "insert", (base, bundle, "-o", new), "read again and compared")
    yield Command("inspect-base", "inspect", (new, "--against", base), r"\d+ equal, \d+ equal codes$")
    yield Command("inspect-another", "inspect", (bundle, "--against", base), r"are not the weights", (1,))
    yield Command("validate-source", "validate", (drafter, "--source", bundle), "Proven: the checkpoint is")
    yield from _beside_the_base(place, shape, device)


def _beside_the_base(place: Place, shape: Shape, device: str) -> Iterator[Command]:
    drafter = place.out("extract-transformers")
    beside = ("--base", place.base, "--device", device)
    length = ("--new-tokens", str(_NEW_TOKENS))
    report = place.out("report")
    asked = ("--prompts", place.prompts, "--draft-steps", "1,2", "--batch", "4", "--report", report)
    said = "not decided|Refuted"
    yield Command("validate", "validate", (drafter, *beside, *length, *asked), said, (0, 1))
    # What the base writes is kept in one folder, so that it writes once; of other workloads no more than shows a loss.
    texts = ("--prompts", place.texts, "--work", place.out("tune.work"))
    few = (*texts, "--batch", "16", "--steps", "2", "--force")
    for mode in MODES:
        out = place.out(f"tune-{mode}")
        arguments = (drafter, *beside, *length, *few, "--mode", mode, "-o", out)
        yield Command(f"tune {mode}", "tune", arguments, "Wrote")
    out = place.out("tune-ordered")
    arguments = (drafter, *beside, *length, *few, "--mode", "ordered", "-o", out)
    yield Command("tune-ordered", "tune", arguments, "Wrote")
    fresh = ("--mode", "eagle3", *beside, *length, *few, "--draft-vocab", str(shape.vocab // 8))
    yield Command("tune-eagle3", "tune", (*fresh, "-o", place.out("tune-eagle3")), "Wrote")
    asking = ("--prompts", place.prompts, "--max-tokens", str(_NEW_TOKENS))
    yield Command("bench", "bench", asking, "not told", served=True)
