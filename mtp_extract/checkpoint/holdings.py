"""How a format holds every weight: decided before anything is written, checked against what was."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from mtp_extract.architecture.roles import shapes_of
from mtp_extract.checkpoint.checkpoint import CODES, FLOATS, INDICES, NOTHING, Checkpoint, Format, Holding
from mtp_extract.checkpoint.rounding import SCALES, narrowed, rounded_again
from mtp_extract.checkpoint.weight import filled, row_codes, same_codes, same_floats, steps_alike
from mtp_extract.errors import CheckpointError, NoCodesError, UnsupportedError, few

_MOST_NAMED = 4


def holdings_of(format_: Format, checkpoint: Checkpoint, dtype: str) -> dict[str, Holding]:
    """How ``format_`` will hold every weight of ``checkpoint``, by role."""
    return {
        role.name: format_.hold(role, checkpoint.tensors.get(role.name, filled(shape)), dtype)
        for role, shape in shapes_of(checkpoint.config).items()
    }


def require_exact(holdings: Mapping[str, Holding], name: str) -> None:
    """Refuse what would be rounded.

    Args:
        name: of the format.

    Raises:
        UnsupportedError: names what would be, and to what.
    """
    changed = {role: holding for role, holding in holdings.items() if holding.rounded_to or holding.kept == NOTHING}
    if changed:
        listed = "; ".join(f"{few(roles, _MOST_NAMED)} ({what})" for what, roles in _grouped(changed).items())
        raise UnsupportedError(
            f"The {name} format cannot hold this drafter exactly: {listed}. Choose floats "
            "in F32, which the transformers format has, or a format that keeps scales in F32.",
            remedies=("format=transformers", "dtype=f32"),
        )


def notes_of(holdings: Mapping[str, Holding]) -> tuple[str, ...]:
    """What a user should know of how the weights were held, where codes were to be kept."""
    whys: dict[tuple[str, str], list[str]] = defaultdict(list)
    coded = any(holding.kept == CODES for holding in holdings.values())
    for role, holding in holdings.items():
        if holding.why and (coded or holding.kept == NOTHING):
            whys["Left out" if holding.kept == NOTHING else "In floats", holding.why].append(role)
    notes = [f"{how}: {few(roles, _MOST_NAMED)}, because {why}." for (how, why), roles in whys.items()]
    if not coded:
        return tuple(notes)
    rounded = {role: holding for role, holding in holdings.items() if holding.rounded_to}
    notes += [f"Rounded: {few(roles, _MOST_NAMED)}, {what}." for what, roles in _grouped(rounded).items()]
    return tuple(notes)


def _grouped(rounded: Mapping[str, Holding]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = defaultdict(list)
    for role, holding in rounded.items():
        what = "scales of codes" if holding.kept == CODES else "numbers"
        how = f"{what} to {holding.rounded_to}, by at most {holding.bound:.1e} of each"
        groups["left out" if holding.kept == NOTHING else how].append(role)
    return groups


def check_codes(written: Checkpoint, original: Checkpoint, holdings: Mapping[str, Holding]) -> None:
    """Compare the codes that ``written`` reads back with those of ``original``, bit for bit, and so their steps.

    Steps are rounded first as they are held; that may have moved none by more than ``bound``.

    Raises:
        CheckpointError: names the first role whose codes or steps are others.
    """
    for role, holding in holdings.items():
        if holding.kept != CODES:
            continue
        steps = [f"{holding.rounded_to}{SCALES}"] if holding.rounded_to else []
        try:
            exact, found = row_codes(original.tensors[role]), row_codes(written.tensors[role])
            expected = row_codes(rounded_again(exact, steps))
        except NoCodesError as error:
            raise CheckpointError(f"{role}: expected its codes, found that {error}.") from error
        if not same_codes(expected, found):
            raise CheckpointError(f"{role}: what was written holds other codes than the file.")
        old, new = steps_alike(exact, found)
        moved = (np.abs(new - old) > holding.bound * np.abs(old)).any()
        if moved or not np.array_equal(*steps_alike(expected, found)):
            raise CheckpointError(f"{role}: what was written holds other scales than the file.")


def check_floats(written: Checkpoint, original: Checkpoint, holdings: Mapping[str, Holding]) -> None:
    """Compare the numbers that ``written`` reads back with those of ``original``, rounded as held, bit for bit.

    Raises:
        CheckpointError: names the first role whose numbers are others.
    """
    for role, holding in holdings.items():
        if holding.kept == FLOATS:
            found = written.tensors[role]
            expected = narrowed(original.tensors.get(role, filled(found.shape)), holding.rounded_to)
            if not same_floats(expected, found):
                raise CheckpointError(f"{role}: what was written holds other numbers than it was made of.")
        elif holding.kept == INDICES and not np.array_equal(
            original.tensors[role].indices(), written.tensors[role].indices()
        ):
            raise CheckpointError(f"{role}: what was written holds other indices than it was made of.")
