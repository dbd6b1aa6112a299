"""A whole diagnosis, from names to a result."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from mtp_extract.doctor.counts import Counts, expected_counts
from mtp_extract.doctor.faults import Reference, reference
from mtp_extract.doctor.likelihood import SOUND, compare
from mtp_extract.doctor.pair import check_fit, identify
from mtp_extract.doctor.plan import DoctorPlan
from mtp_extract.doctor.result import Diagnosis, Serving
from mtp_extract.doctor.texts import Sample, ask_all, rounds_of, samples, served_counts, text_fit
from mtp_extract.doctor.verdict import conclude
from mtp_extract.drafter.load import load_any
from mtp_extract.drafter.masks import LITERT, TRANSFORMERS
from mtp_extract.drafter.protocol import Drafter
from mtp_extract.errors import MtpExtractError, escape
from mtp_extract.evaluate.base_model import load_base, memory_guard
from mtp_extract.evaluate.prompts import encode_prompts, prompts_or_shipped, require_texts
from mtp_extract.io.address import public_name
from mtp_extract.options import check_values
from mtp_extract.serving.client import Answer, Server
from mtp_extract.speculate.loop import SpeculativeGenerator

Say = Callable[[str], None]
_DRAFTS = 3  # a round, where nothing says how many
_CONVENTIONS = {LITERT: "n - 1, as in LiteRT-LM", TRANSFORMERS: "n, as in transformers"}


def diagnose(plan: DoctorPlan, place: Path, say: Say = lambda line: None) -> Diagnosis:
    """Look at the pair, at what is expected of it, and at what is served.

    Args:
        place: of the drafter, a directory or a ``.gguf``.

    Raises:
        MtpExtractError: a part is missing or cannot be read, or a server does not answer as it should.
    """
    check_values(plan)
    if plan.base is None:
        raise MtpExtractError(
            f"{escape(plan.place)}: expected the base to run this drafter beside, found none. Name it.",
            remedies=("base",),
        )
    identity = identify(place, public_name(str(place)))
    prompts = list({prompt.key: prompt for prompt in prompts_or_shipped(plan.prompts)}.values())
    if not plan.chat_template:
        require_texts(prompts)
    answers, serving = None, None
    if plan.server is not None:
        with Server(plan.server, model=plan.model, key=plan.key, timeout=plan.timeout) as server:
            say(f"asking {server.name}, one prompt of {len(prompts)} at a time")
            answers = ask_all(server, plan, prompts)
            serving = _serving(server, answers)
    drafts = plan.drafts or _drafts_of(answers or ())
    settings = {name: getattr(plan, name) for name in ("max_tokens", "temperature", "chat_template")}
    settings |= {"prompts": len(prompts), "drafts": drafts or _DRAFTS, "drafts_known": drafts is not None}
    say(f"loading the base {plan.base}")
    loaded = load_base(plan.base, plan.device)
    with memory_guard("loading the drafter"):
        drafter = load_any(place, dtype=loaded.drafter_dtype, device=loaded.device)
    checks = check_fit(place, identity, drafter, loaded)
    found = Diagnosis(drafter=identity, base=public_name(plan.base), settings=settings, serving=serving, checks=checks)
    found.notes += loaded.notes
    if any(check.passed is False for check in checks):
        return conclude(found)
    generator = SpeculativeGenerator(loaded.model, drafter, loaded.tokenizer)
    with memory_guard("running the base"):
        encoded = encode_prompts(prompts, generator.codec, chat_template=plan.chat_template)
        say(f"texts for {len(prompts)} prompts, and what is expected along them")
        chosen = samples(generator, encoded, answers, plan)
        found.notes += _notes(chosen, len(prompts))
        if chosen:
            _along_texts(found, generator, chosen, plan)
    return conclude(found)


def _serving(server: Server, answers: Sequence[Answer]) -> Serving:
    """A server, and all that it counted."""
    counted = [(one.counted.drafted, rounds_of(one)) for one in answers if one.counted is not None]
    rounds = [(drafted, made) for drafted, made in counted if drafted and made]
    return Serving(
        server.name,
        server.kind.name,
        server.version,
        drafted=sum(drafted for drafted, _ in counted if drafted) if any(d is not None for d, _ in counted) else None,
        per_round=sum(d for d, _ in rounds) / sum(r for _, r in rounds) if rounds else None,
    )


def _drafts_of(answers: Sequence[Answer]) -> int | None:
    """Drafts a round, by the answer that has most on the mean; None where none tells."""
    known = [(one.counted, rounds) for one in answers if one.counted is not None and (rounds := rounds_of(one))]
    means = [(c.drafted / rounds, c.rounds) for c, rounds in known if c.drafted]
    return max((round(mean) if rounds is None else math.ceil(mean) for mean, rounds in means), default=None)


def _notes(chosen: Sequence[Sample], prompts: int) -> list[str]:
    """What was left out, and where the server read other prompts."""
    found = []
    if left_out := prompts - len(chosen):
        why = "too short, repeats, or not reported in these tokens"
        found.append(f"{left_out} of {prompts} texts are not counted: {why}.")
    if bare := sum(sample.without_bos for sample in chosen):
        found.append(
            f"{bare} of {len(chosen)} prompts begin with the BOS token here, which is added to text that no chat "
            "template wrote, and not at the server: they are counted as the server read them."
        )
    if other := sum(sample.read_alike is False and not sample.without_bos for sample in chosen):
        found.append(
            f"{other} of {len(chosen)} prompts are other tokens at the server, as by another chat template: they are "
            "counted as the server read them, where it says so."
        )
    return found


def _along_texts(found: Diagnosis, generator: SpeculativeGenerator, chosen: Sequence[Sample], plan: DoctorPlan) -> None:
    """Add to ``found`` what is expected along the texts, whether they are the base's, and which fault it is."""
    steps, base, texts = int(found.settings["drafts"]), generator.base, [sample.text for sample in chosen]

    def along(drafters: Sequence[Drafter]) -> list[Counts]:
        return expected_counts(base, drafters, texts, steps, batch=plan.batch)

    served = served_counts(chosen, steps, base.stop_token_ids)
    lag = served.tokens_per_round if served else None
    hold_against(found, reference(generator.drafter, base, along, lag=lag), served)
    if found.serving is not None:
        found.text = text_fit(generator, chosen, plan)


def hold_against(found: Diagnosis, known: Reference, served: Counts | None) -> None:
    """Add to ``found`` what is expected, and which fault the counters of the same texts are like."""
    steps = int(found.settings["drafts"])
    found.expected = known.sound.rates(steps)
    found.convention = _CONVENTIONS[known.convention] if known.convention else None
    if served is not None:
        found.served = served.rates(steps)
        found.fits = compare(served, {SOUND: known.sound, **known.broken})
        found.untold = list(known.untold)
