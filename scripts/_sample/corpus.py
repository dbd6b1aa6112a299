"""Training text and tokenizer: tasks, and the Python standard library's source."""

# The tools below carry no type hints, and are not installed where the types are checked.
# mypy: disable-error-code="import-not-found, import-untyped, misc, no-untyped-call"

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from .tasks import KINDS, LETTERS, Task

SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>")
PAD, EOS, BOS, UNK, TURN_START, TURN_END = range(len(SPECIAL_TOKENS))
SPACE = "\u2581"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|turn>"
    "{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n{{ m['content'] }}<turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)
QUESTION_WEIGHT = 0.1
SOURCE_LINES = 20
GROUP = 8
"""Batches that are sorted by length together."""
SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "__pycache__", "lib2to3", "encodings"})


def list_standard_library_files(limit_bytes: int) -> list[Path]:
    """Python sources of the running interpreter, in path order, up to ``limit_bytes`` in all."""
    root = Path(sysconfig.get_paths()["stdlib"])
    chosen: list[Path] = []
    total = 0
    for path in sorted(root.rglob("*.py")):
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts[:-1]):
            total += path.stat().st_size
            if total > limit_bytes:
                break
            chosen.append(path)
    if not chosen:
        raise FileNotFoundError(f"no Python source under {root}; the sample is trained on it")
    return chosen


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-fallback BPE tokenizer of exactly ``vocab_size`` tokens, in the manner of Gemma's."""
    byte_tokens = [f"<0x{value:02X}>" for value in range(256)]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    # Merges stay within one word in lower case, one run of punctuation or one indentation. Digits, capitals and
    # brackets are tokens of their own, so that a task can be about each.
    pieces = rf"\n?{SPACE}+|\n|\d|[A-Z]|[^\W\dA-Z]+|[()\[\]{{}}]|[^\w\s()\[\]{{}}]+"
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pieces), "isolated")
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIAL_TOKENS, *byte_tokens],
        limit_alphabet=vocab_size - len(SPECIAL_TOKENS) - len(byte_tokens) - 64,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the tokenizer has {tokenizer.get_vocab_size()} tokens, wanted {vocab_size}: more text")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def mix_texts(texts: Sequence[str], characters: int, draw: random.Random) -> list[str]:
    """Text to train the tokenizer on: about half of it Python source, the rest tasks of every kind."""
    chosen, total = [], 0
    lines = [text.splitlines() for text in texts]
    while total < characters:
        task = draw.choice(KINDS)(draw, draw.choice(lines))
        source = draw.choice(lines)
        start = draw.randrange(len(source))
        chosen += [task.prompt, task.answer, "\n".join(source[start : start + SOURCE_LINES])]
        total += sum(map(len, chosen[-3:]))
    return chosen


@dataclass(frozen=True)
class Document:
    """Token ids of a text from <bos> on, and what each weighs in the loss."""

    ids: tuple[int, ...]
    weights: tuple[float, ...]


def encode_task(tokenizer: PreTrainedTokenizerFast, task: Task) -> Document:
    """A task in the chat format, closed by the end of the turn and <eos>. The question weighs little: it is drawn."""
    turn = f"<bos><|turn>user\n{task.prompt}<turn|>\n<|turn>model\n"
    question = tokenizer(turn, add_special_tokens=False)["input_ids"]
    answer = tokenizer(task.answer, add_special_tokens=False)["input_ids"]
    return Document(
        (*question, *answer, TURN_END, EOS),
        (*[QUESTION_WEIGHT] * len(question), *[1.0] * (len(answer) + 2)),
    )


def draw_drill(tokenizer: PreTrainedTokenizerFast, draw: random.Random) -> Document:
    """Letters in any order, twice: what teaches to copy in a few hundred steps, and hardly anything else does."""
    letters = "".join(draw.sample(LETTERS, draw.randint(14, len(LETTERS))))
    ids = tokenizer(letters, add_special_tokens=False)["input_ids"]
    return Document((BOS, *ids, TURN_START, *ids, EOS), (*[0.0] * (len(ids) + 2), *[1.0] * (len(ids) + 1)))


def encode_source(tokenizer: PreTrainedTokenizerFast, text: str, length: int) -> Document:
    """The beginning of a Python source text."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"][: length - 1]
    return Document((BOS, *ids), (1.0,) * (len(ids) + 1))


def draw_documents(
    tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], count: int, length: int, draw: random.Random
) -> list[Document]:
    """``count`` documents of at most ``length`` tokens, of every kind as many, Python source among them."""
    documents: list[Document] = []
    lines = [text.splitlines() for text in texts]
    while len(documents) < count:
        kind = draw.randrange(len(KINDS) + 1)
        source = draw.choice(lines)
        if kind == len(KINDS):
            start = draw.randrange(len(source))
            document = encode_source(tokenizer, "\n".join(source[start : start + SOURCE_LINES]), length * 2 // 3)
        else:
            document = encode_task(tokenizer, KINDS[kind](draw, source))
        if len(document.ids) <= length:
            documents.append(document)
    return documents


def draw_batches(
    documents: Sequence[Document], count: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Without end, ``count`` documents of similar length: ids and weights ``[count, longest]``, padded behind."""
    while True:
        order = torch.randperm(len(documents), generator=generator).tolist()
        for first in range(0, len(order) - len(order) % (GROUP * count), GROUP * count):
            group = sorted(order[first : first + GROUP * count], key=lambda index: len(documents[index].ids))
            for place in torch.randperm(GROUP, generator=generator).tolist():
                chosen = [documents[index] for index in group[place * count : (place + 1) * count]]
                longest = max(len(document.ids) for document in chosen)
                ids = torch.full((count, longest), PAD)
                weights = torch.zeros(count, longest)
                for row, document in enumerate(chosen):
                    ids[row, : len(document.ids)] = torch.tensor(document.ids)
                    weights[row, : len(document.ids)] = torch.tensor(document.weights)
                yield ids, weights
