"""The texts of a training, by what they are for: trained on, watched on the way, held out to decide.

A drafter that was tuned on a text repeats it: what it gains there says nothing of text that nobody trained on. So texts
that repeat others are left out, and anchors are told apart by whether a trained text has the tokens around them too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mtp_extract.errors import MtpExtractError
from mtp_extract.evaluation.intervals import LEAST_TEXTS, repeats
from mtp_extract.evaluation.measured import Measured
from mtp_extract.evaluation.progress import Show, silent
from mtp_extract.evaluation.prompts import FEW, Prompt, encode_prompts, shipped_prompts, spread
from mtp_extract.speculate.teacher import Text
from mtp_extract.tuning.pair import Pair
from mtp_extract.tuning.plan import TuningPlan
from mtp_extract.tuning.served import agreement, connected
from mtp_extract.tuning.text import Tokens, Writer, branched, people_texts

T = TypeVar("T")

TRAINED, WATCHED, HELD_OUT, SHIPPED = "trained", "watched", "held out", "shipped"
"""Trained on; measured during training, to keep the best; measured before and after, to save or refuse; and, where the
prompts are a user's, measured like these to see whether other workloads get worse."""

SEEN_LENGTH = 8
"""Tokens of a sequence that training has seen or not: the last drafts of a round that fit, the pending token and those
before it."""

_SHARES = ((0.08, WATCHED), (0.2, HELD_OUT))  # upper bounds of the hash of a source, as shares of its range
_LEAST = {TRAINED: 4, WATCHED: 4, HELD_OUT: LEAST_TEXTS}  # texts of each side; of fewer held out there is no interval
_MOST_WATCHED = 32  # texts that are measured again and again, on the way

Numbers = NDArray[np.uint64]


def side_of(source: str) -> str:
    """:data:`TRAINED`, :data:`WATCHED` or :data:`HELD_OUT`: by a hash of a prompt's source, so that it stays the same
    when prompts are added."""
    share = int.from_bytes(sha256(source.encode("utf-8", "backslashreplace")).digest()[:8], "big") / 2**64
    return next((side for bound, side in _SHARES if share < bound), TRAINED)


@dataclass(frozen=True)
class Corpus:
    # to train on, by kind, of which every batch has equal shares: what the base writes after the prompts, as it is
    # served; what it writes there at the other temperature, prompts included; what it writes, greedily, from within the
    # latter
    kinds: tuple[tuple[Text, ...], ...]
    watched: tuple[Text, ...]  # to be measured on the way
    held_out: tuple[tuple[Prompt, Text], ...]  # to be measured before and after, with the prompt or text by people
    own: int  # so many of the held-out texts, the first ones, are of the workloads that are trained on
    text_from: Mapping[str, Any] | None = None  # who wrote the texts if not the base, and how far it would have

    @property
    def trained(self) -> tuple[Text, ...]:
        """Of all kinds."""
        return tuple(chain.from_iterable(self.kinds))

    @cached_property
    def known(self) -> Numbers:
        """A number for every sequence of tokens that training has seen."""
        return np.unique(np.concatenate([np.zeros(0, np.uint64), *(_sequences(text.tokens) for text in self.trained)]))

    def balanced(self, watched: Measured) -> float:
        """What the best is chosen by, of a drafter measured on the watched texts.

        Teacher-forced tokens per round where training has seen the tokens and where it has not, half each: a drafter
        that goes on learning what it has seen gets worse elsewhere. Over all alike where too few texts have either.
        """
        known = seen(watched, self.watched, self.known)
        parts = [watched.where(rows) for rows in (known, ~known)]
        if any(part.texts < LEAST_TEXTS for part in parts):
            return watched.teacher_forced
        return sum(part.teacher_forced for part in parts) / 2


def seen(measured: Measured, texts: Sequence[Text], known: Numbers) -> Tensor:
    """Bool [N]: of each anchor, whether the 8 tokens that end with its last draft stand in a trained text.

    Prompts count. Near the beginning of a text that it begins there is one of the tokens. Of more than 7 drafts, those
    up to the seventh.

    Args:
        measured: over anchors of ``texts``.
        known: :attr:`Corpus.known` of what was trained on.
    """
    ends = measured.anchor + min(measured.stands.shape[1], SEEN_LENGTH - 1)
    around = np.zeros(len(measured.text), np.uint64)
    for index in torch.unique(measured.text).tolist():
        rows = (measured.text == index).numpy()
        around[rows] = _sequences(texts[index].tokens)[ends[rows].numpy()]
    return torch.from_numpy(np.isin(around, known))


def _sequences(tokens: Sequence[int]) -> Numbers:
    """A number for the sequence that ends with each token: equal for equal ones, and else by a chance of 2^-60."""
    # 0 stands for what is before a text.
    padded = np.concatenate([np.zeros(SEEN_LENGTH - 1, np.int64), np.asarray(tokens, np.int64) + 1]).astype(np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(padded, SEEN_LENGTH)
    factors = np.random.default_rng(SEEN_LENGTH).integers(1 << 63, size=SEEN_LENGTH, dtype=np.uint64) * 2 + 1
    numbers: Numbers = (windows * factors).sum(axis=1, dtype=np.uint64)
    return numbers


def gather(pair: Pair, tell: Show = silent) -> Corpus:
    """The texts that the pair's plan asks for; what is not written yet, the base or a server writes.

    Raises:
        MtpExtractError: too few prompts or texts, or a server has another base.
    """
    plan, steps, by_people, text_from = pair.plan, pair.plan.draft_steps, pair.plan.text is not None, None
    sides = divided(plan)
    asked = [(side, item) for side, items in sides.items() if side == SHIPPED or not by_people for item in items]
    prompts = encode_prompts([item for _, item in asked], pair.codec, chat_template=plan.chat_template)
    with connected(plan) as server:
        contents = {tokens: item.content for tokens, (_, item) in zip(prompts, asked, strict=True)}
        writer = Writer(pair, plan.temperature, plan.new_tokens, server, contents)
        # Shipped prompts are not the user's: what a short context has no room for is no reason to stop.
        room = writer.context - plan.new_tokens
        fitting = [
            (side, item, tokens)
            for (side, item), tokens in zip(asked, prompts, strict=True)
            if len(tokens) <= room or (plan.given and side != SHIPPED)
        ]
        texts = dict[str, list[tuple[Prompt, Text]]]()
        for (side, item, _), text in zip(fitting, writer.texts([one[2] for one in fitting], tell), strict=True):
            texts.setdefault(side, []).append((item, text))
        if by_people:
            texts |= {side: people_texts(items, writer) for side, items in sides.items() if side != SHIPPED}
        if server is not None or by_people:
            by = [text for side, pairs in texts.items() if side != SHIPPED for _, text in pairs]
            text_from = agreement(pair.base, by, plan.temperature, server)
        kinds = [_texts(_enough(TRAINED, texts, steps))]
        if not by_people:
            trained = [tokens for side, _, tokens in fitting if side == TRAINED]
            kinds += _further_kinds(writer, trained, tell)
    # A text that was learned, or chose the best, shows nothing of texts that nobody has seen.
    learned = [*chain.from_iterable(kinds)]
    watched = _texts(_enough(WATCHED, texts, steps, learned)[:_MOST_WATCHED])
    own = _enough(HELD_OUT, texts, steps, [*learned, *watched])
    shipped = new_texts(texts.get(SHIPPED, []), steps, [*learned, *watched, *_texts(own)])
    return Corpus(tuple(filter(None, kinds)), watched, (*own, *shipped), len(own), text_from)


def divided(plan: TuningPlan) -> dict[str, list[Prompt]]:
    """The prompts, or texts by people, by side.

    Raises:
        MtpExtractError: too few prompts.
    """
    items = plan.items
    sides = {side: [item for item in items if side_of(item.source) == side] for side in _LEAST}
    held = {item.key for side in (WATCHED, HELD_OUT) for item in sides[side]}
    sides[TRAINED] = [item for item in sides[TRAINED] if item.key not in held]
    sides[WATCHED] = spread(sides[WATCHED], _MOST_WATCHED)
    few = [side for side, found in sides.items() if len({item.key for item in found}) < _LEAST[side]]
    if few:
        wanted = " and ".join(f"{_LEAST[side]} to be {side}" for side in few)
        raise MtpExtractError(
            f"expected enough prompts for at least {wanted}, found {len(items)} from "
            f"{len({item.source for item in items})} sources, which a hash of each source divides. Give more.",
            remedies=("prompts", "text"),
        )
    known = held | {item.key for item in sides[TRAINED]}
    shipped = [item for item in (shipped_prompts(FEW) if plan.given else ()) if item.key not in known]
    # Of another name, as a user's own workload may be called "code" too.
    return {**sides, SHIPPED: [replace(item, workload=f"{item.workload} (shipped)") for item in shipped]}


def _further_kinds(writer: Writer, prompts: Sequence[Tokens], tell: Show) -> Iterator[tuple[Text, ...]]:
    """What is learned beside the text as ``writer`` has it: text at the other temperature, and text within that."""
    steps = writer.pair.plan.draft_steps
    other = replace(writer, temperature=0.0 if writer.temperature else 1.0)
    drawn = other.texts(prompts, tell)
    # What stands in a prompt is as good to learn from as what the base drew.
    yield _texts(new_texts([(None, replace(text, prompt_length=1)) for text in drawn], steps))
    if not writer.temperature and writer.server is None:
        yield _texts(new_texts([(None, text) for text in branched(writer, drawn, tell)], steps))


def new_texts(pairs: Sequence[tuple[T, Text]], steps: int, seen: Sequence[Text] = ()) -> list[tuple[T, Text]]:
    """Those of ``pairs`` with ``steps`` drafts to make whose text repeats none of ``seen``, nor one before it."""
    found = [(item, text) for item, text in pairs if len(text.anchors) >= steps]
    again = repeats([text.tokens for text in (*seen, *_texts(found))])
    return [pair for index, pair in enumerate(found, len(seen)) if index not in again]


def _texts(pairs: Iterable[tuple[Any, Text]]) -> tuple[Text, ...]:
    return tuple(text for _, text in pairs)


def _enough(
    side: str, texts: Mapping[str, list[tuple[Prompt, Text]]], steps: int, seen: Sequence[Text] = ()
) -> list[tuple[Prompt, Text]]:
    """The new texts of ``side``, if they are as many as it needs."""
    pairs = new_texts(texts.get(side, []), steps, seen)
    if len(pairs) < _LEAST[side]:
        raise MtpExtractError(
            f"expected at least {_LEAST[side]} texts of more than {steps} tokens to be {side}, found {len(pairs)}: the "
            "others are shorter, or repeat one that counts; give other ones",
            remedies=("prompts", "text"),
        )
    return pairs
