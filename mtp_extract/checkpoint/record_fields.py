"""What ``extraction.json`` holds, field by field; :mod:`mtp_extract.checkpoint.record` fills it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType

from mtp_extract.io.typed import Bounds, Count, NotNegative, Positive, Record, Sha256, Share, Tool, read

FORMAT_VERSION = 5
"""Of ``extraction.json``. 2: sums are XXH3-128 where version 1 had CRC-32. 3: what a proof held, by what decides it.
4: of a tuning who wrote the texts, the rounds, what training has not seen, and single texts."""


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
    counts: Counts  #: of weights
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
    model_type: str | None  #: as the header says
    items: dict[str, str | int | float | bool]  #: the header's key/value items
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


class Counts(Record):
    """How many weights there are."""

    held: dict[str, Positive]  #: as `codes`, `indices` of an ordered head, or floats of a type, such as `F32`
    #: by type of the file: how many it stores so; `implied` where it has none and 1 is what it computes; empty for a
    #: checkpoint of unknown origin
    stored: dict[str, Positive]
    names_confirmed: Count  #: of which a published name in the file says the same role
    set_aside: Count  #: other constants of the graph
    static: Count  #: caches and matrices with static quantization of activations


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
    position_values: Count  #: values of the graph that rotate queries
    mask_rows: MaskRows  #: what masks decide
    #: by layer, how large a product of query and key was taken to be: a hidden slot's score is that far below any other
    largest_scores: list[NotNegative]
    #: by cache input: which of its axes are KV heads, slots and width of a head
    cache_axes: dict[str, Annotated[list[Count], Meta(min_length=3, max_length=3)]]
    #: how many activations the file's kernels hold in each type of few bits; empty where none are
    activations_held_in: dict[str, Positive]
    #: of the grids among these, the fewest codes within one standard deviation of ordinary numbers; null without grids
    fewest_codes: NotNegative | None
    largest_share_cut_off: Share  #: of ordinary numbers, the largest share beyond the grid of one of these
    coarse_tables: list[CoarseTable]  #: RoPE tables of the file that are coarser than the config's
    #: whether it is the one of the extraction, over the same codes, or the same numbers before rounding; false where it
    #: was made for what lies here
    inherited: bool


class MaskRows(Record):
    computed: Positive  #: rows that were held against the config, with every content of the mask inputs
    of: Positive  #: rows that there are
    #: whether all rows are the same up to a shift: then the first and the last, which are computed, show all
    alike: bool


class CoarseTable(Record):
    layer: Count  #: whose table it is
    held_in: str  #: the types that it is stored in


class Excerpt(Record):
    """An object of which only what commands read is listed here; `mtp-tune --json` prints it all."""


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
    kinds: dict[str, KeptShare]  #: by kind of held-out text, of the dense head's choices
    refused: list[str]  #: as of a tuning
    overall: Comparison  #: as of a tuning: the dense head before, the ordered one after


class KeptShare(Excerpt):
    share: Share  #: of the dense head's choices, those in a cluster that is looked into


class Comparison(Excerpt):
    texts: Count  #: held out
    before: Length  #: the drafter as it was
    after: Length  #: tuned, rounded as it was written
    rounds: Saving  #: before for one after


class Length(Excerpt):
    teacher_forced: float  #: tokens per round: 1 + drafts accepted, as if a round began at every position


class Saving(Excerpt):
    ratio: float  #: rounds before over rounds after
    interval: Bounds | None  #: `[low, high]` at 95 %, over texts; null with fewer than five


def check_extraction(record: Mapping[str, Any]) -> None:
    """Whether ``record``, as JSON gave it, is one.

    Raises:
        ValueError: it is none; the message names the field.
    """
    read(record, Extraction)
