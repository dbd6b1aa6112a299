"""From float sections to a ``.litertlm``: Google's names, integers in place of floats, and the container.

litert-torch names a tensor after the module that made it, jax2tf, which made the published files, after the function.
What the weights are called there is known (constants, and results of the operators that read them); of the rest of the
graph it is not, and keeps the exporter's names. The layer scalars are anonymous in both.
"""

# The tools below carry no type hints, and are not installed where the types are checked.
# mypy: disable-error-code="import-not-found, import-untyped, misc, no-untyped-call"

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ai_edge_litert.tools import flatbuffer_utils
from ai_edge_quantizer import qtyping, quantizer
from litert_lm_builder import litertlm_builder
from litert_lm_builder.runtime.proto import executor_metadata_pb2, llm_metadata_pb2

from . import corpus
from .export import CACHE, Inputs

_QUERY = "layer_{i}/layer_{i}.pre_q/attn.pre_q/attn._pre_attention_query_fn"
_REST = "layer_{i}/layer_{i}.post_qkv"
_DECODE = "MtpDrafterModel.decode_softmax/transformer.decode_softmax/embedder.decode"
_ARGUMENTS_PER_LAYER = 11
_MATRICES: Mapping[str, str] = {
    "pre_projection.weight": "MtpDrafterModel.mtp_pre_project/mtp_pre_proj/btm,md->btd/dot_general",
    "self_attn.q_proj.weight": f"{_QUERY}/q_einsum/reshape;{_QUERY}/q_einsum/btd,dH->btH/dot_general",
    "self_attn.o_proj.weight": f"{_REST}/attn.post_qkv/attn_vec_einsum/btH,Hd->btd/dot_general",
    "mlp.gate_proj.weight": f"{_REST}/mlp/gating_einsum1/btd,df->btf/dot_general",
    "mlp.up_proj.weight": f"{_REST}/mlp/gating_einsum2/btd,df->btf/dot_general",
    "mlp.down_proj.weight": f"{_REST}/mlp/linear/btf,fd->btd/dot_general",
    "lm_head.weight": f"{_DECODE}/composite",
    "post_projection.weight": "MtpDrafterModel.mtp_post_project/mtp_post_proj/btd,dm->btm/dot_general",
}
"""What constants are called; the result has a 1 behind the same."""
_NORMS: Mapping[str, tuple[int, str]] = {
    "model.norm.weight": (0, "mtp_final_norm"),
    "self_attn.q_norm.weight": (6, f"{_QUERY}/query_norm"),
    "post_attention_layernorm.weight": (10, f"{_REST}/post_attention_norm"),
    "post_feedforward_layernorm.weight": (11, f"{_REST}/post_ffw_norm"),
    "input_layernorm.weight": (12, "layer_{i}/layer_{i}.pre_q/pre_attention_norm"),
    "pre_feedforward_layernorm.weight": (13, f"{_REST}/pre_ffw_norm"),
}
"""The function's argument that holds it, in the first layer, and what its composite is called."""

_MATRIX_PRODUCT = qtyping.TFLOperationName.FULLY_CONNECTED
DRAFTER_RULES = ((".*", _MATRIX_PRODUCT, 8), ("/mlp/|embedder.decode", _MATRIX_PRODUCT, 4))
"""Operators by the name of their result, under published names; their type; and bits. Later rules win."""
BASE_RULES = ((".*", _MATRIX_PRODUCT, 8), (".*", qtyping.TFLOperationName.EMBEDDING_LOOKUP, 8))

_TYPES = litertlm_builder.TfLiteModelType
_MODEL_TYPES = {
    "embedder": _TYPES.EMBEDDER,
    "per_layer_embedder": _TYPES.PER_LAYER_EMBEDDER,
    "prefill_decode": _TYPES.PREFILL_DECODE,
    "mtp_drafter": _TYPES.MTP_DRAFTER,
}


def name_published(name: str) -> tuple[str, str] | None:
    """What the constant of the weight that transformers calls ``name`` is called, and the result of the operator that
    reads it; None where it has no name, as the layer scalars.
    """
    inside = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    layer, part = (int(inside[1]), inside[2]) if inside else (0, name)
    if part in _MATRICES:
        constant, result = _MATRICES[part], f"{_MATRICES[part]}1"
    elif part in _NORMS:
        argument, composite = _NORMS[part]
        constant = f"jax2tf_arg_{argument + _ARGUMENTS_PER_LAYER * layer}/ReadVariableOp;StatefulPartitionedCall"
        result = f"{composite}/composite"
    else:
        return None
    return constant.replace("{i}", str(layer)), result.replace("{i}", str(layer))


def publish(path: Path, weights: Inputs) -> None:
    """Renames the tensors of the float drafter at ``path``, in place.

    Constants are told by their values, no name of the exporter is trusted.

    Raises:
        ValueError: a weight is not a constant of the graph, or several are.
    """
    model = flatbuffer_utils.read_model(str(path))
    graph = model.subgraphs[0]
    constants = {}
    for index, tensor in enumerate(graph.tensors):
        data = model.buffers[tensor.buffer].data if tensor.buffer else None
        if data is not None and tensor.type == qtyping.TensorType.FLOAT32 and len(tensor.shape) in (1, 2):
            constants[index] = np.frombuffer(bytes(data), np.float32).reshape(tensor.shape)
    results = {}
    for name, weight in weights.items():
        if (known := name_published(name)) is None:
            continue
        indices = [index for index, value in constants.items() if np.array_equal(value, weight)]
        if len(indices) != 1:
            raise ValueError(f"{name}: expected one constant of the float model to hold it, found {len(indices)}")
        graph.tensors[indices[0]].name, results[indices[0]] = known[0].encode(), known[1]
    for operator in graph.operators:
        for operand in set(operator.inputs) & results.keys():
            graph.tensors[operator.outputs[0]].name = results[operand].encode()
    flatbuffer_utils.write_model(model, str(path))


def quantize(source: Path, target: Path, rules: Sequence[tuple[str, Any, int]]) -> None:
    """Quantizes the float model ``source`` into ``target``: symmetric integers, a scale a row."""
    worker = quantizer.Quantizer(str(source))
    for regex, operation, bits in rules:
        weights = qtyping.TensorQuantizationConfig(
            num_bits=bits,
            symmetric=True,
            granularity=qtyping.QuantGranularity.CHANNELWISE,
            dtype=qtyping.TensorDataType.INT,
        )
        config = qtyping.OpQuantizationConfig(
            weight_tensor_config=weights, compute_precision=qtyping.ComputePrecision.INTEGER, explicit_dequantize=False
        )
        worker.update_quantization_recipe(regex, operation, config, "min_max_uniform_quantize")
    target.write_bytes(bytes(worker.quantize(enable_progress_report=False).quantized_model))


def pack(target: Path, work: Path, sections: Mapping[str, Path], tokenizer_json: Path, caches: Sequence[str]) -> None:
    """Writes ``target`` from TFLite ``sections`` by model type; the drafter is bound to the CPU.

    Args:
        caches: names of the caches that the runtime carries from call to call.
    """
    llm = llm_metadata_pb2.LlmMetadata()
    llm.start_token.token_str = corpus.SPECIAL_TOKENS[corpus.BOS]
    llm.pad_token.token_str = corpus.SPECIAL_TOKENS[corpus.PAD]
    for token in (corpus.EOS, corpus.TURN_END):
        llm.stop_tokens.add().token_ids.ids.append(token)
    llm.max_num_tokens = CACHE
    llm.jinja_prompt_template = corpus.CHAT_TEMPLATE
    llm.llm_model_type.gemma4.SetInParent()
    metadata = executor_metadata_pb2.ExecutorMetadata()
    executor = metadata.llm_executor_metadata
    executor.max_history_size = CACHE
    for name in caches:
        state = executor.state_buffers.add()
        state.prefill_input_name = state.prefill_output_name = name
        state.decode_input_name = state.decode_output_name = name
        is_key = name.startswith("kv_cache_k_")
        state.type = getattr(type(state), f"TYPE_GLOBAL_{'KEY' if is_key else 'VALUE'}_CACHE")
        state.sequence_axis, state.maximum_sequence_length = (2 if is_key else 3), CACHE
    for name, message in (("llm_metadata.pb", llm), ("executor_metadata.pb", metadata)):
        (work / name).write_bytes(message.SerializeToString())
    builder = litertlm_builder.LitertLmFileBuilder()
    builder.add_system_metadata(
        litertlm_builder.Metadata("Authors", "mtp-extract sample", litertlm_builder.DType.STRING)
    )
    builder.add_llm_metadata(str(work / "llm_metadata.pb"))
    builder.add_executor_metadata(str(work / "executor_metadata.pb"))
    builder.add_hf_tokenizer(str(tokenizer_json))
    for kind, path in sections.items():
        constraint = "cpu" if kind == "mtp_drafter" else None
        builder.add_tflite_model(str(path), _MODEL_TYPES[kind], backend_constraint=constraint)
    with target.open("wb") as stream:
        builder.build(stream)
