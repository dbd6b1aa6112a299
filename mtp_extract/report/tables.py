"""What a validation measured, as tables: the one telling of it, in words and numbers.

The report's page, the terminal and the model card show these tables, each in its own way. They are made from the
content of ``report.json``, which is what all three have: a card is made long after the measurement, elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtp_extract.io.place import listing
from mtp_extract.report import markdown
from mtp_extract.speculate.intervals import LEAST_TEXTS

REPORT = "report.json"
PAGE = "report.md"
WEB_PAGE = "report.html"
PAIR = "pair.json"
FIGURES: Mapping[str, str] = {
    "drafters_and_methods": "Tokens a round of the base, with 95 % intervals, and the measured speedup",
    "acceptance_by_step": "Acceptance by draft step",
    "controls_by_step": "Top-1 agreement by draft step, with one thing broken at a time",
    "agreement_by_workload": "Agreement of the first draft by workload",
    "length_by_workload": "Mean accepted length by workload",
    "length_by_drafts": "Mean accepted length by drafts that the base verifies a round",
    "generation_by_drafts": "Tokens a second by what is drafted",
    "round_by_drafts": "The time of a round and what it yields, by what is drafted",
    "drafters_by_step": "Conditional acceptance by draft step, drafters side by side",
}
"""Names of the figures, without an ending, and what they show."""

REPORT_FILES = frozenset(
    {REPORT, PAGE, WEB_PAGE, PAIR, *(f"{name}.{ending}" for name in FIGURES for ending in ("png", "svg"))}
)
"""Everything that a report may consist of."""

REPORT_LISTED = listing(REPORT, REPORT_FILES)
"""What of a report's directory may be replaced."""


@dataclass(frozen=True)
class Table:
    """One table of a report.

    Attributes:
        title: a heading.
        columns: a name each; percentages say so here.
        rows: text, or whole numbers.
        about: how it was measured, in Markdown; for readers who were not there.
        after: what the numbers come to, in plain text.
        figures: of :data:`FIGURES`, those that show the same.
        detail: only for who looks closer.
        first: what a reader wants first.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | int, ...], ...]
    about: str = ""
    after: str = ""
    figures: tuple[str, ...] = ()
    detail: bool = False
    first: bool = False

    def markdown(self, level: int = 2) -> str:
        """As a section with a heading of ``level``; a detail is folded away."""
        cells = markdown.table(
            [markdown.plain(column) for column in self.columns],
            ([markdown.plain(cell) for cell in row] for row in self.rows),
        )
        if self.detail:
            return f"<details><summary>{markdown.plain(self.title)}</summary>\n\n{cells}\n\n</details>"
        parts = (
            f"{'#' * level} {markdown.plain(self.title)}",
            markdown.prose(self.about),
            cells,
            markdown.paragraph(self.after),
        )
        return "\n\n".join(part for part in parts if part)


def share(value: float | None, interval: Sequence[float] | None) -> str:
    """A fraction in percent with its interval, without the sign: ``81.5 (80.4–82.6)``; a dash where there is none."""
    if value is None or math.isnan(value):
        return "–"
    return f"{100 * value:.1f}" + (f" ({100 * interval[0]:.1f}–{100 * interval[1]:.1f})" if interval else "")


def setting(report: Mapping[str, Any]) -> Table:
    """What was measured, and with what."""
    base, source = report["base"], report["source"]
    rows = [("drafter", report["drafter"])]
    if source:
        rows.append(("file", source))
    if base:
        rows += [
            ("base", f"{base['name']} ({base['dtype']}, on {', '.join(base['devices'])})"),
            ("drafter computes in", base["drafter_dtype"]),
            ("chat template", "applied" if base["chat_template"] else "not applied"),
        ]
    rows += [(name.replace("_", " "), words(value)) for name, value in report["settings"].items() if value != []]
    return Table(title="Setting", columns=("", ""), rows=tuple(rows))


def words(value: Any) -> str:
    """A setting: numbers, names, or numbers by name."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def method(name: str) -> str:
    """What was drafted, by its name in ``generation``: ``chain of 3``, ``tree 4x2x1``."""
    return f"chain of {name}" if name.isdecimal() else f"tree {name}"


def measurements(report: Mapping[str, Any]) -> Iterator[Table]:
    """The tables of what was measured, in the order in which they are read.

    Raises:
        KeyError, TypeError: ``report`` is not the content of a ``report.json``.
    """
    # Reports of earlier releases knew one drafter, and no trees.
    drafters = report.get("drafters") or ()
    if drafters:
        yield _summary(report)
    if len(drafters) > 1:
        yield from _beside(drafters)
    if report["generation"] is not None:
        yield _generation(report)
    if drafters:
        yield _costs(drafters)
    if report["agreement"] is not None:
        yield from _agreement(report["agreement"], alone=len(drafters) < 2)
    if report["controls"] is not None:
        yield _controls(report["controls"], report["agreement"], report.get("trivial", {}))
    # The first reports had no checks.
    if report.get("checks"):
        yield _checks(report["checks"])
    if report["parity"] is not None:
        yield from _parity(report["parity"])


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


_RESULTS = {True: "passed", False: "refuted", None: "not checked"}


def _checks(checks: Sequence[Mapping[str, Any]]) -> Table:
    return Table(
        title="Is it the drafter of the file?",
        columns=("check", "what is asked", "result", "evidence"),
        rows=tuple((check["name"], check["what"], _RESULTS[check["passed"]], check["evidence"]) for check in checks),
        about="Every answer is derived from the file anew. One that is refuted refutes the checkpoint.",
    )


def _parity(parity: Mapping[str, Any]) -> Iterator[Table]:
    compared = {
        "logits, float": parity["float"],
        "logits, emulated": parity["emulated"],
        "logits, emulated alone": parity["emulated_alone"],
        "state, float": parity["float"]["projected"],
        "state, emulated": parity["emulated"]["projected"],
    }
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(parity["matrices"].items()))
    followed, weights = parity["followed_roundings"], parity["weights"]
    different, first_apart = weights["different"], parity["first_apart"]
    yield Table(
        title="Parity with Google's interpreter",
        columns=("", "n", "max. abs.", "of range", "relative", "min. cosine", "top-1 %", "top-5 %"),
        rows=tuple(
            (
                name,
                found["n"],
                _number(found["max_abs"], ".2e"),
                _number(found["max_of_range"], ".1e"),
                _number(found["relative"], ".1e"),
                _number(found["cosine"], ".7f"),
                share(found["top1"], None),
                share(found["top5"], None),
            )
            for name, found in compared.items()
        ),
        about=(
            f"`ai-edge-litert` ({parity['kernels']} kernels) runs the drafter section, the reference runs the "
            f"checkpoint, on the same {parity['float']['n']} inputs; compared are the logits and the projected state. "
            "*Float* is the checkpoint as it is. *Emulated* repeats the interpreter's rounding of activations "
            f"({kinds} matrices{', attention in integers' if parity['rounded_attention'] else ''}); "
            f"{followed['codes']} of {followed['of']} values lay so near the middle between two codes that the last "
            "bit of a sum decides, and were rounded as the interpreter did (*alone*: they were not). That explains a "
            "difference; it proves nothing."
        ),
        after=(
            f"Tensors of the checkpoint: {weights['exact']} equal to the file's, {weights['rounded']} equal once "
            f"rounded, {len(different)} different"
            + (f" ({', '.join(different)})" if different else "")
            + (f". First role apart: {first_apart}" if first_apart is not None else "")
            + "."
        ),
    )
    if parity["roles"]:
        yield Table(
            title="Operator by operator",
            columns=("role", "float, of range", "float, cosine", "emulated, of range", "emulated, cosine"),
            rows=tuple(
                (
                    role,
                    *(
                        cell
                        for found in (both["float"], both["emulated"])
                        for cell in (_number(found["max_of_range"], ".1e"), _number(found["cosine"], ".6f"))
                    ),
                )
                for role, both in parity["roles"].items()
            ),
            detail=True,
        )


_RATES = ("top1", "top5", "conditional", "unconditional")
_BRACKETS = f"In brackets: 95 % intervals, over texts; none with fewer than {LEAST_TEXTS}."


def _rate(figures: Mapping[str, Any], name: str, step: int = 0) -> str:
    steps = figures["steps"]
    return share(steps[step][name], steps[step]["ci95"][name]) if steps else "–"


def _mean(figures: Mapping[str, Any]) -> str:
    # The first reports had no interval for a control.
    value, interval = figures["mean_accepted_length"], figures.get("mean_accepted_length_ci95")
    return _number(value, ".2f") + (f" ({interval[0]:.2f}–{interval[1]:.2f})" if interval else "")


def _agreement(agreement: Mapping[str, Any], alone: bool) -> Iterator[Table]:
    steps = agreement["steps"]
    yield Table(
        title="Agreement with the base",
        columns=("step", "n", "top-1 %", "top-5 %", "conditional %", "unconditional %"),
        rows=tuple(
            (step["step"], step["n"], *(_rate(agreement, name, index) for name in _RATES))
            for index, step in enumerate(steps)
        ),
        about=(
            f"Teacher-forced over the base's own greedy continuation of {agreement['texts']} prompts: every position "
            "is drafted from. Conditional acceptance is accepted_i / accepted_(i−1), unconditional is accepted_i / "
            f"rounds. {_BRACKETS}"
        ),
        after=f"Mean accepted length (1 + accepted / rounds) at {len(steps)} drafts: {_mean(agreement)}.",
        figures=("acceptance_by_step",),
    )
    yield Table(
        title="By workload",
        columns=("workload", "texts", "n", "top-1 %, step 1", "top-5 %, step 1", "mean length"),
        rows=tuple(
            (name, found["texts"], found["n"], _rate(found, "top1"), _rate(found, "top5"), _mean(found))
            for name, found in (*agreement["workloads"].items(), ("all", agreement))
        ),
        figures=("agreement_by_workload", *(("length_by_workload",) if alone else ())),
    )


def _controls(controls: Mapping[str, Any], agreement: Mapping[str, Any] | None, trivial: Mapping[str, Any]) -> Table:
    real = [("real drafter", _rate(agreement, "top1"), "", _mean(agreement), "nothing")] if agreement else []
    return Table(
        title="Controls",
        columns=("control", "top-1 %, step 1", "below by", "mean length", "what is broken: what the score says"),
        rows=(
            *real,
            *(
                (
                    name,
                    _rate(found, "top1"),
                    share(found["difference"], found["difference_ci95"]),
                    _mean(found),
                    f"{found['what']}: {found['why']}",
                )
                for name, found in controls.items()
            ),
            *(
                (
                    name,
                    share(found["top1"], None),
                    share(found["difference"], found["difference_ci95"]),
                    "",
                    "a drafter that knows nothing of the base",
                )
                for name, found in trivial.items()
            ),
        ),
        about=(
            "The same positions with one thing broken on purpose, and what trivial drafters reach there. The "
            "difference is in percentage points, with its interval over texts, which allows for there being seven "
            "controls."
        ),
        figures=("controls_by_step",),
    )


def buffers(pair: Mapping[str, Any]) -> Table:
    """What a round holds, of the content of a ``pair.json``."""
    drafted = pair["verify"]["drafts"]
    return Table(
        title=f"Buffers of a {method(drafted)}, batch of one",
        columns=("buffer", "what", "shape", "axes", "dtype", "copies", "bytes"),
        rows=tuple(
            (
                name,
                tensors["what"],
                str(tensors["shape"]),
                ", ".join(tensors["axes"]),
                tensors["dtype"],
                tensors["copies"],
                f"{tensors['bytes']:,}",
            )
            for name, held in pair["buffers"].items()
            for tensors in held["tensors"]
        ),
        about="As they were seen while the pair continued the longest text, each at its largest. T: tokens of one "
        "forward of the base.",
        detail=True,
    )


def _generation(report: Mapping[str, Any]) -> Table:
    """Chains and trees of every drafter; the first reports knew one, and no trees."""
    drafters = report.get("drafters") or [{**report, "name": ""}]
    several = len(drafters) > 1
    chosen = any(found.get("chosen_on") for drafter in drafters for found in drafter["generation"].values())
    return Table(
        title="Speculative decoding",
        columns=(
            *(("drafter",) if several else ()),
            "drafted",
            "verified",
            "mean length",
            "expected",
            *(("on other texts",) if chosen else ()),
            "accepted",
            "acceptance %",
            "same text",
            "tok/s",
            "predicted",
            "measured",
            "verify ms",
            "draft ms",
        ),
        rows=tuple(
            (
                *((drafter["name"],) if several else ()),
                method(name),
                found.get("drafts", name),
                _mean(found),
                _number(found.get("expected_mean_accepted_length"), ".2f"),
                *((_number(found["mean_accepted_length_elsewhere"], ".2f"),) if chosen else ()),
                *_decoded(found, drafter["arithmetic"].get("speedups", {}).get(name, {})),
            )
            for drafter in drafters
            for name, found in drafter["generation"].items()
        ),
        about=(
            "Drafted: a chain of so many drafts a round, or a tree, whose drafts are alternatives: `4x2x1` has four "
            "after the pending token, two after each of these, one after each of those; `auto:8` grows anew in every "
            "round where the drafter is confident, up to eight; `best:14` is the one of at most 14 that the ranks of "
            "the base's tokens promise most of, in every second text; *on other texts*: its mean length where it was "
            "not chosen. Verified: drafts in one forward of the base, at most. Mean length: 1 + accepted / rounds, "
            "over all prompts in batches; *expected*: the same by teacher forcing from every position, with no round "
            "cut short by a text's end, so that it is mostly more. Acceptance: accepted of the drafter's steps. Same "
            "text: texts that are the base's own. Times are of a batch of one. Predicted: the "
            "speedup by mean length and the times of a round and of a forward of the base over one token; measured: "
            f"in tokens a second. {_BRACKETS}"
        ),
        after=" ".join(_paid(drafter, several) for drafter in drafters),
        figures=("generation_by_drafts", "round_by_drafts"),
    )


def _decoded(found: Mapping[str, Any], speedups: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        f"{found['accepted']}/{found['drafted']}",
        share(found["acceptance"], None),
        f"{found['identical_prompts']}/{found['prompts']}",
        _number(found["speculative_tokens_per_s"], ".1f"),
        _times(speedups.get("predicted")),
        _times(speedups.get("measured")),
        _number(found["verify_ms"], ".2f"),
        _number(found["draft_ms"], ".2f"),
    )


def _paid(drafter: Mapping[str, Any], several: bool) -> str:
    arithmetic = drafter["arithmetic"]
    of = f"{drafter['name']}: " if several else f"The base alone: {_alone(drafter)}. "
    best = arithmetic["best_draft_steps"]
    if not best:
        return f"{of}No chain of those tried is predicted to pay."
    worth = f"{_number(arithmetic['predicted_speedup'], '.2f')}×"
    return f"{of}Of chains, that of {best} is predicted to be worth most, {worth}."


def _alone(drafter: Mapping[str, Any]) -> str:
    found = next(iter(drafter["generation"].values()))
    forward = _number(drafter["arithmetic"]["base_ms"], ".2f")
    return f"{_number(found['base_tokens_per_s'], '.1f')} tokens a second, {forward} ms a forward over one token"


_MADE = {"extracted": "extracted", "tuned": "tuned", "unknown": "no record"}


def _what(drafter: Mapping[str, Any]) -> str:
    mode, head = drafter["mode"], drafter["ordered_head"]
    parts = [_MADE[drafter["made"]] + (f" ({mode})" if mode else ""), drafter["format"]]
    if head:
        parts.append(f"ordered head, {head['top_k']} of {head['num_centroids']} clusters")
    return ", ".join(parts)


def change(mean: float | None, interval: Sequence[float] | None) -> str:
    """A difference in mean accepted length with its interval, ``+0.30 (+0.21 to +0.39)``; a dash for none."""
    if mean is None or math.isnan(mean):
        return "–"
    return f"{mean:+.2f}" + (f" ({interval[0]:+.2f} to {interval[1]:+.2f})" if interval else "")


def _change(found: Mapping[str, Any]) -> str:
    return change(found["mean"], found["ci95"])


def best_methods(drafter: Mapping[str, Any]) -> list[str]:
    """The chain and the tree that are predicted to be worth most, by their names in ``generation``."""
    generation, speedups = drafter["generation"], drafter["arithmetic"]["speedups"]

    def worth(name: str) -> tuple[float, int]:
        return speedups[name]["predicted"] or 0.0, -generation[name]["drafts"]

    kinds = ([name for name in generation if (generation[name]["tree"] is None) == chain] for chain in (True, False))
    return [max(names, key=worth) for names in kinds if names]


def _summary(report: Mapping[str, Any]) -> Table:
    drafters, base = report["drafters"], report["base"]
    return Table(
        title="What drafting is worth",
        columns=(
            "drafter",
            "drafted",
            "mean length",
            "predicted",
            "measured",
            "parameters a step",
            "bytes a step",
            "same text",
            "what it is",
        ),
        rows=tuple(
            (
                drafter["name"],
                method(name),
                _mean(found),
                _times(speedup["predicted"]),
                _times(speedup["measured"]),
                f"{drafter['parameters_a_step']['total']:,}",
                f"{drafter['bytes_a_step']['total']:,}",
                f"{found['identical_prompts']}/{found['prompts']}",
                _what(drafter),
            )
            for drafter in drafters
            for name in best_methods(drafter)
            for found, speedup in [(drafter["generation"][name], drafter["arithmetic"]["speedups"][name])]
        ),
        about=(
            f"Of each drafter the chain and the tree that are predicted to be worth most, of those tried; all on the "
            f"same {drafters[0]['agreement']['texts']} texts of {base['name']}. Mean length: tokens a round, 1 + "
            "accepted / rounds, with its 95 % interval over texts; without a drafter it is 1. Parameters and bytes: of "
            "the drafter's own weights, what one step reads, as its directory stores them. Predicted: the speedup by "
            "mean length and times; measured: in tokens a second, batch of one, in this loop, which computes in floats "
            "whatever a directory stores. Same text: texts that are the base's own."
        ),
        figures=("drafters_and_methods", "length_by_drafts"),
        first=True,
    )


def _beside(drafters: Sequence[Mapping[str, Any]]) -> Iterator[Table]:
    """Drafters side by side."""
    first, *others = drafters
    drafts = len(first["agreement"]["steps"])
    names = tuple(drafter["name"] for drafter in drafters)
    workloads = [
        (name, [d["agreement"]["workloads"][name] for d in drafters], [d["changes"][name] for d in others])
        for name in first["agreement"]["workloads"]
    ]
    workloads.append(("all", [d["agreement"] for d in drafters], [d["change"] for d in others]))
    yield Table(
        title="Conditional acceptance by step, drafters side by side",
        columns=("step", *(f"{name} %" for name in names)),
        rows=tuple(
            (step + 1, *(_rate(drafter["agreement"], "conditional", step) for drafter in drafters))
            for step in range(drafts)
        ),
        about=(
            "Teacher-forced over the base's own text: drafts that are its tokens, of those whose predecessors all "
            f"were. {_BRACKETS}"
        ),
        figures=("drafters_by_step",),
        first=True,
    )
    yield Table(
        title="Mean accepted length by workload, drafters side by side",
        columns=("workload", "texts", *names, *(f"{name}: to the first" for name in names[1:])),
        rows=tuple(
            (name, found[0]["texts"], *map(_mean, found), *map(_change, changes)) for name, found, changes in workloads
        ),
        about=(
            f"Tokens a round with chains of {drafts}, from every position of the base's own text. Differences text by "
            f"text, each with its own 95 % interval over texts; with fewer than {LEAST_TEXTS} texts nothing is decided."
        ),
        figures=("length_by_workload",),
        first=True,
    )


def _costs(drafters: Sequence[Mapping[str, Any]]) -> Table:
    return Table(
        title="What a draft step costs",
        columns=(
            "drafter",
            "parameters a step",
            "bytes a step",
            "of it the head",
            "bytes once a round",
            "bytes stored",
            "draft ms",
            "verify ms",
            "break-even K",
        ),
        rows=tuple(_cost(drafter) for drafter in drafters),
        about=(
            "Of the drafter's own weights, what one step reads, as its directory stores them: codes with their scales; "
            "of an ordered head the centroids and the clusters that are chosen. Once a round: what fuses the base's "
            "states in an EAGLE-3 head. The base's K and V, embedding and hidden states come on top. Times are of one "
            "step and one verification, batch of one, in the chain that is predicted to be worth most. Break-even K: "
            "the longest chain of those tried that is predicted to be faster than the base alone; 0 for none."
        ),
    )


def _cost(drafter: Mapping[str, Any]) -> tuple[str | int, ...]:
    reads = drafter["bytes_a_step"]
    found = drafter["generation"][best_methods(drafter)[0]]
    # Rounds that end a text draft less.
    step = None if found["draft_ms"] is None else found["draft_ms"] * found["rounds"] / found["drafted"]
    return (
        drafter["name"],
        f"{drafter['parameters_a_step']['total']:,}",
        f"{reads['total']:,}",
        f"{reads['head']:,}",
        f"{reads['once_a_round']:,}",
        f"{reads['stored']:,}",
        _number(step, ".2f"),
        _number(found["verify_ms"], ".2f"),
        drafter["arithmetic"]["break_even_draft_steps"],
    )


def _times(speedup: float | None) -> str:
    return "–" if speedup is None else f"{speedup:.2f}×"
