"""Compare Google's interpreter, which runs the drafter's section, with PyTorch, which runs the drafter.

They are compared twice, on the same inputs. *In floats* every tensor of codes is made float32: constants are
dequantized, activations and caches lose their scales, and QUANTIZE and DEQUANTIZE between two floats become CAST, which
does nothing. The same operators run, nothing rounds, and the two programs differ only in the order of float additions.
*As it is*, the section computes with its integers and rounds activations. How far that is from floats is reported, and
bounded loosely, which shows that the floats are the section's own.

LiteRT has two sets of kernels for this. LiteRT-LM runs XNNPACK's, but their memory for attention over whole caches
grows with the square of the length: 17 GB for a drafter of E2B with 32 003 slots. The *reference kernels*, plain loops,
take 0.5 GB. They always compute the section in floats, and the section as it is if its caches are long. Their INT8 and
INT4 codes are XNNPACK's except in a tie of two codes (LiteRT's other plain kernels, the optimized ones, misread INT4's
-8). They do not compute two things: scales by block, and products of floats with INT8's -128, whose sign an 8-bit
register cannot change. Such weights are given to them as floats.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtp_extract.bundle import BundledDrafter
from mtp_extract.drafter.mtp import MtpDrafter
from mtp_extract.errors import UnsupportedError, escape
from mtp_extract.evaluation.extras import explain_import_failure
from mtp_extract.graph.drafter import LOGITS, PROJECTED
from mtp_extract.graph.masks import HIDDEN_BY_FLOATS
from mtp_extract.litertlm.container import TFLITE_IDENTIFIER
from mtp_extract.litertlm.quantized import QuantizedTensor
from mtp_extract.litertlm.storage import CHUNK_ELEMENTS, FLOAT_TYPES, Floats
from mtp_extract.litertlm.tflite import Subgraph, Tensor, TensorType, TfliteModel
from mtp_extract.pipeline.check import Check
from mtp_extract.validation.parity import (
    FIRST_POSITIONS,
    GraphInputs,
    OutputDifference,
    Outputs,
    choose_positions,
    compare_outputs,
    compute_allowed_difference,
    draw_inputs,
    find_longest_cache,
    run_check,
    run_reference,
)

LEAST_CORRELATION = 0.5  # with the outputs of the section as it is, over all steps
XNNPACK_SLOTS = 4096  # longest caches for XNNPACK: 0.25 GB for a drafter of E2B; twice as many slots take 1.06 GB
_CAST = 53  # code of LiteRT's builtin operator
_TABLE_BYTES = 1 << 22  # room for the tables of a flatbuffer beside its buffers


@dataclass(frozen=True)
class Parity:
    """Differences of a drafter from Google's interpreter."""

    nearby: OutputDifference  # in floats, at the first positions
    in_floats: OutputDifference  # in floats, at all positions
    as_it_is: OutputDifference  # with the file's integers, at all positions
    nearby_allowed: float  # largest allowed difference of ``nearby``
    allowed: float  # largest allowed difference of ``in_floats``

    @property
    def agrees(self) -> bool:
        """Whether both compute the same function."""
        in_floats = self.nearby.worst <= self.nearby_allowed and self.in_floats.worst <= self.allowed
        return in_floats and self.as_it_is.correlation >= LEAST_CORRELATION


def measure_parity(drafter: MtpDrafter, source: BundledDrafter, samples: int, seed: int = 0) -> Parity:
    """Compare ``drafter``, float32 on the CPU, with the interpreter on ``samples`` random steps.

    Raise UnsupportedError if the interpreter cannot run: see :func:`run_interpreter`.
    """

    def run_both(floats: bool) -> tuple[list[Outputs], list[Outputs]]:
        ours = [run_reference(drafter, source, x) for x in draw_inputs(source, samples, seed, quiet=floats)]
        return ours, run_interpreter(source, draw_inputs(source, samples, seed, quiet=floats), floats=floats)

    ours, theirs = run_both(True)
    positions = choose_positions(source, samples, quiet=True)
    nearby = [position for position in positions if position < FIRST_POSITIONS]
    terms = max(weight.shape[-1] for weight in drafter.parameters())
    return Parity(
        nearby=compare_outputs(ours[: len(nearby)], theirs[: len(nearby)]),
        in_floats=compare_outputs(ours, theirs),
        as_it_is=compare_outputs(*run_both(False)),
        nearby_allowed=compute_allowed_difference(terms, max(nearby)),
        allowed=compute_allowed_difference(terms, max(positions)),
    )


def check_interpreter(drafter: MtpDrafter, source: BundledDrafter, *, samples: int) -> Check:
    """Check ``drafter`` by :func:`measure_parity`.

    The check stays open if the interpreter cannot run the file, or fails with the sample's drafter, too.
    """

    def examine(directory: Path, drafter: MtpDrafter, source: BundledDrafter) -> tuple[bool | None, str]:
        try:
            parity = measure_parity(drafter, source, samples)
        except UnsupportedError as error:
            return None, str(error)
        rough = parity.as_it_is
        kernels = "the reference kernels" if needs_reference_kernels(source) else "XNNPACK"
        return parity.agrees, (
            f"with the file's integers as floats, outputs within {parity.nearby.worst:.1e} of their range at the first "
            f"positions, {parity.nearby_allowed:.1e} being allowed, and within {parity.in_floats.worst:.1e} at all, "
            f"{parity.allowed:.1e} being allowed; with integers, by {kernels}, within {rough.worst:.1e}, correlated by "
            f"{rough.correlation:.3f}, the same top token in {rough.top1} of {samples} samples"
        )

    return run_check("interpreter", "Google's interpreter computes the same", examine, Path(), drafter, source)


def run_interpreter(source: BundledDrafter, steps: Iterable[GraphInputs], *, floats: bool) -> list[Outputs]:
    """Run the section on each of ``steps`` in Google's interpreter, in ``floats`` or as it is.

    Raise UnsupportedError if the interpreter is not installed or cannot run the section.
    """
    name = source.model.region.source.name
    if why := explain_import_failure("ai_edge_litert.interpreter", "Interpreter", "OpResolverType"):
        raise UnsupportedError(f"{name}: Google's interpreter (ai-edge-litert) cannot be asked: {why}.")
    if source.model.weights is not None:
        raise UnsupportedError(
            f"{name}: the drafter's weights lie in a section of their own, which the interpreter cannot be given. "
            "Parity is possible for files that hold them in the drafter's section."
        )
    from ai_edge_litert.interpreter import Interpreter, OpResolverType

    plain = floats or needs_reference_kernels(source)
    resolver = OpResolverType.BUILTIN_REF if plain else OpResolverType.AUTO
    try:
        with _silence_stderr():
            content = _build_section(source, floats=floats)
            interpreter = Interpreter(model_content=content, num_threads=1, experimental_op_resolver_type=resolver)
            interpreter.allocate_tensors()
            runner = interpreter.get_signature_runner(source.signature.key)
            return [_run_step(runner, source.graph.input_names, inputs) for inputs in steps]
    except UnsupportedError:
        raise
    except Exception as error:  # another release of the interpreter may raise any class
        raise UnsupportedError(f"{name}: Google's interpreter cannot run the drafter: {escape(error)}.") from error


def needs_reference_kernels(source: BundledDrafter) -> bool:
    """Whether the caches are so long that XNNPACK would take gigabytes to run the section as it is."""
    return find_longest_cache(source) > XNNPACK_SLOTS


def _build_section(source: BundledDrafter, *, floats: bool) -> bytes:
    """Return the section in floats or, if not ``floats``, as it is but for weights that the kernels would misread."""
    if floats:
        return convert_to_floats(source.model)
    if needs_reference_kernels(source) and (misread := _find_misread_weights(source.model)):
        return convert_to_floats(source.model, lambda tensor: (tensor.subgraph, tensor.index) in misread)
    return source.model.region.read(0, source.model.region.size)


def _find_misread_weights(model: TfliteModel) -> set[tuple[int, int]]:
    """Return subgraph and index of each weight that the reference kernels misread."""
    misread = set()
    for graph in model.subgraphs:
        for tensor in graph.tensors:
            if tensor.quantization is not None and tensor.quantization.blockwise is not None:
                misread.add((tensor.subgraph, tensor.index))
        for operator in graph.operators:
            if operator.kind not in ("FULLY_CONNECTED", "BATCH_MATMUL"):
                continue
            # If activations have codes, the product is one of integers, which they compute correctly.
            first, second = (graph.tensors[index] for index in operator.inputs[:2])
            if first.type == TensorType.FLOAT32 and _holds_lowest_int8(model, second):
                misread.add((second.subgraph, second.index))
    return misread


def _run_step(runner: Any, names: Mapping[str, str], inputs: GraphInputs) -> Outputs:
    """Run one step. ``names`` are the graph's names of the signature's inputs."""
    input_details = runner.get_input_details()
    output_details = runner.get_output_details()
    computed = runner(**{name: encode_input(inputs[names[name]], detail) for name, detail in input_details.items()})
    logits = decode_output(computed[LOGITS], output_details[LOGITS])
    return logits, decode_output(computed[PROJECTED], output_details[PROJECTED])


def encode_input(values: NDArray[Any], detail: Mapping[str, Any]) -> NDArray[Any]:
    """Encode ``values`` for an input of the interpreter: floats as the nearest codes, ties to even, clipped.

    A mask that is not bool gets 0 for visible slots, and the number that LiteRT's runtime writes for hidden ones.
    """
    if values.dtype == np.bool_ and detail["dtype"] != np.bool_:
        hidden = HIDDEN_BY_FLOATS[TensorType[np.dtype(detail["dtype"]).name.upper()]]
        return np.where(values, 0, hidden).astype(detail["dtype"])
    if values.dtype != np.float32 or detail["dtype"] == np.float32:
        return values
    scale, zero_point = detail["quantization"]
    limits = np.iinfo(detail["dtype"])
    if not scale:
        raise UnsupportedError(f"{escape(detail['name'])} holds integers without a scale.")
    codes = np.rint(values / np.float32(scale)) + zero_point
    stored: NDArray[Any] = np.clip(codes, limits.min, limits.max).astype(limits.dtype)
    return stored


def decode_output(values: NDArray[Any], detail: Mapping[str, Any]) -> Floats:
    """Decode an output of the interpreter to flat float32."""
    flat = values.reshape(-1)
    if flat.dtype == np.float32:
        return flat
    scale, zero_point = map(np.float32, detail["quantization"])
    floats: Floats = (flat.astype(np.float32) - zero_point) * scale
    return floats


@contextmanager
def _silence_stderr() -> Iterator[None]:
    """Discard what the interpreter's C++ writes to stderr; its errors are raised as exceptions, too."""
    sys.stderr.flush()
    stderr_copy = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(stderr_copy, 2)
        os.close(stderr_copy)
        os.close(null)


def is_coded(tensor: Tensor) -> bool:
    """Whether ``tensor`` holds codes: integers with scales."""
    quantization = tensor.quantization
    return (
        tensor.type not in FLOAT_TYPES
        and quantization is not None
        and (quantization.scales.count > 0 or quantization.details != "none")
    )


def convert_to_floats(model: TfliteModel, chosen: Callable[[Tensor], bool] = is_coded) -> bytes:
    """Return the section of ``model`` with float32 in place of codes, rewritten by Google's own schema classes.

    ``chosen`` selects the tensors to convert; by default all that hold codes. Raise UnsupportedError for codes that
    this release cannot read, FormatError for damaged quantization.
    """
    import flatbuffers
    from ai_edge_litert import schema_py_generated as schema

    section = schema.ModelT.InitFromPackedBuf(model.region.read(0, model.region.size))
    # The new section has nothing behind its flatbuffer, so constants that lie there move into it.
    for buffer in section.buffers:
        if buffer.data is None and buffer.offset > 1:
            buffer.data = np.frombuffer(model.region.read(buffer.offset, buffer.size), np.uint8)
            buffer.offset = buffer.size = 0
    cast = schema.OperatorCodeT(deprecatedBuiltinCode=_CAST, version=1, builtinCode=_CAST)
    section.operatorCodes.append(cast)
    for graph, subgraph in zip(section.subgraphs, model.subgraphs, strict=True):
        for tensor, stored in zip(graph.tensors, subgraph.tensors, strict=True):
            if not chosen(stored):
                continue
            tensor.type = int(TensorType.FLOAT32)
            tensor.quantization = None
            if model.has_data(stored):
                tensor.buffer = len(section.buffers)
                floats = QuantizedTensor.of(model, stored).floats().view(np.uint8)
                section.buffers.append(schema.BufferT(data=floats))
        _cast_between_floats(graph, subgraph, section.operatorCodes.index(cast))
    # A builder that has to grow copies everything each time.
    size = sum(len(buffer.data) for buffer in section.buffers if buffer.data is not None)
    builder = flatbuffers.Builder(_TABLE_BYTES + size)
    builder.Finish(section.Pack(builder), TFLITE_IDENTIFIER)
    return bytes(builder.Output())


def _cast_between_floats(graph: Any, subgraph: Subgraph, cast: int) -> None:
    """Replace every QUANTIZE and DEQUANTIZE between two floats by the operator code of index ``cast``."""
    for node, operator in zip(graph.operators, subgraph.operators, strict=True):
        ends = {graph.tensors[index].type for index in (*operator.inputs, *operator.outputs)}
        if operator.kind in ("QUANTIZE", "DEQUANTIZE") and ends == {int(TensorType.FLOAT32)}:
            node.opcodeIndex = cast
            node.builtinOptionsType = 0
            node.builtinOptions = None


def _holds_lowest_int8(model: TfliteModel, tensor: Tensor) -> bool:
    if tensor.type != TensorType.INT8 or not model.has_data(tensor):
        return False
    region = model.locate(tensor)
    chunks = (range(begin, min(begin + CHUNK_ELEMENTS, region.size)) for begin in range(0, region.size, CHUNK_ELEMENTS))
    return any(np.frombuffer(region.read(chunk.start, len(chunk)), np.int8).min() == -128 for chunk in chunks)
