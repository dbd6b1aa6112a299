"""Google's interpreter as a witness: it runs the drafter's section, PyTorch the drafter, on the same inputs.

Twice. *In floats* every tensor of codes is float32: constants become the numbers that their codes stand for,
activations and caches lose their scales, and QUANTIZE and DEQUANTIZE between two floats become CAST, which does
nothing. The same kernels and operators run, nothing rounds, and the two programs differ by the order of float additions
alone. *As it is*, the section computes with its integers and rounds activations: how far that is from floats is
reported, and bounded loosely, which shows that the floats are the section's own.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtp_extract.bundle import Shard
from mtp_extract.drafter.mtp import MtpDrafter
from mtp_extract.errors import UnsupportedError, escape, few
from mtp_extract.evaluate.extras import unusable
from mtp_extract.graph.drafter import ACTIVATIONS, LOGITS, PROJECTED
from mtp_extract.graph.flat import INPUT_POS, MASK, MASK_LOCAL, PARAM_TENSOR
from mtp_extract.io.files import aligned
from mtp_extract.litertlm.container import TFLITE_IDENTIFIER
from mtp_extract.litertlm.storage import FLOAT_TYPES, Floats, QuantizedTensor
from mtp_extract.litertlm.tflite import Tensor, TensorType, TfliteModel
from mtp_extract.pipeline.check import Check
from mtp_extract.validation.parity import (
    Apart,
    Case,
    Outputs,
    apart,
    caches_of,
    examined,
    random_cases,
    reference_output,
    slots_of,
)

IN_FLOATS = 1e-5
"""Largest difference of an output in floats, as a share of its range, that counts as the same function."""

AS_IT_IS = 0.5
"""Least correlation, over all cases, with what the section computes of its integers."""

# Epsilons of norms show where activations are small, and there the float32 angle of a far position would, too.
_QUIET, _NEAR = np.float32(1e-3), 32
_CAST = 53
_ALIGNMENT = 16
_ELEMENTS = 1 << 20  # numbers that are made at a time


@dataclass(frozen=True)
class Parity:
    """A drafter beside Google's interpreter."""

    in_floats: Apart  # with every tensor of codes as floats
    as_it_is: Apart  # with the file's integers, which round activations

    @property
    def agrees(self) -> bool:
        """Whether the two compute the same function."""
        return self.in_floats.worst <= IN_FLOATS and self.as_it_is.correlation >= AS_IT_IS


def measure_parity(drafter: MtpDrafter, source: Shard, cases: Sequence[Case]) -> Parity:
    """Compare ``drafter``, float32 on the CPU, with the interpreter.

    In floats each case at a near position is run again with its activations at a thousandth: there the epsilon of the
    norms shows.

    Raises:
        UnsupportedError: the interpreter is not there, or cannot run the section.
    """
    both = [*cases, *quieter(cases)]
    ours = [reference_output(drafter, case) for case in both]
    exact = apart(ours, interpreted(source, both, floats=True))
    return Parity(exact, apart(ours[: len(cases)], interpreted(source, cases, floats=False)))


def quieter(cases: Sequence[Case]) -> list[Case]:
    """Those of ``cases`` at near positions, with activations at a thousandth."""
    near = (case for case in cases if case.position < _NEAR)
    return [replace(case, embedding=case.embedding * _QUIET, hidden=case.hidden * _QUIET) for case in near]


def check_interpreter(drafter: MtpDrafter, source: Shard, *, samples: int) -> Check:
    """:func:`measure_parity` on ``samples`` random cases, and what it says of ``drafter``.

    The check is left open where the interpreter cannot run the file, or calls a drafter wrong that is known to be
    right.
    """

    def examine(directory: Path, drafter: MtpDrafter, source: Shard) -> tuple[bool | None, str]:
        try:
            parity = measure_parity(drafter, source, random_cases(source, samples))
        except UnsupportedError as error:
            return None, str(error)
        rough = parity.as_it_is
        return parity.agrees, (
            f"with the file's integers as floats, outputs within {parity.in_floats.worst:.1e} of their range, "
            f"{IN_FLOATS:.0e} being allowed; with integers, within {rough.worst:.1e}, correlated by "
            f"{rough.correlation:.3f}, the same top token in {rough.top1} of {samples} samples"
        )

    what = "Google's interpreter computes the same"
    return examined("interpreter", what, examine, Path(), drafter, source)


def interpreted(source: Shard, cases: Sequence[Case], *, floats: bool) -> list[Outputs]:
    """What Google's interpreter, with the CPU kernels that LiteRT-LM uses, computes of each of ``cases``.

    Args:
        floats: run the section in floats. It lies in a temporary file meanwhile.

    Raises:
        UnsupportedError: the interpreter is not there, or cannot run the section.
    """
    name, region = source.model.region.source.name, source.model.region
    if why := unusable("ai_edge_litert.interpreter", "Interpreter"):
        raise UnsupportedError(f"{name}: Google's interpreter (ai-edge-litert) cannot be asked: {why}.")
    if source.model.weights is not None:
        raise UnsupportedError(
            f"{name}: the drafter's weights lie in a section of their own, which the interpreter cannot be given. "
            "Parity is possible for files that hold them in the drafter's section."
        )
    from ai_edge_litert.interpreter import Interpreter

    try:
        with tempfile.TemporaryDirectory() as folder, _without_stderr():
            path = Path(folder) / "drafter.tflite"
            if floats:
                write_in_floats(source.model, path)
            else:
                path.write_bytes(region.read(0, region.size))
            interpreter = Interpreter(model_path=str(path), num_threads=1)
            interpreter.allocate_tensors()
            run = interpreter.get_signature_runner(source.signature.key)
            takes, gives, found = run.get_input_details(), run.get_output_details(), list[Outputs]()
            for case in cases:  # one at a time: the caches of a published file are 130 MB
                inputs = signature_inputs(source, case)
                made = run(**{name: encoded(values, takes[name]) for name, values in inputs.items()})
                found.append((decoded(made[LOGITS], gives[LOGITS]), decoded(made[PROJECTED], gives[PROJECTED])))
            return found
    except UnsupportedError:
        raise
    except Exception as error:  # What a tool of another release raises has no class of its own.
        raise UnsupportedError(f"{name}: Google's interpreter cannot run the drafter: {escape(error)}.") from error


def signature_inputs(source: Shard, case: Case) -> dict[str, NDArray[Any]]:
    """What the signature takes for ``case``, caches and activations in float32; caches are zero past the position.

    Raises:
        UnsupportedError: the signature has an input that this release does not know.
    """
    slots = np.arange(slots_of(source))
    seen = slots <= case.position
    local = seen & (slots > case.position - (source.config.sliding_window or len(slots)))
    # [start, end, end]: the newest slot, and one past the last that may be read.
    param = [case.position, case.position + 1, case.position + 1, 0, 0, 0, 0]
    inputs: dict[str, NDArray[Any]] = {
        ACTIVATIONS: np.concatenate([case.embedding, case.hidden])[None, None],
        INPUT_POS: np.array([case.position], np.int32),
        MASK: seen[None, None, None],
        MASK_LOCAL: local[None, None, None],
        PARAM_TENSOR: np.array([[[param]]], np.int32),
    }
    for kind, names in caches_of(source).items():
        shapes = [source.walk.caches[name].shape for name in names]
        # Where a square cache leaves it open, V is transposed, as in every published file.
        turned = (False, shapes[0] != shapes[1] or shapes[1][2] == shapes[1][3])
        for name, shape, values, transposed in zip(names, shapes, case.kv[kind], turned, strict=True):
            whole = np.zeros(shape, np.float32)
            (whole.swapaxes(2, 3) if transposed else whole)[0, :, : case.position + 1] = values
            inputs[name] = whole
    if unknown := sorted(set(source.signature.inputs) - set(inputs)):
        raise UnsupportedError(
            f"{source.model.region.source.name}: expected the inputs of a known drafter, found also {few(unknown)}, "
            "which this release cannot fill. Look for a newer release."
        )
    return {name: inputs[name] for name in source.signature.inputs}


def encoded(values: NDArray[Any], detail: Mapping[str, Any]) -> NDArray[Any]:
    """``values`` as the interpreter takes this input: floats as the nearest codes, ties to even, clipped."""
    if values.dtype != np.float32 or detail["dtype"] == np.float32:
        return values
    (scale, zero_point), limits = detail["quantization"], np.iinfo(detail["dtype"])
    if not scale:
        raise UnsupportedError(f"{escape(detail['name'])} holds integers without a scale.")
    codes = np.rint(values / np.float32(scale)) + zero_point
    stored: NDArray[Any] = np.clip(codes, limits.min, limits.max).astype(limits.dtype)
    return stored


def decoded(values: NDArray[Any], detail: Mapping[str, Any]) -> Floats:
    """What the interpreter gives for this output, flat, as float32."""
    flat, (scale, zero_point) = values.reshape(-1), detail["quantization"]
    return flat if flat.dtype == np.float32 else (flat.astype(np.float32) - np.float32(zero_point)) * np.float32(scale)


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Without what the interpreter's C++ writes to stderr; what goes wrong comes as an exception too."""
    sys.stderr.flush()
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def write_in_floats(model: TfliteModel, path: Path) -> None:
    """Write the section of ``model`` in floats to ``path``.

    Google's own classes of the schema take it apart and write it again. The float32 constants follow the flatbuffer,
    some rows at a time: what they need is disk, not memory.

    Raises:
        UnsupportedError: it has codes that this release cannot read.
        FormatError: damaged quantization.
    """
    from ai_edge_litert import schema_py_generated as schema

    made = schema.ModelT.InitFromPackedBuf(model.region.read(0, model.region.size))
    for buffer in made.buffers:
        if buffer.data is None and buffer.offset > 1:  # it lies behind the old flatbuffer
            buffer.data = np.frombuffer(model.region.read(buffer.offset, buffer.size), np.uint8)
            buffer.offset = buffer.size = 0
    cast, constants = len(made.operatorCodes), list[tuple[Any, QuantizedTensor]]()
    made.operatorCodes.append(schema.OperatorCodeT(deprecatedBuiltinCode=_CAST, version=1, builtinCode=_CAST))
    for graph, known in zip(made.subgraphs, model.subgraphs, strict=True):
        for tensor, was in zip(graph.tensors, known.tensors, strict=True):
            if is_coded(was):
                tensor.type, tensor.quantization = int(TensorType.FLOAT32), None
                if model.has_data(was):
                    tensor.buffer = len(made.buffers)
                    made.buffers.append(schema.BufferT(offset=1, size=4 * was.elements))
                    constants.append((made.buffers[-1], QuantizedTensor.of(model, was)))
        for node, operator in zip(graph.operators, known.operators, strict=True):
            ends = {graph.tensors[index].type for index in (*operator.inputs, *operator.outputs)}
            if operator.kind in ("QUANTIZE", "DEQUANTIZE") and ends == {int(TensorType.FLOAT32)}:
                node.opcodeIndex, node.builtinOptionsType, node.builtinOptions = cast, 0, None
    end = len(_packed(made))  # no number changes its length
    for buffer, _ in constants:
        buffer.offset = aligned(end, _ALIGNMENT)
        end = buffer.offset + buffer.size
    with path.open("wb") as file:
        file.write(_packed(made))
        for buffer, constant in constants:
            file.seek(buffer.offset)
            for at in range(0, constant.tensor.elements, _ELEMENTS):
                file.write(constant.floats(at, min(at + _ELEMENTS, constant.tensor.elements)).data)


def _packed(made: Any) -> bytes:
    import flatbuffers

    builder = flatbuffers.Builder(1 << 20)
    builder.Finish(made.Pack(builder), TFLITE_IDENTIFIER)
    return bytes(builder.Output())


def is_coded(tensor: Tensor) -> bool:
    """Whether the integers of ``tensor`` stand for real numbers by scales of its own."""
    known = tensor.quantization
    return tensor.type not in FLOAT_TYPES and known is not None and (known.scales.count > 0 or known.details != "none")
