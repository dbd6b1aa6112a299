"""Options that several commands have and no plan."""

from __future__ import annotations

from typing import Annotated

from mtp_extract.options import About

SlidingWindow = Annotated[
    int | None, About("Length of the window; asked for only where the file leaves it to the runtime.", least=1)
]
AsJson = Annotated[bool, About("Print the whole result as JSON.", names=("--json",))]
Verbose = Annotated[bool, About("Print the proof, sizes and files, too.", names=("-v", "--verbose"))]
