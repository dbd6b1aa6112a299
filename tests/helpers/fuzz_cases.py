"""Damaged drafters by the thousand, and what must be true of each; ``test_fuzz`` deals them out to processes.

A case is its kind and its number; the same case is the same bytes on every machine.
"""

from __future__ import annotations

import json
import random
import struct
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from ai_edge_litert import schema_py_generated as schema
from seam import BundledDrafter, MtpExtractError, build_checkpoint, load_format, open_bundle, read

from helpers.bounds import TooLongError, bounded
from helpers.make_bundle import DRAFTER, DTYPES, Memory, Part, bundle, load, pack
from helpers.make_drafter import DrafterSpec, plain_drafter
from mtp_extract import extract

SPECS = (DrafterSpec(), DrafterSpec(windows=(4, None)))
WRITTEN = 25
"""One case in so many is written to disk as well."""
CPU_SECONDS = 10
"""What one case may take; hundredths are usual."""

# What single numbers of a drafter say. Anything else in config.json follows from shapes, which must agree with each
# other, so that one lie is found out.
_SAID_BY_ONE_NUMBER = {
    *("final_logit_softcapping", "hidden_activation", "rms_norm_eps"),
    *("rope_parameters", "sliding_window"),
}
_NUMBERS = (0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e38, 3e38, 1e-45, -1.0, 1.0, 2.0, 30.0, 0.125)
_WORDS = (0, 1, 2, 4, 0x7F, 0xFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF)


@dataclass
class Outcome:
    """What became of a batch: how often what happened, and a description of everything that must not."""

    counts: Counter[str]
    failures: list[str]


@cache
def drafter_bytes(which: int) -> bytes:
    return plain_drafter(SPECS[which])


@cache
def bundle_bytes() -> bytes:
    return bundle([Part(5, b"metadata"), Part(3, drafter_bytes(0), DRAFTER), Part(7, b"w" * 64, {"model_type": "aux"})])


@cache
def stored(which: int) -> tuple[tuple[int, int], ...]:
    """Where the constants of a drafter lie: (offset, length)."""
    model = read(Memory(drafter_bytes(which))).model
    located = [model.locate(t) for g in model.subgraphs for t in g.tensors if model.has_data(t)]
    return tuple(sorted({(place.begin, place.size) for place in located}))


@cache
def structure(which: int) -> tuple[int, ...]:
    """Every offset of a drafter that is not inside a constant."""
    inside = {at for offset, length in stored(which) for at in range(offset, offset + length)}
    return tuple(sorted(set(range(len(drafter_bytes(which)))) - inside))


def _damage(data: bytearray, at: int, rng: random.Random) -> None:
    """Change what lies at ``at``: a bit, a byte, a word."""
    kind = rng.randrange(5)
    word = min(at & ~3, len(data) - 4)
    if kind == 0:
        data[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        data[at] = rng.randrange(256)
    elif kind == 2:
        struct.pack_into("<I", data, word, rng.choice(_WORDS))
    elif kind == 3:
        value = struct.unpack_from("<I", data, word)[0] + rng.choice((-8, -4, -2, -1, 1, 2, 4, 8))
        struct.pack_into("<I", data, word, value & 0xFFFFFFFF)
    else:
        other = rng.randrange(len(data) - 4) & ~3
        data[word : word + 4] = data[other : other + 4]


def _times(rng: random.Random) -> range:
    return range(rng.choice((1, 1, 1, 2, 4)))


def header_case(rng: random.Random) -> bytes:
    """A bundle with damage in its header."""
    data = bytearray(bundle_bytes())
    end = struct.unpack_from("<Q", data, 24)[0]
    for _ in _times(rng):
        _damage(data, rng.randrange(8, end), rng)
    return bytes(data[: rng.randrange(len(data))] if rng.random() < 0.05 else data)


def structure_case(rng: random.Random) -> bytes:
    """A model with damage anywhere but in its constants."""
    which = rng.randrange(len(SPECS))
    data, places = bytearray(drafter_bytes(which)), structure(which)
    for _ in _times(rng):
        _damage(data, places[rng.randrange(len(places))], rng)
    return bytes(data)


def data_case(rng: random.Random) -> bytes:
    """A model with damage in its constants."""
    which = rng.randrange(len(SPECS))
    data, places = bytearray(drafter_bytes(which)), stored(which)
    for _ in _times(rng):
        offset, length = places[rng.randrange(len(places))]
        if length >= 4 and rng.random() < 0.5:
            struct.pack_into("<f", data, offset + (rng.randrange(length - 3) & ~3), rng.choice(_NUMBERS))
        else:
            _damage(data, offset + rng.randrange(length), rng)
    return bytes(data)


def wiring_case(rng: random.Random) -> bytes:
    """A model that is a valid flatbuffer and says something else: operands, shapes, types, ops, scales."""
    model = load(drafter_bytes(rng.randrange(len(SPECS))))
    for _ in _times(rng):
        _rewire(model, rng)
    return pack(model)


def _rewire(model: Any, rng: random.Random) -> None:
    graph = model.subgraphs[0]
    op, tensor = rng.choice(graph.operators), rng.choice(graph.tensors)
    some = rng.randrange(len(graph.tensors))
    inputs = [int(i) for i in op.inputs]

    def operand() -> None:
        inputs[rng.randrange(len(inputs))] = rng.choice((-1, some, int(op.outputs[0]) if len(op.outputs) else some))
        op.inputs = inputs

    def dimension() -> None:
        shape = [int(n) for n in tensor.shape]
        if shape:
            shape[rng.randrange(len(shape))] = rng.choice((0, 1, 2, 4, 8, 1 << 20, (1 << 31) - 1))
        tensor.shape = shape

    def scale() -> None:
        scales = rng.choice([t.quantization.scale for t in graph.tensors if t.quantization is not None])
        scales[rng.randrange(len(scales))] = rng.choice(_NUMBERS)

    changes: tuple[Callable[[], object], ...] = (
        operand if inputs else dimension,
        dimension,
        scale,
        lambda: graph.operators.remove(op) if len(graph.operators) > 1 else None,
        lambda: setattr(tensor, "shape", rng.choice(([], [0], [1], [4], [8], [1 << 20, 1 << 19]))),
        lambda: setattr(tensor, "type", rng.randrange(25)),
        lambda: setattr(tensor, "buffer", rng.randrange(len(model.buffers))),
        lambda: setattr(op, "opcodeIndex", rng.randrange(len(model.operatorCodes))),
        lambda: setattr(op, "inputs", inputs[: rng.randrange(3)]),
        lambda: setattr(op, "inputs", [*inputs, some]),
        lambda: setattr(op, "outputs", rng.choice(([], [-1], [some]))),
        lambda: setattr(rng.choice(model.signatureDefs[0].inputs), "tensorIndex", some),
        lambda: setattr(rng.choice(model.signatureDefs[0].outputs), "tensorIndex", some),
    )
    rng.choice(changes)()


KINDS = {"header": header_case, "structure": structure_case, "data": data_case, "wiring": wiring_case}


@dataclass(frozen=True)
class Planned:
    """What would be written, in F32: tensors by role, which tensors of the file they are, and the text's config."""

    values: dict[str, npt.NDArray[np.float32]]
    tensors: dict[str, int]
    config: dict[str, Any]

    @classmethod
    def of(cls, drafter: BundledDrafter) -> Planned:
        plan = load_format("transformers").plan(build_checkpoint(drafter), "f32")
        values = {role: stored_as.weight.array() for role, stored_as in plan.stored.items()}
        tensors = {role.role: role.tensor.index for role in drafter.structure.roles if role.tensor is not None}
        return cls(values, tensors, json.loads(plan.files[1].text)["text_config"])


@cache
def sound(layers: int) -> Planned:
    """What an undamaged drafter extracts to."""
    return Planned.of(read(Memory(drafter_bytes(layers - 1))))


def independent(data: bytes, index: int) -> npt.NDArray[np.float32]:
    """Tensor ``index`` of the model ``data``, read with the schema's own accessors and dequantized the long way."""
    model = schema.Model.GetRootAs(data, 0)
    tensor = model.Subgraphs(0).Tensors(index)
    codes = np.frombuffer(model.Buffers(tensor.Buffer()).DataAsNumpy(), DTYPES[tensor.Type()])
    values: npt.NDArray[np.float32] = codes.astype(np.float32)
    values = values.reshape(tensor.ShapeAsNumpy() if tensor.ShapeLength() else ())
    if tensor.Type() == schema.TensorType.FLOAT32:
        return values
    quantization = tensor.Quantization()
    scale, along = quantization.ScaleAsNumpy(), [1] * values.ndim
    zero_point = quantization.ZeroPointAsNumpy() if quantization.ZeroPointLength() else np.zeros(1)
    along[quantization.QuantizedDimension()] = -1
    scale, zero_point = (a.reshape(along) if a.size > 1 else a for a in (scale, zero_point))
    real: npt.NDArray[np.float32] = (values - zero_point.astype(np.float32)) * scale
    return real


def wrong(drafter: BundledDrafter, planned: Planned, data: bytes) -> str | None:
    """What of a result is not what the damaged bytes say; None when all of it is."""
    expected = sound(drafter.config.num_layers)
    changed = {key for key, value in expected.config.items() if planned.config[key] != value}
    if not changed <= _SAID_BY_ONE_NUMBER:
        return f"config.json has other values of {sorted(changed)}"
    tensors, region = planned.tensors, drafter.model.region
    # The head's factor is what its soft cap's two numbers leave over; damaged, they leave something over.
    factors = {role.role: role.factor for role in drafter.structure.roles}
    for role, found in planned.values.items():
        if not np.isfinite(found).all():
            return f"{role} is not finite"
        same = tensors.get(role) == expected.tensors.get(role) and np.array_equal(found, expected.values[role])
        if role not in tensors or same:
            continue
        held = independent(data[region.begin : region.begin + region.size], tensors[role]).reshape(-1)
        held = (held.astype(np.float64) / factors[role]).astype(np.float32)
        if not np.array_equal(found.reshape(-1), np.broadcast_to(held, found.size)):
            return f"{role} is not what tensor {tensors[role]} holds"
    if sorted(tensors.values()) != sorted(expected.tensors.values()) and set(tensors) == set(expected.tensors):
        return "the roles are played by other tensors"
    return None


def check(data: bytes, folder: Path | None) -> str:
    """What became of ``data``: "ok" or the name of an error of ours; written to ``folder`` as well.

    Raises:
        AssertionError: a result that is not what the bytes say, or a trace of one that failed.
    """
    outcome, problem = "ok", None
    try:
        drafter = read(Memory(data))
        problem = wrong(drafter, Planned.of(drafter), data)
    except MtpExtractError as error:
        outcome = type(error).__name__
        assert str(error).isprintable()
        assert len(str(error)) < 2000
    assert problem is None, problem
    if folder is None:
        return outcome
    try:
        extract(open_bundle(Memory(data)), folder / "x", dtype="f32")
    except MtpExtractError as error:
        # What reads well may still compute something else, which the proof finds.
        assert outcome in (type(error).__name__, "ok")
        assert not any(folder.iterdir())
        return outcome
    assert outcome == "ok"
    assert [path.name for path in folder.iterdir()] == ["x"]
    assert len(list((folder / "x").iterdir())) == 5
    return outcome


def run(kind: str, first: int, last: int) -> Outcome:
    """Cases ``[first, last)`` of ``kind``."""
    outcome = Outcome(Counter(), [])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(first, last):
            data = KINDS[kind](random.Random(f"{kind} {number}"))
            try:
                with tempfile.TemporaryDirectory() as folder, bounded(CPU_SECONDS):
                    outcome.counts[check(data, Path(folder) if number % WRITTEN == 0 else None)] += 1
            except (Exception, TooLongError):  # noqa: BLE001 - whatever it is, it is the finding
                outcome.failures.append(f"case {kind} {number}:\n{traceback.format_exc()}")
    return outcome
