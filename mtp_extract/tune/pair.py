"""The drafter and its base, loaded, in each of the processes that train together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from xxhash import xxh3_128

from mtp_extract.checkpoint.checkpoint import Checkpoint
from mtp_extract.drafter.load import Network, network_of
from mtp_extract.drafter.protocol import Needs
from mtp_extract.errors import MtpExtractError
from mtp_extract.evaluate.base_model import LoadedBase, load_base, memory_guard
from mtp_extract.evaluate.measured import Measured
from mtp_extract.io.address import public_name
from mtp_extract.pipeline.conversion import ReadDirectory
from mtp_extract.speculate.loop import SpeculativeGenerator
from mtp_extract.speculate.target import Base
from mtp_extract.speculate.teacher import Text
from mtp_extract.tune.measure import joined, measure
from mtp_extract.tune.plan import TuningPlan
from mtp_extract.tune.work import locked
from mtp_extract.tune.writing import as_written

_READ = 1 << 24


@dataclasses.dataclass(frozen=True)
class NoDrafter:
    """In the place of a drafter where the base writes alone."""

    needs: Needs  # vocabulary and width of the base

    def start(self, *arguments: Any) -> Any:
        """Never called: no draft is asked for."""
        raise AssertionError("a draft was asked for, and there is no drafter")

    step = fork = start


class Pair:
    """A drafter beside its base.

    Args:
        say: told what is being done; of several processes by the first.

    Attributes:
        accelerator: accelerate's; it says which process this is.
        origin: the drafter's directory, with its checkpoint.
        loaded: the base as transformers has it.
        drafter: in the type it computes in beside the base. Where the plan names no drafter, this and ``origin`` are
            there from :meth:`take` on.
        generator: both in the loop of generation.

    Raises:
        MtpExtractError: a part is missing, does not fit, or does not fit into memory.
    """

    def __init__(self, plan: TuningPlan, say: Callable[[str], None] = lambda line: None) -> None:
        self.plan = plan
        self.accelerator = Accelerator(cpu=plan.device == "cpu")
        self.say = say if self.accelerator.is_main_process else lambda line: None
        _, processes = self.share
        if plan.batch < processes:
            raise MtpExtractError(
                f"expected a batch of at least {processes}, one text a process, found {plan.batch}; raise it",
                remedies=("batch",),
            )
        if plan.directory is not None:
            self.origin = ReadDirectory.of(plan.directory)
        self.say(f"loading the base {plan.base}")
        several = processes > 1 and self.accelerator.device.type != "cpu"
        self.loaded: LoadedBase = load_base(plan.base, str(self.accelerator.device) if several else plan.device)
        with memory_guard("loading the drafter"):
            if plan.directory is None:
                base = Base(self.loaded.model)
                none = NoDrafter(Needs(base.vocab_size, base.width, embedding=False, final_hidden=False))
                self.generator = SpeculativeGenerator(base, none, self.loaded.tokenizer)
            else:
                self._join()

    def take(self, directory: Path) -> None:
        """Put the drafter in ``directory`` beside the base, where there was none.

        Raises:
            MtpExtractError: it holds none, or none that fits.
        """
        self.origin = ReadDirectory.of(directory)
        self._join()

    def _join(self) -> None:
        self.drafter = self.drafter_of(self.origin.checkpoint)
        self.generator = SpeculativeGenerator(self.loaded.model, self.drafter, self.loaded.tokenizer)

    def working_alone(self) -> AbstractContextManager[None]:
        """Around what keeps text and state in the folder of the work; the first process locks it for all.

        Raises:
            OutputError: another run is at work there, or it cannot be written.
        """
        return locked(self.plan.work) if self.accelerator.is_main_process else nullcontext()

    @property
    def as_json(self) -> Mapping[str, str]:
        """The base, for the record."""
        return {"base": public_name(self.plan.base), "base_xxh3": self.base_fingerprint}

    @property
    def base(self) -> Base:
        return self.generator.base

    @property
    def share(self) -> tuple[int, int]:
        """Which process this is, of how many."""
        return self.accelerator.process_index, self.accelerator.num_processes

    @cached_property
    def base_fingerprint(self) -> str:
        """XXH3-128 of the base's weights, on which its text depends."""
        digest = xxh3_128()
        for name, value in sorted(self.loaded.model.state_dict().items()):
            digest.update(f"{name} {tuple(value.shape)} {value.dtype} ".encode())
            numbers = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            for at in range(0, len(numbers), _READ):
                digest.update(numbers[at : at + _READ].data)
        return digest.hexdigest()

    def drafter_of(self, checkpoint: Checkpoint) -> Network:
        """``checkpoint``, rounded as it will be in a directory like the origin: what is measured is what is written."""
        written = as_written(self.origin, checkpoint)
        return network_of(written, dtype=self.loaded.drafter_dtype, device=self.accelerator.device)

    def measured(self, drafter: Network, texts: Sequence[Text]) -> Measured:
        """``drafter`` on ``texts``, divided among the processes, and then joined in each of them."""
        number, processes = self.share
        part = measure(
            self.base,
            drafter,
            [texts[index] for index in range(number, len(texts), processes)],
            self.plan.draft_steps,
            temperature=self.plan.temperature,
            batch=self.plan.batch,
        )
        part = dataclasses.replace(part, text=part.text * processes + number)
        if processes == 1:
            return part
        gathered: list[Any] = gather_object([part])
        return joined(gathered)
