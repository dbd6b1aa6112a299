"""What ``extraction.json`` holds, field by field; :mod:`mtp_extract.checkpoint.record` fills it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType

from mtp_extract.io.typed import Bounds, Count, NotNegative, Positive, Record, Sha256, Share, Tool, Xxh3, read

FORMAT_VERSION = 5
"""Of ``extraction.json``. 2: sums are XXH3-128 where version 1 had CRC-32. 3: what a proof held, by what decides it.
4: of a tuning who wrote the texts, the rounds, what training has not seen, and single texts."""


def _one_of(*kinds: str) -> Meta:
    return Meta(extra_json_schema={"oneOf": [{"$ref": f"#/definitions/{kind}"} for kind in kinds]})


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
    #: the drafter's shape, as read from the graph; a `Head` where it is an EAGLE-3 head
    geometry: Annotated[dict[str, Any], _one_of("Geometry", "Head")]
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
    rms: NotNegative  #: root mean square of the error, as a share of the matrix's range; of the worst of them
    largest: NotNegative  #: largest error, as a share of it; of the worst of them


class Geometry(Record):
    backbone_hidden_size: Positive  #: width of the base
    hidden_size: Positive  #: width of the drafter
    intermediate_size: Positive  #: width of the feed-forward block
    vocab_size: Positive  #: rows of the LM head
    num_layers: Positive  #: layers
    num_heads: Positive  #: query heads
    head_dims: list[Positive]  #: width of a head, by layer
    num_kv_heads: list[Positive]  #: heads of the base's K and V, by layer
    layer_types: list[Literal["sliding_attention", "full_attention"]]  #: by layer
    sliding_window: Positive | None  #: positions a sliding layer sees, itself included; null without sliding layers
    rope: dict[str, Rope]  #: by layer type
    final_logit_softcap: float | None  #: c in c · tanh(logits / c); null for no cap
    rms_norm_eps: float  #: epsilon of every RMSNorm
    hidden_activation: str  #: of the gate, in transformers' words


class Rope(Record):
    theta: float  #: base of the frequencies
    partial_rotary_factor: Annotated[float, Meta(gt=0, le=1)]  #: share of the head that is rotated


class Head(Record):
    """An EAGLE-3 head."""

    backbone_hidden_size: Positive  #: width of the base
    hidden_size: Positive  #: width of the head
    intermediate_size: Positive  #: width of the feed-forward block
    vocab_size: Positive  #: tokens of the base
    draft_vocab_size: Positive  #: tokens that it can propose
    num_heads: Positive  #: query heads
    num_kv_heads: Positive  #: heads of its own K and V
    head_dim: Positive  #: width of a head
    #: whose incoming hidden states it reads, counted from 0; their number stands for what leaves the last
    base_layers: list[Count]
    rope_theta: float  #: base of the frequencies
    rms_norm_eps: float  #: epsilon of every RMSNorm
    fc_norm: bool  #: each state is normed by itself before they are fused
    norm_before_fc: bool  #: they are normed together
    norm_before_residual: bool  #: the residual stream begins after the norm of the fused state
    norm_output: bool  #: what is fed back is taken after the final norm
    own_embedding: bool  #: it has a table of embeddings of its own
    max_position_embeddings: Positive | None  #: longest context; null when not recorded
    base: str | None  #: name of the base it was trained for; null when not recorded


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
    differs_by: NotNegative  #: the largest difference of a cosine or sine from the config's


class Tuning(Record):
    #: what was trained: `norms` (and layer scalars), `qat` (and codes, on the stored grid), `float` (every weight)
    mode: Literal["norms", "qat", "float"]
    base: str  #: as it was named; of a directory its name alone
    base_xxh3: Xxh3  #: XXH3-128 of its weights, in order of their names
    recipe: Recipe  #: how it was trained
    numbers: Positive  #: how many were trained
    #: how many were trained on (`trained`), measured on the way to keep the best (`watched`), measured before and after
    #: (`held_out`), and left out since they repeat one of these (`repeats`)
    texts: dict[str, Count]
    #: share of the held-out texts' sequences of 8 generated tokens that stand in a training text too
    shared_sequences: Share
    text_from: TextFrom | None  #: the server that wrote the texts; null where the base at hand did
    steps_done: Count  #: of the optimizer
    best_step: Count  #: the one after which the watched texts were at their best: these weights are what was written
    interrupted: bool  #: whether it was stopped before its end
    #: whether it took fewer rounds on held-out text, at 95 %, may not lose more than 0.05 where `unseen`, and is not
    #: seen to ruin a text, to be worse on a workload or to lose more than 0.05 served otherwise; of fewer than five
    #: texts of a kind nothing is seen
    accepted: bool
    refused: list[str]  #: why it was not; then it was written because that was asked for
    #: over the same prompts served otherwise (at temperature 1 where tuned for greedy serving, else greedily); null
    #: after text by people
    other_serving: OtherServing | None
    overall: Comparison  #: over the held-out texts of the workloads that were trained on
    workloads: dict[str, Comparison]  #: by name: over its held-out texts
    sequences: Sequences  #: over all held-out texts, by whether training has seen the tokens around a draft
    worst: list[TextChange]  #: the five held-out texts that lost most, that one first
    ruined: Count  #: how many held-out texts fell below 0.7 of their teacher-forced tokens per round, beyond chance
    too_short: Count  #: of how many that is not decided, as they have fewer than 33 places to draft from
    tuned_from: dict[str, Sha256]  #: by name: SHA-256 of each file with tensors of the directory that was tuned
    #: by tensor: how many of its codes, or numbers where it has none, are others than before; those with none left out
    changed: dict[str, Positive]


class TextFrom(Record):
    """A server that wrote the texts, and how far it has the base at hand; by up to 32 of them."""

    kind: str  #: as `mtp-bench` calls it
    version: str | None  #: as it says
    model: str  #: as it calls the base
    texts: Count  #: that were looked at
    positions: Count  #: tokens of theirs
    #: share of them that the base at hand would have written, given all before; null for sampled text
    agreement: Share | None
    #: by how many nats a token they are less likely to the base at hand than what it writes itself; null for greedy
    surprise: float | None
    #: share of the prompts that have as many tokens there as here; null where it does not say
    prompts_alike: Share | None
    #: share of the texts whose tokens were told; of the others they are those that the tokenizer makes of the text
    tokens_told: Share


class Recipe(Record):
    steps: Positive  #: of the optimizer, planned
    draft_steps: Positive  #: drafts a round
    batch: Positive  #: texts a step
    anchors: Positive  #: places of each text to draft from
    #: `ce`: cross-entropy on the base's choice; `kl`: divergence from its distribution; `tv`: the probability of a
    #: rejection; `mixed`: of `ce` and `tv`
    objective: Literal["mixed", "ce", "kl", "tv"]
    temperature: NotNegative  #: at which the base wrote the text and drafts were judged; 0 for greedy
    learning_rate: float | None  #: null for the mode's own
    warm_up: NotNegative  #: share of the steps
    evaluations: Positive  #: how often the watched texts were to be measured
    patience: Positive  #: measurements without a better one after which it ends
    seed: Count  #: of the order of texts, the anchors and sampled text
    logits_at_once: Positive  #: most logits held in one piece


class OrderedHead(Record):
    centroids: Annotated[int, Meta(ge=2)]  #: number of clusters
    top_k: Positive  #: clusters that are looked into
    tokens_a_cluster: Annotated[int, Meta(ge=2)]  #: the vocabulary, divided
    rows_read: Positive  #: rows of the head, centroids among them, that a draft step reads
    rows_dense: Positive  #: what the dense head reads
    base: str  #: as of a tuning
    base_xxh3: Xxh3  #: XXH3-128 of its weights, in order of their names
    temperature: NotNegative  #: at which the base wrote the text and drafts were judged; 0 for greedy
    draft_steps: Positive  #: drafts a round
    seed: Count  #: of anchors, the order of states and sampled text
    texts: dict[str, Count]  #: as of a tuning
    shared_sequences: Share  #: as of a tuning
    text_from: TextFrom | None  #: as of a tuning
    states: Positive  #: of the drafter's rounds, over the trained texts and over such after random tokens
    states_made: Count  #: for tokens that text seldom leads to: the other part of what it was made from
    tokens_used: Positive  #: tokens that were the dense head's choice in any state over the trained texts
    tokens_seen: Positive  #: tokens that were so in any state over texts, those after random tokens too
    steps: Positive  #: of the optimizer, planned
    steps_done: Count  #: made
    #: the one after which the watched states were at their best; 0 where that was the clusters' means
    best_step: Count
    kept: KeptShare  #: of the dense head's choices on held-out text
    kinds: dict[str, KeptShare]  #: by kind of held-out text: the same, of text that it was not made of too
    reached: Reached  #: of tokens, by states that were made for them
    #: whether enough are kept on every kind, and reached, and no more than 0.02 of teacher-forced tokens per round may
    #: be lost, at 95 %
    accepted: bool
    refused: list[str]  #: why it was not; then it was written because that was asked for
    other_serving: OtherServing | None  #: as of a tuning
    overall: Comparison  #: as of a tuning: the dense head before, the ordered one after
    workloads: dict[str, Comparison]  #: by name: the same over its held-out texts
    sequences: Sequences  #: as of a tuning
    worst: list[TextChange]  #: as of a tuning
    ruined: Count  #: as of a tuning
    too_short: Count  #: as of a tuning
    made_from: dict[str, Sha256]  #: by name: SHA-256 of each file with tensors of the directory that it was made for


class KeptShare(Record):
    share: Share  #: of the dense head's choices, those in a cluster that is looked into
    interval: Bounds | None  #: `[low, high]` at 95 %, over texts; null with fewer than five


class Reached(Record):
    tokens: Count  #: that a state could be made for in which the dense head chooses them
    share: Share  #: of those tokens, found from one such state at least
    kept: Share  #: of those states, the ones in which the token is found


class OtherServing(Record):
    temperature: NotNegative  #: of that serving
    comparison: Comparison  #: over the same prompts


class Comparison(Record):
    texts: Count  #: held out
    anchors: Count  #: positions of them with all targets
    trained_on_its_kind: bool  #: whether its workload was among those trained on; else it was looked at for harm
    before: Length  #: the drafter as it was
    after: Length  #: tuned, rounded as it was written
    change: Change  #: of teacher-forced tokens per round, text by text
    rounds: Saving  #: before for one after


class Length(Record):
    mean_accepted_length: float  #: 1 + accepted drafts of a round, at every position as if one began there
    interval: Bounds | None  #: `[low, high]` at 95 %, over texts; null with fewer than five
    conditional: list[float]  #: by draft step: accepted, of the rounds that accepted all before
    #: of the loop over these texts, each up to the last position with all targets; of sampled serving expected ones
    rounds: NotNegative
    tokens_a_round: float  #: of these rounds
    tokens_a_round_interval: Bounds | None  #: as of `mean_accepted_length`


class Change(Record):
    mean: float  #: after less before
    interval: Bounds | None  #: `[low, high]` at 95 %, over texts; null with fewer than five
    shows: NotNegative | None  #: half its width: a change that these texts would show half of the time


class Saving(Record):
    ratio: float  #: rounds before over rounds after
    interval: Bounds | None  #: `[low, high]` at 95 %, over texts; null with fewer than five


class Sequences(Record):
    seen: Places  #: where the 8 tokens that end with the last draft stand in a training text, prompts included
    unseen: Places  #: everywhere else


class Places(Record):
    texts: Count  #: with such a position
    anchors: Count  #: such positions
    change: Change | None  #: of teacher-forced tokens per round there; null where there are none


class TextChange(Record):
    workload: str  #: its workload
    name: str  #: its source, if it has one of its own, and how its prompt begins
    anchors: Count  #: positions of it with all targets
    before: TextLength  #: the drafter as it was
    after: TextLength  #: as it was written
    #: whether its teacher-forced tokens per round fell below 0.7 of what they were, beyond chance, by blocks of 8
    #: positions
    ruined: bool


class TextLength(Record):
    mean_accepted_length: float  #: as of a comparison
    tokens_a_round: float  #: as of a comparison


def check_extraction(record: Mapping[str, Any]) -> None:
    """Whether ``record``, as JSON gave it, is one.

    Raises:
        ValueError: it is none; the message names the field.
    """
    whole = read(record, Extraction)
    read(whole.geometry, Head if "draft_vocab_size" in whole.geometry else Geometry, "geometry")
