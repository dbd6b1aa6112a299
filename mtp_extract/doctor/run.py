"""Run a diagnosis: ask the server, check the pair, count what is expected, and compare it with what was served."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mtp_extract.architecture.config import DrafterConfig
from mtp_extract.doctor.counts import Counts, rank_fits
from mtp_extract.doctor.faults import SOUND, ExpectedCounts, count_expected
from mtp_extract.doctor.plan import DoctorPlan
from mtp_extract.doctor.result import Check, Diagnosis, Identity, Serving
from mtp_extract.doctor.texts import Sample, ask_all, count_rounds, count_served, measure_text_fit, read_samples
from mtp_extract.doctor.verdict import judge_diagnosis
from mtp_extract.drafter.load import Network, load_any_drafter
from mtp_extract.drafter.mtp import LITERT, TRANSFORMERS
from mtp_extract.errors import escape, format_count
from mtp_extract.evaluation.base_model import LoadedBase, guard_memory, load_base
from mtp_extract.evaluation.prompts import Prompt, read_prompts
from mtp_extract.formats import detect_format, read_checkpoint
from mtp_extract.io.address import choose_public_name
from mtp_extract.litertlm.published import find_base_model
from mtp_extract.pipeline.check import read_record
from mtp_extract.progress import SILENT, Reporter
from mtp_extract.serving.client import Answer, Server
from mtp_extract.speculate.loop import SpeculativeGenerator
from mtp_extract.speculate.target import Base, compare_needs

_DRAFTS = 3  # a round, where nothing says how many
_CONVENTIONS = {LITERT: "n - 1, as in LiteRT-LM", TRANSFORMERS: "n, as in transformers"}


def run_diagnosis(plan: DoctorPlan, place: Path, reporter: Reporter = SILENT) -> Diagnosis:
    """Diagnose the drafter in ``place``, a directory or a ``.gguf``; as :func:`mtp_extract.diagnose` explains."""
    identity = identify(place, choose_public_name(str(place)))
    all_prompts = read_prompts(plan.prompts, chat_template=plan.chat_template)
    prompts = list({prompt.key: prompt for prompt in all_prompts}.values())
    answers = serving = None
    if plan.server is not None:
        with Server(plan.server, model=plan.model, key=plan.key) as server:
            reporter.say(f"asking {server.name}, {format_count(len(prompts), 'prompt')} one at a time")
            answers = ask_all(server, plan, prompts)
            serving = _describe_server(server, answers)

    reporter.say(f"loading the base {plan.base}")
    loaded = load_base(plan.base, plan.device)
    with guard_memory("loading the drafter"):
        drafter = load_any_drafter(place, dtype=loaded.drafter_dtype, device=loaded.device)
    checks = check_fit(place, identity, drafter, loaded)
    diagnosis = Diagnosis(
        drafter=identity,
        base=choose_public_name(plan.base),
        settings=_list_settings(plan, len(prompts), answers or ()),
        serving=serving,
        checks=checks,
    )
    diagnosis.notes += (*read_checkpoint(place).notes, *loaded.notes)
    if all(check.passed is not False for check in checks):
        generator = SpeculativeGenerator(loaded.model, drafter, loaded.tokenizer)
        with guard_memory("running the base"):
            _read_texts(diagnosis, generator, prompts, answers, plan, reporter)
    return judge_diagnosis(diagnosis)


def _list_settings(plan: DoctorPlan, prompts: int, answers: Sequence[Answer]) -> dict[str, Any]:
    """List what a second run needs; drafts per round come from the counters if the plan does not say them."""
    drafts = plan.drafts or _infer_drafts_per_round(answers)
    return {
        "max_tokens": plan.max_tokens,
        "chat_template": plan.chat_template,
        "prompts": prompts,
        "drafts": drafts or _DRAFTS,
        "drafts_known": drafts is not None,
    }


def _read_texts(
    diagnosis: Diagnosis,
    generator: SpeculativeGenerator,
    prompts: Sequence[Prompt],
    answers: Sequence[Answer] | None,
    plan: DoctorPlan,
    reporter: Reporter,
) -> None:
    """Add what is expected and what was served along the texts of ``prompts`` to ``diagnosis``."""
    encoded = [generator.codec.encode(prompt.content, chat_template=plan.chat_template) for prompt in prompts]
    reporter.say(f"texts for {format_count(len(prompts), 'prompt')}, and what is expected along them")
    chosen = read_samples(generator, encoded, answers, plan)
    diagnosis.notes += _list_notes(chosen, len(prompts))
    if not chosen:
        return
    steps = int(diagnosis.settings["drafts"])
    served = count_served(chosen, steps, generator.base.stop_token_ids)
    lag = served.tokens_per_round if served else None
    texts = [sample.text for sample in chosen]
    compare_with_served(diagnosis, count_expected(generator.drafter, generator.base, texts, steps, lag=lag), served)
    diagnosis.text = measure_text_fit(generator, chosen) if diagnosis.serving is not None else None


def compare_with_served(diagnosis: Diagnosis, expected: ExpectedCounts, served: Counts | None) -> None:
    """Add to ``diagnosis`` what is expected, and how likely each fault makes the counters of the same texts."""
    steps = int(diagnosis.settings["drafts"])
    diagnosis.expected = expected.counts[SOUND].estimate_rates(steps)
    diagnosis.convention = _CONVENTIONS[expected.convention] if expected.convention else None
    if served is not None:
        diagnosis.served = served.estimate_rates(steps)
        diagnosis.fits = rank_fits(served, expected.counts)


def _describe_server(server: Server, answers: Sequence[Answer]) -> Serving:
    """Sum up what a server counted in all answers."""
    counts = [(answer.counted.drafted, count_rounds(answer)) for answer in answers if answer.counted]
    drafted = [drafts for drafts, _ in counts if drafts is not None]
    in_rounds = [(drafts, rounds) for drafts, rounds in counts if drafts and rounds]
    per_round = sum(d for d, _ in in_rounds) / sum(r for _, r in in_rounds) if in_rounds else None
    total = sum(drafted) if drafted else None
    return Serving(server.name, server.kind.name, total, per_round)


def _infer_drafts_per_round(answers: Sequence[Answer]) -> int | None:
    """Return drafts per round, from the answer with the highest mean; None if no answer has counters for it."""
    counts = [(answer.counted, rounds) for answer in answers if answer.counted and (rounds := count_rounds(answer))]
    means = [(counters.drafted / rounds, counters.rounds) for counters, rounds in counts if counters.drafted]
    return max((round(mean) if rounds is None else math.ceil(mean) for mean, rounds in means), default=None)


def _list_notes(chosen: Sequence[Sample], prompts: int) -> Iterator[str]:
    """Say which texts were left out, and where the server read other prompts."""
    if left_out := prompts - len(chosen):
        uncounted = f"{left_out} of {format_count(prompts, 'text')}"
        yield f"Not counted: {uncounted}, too short, repeats, or not reported in these tokens."
    if bare := sum(sample.without_bos for sample in chosen):
        yield (
            f"The BOS token is added here to text that no chat template wrote, and not at the server, for {bare} of "
            f"{format_count(len(chosen), 'prompt')}: counted as the server read them."
        )
    if unlike := sum(sample.read_alike is False and not sample.without_bos for sample in chosen):
        yield (
            f"Other tokens at the server, as by another chat template, for {unlike} of "
            f"{format_count(len(chosen), 'prompt')}: counted as the server read them, where it says so."
        )


def identify(place: Path, name: str) -> Identity:
    """Identify the drafter in ``place``; raises CheckpointError if it is damaged, or there is none."""
    layout, record = detect_format(place), read_record(place)
    config = layout.read(place).config
    # Some configurations name the base themselves.
    made_for = (find_base_model(record) if record else None) or config.as_json().get("base")
    return Identity(name, layout.name, made_for)


def check_fit(place: Path, identity: Identity, drafter: Network, loaded: LoadedBase) -> list[Check]:
    """Check everything in which drafter and base have to agree, even after one check has failed."""
    base = Base(loaded.model)
    with torch.inference_mode():
        checks = [_compare(name.removesuffix(" of"), *both) for name, *both in compare_needs(base, drafter.needs)]
    if drafter.needs.shared_kv:
        checks += _check_attention(drafter.config, base)
    size = len(loaded.tokenizer)
    fits = size <= base.vocab_size
    # Many tokenizers list tokens for which their base has no row; only a text with such a token does not fit.
    beyond = "" if fits else "; a text with a token beyond these is refused"
    checks.append(Check("tokenizer's size", fits or None, f"{size} tokens, {base.vocab_size} in the base{beyond}"))
    if (file := place / "tokenizer.json").is_file():
        checks.append(_check_tokenizer(file, loaded.tokenizer.get_vocab()))
    return [*checks, _check_base_name(identity, loaded)]


def _check_base_name(identity: Identity, loaded: LoadedBase) -> Check:
    """Check that the base has the name of the one that the drafter was made for."""
    name = str(loaded.name).partition("@")[0].rstrip("/").rpartition("/")[2]
    names = f"made for {identity.made_for or 'a base that is not known'}; here it is {name}, {loaded.dtype}"
    is_named = name == (identity.made_for or "").rpartition("/")[2]
    return Check("made for this base", True if is_named else None, escape(names))


def _compare(name: str, drafter: object, base: object) -> Check:
    if drafter == base:
        return Check(name, True, escape(base))
    return Check(name, False, f"the drafter has {escape(drafter)}, the base {escape(base)}")


def _check_attention(config: DrafterConfig, base: Base) -> Iterator[Check]:
    ropes = getattr(base.config, "rope_parameters", None) or {}
    for kind, layer in config.kv_layers.items():
        rope = ropes.get(kind)
        if isinstance(rope, Mapping):
            of_base = rope.get("rope_theta"), rope.get("partial_rotary_factor", 1.0)
            yield _compare(f"RoPE, {kind}", (layer.rope.theta, layer.rope.partial_rotary_factor), of_base)
        if layer.sliding_window is not None:
            yield _compare("sliding window", layer.sliding_window, base.windows.get(kind))
    cap, theirs = config.final_logit_softcap or None, getattr(base.config, "final_logit_softcapping", None) or None
    so = ": greedy drafts are the same, drawn ones are not"
    yield Check("soft cap", True if cap == theirs else None, f"{cap} and {theirs}{'' if cap == theirs else so}")


def _check_tokenizer(file: Path, base: Mapping[str, int]) -> Check:
    """Compare the drafter's tokenizer with the base's, token by token."""
    try:
        read = json.loads(file.read_bytes())
        listed = {**read["model"]["vocab"], **{token["content"]: token["id"] for token in read["added_tokens"]}}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        return Check("tokenizer", None, f"it lists no tokens by number: {escape(error)}")
    count = sum(base.get(token) != number for token, number in listed.items())
    return Check(
        "tokenizer", not count, f"{format_count(count, 'token')} unlike the base's" if count else "the base's own"
    )
