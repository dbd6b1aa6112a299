"""Whatever is done to a drafter's graph, extraction refuses it or writes what it computes.

Every mutation and rewrite is tried in one of the two exporters' styles; which, its name decides.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.surgery import STYLES

from adversary.edits import Case
from adversary.judge import APART, SAME, Verdict, apart, computed, original, try_case
from adversary.mutations import MUTATIONS
from adversary.rewrites import REWRITES

FAMILIES = list(dict.fromkeys(case.family for case in MUTATIONS))
OTHER_WORDS = list(dict.fromkeys(case.family for case in REWRITES))
ACCEPTED = frozenset((Path(__file__).parent / "accepted.txt").read_text().splitlines())
"""Rewrites that are read, as ``style family/name``. What leaves the list is said in docs/proof.md."""


def tried(cases: tuple[Case, ...], family: str) -> Iterator[tuple[Case, str]]:
    """The cases of ``family``, each with its style."""
    for case in cases:
        if case.family == family:
            style = list(STYLES)[zlib.crc32(case.label.encode()) >> 1 & 1]
            # What exists in one style only is tried in that one.
            yield case, style if case.apply(style) is not None else next(s for s in STYLES if s != style)


def verdicts(cases: tuple[Case, ...], family: str) -> dict[str, Verdict]:
    found = {f"{style} {case.label}": try_case(case, style) for case, style in tried(cases, family)}
    return {name: verdict for name, verdict in found.items() if verdict is not None}


def bad(found: dict[str, Verdict]) -> dict[str, str]:
    return {name: str(verdict) for name, verdict in found.items() if verdict.outcome not in ("refused", "same")}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mutation_is_refused_or_the_same_function(family: str) -> None:
    assert not bad(verdicts(MUTATIONS, family))


@pytest.mark.parametrize("family", OTHER_WORDS)
def test_a_rewrite_is_refused_or_the_same_function(family: str) -> None:
    found = verdicts(REWRITES, family)
    assert not bad(found)
    refused = {name: verdict.detail for name, verdict in found.items() if verdict.outcome == "refused"}
    assert not {name: refused[name] for name in ACCEPTED & set(refused)}


@pytest.mark.parametrize("family", [*FAMILIES, *OTHER_WORDS])
def test_what_google_computes_changes_or_does_not(family: str) -> None:
    """The interpreter says so of one in eight, unless the case says why it cannot."""
    mutated = family in FAMILIES
    for case, style in list(tried(MUTATIONS if mutated else REWRITES, family))[::8]:
        graph = case.apply(style)
        if case.why or case.rounds or graph is None:
            continue
        graph.tidy()
        inputs, outputs = original(style, case.layers, case.shows, case.slots)
        difference = apart(outputs, computed(graph, inputs, case.exact))
        assert difference > max(APART, case.rounding) if mutated else difference < max(SAME, case.rounding), case.label


@pytest.mark.parametrize("style", STYLES)
def test_styles_are_judged_alike(style: str) -> None:
    inputs, outputs = original(style)
    assert len(inputs) == len(outputs) >= 4
    verdict = try_case(Case("none", "nothing changed", lambda g: None), style)
    assert verdict is not None
    assert verdict.outcome == "same"


def test_names_are_unique() -> None:
    labels = [case.label for case in (*MUTATIONS, *REWRITES)]
    assert len(set(labels)) == len(labels)
    known = {f"{style} {case.label}" for style in STYLES for case in REWRITES}
    assert known >= ACCEPTED
