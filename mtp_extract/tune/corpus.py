"""The texts of a training, by what they are for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import Any, TypeVar

from mtp_extract.drafter.load import Network
from mtp_extract.errors import MtpExtractError
from mtp_extract.evaluate.measured import Measured
from mtp_extract.evaluate.prompts import Prompt, shipped_prompts, spread
from mtp_extract.speculate.teacher import Text
from mtp_extract.speculate.texts import LEAST_TEXTS, repeats, repeats_note
from mtp_extract.tune.pair import Pair
from mtp_extract.tune.prompts import HELD_OUT, TRAINED, WATCHED, side_of
from mtp_extract.tune.seen import Numbers, repeated_share, seen, sequences
from mtp_extract.tune.served import Served, said_of
from mtp_extract.tune.setting import Setting
from mtp_extract.tune.status import Status
from mtp_extract.tune.text import Tokens, Writing, people_texts

Item = TypeVar("Item")

_LEAST = {TRAINED: 4, WATCHED: 4, HELD_OUT: LEAST_TEXTS}
"""Texts of each side; of fewer that are held out there is no interval."""

_ALONE = "Whether other workloads than those trained on get worse is not known: no text of any was held out."

_NAME = 40  # characters
_MOST_WATCHED = 32  # texts that are measured again and again, on the way


@dataclass(frozen=True)
class Corpus:
    # to train on, by kind, of which every batch has equal shares: what the base writes after the prompts, as it is
    # served; what it writes there served otherwise, prompts included; what it writes, greedily, from within the latter
    kinds: tuple[tuple[Text, ...], ...]
    watched: tuple[Text, ...]  # to be measured on the way
    held_out: tuple[Text, ...]  # to be measured before and after
    workloads: tuple[str, ...]  # of each held-out text, its workload
    # so many of the held-out texts, the first ones, are of the workloads that are trained on; the others show whether a
    # workload that is not trained on gets worse
    own: int
    units: tuple[int, ...]  # of each held-out text, what intervals count: windows of one text by people are one
    names: tuple[str, ...]  # of each held-out text, where it comes from or how its prompt begins
    given: bool = False  # whether the user's workloads are trained on, and others are to be held out beside them
    repeats: int = 0  # further held-out texts that repeat one of these, trained or watched, and are left out
    # what the base writes after the held-out prompts of those workloads when it is served otherwise than the setting
    # says; none after text by people
    otherwise: tuple[Text, ...] = ()
    other_temperature: float = 1.0  # at which it wrote that: 1 where the setting is greedy, else 0
    text_from: Mapping[str, Any] | None = None  # the server that wrote the texts, and how far it is this base

    @property
    def trained(self) -> tuple[Text, ...]:
        """Of all kinds."""
        return tuple(text for kind in self.kinds for text in kind)

    @property
    def as_json(self) -> Mapping[str, Any]:
        """For the record: how many texts there are, and :attr:`shared`."""
        texts = {
            "trained": len(self.trained),
            "watched": len(self.watched),
            "held_out": len(self.held_out),
            "repeats": self.repeats,
        }
        return {"texts": texts, "shared_sequences": round(self.shared, 4), "text_from": self.text_from}

    @property
    def notes(self) -> tuple[str, ...]:
        """That held-out texts repeat one another or are of the user's workloads alone, and who wrote them."""
        source = () if self.text_from is None else (said_of(self.text_from),)
        alone = (_ALONE,) if self.given and self.own == len(self.held_out) else ()
        return *source, *alone, *repeats_note(len(self.held_out) + self.repeats, self.repeats)

    @cached_property
    def shared(self) -> float:
        """The share of the held-out texts' 8-token sequences that training texts have too."""
        return repeated_share(self.held_out[: self.own], self.trained)

    @cached_property
    def known(self) -> Numbers:
        """The sequences of tokens that training has seen; asked for at every measurement on the way."""
        return sequences(self.trained)

    def measured(self, pair: Pair, drafter: Network) -> tuple[Measured, Measured | None]:
        """``drafter`` on the held-out texts, and on those that were served otherwise; None where there are none."""
        other = pair.measured(drafter, self.otherwise, self.other_temperature) if self.otherwise else None
        return pair.measured(drafter, self.held_out), other

    def balanced(self, watched: Measured) -> float:
        """What the best is chosen by, of a drafter measured on the watched texts.

        Teacher-forced tokens per round where training has seen the tokens and where it has not, half each: a drafter
        that goes on learning what it has seen gets worse elsewhere. Over all alike where too few texts have either.
        """
        known = seen(watched, self.watched, self.known, watched.stands.shape[1])
        parts = [watched.where(rows) for rows in (known, ~known)]
        if any(part.texts < LEAST_TEXTS for part in parts):
            return watched.mean_accepted_length
        return sum(part.mean_accepted_length for part in parts) / 2

    @classmethod
    def of(cls, pair: Pair, tell: Callable[[Status], None] = lambda status: None) -> Corpus:
        """The texts that the pair's setting asks for; what the base has not written yet, it writes.

        Raises:
            MtpExtractError: too few prompts, or the base ends its texts at once.
        """
        setting, steps = pair.setting, pair.setting.draft_steps
        sides, guards = divided(setting)
        writing = _writing(pair)
        # Shipped prompts are not the user's: what a short context has no room for is no reason to stop.
        guards = writing.fitting(guards)
        if not setting.given:
            sides = {side: writing.fitting(items) for side, items in sides.items()}
        other = replace(writing, temperature=0.0 if setting.temperature else 1.0)
        by_base = setting.text is None
        asked = [*chain.from_iterable(sides.values()), *guards] if by_base else guards
        text_from = _write(pair, writing, asked, tell)
        _write(pair, other, [*sides[TRAINED], *sides[HELD_OUT]] if by_base else [], tell)

        def written(writer: Writing, items: Sequence[Prompt]) -> list[tuple[Prompt, Text]]:
            return list(zip(items, writer.texts(items), strict=True))

        texts = {
            side: written(writing, items) if by_base else people_texts(items, writing) for side, items in sides.items()
        }
        trained = _enough(TRAINED, new_texts(texts[TRAINED], steps), steps)
        kinds = [_texts(trained)]
        if by_base:
            beside = _beside(pair, writing, written(other, sides[TRAINED]), tell)
            kinds += [_texts(new_texts(kind, steps)) for kind in beside]
        # A text that was learned, or chose the best, shows nothing of texts that nobody has seen.
        learned = [*chain.from_iterable(kinds)]
        watched = _enough(WATCHED, new_texts(texts[WATCHED], steps, learned), steps)[:_MOST_WATCHED]
        learned += _texts(watched)
        own = _enough(HELD_OUT, new_texts(texts[HELD_OUT], steps, learned), steps)
        candidates = [*texts[HELD_OUT], *written(writing, guards)]
        held_out = new_texts(candidates, steps, learned)
        origins = [None, *(item for item, _ in held_out)]
        return cls(
            kinds=tuple(filter(None, kinds)),
            watched=_texts(watched),
            held_out=_texts(held_out),
            workloads=tuple(item.workload for item, _ in held_out),
            own=len(own),
            units=tuple(accumulate(item is not before for before, item in pairwise(origins))),
            names=tuple(_name(item) for item, _ in held_out),
            given=setting.given,
            repeats=len(_with_rounds(candidates, steps)) - len(held_out),
            otherwise=_texts(new_texts(written(other, sides[HELD_OUT]), steps, learned)) if by_base else (),
            other_temperature=other.temperature,
            text_from=text_from,
        )


def divided(setting: Setting) -> tuple[dict[str, list[Prompt]], list[Prompt]]:
    """By side; and shipped prompts that are not trained on, which show whether other workloads get worse.

    Raises:
        MtpExtractError: too few prompts.
    """
    items = setting.items
    sides = {side: [item for item in items if side_of(item.source) == side] for side in (TRAINED, WATCHED, HELD_OUT)}
    held = {item.key for side in (WATCHED, HELD_OUT) for item in sides[side]}
    sides[TRAINED] = [item for item in sides[TRAINED] if item.key not in held]
    sides[WATCHED] = spread(sides[WATCHED], _MOST_WATCHED)
    learned = {item.key for item in sides[TRAINED]}
    # Of another name, as a user's own workload may be called "code" too.
    guards = [
        replace(item, workload=f"{item.workload} (shipped)")
        for item in (shipped_prompts(setting.other_prompts) if setting.given else ())
        if item.key not in learned | held
    ]
    few = [side for side, found in sides.items() if len({item.key for item in found}) < _LEAST[side]]
    if few:
        wanted = " and ".join(f"{_LEAST[side]} to be {side}" for side in few)
        raise MtpExtractError(
            f"expected enough prompts for at least {wanted}, found {len(items)} from "
            f"{len({item.source for item in items})} sources, which a hash of each source divides. Give more.",
            remedies=("prompts", "text"),
        )
    return sides, guards


def _name(item: Prompt) -> str:
    """Its source, if it has one of its own, and how its prompt begins."""
    said = item.content if isinstance(item.content, str) else item.content[-1].get("content")
    start = " ".join(str(said).split())[:_NAME]
    return start if item.source in (item.content, item.key) else f"{item.source[:_NAME]}: {start}"


def _writing(pair: Pair) -> Writing:
    """What writes the texts as the setting serves them: the base at hand, or a server."""
    setting = pair.setting
    own = Writing(
        generator=pair.generator,
        folder=setting.work / "text",
        fingerprint=pair.base_fingerprint,
        new_tokens=setting.new_tokens,
        temperature=setting.temperature,
        seed=setting.seed,
        batch=setting.batch,
        chat_template=setting.chat_template,
        share=pair.share,
    )
    return own if setting.text_from is None else Served.of(own, setting)


def _write(
    pair: Pair,
    writer: Writing,
    items: Sequence[Prompt | Tokens],
    tell: Callable[[Status], None],
    what: str = "prompts",
) -> Mapping[str, Any] | None:
    """Have written what is not stored yet, by all processes; who wrote it, where that is not the base at hand."""
    if not items:
        return None
    pair.say(f"continuing {len(items)} {what} with {writer.author} at temperature {writer.temperature:g}")
    writer.prepare(items, tell)
    pair.accelerator.wait_for_everyone()
    return writer.checked(items)


def _beside(
    pair: Pair, writing: Writing, drawn: Sequence[tuple[Prompt, Text]], tell: Callable[[Status], None]
) -> Iterator[Sequence[tuple[Any, Text]]]:
    """What is learned beside the text as ``writing`` has it: ``drawn`` at the other temperature, and text within it."""
    # What stands in a prompt is as good to learn from as what the base drew.
    yield [(item, replace(text, prompt_length=1)) for item, text in drawn]
    if not writing.temperature and pair.setting.text_from is None:
        writer, places = writing.branches(_texts(drawn))
        _write(pair, writer, places, tell, "places within these")
        yield list(zip(places, writer.texts(places), strict=True))


def new_texts(pairs: Sequence[tuple[Item, Text]], steps: int, seen: Sequence[Text] = ()) -> list[tuple[Item, Text]]:
    """Those of ``pairs`` with ``steps`` drafts to make whose text repeats none of ``seen``, nor one before it."""
    found = _with_rounds(pairs, steps)
    again = repeats([text.tokens for text in (*seen, *_texts(found))])
    return [pair for index, pair in enumerate(found, len(seen)) if index not in again]


def _with_rounds(pairs: Sequence[tuple[Item, Text]], steps: int) -> list[tuple[Item, Text]]:
    """Those with a place to draft from, and a target for each of ``steps`` drafts."""
    return [(item, text) for item, text in pairs if len(text.anchors) >= steps]


def _texts(pairs: Sequence[tuple[Any, Text]]) -> tuple[Text, ...]:
    return tuple(text for _, text in pairs)


def _enough(side: str, pairs: Sequence[tuple[Prompt, Text]], steps: int) -> list[tuple[Prompt, Text]]:
    """``pairs``, if they are as many as ``side`` needs."""
    if len(pairs) < _LEAST[side]:
        raise MtpExtractError(
            f"expected at least {_LEAST[side]} texts of more than {steps} tokens to be {side}, found {len(pairs)}: the "
            "others are shorter, or repeat one that counts; give other ones",
            remedies=("prompts", "text"),
        )
    return list(pairs)
