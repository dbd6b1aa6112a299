"""The formats, a row each in ``ALL_FORMATS``, and the ``ENGINES`` that load them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from mtp_extract.architecture import ARCHITECTURES
from mtp_extract.architecture.architecture import Architecture
from mtp_extract.architecture.eagle3 import EAGLE3
from mtp_extract.architecture.roles import GEMMA4_MTP
from mtp_extract.errors import CheckpointError, UnsupportedError, escape, format_choice, suggest_name

if TYPE_CHECKING:
    from mtp_extract.checkpoint.checkpoint import Checkpoint
    from mtp_extract.checkpoint.format import Format


@dataclass(frozen=True)
class FormatInfo:
    """A row of the table of formats. The module of a format is imported when the format is used, not for the table."""

    instance: str  # the Format object, as module:name
    dtypes: tuple[str, ...]  # output types, the default first
    about: str  # one line for users
    library: str = ""  # the Hub's name of the library that loads it
    rules: tuple[str, ...] = ()  # of checkpoint.rounding.RULES, those whose codes it holds; the usual one first
    activations: bool = False  # it holds static scales of activations
    architecture: str = GEMMA4_MTP
    read_as: str = ""  # the format that its directories are read back as, if another
    # Whether a config.json is this format's.
    is_config: Callable[[Mapping[str, Any]], bool] = lambda config: False


def _is_quantized_by(method: str, config: Mapping[str, Any]) -> bool:
    # MLX's converters write their own entry under this key, too.
    entry = config.get("quantization_config")
    return not _has_mlx_entry(config) and isinstance(entry, dict) and entry.get("quant_method") == method


def _has_mlx_entry(config: Mapping[str, Any]) -> bool:
    return isinstance(config.get("quantization"), dict)


_CODES, _FLOATS = ("codes",), ("bf16", "f16", "f32")
# Rounding rules whose scales are never negative.
_POSITIVE = ("q8_0", "int8", "int4")

ALL_FORMATS: dict[str, FormatInfo] = {
    "transformers": FormatInfo(
        "mtp_extract.formats.directory:TRANSFORMERS_LAYOUT",
        _FLOATS,
        "floats, for every engine but llama.cpp",
        "transformers",
        is_config=lambda config: True,  # even with an unknown quantization method
    ),
    "litert": FormatInfo("mtp_extract.formats.litert:LITERT_LAYOUT", ("f32",), "one F32 tensor per stored constant"),
    "mlx": FormatInfo(
        "mtp_extract.formats.integers:MLX",
        _CODES,
        "integers for mlx-vlm",
        "mlx",
        _POSITIVE,
        is_config=_has_mlx_entry,
    ),
    "compressed-tensors": FormatInfo(
        "mtp_extract.formats.integers:COMPRESSED_TENSORS",
        _CODES,
        "integers for vLLM and transformers",
        "transformers",
        _POSITIVE,
        is_config=partial(_is_quantized_by, "compressed-tensors"),
    ),
    "compressed-tensors-sglang": FormatInfo(
        "mtp_extract.formats.integers:COMPRESSED_FOR_SGLANG",
        _CODES,
        "the same with a head of floats, for SGLang",
        "transformers",
        _POSITIVE,
        read_as="compressed-tensors",
    ),
    "gguf": FormatInfo(
        "mtp_extract.formats.gguf:GGUF",
        ("codes", "f32", "bf16", "f16"),
        "one file for llama.cpp, with the stored integers",
        "gguf",
        ("q8_0", "q4_0"),
    ),
    "gemma": FormatInfo(
        "mtp_extract.formats.integers:GEMMA",
        _CODES,
        "integers for transformers, with static scales of activations",
        "transformers",
        ("int8", "int4"),
        activations=True,
        is_config=partial(_is_quantized_by, "gemma"),
    ),
    "eagle3": FormatInfo(
        "mtp_extract.formats.eagle3:EAGLE",
        _FLOATS,
        "an EAGLE-3 head for SGLang and vLLM",
        architecture=EAGLE3,
        is_config=lambda config: "eagle3" in str(config.get("architectures")).lower(),
    ),
    "speculators": FormatInfo(
        "mtp_extract.formats.eagle3:SPECULATORS",
        _FLOATS,
        "an EAGLE-3 head for vLLM, which serves it by itself",
        "speculators",
        architecture=EAGLE3,
        is_config=lambda config: "speculators_model_type" in config,
    ),
}
"""Every format by name. If several rows claim a config.json, the last one is its format."""

MTP_FORMATS = {name: row for name, row in ALL_FORMATS.items() if row.architecture == GEMMA4_MTP}
"""The formats of MTP drafters."""


ENGINES: Mapping[str, tuple[str, ...]] = {
    "transformers": ("transformers", "compressed-tensors", "compressed-tensors-sglang", "gemma"),
    "vllm": ("transformers", "compressed-tensors", "compressed-tensors-sglang", "speculators", "eagle3"),
    "sglang": ("transformers", "compressed-tensors-sglang", "eagle3"),
    # mlx-vlm runs the bundle's integers as they are, in a third of the bytes of floats.
    "mlx-vlm": ("mlx", "transformers"),
    "llama.cpp": ("gguf",),
    "tensorrt-llm": ("transformers",),
    "ollama": ("transformers",),
    "litert-lm": (),
    "lm-studio": (),
}
"""Engine, as users call it → the formats that it loads, the best first."""

_NO_FORMAT = {
    "litert-lm": "LiteRT-LM drafts with what its bundle holds: put a drafter into the bundle with `mtp-insert`.",
    "lm-studio": "LM Studio does not draft with a Gemma 4 drafter, whatever its format (seen in 0.4.20: its draft "
    "models are whole models). Serve it with llama.cpp's own llama-server instead: choose llama.cpp.",
}
"""Engine that loads no format → why, and what to do instead."""


def list_choices() -> tuple[str, ...]:
    """List the names that a user may choose a format by: engines, then formats."""
    return tuple(dict.fromkeys((*ENGINES, *ALL_FORMATS)))


def list_engines_for(name: str) -> tuple[str, ...]:
    """List the engines that load the format ``name``."""
    return tuple(engine for engine, formats in ENGINES.items() if name in formats)


def load_format(name: str) -> Format:
    """Import and return the format ``name``; ValueError if there is none."""
    if name not in ALL_FORMATS:
        raise ValueError(
            f"format {escape(name)!r}: expected {format_choice(ALL_FORMATS)}.{suggest_name(name, ALL_FORMATS)}"
        )
    format_: Format = resolve_name(ALL_FORMATS[name].instance)
    return format_


def find_format_architecture(name: str) -> Architecture:
    """Return the architecture of the drafters that the format ``name`` holds."""
    return ARCHITECTURES[ALL_FORMATS[name].architecture]


def choose_format(name: str | None, architecture: str = GEMMA4_MTP) -> str:
    """Return the format to write: ``name`` itself (in any case), or the best one for the engine ``name``.

    Without a name it is the first format of the architecture.

    Raises:
        ValueError: there is no format and no engine of that name.
        UnsupportedError: the engine loads no drafter of that architecture, or none at all.
    """
    if name is not None:
        name = name.lower()  # vLLM, SGLang and llama.cpp write themselves with capitals
    if name is not None and name in ALL_FORMATS:
        return name
    if name is not None and name not in ENGINES:
        raise ValueError(
            f"format {escape(name)!r}: expected {format_choice(list_choices())}.{suggest_name(name, list_choices())}"
        )
    if name in _NO_FORMAT:
        raise UnsupportedError(f"{name}: {_NO_FORMAT[name]}")
    for candidate in ALL_FORMATS if name is None else ENGINES[name]:
        if ALL_FORMATS[candidate].architecture == architecture:
            return candidate
    raise UnsupportedError(f"{name} loads no drafter of the architecture {architecture}.", remedies=("format",))


def detect_format(directory: Path) -> Format:
    """Detect the format of a checkpoint directory, or of a ``.gguf`` file; CheckpointError if there is none."""
    if directory.suffix == ".gguf" and directory.is_file():
        return load_format("gguf")
    if (config := directory / "config.json").is_file():
        # Imported here, since choosing a format by name needs no reader.
        from mtp_extract.checkpoint.documents import read_object

        document = read_object(config)
        return load_format(next(name for name in reversed(ALL_FORMATS) if ALL_FORMATS[name].is_config(document)))
    formats = [load_format(name) for name in ALL_FORMATS]
    for format_ in formats:
        if any(path.is_file() for path in directory.glob(format_.marker)):
            return format_
    if not directory.exists():
        problem = "a checkpoint's directory or an id of the Hugging Face Hub, found neither. Check the path"
    elif directory.is_file():
        problem = "a checkpoint's directory or a .gguf, found another file. Extract a bundle's drafter first"
    else:
        markers = format_choice(dict.fromkeys(f.marker for f in formats))
        problem = f"{markers} there, found none of them. Give the directory of a drafter's checkpoint"
    raise CheckpointError(f"{escape(directory)}: expected {problem}.")


def find_weights_file(format_: Format, names: Iterable[str]) -> str | None:
    """Return the first of the file ``names`` that is the weights file of ``format_``; None if none is."""
    return next((name for name in sorted(names) if matches_pattern(name, format_.weights_file)), None)


def list_checkpoint_files(directory: Path, format_: Format) -> set[str]:
    """List the names of the files that a checkpoint in ``directory`` is read from; of several GGUF files the first.

    Raises:
        CheckpointError: a weights file is missing.
    """
    from mtp_extract.formats.reading import INDEX_ENDING, find_weight_files

    if "*" in format_.weights_file:
        return {min((path.name for path in directory.glob(format_.weights_file)), default=format_.weights_file)}
    weights = {path.name for path in find_weight_files(directory, format_.weights_file)}
    return {format_.marker, f"{format_.weights_file}{INDEX_ENDING}", *weights, *format_.further_files}


def matches_pattern(name: str, pattern: str) -> bool:
    """Whether the file ``name`` matches ``pattern``; a path with folders must be equal to it."""
    return name == pattern or ("/" not in name and fnmatchcase(name, pattern))


def read_checkpoint(directory: Path | str) -> Checkpoint:
    """Read the checkpoint in ``directory``, of whichever format; CheckpointError as in :meth:`Format.read`."""
    folder = Path(directory)
    return detect_format(folder).read(folder)
