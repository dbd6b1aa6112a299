"""An EAGLE-3 head in vLLM's own loader, on a CPU: ``python load_vllm.py BASE HEAD ASKED.npz ANSWERED.npz``.

Prints one line of JSON. What is run: the engine's arguments to a speculative configuration, the head's module, every
tensor of the directory into its parameters, and the module's Python but for attention's kernel, in whose place is
PyTorch's. Its logits and what it feeds back, for the tokens and states of the one file, go to the other. Whole drafters
are run by ``run_vllm.py``.
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

DRAFTS = 4
_EMBEDDING = "model.embed_tokens.weight"


def check(base: str, directory: str, asked: str, answered: str) -> dict[str, Any]:
    """Load ``directory`` as a head of ``base``, and ask it."""
    arguments = EngineArgs(
        model=base,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        speculative_config={"method": "eagle3", "model": directory, "num_speculative_tokens": DRAFTS},
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
        # vLLM's own complaint covers whole parameters.
        loader.load_weights(model, wanted)
        unfilled = {name for name, parameter in parameters.items() if (parameter == _mark(parameter)).any()}
        if not wanted.hf_config.tie_word_embeddings:
            # With a head of its own this is not used: the proposer puts the base's there.
            del parameters[_EMBEDDING]
            unfilled.discard(_EMBEDDING)
        if unfilled:
            raise ValueError(f"not filled from the directory: {', '.join(sorted(unfilled))}")
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
    """A number that no weight is."""
    return torch.finfo(parameter.dtype).max


if __name__ == "__main__":
    print(json.dumps(check(*sys.argv[1:])))
