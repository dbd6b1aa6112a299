"""``extraction.json``, filled in: where every number of a checkpoint came from.

Nothing in it depends on the clock, the machine or the path: the same input gives the same bytes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from msgspec import UNSET

from mtp_extract.bundle import Shard
from mtp_extract.checkpoint import record_fields
from mtp_extract.checkpoint.checkpoint import Holding
from mtp_extract.checkpoint.constant import constant_of
from mtp_extract.checkpoint.planned import PlannedTensor
from mtp_extract.checkpoint.record_fields import (
    Cache,
    Constant,
    FileTensor,
    Part,
    Quantization,
    Section,
    Source,
    Stored,
    Tensor,
)
from mtp_extract.checkpoint.weight import Weight
from mtp_extract.errors import FormatError
from mtp_extract.graph.roles import Activation, FoundRole
from mtp_extract.io.source import Region
from mtp_extract.io.typed import fill
from mtp_extract.litertlm.storage import QuantizedTensor
from mtp_extract.litertlm.tflite import Tensor as TfliteTensor

CHECKPOINT = "checkpoint"
"""What a record calls a source that is a directory: nothing says where that came from."""

UNKNOWN: Mapping[str, Any] = MappingProxyType(
    {
        "why": "the name it has in the directory that was converted",
        "rounded_before": [],
        "made_codes": None,
        "factor": 1.0,
        "name_confirms": False,
        "source": None,
        "quantization": None,
        "activations": None,
    }
)
"""What is known of a weight where no record says where it came from."""

_EVIDENCE = ("why", "rounded_before", "factor", "name_confirms", "source", "quantization", "activations")
"""Of a role, whatever is done to it."""

_READ = 1 << 18


def sha256_of(region: Region, offset: int, length: int) -> str:
    """SHA-256 of ``length`` bytes of ``region`` from ``offset``."""
    digest = hashlib.sha256()
    for at in range(offset, offset + length, _READ):
        digest.update(region.read(at, min(_READ, offset + length - at)))
    return digest.hexdigest()


def source_record(drafter: Shard, name: str, section_sha256: str | None) -> dict[str, Any]:
    """The file and the section."""
    opened, section, region = drafter.opened, drafter.section, drafter.model.region
    bundle = opened.bundle
    return fill(
        Source,
        opened.source,
        name=name,
        kind="litertlm" if bundle else "tflite",
        version=".".join(map(str, bundle.version)) if bundle else None,
        provenance=dict(sorted(opened.source.provenance.items())),
        section=fill(
            Section,
            drafter,
            index=section.index if section else None,
            model_type=section.model_type if section else None,
            items=dict(sorted(section.items.items())) if section else {},
            begin=region.begin,
            end=region.begin + region.size,
            sha256=section_sha256,
            signature=drafter.signature.key,
        ),
    )


def provenance(source: Mapping[str, Any]) -> dict[str, str]:
    """``source`` of a record as text by name, for formats that keep it inside the weights file."""
    section = source["section"] or {}
    return {
        "source.name": source["name"],
        "source.size": str(source["size"]),
        **{f"source.{key}": str(value) for key, value in source["provenance"].items()},
        **{f"section.{key}": str(section[key]) for key in ("begin", "end", "sha256") if section.get(key) is not None},
    }


def part_record(planned: PlannedTensor, xxh3: str) -> dict[str, Any]:
    """An output tensor that holds scales or the like, beside the one that its role's record stands under."""
    return fill(Part, planned, xxh3=xxh3)


def tensor_record(
    planned: PlannedTensor, xxh3: str, holding: Holding, evidence: Mapping[str, Any], made: Mapping[str, Any] | None
) -> dict[str, Any]:
    """One output tensor.

    Args:
        xxh3: XXH3-128 of the data written.
        holding: how its numbers are held.
        evidence: what :func:`evidence` says of its role.
        made: the rule its codes were made by, and the error of that; None where none were.
    """
    return fill(
        Tensor,
        planned,
        xxh3=xxh3,
        kept=holding.kept,
        rounded_to=holding.rounded_to or None,
        made_codes=made or evidence["made_codes"],
        offset=evidence.get("offset") or UNSET,
        **{key: evidence[key] for key in _EVIDENCE},
    )


def evidence(found: FoundRole | None, tensor: Weight | None, sha256: str | None, confirmed: bool) -> dict[str, Any]:
    """What is known of a role: why it is that, and the stored bytes behind it.

    Args:
        found: what the graph says of it; None where the graph has no such constant.
        tensor: its weight as the graph has it.
        sha256: of the stored bytes.
        confirmed: whether a published name says the same.
    """
    source = constant.source if tensor is not None and (constant := constant_of(tensor)) is not None else None
    return {
        "why": found.why if found else "the graph multiplies by no layer scalar: 1 is what it computes",
        "rounded_before": [],
        "made_codes": None,
        "factor": found.factor if found else 1.0,
        "offset": found.offset if found else 0.0,
        "name_confirms": confirmed,
        "source": _stored(source, sha256) if source else None,
        "quantization": _quantization(source) if source else None,
        "activations": {"input": _activation(found.input), "output": _activation(found.output)}
        if found and len(found.shape) == 2
        else None,
    }


def _of_file(kind: type[FileTensor], tensor: TfliteTensor, **more: Any) -> dict[str, Any]:
    """A ``kind`` of ``tensor``, and ``more`` of its fields."""
    return fill(kind, tensor, tensor=tensor.index, dtype=tensor.type_name, **more)


def _stored(source: QuantizedTensor, sha256: str | None) -> dict[str, Any]:
    tensor, location = source.tensor, source.location
    return _of_file(
        Stored,
        tensor,
        buffer=tensor.buffer if not tensor.external_buffer else tensor.external_buffer,
        place=location.place,
        offset=location.file_offset,
        length=location.length,
        sha256=sha256,
    )


def _quantization(source: QuantizedTensor) -> dict[str, Any] | None:
    if source.packing is None:
        return None
    return fill(
        Quantization,
        source,
        bits=source.packing.bits,
        axis=source.axis if source.kind == "per_channel" else None,
        block_size=source.block_size or None,
        scales=int(source.scale.size),
    )


def _activation(activation: Activation | None) -> dict[str, Any] | None:
    return None if activation is None else fill(record_fields.Activation, activation, dtype=activation.type)


def set_aside(drafter: Shard) -> list[dict[str, Any]]:
    """Every constant of the graph that is not a weight, with its reader and the reason."""
    return [_of_file(Constant, entry.tensor, op=entry.op, reason=entry.reason) for entry in drafter.walk.aside]


def caches(drafter: Shard) -> dict[str, Any]:
    """The base model's caches that the drafter reads: shape and static quantization."""
    users: dict[str, list[int]] = {}
    for index, layer in enumerate(drafter.walk.layers):
        users.setdefault(layer.key, []).append(index)
        users.setdefault(layer.value, []).append(index)
    result: dict[str, Any] = {}
    for name, tensor in drafter.walk.caches.items():
        quantization = tensor.quantization
        scale = quantization.scale if quantization is not None and quantization.scale_count == 1 else None
        zero_point = (
            quantization.zero_point if quantization is not None and quantization.zero_point_count == 1 else None
        )
        if scale is not None and not 0 <= scale[0] < math.inf:
            raise FormatError(f"{tensor.label} has a scale of {scale[0]}: the file is damaged.")
        result[name] = fill(
            Cache,
            tensor,
            dtype=tensor.type_name,
            scale=float(scale[0]) if scale is not None else None,
            zero_point=int(zero_point[0]) if zero_point is not None else None,
            layers=users.get(name, []),
        )
    return result
