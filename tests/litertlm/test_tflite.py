"""The reader against the published schemas: every tensor, operator, buffer and signature of every file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tflite
from ai_edge_litert import schema_py_generated as schema
from helpers.first_pair import first_bundle
from helpers.make_bundle import Memory, Part, bundle
from helpers.variant_files import VARIANTS, variant

from mtp_extract.bundle import open_bundle
from mtp_extract.data import load_mapping
from mtp_extract.errors import NoDrafterError
from mtp_extract.io.source import Region
from mtp_extract.litertlm.container import SECTION_TYPES
from mtp_extract.litertlm.tflite import ELEMENT_BITS, Blockwise, TensorType, TfliteModel, read_model


def list_names(enum: Any) -> dict[int, str]:
    return {value: name for name, value in vars(enum).items() if isinstance(value, int)}


def test_tensor_types_are_the_schemas() -> None:
    assert {int(t): t.name for t in TensorType} == list_names(schema.TensorType)
    assert set(ELEMENT_BITS) == {t for t in TensorType if t.name not in ("STRING", "RESOURCE", "VARIANT")}
    # The published bindings are older; what they know must agree.
    assert list_names(tflite.TensorType).items() <= {int(t): t.name for t in TensorType}.items()


def test_operator_names_are_the_schemas() -> None:
    names = load_mapping("tflite_schema")["builtin_operators"]
    assert dict(enumerate(names)) == list_names(schema.BuiltinOperator)
    assert list_names(tflite.BuiltinOperator).items() <= dict(enumerate(names)).items()


def test_types_of_options_are_the_schemas() -> None:
    """Ids are those of the operators' own options, a few of which are named differently."""
    reducers = ("MEAN", "SUM", "REDUCE_MAX", "REDUCE_MIN", "REDUCE_PROD", "REDUCE_ANY", "REDUCE_ALL")
    named = dict.fromkeys(reducers, "Reducer") | {"L2_NORMALIZATION": "L2Norm"}
    ids = {name.lower(): number for number, name in list_names(schema.BuiltinOptions).items()}
    for kind, number in load_mapping("tflite_schema")["option_types"].items():
        assert ids[f"{named.get(kind, kind.replace('_', ''))}options".lower()] == number


@pytest.fixture(scope="module", params=["sample", *sorted(VARIANTS)])
def pair(request: pytest.FixtureRequest) -> tuple[TfliteModel, Any, bytes]:
    """A model read by us, the same read by the published schema, and its bytes."""
    path = first_bundle() if request.param == "sample" else variant(request.param)
    with open_bundle(path) as opened:
        region = opened._locate[2].region
        data = opened.source.read(region.begin, region.size)
    return read_model(Region(Memory(data), 0, len(data), "model")), schema.ModelT.InitFromPackedBuf(data, 0), data


def test_structure(pair: tuple[TfliteModel, Any, bytes]) -> None:
    model, expected_model, _ = pair
    assert len(model.subgraphs) == len(expected_model.subgraphs)
    names = load_mapping("tflite_schema")["builtin_operators"]
    for graph, expected in zip(model.subgraphs, expected_model.subgraphs, strict=True):
        assert graph.inputs == tuple(expected.inputs)
        assert graph.outputs == tuple(expected.outputs)
        for op, expected_op in zip(graph.operators, expected.operators, strict=True):
            code = expected_model.operatorCodes[expected_op.opcodeIndex]
            kind = names[max(code.builtinCode, code.deprecatedBuiltinCode)]
            assert op.kind == (f"CUSTOM:{code.customCode.decode()}" if kind == "CUSTOM" else kind)
            assert op.inputs == tuple(expected_op.inputs)
            assert op.outputs == tuple(expected_op.outputs)
            if kind == "STABLEHLO_COMPOSITE":
                options = expected_op.builtinOptions2
                assert op.composite == options.name.decode()
                assert op.body == options.decompositionSubgraphIndex
            assert op.activation == getattr(expected_op.builtinOptions, "fusedActivationFunction", 0)
    signatures = {
        s.signatureKey.decode(): ({m.name.decode(): m.tensorIndex for m in s.inputs}, s.subgraphIndex)
        for s in expected_model.signatureDefs
    }
    assert {s.key: (dict(s.inputs), s.subgraph) for s in model.signatures} == signatures


def test_tensors_and_their_bytes(pair: tuple[TfliteModel, Any, bytes]) -> None:
    model, expected_model, data = pair
    seen = 0
    for graph, expected in zip(model.subgraphs, expected_model.subgraphs, strict=True):
        for tensor, theirs in zip(graph.tensors, expected.tensors, strict=True):
            assert tensor.name == theirs.name.decode()
            assert tensor.type_id == theirs.type
            assert tensor.shape == tuple(theirs.shape if theirs.shape is not None else ())
            ours, quantization = tensor.quantization, theirs.quantization
            if ours is not None:
                for vector, stored in ((ours.scale, quantization.scale), (ours.zero_point, quantization.zeroPoint)):
                    np.testing.assert_array_equal(vector, [] if stored is None else stored)
                assert ours.axis == quantization.quantizedDimension
                if quantization.detailsType == schema.QuantizationDetails.BlockwiseQuantization:
                    details = quantization.details
                    assert ours.blockwise == Blockwise(details.scales, details.zeroPoints, details.blockSize)
            buffer = expected_model.buffers[theirs.buffer]
            stored = b"" if buffer.data is None else bytes(buffer.data)
            if buffer.offset > 1:
                stored = data[buffer.offset : buffer.offset + buffer.size]
            assert model.has_data(tensor) == bool(stored)
            if stored:
                assert model.locate(tensor).read() == stored
                seen += 1
    assert seen > 50


def test_sections_of_the_sample(sample: Path) -> None:
    """The sections are those that litert-lm-builder was asked to write."""
    with open_bundle(sample) as opened:
        models = [("TFLiteModel", of) for of in ("embedder", "per_layer_embedder", "prefill_decode", "mtp_drafter")]
        others = [(name, None) for name in ("LlmMetadataProto", "ExecutorMetadataProto", "SP_Tokenizer")]
        assert [(s.type_name, s.model_type) for s in opened.sections] == [*others, *models]
        assert all(s.begin % 16384 == 0 for s in opened.sections)
        assert opened.sections[-1].end == sample.stat().st_size
        assert opened.bundle is not None
        assert (opened.bundle.version, opened.bundle.items["Authors"]) == ((1, 7, 0), "ODML")
        assert all(opened.read_model(section).subgraphs for section in opened.sections[3:6])
    assert SECTION_TYPES[7] == "TFLiteWeights"


def test_a_model_that_is_no_drafter(sample: Path, tmp_path: Path) -> None:
    """The name of the file does not matter."""
    with open_bundle(sample) as opened:
        section = opened.sections[3]
        embedder = opened.source.read(section.begin, section.size)
    (tmp_path / "embedder.tflite").write_bytes(embedder)
    with open_bundle(tmp_path / "embedder.tflite") as opened, pytest.raises(NoDrafterError, match="mtp_drafter"):
        opened.read_drafter()
    path = tmp_path / "gemma-4-E2B-it-web.litertlm"
    path.write_bytes(bundle([Part(3, embedder, {"model_type": "tf_lite_embedder"})]))
    with open_bundle(path) as opened, pytest.raises(NoDrafterError, match="Models in it: embedder") as raised:
        opened.read_drafter()
    assert "this is" not in str(raised.value)
