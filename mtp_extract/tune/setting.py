"""What tuning and making a head both ask for: a drafter, its base, and the text they are trained on."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated

from mtp_extract.errors import MtpExtractError, OutputError, escape
from mtp_extract.evaluate.prompts import FEW, Prompt, read_prompts, shipped_prompts
from mtp_extract.io.place import PathLike, check_place, files_of
from mtp_extract.options import BASE, About, ApiKey, Bytes, Device, check_values

Force = Annotated[bool, About("Write also what is not better.")]


@dataclass(frozen=True)
class Setting:
    """A drafter with its base, and the text they are trained and measured on."""

    directory: Annotated[
        Path | None,
        About(
            "A checkpoint that mtp-extract wrote, an official assistant, or an EAGLE-3 head; or its id on the Hub.",
            metavar="[DIR]",
        ),
    ]
    """None where a new EAGLE-3 head is to be made."""
    base: Annotated[str, BASE]
    work: Path  # where text, state and log are kept: a run that was stopped goes on from there
    prompts: Annotated[
        Path | None,
        About(
            "Prompts of your workload as .txt, .json or .jsonl; by default those that come with mtp-extract.",
            metavar="FILE",
        ),
    ] = None
    text: Annotated[
        Path | None, About("Texts by people instead, or prompts with their answers, in the same forms.", metavar="FILE")
    ] = None
    other_prompts: Annotated[
        int,
        About(
            "Beside given prompts or texts, held-out prompts of each workload that comes with mtp-extract, to see "
            "whether it gets worse; below 5 that is not decided, 0 for none.",
            least=0,
        ),
    ] = FEW
    text_from: Annotated[
        str | None,
        About(
            "An OpenAI-compatible server that has the base, and writes its texts: http://localhost:8000.", metavar="URL"
        ),
    ] = None
    text_model: Annotated[
        str | None, About("As that server calls the base; needed where it serves several.", metavar="NAME")
    ] = None
    text_key: ApiKey = field(default=None, repr=False)
    text_concurrency: Annotated[int, About("Texts that it writes at a time.", least=1, most=1024)] = 16
    text_timeout: Annotated[float, About("Seconds that one may take.", least=0.1)] = 600.0
    text_unlike: Annotated[bool, About("Train on its texts though they are not this base's.")] = False
    new_tokens: Annotated[int, About("Most tokens of each of the base's texts.", least=2)] = 256
    temperature: Annotated[float, About("At which the base is served, and writes the text; 0 is greedy.", least=0)] = (
        0.0
    )
    chat_template: Annotated[bool, About("Put prompts into the base's chat format.")] = True
    draft_steps: Annotated[int, About("Drafts a round to train for.", least=1)] = 3
    batch: Annotated[
        int,
        About("Texts a step, of all processes together; each writes and measures as many at a time.", least=1),
    ] = 16
    states_memory: Annotated[
        int,
        About(
            "Most memory for what the base computes over the training texts, of each process; what finds no room is "
            "computed in every step that reads it.",
            metavar="SIZE",
            least=0,
            parse=Bytes.parse,
        ),
    ] = Bytes(2 * 10**9)
    states_disk: Annotated[
        int,
        About(
            "Most disk space for the same, used after the memory, in the folder of the work; freed when the run is "
            "finished.",
            metavar="SIZE",
            least=0,
            parse=Bytes.parse,
        ),
    ] = Bytes(0)
    seed: Annotated[int, About("The same seed, texts and machine give the same bytes.", least=0)] = 0
    device: Device = "auto"

    @property
    def inputs(self) -> tuple[PathLike | None, ...]:
        """What is read, and so is not replaced."""
        return self.directory, *files_of(self.base), self.prompts, self.text

    @property
    def given(self) -> bool:
        """Whether the prompts, or the texts, are the user's."""
        return self.prompts is not None or self.text is not None

    @cached_property
    def items(self) -> tuple[Prompt, ...]:
        """The prompts, or the texts by people.

        Raises:
            MtpExtractError: the file that holds them cannot be read.
        """
        given = self.prompts or self.text
        return read_prompts(given) if given else shipped_prompts()

    def check_out(self, out: Path, overwrite: bool) -> None:
        """Whether the result may be written to ``out``.

        Raises:
            OutputError: it may not.
        """
        from mtp_extract.pipeline.staging import recorded

        place, work = (Path(os.path.realpath(path)) for path in (out, self.work))
        if place in (work, *work.parents):
            raise OutputError(
                f"{escape(out)}: expected a place of its own for the result, found that text and state are kept there. "
                "Choose another place for one of the two.",
                remedies=("out", "work"),
            )
        check_place(out, overwrite=overwrite, inputs=self.inputs, listed=recorded)

    def check(self) -> None:
        """What can be said before anything is loaded.

        Raises:
            MtpExtractError: a number is out of range, or two things exclude each other.
        """
        if self.prompts is not None and self.text is not None:
            raise MtpExtractError("expected prompts or texts, found both; leave one out", remedies=("prompts", "text"))
        if self.text is not None and self.text_from is not None:
            raise MtpExtractError(
                "expected texts by people or by a server, found both; leave one out", remedies=("text", "text_from")
            )
        if self.text is not None and self.temperature:
            raise MtpExtractError(
                "expected text of the base itself for sampled serving, found text by people, which has another "
                "distribution; give prompts",
                remedies=("prompts", "temperature=0"),
            )
        check_values(self)
        if self.new_tokens < self.draft_steps + 2:
            raise MtpExtractError(
                f"expected new_tokens of at least {self.draft_steps + 2}, found {self.new_tokens}; raise it",
                remedies=("new_tokens",),
            )
        if not self.temperature < math.inf:
            raise MtpExtractError(
                f"expected a temperature that is a number, found {self.temperature}; 0 is greedy",
                remedies=("temperature",),
            )
