"""An EAGLE-3 head in vLLM's own loader, on a CPU: ``python load_vllm.py BASE HEAD ASKED.npz ANSWERED.npz``.

Prints one line of JSON. What is run: the engine's arguments to a speculative configuration, the head's module, every
tensor of the directory into its parameters, and the module's Python but for attention's kernel, in whose place is
PyTorch's. ASKED holds the base's embeddings ``table`` ``[vocabulary, hidden]``, ``tokens`` ``[T]`` and the ``states``
``[T, 3 · hidden]`` of its layers; ANSWERED is given the ``logits`` and what is ``fed_back``. Whole drafters are run by
``run_vllm.py``, which says how vLLM is installed.
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
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype


def check(base: str, directory: str, asked: str, answered: str) -> dict[str, Any]:
    """Load ``directory`` as a head of ``base``, and ask it.

    Raises:
        ValueError: the directory leaves a part of a parameter unfilled; vLLM's own complaint is of whole ones.
    """
    config = EngineArgs(
        model=base,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        speculative_config={"method": "eagle3", "model": directory, "num_speculative_tokens": 4},
        hf_overrides={"architectures": ["Gemma4ForCausalLM"]},
        # In Python, not in what is compiled for a device.
        compilation_config={"custom_ops": ["none"]},
    ).create_engine_config()
    wanted, loader = config.speculative_config.draft_model_config, get_model_loader(config.load_config)
    with tempfile.NamedTemporaryFile() as met, set_current_vllm_config(config), set_default_torch_dtype(wanted.dtype):
        init_distributed_environment(1, 0, f"file://{met.name}", 0, "gloo")
        initialize_model_parallel(1, 1)
        model = loader.create_model(vllm_config=config, model_config=wanted)
        # Scales of a quantized cache belong to vLLM, which knows their defaults.
        parameters = {name: weight for name, weight in model.named_parameters() if ".attn." not in name}
        # A number that no weight is.
        marks = {name: torch.finfo(weight.dtype).max for name, weight in parameters.items()}
        for name, parameter in parameters.items():
            parameter.data.fill_(marks[name])
        loader.load_weights(model, wanted)
        if not wanted.hf_config.tie_word_embeddings:
            # With a head of its own this is not used: the proposer puts the base's there.
            del parameters["model.embed_tokens.weight"]
        unfilled = sorted(name for name, parameter in parameters.items() if (parameter == marks[name]).any())
        if unfilled:
            raise ValueError(f"not filled from the directory: {', '.join(unfilled)}")
        process_weights_after_loading(model, wanted, torch.device("cpu"))
        np.savez(answered, **_ask(model, config, np.load(asked)))
    return {"version": vllm.__version__, "note": f"{type(model).__name__}, {len(parameters)} parameters filled"}


@torch.inference_mode()
def _ask(model: Any, config: Any, asked: Any) -> dict[str, Any]:
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


if __name__ == "__main__":
    print(json.dumps(check(*sys.argv[1:])))
