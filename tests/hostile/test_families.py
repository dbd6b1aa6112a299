"""Files whose parts share each other, in families of growing size: work grows no faster than the bytes of a file.

Work is counted, not timed: tables and bytes that are read, numbers that are computed, patterns that are tried.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema
from flatbuffers import flexbuffers
from helpers.make_bundle import TABLE, Memory, Part, bundle, pack, table, vector
from helpers.make_drafter import DrafterSpec, plain_model
from helpers.surgery import Graph, sound
from helpers.twin_base import TWIN, edited_twin
from seam import (
    FormatError,
    FoundRole,
    MtpExtractError,
    NoDrafterError,
    Region,
    UnsupportedError,
    base,
    base_module,
    build_checkpoint,
    bundle_module,
    check_names,
    evaluate,
    flat,
    list_roles,
    model_of,
    open_bundle,
    parse_address,
    prove,
    prove_checkpoint,
    read,
    read_model,
    read_numbers,
    read_prompts,
    roles_module,
    write_skeleton,
)

from mtp_extract import extract

SIZES = (250, 1000, 4000)


class _Counted(Memory):
    """A source that counts reads and their bytes."""

    work = 0

    def read_small(self, offset: int, length: int) -> bytes:
        self.work += 1 + length
        return self.read(offset, length)


def work_of(data: bytes, use: Callable[[Any], object] = lambda model: None) -> int:
    """Count the reads of reading the model ``data`` and of ``use``; a refusal ends it early."""
    source = _Counted(data)
    with suppress(MtpExtractError):
        use(read_model(Region(source, 0, source.size, "the model")))
    return source.work


def require_linear(work: dict[int, int]) -> None:
    """``work`` is by bytes of a file: four times the bytes may take five times the work."""
    sizes = sorted(work)
    for smaller, larger in pairwise(sizes):
        assert work[larger] / work[smaller] < 1.25 * larger / smaller, work


# -- shared vectors --------------------------------------------------------------------------------------------------


def shared_vectors(levels: int) -> bytes:
    """A flexbuffer ``{"bomb": …, "epsilon": 0.5}`` of vectors that hold the one before them twice: 2^levels values."""
    content = bytearray(b"bomb\0epsilon\0\0\0\0")

    def back(target: int) -> bytes:
        return struct.pack("<I", len(content) - target)

    content += struct.pack("<I", 0)
    inner = len(content)
    for level in range(levels):
        content += struct.pack("<I", 2)
        start = len(content)
        for _ in range(2):
            content += back(inner)
        content += bytes([(10 if level else 1) << 2 | 2] * 2) + bytes(2)
        inner = start
    content += struct.pack("<I", 2)
    keys = len(content)
    for name in (b"bomb", b"epsilon"):
        content += back(content.index(name + b"\0"))
    content += back(keys) + struct.pack("<II", 4, 2)
    values = len(content)
    content += back(inner) + struct.pack("<f", 0.5) + bytes([10 << 2 | 2, 3 << 2 | 2])
    return bytes(content) + struct.pack("<B", len(content) - values) + bytes([9 << 2 | 2, 1])


def test_a_number_beside_vectors_that_share_one_another_is_read() -> None:
    small = flexbuffers.Loads(shared_vectors(3))
    assert small["epsilon"] == 0.5 and len(small["bomb"]) == 2, "the generator writes sound flexbuffers"
    assert read_numbers(shared_vectors(200), ("epsilon", "scale")) == {"epsilon": 0.5}


@pytest.mark.parametrize("number", [0, 1, -1, 300, -70000, 2**40, 0.5, 1e-6, 1e30, True, "0.5", [1], {"epsilon": 1}])
def test_numbers_of_flexbuffers_are_what_the_published_reader_reads(number: Any) -> None:
    attributes = {"a": 1, "epsilon": number, "epsilon2": 3, "is_global": True, "z": {"epsilon": 7}}
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    stored = bytes(flexbuffers.Dumps(attributes))
    assert read_numbers(stored, ("epsilon", "scale")) == ({"epsilon": number} if is_number else {})


def test_every_damage_to_a_flexbuffer_ends_in_an_error_of_ours() -> None:
    stored = bytes(flexbuffers.Dumps({"epsilon": 1e-6, "scale": 300, "name": "x"}))
    damaged = [stored[:length] for length in range(len(stored))]
    for place in range(len(stored)):
        damaged += [stored[:place] + bytes([byte]) + stored[place + 1 :] for byte in (0, 1, 0x7F, 0xFF)]
    refused = 0
    for content in damaged:
        with suppress(FormatError):
            refused += 1
            read_numbers(content, ("epsilon", "scale"))
            refused -= 1
    assert 20 < refused < len(damaged) - 20


def file_of(family: Callable[..., int], *numbers: int) -> bytes:
    """The model whose root ``family`` builds."""
    builder = flatbuffers.Builder(1 << 16)
    builder.Finish(family(builder, *numbers), b"TFL3")
    return bytes(builder.Output())


def shared_attributes(builder: flatbuffers.Builder, count: int) -> int:
    """``count`` composites with one vector of ``16 · count`` bytes of attributes."""
    name, attributes = builder.CreateString("odml.rms_norm"), builder.CreateByteVector(bytes(16 * count))
    options = table(builder, 4, (TABLE, 0, name), (TABLE, 2, attributes))
    operators = [table(builder, 13, ("Uint8", 11, 21), (TABLE, 12, options)) for _ in range(count)]
    graphs = vector(builder, [table(builder, 4, (TABLE, 3, vector(builder, operators)))])
    number = schema.BuiltinOperator.STABLEHLO_COMPOSITE
    codes = vector(builder, [table(builder, 4, ("Int32", 3, number))])
    return table(builder, 5, (TABLE, 1, codes), (TABLE, 2, graphs))


def shared_scales(builder: flatbuffers.Builder, count: int) -> int:
    """``count`` tensors that share one vector of ``4 · count`` scales."""
    scales = builder.CreateNumpyVector(np.ones(4 * count, np.float32))
    grids = [table(builder, 7, (TABLE, 2, scales)) for _ in range(count)]
    tensors = [table(builder, 5, ("Int8", 1, schema.TensorType.INT8), (TABLE, 4, grid)) for grid in grids]
    graphs = vector(builder, [table(builder, 4, (TABLE, 0, vector(builder, tensors)))])
    return table(builder, 5, (TABLE, 2, graphs), (TABLE, 4, vector(builder, [table(builder, 1)])))


def shared_tables(builder: flatbuffers.Builder, count: int, buffers: int = 1) -> int:
    """``count`` subgraphs that are one, of ``count`` tensors that are one, with a name of ``count`` bytes."""
    tensor = table(builder, 4, (TABLE, 3, builder.CreateString("x" * count)))
    graph = table(builder, 1, (TABLE, 0, vector(builder, [tensor] * count)))
    graphs, empty = vector(builder, [graph] * count), vector(builder, [table(builder, 1)] * buffers)
    return table(builder, 5, (TABLE, 2, graphs), (TABLE, 4, empty))


def shared_vtable(builder: flatbuffers.Builder, count: int) -> int:
    """``count`` buffers whose one vtable has ``count`` fields."""
    tables = [table(builder, count, ("Uint8", count - 1, 1)) for _ in range(count)]
    graphs = vector(builder, [table(builder, 1)])
    return table(builder, 5, (TABLE, 2, graphs), (TABLE, 4, vector(builder, tables)))


def listed_signatures(builder: flatbuffers.Builder, count: int) -> int:
    """A model of ``count`` tensors that lists one signature, of ``count // 10`` inputs, ``count`` times."""
    texts = [builder.CreateString(f"input {index}") for index in range(count // 10)]
    names = [table(builder, 2, (TABLE, 0, text), ("Uint32", 1, index)) for index, text in enumerate(texts)]
    signature = table(builder, 5, (TABLE, 0, vector(builder, names)), (TABLE, 2, builder.CreateString("key")))
    tensors = vector(builder, [table(builder, 1) for _ in range(count)])
    graphs = vector(builder, [table(builder, 1, (TABLE, 0, tensors))])
    buffers, listed = vector(builder, [table(builder, 1)]), vector(builder, [signature] * count)
    return table(builder, 8, (TABLE, 2, graphs), (TABLE, 4, buffers), (TABLE, 7, listed))


def _scales_are_one(model: Any) -> None:
    arrays = [tensor.quantization.scale for tensor in model.subgraphs[0].tensors]
    assert all(np.shares_memory(array, arrays[0]) for array in arrays), "they are kept once"


FAMILIES = (shared_attributes, shared_scales, shared_tables, shared_vtable, listed_signatures)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_read_grows_with_the_bytes(family: Callable[..., int]) -> None:
    use = _scales_are_one if family is shared_scales else lambda model: None
    files = [file_of(family, count) for count in SIZES]
    require_linear({len(data): work_of(data, use) for data in files})


def test_tables_that_are_shared_without_end_are_refused_by_that_name() -> None:
    with pytest.raises(FormatError, match=r"more elements.* by sharing parts"):
        model_of(file_of(shared_tables, 1000))


def test_many_small_files_that_describe_gigabytes_are_searched_no_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many sections do not add up to more work than one file is worth."""
    monkeypatch.setattr(bundle_module, "_SEARCH_BUDGET", 100_000)
    section = Part(3, file_of(shared_tables, 1000), {"model_type": "tf_lite_aux"})
    (tmp_path / "many.litertlm").write_bytes(bundle([section] * 40))
    with pytest.raises(NoDrafterError):
        extract(tmp_path / "many.litertlm", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_model_without_buffers_is_refused_by_the_buffer_that_a_tensor_names() -> None:
    with pytest.raises(FormatError, match="names buffer 0 of 0"):
        model_of(file_of(shared_tables, 1, 0))


def test_a_signature_that_is_listed_several_times_is_one() -> None:
    assert [signature.key for signature in model_of(file_of(listed_signatures, 20)).signatures] == ["key"]


# -- computed constants ----------------------------------------------------------------------------------------------


def sums_of_a_constant(count: int, elements: int) -> Any:
    """A drafter's graph and the last of ``count`` sums of what BROADCAST_TO makes of one number."""
    g = Graph(plain_model(), {})
    value = g.call("BROADCAST_TO", g.constant(np.ones(1)), g.constant(np.array([elements]), np.int32), shape=[elements])
    for _ in range(count):
        value = g.call("ADD", value, value)
    name = g.model.subgraphs[0].tensors[value].name = b"the last"
    graph = flat(pack(g.model))
    outputs = (output for node in graph.nodes for output in node.outputs)
    return graph, next(output for output in outputs if output.tensor.name == name.decode())


def test_numbers_that_are_computed_are_counted_in_all() -> None:
    graph, value = sums_of_a_constant(4, 1 << 16)
    before = graph.computed.elements
    (first,) = evaluate(graph, {}, [value])
    spent = before - graph.computed.elements
    evaluate(graph, {}, [value])
    assert first.max() == 16
    assert before - graph.computed.elements == 2 * spent
    assert 5 << 16 <= spent < 6 << 16


def test_more_numbers_than_any_drafter_computes_are_refused_before_they_are() -> None:
    graph, value = sums_of_a_constant(200, 1 << 20)
    with pytest.raises(UnsupportedError, match="more numbers are computed"):
        evaluate(graph, {}, [value])


def test_a_large_constant_of_a_small_file_is_refused() -> None:
    graph, value = sums_of_a_constant(1, 1 << 23)
    with pytest.raises(UnsupportedError, match="makes 8388608 numbers"):
        evaluate(graph, {}, [value])


# -- many layers, long caches ----------------------------------------------------------------------------------------


def named_roles(layers: int) -> list[FoundRole]:
    """The roles of a drafter of ``layers`` layers, called as Google calls them."""
    roles = []
    for role in list_roles(layers):
        name = {"lm_head": "decode_softmax/embedder.decode"}.get(role.name)
        if name is None:
            name = role.published_names[0].replace(".*", "x/").partition("(")[0]
            name += "skip_scale" if role.name.endswith("layer_scalar") else ""
        shape = (8, 8) if role.kind == "matrix" else (8,)
        roles.append(FoundRole(role.name, None, shape, 1.0, "", (f"other;{name}",)))
    return roles


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The patterns of names that are tried from now on."""
    patterns, layers_of = list[str](), roles_module._find_layers
    monkeypatch.setattr(
        roles_module, "_find_layers", lambda pattern, names: patterns.append(pattern) or layers_of(pattern, names)
    )
    return patterns


def test_names_are_compared_in_a_time_that_grows_with_their_number(tried: list[str]) -> None:
    work = dict[int, int]()
    for layers in (5, 20, 80):
        vectors = [role for role in named_roles(layers) if len(role.shape) == 1]
        tried.clear()
        checked = check_names(vectors, layers)
        assert set(checked.confirmed) == {role.role for role in vectors}
        work[len(vectors)] = len(tried)
    require_linear(work)


def test_names_of_what_is_not_proven_are_compared_once_each(tried: list[str], tmp_path: Path) -> None:
    work = dict[int, int]()
    for layers in (4, 8, 16):
        graph = Graph(plain_model(DrafterSpec(windows=(4, None) * (layers // 2), ffn=8)), {})
        softmax = next(op for op in graph.ops if graph.kind(op) == "SOFTMAX")
        scores = int(softmax.inputs[0])
        graph.insert(scores, lambda x, g=graph: g.call("MAXIMUM", x, g.call("MUL", x, 0.5)), into=[softmax])
        tried.clear()
        extract(open_bundle(Memory(graph.data())), tmp_path / str(layers), unproven=True)
        work[layers] = len(tried)
    require_linear(work)


def test_what_a_skeleton_leaves_out_is_asked_of_every_value_once(tmp_path: Path) -> None:
    """A chain of operators that each read one value four times."""
    graph = Graph(plain_model(), {})
    value = graph.constant(np.array([1]), np.int32)
    for _ in range(2000):
        value = graph.call("STRIDED_SLICE", value, value, value, value, shape=[1])
    (tmp_path / "chain.tflite").write_bytes(pack(graph.model))
    write_skeleton(tmp_path / "chain.tflite", tmp_path / "skeleton.zip")


def test_a_name_says_the_layer_before_its_own_word() -> None:
    carried = {
        "layer_1/x/query_norm": {"1"},
        "layer_12/query_norm": {"12"},
        "query_norm/layer_1/x": set(),
        "layer_1/layer_2/query_norm": {"1", "2"},
        "layer_1_query_norm": set(),
    }
    for name, layers in carried.items():
        assert roles_module._find_layers("layer_{i}/.*query_norm", [name]) == layers


def masked_again(times: int) -> bytes:
    """Scores of a layer that are chosen between and themselves, ``times`` one after the other."""
    graph = sound("torch")
    shape = graph.shape(graph.layer(0).scores)

    def choose(scores: int) -> int:
        for _ in range(times):
            scores = graph.call("SELECT_V2", graph.input("mask"), scores, scores, shape=shape)
        return scores

    graph.insert(graph.layer(0).scores, choose)
    return graph.data()


def test_a_mask_tree_whose_branches_are_one_another_is_refused_by_its_size() -> None:
    prove(Memory(masked_again(5)))
    with pytest.raises(UnsupportedError, match=r"at most 256 numbers, masks and operators .*, found \d+"):
        prove(Memory(masked_again(14)))


def test_a_drafter_of_100_layers_is_read() -> None:
    drafter = read(Memory(pack(plain_model(DrafterSpec(windows=(4, None) * 50, ffn=8)))))
    assert drafter.config.num_layers == 100


def test_caches_of_500_000_slots_are_proven() -> None:
    proof = prove(Memory(pack(plain_model(DrafterSpec(windows=(8, None), cache=500_000)))))
    assert proof["mask_rows"] == {"computed": 2, "of": 500_000, "alike": True}


def runtime_masked(slots: int) -> bytes:
    """A drafter whose sliding layer is masked by an input of its own, so that the window is the runtime's."""
    graph = Graph(plain_model(DrafterSpec(windows=(8, None), cache=slots)), {})
    local = schema.TensorMapT(name=b"mask_local", tensorIndex=graph.tensor([1, 1, 1, slots], np.bool_))
    graph.main.inputs = [*graph.main.inputs, local.tensorIndex]
    graph.model.signatureDefs[0].inputs.append(local)
    graph.set_input(next(op for op in graph.ops if graph.kind(op) == "SELECT_V2"), 0, local.tensorIndex)
    return graph.data()


@pytest.mark.parametrize("slots", [64, 98_304, 131_072])
def test_a_local_mask_that_the_runtime_gives_is_proven_of_long_caches(slots: int) -> None:
    with open_bundle(Memory(runtime_masked(slots))) as opened:
        drafter = opened.read_drafter(512 if slots > 64 else 8)
        assert [layer.sliding_window for layer in drafter.config.layers] == [512 if slots > 64 else 8, None]
        proof = prove_checkpoint(drafter, build_checkpoint(drafter))
    assert proof["mask_rows"]["of"] == slots


def test_signatures_of_a_base_that_share_one_graph_are_walked_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    walked = list[str]()
    flatten = base_module.flatten

    def counted(model: Any, signature: Any, most: int) -> Any:
        walked.append(signature.key)
        return flatten(model, signature, most)

    def list_more(model: Any) -> None:
        for number in range(200):
            again = copy(model.signatureDefs[0])
            again.signatureKey = f"prefill_{1000 + number}".encode()
            model.signatureDefs.append(again)

    monkeypatch.setattr(base_module, "flatten", counted)
    few = base(TWIN)
    alone = list(walked)
    walked.clear()
    many = base(edited_twin(tmp_path / "many.litertlm", prefill_decode=list_more))
    assert walked == alone
    counts = [{role: len(places) for role, places in walk.places.items()} for walk in (few, many)]
    assert counts[0] == counts[1]


# -- documents -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [70, 900])
def test_messages_nested_without_end_are_no_prompt(tmp_path: Path, depth: int) -> None:
    path = tmp_path / "prompts.jsonl"
    content = "[" * depth + "]" * depth
    path.write_text(f'{{"messages": [{{"role": "user", "content": {content}}}]}}\n')
    with pytest.raises(MtpExtractError, match=r"prompts.jsonl: .*nested more than 64 deep"):
        read_prompts(path)


def test_a_revision_that_is_no_text_names_nothing() -> None:
    assert parse_address("org/name@\udcff") is None
    with pytest.raises(MtpExtractError, match="Expected hf://"):
        parse_address("hf://org/name@\udcff/file")
