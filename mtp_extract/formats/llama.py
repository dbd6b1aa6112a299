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
from mtp_extract.checkpoint.json_file import read_object
from mtp_extract.checkpoint.lazy import LazyTensor, read_indices
from mtp_extract.checkpoint.manifest import Keys, Said, anything, at, is_whole, off, some
from mtp_extract.checkpoint.planned import OutputFile, PlannedTensor, json_text
from mtp_extract.checkpoint.stored import StoredWeight, common_dtype, read_array
from mtp_extract.errors import CheckpointError, UnsupportedError, escape
from mtp_extract.formats import reading
from mtp_extract.formats.eagle3_lint import LLAMA, Finding, lint
from mtp_extract.formats.holding import hold_floats, plan_weight
from mtp_extract.formats.keys import Table, constant, fixed, held, positions, unwritten
from mtp_extract.formats.transformers import UNCOMPUTED

MARKER, WEIGHTS_FILE = "config.json", "model.safetensors"
LAYOUTS = ("eagle3", "speculators")
_T2D, _D2T, _EMBED = "t2d", "d2t", "embed_tokens.weight"


def _theta(llama: Mapping[str, Any], key: str) -> float:
    """Of flat RoPE, in the old form or in that of transformers 5, ``rope_parameters``."""
    parameters = llama.get("rope_parameters")
    if parameters is None:
        return reading.number(llama, key)
    found = reading.table(llama, "rope_parameters")
    if found.get("rope_type", "default") != "default" or set(found) - {"rope_type", key}:
        raise CheckpointError(
            f"expected one {key} in rope_parameters, found {escape(parameters)}; engines that read a flat one "
            f"take 10000 where there is none: write the {key} that the head was trained with"
        )
    theta = reading.number(found, key)
    if reading.number(llama, key, default=theta) != theta:
        raise CheckpointError(f"expected one {key}, found another in rope_parameters; the config contradicts itself")
    return theta


_LLAMA = Table(
    fixed(
        attention_bias=(False, None),
        hidden_act=("silu",),
        mlp_bias=(False, None),
        num_hidden_layers=(1,),
        rope_scaling=(None,),
        tie_word_embeddings=(False, None),
    ),
    unwritten(fixed(bias=(False, None), layer_types=(None, ["full_attention"]), use_aux_norm=(False, None))),
    unwritten(fixed(logit_scale=(None, 1.0, 1), partial_rotary_factor=(None, 1.0, 1), quantization_config=(None,))),
    constant(attention_dropout=0.0, initializer_range=0.02, model_type="llama"),
    held(
        reading.positive_integer, "hidden_size", "intermediate_size", "vocab_size", ("num_attention_heads", "num_heads")
    ),
    held(reading.optional_integer, "head_dim", ("num_key_value_heads", "num_kv_heads"), tolerated=some(None)),
    held(reading.number, "rms_norm_eps"),
    held(_theta, "rope_theta"),
    positions("max_position_embeddings"),
)
"""A Llama configuration, which is written in the order of the alphabet."""

_FLAGS = Table(
    held(reading.optional_integer, "draft_vocab_size", tolerated=some(None)),
    held(reading.flag, "fc_norm", "norm_before_fc", "norm_before_residual", "norm_output", tolerated=some(None)),
    held(reading.optional_integer, ("target_hidden_size", "backbone_hidden_size"), tolerated=some(None)),
    unwritten(fixed(quantization_config=(None,))),
)
"""The keys beside it that both layouts have, written whether they are the default or not."""

TOLERATED: Keys = MappingProxyType(
    at(
        ("", f"{LLAMA}."),
        {
            **UNCOMPUTED,
            **_LLAMA.allowed(),
            **_FLAGS.allowed(),
            "rope_parameters": anything,
            # By nothing that computes what is drafted.
            **dict.fromkeys(("sliding_window", "use_sliding_window"), off),
            "max_window_layers": is_whole,
            "pretraining_tp": some(1, None),
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

    Raises CheckpointError where a key is missing, of the wrong type or range, or says what no such head has, and
    DrafterError for a shape that no head has.
    """
    tolerated: Keys  # what ``config.json`` may say otherwise than it is written here
    marker: str = MARKER
    weights_file: str = WEIGHTS_FILE

    def recognizes(self, directory: Path) -> bool:
        return reading.kind_of(directory / self.marker) == self.name

    def hold(self, role: Role, tensor: LazyTensor, dtype: str) -> Holding:
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
            planned.append(_plan_marks(config, read_indices(checkpoint.tensors[_D2T])))
        document = self.document(config, DTYPES[dtype].transformers)
        # What an engine that reads the layout would refuse, or load wrongly and not say so, is not written.
        found = lint(self.name, document, {tensor.name: tensor.shape for tensor in planned})
        if wrong := [finding for finding in found if finding.forbids]:
            raise UnsupportedError(
                f"The {self.name} layout cannot hold this head: {'; '.join(map(str, wrong))}. Choose the other layout.",
                remedies=("format",),
            )
        return [
            OutputFile(self.weights_file, tensors=tuple(planned), notes=tuple(map(str, found))),
            OutputFile(self.marker, text=json_text(document)),
        ]

    def read_config(self, directory: Path) -> Eagle3Config:
        return self._opened(directory)[0]

    def read(self, directory: Path) -> Checkpoint:
        config, stored = self._opened(directory)
        shapes = shapes_of(config)
        # A map of all tokens to themselves says nothing.
        more = (_T2D,) if config.reduced else (_T2D, _D2T)
        names = {role: role.names[self.name] for role in shapes}
        tensors = reading.weights_of(shapes, names, stored, more)
        if problems := list(_vocabulary_problems(config, stored)):
            raise reading.mismatch(problems)
        dtype = common_dtype(tensors[role.name] for role in shapes if role.kind != INDEX)
        return Checkpoint(EAGLE3, config, MappingProxyType(tensors), dtype)

    def manifest(self, directory: Path) -> Sequence[Said]:
        config, stored = self._opened(directory)
        said = Said(directory / self.marker, self.document(config, ""), self.tolerated)
        return *reading.said_by_shards(directory, self.weights_file, stored), said

    def _opened(self, directory: Path) -> tuple[Eagle3Config, reading.Stored]:
        path = directory / self.marker
        document, stored = read_object(path), reading.read_shards(directory, self.weights_file)
        with reading.naming(path):
            return self.parse(document, _EMBED in stored), stored


def llama_document(config: Eagle3Config) -> dict[str, Any]:
    """The keys of a Llama configuration, RoPE flat."""
    return dict(sorted(_LLAMA.write(config).items()))


def shape_flags(config: Eagle3Config) -> dict[str, Any]:
    """The keys beside those of Llama that both layouts have."""
    return _FLAGS.write(config)


def parse_llama(llama: Mapping[str, Any], flags: Mapping[str, Any], **fields: Any) -> Eagle3Config:
    """The head that a Llama configuration and the keys beside it describe; raises as :attr:`HeadFormat.parse`.

    Args:
        fields: those of the shape that a layout has elsewhere.
    """
    if (kind := llama.get("model_type")) != "llama":
        why = "; in one of qwen3, which vLLM alone serves, queries and keys are normed" if kind == "qwen3" else ""
        raise CheckpointError(
            f"expected model_type llama in an EAGLE-3 head, found {escape(kind)}{why}; it is not supported"
        )
    found = {**_LLAMA.read(llama), **_FLAGS.read(flags), **fields}
    hidden, heads = found["hidden_size"], found["num_heads"]
    implied = {"backbone_hidden_size": hidden, "draft_vocab_size": found["vocab_size"], "num_kv_heads": heads}
    implied["head_dim"] = max(hidden // heads, 1)
    return Eagle3Config(**{**found, **{field: value for field, value in implied.items() if found[field] is None}})


def read_ids(place: Mapping[str, Any], key: str) -> tuple[int, ...] | None:
    """The layer ids under ``key``; None where there are none.

    Raises:
        CheckpointError: something else is there.
    """
    if place.get(key) is None:
        return None
    ids = reading.sequence(place, key)
    if not all(isinstance(i, int) and not isinstance(i, bool) and -1 <= i < _MOST_LAYERS for i in ids):
        raise CheckpointError(f"expected layer numbers in {key}, found {escape(ids)}; check the config")
    return tuple(ids)


_MOST_LAYERS = 4096


def named_base(name: object) -> str | None:
    """The base that a config names, as the Hub does; a path of whoever trained means nothing elsewhere."""
    return name if isinstance(name, str) and _HUB_NAME.fullmatch(name) else None


_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9][A-Za-z0-9_.-]*)?")


def _vocabulary_problems(config: Eagle3Config, stored: reading.Stored) -> Iterator[str]:
    """What is wrong with the two maps between the base's tokens and the head's."""
    mapping = StoredWeight(*stored[_D2T]).indices() if _D2T in stored else np.zeros(config.draft_vocab_size, np.int64)
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
    """What engines make of the head in ``directory``; nothing where there is none.

    Raises:
        CheckpointError: its files cannot be read.
    """
    path = directory / MARKER
    layout = reading.kind_of(path)
    if layout not in LAYOUTS:
        return ()
    stored = reading.read_shards(directory, WEIGHTS_FILE)
    return lint(layout, read_object(path), {name: tensor.shape for name, (_, tensor) in stored.items()})
