"""What static grids of activations cut off: of the base that they were calibrated for, and of one in its place."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mtp_extract.architecture.activation import Activation
from mtp_extract.architecture.roles import GEMMA4, roles_of
from mtp_extract.evaluation.base_model import load_base, memory_guard
from mtp_extract.evaluation.prompts import FEW, shipped_prompts
from mtp_extract.insertion.activations import Grids
from mtp_extract.progress import Reporter, report_each
from mtp_extract.speculate.codec import Codec

_MOST_TOKENS = 512  # of a prompt
_ENDS = {"int8": (-128, 127), "int16": (-32768, 32767), "uint8": (0, 255)}


def measure_cut_off(directory: str, grids: Grids, *, reporter: Reporter) -> float:
    """The share of the numbers, of all that go into the matrices of the base in ``directory`` and come out, that lie
    beyond the grids which a bundle has for them. The base reads our own prompts, in its own type, without any grid.

    Raises:
        MtpExtractError: it cannot be loaded, or does not fit into memory.
    """
    reporter.say(f"loading the base {directory}")
    loaded = load_base(directory)
    counts = _Counts()
    # The model goes with this function, and its hooks with it.
    for role, module in _modules(loaded.model.get_decoder(), grids).items():
        module.register_forward_hook(partial(counts.add_call, *grids[role]))
    codec = Codec(loaded.tokenizer, loaded.model.get_input_embeddings().num_embeddings)
    texts = [codec.encode(prompt.content, chat_template=True)[:_MOST_TOKENS] for prompt in shipped_prompts(FEW)]
    with memory_guard("running the base"), torch.inference_mode():
        for text in report_each(texts, reporter, "texts read"):
            loaded.model(input_ids=torch.tensor([text], device=loaded.device), use_cache=False)
    return counts.beyond / counts.numbers if counts.numbers else 0.0


class _Counts:
    """Of numbers that go into modules and come out."""

    numbers = 0
    beyond = 0  # a grid

    def add_call(
        self,
        grid_in: Activation | None,
        grid_out: Activation | None,
        module: Any,
        inputs: tuple[Tensor, ...],
        output: Tensor,
    ) -> None:
        """Count a call of ``module``, as a hook of it."""
        for values, grid in ((inputs[0], grid_in), (output, grid_out)):
            if grid is not None:
                low, high = (grid.scale * (end - grid.zero_point) for end in _ENDS[grid.type])
                half = grid.scale / 2
                self.beyond += int(((values < low - half) | (values > high + half)).sum())
                self.numbers += values.numel()


def _modules(decoder: Any, grids: Mapping[str, object]) -> dict[str, Any]:
    """The module of each role that ``decoder``, a text model, has."""
    layers = len(decoder.layers)
    names = {
        role.name: role.names["transformers"] for role in roles_of(layers, architecture=GEMMA4) if role.name in grids
    }
    by_name = dict(decoder.named_modules())
    paths = {role: name.removesuffix(".weight") for role, name in names.items()}
    return {role: by_name[path] for role, path in paths.items() if path in by_name}
