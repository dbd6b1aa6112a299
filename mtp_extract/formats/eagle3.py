"""The two layouts of an EAGLE-3 head: a Llama configuration, tensors, and the maps between two vocabularies.

SpecForge's layout is loaded by SGLang and vLLM. It names the base's layers twice, because engines count them
differently: at the top level as vLLM does (the layer that a state enters), in ``eagle_config`` as SGLang and SpecForge
do (the layer that it leaves); each engine prefers its own place. The speculators library's layout is served by vLLM
without further options and not read by SGLang: the Llama configuration is nested, beside the head's own keys, the base
("verifier") and the number of tokens to propose.

Cases in which engines silently compute something else than the trained head were read in the sources of vLLM 0.33.0
(``llama_eagle3.py``, ``speculators``) and SGLang 0.5.23 (``llama_eagle3.py``), for which the layouts are made; of
llama.cpp 0c1e570 (``conversion/llama.py``), which converts both, and mlx-vlm 0.7.10 (``speculative/drafters/eagle3``),
which loads one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from mtp_extract.architecture import list_shapes
from mtp_extract.architecture.eagle3 import FUSED, Eagle3Config
from mtp_extract.architecture.roles import INDEX, Role
from mtp_extract.checkpoint.checkpoint import Checkpoint, Finding
from mtp_extract.checkpoint.documents import compare_document, read_object
from mtp_extract.checkpoint.dtypes import DTYPES
from mtp_extract.checkpoint.files import OutputFile, format_json, plan_array
from mtp_extract.checkpoint.format import INDICES, Plan, StoredAs, store_all, store_floats
from mtp_extract.checkpoint.stored import FileWeight, find_common_dtype, read_array
from mtp_extract.checkpoint.weight import Weight
from mtp_extract.errors import CheckpointError, UnsupportedError
from mtp_extract.formats import reading
from mtp_extract.formats.reading import PositiveNumber, Size
from mtp_extract.formats.transformers import MAX_POSITIONS

WEIGHTS_FILE = "model.safetensors"
_IDS = "eagle_aux_hidden_state_layer_ids"
_LLAMA = "transformer_layer_config"
"""Key of a ``speculators`` configuration that holds the Llama configuration."""

_T2D = "t2d"
_D2T = "d2t"
_EMBED = "embed_tokens.weight"
_BASE = "base_model_name_or_path"
"""Read by no engine; a ``speculators`` configuration names its verifier instead."""

_TOKENS = 3
"""Drafts per round, which whoever serves the head may change."""

_NORMS = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")
_FLAGS: Mapping[str, str] = {
    "draft_vocab_size": "draft_vocab_size",
    **{name: name for name in _NORMS},
    "target_hidden_size": "backbone_hidden_size",
}
"""Key that both layouts write beside those of Llama, even at its default → field of an Eagle3Config."""

VLLM = "vLLM 0.33.0"
SGLANG = "SGLang 0.5.23"
LLAMA_CPP = "llama.cpp 0c1e570"
MLX_VLM = "mlx-vlm 0.7.10"
_FED_BACK = "norm_output is true, and it feeds back the state before the norm"
_DEFAULT_IDS = "2, n // 2 and n − 3 of a base of n layers"


@dataclass(frozen=True)
class HeadFormat:
    """The directory of an EAGLE-3 head: ``config.json`` and ``model.safetensors``."""

    name: str
    # Build config.json, given transformers' name of the dtype.
    build_config: Callable[[Eagle3Config, str], Mapping[str, Any]]
    # Move all keys that are read to the top level of config.json; CheckpointError if one is missing.
    flatten: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    # Engines that compute something else with this config.json, and why.
    list_findings: Callable[[Mapping[str, Any], Eagle3Config], Iterator[tuple[str, str]]]
    marker: str = "config.json"
    weights_file: str = WEIGHTS_FILE
    further_files: tuple[str, ...] = ()

    def store(self, role: Role, weight: Weight, dtype: str) -> StoredAs:
        return StoredAs(INDICES, weight) if role.kind == INDEX else store_floats(weight, dtype)

    def plan(self, checkpoint: Checkpoint, dtype: str) -> Plan:
        config = checkpoint.config
        assert isinstance(config, Eagle3Config)
        stored = store_all(self.store, checkpoint, dtype)
        roles = {role.names[self.name]: role.name for role in list_shapes(config)}
        tensors = [stored[role].tensor(name) for name, role in roles.items()]
        if config.reduced:
            # Trainers need it, engines skip it.
            tensors.append(plan_array(_T2D, _mark_draft_tokens(config, stored[_D2T].weight.indices())))
        document = self.build_config(config, DTYPES[dtype].transformers)
        findings = self.build_findings(document, config)
        self._require_no_errors(findings)
        files = (
            OutputFile(self.weights_file, tuple(tensors), notes=tuple(map(str, findings))),
            OutputFile(self.marker, text=format_json(document)),
        )
        return Plan(self.name, checkpoint, dtype, stored, roles, files)

    def _require_no_errors(self, findings: Iterable[Finding]) -> None:
        """Raise UnsupportedError if the engines of this layout would silently load the head wrongly."""
        if errors := [str(finding) for finding in findings if finding.is_error]:
            raise UnsupportedError(
                f"The {self.name} layout cannot hold this head: {'; '.join(errors)}. Choose the other layout.",
                remedies=("format",),
            )

    def read(self, directory: Path) -> Checkpoint:
        path = directory / self.marker
        document = read_object(path)
        stored = reading.read_weights(directory, self.weights_file)
        with reading.attribute_errors_to(path):
            config = _parse_head_config(self.flatten(document), own_embedding=_EMBED in stored)
        written = self.build_config(config, "")
        unread = compare_document(path, document, written, harmless=_HARMLESS, means_the_same=_MEANS_THE_SAME)
        unread += reading.find_index_conflicts(directory, self.weights_file, stored)
        self._check_tensors(directory / self.weights_file, config, stored)
        tensors: dict[str, Weight] = {
            role.name: FileWeight(*stored[role.names[self.name]], role.names[self.name]) for role in list_shapes(config)
        }
        findings = self.build_findings(document, config)
        dtype = find_common_dtype(tensors.values())
        return Checkpoint(config, MappingProxyType(tensors), dtype, unread=unread, findings=findings)

    def _check_tensors(self, path: Path, config: Eagle3Config, stored: reading.Tensors) -> None:
        expected = {
            role.names[self.name]: (shape, ("I64",) if role.kind == INDEX else reading.FLOAT_DTYPES)
            for role, shape in list_shapes(config).items()
        }
        # A head with the base's vocabulary may have maps of all tokens to themselves.
        more = {_T2D: ((config.vocab_size,), ("BOOL",)), _D2T: ((config.draft_vocab_size,), ("I64",))}
        reading.check_tensors(path, expected, stored, more)
        _check_vocabulary(path, config, stored)

    def build_findings(self, document: Mapping[str, Any], config: Eagle3Config) -> tuple[Finding, ...]:
        """Return why engines would compute something else; for the layout's own engines that is an error."""
        entries = self.list_findings(document, config)
        return tuple(Finding(engine, reason, engine in (VLLM, SGLANG)) for engine, reason in entries)


def _list_eagle3_findings(document: Mapping[str, Any], config: Eagle3Config) -> Iterator[tuple[str, str]]:
    if not document.get(_IDS):
        reason = f"{_IDS} is not at the top level, and it takes"
        yield VLLM, f"{reason} those of eagle_config, which are one too low for it; write each plus 1 there"
        yield LLAMA_CPP, f"{reason} {_DEFAULT_IDS}; write the head's layers there"
    if not (document.get("eagle_config") or {}).get(_IDS):
        yield SGLANG, f"{_IDS} is missing in eagle_config; write each less 1 there"
    if config.norm_before_residual:
        yield SGLANG, "norm_before_residual is true, and it begins the residual before the norm"
    if document.get("draft_vocab_size", 0) is None:
        yield SGLANG, "draft_vocab_size is null, for which it takes the base's LM head, not this one"
    if config.hidden_size == FUSED * config.backbone_hidden_size:
        yield SGLANG, f"it leaves fc out of a head as wide as {FUSED} states of the base"
    if config.own_embedding and config.hidden_size == config.backbone_hidden_size:
        yield SGLANG, "it takes the base's embeddings for embed_tokens.weight; leave those out"
    if config.norm_output:
        yield LLAMA_CPP, _FED_BACK


def _list_speculators_findings(document: Mapping[str, Any], config: Eagle3Config) -> Iterator[tuple[str, str]]:
    if config.norm_output:
        yield LLAMA_CPP, _FED_BACK
        yield MLX_VLM, _FED_BACK
    if 0 in config.base_layers:
        yield MLX_VLM, "it reads the output of layer 0 in place of its input"
    if config.reduced:
        yield MLX_VLM, "it takes the best token of the head's vocabulary for the base's best: the text changes"


def _build_llama_config(config: Eagle3Config) -> dict[str, Any]:
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


def _build_eagle3_config(config: Eagle3Config, dtype: str) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **({_BASE: config.base} if config.base else {}),
        **_build_llama_config(config),
        **{key: getattr(config, field) for key, field in _FLAGS.items()},
        "dtype": dtype,
        _IDS: list(config.base_layers),
        "eagle_config": {_IDS: [layer - 1 for layer in config.base_layers], "use_aux_hidden_state": True},
    }


def _build_speculators_config(config: Eagle3Config, dtype: str) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "dtype": dtype,
        _IDS: list(config.base_layers),
        **{key: getattr(config, field) for key, field in _FLAGS.items()},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": _TOKENS}],
            "verifier": {"name_or_path": config.base, "architectures": []},
        },
        "tie_word_embeddings": False,
        _LLAMA: {"architectures": ["LlamaForCausalLM"], **_build_llama_config(config)},
    }


_Layers = Annotated[list[Annotated[int, Meta(ge=-1, le=4096)]], Meta(max_length=64)]


class _Rope(Struct, forbid_unknown_fields=True):
    """RoPE parameters of transformers 5, not by layer type: for those engines silently take a theta of 10000."""

    rope_theta: PositiveNumber
    rope_type: Literal["default"] = "default"


class _Eagle(Struct):
    eagle_aux_hidden_state_layer_ids: _Layers | None = None
    norm_before_fc: bool | None = None


class _Speculators(Struct):
    speculators_model_type: Literal["eagle3"]
    transformer_layer_config: dict[str, Any]
    norm_before_residual: bool  # required: the default is false in speculators, true in vLLM


class _FlatFields(Struct):
    """The fields of a flattened ``config.json`` that are read."""

    model_type: Literal["llama"]  # qwen3 heads, which only vLLM serves, norm queries and keys
    hidden_size: Size
    intermediate_size: Size
    vocab_size: Size
    num_attention_heads: Size
    eagle_aux_hidden_state_layer_ids: _Layers | None = None
    eagle_config: _Eagle | None = None
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    target_hidden_size: Size | None = None
    draft_vocab_size: Size | None = None
    rms_norm_eps: PositiveNumber = 1e-6
    max_position_embeddings: Size | None = None
    rope_theta: PositiveNumber | None = None
    rope_parameters: _Rope | None = None
    fc_norm: bool | None = None
    norm_before_fc: bool | None = None
    norm_before_residual: bool | None = None
    norm_output: bool | None = None

    def find_base_layers(self) -> tuple[int, ...]:
        """Return the base's layers whose incoming states are read; CheckpointError if neither key names them."""
        left_layers = (self.eagle_config and self.eagle_config.eagle_aux_hidden_state_layer_ids) or []
        layers = self.eagle_aux_hidden_state_layer_ids or [layer + 1 for layer in left_layers]
        if not layers:
            raise CheckpointError(
                f"expected {_IDS}, found none; engines take {_DEFAULT_IDS}: write those that the head was trained with"
            )
        return tuple(layers)

    def find_rope_theta(self) -> float:
        theta = self.rope_parameters.rope_theta if self.rope_parameters else self.rope_theta
        if theta is None:
            raise CheckpointError(
                "expected rope_theta, found none, for which engines take 10000. Write what the head was trained with."
            )
        return theta


def _flatten_speculators_config(document: Mapping[str, Any]) -> dict[str, Any]:
    """Turn a ``speculators`` configuration into one of SpecForge's keys."""
    llama = reading.parse_fields(document, _Speculators).transformer_layer_config
    verifier = document.get("speculators_config")
    for key in ("verifier", "name_or_path"):
        verifier = verifier.get(key) if isinstance(verifier, Mapping) else None
    return {**llama, **{key: document[key] for key in (_IDS, *_FLAGS) if key in document}, _BASE: verifier}


def _parse_head_config(flat: Mapping[str, Any], own_embedding: bool) -> Eagle3Config:
    fields = reading.parse_fields(flat, _FlatFields)
    base = flat.get(_BASE)
    flags = {name: bool(getattr(fields, name)) for name in _NORMS}
    if fields.eagle_config and fields.eagle_config.norm_before_fc is not None:
        flags["norm_before_fc"] = fields.eagle_config.norm_before_fc
    return Eagle3Config(
        backbone_hidden_size=fields.target_hidden_size or fields.hidden_size,
        draft_vocab_size=fields.draft_vocab_size or fields.vocab_size,
        num_heads=fields.num_attention_heads,
        num_kv_heads=fields.num_key_value_heads or fields.num_attention_heads,
        head_dim=fields.head_dim or max(fields.hidden_size // fields.num_attention_heads, 1),
        base_layers=fields.find_base_layers(),
        rope_theta=fields.find_rope_theta(),
        own_embedding=own_embedding,
        # The trainer's local path of the base means nothing elsewhere.
        base=base if isinstance(base, str) and _HUB_NAME.fullmatch(base) else None,
        **{name: getattr(fields, name) for name in _OWN_NAMES},
        **flags,
    )


_OWN_NAMES = ("hidden_size", "intermediate_size", "vocab_size", "rms_norm_eps", "max_position_embeddings")
"""Keys that are fields of an Eagle3Config under their own names."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9][A-Za-z0-9_.-]*)?")

_HARMLESS = (
    # The base, and the number of drafts.
    *(_BASE, "speculators_version", "speculators_config.verifier*", "speculators_config.*proposal_method*"),
    # Read in every form that it may have, or unused without a sliding window.
    *("rope_parameters", f"{_LLAMA}.architectures", "max_window_layers", "eagle_config.norm_before_fc"),
)
_MEANS_THE_SAME: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "pretraining_tp": (1,),
        "layer_types": (["full_attention"],),
        # These may be missing, since other keys imply them.
        **dict.fromkeys(("head_dim", "num_key_value_heads", "tie_word_embeddings", *_FLAGS), (None,)),
        **dict.fromkeys(("eagle_config", "eagle_config.use_aux_hidden_state", _IDS), (None,)),
        "architectures": (["Eagle3LlamaForCausalLM"],),
    }
)
"""Key → other values that mean the same as ours."""

EAGLE = HeadFormat("eagle3", _build_eagle3_config, dict, _list_eagle3_findings)

SPECULATORS = HeadFormat(
    "speculators", _build_speculators_config, _flatten_speculators_config, _list_speculators_findings
)


def _check_vocabulary(path: Path, config: Eagle3Config, stored: reading.Tensors) -> None:
    """Raise CheckpointError if the maps between the base's tokens and the head's are invalid, or disagree."""
    differences = FileWeight(*stored[_D2T]).indices() if _D2T in stored else np.zeros(config.draft_vocab_size, np.int64)
    targets = differences + np.arange(len(differences))
    is_one_to_one = len(np.unique(targets)) == len(targets) and targets.min() >= 0 and targets.max() < config.vocab_size
    if not is_one_to_one or (differences.any() and not config.reduced):
        expected = f"differences that make all i + {_D2T}[i] distinct tokens below {config.vocab_size}"
        problem = f"{_D2T}: expected {expected}, and zeros if there is a row of every token; found others"
        raise reading.build_mismatch_error(path, [problem])
    marks = _mark_draft_tokens(config, differences)
    if config.reduced and _T2D in stored and (read_array(*stored[_T2D]) != marks).any():
        problem = f"{_T2D}: expected the tokens that {_D2T} names to be marked, found others"
        raise reading.build_mismatch_error(path, [problem])


def _mark_draft_tokens(config: Eagle3Config, differences: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return t2d: True for every token of the base that the head can propose. ``differences`` are d2t."""
    marks = np.zeros(config.vocab_size, np.bool_)
    marks[differences + np.arange(config.draft_vocab_size)] = True
    return marks
