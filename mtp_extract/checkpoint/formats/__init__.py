"""The formats, one module each. What ``FORMATS`` lists is what there is to choose from."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from mtp_extract.errors import DrafterError, escape

if TYPE_CHECKING:
    from mtp_extract.checkpoint.checkpoint import Checkpoint, Format

__all__ = ["FORMATS", "format_named", "format_of", "read_checkpoint"]


@dataclass(frozen=True)
class Listed:
    """A format as the list of choices has it. Its module is imported when it is chosen, so that a list costs nothing.

    Attributes:
        module: whose ``FORMAT`` it is.
        dtypes: the output types it has, the default first.
        about: one line for users.
        provenance_inside: whether the weights file has room for where it came from.
    """

    module: str
    dtypes: tuple[str, ...]
    about: str
    provenance_inside: bool = False


FORMATS = {
    "transformers": Listed(f"{__name__}.transformers", ("bf16", "f16", "f32"), "what engines load"),
    "litert": Listed(f"{__name__}.litert", ("f32",), "one F32 tensor per stored constant"),
}
"""Every format by name."""


def format_named(name: str) -> Format:
    """The format called ``name``.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in FORMATS:
        raise ValueError(f"format {name!r}: expected {' or '.join(FORMATS)}.")
    found: Format = import_module(FORMATS[name].module).FORMAT
    return found


def format_of(directory: Path) -> Format:
    """The format of the checkpoint in ``directory``.

    Raises:
        DrafterError: it is of none.
    """
    formats = [format_named(name) for name in FORMATS]
    for found in formats:
        if found.recognizes(directory):
            return found
    raise DrafterError(
        f"expected {' or '.join(dict.fromkeys(f.marker for f in formats))} in {escape(directory)}, found none of them; "
        "give the directory an extraction wrote"
    )


def read_checkpoint(directory: Path | str) -> Checkpoint:
    """The checkpoint in ``directory``, of whichever format.

    Raises:
        DrafterError, CheckpointError: as :meth:`Format.read`.
    """
    folder = Path(directory)
    return format_of(folder).read(folder)
