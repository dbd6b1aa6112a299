"""What the two layouts of an EAGLE-3 head have in common: a Llama configuration, tensors, and the two vocabularies."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_extract.architecture.eagle3 import Eagle3Config
from mtp_extract.architecture.roles import EAGLE3, INDEX, Role, shapes_of
from mtp_extract.checkpoint.checkpoint import INDICES, Checkpoint, Holding
from mtp_extract.checkpoint.dtypes import DTYPES
from mtp_extract.checkpoint.lazy import LazyTensor, read_indices
from mtp_extract.checkpoint.manifest import Keys, Manifest, Said, anything, at, is_whole, off, some
from mtp_extract.checkpoint.planned import OutputFile, PlannedTensor, json_text
from mtp_extract.checkpoint.stored import StoredTensor, StoredWeight, common_dtype
from mtp_extract.errors import DrafterError, UnsupportedError, escape
from mtp_extract.formats import reading
from mtp_extract.formats.eagle3_lint import LLAMA, Finding, lint
from mtp_extract.formats.holding import hold_floats
from mtp_extract.formats.transformers import UNCOMPUTED, plan_weight
from mtp_extract.io.regular import open_regular

MARKER, WEIGHTS_FILE = "config.json", "model.safetensors"
LAYOUTS = ("eagle3", "speculators")
_T2D, _D2T, _EMBED = "t2d", "d2t", "embed_tokens.weight"

# What the head has not: keys that change what engines compute, or which tensors they ask for, and the values that do
# not.
_FIXED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "attention_bias": (False, None),
        "bias": (False, None),
        "hidden_act": ("silu",),
        "layer_types": (None, ["full_attention"]),
        "logit_scale": (None, 1.0, 1),
        "mlp_bias": (False, None),
        "num_hidden_layers": (1,),
        "partial_rotary_factor": (None, 1.0, 1),
        "quantization_config": (None,),
        "rope_scaling": (None,),
        "tie_word_embeddings": (False, None),
        "use_aux_norm": (False, None),
    }
)


@dataclass(frozen=True)
class HeadFormat:
    """The directory of an EAGLE-3 head: ``config.json`` and ``model.safetensors``.

    Attributes:
        name: of the layout.
        document: ``config.json`` of a head whose weights have this transformers dtype.
        parse: the head of a parsed ``config.json``; told whether a table of embeddings lies beside it.
        besides: what ``config.json`` may say otherwise than it is written here.
    """

    name: str
    document: Callable[[Eagle3Config, str], Mapping[str, Any]]
    parse: Callable[[Mapping[str, Any], bool], Eagle3Config]
    besides: Keys
    marker: str = MARKER
    weights_file: str = WEIGHTS_FILE

    def recognizes(self, directory: Path) -> bool:
        return reading.kind_of(directory / self.marker) == self.name

    def hold(self, role: Role, tensor: LazyTensor, dtype: str) -> Holding:
        return Holding(INDICES) if role.kind == INDEX else hold_floats(tensor, dtype)

    def plan(self, checkpoint: Checkpoint, dtype: str) -> Sequence[OutputFile]:
        config = _require_head(checkpoint)
        return _plan_head(checkpoint, config, dtype, self.name, self.document(config, DTYPES[dtype].transformers))

    def read_config(self, directory: Path) -> Eagle3Config:
        return self._opened(directory)[0]

    def read(self, directory: Path) -> Checkpoint:
        return _read_head(*self._opened(directory), self.name)

    def manifest(self, directory: Path) -> Manifest:
        config, stored = self._opened(directory)
        weights = reading.shards_of(directory, self.weights_file, stored)
        said = Said(directory / self.marker, self.document(config, ""), self.besides)
        return Manifest(weights.files | {self.marker}, (*weights.said, said))

    def _opened(self, directory: Path) -> tuple[Eagle3Config, Mapping[str, tuple[Path, StoredTensor]]]:
        document, stored = reading.read_json(directory / self.marker), _stored_head(directory)
        return self.parse(document, _EMBED in stored), stored


_UNSET = ("head_dim", "num_key_value_heads", "target_hidden_size", "draft_vocab_size")
_FLAGS = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")
BESIDES: Keys = MappingProxyType(
    at(
        ("", f"{LLAMA}."),
        {
            **UNCOMPUTED,
            **{key: some(*values) for key, values in _FIXED.items()},
            # Read, and made what it stands for.
            **dict.fromkeys((*_UNSET, *_FLAGS), some(None)),
            "rope_parameters": anything,
            # By nothing that computes what is drafted.
            **dict.fromkeys(("sliding_window", "use_sliding_window"), off),
            "max_window_layers": is_whole,
            "pretraining_tp": some(1, None),
        },
    )
)
"""What the Llama configuration and the keys beside it may say otherwise than they are written here."""


def llama_document(config: Eagle3Config) -> dict[str, Any]:
    """The keys of a Llama configuration, RoPE flat."""
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings or _POSITIONS,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": False,
        "vocab_size": config.vocab_size,
    }


_POSITIONS = 131072


def shape_flags(config: Eagle3Config) -> dict[str, Any]:
    """The keys beside those of Llama that both layouts have, written whether they are the default or not."""
    return {
        "draft_vocab_size": config.draft_vocab_size,
        "fc_norm": config.fc_norm,
        "norm_before_fc": config.norm_before_fc,
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_output,
        "target_hidden_size": config.backbone_hidden_size,
    }


def parse_llama(
    llama: Mapping[str, Any],
    flags: Mapping[str, Any],
    base_layers: tuple[int, ...],
    *,
    norm_before_residual: bool,
    norm_before_fc: bool,
    own_embedding: bool,
    base: str | None,
) -> Eagle3Config:
    """The head that a Llama configuration and the keys beside it describe.

    Raises:
        DrafterError: a key is missing, of the wrong type or range, or says what no such head has.
    """
    if (kind := llama.get("model_type")) != "llama":
        why = "; in one of qwen3, which vLLM alone serves, queries and keys are normed" if kind == "qwen3" else ""
        raise DrafterError(
            f"expected model_type llama in an EAGLE-3 head, found {escape(kind)}{why}; it is not supported"
        )
    for key, values in _FIXED.items():
        found = llama.get(key)
        if (type(found), found) not in [(type(value), value) for value in values]:
            raise DrafterError(
                f"expected {key} {' or '.join(map(str, values))} in an EAGLE-3 head, found {escape(found)}; it is not "
                "supported"
            )
    if flags.get("quantization_config") is not None:
        raise DrafterError("expected an EAGLE-3 head in floats, found a quantization_config; it is not supported")
    hidden, heads = (reading.positive_integer(llama, key) for key in ("hidden_size", "num_attention_heads"))
    vocabulary = reading.positive_integer(llama, "vocab_size")
    return Eagle3Config(
        backbone_hidden_size=reading.optional_integer(flags, "target_hidden_size") or hidden,
        hidden_size=hidden,
        intermediate_size=reading.positive_integer(llama, "intermediate_size"),
        vocab_size=vocabulary,
        draft_vocab_size=reading.optional_integer(flags, "draft_vocab_size") or vocabulary,
        num_heads=heads,
        num_kv_heads=reading.optional_integer(llama, "num_key_value_heads") or heads,
        head_dim=reading.optional_integer(llama, "head_dim") or max(hidden // heads, 1),
        base_layers=base_layers,
        rope_theta=_theta(llama),
        rms_norm_eps=reading.number(llama, "rms_norm_eps"),
        fc_norm=reading.flag(flags, "fc_norm"),
        norm_before_fc=norm_before_fc,
        norm_before_residual=norm_before_residual,
        norm_output=reading.flag(flags, "norm_output"),
        own_embedding=own_embedding,
        max_position_embeddings=reading.optional_integer(llama, "max_position_embeddings"),
        base=base,
    )


def _theta(llama: Mapping[str, Any]) -> float:
    """Of flat RoPE, in the old form or in that of transformers 5."""
    parameters = llama.get("rope_parameters")
    if parameters is None:
        return reading.number(llama, "rope_theta")
    found = reading.table(llama, "rope_parameters")
    if found.get("rope_type", "default") != "default" or set(found) - {"rope_type", "rope_theta"}:
        raise DrafterError(
            f"expected one rope_theta in rope_parameters, found {escape(parameters)}; engines that read a flat one "
            "take 10000 where there is none: write the rope_theta that the head was trained with"
        )
    theta = reading.number(found, "rope_theta")
    if reading.number(llama, "rope_theta", default=theta) != theta:
        raise DrafterError("expected one rope_theta, found another in rope_parameters; the config contradicts itself")
    return theta


def read_ids(place: Mapping[str, Any], key: str) -> tuple[int, ...] | None:
    """The layer ids under ``key``; None where there are none.

    Raises:
        DrafterError: something else is there.
    """
    if place.get(key) is None:
        return None
    ids = reading.sequence(place, key)
    if not all(isinstance(i, int) and not isinstance(i, bool) and -1 <= i < _MOST_LAYERS for i in ids):
        raise DrafterError(f"expected layer numbers in {key}, found {escape(ids)}; check the config")
    return tuple(ids)


_MOST_LAYERS = 4096


def named_base(name: object) -> str | None:
    """The base that a config names, as the Hub does; a path of whoever trained means nothing elsewhere."""
    return name if isinstance(name, str) and _HUB_NAME.fullmatch(name) else None


_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9][A-Za-z0-9_.-]*)?")


def _stored_head(directory: Path) -> dict[str, tuple[Path, StoredTensor]]:
    """The tensors in ``directory``."""
    return reading.read_shards(directory, WEIGHTS_FILE)


def _read_head(config: Eagle3Config, stored: Mapping[str, tuple[Path, StoredTensor]], layout: str) -> Checkpoint:
    """The weights of ``config`` among those ``stored``, matched strictly.

    Raises:
        DrafterError, CheckpointError: a tensor is missing, unexpected, of another shape, or maps tokens that are not
            there.
    """
    shapes = shapes_of(config)
    # A map of all tokens to themselves says nothing.
    more = (_T2D,) if config.reduced else (_T2D, _D2T)
    reading.check_tensors(
        {role.names[layout]: (role.path, shape) for role, shape in shapes.items()},
        {name: tensor.shape for name, (_, tensor) in stored.items()},
        more=more,
    )
    tensors = {role.name: StoredWeight(*stored[role.names[layout]], role.names[layout]) for role in shapes}
    mapping = StoredWeight(*stored[_D2T]).indices() if _D2T in stored else np.zeros(config.draft_vocab_size, np.int64)
    marks = _marks(stored[_T2D]) if _T2D in stored else None
    if problems := list(_vocabulary_problems(config, mapping, marks)):
        raise reading.mismatch(problems)
    dtype = common_dtype(tensors[role.name] for role in shapes if role.kind != INDEX)
    return Checkpoint(EAGLE3, config, MappingProxyType(tensors), dtype)


def _marks(place: tuple[Path, StoredTensor]) -> npt.NDArray[np.bool_]:
    path, stored = place
    with open_regular(path) as file:
        file.seek(stored.offset)
        return np.frombuffer(file.read(stored.length), np.bool_)


def _vocabulary_problems(
    config: Eagle3Config, mapping: npt.NDArray[np.int64], marks: npt.NDArray[np.bool_] | None
) -> Iterator[str]:
    if not config.reduced:
        if mapping.shape != (config.draft_vocab_size,) or mapping.any():
            yield f"{_D2T}: expected none, or zeros, in a head with the base's whole vocabulary, found other numbers"
        return
    targets = mapping + np.arange(len(mapping))
    if targets.min() < 0 or targets.max() >= config.vocab_size:
        yield (
            f"{_D2T}: expected differences, so that row i stands for token i + {_D2T}[i] of {config.vocab_size}, found "
            f"tokens {targets.min()} to {targets.max()}"
        )
    elif len(np.unique(targets)) < len(targets):
        yield f"{_D2T}: expected a token of its own for every row, found some twice"
    elif marks is not None and (
        marks.shape != (config.vocab_size,) or not np.array_equal(np.flatnonzero(marks), np.sort(targets))
    ):
        yield f"{_T2D}: expected the tokens that {_D2T} names to be marked, found others"


def _plan_head(
    checkpoint: Checkpoint, config: Eagle3Config, dtype: str, layout: str, document: Mapping[str, Any]
) -> Sequence[OutputFile]:
    """The files of a head whose configuration is ``document``.

    Raises:
        UnsupportedError: an engine that reads the layout would refuse it, or load it wrongly and not say so.
    """
    planned = [
        plan_weight(checkpoint, role, shape, role.names[layout], dtype) for role, shape in shapes_of(config).items()
    ]
    if config.reduced:
        targets = _indices(checkpoint) + np.arange(config.draft_vocab_size)
        planned.append(_planned_marks(config, targets))
    found = lint(layout, document, {tensor.name: tensor.shape for tensor in planned})
    if wrong := [finding for finding in found if finding.forbids]:
        raise UnsupportedError(
            f"The {layout} layout cannot hold this head: {'; '.join(map(str, wrong))}. Choose the other layout.",
            remedies=("format",),
        )
    return [
        OutputFile(WEIGHTS_FILE, tensors=tuple(planned), notes=tuple(map(str, found))),
        OutputFile(MARKER, text=json_text(document)),
    ]


def _indices(checkpoint: Checkpoint) -> npt.NDArray[np.int64]:
    return read_indices(checkpoint.tensors[_D2T])


def _planned_marks(config: Eagle3Config, targets: npt.NDArray[np.int64]) -> PlannedTensor:
    """Which of the base's tokens the head can propose: what trainers ask for, and engines skip."""

    def produce() -> Iterator[npt.NDArray[np.generic]]:
        marks = np.zeros(config.vocab_size, np.uint8)
        marks[targets] = 1
        yield marks

    return PlannedTensor(_T2D, "BOOL", (config.vocab_size,), produce, role=_D2T, part="marks")


def _require_head(checkpoint: Checkpoint) -> Eagle3Config:
    """The shape of the head that ``checkpoint`` holds.

    Raises:
        UnsupportedError: it holds an MTP drafter.
    """
    if not isinstance(checkpoint.config, Eagle3Config):
        raise UnsupportedError(
            "Expected an EAGLE-3 head, found an MTP drafter, which these layouts cannot hold. Choose another format.",
            remedies=("format",),
        )
    return checkpoint.config


def findings_of(directory: Path) -> tuple[Finding, ...]:
    """What engines make of the head in ``directory``; nothing where there is none.

    Raises:
        DrafterError: its files cannot be read.
    """
    path = directory / MARKER
    layout = reading.kind_of(path)
    if layout not in LAYOUTS:
        return ()
    stored = _stored_head(directory)
    return lint(layout, reading.read_json(path), {name: tensor.shape for name, (_, tensor) in stored.items()})
