"""What to know of the figures of a validation, beside what they say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mtp_extract.evaluate.agreement import Continuations
from mtp_extract.evaluate.texts import repeats_note
from mtp_extract.validate.acceptance.controls import Drafted
from mtp_extract.validate.acceptance.drafters import DrafterFigures

_MOST_REPEATED = 0.25


def notes_of(drafters: Sequence[DrafterFigures], written: Continuations, drafted: Drafted) -> Iterator[str]:
    """What to know of the figures: prompts that a drafter may have seen, text that says little, what did not run."""
    if tuned := [drafter.facts.name for drafter in drafters if drafter.facts.made == "tuned"]:
        yield (
            f"tuned: {', '.join(tuned)}; on prompts that a drafter was tuned on it does better than on others, and the "
            "shipped ones are those that tuning takes by default: its extraction.json has what texts held out showed"
        )
    if written.repeated > _MOST_REPEATED:
        yield (
            f"{100 * written.repeated:.0f} % of the runs of eight tokens that the base writes stand earlier in the "
            "same text: loops, which are easy to draft, so controls may do as well."
        )
    yield from repeats_note(len(written.texts), len(written.repeats))
    positions = len(drafted.agreements[0].anchor)
    if not drafted.controls:
        yield "Nothing was broken on purpose beside it: the controls are those of an MTP drafter."
    elif drafted.positions < positions:
        yield (
            f"Controls drafted at {drafted.positions} of {positions} positions, spread over all texts, and are held "
            "against the drafter there."
        )
    if disturbed := [drafter.facts.name for drafter in drafters if drafter.generation.disturbed]:
        yield (
            f"Times and speedups mean nothing here ({', '.join(disturbed)}): rounds took less time than a single token "
            "of the base alone, so something else used the machine meanwhile. Lengths and texts do not depend on it."
        )
