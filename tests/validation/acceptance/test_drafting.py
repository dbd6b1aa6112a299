"""Trees as they are asked for: what can be, and what is refused before anything is done."""

from __future__ import annotations

from typing import Any

import pytest

from mtp_extract.errors import MtpExtractError
from mtp_extract.speculate.trees import Tree
from mtp_extract.validation.acceptance.drafting import parse_wanted
from mtp_extract.validation.plan import ValidationPlan
from mtp_extract.validation.run import run_validation


def test_names() -> None:
    assert parse_wanted("4x2x1") == ("4x2x1", Tree.parse("4x2x1"))
    # A number alone is the name of a chain.
    assert parse_wanted("3") == ("tree of 3", Tree.parse("3"))


@pytest.mark.parametrize(
    "text",
    ["", "x", "0x2", "4x", "-1", "4x2x-1", "4 x 2", "²", "best:14", "2000", "40x40", "9" * 5000, "x".join("1" * 65)],
)
def test_what_is_no_tree(text: str) -> None:
    with pytest.raises(MtpExtractError, match="expected a tree"):
        parse_wanted(text)


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
