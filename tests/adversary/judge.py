"""Whether two drafters compute the same: files on Google's interpreter, checkpoints in the reference network.

The inputs tell functions apart: positions below, at and beyond the window, masks with holes, caches that are full of
other numbers in every slot and head, those that no query may see included.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter, OpResolverType
from helpers.make_bundle import pack
from helpers.signature import run_signature
from helpers.surgery import Graph
from seam import MtpExtractError

from adversary.edits import Case, Sample, sized
from mtp_extract import extract
from mtp_extract.drafter.load import load_drafter

SAME = 2e-5
"""Largest difference, as a share of the range of the outputs, between two that are the same."""
APART = 5e-5
"""Least difference, likewise, between two that are not."""

SAMPLES = (Sample(3), Sample(16), Sample(40), Sample(201), Sample(100, activations=8.0, values=8.0))
"""For every case; a bound that is far out shows only where numbers are loud."""

_HALF = (schema.TensorType.FLOAT16, schema.TensorType.BFLOAT16)

Arrays = dict[str, npt.NDArray[Any]]
Outputs = list[tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]]
"""Logits and projected state, for every set of inputs."""


def _visible(sample: Sample, slots: int, random: np.random.Generator) -> npt.NDArray[np.bool_]:
    at, drawn = np.arange(slots), random.random(slots)
    own, past = at == sample.position, at <= sample.position
    kinds = {"holes": (past & (drawn > 0.25)) | own, "past": past, "all": at >= 0, "one": own}
    return kinds[sample.mask]


def inputs_of(graph: Graph, shows: tuple[Sample, ...] = ()) -> tuple[Arrays, ...]:
    """Inputs for the signature of ``graph``, a sound one."""
    random = np.random.default_rng(2026)
    names = sorted(entry.name.decode() for entry in graph.model.signatureDefs[0].inputs)
    inputs = []
    for sample in SAMPLES + shows:
        arrays: Arrays = {}
        for name in names:
            shape = graph.shape(graph.input(name))
            values = random.standard_normal(shape)
            if name == "input_pos":
                arrays[name] = np.array([sample.position], np.int32)
            elif name == "mask":
                arrays[name] = _visible(sample, shape[-1], random).reshape(shape)
            elif name == "param_tensor":
                arrays[name] = np.zeros(shape, np.int32)
                arrays[name][..., :3] = sample.position, sample.position + 1, sample.position + 1
            elif name == "activations":
                arrays[name] = (values * sample.activations).astype(np.float32)
            else:
                # Heads are told apart by their spread, K and V by their mean.
                heads = np.linspace(0.7, 1.3, shape[1])[:, None, None]
                spread = sample.keys * 3.0 / shape[3] ** 0.5 if "_k_" in name else sample.values
                arrays[name] = ((values + (0.0 if "_k_" in name else 0.3)) * heads * spread).astype(np.float32)
        if sample.change is not None:
            sample.change(arrays)
        inputs.append(arrays)
    return tuple(inputs)


def computed(graph: Graph, inputs: tuple[Arrays, ...], exact: bool = False) -> Outputs:
    """What LiteRT computes of ``graph`` in floats; the graph is changed to that end.

    With integer weights LiteRT rounds activations, which hides small differences. So the weights are turned to floats
    first, by the rule of its own kernels: codes times the scales along the first axis. Rounding of activations (a
    QUANTIZE and the DEQUANTIZE that undoes it, casts to half precision and back) is taken away: a checkpoint of floats
    has none, and its record says so; ``exact``: it is executed all the same. ``inputs`` are the sound model's, which
    ``graph.adapt`` makes this one's. What the interpreter cannot run is a RuntimeError or ValueError of its own.
    """
    _float_weights(graph)
    if not exact:
        for op in [op for op in graph.ops if graph.kind(op) in ("DEQUANTIZE", "CAST")]:
            codes = int(op.inputs[0])
            source = graph.producer(codes)
            if source is not None and (graph.kind(source) == "QUANTIZE" or graph.main.tensors[codes].type in _HALF):
                graph.rewire(int(op.outputs[0]), int(source.inputs[0]))
    # LiteRT 2.3.0 plans memory wrongly where MUL and RESHAPE both hand their operand's memory on: every tensor is kept.
    interpreter = Interpreter(
        model_content=pack(graph.model),
        experimental_op_resolver_type=OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
        experimental_preserve_all_tensors=True,
    )
    runner = interpreter.get_signature_runner("mtp_drafter")
    wanted, described = runner.get_input_details(), runner.get_output_details()
    results: Outputs = []
    for arrays in inputs:
        adapted = arrays | {name: adapt(arrays[name]) for name, adapt in graph.adapt.items()}
        operands = {n: adapted.get(n, np.zeros(detail["shape"], detail["dtype"])) for n, detail in wanted.items()}
        outputs = runner(**operands)
        results.append(tuple(_real(outputs[name], described[name]) for name in ("logits", "projected_activations")))
    return results


def _real(array: npt.NDArray[Any], described: Mapping[str, Any]) -> npt.NDArray[np.float32]:
    """A result, flat; of codes, what they stand for."""
    scale, zero_point = described["quantization"]
    return array.reshape(-1) if array.dtype == np.float32 else (array.reshape(-1) - np.float32(zero_point)) * scale


def _float_weights(graph: Graph) -> None:
    for op in [op for op in graph.ops if graph.kind(op) == "FULLY_CONNECTED"]:
        x, weight = (graph.main.tensors[int(i)] for i in op.inputs[:2])
        codes = weight.type in (schema.TensorType.INT8, schema.TensorType.INT4) and graph.is_constant(int(op.inputs[1]))
        if codes and x.type == schema.TensorType.FLOAT32:
            weight.buffer = graph.buffer(graph.floats(int(op.inputs[1])).astype(np.float32).tobytes())
            weight.type, weight.quantization = schema.TensorType.FLOAT32, None


@torch.inference_mode()
def written(directory: Path, inputs: tuple[Arrays, ...]) -> Outputs:
    """What the checkpoint in ``directory`` computes, in float32."""
    drafter = load_drafter(directory, dtype=torch.float32)
    steps = [run_signature(drafter, arrays) for arrays in inputs]
    return [(step.logits.numpy().reshape(-1), step.projected.numpy().reshape(-1)) for step in steps]


def apart(ours: Outputs, theirs: Outputs) -> float:
    """The largest difference, as a share of the range of each output; infinite where numbers or shapes are not."""
    largest = 0.0
    for mine, other in zip(ours, theirs, strict=True):
        for a, b in zip(mine, other, strict=True):
            if a.shape != b.shape or not (np.isfinite(a).all() and np.isfinite(b).all()):
                return np.inf
            span = max(float(np.ptp(a)), float(np.ptp(b)), 1e-30)
            largest = max(largest, float(np.abs(a - b).max()) / span)
    return largest


@dataclass(frozen=True)
class Verdict:
    """What extraction makes of a case."""

    outcome: str  # refused, same (as the file), wrong, or crashed
    detail: str = ""  # the message, or what the interpreter says of a file that it cannot run
    difference: float = 0.0  # as a share of the outputs' range; 0 where nothing was written

    def __str__(self) -> str:
        return f"{self.outcome}: {self.detail or f'{self.difference:.2g}'}"


@cache
def original(
    style: str, layers: tuple[int, ...] = (0, 3), shows: tuple[Sample, ...] = (), slots: int = 256
) -> tuple[tuple[Arrays, ...], Outputs]:
    """Inputs of the sound drafter of ``style``, and what LiteRT computes of them."""
    graph = sized(style, layers, slots)
    inputs = inputs_of(graph, shows)
    return inputs, computed(graph, inputs)


def try_case(case: Case, style: str) -> Verdict | None:
    """Extract the drafter of ``style`` changed by ``case``; None where that does not apply."""
    graph = case.apply(style)
    if graph is None:
        return None
    inputs, _ = original(style, case.layers, case.shows, case.slots)
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder) / "drafter.tflite", Path(folder) / "out"
        file.write_bytes(graph.data())
        try:
            extract(file, out, dtype="f32")
        except MtpExtractError as error:
            return Verdict("refused", str(error))
        except Exception as error:  # noqa: BLE001 - any other error is a finding, and is reported as one
            return Verdict("crashed", f"{type(error).__name__}: {error}")
        try:
            ours = written(out, inputs)
        except MtpExtractError as error:
            return Verdict("wrong", f"what was written cannot be loaded: {error}", np.inf)
    try:
        theirs = computed(graph, inputs, case.exact)
    except (RuntimeError, ValueError) as error:
        return Verdict("wrong", case.why or f"LiteRT cannot run the file: {error}", np.inf)
    difference = apart(ours, theirs)
    return Verdict("same" if difference <= max(SAME, case.rounding) else "wrong", "", difference)
