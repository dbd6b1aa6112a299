"""Packs the sections into a ``.litertlm`` file with litert-lm-builder."""

# The tools below carry no type hints, and are not installed where the types are checked.
# mypy: disable-error-code="import-not-found, import-untyped, misc, no-untyped-call"

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from litert_lm_builder import litertlm_builder
from litert_lm_builder.runtime.proto import executor_metadata_pb2, llm_metadata_pb2

from . import corpus

_TYPES = litertlm_builder.TfLiteModelType
MODEL_TYPES = {
    "embedder": _TYPES.EMBEDDER,
    "per_layer_embedder": _TYPES.PER_LAYER_EMBEDDER,
    "prefill_decode": _TYPES.PREFILL_DECODE,
    "mtp_drafter": _TYPES.MTP_DRAFTER,
}


def llm_metadata(cache_length: int) -> llm_metadata_pb2.LlmMetadata:
    """Start, stop and padding tokens, context length, chat template, and Gemma 4 as the model type."""
    metadata = llm_metadata_pb2.LlmMetadata()
    metadata.start_token.token_str = corpus.SPECIAL_TOKENS[corpus.BOS]
    metadata.pad_token.token_str = corpus.SPECIAL_TOKENS[corpus.PAD]
    for token in (corpus.EOS, corpus.TURN_END):
        metadata.stop_tokens.add().token_ids.ids.append(token)
    metadata.max_num_tokens = cache_length
    metadata.jinja_prompt_template = corpus.CHAT_TEMPLATE
    metadata.llm_model_type.gemma4.SetInParent()
    return metadata


def executor_metadata(caches: Sequence[str], cache_length: int) -> executor_metadata_pb2.ExecutorMetadata:
    """Names the caches that the runtime carries from call to call."""
    metadata = executor_metadata_pb2.ExecutorMetadata()
    executor = metadata.llm_executor_metadata
    executor.max_history_size = cache_length
    for name in caches:
        state = executor.state_buffers.add()
        state.prefill_input_name = state.prefill_output_name = name
        state.decode_input_name = state.decode_output_name = name
        is_key = name.startswith("kv_cache_k_")
        kind = "TYPE_GLOBAL_KEY_CACHE" if is_key else "TYPE_GLOBAL_VALUE_CACHE"
        state.type = getattr(type(state), kind)
        state.sequence_axis = 2 if is_key else 3
        state.maximum_sequence_length = cache_length
    return metadata


def pack(
    target: Path,
    work: Path,
    sections: Mapping[str, Path],
    tokenizer_json: Path,
    caches: Sequence[str],
    cache_length: int,
) -> None:
    """Writes ``target`` from TFLite ``sections`` by model type; the drafter is bound to the CPU."""
    llm, executor = work / "llm_metadata.pb", work / "executor_metadata.pb"
    llm.write_bytes(llm_metadata(cache_length).SerializeToString())
    executor.write_bytes(executor_metadata(caches, cache_length).SerializeToString())
    builder = litertlm_builder.LitertLmFileBuilder()
    builder.add_system_metadata(
        litertlm_builder.Metadata("Authors", "mtp-extract sample", litertlm_builder.DType.STRING)
    )
    builder.add_llm_metadata(str(llm))
    builder.add_executor_metadata(str(executor))
    builder.add_hf_tokenizer(str(tokenizer_json))
    for kind, path in sections.items():
        constraint = "cpu" if kind == "mtp_drafter" else None
        builder.add_tflite_model(str(path), MODEL_TYPES[kind], backend_constraint=constraint)
    with target.open("wb") as stream:
        builder.build(stream)
