"""The functions of ``mtp_extract``: what the commands do, with typed results.

Each loads what it needs when it is called: this module by itself loads nothing heavy.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtp_extract.errors import PlanError, UnsupportedError, escape
from mtp_extract.progress import SILENT, Reporter

if TYPE_CHECKING:
    from mtp_extract.bundle import ModelFile
    from mtp_extract.doctor.plan import DoctorPlan
    from mtp_extract.doctor.result import Diagnosis
    from mtp_extract.hub.upload import UploadResult
    from mtp_extract.insertion.activations import StaticActivations
    from mtp_extract.insertion.comparison import BaseComparison
    from mtp_extract.insertion.plan import InsertionPlan, InsertionResult
    from mtp_extract.io.opening import Named
    from mtp_extract.io.place import PathLike
    from mtp_extract.io.source import Source
    from mtp_extract.pipeline.inspection import Inspection
    from mtp_extract.pipeline.plan import DtypeName, RuleName
    from mtp_extract.pipeline.writing import ExtractionResult
    from mtp_extract.report.card import CardWords
    from mtp_extract.serving.plan import BenchPlan
    from mtp_extract.serving.result import Benchmark
    from mtp_extract.tuning.plan import TuningPlan
    from mtp_extract.tuning.run import Outcome
    from mtp_extract.validation.plan import ValidationPlan
    from mtp_extract.validation.result import Validation

_LARGEST_BASE = 100_000_000_000
"""Bytes of a base that is fetched to be compared: no Gemma 4 has more. It is read tensor by tensor."""


def open(  # noqa: A001 - meant to be read with its package
    source: Named | Source,
    *,
    token: str | bool | None = None,
    section: int | None = None,
    signature: str | None = None,
    reporter: Reporter = SILENT,
) -> ModelFile:
    """Open a ``.litertlm`` or a drafter's ``.tflite``, here, on the Hub or behind a URL.

    Args:
        source: a path, an id of the Hub, or a URL. Of a remote file only byte ranges are fetched; of a repository with
            several bundles, the one is taken whose header lists a drafter.
        token: for the Hub; by default the one that ``hf auth login`` or ``HF_TOKEN`` left.
        section, signature: index of the drafter's section and key of its signature, where there are several.
        reporter: told of the bytes of a remote range that is fetched.

    Raises:
        SourceError, FormatError, UnsupportedError, NoDrafterError: as their names say.
    """
    from mtp_extract.bundle import open_bundle

    return open_bundle(source, token=token, section=section, signature=signature, reporter=reporter)


def inspect(
    source: PathLike,
    *,
    tensors: bool = False,
    graph: bool = False,
    against: PathLike | None = None,
    reporter: Reporter = SILENT,
) -> Inspection | BaseComparison:
    """Inspect a bundle or a checkpoint, or compare one with the other.

    Args:
        source: a bundle, as :func:`open` takes it, or a checkpoint: a directory or a ``.gguf``.
        tensors: list every tensor.
        graph: list, for a bundle, what every operator is read as, then every role and every other constant.
        against: for a checkpoint, the bundle from which everything is derived again and compared, bit for bit; for a
            bundle, the directory of a base, or its id on the Hub, whose files then go into the Hub's cache.
        reporter: told of the bytes that are fetched and compared.

    Returns:
        An Inspection; of a bundle ``against`` a base's directory a BaseComparison.

    Raises:
        CheckpointError, SourceError, FormatError: damaged, or not to be had, or not what its record says.
        UnsupportedError: what is asked for does not go together.
    """
    from mtp_extract.bundle import open_bundle
    from mtp_extract.io.opening import fetch_checkpoint, is_checkpoint
    from mtp_extract.pipeline import inspection

    source = fetch_checkpoint(source, or_bundle=True)
    if graph and (against or is_checkpoint(source)):
        why = "expected a bundle, compared with nothing, to show its graph. Leave that out."
        raise UnsupportedError(f"{escape(source)}: {why}", remedies=("graph",))
    if is_checkpoint(source):
        return inspection.inspect_checkpoint(Path(source), against, tensors=tensors, reporter=reporter)
    with open_bundle(source, reporter=reporter, skeleton=against is None) as opened:
        if against is None:
            return inspection.inspect(opened, tensors=tensors, graph=graph)
        place = Path(fetch_checkpoint(against, largest=_LARGEST_BASE))
        if not place.is_dir():
            why = f"expected the directory of a checkpoint to compare {escape(source)} with, found none. Give one."
            raise UnsupportedError(f"{escape(against)}: {why}", remedies=("against",))
        from mtp_extract.insertion.comparison import compare_base

        return compare_base(opened, place, reporter)


def extract(
    source: Named | Source | ModelFile,
    out: PathLike | None = None,
    *,
    format: str | None = None,  # noqa: A002 - the command's word for it
    dtype: DtypeName | None = None,
    codes: bool = False,
    quantize: RuleName | None = None,
    overwrite: bool = False,
    sliding_window: int | None = None,
    unproven: bool = False,
    section: int | None = None,
    signature: str | None = None,
    reporter: Reporter = SILENT,
) -> ExtractionResult:
    """Extract the drafter of ``source`` into the directory ``out``.

    Args:
        source: a path, an id of the Hub, a URL, or what :func:`open` returned.
        out: a directory that does not exist yet; by default the source's name and ``-mtp-drafter``.
        format: a name in :data:`mtp_extract.formats.MTP_FORMATS`, or an engine's, whose best it then is; by default
            "transformers".
        dtype: "bf16", "f16", "f32" or "codes"; by default the format's own choice.
        codes: write ``codes/codes.safetensors`` too: integers, scales and zero points of what is written in floats.
        quantize: a name in :data:`mtp_extract.checkpoint.rounding.RULES`: round matrices that have no codes by it.
        overwrite: replace ``out`` if it is a checkpoint of ours.
        sliding_window: used only where the file leaves the window to the runtime (1 or more).
        unproven: where the graph cannot be proven, take what can be read of it, and record why it is not proven.
        section, signature: as for :func:`open`, for what is not open yet.
        reporter: told of the bytes that are fetched and written.

    Raises:
        SourceError, FormatError, UnsupportedError, NoDrafterError, RoleError, OutputError: as their names say;
            nothing is left behind.
        PlanError: an unknown ``format``, ``dtype`` or ``quantize``.
    """
    from mtp_extract.pipeline.extraction import extract_drafter
    from mtp_extract.pipeline.plan import WritingPlan

    return extract_drafter(
        source,
        out,
        WritingPlan(format, dtype, codes, quantize),
        overwrite=overwrite,
        sliding_window=sliding_window,
        unproven=unproven,
        section=section,
        signature=signature,
        reporter=reporter,
    )


def convert(
    directory: PathLike,
    out: PathLike | None = None,
    *,
    format: str,  # noqa: A002 - the command's word for it
    dtype: DtypeName | None = None,
    codes: bool = False,
    quantize: RuleName | None = None,
    overwrite: bool = False,
    reporter: Reporter = SILENT,
) -> ExtractionResult:
    """Write the drafter in ``directory`` to ``out`` in another format, or the same with other types.

    Args:
        directory: what :func:`extract` or this function wrote, which is then held against its record first; an official
            assistant as transformers has it; a ``.gguf``; or an id of the Hub.
        out: a directory that does not exist yet; by default ``NAME-FORMAT`` in the current one.
        format: a name in :data:`mtp_extract.formats.ALL_FORMATS`, or an engine's, whose best it then is.
        dtype, codes, quantize, overwrite, reporter: as for :func:`extract`.

    Raises:
        CheckpointError: the directory is damaged, or holds no drafter.
        UnsupportedError, OutputError: as their names say; nothing is left behind.
        PlanError: an unknown ``format``, ``dtype`` or ``quantize``.
    """
    from mtp_extract.io.opening import fetch_checkpoint
    from mtp_extract.pipeline.plan import WritingPlan
    from mtp_extract.pipeline.writing import convert_checkpoint

    plan = WritingPlan(format, dtype, codes, quantize)
    place = Path(fetch_checkpoint(directory))
    return convert_checkpoint(place, out, plan, overwrite=overwrite, reporter=reporter)


def validate(plan: ValidationPlan, reporter: Reporter = SILENT) -> Validation:
    """Check a drafter against its bundle, and measure how many of its drafts its base accepts.

    Args:
        plan: its fields are

            * directory: a checkpoint that mtp-extract wrote, or an official assistant; or its id on the Hub; None for
              the sample
            * base: the model it drafts for: a directory, or an id of the Hub
            * beside: another drafter of that base, to measure on the same texts
            * source: the bundle it was extracted from, or a ``.tflite``, or an address: to prove that this is its
              drafter
            * sample: validate the sample, which is extracted first, and brings its base, its source and, unless given,
              prompts
            * prompts: a ``.txt`` or ``.jsonl``; by default about 100 of ours
            * draft_steps (1 to 64): values of K to generate with; the largest is the number of steps of the agreement
            * trees: trees of drafts to measure too, such as "4x2x1", or "adaptive"
            * device: auto, cpu, cuda, cuda:N, mps, or balanced over all GPUs
            * new_tokens (3 or more): most tokens the base adds to a prompt
            * batch (1 or more): prompts at a time
            * samples (1 to 4096): random inputs for parity
            * timed: prompts to time
            * chat_template: apply the base's, if it has one
            * report: a directory for ``report.html``, ``report.json`` and ``pair.json``
            * overwrite: replace an older report
            * command: how it was asked for, as the report says it
        reporter: told what is measured, and how far it is; and the Validation before a report of it is written, which a
            full disk may prevent, or as far as it came, where an error or a signal ends it.

    Raises:
        MtpExtractError: a part is missing, does not fit, or does not fit into memory.
    """
    from mtp_extract.evaluation.extras import require_packages
    from mtp_extract.io.opening import fetch_checkpoint
    from mtp_extract.io.place import check_place
    from mtp_extract.report.files import REPORT_LISTED

    destination: dict[str, Any] = {"overwrite": plan.overwrite, "inputs": plan.inputs}
    if plan.report is not None:
        check_place(plan.report, **destination, listed=REPORT_LISTED)
    require_packages("torch", *(["transformers"] if plan.sample or plan.base else []))

    from mtp_extract.validation import page, run

    directory, beside = (place and Path(fetch_checkpoint(place)) for place in (plan.directory, plan.beside))
    validation = run.run_validation(replace(plan, directory=directory, beside=beside), reporter)
    reporter.report_result(validation)
    if plan.report is not None:
        page.write_validation(validation, plan.report, **destination)
    return validation


def tune(plan: TuningPlan, reporter: Reporter = SILENT) -> Outcome:
    """Fit a drafter to its base, or make a new head; measure it before and after; save what is better.

    Args:
        plan: its fields are

            * directory: the drafter: extracted, an official assistant, or a head; or its id on the Hub; None for a new
              EAGLE-3 head
            * base: the model that it is served with: a directory, or an id of the Hub
            * out: where the result goes; by default the drafter's name and ``-tuned``, or the base's and ``-eagle3``
            * work: where text, state and log are kept, to resume; by default ``OUT.work``
            * mode: what to train: "norms" (and layer scalars), "qat" (also the codes, on the stored grid), "float"
              (every weight), "ordered" (a head that scores clusters of tokens first), "eagle3" (a new head)
            * prompts: of your workload, as ``.txt`` or ``.jsonl``; by default ours
            * text: texts by people instead, or prompts with answers, in the same forms
            * text_from: the URL of a server that has the base and writes its texts
            * text_model: the name of the model there, if it serves several
            * text_key: that server's key, where it wants one
            * new_tokens (2 or more): most tokens of each of the base's texts
            * temperature (0 to 100): of serving and of the base's text; 0 is greedy
            * chat_template: put prompts into the base's chat format
            * draft_steps (1 or more): drafts a round to train for
            * objective: "ce" for greedy serving alone, "tv" or "kl" for sampled alone; "mixed" (ce and tv) for both
            * steps (1 or more): of the optimizer; by default 500, of eagle3 300, of ordered 600
            * batch (1 or more): texts a step, of all processes together
            * learning_rate: by default the mode's own, by width
            * draft_vocab (1 or more): tokens that an eagle3 head can propose, the most frequent ones
            * seed (0 or more): the same seed, texts and machine give the same bytes
            * device: auto, cpu, cuda, cuda:N, mps, or balanced over all GPUs
            * force: save the result even if it is not better
            * overwrite: replace a checkpoint of ours
        reporter: told after every batch of text and every step, after which it is asked whether to stop: what is best
            so far is then measured, and saved if it is better, marked as interrupted; a later run with the same plan
            resumes there.

    Raises:
        MtpExtractError: a part is missing, does not fit, or does not fit into memory.
        OutputError: the result cannot be written, or reads back differently; nothing is left behind.
    """
    from mtp_extract.evaluation.extras import require_packages

    require_packages("torch", "transformers", "accelerate")
    from mtp_extract.tuning.run import run_tuning

    return run_tuning(plan, reporter)


def insert(
    source: PathLike,
    bundle: PathLike,
    out: PathLike | None = None,
    *,
    dry_run: bool = False,
    graph_from: PathLike | None = None,
    base: str | None = None,
    section: int | None = None,
    overwrite: bool = False,
    force: bool = False,
    reporter: Reporter = SILENT,
) -> InsertionResult | InsertionPlan:
    """Put the weights of a checkpoint into a bundle, whose other sections stay as they are.

    Args:
        source: a drafter's checkpoint, or a bundle or model whose drafter is taken; or the checkpoint of a Gemma 4
            base, as transformers writes it.
        bundle: where they go; it stays as it is.
        out: the new bundle.
        dry_run: write nothing and return what would be done; ``out`` is then None.
        graph_from: for a bundle without a drafter, the bundle or model whose drafter's graph it gets.
        base: for a graph with static activations, the base beside which their scales are measured anew, on our prompts;
            of a base that is put in the one that was there, to measure what the static scales clip of each.
        section: index of the drafter's in ``bundle``, where there are several.
        overwrite: replace ``out`` if it is there.
        force: write although rounding to the bundle's types loses more than a tenth of a role of a base.
        reporter: told what is measured, and how far it is.

    Raises:
        PairError, UnsupportedError, OutputError, ProofError: as their names say; nothing is left behind.
        PlanError: neither or both of ``out`` and ``dry_run``.
    """
    from mtp_extract.insertion.run import plan_insertion
    from mtp_extract.io.opening import fetch_checkpoint, is_checkpoint
    from mtp_extract.io.place import check_place, list_files

    if (out is None) != dry_run:
        raise PlanError("out: expected a place for the new bundle, or a dry run; one of the two.")
    if out is not None:
        check_place(out, overwrite=overwrite, inputs=(bundle, source, graph_from, *list_files(base)))
    if is_checkpoint(bundle):
        swapped = "The first argument is a bundle, the second a checkpoint: swap them."
        advice = swapped if Path(source).is_file() and not is_checkpoint(source) else "Give a .litertlm in its place."
        raise UnsupportedError(
            f"{escape(bundle)}: expected the bundle that weights go into, found a checkpoint. {advice}"
        )
    source = fetch_checkpoint(source, or_bundle=True)
    measuring = {} if base is None else _choose_measurement(source, base, reporter)
    with plan_insertion(source, bundle, **measuring, graph_from=graph_from, section=section, reporter=reporter) as plan:
        return plan if out is None else plan.write(out, overwrite=overwrite, force=force, reporter=reporter)


def _choose_measurement(source: str, base: str, reporter: Reporter) -> dict[str, Any]:
    """Choose what an insertion measures with ``base``: a drafter's ranges, or what the static scales clip of a base."""
    from mtp_extract.evaluation.extras import require_packages
    from mtp_extract.insertion.base_checkpoint import holds_base
    from mtp_extract.io.opening import fetch_checkpoint

    require_packages("torch", "transformers")
    if not Path(source).is_dir():
        why = "expected the directory of a checkpoint to run beside a base. Extract the drafter first."
        raise UnsupportedError(f"{escape(source)}: {why}", remedies=("base",))
    # Checked first, since the base is loaded last, and only for static grids.
    fetch_checkpoint(base, largest=_LARGEST_BASE, fetch=False)
    if holds_base(Path(source)):
        from mtp_extract.insertion.calibration import measure_cut_off

        def cut_off(grids: StaticActivations) -> tuple[float, float]:
            before, after = (measure_cut_off(model, grids, reporter=reporter) for model in (base, source))
            return before, after

        return {"cut_off": cut_off}
    from mtp_extract.insertion.calibration import measure_ranges

    return {"measure": partial(measure_ranges, source, base, reporter=reporter)}


def bench(plan: BenchPlan, reporter: Reporter = SILENT) -> Benchmark:
    """Measure a running server, with and without its drafter, and what came of its drafts.

    An answer that fails is counted, and its prompt left out.

    Args:
        plan: its fields are

            * url: an OpenAI-compatible server, such as http://localhost:8000
            * baseline: the URL of the same server started without a drafter, asked in turn with the first
            * prompts: a ``.txt`` or ``.jsonl``; by default about 100 of ours
            * model: its name on the servers; needed if they serve several
            * key: sent to both servers
            * max_tokens (1 or more): most tokens of an answer
            * temperature (0 or more): at 0 texts are compared
            * concurrency (1 to 64): requests in flight at a time
            * warm_up (0 or more): requests to each server that are not measured
            * chat_template: send prompts as chats, or as text to be continued
        reporter: told what is begun, after each window of all servers how much is done, and what was measured so far,
            where an error or a signal ends it.

    Raises:
        MtpExtractError: prompts cannot be read, or a server does not answer as it should.
    """
    from mtp_extract.serving.benchmark import run_benchmark

    return run_benchmark(plan, reporter)


def diagnose(plan: DoctorPlan, reporter: Reporter = SILENT) -> Diagnosis:
    """Find out why a server rejects drafts: whether the pair fits, what is expected and served, and which fault it is.

    Args:
        plan: its fields are

            * place: of the drafter: a directory, a ``.gguf``, or an id of the Hub
            * base: the base model: a directory, or an id of the Hub
            * server: the URL of an OpenAI-compatible server with that pair
            * prompts: a ``.txt`` or ``.jsonl``; by default about 100 of ours
            * model: its name on the server; needed if it serves several
            * key: the server's
            * max_tokens (8 or more): most tokens of an answer
            * drafts (1 to 64): a round; by default as many as the server's counters say, or 3
            * chat_template: apply the base's, if it has one
            * device: auto, cpu, cuda, cuda:N, mps, or balanced over all GPUs
        reporter: told what is being done.

    Raises:
        MtpExtractError: a part is missing or cannot be read, or a server does not answer as it should.
    """
    from mtp_extract.evaluation.extras import require_packages
    from mtp_extract.io.opening import fetch_checkpoint

    path = Path(fetch_checkpoint(plan.place))
    require_packages("torch", "transformers")

    from mtp_extract.doctor.run import run_diagnosis

    return run_diagnosis(plan, path, reporter)


def upload(
    directory: PathLike,
    repo_id: str,
    *,
    private: bool = True,
    beside: bool = False,
    force: bool = False,
    dry_run: bool = False,
    token: str | None = None,
    card: CardWords | None = None,
) -> UploadResult:
    """Publish a checkpoint directory on the Hugging Face Hub, and verify what arrived.

    The files appear in one commit, all or none. Large files that arrived before an interruption are not sent again.

    Args:
        directory: what mtp-extract wrote, with a validation report or without.
        repo_id: ``org/name``.
        private: visibility of a repository that has to be created; one that exists keeps its own.
        beside: send the one file of a GGUF alone into a repository that exists, such as its base's; what is there
            stays, its card too.
        force: write into a repository that holds other content: files of the same name are replaced (the
            history keeps them), others stay.
        dry_run: check and list, and ask nobody.
        token: None for the one that ``hf auth login`` or ``HF_TOKEN`` left.
        card: what the card is to say; by default what the record says.

    Raises:
        CheckpointError: the directory does not match its ``extraction.json``.
        PlanError: ``repo_id`` is no name of a repository.
        HubError: no token, no permission, no network, other content, or not what was sent has arrived.
    """
    from mtp_extract.hub.upload import upload_directory
    from mtp_extract.report.card import NO_CARD_WORDS

    return upload_directory(
        directory,
        repo_id,
        private=private,
        beside=beside,
        force=force,
        dry_run=dry_run,
        token=token,
        words=card or NO_CARD_WORDS,
    )
