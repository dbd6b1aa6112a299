"""Describes a bundle or a checkpoint as plain data: sections, tensors, and the drafter's roles with their evidence."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from mtp_extract.architecture import list_shapes
from mtp_extract.bundle import BundledDrafter, ModelFile, name_file_in_errors, open_bundle
from mtp_extract.checkpoint.stored import FileWeight
from mtp_extract.errors import CheckpointError, MtpExtractError, NoDrafterError, escape, format_count
from mtp_extract.graph.trace import trace_drafter
from mtp_extract.litertlm.published import compare_with_published, find_published_bundle
from mtp_extract.litertlm.tflite import Signature, Tensor, TfliteModel
from mtp_extract.pipeline.check import CARD, Check, CheckpointDirectory
from mtp_extract.pipeline.extraction import prove_drafter
from mtp_extract.pipeline.identity import verify_against
from mtp_extract.progress import SILENT, Reporter
from mtp_extract.proof.grids import list_rounded_tensors


@dataclass(frozen=True)
class Inspection:
    """The content of a bundle or a checkpoint."""

    report: dict[str, Any]  # as ``mtp-inspect --json`` prints it
    # Why the drafter cannot be extracted, or that an engine loads the checkpoint wrongly; None without a problem.
    problem: MtpExtractError | None


def inspect(opened: ModelFile, *, tensors: bool = False, graph: bool = False) -> Inspection:
    """Describe ``opened``. Only the header and flatbuffers are read; ``graph`` also reads the weights.

    Args:
        tensors: list every tensor of the drafter's model.
        graph: list how every value is read, every role with its evidence and every other constant; and prove the
            checkpoint.

    Raises:
        NoDrafterError: the source is neither a bundle nor a model.
    """
    published = find_published_bundle(opened.source)
    report = _describe_file(opened, published["name"] if published else None)
    if graph:
        report["trace"] = _trace_graph(opened)
    try:
        drafter = opened.read_drafter()
        facts = _describe_drafter(drafter, tensors) | (_describe_graph(drafter) if graph else {})
    except NoDrafterError as error:
        if opened.bundle is None and not opened.is_model:
            raise
        return Inspection({**report, "drafter": None, "no_drafter": str(error)}, None)
    except MtpExtractError as error:
        listed = _list_tensors_of_refused(opened) if tensors else {}
        return Inspection({**report, "drafter": None, "problem": str(error), **listed}, error)
    facts["base_model"] = published["base_model"] if published else None
    return Inspection({**report, "drafter": facts}, None)


def _describe_file(opened: ModelFile, known_as: str | None) -> dict[str, Any]:
    """Describe the file, with the name of the published one that it is, and its sections."""
    source = opened.source
    bundle = opened.bundle
    return {
        "name": source.name,
        "size": source.size,
        "kind": "litertlm" if bundle else "skeleton" if opened.skeleton else "tflite",
        "version": ".".join(map(str, bundle.version)) if bundle else None,
        "known_bundle": known_as,
        "provenance": dict(sorted(source.provenance.items())),
        "items": dict(bundle.items) if bundle else {},
        "sections": [
            {"index": section.index, "type": section.type_name, "model_type": section.model_type}
            | {"begin": section.begin, "size": section.size, "items": dict(section.items)}
            for section in opened.sections
        ],
    }


def _trace_graph(opened: ModelFile) -> list[dict[str, Any]]:
    """Describe how every value of the drafter's graph is read, up to the error; empty if the graph cannot be opened."""
    try:
        graph = opened.flatten_graph()
    except MtpExtractError:
        # ``inspect`` reports the error.
        return []
    return [asdict(line) for line in trace_drafter(graph)]


def _list_tensors_of_refused(opened: ModelFile) -> dict[str, Any]:
    """Describe the model of a drafter whose graph is refused; empty if the model cannot be read either."""
    try:
        model = opened.find_model()
    except MtpExtractError:
        # ``inspect`` reports the error.
        return {}
    return {"model": _describe_model(model, tensors=True)}


def _describe_drafter(drafter: BundledDrafter, tensors: bool) -> dict[str, Any]:
    roles = drafter.structure.roles
    return {
        "section": drafter.section.index if drafter.section else None,
        "found_by": drafter.found_by,
        "size": drafter.model.region.size,
        "known_as": drafter.known["name"] if drafter.known else None,
        "geometry": drafter.config.as_json(),
        "parameters": sum(math.prod(role.shape) for role in roles),
        "stored_types": dict(sorted(Counter(role.tensor.type_name for role in roles if role.tensor).items())),
        "roles_found": len(roles),
        "set_aside_count": len(drafter.structure.other_constants),
        "layer_scalars": sum(role.role.endswith(".layer_scalar") for role in roles),
        "names_confirmed": len(set(drafter.names.confirmed)),
        "rounded_activations": list_rounded_tensors(drafter.graph, drafter.structure),
        "model": _describe_model(drafter.model, tensors),
    }


def _describe_graph(drafter: BundledDrafter) -> dict[str, Any]:
    """Describe every role with its constant and evidence, and every other constant; and prove the checkpoint."""
    model = drafter.model
    walk = drafter.structure
    roles = [
        (_describe_tensor(model, role.tensor) if role.tensor else {"type": None})
        | {"role": role.role, "shape": role.shape, "factor": role.factor, "why": role.why}
        | {"activations": to_builtins({"input": role.input, "output": role.output})}
        | {"name_confirms": role.role in drafter.names.confirmed}
        for role in walk.roles
    ]
    aside = [
        {**_describe_tensor(model, constant.tensor), "op": constant.op, "reason": constant.reason}
        for constant in walk.other_constants
    ]
    with name_file_in_errors(model.region.source.name):
        proof = prove_drafter(drafter)
    return {"roles": roles, "set_aside": aside, "proof": proof}


def _describe_model(model: TfliteModel, tensors: bool) -> dict[str, Any]:
    """Describe signatures and sizes of ``model``; with ``tensors`` every tensor."""
    all_tensors = [tensor for graph in model.subgraphs for tensor in graph.tensors]

    def describe_ends(signature: Signature, names: Mapping[str, int]) -> dict[str, Any]:
        by_name = {name: model.tensor(signature.subgraph, index) for name, index in names.items()}
        return {name: {"type": tensor.type_name, "shape": tensor.shape} for name, tensor in by_name.items()}

    return {
        "subgraphs": len(model.subgraphs),
        "tensors_in_all": len(all_tensors),
        "operators": sum(len(graph.operators) for graph in model.subgraphs),
        "signatures": [
            {"key": signature.key, "subgraph": signature.subgraph}
            | {"inputs": describe_ends(signature, signature.inputs)}
            | {"outputs": describe_ends(signature, signature.outputs)}
            for signature in model.signatures
        ],
        **({"tensors": [_describe_tensor(model, tensor) for tensor in all_tensors]} if tensors else {}),
    }


def _describe_tensor(model: TfliteModel, tensor: Tensor) -> dict[str, Any]:
    """Describe a tensor, its quantization and the place of its bytes, or why they cannot be read, as with strings."""
    described = {"subgraph": tensor.subgraph, "index": tensor.index, "name": tensor.name, "type": tensor.type_name}
    described |= {"shape": tensor.shape, "quantization": None, "data": None}
    if (quantization := tensor.quantization) is not None:
        described["quantization"] = {
            "scales": quantization.scales.count,
            "zero_points": quantization.zero_points.count,
            "axis": quantization.axis,
            "details": quantization.details,
            "block_size": quantization.blockwise.block_size if quantization.blockwise else None,
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
    reporter: Reporter = SILENT,
) -> Inspection:
    """Describe the checkpoint at ``place``, of any format, and compare it with its record, if it has one.

    Args:
        bundle: the bundle that it came from; every tensor is derived from it again and compared.
        tensors: list every weight.

    Raises:
        CheckpointError: it is damaged, holds no drafter, or differs from its record or from ``bundle``.
    """
    read = CheckpointDirectory.of(place)
    checks = list[Check]()
    against = published = None
    if bundle is not None:
        with open_bundle(bundle, reporter=reporter) as opened:
            checks = verify_against(read, opened)
            against = opened.source.name
            published = compare_with_published(opened.source, reporter)
    problem = _find_problem(read)
    record = read.record if read.is_recorded else None
    report = {
        "directory": str(read.directory),
        "files": len({*record["files"]} - {CARD, *read.changed}) if record else None,
        "against": against,
        "against_published": published,
        "checks": [asdict(check) for check in checks],
        "notes": list(read.checkpoint.notes),
        "ok": problem is None,
        "extraction": record,
        "holds": _describe_contents(read, tensors),
    }
    return Inspection(report, problem)


def _find_problem(read: CheckpointDirectory) -> CheckpointError | None:
    if wrong := sum(finding.is_error for finding in read.written.findings):
        problem = f"an engine would load it wrongly without an error ({format_count(wrong, 'finding')})"
        return CheckpointError(f"{escape(read.directory)}: {problem}. Convert it, or change its config as stated.")
    return None


def _describe_contents(read: CheckpointDirectory, tensors: bool) -> dict[str, Any]:
    """Describe the checkpoint and how its weights are stored; with ``tensors`` every weight."""
    listed = list[dict[str, Any]]()
    for role, shape in list_shapes(read.written.config).items():
        weight = read.written.tensors.get(role.name)
        if weight is not None:
            stored = weight.tensor.dtype if isinstance(weight, FileWeight) else "implied"
            kind = f"INT{weight.bits}" if weight.bits else stored
            name = role.names.get(read.layout, role.name)
            listed.append({"role": role.name, "type": kind, "shape": shape, "name": name})
    return {
        "format": read.layout,
        "known_as": read.known_as,
        "geometry": read.written.config.as_json(),
        "parameters": sum(math.prod(entry["shape"]) for entry in listed),
        "weights": len(listed),
        "stored_types": dict(sorted(Counter(entry["type"] for entry in listed).items())),
        "findings": [asdict(finding) for finding in read.written.findings],
        **({"tensors": listed} if tensors else {}),
    }
