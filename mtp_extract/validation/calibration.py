"""The ranges of a drafter's activations as it drafts for its base, over real prompts."""

from __future__ import annotations

import os
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtp_extract.architecture.roles import MATRIX, roles_of
from mtp_extract.evaluation.extras import require
from mtp_extract.evaluation.progress import Say, Show, silent
from mtp_extract.insertion.activations import Range, Ranges

if TYPE_CHECKING:
    from torch import Tensor

_BATCH = 16
_STEPS = 4  # drafts after each token: later ones start from the drafter's own state


def measure_ranges(
    directory: str | os.PathLike[str],
    base: str,
    prompts: str | os.PathLike[str] | None = None,
    *,
    new_tokens: int = 48,
    device: str = "auto",
    chat_template: bool = True,
    say: Say = silent,
    show: Show = silent,
) -> Ranges:
    """Draft after every token of the base's own text, and note what goes into every matrix and what comes out.

    Args:
        prompts: a file as validation takes; by default about 100 of those that are shipped.
        show: told after each batch of text, and after each text that was drafted along.

    Raises:
        MtpExtractError: a package is missing, the pair does not fit, or does not fit into memory.
    """
    require("torch", "transformers")
    from mtp_extract.drafter.load import load_drafter
    from mtp_extract.evaluation.agreement import Asked, measure_agreements, write_texts
    from mtp_extract.evaluation.base_model import load_base, memory_guard
    from mtp_extract.evaluation.prompts import prompts_or_shipped
    from mtp_extract.speculate.loop import SpeculativeGenerator

    chosen = prompts_or_shipped(Path(prompts) if prompts is not None else None)
    say(f"loading the base {base}")
    loaded = load_base(base, device)
    drafter = load_drafter(Path(directory), dtype=loaded.drafter_dtype, device=loaded.device)
    pair = SpeculativeGenerator(loaded.model, drafter, loaded.tokenizer)
    roles = [role.name for role in roles_of(drafter.config.num_layers) if role.kind == MATRIX]
    seen: dict[str, tuple[Range, Range]] = dict.fromkeys(roles, ((inf, -inf), (inf, -inf)))

    def note(role: str, module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        given, made = (
            (min(low, float(values.min())), max(high, float(values.max())))
            for (low, high), values in zip(seen[role], (inputs[0], output), strict=True)
        )
        seen[role] = given, made

    for role in roles:
        drafter.get_submodule(role).register_forward_hook(partial(note, role))
    sizes = {"new_tokens": new_tokens, "batch": _BATCH}
    with memory_guard("running the base"):
        written = write_texts(pair.base, pair.codec, chosen, **sizes, chat_template=chat_template, say=say, show=show)
        say("drafting after every token of them")
        # One text at a time: what pads a shorter one would be measured, too.
        measure_agreements(pair.base, [Asked(drafter, _STEPS)], written, batch=1, show=show)
    return seen
