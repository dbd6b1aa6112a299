"""Loading a base model and its tokenizer, and saying in one line why one cannot be."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mtp_extract.errors import MtpExtractError, PairError, escape, few
from mtp_extract.evaluation.extras import nothing_collected, quiet_transformers, require
from mtp_extract.io.opening import checkpoint_here
from mtp_extract.io.place import files_of

_WEIGHTS = re.compile(r"model.*\.safetensors")
_HEADROOM = 1.15  # weights, and what a forward needs with them
_MOST_LAYERS = 1024
_DEVICE = re.compile(r"cpu|mps|cuda(:\d+)?")
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "DefaultCPUAllocator")


@dataclass(frozen=True)
class LoadedBase:
    name: str  # as given
    model: Any  # of transformers
    tokenizer: Any  # of transformers
    device: torch.device  # where the drafter goes: the device of the base's embedding
    devices: tuple[str, ...]  # every device that holds a part, in words
    dtype: str  # of the weights, in words
    notes: tuple[str, ...]  # what was decided on the way

    @property
    def drafter_dtype(self) -> torch.dtype:
        """What the drafter computes in beside this base: float32 where the base does, else bfloat16."""
        return torch.float32 if self.dtype == "float32" else torch.bfloat16


@nothing_collected()
def load_base(name: str, device: str = "auto") -> LoadedBase:
    """Load the base ``name``: a directory, or ``org/name`` (``@revision``) of the Hugging Face Hub.

    Args:
        device: ``auto`` (all GPUs when there are several, else the GPU, else the CPU), ``cpu``, ``cuda``,
            ``cuda:N``, ``mps``; or ``balanced`` to spread over all GPUs.

    Raises:
        PairError: no such directory, a drafter, no model or no tokenizer in it, or a tensor is missing.
        SourceError: the Hub cannot be reached, has no such model, wants a token, or the model is larger than memory.
        MtpExtractError: too little memory, or a device that is not there.
    """
    require("torch", "transformers", "accelerate")
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

    placed = _placed(device)
    room = int(free_memory(placed) / _HEADROOM)
    directory, given = Path(checkpoint_here(name, largest=room)), escape(name)
    if not directory.is_dir():
        raise PairError(
            f"{given}: expected a directory or a Hub id such as google/gemma-4-E4B-it, found neither. Give a base."
        )
    if not (directory / "config.json").is_file():
        raise PairError(f"{given}: expected a model's config.json there, found none. Give the base model's directory.")
    size = sum(file.stat().st_size for file in files_of(directory) if _WEIGHTS.fullmatch(file.name))
    if size > room:  # before the machine starts to swap
        raise MtpExtractError(
            f"too little memory on {placed or 'all GPUs'}: the base has {size / 1e9:.1f} GB of weights, for "
            f"{room / 1e9:.1f} GB there is room. Close other programs, use another device, or a machine with more",
            remedies=("device",),
        )
    with _explained(name, "model"):
        stored, _ = PretrainedConfig.get_config_dict(directory)
        layers = (stored.get("text_config") or stored).get("num_hidden_layers", 1)
        # Before transformers sees it: a config of a billion layers keeps it busy for hours.
        if not 0 < layers <= _MOST_LAYERS:
            raise ValueError(f"{escape(layers)} layers")
        config = AutoConfig.from_pretrained(directory)
    if str(config.model_type).endswith("_assistant"):
        raise PairError(
            f"{given}: expected a base model, found a drafter ({config.model_type}). Give the model that it drafts for."
        )
    half = torch.float16 in (getattr(config, "dtype", None), getattr(config.get_text_config(), "dtype", None))
    with memory_guard("loading the base"), quiet_transformers():
        with _explained(name, "tokenizer"):
            tokenizer = AutoTokenizer.from_pretrained(directory)
        with _explained(name, "model"):
            # What has another shape is refused below, by name; transformers would say that its log tells.
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                directory,
                dtype=torch.bfloat16 if half else "auto",
                device_map="auto" if placed is None else {"": placed},
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
    model, info = loaded
    # transformers would have filled these with random numbers.
    mismatched = [key for key, *_ in info["mismatched_keys"]]
    parts = (("missing", info["missing_keys"]), ("of another shape than its config says", mismatched))
    if wrong := [f"{what}: {few(sorted(keys))}" for what, keys in parts if keys]:
        raise PairError(f"{given}: expected every tensor of the base, found {'; '.join(wrong)}. Fetch the model again.")
    model = model.eval().requires_grad_(False)
    embedding = model.get_input_embeddings().weight
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    notes = ("the base is stored as float16, whose range Gemma 4 leaves: loaded as bfloat16",) if half else ()
    return LoadedBase(name, model, tokenizer, embedding.device, tuple(devices), str(embedding.dtype)[6:], notes)


def _placed(device: str) -> torch.device | None:
    """The one device that ``device`` means, or None for all GPUs.

    Raises:
        MtpExtractError: it is not there.
    """
    gpus = torch.cuda.device_count()
    if device == "auto":
        device = "balanced" if gpus > 1 else "cuda:0" if gpus else "cpu"
    if device == "balanced" and gpus:
        return None
    try:
        if _DEVICE.fullmatch(device):
            return torch.empty(0, device=device).device
    except (AssertionError, RuntimeError):  # as torch raises for what it does not have
        pass
    raise MtpExtractError(
        f"expected a device that is there (auto, balanced, cpu, cuda:N or mps), found {escape(device)}. Let it be "
        "chosen.",
        remedies=("device=auto",),
    )


def free_memory(device: torch.device | None) -> int:
    """Bytes that can be had on ``device``, or on all GPUs together."""
    from accelerate.utils import get_max_memory

    free = get_max_memory()
    if device is None:
        return sum(size for key, size in free.items() if isinstance(key, int))
    key = (device.index or 0) if device.type == "cuda" else "mps" if "mps" in free else "cpu"
    return int(free[key])


@contextmanager
def _explained(name: str, what: str) -> Iterator[None]:
    """Turn what transformers raises for a missing or broken part, but for want of memory, into a line."""
    try:
        yield
    except Exception as error:  # What a damaged part raises in there has no class of its own.
        if _is_out_of_memory(error):
            raise
        reason = escape(str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__)
        raise PairError(
            f"{escape(name)}: expected a {what}, found: {reason}. Give a Gemma 4 base model in transformers' format, "
            "with its tokenizer files in the same directory."
        ) from error


@contextmanager
def memory_guard(doing: str) -> Iterator[None]:
    """Turn running out of memory into an error that says what to do.

    Raises:
        MtpExtractError: memory ran out.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        raise MtpExtractError(
            f"too little memory while {doing}. Use a smaller batch, fewer prompts or new tokens, the CPU, or a machine "
            "with more",
            remedies=("batch", "prompts", "new_tokens", "device=cpu"),
        ) from error


def _is_out_of_memory(error: Exception) -> bool:
    known = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, known) or any(sign in str(error) for sign in _OUT_OF_MEMORY)
