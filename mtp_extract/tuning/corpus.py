"""The texts of a training, by what they are for: trained on, watched on the way, held out to decide.

A drafter that was tuned on a text repeats it: what it gains there says nothing of text that nobody trained on. So texts
that repeat others are left out, and anchors are told apart by whether a trained text has the tokens around them too.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from mtp_extract.errors import MtpExtractError, several
from mtp_extract.evaluation.agreement import Acceptance
from mtp_extract.evaluation.intervals import LEAST_TEXTS, find_repeats
from mtp_extract.evaluation.prompts import FEW, Prompt, read_prompts, shipped_prompts, spread
from mtp_extract.progress import SILENT, Reporter
from mtp_extract.serving.client import Server
from mtp_extract.speculate.teacher import Text
from mtp_extract.tuning.pair import Pair
from mtp_extract.tuning.plan import TuningPlan
from mtp_extract.tuning.text import (
    PromptTokens,
    Writer,
    compare_with_base,
    compute_stable_hash,
    connect_writer,
    encode_human_texts,
)

TRAINED = "trained"
WATCHED = "watched"  # measured during training, to keep the best weights
HELD_OUT = "held out"  # measured before and after, to save or refuse
SHIPPED = "shipped"  # where the prompts are a user's: measured like HELD_OUT, to see whether other workloads get worse

_BRANCHES = 3  # positions of a text from which the base continues once more
_SEEN_LENGTH = 8  # tokens of a sequence that training has seen or not: those that end with a round's last draft
_SHARES = ((0.08, WATCHED), (0.2, HELD_OUT))  # upper bounds of the hash of a source, as shares of its range
_LEAST = {TRAINED: 4, WATCHED: 4, HELD_OUT: LEAST_TEXTS}  # texts of each side; of fewer held out there is no interval
_MOST_WATCHED = 32  # texts that are measured again and again, on the way


def split_of(source: str) -> str:
    """:data:`TRAINED`, :data:`WATCHED` or :data:`HELD_OUT`: by a hash of a prompt's source, so that it stays the same
    when prompts are added."""
    share = int.from_bytes(sha256(source.encode("utf-8", "backslashreplace")).digest()[:8], "big") / 2**64
    return next((side for bound, side in _SHARES if share < bound), TRAINED)


@dataclass(frozen=True)
class Corpus:
    # to train on, in equal shares: what the base writes as it is served; what it writes at the other temperature,
    # prompts included; what it writes, greedily, from within the latter
    kinds: tuple[tuple[Text, ...], ...]
    watched: tuple[Text, ...]  # to be measured on the way
    held_out: tuple[tuple[Prompt, Text], ...]  # to be measured before and after, with the prompt or text by people
    own_count: int  # so many of the held-out texts, the first ones, are of the workloads that are trained on
    text_from: Mapping[str, Any] | None = None  # who wrote the texts if not the base, and how far it would have

    @property
    def trained(self) -> tuple[Text, ...]:
        return tuple(chain.from_iterable(self.kinds))

    @cached_property
    def sequences(self) -> frozenset[int]:
        """Of every sequence of tokens that training has seen, its number."""
        return frozenset(chain.from_iterable(_hash_sequences(text.tokens) for text in self.trained))

    def compute_score(self, watched: Acceptance) -> float:
        """What the best is chosen by, of a drafter measured on the watched texts.

        Teacher-forced tokens per round where training has seen the tokens and where it has not, half each: a drafter
        that goes on learning what it has seen gets worse elsewhere. Over all alike where too few texts have either.
        """
        trained_on = was_trained_on(watched, self.watched, self.sequences)
        parts = [watched.where(rows) for rows in (trained_on, ~trained_on)]
        if any(part.texts < LEAST_TEXTS for part in parts):
            return watched.teacher_forced
        return sum(part.teacher_forced for part in parts) / 2


def was_trained_on(measured: Acceptance, texts: Sequence[Text], trained: Container[int]) -> Tensor:
    """Bool [N]: of each anchor of ``texts``, whether the 8 tokens that end with its last draft are ``trained`` on.

    Prompts count. Near the beginning of a text that it begins there is one of the tokens. Of more than 7 drafts, those
    up to the seventh.
    """
    ends = measured.anchor + min(measured.stands.shape[1], _SEEN_LENGTH - 1)
    sequences = {index: _hash_sequences(texts[index].tokens) for index in set(measured.text.tolist())}
    anchors = zip(measured.text.tolist(), ends.tolist(), strict=True)
    return torch.tensor([sequences[index][end] in trained for index, end in anchors], dtype=torch.bool)


def _hash_sequences(tokens: Sequence[int]) -> list[int]:
    """A number for the 8 tokens that end with each: equal for equal ones, and else by a chance of 2^-60."""
    padded = (*[-2] * (_SEEN_LENGTH - 1), *tokens)
    return [hash(padded[start : start + _SEEN_LENGTH]) for start in range(len(tokens))]


def gather_texts(pair: Pair, reporter: Reporter = SILENT) -> Corpus:
    """The texts that the pair's plan asks for; what is not written yet, the base or a server writes. MtpExtractError
    where prompts or texts are too few, or a server has another base."""
    plan = pair.plan
    sides = split_prompts(plan)
    with connect_writer(plan) as server:
        writer, written = _write_sides(pair, sides, server, reporter)
        texts = {side: [text for of, _, text in written if of == side] for side in sides}
        prompts = [text.prompt for text in texts[TRAINED]]

        text_from = None
        if server or plan.text:
            # How far the base at hand would have written the same.
            greedy = (
                replace(writer, temperature=0.0).write_texts(prompts, reporter) if plan.temperature else texts[TRAINED]
            )
            text_from = compare_with_base(pair.base, greedy, server)

        kinds = [_require_enough(TRAINED, texts, plan.draft_steps)]
        if not plan.text:
            kinds += _write_further_kinds(writer, prompts, reporter)

    # Of texts that are alike the first one's prompt counts.
    item_of = {text: item for _, item, text in reversed(written)}
    return _build_corpus(kinds, texts, item_of, plan.draft_steps, text_from)


def _build_corpus(
    kinds: Sequence[list[Text]],
    texts: Mapping[str, Sequence[Text]],
    item_of: Mapping[Text, Prompt],
    steps: int,
    text_from: Mapping[str, Any] | None,
) -> Corpus:
    """The corpus that learns ``kinds``: a text that was learned, or chose the best, decides nothing."""
    learned = list(chain.from_iterable(kinds))
    watched = _require_enough(WATCHED, texts, steps, learned)[:_MOST_WATCHED]
    held_out = _require_enough(HELD_OUT, texts, steps, [*learned, *watched])
    shipped = filter_new_texts(texts[SHIPPED], steps, [*learned, *watched, *held_out])
    measured = tuple((item_of[text], text) for text in (*held_out, *shipped))
    return Corpus(tuple(tuple(kind) for kind in kinds if kind), tuple(watched), measured, len(held_out), text_from)


def _write_sides(
    pair: Pair, sides: Mapping[str, Sequence[Prompt]], server: Server | None, reporter: Reporter
) -> tuple[Writer, list[tuple[str, Prompt, Text]]]:
    """What writes; and the texts, each with its side and the prompt or text by people that it comes from."""
    plan = pair.plan
    items = [(side, item) for side in sides for item in sides[side]]
    # Texts by people are there already: beside them only the shipped prompts are continued.
    asked = [(side, item) for side, item in items if side == SHIPPED or not plan.text]
    prompts = [pair.codec.encode(item.content, chat_template=plan.chat_template) for _, item in asked]
    contents = {prompt: item.content for prompt, (_, item) in zip(prompts, asked, strict=True)}
    writer = Writer(pair, plan.temperature, plan.new_tokens, server, contents)

    by_people = [(side, item) for side, item in items if side != SHIPPED and plan.text]
    texts = [(side, item, text) for side, item in by_people for text in encode_human_texts(item, writer)]
    continued = writer.write_texts(prompts, reporter)
    return writer, [*texts, *((side, item, text) for (side, item), text in zip(asked, continued, strict=True))]


def split_prompts(plan: TuningPlan) -> dict[str, list[Prompt]]:
    """The prompts, or texts by people, by side; MtpExtractError where they are too few."""
    file = plan.prompts or plan.text
    items = read_prompts(file, chat_template=plan.chat_template) if file else shipped_prompts()
    sides = {side: [item for item in items if split_of(item.source) == side] for side in _LEAST}
    sides[WATCHED] = spread(sides[WATCHED], _MOST_WATCHED)
    short = [side for side, prompts in sides.items() if len({item.key for item in prompts}) < _LEAST[side]]
    if short:
        raise _build_shortage_error(items, " and ".join(f"{_LEAST[side]} to be {side}" for side in short))
    # Of another name, as a user's own workload may be called "code" too.
    shipped = shipped_prompts(FEW) if file else ()
    return {**sides, SHIPPED: [replace(item, workload=f"{item.workload} (shipped)") for item in shipped]}


def _build_shortage_error(items: Sequence[Prompt], wanted: str) -> MtpExtractError:
    prompts = len({item.key for item in items})
    sources = len({item.source for item in items})
    advice = "Give some hundred"
    if sources < prompts:
        advice = (
            "All prompts with one value of `source` are on one side, so that no document is both trained on and "
            "held out. Give each document a value of its own, or leave `source` out"
        )
    return MtpExtractError(
        f"expected enough prompts for at least {wanted}, found {several(prompts, 'prompt')} of "
        f"{several(sources, 'source')}, and a hash of the source decides the side. {advice}.",
        remedies=("prompts", "text"),
    )


def _write_further_kinds(writer: Writer, prompts: Sequence[PromptTokens], reporter: Reporter) -> Iterator[list[Text]]:
    """What is learned besides the text as ``writer`` has it: text at the other temperature, and text within that.

    Text that is written greedily soon repeats itself, and the base has little else to say after a prompt: from within
    text that was drawn it has more.
    """
    plan = writer.pair.plan
    drawn = replace(writer, temperature=0.0 if writer.temperature else 1.0).write_texts(prompts, reporter)
    # What stands in a prompt is as good to learn from as what the base drew.
    yield filter_new_texts([replace(text, prompt_length=1) for text in drawn], plan.draft_steps)
    if writer.temperature or writer.server is not None:
        return
    short = replace(writer, new_tokens=max(2, writer.new_tokens // 2))
    branches = [branch for text in drawn for branch in _choose_branches(text, short)]
    yield filter_new_texts(short.write_texts(branches, reporter, "positions within these"), plan.draft_steps)


def _choose_branches(text: Text, writer: Writer) -> list[PromptTokens]:
    """Beginnings of ``text`` that ``writer`` has room to continue, at random positions."""
    room = writer.pair.base.config.max_position_embeddings - writer.new_tokens
    ends = range(text.prompt_length, min(len(text.tokens), room + 1))
    generator = torch.Generator().manual_seed(compute_stable_hash([writer.pair.plan.seed, *text.tokens]))
    chosen = torch.randperm(len(ends), generator=generator)[:_BRANCHES].sort().values.tolist()
    return [text.tokens[: ends[index]] for index in chosen]


def filter_new_texts(texts: Sequence[Text], steps: int, earlier: Sequence[Text] = ()) -> list[Text]:
    """Those of ``texts`` with ``steps`` drafts to make that repeat none of ``earlier``, nor one before them."""
    candidates = [*earlier, *(text for text in texts if len(text.anchors) >= steps)]
    repeated = find_repeats([text.tokens for text in candidates])
    return [text for index, text in enumerate(candidates) if index >= len(earlier) and index not in repeated]


def _require_enough(
    side: str, texts: Mapping[str, Sequence[Text]], steps: int, earlier: Sequence[Text] = ()
) -> list[Text]:
    fresh = filter_new_texts(texts[side], steps, earlier)
    if len(fresh) < _LEAST[side]:
        raise MtpExtractError(
            f"expected at least {_LEAST[side]} texts of more than {steps} tokens to be {side}, found {len(fresh)}: the "
            "others are shorter, or repeat one that counts. Give other ones.",
            remedies=("prompts", "text"),
        )
    return fresh
