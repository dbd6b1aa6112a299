"""The commands: ``mtp-NAME``, and the same as ``mtp NAME``."""

import os
import sys
from importlib import import_module
from typing import Any

if os.name == "nt":
    # Places are locked, and files made durable, in the ways of POSIX.
    sys.exit("error: mtp-extract runs on Linux and macOS. On Windows, run it in WSL.")

COMMANDS = {
    "inspect": "Show what a bundle or a checkpoint holds.",
    "extract": "Write a bundle's drafter as a checkpoint that engines load.",
    "convert": "Write a checkpoint in another format.",
    "validate": "Check a drafter against its bundle, and measure acceptance with its base.",
    "tune": "Fit a drafter to its base, or make a new head.",
    "insert": "Put a checkpoint into a bundle.",
    "bench": "Measure a running server with and without its drafter.",
    "doctor": "Find out why a server rejects drafts.",
    "upload": "Publish a checkpoint on the Hugging Face Hub.",
    "sample": "Print where the sample's files are.",
    "schema": "Print the JSON schema of a record.",
}
"""Command → what it is for, in the order in which a user meets them; the module of this folder has the same name."""


def import_command(name: str) -> Any:
    """Import the module of the command ``name``."""
    return import_module(f"{__name__}.{name}")
