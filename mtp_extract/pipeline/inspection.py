"""What a file holds, as plain data: sections, tensors, and the drafter's roles with the evidence for each."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mtp_extract.architecture.config import DrafterConfig, known_drafter
from mtp_extract.architecture.roles import EAGLE3, shapes_of
from mtp_extract.bundle import Opened, Shard
from mtp_extract.checkpoint.record import activation_json
from mtp_extract.checkpoint.stored import stored_of
from mtp_extract.checkpoint.weight import Weight
from mtp_extract.errors import FormatError, MtpExtractError, NoDrafterError
from mtp_extract.formats import format_of
from mtp_extract.formats.eagle3 import findings_of
from mtp_extract.graph.roles import FoundRole
from mtp_extract.litertlm.published import known_bundle
from mtp_extract.litertlm.tflite import Subgraph, Tensor, TfliteModel
from mtp_extract.pipeline.extraction import checkpoint_of, prove_checkpoint


@dataclass(frozen=True)
class Inspection:
    """What :func:`inspect` found. ``as_json`` is the whole of it; the rest is what a summary needs.

    Attributes:
        problem: why the drafter cannot be extracted; None when it can, or when there is none.
    """

    as_json: dict[str, Any]
    problem: MtpExtractError | None


def inspect(
    opened: Opened,
    *,
    tensors: bool = False,
    graph: bool = False,
    section: int | None = None,
    sliding_window: int | None = None,
) -> Inspection:
    """Look at ``opened``. Only the header and flatbuffers are read, and weights only for ``graph``.

    Args:
        tensors: list every tensor of the drafter's model, or of ``section``.
        graph: list every role with its evidence, every constant set aside, and the cache inputs; and prove
            the checkpoint that it would give, which reads the weights.
        section: index of the TFLite section to describe instead of the drafter's.

    Raises:
        NoDrafterError: ``section`` is no TFLite section; or the source is neither a bundle nor a model.
    """
    bundle = opened.bundle
    known = known_bundle(opened.source)
    report: dict[str, Any] = {
        "name": opened.source.name,
        "size": opened.source.size,
        "kind": "litertlm" if bundle else "tflite",
        "version": ".".join(map(str, bundle.version)) if bundle else None,
        "known_bundle": known.name if known else None,
        "provenance": dict(sorted(opened.source.provenance.items())),
        "items": dict(bundle.items) if bundle else {},
        "sections": [
            {**_fields(s, "index data_type type_name:type model_type begin end size"), "items": dict(s.items)}
            for s in opened.sections
        ],
    }
    if section is not None:
        (chosen,) = replace(opened, section=section).chosen()
        report["model"] = _model(opened.model(chosen), tensors)
        return Inspection(report, None)
    problem: MtpExtractError | None = None
    try:
        drafter = opened.drafter(sliding_window)
        report["drafter"] = _drafter(drafter, tensors, graph)
        report["drafter"]["base_model"] = drafter.known["base_model"] if drafter.known else known and known.base_model
    except NoDrafterError as error:
        if bundle is None and not opened.is_model:
            raise
        report["drafter"], report["no_drafter"] = None, str(error)
    except MtpExtractError as error:
        report["drafter"], report["problem"], problem = None, str(error), error
    return Inspection(report, problem)


def _drafter(drafter: Shard, tensors: bool, graph: bool) -> dict[str, Any]:
    section = drafter.section
    confirmed = set(drafter.names.confirmed)
    found: dict[str, Any] = {
        "section": section.index if section else None,
        "found_by": drafter.found_by,
        "begin": drafter.model.region.begin,
        "size": drafter.model.region.size,
        "known_as": drafter.known["name"] if drafter.known else None,
        "geometry": drafter.config.as_json(),
        "parameters": sum(math.prod(r.shape) for r in drafter.walk.roles),
        "stored_types": dict(
            sorted(Counter(r.tensor.type_name for r in drafter.walk.roles if r.tensor is not None).items())
        ),
        "roles_found": len(drafter.walk.roles),
        "set_aside_count": len(drafter.walk.aside),
        "names_confirmed": len(confirmed),
        "model": _model(drafter.model, tensors),
    }
    if graph:
        found["roles"] = [_role(drafter, role, role.role in confirmed) for role in drafter.walk.roles]
        found["set_aside"] = [
            {**_fields(entry.tensor, f"index:tensor subgraph {_NAMED}"), **_fields(entry, "op reason")}
            for entry in drafter.walk.aside
        ]
        found["kv_inputs"] = _caches(drafter)
        found["proof"] = prove_checkpoint(drafter, checkpoint_of(drafter)).as_json()
    return found


_NAMED = "name type_name:dtype shape"


def _fields(value: object, names: str) -> dict[str, Any]:
    """Attributes of ``value`` as JSON has them, by name or, after a colon, by another; None of what is None."""
    pairs = [name.split(":") for name in names.split()]
    found = {pair[-1]: None if value is None else getattr(value, pair[0]) for pair in pairs}
    return {name: list(one) if isinstance(one, tuple) else one for name, one in found.items()}


def _role(drafter: Shard, role: FoundRole, confirmed: bool) -> dict[str, Any]:
    """A role with its constant, how that is quantized, the static quantization around a matrix, and the evidence."""
    tensor = role.tensor
    described = _tensor(drafter.model, drafter.model.subgraphs[tensor.subgraph], tensor) if tensor is not None else {}
    return {
        **_fields(role, "role shape"),
        **_fields(tensor, "subgraph index:tensor name type_name:type"),
        **_fields(role, "factor why"),
        **{key: described.get(key) for key in ("quantization", "data")},
        "activations": {"input": activation_json(role.input), "output": activation_json(role.output)},
        "name_confirms": confirmed,
    }


def _caches(drafter: Shard) -> dict[str, Any]:
    """The base model's caches that the drafter reads: type, shape, static quantization and the layers that read it."""
    users: dict[str, list[int]] = {}
    for index, layer in enumerate(drafter.walk.layers):
        users.setdefault(layer.key, []).append(index)
        users.setdefault(layer.value, []).append(index)
    result = {}
    for name, tensor in drafter.walk.caches.items():
        quantization = tensor.quantization
        static = quantization is not None and quantization.scales.count == 1
        scale = float(quantization.scale[0]) if quantization is not None and static else None
        if scale is not None and not 0 <= scale < math.inf:
            raise FormatError(f"{tensor.label} has a scale of {scale}: the file is damaged.")
        zero_points = (
            quantization.zero_point if quantization is not None and quantization.zero_points.count == 1 else ()
        )
        result[name] = {
            "dtype": tensor.type_name,
            "shape": list(tensor.shape),
            "scale": scale,
            "zero_point": next(map(int, zero_points), None),
            "layers": users.get(name, []),
        }
    return result


def _model(model: TfliteModel, tensors: bool) -> dict[str, Any]:
    described: dict[str, Any] = {
        "description": model.description,
        "subgraphs": len(model.subgraphs),
        "tensors_in_all": sum(len(g.tensors) for g in model.subgraphs),
        "operators": sum(len(g.operators) for g in model.subgraphs),
        "signatures": [
            {
                "key": s.key,
                "subgraph": s.subgraph,
                "inputs": _interface(model, s.subgraph, s.inputs),
                "outputs": _interface(model, s.subgraph, s.outputs),
            }
            for s in model.signatures
        ],
    }
    if tensors:
        described["tensors"] = [_tensor(model, g, t) for g in model.subgraphs for t in g.tensors]
    return described


def _interface(model: TfliteModel, subgraph: int, names: Any) -> dict[str, dict[str, Any]]:
    graph = model.subgraphs[subgraph]
    return {
        name: {"type": graph.tensors[i].type_name, "shape": list(graph.tensors[i].shape)} for name, i in names.items()
    }


def _tensor(model: TfliteModel, graph: Subgraph, tensor: Tensor) -> dict[str, Any]:
    quantization = tensor.quantization
    described = {
        "subgraph": graph.index,
        **_fields(tensor, "index name type_name:type shape"),
        "quantization": None,
        "data": None,
    }
    if quantization is not None:
        blocks = quantization.blockwise
        described["quantization"] = {
            "scales": quantization.scales.count,
            "zero_points": quantization.zero_points.count,
            "axis": quantization.axis,
            "details": quantization.details,
            "block_size": blocks.block_size if blocks else None,
        }
    if model.has_data(tensor):
        described["data"] = _data(model, tensor)
    return described


def _data(model: TfliteModel, tensor: Tensor) -> dict[str, Any]:
    """Where the bytes of a constant lie; for one that cannot be read, such as strings, the reason."""
    try:
        location = model.locate(tensor)
    except MtpExtractError as error:
        return {"problem": str(error)}
    return {"offset": location.begin, "length": location.size}


def inspect_checkpoint(place: Path, *, tensors: bool = False) -> dict[str, Any]:
    """What the checkpoint at ``place`` holds, of whichever format, by itself: no record is looked at.

    Args:
        tensors: list every weight.

    Raises:
        CheckpointError: it is damaged, or holds no drafter.
    """
    format_ = format_of(place)
    found = format_.read(place)
    known = known_drafter(found.config) if isinstance(found.config, DrafterConfig) else None
    shapes = {role: shape for role, shape in shapes_of(found.config).items() if role.name in found.tensors}
    types = {role.name: _stored_type(found.tensors[role.name]) for role in shapes}
    described: dict[str, Any] = {
        "format": format_.name,
        "known_as": known["name"] if known else None,
        "geometry": found.config.as_json(),
        "parameters": sum(map(math.prod, shapes.values())),
        "weights": len(shapes),
        "stored_types": dict(sorted(Counter(types.values()).items())),
    }
    if found.architecture == EAGLE3:
        described["findings"] = [{**asdict(finding), "is_error": finding.is_error} for finding in findings_of(place)]
    if tensors:
        described["tensors"] = [
            {
                **{"role": role.name, "name": role.names.get(format_.name, role.name)},
                **{"type": types[role.name], "shape": list(shape), "block_size": _block(found.tensors[role.name])},
            }
            for role, shape in shapes.items()
        ]
    return described


def _block(weight: Weight) -> int | None:
    """Neighbouring elements of a row that share a scale; None where a row has one, or none."""
    return weight.steps.block if weight.steps is not None and weight.steps.block != weight.shape[-1] else None


def _stored_type(tensor: Weight) -> str:
    if (stored := stored_of(tensor)) is not None:
        return stored.tensor.dtype
    return f"INT{tensor.scheme.bits}" if tensor.scheme is not None else "implied"
