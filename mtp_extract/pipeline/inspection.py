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
from mtp_extract.errors import CheckpointError, MtpExtractError, NoDrafterError, escape
from mtp_extract.formats.eagle3 import findings_of
from mtp_extract.graph.call import grid_of
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
    bundle, known = opened.bundle, known_bundle(opened.source)
    of_section = ("index", "data_type", "type_name", "model_type", "begin", "end", "size", "items")
    report: dict[str, Any] = {
        "name": opened.source.name,
        "size": opened.source.size,
        "kind": "litertlm" if bundle else "tflite",
        "version": ".".join(map(str, bundle.version)) if bundle else None,
        "known_bundle": known["name"] if known else None,
        "provenance": dict(sorted(opened.source.provenance.items())),
        "items": dict(bundle.items) if bundle else {},
        "sections": [_picked(one, *of_section) for one in opened.sections],
    }
    if section is not None:
        (chosen,) = replace(opened, section=section).chosen()
        return Inspection({**report, "model": _model(opened.model(chosen), tensors)}, None)
    try:
        drafter = opened.drafter(sliding_window)
        found = _drafter(drafter, tensors) | (_graph(drafter) if graph else {})
    except NoDrafterError as error:
        if bundle is None and not opened.is_model:
            raise
        return Inspection({**report, "drafter": None, "no_drafter": str(error)}, None)
    except MtpExtractError as error:
        return Inspection({**report, "drafter": None, "problem": str(error)}, error)
    found["base_model"] = (drafter.known or known or {"base_model": None})["base_model"]
    return Inspection({**report, "drafter": found}, None)


def _picked(thing: object, *names: str) -> dict[str, Any]:
    """Attributes of ``thing`` by name, as JSON has them."""
    found = {name.removesuffix("_name"): getattr(thing, name) for name in names}
    found |= {name: list(value) for name, value in found.items() if isinstance(value, tuple)}
    return found | {name: dict(value) for name, value in found.items() if isinstance(value, Mapping)}


def _drafter(drafter: Shard, tensors: bool) -> dict[str, Any]:
    roles, region = drafter.walk.roles, drafter.model.region
    types = Counter(role.tensor.type_name for role in roles if role.tensor is not None)
    return {
        "section": drafter.section.index if drafter.section else None,
        "found_by": drafter.found_by,
        "begin": region.begin,
        "size": region.size,
        "known_as": drafter.known["name"] if drafter.known else None,
        "geometry": drafter.config.as_json(),
        "parameters": sum(math.prod(role.shape) for role in roles),
        "stored_types": dict(sorted(types.items())),
        "roles_found": len(roles),
        "set_aside_count": len(drafter.walk.aside),
        "names_confirmed": len(set(drafter.names.confirmed)),
        "model": _model(drafter.model, tensors),
    }


def _graph(drafter: Shard) -> dict[str, Any]:
    """Every role with its constant and the evidence for it, every other constant, the base's caches with the layers
    that read them, and the proof."""
    model, walk, confirmed = drafter.model, drafter.walk, set(drafter.names.confirmed)
    roles, aside, caches = list[dict[str, Any]](), list[dict[str, Any]](), dict[str, Any]()
    for role in walk.roles:
        tensor = defaultdict(lambda: None, {} if role.tensor is None else _tensor(model, role.tensor))
        found = {"role": role.role, "shape": list(role.shape), "tensor": tensor["index"]}
        found |= {key: tensor[key] for key in ("subgraph", "name", "type", "quantization", "data")}
        activations = to_builtins({"input": role.input, "output": role.output})
        found |= {"factor": role.factor, "why": role.why, "activations": activations}
        roles.append({**found, "name_confirms": role.role in confirmed})
    for other in walk.aside:
        own = _picked(other.tensor, "index", "subgraph", "name", "type_name", "shape")
        own = {"tensor": own.pop("index"), "dtype": own.pop("type"), **own}
        aside.append({**own, "op": other.op, "reason": other.reason})
    for name, cache in walk.caches.items():
        scale, zero_point = grid_of(cache) or (None, None)
        layers = [index for index, layer in enumerate(walk.layers) if name in (layer.key, layer.value)]
        held = {"dtype": cache.type_name, "shape": list(cache.shape), "scale": scale, "zero_point": zero_point}
        caches[name] = {**held, "layers": layers}
    proof = prove_checkpoint(drafter, checkpoint_of(drafter))
    return {"roles": roles, "set_aside": aside, "kv_inputs": caches, "proof": proof}


def _model(model: TfliteModel, tensors: bool) -> dict[str, Any]:
    """Its signatures, and how large it is; with ``tensors`` every tensor."""

    def interface(subgraph: int, names: Mapping[str, int]) -> dict[str, dict[str, Any]]:
        return {name: _picked(model.tensor(subgraph, at), "type_name", "shape") for name, at in names.items()}

    described: dict[str, Any] = {
        "description": model.description,
        "subgraphs": len(model.subgraphs),
        "tensors_in_all": sum(len(g.tensors) for g in model.subgraphs),
        "operators": sum(len(g.operators) for g in model.subgraphs),
        "signatures": [
            {**_picked(s, "key", "subgraph")}
            | {side: interface(s.subgraph, getattr(s, side)) for side in ("inputs", "outputs")}
            for s in model.signatures
        ],
    }
    if tensors:
        described["tensors"] = [_tensor(model, t) for g in model.subgraphs for t in g.tensors]
    return described


def _tensor(model: TfliteModel, tensor: Tensor) -> dict[str, Any]:
    """A tensor with its quantization and where its bytes lie; of bytes that cannot be read, such as strings, why."""
    described = _picked(tensor, "subgraph", "index", "name", "type_name", "shape")
    described |= {"quantization": None, "data": None}
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
    config, weights = read.written.config, read.written.tensors
    shapes = {role: shape for role, shape in shapes_of(config).items() if role.name in weights}
    listed, types = [], Counter[str]()
    for role, shape in shapes.items():
        weight, block, stored = weights[role.name], None, "implied"
        if isinstance(weight, Stored):
            stored = weight.tensor.dtype
        elif weight.scheme is not None:
            # Neighbours of a row that share a scale; None where a row has one, or none.
            stored, block = f"INT{weight.scheme.bits}", weight.steps.block if weight.steps.block != shape[-1] else None
        own = {"role": role.name, "name": role.names.get(read.layout, role.name), "type": stored}
        listed.append({**own, "shape": list(shape), "block_size": block})
        types[stored] += 1
    known = known_drafter(config) if isinstance(config, DrafterConfig) else None
    holds: dict[str, Any] = {
        "format": read.layout,
        "known_as": known["name"] if known else None,
        "geometry": config.as_json(),
        "parameters": sum(map(math.prod, shapes.values())),
        "weights": len(shapes),
        "stored_types": dict(sorted(types.items())),
        **({"tensors": listed} if tensors else {}),
    }
    problem = None
    if read.written.architecture == EAGLE3:
        findings = findings_of(read.directory)
        holds["findings"] = [{**asdict(finding), "is_error": finding.is_error} for finding in findings]
        if wrong := sum(finding.is_error for finding in findings):
            problem = CheckpointError(
                f"{escape(read.directory)}: expected nothing that an engine takes otherwise without a word, found "
                f"{wrong}. Convert it, or change its config as said."
            )
    report = {
        "directory": str(read.directory),
        "files": len({*read.record["files"]} - {CARD}) if read.is_recorded else None,
        "against": against,
        "checks": [asdict(check) for check in checks],
        "ok": problem is None,
        "extraction": read.record if read.is_recorded else None,
        "holds": holds,
    }
    return Inspection(report, problem)
