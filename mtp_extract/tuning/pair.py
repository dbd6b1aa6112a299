"""Loads the drafter and its base in every training process, and writes a tuned drafter in its original format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, cast

import torch
from accelerate import Accelerator
from xxhash import xxh3_128

from mtp_extract.architecture import list_shapes
from mtp_extract.architecture.roles import HEAD_ROLES, MATRIX
from mtp_extract.checkpoint.checkpoint import CODES, Checkpoint
from mtp_extract.checkpoint.format import NOTHING, Plan
from mtp_extract.drafter.load import Network, load_any_drafter
from mtp_extract.errors import UnsupportedError, escape
from mtp_extract.evaluation.base_model import LoadedBase, guard_memory, load_base
from mtp_extract.formats import ALL_FORMATS
from mtp_extract.io.opening import fetch_checkpoint
from mtp_extract.pipeline.check import CheckpointDirectory
from mtp_extract.pipeline.plan import DtypeName, WritingPlan
from mtp_extract.pipeline.writing import describe_origin, prepare, write
from mtp_extract.progress import SILENT, Reporter
from mtp_extract.speculate.codec import Codec
from mtp_extract.speculate.target import Base, check_pair
from mtp_extract.tuning.plan import TuningPlan


class Pair:
    """A drafter beside its base.

    Args:
        reporter: receives progress; only the first of several processes reports.

    Attributes:
        origin: the drafter's directory, with its checkpoint.
        drafter: in the dtype that it computes in beside the base. If the plan names no drafter, this and ``origin``
            are set by :meth:`load_origin`.

    Raises:
        MtpExtractError: a part is missing, does not fit, or does not fit into memory.
    """

    drafter: Network

    def __init__(self, plan: TuningPlan, reporter: Reporter = SILENT) -> None:
        self.plan = plan
        self.accelerator = Accelerator(cpu=plan.device == "cpu")
        self.say = (reporter if self.accelerator.is_main_process else SILENT).say
        origin = None if plan.directory is None else CheckpointDirectory.of(fetch_checkpoint(plan.directory))
        # Check the drafter before the base is loaded, which may take minutes.
        if origin is not None and plan.mode == "qat":
            require_codes(origin, list_idle_roles(plan))
        self.say(f"loading the base {plan.base}")
        is_distributed = self.accelerator.num_processes > 1 and self.accelerator.device.type != "cpu"
        self.loaded: LoadedBase = load_base(plan.base, str(self.accelerator.device) if is_distributed else plan.device)
        self.base = Base(self.loaded.model)
        self.codec = Codec(self.loaded.tokenizer, self.base.vocab_size)
        if origin is not None:
            self.load_origin(origin)

    def load_origin(self, origin: CheckpointDirectory) -> None:
        """Load the drafter of ``origin``; raise MtpExtractError if it does not fit the base."""
        self.origin = origin
        with guard_memory("loading the drafter"):
            self.drafter = self.load_rounded(origin.checkpoint)
            check_pair(self.base, self.drafter)

    @cached_property
    def base_fingerprint(self) -> str:
        """XXH3-128 of the base's weights; stored text is reused only with the same base."""
        digest = xxh3_128()
        for name, value in sorted(self.loaded.model.state_dict().items()):
            digest.update(f"{name} {tuple(value.shape)} {value.dtype} ".encode())
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def load_rounded(self, checkpoint: Checkpoint) -> Network:
        """Load ``checkpoint`` rounded to the format of the origin, so that a measurement is of the written weights."""
        rounded = round_like(self.origin, checkpoint)
        return load_any_drafter(rounded, dtype=self.loaded.drafter_dtype, device=self.accelerator.device)


def list_idle_roles(plan: TuningPlan) -> tuple[str, ...]:
    """List the roles that are not trained: with one draft step, nothing reads the state for the next step."""
    return ("post_projection",) if plan.draft_steps == 1 else ()


def require_codes(origin: CheckpointDirectory, idle: Sequence[str]) -> None:
    """Raise UnsupportedError if a matrix of ``origin`` that is trained, so not in ``idle``, has no codes."""
    tensors = origin.checkpoint.tensors
    for role in list_shapes(origin.checkpoint.config):
        if role.kind == MATRIX and role.name not in (*HEAD_ROLES, *idle) and tensors[role.name].scheme is None:
            raise UnsupportedError(
                f"{escape(origin.directory)}: {role.name} is in floats, and the mode qat trains the stored integers of "
                "every matrix. Extract the drafter again with its codes (`mtp-extract … --codes`), or train norms or "
                "floats.",
                remedies=("mode=norms", "mode=float"),
            )


def plan_like(origin: CheckpointDirectory, checkpoint: Checkpoint) -> Plan:
    """Plan ``checkpoint`` in the format and dtype of ``origin``, with codes if that has them; UnsupportedError if that
    cannot hold it."""
    tensors = origin.checkpoint.tensors.items()
    coded = any(weight.scheme is not None and role not in origin.extra_codes for role, weight in tensors)
    # Codes that `extra_codes` does not list are stored in place of floats, not beside them.
    dtype = CODES if coded and CODES in ALL_FORMATS[origin.layout].dtypes else origin.checkpoint.dtype
    return prepare(checkpoint, origin.layout, WritingPlan(dtype=cast(DtypeName, dtype), codes=bool(origin.extra_codes)))


def round_like(origin: CheckpointDirectory, checkpoint: Checkpoint) -> Checkpoint:
    """Return ``checkpoint`` as it would be read back from a directory in the format of ``origin``."""
    stored = plan_like(origin, checkpoint).stored
    rounded = {
        role: weight.written for role, weight in stored.items() if weight.rounded_to and role in checkpoint.tensors
    }
    return replace(checkpoint, tensors=MappingProxyType({**checkpoint.tensors, **rounded}))


def check_writable(origin: CheckpointDirectory, like: Checkpoint, mode: str) -> None:
    """Raise UnsupportedError if the format of ``origin`` cannot hold ``like``, an example of what ``mode`` makes."""
    try:
        stored = plan_like(origin, like).stored.values()
        why = next((f"{weight.why}." for weight in stored if weight.how == NOTHING), None)
    except UnsupportedError as error:
        why = str(error)
    if why:
        raise UnsupportedError(
            f"{escape(origin.directory)}: expected a format with room for what the mode {mode} makes, found "
            f"{origin.layout}: {why} Train norms or codes, or convert it to the transformers format first.",
            remedies=("mode=norms", "mode=qat"),
        )


def write_result(
    origin: CheckpointDirectory, checkpoint: Checkpoint, plan: TuningPlan, key: str, about: Mapping[str, Any]
) -> None:
    """Write ``checkpoint`` in the format of ``origin`` to the plan's target, with ``about`` as ``key`` of the record.

    Raises:
        OutputError: it cannot be written, or reads back differently; nothing is left behind.
    """
    planned = plan_like(origin, checkpoint)
    made_from = "tuned_from" if key == "tuning" else "made_from"
    # The origin's proof is of other weights, or another head.
    record = {**describe_origin(origin, planned), "proof": None, key: {**about, made_from: origin.sums}}
    write(planned, plan.target, record, overwrite=plan.overwrite, inputs=plan.inputs)
