"""The commands: ``mtp-NAME``, and the same as ``mtp NAME``."""

from importlib import import_module
from typing import Any

COMMANDS = {
    "inspect": "What a bundle or a checkpoint holds.",
    "extract": "The drafter of a bundle, as a checkpoint that engines load.",
    "convert": "A checkpoint in another format.",
    "validate": "Is it the drafter of its file, and does it draft what its base would say?",
    "tune": "A drafter, fitted to its base; or a new one.",
    "insert": "A checkpoint back into a bundle.",
    "bench": "How fast a running server is, with and without its drafter.",
    "doctor": "Why acceptance is what it is; and whether a bundle holds a drafter.",
    "upload": "A checkpoint on the Hugging Face Hub.",
}
"""Each command and what it is for, in the order in which a user meets them; a module of this folder has its name."""


def module_of(name: str) -> Any:
    """The module of the command ``name``."""
    return import_module(f"{__name__}.{name}")
