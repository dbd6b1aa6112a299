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
from mtp_extract.doctor.server import Asked, Reply, ask_all
from mtp_extract.doctor.texts import samples, served_counts, text_fit
from mtp_extract.doctor.verdict import conclude
from mtp_extract.drafter.load import Network, load_any
from mtp_extract.drafter.masks import LITERT, TRANSFORMERS
from mtp_extract.drafter.protocol import Drafter
from mtp_extract.evaluate.base_model import LoadedBase, load_base, memory_guard
from mtp_extract.evaluate.prompts import Prompt, encode_prompts, prompts_or_shipped, require_texts
from mtp_extract.io.address import public_name
from mtp_extract.options import check_values
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
    drafter = identify(place, public_name(str(place)))
    prompts = list({prompt.key: prompt for prompt in prompts_or_shipped(plan.prompts)}.values())
    if not plan.chat_template:
        require_texts(prompts)
    asked, serving = _ask(plan, prompts, say)
    drafts = plan.drafts or _drafts_of(asked.replies if asked else ())
    settings = {name: getattr(plan, name) for name in ("max_tokens", "temperature", "drawn", "chat_template")}
    settings |= {"prompts": len(prompts), "drafts": drafts or _DRAFTS, "drafts_known": drafts is not None}
    found = Diagnosis(drafter=drafter, settings=settings, serving=serving)
    if plan.base is not None:
        _with_base(plan, found, place, prompts, asked, say)
    return conclude(found)


def _ask(plan: DoctorPlan, prompts: Sequence[Prompt], say: Say) -> tuple[Asked | None, Serving | None]:
    """What the server told of every prompt, and all of it together."""
    if plan.server is None:
        return None, None
    say(f"asking {public_name(plan.server)}, one prompt of {len(prompts)} at a time")
    asked = ask_all(plan, plan.server, prompts)
    counted = [(r.counted.drafted, r.counted.accepted, r.rounds) for r in asked.replies]
    told = [(drafted, accepted) for drafted, accepted, _ in counted if drafted is not None and accepted is not None]
    drafted, accepted = (sum(column) for column in zip(*told, strict=True)) if told else (None, 0)
    rounds = [(drafts, made) for drafts, _, made in counted if drafts and made]
    return asked, Serving(
        asked.name,
        asked.kind,
        asked.version,
        drafted=drafted,
        per_round=sum(d for d, _ in rounds) / sum(r for _, r in rounds) if rounds else None,
        acceptance=accepted / drafted if drafted else None,
    )


def _drafts_of(replies: Sequence[Reply]) -> int | None:
    """Drafts a round, by the answer that has most on the mean; None where none tells."""
    made = [(r.counted.drafted / r.rounds, r.counted.rounds) for r in replies if r.counted.drafted and r.rounds]
    return max((round(mean) if rounds is None else math.ceil(mean) for mean, rounds in made), default=None)


def _with_base(
    plan: DoctorPlan, found: Diagnosis, place: Path, prompts: Sequence[Prompt], asked: Asked | None, say: Say
) -> None:
    """Add to ``found`` whether the pair fits, and where it does, what the reference says."""
    assert plan.base is not None
    say(f"loading the base {plan.base}")
    loaded = load_base(plan.base, plan.device)
    with memory_guard("loading the drafter"):
        drafter = load_any(place, dtype=loaded.drafter_dtype, device=loaded.device)
    found.base, found.checks = public_name(plan.base), check_fit(place, found.drafter, drafter, loaded)
    found.notes += loaded.notes
    if all(check.passed is not False for check in found.checks):
        with memory_guard("running the base"):
            _along_texts(plan, found, prompts, asked, drafter, loaded, say)


def _along_texts(
    plan: DoctorPlan,
    found: Diagnosis,
    prompts: Sequence[Prompt],
    asked: Asked | None,
    drafter: Network,
    loaded: LoadedBase,
    say: Say,
) -> None:
    """Add to ``found`` what is expected along the texts, whether they are the base's, and which fault it is."""
    generator, steps = SpeculativeGenerator(loaded.model, drafter, loaded.tokenizer), int(found.settings["drafts"])
    codec = generator.codec
    encoded = encode_prompts(prompts, codec, chat_template=plan.chat_template)
    say(f"texts for {len(prompts)} prompts, and what is expected along them")
    chosen = samples(
        generator,
        encoded,
        asked.replies if asked else None,
        max_tokens=plan.max_tokens,
        temperature=plan.temperature,
        batch=plan.batch,
    )
    if left_out := len(prompts) - len(chosen):
        why = "too short, repeats, or not told in these tokens"
        found.notes.append(f"{left_out} of {len(prompts)} texts are not counted: {why}.")
    if not chosen:
        return
    served = served_counts(chosen, steps, generator.base.stop_token_ids)

    def along(drafters: Sequence[Drafter]) -> list[Counts]:
        drawn_at = plan.temperature if plan.drawn and plan.temperature else None
        texts = [sample.text for sample in chosen]
        return expected_counts(generator.base, drafters, texts, steps, temperature=drawn_at, batch=plan.batch)

    known = reference(drafter, generator.base, along, lag=served.tokens_per_round if served else None)
    hold_against(found, known, served)
    if asked is not None:
        found.text = text_fit(generator, chosen, temperature=plan.temperature, batch=plan.batch)


def hold_against(found: Diagnosis, known: Reference, served: Counts | None) -> None:
    """Add to ``found`` what is expected, and which fault the counters of the same texts are like."""
    steps = int(found.settings["drafts"])
    found.expected = known.sound.rates(steps)
    found.convention = _CONVENTIONS[known.convention] if known.convention else None
    if served is not None:
        found.served = served.rates(steps)
        found.fits = compare(served, {SOUND: known.sound, **known.broken})
        found.untold = list(known.untold)
