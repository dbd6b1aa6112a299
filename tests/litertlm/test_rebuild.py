"""Rebuilt models, as independent readers see them: PyPI's ``tflite``, Google's schema and Google's interpreter."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np
import pytest
import tflite
from helpers.make_bundle import Memory, drafter_of, load, pack
from helpers.make_drafter import plain_model

from mtp_extract.errors import UnsupportedError
from mtp_extract.io.laid import LaidSource
from mtp_extract.io.source import Region
from mtp_extract.litertlm.flatbuffer import FlatBuffer
from mtp_extract.litertlm.graft import ALIGNMENT, Graft
from mtp_extract.litertlm.rebuild import NewTensor, readers_of, rebuilt
from mtp_extract.litertlm.storage import Storage
from mtp_extract.litertlm.tflite import Tensor, TensorType, TfliteModel, read_model


def model_of(data: bytes) -> TfliteModel:
    return read_model(Region(Memory(data), 0, len(data), "the model"))


def matrices(model: TfliteModel) -> list[Tensor]:
    return [t for t in model.subgraphs[0].tensors if t.type is TensorType.INT8 and model.has_data(t)]


def norm_of(model: TfliteModel) -> Tensor:
    return next(t for t in model.subgraphs[0].tensors if t.type is TensorType.FLOAT32 and model.has_data(t))


def storage_of(tensor: Tensor) -> Storage:
    return Storage(TensorType(tensor.type_id), tensor.shape, "per_channel")


def rebuild(data: bytes, changes: Iterable[NewTensor]) -> bytes:
    laid = rebuilt(model_of(data), list(changes))
    return LaidSource(laid, "rebuilt").read(0, laid.size)


def same(old: Any, new: Any, but: frozenset[str] = frozenset()) -> bool:
    """Whether two objects of the schema's object API hold the same, fields called as in ``but`` aside."""
    if hasattr(old, "__dict__"):
        return type(old) is type(new) and all(
            same(value, vars(new)[name], but) for name, value in vars(old).items() if name not in but
        )
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(same(a, b, but) for a, b in zip(old, new, strict=True))
    return bool(np.array_equal(old, new))


def test_only_what_was_named_changes(sample: Path) -> None:
    data = drafter_of(sample)
    chosen = {t.index: t for t in matrices(model_of(data))[:3]}
    new = rebuild(data, [NewTensor(0, t.index, storage_of(t)) for t in chosen.values()])
    before, after = load(data), load(new)
    count = len(before.buffers)
    for name in ("version", "operatorCodes", "description", "metadataBuffer", "metadata", "signatureDefs"):
        assert same(getattr(before, name), getattr(after, name)), name
    assert same(before.subgraphs, after.subgraphs, frozenset({"tensors"}))
    assert len(after.buffers) == count + 3
    for index, (old, tensor) in enumerate(zip(before.subgraphs[0].tensors, after.subgraphs[0].tensors, strict=True)):
        if index not in chosen:
            assert same(old, tensor), index
            assert same(before.buffers[old.buffer].data, after.buffers[tensor.buffer].data)
            continue
        assert same(old, tensor, frozenset({"buffer", "quantization"}))
        assert tensor.buffer >= count


def test_the_tflite_package_reads_it(sample: Path) -> None:
    data = drafter_of(sample)
    chosen = matrices(model_of(data))[0]
    storage = storage_of(chosen)
    new = rebuild(data, [NewTensor(0, chosen.index, storage)])
    assert tflite.Model.ModelBufferHasIdentifier(new, 0)
    read = tflite.Model.GetRootAs(new, 0)
    tensor = read.Subgraphs(0).Tensors(chosen.index)
    assert tensor.Type() == int(chosen.type)
    assert tuple(tensor.ShapeAsNumpy()) == chosen.shape
    buffer = read.Buffers(tensor.Buffer())
    assert buffer.Size() == storage.length
    assert buffer.Offset() % 16 == 0
    assert buffer.Offset() + buffer.Size() == len(new)
    assert tensor.Quantization().ScaleLength() == chosen.shape[0]
    assert tensor.Quantization().ZeroPointLength() == chosen.shape[0]


def test_one_number_becomes_a_vector(sample: Path) -> None:
    data = drafter_of(sample)
    norm = norm_of(model_of(data))
    storage = Storage(TensorType.FLOAT32, (norm.elements * 2,), "none")
    new = model_of(rebuild(data, [NewTensor(0, norm.index, storage)]))
    assert new.tensor(0, norm.index).shape == storage.shape
    assert new.locate(new.tensor(0, norm.index)).read() == bytes(storage.length)


def test_what_was_appended_once_moves_up(sample: Path) -> None:
    data = drafter_of(sample)
    chosen = matrices(model_of(data))[:4]
    filled = bytearray(rebuild(data, [NewTensor(0, t.index, storage_of(t)) for t in chosen]))
    model = model_of(bytes(filled))
    for number, tensor in enumerate(chosen, 1):
        place = model.locate(model.tensor(0, tensor.index))
        filled[place.begin : place.begin + place.size] = bytes([number]) * place.size
    first = chosen[1]
    again = model_of(rebuild(bytes(filled), [NewTensor(0, first.index, storage_of(first))]))
    for number, tensor in enumerate(chosen, 1):
        held = again.locate(again.tensor(0, tensor.index)).read()
        assert set(held) == ({number} if tensor is not first else {0})


def test_a_reader_of_its_own(sample: Path) -> None:
    data = drafter_of(sample)
    model = model_of(data)
    norm = norm_of(model)
    (reader,) = readers_of(model, 0, norm.index)
    storage = Storage(TensorType.FLOAT32, norm.shape, "none")
    again = model_of(rebuild(data, [NewTensor(0, norm.index, storage, (reader,))]))
    count = len(model.subgraphs[0].tensors)
    assert len(again.subgraphs[0].tensors) == count + 1
    assert again.subgraphs[0].operators[reader[0]].inputs[reader[1]] == count
    assert again.tensor(0, count).shape == norm.shape
    assert readers_of(again, 0, norm.index) == []
    assert again.locate(again.tensor(0, norm.index)).read() == model.locate(norm).read()


def test_googles_interpreter_runs_it() -> None:
    """The same codes and scales in another place give the same result."""
    from ai_edge_litert.interpreter import Interpreter

    data = pack(plain_model())
    read = model_of(data)
    wanted = matrices(read)
    new = bytearray(rebuild(data, [NewTensor(0, t.index, storage_of(t)) for t in wanted]))
    again = model_of(bytes(new))
    for tensor in wanted:
        assert tensor.quantization is not None
        made = again.tensor(0, tensor.index)
        assert made.quantization is not None
        for at, content in (
            (again.locate(made).begin, read.locate(tensor).read()),
            (made.quantization.scales.start, tensor.quantization.scale.tobytes()),
        ):
            new[at : at + len(content)] = content
    results = []
    for content in (data, bytes(new)):
        interpreter = Interpreter(model_content=content)
        interpreter.allocate_tensors()
        rng = np.random.default_rng(5)
        for entry in interpreter.get_input_details():
            drawn = (
                rng.integers(0, 2, entry["shape"]) if entry["dtype"] != np.float32 else rng.normal(size=entry["shape"])
            )
            interpreter.set_tensor(entry["index"], drawn.astype(entry["dtype"]))
        interpreter.invoke()
        results.append([interpreter.get_tensor(entry["index"]) for entry in interpreter.get_output_details()])
    for mine, theirs in zip(*results, strict=True):
        assert np.ptp(mine) > 0
        np.testing.assert_array_equal(mine, theirs)


def test_a_field_that_is_not_known_is_refused() -> None:
    """A table that is copied is copied whole: a slot beyond those that are known stops it."""
    builder = flatbuffers.Builder()
    builder.StartObject(3)
    builder.PrependInt32Slot(0, 7, 0)
    builder.PrependInt32Slot(2, 9, 0)
    builder.Finish(builder.EndObject())
    data = bytes(builder.Output())
    table = FlatBuffer(Region(Memory(data), 0, len(data), "it")).root()
    with pytest.raises(UnsupportedError, match=r"it has a field \(slot 2\) that is newer"):
        Graft().copy(table, "ii", {}, "it")
    graft = Graft()
    front = graft.finish(graft.copy(table, "iii", {0: 8}, "it"))
    assert len(front) % ALIGNMENT == 0
    both = front + data
    root = FlatBuffer(Region(Memory(both), 0, len(both), "both")).root()
    assert [root.integer(slot, "i") for slot in range(3)] == [8, 0, 9]
