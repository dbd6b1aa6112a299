"""Collects the texts of a training and splits them: train on, evaluate during training, hold out for the decision.

A tuned drafter repeats the text it was tuned on, so a gain there says nothing about new text. Texts that repeat others
are therefore dropped, and each anchor is marked by whether a training text also has the tokens around it.
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

from mtp_extract.errors import MtpExtractError, format_count
from mtp_extract.evaluation.agreement import Acceptance
from mtp_extract.evaluation.intervals import LEAST_TEXTS, find_repeats
from mtp_extract.evaluation.prompts import FEW_PER_WORKLOAD, Prompt, load_shipped_prompts, pick_evenly, read_prompts
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

_BRANCHES = 3  # positions in a sampled text from which the base writes a greedy continuation
_SEEN_LENGTH = 8  # tokens of the sequences that are looked up in the training texts; they end with a round's last draft
_SHARES = ((0.08, WATCHED), (0.2, HELD_OUT))  # upper bounds of the hash of a source, as shares of its range
_LEAST = {TRAINED: 4, WATCHED: 4, HELD_OUT: LEAST_TEXTS}  # texts of each side; fewer held-out texts have no interval
_MOST_WATCHED = 32  # texts, as every evaluation measures all of them


def choose_side(source: str) -> str:
    """Return :data:`TRAINED`, :data:`WATCHED` or :data:`HELD_OUT` for a prompt of this source.

    A hash of the source decides, so prompts that are added later do not move the others.
    """
    share = int.from_bytes(sha256(source.encode("utf-8", "backslashreplace")).digest()[:8], "big") / 2**64
    return next((side for bound, side in _SHARES if share < bound), TRAINED)


@dataclass(frozen=True)
class Corpus:
    # to train on, in equal shares: what the base writes at the serving temperature; what it writes at the other
    # temperature, prompts included; what it writes greedily from positions within the latter
    kinds: tuple[tuple[Text, ...], ...]
    watched: tuple[Text, ...]  # to be measured during training
    held_out: tuple[tuple[Prompt, Text], ...]  # to be measured before and after, with its prompt or human text
    own_count: int  # the first texts of `held_out`, which are of the workloads that are trained on
    text_from: Mapping[str, Any] | None = None  # see `compare_with_base`; None where the base wrote

    @property
    def trained(self) -> tuple[Text, ...]:
        return tuple(chain.from_iterable(self.kinds))

    @cached_property
    def sequences(self) -> frozenset[int]:
        """Hashes of all 8-token sequences in the training texts."""
        return frozenset(chain.from_iterable(_hash_sequences(text.tokens) for text in self.trained))

    def compute_score(self, watched: Acceptance) -> float:
        """Return the score that the best weights have highest, from a measurement on the watched texts.

        It is the mean of two figures: teacher-forced tokens per round where training has seen the tokens, and where it
        has not, since a drafter that only memorizes gets worse elsewhere. Where too few texts have anchors of one of
        the two kinds, it is the figure over all anchors.
        """
        trained_on = was_trained_on(watched, self.watched, self.sequences)
        parts = [watched.where(rows) for rows in (trained_on, ~trained_on)]
        if any(part.texts < LEAST_TEXTS for part in parts):
            return watched.teacher_forced
        return sum(part.teacher_forced for part in parts) / 2


def was_trained_on(measured: Acceptance, texts: Sequence[Text], trained: Container[int]) -> Tensor:
    """Return for each anchor of ``texts`` whether the 8 tokens that end with its last draft are ``trained``, bool [N].

    Prompts count as trained text. Near its beginning a text has fewer than 8 tokens: then they must also begin a
    training text. With more than 7 drafts, the sequence ends at the seventh.
    """
    ends = measured.anchor + min(measured.stands.shape[1], _SEEN_LENGTH - 1)
    sequences = {index: _hash_sequences(texts[index].tokens) for index in set(measured.text.tolist())}
    anchors = zip(measured.text.tolist(), ends.tolist(), strict=True)
    return torch.tensor([sequences[index][end] in trained for index, end in anchors], dtype=torch.bool)


def _hash_sequences(tokens: Sequence[int]) -> list[int]:
    """Return for each token a hash of the 8 tokens that end with it; unequal ones collide by a chance of 2^-60."""
    padded = (*[-2] * (_SEEN_LENGTH - 1), *tokens)
    return [hash(padded[start : start + _SEEN_LENGTH]) for start in range(len(tokens))]


def gather_texts(pair: Pair, reporter: Reporter = SILENT) -> Corpus:
    """Return the texts that the pair's plan asks for; the base or a server writes those that are not stored yet.

    Raises:
        MtpExtractError: there are too few prompts or texts, or a server has another base.
    """
    plan = pair.plan
    sides = split_prompts(plan)
    with connect_writer(plan) as server:
        writer, written = _write_sides(pair, sides, server, reporter)
        texts = {side: [text for of, _, text in written if of == side] for side in sides}
        prompts = [text.prompt for text in texts[TRAINED]]

        text_from = None
        if server or plan.text:
            greedy = (
                replace(writer, temperature=0.0).write_texts(prompts, reporter) if plan.temperature else texts[TRAINED]
            )
            text_from = compare_with_base(pair.base, greedy, server)

        kinds = [_require_enough(TRAINED, texts, plan.draft_steps)]
        if not plan.text:
            kinds += _write_further_kinds(writer, prompts, reporter)

    # Equal texts get the prompt of the first of them.
    item_of = {text: item for _, item, text in reversed(written)}
    return _build_corpus(kinds, texts, item_of, plan.draft_steps, text_from)


def _build_corpus(
    kinds: Sequence[list[Text]],
    texts: Mapping[str, Sequence[Text]],
    item_of: Mapping[Text, Prompt],
    steps: int,
    text_from: Mapping[str, Any] | None,
) -> Corpus:
    """Return the corpus that trains on ``kinds``; watched and held-out texts repeat no text of an earlier side."""
    learned = list(chain.from_iterable(kinds))
    watched = _require_enough(WATCHED, texts, steps, learned)[:_MOST_WATCHED]
    held_out = _require_enough(HELD_OUT, texts, steps, [*learned, *watched])
    shipped = filter_new_texts(texts[SHIPPED], steps, [*learned, *watched, *held_out])
    measured = tuple((item_of[text], text) for text in (*held_out, *shipped))
    return Corpus(tuple(tuple(kind) for kind in kinds if kind), tuple(watched), measured, len(held_out), text_from)


def _write_sides(
    pair: Pair, sides: Mapping[str, Sequence[Prompt]], server: Server | None, reporter: Reporter
) -> tuple[Writer, list[tuple[str, Prompt, Text]]]:
    """Return the writer, and all texts: each with its side and its prompt or human text."""
    plan = pair.plan
    items = [(side, item) for side in sides for item in sides[side]]
    # Human texts need no writer: beside them only the shipped prompts are continued.
    to_continue = [(side, item) for side, item in items if side == SHIPPED or not plan.text]
    prompts = [pair.codec.encode(item.content, chat_template=plan.chat_template) for _, item in to_continue]
    contents = {prompt: item.content for prompt, (_, item) in zip(prompts, to_continue, strict=True)}
    writer = Writer(pair, plan.temperature, plan.new_tokens, server, contents)

    by_people = [(side, item) for side, item in items if side != SHIPPED and plan.text]
    texts = [(side, item, text) for side, item in by_people for text in encode_human_texts(item, writer)]
    continued = writer.write_texts(prompts, reporter)
    return writer, [*texts, *((side, item, text) for (side, item), text in zip(to_continue, continued, strict=True))]


def split_prompts(plan: TuningPlan) -> dict[str, list[Prompt]]:
    """Return the prompts or human texts by side; raise MtpExtractError if there are too few."""
    file = plan.prompts or plan.text
    items = read_prompts(file, chat_template=plan.chat_template) if file else load_shipped_prompts()
    sides = {side: [item for item in items if choose_side(item.source) == side] for side in _LEAST}
    sides[WATCHED] = pick_evenly(sides[WATCHED], _MOST_WATCHED)
    short = [side for side, prompts in sides.items() if len({item.key for item in prompts}) < _LEAST[side]]
    if short:
        raise _build_shortage_error(items, " and ".join(f"{_LEAST[side]} to be {side}" for side in short))
    # Under another name, as a user's workload may be called "code" too.
    shipped = load_shipped_prompts(FEW_PER_WORKLOAD) if file else ()
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
        f"expected enough prompts for at least {wanted}, found {format_count(prompts, 'prompt')} of "
        f"{format_count(sources, 'source')}, and a hash of the source decides the side. {advice}.",
        remedies=("prompts", "text"),
    )


def _write_further_kinds(writer: Writer, prompts: Sequence[PromptTokens], reporter: Reporter) -> Iterator[list[Text]]:
    """Yield more text to train on: at the other temperature, and greedy text from positions within that.

    Greedy text soon repeats itself, and a prompt has only one greedy continuation. Sampled text has many positions from
    which greedy text begins anew.
    """
    plan = writer.pair.plan
    drawn = replace(writer, temperature=0.0 if writer.temperature else 1.0).write_texts(prompts, reporter)
    # The tokens of a prompt are as good to train on as those that the base drew.
    yield filter_new_texts([replace(text, prompt_length=1) for text in drawn], plan.draft_steps)
    if writer.temperature or writer.server is not None:
        return
    short = replace(writer, new_tokens=max(2, writer.new_tokens // 2))
    branches = [branch for text in drawn for branch in _choose_branches(text, short)]
    yield filter_new_texts(short.write_texts(branches, reporter, "positions within these"), plan.draft_steps)


def _choose_branches(text: Text, writer: Writer) -> list[PromptTokens]:
    """Cut ``text`` at random positions from which ``writer`` has room to continue."""
    room = writer.pair.base.config.max_position_embeddings - writer.new_tokens
    ends = range(text.prompt_length, min(len(text.tokens), room + 1))
    generator = torch.Generator().manual_seed(compute_stable_hash([writer.pair.plan.seed, *text.tokens]))
    chosen = torch.randperm(len(ends), generator=generator)[:_BRANCHES].sort().values.tolist()
    return [text.tokens[: ends[index]] for index in chosen]


def filter_new_texts(texts: Sequence[Text], steps: int, earlier: Sequence[Text] = ()) -> list[Text]:
    """Return the ``texts`` that have room for ``steps`` drafts and repeat neither ``earlier`` nor a previous text."""
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
