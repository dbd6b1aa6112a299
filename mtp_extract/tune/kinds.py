"""Kinds of text that an ordered head is made of and judged by, beside that of the prompts.

A head made of one kind of text loses the choices of another. So the base also continues random tokens of its whole
vocabulary, whose text uses far more of it, and what it keeps is measured on every kind there is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mtp_extract.drafter.mtp import MtpDrafter
from mtp_extract.errors import MtpExtractError
from mtp_extract.speculate.teacher import Text
from mtp_extract.tune.corpus import Corpus, new_texts
from mtp_extract.tune.made import made_states
from mtp_extract.tune.ordered import Used, collect
from mtp_extract.tune.pair import Pair
from mtp_extract.tune.prompts import HELD_OUT, TRAINED, WATCHED, side_of
from mtp_extract.tune.status import Status
from mtp_extract.tune.text import Writing

OWN, SHIPPED, RANDOM = "as trained on", "shipped prompts", "random tokens"
"""Text like that which the head is made of; that of workloads it is not made of; that after random tokens."""

_STRANGE = 1 / 3  # of the states that are learned from, those over text after random tokens
_MADE = 1 << 18  # states for all tokens together
_MOST_MADE = 32  # for one token
_CHECKED = 8  # that nothing is learned from
_PROMPTS = 320
_LENGTHS = (4, 16, 48)  # tokens of a prompt
_NEW_TOKENS = 96


@dataclass(frozen=True)
class Material:
    """States of a drafter: what a head is made of, and what it is judged by."""

    used: tuple[Used, Used]  # to learn from: over the prompts' text, and over that after random tokens
    watched: tuple[Used, Used]  # the same, to choose by
    held_out: Mapping[str, Used]  # by kind of text, to accept or refuse by
    made: Used  # for every token, to learn from
    checked: Used  # for tokens, to choose and to refuse by

    @property
    def states(self) -> int:
        """How many there are to learn from, over text."""
        return sum(map(len, self.used))

    @property
    def as_json(self) -> Mapping[str, int]:
        """For the record: how many states there are to learn from, and of how many tokens."""
        return {
            "states": self.states,
            "states_made": len(self.made),
            "tokens_used": len(torch.unique(self.used[0].choices)),
            "tokens_seen": len(torch.unique(torch.cat([part.choices for part in self.used]))),
        }

    @classmethod
    def of(
        cls,
        pair: Pair,
        drafter: MtpDrafter,
        corpus: Corpus,
        head: Tensor,
        most: int,
        tell: Callable[[Status], None] = lambda status: None,
    ) -> Material:
        """Read over the texts of ``corpus`` and over such as the base writes after random tokens.

        Args:
            drafter: with a dense head.
            head: F32 [V, width], its rows.
            most: states over text to learn from.

        Raises:
            MtpExtractError: there are too few texts of a kind, or none of which a draft counts.
        """
        strange = random_texts(pair, tell)
        pair.say(f"reading the drafter's states over {len(corpus.trained) + len(strange[TRAINED])} texts")

        def read(texts: Sequence[Text], share: float = 1.0, *, learned: bool = False) -> Used:
            return _enough(collect(pair, drafter, texts, max(1, int(share * most)), every_convention=learned))

        used = (
            read(corpus.trained, 1 - _STRANGE, learned=True),
            read(strange[TRAINED], _STRANGE, learned=True),
        )
        watched = (read(corpus.watched), read(strange[WATCHED]))
        held_out = {name: read(texts) for name, texts in held_out_kinds(corpus, strange[HELD_OUT]).items()}
        own = held_out[OWN]
        held_out[OWN] = replace(own, text=torch.tensor(corpus.units)[own.text])
        each, seed = max(1, min(_MOST_MADE, _MADE // len(head))), pair.setting.seed
        made = made_states(head, used[1], each, seed, sure=False)
        return cls(used, watched, held_out, made, made_states(head, watched[1], _CHECKED, seed + 1, sure=True))


def _enough(used: Used) -> Used:
    if not len(used):
        raise MtpExtractError(
            "expected text that the base would write, found none of which a draft counts; give other text",
            remedies=("text", "prompts"),
        )
    return used


def random_texts(pair: Pair, tell: Callable[[Status], None] = lambda status: None) -> Mapping[str, list[Text]]:
    """By side, what the base writes after random tokens, none of them special.

    Raises:
        MtpExtractError: the base's context is too short, or it ends such texts at once.
    """
    setting, tokenizer = pair.setting, pair.loaded.tokenizer
    special = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", ())}
    usual = [token for token in range(min(pair.base.vocab_size, len(tokenizer))) if token not in special]
    opened = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    generator = torch.Generator().manual_seed(setting.seed)
    items = []
    for number in range(_PROMPTS):
        drawn = torch.randint(len(usual), (_LENGTHS[number % len(_LENGTHS)],), generator=generator)
        items.append((*opened, *(usual[index] for index in drawn.tolist())))
    writing = Writing(
        generator=pair.generator,
        folder=setting.work / "text",
        fingerprint=pair.base_fingerprint,
        new_tokens=min(setting.new_tokens, _NEW_TOKENS),
        temperature=setting.temperature,
        seed=setting.seed,
        batch=setting.batch,
        chat_template=False,
    )
    pair.say(f"continuing {len(items)} prompts of random tokens")
    writing.prepare(items, tell)
    written = [(side_of(str(list(item))), text) for item, text in zip(items, writing.texts(items), strict=True)]
    sides, learned = dict[str, list[Text]](), list[Text]()
    # After random tokens a base soon writes the same loops: one that was learned shows nothing.
    for side in (TRAINED, WATCHED, HELD_OUT):
        own = [pair for pair in written if pair[0] == side]
        sides[side] = [text for _, text in new_texts(own, setting.draft_steps, learned)]
        learned += sides[side]
    if not all(sides.values()):
        raise MtpExtractError(
            f"expected the base to write more than {setting.draft_steps} tokens after random ones, found that it ends "
            "nearly all such texts at once, or repeats itself: on other text than yours a head cannot be checked; "
            "keep the dense one"
        )
    return sides


def held_out_kinds(corpus: Corpus, strange: Sequence[Text]) -> Mapping[str, Sequence[Text]]:
    """Texts by kind that nothing is learned from or chosen by; kinds without any left out.

    Args:
        strange: held out, after random tokens.
    """
    kinds = {
        OWN: corpus.held_out[: corpus.own],
        SHIPPED: corpus.held_out[corpus.own :],
        f"temperature {corpus.other_temperature:g}": corpus.otherwise,
        RANDOM: strange,
    }
    return {name: texts for name, texts in kinds.items() if texts}
