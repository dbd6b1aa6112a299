"""What there is to choose from: ``FORMATS`` of MTP drafters, ``HEADS`` of EAGLE-3, ``ENGINES`` that load them."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from mtp_extract.architecture.roles import EAGLE3, GEMMA4_MTP
from mtp_extract.errors import CheckpointError, UnsupportedError, either, escape, nearest

if TYPE_CHECKING:
    from mtp_extract.checkpoint.checkpoint import Checkpoint, Format


@dataclass(frozen=True)
class FormatInfo:
    """A format as the list of choices has it. Its module is imported when it is chosen: a list costs nothing."""

    instance: str  # its module, and its name there
    dtypes: tuple[str, ...]  # output types, the default first
    about: str  # one line for users
    library: str = ""  # what the Hub calls the library it is for
    rules: tuple[str, ...] = ()  # those of checkpoint.rounding.RULES whose codes it holds, the usual one first
    activations: bool = False  # whether it holds the static quantization of activations
    architecture: str = GEMMA4_MTP
    read_as: str = ""  # the format whose reader reads what this one writes, if not its own


_CODES, _FLOATS = ("codes",), ("bf16", "f16", "f32")
# Those whose scales are never negative.
_POSITIVE = ("q8_0", "int8", "int4")

FORMATS = {
    "transformers": FormatInfo("directory.FORMAT", _FLOATS, "floats, for every engine but llama.cpp", "transformers"),
    "litert": FormatInfo("litert.FORMAT", ("f32",), "one F32 tensor per stored constant"),
    "mlx": FormatInfo("integers.MLX", _CODES, "integers for mlx-vlm", "mlx", _POSITIVE),
    "compressed-tensors": FormatInfo(
        "integers.COMPRESSED_TENSORS", _CODES, "integers for vLLM and transformers", "transformers", _POSITIVE
    ),
    "compressed-tensors-sglang": FormatInfo(
        "integers.SGLANG",
        _CODES,
        "the same with a head of floats, for SGLang",
        "transformers",
        _POSITIVE,
        read_as="compressed-tensors",
    ),
    "gguf": FormatInfo(
        "gguf.FORMAT",
        ("codes", "f32", "bf16", "f16"),
        "one file for llama.cpp, with the stored integers",
        "gguf",
        ("q8_0", "q4_0"),
    ),
    "gemma": FormatInfo(
        "integers.GEMMA",
        _CODES,
        "integers for transformers, with static scales of activations",
        "transformers",
        ("int8", "int4"),
        activations=True,
    ),
}
"""Every format of an MTP drafter by name."""

HEADS = {
    "eagle3": FormatInfo("eagle3.EAGLE", _FLOATS, "an EAGLE-3 head for SGLang and vLLM", architecture=EAGLE3),
    "speculators": FormatInfo(
        "eagle3.SPECULATORS",
        _FLOATS,
        "an EAGLE-3 head for vLLM, which serves it by itself",
        "speculators",
        architecture=EAGLE3,
    ),
}
"""Every layout of an EAGLE-3 head by name."""

EVERY: Mapping[str, FormatInfo] = ChainMap(FORMATS, HEADS)
"""Both."""


ENGINES: Mapping[str, tuple[str, ...]] = {
    "transformers": ("transformers", "compressed-tensors", "compressed-tensors-sglang", "gemma"),
    "vllm": ("transformers", "compressed-tensors", "compressed-tensors-sglang", "speculators", "eagle3"),
    "sglang": ("transformers", "compressed-tensors-sglang", "eagle3"),
    # The bundle's integers, which it runs on as they are, in a third of the bytes.
    "mlx-vlm": ("mlx", "transformers"),
    "llama.cpp": ("gguf",),
    "tensorrt-llm": ("transformers",),
    "ollama": ("transformers",),
    "litert-lm": (),
    "lm-studio": (),
}
"""What a user may call what is to serve the drafter → the formats that it loads, the best first."""

_NO_FORMAT = {
    "litert-lm": "LiteRT-LM drafts with what its bundle holds: put a drafter into the bundle with `mtp-insert`.",
    "lm-studio": "LM Studio does not draft with a Gemma 4 drafter, whatever its format (seen in 0.4.20: its draft "
    "models are whole models). Serve it with llama.cpp's own llama-server instead: choose llama.cpp.",
}
"""Why an engine loads none."""

NAMES = tuple(dict.fromkeys((*ENGINES, *EVERY)))
"""By which a user chooses a format: its own, or an engine's."""


def engines_for(name: str) -> tuple[str, ...]:
    """The engines that load the format ``name``; none where there is no format of that name."""
    return tuple(engine for engine, formats in ENGINES.items() if name in formats)


def format_named(name: str) -> Format:
    """The format called ``name``.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in EVERY:
        raise ValueError(f"format {escape(name)!r}: expected {either(EVERY)}.{nearest(name, EVERY)}")
    module, instance = EVERY[name].instance.split(".")
    format_: Format = getattr(import_module(f"{__name__}.{module}"), instance)
    return format_


def choose(name: str | None, architecture: str = GEMMA4_MTP) -> str:
    """The format to write: the one called ``name`` (in any case), or the best for the engine called so.

    Without a name it is the first of the architecture's.

    Raises:
        ValueError: there is no format and no engine of that name.
        UnsupportedError: the engine loads no drafter of that architecture, or none at all.
    """
    if name is not None:
        name = name.lower()  # vLLM, SGLang and llama.cpp write themselves with capitals
    if name is not None and name in EVERY:
        return name
    if name is not None and name not in ENGINES:
        raise ValueError(f"format {escape(name)!r}: expected {either(NAMES)}.{nearest(name, NAMES)}")
    if name in _NO_FORMAT:
        raise UnsupportedError(f"{name}: {_NO_FORMAT[name]}")
    for candidate in EVERY if name is None else ENGINES[name]:
        if EVERY[candidate].architecture == architecture:
            return candidate
    raise UnsupportedError(f"{name} loads no drafter of the architecture {architecture}.", remedies=("format",))


def format_of(directory: Path) -> Format:
    """The format of the checkpoint in ``directory``.

    Raises:
        CheckpointError: it is of none.
    """
    if directory.suffix == ".gguf" and directory.is_file():
        return format_named("gguf")
    if (config := directory / "config.json").is_file():
        from mtp_extract.formats.reading import kind_of  # no format is imported before it is needed

        return format_named(kind_of(config))
    formats = [format_named(name) for name in EVERY]
    for format_ in formats:
        if any(path.is_file() for path in directory.glob(format_.marker)):
            return format_
    if not directory.exists():
        what = "a checkpoint's directory or an id of the Hugging Face Hub, found neither. Check the path"
    elif directory.is_file():
        what = "a checkpoint's directory or a .gguf, found another file. Extract a bundle's drafter first"
    else:
        markers = either(dict.fromkeys(f.marker for f in formats))
        what = f"{markers} there, found none of them. Give the directory of a drafter's checkpoint"
    raise CheckpointError(f"{escape(directory)}: expected {what}.")


def weights_of(format_: Format, names: Iterable[str]) -> str | None:
    """Which of ``names``, of files of a directory of ``format_``, is that of the weights; None where none is."""
    return next((name for name in sorted(names) if is_called(name, format_.weights_file)), None)


def own_files(directory: Path, format_: Format) -> set[str]:
    """Names of the files in ``directory`` that a drafter in ``format_`` is read from; of several GGUF the first.

    Raises:
        CheckpointError: its weights are in no file, or not in all that they should be in.
    """
    from mtp_extract.formats.reading import INDEX_ENDING, weight_files

    if "*" in format_.weights_file:
        return {min((path.name for path in directory.glob(format_.weights_file)), default=format_.weights_file)}
    weights = {path.name for path in weight_files(directory, format_.weights_file)}
    return {format_.marker, f"{format_.weights_file}{INDEX_ENDING}", *weights, *format_.further_files}


def is_called(name: str, pattern: str) -> bool:
    """Whether a file at the top of a directory is called by ``pattern``; what lies deeper is named in full."""
    return name == pattern or ("/" not in name and fnmatchcase(name, pattern))


def read_checkpoint(directory: Path | str) -> Checkpoint:
    """The checkpoint in ``directory``, of whichever format.

    Raises:
        CheckpointError: as :meth:`Format.read`.
    """
    folder = Path(directory)
    return format_of(folder).read(folder)
