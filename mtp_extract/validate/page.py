"""A validation as its reader sees it: large figures, tables and pictures; and the directory that it is written to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mtp_extract.evaluate.agreement import Workload
from mtp_extract.evaluate.texts import LEAST_TEXTS
from mtp_extract.io.place import Inputs, staged
from mtp_extract.io.typed import Figure
from mtp_extract.report import figures
from mtp_extract.report.files import PAIR, REPORT_LISTED
from mtp_extract.report.numbers import DASH, mean, number, percent, rate, signed, within
from mtp_extract.report.page import NOT_MEASURED, Headline, Page, Table, as_json, write_report
from mtp_extract.validate.acceptance.drafters import DrafterFigures
from mtp_extract.validate.acceptance.generation import Worth
from mtp_extract.validate.parity.interpreter import Parity
from mtp_extract.validate.result import Validation
from mtp_extract.validate.verdict import drafts_of, why

_BRACKETS = f"In brackets: 95 % intervals, over texts; none with fewer than {LEAST_TEXTS}."


def write_validation(found: Validation, target: Path, *, overwrite: bool = False, inputs: Inputs = ()) -> list[str]:
    """Write ``report.html``, ``report.json`` and, with a base, ``pair.json``; their names.

    Nothing is written unless all is, and none of ``inputs``, which were read, is replaced.

    Raises:
        OutputError: it cannot be written there.
    """
    with staged(target, overwrite=overwrite, inputs=inputs, listed=REPORT_LISTED) as stage:
        if found.pair is not None:
            (stage / PAIR).write_bytes(as_json(found.pair))
        return write_report(stage, "report", found, page_of(found))


def page_of(found: Validation) -> Page:
    """The page; without pictures where matplotlib is missing."""
    base, source = found.base, found.source
    parts = [f"beside {base.name}, in {base.dtype} on {', '.join(base.devices)}"] if base else []
    about = "; ".join((*parts, *([f"against {source}"] if source else [])))
    drawn = find_spec("matplotlib") is not None
    notes = [*found.notes, *([] if drawn else ["Nothing is drawn: matplotlib is missing; the extra validate has it."])]
    return Page(
        title=f"Validation of {found.drafter}",
        about=about[:1].upper() + about[1:],
        verdict=found.verdict,
        headlines=list(headlines(found)),
        tables=list(tables(found, drawn=drawn)),
        findings=found.findings,
        notes=notes,
    )


def headlines(found: Validation) -> Iterator[Headline]:
    """Is it the file's drafter; and of the best chain tokens per round and speedup; and whether text stays."""
    yield _standing(found)
    means = {
        "Tokens per round": "Drafts that stand, and the base's own token; 1 without a drafter.",
        "Speedup": "Tokens a second with the drafter, over the base alone.",
        "Same text": "Texts that are what the base alone writes, to the last token.",
    }
    if not found.drafters or found.base is None:
        yield from (Headline(name, NOT_MEASURED, "it was run beside no base", of, "none") for name, of in means.items())
        return
    generation = found.drafters[0].generation
    best = generation.worth[generation.best]
    name, length, speed = drafts_of(generation.best, best), best.tokens_per_round, best.measured_speedup
    of = f"{name}; {within(length.ci95)}" if length.value is not None else "no text left anything to draft"
    yield _headline("Tokens per round", number(length.value, ".2f"), of, means)
    of = f"{name}; {generation.timed} texts, one at a time, on {', '.join(found.base.devices)}; no interval"
    if speed is None or generation.disturbed:
        speed, of = None, "something else used the machine meanwhile" if generation.disturbed else "no text was timed"
    yield _headline("Speedup", number(speed, ".2f", unit="×"), of, means)
    which, worst = min(generation.worth.items(), key=lambda item: item[1].same_text)
    whole = worst.same_text == worst.prompts
    of = f"greedy, in {found.base.dtype}; {'whatever is drafted' if whole else f'{drafts_of(which, worst)}, the worst'}"
    if not best.rounds:
        yield _headline("Same text", DASH, "no round drafted anything", means)
        return
    wrong = any(worth.wrong_text for worth in generation.worth.values())
    same = f"{worst.same_text} of {worst.prompts}"
    yield Headline("Same text", same, of, means["Same text"], "bad" if wrong else "good" if whole else "")


def _headline(name: str, value: str, of: str, means: Mapping[str, str]) -> Headline:
    known = value != DASH
    return Headline(name, value if known else NOT_MEASURED, of, means[name], "" if known else "none")


def _standing(found: Validation) -> Headline:
    means = "Verified: its weights, settings and outputs are those of the file."
    passed, failed, left = ([c.name for c in found.checks if c.passed is answer] for answer in (True, False, None))
    of = f"{len(passed)} of {len(found.checks)} checks against {found.source} passed"
    if not found.checks:
        of = "compared with no file"
    if left:
        of += f", not checked: {', '.join(left)}"
    if found.refuted:
        of = f"{of}, refuted: {', '.join(failed)}" if failed else f"by what it drafts; {of}"
        return Headline("Verdict", "Refuted", of, means, "bad")
    return Headline("Verdict", *(("Verified", of, means, "good") if found.verified else ("Not verified", of, means)))


def tables(found: Validation, *, drawn: bool = False) -> Iterator[Table]:
    """The tables in the order in which they are read; ``drawn`` with their pictures."""
    if found.drafters:
        yield worth(found.drafters, drawn)
        yield from _agreement(found.drafters, drawn)
        yield _rounds(found.drafters)
        yield _costs(found.drafters)
    if found.checks:
        yield checks(found)
    if found.controls or found.trivial:
        yield controls(found, drawn)
    if found.parity:
        yield _parity(found.parity)
    yield Table("Setting", ("", ""), [*_setting(found)], "What a second run needs.", folded=True)


def worth(drafters: list[DrafterFigures], drawn: bool = False) -> Table:
    """What drafting is worth: every chain and tree of every drafter."""
    rows, first = _drafted(drafters), drafters[0].generation
    picture = _worth_picture(rows, rows[[*first.worth].index(first.best)][0]) if drawn else ""
    speed, forward = number(next(iter(first.worth.values())).base_tokens_per_s, ".1f"), number(first.base_ms, ".2f")
    return Table(
        "What drafting is worth",
        ("drafts", "tokens per round", "speedup", "predicted", "same text"),
        [
            (
                name,
                mean(found.tokens_per_round),
                number(found.measured_speedup, ".2f", unit="×"),
                number(found.predicted_speedup, ".2f", unit="×"),
                f"{found.same_text}/{found.prompts}",
            )
            for name, found in rows
        ],
        what="Tokens that one forward of the base yields, and how much sooner text is there.",
        about=(
            "Tokens per round, of the loop along all texts: drafts that stand, and the base's own token. Speedup: "
            f"tokens a second of {first.timed} texts, one at a time, over the base alone; predicted: by tokens per "
            "round and the times of a round and of the base's forward. Same text: of these, those that the base alone "
            f"writes so. The base alone: {speed} tokens a second, {forward} ms a forward. A chain drafts each token "
            f"after the one before; the drafts of a tree branch. {_BRACKETS}"
        ),
        picture=picture,
    )


def _drafted(drafters: list[DrafterFigures]) -> list[tuple[str, Worth]]:
    """All that was drafted, and what to call it."""
    return [
        ((f"{drafter.facts.name}: " if len(drafters) > 1 else "") + drafts_of(name, found), found)
        for drafter in drafters
        for name, found in drafter.generation.worth.items()
    ]


def _rounds(drafters: list[DrafterFigures]) -> Table:
    return Table(
        "Rounds",
        ("drafts", "verified", "rounds", "accepted", "accepted %", "expected", "tokens/s", "verify ms", "draft ms"),
        [
            (
                name,
                found.drafts,
                found.rounds,
                f"{found.accepted}/{found.drafted}",
                percent(found.accepted / found.drafted if found.drafted else None),
                number(found.expected_tokens_per_round, ".2f"),
                number(found.tokens_per_s, ".1f"),
                number(found.verify_ms, ".2f"),
                number(found.draft_ms, ".2f"),
            )
            for name, found in _drafted(drafters)
        ],
        what="The rounds of the loop along all texts, and their times, of one text at a time.",
        about=(
            "Verified: drafts in one forward of the base, at most. Accepted: drafts that stand, of the drafter's "
            "steps. Expected: tokens per round, teacher-forced, no round cut short by a text's end."
        ),
        folded=True,
    )


def _worth_picture(rows: list[tuple[str, Worth]], best: str) -> str:
    bars: list[tuple[str, figures.Point, str]] = [("the base alone", (1.0, None), "1")]
    for name, found in rows:
        length = found.tokens_per_round
        if length.value is not None:
            speed = "" if found.measured_speedup is None else f", {found.measured_speedup:.2f}×"
            bars.append((name, (length.value, length.ci95), f"{length.value:.2f}{speed}"))
    return figures.bars(bars, best, "tokens per round, and the speedup") if len(bars) > 1 else ""


def _agreement(drafters: list[DrafterFigures], drawn: bool) -> Iterator[Table]:
    first, *others = drafters
    steps, several = first.agreement.steps, len(drafters) > 1
    rows: list[Sequence[str | int]]
    if several:
        curves = {d.facts.name: [step.conditional for step in d.agreement.steps] for d in drafters}
        columns = ["draft step", *(f"{name}: accepted %" for name in curves)]
        rows = [(at + 1, *(rate(curve[at]) for curve in curves.values())) for at in range(len(steps))]
    else:
        names = {"top5": "top-5", "conditional": "accepted", "top1": "top-1"}
        curves = {shown: [getattr(step, name) for step in steps] for name, shown in names.items()}
        columns = ["draft step", "positions", "top-1 %", "top-5 %", "accepted %"]
        rows = [(step.step, step.top1.n, *map(rate, (step.top1, step.top5, step.conditional))) for step in steps]
    yield Table(
        "Acceptance by draft step",
        columns,
        rows,
        what="How often each draft of a round is what the base says, at every position of the base's own text.",
        about=(
            f"Teacher-forced over the base's own greedy text after {first.agreement.texts} prompts. Accepted: of the "
            "positions at which all drafts before it were. Top-1: the draft is the base's token; top-5: the base's "
            f"token is among the drafter's five likeliest. {_BRACKETS}"
        ),
        picture=_lines(curves) if drawn else "",
    )
    by_name = [{**drafter.workloads, "all": drafter.agreement} for drafter in drafters]
    differences = [{**drafter.changes, "all": drafter.change} for drafter in others]
    forced = "teacher-forced tokens per round"
    alone = ["top-1 %, step 1", "top-5 %, step 1", forced]
    tail = [f"{drafter.facts.name}: {forced}" for drafter in drafters] if several else alone
    yield Table(
        "Acceptance by workload",
        ["workload", "texts", *tail, *(f"{drafter.facts.name}: to the first" for drafter in others)],
        [
            (
                name,
                found.texts,
                *([] if several else _first_step(found)),
                *(mean(of[name].teacher_forced) for of in by_name),
                *(signed(change[name].mean, change[name].interval) for change in differences),
            )
            for name, found in by_name[0].items()
        ],
        what=f"The first draft, and what rounds of {len(steps)} drafts come to, by kind of text.",
        about=(
            "Teacher-forced tokens per round: 1 + accepted drafts, from every position. Rounds of the loop begin where "
            "others ended, which is more often at a token that is hard to draft, and come to less."
            + (" Differences are text by text, each with its own interval." if several else "")
        ),
        picture=_dots({d.facts.name: of for d, of in zip(drafters, by_name, strict=True)}) if drawn else "",
    )


def _first_step(found: Workload) -> tuple[str, str]:
    return (rate(found.steps[0].top1), rate(found.steps[0].top5)) if found.steps else (DASH, DASH)


def _point(found: Figure) -> figures.Point:
    assert found.value is not None
    return found.value, found.ci95


def _lines(curves: Mapping[str, list[Figure]]) -> str:
    known = {name: [_point(figure) for figure in curve if figure.value is not None] for name, curve in curves.items()}
    return figures.lines({name: curve for name, curve in known.items() if curve}, "share of drafts (%)")


def _dots(drafters: Mapping[str, Mapping[str, Workload]]) -> str:
    known = {
        name: {work: _point(of.teacher_forced) for work, of in found.items() if of.teacher_forced.value is not None}
        for name, found in drafters.items()
    }
    return figures.dots(known, "teacher-forced tokens per round", left=1.0) if any(known.values()) else ""


def _costs(drafters: list[DrafterFigures]) -> Table:
    return Table(
        "What a draft step costs",
        ("drafter", "what it is", "bytes a step", "once a round", "stored", "break-even K"),
        [
            (
                drafter.facts.name,
                _what_it_is(drafter),
                f"{reads.total:,}",
                f"{reads.once_a_round:,}",
                f"{reads.stored:,}",
                drafter.generation.break_even,
            )
            for drafter in drafters
            for reads in [drafter.facts.reads]
        ],
        what="What one step of the drafter reads of its own weights.",
        about=(
            "As its directory stores them: codes with their scales; of an ordered head the centroids and the clusters "
            "that are chosen. The base's K and V, embedding and hidden states come on top. Break-even K: the longest "
            "chain tried that is predicted to be faster than the base alone; 0 for none."
        ),
        folded=True,
    )


def _what_it_is(drafter: DrafterFigures) -> str:
    facts = drafter.facts
    parts = ["no record" if facts.made == "unknown" else facts.made + (f" ({facts.mode})" if facts.mode else "")]
    if facts.ordered_head:
        head = facts.ordered_head
        parts.append(f"ordered head, {head.top_k} of {head.num_centroids} clusters")
    return ", ".join([*parts, facts.format])


def controls(found: Validation, drawn: bool = False) -> Table:
    """What the drafter reaches with one thing broken at a time, and what trivial drafters reach."""
    ran = [(result, result.agreement, result.difference) for result in found.controls]
    real = found.drafters[0].agreement
    first = ("real drafter", rate(real.steps[0].top1), "", mean(real.teacher_forced), "nothing is broken")
    broken = [
        (result.name, rate(of.steps[0].top1), rate(gap), mean(of.teacher_forced), f"{result.what}: {why(result)}")
        if of and gap
        else (result.name, DASH, DASH, DASH, f"{result.what}: {why(result)}")
        for result, of, gap in ran
    ]
    trivial = [
        (result.name, percent(result.top1), rate(result.difference), "", "it knows nothing of the base")
        for result in found.trivial
    ]
    curves = {"real drafter": real, **{result.name: of for result, of, _ in ran if of}}
    return Table(
        "Controls",
        ("drafter", "top-1 %, step 1", "below by", "teacher-forced tokens per round", "what is broken: what it says"),
        [first, *broken, *trivial],
        what="The same with one thing broken on purpose: each should draft worse. And what trivial drafters reach.",
        about=(
            "Below by: points of top-1 that the drafter is ahead, at the same positions; of the controls that ran, all "
            "intervals hold together in 95 % of measurements."
        ),
        picture=_lines({name: [step.top1 for step in of.steps] for name, of in curves.items()}) if drawn else "",
        folded=True,
    )


def checks(found: Validation) -> Table:
    """Is it the drafter of the file, question by question."""
    answers = {True: "passed", False: "refuted", None: "not checked"}
    return Table(
        "Is it the drafter of the file?",
        ("check", "what is asked", "result", "evidence"),
        [(check.name, check.what, answers[check.passed], check.evidence) for check in found.checks],
        what="Every answer is derived from the file anew. One that is refuted refutes the checkpoint.",
        folded=bool(found.drafters) and all(check.passed is not False for check in found.checks),
    )


def _parity(parity: Parity) -> Table:
    return Table(
        "Parity with Google's interpreter",
        ("the file's drafter", "logits, of range", "state, of range", "correlation", "same top token"),
        [
            (
                name,
                number(apart.logits, ".1e"),
                number(apart.state, ".1e"),
                number(apart.correlation, ".4f"),
                apart.top1,
            )
            for name, apart in (("in floats", parity.in_floats), ("as it is", parity.as_it_is))
        ],
        what="The interpreter and the reference run the drafter on the same inputs: how far apart, at most.",
        about=(
            f"ai-edge-litert runs the drafter's section on {len(parity.cases)} inputs. In floats: every tensor of "
            "integers is made floats first, so that the order of additions is all that is left. As it is: the section "
            "rounds activations to integers, which the reference does not."
        ),
        folded=True,
    )


def _setting(found: Validation) -> Iterator[tuple[str, str]]:
    yield "drafter", found.drafter
    if found.source:
        yield "file", found.source
    if found.base:
        yield "base", f"{found.base.name} ({found.base.dtype}, on {', '.join(found.base.devices)})"
        yield "drafter computes in", found.base.drafter_dtype
        yield "chat template", "applied" if found.base.chat_template else "not applied"
    yield from ((name.replace("_", " "), _words(value)) for name, value in found.settings.items() if value != [])


def _words(value: Any) -> str:
    """A setting: numbers, names, or numbers by name."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
