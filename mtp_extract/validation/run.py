"""A whole validation: against the file, beside the base, and in other programs."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mtp_extract._version import __version__
from mtp_extract.bundle import Shard, open_bundle
from mtp_extract.checkpoint.checkpoint import require_mtp
from mtp_extract.data import sample_bundle
from mtp_extract.drafter.load import Network, drafter_of, load_any
from mtp_extract.drafter.mtp import MtpDrafter
from mtp_extract.errors import PairError, escape
from mtp_extract.evaluate.agreement import continue_greedily
from mtp_extract.evaluate.base_model import load_base, memory_guard
from mtp_extract.evaluate.batches import groups
from mtp_extract.evaluate.progress import counter
from mtp_extract.evaluate.prompts import Prompt, encode_prompts, prompts_or_shipped
from mtp_extract.formats import format_of
from mtp_extract.io.address import public_name
from mtp_extract.io.opening import checkpoint_here
from mtp_extract.io.typed import Tool
from mtp_extract.pipeline.extraction import checkpoint_of, extract
from mtp_extract.pipeline.identity import check_identity, drafter_for
from mtp_extract.report.files import REPORT_FILES
from mtp_extract.speculate.loop import SpeculativeGenerator
from mtp_extract.speculate.trees import Tree
from mtp_extract.validation.acceptance.controls import draft_together
from mtp_extract.validation.acceptance.drafters import DrafterFacts, facts_of, figures_of
from mtp_extract.validation.acceptance.trivial import compare_trivial
from mtp_extract.validation.acceptance.worth import draftings, measure_generation
from mtp_extract.validation.pair import pair_of
from mtp_extract.validation.parity.cases import Case, base_cases
from mtp_extract.validation.parity.interpreter import check_interpreter
from mtp_extract.validation.parity.transformers import check_transformers
from mtp_extract.validation.plan import ValidationPlan
from mtp_extract.validation.result import BaseFacts, Validation
from mtp_extract.validation.verdict import concluded, notes_of


def run_validation(plan: ValidationPlan) -> Validation:
    """Measure what ``plan`` asks for: at least one of ``base`` and ``source``.

    Raises:
        MtpExtractError: a part is missing, does not fit, or does not fit into memory.
    """
    plan.check()
    with ExitStack() as stack:
        if plan.directory is None:
            plan.say("extracting the sample")
            directory = stack.enter_context(_sample())
        else:
            directory = Path(checkpoint_here(plan.directory))
        found = Validation(
            tool=Tool("mtp-extract", __version__),
            drafter="the sample" if plan.directory is None else public_name(str(directory)),
            source=Path(plan.source).name if plan.source is not None else None,
            settings={"seed": plan.seed},
        )
        source, cases = None, list[Case]()
        if plan.source is not None:
            plan.say("deriving every tensor from the file again, and reading its graph")
            opened = stack.enter_context(open_bundle(plan.source))
            opened.prefetch()
            source = drafter_for(opened, require_mtp(format_of(directory).read_config(directory)))
            identity = check_identity(directory, source, REPORT_FILES)
            found.checks = list(identity.checks)
            if not identity.comparable or any(check.passed is False for check in found.checks):
                # What is refuted needs no second opinion, and may hold numbers that nothing can run.
                found.notes.append("It is refuted already, so nothing was measured.")
                return concluded(found)
        if plan.base is not None:
            beside = _load(plan, plan.base, directory, found)
            with memory_guard("running the base"):
                cases = _measure(plan, beside, source, found)
        if source is not None:
            with memory_guard("comparing with other programs"):
                _ask_other_programs(plan, directory, source, cases, found)
        return concluded(found)


@contextmanager
def _sample() -> Iterator[Path]:
    """The sample's checkpoint. Its matrices are too small to share: threads would mostly wait for each other."""
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "sample-mtp-drafter"
        extract(str(sample_bundle()), directory)
        torch.set_num_threads(1)
        try:
            yield directory
        finally:
            torch.set_num_threads(threads)


@dataclass(frozen=True)
class _Beside:
    """What is measured beside a base: drafters, each with it, and prompts."""

    facts: list[DrafterFacts]
    drafters: list[Network]
    pairs: list[SpeculativeGenerator]
    prompts: tuple[Prompt, ...]
    encoded: list[tuple[int, ...]]


def _load(plan: ValidationPlan, base: str, directory: Path, found: Validation) -> _Beside:
    """Everything, before anything is measured: what does not fit is said now, and not in an hour."""
    prompts, places, names = prompts_or_shipped(plan.prompts), [directory], [found.drafter]
    for place in (Path(checkpoint_here(place)) for place in plan.beside):
        name = public_name(str(place))
        names.append(name if name not in names else f"{name} ({len(names) + 1})")
        places.append(place)
    facts = [facts_of(*named) for named in zip(places, names, strict=True)]
    plan.say(f"loading the base {base}")
    loaded, drafters, pairs = load_base(base, plan.device), list[Network](), list[SpeculativeGenerator]()
    with memory_guard("loading the drafters"):
        for place in places:
            drafters.append(load_any(place, dtype=loaded.drafter_dtype, device=loaded.device))
            try:
                pairs.append(SpeculativeGenerator(loaded.model, drafters[-1], loaded.tokenizer))
            except PairError as error:
                raise PairError(f"{escape(place)}: {error}", remedies=error.remedies) from error
    encoded = encode_prompts(prompts, pairs[0].codec, chat_template=plan.chat_template)
    _check_fit(plan, prompts, encoded, pairs[0])
    found.base = BaseFacts(
        "the sample's base" if plan.directory is None else public_name(base),
        loaded.dtype,
        list(loaded.devices),
        str(loaded.drafter_dtype).removeprefix("torch."),
        plan.chat_template and pairs[0].codec.has_template,
    )
    found.notes += loaded.notes
    return _Beside(facts, drafters, pairs, prompts, encoded)


def _check_fit(
    plan: ValidationPlan, prompts: Sequence[Prompt], encoded: Sequence[Sequence[int]], generator: SpeculativeGenerator
) -> None:
    """Refuse what does not fit the base: a prompt and its continuation, or a tree.

    Raises:
        PairError: a text is longer than the base's context, or a tree wider than its vocabulary.
    """
    context, vocabulary = getattr(generator.base.config, "max_position_embeddings", None), generator.base.vocab_size
    length, longest = max((len(tokens), index) for index, tokens in enumerate(encoded))
    if context is not None and length + plan.new_tokens > context:
        raise PairError(
            f"prompt {longest + 1} ({prompts[longest].workload}): expected at most the base's {context} tokens, "
            f"found {length} and {plan.new_tokens} new ones; give shorter prompts",
            remedies=("prompts", "new_tokens"),
        )
    for name, tree in plan.wanted.items():
        if isinstance(tree, Tree) and tree.width > vocabulary:
            raise PairError(
                f"expected at most {vocabulary} drafts for one place, as many as the base has tokens, found "
                f"{tree.width} in {escape(name)}; make the tree narrower",
                remedies=("trees",),
            )


def _measure(plan: ValidationPlan, beside: _Beside, source: Shard | None, found: Validation) -> list[Case]:
    """Add to ``found`` everything that needs the base; return cases for parity with ``source``, from its states."""
    base, steps = beside.pairs[0].base, sorted(set(plan.draft_steps))
    batches = len(list(groups([0] * len(beside.prompts), plan.batch)))
    sizes = {"batch": plan.batch, "new_tokens": plan.new_tokens}
    plan.say(f"continuing {len(beside.prompts)} prompts with the base alone")
    done = counter(plan.show, "the base's text", batches)
    written = continue_greedily(base, beside.prompts, beside.encoded, **sizes, done=done)
    plan.say("drafting after every token of them, and with one thing broken at a time")
    done = counter(plan.show, "drafts after every token", batches)
    most = plan.control_positions
    drafted = draft_together(base, beside.drafters, written, steps[-1], batch=plan.batch, most=most, done=done)
    first = drafted.agreements[0]
    plan.say("generating a few texts with drafts")
    done = counter(plan.show, "a few texts with drafts", len(beside.pairs) * (len(steps) + len(plan.wanted)))
    for facts, pair, agreement in zip(beside.facts, beside.pairs, drafted.agreements, strict=True):
        planned = draftings(pair, steps, plan.wanted, written, agreement, batch=plan.batch)
        worth = measure_generation(pair, written, planned, new_tokens=plan.new_tokens, timed=plan.timed, done=done)
        found.drafters.append(figures_of(facts, written, agreement, first, worth))
    found.trivial, found.controls = list(compare_trivial(written, first)), list(drafted.controls)
    found.settings = {
        "prompts": dict(Counter(prompt.workload for prompt in beside.prompts)),
        **sizes,
        "draft_steps": steps,
        "trees": list(plan.wanted),
        **({"control_positions": drafted.positions} if drafted.controls else {}),
        **found.settings,
    }
    found.notes += notes_of(found.drafters, written, drafted)
    longest = max(len(text.tokens) for text in written.texts)
    found.pair = pair_of(base, found, beside.drafters[0], longest)
    return [] if source is None else base_cases(base, source, written.texts, plan.samples)


def _ask_other_programs(
    plan: ValidationPlan, directory: Path, source: Shard, cases: Sequence[Case], found: Validation
) -> None:
    """Add to ``found`` what transformers and Google's interpreter make of the drafter."""
    drafter = load_any(directory, dtype=torch.float32)
    if not isinstance(drafter, MtpDrafter):
        return
    plan.say("loading the checkpoint with transformers")
    loaded = check_transformers(directory, drafter, source, plan.seed)
    plan.say("running the drafter section in Google's interpreter")
    # The file's numbers: that the directory's are these, rounded as is said, was checked to the bit.
    own = replace(checkpoint_of(source).whole(), config=drafter.config)
    drafter = drafter_of(own, dtype=torch.float32)
    found.parity, interpreted = check_interpreter(drafter, source, cases, samples=plan.samples, seed=plan.seed)
    found.checks += (loaded, interpreted)
    found.notes += [f"{c.name} was not checked: {c.evidence}" for c in (loaded, interpreted) if c.passed is None]
