"""Whatever is done to a drafter's graph, extraction refuses it or writes what it computes.

Every mutation and rewrite is tried in one of the two styles, by turns; ``adversary.report`` tries both and prints what
became of each.
"""

from __future__ import annotations

import pytest
from helpers.surgery import STYLES

from adversary.edits import Case
from adversary.judge import APART, SAME, Verdict, apart, computed, original, try_case
from adversary.mutations import MUTATIONS
from adversary.rewrites import REWRITES

FAMILIES = list(dict.fromkeys(case.family for case in MUTATIONS))


def of_family(cases: tuple[Case, ...], family: str) -> list[tuple[Case, str]]:
    """The cases of ``family``, each with the style it is tried in."""
    styles = list(STYLES)
    mine = [case for case in cases if case.family == family]
    # What exists in one style only is tried in that one.
    tried = [(case, styles[index % 2]) for index, case in enumerate(mine)]
    return [(case, style if case.apply(style) is not None else "jax") for case, style in tried]


def verdicts(cases: tuple[Case, ...], family: str) -> dict[str, Verdict]:
    found = {f"{case.name} ({style})": try_case(case, style) for case, style in of_family(cases, family)}
    return {name: verdict for name, verdict in found.items() if verdict is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mutation_is_refused_or_the_same_function(family: str) -> None:
    found = verdicts(MUTATIONS, family)
    bad = {name: str(verdict) for name, verdict in found.items() if verdict.outcome not in ("refused", "same")}
    assert not bad


@pytest.mark.parametrize("style", STYLES)
def test_names_are_unique_and_styles_are_judged_alike(style: str) -> None:
    labels = [case.label for case in (*MUTATIONS, *REWRITES)]
    assert len(set(labels)) == len(labels)
    inputs, outputs = original(style)
    assert apart(outputs, original(style)[1]) == 0
    assert len(inputs) == len(outputs) >= 4
    verdict = try_case(Case("none", "nothing changed", lambda g: None), style)
    assert verdict is not None
    assert verdict.outcome == "same"
    assert SAME < APART


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mutation_changes_the_function(family: str) -> None:
    """Google's interpreter says so of one in eight of each family, unless the case says why it cannot."""
    for case, style in of_family(MUTATIONS, family)[::8]:
        if case.why:
            continue
        graph = case.apply(style)
        assert graph is not None
        graph.tidy()
        inputs, outputs = original(style, case.layers)
        assert apart(outputs, computed(graph, inputs)) > APART, case.label
