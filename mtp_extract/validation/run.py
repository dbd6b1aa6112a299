"""A whole validation: against the file, beside the base, and in other programs."""

from __future__ import annotations

import platform
import tempfile
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from mtp_extract._version import __version__
from mtp_extract.bundle import Shard, open_bundle
from mtp_extract.data import sample_bundle
from mtp_extract.drafter.load import load_any, load_drafter
from mtp_extract.drafter.mtp import MtpDrafter
from mtp_extract.errors import PairError, escape
from mtp_extract.evaluation.agreement import acceptance_of, compare_acceptance, figures, known, write_texts
from mtp_extract.evaluation.base_model import LoadedBase, load_base, memory_guard
from mtp_extract.evaluation.prompts import hash_of_prompts, read_prompts
from mtp_extract.formats import read_checkpoint
from mtp_extract.io.address import public_name
from mtp_extract.io.opening import checkpoint_here
from mtp_extract.io.typed import Tool
from mtp_extract.pipeline.check import read_record
from mtp_extract.pipeline.extraction import checkpoint_of, extract
from mtp_extract.pipeline.identity import check_identity, drafter_for
from mtp_extract.speculate.loop import Drafts, SpeculativeGenerator
from mtp_extract.speculate.trees import DraftTree
from mtp_extract.validation.controls import draft_together
from mtp_extract.validation.interpreter import check_interpreter
from mtp_extract.validation.pair import pair_of
from mtp_extract.validation.plan import ValidationPlan
from mtp_extract.validation.result import BaseFacts, DrafterFigures, RunFacts, Validation
from mtp_extract.validation.transformers import check_transformers
from mtp_extract.validation.verdict import concluded, notes_of
from mtp_extract.validation.worth import best_of, by_base_alone, measure_worth

_SMALL = 256
_COMPUTING = ("torch", "transformers", "ai-edge-litert", "numpy")  # whose versions may change a figure


def run_validation(plan: ValidationPlan) -> Validation:
    """Measure what ``plan`` asks for: at least one of ``base`` and ``source``.

    Raises:
        MtpExtractError: a part is missing, does not fit, or does not fit into memory.
    """
    plan = plan.resolved()
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        name, source = "the sample", None
        if plan.directory is None:
            plan.say("extracting the sample")
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "sample-mtp-drafter"
            extract(str(sample_bundle()), directory)
        else:
            directory = Path(checkpoint_here(plan.directory))
            name = public_name(str(directory))
        # What is cheap to see is seen before a bundle is fetched or a base is loaded.
        checkpoint = read_checkpoint(directory)
        validation = Validation(
            tool=Tool("mtp-extract", __version__),
            run=_facts_of_run(plan),
            drafter=name,
            source=plan.source and Path(plan.source).name,
        )
        validation.notes += checkpoint.notes
        if plan.source is not None:
            plan.say("deriving every tensor from the file again, and reading its graph")
            opened = stack.enter_context(open_bundle(plan.source))
            opened.prefetch()
            source = drafter_for(opened, checkpoint.mtp)
            validation.checks = check_identity(directory, source)
            if any(check.passed is False for check in validation.checks):
                # What is refuted needs no second opinion, and may hold numbers that nothing can run.
                validation.notes.append("It is refuted already, so nothing was measured.")
                return concluded(validation)
        try:
            if plan.base is not None:
                _measure(plan, plan.base, directory, validation)
            if source is not None:
                with memory_guard("comparing with other programs"):
                    _ask_other_programs(plan, directory, source, validation)
        except BaseException:
            if validation.checks or validation.drafters:
                plan.rescue(_concluded_early(validation))
            raise
        return concluded(validation)


def _facts_of_run(plan: ValidationPlan) -> RunFacts:
    """Of a run that begins. A file of prompts that cannot be read has no hash; reading it says why."""
    prompts_sha256 = None
    if plan.base is not None:
        with suppress(OSError, ValueError):
            prompts_sha256 = hash_of_prompts(plan.prompts)
    versions = {"python": platform.python_version()}
    for package in _COMPUTING:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return RunFacts(datetime.now(timezone.utc).isoformat(timespec="seconds"), plan.command, prompts_sha256, versions)


def _concluded_early(validation: Validation) -> Validation:
    """What was found so far, with a verdict on that."""
    validation.notes.append("It ended early: what is missing was not measured.")
    for drafter in validation.drafters:
        drafter.best = best_of(drafter.worth) if drafter.worth else ""
    return concluded(validation)


def _measure(plan: ValidationPlan, base: str, directory: Path, validation: Validation) -> None:
    """Add to ``validation`` everything that needs the base. What does not fit is said before anything is measured.

    Raises:
        PairError: a drafter does not fit the base, or a prompt its context.
        MtpExtractError: a tree looks at more choices than the base has tokens.
    """
    prompts = read_prompts(plan.prompts, chat_template=plan.chat_template)
    places = {validation.drafter: directory}
    if plan.beside is not None:
        beside = Path(checkpoint_here(plan.beside))
        read_checkpoint(beside)
        name = public_name(str(beside))
        places[name if name not in places else f"{name} (2)"] = beside
    plan.say(f"loading the base {base}")
    loaded = load_base(base, plan.device)
    with memory_guard("loading the drafters"):
        pairs = {name: _pair(loaded, place) for name, place in places.items()}
    pair = pairs[validation.drafter]
    steps = sorted(set(plan.draft_steps))
    new_tokens = plan.new_tokens
    _use_threads(pair.base.width)
    trees = [what for what in plan.wanted.values() if isinstance(what, DraftTree)]
    for tree in trees:
        tree.require_tokens(pair.base.vocab_size)
    workloads = dict(Counter(prompt.workload for prompt in prompts))
    sizes = {"batch": plan.batch, "new_tokens": new_tokens}
    validation.settings = {"prompts": workloads, **sizes, "draft_steps": steps, "trees": list(plan.wanted)}
    shown: dict[str, Any] = {"batch": plan.batch, "show": plan.show}
    said: dict[str, Any] = {"chat_template": plan.chat_template, "say": plan.say}
    with memory_guard("running the base"):
        written = write_texts(pair.base, pair.codec, prompts, new_tokens=new_tokens, **said, **shown)
        plan.say("drafting after every token of them, and with one thing broken at a time")
        asked = [(network.drafter, steps[-1], False) for network in pairs.values()]
        if trees:
            deepest = max(tree.depth for tree in trees)
            asked += [(network.drafter, deepest, True) for network in pairs.values()]
        table, validation.controls = draft_together(pair.base, asked, written, **shown)
        plan.say("generating a few texts with drafts")
        alone = by_base_alone(pair, written, new_tokens=new_tokens, timed=plan.timed)
        plans: dict[str, Drafts] = {**{str(drafts): drafts for drafts in steps}, **plan.wanted}
        validation.base = BaseFacts(
            "the sample's base" if plan.directory is None else public_name(base),
            loaded.dtype,
            list(loaded.devices),
            plan.chat_template and pair.codec.has_template,
            len(alone.texts),
            known(alone.tokens_per_s),
            known(alone.forward_ms),
        )
        before, parts = acceptance_of(table[0]), written.workloads
        for name, agreement in zip(pairs, table, strict=False):
            after = acceptance_of(agreement)
            validation.drafters.append(
                DrafterFigures(
                    name,
                    _tuning_of(places[name]),
                    figures(agreement),
                    {workload: figures(agreement.of(rows)) for workload, rows in parts.items()},
                    {},
                    "",
                    compare_acceptance(before, after),
                    {workload: compare_acceptance(before.of(rows), after.of(rows)) for workload, rows in parts.items()},
                )
            )
        # The drafts along the texts, of which trees are read off, stand behind the others.
        for network, drafter, agreement, along in zip(
            pairs.values(), validation.drafters, table, table[-len(pairs) :], strict=False
        ):
            worth: dict[str, Any] = {"new_tokens": new_tokens, "show": plan.show, "worth": drafter.worth}
            drafter.best = best_of(measure_worth(network, written, agreement, along, plans, alone, **worth))
    validation.pair = pair_of(pair, validation, max(len(text.tokens) for text in written.texts))
    validation.notes += loaded.notes
    if unused := len(written.texts) - len(written.usable):
        validation.notes.append(
            f"{unused} of {len(written.texts)} texts repeat another, or end at once, and are not counted."
        )
    validation.notes += notes_of(validation)


def _pair(loaded: LoadedBase, place: Path) -> SpeculativeGenerator:
    """The base with the drafter in ``place``.

    Raises:
        PairError: they do not belong together.
    """
    drafter = load_any(place, dtype=loaded.drafter_dtype, device=loaded.device)
    try:
        return SpeculativeGenerator(loaded.model, drafter, loaded.tokenizer)
    except PairError as error:
        raise PairError(f"{escape(place)}: {error}", remedies=error.remedies) from error


def _use_threads(width: int) -> None:
    """One where matrices of a base of this ``width`` are too small to share: more would mostly wait for each other."""
    if width <= _SMALL:
        torch.set_num_threads(1)


def _tuning_of(directory: Path) -> str | None:
    """How the checkpoint in ``directory`` was tuned, by its record; None where nothing says so."""
    record = read_record(directory)
    return str(record["tuning"]["mode"]) if record.get("tuning") else None


def _ask_other_programs(plan: ValidationPlan, directory: Path, source: Shard, validation: Validation) -> None:
    """Add to ``validation`` what transformers and Google's interpreter make of the drafter."""
    drafter = load_any(directory, dtype=torch.float32)
    if not isinstance(drafter, MtpDrafter):
        return
    _use_threads(drafter.config.backbone_hidden_size)
    plan.say("loading the checkpoint with transformers")
    loaded = check_transformers(directory, drafter, source)
    plan.say("running the drafter section in Google's interpreter")
    # The file's numbers: that the directory's are these, rounded as is said, was checked to the bit.
    checkpoint = replace(checkpoint_of(source).whole(), config=drafter.config)
    drafter = load_drafter(checkpoint, dtype=torch.float32)
    interpreted = check_interpreter(drafter, source, samples=plan.samples)
    validation.checks += (loaded, interpreted)
    validation.inputs = None if interpreted.passed is None else plan.samples
    validation.notes += [f"{c.name} was not checked: {c.evidence}" for c in (loaded, interpreted) if c.passed is None]
