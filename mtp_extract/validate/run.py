"""A whole validation, from names to a result."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from mtp_extract._version import __version__
from mtp_extract.errors import MtpExtractError, PairError, escape
from mtp_extract.evaluate.extras import require
from mtp_extract.evaluate.progress import Say, Show, counter, silent
from mtp_extract.io.address import public_name
from mtp_extract.io.opening import checkpoint_here
from mtp_extract.io.place import PathLike, files_of
from mtp_extract.io.typed import Tool
from mtp_extract.options import BASE, About, ChatTemplate, Device, Replace, Workloads, check_values, whole_numbers
from mtp_extract.speculate.trees import Tree
from mtp_extract.validate.acceptance.drafting import MOST_STEPS, Wanted, parse_wanted

if TYPE_CHECKING:
    from mtp_extract.bundle import Shard
    from mtp_extract.drafter.load import Network
    from mtp_extract.evaluate.base_model import LoadedBase
    from mtp_extract.evaluate.prompts import Prompt
    from mtp_extract.speculate.loop import SpeculativeGenerator
    from mtp_extract.validate.acceptance.drafters import DrafterFigures
    from mtp_extract.validate.parity.cases import Case
    from mtp_extract.validate.result import Validation

_MOST_SAMPLES = 4096


@dataclass(frozen=True)
class ValidationPlan:
    """What to measure."""

    directory: Annotated[
        Path | None,
        About("A checkpoint that mtp-extract wrote, or an official assistant; or its id on the Hub.", metavar="DIR"),
    ]
    """None for the sample, which is then extracted first."""
    base: Annotated[str | None, BASE] = None
    beside: Annotated[
        Sequence[Path], About("Another drafter of that base, on the same texts; may be repeated.", metavar="DIR")
    ] = ()
    source: Annotated[
        str | None,
        About("The .litertlm it was extracted from: proof that this is its drafter.", metavar="FILE"),
    ] = None
    """Or a ``.tflite``, or an address."""
    prompts: Workloads = None
    draft_steps: Annotated[
        Sequence[int], About("Drafts a round.", metavar="K,…", least=1, most=MOST_STEPS, parse=whole_numbers)
    ] = (1, 2, 4, 8)
    """Values of K to generate with; the largest is the number of steps of the agreement."""
    trees: Annotated[
        Sequence[str],
        About(
            "Drafts that branch, too: 4x2x1 is four drafts, two after each, one after each of those; or adaptive, a "
            "chain whose length follows acceptance. May be repeated.",
            names=("--tree",),
            metavar="TREE",
        ),
    ] = ()
    device: Device = "auto"
    new_tokens: Annotated[int, About("Most tokens the base adds to a prompt.", least=2)] = 64
    batch: Annotated[int, About("Prompts at a time.", least=1)] = 16
    control_positions: Annotated[
        int | None,
        About(
            "At how many positions drafters that are broken on purpose draft; by default as many as take minutes.",
            metavar="N",
            least=1,
        ),
    ] = None
    """They are spread over all texts."""
    samples: Annotated[int, About("Random inputs for parity.", least=1)] = 16
    timed: int = 5  # prompts to time
    seed: Annotated[int, About("Of the random inputs.")] = 0
    chat_template: ChatTemplate = True

    @property
    def inputs(self) -> tuple[PathLike | None, ...]:
        """What is read, and so is not replaced."""
        return self.directory, *self.beside, self.source, self.prompts, *files_of(self.base)

    @property
    def wanted(self) -> Mapping[str, Wanted]:
        """The trees by name.

        Raises:
            MtpExtractError: one is none, or too large.
        """
        return dict(map(parse_wanted, self.trees))


@dataclass(frozen=True)
class Validating(ValidationPlan):
    """A validation, and what becomes of it: a place to write to, and who is told how far it is."""

    report: Annotated[Path | None, About("Write report.html, report.json and pair.json there.", metavar="DIR")] = None
    overwrite: Replace = False
    say: Say = silent
    show: Show = silent


def sample_plan(plan: ValidationPlan) -> ValidationPlan:
    """``plan`` for the sample that is shipped, with the base it was trained for and, unless given, prompts for that."""
    from mtp_extract.data import sample_base, sample_bundle, sample_prompts

    return replace(
        plan,
        directory=None,
        base=str(sample_base()),
        source=str(sample_bundle()),
        prompts=plan.prompts or sample_prompts(),
        device="cpu",
        batch=32,
    )


def run_validation(plan: ValidationPlan, say: Say = silent, show: Show = silent) -> Validation:
    """Measure what ``plan`` asks for.

    Args:
        plan: at least one of ``base`` and ``source``.
        say: told what is begun.
        show: told how far it is, after each batch of texts.

    Raises:
        MtpExtractError: a part is missing, does not fit, or does not fit into memory.
    """
    _check(plan)
    own = None if plan.directory is None else Path(checkpoint_here(plan.directory))
    plan = replace(plan, directory=own, beside=tuple(Path(checkpoint_here(place)) for place in plan.beside))
    with ExitStack() as stack:
        directory = plan.directory
        if directory is None:
            say("extracting the sample")
            directory = stack.enter_context(_sample())
        return _measure(plan, directory, say, show, stack)


def _check(plan: ValidationPlan) -> None:
    """Refuse what cannot be measured, before anything is loaded."""
    if plan.base is None and plan.source is None:
        raise MtpExtractError(
            "expected a base, a source or both, found neither; there is nothing to validate against",
            remedies=("base", "source"),
        )
    needing = ((plan.wanted, "to verify trees of drafts"), (plan.beside, "for the drafters to be compared beside"))
    for given, what in needing:
        if given and plan.base is None:
            raise MtpExtractError(
                f"expected a base {what}, found none; give the model that is drafted for", remedies=("base",)
            )
    require("torch")
    if plan.base is not None:
        require("transformers")
    check_values(plan)
    if not plan.draft_steps:
        raise MtpExtractError("expected a number of draft steps, found none; give one", remedies=("draft_steps",))
    if not 0 <= plan.seed < 1 << 63 or plan.samples > _MOST_SAMPLES:
        raise MtpExtractError(f"expected a seed of 0 to 2^63 - 1 and at most {_MOST_SAMPLES} samples")


@contextmanager
def _sample() -> Iterator[Path]:
    """The sample's checkpoint. Its matrices are too small to share: threads would mostly wait for each other."""
    import torch

    from mtp_extract.data import sample_bundle
    from mtp_extract.pipeline.extraction import extract

    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "sample-mtp-drafter"
        extract(str(sample_bundle()), directory)
        torch.set_num_threads(1)
        try:
            yield directory
        finally:
            torch.set_num_threads(threads)


def _measure(plan: ValidationPlan, directory: Path, say: Say, show: Show, stack: ExitStack) -> Validation:
    """Against the file, beside the base, and in other programs."""
    import torch

    from mtp_extract.bundle import open_bundle
    from mtp_extract.checkpoint.checkpoint import require_mtp
    from mtp_extract.drafter.load import drafter_of, load_any
    from mtp_extract.drafter.mtp import MtpDrafter
    from mtp_extract.evaluate.base_model import memory_guard
    from mtp_extract.formats import format_of
    from mtp_extract.pipeline.extraction import checkpoint_of
    from mtp_extract.pipeline.identity import check_identity, drafter_for
    from mtp_extract.report.files import REPORT_FILES
    from mtp_extract.validate.parity.interpreter import check_interpreter
    from mtp_extract.validate.parity.transformers import check_transformers
    from mtp_extract.validate.result import Validation
    from mtp_extract.validate.verdict import concluded

    config = format_of(directory).read_config(directory)
    result = Validation(
        tool=Tool("mtp-extract", __version__),
        drafter="the sample" if plan.directory is None else public_name(str(directory)),
        source=Path(plan.source).name if plan.source is not None else None,
        settings={"seed": plan.seed},
    )
    source, comparable = None, True
    cases: list[Case] = []
    if plan.source is not None:
        say("deriving every tensor from the file again, and reading its graph")
        opened = stack.enter_context(open_bundle(plan.source))
        opened.prefetch()
        source = drafter_for(opened, require_mtp(config))
        identity = check_identity(directory, source, REPORT_FILES)
        comparable = identity.comparable
        result.checks = list(identity.checks)
    if not comparable or any(check.passed is False for check in result.checks):
        # What is refuted needs no second opinion, and may hold numbers that nothing can run.
        result.notes.append("It is refuted already, so nothing was measured.")
        return concluded(result)
    with memory_guard("loading the drafter"):
        drafter = load_any(directory, dtype=torch.float32)
    if plan.base is not None:
        cases = _beside_base(plan, plan.base, directory, source, result, say, show)
    if source is not None and isinstance(drafter, MtpDrafter):
        say("loading the checkpoint with transformers")
        loaded = check_transformers(directory, drafter, source, plan.seed)
        say("running the drafter section in Google's interpreter")
        with memory_guard("comparing with Google's interpreter"):
            # The file's numbers: that the directory's are these, rounded as is said, was checked to the bit.
            own = replace(checkpoint_of(source).whole(), config=drafter.config)
            drafter = drafter_of(own, dtype=torch.float32)
            parity, interpreted = check_interpreter(drafter, source, cases, samples=plan.samples, seed=plan.seed)
        asked = (loaded, interpreted)
        result.parity = parity
        result.checks += asked
        result.notes += [f"{check.name} was not checked: {check.evidence}" for check in asked if check.passed is None]
    return concluded(result)


def _beside_base(
    plan: ValidationPlan, base: str, directory: Path, source: Shard | None, result: Validation, say: Say, show: Show
) -> list[Case]:
    """Add to ``result`` everything that needs the base; return cases for parity with ``source``, from its states."""
    from mtp_extract.evaluate.agreement import continue_greedily
    from mtp_extract.evaluate.base_model import load_base, memory_guard
    from mtp_extract.evaluate.batches import groups
    from mtp_extract.evaluate.prompts import encode_prompts, prompts_or_shipped
    from mtp_extract.validate.acceptance.controls import draft_together
    from mtp_extract.validate.acceptance.drafters import facts_of, measure_drafter
    from mtp_extract.validate.acceptance.trivial import compare_trivial
    from mtp_extract.validate.notes import notes_of
    from mtp_extract.validate.pair import pair_of
    from mtp_extract.validate.parity.cases import base_cases
    from mtp_extract.validate.result import BaseFacts

    prompts = prompts_or_shipped(plan.prompts)
    directories = (directory, *plan.beside)
    facts = [facts_of(*named) for named in zip(directories, _names(result.drafter, plan.beside), strict=True)]
    say(f"loading the base {base}")
    loaded = load_base(base, plan.device)
    # All of them before anything is measured: one that does not fit is said now, and not in an hour.
    with memory_guard("loading the drafters"):
        pairs = [_pair(loaded, place) for place in directories]
    _, generator = pairs[0]
    encoded = encode_prompts(prompts, generator.codec, chat_template=plan.chat_template)
    _check_lengths(prompts, encoded, plan.new_tokens, generator.base.config)
    _check_widths(plan.wanted, generator.base.vocab_size)
    steps = sorted(set(plan.draft_steps))
    drafters: list[DrafterFigures] = []
    networks = [network for network, _ in pairs]
    batches = len(list(groups([0] * len(prompts), plan.batch)))
    ways = len(pairs) * (len(steps) + len(plan.wanted))
    with memory_guard("running the base"):
        say(f"continuing {len(prompts)} prompts with the base alone")
        sizes = {"batch": plan.batch, "new_tokens": plan.new_tokens}
        written = continue_greedily(
            generator.base, prompts, encoded, **sizes, done=counter(show, "the base's text", batches)
        )
        say("drafting after every token of them, and with one thing broken at a time")
        drafted = draft_together(
            generator.base,
            networks,
            written,
            steps[-1],
            batch=plan.batch,
            most=plan.control_positions,
            done=counter(show, "drafts after every token", batches),
        )
        first, generated = drafted.agreements[0], counter(show, "a few texts with drafts", ways)
        for known, (network, own), agreement in zip(facts, pairs, drafted.agreements, strict=True):
            say(f"generating with {_rounds(steps, plan.wanted)}{f' with {known.name}' if plan.beside else ''}")
            drafters.append(
                measure_drafter(
                    known,
                    network,
                    own,
                    written,
                    agreement,
                    first,
                    chains=steps,
                    trees=plan.wanted,
                    **sizes,
                    timed=plan.timed,
                    done=generated,
                )
            )
    result.base = BaseFacts(
        "the sample's base" if plan.directory is None else public_name(base),
        loaded.dtype,
        list(loaded.devices),
        str(loaded.drafter_dtype).removeprefix("torch."),
        plan.chat_template and generator.codec.has_template,
    )
    result.settings = {
        "prompts": dict(Counter(prompt.workload for prompt in prompts)),
        "new_tokens": plan.new_tokens,
        "draft_steps": steps,
        "trees": list(plan.wanted),
        "batch": plan.batch,
        **({"control_positions": drafted.positions} if drafted.controls else {}),
        **result.settings,
    }
    result.trivial, result.controls = list(compare_trivial(written, first)), list(drafted.controls)
    result.drafters = drafters
    result.notes += (*loaded.notes, *notes_of(drafters, written, drafted))
    longest = max(len(text.tokens) for text in written.texts)
    result.pair = pair_of(generator.base, result.base.name, networks[0], drafters[0], longest)
    return [] if source is None else base_cases(generator.base, source, written.texts, plan.samples)


def _pair(loaded: LoadedBase, directory: Path) -> tuple[Network, SpeculativeGenerator]:
    """The drafter in ``directory`` with its base.

    Raises:
        MtpExtractError: it cannot be loaded or does not fit; the message names ``directory``.
    """
    from mtp_extract.drafter.load import load_any
    from mtp_extract.speculate.loop import SpeculativeGenerator

    drafter = load_any(directory, dtype=loaded.drafter_dtype, device=loaded.device)
    try:
        return drafter, SpeculativeGenerator(loaded.model, drafter, loaded.tokenizer)
    except PairError as error:
        raise PairError(f"{escape(directory)}: {error}", remedies=error.remedies) from error


def _check_lengths(prompts: Sequence[Prompt], encoded: Sequence[tuple[int, ...]], new_tokens: int, config: Any) -> None:
    """Refuse what does not fit the base's context.

    Raises:
        PairError: a prompt and its continuation are longer.
    """
    context = getattr(config, "max_position_embeddings", None)
    longest = max(range(len(encoded)), key=lambda index: len(encoded[index]))
    length = len(encoded[longest])
    if context is not None and length + new_tokens > context:
        raise PairError(
            f"prompt {longest + 1} ({prompts[longest].workload}): expected at most the base's {context} tokens, "
            f"found {length} and {new_tokens} new ones; give shorter prompts",
            remedies=("prompts", "new_tokens"),
        )


def _check_widths(trees: Mapping[str, Wanted], vocab_size: int) -> None:
    """Refuse a tree of more drafts for one place than there are tokens.

    Raises:
        PairError: there is one.
    """
    for name, tree in trees.items():
        if isinstance(tree, Tree) and tree.width > vocab_size:
            raise PairError(
                f"expected at most {vocab_size} drafts for one place, as many as the base has tokens, found "
                f"{tree.width} in {escape(name)}; make the tree narrower",
                remedies=("trees",),
            )


def _names(first: str, beside: Sequence[Path]) -> list[str]:
    """What to call them; where two have one name, by their places too."""
    names = [first, *(public_name(str(place)) for place in beside)]
    return [name if name not in names[:index] else f"{name} ({index + 1})" for index, name in enumerate(names)]


def _rounds(steps: Sequence[int], trees: Collection[str]) -> str:
    """What is drafted a round, in words."""
    chains = f"{', '.join(map(str, steps))} drafts a round"
    return f"{chains}, and trees of {', '.join(trees)}" if trees else chains
