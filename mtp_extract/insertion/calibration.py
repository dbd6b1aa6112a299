"""Measure activations on our own prompts: the ranges of a drafter's as it drafts for its base, and the share of a
base's that static scales clip."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtp_extract.architecture.roles import GEMMA4, MATRIX, list_roles
from mtp_extract.drafter.load import load_drafter
from mtp_extract.evaluation.agreement import measure_agreements
from mtp_extract.evaluation.base_model import guard_memory, load_base
from mtp_extract.evaluation.base_texts import write_texts
from mtp_extract.evaluation.prompts import FEW_PER_WORKLOAD, load_shipped_prompts
from mtp_extract.insertion.activations import Activations, Range, Ranges, StaticActivations
from mtp_extract.progress import Reporter, report_each
from mtp_extract.speculate.codec import Codec
from mtp_extract.speculate.loop import SpeculativeGenerator

_NEW_TOKENS, _BATCH = 48, 16
_STEPS = 4  # drafts after each token: from the second on, the drafter reads its own state
_MOST_TOKENS = 512  # of a prompt
_ENDS = {"int8": (-128, 127), "int16": (-32768, 32767), "uint8": (0, 255)}


def measure_ranges(directory: str | os.PathLike[str], base: str, *, reporter: Reporter) -> Ranges:
    """Draft after every token of the base's own text; return the ranges of every matrix's input and output.

    Raises:
        MtpExtractError: drafter and base do not fit each other, or do not fit into memory.
    """
    reporter.say(f"loading the base {base}")
    loaded = load_base(base)
    drafter = load_drafter(Path(directory), dtype=loaded.drafter_dtype, device=loaded.device)
    pair = SpeculativeGenerator(loaded.model, drafter, loaded.tokenizer)
    roles = list_roles(drafter.config.num_layers)
    ends_of_role: dict[str, list[Tensor]] = {role.name: [] for role in roles if role.kind == MATRIX}

    def note(role: str, module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ends_of_role[role].append(torch.stack((*inputs[0].aminmax(), *output.aminmax())))

    for role in ends_of_role:
        drafter.get_submodule(role).register_forward_hook(partial(note, role))
    with guard_memory("running the base"):
        written = write_texts(
            pair.base,
            pair.codec,
            load_shipped_prompts(FEW_PER_WORKLOAD),
            new_tokens=_NEW_TOKENS,
            batch=_BATCH,
            chat_template=True,
            reporter=reporter,
        )
        reporter.say("drafting after every token of them")
        # One text at a time: padding would be measured, too.
        measure_agreements(pair.base, [(drafter, _STEPS, False)], written, batch=1, reporter=reporter)
    return {role: _combine_ranges(torch.stack(ends)) for role, ends in ends_of_role.items()}


def _combine_ranges(ends: Tensor) -> tuple[Range, Range]:
    """Return the ranges of input and output over all calls; ``ends``: their minima and maxima, [calls, 4]."""
    low_in, _, low_out, _ = ends.amin(0).tolist()
    _, high_in, _, high_out = ends.amax(0).tolist()
    return (low_in, high_in), (low_out, high_out)


def measure_cut_off(directory: str, grids: StaticActivations, *, reporter: Reporter) -> float:
    """Return the share of activations of the base in ``directory`` that the static scales of a bundle would clip.

    The base reads our own prompts in its own type, with no activation quantized.

    Raises:
        MtpExtractError: the base cannot be loaded, or does not fit into memory.
    """
    reporter.say(f"loading the base {directory}")
    loaded = load_base(directory)
    decoder = loaded.model.get_decoder()
    modules = dict(decoder.named_modules())
    counts = _ClippingCount()
    for role in list_roles(len(decoder.layers), architecture=GEMMA4):
        path = role.names["transformers"].removesuffix(".weight")
        if role.name in grids and path in modules:
            modules[path].register_forward_hook(partial(counts.add_call, grids[role.name]))
    codec = Codec(loaded.tokenizer, loaded.model.get_input_embeddings().num_embeddings)
    texts = [
        codec.encode(prompt.content, chat_template=True)[:_MOST_TOKENS]
        for prompt in load_shipped_prompts(FEW_PER_WORKLOAD)
    ]
    with guard_memory("running the base"), torch.inference_mode():
        for text in report_each(texts, reporter, "texts read"):
            loaded.model(input_ids=torch.tensor([text], device=loaded.device), use_cache=False)
    return counts.clipped / counts.numbers if counts.numbers else 0.0


class _ClippingCount:
    """Counts of activations, and of those that are clipped."""

    numbers = 0
    clipped = 0

    def add_call(self, activations: Activations, module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Count the numbers of one call; a forward hook of ``module`` with the ``activations`` of input and output."""
        for values, activation in zip((inputs[0], output), activations, strict=True):
            if activation is not None:
                low, high = (activation.scale * (end - activation.zero_point) for end in _ENDS[activation.type])
                half_step = activation.scale / 2
                self.clipped += int(((values < low - half_step) | (values > high + half_step)).sum())
                self.numbers += values.numel()
