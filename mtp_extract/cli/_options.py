"""Options that more than one command has."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

__all__ = ["Download", "SlidingWindow"]

SlidingWindow = Annotated[
    Optional[int],  # noqa: UP045 - typer reads the annotation at run time, on Python 3.10 too
    typer.Option(min=1, help="Length of the window; asked for only where the file leaves it to the runtime."),
]

Download = Annotated[
    bool, typer.Option("--download", help="From a server without byte ranges, download the whole file.")
]
