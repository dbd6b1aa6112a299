"""``extraction.json``, filled in: where a checkpoint came from, and what was done to it.

It holds provenance, not evidence: what a bundle decides is derived from the bundle again where a directory is checked.
Nothing in it depends on the clock, the machine or the path: the same input gives the same bytes.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Container, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mtp_extract.architecture.roles import shapes_of
from mtp_extract.bundle import Shard
from mtp_extract.checkpoint.arranged import FLOATS, Arranged
from mtp_extract.checkpoint.checkpoint import CODES, Checkpoint
from mtp_extract.checkpoint.codes import CODES_FILE
from mtp_extract.checkpoint.rounding import SCALES, rule_of
from mtp_extract.graph.roles import Activation

CHECKPOINT = "checkpoint"
"""What a record calls a source that is a directory: nothing says where that came from."""

_READ = 1 << 18


def sha256_of_section(drafter: Shard) -> str:
    """SHA-256 of the drafter's section."""
    region, digest = drafter.model.region, hashlib.sha256()
    for at in range(0, region.size, _READ):
        digest.update(region.read(at, min(_READ, region.size - at)))
    return digest.hexdigest()


def source_record(drafter: Shard, section_sha256: str | None) -> dict[str, Any]:
    """The file and the section."""
    opened, section, region = drafter.opened, drafter.section, drafter.model.region
    return {
        "name": Path(opened.source.name).name,
        "size": opened.source.size,
        "kind": "litertlm" if opened.bundle else "tflite",
        "version": ".".join(map(str, opened.bundle.version)) if opened.bundle else None,
        "provenance": dict(sorted(opened.source.provenance.items())),
        "section": {
            "index": section.index if section else None,
            "model_type": section.model_type if section else None,
            "items": dict(sorted(section.items.items())) if section else {},
            "begin": region.begin,
            "end": region.begin + region.size,
            "sha256": section_sha256,
            "found_by": drafter.found_by,
            "signature": drafter.signature.key,
        },
    }


def provenance(source: Mapping[str, Any]) -> dict[str, str]:
    """``source`` of a record as text by name, for formats that keep it inside the weights file."""
    section = source["section"] or {}
    return {
        "source.name": source["name"],
        "source.size": str(source["size"]),
        **{f"source.{key}": str(value) for key, value in source["provenance"].items()},
        **{f"section.{key}": str(section[key]) for key in ("begin", "end", "sha256") if section.get(key) is not None},
    }


def of_bundle(drafter: Shard, original: Checkpoint, section_sha256: str | None) -> dict[str, Any]:
    """What a record says of the bundle, whatever is written of it.

    Args:
        original: the drafter's own weights.
    """
    stored = Counter(
        next((f.tensor.type_name for f in drafter.walk.roles if f.role == role.name and f.tensor), "implied")
        for role in shapes_of(original.config)
    )
    caches = [tensor.quantization for tensor in drafter.walk.caches.values()]
    alike: dict[object, list[str]] = defaultdict(list)
    for role, tensor in original.tensors.items():
        if tensor.origin is not None:
            alike[tensor.origin].append(role)
    return {
        "source": source_record(drafter, section_sha256),
        "known_as": drafter.known["name"] if drafter.known else None,
        "counts": {
            "stored": dict(sorted(stored.items())),
            "names_confirmed": len(set(drafter.names.confirmed)),
            "set_aside": len(drafter.walk.aside),
            "static": sum(q is not None and q.scales.count == 1 for q in caches)
            + sum(pair != (None, None) for pair in original.activations.values()),
        },
        "shared": [roles for roles in alike.values() if len(roles) > 1],
        "activations": {
            role: {"input": activation_json(pair[0]), "output": activation_json(pair[1])}
            for role, pair in original.activations.items()
            if any(pair)
        },
    }


def activation_json(found: Activation | None) -> dict[str, Any] | None:
    """``found`` as JSON has it."""
    return None if found is None else {"dtype": found.type, "scale": found.scale, "zero_point": found.zero_point}


def activations_of(record: Mapping[str, Any]) -> Mapping[str, tuple[Activation | None, Activation | None]]:
    """By role, the static quantization of activations that ``record`` has."""

    def made(found: Mapping[str, Any] | None) -> Activation | None:
        return Activation(found["dtype"], found["scale"], found["zero_point"]) if found else None

    pairs: Mapping[str, Mapping[str, Any]] = record["activations"]
    return MappingProxyType({role: (made(pair["input"]), made(pair["output"])) for role, pair in pairs.items()})


def held(made: Arranged) -> dict[str, int]:
    """How many weights are held as codes, as indices, and as floats of which type; what several share, once."""
    found = ((made.kept[role].how, planned.dtype) for role, planned in made.files[0].weights.items())
    return dict(sorted(Counter(dtype if how == FLOATS else how for how, dtype in found).items()))


def rounded(made: Arranged, files: Container[str]) -> dict[str, int]:
    """What weights were rounded to, and how many of them; those left out whose own codes lie in ``files``, too."""
    counted: Counter[str] = Counter()
    for kept in made.kept.values():
        beside = CODES_FILE in files and kept.how == FLOATS and kept.weight.scheme is not None
        if kept.rounded_to and not beside:
            counted[kept.rounded_to + (SCALES if kept.how == CODES else "")] += 1
    return dict(sorted(counted.items()))


def made_codes(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The rule by which codes were made of floats, and of how many matrices; None where none were made."""
    rules = [rule.name for rule in map(rule_of, checkpoint.tensors.values()) if rule is not None]
    return {"rule": rules[0], "matrices": len(rules)} if rules else None
