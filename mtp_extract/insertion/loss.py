"""What the types of a file lose of the weights that are put in: by role, in all, and whether that is too much.

A loss is relative: root mean square of what the file will hold less the checkpoint's weight, as a share of the root
mean square of the weight. Beside it stands how far the checkpoint's weight is from what the file held: where rounding
moves a weight as far as its training did, most of the training is rounded away.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mtp_extract.errors import UnsupportedError, few
from mtp_extract.insertion.encoding import Encoding, Sums
from mtp_extract.insertion.slots import relative_error

MOST_LOST = 0.1
"""Of a role. A checkpoint trained on the file's grid loses almost nothing; floats lose two fifths in two bits."""

_MOSTLY = 0.5
_WORST = 5


@dataclass(frozen=True)
class Loss:
    """Of one role, or of all together, as shares of the checkpoint's norm."""

    relative_rms_error: float  # what the file's types lose
    relative_change: float  # what the checkpoint changes of what the file holds

    @classmethod
    def of(cls, sums: Sums) -> Loss:
        """The roots of ``sums``, as shares."""
        return cls(relative_error([sums.lost], [sums.size]), relative_error([sums.changed], [sums.size]))


@dataclass(frozen=True)
class Losses:
    """Of every role that the file does not hold to the bit."""

    total: Loss
    roles: Mapping[str, Loss]  # the worst first

    @classmethod
    def of(cls, encodings: Mapping[str, Iterable[Encoding]]) -> Losses:
        """Of what is to be put in."""
        sums = {
            role: Sums.total(encoding.weight_sums for encoding in of_role)
            for role, of_role in encodings.items()
            if of_role
        }
        measured = {role: of_role for role, of_role in sums.items() if of_role.size and of_role.lost}
        losses = {role: Loss.of(of_role) for role, of_role in measured.items()}
        worst_first = sorted(losses.items(), key=lambda item: -item[1].relative_rms_error)
        return cls(Loss.of(Sums.total(measured.values())), dict(worst_first))

    @property
    def in_words(self) -> str:
        """The total, and the worst; empty where nothing is lost."""
        if not self.roles:
            return ""
        total = self.total
        return (
            f"Rounding to the file's types loses {total.relative_rms_error:.1%} of what is put in (the checkpoint "
            f"changes {total.relative_change:.1%}); most: {', '.join(_named(self.roles)[:_WORST])}"
        )

    @property
    def warning(self) -> str:
        """What to know where most of a training is rounded away; empty where it is not."""
        lost, changed = self.total.relative_rms_error, self.total.relative_change
        if not changed or lost**2 < _MOSTLY * changed**2:
            return ""
        return (
            f"Most of what the checkpoint changes is rounded away: {changed:.1%} is changed, {lost:.1%} is lost. Train "
            "with the file's grid in the loop (quantization-aware), so that its codes change."
        )

    def refusal(self, name: str) -> UnsupportedError | None:
        """Why the file ``name`` should not get these weights; None where every role keeps enough of its own."""
        ruined = {role: loss for role, loss in self.roles.items() if loss.relative_rms_error > MOST_LOST}
        if not ruined:
            return None
        return UnsupportedError(
            f"{name}: rounding to its types would lose more than {MOST_LOST:.0%} of {len(ruined)} roles: "
            f"{few(_named(ruined))}. Train with the file's grid in the loop (quantization-aware), from Google's public "
            "mobile checkpoint, whose codes the bundle holds; or take the loss.",
            remedies=("force",),
        )


def _named(losses: Mapping[str, Loss]) -> list[str]:
    return [f"{role} {loss.relative_rms_error:.1%}" for role, loss in losses.items()]
