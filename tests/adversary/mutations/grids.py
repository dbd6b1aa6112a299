"""Casts, roundings and integer grids."""

from __future__ import annotations

import numpy as np
from helpers.surgery import Graph

from adversary.edits import Change, Edit, edge, grid, parameters, quantized, through, unary


def rescaled(scale: float, back: float) -> Edit:
    """QUANTIZE to INT8 with ``scale``; a RESHAPE hands the codes on as if their scale were ``back``; DEQUANTIZE."""

    def edit(g: Graph, x: int) -> int:
        codes = quantized(g, x, scale)
        shifted = g.call("RESHAPE", codes, np.array(g.shape(x), np.int32), shape=g.shape(x))
        g.main.tensors[shifted].quantization = parameters(back)
        return g.call("DEQUANTIZE", shifted, dtype=np.float32)

    return edit


GRIDS: dict[str, Change] = {
    **{
        f"{place}_{name}": edge(place, edit)
        for place, edits in {
            "activations": {"int32": through(np.int32), "floor": unary("FLOOR"), "quarters": grid(0.25)},
            "pre_projection": {"int32": through(np.int32), "int8": through(np.int8), "round": unary("ROUND")},
            "0.query": {"round": unary("ROUND"), "ceil": unary("CEIL"), "int16": through(np.int16)},
            # Elsewhere half precision is the runtime's rounding, as that of INT8 activations is, and not a change.
            "0.angle": {"fp16": through(np.float16)},
            "0.query_normed": {"quarters": grid(0.25), "sign": unary("SIGN")},
            "0.scores": {"int32": through(np.int32), "halves": grid(0.5)},
            "0.probabilities": {"round": unary("ROUND")},
            "0.attended": {"quarters": grid(0.25)},
            "0.attention_branch": {"int32": through(np.int32), "eighths": grid(0.125)},
            "0.ffw_in": {"int32": through(np.int32)},
            "0.product": {"floor": unary("FLOOR"), "halves": grid(0.5), "uint8": through(np.uint8)},
            "0.down": {"round": unary("ROUND"), "int64": through(np.int64)},
            "1.stream": {"bool": through(np.bool_), "quarters": grid(0.25)},
            "state": {"int8": through(np.int8), "halves": grid(0.5)},
            "lm_head": {"int32": through(np.int32)},
            "logits": {"int32": through(np.int32), "halves": grid(0.5)},
            "projected_activations": {"round": unary("ROUND")},
        }.items()
        for name, edit in edits.items()
    },
    "stream_quantized_with_two_scales": edge("1.stream", rescaled(0.05, 0.1)),
    "projected_quantized_with_two_scales": edge("projected_activations", rescaled(0.05, 0.04)),
    "query_quantized_with_two_scales": edge("0.query", rescaled(0.1, 0.15)),
}
