"""Rebuilt models, as independent readers see them: PyPI's ``tflite``, Google's schema and Google's interpreter."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np
import pytest
import tflite
from ai_edge_litert import schema_py_generated as schema
from helpers.make_bundle import Memory, drafter_of, load, pack
from helpers.make_drafter import plain_model

from mtp_extract.errors import UnsupportedError
from mtp_extract.io.laid import LaidSource
from mtp_extract.io.source import Region
from mtp_extract.litertlm.flatbuffer import FlatBuffer
from mtp_extract.litertlm.graft import ALIGNMENT, Graft
from mtp_extract.litertlm.rebuild import NewTensor, readers_of, rebuilt
from mtp_extract.litertlm.storage import Storage
from mtp_extract.litertlm.tflite import TensorType, TfliteModel, read_model


def model_of(data: bytes) -> TfliteModel:
    return read_model(Region(Memory(data), 0, len(data), "the model"))


def matrices(model: TfliteModel) -> list[Any]:
    return [t for t in model.subgraphs[0].tensors if t.type is TensorType.INT8 and model.has_data(t)]


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


@pytest.mark.parametrize("type_", [TensorType.INT8, TensorType.INT4, TensorType.INT2, TensorType.FLOAT32])
def test_only_what_was_named_changes(type_: TensorType, sample: Path) -> None:
    data = drafter_of(sample)
    model = model_of(data)
    chosen = matrices(model)[:3]
    storage = [Storage(TensorType.INT8, t.shape, "per_channel").as_type(type_) for t in chosen]
    new = rebuild(data, [NewTensor(0, t.index, s) for t, s in zip(chosen, storage, strict=True)])
    before, after = load(data), load(new)
    count = len(before.buffers)
    for name in ("version", "operatorCodes", "description", "metadataBuffer", "metadata", "signatureDefs"):
        assert same(getattr(before, name), getattr(after, name)), name
    assert same(before.subgraphs, after.subgraphs, frozenset({"tensors"}))
    assert len(after.buffers) == count + 3
    for index, (old, tensor) in enumerate(zip(before.subgraphs[0].tensors, after.subgraphs[0].tensors, strict=True)):
        if index not in {t.index for t in chosen}:
            assert same(old, tensor), index
            assert same(before.buffers[old.buffer].data, after.buffers[tensor.buffer].data)
            continue
        assert same(old, tensor, frozenset({"type", "buffer", "quantization"}))
        assert tensor.type == int(type_)
        assert tensor.buffer >= count
    # The old bytes are gone: what is left in their place are zeros.
    for tensor in chosen:
        old = bytes(before.buffers[before.subgraphs[0].tensors[tensor.index].buffer].data)
        assert old not in new


@pytest.mark.parametrize("type_", [TensorType.INT8, TensorType.FLOAT32])
def test_the_tflite_package_reads_it(type_: TensorType, sample: Path) -> None:
    data = drafter_of(sample)
    chosen = matrices(model_of(data))[0]
    storage = Storage(TensorType.INT8, chosen.shape, "per_channel").as_type(type_)
    new = rebuild(data, [NewTensor(0, chosen.index, storage)])
    assert tflite.Model.ModelBufferHasIdentifier(new, 0)
    read = tflite.Model.GetRootAs(new, 0)
    tensor = read.Subgraphs(0).Tensors(chosen.index)
    assert tensor.Type() == int(type_)
    assert tuple(tensor.ShapeAsNumpy()) == chosen.shape
    buffer = read.Buffers(tensor.Buffer())
    assert buffer.Size() == storage.length
    assert buffer.Offset() % 16 == 0
    assert buffer.Offset() + buffer.Size() == len(new)
    if type_ is TensorType.INT8:
        assert tensor.Quantization().ScaleLength() == chosen.shape[0]
        assert tensor.Quantization().ZeroPointLength() == chosen.shape[0]
    else:
        assert tensor.Quantization() is None


def test_what_was_appended_once_moves_up(sample: Path) -> None:
    """Buffers behind the flatbuffer are laid out anew: one that is replaced leaves no hole."""
    data = drafter_of(sample)
    chosen = matrices(model_of(data))[:4]
    wide = rebuild(data, [NewTensor(0, t.index, Storage(TensorType.FLOAT32, t.shape, "none")) for t in chosen])
    model = model_of(wide)
    assert {model.locate(model.tensor(0, t.index)).place for t in chosen} == {"appended"}
    filled = bytearray(wide)
    for number, tensor in enumerate(chosen, 1):
        place = model.locate(model.tensor(0, tensor.index))
        filled[place.offset : place.offset + place.length] = bytes([number]) * place.length
    first = chosen[1]
    narrow = rebuild(bytes(filled), [NewTensor(0, first.index, Storage(TensorType.INT2, first.shape, "per_channel"))])
    assert len(narrow) < len(filled) - first.elements * 3
    again = model_of(narrow)
    for number, tensor in enumerate(chosen, 1):
        held = again.locate(again.tensor(0, tensor.index)).read()
        assert set(held) == ({number} if tensor is not first else {0})


def test_a_reader_of_its_own(sample: Path) -> None:
    data = drafter_of(sample)
    model = model_of(data)
    norm = next(t for t in model.subgraphs[0].tensors if t.type is TensorType.FLOAT32 and model.has_data(t))
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
    """The same numbers in another type give the same result."""
    from ai_edge_litert.interpreter import Interpreter

    model = plain_model()
    for tensor in model.subgraphs[0].tensors:
        if tensor.type == schema.TensorType.INT8:
            # Codes that INT4 has, too.
            data = model.buffers[tensor.buffer].data.view(np.int8)
            model.buffers[tensor.buffer].data = np.clip(data // 16, -7, 7).astype(np.int8).view(np.uint8)
    data = pack(model)
    read = model_of(data)
    wanted = matrices(read)
    storages = [Storage(TensorType.FLOAT32, t.shape, "none") for t in wanted]
    new = bytearray(rebuild(data, [NewTensor(0, t.index, s) for t, s in zip(wanted, storages, strict=True)]))
    again = model_of(bytes(new))
    for tensor in wanted:
        codes = np.frombuffer(read.locate(tensor).read(), np.int8).reshape(tensor.shape)
        assert tensor.quantization is not None
        place = again.locate(again.tensor(0, tensor.index))
        floats = (codes * tensor.quantization.scale[:, None]).astype("<f4")
        new[place.offset : place.offset + place.length] = floats.tobytes()
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
        # Activations are quantized on the fly beside codes, and are not beside floats.
        assert np.abs(mine - theirs).max() <= 0.05 * np.ptp(mine)


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


def test_overlapping_buffers_are_refused(sample: Path) -> None:
    data = drafter_of(sample)
    first, second = matrices(model_of(data))[:2]
    wide = bytearray(
        rebuild(data, [NewTensor(0, t.index, Storage(TensorType.FLOAT32, t.shape, "none")) for t in (first, second)])
    )
    tables = list(FlatBuffer(Region(Memory(bytes(wide)), 0, len(wide), "it")).root().tables(4))
    at = tables[-1].at(1)
    wide[at : at + 8] = (tables[-2].integer(1, "Q") + 16).to_bytes(8, "little")
    with pytest.raises(UnsupportedError, match="overlap"):
        rebuild(bytes(wide), [NewTensor(0, first.index, Storage(TensorType.INT8, first.shape, "per_channel"))])
