"""What the two layouts of an EAGLE-3 head have in common: a Llama configuration, tensors, and the two vocabularies."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from mtp_extract.architecture.eagle3 import Eagle3Config
from mtp_extract.architecture.roles import EAGLE3, INDEX, Role, shapes_of
from mtp_extract.checkpoint.checkpoint import INDICES, Checkpoint, Holding
from mtp_extract.checkpoint.dtypes import DTYPES
from mtp_extract.checkpoint.json_file import read_object
from mtp_extract.checkpoint.keys import AllowedKeys, anything, at, is_whole, off, require_keys, some
from mtp_extract.checkpoint.planned import OutputFile, PlannedTensor, json_text
from mtp_extract.checkpoint.stored import common_dtype, read_array, stored_weight
from mtp_extract.checkpoint.weight import Weight
from mtp_extract.errors import CheckpointError, UnsupportedError
from mtp_extract.formats import format_of, reading
from mtp_extract.formats.eagle3_lint import LLAMA, Finding, lint
from mtp_extract.formats.holding import hold_floats, plan_weight
from mtp_extract.formats.reading import Number, Size
from mtp_extract.formats.transformers import MAX_POSITIONS, UNCOMPUTED

MARKER, WEIGHTS_FILE = "config.json", "model.safetensors"
_T2D, _D2T, _EMBED = "t2d", "d2t", "embed_tokens.weight"

_NORMS = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")
_OWN_NAMES = ("hidden_size", "intermediate_size", "vocab_size", "rms_norm_eps", "max_position_embeddings")
"""Keys that are fields of an Eagle3Config under their own names."""

TOLERATED: AllowedKeys = MappingProxyType(
    at(
        ("", f"{LLAMA}."),
        {
            **UNCOMPUTED,
            # What a head has not, in other words.
            **dict.fromkeys(("attention_bias", "mlp_bias", "bias", "use_aux_norm"), some(False, None)),
            **dict.fromkeys(("logit_scale", "partial_rotary_factor", "pretraining_tp"), some(1)),
            **dict.fromkeys(("sliding_window", "use_sliding_window"), off),
            "layer_types": some(["full_attention"]),
            "tie_word_embeddings": some(None),
            # Implied where they are missing.
            **dict.fromkeys(("head_dim", "num_key_value_heads", "rope_theta"), some(None)),
            **dict.fromkeys(("draft_vocab_size", "target_hidden_size"), some(None)),
            **dict.fromkeys(_NORMS, some(None)),
            "rope_parameters": anything,  # which is read in full
            "max_window_layers": is_whole,
        },
    )
)
"""What the Llama configuration and the keys beside it may say otherwise than they are written here."""


@dataclass(frozen=True)
class HeadFormat:
    """The directory of an EAGLE-3 head: ``config.json`` and ``model.safetensors``."""

    name: str  # of the layout
    document: Callable[[Eagle3Config, str], Mapping[str, Any]]
    """``config.json`` of a head whose weights have this transformers dtype."""
    parse: Callable[[Mapping[str, Any], bool], Eagle3Config]
    """The head of a parsed ``config.json``; the second argument is whether a table of embeddings lies beside it.

    Raises CheckpointError where a key is missing or of the wrong type or range, and DrafterError for a shape that no
    head has.
    """
    tolerated: AllowedKeys  # what ``config.json`` may say otherwise than it is written here
    marker: str = MARKER
    weights_file: str = WEIGHTS_FILE
    further_files: tuple[str, ...] = ()

    def recognizes(self, directory: Path) -> bool:
        return reading.kind_of(directory / self.marker) == self.name

    def hold(self, role: Role, tensor: Weight, dtype: str) -> Holding:
        return Holding(INDICES) if role.kind == INDEX else hold_floats(tensor, dtype)

    def plan(self, checkpoint: Checkpoint, dtype: str) -> Sequence[OutputFile]:
        config = checkpoint.config
        if not isinstance(config, Eagle3Config):
            raise UnsupportedError(
                f"Expected an EAGLE-3 head, found an MTP drafter, which the {self.name} layout cannot hold. Choose "
                "another format.",
                remedies=("format",),
            )
        planned = [
            plan_weight(checkpoint, role, shape, role.names[self.name], dtype)
            for role, shape in shapes_of(config).items()
        ]
        if config.reduced:
            planned.append(_plan_marks(config, checkpoint.tensors[_D2T].indices()))
        document = self.document(config, DTYPES[dtype].transformers)
        found = lint(self.name, document, config)
        # What an engine that reads the layout would load wrongly and not say so is not written.
        if wrong := [finding for finding in found if finding.is_error]:
            raise UnsupportedError(
                f"The {self.name} layout cannot hold this head: {'; '.join(map(str, wrong))}. Choose the other layout.",
                remedies=("format",),
            )
        return [
            OutputFile(self.weights_file, tensors=tuple(planned), notes=tuple(map(str, found))),
            OutputFile(self.marker, text=json_text(document)),
        ]

    def read_config(self, directory: Path) -> Eagle3Config:
        return self._read(directory)[0]

    def read(self, directory: Path) -> Checkpoint:
        config, _, stored = self._read(directory)
        shapes = shapes_of(config)
        # A map of all tokens to themselves says nothing.
        more = (_T2D,) if config.reduced else (_T2D, _D2T)
        names = {role: role.names[self.name] for role in shapes}
        tensors = reading.weights_of(shapes, names, stored, more)
        if problems := list(_vocabulary_problems(config, stored)):
            raise reading.mismatch(problems)
        dtype = common_dtype(tensors[role.name] for role in shapes if role.kind != INDEX)
        return Checkpoint(EAGLE3, config, MappingProxyType(tensors), dtype)

    def findings(self, directory: Path) -> tuple[Finding, ...]:
        """What engines make of the head in ``directory``.

        Raises:
            CheckpointError: as :meth:`read_config`.
        """
        config, document, _ = self._read(directory)
        return lint(self.name, document, config)

    def _read(self, directory: Path) -> tuple[Eagle3Config, Mapping[str, Any], reading.Stored]:
        path = directory / self.marker
        document, stored = read_object(path), reading.read_shards(directory, self.weights_file)
        with reading.naming(path):
            config = self.parse(document, _EMBED in stored)
        require_keys(path, document, self.document(config, ""), self.tolerated)
        return config, document, stored


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
        "max_position_embeddings": config.max_position_embeddings or MAX_POSITIONS,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": False,
        "vocab_size": config.vocab_size,
    }


def shape_flags(config: Eagle3Config) -> dict[str, Any]:
    """The keys beside those of Llama that both layouts have, written whether they are the default or not."""
    return {
        "draft_vocab_size": config.draft_vocab_size,
        **{name: getattr(config, name) for name in _NORMS},
        "target_hidden_size": config.backbone_hidden_size,
    }


class _Rope(Struct, forbid_unknown_fields=True):
    """RoPE in the form of transformers 5, flat: engines that read it take 10000 where it is given by layer type."""

    rope_theta: Number
    rope_type: Literal["default"] = "default"


class _Llama(Struct):
    model_type: Literal["llama"]  # in one of qwen3, which vLLM alone serves, queries and keys are normed
    hidden_size: Size
    intermediate_size: Size
    vocab_size: Size
    num_attention_heads: Size
    rms_norm_eps: Number
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    rope_theta: Number | None = None
    rope_parameters: _Rope | None = None
    max_position_embeddings: Size | None = None


class _Flags(Struct):
    draft_vocab_size: Size | None = None
    target_hidden_size: Size | None = None
    fc_norm: bool | None = None
    norm_before_fc: bool | None = None
    norm_before_residual: bool | None = None
    norm_output: bool | None = None


Layers = Annotated[list[Annotated[int, Meta(ge=-1, le=4096)]], Meta(max_length=64)]
"""Numbers of layers of the base."""


def parse_llama(llama: Mapping[str, Any], flags: Mapping[str, Any], **more: Any) -> Eagle3Config:
    """The head that a Llama configuration and the keys beside it describe; raises as :attr:`HeadFormat.parse`.

    Args:
        more: fields of the shape that a layout has elsewhere.
    """
    layer, beside = reading.fields(llama, _Llama), reading.fields(flags, _Flags)
    theta = layer.rope_parameters.rope_theta if layer.rope_parameters else layer.rope_theta
    if theta is None:
        raise CheckpointError(
            "expected rope_theta, found none, for which engines take 10000; write what the head was trained with"
        )
    fields = {
        "backbone_hidden_size": beside.target_hidden_size or layer.hidden_size,
        **{name: getattr(layer, name) for name in _OWN_NAMES},
        "draft_vocab_size": beside.draft_vocab_size or layer.vocab_size,
        "num_heads": layer.num_attention_heads,
        "num_kv_heads": layer.num_key_value_heads or layer.num_attention_heads,
        "head_dim": layer.head_dim or max(layer.hidden_size // layer.num_attention_heads, 1),
        "rope_theta": theta,
        **{name: bool(getattr(beside, name)) for name in _NORMS},
    }
    return Eagle3Config(**{**fields, **more})


def named_base(name: object) -> str | None:
    """The base that a config names, as the Hub does; a path of whoever trained means nothing elsewhere."""
    return name if isinstance(name, str) and _HUB_NAME.fullmatch(name) else None


_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9][A-Za-z0-9_.-]*)?")


def _vocabulary_problems(config: Eagle3Config, stored: reading.Stored) -> Iterator[str]:
    """What is wrong with the two maps between the base's tokens and the head's."""
    mapping = stored_weight(*stored[_D2T]).indices() if _D2T in stored else np.zeros(config.draft_vocab_size, np.int64)
    marks = read_array(*stored[_T2D], np.dtype(np.bool_)) if _T2D in stored else None
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


def _plan_marks(config: Eagle3Config, mapping: npt.NDArray[np.int64]) -> PlannedTensor:
    """Which of the base's tokens the head can propose: what trainers ask for, and engines skip.

    Args:
        mapping: of each row of the head its token less its number.
    """

    def produce() -> Iterator[npt.NDArray[np.generic]]:
        marks = np.zeros(config.vocab_size, np.uint8)
        marks[mapping + np.arange(config.draft_vocab_size)] = 1
        yield marks

    return PlannedTensor(_T2D, "BOOL", (config.vocab_size,), produce, role=_D2T, part="marks")


def findings_of(directory: Path) -> tuple[Finding, ...]:
    """What engines make of the EAGLE-3 head in ``directory``; nothing where that holds another drafter.

    Raises:
        CheckpointError: it holds none, or a damaged one.
    """
    found = format_of(directory)
    return found.findings(directory) if isinstance(found, HeadFormat) else ()
