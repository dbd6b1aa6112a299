"""Everything this package raises on purpose.

A message says what was expected, what was found, and what to do. Commands print it to stderr and exit with
status 1; a traceback is a bug. Names read from files are escaped with :func:`escape` before they enter a message.

What to do is often an argument of the function that was called. The message says it in words, ``remedies`` names the
argument, and a command adds its own option for it: no message here knows how a command spells anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

LONGEST_NAME = 200
MOST_NAMED = 5
_NEAR = 0.65
"""Least similarity (difflib's ratio) of a name that is suggested."""


class MtpExtractError(Exception):
    """Base class of every error this package raises on purpose.

    Attributes:
        remedies: arguments that would help, each as ``name`` or ``name=value``, such as ``("overwrite", "out")``.
    """

    def __init__(self, message: str, *, remedies: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.remedies = remedies


class PlanError(MtpExtractError, ValueError):
    """An argument is out of bounds, or arguments contradict each other; ``remedies`` are fields of the plan."""


class SourceError(MtpExtractError):
    """The source cannot be opened or read."""


class TruncatedError(SourceError):
    """The source ends before something it promises."""


class FormatError(MtpExtractError):
    """The bytes are not what the format says."""


class UnsupportedError(MtpExtractError):
    """Valid and understood, but refused: the message names the feature."""


class OperatorError(UnsupportedError):
    """An operator computes what no drafter does.

    Attributes:
        place: number of its subgraph, and its own there.
        label: what messages call it.
    """

    def __init__(self, message: str, *, place: tuple[int, int], label: str) -> None:
        super().__init__(message)
        self.place = place
        self.label = label


class AnotherKindError(UnsupportedError):
    """The drafter is of a known kind that no checkpoint of Gemma 4's kind can express; nothing else is tried."""


class NoCodesError(UnsupportedError):
    """A weight does not have integers with one scale per row or block; the message says why, as a clause."""


class NoDrafterError(MtpExtractError):
    """A readable file that holds no MTP drafter."""


class RoleError(MtpExtractError):
    """A role of the drafter was not found in the graph, or a constant is left without a role."""


class ProofError(MtpExtractError):
    """A checkpoint and the graph that it was extracted from compute different things; the message names the role."""


class OutputError(MtpExtractError):
    """The result cannot be written where it was asked for."""


class CheckpointError(MtpExtractError):
    """A checkpoint directory is damaged, incomplete, or does not hold what it says."""


class HubError(MtpExtractError):
    """The Hugging Face Hub refused, or could not be reached."""


class ServerError(MtpExtractError):
    """A model server refused, could not be reached, or gave an answer that makes no sense."""


class DrafterError(MtpExtractError):
    """A drafter cannot be built: none has this shape, or computes in this type."""


class PairError(MtpExtractError):
    """A drafter and a base model do not belong together."""


def escape(name: object, longest: int = LONGEST_NAME) -> str:
    """Make ``name`` safe for a terminal: escape control and undecodable characters, shorten very long names."""
    text = str(name)
    if len(text) > longest:
        text = text[: longest - 1] + "…"
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode("ascii") for c in text)


def list_few(names: Iterable[object], most: int = MOST_NAMED, separator: str = ", ") -> str:
    """List the first ``most`` of ``names``, safe for a terminal, and say how many more there are."""
    listed = list(names)
    named = separator.join(escape(name) for name in listed[:most])
    return f"{named} and {len(listed) - most} more" if len(listed) > most else named


def format_count(count: int, noun: str) -> str:
    """Format ``count`` with its ``noun``, in the plural unless it is 1."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_choice(names: Iterable[object]) -> str:
    """Format ``names`` as a choice: "a, b or c"."""
    *others, last = map(str, names)
    return f"{', '.join(others)} or {last}" if others else last


def suggest_name(name: object, names: Iterable[str]) -> str:
    """Return " Did you mean …?" with the one of ``names`` that is most like ``name``; empty if none is like it."""
    matches = get_close_matches(str(name).lower(), list(names), n=1, cutoff=_NEAR)
    return f" Did you mean {matches[0]}?" if matches else ""
