"""A drafter whose matrices are INT2, each block of a row with a scale of its own: no exporter at hand makes one."""

from __future__ import annotations

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from helpers.make_bundle import add_buffer, added, pack
from helpers.make_drafter import DrafterSpec, plain_model

_SPEC = DrafterSpec(hidden=128, ffn=128, heads=2, kv_heads=1, head_dim=64, backbone=128, windows=(4, None))


def blockwise_int2(block: int = 64, *, zeros: bool = False) -> bytes:
    """A model with every matrix in codes of 2 bits and FP16 scales for each ``block`` of a row.

    ``zeros``: some blocks have a scale of 0, as blocks that are all 0 may have.
    """
    model = plain_model(_SPEC)
    rng, main = np.random.default_rng(0), model.subgraphs[0]

    def constant(values: np.ndarray, name: bytes, shape: tuple[int, ...], kind: int) -> int:
        buffer = add_buffer(model, values.tobytes())
        return added(main.tensors, schema.TensorT(name=name, shape=list(shape), type=kind, buffer=buffer))

    for tensor in [t for t in main.tensors if t.quantization is not None]:
        rows, columns = tensor.shape
        codes = rng.integers(-2, 2, (rows, columns)).astype(np.int8)
        scales = rng.uniform(0.02, 0.5, (rows, columns // block)).astype(np.float16)
        if zeros:
            scales[::3, 0] = 0
        packed = (codes.reshape(-1, 4) & 3).astype(np.uint8)
        packed = packed[:, 0] | packed[:, 1] << 2 | packed[:, 2] << 4 | packed[:, 3] << 6
        model.buffers[tensor.buffer].data = packed.astype(np.uint8)
        tensor.type = schema.TensorType.INT2
        details = schema.BlockwiseQuantizationT(
            scales=constant(scales, tensor.name + b"_scales", scales.shape, schema.TensorType.FLOAT16),
            zeroPoints=-1,
            blockSize=block,
        )
        quantization = schema.QuantizationParametersT(
            details=details, detailsType=schema.QuantizationDetails.BlockwiseQuantization
        )
        tensor.quantization = quantization
    return pack(model)
