"""An untrained EAGLE-3 head for a base: its shape, its vocabulary, and its first weights."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from mtp_extract.architecture import list_shapes
from mtp_extract.architecture.eagle3 import EAGLE3, FUSED, Eagle3Config
from mtp_extract.architecture.roles import INDEX, NORM
from mtp_extract.checkpoint.checkpoint import Checkpoint
from mtp_extract.checkpoint.files import write_file
from mtp_extract.checkpoint.weight import Weight, wrap_array
from mtp_extract.formats import load_format
from mtp_extract.formats.eagle3 import WEIGHTS_FILE
from mtp_extract.io.place import make_own_files, stage_output
from mtp_extract.pipeline.check import CheckpointDirectory
from mtp_extract.speculate.target import Base
from mtp_extract.speculate.teacher import Text
from mtp_extract.tuning.pair import Pair

_ROPE_THETA = 1e6  # that of the base's full layers; the head has one RoPE, over the whole head dimension
_LEAST_DEEP = 9  # layers from which the engines' default 2, n // 2, n − 3 is a low, a middle and a high layer
_MEASURED = 32  # texts over which the size of states is measured


def choose_base_layers(count: int) -> tuple[int, ...]:
    """Return the layers whose input the head reads, of a base with ``count`` layers.

    They are the engines' default where the base is deep enough, else a third of the depth apart. The highest is the
    input of the last layer at most: llama.cpp hands out no later state.
    """
    if count >= _LEAST_DEEP:
        return 2, count // 2, count - 3
    return tuple(max(1, (count - 1) * part // FUSED) for part in range(1, FUSED + 1))


def build_head_config(text: Any, draft_vocab_size: int, name: str | None) -> Eagle3Config:
    """Return a head's config: width and feed-forward size of the base ``name``, heads of its first layer.

    ``text`` is the base's text config. The states are normalized together before they are fused, since neither
    llama.cpp nor mlx-vlm supports a norm for each of them (``fc_norm``).
    """
    first = text.per_layer_config[0]
    width = int(text.hidden_size)
    vocabulary = int(text.vocab_size)
    heads = math.gcd(int(text.num_attention_heads), width)
    return Eagle3Config(
        backbone_hidden_size=width,
        hidden_size=width,
        intermediate_size=int(text.intermediate_size),
        vocab_size=vocabulary,
        draft_vocab_size=min(draft_vocab_size, vocabulary),
        num_heads=heads,
        num_kv_heads=math.gcd(int(first.num_key_value_heads), heads),
        head_dim=int(first.head_dim),
        base_layers=choose_base_layers(len(text.layer_types)),
        rope_theta=_ROPE_THETA,
        rms_norm_eps=float(text.rms_norm_eps),
        norm_before_fc=True,
        max_position_embeddings=int(text.max_position_embeddings),
        base=name,
    )


def choose_draft_tokens(texts: Iterable[Text], count: int, vocabulary: int, always: Iterable[int] = ()) -> list[int]:
    """Return the ``count`` tokens that the base wrote most often, ascending; the lowest tokens fill the rest.

    Tokens in ``always`` (those that end a text) are included however rare they are.
    """
    counts = Counter(token for text in texts for token in text.continuation)
    ranked = sorted(range(vocabulary), key=lambda token: -counts[token])
    return sorted(list(dict.fromkeys([*always, *ranked]))[:count])


@torch.no_grad()
def measure_state_sizes(base: Base, layers: Sequence[int], texts: Sequence[Text]) -> list[float]:
    """Return for each layer the root mean square of its input states over some of ``texts``.

    In Gemma 4 it differs 100-fold between layers. The geometric mean over tokens is taken, since a first token's state
    can be a thousand times as large as all others.
    """
    # exp(mean over tokens of log sqrt(mean over the width of x²))
    logarithms = []
    for text in texts[:_MEASURED]:
        states = base.feed(torch.tensor([text.tokens], device=base.device), layers).layers
        sizes = torch.stack([states[layer][0].double().square().mean(-1).sqrt().cpu() for layer in layers])
        logarithms.append(sizes.clamp(min=1e-6).log())
    return list(torch.cat(logarithms, dim=1).mean(dim=1).exp().tolist())


def add_untrained_head(pair: Pair, texts: Sequence[Text]) -> None:
    """Write an untrained head into the work folder, and load it as the pair's drafter."""
    plan = pair.plan
    directory = plan.kept_in / "untrained-eagle3-head"
    if pair.accelerator.is_main_process:
        name = None if Path(plan.base).is_dir() else plan.base
        head = build_untrained_head(pair.base, texts, plan.draft_vocab, name, pair.loaded.dtype, plan.seed)
        files = load_format(EAGLE3).plan(head, head.dtype).files
        # A head that an earlier training left there is replaced.
        with stage_output(
            directory, overwrite=True, listed=make_own_files(WEIGHTS_FILE, [file.name for file in files])
        ) as stage:
            for file in files:
                write_file(stage, file)
    pair.accelerator.wait_for_everyone()
    pair.load_origin(CheckpointDirectory.of(directory))


@torch.no_grad()
def build_untrained_head(
    base: Base, texts: Sequence[Text], draft_vocab_size: int, name: str | None, dtype: str, seed: int
) -> Checkpoint:
    """Return a head for ``base``: LM head rows and final norm of the base, an input norm that equalizes the layers'
    states, and random matrices.

    Args:
        texts: the base's text, from which token frequencies and state sizes are measured.
        draft_vocab_size: how many tokens the head may propose, at most the base's vocabulary.
        name: of the base, whose embeddings the head shares.
        dtype: of the base's weights.
    """
    config = build_head_config(base.config, draft_vocab_size, name)
    rows = np.array(choose_draft_tokens(texts, config.draft_vocab_size, config.vocab_size, base.stop_token_ids))
    sizes = measure_state_sizes(base, config.base_layers, texts)
    mean_size = math.sqrt(sum(size * size for size in sizes) / len(sizes))
    from_base = {
        "input_norm": torch.tensor([mean_size / size for size in sizes]).repeat_interleave(config.backbone_hidden_size),
        "lm_head": base.model.lm_head.weight[torch.from_numpy(rows)],
        "final_norm": base.model.get_decoder().norm.weight,
    }
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Weight] = {}
    for role, shape in list_shapes(config).items():
        if role.kind == INDEX:
            tensors[role.name] = wrap_array(rows - np.arange(len(rows)))
            continue
        if role.name in from_base:
            weight = from_base[role.name]
        elif role.kind == NORM:
            weight = torch.ones(*shape)
        else:
            # The output of a matrix is as large as its input.
            weight = torch.randn(*shape, generator=generator) * shape[1] ** -0.5
        tensors[role.name] = wrap_array(np.array(weight.detach().float().cpu().numpy()))
    return Checkpoint(config, MappingProxyType(tensors), "bf16" if dtype == "bfloat16" else "f32")
