"""What ``report.json`` and ``pair.json`` hold, field by field.

A field is called as in the results, from which it is taken; ``name`` is what the file calls it, where that differs.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType, field

from mtp_extract.io.typed import Bounds, Count, NotNegative, Positive, Record, Share, Tool

_TWO = Meta(min_length=2, max_length=2)


class Report(Record):
    version: Literal[2]  #: version of this file: 2
    tool: Tool  #: what wrote it
    verdict: str  #: the result in one sentence
    proven: bool  #: whether config, files, tensors and function were checked and nothing was refuted
    refuted: bool  #: whether something was shown to be wrong
    findings: list[str]  #: sentences, one by one
    drafter: str  #: the directory
    source: str | None  #: file it was compared with
    base: Base | None  #: the base and how it ran
    settings: Settings  #: what a second run needs
    notes: list[str]  #: things worth knowing that are not errors
    checks: list[Check] | None  #: is it the drafter of the file: one entry a question; null without a file
    parity: Parity | None  #: against Google's interpreter
    agreement: Agreement | None  #: with the base, over all texts
    trivial: dict[str, TrivialDrafter]  #: what drafters that know nothing of the base reach on the same text
    controls: dict[str, Control] | None  #: by name: one thing broken
    #: speculative decoding, by what was drafted: `3` a chain of three, `4x2x1` a tree of that shape, `auto:8` one that
    #: is grown anew in every round, `best:14` one that ranks chose
    generation: dict[str, DraftLength] | None
    arithmetic: Arithmetic | None  #: what the measured acceptance and costs come to
    #: this drafter first, then those beside it, all on the same texts; null without a base
    drafters: Annotated[list[Drafter], Meta(min_length=1)] | None


class Base(Record):
    name: str  #: directory or Hub id
    dtype: str  #: it was run in
    devices: list[str]  #: it was run on
    drafter_dtype: str  #: the drafter's
    chat_template: bool  #: whether prompts went through it


class Settings(Record, kw_only=True, forbid_unknown_fields=True):
    """Without a base only `seed` is there."""

    prompts: dict[str, Positive] | UnsetType = UNSET  #: by workload: how many
    new_tokens: Positive | UnsetType = UNSET  #: most tokens of a continuation
    draft_steps: list[Positive] | UnsetType = UNSET  #: numbers of drafts tried
    trees: list[str] | UnsetType = UNSET  #: trees tried
    batch: Positive | UnsetType = UNSET  #: prompts at a time
    control_positions: Positive | UnsetType = UNSET  #: at how many positions controls drafted, spread over all texts
    seed: int  #: of the random inputs


class Check(Record):
    name: str  #: `config`, `files`, `tensors`, `function`, `record`, `transformers`, `interpreter`
    what: str  #: the question
    #: the answer; null where it was not checked, as its tool is missing, broken or of a release that was never tried
    passed: bool | None
    evidence: str  #: what it rests on


class Parity(Record):
    agrees: bool  #: whether the two compute the same function
    in_floats: Apart  #: the file's drafter with every tensor of codes as floats
    as_it_is: Apart  #: the same with the file's integers, which round activations
    cases: list[str]  #: where each input is from


class Apart(Record):
    """Between the reference and Google's interpreter, over all inputs."""

    logits: float | None  #: largest difference, as a share of that input's range; null where it is no number
    state: float | None  #: the same of the projected state
    correlation: float | None  #: mean over the inputs, of the output where it is less
    top1: Count  #: inputs with the same largest logit


class Workload(Record):
    texts: Count  #: continuations of the base that repeat no other
    anchors: Count = field(name="n")  #: positions from which was drafted
    #: 1 + accepted / rounds, over positions that have a target at every step
    mean_accepted_length: float | None
    #: over texts; null with fewer than five
    mean_accepted_interval: Bounds | None = field(name="mean_accepted_length_ci95")
    steps: list[Step]  #: by draft step


class Agreement(Workload):
    workloads: dict[str, Workload]  #: the same by workload


class Step(Record):
    step: Positive  #: 1 is the first draft
    top1: Share | None  #: the draft is the base's token
    top5: Share | None  #: the base's token is among the five likeliest
    conditional: Share | None  #: accepted, given that all drafts before it were
    unconditional: Share | None  #: accepted together with all drafts before it
    n: Count  #: positions
    n_conditional: Count  #: positions at which all drafts before it were accepted
    ci95: Intervals  #: of the shares


class Intervals(Record):
    top1: Bounds | None  #: of the field of this name
    top5: Bounds | None  #: of the field of this name
    conditional: Bounds | None  #: of the field of this name
    unconditional: Bounds | None  #: of the field of this name


class TrivialDrafter(Record):
    share: Share = field(name="top1")  #: share of first drafts that are the base's own token
    difference: float | None  #: top-1 of the first step: real drafter less this one
    #: its interval; where it has none, or 0 within, neither is shown to be better
    interval: Bounds | None = field(name="difference_ci95")


class Control(Record):
    what: str  #: what is broken
    suspect: str  #: what to look at if it scores as well
    skipped: str | None  #: why it was not run; then what follows is null
    #: `below`, `above`, `same` (within 5 points, or no first draft changed), `undecided`
    standing: Literal["below", "above", "same", "undecided"] | None
    difference: float | None  #: top-1 of the first step: real drafter less control
    interval: Bounds | None = field(name="difference_ci95")  #: its interval
    changed: Count | None  #: first drafts that it changes
    better: Count | None  #: of them, drafts that are right only with it
    worse: Count | None  #: of them, drafts that are right only without it
    #: 1 + accepted / rounds, over positions that have a target at every step
    mean_accepted_length: float | None
    #: over texts; null with fewer than five
    mean_accepted_interval: Bounds | None = field(name="mean_accepted_length_ci95")
    steps: list[Step]  #: by draft step
    why: str  #: what the score says


class DraftLength(Record):
    """A chain, or a tree."""

    tree: str | None  #: what it can be asked for as again; null for a chain
    #: of a tree of fixed shape, the drafts: of each the ranks on the way to it, 0 the likeliest; null for a chain, and
    #: for a tree that is grown
    paths: Annotated[list[Annotated[list[Count], Meta(min_length=1)]], Meta(min_length=1)] | None
    drafts: Positive  #: most that the base verifies a round
    depth: Positive  #: most steps of the drafter a round; of a chain, as many as drafts
    accepted: Count  #: drafts, over all prompts whose text repeats no other
    drafted: Count  #: steps of the drafter, over these; in a chain each is one draft
    rounds: Count  #: over these
    acceptance: Share | None  #: accepted / drafted
    mean_accepted_length: float | None  #: 1 + accepted / rounds
    mean_accepted_interval: Bounds | None = field(name="mean_accepted_length_ci95")  #: its interval
    #: by teacher forcing from every position of the same texts (rounds begin where others ended, which is more often a
    #: token that is hard to draft, and the last one of a text may be cut short, so that they come to less): of a chain
    #: from its agreement; of a tree from how often the base's token had each rank at each step, the steps taken for
    #: independent; null for a tree that is grown
    expected: float | None = field(name="expected_mean_accepted_length")
    #: texts whose ranks chose the tree, every second one of each workload; 0 where none did
    chosen_on: Count
    #: of the prompts that did not choose it; null where none did
    elsewhere: float | None = field(name="mean_accepted_length_elsewhere")
    steps: list[AcceptedStep]  #: accepted, by step
    identical: bool  #: whether every text is the base's
    identical_prompts: Count  #: how many are
    prompts: Positive  #: of so many
    divergences: list[Divergence]  #: the others
    base_tokens_per_s: float | None  #: the base alone, one prompt at a time
    speculative_tokens_per_s: float | None  #: with the drafter, one prompt at a time
    verify_ms: float | None  #: mean of a round
    draft_ms: float | None  #: mean of a round


class AcceptedStep(Record):
    step: Positive  #: 1 is the first
    #: share of all rounds that accepted a draft there; over all steps, mean accepted length less 1
    accepted: Share
    conditional: Share | None  #: accepted, of rounds that drafted it and accepted all before it
    #: accepted, of rounds that drafted it: a tree that is grown goes deep where the drafter is confident, so that this
    #: may rise
    unconditional: Share | None
    n: Count  #: rounds that drafted it
    n_conditional: Count  #: of these, rounds that accepted all before it


class Divergence(Record):
    prompt: Count  #: index
    token: Count  #: index among the generated
    #: logit of the base's token less that of the other; null where one text only ends earlier
    margin: float | None
    tie: bool  #: whether the margin is within what rounding in the base, through all of its layers, moves a logit by


class Arithmetic(Record):
    base_ms: float | None  #: one forward of the base over one token
    #: number of drafts in a chain worth most; 0 where none is worth it
    best_drafts: Count = field(name="best_draft_steps")
    predicted_speedup: float | None  #: at that number
    #: largest number in a chain of those tried that is predicted to be faster than none; 0 for none
    break_even_drafts: Count = field(name="break_even_draft_steps")
    timed: Count = field(name="timed_prompts")  #: prompts behind the times
    speedups: dict[str, Speedup]  #: by what was drafted, as in `generation`


class Speedup(Record):
    """Over the base alone; null where nothing was timed."""

    #: mean accepted length over all prompts × `base_ms` / (`verify_ms` + `draft_ms`)
    predicted: float | None
    measured: float | None  #: in tokens a second, over the prompts that were timed


class Drafter(Record):
    name: str  #: its directory's, as short as tells it from the others
    format: str  #: of its directory
    #: by its record: `extracted`, `tuned`; `unknown` where there is none, or no bundle in it
    made: Literal["extracted", "tuned", "unknown"]
    mode: str | None  #: how it was tuned; null if it was not
    ordered_head: OrderedHead | None  #: null for a dense head
    #: what one draft step reads, as its directory stores it: codes with their scales, floats by the size of their type
    bytes_a_step: StepReads
    #: the same in numbers of the network, whatever a number is stored as; scales and indices are none
    parameters_a_step: StepReads
    change: Change  #: in mean accepted length: this one less the first
    changes: dict[str, Change]  #: the same by workload
    agreement: Agreement  #: with the base, over all texts
    generation: dict[str, DraftLength]  #: speculative decoding, by what was drafted
    arithmetic: Arithmetic  #: what the measured acceptance and costs come to


class OrderedHead(Record):
    num_centroids: Positive  #: clusters of tokens
    top_k: Positive  #: clusters whose tokens get logits


class StepReads(Record):
    """Of the drafter's own weights, in one step of one sequence, each once. The base's K and V, its embedding of a
    token and its hidden states are not counted.
    """

    body: Positive  #: everything but the head
    #: a dense one whole; of an ordered one the centroids, and rows and indices of `top_k` clusters
    head: Positive
    #: read beside the steps once a round, however many they are: of an EAGLE-3 head, what fuses the base's states; 0
    #: otherwise
    once_a_round: Count
    stored: Positive  #: all weights
    total: Positive  #: `body` and `head`


class Change(Record):
    """Over positions that have a target at every step, text by text."""

    mean: float | None  #: of the differences; null without such positions
    interval: Bounds | None = field(name="ci95")  #: over texts; null with fewer than five


class Pair(Record):
    version: Literal[1]  #: version of this file: 1
    tool: Tool  #: what wrote it
    model: Literal["gemma4_speculative_pair"]  #: what the two are together
    target: Target  #: the base
    draft: Draft  #: the drafter
    bridge: Bridge  #: what goes from one to the other
    verify: Verify  #: how drafts are judged
    buffers: Buffers  #: what a round holds
    #: by name of what was drafted, as in `generation` of report.json
    metrics: Annotated[dict[str, Metrics], Meta(min_length=1)]
    beside: list[PairBeside]  #: the other drafters of the report with the same base


class PairBeside(Record):
    draft: Draft  #: the drafter
    bridge: Bridge  #: what goes from one to the other
    verify: Verify  #: how drafts are judged
    buffers: Buffers  #: what a round holds
    #: by name of what was drafted
    metrics: Annotated[dict[str, Metrics], Meta(min_length=1)]


class Target(Record):
    name: str  #: directory or Hub id
    devices: Annotated[list[str], Meta(min_length=1)]  #: it was run on
    hidden_export: Literal["target_hidden_stream"]  #: what it gives to a drafter
    hidden_size: Positive  #: width of its hidden states
    vocab_size: Positive  #: tokens
    layers: Positive  #: how many
    dtype: str  #: of most of its numbers, as it was run
    parameters: Positive  #: numbers in its weights
    nbytes: Positive = field(name="bytes")  #: of its weights and buffers, as it was run


class Draft(Record):
    name: str  #: as in report.json
    assistant_role: Literal["mtp_drafter", "eagle3_head"]  #: what kind of drafter it is
    format: str  #: of its directory
    backbone_hidden_size: Positive  #: width of the base
    hidden_size: Positive  #: width of its own stream
    dtype: str  #: of most of its numbers, as it was run
    parameters: Positive  #: numbers in its weights
    nbytes: Positive = field(name="bytes")  #: of its weights and buffers, as it was run


class Bridge(Record):
    source: Literal["target_hidden_stream"]  #: what the base gives
    dest: Literal["draft.backbone_stream"]  #: where it goes
    shape: Annotated[list[Literal["T"] | int], _TWO]  #: `T`, and how many numbers for each token
    #: of an EAGLE-3 head: layers whose incoming states go over; null where it is the state after the final norm
    layers: Annotated[list[Count], Meta(min_length=1)] | None
    embedding: bool  #: whether the base's embedding of each token goes over too
    shared_kv: dict[str, SharedKv]  #: by layer type: the base's keys and values that the drafter looks at


class SharedKv(Record):
    heads: Positive  #: of keys and values
    head_dim: Positive  #: width of one


class Verify(Record):
    rule: Literal["greedy"]  #: `greedy`: a draft stands if it is what the base says
    #: what was drafted in the run whose buffers these are, by its name in `generation` of report.json
    drafts: str
    fed: Annotated[int, Meta(ge=2)] = field(name="T")  #: the pending token and the drafts
    positions: Annotated[int, Meta(ge=2)]  #: tokens of that run, the prompt included
    inputs: Annotated[list[Literal["draft_candidate_tokens", "target_logits"]], _TWO]  #: what is compared
    outputs: Annotated[list[Literal["accepted_tokens", "rejected_token"]], _TWO]  #: what comes of it


class Buffers(Record):
    target_main_stream: Buffer  #: the base's states
    target_kv_cache: Buffer  #: its keys and values
    target_logits: Buffer  #: its logits
    draft_backbone_stream: Buffer  #: its states, as they go into the drafter
    draft_main_stream: Buffer  #: the drafter's own states
    draft_kv_cache: Buffer  #: the drafter's own keys and values; an MTP drafter has none
    draft_logits: Buffer  #: its logits of one step
    candidate_tokens: Buffer  #: drafts of a round
    accepted_tokens: Buffer  #: tokens that a round gives, at most
    verifier_scratch: Buffer  #: masks, and what the base says


class Buffer(Record):
    nbytes: Count = field(name="bytes")  #: of all its tensors
    #: the buffer that is read in its place; null where it has tensors of its own
    shared_with: Literal["target_kv_cache"] | None
    why: str | None  #: that is so; else null
    tensors: list[AlikeTensors]  #: those that are alike in one entry


class AlikeTensors(Record):
    what: str  #: it holds
    shape: list[Count]  #: of one, at its largest
    axes: list[str]  #: what each dimension counts
    dtype: str  #: torch's name
    copies: Positive  #: how many there are
    nbytes: Count = field(name="bytes")  #: of all of them


class Metrics(Record):
    #: the base alone, batch of one
    base_tokens_per_s: NotNegative | None = field(name="backbone_only_tok_per_sec")
    #: with the drafter, batch of one
    speculative_tokens_per_s: NotNegative | None = field(name="speculative_tok_per_sec")
    #: drafts that the base verifies in one forward, at most
    drafts: Positive = field(name="draft_tokens_per_batch")
    #: share of drafts that stand; null of a tree
    acceptance: Share | None = field(name="accepted_tokens/drafted_tokens")
    verify_ms: NotNegative | None = field(name="target_verify_ms")  #: mean of a round
    draft_ms: NotNegative | None = field(name="assistant_draft_ms")  #: mean of a round
    why: dict[str, str]  #: by field: why it is null
