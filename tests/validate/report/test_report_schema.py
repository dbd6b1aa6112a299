"""What a validation writes is what docs/records.md and the schema say."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from helpers.schemas import validator

from mtp_extract.validate.acceptance.generation import Divergence
from mtp_extract.validate.report.document import as_json
from mtp_extract.validate.result import Validation

# They share the pair, and a whole validation of it.
pytestmark = pytest.mark.xdist_group("validation")


def _check(validation: Validation) -> None:
    validator("report")(json.loads(json.dumps(as_json(validation), allow_nan=False)))


def test_a_whole_validation(validation: Validation) -> None:
    _check(validation)


def test_a_text_that_parts_from_the_base(validation: Validation) -> None:
    (drafter,) = validation.drafters
    first, *more = drafter.generation.lengths
    parted = replace(
        first, identical_prompts=0, divergences=(Divergence(0, 3, 1.5, False), Divergence(1, 0, None, True))
    )
    generation = replace(drafter.generation, lengths=(parted, *more))
    _check(replace(validation, drafters=(replace(drafter, generation=generation),)))


def test_what_was_not_measured(validation: Validation) -> None:
    _check(replace(validation, parity=None))
    _check(
        replace(
            validation,
            base=None,
            settings={"seed": 0},
            controls=(),
            drafters=(),
        )
    )
