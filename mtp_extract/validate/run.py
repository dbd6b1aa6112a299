"""A whole validation: against the file, beside the base, and in other programs."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
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
from mtp_extract.evaluate.base_model import LoadedBase, load_base, memory_guard
from mtp_extract.evaluate.batches import groups
from mtp_extract.evaluate.progress import Say, Show, counter, silent
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
from mtp_extract.validate.acceptance.controls import draft_together
from mtp_extract.validate.acceptance.drafters import facts_of, measure_drafter
from mtp_extract.validate.acceptance.trivial import compare_trivial
from mtp_extract.validate.notes import notes_of
from mtp_extract.validate.pair import pair_of
from mtp_extract.validate.parity.cases import Case, base_cases
from mtp_extract.validate.parity.interpreter import check_interpreter
from mtp_extract.validate.parity.transformers import check_transformers
from mtp_extract.validate.plan import ValidationPlan
from mtp_extract.validate.result import BaseFacts, Validation
from mtp_extract.validate.verdict import concluded


def run_validation(plan: ValidationPlan, say: Say = silent, show: Show = silent) -> Validation:
    """Measure what ``plan`` asks for.

    Args:
        plan: at least one of ``base`` and ``source``.
        say: told what is begun.
        show: told how far it is, after each batch of texts.

    Raises:
        MtpExtractError: a part is missing, does not fit, or does not fit into memory.
    """
    plan.check()
    with ExitStack() as stack:
        if plan.directory is None:
            say("extracting the sample")
            directory = stack.enter_context(_sample())
        else:
            directory = Path(checkpoint_here(plan.directory))
        result = Validation(
            tool=Tool("mtp-extract", __version__),
            drafter="the sample" if plan.directory is None else public_name(str(directory)),
            source=Path(plan.source).name if plan.source is not None else None,
            settings={"seed": plan.seed},
        )
        source = None
        if plan.source is not None:
            say("deriving every tensor from the file again, and reading its graph")
            opened = stack.enter_context(open_bundle(plan.source))
            opened.prefetch()
            source = drafter_for(opened, require_mtp(format_of(directory).read_config(directory)))
            identity = check_identity(directory, source, REPORT_FILES)
            result.checks = list(identity.checks)
            if not identity.comparable or any(check.passed is False for check in result.checks):
                # What is refuted needs no second opinion, and may hold numbers that nothing can run.
                result.notes.append("It is refuted already, so nothing was measured.")
                return concluded(result)
        cases = [] if plan.base is None else _beside_base(plan, plan.base, directory, source, result, say, show)
        if source is not None:
            _in_other_programs(plan, directory, source, cases, result, say)
        return concluded(result)


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


def _beside_base(
    plan: ValidationPlan, base: str, directory: Path, source: Shard | None, result: Validation, say: Say, show: Show
) -> list[Case]:
    """Add to ``result`` everything that needs the base; return cases for parity with ``source``, from its states."""
    prompts, steps = prompts_or_shipped(plan.prompts), sorted(set(plan.draft_steps))
    places = [directory, *(Path(checkpoint_here(place)) for place in plan.beside)]
    facts = [facts_of(*named) for named in zip(places, _names(result.drafter, places[1:]), strict=True)]
    say(f"loading the base {base}")
    loaded = load_base(base, plan.device)
    # All of them before anything is measured: one that does not fit is said now, and not in an hour.
    with memory_guard("loading the drafters"):
        pairs = [_pair(loaded, place) for place in places]
    network, generator = pairs[0]
    encoded = encode_prompts(prompts, generator.codec, chat_template=plan.chat_template)
    _check_fit(plan, prompts, encoded, generator)
    sizes = {"batch": plan.batch, "new_tokens": plan.new_tokens}
    batches = len(list(groups([0] * len(prompts), plan.batch)))
    with memory_guard("running the base"):
        say(f"continuing {len(prompts)} prompts with the base alone")
        done = counter(show, "the base's text", batches)
        written = continue_greedily(generator.base, prompts, encoded, **sizes, done=done)
        say("drafting after every token of them, and with one thing broken at a time")
        drafted = draft_together(
            generator.base,
            [network for network, _ in pairs],
            written,
            steps[-1],
            batch=plan.batch,
            most=plan.control_positions,
            done=counter(show, "drafts after every token", batches),
        )
        say("generating a few texts with drafts")
        generated = counter(show, "a few texts with drafts", len(pairs) * (len(steps) + len(plan.wanted)))
        result.drafters = [
            measure_drafter(
                known,
                drafter,
                own,
                written,
                agreement,
                drafted.agreements[0],
                chains=steps,
                trees=plan.wanted,
                **sizes,
                timed=plan.timed,
                done=generated,
            )
            for known, (drafter, own), agreement in zip(facts, pairs, drafted.agreements, strict=True)
        ]
    result.trivial = list(compare_trivial(written, drafted.agreements[0]))
    result.controls = list(drafted.controls)
    result.base = BaseFacts(
        "the sample's base" if plan.directory is None else public_name(base),
        loaded.dtype,
        list(loaded.devices),
        str(loaded.drafter_dtype).removeprefix("torch."),
        plan.chat_template and generator.codec.has_template,
    )
    result.settings = {
        "prompts": dict(Counter(prompt.workload for prompt in prompts)),
        **sizes,
        "draft_steps": steps,
        "trees": list(plan.wanted),
        **({"control_positions": drafted.positions} if drafted.controls else {}),
        **result.settings,
    }
    result.notes += (*loaded.notes, *notes_of(result.drafters, written, drafted))
    longest = max(len(text.tokens) for text in written.texts)
    result.pair = pair_of(generator.base, result.base.name, network, result.drafters[0], longest)
    return [] if source is None else base_cases(generator.base, source, written.texts, plan.samples)


def _names(first: str, beside: Sequence[Path]) -> list[str]:
    """What to call drafters; where two have one name, by their places too."""
    names = [first, *(public_name(str(place)) for place in beside)]
    return [name if name not in names[:index] else f"{name} ({index + 1})" for index, name in enumerate(names)]


def _pair(loaded: LoadedBase, directory: Path) -> tuple[Network, SpeculativeGenerator]:
    """The drafter in ``directory`` with its base.

    Raises:
        MtpExtractError: it cannot be loaded or does not fit; the message names ``directory``.
    """
    drafter = load_any(directory, dtype=loaded.drafter_dtype, device=loaded.device)
    try:
        return drafter, SpeculativeGenerator(loaded.model, drafter, loaded.tokenizer)
    except PairError as error:
        raise PairError(f"{escape(directory)}: {error}", remedies=error.remedies) from error


def _check_fit(
    plan: ValidationPlan, prompts: Sequence[Prompt], encoded: Sequence[Sequence[int]], generator: SpeculativeGenerator
) -> None:
    """Refuse what does not fit the base: a prompt and its continuation, or a tree.

    Raises:
        PairError: a text is longer than the base's context, or a tree wider than its vocabulary.
    """
    context, vocabulary = getattr(generator.base.config, "max_position_embeddings", None), generator.base.vocab_size
    longest = max(range(len(encoded)), key=lambda index: len(encoded[index]))
    length = len(encoded[longest])
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


def _in_other_programs(
    plan: ValidationPlan, directory: Path, source: Shard, cases: Sequence[Case], result: Validation, say: Say
) -> None:
    """Add to ``result`` what transformers and Google's interpreter make of the drafter."""
    with memory_guard("comparing with other programs"):
        drafter = load_any(directory, dtype=torch.float32)
        if not isinstance(drafter, MtpDrafter):
            return
        say("loading the checkpoint with transformers")
        loaded = check_transformers(directory, drafter, source, plan.seed)
        say("running the drafter section in Google's interpreter")
        # The file's numbers: that the directory's are these, rounded as is said, was checked to the bit.
        own = replace(checkpoint_of(source).whole(), config=drafter.config)
        drafter = drafter_of(own, dtype=torch.float32)
        result.parity, interpreted = check_interpreter(drafter, source, cases, samples=plan.samples, seed=plan.seed)
    result.checks += (loaded, interpreted)
    result.notes += [
        f"{check.name} was not checked: {check.evidence}" for check in (loaded, interpreted) if check.passed is None
    ]
