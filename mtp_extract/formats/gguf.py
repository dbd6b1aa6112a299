"""One file that llama.cpp loads, with the integers of the bundle in it.

Codes of 4 bits and less become Q4_0, of 8 bits Q8_0: blocks of 32 codes with an FP16 scale, so the scale of a row is
repeated in its blocks and rounded to FP16. Norms, scalars and matrices that do not fit are F32.

The keys are those that llama.cpp's converter writes and its loader reads for ``gemma4-assistant``, and our own under
``mtp_extract.`` where it has none. Numbers that users know in decimal are FP32 there; one that FP32 does not preserve
is also stored as float64 under ``mtp_extract.``. Reading takes the few keys that determine the others, builds all keys
again and compares.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from msgspec import Struct, field

from mtp_extract._version import __version__
from mtp_extract.architecture import list_shapes
from mtp_extract.architecture.config import FULL, SLIDING, DrafterConfig, LayerConfig, RopeConfig
from mtp_extract.architecture.roles import MATRIX, Role
from mtp_extract.checkpoint.checkpoint import CODES, Checkpoint
from mtp_extract.checkpoint.documents import compare_document
from mtp_extract.checkpoint.dtypes import BLOCK, BLOCK_TYPES, DTYPES
from mtp_extract.checkpoint.files import OutputFile, PlannedTensor, plan_array, plan_rows
from mtp_extract.checkpoint.format import NOTHING, Plan, StoredAs, store_all, store_floats
from mtp_extract.checkpoint.gguf_file import ARCHITECTURE, read_gguf
from mtp_extract.checkpoint.rounding import SCALES, repeat_roundings
from mtp_extract.checkpoint.stored import FileWeight, TensorPlace, find_common_dtype, read_rows
from mtp_extract.checkpoint.weight import Rows, Steps, Weight, center_codes, has_exact_steps, split_rows
from mtp_extract.errors import CheckpointError, NoCodesError, UnsupportedError, escape
from mtp_extract.formats import reading
from mtp_extract.formats.reading import GateFunction, PositiveNumber, PositiveShare, Size
from mtp_extract.formats.transformers import MAX_POSITIONS, UNUSED_WINDOW
from mtp_extract.litertlm.storage import Floats, Packing

_HEAD, _ROPE = "token_embd.weight", "rope_freqs.weight"
_TOKENIZER, _TOKENS = "tokenizer.ggml.model", "tokenizer.ggml.tokens"
_QUANTIZED = MappingProxyType({kind.name: kind for kind in BLOCK_TYPES.values()})
# llama_ftype of the dtype that most matrices have.
_FILE_TYPES = MappingProxyType({"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7, "BF16": 32})
_DROPPED = "llama.cpp computes the dense head, of which the ordered one looks at a part"
_EXACT_GELU = "The gate is an exact GELU, of which llama.cpp computes the tanh approximation."

ARCH = "gemma4-assistant"
"""llama.cpp's name of the architecture."""

OWN = "mtp_extract."
"""Prefix of our own keys."""

_NEVER_TURNED = 1e30
"""Divisor of the frequencies of unrotated dimensions, as llama.cpp's converter writes it."""

_NO_FACTORS = np.empty(0, np.float32)
_FACTOR = "rope.factor"
"""The divisor of the other frequencies; llama.cpp has no key for it, but the tensor of all divisors."""

_NUMBERS = (
    *("attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.freq_base_swa", "final_logit_softcapping"),
    _FACTOR,
)
"""Keys that are stored in FP32."""

_HARMLESS = (
    # Names, authors, and sampling parameters, which are for base models.
    *("general.name", "general.author", "general.version", "general.organization", "general.finetune", "general.url"),
    *("general.basename", "general.description", "general.quantized_by", "general.size_label", "general.license*"),
    *("general.doi", "general.uuid", "general.repo_url", "general.source.*", "general.base_model.*", "general.tags"),
    *("general.dataset.*", "general.languages", "general.sampling.*", "general.file_type", "general.alignment"),
    "general.quantization_version",
    # Drafts are tokens of the base, whatever the tokenizer calls them; only their number is read.
    *("tokenizer.*", "quantize.imatrix.*"),
    # Keys that are read, and the provenance.
    *(ARCHITECTURE, f"{ARCH}.context_length", f"{ARCH}.attention.head_count_kv"),
    *(f"{OWN}{key}" for key in ("version", "source.*", "section.*", "rope.*", "attention.*")),
    f"{OWN}final_logit_softcapping",
)
_MEANS_THE_SAME: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {"general.type": (None, "model"), f"{ARCH}.vocab_size": (None,), f"{OWN}hidden_activation": (None,)}
)


class GgufFormat:
    """``mtp-BASE-TYPE.gguf``; :meth:`read` also takes a single file of any name.

    llama.cpp pairs a base with a file of the same Hub repository or folder that has ``mtp-`` in its name
    (``find_best_mtp`` of its common/download.cpp); of several it takes the one whose type is nearest to the base's.
    """

    name = "gguf"
    marker = "mtp-*.gguf"
    weights_file = marker
    further_files: tuple[str, ...] = ()

    def store(self, role: Role, weight: Weight, dtype: str) -> StoredAs:
        if self.name not in role.names:
            return StoredAs(NOTHING, weight, why=_DROPPED)
        if role.kind != MATRIX:
            return store_floats(weight, "f32", "llama.cpp multiplies by vectors of F32")
        if dtype != CODES:
            return store_floats(weight, dtype, "floats were asked for")
        try:
            codes = center_codes(weight)
            halves = _round_scales_to_f16(codes)
        except NoCodesError as error:
            return store_floats(weight, "f32", str(error))
        if (halves == codes.steps.size).all():
            return StoredAs(CODES, codes, "" if has_exact_steps(weight) else "F32")
        return StoredAs(CODES, repeat_roundings(codes, [f"FP16{SCALES}"]), "FP16")

    def plan(self, checkpoint: Checkpoint, dtype: str) -> Plan:
        config = checkpoint.mtp
        stored = store_all(self.store, checkpoint, dtype)
        roles = {role.names[self.name]: role.name for role in list_shapes(config) if self.name in role.names}
        tensors = [
            _plan_blocks(name, stored[role].weight) if stored[role].how == CODES else stored[role].tensor(name)
            for name, role in roles.items()
        ]
        if (factors := _compute_frequency_factors(config)).size:
            tensors.append(plan_array(_ROPE, factors))
        # The file is named after the dtype of most matrices.
        main_dtype = max(_FILE_TYPES, key=[tensor.dtype for tensor in tensors if len(tensor.shape) > 1].count)
        file = OutputFile(
            f"mtp-{_derive_base_name(checkpoint.provenance)}-{main_dtype}.gguf",
            tuple(tensors),
            metadata=_build_metadata(checkpoint.provenance, config, main_dtype),
            notes=(_EXACT_GELU,) if config.hidden_activation == "gelu" else (),
        )
        return Plan(self.name, checkpoint, dtype, stored, roles, (file,))

    def read(self, directory: Path) -> Checkpoint:
        path = directory
        if not path.is_file():
            # The first of several files; the others are reported as not belonging to the checkpoint.
            path = min(directory.glob(self.marker), default=directory / self.marker)
        metadata, stored = read_gguf(path)
        factors = FileWeight(path, stored[_ROPE]).array().reshape(-1) if _ROPE in stored else _NO_FACTORS
        with reading.attribute_errors_to(path):
            config = _read_config(metadata, stored, factors)
            expected_keys = _build_shape_keys(config)
        unread = _compare_keys(path, metadata, expected_keys)

        _check_tensors(path, config, stored, factors)
        roles = list_shapes(config)
        tensors = {
            role.name: _build_weight(path, stored[role.names[self.name]], role.names[self.name]) for role in roles
        }
        matrices = [tensors[role.name] for role in roles if role.kind == MATRIX]
        dtype = find_common_dtype(weight for weight in matrices if weight.scheme is None)
        return Checkpoint(config, MappingProxyType(tensors), dtype, unread=unread)


GGUF = GgufFormat()


def _round_scales_to_f16(codes: Weight) -> Floats:
    """Return the scales of ``codes`` rounded to FP16; NoCodesError if Q4_0 and Q8_0 cannot hold them or the codes."""
    block = codes.steps.block
    if codes.columns % BLOCK or block % BLOCK:
        shape = f"rows of {codes.columns}" if codes.columns % BLOCK else f"blocks of {block}"
        raise NoCodesError(
            f"it has {shape}, not a scale for each {BLOCK} numbers of a row (compressed-tensors keeps any rows)"
        )
    sizes = codes.steps.size
    with np.errstate(over="ignore", under="ignore"):
        halves: Floats = sizes.astype(np.float16).astype(np.float32)
    unfit = ~(np.abs(halves - sizes) <= DTYPES["f16"].roundoff * np.abs(sizes))
    if unfit.any():
        raise NoCodesError(
            f"a scale of {float(sizes[unfit][0]):.2g} is out of FP16's range, the only type of scale there is in Q4_0 "
            "and Q8_0 (mlx, compressed-tensors and gemma have F32)"
        )
    return halves


def _read_config(metadata: Mapping[str, Any], stored: Mapping[str, TensorPlace], factors: Floats) -> DrafterConfig:
    """Parse the keys; CheckpointError if they are another model's, or contradict the head or the RoPE factors."""
    if (arch := metadata.get(ARCHITECTURE)) != ARCH:
        raise CheckpointError(_describe_wrong_architecture(arch))
    rows = stored[_HEAD].shape[0] if _HEAD in stored else 0
    if rows and (tokens := metadata.get(_TOKENS, rows)) != rows:
        raise CheckpointError(
            f"expected {rows} tokens in {_TOKENS}, found {escape(tokens)}; the file contradicts itself"
        )
    config = _parse_config(metadata, rows, factors)
    if not np.array_equal(_compute_frequency_factors(config), factors):
        raise CheckpointError(
            f"expected {_ROPE} as the full layers' RoPE has it, one factor and then {_NEVER_TURNED:g}, found "
            "others; it is not supported"
        )
    return config


def _check_tensors(path: Path, config: DrafterConfig, stored: Mapping[str, TensorPlace], factors: Floats) -> None:
    readable = (*reading.FLOAT_DTYPES, *_QUANTIZED)
    expected = {role.names[GGUF.name]: (shape, readable) for role, shape in list_shapes(config).items()}
    places = {name: (path, tensor) for name, tensor in stored.items()}
    reading.check_tensors(path, expected, places, more={_ROPE: (factors.shape, reading.FLOAT_DTYPES)})


def _compare_keys(path: Path, metadata: Mapping[str, Any], expected: Mapping[str, Any]) -> tuple[str, ...]:
    """Compare a file's keys with ours, as :func:`compare_document` does."""
    # A Python float is written as FP32.
    written = {key: np.float32(value) if type(value) is float else value for key, value in expected.items()}
    documents = [
        {key: value.item() if isinstance(value, np.generic) else value for key, value in document.items()}
        for document in (metadata, {"general.type": "model", **written})
    ]
    return compare_document(path, *documents, harmless=_HARMLESS, means_the_same=_MEANS_THE_SAME)


def _describe_wrong_architecture(name: object) -> str:
    advice = f"Ask for one that llama.cpp's own converter wrote ({ARCH})."
    if "assistant" in str(name) or "mtp" in str(name):
        problem = f"a drafter for another program than llama.cpp ({ARCHITECTURE} {escape(name)})"
        return f"{problem}; it is not read. {advice}"
    problem = f"expected {ARCHITECTURE} {ARCH}, found {escape(name)}: the base model's, or another model's"
    return f"{problem}. Point to the drafter. {advice}"


_ENDINGS = (".litertlm", ".tflite", ".gguf", "-assistant", "-mtp-drafter")
"""Removed from the name of a source to get its base's name."""
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")
_PARTS = re.compile(
    r"(?P<basename>.+?)-(?P<size_label>(?:\d+x)?[AE]?\d+(?:\.\d+)?[BKM](?:-A\d+B)?)(?:-(?P<finetune>.+))?"
)


def _derive_base_name(provenance: Mapping[str, str]) -> str:
    """Return the base's name for the file's name, from the name of the bundle or directory that was converted."""
    name = provenance.get("source.name", "").rstrip("/").rpartition("/")[2]
    for ending in _ENDINGS:
        name = name.removesuffix(ending)
    return _NOT_IN_NAMES.sub("-", name).removeprefix("mtp-").strip("-.") or "drafter"


def _split_base_name(base: str) -> dict[str, str]:
    """Return the keys of the parts of a base's name in GGUF's naming convention: gemma-4, E4B, it."""
    match = _PARTS.fullmatch(base)
    parts = {"basename": base} if match is None else {key: part for key, part in match.groupdict().items() if part}
    return {f"general.{key}": part for key, part in parts.items()}


def _build_weight(path: Path, stored: TensorPlace, name: str) -> Weight:
    kind = _QUANTIZED.get(stored.dtype)
    if kind is None:
        return FileWeight(path, stored, name)

    def read_codes(first: int, last: int) -> Rows:
        return kind.codes(read_rows(path, stored, first, last))

    def read_steps() -> Steps:
        size = np.concatenate([kind.steps(read_rows(path, stored, *row_range)) for row_range in split_rows(weight)])
        if not np.isfinite(size).all():
            raise CheckpointError(f"{escape(path)}: a scale of a matrix is not finite: the file is damaged.")
        return Steps.around_zero(BLOCK, size).merge_equal_blocks()

    packing = Packing(kind.bits, signed=True)
    weight = Weight(stored.shape, read_codes, packing, read_steps, origin=(path, stored.offset))
    return weight


def _plan_blocks(name: str, codes: Weight) -> PlannedTensor:
    """Plan a tensor of Q4_0 or Q8_0 blocks; the rows and blocks of ``codes`` divide by 32."""
    kind, sizes = BLOCK_TYPES[max(codes.bits, min(BLOCK_TYPES))], codes.steps.size

    def pack_blocks(first: int, last: int) -> Rows:
        return kind.pack(codes.codes(first, last), sizes[first:last])

    return plan_rows(name, codes, kind.name, pack_blocks)


def _build_metadata(provenance: Mapping[str, str], config: DrafterConfig, dtype: str) -> dict[str, Any]:
    """Build every key of a file whose main dtype is ``dtype``."""
    keys = {ARCHITECTURE: ARCH, "general.type": "model"}
    if "source.name" in provenance:
        keys["general.name"] = f"MTP drafter of {provenance['source.name']}"
    if "source.repository" in provenance:
        keys["general.source.repo_url"] = f"https://huggingface.co/{provenance['source.repository']}"
    if "source.url" in provenance:
        keys["general.source.url"] = provenance["source.url"]
    return {
        **keys,
        **_split_base_name(_derive_base_name(provenance)),
        "general.file_type": _FILE_TYPES[dtype],
        "general.quantization_version": 2,
        **_build_shape_keys(config),
        f"{OWN}version": __version__,
        **{OWN + key: text for key, text in provenance.items()},
        _TOKENIZER: "no_vocab",  # drafts are tokens of the base
    }


def _build_shape_keys(config: DrafterConfig) -> dict[str, Any]:
    """Build the keys that determine ``config``; UnsupportedError if llama.cpp would compute something else."""
    config.require_uniform()
    if SLIDING in config.layer_types and config.sliding.rope.kind != "default":
        reason = "The sliding layers have a partial or scaled RoPE, which llama.cpp supports in full layers only."
        raise UnsupportedError(f"{reason} Choose the transformers format.", remedies=("format=transformers",))
    if config.attention_scale != 1.0:
        reason = f"The attention's scale is {config.attention_scale:g}; llama.cpp's is 1 whatever the file says."
        raise UnsupportedError(f"{reason} Choose the litert format.", remedies=("format=litert",))
    keys = _build_llama_keys(config)
    return {
        **{f"{ARCH}.{key}": value for key, value in keys.items()},
        **{OWN + key: value for key, value in _build_own_keys(config, keys).items()},
    }


def _build_llama_keys(config: DrafterConfig) -> dict[str, Any]:
    """Build llama.cpp's keys, without the architecture that they begin with."""
    sliding, full = config.sliding, config.full  # the same layer if a drafter has only one type
    heads = config.num_kv_heads
    keys: dict[str, Any] = {
        "block_count": config.num_layers,
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings or MAX_POSITIONS,
        "embedding_length": config.hidden_size,
        "embedding_length_out": config.backbone_hidden_size,
        "embedding_length_per_layer_input": 0,
        "feed_forward_length": config.intermediate_size,
        "nextn_predict_layers": config.num_layers,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": heads[0] if len(set(heads)) == 1 else list(heads),
        "attention.key_length": full.head_dim,
        "attention.value_length": full.head_dim,
        "attention.key_length_swa": sliding.head_dim,
        "attention.value_length_swa": sliding.head_dim,
        "attention.shared_kv_layers": config.num_layers,
        "attention.sliding_window": config.sliding_window or UNUSED_WINDOW,
        "attention.sliding_window_pattern": [kind == SLIDING for kind in config.layer_types],
        "rope.dimension_count": full.head_dim,
        "rope.dimension_count_swa": sliding.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": full.rope.theta,
        "rope.freq_base_swa": sliding.rope.theta,
    }
    if config.final_logit_softcap is not None:
        keys["final_logit_softcapping"] = config.final_logit_softcap
    return keys


def _build_own_keys(config: DrafterConfig, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Build our own keys, without their prefix: what llama.cpp's ``keys`` cannot say, or not to the bit."""
    own_keys: dict[str, Any] = {"hidden_activation": config.hidden_activation}
    numbers = dict(keys)
    if FULL in config.layer_types:
        own_keys["rope.partial_rotary_factor"] = np.float64(config.full.rope.partial_rotary_factor)
        numbers[_FACTOR] = config.full.rope.factor
    inexact = [
        key for key in _NUMBERS if key in numbers and _convert_to_python(np.float32(numbers[key])) != numbers[key]
    ]
    return own_keys | {key: np.float64(numbers[key]) for key in inexact}


def _compute_frequency_factors(config: DrafterConfig) -> Floats:
    """Return the divisors of full layers' frequencies, F32 [head_dim / 2]; empty without full layers."""
    full = config.kv_layers.get(FULL)
    if full is None:
        return _NO_FACTORS
    factors = np.full(full.head_dim // 2, _NEVER_TURNED, np.float32)
    # The same number of dimension pairs as in mtp_extract.graph.rotation.compute_frequencies.
    factors[: int(full.rope.partial_rotary_factor * full.head_dim // 2)] = full.rope.factor
    return factors


class _GgufFields(Struct, kw_only=True):
    """The keys that are read: ours, and llama.cpp's without the architecture."""

    layers: Size = field(name="block_count")
    hidden_size: Size = field(name="embedding_length")
    backbone_hidden_size: Size = field(name="embedding_length_out")
    intermediate_size: Size = field(name="feed_forward_length")
    num_heads: Size = field(name="attention.head_count")
    num_kv_heads: Size | list[Size] = field(name="attention.head_count_kv")
    head_dim: Size = field(name="attention.key_length")
    sliding_head_dim: Size = field(name="attention.key_length_swa")
    sliding_window: Size = field(name="attention.sliding_window")
    slides: list[bool] = field(name="attention.sliding_window_pattern")
    theta: PositiveNumber = field(name="rope.freq_base")
    sliding_theta: PositiveNumber = field(name="rope.freq_base_swa")
    factor: PositiveNumber = field(name=_FACTOR, default=1.0)
    share: PositiveShare | None = field(name=f"{OWN}rope.partial_rotary_factor", default=None)
    rms_norm_eps: PositiveNumber = field(name="attention.layer_norm_rms_epsilon", default=1e-6)
    final_logit_softcap: PositiveNumber | None = field(name="final_logit_softcapping", default=None)
    hidden_activation: GateFunction = field(name=f"{OWN}hidden_activation", default="gelu_pytorch_tanh")
    max_position_embeddings: Size | None = field(name="context_length", default=None)


_SAME = (
    *("hidden_size", "backbone_hidden_size", "intermediate_size", "num_heads", "rms_norm_eps"),
    *("final_logit_softcap", "hidden_activation", "max_position_embeddings"),
)
"""Fields that a DrafterConfig has under the same names."""


def _convert_to_python(value: Any) -> Any:
    """Convert an FP32 or FP64 number to the float whose shortest decimal it has; leave other values."""
    return float(str(value)) if isinstance(value, np.floating) else value


def _parse_config(metadata: Mapping[str, Any], vocabulary: int, factors: Floats) -> DrafterConfig:
    """Invert :func:`_build_shape_keys` and :func:`_compute_frequency_factors`."""
    keys = {key.removeprefix(f"{ARCH}."): _convert_to_python(value) for key, value in metadata.items()}
    if turned := int(np.count_nonzero(factors < np.float32(_NEVER_TURNED))):
        keys[_FACTOR] = _convert_to_python(factors[0])
    keys |= {key: keys[OWN + key] for key in _NUMBERS if key in keys and OWN + key in keys}
    fields = reading.parse_fields(keys, _GgufFields)
    share = fields.share or 2 * turned / fields.head_dim or 1.0
    shared_fields = {name: getattr(fields, name) for name in _SAME}
    return DrafterConfig(vocab_size=vocabulary, layers=_build_layers(fields, share), **shared_fields)


def _build_layers(fields: _GgufFields, share: float) -> tuple[LayerConfig, ...]:
    """Build every layer; ``share`` is the rotated part of a full layer's heads."""
    heads = fields.num_kv_heads if isinstance(fields.num_kv_heads, list) else [fields.num_kv_heads] * fields.layers
    if not fields.layers == len(fields.slides) == len(heads):
        raise CheckpointError(
            f"expected sliding_window_pattern and head_count_kv of {fields.layers} layers, found others. "
            "Check the file."
        )
    full = RopeConfig(fields.theta, share, fields.factor)
    sliding = RopeConfig(fields.sliding_theta)
    return tuple(
        LayerConfig(SLIDING, fields.sliding_head_dim, kv_heads, fields.sliding_window, sliding)
        if slides
        else LayerConfig(FULL, fields.head_dim, kv_heads, None, full)
        for slides, kv_heads in zip(fields.slides, heads, strict=True)
    )
