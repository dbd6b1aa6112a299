"""The texts of a training, by what they are for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

from mtp_extract.errors import MtpExtractError
from mtp_extract.evaluate.prompts import shipped_prompts
from mtp_extract.speculate.intervals import LEAST_TEXTS, repeats, repeats_note
from mtp_extract.speculate.teacher import Text
from mtp_extract.tune.pair import TEXTS_AT_ONCE, Pair
from mtp_extract.tune.progress import Written
from mtp_extract.tune.prompts import HELD_OUT, TRAINED, WATCHED, Item, of_prompts, read_items
from mtp_extract.tune.text import Writing, people_texts, repeated_share

_LEAST = {TRAINED: 4, WATCHED: 4, HELD_OUT: LEAST_TEXTS}
"""Texts of each side; of fewer that are held out there is no interval."""

_MOST_WATCHED = 32
"""Texts that are measured again and again, on the way."""


@dataclass(frozen=True)
class Corpus:
    """Texts by what they are for.

    Attributes:
        trained: to train on.
        watched: to be measured on the way.
        held_out: to be measured before and after.
        workloads: of each held-out text, its workload.
        own: of the held-out texts the first so many are of the workloads that are trained on; the others are there to
            see harm.
        units: of each held-out text, what intervals count: windows of one text by people are one.
        repeats: further held-out texts that repeat one of these, and are left out.
        otherwise: what the base writes after the held-out prompts of those workloads when it is served otherwise than
            the setting says; none after text by people.
        other_temperature: at which it wrote that: 1 where the setting is greedy, else 0.
    """

    trained: tuple[Text, ...]
    watched: tuple[Text, ...]
    held_out: tuple[Text, ...]
    workloads: tuple[str, ...]
    own: int
    units: tuple[int, ...]
    repeats: int = 0
    otherwise: tuple[Text, ...] = ()
    other_temperature: float = 1.0

    @property
    def counts(self) -> Mapping[str, int]:
        """How many there are of each, for the record."""
        return {
            "trained": len(self.trained),
            "watched": len(self.watched),
            "held_out": len(self.held_out),
            "repeats": self.repeats,
        }

    @property
    def notes(self) -> tuple[str, ...]:
        """That held-out texts repeat one another."""
        return repeats_note(len(self.held_out) + self.repeats, self.repeats)

    @cached_property
    def shared(self) -> float:
        """The share of the held-out texts' 8-token sequences that training texts have too."""
        return repeated_share(self.held_out[: self.own], self.trained)

    @classmethod
    def of(cls, pair: Pair, tell: Callable[[Written], None] = lambda written: None) -> Corpus:
        """The texts that the pair's setting asks for; what the base has not written yet, it writes.

        Args:
            pair: with its setting.
            tell: called after every batch that was written.

        Raises:
            MtpExtractError: too few prompts, or the base ends its texts at once.
        """
        setting = pair.setting
        given = setting.prompts or setting.text
        sides, guards = _divided(given is None, read_items(given) if given else of_prompts(shipped_prompts()))
        writing = Writing(
            generator=pair.generator,
            folder=setting.work / "text",
            fingerprint=pair.base_fingerprint,
            new_tokens=setting.new_tokens,
            temperature=setting.temperature,
            seed=setting.seed,
            batch=max(setting.batch, TEXTS_AT_ONCE),
            chat_template=setting.chat_template,
            share=pair.share,
            drafts=0 if setting.directory is None else Writing.drafts,
        )
        other = replace(writing, temperature=0.0 if setting.temperature else 1.0)
        written = setting.text is None
        every = [*(item for side in sides.values() for item in side if written), *guards]
        again = sides[HELD_OUT] if written else []
        for writer, prompts in ((writing, every), (other, again)):
            if prompts:
                pair.say(f"continuing {len(prompts)} prompts with the base at temperature {writer.temperature:g}")
                writer.prepare(prompts, tell)
        pair.accelerator.wait_for_everyone()
        made: dict[str, list[tuple[Item, Text]]] = {}
        for side, found in sides.items():
            if written:
                made[side] = list(zip(found, writing.texts(found), strict=True))
            else:
                windows = people_texts(found, pair.generator.codec, setting.new_tokens)
                made[side] = [(item, text) for item, parts in zip(found, windows, strict=True) for text in parts]
        steps = setting.draft_steps
        made = {side: _long_enough(side, pairs, steps) for side, pairs in made.items()}
        guarded = list(zip(guards, writing.texts(guards), strict=True)) if guards else []
        candidates = [*made[HELD_OUT], *(pair for pair in guarded if _has_a_round(pair[1], steps))]
        judged = _unrepeated(candidates)
        served = zip(again, other.texts(again), strict=True) if again else ()
        otherwise = _unrepeated([pair for pair in served if _has_a_round(pair[1], steps)])
        return cls(
            trained=tuple(text for _, text in made[TRAINED]),
            watched=tuple(text for _, text in made[WATCHED][:_MOST_WATCHED]),
            held_out=tuple(text for _, text in judged),
            workloads=tuple(item.workload for item, _ in judged),
            own=len(_unrepeated(made[HELD_OUT])),
            units=tuple(accumulate(one is not other for (one, _), (other, _) in pairwise([(None, None), *judged]))),
            repeats=len(candidates) - len(judged),
            otherwise=tuple(text for _, text in otherwise),
            other_temperature=other.temperature,
        )


def _divided(are_shipped: bool, items: Sequence[Item]) -> tuple[dict[str, list[Item]], list[Item]]:
    """By side; and shipped prompts of which nothing is trained on, which are there to see harm."""
    sides = {side: [item for item in items if item.side == side] for side in (TRAINED, WATCHED, HELD_OUT)}
    held = {item.key for side in (WATCHED, HELD_OUT) for item in sides[side]}
    sides[TRAINED] = [item for item in sides[TRAINED] if item.key not in held]
    sides[WATCHED] = sides[WATCHED][:_MOST_WATCHED]
    learned = {item.key for item in sides[TRAINED]}
    # Of another name, as a user's own workload may be called "code" too.
    guards = [
        replace(item, workload=f"{item.workload} (shipped)")
        for item in (() if are_shipped else of_prompts(shipped_prompts()))
        if item.key not in learned | held
    ]
    few = [side for side, found in sides.items() if len({item.key for item in found}) < _LEAST[side]]
    if few:
        wanted = " and ".join(f"{_LEAST[side]} to be {side}" for side in few)
        raise MtpExtractError(
            f"expected enough prompts for at least {wanted}, found {len(items)} prompts from "
            f"{len({item.source for item in items})} sources, divided by a hash of where they come from; give more",
            remedies=("prompts",),
        )
    return sides, guards


def _unrepeated(pairs: Sequence[tuple[Item, Text]]) -> list[tuple[Item, Text]]:
    """Without those whose text repeats one before it."""
    again = repeats([text.tokens for _, text in pairs])
    return [pair for index, pair in enumerate(pairs) if index not in again]


def _has_a_round(text: Text, steps: int) -> bool:
    return len(text.anchors) >= steps


def _long_enough(side: str, pairs: Sequence[tuple[Item, Text]], steps: int) -> list[tuple[Item, Text]]:
    """Those with a place to draft from, and a target for every step."""
    found = [pair for pair in pairs if _has_a_round(pair[1], steps)]
    if len(found) < _LEAST[side]:
        raise MtpExtractError(
            f"expected texts of more than {steps} tokens, found {len(found)} that are {side}: the base ends the others "
            "at once; give other prompts",
            remedies=("prompts",),
        )
    return found
