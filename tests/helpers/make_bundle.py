"""Bundles and models written by code: what the tests take apart, damage and put together again.

A bundle is a list of :class:`Part`; :func:`bundle` packs it as litert-lm-builder does, or, where a test says so,
with a header that lies. A TFLite model is the schema's own object tree (``ModelT``); :func:`load` and :func:`pack`
convert, and what lies between is ordinary attribute access::

    model = load(drafter_of(first_bundle()))
    model.subgraphs[0].operators[3].inputs[1] = -1
    path.write_bytes(pack(model))
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import flatbuffers
import ml_dtypes  # noqa: F401 - lets numpy know bfloat16
import numpy as np
import numpy.typing as npt
from ai_edge_litert import schema_py_generated as schema

import mtp_extract
from mtp_extract.io.source import BytesSource

ALIGNMENT = 16384
DRAFTER = {"model_type": "tf_lite_mtp_drafter"}
"""Items of a drafter's section."""

PUBLISHED_ITEMS = {
    "author": "The ODML Authors",
    "uuid": "2fa073f5-0000-4000-8000-000000000001",
    "creation_timestamp": "2026-04-28T22:06:55.560103+00:00",
}
"""What the header of E2B of May says of its file; the uuid is made up."""

Memory = BytesSource
P = ParamSpec("P")
_HEADER_START = 32
_STRING_VALUE = 9
_MODEL, _EXECUTOR_METADATA = 3, 9


@dataclass(frozen=True)
class Part:
    """A section: its ``data_type``, its bytes and its items."""

    data_type: int
    data: bytes
    items: Mapping[str, str] = field(default_factory=dict)


def parts_of(path: Path) -> list[Part]:
    """The sections of the bundle at ``path``."""
    with mtp_extract.open(path) as opened:
        return [
            Part(s.data_type, opened.source.read(s.begin, s.size), {k: str(v) for k, v in s.items.items()})
            for s in opened.sections
        ]


def drafter_of(path: Path) -> bytes:
    """The drafter's section of the bundle at ``path``: a whole ``.tflite``."""
    return next(p.data for p in parts_of(path) if "mtp_drafter" in p.items.get("model_type", ""))


def like_published(path: Path, *, april: bool = False) -> bytes:
    """The bundle at ``path`` with the header that people read in Google's published files.

    Version 1.5.0, `author` in lower case, no executor metadata; the drafter's section has a model_type alone, in April
    a backend_constraint beside it.
    """
    items = {**DRAFTER, **({"backend_constraint": "cpu"} if april else {})}
    parts = [replace(part, items=items) if is_drafter(part) else part for part in parts_of(path)]
    published = [part for part in parts if part.data_type != _EXECUTOR_METADATA]
    return bundle(published, version=(1, 5, 0), items=PUBLISHED_ITEMS)


def without_drafter(path: Path, model_type: str) -> bytes:
    """The bundle at ``path`` as files for a GPU or the web are: its metadata, and one model called ``model_type``."""
    parts = parts_of(path)
    model = next(part for part in parts if part.items.get("model_type") == "tf_lite_prefill_decode")
    metadata = [part for part in parts if part.data_type != _MODEL]
    return bundle([*metadata, replace(model, items={"model_type": model_type})], version=(1, 5, 0))


def is_drafter(part: Part) -> bool:
    return part.items.get("model_type") == DRAFTER["model_type"]


def bundle(
    parts: Sequence[Part],
    *,
    items: Mapping[str, str] | None = None,
    version: tuple[int, int, int] = (1, 7, 0),
    ranges: Sequence[tuple[int, int]] | None = None,
    header_end: int | None = None,
) -> bytes:
    """A ``.litertlm`` of ``parts``.

    ``items`` are those of the file; by default there are none. ``ranges`` are the byte ranges the header claims,
    ``header_end`` the end it claims for itself; by default the true ones.
    """
    places: list[tuple[int, int]] = []
    at = ALIGNMENT
    for part in parts:
        places.append((at, at + len(part.data)))
        at = -(-(at + len(part.data)) // ALIGNMENT) * ALIGNMENT
    listing = _listing(parts, places if ranges is None else ranges, items or {})
    end = _HEADER_START + len(listing)
    assert end <= ALIGNMENT, "the header of a test's bundle fits its first page"
    result = bytearray(places[-1][1] if places else end)
    struct.pack_into("<8s3I4xQ", result, 0, b"LITERTLM", *version, end if header_end is None else header_end)
    result[_HEADER_START:end] = listing
    for part, (begin, stop) in zip(parts, places, strict=True):
        result[begin:stop] = part.data
    return bytes(result)


def _listing(parts: Sequence[Part], ranges: Sequence[tuple[int, int]], file_items: Mapping[str, str]) -> bytes:
    builder, objects = flatbuffers.Builder(1024), list[int]()
    for part, (begin, end) in zip(parts, ranges, strict=True):
        items = vector(builder, [_item(builder, key, value) for key, value in part.items.items()])
        places = ("Uint64", 1, begin), ("Uint64", 2, end), ("Uint8", 3, part.data_type)
        objects.append(table(builder, 4, (TABLE, 0, items), *places))
    sections = table(builder, 1, (TABLE, 0, vector(builder, objects)))
    entries = [_item(builder, key, value) for key, value in file_items.items()]
    system = [(TABLE, 0, table(builder, 1, (TABLE, 0, vector(builder, entries))))] if entries else []
    builder.Finish(table(builder, 2, *system, (TABLE, 1, sections)))
    return bytes(builder.Output())


TABLE = "UOffsetTRelative"
"""A slot that leads to a table, a vector or a string."""


def table(builder: flatbuffers.Builder, size: int, *slots: tuple[str, int, Any]) -> int:
    """A table of ``size`` slots, of which these have a value: kind, number, value."""
    builder.StartObject(size)
    for kind, number, value in slots:
        getattr(builder, f"Prepend{kind}Slot")(number, value, 0)
    return int(builder.EndObject())


def vector(builder: flatbuffers.Builder, offsets: Sequence[int]) -> int:
    """A vector of what ``offsets`` lead to."""
    builder.StartVector(4, len(offsets), 4)
    for offset in reversed(offsets):
        builder.PrependUOffsetTRelative(offset)
    return int(builder.EndVector())


def _item(builder: flatbuffers.Builder, key: str, value: str) -> int:
    name, text = builder.CreateString(key), builder.CreateString(value)
    boxed = table(builder, 1, (TABLE, 0, text))
    return table(builder, 3, (TABLE, 0, name), ("Uint8", 1, _STRING_VALUE), (TABLE, 2, boxed))


def load(data: bytes) -> Any:
    """The ``ModelT`` in ``data``, a copy that may be changed."""
    return pickle.loads(_unpacked(data))


@lru_cache(maxsize=64)
def _unpacked(data: bytes) -> bytes:
    """The ``ModelT`` in ``data``, pickled: a quarter of the time of unpacking it again."""
    return pickle.dumps(schema.ModelT.InitFromPackedBuf(bytearray(data), 0))


def pack(model: Any) -> bytes:
    """``model`` as a flatbuffer."""
    builder = flatbuffers.Builder(1 << 19)
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


def on_model(function: Callable[Concatenate[Any, P], object]) -> Callable[P, Callable[[Any], object]]:
    """``function`` called without what it changes: a change that is still to be made."""
    return lambda *given, **named: lambda model: function(model, *given, **named)


_CODE_NAMES = {number: name for name, number in vars(schema.BuiltinOperator).items() if isinstance(number, int)}

DTYPES: dict[int, np.dtype[Any]] = {
    getattr(schema.TensorType, name.upper()): np.dtype(name)
    for name in ("float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
}
"""How numpy calls a type of tensors."""


def type_of(dtype: npt.DTypeLike) -> int:
    """The type of tensors that numpy, or ml_dtypes, calls ``dtype``."""
    return int(getattr(schema.TensorType, np.dtype(dtype).name.upper()))


def kind(model: Any, op: Any) -> str:
    """Name of the builtin that ``op`` is."""
    code = model.operatorCodes[op.opcodeIndex]
    return _CODE_NAMES[max(code.builtinCode, code.deprecatedBuiltinCode)]


def added(things: list[Any], thing: Any) -> int:
    """The index of ``thing``, put behind ``things``."""
    things.append(thing)
    return len(things) - 1


def add_buffer(model: Any, data: bytes | Iterable[int]) -> int:
    """The index of a new buffer with ``data`` in it."""
    return added(model.buffers, schema.BufferT(data=np.frombuffer(bytes(data), np.uint8)))


def set_buffer(model: Any, tensor: Any, data: bytes | Iterable[int]) -> None:
    """Give ``tensor`` a buffer of its own with ``data`` in it."""
    tensor.buffer = add_buffer(model, data)


def code_of(model: Any, name: str, version: int = 1) -> int:
    """The index of the operator code ``name``, made if there is none."""
    number = getattr(schema.BuiltinOperator, name)
    for index, code in enumerate(model.operatorCodes):
        if max(code.builtinCode, code.deprecatedBuiltinCode) == number:
            return index
    made = schema.OperatorCodeT(builtinCode=number, deprecatedBuiltinCode=min(number, 127), version=version)
    return added(model.operatorCodes, made)
