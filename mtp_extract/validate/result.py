"""What a validation found, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mtp_extract.validate.acceptance.agreement import WorkloadFigures
from mtp_extract.validate.acceptance.controls import ControlResult
from mtp_extract.validate.acceptance.generation import GenerationResult
from mtp_extract.validate.parity.compare import Parity

__all__ = ["BaseFacts", "Validation"]


@dataclass(frozen=True)
class BaseFacts:
    """The base and how it was run."""

    name: str
    dtype: str
    devices: tuple[str, ...]
    drafter_dtype: str
    chat_template: bool


@dataclass(frozen=True)
class Validation:
    """The result. What was not asked for is None.

    Attributes:
        directory: the checkpoint.
        source: name of the file it was compared with.
        base: the base model.
        settings: prompts, lengths, seeds: what a second run needs.
        parity: against the interpreter.
        agreement: over all texts.
        workloads: the same by workload.
        controls: in the order of the table.
        generation: by K.
        notes: things worth knowing that are not errors.
    """

    directory: str
    source: str | None
    base: BaseFacts | None
    settings: Mapping[str, Any]
    parity: Parity | None
    agreement: WorkloadFigures | None
    workloads: Mapping[str, WorkloadFigures]
    controls: tuple[ControlResult, ...]
    generation: GenerationResult | None
    notes: tuple[str, ...]

    @property
    def refuted(self) -> bool:
        """Whether something was shown to be wrong: parity, or a text that differs where the base is sure."""
        lengths = self.generation.lengths if self.generation else ()
        wrong_text = any(not divergence.tie for result in lengths for divergence in result.divergences)
        return wrong_text or (self.parity is not None and not self.parity.proven)
