"""Run a validation: against the bundle, with the base, and in other programs."""

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
from mtp_extract.architecture import find_architecture
from mtp_extract.bundle import BundledDrafter, open_bundle
from mtp_extract.data import sample_bundle
from mtp_extract.drafter.load import Network, load_any_drafter, load_drafter
from mtp_extract.drafter.mtp import MtpDrafter
from mtp_extract.errors import PairError, escape
from mtp_extract.evaluation.agreement import (
    DraftRequest,
    compare_acceptance,
    compute_acceptance,
    nan_to_none,
    summarize_agreement,
)
from mtp_extract.evaluation.base_model import LoadedBase, guard_memory, load_base
from mtp_extract.evaluation.base_texts import Continuations, write_texts
from mtp_extract.evaluation.prompts import hash_prompts, read_prompts
from mtp_extract.formats import read_checkpoint
from mtp_extract.io.address import choose_public_name
from mtp_extract.io.typed import Tool
from mtp_extract.pipeline.check import read_record
from mtp_extract.pipeline.extraction import build_checkpoint, extract_drafter
from mtp_extract.pipeline.identity import check_identity, read_drafter_for
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

_SINGLE_THREAD_WIDTH = 256  # matrices of a base up to this width are too small for several threads
_SAMPLE = "the sample"  # the name of the sample's drafter in a report
_COMPUTING = ("torch", "transformers", "ai-edge-litert", "numpy")  # packages whose versions may change a figure


def run_validation(plan: ValidationPlan, reporter: Reporter = SILENT) -> Validation:
    """Measure what ``plan`` asks for.

    If an error or a signal ends the run, the reporter gets the Validation as far as it came.

    Raises:
        MtpExtractError: a part is missing, does not fit, or does not fit into memory.
    """
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        directory = plan.directory
        name = _SAMPLE if directory is None else choose_public_name(str(directory))
        if directory is None:
            reporter.say("extracting the sample")
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "sample-mtp-drafter"
            extract_drafter(sample_bundle(), directory, WritingPlan())
            plan = plan.adapt_to_sample(directory)
        # Cheap errors come first, before a bundle is fetched or a base is loaded.
        checkpoint = read_checkpoint(directory)
        validation = _start_validation(plan, name, checkpoint.notes)

        source = None
        if plan.source is not None:
            reporter.say("deriving every tensor from the file again, and reading its graph")
            opened = stack.enter_context(open_bundle(plan.source))
            opened.prefetch()
            source = read_drafter_for(opened, checkpoint.mtp)
            validation.checks = check_identity(directory, source)
            if any(check.passed is False for check in validation.checks):
                # A refuted checkpoint may hold numbers that no program can run.
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
                reporter.report_result(conclude(validation))
            raise
        return conclude(validation)


def _start_validation(plan: ValidationPlan, drafter: str, notes: Sequence[str]) -> Validation:
    """Start a record without results. Unreadable prompts get no hash here; reading them later raises the error."""
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
    """A drafter with its base, under its name in the report."""

    name: str
    tuned: str | None  # mode of tuning, by its record; None if none is recorded
    pair: SpeculativeGenerator


def _measure(plan: ValidationPlan, base: str, directory: Path, validation: Validation, reporter: Reporter) -> None:
    """Add to ``validation`` all that needs the base. Errors of options come before any measurement."""
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
    with guard_memory("running the base"):
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
    """Load the base, the drafter ``name`` in ``directory``, and the drafter that the plan compares with it, if any."""
    directories = {name: directory}
    if plan.beside is not None:
        read_checkpoint(plan.beside)
        beside = choose_public_name(str(plan.beside))
        directories[beside if beside != name else f"{beside} (2)"] = plan.beside
    reporter.say(f"loading the base {base}")
    loaded = load_base(base, plan.device)
    contenders = []
    with guard_memory("loading the drafters"):
        for drafter_name, folder in directories.items():
            drafter = load_any_drafter(folder, dtype=loaded.drafter_dtype, device=loaded.device)
            tuning = read_record(folder).get("tuning")
            try:
                pair = SpeculativeGenerator(loaded.model, drafter, loaded.tokenizer)
            except PairError as error:
                raise PairError(f"{escape(folder)}: {error}", remedies=error.remedies) from error
            contenders.append(_Contender(drafter_name, str(tuning["mode"]) if tuning else None, pair))
    return loaded, contenders


def _measure_drafts(
    plan: ValidationPlan,
    loaded: LoadedBase,
    contenders: Sequence[_Contender],
    written: Continuations,
    validation: Validation,
    reporter: Reporter,
) -> None:
    """Add to ``validation`` acceptance of ``contenders`` along the texts, controls of the first, and times."""
    reporter.say("drafting after every token of them, and with one thing broken at a time")
    drafts, controls = _draft_after_every_token(plan, contenders, written, reporter)
    reporter.say("generating a few texts with drafts")
    pair = contenders[0].pair
    alone = generate_with_base_alone(pair, written, new_tokens=plan.new_tokens, timed=plan.timed)
    validation.base = BaseFacts(
        name="the sample's base" if contenders[0].name == _SAMPLE else choose_public_name(loaded.name),
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

    # Chains with the longest last, then trees and the adaptive chain, which needs the longest chain's times.
    planned: dict[str, Drafts] = {str(steps): steps for steps in sorted(set(plan.draft_steps))}
    planned |= plan.drafts_by_name
    for contender, agreements, drafter in zip(contenders, drafts, validation.drafters, strict=True):
        measure_worth(contender.pair, written, *agreements, planned, alone, plan.new_tokens, reporter, drafter.worth)


def _draft_after_every_token(
    plan: ValidationPlan, contenders: Sequence[_Contender], written: Continuations, reporter: Reporter
) -> tuple[list[tuple[Agreement, Agreement | None]], list[ControlResult]]:
    """Draft after every token with each contender, and with the controls of the first.

    Each contender gets two agreements: after its own drafts, with the steps of the longest chain; and along the texts,
    with the steps of the deepest tree, or None without trees.
    """
    drafters = [contender.pair.drafter for contender in contenders]
    requests: list[DraftRequest] = [(drafter, max(plan.draft_steps), False) for drafter in drafters]
    if trees := _list_trees(plan):
        requests += [(drafter, max(tree.depth for tree in trees), True) for drafter in drafters]
    base = contenders[0].pair.base
    agreements, controls = draft_together(base, requests, written, batch=plan.batch, reporter=reporter)
    along: Sequence[Agreement | None] = agreements[len(drafters) :] or [None] * len(drafters)
    return list(zip(agreements, along, strict=False)), controls


def _summarize_contender(
    contender: _Contender, first: Agreement, agreement: Agreement, workloads: Mapping[str, Sequence[int]]
) -> DrafterFigures:
    """Summarize acceptance, and its change from the ``first`` drafter; worth is measured later."""
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
    plan: ValidationPlan, directory: Path, source: BundledDrafter, validation: Validation, reporter: Reporter
) -> None:
    with guard_memory("comparing with other programs"):
        drafter = load_any_drafter(directory, dtype=torch.float32)
        if not isinstance(drafter, MtpDrafter):
            return
        if drafter.config.backbone_hidden_size <= _SINGLE_THREAD_WIDTH:
            torch.set_num_threads(1)
        reporter.say("loading the checkpoint with transformers")
        loaded = check_transformers(directory, drafter, source)
        reporter.say("running the drafter section in Google's interpreter")
        # The interpreter is compared with the file's own weights; identity has compared the directory's with them.
        checkpoint = replace(build_checkpoint(source).complete(), config=drafter.config)
        drafter = load_drafter(checkpoint, dtype=torch.float32)
        interpreted = check_interpreter(drafter, source, samples=plan.samples)
        validation.checks += (loaded, interpreted)
        validation.inputs = None if interpreted.passed is None else plan.samples
        for check in (loaded, interpreted):
            if check.passed is None:
                validation.notes.append(f"{check.name} was not checked: {check.evidence}")


# pair.json describes base and drafter as the parts of one model.


def describe_pair(pair: SpeculativeGenerator, validation: Validation, positions: int) -> dict[str, Any]:
    """Describe base, drafter and buffers for one sequence of ``positions``, and the times of rounds."""
    base = pair.base
    drafter = pair.drafter
    facts = validation.base
    worth = validation.drafters[0].worth
    assert isinstance(drafter, Network) and facts
    fed = 1 + max(drafted.drafts for drafted in worth.values() if not drafted.tree)
    role = find_architecture(drafter.config).pair_role
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
    needs = drafter.needs
    layers = needs.layers
    config = drafter.config
    float_bytes = next(base.model.parameters()).element_size()
    # A drafter that reads the base's K and V has no cache of its own.
    own_cache = [2, positions, getattr(config, "num_kv_heads", 0), getattr(config, "head_dim", 0)]
    draft_cache = [0] if needs.shared_kv else own_cache
    shapes = {
        "target_main_stream": ([fed, base.width], float_bytes),
        "target_kv_cache": ([2, _count_cache_numbers(base, positions)], float_bytes),
        "target_logits": ([fed, base.vocab_size], 4),
        "draft_backbone_stream": ([fed if layers else 1, len(layers) or 1, base.width], float_bytes),
        "draft_main_stream": ([1, config.hidden_size], float_bytes),
        "draft_kv_cache": (draft_cache, float_bytes),
        "draft_logits": ([1, drafter.needs.vocab_size], 4),
        "candidate_tokens": ([fed - 1], 8),
        "accepted_tokens": ([fed], 8),
        "verifier_scratch": ([fed], 8),
    }
    return {name: {"shape": shape, "bytes": size * math.prod(shape)} for name, (shape, size) in shapes.items()}


def _count_cache_numbers(base: Base, positions: int) -> int:
    """Count the numbers of K for ``positions``, over all layers of the base that compute their own K."""
    layers = [m for m in base.model.modules() if hasattr(m, "is_sliding") and getattr(m, "k_proj", None) is not None]
    return sum(layer.k_proj.out_features * min(positions, layer.sliding_window or positions) for layer in layers)
