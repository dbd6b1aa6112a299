"""The checkpoint in transformers: it must load without a key too few or too many, and compute as the reference does."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from packaging.specifiers import SpecifierSet

from mtp_extract.architecture.config import FULL, SLIDING, DrafterConfig
from mtp_extract.bundle import Shard
from mtp_extract.drafter.mtp import MtpDrafter
from mtp_extract.errors import escape
from mtp_extract.evaluation.extras import TRANSFORMERS_RELEASES, quiet_transformers, why_unusable
from mtp_extract.formats import format_of
from mtp_extract.graph.drafter import ACTIVATIONS
from mtp_extract.graph.flat import INPUT_POS
from mtp_extract.pipeline.check import Check
from mtp_extract.validation.parity import (
    GraphInputs,
    Outputs,
    apart,
    examined,
    random_inputs,
    reference_outputs,
    visible_slots,
)

TOLERANCE = 1e-4
"""Of the range of an output: the same arithmetic in float32, in another order."""

_WHAT = "transformers loads it strictly, and computes what the reference does"
_SAMPLES = 4
_KEYS = ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")


def check_transformers(directory: Path, drafter: MtpDrafter, source: Shard) -> Check:
    """Load ``directory`` with transformers and compare it with ``drafter``, float32, on random inputs.

    The check is left open where transformers cannot be asked, where it calls a drafter wrong that is known to be right,
    and where it fails and is of no release that was tried.

    Args:
        source: the file's drafter, whose signature says what inputs there may be.
    """
    if format_of(directory).name != "transformers":
        return Check("transformers", _WHAT, None, "this is asked of the transformers format only")
    if why := why_unusable("transformers", "Gemma4AssistantForCausalLM"):
        return Check("transformers", _WHAT, None, f"transformers: {why}; {TRANSFORMERS_RELEASES} works")
    check = examined("transformers", _WHAT, _examine, directory, drafter, source)
    version = str(sys.modules["transformers"].__version__)
    if check.passed is False and not SpecifierSet(TRANSFORMERS_RELEASES).contains(version, prereleases=True):
        check = replace(check, passed=None, evidence=f"it is of no release that was tried: {check.evidence}")
    if check.passed is None:
        return replace(
            check, evidence=f"transformers {escape(version)}: {check.evidence}; {TRANSFORMERS_RELEASES} works"
        )
    return check


def _examine(directory: Path, drafter: MtpDrafter, source: Shard) -> tuple[bool, str]:
    """Whether it loads and computes as ``drafter`` does, and the evidence."""
    from transformers import AutoModelForCausalLM

    try:
        quiet_transformers()
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, local_files_only=True, trust_remote_code=False, output_loading_info=True
        )
        model, info = loaded
        if odd := {name.replace("_", " "): info[name] for name in _KEYS if info.get(name)}:
            return False, "; ".join(f"{name} {escape(', '.join(map(str, keys)))}" for name, keys in odd.items())
        theirs = [_outputs(model.eval(), source, drafter.config, inputs) for inputs in random_inputs(source, _SAMPLES)]
        ours = reference_outputs(drafter, source, random_inputs(source, _SAMPLES))
        worst = apart(ours, theirs).worst
    except Exception as error:  # noqa: BLE001 - what a damaged directory raises there has no class of its own
        return False, f"it does not load, or does not run: {escape(' '.join(str(error).split()))}"
    evidence = f"outputs within {worst:.1g} of their range for {_SAMPLES} inputs, {TOLERANCE:g} being allowed"
    return worst <= TOLERANCE, evidence


@torch.inference_mode()
def _outputs(model: Any, source: Shard, config: DrafterConfig, inputs: GraphInputs) -> Outputs:
    """What transformers computes of ``inputs``."""
    # The caches hold what the query may see, and no more: a sliding mask has nothing left to hide.
    kv = {
        kind: tuple(part[:, :, -(config.kv_layers[kind].sliding_window or part.shape[2]) :] for part in pair)
        for kind, pair in visible_slots(source, inputs).items()
    }
    only = next(iter(kv.values()))
    output = model(
        inputs_embeds=torch.from_numpy(inputs[ACTIVATIONS]),
        position_ids=torch.from_numpy(inputs[INPUT_POS])[None].long(),
        # It makes a mask of either kind, whether a layer has use for it or not.
        shared_kv_states={SLIDING: only, FULL: only, **kv},
    )
    logits = output.logits.float()
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    if cap is not None:  # transformers leaves the cap to whoever samples
        logits = torch.tanh(logits / cap) * cap
    return logits.numpy().reshape(-1), output.last_hidden_state.float().numpy().reshape(-1)
