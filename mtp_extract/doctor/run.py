"""A whole diagnosis, from names to a result."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import structs

from mtp_extract.doctor.faults import Reference, reference, with_faults
from mtp_extract.doctor.fields import Diagnosis, Serving
from mtp_extract.doctor.likelihood import SOUND, compare
from mtp_extract.doctor.pair import check_fit, engines_of, identify
from mtp_extract.doctor.patterns import Counted, patterns
from mtp_extract.doctor.plan import DoctorPlan
from mtp_extract.doctor.rates import rates_of
from mtp_extract.doctor.samples import counted, samples, text_fit
from mtp_extract.doctor.served import Asked, ask_all
from mtp_extract.drafter.load import Network, load_any
from mtp_extract.drafter.masks import LITERT, TRANSFORMERS
from mtp_extract.drafter.protocol import Drafter
from mtp_extract.evaluate.base_model import LoadedBase, load_base, memory_guard
from mtp_extract.evaluate.prompts import Prompt, encode_prompts, prompts_or_shipped, require_texts
from mtp_extract.io.address import public_name
from mtp_extract.options import check_values
from mtp_extract.serving.counters import rate_in
from mtp_extract.speculate.loop import SpeculativeGenerator

Say = Callable[[str], None]
_DRAWN_BASELINE = "The baseline was not asked: texts that are drawn differ by chance."
_DRAFTS = 3  # a round, where nothing says how many
_CONVENTIONS = {LITERT: "n - 1, as in LiteRT-LM", TRANSFORMERS: "n, as in transformers"}


def diagnose(plan: DoctorPlan, place: Path, say: Say = lambda line: None) -> Diagnosis:
    """Look at the pair, at what is to be expected of it, and at what is served.

    Args:
        place: of the drafter, a directory or a ``.gguf``.

    Raises:
        MtpExtractError: a part is missing or cannot be read, or a server does not answer as it should.
    """
    check_values(plan)
    identity = identify(place, public_name(str(place)))
    prompts = list({prompt.key: prompt for prompt in prompts_or_shipped(plan.prompts)}.values())
    if not plan.chat_template:
        require_texts(prompts)
    asked, serving = _serving(plan, prompts, say)
    drafts = plan.drafts or _drafts_of(asked)
    found = Diagnosis(
        identity=identity,
        settings={
            **{name: getattr(plan, name) for name in ("max_tokens", "temperature", "drawn", "chat_template")},
            "prompts": len(prompts),
            "drafts": drafts or _DRAFTS,
            "drafts_known": drafts is not None,
        },
        engines=list(engines_of(place, serving.kind if serving else None)),
        serving=serving,
        notes=[_DRAWN_BASELINE] if plan.baseline is not None and plan.temperature else [],
    )
    if plan.base is None:
        return found
    say(f"loading the base {plan.base}")
    loaded = load_base(plan.base, plan.device)
    with memory_guard("loading the drafter"):
        drafter = load_any(place, dtype=loaded.drafter_dtype, device=loaded.device)
    found.base, found.checks = public_name(plan.base), list(check_fit(place, identity, drafter, loaded))
    found.notes += loaded.notes
    if any(check.passed is False for check in found.checks):
        return found
    with memory_guard("running the base"):
        return _beside(plan, found, prompts, asked, drafter, loaded, say)


def _serving(plan: DoctorPlan, prompts: Sequence[Prompt], say: Say) -> tuple[Asked | None, Serving | None]:
    """What the server told of every prompt, and all of it together; or what the log says."""
    if plan.server is None:
        if plan.log is None:
            return None, None
        return None, Serving(public_name(str(plan.log)), "LiteRT-LM", acceptance=rate_in(plan.log))

    def ask(url: str) -> Asked:
        say(f"asking {public_name(url)}, one prompt of {len(prompts)} at a time")
        return ask_all(
            url,
            [prompt.content for prompt in prompts],
            model=plan.model,
            key=plan.key,
            timeout=plan.timeout,
            max_tokens=plan.max_tokens,
            temperature=plan.temperature,
            chat=plan.chat_template,
        )

    asked = ask(plan.server)
    same: list[bool] = []
    if plan.baseline is not None and not plan.temperature:
        others = ask(plan.baseline).answers
        same = [a.text == b.text for a, b in zip(asked.answers, others, strict=True)]
    judged = [(t.drafted, t.accepted) for t in asked.answers if t.drafted is not None and t.accepted is not None]
    rounds = [(t.drafted, t.made) for t in asked.answers if t.drafted and t.made]
    drafted, accepted = (sum(column) for column in zip(*judged, strict=True)) if judged else (None, 0)
    return asked, Serving(
        asked.name,
        asked.kind,
        asked.version,
        drafted=drafted,
        per_round=sum(d for d, _ in rounds) / sum(r for _, r in rounds) if rounds else None,
        acceptance=accepted / drafted if drafted else None,
        identical=sum(same) if same else None,
        compared=len(same),
    )


def _drafts_of(asked: Asked | None) -> int | None:
    """Drafts a round, by the answer that has most on the mean; None where none tells."""
    told = [(t.drafted / t.made, t.rounds) for t in asked.answers if t.drafted and t.made] if asked else []
    return max((round(mean) if rounds is None else math.ceil(mean) for mean, rounds in told), default=None)


def _beside(
    plan: DoctorPlan,
    found: Diagnosis,
    prompts: Sequence[Prompt],
    asked: Asked | None,
    drafter: Network,
    loaded: LoadedBase,
    say: Say,
) -> Diagnosis:
    """With what the reference says."""
    generator, steps = SpeculativeGenerator(loaded.model, drafter, loaded.tokenizer), int(found.settings["drafts"])
    codec, temperature = generator.codec, plan.temperature
    encoded = encode_prompts(prompts, codec, chat_template=plan.chat_template)
    say(f"texts for {len(prompts)} prompts, and what is to be expected along them")
    chosen = samples(
        generator,
        encoded,
        asked.answers if asked else None,
        max_tokens=plan.max_tokens,
        temperature=temperature,
        batch=plan.batch,
    )
    if left_out := len(prompts) - len(chosen):
        note = f"{left_out} of {len(prompts)} texts are not counted: too short, repeats, or not told in these tokens."
        found.notes.append(note)
    if not chosen:
        return found

    def along(drafters: Sequence[Drafter]) -> list[Counted]:
        drawn_at = temperature if plan.drawn and temperature else None
        texts = [sample.text for sample in chosen]
        return patterns(generator.base, drafters, texts, steps, temperature=drawn_at, batch=plan.batch)

    known = reference(drafter, along)
    found.expected = rates_of(known.sound, steps)
    found.convention = _CONVENTIONS[known.convention] if known.convention else None
    if asked is None:
        return found
    otherwise = encode_prompts(prompts, codec, chat_template=not plan.chat_template) if codec.has_template else None
    found.text = text_fit(generator, chosen, otherwise, temperature=temperature, batch=plan.batch)
    served = counted(chosen, steps)
    if served is None:
        return found
    say("the same with one thing broken at a time")
    known = with_faults(known, generator.base, drafter, along, served.mean_accepted_length)
    return held_against(found, known, served)


def held_against(found: Diagnosis, known: Reference, served: Counted) -> Diagnosis:
    """``found`` with the patterns that ``served``, along the same texts, is most like."""
    assert found.serving is not None
    serving = structs.replace(found.serving, rates=rates_of(served, int(found.settings["drafts"])))
    fits = compare(served, {SOUND: known.sound, **known.broken})
    return structs.replace(found, serving=serving, fits=list(fits), untold=list(known.untold))
