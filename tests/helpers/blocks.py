"""A drafter whose matrices are INT2, each block of a row with a scale of its own: no exporter at hand makes one."""

from __future__ import annotations

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from helpers.make_bundle import pack
from helpers.make_drafter import DrafterSpec, plain_model
from helpers.surgery import Graph

_SPEC = DrafterSpec(hidden=128, ffn=128, heads=2, kv_heads=1, head_dim=64, backbone=128, windows=(4, None))


def blockwise_int2(block: int = 64, *, zeros: bool = False) -> bytes:
    """A model with every matrix in codes of 2 bits and FP16 scales for each ``block`` of a row.

    ``zeros``: some blocks have a scale of 0, as blocks that are all 0 may have.
    """
    graph, rng = Graph(plain_model(_SPEC), {}), np.random.default_rng(0)
    for tensor in [t for t in graph.main.tensors if t.quantization is not None]:
        rows, columns = tensor.shape
        codes = rng.integers(-2, 2, (rows, columns)).astype(np.int8)
        scales = rng.uniform(0.02, 0.5, (rows, columns // block)).astype(np.float16)
        if zeros:
            scales[::3, 0] = 0
        packed = (codes.reshape(-1, 4) & 3).astype(np.uint8)
        packed = packed[:, 0] | packed[:, 1] << 2 | packed[:, 2] << 4 | packed[:, 3] << 6
        graph.model.buffers[tensor.buffer].data = packed.astype(np.uint8)
        tensor.type = schema.TensorType.INT2
        stored = graph.constant(scales, np.float16)
        details = schema.BlockwiseQuantizationT(scales=stored, zeroPoints=-1, blockSize=block)
        kind = schema.QuantizationDetails.BlockwiseQuantization
        tensor.quantization = schema.QuantizationParametersT(details=details, detailsType=kind)
    return pack(graph.model)
