"""``extraction.json``, version 5: where a checkpoint came from, and what was done to it.

It holds provenance, not evidence: what a bundle decides is derived from the bundle again where a directory is checked.
Nothing in it depends on the clock, the machine or the path: the same input gives the same bytes.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType

from mtp_extract.bundle import Shard
from mtp_extract.checkpoint.checkpoint import Checkpoint
from mtp_extract.graph import roles
from mtp_extract.io.typed import Bounds, Count, Excerpt, Positive, Record, Sha256, Tool, read

FORMAT_VERSION = 5
"""Of ``extraction.json``."""

CHECKPOINT = "checkpoint"
"""What a record calls a source that is a directory: nothing says where that came from."""

_READ = 1 << 18


class Extraction(Record, kw_only=True):
    format_version: Literal[5]  #: version of this file: 5
    tool: Tool  #: what wrote it
    source: Source  #: the file the drafter was taken from
    #: the directories it has been since, the last one last; empty for an extraction
    converted_from: list[Step]
    #: name of the geometry, such as "Gemma 4 E4B"; null for one that `mappings/geometries.json` does not list
    known_as: str | None
    layout: str  #: name of the format
    dtype: Literal["codes", "f32", "bf16", "f16"]  #: type the weights were written in
    #: what weights were rounded to here (`BF16`, `FP16`, `FP16 scales`), and how many; those left out whose own codes
    #: are kept beside them
    rounded: dict[str, Positive]
    made_codes: MadeCodes | None  #: how codes were made that the source has none of; null where none were made here
    geometry: dict[str, Any]  #: the drafter's shape, which is its config's and, of a bundle, the graph's
    #: by name: every file of the directory but this one; the card as it was written, which may be changed by hand
    files: dict[str, File]
    #: roles that are one constant of the file; what a format writes once, another writes for each
    shared: list[list[str]]
    #: by role of a matrix: static quantization of what goes into it and what comes out; only those that have any
    activations: dict[str, Activations]
    notes: list[str]  #: where an engine does not do what the file says
    #: what reading the graph beside the checkpoint showed; null for a checkpoint that no record says the origin of, and
    #: for one that was tuned, or has an ordered head that was made here
    proof: Proof | None
    #: where the weights were tuned: how, and what it did to the drafts; the figures are those of the directory that was
    #: written then
    tuning: Tuning | UnsetType = UNSET
    #: where an ordered head was made here: of what, and how much of the dense head it keeps; as above of the directory
    #: that was written then, and left out where the format leaves the head out
    ordered_head: OrderedHead | UnsetType = UNSET


class Source(Record):
    name: str  #: file name, without folders
    size: Count  #: bytes of the whole file
    #: `litertlm` for a bundle, `tflite` for a bare model, `checkpoint` for a directory of unknown origin
    kind: Literal["litertlm", "tflite", "checkpoint"]
    version: str | None  #: of the container; null for a bare model
    #: what identifies the bytes beyond their name. Hub: `repository`, `path`, `revision`, `commit`,
    #: `etag`, `sha256`; a URL: `url`, `etag`, `last_modified`; empty for a local file
    provenance: dict[str, str]
    section: Section | None  #: the drafter's section; null for a checkpoint


class Section(Record):
    index: Count | None  #: in the header's list; null for a bare model
    begin: Count  #: first byte, from the start of the file
    end: Count  #: one past the last byte
    sha256: Sha256  #: of these bytes
    found_by: Literal["model_type", "signature", "bare model"]  #: how the section was found
    signature: str  #: key of the TFLite signature


class Step(Record):
    """A directory that was converted."""

    layout: str  #: name of its format
    dtype: str  #: type its weights were written in
    rounded: dict[str, Positive]  #: what its weights were rounded to, and how many; empty where no record says it
    made_codes: MadeCodes | None  #: how codes were made there; null where none were
    version: str | None  #: of mtp-extract that wrote it; null where another program did
    files: dict[str, Sha256]  #: by name: SHA-256 of each file with tensors


class MadeCodes(Record):
    rule: Literal["q4_0", "q8_0", "int4", "int8"]  #: ggml's, or ai-edge-quantizer's (a row a scale)
    matrices: Positive  #: how many


class File(Record):
    size: Count  #: bytes
    sha256: Sha256  #: of its bytes


class Activations(Record):
    input: Activation | None  #: of what the operator reads; null where it is float
    output: Activation | None  #: of what it writes; null where it is float


class Activation(Record):
    dtype: str  #: TFLite's name
    scale: float  #: real = scale · (code − zero_point)
    zero_point: int  #: as above


class Proof(Record):
    positions: Positive  #: at which rotations were held: all that the caches have
    mask_rows: MaskRows  #: what masks decide
    #: how many activations the file's kernels hold in each type of few bits; empty where none are
    activations_held_in: dict[str, Positive]
    coarse_tables: list[CoarseTable]  #: RoPE tables of the file that are coarser than the config's
    #: whether it is the one of the extraction, over the same codes, or the same numbers before rounding; false where it
    #: was made for what lies here
    inherited: bool


class MaskRows(Record):
    #: rows that were held against the config, with every content of the mask inputs; where all rows are the same up to
    #: a shift, the first and the last
    computed: Positive
    of: Positive  #: rows that there are


class CoarseTable(Record):
    layer: Count  #: whose table it is
    held_in: str  #: the types that it is stored in


class Tuning(Excerpt):
    #: what was trained: `norms` (and layer scalars), `qat` (and codes, on the stored grid), `float` (every weight),
    #: `eagle3` (every weight of a new head)
    mode: Literal["norms", "qat", "float", "eagle3"]
    base: str  #: as it was named; of a directory its name alone
    interrupted: bool  #: whether it was stopped before its end
    refused: list[str]  #: why it was not accepted; then it was written because that was asked for
    overall: Comparison  #: over the held-out texts of the workloads that were trained on


class OrderedHead(Excerpt):
    centroids: Annotated[int, Meta(ge=2)]  #: number of clusters
    top_k: Positive  #: clusters that are looked into
    rows_read: Positive  #: rows of the head, centroids among them, that a draft step reads
    rows_dense: Positive  #: what the dense head reads
    base: str  #: as of a tuning
    refused: list[str]  #: as of a tuning
    overall: Comparison  #: as of a tuning: the dense head before, the ordered one after


class Comparison(Excerpt):
    texts: Count  #: held out
    rounds: Saving  #: before for one after


class Saving(Excerpt):
    ratio: float  #: rounds before over rounds after
    interval: Bounds | None  #: `[low, high]` at 95 %, over texts; null with fewer than five


def check_extraction(record: Mapping[str, Any]) -> None:
    """Whether ``record``, as JSON gave it, is one.

    Raises:
        ValueError: it is none; the message names the field.
    """
    read(record, Extraction)


def of_bundle(drafter: Shard, original: Checkpoint) -> dict[str, Any]:
    """What a record says of the bundle, whatever is written of it.

    Args:
        original: the drafter's own weights.
    """
    opened, section, region, digest = drafter.opened, drafter.section, drafter.model.region, hashlib.sha256()
    for at in range(0, region.size, _READ):
        digest.update(region.read(at, min(_READ, region.size - at)))
    alike: dict[object, list[str]] = defaultdict(list)
    for role, tensor in original.tensors.items():
        if tensor.origin is not None:
            alike[tensor.origin].append(role)
    return {
        "source": {
            "name": Path(opened.source.name).name,
            "size": opened.source.size,
            "kind": "litertlm" if opened.bundle else "tflite",
            "version": ".".join(map(str, opened.bundle.version)) if opened.bundle else None,
            "provenance": dict(sorted(opened.source.provenance.items())),
            "section": {
                "index": section.index if section else None,
                "begin": region.begin,
                "end": region.begin + region.size,
                "sha256": digest.hexdigest(),
                "found_by": drafter.found_by,
                "signature": drafter.signature.key,
            },
        },
        "known_as": drafter.known["name"] if drafter.known else None,
        "shared": [names for names in alike.values() if len(names) > 1],
        "activations": {
            role: {"input": activation_json(pair[0]), "output": activation_json(pair[1])}
            for role, pair in original.activations.items()
            if any(pair)
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


def proof_record(proof: Mapping[str, Any], *, inherited: bool) -> dict[str, Any]:
    """What a record says of ``proof``, which a proof or a record gives as JSON."""
    rows = {key: proof["mask_rows"][key] for key in ("computed", "of")}
    kept = {key: proof[key] for key in ("positions", "activations_held_in", "coarse_tables")}
    return {**kept, "mask_rows": rows, "inherited": inherited}


def activation_json(found: roles.Activation | None) -> dict[str, Any] | None:
    """``found`` as JSON has it."""
    return None if found is None else {"dtype": found.type, "scale": found.scale, "zero_point": found.zero_point}


def activations_of(
    record: Mapping[str, Any],
) -> Mapping[str, tuple[roles.Activation | None, roles.Activation | None]]:
    """By role, the static quantization of activations that ``record`` has."""

    def made(found: Mapping[str, Any] | None) -> roles.Activation | None:
        return roles.Activation(found["dtype"], found["scale"], found["zero_point"]) if found else None

    pairs: Mapping[str, Mapping[str, Any]] = record["activations"]
    return MappingProxyType({role: (made(pair["input"]), made(pair["output"])) for role, pair in pairs.items()})
