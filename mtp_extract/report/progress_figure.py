"""How a training went, as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mtp_extract.report.colours import light


def draw_progress(history: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Loss by step, and mean accepted length on the watched texts where it was measured, as a PNG at ``path``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    losses = [(entry["step"], entry["loss"]) for entry in history if "loss" in entry]
    lengths = [(entry["step"], entry["mean_accepted_length"]) for entry in history if "loss" not in entry]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axes, points, colour, marker, title in (
        (left, losses, light("blue"), "", "loss of a step"),
        (right, lengths, light("vermilion"), "o", "mean accepted length, watched texts"),
    ):
        axes.plot(*zip(*points, strict=True) if points else ([], []), color=colour, marker=marker, linewidth=1.2)
        axes.set_title(title, loc="left")
        axes.set_xlabel("step")
        axes.grid(color=light("line"))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
