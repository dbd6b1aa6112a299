"""The report directory: ``report.json``, ``report.md`` and the figures, there whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mtp_extract.errors import OutputError, escape
from mtp_extract.validate.acceptance.agreement import WorkloadFigures
from mtp_extract.validate.parity.compare import Comparison
from mtp_extract.validate.report.figures import draw_figures
from mtp_extract.validate.report.verdict import findings, percent, verdict, why
from mtp_extract.validate.result import Validation, as_json

__all__ = ["check_report_place", "markdown", "write_report"]

_JSON = "report.json"
_CAPTIONS = {
    "acceptance_by_step": "Acceptance by draft step, and top-1 agreement beside that of the controls",
    "agreement_by_workload": "Agreement by workload",
    "generation_by_drafts": "Tokens a second, and the time of a round, by number of drafts",
}


def check_report_place(target: Path, overwrite: bool) -> None:
    """Check that a report may be written to ``target``, before any work is done.

    Raises:
        OutputError: it exists, and is not a report or may not be replaced.
    """
    if not os.path.lexists(target) or (target.is_dir() and not any(target.iterdir())):
        return
    if not target.is_dir() or target.is_symlink():
        raise OutputError(f"{escape(target)}: exists and is not a directory. Choose another place with --report.")
    if not (target / _JSON).is_file():
        raise OutputError(
            f"{escape(target)}: exists and is no report (it has no {_JSON}). Choose another place with --report."
        )
    if not overwrite:
        raise OutputError(
            f"{escape(target)}: exists. Add --overwrite to replace it, or choose another place with --report."
        )


def write_report(validation: Validation, target: Path, *, overwrite: bool = False) -> list[str]:
    """Write the report; names of its files.

    Raises:
        OutputError: it cannot be written there.
    """
    with _staged(target, overwrite) as stage:
        figures = draw_figures(validation, stage)
        (stage / _JSON).write_text(json.dumps(as_json(validation), indent=2) + "\n", encoding="utf-8")
        (stage / "report.md").write_text(markdown(validation, figures), encoding="utf-8")
        return sorted(path.name for path in stage.iterdir())


@contextmanager
def _staged(target: Path, overwrite: bool) -> Iterator[Path]:
    target = Path(os.path.abspath(target))
    check_report_place(target, overwrite)
    stage = target.parent / f".{target.name}.partial-{uuid.uuid4().hex[:12]}"
    old = target.parent / f".{target.name}.replaced-{uuid.uuid4().hex[:12]}"
    try:
        stage.mkdir(parents=True)
        yield stage
        check_report_place(target, overwrite)
        # A directory with files in it cannot be replaced in one step: the old one steps aside first.
        if target.is_dir() and any(target.iterdir()):
            os.rename(target, old)
        try:
            os.replace(stage, target)
        except OSError:
            if old.is_dir():
                os.rename(old, target)
            raise
    except OSError as error:
        raise OutputError(
            f"{escape(target)}: the report cannot be written: {error.strerror or error}. Choose another place with "
            "--report."
        ) from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def markdown(validation: Validation, figures: Sequence[str] = ()) -> str:
    """The report as a page: verdict first, then each measurement as a table."""
    found = validation
    drawn = {name: f"![{_CAPTIONS[name]}]({name}.png)\n" for name in figures}
    page = [f"# Validation of {_cell(found.directory)}\n", f"**{_cell(verdict(found))}**\n"]
    if listed := findings(found):
        page.append("Findings:\n\n" + "\n".join(f"- {_cell(item)}" for item in listed) + "\n")
    page.append(_about(found))
    if found.parity:
        page.append(_parity_section(found))
    if found.agreement:
        page += [_agreement_section(found), drawn.get("acceptance_by_step", "")]
        page += [_workload_section(found), drawn.get("agreement_by_workload", "")]
    if found.controls:
        page.append(_control_section(found))
    if found.generation:
        page += [_generation_section(found), drawn.get("generation_by_drafts", "")]
    if found.notes:
        page.append("## Notes\n\n" + "\n".join(f"- {_cell(note)}" for note in found.notes) + "\n")
    return "\n".join(part for part in page if part)


def _cell(text: object) -> str:
    """Names come from files and users: nothing in them may end a table cell or a line."""
    # Word by word, as a long text is not a long name.
    return " ".join(escape(word) for word in str(text).split(" ")).replace("|", "\\|")


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in row) + " |" for row in lines) + "\n"


def _about(found: Validation) -> str:
    rows: list[tuple[str, object]] = [("drafter", found.directory)]
    if found.source:
        rows.append(("file", found.source))
    if found.base:
        rows += [
            ("base", f"{found.base.name} ({found.base.dtype}, on {', '.join(found.base.devices)})"),
            ("drafter computes in", found.base.drafter_dtype),
            ("chat template", "applied" if found.base.chat_template else "not applied"),
        ]
    rows += [(name.replace("_", " "), _setting(value)) for name, value in found.settings.items()]
    return "## Setting\n\n" + _table(["", ""], rows)


def _setting(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _parity_section(found: Validation) -> str:
    parity = found.parity
    assert parity is not None
    rows = [
        [name, *_compared(comparison)]
        for name, comparison in (
            ("logits, float", parity.float),
            ("logits, emulated", parity.emulated),
            ("logits, emulated alone", parity.emulated_alone),
            ("projected state, float", parity.float_projected),
            ("projected state, emulated", parity.emulated_projected),
        )
    ]
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(parity.kinds.items()))
    weights = parity.weights
    text = (
        "## Parity with Google's interpreter\n\n"
        f"`ai-edge-litert` ({parity.kernels} kernels) runs the drafter section, the reference runs the checkpoint, on "
        f"the same {parity.float.n} inputs. *Float* is the checkpoint as it is. *Emulated* repeats the interpreter's "
        f"rounding of activations ({kinds} matrices{', attention in integers' if parity.rounded_attention else ''}); "
        f"{parity.followed.codes} of {parity.followed.of} values lay so near the middle between two codes that the "
        "last bit of a sum decides, and were rounded as the interpreter did (*alone*: they were not).\n\n"
        + _table(
            ["", "n", "max. abs.", "of range", "relative", "min. cosine", "top-1", "top-5"],
            rows,
        )
        + f"\nTensors of the checkpoint: {len(weights.exact)} equal to the file's, {len(weights.rounded)} equal once "
        f"rounded, {len(weights.different)} different"
        + (f" ({', '.join(weights.different)})" if weights.different else "")
        + ".\n"
    )
    if parity.roles:
        text += (
            "\n<details><summary>Operator by operator</summary>\n\n"
            + _table(
                ["role", "float, of range", "float, cosine", "emulated, of range", "emulated, cosine"],
                [
                    [
                        role.role,
                        f"{role.float.max_of_range:.1e}",
                        f"{role.float.cosine:.6f}",
                        f"{role.emulated.max_of_range:.1e}",
                        f"{role.emulated.cosine:.6f}",
                    ]
                    for role in parity.roles
                ],
            )
            + "\n</details>\n"
        )
    return text


def _compared(comparison: Comparison) -> list[object]:
    return [
        comparison.n,
        f"{comparison.max_abs:.2e}",
        f"{comparison.max_of_range:.1e}",
        f"{comparison.relative:.1e}",
        f"{comparison.cosine:.7f}",
        f"{100 * comparison.top1:.1f} %",
        f"{100 * comparison.top5:.1f} %",
    ]


def _mean(figures: WorkloadFigures) -> str:
    interval = figures.mean_accepted_interval
    return f"{figures.mean_accepted_length:.2f}" + (f" ({interval.low:.2f}–{interval.high:.2f})" if interval else "")


def _agreement_section(found: Validation) -> str:
    figures = found.agreement
    assert figures is not None
    rows = [
        [
            index + 1,
            step.top1.trials,
            percent(step.top1),
            percent(step.top5),
            percent(step.conditional),
            percent(step.unconditional),
        ]
        for index, step in enumerate(figures.steps)
    ]
    return (
        "## Agreement with the base\n\n"
        f"Teacher-forced over the base's own greedy continuation of {figures.texts} prompts: every position is "
        "drafted from. Conditional acceptance is accepted_i / accepted_(i−1), unconditional is accepted_i / rounds. In "
        "brackets: 95 % intervals (Wilson).\n\n"
        + _table(["step", "n", "top-1", "top-5", "conditional", "unconditional"], rows)
        + f"\nMean accepted length (1 + accepted / rounds) at {len(figures.steps)} drafts: {_mean(figures)}.\n"
    )


def _workload_section(found: Validation) -> str:
    rows = [
        [
            name,
            figures.texts,
            figures.anchors,
            percent(figures.steps[0].top1),
            percent(figures.steps[0].top5),
            _mean(figures),
        ]
        for name, figures in found.workloads.items()
    ]
    return "### By workload\n\n" + _table(
        ["workload", "texts", "n", "top-1, step 1", "top-5, step 1", "mean accepted length"], rows
    )


def _control_section(found: Validation) -> str:
    rows: list[list[object]] = []
    if found.agreement:
        rows.append(["**real drafter**", "", percent(found.agreement.steps[0].top1), "", _mean(found.agreement), ""])
    for result in found.controls:
        figures, interval = result.figures, result.interval
        gap = f"{100 * result.difference:.1f}" if result.difference is not None else ""
        if interval:
            gap += f" ({100 * interval.low:.1f}–{100 * interval.high:.1f})"
        rows.append(
            [
                result.control.name,
                result.control.what,
                percent(figures.steps[0].top1) if figures else "–",
                gap,
                _mean(figures) if figures else "–",
                why(result, found),
            ]
        )
    return (
        "## Controls\n\nThe same positions with one thing broken on purpose. The difference is in percentage points, "
        "with its interval over texts.\n\n"
        + _table(["control", "what is broken", "top-1, step 1", "below by", "mean accepted length", "meaning"], rows)
    )


def _generation_section(found: Validation) -> str:
    generation = found.generation
    assert generation is not None
    rows = [
        [
            result.drafts,
            f"{result.accepted}/{result.drafted}",
            f"{100 * result.acceptance:.1f} %",
            f"{result.mean_accepted_length:.2f}",
            f"{result.identical_prompts} of {result.prompts}",
            f"{result.base_tokens_per_s:.1f}",
            f"{result.speculative_tokens_per_s:.1f}",
            f"{result.verify_ms:.2f}",
            f"{result.draft_ms:.2f}",
        ]
        for result in generation.lengths
    ]
    longest = generation.lengths[-1]
    buffers = [[buffer.name, list(buffer.shape), buffer.dtype, f"{buffer.nbytes:,}"] for buffer in longest.buffers]
    return (
        "## Speculative decoding\n\n"
        "Acceptance and text over all prompts in batches; times of a batch of one, over "
        f"{generation.timed} prompts.\n\n"
        + _table(
            [
                "K",
                "accepted",
                "acceptance",
                "mean accepted length",
                "identical text",
                "base tokens/s",
                "speculative tokens/s",
                "verify ms",
                "draft ms",
            ],
            rows,
        )
        + f"\nOne forward of the base over one token: {generation.base_ms:.2f} ms. By the arithmetic of measured "
        f"acceptance and cost, K = {generation.best_drafts} is worth most, {generation.predicted_speedup:.2f}×.\n"
        + f"\nBuffers at K = {longest.drafts}, batch of one:\n\n"
        + _table(["buffer", "shape", "dtype", "bytes"], buffers)
    )
