"""vLLM's own loader with a drafter, on CPU: ``python load_vllm.py BASE DRAFTER``; or ``… HEAD ASKED.npz ANSWERED.npz``.

Prints one line of JSON. Nothing is generated: vLLM's kernels want its own build for the machine. What is run is what
it does before: the engine's arguments to a speculative configuration, the drafter's module, and every tensor of the
directory into its parameters. The wheel's Python is enough for that, without its own torch and what belongs to a GPU::

    pip install --no-deps vllm==0.33.0 transformers==5.20.0 compressed-tensors==0.17.0 apache-tvm-ffi==0.1.11
    pip install torch==2.13.0 ...       # and what its imports ask for: no torchvision, no nvidia-*

Where vLLM is installed whole, the same is run. The base is named a text model, as torchvision would see for it.

An EAGLE-3 head, whose module is Python throughout but for attention's kernel, is asked too: its logits, and what it
feeds back, for the tokens and states of the one file go to the other. In the place of the kernel is PyTorch's.
"""

# Not installed where the types are checked.
# mypy: disable-error-code="import-not-found, misc"

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any

os.environ["VLLM_TARGET_DEVICE"] = "cpu"

import numpy as np
import torch
import vllm
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear import MPLinearKernel
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype

DRAFTS = 4
_EMBEDDING = "model.embed_tokens.weight"


class NotRun(MPLinearKernel):
    """Stands for the GPU's kernel of packed integers: on CPU vLLM has none for 8 bits, and would refuse to load."""

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        raise NotImplementedError

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        raise NotImplementedError


def check(base: str, directory: str, asked: str | None = None, answered: str | None = None) -> dict[str, Any]:
    """Load ``directory`` as the drafter of ``base``, a head if it is ``asked`` something."""
    linear._POSSIBLE_KERNELS[current_platform._enum].append(NotRun)
    method = "mtp" if asked is None else "eagle3"
    arguments = EngineArgs(
        model=base,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        speculative_config={"method": method, "model": directory, "num_speculative_tokens": DRAFTS},
        hf_overrides={"architectures": ["Gemma4ForCausalLM"]},
        # In Python, not in what is compiled for a device.
        compilation_config={"custom_ops": ["none"]},
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
        # Scales of a quantized cache belong to vLLM, which knows their defaults.
        parameters = {name: made for name, made in model.named_parameters() if ".attn." not in name}
        for parameter in parameters.values():
            parameter.data.fill_(_mark(parameter))
        # vLLM's own complaint covers whole parameters, and only where there are no integers.
        loader.load_weights(model, wanted)
        unfilled = {name for name, parameter in parameters.items() if (parameter == _mark(parameter)).any()}
        if not wanted.hf_config.tie_word_embeddings:
            # With a head of its own this is not used: the proposer puts the base's there.
            del parameters[_EMBEDDING]
            unfilled.discard(_EMBEDDING)
        if unfilled:
            raise ValueError(f"not filled from the directory: {', '.join(sorted(unfilled))}")
        if asked is not None and answered is not None:
            process_weights_after_loading(model, wanted, torch.device("cpu"))
            np.savez(answered, **_answer(model, config, np.load(asked)))
    return {"version": vllm.__version__, "note": f"{type(model).__name__}, {len(parameters)} parameters filled"}


@torch.inference_mode()
def _answer(model: Any, config: Any, asked: Any) -> dict[str, Any]:
    Attention.forward = _attend
    table, tokens, states = (torch.from_numpy(asked[name]) for name in ("table", "tokens", "states"))
    model.model.embed_tokens.weight.data.copy_(table)
    with set_forward_context(None, config):
        normed, fed_back = model(tokens, torch.arange(len(tokens)), model.combine_hidden_states(states))
        return {"logits": model.compute_logits(normed).numpy(), "fed_back": fed_back.numpy()}


def _attend(layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    q, k, v = (part.view(len(query), -1, layer.head_size).transpose(0, 1)[None] for part in (query, key, value))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    mixed = sdpa(q, k, v, is_causal=True, scale=layer.impl.scale, enable_gqa=True)
    return mixed[0].transpose(0, 1).reshape(len(query), -1)


def _mark(parameter: torch.Tensor) -> float:
    """A number that no weight, scale or packed word is."""
    return torch.finfo(parameter.dtype).max if parameter.is_floating_point() else 0x5A5A5A5A


if __name__ == "__main__":
    print(json.dumps(check(*sys.argv[1:])))
