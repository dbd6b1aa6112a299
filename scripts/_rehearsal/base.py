"""A base with random weights in transformers' form: BF16, in shards with an index, and a tokenizer of its size.

Written a few rows at a time: it takes no more memory than a piece of a matrix. Weights are drawn from 256 quantiles of
a normal distribution, whose deviation is the root of the row's length and differs a little from row to row; a forward
pass neither explodes nor vanishes, and says nothing.
"""

from __future__ import annotations

import itertools
import json
import string
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from mtp_extract.checkpoint.dtypes import DTYPES

from .shapes import FULL, SLIDING, Shape, Weight

LARGEST_SHARD = 2_000_000_000
_PIECE = 1 << 23
_SPREADS = 16
SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|turn>{{ message['role'] }}\n{{ message['content'] }}<turn|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)


def write_base(shape: Shape, out: Path) -> None:
    """Write a base of ``shape`` into the new directory ``out``; the same shape gives the same bytes."""
    out.mkdir(parents=True)
    (out / "config.json").write_text(json.dumps(build_config(shape), indent=2))
    generation = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0, "_from_model_config": True}
    (out / "generation_config.json").write_text(json.dumps(generation))
    _write_weights(shape, out)
    write_tokenizer(shape.vocab, out)


def build_config(shape: Shape) -> dict[str, Any]:
    """Build the base's ``config.json``."""
    text = {
        "model_type": "gemma4_text",
        "vocab_size": shape.vocab,
        "vocab_size_per_layer_input": shape.vocab,
        "hidden_size": shape.width,
        "hidden_size_per_layer_input": shape.per_layer,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_kv_shared_layers": shape.shared,
        "use_double_wide_mlp": shape.double_wide,
        "layer_types": shape.types,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "global_head_dim": shape.full_head_dim,
        "sliding_window": shape.window,
        "max_position_embeddings": shape.positions,
        "rms_norm_eps": 1e-6,
        "final_logit_softcapping": shape.soft_cap,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "attention_k_eq_v": False,
        "enable_moe_block": False,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "dtype": "bfloat16",
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
            FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
        },
    }
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "text_config": text,
        "vision_config": None,
        "audio_config": None,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }


def _write_weights(shape: Shape, out: Path) -> None:
    shards: list[list[Weight]] = [[]]
    filled = 0
    for tensor in shape.tensors():
        size = 2 * int(np.prod(tensor.shape))
        if shards[-1] and filled + size > LARGEST_SHARD:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += size
    names = [f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors" for number in range(len(shards))]
    generator = np.random.default_rng(0)
    for name, tensors in zip(names, shards, strict=True):
        with (out / name).open("wb") as file:
            _write_shard(file, tensors, generator)
    placed = {tensor.name: name for name, tensors in zip(names, shards, strict=True) for tensor in tensors}
    total = sum((out / name).stat().st_size for name in names)
    index = {"metadata": {"total_size": total}, "weight_map": placed}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _write_shard(file: BinaryIO, tensors: Sequence[Weight], generator: np.random.Generator) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        end = at + 2 * int(np.prod(tensor.shape))
        header[tensor.name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for tensor in tensors:
        for rows in _draw_numbers(tensor, generator):
            file.write(rows.data)


def _draw_numbers(weight: Weight, generator: np.random.Generator) -> Iterator[npt.NDArray[np.generic]]:
    """Draw the numbers of a weight in BF16, some rows at a time."""
    narrow = DTYPES["bf16"].narrow
    if not weight.deviation:
        values = weight.level * generator.uniform(0.8, 1.2, weight.shape)
        yield narrow(values.astype(np.float32), weight.name)
        return
    rows, width = weight.shape
    quantiles = np.array([NormalDist(0, weight.deviation).inv_cdf((number + 0.5) / 256) for number in range(256)])
    tables = [narrow((quantiles * (1 + 0.05 * spread)).astype(np.float32), weight.name) for spread in range(_SPREADS)]
    height = max(_SPREADS, _PIECE // width // _SPREADS * _SPREADS)
    for first in range(0, rows, height):
        count = min(height, rows - first)
        drawn = np.frombuffer(generator.bytes(count * width), np.uint8).reshape(count, width)
        piece = np.empty((count, width), tables[0].dtype)
        for spread, table in enumerate(tables):
            piece[spread::_SPREADS] = table[drawn[spread::_SPREADS]]
        yield piece


def write_tokenizer(vocab: int, out: Path) -> None:
    """A BPE tokenizer of ``vocab`` tokens as Gemma's: ``▁`` for a space, bytes for what is in no token, and for most
    tokens two merges that make it.
    """
    letters = ["▁", *string.ascii_lowercase, *string.ascii_uppercase, *string.digits, *string.punctuation, "\n"]
    tokens = {token: number for number, token in enumerate((*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))))}
    for letter in letters:
        tokens[letter] = len(tokens)
    merges: list[tuple[str, str]] = []
    level = letters
    while len(tokens) < vocab:
        pairs = itertools.islice(itertools.product(level, string.ascii_lowercase), vocab - len(tokens))
        level = []
        for left, right in pairs:
            token = left + right
            tokens[token] = len(tokens)
            merges.append((left, right))
            if len(token) > 2 and token[1:] in tokens:
                merges.append((token[0], token[1:]))
            level.append(token)
    added = [
        {
            "id": number,
            "content": token,
            "special": True,
            **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
        }
        for number, token in enumerate(SPECIAL)
    ]
    model = {"type": "BPE", "vocab": tokens, "merges": merges, "byte_fallback": True, "unk_token": "<unk>"}
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": model | {"fuse_unk": True},
    }
    (out / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False, indent=2), encoding="utf-8")
    names = dict(zip(("pad_token", "eos_token", "bos_token", "unk_token"), SPECIAL, strict=False))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 131072, **names}
    (out / "tokenizer_config.json").write_text(json.dumps(settings))
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)
