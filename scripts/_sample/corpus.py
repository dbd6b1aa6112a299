"""Training text and tokenizer: the Python standard library's source."""

# The tools below carry no type hints, and are not installed where the types are checked.
# mypy: disable-error-code="import-not-found, import-untyped, misc, no-untyped-call"

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>")
PAD, EOS, BOS, UNK, TURN_START, TURN_END = range(len(SPECIAL_TOKENS))
SPACE = "\u2581"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|turn>"
    "{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n{{ m['content'] }}<turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)
SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "__pycache__", "lib2to3", "encodings"})


def standard_library_files(limit_bytes: int) -> list[Path]:
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
    # Merges stay within one word, one run of punctuation or one indentation.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(rf"\n?{SPACE}+|\n|\w+|[^\w\s]+"), "isolated")
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


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Tensor:
    """All texts as one int64 vector of token ids, each text opened by <bos>."""
    pieces: list[int] = []
    for text in texts:
        pieces.append(BOS)
        pieces.extend(tokenizer(text, add_special_tokens=False)["input_ids"])
    return torch.tensor(pieces, dtype=torch.int64)


def batches(tokens: Tensor, length: int, count: int, generator: torch.Generator) -> Tensor:
    """``[count, length]`` windows at random places, each starting with <bos>."""
    starts = torch.randint(0, tokens.numel() - length, (count,), generator=generator)
    window = torch.stack([tokens[start : start + length] for start in starts.tolist()])
    window[:, 0] = BOS
    return window
