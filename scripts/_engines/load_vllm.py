"""vLLM's own loader with a drafter, on CPU: ``python load_vllm.py BASE DRAFTER``.

Prints one line of JSON. Nothing is generated: vLLM's kernels want its own build for the machine. What is run is what
it does before: the engine's arguments to a speculative configuration, the drafter's module, and every tensor of the
directory into its parameters. The wheel's Python is enough for that, without its own torch and what belongs to a GPU::

    pip install --no-deps vllm==0.33.0 transformers==5.20.0 compressed-tensors==0.17.0 apache-tvm-ffi==0.1.11
    pip install torch==2.13.0 ...       # and what its imports ask for: no torchvision, no nvidia-*

Where vLLM is installed whole, the same is run. The base is named a text model, as torchvision would see for it.
"""

# Not installed where the types are checked.
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any

os.environ["VLLM_TARGET_DEVICE"] = "cpu"

import torch
import vllm
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader
from vllm.utils.torch_utils import set_default_torch_dtype

DRAFTS = 4


def check(base: str, directory: str) -> dict[str, Any]:
    """Load ``directory`` as the drafter of ``base``."""
    speculative = {"method": "mtp", "model": directory, "num_speculative_tokens": DRAFTS}
    arguments = EngineArgs(
        model=base,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        speculative_config=speculative,
        hf_overrides={"architectures": ["Gemma4ForCausalLM"]},
        model_loader_extra_config={"enable_weights_track": True},
    )
    config = arguments.create_engine_config()
    wanted = config.speculative_config.draft_model_config
    loader = get_model_loader(config.load_config)
    with (
        tempfile.NamedTemporaryFile() as meeting,
        set_current_vllm_config(config),
        set_default_torch_dtype(wanted.dtype),
    ):
        init_distributed_environment(1, 0, f"file://{meeting.name}", 0, "gloo")
        initialize_model_parallel(1, 1)
        model = loader.create_model(vllm_config=config, model_config=wanted)
        parameters = dict(model.named_parameters())
        for parameter in parameters.values():
            parameter.data.fill_(_mark(parameter))
        # vLLM's own complaint covers whole parameters; ours the parts of one that is put together from several.
        loader.load_weights(model, wanted)
    unfilled = [name for name, parameter in parameters.items() if (parameter == _mark(parameter)).any()]
    if unfilled:
        raise ValueError(f"not filled from the directory: {', '.join(unfilled)}")
    return {"version": vllm.__version__, "note": f"{type(model).__name__}, {len(parameters)} parameters filled"}


def _mark(parameter: torch.Tensor) -> float:
    """A number that no weight, scale or packed word is."""
    return torch.finfo(parameter.dtype).max if parameter.is_floating_point() else 0x5A5A5A5A


if __name__ == "__main__":
    print(json.dumps(check(sys.argv[1], sys.argv[2])))
