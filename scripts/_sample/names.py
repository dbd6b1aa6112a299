"""The names of Google's published drafters, put on a drafter that litert-torch exported.

litert-torch names a tensor after the module that made it, jax2tf, which made the published files, after the function.
What the weights are called there is known (constants, and results of the operators that read them); of the rest of the
graph it is not, and keeps the exporter's names. The layer scalars are anonymous in both.
"""

# The tools below carry no type hints, and are not installed where the types are checked.
# mypy: disable-error-code="import-not-found, import-untyped, misc, no-untyped-call"

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ai_edge_litert.tools import flatbuffer_utils

from . import quantize
from .quantize import Array

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


@dataclass(frozen=True)
class Published:
    """What a weight's constant is called, and the result of the operator that reads it."""

    constant: str
    result: str


def published(name: str) -> Published | None:
    """Names of the weight that transformers calls ``name``; None where it has none, as the layer scalars."""
    inside = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    layer, part = (int(inside[1]), inside[2]) if inside else (0, name)
    if part in _MATRICES:
        constant = _MATRICES[part]
        result = f"{constant}1"
    elif part in _NORMS:
        argument, composite = _NORMS[part]
        constant = f"jax2tf_arg_{argument + _ARGUMENTS_PER_LAYER * layer}/ReadVariableOp;StatefulPartitionedCall"
        result = f"{composite}/composite"
    else:
        return None
    return Published(constant.replace("{i}", str(layer)), result.replace("{i}", str(layer)))


def publish(path: Path, weights: Mapping[str, Array], softcap: float | None) -> None:
    """Renames the tensors of the float model at ``path``, in place.

    Args:
        path: what litert-torch wrote.
        weights: the drafter's, by transformers name. Constants are told by their values, no name is trusted.
        softcap: the soft cap that may be folded into the LM head.

    Raises:
        ValueError: a weight is not a constant of the graph, or two are.
    """
    constants = quantize.float_constants(path)
    names = {
        quantize.find(name, weight, constants, softcap)[0].encode(): known
        for name, weight in weights.items()
        if (known := published(name)) is not None
    }
    model = flatbuffer_utils.read_model(str(path))
    graph = model.subgraphs[0]
    results = {}
    for index, tensor in enumerate(graph.tensors):
        if (known := names.get(tensor.name)) is not None:
            tensor.name, results[index] = known.constant.encode(), known.result
    for operator in graph.operators:
        for operand in set(operator.inputs) & results.keys():
            graph.tensors[operator.outputs[0]].name = results[operand].encode()
    flatbuffer_utils.write_model(model, str(path))
