"""``extraction.json``, version 5: where a checkpoint came from, and how it was processed.

It states the origin and proves nothing: checking a directory derives everything from the bundle again. No field depends
on the clock, the machine or a path: the same input gives the same bytes.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType, to_builtins

from mtp_extract.bundle import BundledDrafter
from mtp_extract.checkpoint.checkpoint import Activations, Checkpoint
from mtp_extract.io.typed import Bounds, Count, Excerpt, Positive, Record, Sha256, Tool

CHECKPOINT = "checkpoint"
"""The ``kind`` of a source that is a directory of unknown origin."""

Pairs = dict[str, Activations]
_READ = 1 << 18


class Written(Record, kw_only=True):
    """How weights were written."""

    layout: str  #: name of the format
    dtype: Literal["codes", "f32", "bf16", "f16"]  #: type of the numbers
    rounded: list[str]  #: roundings of numbers that engines load (`BF16`), or of scales of codes (`FP16 scales`)
    rule: Literal["q4_0", "q8_0", "int4", "int8"] | None  #: by which floats were rounded to codes; null without one


class Step(Written, kw_only=True):
    """A directory that was converted; without a record, the facts that its files show."""

    version: str | None  #: of the mtp-extract that wrote it; null for another program
    files: dict[str, Sha256]  #: name → SHA-256 of each file with tensors


class Extraction(Written, kw_only=True):
    format_version: Literal[5]  #: version of this file: 5
    tool: Tool  #: the program that wrote it
    source: Source  #: the file the drafter was taken from
    converted_from: list[Step]  #: the directories in between, the latest last; empty for an extraction
    known_as: str | None  #: name of the geometry, such as "Gemma 4 E4B"; null for one that is not known
    geometry: dict[str, Any]  #: the drafter's shape, as its config and the bundle's graph have it
    files: dict[str, File]  #: name → every file but this one; the card as it was written
    shared: list[Annotated[list[str], Meta(min_length=2)]]  #: roles that share a constant of the bundle
    #: role of a matrix → static quantization of its input and its output; null for floats
    activations: Pairs
    #: what was proven when it was extracted, about the numbers before rounding; null if the origin is unknown, the
    #: weights were tuned or an ordered head was made here
    proof: list[str] | None
    #: why it was not proven when it was extracted, and what was read nevertheless; absent if it was proven
    not_proven: list[str] | UnsetType = UNSET
    tuning: Tuning | UnsetType = UNSET  #: how the weights were tuned, with the figures of that time
    ordered_head: OrderedHead | UnsetType = UNSET  #: how an ordered head was made here, with the figures of that time


class Source(Record):
    name: str  #: file name, without folders
    size: Count  #: bytes of the whole file
    #: `litertlm` for a bundle, `tflite` for a bare model, `checkpoint` for a directory of unknown origin
    kind: Literal["litertlm", "tflite", "checkpoint"]
    version: str | None  #: of the container; null for a bare model
    #: what identifies the bytes, beside the name. Hub: `repository`, `path`, `revision`, `commit` and `etag`, which for
    #: a large file is the SHA-256 that the Hub states (not computed here); a URL: `url`, `etag`, `last_modified`;
    #: empty for a local file
    provenance: dict[str, str]
    section: Section | None  #: the drafter's section; null for a checkpoint


class Section(Record):
    index: Count | None  #: in the header's list; null for a bare model
    begin: Count  #: first byte, from the start of the file
    end: Count  #: one past the last byte
    sha256: Sha256  #: of these bytes
    found_by: Literal["model_type", "signature", "bare model"]  #: how the section was found
    signature: str  #: key of the TFLite signature


class File(Record):
    size: Count  #: bytes
    sha256: Sha256  #: of its bytes


class Fitted(Excerpt):
    """The result of a training, with its figures on held-out text."""

    base: str  #: as it was named; for a directory, its last part
    refused: list[str]  #: why it was not accepted; it was written because the user asked for that
    overall: Comparison  #: over the held-out texts of the workloads that were trained on


class Tuning(Fitted):
    #: what was trained: `norms` (and layer scalars), `qat` (and codes, on the stored grid), `float` (every weight),
    #: `eagle3` (every weight of a new head)
    mode: Literal["norms", "qat", "float", "eagle3"]
    interrupted: bool  #: whether it was stopped before its end


class OrderedHead(Fitted):
    centroids: Annotated[int, Meta(ge=2)]  #: number of clusters
    top_k: Positive  #: clusters that a draft step looks into
    rows_read: Positive  #: rows of the head, centroids among them, that a draft step reads
    rows_dense: Positive  #: rows that the dense head reads


class Comparison(Excerpt):
    texts: Count  #: held-out texts
    rounds: Saving  #: rounds before for one round after


class Saving(Excerpt):
    ratio: float  #: rounds before over rounds after
    interval: Bounds | None  #: `[low, high]` at 95 %, over texts; null with fewer than five


def describe_origin_of_bundle(drafter: BundledDrafter, original: Checkpoint) -> dict[str, Any]:
    """Return the record's fields on the bundle; ``original`` has the weights as the bundle stores them."""
    roles_by_constant = defaultdict[object, list[str]](list)
    for role, tensor in original.tensors.items():
        if tensor.origin is not None:
            roles_by_constant[tensor.origin].append(role)
    return {
        "source": _describe_source(drafter),
        "known_as": drafter.known["name"] if drafter.known else None,
        "shared": [roles for roles in roles_by_constant.values() if len(roles) > 1],
        "activations": {role: to_builtins([*pair]) for role, pair in original.activations.items() if any(pair)},
    }


def _describe_source(drafter: BundledDrafter) -> dict[str, Any]:
    opened = drafter.opened
    region = drafter.model.region
    digest = hashlib.sha256()
    for begin in range(0, region.size, _READ):
        digest.update(region.read(begin, min(_READ, region.size - begin)))
    return {
        "name": Path(opened.source.name).name,
        "size": opened.source.size,
        "kind": "litertlm" if opened.bundle else "tflite",
        "version": ".".join(map(str, opened.bundle.version)) if opened.bundle else None,
        "provenance": dict(sorted(opened.source.provenance.items())),
        "section": {
            "index": drafter.section.index if drafter.section else None,
            "begin": region.begin,
            "end": region.begin + region.size,
            "sha256": digest.hexdigest(),
            "found_by": drafter.found_by,
            "signature": drafter.signature.key,
        },
    }


def flatten_provenance(source: Mapping[str, Any]) -> dict[str, str]:
    """Return a record's ``source`` as name → text, for formats that keep it inside the weights file."""
    section = source["section"] or {}
    return {
        "source.name": source["name"],
        "source.size": str(source["size"]),
        **{f"source.{key}": str(value) for key, value in source["provenance"].items()},
        **{f"section.{key}": str(section[key]) for key in ("begin", "end", "sha256") if section.get(key) is not None},
    }
