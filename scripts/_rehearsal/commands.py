"""The commands of a rehearsal, in the order in which each finds what it needs, and how each is expected to end.

Weights are random: no draft is accepted but by chance, no tuning helps, and two tokens of a base in BF16 may be as
likely as each other. So a validation says "not decided" or "refuted", and a tuning is told to write what is not better.

In the folder of a rehearsal lie ``base``, ``bundle.litertlm``, prompts of validations in ``prompts.jsonl`` and of
tunings in ``texts.jsonl``; what a command writes lies in ``out``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .shapes import Shape

FORMATS = ("transformers", "litert", "mlx", "compressed-tensors", "gguf", "gemma")
_NEW_TOKENS = ("--new-tokens", "8")
# What a tuning asks for at least: texts to train on, to watch, and held out.
_SIDES = {"trained": 4, "watched": 4, "held out": 5}


@dataclass(frozen=True)
class Command:
    """One command, and what it is expected to print and to end with."""

    name: str  # in the table; up to the first space, its kind in that of the budgets; up to a hyphen, the program's
    arguments: tuple[str | Path, ...]
    says: str  # a regular expression that its output must match
    status: tuple[int, ...] = (0,)
    served: bool = False  # whether it asks a server, whose address comes first

    @property
    def kind(self) -> str:
        """What its budget is called."""
        return self.name.partition(" ")[0]

    @property
    def program(self) -> str:
        """The command of ``mtp``."""
        return self.kind.partition("-")[0]


def write_prompts(root: Path) -> None:
    """Write the prompts of validations, and the fewest that tunings take."""
    from mtp_extract.tuning.corpus import choose_side

    topics = {"chat": ("Name three rivers.", "Why is it dark at night?"), "code": ("def main():", "for line in lines:")}
    rows = [{"prompt": text, "workload": name} for name, texts in topics.items() for text in texts]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    missing, number, rows = Counter(_SIDES), 0, []
    while missing.total():
        number += 1
        if missing[side := choose_side(f"source {number}")]:
            missing[side] -= 1
            prompt = f"Count from {number} to {2 * number}, and say why."
            rows.append({"prompt": prompt, "source": f"source {number}"})
    (root / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def list_commands(root: Path, shape: Shape, device: str) -> Iterator[Command]:
    """List all commands that are rehearsed."""
    base, bundle, out, prompts = root / "base", root / "bundle.litertlm", root / "out", root / "prompts.jsonl"
    drafter, new = out / "extract-transformers", out / "base.litertlm"
    yield Command("inspect", (bundle, "--graph"), r"48 roles")
    for form in FORMATS:
        more = ("--codes",) if form == "transformers" else ()
        yield Command(f"extract {form}", (bundle, "--for", form, "-o", out / f"extract-{form}", *more), "Verified")
    yield Command("inspect-drafter", (drafter, "--against", bundle), "agrees|the same")
    for form in ("mlx", "gguf"):
        yield Command(f"convert {form}", (drafter, "--for", form, "-o", out / f"convert-{form}"), "Wrote")
    yield Command("insert", (drafter, bundle, "-o", out / "drafter.litertlm"), "Verified")
    # Of random floats two and four bits lose more than a tenth: only --force writes that, and the comparison says it.
    yield Command("insert-base", (base, bundle, "-o", new, "--force"), "read again and compared")
    yield Command("inspect-base", (new, "--against", base), r"\d+ equal, \d+ within half a step")
    yield Command("inspect-another", (bundle, "--against", base), "are not the weights", (1,))
    yield Command("validate-source", (drafter, "--source", bundle), "computes the same +passed")
    beside = ("--base", base, "--device", device, *_NEW_TOKENS)
    options = ("--prompts", prompts, "--draft-steps", "1,2", "--batch", "4", "--report", out / "report")
    yield Command("validate", (drafter, *beside, *options), "not decided|Refuted", (0, 1))
    # What the base writes is kept in one folder, so that it writes once; of other workloads no more than shows a loss.
    few = ("--prompts", root / "texts.jsonl", "--work", out / "tune.work", "--batch", "16", "--steps", "2", "--force")
    for mode in ("norms", "qat", "float", "ordered"):
        name = "tune-ordered" if mode == "ordered" else f"tune {mode}"
        yield Command(name, (drafter, *beside, *few, "--mode", mode, "-o", out / f"tune-{mode}"), "Wrote")
    head = ("--mode", "eagle3", "--draft-vocab", str(shape.vocab // 8), "-o", out / "tune-eagle3")
    yield Command("tune-eagle3", (*beside, *few, *head), "Wrote")
    yield Command("bench", ("--prompts", prompts, "--max-tokens", "8"), "Measured: ", served=True)
