"""A whole validation: against the file, beside the base, and in other programs."""

from __future__ import annotations

import math
import platform
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mtp_extract._version import __version__
from mtp_extract.architecture import architecture_of
from mtp_extract.bundle import Shard, open_bundle
from mtp_extract.data import sample_bundle
from mtp_extract.drafter.load import Network, load_any, load_drafter
from mtp_extract.drafter.mtp import MtpDrafter
from mtp_extract.errors import PairError, escape
from mtp_extract.evaluation.agreement import (
    DraftRequest,
    compare_acceptance,
    compute_acceptance,
    nan_to_none,
    summarize_agreement,
)
from mtp_extract.evaluation.base_model import LoadedBase, load_base, memory_guard
from mtp_extract.evaluation.base_texts import Continuations, write_texts
from mtp_extract.evaluation.prompts import hash_prompts, read_prompts
from mtp_extract.formats import read_checkpoint
from mtp_extract.io.address import public_name
from mtp_extract.io.typed import Tool
from mtp_extract.pipeline.check import read_record
from mtp_extract.pipeline.extraction import checkpoint_of, extract_drafter
from mtp_extract.pipeline.identity import check_identity, drafter_for
from mtp_extract.pipeline.plan import WritingPlan
from mtp_extract.progress import SILENT, Reporter
from mtp_extract.speculate.drafts import Drafts, DraftTree
from mtp_extract.speculate.loop import SpeculativeGenerator
from mtp_extract.speculate.target import Base
from mtp_extract.speculate.teacher import Agreement
from mtp_extract.validation.controls import ControlResult, draft_together
from mtp_extract.validation.interpreter import check_interpreter
from mtp_extract.validation.parity import check_transformers
from mtp_extract.validation.plan import ValidationPlan
from mtp_extract.validation.result import BaseFacts, DrafterFigures, RunFacts, Validation, conclude, list_notes
from mtp_extract.validation.worth import generate_with_base_alone, measure_worth

_SINGLE_THREAD_WIDTH = (
    256  # width of a base whose matrices are too small to share: more threads would mostly wait for each other
)
_SAMPLE = "the sample"  # what a report calls the drafter of the sample
_COMPUTING = ("torch", "transformers", "ai-edge-litert", "numpy")  # whose versions may change a figure


def run_validation(plan: ValidationPlan, reporter: Reporter = SILENT) -> Validation:
    """Measure what ``plan`` asks for: at least one of ``base`` and ``source``.

    Where an error or a signal ends it, the reporter is told the Validation as far as it came.

    Raises:
        MtpExtractError: a part is missing, does not fit, or does not fit into memory.
    """
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        directory = plan.directory
        name = _SAMPLE if directory is None else public_name(str(directory))
        if directory is None:
            reporter.say("extracting the sample")
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "sample-mtp-drafter"
            extract_drafter(sample_bundle(), directory, WritingPlan())
            plan = plan.adapt_to_sample(directory)
        # What is cheap to see is seen before a bundle is fetched or a base is loaded.
        checkpoint = read_checkpoint(directory)
        validation = _start_validation(plan, name, checkpoint.notes)

        source = None
        if plan.source is not None:
            reporter.say("deriving every tensor from the file again, and reading its graph")
            opened = stack.enter_context(open_bundle(plan.source))
            opened.prefetch()
            source = drafter_for(opened, checkpoint.mtp)
            validation.checks = check_identity(directory, source)
            if any(check.passed is False for check in validation.checks):
                # What is refuted needs no second opinion, and may hold numbers that nothing can run.
                validation.notes.append("It is refuted already, so nothing was measured.")
                return conclude(validation)

        try:
            if plan.base is not None:
                _measure(plan, plan.base, directory, validation, reporter)
            if source is not None:
                _compare_with_other_programs(plan, directory, source, validation, reporter)
        except BaseException:
            if validation.checks or validation.drafters:
                validation.notes.append("It ended early: what is missing was not measured.")
                reporter.measured(conclude(validation))
            raise
        return conclude(validation)


def _start_validation(plan: ValidationPlan, drafter: str, notes: Sequence[str]) -> Validation:
    """Without results. A file of prompts that cannot be read has no hash; reading it says why."""
    prompts_sha256 = None
    if plan.base is not None:
        with suppress(OSError, ValueError):
            prompts_sha256 = hash_prompts(plan.prompts)
    versions = {"python": platform.python_version()}
    for package in _COMPUTING:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    began = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Validation(
        tool=Tool("mtp-extract", __version__),
        run=RunFacts(began, plan.command, prompts_sha256, versions),
        drafter=drafter,
        source=plan.source and Path(plan.source).name,
        notes=list(notes),
    )


@dataclass(frozen=True)
class _Contender:
    """A drafter beside the base, as the report has it."""

    name: str
    tuned: str | None  # how it was tuned, by its record; None where nothing says so
    pair: SpeculativeGenerator


def _measure(plan: ValidationPlan, base: str, directory: Path, validation: Validation, reporter: Reporter) -> None:
    """Add to ``validation`` everything that needs the base. What does not fit is said before anything is measured."""
    prompts = read_prompts(plan.prompts, chat_template=plan.chat_template)
    loaded, contenders = _load_contenders(plan, base, validation.drafter, directory, reporter)
    pair = contenders[0].pair
    for tree in _list_trees(plan):
        tree.require_tokens(pair.base.vocab_size)
    if pair.base.width <= _SINGLE_THREAD_WIDTH:
        torch.set_num_threads(1)
    sizes = {"batch": plan.batch, "new_tokens": plan.new_tokens}
    validation.settings = {
        "prompts": dict(Counter(prompt.workload for prompt in prompts)),
        **sizes,
        "draft_steps": sorted(set(plan.draft_steps)),
        "trees": list(plan.drafts_by_name),
    }
    with memory_guard("running the base"):
        written = write_texts(
            pair.base, pair.codec, prompts, **sizes, chat_template=plan.chat_template, reporter=reporter
        )
        _measure_drafts(plan, loaded, contenders, written, validation, reporter)
    validation.pair = describe_pair(pair, validation, max(len(text.tokens) for text in written.texts))
    validation.notes += [*loaded.notes, *_note_unused_texts(written), *list_notes(validation)]


def _note_unused_texts(written: Continuations) -> Iterator[str]:
    if unused := len(written.texts) - len(written.usable):
        yield f"{unused} of {len(written.texts)} texts repeat another, or end at once, and are not counted."


def _list_trees(plan: ValidationPlan) -> list[DraftTree]:
    return [drafts for drafts in plan.drafts_by_name.values() if isinstance(drafts, DraftTree)]


def _load_contenders(
    plan: ValidationPlan, base: str, name: str, directory: Path, reporter: Reporter
) -> tuple[LoadedBase, list[_Contender]]:
    """The base, and beside it the drafter ``name`` in ``directory`` and the other one that the plan may have."""
    places = {name: directory}
    if plan.beside is not None:
        read_checkpoint(plan.beside)
        other = public_name(str(plan.beside))
        places[other if other != name else f"{other} (2)"] = plan.beside
    reporter.say(f"loading the base {base}")
    loaded = load_base(base, plan.device)
    contenders = []
    with memory_guard("loading the drafters"):
        for each, place in places.items():
            drafter = load_any(place, dtype=loaded.drafter_dtype, device=loaded.device)
            tuning = read_record(place).get("tuning")
            try:
                pair = SpeculativeGenerator(loaded.model, drafter, loaded.tokenizer)
            except PairError as error:
                raise PairError(f"{escape(place)}: {error}", remedies=error.remedies) from error
            contenders.append(_Contender(each, str(tuning["mode"]) if tuning else None, pair))
    return loaded, contenders


def _measure_drafts(
    plan: ValidationPlan,
    loaded: LoadedBase,
    contenders: Sequence[_Contender],
    written: Continuations,
    validation: Validation,
    reporter: Reporter,
) -> None:
    """Add to ``validation`` how ``contenders`` draft along the texts, the controls of the first, and times."""
    reporter.say("drafting after every token of them, and with one thing broken at a time")
    drafts, controls = _draft_after_every_token(plan, contenders, written, reporter)
    reporter.say("generating a few texts with drafts")
    pair = contenders[0].pair
    alone = generate_with_base_alone(pair, written, new_tokens=plan.new_tokens, timed=plan.timed)
    validation.base = BaseFacts(
        name="the sample's base" if contenders[0].name == _SAMPLE else public_name(loaded.name),
        dtype=loaded.dtype,
        devices=list(loaded.devices),
        chat_template=plan.chat_template and pair.codec.has_template,
        timed=len(alone.texts),
        tokens_per_s=nan_to_none(alone.tokens_per_s),
        forward_ms=nan_to_none(alone.verify_ms),
    )
    first = drafts[0][0]
    for contender, (agreement, _) in zip(contenders, drafts, strict=True):
        validation.drafters.append(_summarize_contender(contender, first, agreement, written.workloads))
    validation.controls = controls

    # Chains, the longest last; then what is measured besides.
    planned: dict[str, Drafts] = {
        **{str(steps): steps for steps in sorted(set(plan.draft_steps))},
        **plan.drafts_by_name,
    }
    for contender, drafted, drafter in zip(contenders, drafts, validation.drafters, strict=True):
        measure_worth(contender.pair, written, *drafted, planned, alone, plan.new_tokens, reporter, drafter.worth)


def _draft_after_every_token(
    plan: ValidationPlan, contenders: Sequence[_Contender], written: Continuations, reporter: Reporter
) -> tuple[list[tuple[Agreement, Agreement | None]], list[ControlResult]]:
    """What each drafts after its own drafts, as many as the longest chain has, and along the texts, as deep as the
    deepest tree (None without trees); and the controls of the first."""
    drafters = [contender.pair.drafter for contender in contenders]
    asked: list[DraftRequest] = [(drafter, max(plan.draft_steps), False) for drafter in drafters]
    if trees := _list_trees(plan):
        asked += [(drafter, max(tree.depth for tree in trees), True) for drafter in drafters]
    base = contenders[0].pair.base
    agreements, controls = draft_together(base, asked, written, batch=plan.batch, reporter=reporter)
    along: Sequence[Agreement | None] = agreements[len(drafters) :] or [None] * len(drafters)
    return list(zip(agreements, along, strict=False)), controls


def _summarize_contender(
    contender: _Contender, first: Agreement, agreement: Agreement, workloads: Mapping[str, Sequence[int]]
) -> DrafterFigures:
    """How it drafts, beside the ``first`` one; what that is worth is measured later."""
    before = compute_acceptance(first)
    after = compute_acceptance(agreement)
    return DrafterFigures(
        name=contender.name,
        tuned=contender.tuned,
        agreement=summarize_agreement(agreement),
        workloads={workload: summarize_agreement(agreement.of(rows)) for workload, rows in workloads.items()},
        worth={},
        best="",
        change=compare_acceptance(before, after),
        changes={workload: compare_acceptance(before.of(rows), after.of(rows)) for workload, rows in workloads.items()},
    )


def _compare_with_other_programs(
    plan: ValidationPlan, directory: Path, source: Shard, validation: Validation, reporter: Reporter
) -> None:
    """Add to ``validation`` what transformers and Google's interpreter make of the drafter."""
    with memory_guard("comparing with other programs"):
        drafter = load_any(directory, dtype=torch.float32)
        if not isinstance(drafter, MtpDrafter):
            return
        if drafter.config.backbone_hidden_size <= _SINGLE_THREAD_WIDTH:
            torch.set_num_threads(1)
        reporter.say("loading the checkpoint with transformers")
        loaded = check_transformers(directory, drafter, source)
        reporter.say("running the drafter section in Google's interpreter")
        # The file's numbers: that the directory's are these, rounded as is said, was checked to the bit.
        checkpoint = replace(checkpoint_of(source).whole(), config=drafter.config)
        drafter = load_drafter(checkpoint, dtype=torch.float32)
        interpreted = check_interpreter(drafter, source, samples=plan.samples)
        validation.checks += (loaded, interpreted)
        validation.inputs = None if interpreted.passed is None else plan.samples
        validation.notes += [
            f"{c.name} was not checked: {c.evidence}" for c in (loaded, interpreted) if c.passed is None
        ]


# pair.json: base and drafter as the parts of one model


def describe_pair(pair: SpeculativeGenerator, validation: Validation, positions: int) -> dict[str, Any]:
    """What base and drafter of ``validation`` hold for one sequence of so many ``positions``, and what rounds took."""
    base = pair.base
    drafter = pair.drafter
    facts = validation.base
    worth = validation.drafters[0].worth
    assert isinstance(drafter, Network) and facts
    fed = 1 + max(drafted.drafts for drafted in worth.values() if not drafted.tree)
    role = architecture_of(drafter.config).pair_role
    return {
        "version": 2,
        "model": "gemma4_speculative_pair",
        "target": {
            "name": facts.name,
            "hidden_export": "target_hidden_stream",
            **_describe_model(base.model, base.width),
        },
        "draft": {
            "name": validation.drafter,
            "assistant_role": role,
            **_describe_model(drafter, drafter.config.hidden_size),
        },
        "bridge": _describe_bridge(base, drafter),
        "verify": {
            "rule": "greedy",
            "T": fed,
            "inputs": ["draft_candidate_tokens", "target_logits"],
            "outputs": ["accepted_tokens", "rejected_token"],
        },
        "buffers": _describe_buffers(base, drafter, fed, positions),
        "metrics": {
            name: {
                "backbone_only_tok_per_sec": facts.tokens_per_s,
                "speculative_tok_per_sec": drafted.tokens_per_s,
                "draft_tokens_per_batch": drafted.drafts,
                "accepted_tokens/drafted_tokens": drafted.accepted / drafted.drafted if drafted.drafted else None,
                "target_verify_ms": drafted.verify_ms,
                "assistant_draft_ms": drafted.draft_ms,
            }
            for name, drafted in worth.items()
        },
    }


def _describe_model(model: nn.Module, width: int) -> dict[str, Any]:
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}.values()
    dtype = str(max(tensors, key=lambda tensor: tensor.numel()).dtype).removeprefix("torch.")
    return {"hidden_size": width, "dtype": dtype, "bytes": sum(t.numel() * t.element_size() for t in tensors)}


def _describe_bridge(base: Base, drafter: Network) -> dict[str, Any]:
    """What the drafter reads of its base."""
    needs = drafter.needs
    return {
        "source": "target_hidden_stream",
        "dest": "draft.backbone_stream",
        "shape": ["T", (len(needs.layers) or 1) * base.width],
        "layers": list(needs.layers),
        "embedding": not getattr(drafter.config, "own_embedding", False),
        "shared_kv": {kind: {"heads": heads, "head_dim": dim} for kind, (heads, dim) in needs.shared_kv.items()},
    }


def _describe_buffers(base: Base, drafter: Network, fed: int, positions: int) -> dict[str, Any]:
    """Of a round that feeds the base ``fed`` tokens: the shape of each, and its bytes."""
    needs = drafter.needs
    layers = needs.layers
    config = drafter.config
    number = next(base.model.parameters()).element_size()
    # A drafter that reads the base's K and V has no cache of its own.
    own_cache = [2, positions, getattr(config, "num_kv_heads", 0), getattr(config, "head_dim", 0)]
    draft_cache = [0] if needs.shared_kv else own_cache
    shapes = {
        "target_main_stream": ([fed, base.width], number),
        "target_kv_cache": ([2, _count_cache_numbers(base, positions)], number),
        "target_logits": ([fed, base.vocab_size], 4),
        "draft_backbone_stream": ([fed if layers else 1, len(layers) or 1, base.width], number),
        "draft_main_stream": ([1, config.hidden_size], number),
        "draft_kv_cache": (draft_cache, number),
        "draft_logits": ([1, drafter.needs.vocab_size], 4),
        "candidate_tokens": ([fed - 1], 8),
        "accepted_tokens": ([fed], 8),
        "verifier_scratch": ([fed], 8),
    }
    return {name: {"shape": shape, "bytes": size * math.prod(shape)} for name, (shape, size) in shapes.items()}


def _count_cache_numbers(base: Base, positions: int) -> int:
    """Numbers of K for so many positions, over all layers of the base that have K of their own."""
    layers = [m for m in base.model.modules() if hasattr(m, "is_sliding") and getattr(m, "k_proj", None) is not None]
    return sum(layer.k_proj.out_features * min(positions, layer.sliding_window or positions) for layer in layers)
