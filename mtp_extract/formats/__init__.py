"""The formats, one module each. What ``FORMATS`` lists is what there is to choose from; of EAGLE-3 heads, ``HEADS``."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from mtp_extract.architecture.roles import EAGLE3, GEMMA4_MTP
from mtp_extract.errors import CheckpointError, either, escape, nearest

if TYPE_CHECKING:
    from mtp_extract.checkpoint.checkpoint import Checkpoint, Format


@dataclass(frozen=True)
class Listed:
    """A format as the list of choices has it. Its module is imported when it is chosen: a list costs nothing."""

    module: str
    dtypes: tuple[str, ...]  # output types, the default first
    about: str  # one line for users
    engines: tuple[str, ...] = ()  # those of ENGINES that load it
    library: str = ""  # what the Hub calls the library it is for
    rules: tuple[str, ...] = ()  # those of checkpoint.rounding.RULES whose codes it holds, the usual one first
    provenance_inside: bool = False  # whether the weights file has room for where it came from
    tokenizer_inside: bool = False  # and for the base's tokenizer
    activations: bool = False  # whether it holds the static quantization of activations
    architecture: str = GEMMA4_MTP
    instance: str = "FORMAT"  # its name in the module
    otherwise: Mapping[str, str] = field(default_factory=dict)  # engine → the name under which it is written for it
    variant: bool = False  # whether it is chosen by engine and not by name


ENGINES = ("transformers", "vllm", "sglang", "mlx_vlm", "llama_cpp")
"""What loads a drafter, by the name of its section in a model card."""

# Those whose scales are never negative.
_POSITIVE = ("q8_0", "int8", "int4")

FORMATS = {
    "transformers": Listed(
        module=f"{__name__}.transformers",
        dtypes=("bf16", "f16", "f32"),
        about="floats, for every engine but llama.cpp",
        engines=("transformers", "vllm", "sglang", "mlx_vlm"),
        library="transformers",
    ),
    "litert": Listed(f"{__name__}.litert", ("f32",), "one F32 tensor per stored constant"),
    "mlx": Listed(
        f"{__name__}.integers",
        ("codes",),
        "integers for mlx-vlm",
        instance="MLX",
        engines=("mlx_vlm",),
        library="mlx",
        rules=_POSITIVE,
    ),
    "compressed-tensors": Listed(
        f"{__name__}.integers",
        ("codes",),
        "integers for vLLM and transformers",
        instance="COMPRESSED_TENSORS",
        engines=("transformers", "vllm"),
        library="transformers",
        rules=_POSITIVE,
        otherwise={"sglang": "compressed-tensors-sglang"},
    ),
    "compressed-tensors-sglang": Listed(
        f"{__name__}.integers",
        ("codes",),
        "the same with a head of floats",
        engines=("transformers", "vllm", "sglang"),
        library="transformers",
        rules=_POSITIVE,
        instance="SGLANG",
        variant=True,
    ),
    "gguf": Listed(
        f"{__name__}.gguf",
        ("codes", "f32", "bf16", "f16"),
        "one file for llama.cpp, with the stored integers",
        engines=("llama_cpp",),
        library="gguf",
        rules=("q8_0", "q4_0"),
        provenance_inside=True,
        tokenizer_inside=True,
    ),
    "gemma": Listed(
        f"{__name__}.integers",
        ("codes",),
        "integers for transformers, with static scales of activations",
        instance="GEMMA",
        engines=("transformers",),
        library="transformers",
        rules=("int8", "int4"),
        activations=True,
    ),
}
"""Every format of an MTP drafter by name."""

HEADS = {
    "eagle3": Listed(
        f"{__name__}.eagle3",
        ("bf16", "f16", "f32"),
        "an EAGLE-3 head for SGLang and vLLM",
        engines=("vllm", "sglang"),
        architecture=EAGLE3,
        instance="EAGLE",
    ),
    "speculators": Listed(
        f"{__name__}.eagle3",
        ("bf16", "f16", "f32"),
        "an EAGLE-3 head for vLLM, which serves it by itself",
        engines=("vllm",),
        library="speculators",
        architecture=EAGLE3,
        instance="SPECULATORS",
    ),
}
"""Every layout of an EAGLE-3 head by name."""

EVERY: Mapping[str, Listed] = ChainMap(FORMATS, HEADS)
"""Both."""


@dataclass(frozen=True)
class Serves:
    """What an engine loads: formats, the best first; or why it loads none."""

    formats: tuple[str, ...] = ()
    none: str = ""


SERVES = {
    "transformers": Serves(("transformers", "compressed-tensors", "gemma")),
    "vllm": Serves(("transformers", "compressed-tensors", "speculators", "eagle3")),
    "sglang": Serves(("transformers", "compressed-tensors", "eagle3")),
    # The bundle's integers, which it runs on as they are, in a third of the bytes.
    "mlx-vlm": Serves(("mlx", "transformers")),
    "llama.cpp": Serves(("gguf",)),
    "tensorrt-llm": Serves(("transformers",)),
    "ollama": Serves(("transformers",)),
    "litert-lm": Serves(
        none="LiteRT-LM drafts with what its bundle holds, so nothing is to be written for it. To change that, put a "
        "drafter into the bundle."
    ),
    "lm-studio": Serves(
        none="LM Studio does not draft with a Gemma 4 drafter, whatever its format (seen in 0.4.20: its draft models "
        "are whole models). Its llama.cpp does by itself: choose llama.cpp, and llama-server."
    ),
}
"""What a user may call what is to serve the drafter → what that loads."""


def format_named(name: str) -> Format:
    """The format called ``name``.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in EVERY:
        choices = [name for name, listed in [*FORMATS.items(), *HEADS.items()] if not listed.variant]
        raise ValueError(f"format {escape(name)!r}: expected {either(choices)}.{nearest(name, choices)}")
    listed = EVERY[name]
    found: Format = getattr(import_module(listed.module), listed.instance)
    return found


def choose(name: str | None, engine: str | None, architecture: str = GEMMA4_MTP) -> str:
    """The name of the format to write: the one called ``name``, or where that is None the best for ``engine``.

    Without either it is the first of the architecture's.

    Raises:
        ValueError: there is no format or engine of that name, or the engine loads none such.
    """
    if name is not None:
        format_named(name)
    if engine is None:
        return name or next(known for known, listed in EVERY.items() if listed.architecture == architecture)
    if engine not in SERVES:
        raise ValueError(f"engine {escape(engine)!r}: expected {either(SERVES)}.{nearest(engine, SERVES)}")
    serves = SERVES[engine]
    if serves.none:
        raise ValueError(f"engine {engine!r}: {serves.none}")
    loads = [known for known in serves.formats if name or EVERY[known].architecture == architecture]
    if not loads or (name is not None and name not in loads):
        what = f"loads {either(loads)}, and {name} is none of them" if loads else f"loads no {architecture}"
        raise ValueError(f"engine {engine!r}: {what}. Leave one of the two out.")
    return name or loads[0]


def variant_for(name: str, engine: str | None) -> str:
    """The name under which the format ``name`` is written for ``engine``: mostly its own."""
    return name if engine is None else EVERY[name].otherwise.get(engine, name)


def format_of(directory: Path) -> Format:
    """The format of the checkpoint in ``directory``.

    Raises:
        CheckpointError: it is of none.
    """
    formats = [format_named(name) for name in EVERY]
    for found in formats:
        if found.recognizes(directory):
            return found
    if not directory.exists():
        raise CheckpointError(
            f"{escape(directory)}: expected a checkpoint's directory or an id of the Hugging Face Hub, found neither. "
            "Check the path."
        )
    if directory.is_file():
        raise CheckpointError(
            f"{escape(directory)}: expected a checkpoint's directory or a .gguf, found another file. Extract a "
            "bundle's drafter first."
        )
    raise CheckpointError(
        f"{escape(directory)}: expected {either(dict.fromkeys(f.marker for f in formats))} there, found none of them. "
        "Give the directory of a drafter's checkpoint."
    )


def weights_of(format_: Format, names: Iterable[str]) -> str | None:
    """Which of ``names``, of files of a directory of ``format_``, is that of the weights; None where none is."""
    return next((name for name in sorted(names) if is_called(name, format_.weights_file)), None)


def is_called(name: str, pattern: str) -> bool:
    """Whether a file at the top of a directory is called by ``pattern``; what lies deeper is named in full."""
    return name == pattern or ("/" not in name and fnmatchcase(name, pattern))


def architecture_of(directory: Path) -> str:
    """That of the drafter in ``directory``.

    Raises:
        CheckpointError: it holds none.
    """
    return EVERY[format_of(directory).name].architecture


def read_checkpoint(directory: Path | str) -> Checkpoint:
    """The checkpoint in ``directory``, of whichever format.

    Raises:
        CheckpointError: as :meth:`Format.read`.
    """
    folder = Path(directory)
    return format_of(folder).read(folder)
