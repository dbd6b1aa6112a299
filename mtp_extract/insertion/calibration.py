"""The ranges of a drafter's activations as it drafts for its base, over our own prompts."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtp_extract.architecture.roles import MATRIX, roles_of
from mtp_extract.drafter.load import load_drafter
from mtp_extract.evaluation.agreement import measure_agreements
from mtp_extract.evaluation.base_model import load_base, memory_guard
from mtp_extract.evaluation.base_texts import write_texts
from mtp_extract.evaluation.prompts import FEW, shipped_prompts
from mtp_extract.insertion.activations import Range, Ranges
from mtp_extract.progress import Reporter
from mtp_extract.speculate.loop import SpeculativeGenerator

_NEW_TOKENS, _BATCH = 48, 16
_STEPS = 4  # drafts after each token: later ones start from the drafter's own state


def measure_ranges(directory: str | os.PathLike[str], base: str, *, reporter: Reporter) -> Ranges:
    """Draft after every token of the base's own text, and note what goes into every matrix and what comes out.

    Args:
        reporter: told after each batch of text, and after each text that was drafted along.

    Raises:
        MtpExtractError: the pair does not fit, or does not fit into memory.
    """
    reporter.say(f"loading the base {base}")
    loaded = load_base(base)
    drafter = load_drafter(Path(directory), dtype=loaded.drafter_dtype, device=loaded.device)
    pair = SpeculativeGenerator(loaded.model, drafter, loaded.tokenizer)
    ends_of_role: dict[str, list[Tensor]] = {
        r.name: [] for r in roles_of(drafter.config.num_layers) if r.kind == MATRIX
    }

    def note(role: str, module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ends_of_role[role].append(torch.stack((*inputs[0].aminmax(), *output.aminmax())))

    for role in ends_of_role:
        drafter.get_submodule(role).register_forward_hook(partial(note, role))
    with memory_guard("running the base"):
        written = write_texts(
            pair.base,
            pair.codec,
            shipped_prompts(FEW),
            new_tokens=_NEW_TOKENS,
            batch=_BATCH,
            chat_template=True,
            reporter=reporter,
        )
        reporter.say("drafting after every token of them")
        # One text at a time: what pads a shorter one would be measured, too.
        measure_agreements(pair.base, [(drafter, _STEPS, False)], written, batch=1, reporter=reporter)
    return {role: _ranges_of(torch.stack(ends)) for role, ends in ends_of_role.items()}


def _ranges_of(ends: Tensor) -> tuple[Range, Range]:
    """Of what goes in and of what comes out, by the ``ends`` of both in every call, [calls, 4]."""
    low_in, _, low_out, _ = ends.amin(0).tolist()
    _, high_in, _, high_out = ends.amax(0).tolist()
    return (low_in, high_in), (low_out, high_out)
