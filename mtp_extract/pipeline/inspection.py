"""What a file holds, as plain data: sections, tensors, and the drafter's roles with the evidence for each."""

from __future__ import annotations

import math
import os
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from mtp_extract.architecture.config import DrafterConfig, known_drafter
from mtp_extract.architecture.roles import EAGLE3, shapes_of
from mtp_extract.bundle import Opened, Shard, open_bundle
from mtp_extract.checkpoint.stored import Stored
from mtp_extract.checkpoint.weight import Weight
from mtp_extract.errors import CheckpointError, MtpExtractError, NoDrafterError, escape
from mtp_extract.formats.eagle3 import findings_of
from mtp_extract.graph.call import grid_of
from mtp_extract.graph.roles import FoundRole
from mtp_extract.io.source import Progress, nothing_shown
from mtp_extract.litertlm.published import known_bundle
from mtp_extract.litertlm.tflite import Tensor, TfliteModel
from mtp_extract.pipeline.check import CARD, Check
from mtp_extract.pipeline.extraction import checkpoint_of, prove_checkpoint
from mtp_extract.pipeline.identity import verify_against
from mtp_extract.pipeline.reading import ReadDirectory


@dataclass(frozen=True)
class Inspection:
    """What a bundle or a checkpoint holds.

    Attributes:
        report: all of it, as ``mtp-inspect --json`` prints it.
        problem: why the drafter cannot be extracted, or engines may load something else than the checkpoint seems to
            hold; None where nothing was found.
    """

    report: dict[str, Any]
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
        "known_bundle": known["name"] if known else None,
        "provenance": dict(sorted(opened.source.provenance.items())),
        "items": dict(bundle.items) if bundle else {},
        "sections": [
            {
                **{"index": s.index, "data_type": s.data_type, "type": s.type_name, "model_type": s.model_type},
                **{"begin": s.begin, "end": s.end, "size": s.size, "items": dict(s.items)},
            }
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
        report["drafter"]["base_model"] = (
            drafter.known["base_model"] if drafter.known else known and known["base_model"]
        )
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
            {
                **{"tensor": aside.tensor.index, "subgraph": aside.tensor.subgraph, "name": aside.tensor.name},
                **{"dtype": aside.tensor.type_name, "shape": list(aside.tensor.shape)},
                **{"op": aside.op, "reason": aside.reason},
            }
            for aside in drafter.walk.aside
        ]
        found["kv_inputs"] = _caches(drafter)
        found["proof"] = prove_checkpoint(drafter, checkpoint_of(drafter))
    return found


def _role(drafter: Shard, role: FoundRole, confirmed: bool) -> dict[str, Any]:
    """A role with its constant, how that is quantized, the static quantization around a matrix, and the evidence."""
    tensor = defaultdict(lambda: None, {} if role.tensor is None else _tensor(drafter.model, role.tensor))
    return {
        "role": role.role,
        "shape": list(role.shape),
        "tensor": tensor["index"],
        **{key: tensor[key] for key in ("subgraph", "name", "type", "quantization", "data")},
        "factor": role.factor,
        "why": role.why,
        "activations": to_builtins({"input": role.input, "output": role.output}),
        "name_confirms": confirmed,
    }


def _caches(drafter: Shard) -> dict[str, Any]:
    """The base model's caches that the drafter reads: type, shape, static quantization and the layers that read it."""
    result = {}
    for name, tensor in drafter.walk.caches.items():
        scale, zero_point = grid_of(tensor) or (None, None)
        layers = [index for index, layer in enumerate(drafter.walk.layers) if name in (layer.key, layer.value)]
        own = {"dtype": tensor.type_name, "shape": list(tensor.shape), "scale": scale, "zero_point": zero_point}
        result[name] = {**own, "layers": layers}
    return result


def _model(model: TfliteModel, tensors: bool) -> dict[str, Any]:
    def interface(subgraph: int, names: Mapping[str, int]) -> dict[str, dict[str, Any]]:
        found = {name: model.tensor(subgraph, index) for name, index in names.items()}
        return {name: {"type": tensor.type_name, "shape": list(tensor.shape)} for name, tensor in found.items()}

    described: dict[str, Any] = {
        "description": model.description,
        "subgraphs": len(model.subgraphs),
        "tensors_in_all": sum(len(g.tensors) for g in model.subgraphs),
        "operators": sum(len(g.operators) for g in model.subgraphs),
        "signatures": [
            {
                "key": s.key,
                "subgraph": s.subgraph,
                "inputs": interface(s.subgraph, s.inputs),
                "outputs": interface(s.subgraph, s.outputs),
            }
            for s in model.signatures
        ],
    }
    if tensors:
        described["tensors"] = [_tensor(model, t) for g in model.subgraphs for t in g.tensors]
    return described


def _tensor(model: TfliteModel, tensor: Tensor) -> dict[str, Any]:
    """A tensor with its quantization and where its bytes lie; of bytes that cannot be read, such as strings, why."""
    described: dict[str, Any] = {
        **{"subgraph": tensor.subgraph, "index": tensor.index, "name": tensor.name},
        **{"type": tensor.type_name, "shape": list(tensor.shape), "quantization": None, "data": None},
    }
    if (found := tensor.quantization) is not None:
        described["quantization"] = {
            **{"scales": found.scales.count, "zero_points": found.zero_points.count, "axis": found.axis},
            **{"details": found.details, "block_size": found.blockwise.block_size if found.blockwise else None},
        }
    if model.has_data(tensor):
        try:
            location = model.locate(tensor)
            described["data"] = {"offset": location.begin, "length": location.size}
        except MtpExtractError as error:
            described["data"] = {"problem": str(error)}
    return described


def inspect_checkpoint(
    place: Path,
    bundle: str | os.PathLike[str] | None = None,
    *,
    tensors: bool = False,
    progress: Progress = nothing_shown,
) -> Inspection:
    """What the checkpoint at ``place`` holds, of whichever format, held against its record, if it has one.

    Args:
        bundle: where it came from, which all is derived from again and compared with.
        tensors: list every weight.

    Raises:
        CheckpointError: it is damaged, holds no drafter, or is not what its record or ``bundle`` says.
    """
    checks, against = list[Check](), None
    if bundle is not None:
        with open_bundle(bundle, progress=progress) as opened:
            checks, against = verify_against(place, opened), opened.source.name
    read = ReadDirectory.of(place)
    found, record = read.written, read.record
    known = known_drafter(found.config) if isinstance(found.config, DrafterConfig) else None
    shapes = {role: shape for role, shape in shapes_of(found.config).items() if role.name in found.tensors}
    types = {role.name: _stored_type(found.tensors[role.name]) for role in shapes}
    holds: dict[str, Any] = {
        "format": read.layout,
        "known_as": known["name"] if known else None,
        "geometry": found.config.as_json(),
        "parameters": sum(map(math.prod, shapes.values())),
        "weights": len(shapes),
        "stored_types": dict(sorted(Counter(types.values()).items())),
    }
    problem: MtpExtractError | None = None
    if found.architecture == EAGLE3:
        findings = findings_of(read.directory)
        holds["findings"] = [{**asdict(finding), "is_error": finding.is_error} for finding in findings]
        if wrong := sum(finding.is_error for finding in findings):
            problem = CheckpointError(
                f"{escape(read.directory)}: expected nothing that an engine takes otherwise without a word, found "
                f"{wrong}. Convert it, or change its config as said."
            )
    if tensors:
        holds["tensors"] = []
        for role, shape in shapes.items():
            weight = found.tensors[role.name]
            # Neighbours of a row that share a scale; None where a row has one, or none.
            shared = weight.steps.block if weight.scheme is not None else shape[-1]
            block = shared if shared != shape[-1] else None
            own = {"role": role.name, "name": role.names.get(read.layout, role.name), "type": types[role.name]}
            holds["tensors"].append({**own, "shape": list(shape), "block_size": block})
    report = {
        "directory": str(read.directory),
        "files": len({*record["files"]} - {CARD}) if read.is_recorded else None,
        "against": against,
        "checks": [asdict(check) for check in checks],
        "ok": problem is None,
        "extraction": record if read.is_recorded else None,
        "holds": holds,
    }
    return Inspection(report, problem)


def _stored_type(tensor: Weight) -> str:
    if isinstance(tensor, Stored):
        return tensor.tensor.dtype
    return f"INT{tensor.scheme.bits}" if tensor.scheme is not None else "implied"
