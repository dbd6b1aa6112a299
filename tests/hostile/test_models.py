"""TFLite models that lie: shapes, types, buffers, scales, names, wiring."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema
from helpers.make_bundle import DRAFTER, Memory, Part, added, bundle, code_of, kind, on_model, pack, set_buffer
from helpers.make_drafter import DrafterSpec, plain_model
from helpers.surgery import Graph
from seam import (
    FormatError,
    MtpExtractError,
    NoDrafterError,
    ProofError,
    RoleError,
    TruncatedError,
    UnsupportedError,
    build_checkpoint,
    inspect,
    open_bundle,
    read,
)

from mtp_extract import extract

INT8, INT4, FLOAT32 = schema.TensorType.INT8, schema.TensorType.INT4, schema.TensorType.FLOAT32


def op_of(model: Any, name: str, which: int = 0) -> Any:
    """The ``which``-th op of the builtin ``name`` in the main subgraph."""
    return [op for op in model.subgraphs[0].operators if kind(model, op) == name][which]


def linear(model: Any, which: int = 0) -> Any:
    """The ``which``-th FULLY_CONNECTED op: 0 pre projection, 1 q, 2 o, 3 gate, 4 up, 5 down."""
    return op_of(model, "FULLY_CONNECTED", which)


def gate(model: Any) -> Any:
    """Gate's tensor."""
    return model.subgraphs[0].tensors[linear(model, 3).inputs[1]]


def refuse(data: bytes, tmp_path: Path, error: type[MtpExtractError], match: str) -> None:
    """Extraction of ``data`` ends in ``error``, and leaves nothing."""
    path = tmp_path / "bad.tflite"
    path.write_bytes(data)
    (tmp_path / "out").mkdir()
    with pytest.raises(error, match=match):
        extract(path, tmp_path / "out" / "x")
    assert not any((tmp_path / "out").iterdir())


def _set(field: str, value: object) -> Callable[[Any], None]:
    """``field`` of gate's tensor."""
    return lambda model: setattr(gate(model), field, value)


def _quantization(field: str, value: object) -> Callable[[Any], None]:
    """``field`` of what gate's tensor says of its scales."""
    return lambda model: setattr(gate(model).quantization, field, value)


def _scale_of_one(value: float) -> Callable[[Any], None]:
    return lambda model: gate(model).quantization.scale.__setitem__(5, value)


@on_model
def _blockwise(model: Any, scales: int = -2, zero_points: int = -1, size: int = 4) -> None:
    """Blocks on gate; ``scales`` -2 stands for a new, sound tensor, -3 for gate itself."""
    if scales == -2:
        scales = Graph(model, {}).constant(np.full((16, 2), 0.01))
    elif scales == -3:
        scales = model.subgraphs[0].tensors.index(gate(model))
    details = schema.BlockwiseQuantizationT(scales=scales, zeroPoints=zero_points, blockSize=size)
    blockwise = schema.QuantizationDetails.BlockwiseQuantization
    gate(model).quantization = schema.QuantizationParametersT(detailsType=blockwise, details=details)


def _blocks_with_blocks(model: Any) -> None:
    """The scales of gate are integers, whose scales are in turn those of gate."""
    _blockwise()(model)
    scales = model.subgraphs[0].tensors[-1]
    scales.type, scales.quantization = INT8, gate(model).quantization
    set_buffer(model, scales, bytes(32))


@on_model
def _details(model: Any, kind: int, details: Any) -> None:
    gate(model).quantization.detailsType, gate(model).quantization.details = kind, details


@on_model
def _external(model: Any, group: int = 0, listed: bool = True, packing: bytes = b"", offset: int = 0) -> None:
    model.externalBufferGroups = [schema.ExternalBufferGroupT(name=b"tflite_weights")]
    entry = schema.ExternalBufferT(id=7, group=group, offset=offset, length=128, packing=packing)
    model.externalBuffers = [entry] if listed else []
    gate(model).buffer, gate(model).externalBuffer = 0, 7


@on_model
def _appended(model: Any, offset: int, size: int) -> None:
    buffer = model.buffers[gate(model).buffer]
    buffer.data, buffer.offset, buffer.size = None, offset, size


@on_model
def _after(model: Any, name: str, by: int, *values: float) -> None:
    """Numbers in place of the constant of the operator ``by`` places after the first of the builtin ``name``."""
    operators = model.subgraphs[0].operators
    at = operators.index(op_of(model, name))
    constant = model.subgraphs[0].tensors[operators[at + by].inputs[1]]
    set_buffer(model, constant, np.array(values, "<f4").tobytes())


def _signature(change: Callable[[Any], object]) -> Callable[[Any], object]:
    return lambda model: change(model.signatureDefs[0])


def _without(name: bytes) -> Callable[[Any], object]:
    def change(signature: Any) -> None:
        for names in (signature.inputs, signature.outputs):
            names[:] = [entry for entry in names if entry.name != name]

    return _signature(change)


def _swapped(signature: Any) -> None:
    first, second = signature.outputs[:2]
    first.name, second.name = second.name, first.name


@on_model
def _fed(model: Any, which: int, field: str) -> None:
    """The result of gate's operator as an operand or a result of the ``which``-th."""
    getattr(linear(model, which), field)[0] = linear(model, 3).outputs[0]


@on_model
def _options(model: Any, field: str) -> None:
    op = linear(model, 3)
    op.builtinOptionsType = schema.BuiltinOptions.FullyConnectedOptions
    op.builtinOptions = schema.FullyConnectedOptionsT()
    setattr(op.builtinOptions, field, 1)


def _bias(model: Any) -> None:
    linear(model, 3).inputs[2] = Graph(model, {}).constant([0.0] * 15 + [1e-30])


CASES: dict[str, tuple[Callable[[Any], object], type[MtpExtractError], str]] = {
    "scale nan": (_scale_of_one(float("nan")), FormatError, "negative or not finite"),
    "scale inf": (_scale_of_one(float("inf")), FormatError, "negative or not finite"),
    "scale negative": (_scale_of_one(-0.5), FormatError, "negative or not finite"),
    "scale of 1e38": (_scale_of_one(1e38), FormatError, "a scale of 1e\\+38"),
    "scales missing": (_quantization("scale", np.zeros(0, np.float32)), FormatError, "0 scales"),
    "scales too few": (_quantization("scale", np.full(15, 0.1, np.float32)), FormatError, "15 scales"),
    "axis -1": (_quantization("quantizedDimension", -1), FormatError, "along axis -1"),
    "axis 2": (_quantization("quantizedDimension", 2), FormatError, "along axis 2"),
    "zero points too few": (_quantization("zeroPoint", np.zeros(2, np.int64)), FormatError, "2 zero points"),
    "zero point 200": (_quantization("zeroPoint", np.array([0] * 15 + [200])), FormatError, "outside the range"),
    "no quantization": (_set("quantization", None), FormatError, "no scale"),
    "blocks of 0": (_blockwise(size=0), FormatError, "blocks of 0"),
    "blocks of 3": (_blockwise(size=3), FormatError, "blocks of 3"),
    "blocks of 8": (_blockwise(size=8), FormatError, r"expected floats \[16, 1\]"),
    "block scales -1": (_blockwise(scales=-1), FormatError, "names tensor -1"),
    "block scales nowhere": (_blockwise(scales=9999), FormatError, "names tensor 9999"),
    "block scales of itself": (_blockwise(scales=-3), FormatError, "block scales"),
    "block scales in a loop": (_blocks_with_blocks, FormatError, "block scales"),
    "block zero points of floats": (_blockwise(zero_points=0), FormatError, "zero points"),
    "multi-axis": (_details(3, schema.BlockwiseQuantizationT()), UnsupportedError, "multi-axis"),
    "custom": (_details(1, schema.CustomQuantizationT()), UnsupportedError, "custom"),
    "sparse": (_set("sparsity", schema.SparsityParametersT(traversalOrder=[0, 1])), UnsupportedError, "sparse"),
    "type unknown": (_set("type", 99), UnsupportedError, r"unknown \(99\)"),
    "type string": (_set("type", schema.TensorType.STRING), UnsupportedError, "STRING"),
    "type int32": (_set("type", schema.TensorType.INT32), FormatError, "INT32"),
    "type int4": (_set("type", INT4), FormatError, "needs 64 bytes, its buffer has 128"),
    "type float32": (_set("type", FLOAT32), FormatError, "needs 512 bytes, its buffer has 128"),
    "buffer short": (lambda m: set_buffer(m, gate(m), bytes(127)), FormatError, "needs 128 bytes, its buffer has 127"),
    "buffer empty": (lambda m: set_buffer(m, gate(m), b""), UnsupportedError, "no constant matrix"),
    "buffer out of range": (_set("buffer", 1 << 31), FormatError, "names buffer"),
    "buffer after the end": (_appended(1 << 20, 128), TruncatedError, "lie at 1048576"),
    "buffer of another size": (_appended(64, 127), FormatError, "needs 128 bytes"),
    "external, not listed": (_external(listed=False), FormatError, "does not list"),
    "external, no section": (_external(), FormatError, "TFLiteWeights section"),
    "external, other group": (_external(group=3), UnsupportedError, r"group 3 of 1"),
    "external, packed": (_external(packing=b"\x1b[2J"), UnsupportedError, r"packing '.+x1b\[2J'"),
    "shape negative": (_set("shape", [-16, -8]), FormatError, "has shape"),
    "shape of zeros": (_set("shape", [0, 8]), FormatError, r"needs 0 bytes"),
    "shape of 2^39": (_set("shape", [1 << 20, 1 << 19]), MtpExtractError, r"layers\.0\.gate_proj|needs"),
    "shape of a vector": (_set("shape", [128]), UnsupportedError, "no constant matrix"),
    "norm weight nan": (_after("RSQRT", 2, *[float("nan")] * 8), FormatError, "not finite"),
    "norm weight of 3e38": (_after("RSQRT", 2, *[3.4e38] * 8), ProofError, r"3\.4e\+38 in the graph, larger"),
    "norm weight short": (_after("RSQRT", 2, 1.0, 2.0), FormatError, "needs 32 bytes"),
    "epsilons differ": (_after("ADD", 0, 1e-5), UnsupportedError, "different epsilons"),
    "epsilon nan": (_after("ADD", 0, float("nan")), UnsupportedError, "ADD"),
    "soft cap 0": (_after("TANH", 1, 0.0), UnsupportedError, "0 times"),
    "soft cap negative": (_after("TANH", 1, -30.0), UnsupportedError, "soft cap"),
    "rope tiny": (_after("COS", -1, 1, 1e-40), UnsupportedError, "would need a theta"),
    "rope nan": (_after("COS", -1, 1, float("nan")), UnsupportedError, "makes NaN"),
    "no signature": (lambda m: setattr(m, "signatureDefs", []), NoDrafterError, "mtp_drafter in .*, found none"),
    "no subgraph": (lambda m: setattr(m, "subgraphs", []), FormatError, "no subgraph"),
    "signature without logits": (_without(b"logits"), NoDrafterError, "'logits'"),
    "signature without projection": (_without(b"projected_activations"), NoDrafterError, "'projected_activations'"),
    "signature without activations": (_without(b"activations"), RoleError, "'activations'"),
    "signature of subgraph 9": (_signature(lambda s: setattr(s, "subgraphIndex", 9)), FormatError, "names subgraph 9"),
    "signature of tensor 999": (
        _signature(lambda s: setattr(s.inputs[0], "tensorIndex", 999)),
        FormatError,
        "tensor 999",
    ),
    "outputs swapped": (_signature(_swapped), RoleError, "post_projection"),
    "operand -2": (lambda m: linear(m).inputs.__setitem__(0, -2), FormatError, "names tensor -2"),
    "operand 99999": (lambda m: linear(m).inputs.__setitem__(0, 99999), FormatError, "names tensor 99999"),
    "operator code 99": (lambda m: setattr(linear(m), "opcodeIndex", 99), FormatError, "operator code 99"),
    "an op that reads itself": (_fed(3, "inputs"), RoleError, "after it was read or set"),
    "an output written twice": (_fed(4, "outputs"), RoleError, "after it was read or set"),
    "weights shuffled": (_options("weightsFormat"), UnsupportedError, "shuffled"),
    "activation fused": (_options("fusedActivationFunction"), UnsupportedError, "fused"),
    "a bias": (_bias, UnsupportedError, "bias"),
}


@pytest.mark.parametrize("case", CASES)
def test_models(tmp_path: Path, case: str) -> None:
    change, error, match = CASES[case]
    model = plain_model()
    change(model)
    refuse(pack(model), tmp_path, error, match)


def test_blocks_are_sound_before_they_are_damaged(tmp_path: Path) -> None:
    model = plain_model()
    _blockwise()(model)
    (tmp_path / "x.tflite").write_bytes(pack(model))
    extract(tmp_path / "x.tflite", tmp_path / "out")
    with open_bundle(tmp_path / "x.tflite") as opened:
        roles = inspect(opened, graph=True).report["drafter"]["roles"]
    (role,) = [role for role in roles if role["role"] == "layers.0.gate_proj"]
    assert role["quantization"]["block_size"]


def test_external_buffers_outside_their_section(tmp_path: Path) -> None:
    for offset, error in ((0, None), (1, TruncatedError), (1 << 63, TruncatedError)):
        model = plain_model()
        codes = bytes(model.buffers[gate(model).buffer].data)
        _external(offset=offset)(model)
        path = tmp_path / f"{offset}.litertlm"
        path.write_bytes(bundle([Part(3, pack(model), DRAFTER), Part(7, codes, DRAFTER)]))
        if error is None:
            assert extract(path, tmp_path / "out").files
        else:
            with pytest.raises(error, match="section 1"):
                extract(path, tmp_path / "none")
    assert not (tmp_path / "none").exists()


NAMES = (
    *(b"\x1b]0;owned\x07\x1b[2J", b"../../../etc/passwd", b"\xff\xfe\xc0\x80", b"\x00\x00"),
    *("\u202e\u2066\ufeff".encode(), b"layer_0/" * 8000),
)


@pytest.mark.parametrize("name", NAMES)
def test_names_of_tensors(tmp_path: Path, name: bytes) -> None:
    """A tensor's name changes no file and reaches no path."""
    sound, model = plain_model(), plain_model()
    for tensor in model.subgraphs[0].tensors:
        tensor.name = name
    for label, content in (("sound", sound), ("named", model)):
        (tmp_path / f"{label}.tflite").write_bytes(pack(content))
        extract(tmp_path / f"{label}.tflite", tmp_path / label)
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "sound" / file).read_bytes() == (tmp_path / "named" / file).read_bytes()
    assert {p.name for p in tmp_path.iterdir()} == {"sound", "named", "sound.tflite", "named.tflite"}


def test_a_name_too_long(tmp_path: Path) -> None:
    model = plain_model()
    gate(model).name = b"x" * 70000
    refuse(pack(model), tmp_path, FormatError, "a string of 70000 bytes")


# -- wiring that no exporter produces -------------------------------------------------------------------------------


def test_a_tower_of_sums_in_the_mask() -> None:
    """position + position, doubled 200 times, compared with the cache's slots: 2^200 terms."""
    graph = Graph(plain_model(DrafterSpec(windows=(4, None))), {})
    reader = op_of(graph.model, "GREATER_EQUAL")
    value = int(reader.inputs[0])
    for _ in range(200):
        value = graph.call("ADD", value, value)
    graph.set_input(reader, 0, value)
    with pytest.raises(MtpExtractError, match="does not hold"):
        read(Memory(graph.data()))


def _new_tensor(model: Any, graph: int = 0) -> int:
    return added(model.subgraphs[graph].tensors, schema.TensorT(name=b"n", type=FLOAT32, shape=[1, 1, 8]))


def _composite(model: Any, graph: int, body: int, inputs: list[int], outputs: list[int]) -> None:
    op = schema.OperatorT(opcodeIndex=code_of(model, "STABLEHLO_COMPOSITE"), inputs=inputs, outputs=outputs)
    op.builtinOptions2 = schema.StableHLOCompositeOptionsT(name=b"odml.rms_norm", decompositionSubgraphIndex=body)
    op.builtinOptions2Type = schema.BuiltinOptions2.StableHLOCompositeOptions
    model.subgraphs[graph].operators.insert(0, op)


def _called(model: Any, body: int, operands: int = 1, results: int = 1) -> None:
    """A composite of the drafter itself, whose body is ``body``."""
    _composite(model, 0, body, [0] * operands, [_new_tensor(model) for _ in range(results)])


def _bodies(model: Any, count: int = 1, tensors: int = 2) -> list[int]:
    """Subgraphs of so many tensors, the first of which is their input and the last their output."""
    indices = []
    for _ in range(count):
        graph = schema.SubGraphT(name=b"body", tensors=[], operators=[], inputs=[0], outputs=[tensors - 1])
        indices.append(added(model.subgraphs, graph))
        for _ in range(tensors):
            _new_tensor(model, indices[-1])
    return indices


def _calls_itself(model: Any) -> None:
    (body,) = _bodies(model)
    _composite(model, body, body, [0], [1])
    _called(model, body)


def _nested(model: Any) -> None:
    bodies = _bodies(model, 12)
    for body, inner in pairwise([*bodies, -1]):
        _composite(model, body, inner, [0], [1])
    _called(model, bodies[0])


def _multiplied(model: Any) -> None:
    """Eight levels of ten calls each would be a hundred million operators."""
    bodies = _bodies(model, 8, tensors=12)
    for body, inner in pairwise([*bodies, -1]):
        for call in range(10):
            _composite(model, body, inner, [0], [call + 1])
        model.subgraphs[body].outputs = [10]
    _called(model, bodies[0])


def _thousands_of_operands(model: Any) -> None:
    """Few operators, but every one of them reads thirty thousand values, again at every level."""
    bodies = _bodies(model, 7)
    for body, inner in pairwise([*bodies, -1]):
        model.subgraphs[body].inputs = [0] * 30000
        for _ in range(4):
            output = _new_tensor(model, body)
            _composite(model, body, inner, [0] * 30000, [output])
            model.subgraphs[body].outputs = [output]
    _called(model, bodies[0], operands=30000)


@on_model
def _hands_out(model: Any, outputs: list[int]) -> None:
    """A body that hands out other values than its own result: one a thousand times, or none."""
    (body,) = _bodies(model)
    _composite(model, body, -1, [0], [1])
    model.subgraphs[body].outputs = outputs
    _called(model, body, results=len(outputs))


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (_calls_itself, RoleError, "contains itself"),
        (_nested, RoleError, "nested too deeply"),
        (_multiplied, RoleError, "more than"),
        (_thousands_of_operands, MtpExtractError, "more than|more elements"),
        (_hands_out([0] * 1000), RoleError, "through more composites"),
        (_hands_out([-1]), RoleError, "output without a tensor"),
    ],
)
def test_composites(tmp_path: Path, change: Callable[[Any], None], error: type[MtpExtractError], match: str) -> None:
    model = plain_model()
    change(model)
    refuse(pack(model), tmp_path, error, match)


def test_an_op_that_reads_what_nothing_computes(tmp_path: Path) -> None:
    """Even where its result goes nowhere: whatever computed it was lost, and may have held a weight."""
    graph = Graph(plain_model(), {})
    graph.call("ABS", graph.tensor([8]))
    refuse(pack(graph.model), tmp_path, RoleError, "ABS reads .* nothing computes")


def test_values_are_never_infinite() -> None:
    """The largest scale that is let through, and the largest code, still make a finite number."""
    model = plain_model()
    gate(model).quantization.scale[:] = 9e5
    set_buffer(model, gate(model), np.full(128, -128, np.int8).tobytes())
    checkpoint = build_checkpoint(read(Memory(pack(model))))
    assert np.isfinite(checkpoint.tensors["layers.0.gate_proj"].array()).all()
