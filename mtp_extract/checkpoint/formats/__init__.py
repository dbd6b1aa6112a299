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
        engines: those of :data:`ENGINES` that load it.
        library: what the Hub calls the library it is for.
        rules: those of :data:`mtp_extract.checkpoint.rounding.RULES` whose codes it holds, the usual one first.
        provenance_inside: whether the weights file has room for where it came from.
    """

    module: str
    dtypes: tuple[str, ...]
    about: str
    engines: tuple[str, ...] = ()
    library: str = ""
    rules: tuple[str, ...] = ()
    provenance_inside: bool = False


ENGINES = ("transformers", "vllm", "sglang", "mlx_vlm", "llama_cpp")
"""What loads a drafter, by the name of its section in a model card."""

FORMATS = {
    "transformers": Listed(
        module=f"{__name__}.transformers",
        dtypes=("bf16", "f16", "f32"),
        about="floats, for every engine but llama.cpp",
        engines=("transformers", "vllm", "sglang", "mlx_vlm"),
        library="transformers",
    ),
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
