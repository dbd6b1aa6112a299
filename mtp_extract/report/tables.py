"""What a validation measured, as tables, in words and numbers.

The report's page, the terminal and the model card show these tables, each in its own way. They are made from the
content of ``report.json``, which is what all three have: a card is made long after the measurement, elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mtp_extract.io.place import listing
from mtp_extract.report.columns import Cell, Column, Row, Table, change, decimal, item, named, number, percent, share
from mtp_extract.report.page import pages_of
from mtp_extract.speculate.texts import LEAST_TEXTS

REPORT = "report.json"
PAIR = "pair.json"
FIGURES: Mapping[str, str] = {
    "drafters_and_methods": "Tokens a round, with 95 % intervals, and the measured speedup",
    "acceptance_by_step": "Acceptance by draft step",
    "controls_by_step": "Top-1 agreement by draft step, with one thing broken at a time",
    "length_by_workload": "Mean accepted length by workload",
    "generation_by_drafts": "Tokens a second by what is drafted",
    "round_by_drafts": "The time of a round and what it yields, by what is drafted",
    "drafters_by_step": "Conditional acceptance by draft step, drafters side by side",
}
"""Names of the figures, without an ending, and what they show."""

REPORT_FILES = pages_of("report", FIGURES) | {PAIR}
"""Everything that a report may consist of."""

REPORT_LISTED = listing(REPORT, REPORT_FILES)
"""What of a report's directory may be replaced."""

_BRACKETS = f"In brackets: 95 % intervals, over texts; none with fewer than {LEAST_TEXTS}."
_MADE = {"extracted": "extracted", "tuned": "tuned", "unknown": "no record"}


def words(value: Any) -> str:
    """A setting: numbers, names, or numbers by name."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def method(name: str) -> str:
    """What was drafted, by its name in ``generation``: ``chain of 3``, ``tree 4x2x1``."""
    return f"chain of {name}" if name.isdecimal() else f"tree {name}"


def best_methods(drafter: Mapping[str, Any]) -> list[str]:
    """The chain and the tree that are predicted to be worth most, by their names in ``generation``."""
    generation, speedups = drafter["generation"], drafter["arithmetic"]["speedups"]

    def worth(name: str) -> tuple[float, int]:
        return speedups[name]["predicted"] or 0.0, -generation[name]["drafts"]

    kinds = ([name for name in generation if (generation[name]["tree"] is None) == chain] for chain in (True, False))
    return [max(names, key=worth) for names in kinds if names]


def measurements(report: Mapping[str, Any]) -> Iterator[Table]:
    """The tables of what was measured, in the order in which they are read.

    Raises:
        KeyError, TypeError: ``report`` is not the content of a ``report.json``.
    """
    drafters = report["drafters"]
    if drafters:
        yield _summary(report)
        if len(drafters) > 1:
            yield from _side_by_side(drafters)
    if report["agreement"] is not None:
        yield from _agreement(report["agreement"], alone=len(drafters or ()) < 2)
    if drafters:
        yield _generation(drafters)
        yield Table.of("What a draft step costs", _COSTS, drafters, what=_COSTS_WHAT, about=_COSTS_ABOUT)
    if report["controls"] is not None:
        yield _controls(report["controls"], report["agreement"], report["trivial"])
    if report["checks"]:
        yield Table.of(
            "Is it the drafter of the file?",
            _CHECKS,
            report["checks"],
            what="Every answer is derived from the file anew. One that is refuted refutes the checkpoint.",
            first=not drafters or any(check["passed"] is False for check in report["checks"]),
        )
    if report["parity"] is not None:
        yield _parity(report["parity"])


_CHECKS: Sequence[Column] = (
    ("check", item("name")),
    ("what is asked", item("what")),
    ("result", lambda check: {True: "passed", False: "refuted", None: "not checked"}[check["passed"]]),
    ("evidence", item("evidence")),
)

_COMPARISON: Sequence[Column] = (
    ("the file's drafter", item("name")),
    ("logits, of range", decimal("logits", ".1e")),
    ("state, of range", decimal("state", ".1e")),
    ("correlation", decimal("correlation", ".4f")),
    ("same top token", item("top1")),
)


def _parity(parity: Mapping[str, Any]) -> Table:
    return Table.of(
        "Parity with Google's interpreter",
        _COMPARISON,
        named({"in floats": parity["in_floats"], "as it is": parity["as_it_is"]}),
        what="The interpreter and the reference run the drafter on the same inputs: how far apart, at most.",
        about=(
            f"`ai-edge-litert` runs the drafter's section on {len(parity['cases'])} inputs. *In floats* every tensor "
            "of integers is made floats first (and some inputs are run again, with small activations): what is left "
            "is the order of additions. *As it is* the section rounds activations to integers, which the reference "
            "does not."
        ),
    )


def _rate(name: str, step: int = 0) -> Cell:
    """Of a workload or a control: this rate at a draft step, in percent; a dash where nothing was drafted."""
    cell = percent(f"steps.{step}.{name}", f"steps.{step}.ci95.{name}")
    return lambda row: cell(row) if row["steps"] else "–"


_mean = decimal("mean_accepted_length", ".2f", "mean_accepted_length_ci95")

_BY_STEP: Sequence[Column] = (
    ("draft step", item("step")),
    ("n", item("n")),
    ("top-1 %", percent("top1", "ci95.top1")),
    ("top-5 %", percent("top5", "ci95.top5")),
    ("conditional %", percent("conditional", "ci95.conditional")),
    ("unconditional %", percent("unconditional", "ci95.unconditional")),
)

_BY_WORKLOAD: Sequence[Column] = (
    ("workload", item("name")),
    ("texts", item("texts")),
    ("n", item("n")),
    ("top-1 %, step 1", _rate("top1")),
    ("top-5 %, step 1", _rate("top5")),
    ("mean length", _mean),
)


def _agreement(agreement: Mapping[str, Any], alone: bool) -> Iterator[Table]:
    steps = agreement["steps"]
    yield Table.of(
        "Acceptance by draft step",
        _BY_STEP,
        steps,
        what="How often each draft of a round is what the base says, at every position of the base's own text.",
        about=(
            f"Teacher-forced over the base's own greedy continuation of {agreement['texts']} prompts: every position "
            "is drafted from. Conditional acceptance is accepted_i / accepted_(i−1), unconditional is accepted_i / "
            f"rounds. {_BRACKETS}"
        ),
        after=f"Mean accepted length (1 + accepted / rounds) at {len(steps)} drafts: {_mean(agreement)}.",
        figures=("acceptance_by_step",),
        first=alone,
    )
    yield Table.of(
        "Acceptance by workload",
        _BY_WORKLOAD,
        [*named(agreement["workloads"]), {**agreement, "name": "all"}],
        what=f"The first draft, and what a round of {len(steps)} drafts comes to, by kind of text.",
        figures=("length_by_workload",) if alone else (),
        first=alone,
    )


def _controls(controls: Mapping[str, Row], agreement: Row | None, trivial: Mapping[str, Row]) -> Table:
    rate, below = _rate("top1"), percent("difference", "difference_ci95")
    counts = {step["n"] for row in (agreement, *controls.values()) if row for step in (row["steps"] or ())[:1]}
    name = "real drafter" if len(counts) < 2 else "real drafter, everywhere"
    real = [(name, rate(agreement), "", _mean(agreement), "nothing")] if agreement else []
    broken = ((name, rate(f), below(f), _mean(f), f"{f['what']}: {f['why']}") for name, f in controls.items())
    knows = "a drafter that knows nothing of the base"
    return Table(
        title="Controls",
        columns=("control", "top-1 %, step 1", "below by", "mean length", "what is broken: what the score says"),
        rows=(
            *real,
            *broken,
            *((name, share(found["top1"], None), below(found), "", knows) for name, found in trivial.items()),
        ),
        what="The same with one thing broken on purpose: each should draft worse. And what trivial drafters reach.",
        figures=("controls_by_step",),
    )


# Columns over what was drafted: a chain or a tree, of one drafter.
_DRAFTER: Column = ("drafter", item("drafter.name"))
_METHOD: Column = ("method", lambda row: method(row["method"]))
_LENGTH: Column = ("mean length", _mean)
_SPEEDUPS = [(f"{name} speedup", decimal(f"speedups.{name}", ".2f", unit="×")) for name in ("predicted", "measured")]
_SAME_TEXT: Column = ("same text", lambda row: f"{row['identical_prompts']}/{row['prompts']}")


def _drafted(drafter: Row, name: str) -> Row:
    """The row of what was drafted under ``name``."""
    speedups = drafter["arithmetic"]["speedups"][name]
    return {**drafter["generation"][name], "method": name, "drafter": drafter, "speedups": speedups}


def _generation(drafters: Sequence[Row]) -> Table:
    rows = [_drafted(drafter, name) for drafter in drafters for name in drafter["generation"]]
    several, chosen = len(drafters) > 1, any(row["chosen_on"] for row in rows)
    elsewhere: Column = ("on other texts", decimal("mean_accepted_length_elsewhere", ".2f"))
    return Table.of(
        "Speculative decoding",
        (
            *((_DRAFTER,) if several else ()),
            _METHOD,
            ("verified", item("drafts")),
            _LENGTH,
            ("expected", decimal("expected_mean_accepted_length", ".2f")),
            *((elsewhere,) if chosen else ()),
            ("accepted", lambda row: f"{row['accepted']}/{row['drafted']}"),
            ("acceptance %", percent("acceptance")),
            _SAME_TEXT,
            ("tok/s", decimal("speculative_tokens_per_s", ".1f")),
            *_SPEEDUPS,
            ("verify ms", decimal("verify_ms", ".2f")),
            ("draft ms", decimal("draft_ms", ".2f")),
        ),
        rows,
        what="Every chain and tree that was tried, over all prompts; times are of one text at a time.",
        about=(
            "A tree `4x2x1` has four drafts after the pending token, two after each of these, one after each of those; "
            "`auto:8` grows anew in every round where the drafter is confident, up to eight; `best:14` is the one of "
            "at most 14 that the ranks of the base's tokens promise most of, in every second text. Acceptance is of "
            "the drafter's steps. Predicted: by mean length, the times of a round and of a forward of the base over "
            f"one token. {_BRACKETS}"
        ),
        after=" ".join(_best_chain(drafter, several) for drafter in drafters),
        figures=("generation_by_drafts", "round_by_drafts"),
    )


def _best_chain(drafter: Row, several: bool) -> str:
    """In a sentence, which chain is predicted to be worth most, and of the only drafter what the base does alone."""
    arithmetic, found = drafter["arithmetic"], next(iter(drafter["generation"].values()))
    speed, forward = number(found["base_tokens_per_s"], ".1f"), number(arithmetic["base_ms"], ".2f")
    alone = f"The base alone: {speed} tokens a second, {forward} ms a forward over one token. "
    of_which = f"{drafter['name']}: " if several else alone
    best, worth = arithmetic["best_draft_steps"], number(arithmetic["predicted_speedup"], ".2f")
    if not best:
        return f"{of_which}No chain of those tried is predicted to pay."
    return f"{of_which}Of chains, that of {best} is predicted to be worth most, {worth}×."


def _what_it_is(drafter: Row) -> str:
    mode, head = drafter["mode"], drafter["ordered_head"]
    parts = [_MADE[drafter["made"]] + (f" ({mode})" if mode else ""), drafter["format"]]
    if head:
        parts.append(f"ordered head, {head['top_k']} of {head['num_centroids']} clusters")
    return ", ".join(parts)


def summary_rows(drafters: Sequence[Row]) -> list[Row]:
    """All that the only drafter drafted; of several the chain and the tree that are predicted to be worth most."""
    return [
        _drafted(drafter, name)
        for drafter in drafters
        for name in (best_methods(drafter) if len(drafters) > 1 else drafter["generation"])
    ]


def _summary(report: Mapping[str, Any]) -> Table:
    drafters, base = report["drafters"], report["base"]
    several = len(drafters) > 1
    of_each = ", of each drafter its best chain and tree" if several else ""
    return Table.of(
        "What drafting is worth",
        (*((_DRAFTER,) if several else ()), _METHOD, _LENGTH, *_SPEEDUPS, _SAME_TEXT),
        summary_rows(drafters),
        what=f"Tokens that one forward of the base yields, and how much sooner text is there{of_each}.",
        about=(
            f"All on the same {drafters[0]['agreement']['texts']} texts of {base['name']}. Mean length: 1 + accepted / "
            "rounds, with its 95 % interval over texts. Best: by the predicted speedup, of those tried. Measured in "
            "this loop, one text at a time, which computes in floats whatever a directory stores."
        ),
        figures=("drafters_and_methods",),
        first=True,
    )


def _side_by_side(drafters: Sequence[Row]) -> Iterator[Table]:
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
        columns=("draft step", *(f"{name} %" for name in names)),
        rows=tuple(
            (step + 1, *(_rate("conditional", step)(drafter["agreement"]) for drafter in drafters))
            for step in range(drafts)
        ),
        what="Drafts that are the base's own tokens, of those whose predecessors in the round all were.",
        about=f"Teacher-forced over the base's own text. {_BRACKETS}",
        figures=("drafters_by_step",),
        first=True,
    )
    yield Table(
        title="Mean accepted length by workload, drafters side by side",
        columns=("workload", "texts", *names, *(f"{name}: to the first" for name in names[1:])),
        rows=tuple(
            (name, found[0]["texts"], *map(_mean, found), *(change(c["mean"], c["ci95"]) for c in changes))
            for name, found, changes in workloads
        ),
        what=f"Tokens a round with chains of {drafts}, from every position of the base's own text.",
        about=(
            "Differences text by text, each with its own 95 % interval over texts; with fewer than "
            f"{LEAST_TEXTS} texts nothing is decided."
        ),
        figures=("length_by_workload",),
        first=True,
    )


def _draft_ms(drafter: Row) -> str:
    found = drafter["generation"][best_methods(drafter)[0]]
    # Rounds that end a text draft less.
    step = None if found["draft_ms"] is None else found["draft_ms"] * found["rounds"] / found["drafted"]
    return number(step, ".2f")


_COSTS: Sequence[Column] = (
    ("drafter", item("name")),
    ("what it is", _what_it_is),
    ("parameters a step", decimal("parameters_a_step.total", ",")),
    ("bytes a step", decimal("bytes_a_step.total", ",")),
    ("of it the head", decimal("bytes_a_step.head", ",")),
    ("bytes once a round", decimal("bytes_a_step.once_a_round", ",")),
    ("bytes stored", decimal("bytes_a_step.stored", ",")),
    ("draft ms", _draft_ms),
    ("verify ms", lambda drafter: number(drafter["generation"][best_methods(drafter)[0]]["verify_ms"], ".2f")),
    ("break-even K", item("arithmetic.break_even_draft_steps")),
)
_COSTS_WHAT = "What one step of the drafter reads of its own weights, and takes beside one verification by the base."
_COSTS_ABOUT = (
    "As its directory stores them: codes with their scales; of an ordered head the centroids and the clusters that are "
    "chosen. The base's K and V, embedding and hidden states come on top. Times are of one step and one verification, "
    "batch of one, in the chain that is predicted to be worth most."
)
