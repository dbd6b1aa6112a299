"""Quantization recipes, and a quantizer that keeps the integers it computed before packing them."""

# The tools below carry no type hints, and are not installed where the types are checked.
# mypy: disable-error-code="import-not-found, import-untyped, misc, no-untyped-call"

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ai_edge_litert.tools import flatbuffer_utils
from ai_edge_quantizer import calibrator, qtyping, quantizer
from ai_edge_quantizer.utils import qsv_utils
from numpy.typing import NDArray

Array = NDArray[Any]
_Granularity = qtyping.QuantGranularity
_FULLY_CONNECTED = qtyping.TFLOperationName.FULLY_CONNECTED
_BLOCKWISE = {32: _Granularity.BLOCKWISE_32, 64: _Granularity.BLOCKWISE_64}

HEAD = "embedder.decode"
MLP_AND_HEAD = f"/mlp/|{HEAD}"
"""Output names of the MLP's fully-connected ops and of the LM head, under their published names."""


@dataclass(frozen=True)
class Rule:
    """How the ops whose output name matches ``regex`` are quantized; later rules win.

    Attributes:
        bits: 2, 4 or 8 bit integers; 16 casts weights to float16.
        block: block length along the input axis, 0 for one scale per output channel.
        weight_only: dequantize the weights by an op and compute in float.
        symmetric: all zero points 0; otherwise only with ``weight_only``.
        activation_bits: static activation quantization (needs calibration), 0 for dynamic.
        algorithm: the quantizer's name of the algorithm.
        operation: the TFLite op the rule is for.
    """

    bits: int
    regex: str = ".*"
    block: int = 0
    weight_only: bool = False
    symmetric: bool = True
    activation_bits: int = 0
    algorithm: str = "min_max_uniform_quantize"
    operation: str = _FULLY_CONNECTED

    def config(self) -> Any:
        """The quantizer's own form of this rule."""
        as_float = self.bits == 16
        weights = qtyping.TensorQuantizationConfig(
            num_bits=self.bits,
            symmetric=self.symmetric,
            granularity=_BLOCKWISE[self.block] if self.block else _Granularity.CHANNELWISE,
            dtype=qtyping.TensorDataType.FLOAT if as_float else qtyping.TensorDataType.INT,
        )
        activations = (
            qtyping.TensorQuantizationConfig(num_bits=self.activation_bits, symmetric=True)
            if self.activation_bits
            else None
        )
        in_float = self.weight_only or as_float
        return qtyping.OpQuantizationConfig(
            activation_tensor_config=activations,
            weight_tensor_config=weights,
            compute_precision=qtyping.ComputePrecision.FLOAT if in_float else qtyping.ComputePrecision.INTEGER,
            explicit_dequantize=self.weight_only,
        )


def _mixed(low: int, high: int = 8, **options: Any) -> tuple[Rule, ...]:
    return (Rule(high, **options), Rule(low, MLP_AND_HEAD, **options))


RECIPES: Mapping[str, tuple[Rule, ...]] = {
    "mix48": _mixed(4),
    "mix28": _mixed(2),
    "int4": (Rule(4),),
    "int8": (Rule(8),),
    "float32": (),
    "float16": (Rule(16, algorithm="float_casting"),),
    "weight_only": _mixed(4, weight_only=True),
    "asymmetric": _mixed(4, weight_only=True, symmetric=False),
    "blockwise32": (Rule(8), Rule(4, MLP_AND_HEAD, block=32)),
    "blockwise64": (Rule(8), Rule(4, MLP_AND_HEAD, block=64)),
    "static8": (Rule(8, activation_bits=8), Rule(4, HEAD)),
    "hadamard": (Rule(8), Rule(4, MLP_AND_HEAD, algorithm="DECOMPOSED_HADAMARD_ROTATION")),
}
"""Recipe name → rules. The published drafters are ``mix48`` with static activations."""


class RecordingQuantizer(quantizer.Quantizer):  # type: ignore[misc,unused-ignore]
    """A quantizer whose ``parameters`` are what it computed: tensor name → parameters with integers."""

    parameters: dict[str, Any]

    def _get_quantization_params(self, *args: Any, **kwargs: Any) -> Any:
        computed = super()._get_quantization_params(*args, **kwargs)
        self.parameters = {
            name: consumer.parameters
            for name, entry in computed.items()
            for consumer in entry.consumers or ()
            if consumer.parameters is not None
        }
        return computed


def quantize(
    source: Path,
    target: Path,
    rules: Sequence[Rule],
    calibration: Iterable[Mapping[str, Array]] | None = None,
    signature: str = "mtp_drafter",
) -> dict[str, Any]:
    """Quantizes the float model ``source`` into ``target``.

    Args:
        calibration: inputs of ``signature``; needed when a rule has static activations.

    Returns:
        The quantizer's parameters by tensor name; empty without rules, when the file is copied.
    """
    if not rules:
        target.write_bytes(source.read_bytes())
        return {}
    worker = RecordingQuantizer(str(source))
    for rule in rules:
        worker.update_quantization_recipe(rule.regex, rule.operation, rule.config(), rule.algorithm)
    statistics = None
    if worker.need_calibration:
        if calibration is None:
            raise ValueError("a recipe with static activations needs calibration inputs")
        # The default update, a moving average, clips what it has seen.
        observer = calibrator.Calibrator(source.read_bytes(), num_threads=1, qsv_update_func=qsv_utils.min_max_update)
        observer.calibrate({signature: list(calibration)}, worker._recipe_manager)
        statistics = observer.get_model_qsvs()
    result = worker.quantize(calibration_result=statistics, enable_progress_report=False)
    target.write_bytes(bytes(result.quantized_model))
    return worker.parameters


def float_constants(path: Path) -> dict[str, Array]:
    """The constant matrices and vectors of a float model: tensor name → float32, ``[out, in]`` or ``[size]``."""
    model = flatbuffer_utils.read_model(str(path))
    found: dict[str, Array] = {}
    for graph in model.subgraphs:
        for tensor in graph.tensors:
            data = model.buffers[tensor.buffer].data if tensor.buffer else None
            if data is not None and tensor.type == qtyping.TensorType.FLOAT32 and len(tensor.shape) in (1, 2):
                values = np.frombuffer(bytes(data), np.float32).reshape(tensor.shape)
                found[tensor.name.decode()] = values
    return found


def truth(
    float_model: Path,
    parameters: Mapping[str, Any],
    weights: Mapping[str, Array],
    softcap: float | None,
) -> dict[str, Array]:
    """What the quantizer computed, under transformers names.

    Constants of the float model are matched to ``weights`` by value, so no name and no graph is trusted.
    A matrix that matches after division by the soft cap has the factor 1/softcap: stored = factor * weight.

    Returns:
        Per transformers name ``h``: ``h/q`` integers, ``h/scale``, ``h/zp``, ``h/qdim``, ``h/block``,
        ``h/bits``, ``h/factor``, ``h/tensor``, ``h/hadamard``; a float tensor has ``h/q`` in its own dtype
        and scale 1.
    """
    constants = float_constants(float_model)
    out: dict[str, Array] = {}
    for name, weight in weights.items():
        if weight.ndim != 2:
            continue
        tensor, factor = find(name, weight, constants, softcap)
        fields = _entry(constants[tensor], parameters.get(tensor))
        fields |= {"factor": np.array(factor), "tensor": np.array(tensor)}
        out |= {f"{name}/{key}": value for key, value in fields.items()}
    return out


def find(name: str, weight: Array, constants: Mapping[str, Array], softcap: float | None) -> tuple[str, float]:
    """The tensor among ``constants`` that holds ``weight``, and the factor: stored = factor * weight.

    Raises:
        ValueError: none does, or several.
    """
    tests: list[tuple[float, Callable[[Array], bool]]] = [(1.0, lambda c: bool(np.array_equal(c, weight)))]
    if softcap is not None:
        folded = weight / np.float32(softcap)
        tests.append((1 / softcap, lambda c: bool(np.allclose(c, folded, rtol=1e-6, atol=0))))
    for factor, same in tests:
        matches = [key for key, value in constants.items() if value.shape == weight.shape and same(value)]
        if len(matches) == 1:
            return matches[0], factor
        if matches:
            raise ValueError(f"{name}: {len(matches)} equal constants in the float model")
    raise ValueError(f"{name}: no constant of the float model holds it")


def _entry(stored: Array, computed: Any) -> dict[str, Array]:
    if computed is None:
        return _fields(stored, np.ones(1, np.float32), np.zeros(1, np.int8), None, 0, 32, False)
    if isinstance(computed, qtyping.NonLinearQuantParams):
        data = np.asarray(computed.quantized_data)
        return _fields(data, np.ones(1, np.float32), np.zeros(1, np.int8), None, 0, computed.num_bits, False)
    return _fields(
        np.asarray(computed.quantized_data),
        np.asarray(computed.scale),
        np.asarray(computed.zero_point),
        computed.quantized_dimension,
        computed.block_size,
        computed.num_bits,
        computed.hadamard is not None,
    )


def _fields(
    q: Array, scale: Array, zp: Array, qdim: int | None, block: int, bits: int, hadamard: bool
) -> dict[str, Array]:
    return {
        "q": q,
        "scale": scale,
        "zp": zp,
        "qdim": np.array(-1 if qdim is None else qdim),
        "block": np.array(block),
        "bits": np.array(bits),
        "hadamard": np.array(int(hadamard)),
    }


def dequantize(entry: Mapping[str, Array], name: str) -> Array:
    """The float32 weight behind a :func:`truth` entry: (q - zp) * scale / factor."""
    q = entry[f"{name}/q"].astype(np.float32)
    scale, zp = (entry[f"{name}/{key}"].astype(np.float32) for key in ("scale", "zp"))
    block = int(entry[f"{name}/block"])
    if block:
        scale = np.repeat(scale, block, axis=1)
        zp = np.repeat(zp, block, axis=1) if zp.shape[-1:] != (1,) else zp
    result: Array = ((q - zp) * scale / np.float32(entry[f"{name}/factor"])).astype(np.float32)
    return result
