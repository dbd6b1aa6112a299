"""The checkpoint in transformers: it must load without a key too few or too many, and compute as the reference does.

A release that cannot construct an assistant says nothing of a checkpoint: what fails here refutes it only where the
release is one that was tried, and the same is well with a drafter that is known to be right.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import torch
from packaging.specifiers import SpecifierSet
from torch import Tensor

from mtp_extract.architecture.config import FULL, SLIDING
from mtp_extract.drafter.mtp import MtpDrafter
from mtp_extract.errors import escape
from mtp_extract.evaluate.extras import TRANSFORMERS, quiet_transformers, unusable
from mtp_extract.formats import format_of
from mtp_extract.pipeline.check import Check
from mtp_extract.validate.parity.control import known_good

TOLERANCE = 1e-4
"""Of the range of an output: the same arithmetic in float32, in another order."""

_WHAT = "transformers loads it strictly, and computes what the reference does"
_POSITIONS = (1, 7, 60, 700)
_KEYS = ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")


def check_transformers(directory: Path, drafter: MtpDrafter, seed: int) -> Check:
    """Load ``directory`` with transformers and hold it against ``drafter``, float32, on random inputs."""
    if format_of(directory).name != "transformers":
        return Check("transformers", _WHAT, None, "this is asked of the transformers format only")
    if why := unusable("transformers", "Gemma4AssistantForCausalLM"):
        return Check("transformers", _WHAT, None, f"transformers: {why}; {TRANSFORMERS} works")
    passed, evidence = _examined(directory, drafter, seed)
    if not passed and (why := _unreliable(seed)):
        return Check("transformers", _WHAT, None, f"{why}, so it cannot be asked; {TRANSFORMERS} works")
    return Check("transformers", _WHAT, passed, evidence)


def _unreliable(seed: int) -> str:
    """Why transformers is no judge here; empty where it is one."""
    version = str(sys.modules["transformers"].__version__)
    with known_good() as (directory, drafter, _):
        passed, evidence = _examined(directory, drafter, seed)
    if not passed:
        return f"transformers {escape(version)} fails with a drafter that is known to be right, too: {evidence}"
    if not SpecifierSet(TRANSFORMERS).contains(version, prereleases=True):
        return f"transformers {escape(version)} fails, and is of no release that was tried"
    return ""


def _examined(directory: Path, drafter: MtpDrafter, seed: int) -> tuple[bool, str]:
    """Whether it loads and computes as ``drafter`` does, and the evidence."""
    try:
        model, info = _load(directory)
    except Exception as error:  # noqa: BLE001 - what a damaged directory raises there has no class of its own
        return False, f"it does not load: {escape(' '.join(str(error).split()))}"
    odd = [f"{name.replace('_', ' ')} {escape(', '.join(map(str, info[name])))}" for name in _KEYS if info.get(name)]
    if odd:
        return False, "; ".join(odd)
    try:
        differences = _compare(model, drafter, seed)
    except Exception as error:  # noqa: BLE001 - so does what it raises when it runs
        return False, f"it does not run: {escape(' '.join(str(error).split()))}"
    name, worst = max(differences.items(), key=lambda item: item[1])
    evidence = f"{name} {worst:.1g} of its range apart at {len(_POSITIONS)} positions, {TOLERANCE:g} being allowed"
    return worst <= TOLERANCE, evidence


def _load(directory: Path) -> tuple[Any, dict[str, Any]]:
    from transformers import AutoModelForCausalLM

    with quiet_transformers():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, local_files_only=True, trust_remote_code=False, output_loading_info=True
        )
    model, info = loaded
    return model.eval(), info


@torch.inference_mode()
def _compare(model: Any, drafter: MtpDrafter, seed: int) -> dict[str, float]:
    """Largest difference of logits and state, as a share of the range."""
    config = drafter.config
    random = torch.Generator().manual_seed(seed)
    cap = config.final_logit_softcap
    loaded = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    found = {"the soft cap": 0.0 if loaded == cap else math.inf, "logits": 0.0, "state": 0.0}
    for position in _POSITIONS:
        inputs = torch.randn(1, 1, 2 * config.backbone_hidden_size, generator=random)
        places = torch.tensor([[position]])
        kv = {}
        for kind, layer in config.kv_layers.items():
            # The caches hold what a query may see, and no more: a sliding mask has nothing left to hide.
            slots = min(position + 1, layer.sliding_window or position + 1)
            shape = (1, layer.num_kv_heads, slots, layer.head_dim)
            kv[kind] = (
                torch.randn(shape, generator=random) / layer.head_dim**0.5,
                torch.randn(shape, generator=random),
            )
        only = next(iter(kv.values()))
        expected = drafter(inputs, kv, places)
        # It makes a mask of either kind, whether a layer has use for it or not.
        output = model(inputs_embeds=inputs, position_ids=places, shared_kv_states={SLIDING: only, FULL: only, **kv})
        logits = output.logits.float()
        if cap is not None:
            # transformers leaves the cap to whoever samples.
            logits = torch.tanh(logits / cap) * cap
        found["logits"] = max(found["logits"], _distance(expected.logits, logits))
        found["state"] = max(found["state"], _distance(expected.projected, output.last_hidden_state))
    return found


def _distance(expected: Tensor, found: Tensor) -> float:
    """Infinite where either is not finite."""
    distance = float((expected - found).abs().max() / (expected.max() - expected.min()))
    return math.inf if math.isnan(distance) else distance
