"""A bundle built to the inventory of Google's base sections, its base, and both changed on purpose.

``data/twin_base``: embedder, per-layer embedder and decoder of eight layers, with what the published files have: an id
guard, a table a layer, INT8 caches, weights of 2, 4 and 8 bits with static grids and trained scales, an output guard;
and the base in the form of Google's public mobile checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter, OpResolverType
from safetensors.numpy import save_file
from seam import GEMMA4, list_roles, read_base
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

from helpers.bases import PREFIX, Weights, edited_bundle, in_dtype
from helpers.make_bundle import kind, load, on_model, parts_of, set_buffer
from helpers.subgraph import Subgraph

_DATA = Path(__file__).resolve().parent.parent / "data" / "twin_base"
TWIN, MOBILE = _DATA / "bundle.litertlm", _DATA / "mobile"
edited_twin = partial(edited_bundle, source=TWIN)


def floats() -> Weights:
    """The base's weights, float32, by transformers' name: what the codes of the mobile checkpoint stand for."""
    stored = dict(read_base(MOBILE).weights)
    del stored["lm_head"]  # In floats it is the embedding.
    names = {role.name: PREFIX + role.names["transformers"] for role in list_roles(8, architecture=GEMMA4)}
    return {names[role]: np.ascontiguousarray(weight.array()) for role, weight in stored.items()}


def twin_base(out: Path, change: Callable[[Weights], None] = lambda weights: None, dtype: str = "") -> Path:
    """The base in floats in a directory of its own, changed by ``change``, rounded to ``dtype`` (bf16)."""
    out.mkdir()
    config = json.loads((MOBILE / "config.json").read_text())
    del config["quantization_config"]
    config["tie_word_embeddings"] = True
    (out / "config.json").write_text(json.dumps(config))
    weights = floats()
    change(weights)
    save_file(in_dtype(weights, dtype), out / "model.safetensors")
    return out


def tuned(weights: Weights) -> None:
    """Every matrix moved by 2 %."""
    random = np.random.default_rng(5)
    for name, weight in weights.items():
        if weight.ndim == 2:
            noise = random.standard_normal(weight.shape)
            weights[name] = (weight + 0.02 * weight.std() * noise).astype(np.float32)


def logits_of_google(bundle: Path, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
    """What Google's interpreter computes of ``tokens``, one after the other: ``[tokens, vocabulary]``."""
    embed, embed_per_layer, decode = (_runner(bundle, kind) for kind in ("embedder", "per_layer_embedder", "decode"))
    forms = decode.get_input_details()
    caches = {name: np.zeros(form["shape"], form["dtype"]) for name, form in forms.items() if name.startswith("kv_")}
    logits = []
    for position, token in enumerate(tokens):
        token_ids = np.array([[token]], np.int32)
        ends = np.zeros(forms["param_tensor"]["shape"], np.int32)
        ends.reshape(-1)[:3] = position, position + 1, position + 1
        results = decode(
            embeddings=embed(token_ids=token_ids)["embeddings"],
            per_layer_embeddings=embed_per_layer(token_ids=token_ids)["embeddings"],
            input_pos=np.array([position], np.int32),
            mask=(np.arange(forms["mask"]["shape"][-1]) <= position)[None, None, None],
            param_tensor=ends,
            **caches,
        )
        caches = {name: results[name] for name in caches}
        logits.append(results["logits"][0, 0])
    return np.stack(logits)


def _runner(bundle: Path, name: str) -> Any:
    """The signature decode, or that of an embedder, computed in integers as it is stored."""
    kind = "prefill_decode" if name == "decode" else name
    data = next(part.data for part in parts_of(bundle) if part.items["model_type"] == f"tf_lite_{kind}")
    plain = OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    interpreter = Interpreter(model_content=bytes(data), num_threads=1, experimental_op_resolver_type=plain)
    first = next(iter(interpreter.get_signature_list()))
    return interpreter.get_signature_runner(name if name == "decode" else first)


def logits_of_transformers(weights: Weights, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
    """What transformers computes in float32 with ``weights``: ``[tokens, vocabulary]``."""
    text = json.loads((MOBILE / "config.json").read_text())["text_config"]
    model = Gemma4ForCausalLM(Gemma4TextConfig(**text)).eval()
    state = {f"model.{name.removeprefix(PREFIX)}": torch.from_numpy(weight) for name, weight in weights.items()}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    with torch.inference_mode():
        logits: npt.NDArray[np.float32] = model(torch.tensor([list(map(int, tokens))])).logits[0].numpy()
    return logits


def decoder_of(path: Path) -> Any:
    """The decoder of a bundle, as the schema's object tree."""
    return load(next(part.data for part in parts_of(path) if part.items["model_type"] == "tf_lite_prefill_decode"))


def numbers_of(model: Any, tensor: Any) -> npt.NDArray[np.float32]:
    """A constant in floats."""
    data = model.buffers[tensor.buffer].data
    if data is None or tensor.type != schema.TensorType.FLOAT32:
        return np.empty(0, np.float32)
    return np.frombuffer(bytes(data), np.float32)


def _tensors(model: Any) -> list[Any]:
    return [tensor for graph in model.subgraphs for tensor in graph.tensors]


@on_model
def scaled_matrix(model: Any, name: str, factor: float) -> None:
    """The scales of every matrix whose tensor is called ``name…`` times ``factor``."""
    for tensor in _tensors(model):
        if tensor.name.decode().startswith(name) and tensor.buffer and tensor.quantization is not None:
            tensor.quantization.scale = (tensor.quantization.scale * np.float32(factor)).astype(np.float32)


@on_model
def number(model: Any, old: float, new: float) -> None:
    """Wherever ``old`` multiplies a value it is ``new``."""
    for tensor in _tensors(model):
        values = numbers_of(model, tensor)
        if values.size == 1 and values[0] == np.float32(old):
            set_buffer(model, tensor, np.float32(new).tobytes())


@on_model
def multiplied(model: Any, op_kind: str, width: tuple[int, ...], factor: float) -> None:
    """Results of the operators ``op_kind`` whose last axes are ``width``, times ``factor``."""
    for index in range(len(model.subgraphs)):
        graph = Subgraph(model, index)
        for place, op in reversed([*enumerate(graph.main.operators)]):
            result = op.outputs[0]
            if kind(model, op) == op_kind and tuple(graph.shape(result)[-len(width) :]) == width:
                op.outputs = [graph.tensor(graph.shape(result))]
                graph.emit("MUL", [op.outputs[0], graph.constant(factor)], [result])
                graph.main.operators.insert(place + 1, graph.main.operators.pop())


def own_norms(model: Any) -> None:
    """Every signature gets its own copy of each constant in floats."""
    for tensor in _tensors(model):
        values = numbers_of(model, tensor)
        if values.size:
            set_buffer(model, tensor, values.tobytes())
