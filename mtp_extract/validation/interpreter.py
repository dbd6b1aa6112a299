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
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtp_extract.bundle import Shard
from mtp_extract.drafter.mtp import MtpDrafter
from mtp_extract.errors import UnsupportedError, escape
from mtp_extract.evaluation.extras import unusable
from mtp_extract.graph.drafter import LOGITS, PROJECTED
from mtp_extract.graph.masks import HIDDEN_BY_FLOATS
from mtp_extract.litertlm.container import TFLITE_IDENTIFIER
from mtp_extract.litertlm.storage import FLOAT_TYPES, Floats, QuantizedTensor
from mtp_extract.litertlm.tflite import Tensor, TensorType, TfliteModel
from mtp_extract.pipeline.check import Check
from mtp_extract.validation.parity import (
    Apart,
    Inputs,
    Outputs,
    apart,
    examined,
    nearby,
    random_inputs,
    reference_outputs,
)

NEARBY, FAR = 1e-5, 1e-4
"""Largest difference of an output in floats, as a share of its range, that counts as the same function.

Far from the first position two float32 angles and the sums over many slots differ by more: 6e-5 of a drafter of E4B's
shape.
"""

AS_IT_IS = 0.5
"""Least correlation, over all cases, with what the section computes of its integers."""

_CAST = 53


@dataclass(frozen=True)
class Parity:
    """A drafter beside Google's interpreter."""

    nearby: Apart  # with every tensor of codes as floats, at the first positions
    in_floats: Apart  # at all positions
    as_it_is: Apart  # with the file's integers, which round activations

    @property
    def agrees(self) -> bool:
        """Whether the two compute the same function."""
        in_floats = self.nearby.worst <= NEARBY and self.in_floats.worst <= FAR
        return in_floats and self.as_it_is.correlation >= AS_IT_IS


def measure_parity(drafter: MtpDrafter, source: Shard, samples: int, seed: int = 0) -> Parity:
    """Compare ``drafter``, float32 on the CPU, with the interpreter, on so many random steps.

    Raises:
        UnsupportedError: the interpreter is not there, or cannot run the section.
    """

    def outputs(floats: bool) -> tuple[list[Outputs], list[Outputs]]:
        ours, theirs = (random_inputs(source, samples, seed, quiet=floats) for _ in range(2))
        return reference_outputs(drafter, source, ours), interpreted(source, theirs, floats=floats)

    ours, theirs = outputs(True)
    near = nearby(random_inputs(source, samples, seed, quiet=True))
    return Parity(apart(ours[:near], theirs[:near]), apart(ours, theirs), apart(*outputs(False)))


def check_interpreter(drafter: MtpDrafter, source: Shard, *, samples: int) -> Check:
    """:func:`measure_parity`, and what it says of ``drafter``.

    The check is left open where the interpreter cannot run the file, or calls a drafter wrong that is known to be
    right.
    """

    def examine(directory: Path, drafter: MtpDrafter, source: Shard) -> tuple[bool | None, str]:
        try:
            parity = measure_parity(drafter, source, samples)
        except UnsupportedError as error:
            return None, str(error)
        rough = parity.as_it_is
        return parity.agrees, (
            f"with the file's integers as floats, outputs within {parity.nearby.worst:.1e} of their range at the first "
            f"positions, {NEARBY:.0e} being allowed, and within {parity.in_floats.worst:.1e} at all, {FAR:.0e} being "
            f"allowed; with integers, within {rough.worst:.1e}, correlated by "
            f"{rough.correlation:.3f}, the same top token in {rough.top1} of {samples} samples"
        )

    what = "Google's interpreter computes the same"
    return examined("interpreter", what, examine, Path(), drafter, source)


def interpreted(source: Shard, steps: Iterable[Inputs], *, floats: bool) -> list[Outputs]:
    """What Google's interpreter, with the CPU kernels that LiteRT-LM uses, computes of each of ``steps``.

    Args:
        floats: run the section in floats.

    Raises:
        UnsupportedError: the interpreter is not there, or cannot run the section.
    """
    name, region = source.model.region.source.name, source.model.region
    names = source.graph.input_names
    if why := unusable("ai_edge_litert.interpreter", "Interpreter"):
        raise UnsupportedError(f"{name}: Google's interpreter (ai-edge-litert) cannot be asked: {why}.")
    if source.model.weights is not None:
        raise UnsupportedError(
            f"{name}: the drafter's weights lie in a section of their own, which the interpreter cannot be given. "
            "Parity is possible for files that hold them in the drafter's section."
        )
    from ai_edge_litert.interpreter import Interpreter

    try:
        with _without_stderr():
            content = in_floats(source.model) if floats else region.read(0, region.size)
            interpreter = Interpreter(model_content=content, num_threads=1)
            interpreter.allocate_tensors()
            run = interpreter.get_signature_runner(source.signature.key)
            takes, gives, found = run.get_input_details(), run.get_output_details(), list[Outputs]()
            for inputs in steps:
                made = run(**{name: encoded(inputs[names[name]], detail) for name, detail in takes.items()})
                found.append((decoded(made[LOGITS], gives[LOGITS]), decoded(made[PROJECTED], gives[PROJECTED])))
            return found
    except UnsupportedError:
        raise
    except Exception as error:  # What a tool of another release raises has no class of its own.
        raise UnsupportedError(f"{name}: Google's interpreter cannot run the drafter: {escape(error)}.") from error


def encoded(values: NDArray[Any], detail: Mapping[str, Any]) -> NDArray[Any]:
    """``values`` as the interpreter takes this input: floats as the nearest codes, ties to even, clipped.

    A mask that is no bool is 0, and where it hides a slot the number that LiteRT's runtime writes.
    """
    if values.dtype == np.bool_ and detail["dtype"] != np.bool_:
        hidden = HIDDEN_BY_FLOATS[TensorType[np.dtype(detail["dtype"]).name.upper()]]
        return np.where(values, 0, hidden).astype(detail["dtype"])
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


def in_floats(model: TfliteModel) -> bytes:
    """The section of ``model`` in floats, which Google's own classes of the schema take apart and write again.

    Raises:
        UnsupportedError: it has codes that this release cannot read.
        FormatError: damaged quantization.
    """
    import flatbuffers
    from ai_edge_litert import schema_py_generated as schema

    made = schema.ModelT.InitFromPackedBuf(model.region.read(0, model.region.size))
    for buffer in made.buffers:
        if buffer.data is None and buffer.offset > 1:  # it lies behind the flatbuffer
            buffer.data = np.frombuffer(model.region.read(buffer.offset, buffer.size), np.uint8)
            buffer.offset = buffer.size = 0
    cast = len(made.operatorCodes)
    made.operatorCodes.append(schema.OperatorCodeT(deprecatedBuiltinCode=_CAST, version=1, builtinCode=_CAST))
    for graph, known in zip(made.subgraphs, model.subgraphs, strict=True):
        for tensor, was in zip(graph.tensors, known.tensors, strict=True):
            if is_coded(was):
                tensor.type, tensor.quantization = int(TensorType.FLOAT32), None
                if model.has_data(was):
                    tensor.buffer = len(made.buffers)
                    made.buffers.append(schema.BufferT(data=QuantizedTensor.of(model, was).floats().view(np.uint8)))
        for node, operator in zip(graph.operators, known.operators, strict=True):
            ends = {graph.tensors[index].type for index in (*operator.inputs, *operator.outputs)}
            if operator.kind in ("QUANTIZE", "DEQUANTIZE") and ends == {int(TensorType.FLOAT32)}:
                node.opcodeIndex, node.builtinOptionsType, node.builtinOptions = cast, 0, None
    builder = flatbuffers.Builder(1 << 20)
    builder.Finish(made.Pack(builder), TFLITE_IDENTIFIER)
    return bytes(builder.Output())


def is_coded(tensor: Tensor) -> bool:
    """Whether the integers of ``tensor`` stand for real numbers by scales of its own."""
    known = tensor.quantization
    return tensor.type not in FLOAT_TYPES and known is not None and (known.scales.count > 0 or known.details != "none")
