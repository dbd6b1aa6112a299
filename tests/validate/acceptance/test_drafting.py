"""Trees as they are asked for: what can be, and what is refused before anything is done."""

from __future__ import annotations

import random
from typing import Any

import pytest

from mtp_extract.errors import MtpExtractError
from mtp_extract.speculate.trees import AutoTree, Tree
from mtp_extract.validate.acceptance.drafting import BestTree, parse_wanted, steps_to_rank
from mtp_extract.validate.run import ValidationPlan, run_validation


def test_names() -> None:
    assert parse_wanted("4x2x1") == ("4x2x1", Tree.parse("4x2x1"))
    assert parse_wanted("auto:8") == ("auto:8", AutoTree(8))
    assert parse_wanted("best:14") == ("best:14", BestTree(14))
    assert parse_wanted("paths:1,0.0") == ("paths:1,0.0", Tree(((0,), (1,), (0, 0))))
    # A number is the name of a chain.
    assert parse_wanted("3") == ("paths:0,1,2", Tree.parse("3"))


def test_any_tree_can_be_asked_for_again() -> None:
    chance = random.Random(3)
    for _ in range(50):
        paths: list[tuple[int, ...]] = [()]
        for _ in range(chance.randrange(1, 30)):
            paths.append((*chance.choice(paths), chance.randrange(12)))
        tree = Tree(tuple(dict.fromkeys(paths[1:])))
        assert parse_wanted(tree.notation) == (tree.notation, tree)


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", "0x2", "4x", "-1", "4x2x-1", "4 x 2", "²", "best", "auto", "best:", "best:0", "best:x", "best:-3"),
        *("auto:", "auto:0", "auto:1.5", "paths:", "paths:0,,1", "paths:0.", "paths:-1", "wide:3"),
        *("2000", "40x40", "best:2000", "auto:2000", "9" * 5000, "best:" + "9" * 5000),
        *("x".join("1" * 65), "paths:" + ".".join("0" * 65), "paths:" + ".".join("0" * 5000)),
    ],
)
def test_what_is_no_tree(text: str) -> None:
    with pytest.raises(MtpExtractError, match=r"expected a (tree|rank)"):
        parse_wanted(text)


def test_ranks_are_measured_as_deep_as_they_are_needed() -> None:
    fixed, grown, best = Tree.parse("4x2x1"), AutoTree(8), BestTree(14)
    assert steps_to_rank([], 8) == steps_to_rank([grown], 8) == 0
    assert steps_to_rank([fixed, grown], 8) == 3
    assert steps_to_rank([fixed, grown, best], 8) == 8
    assert steps_to_rank([BestTree(2)], 8) == 2


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"draft_steps": ()}, "draft steps, found none"),
        ({"draft_steps": (2, 0)}, "draft_steps of at least 1, found 0"),
        ({"draft_steps": (65,)}, "draft_steps of at most 64, found 65"),
        ({"new_tokens": 1}, "new_tokens of at least 2, found 1"),
        ({"batch": 0}, "batch of at least 1, found 0"),
        ({"samples": 0}, "samples of at least 1, found 0"),
        ({"samples": 4097}, "at most 4096 samples"),
        ({"seed": -1}, "a seed of 0"),
    ],
)
def test_numbers_out_of_bounds(given: dict[str, Any], what: str) -> None:
    """Refused before the base, which is not there, is looked for."""
    with pytest.raises(MtpExtractError, match=what):
        run_validation(ValidationPlan(None, base="absent", **given))
