"""Load a base model and its tokenizer, or say in one line why that is impossible."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mtp_extract.errors import MtpExtractError, PairError, escape, list_few
from mtp_extract.evaluation.extras import quiet_transformers, require_packages
from mtp_extract.io.opening import fetch_checkpoint

_HEADROOM = 1.15  # memory for weights and activations, over the memory of the weights
_MOST_LAYERS = 1024
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "DefaultCPUAllocator")


@dataclass(frozen=True)
class LoadedBase:
    name: str  # as given
    model: Any  # of transformers
    tokenizer: Any  # of transformers
    device: torch.device  # of the base's embedding, where the drafter goes, too
    devices: tuple[str, ...]  # names of all devices that hold a part of it
    dtype: str  # name of the weights' dtype, without torch.
    notes: tuple[str, ...]  # decisions that the user should know of

    @property
    def drafter_dtype(self) -> torch.dtype:
        """The dtype for a drafter of this base: float32 if the base has it, else bfloat16."""
        return torch.float32 if self.dtype == "float32" else torch.bfloat16


def load_base(name: str, device: str = "auto") -> LoadedBase:
    """Load the base ``name``: a directory, or ``org/name`` (``@revision``) of the Hugging Face Hub.

    Args:
        device: ``cpu``, ``cuda``, ``cuda:N``, ``mps``; ``balanced``, over all GPUs; ``auto``, GPUs or the CPU.

    Raises:
        PairError: it has no model or no tokenizer, is a drafter, or lacks a tensor.
        CheckpointError: it is a LoRA adapter.
        SourceError: the Hub cannot be reached, has no such model, wants a token, or the model is larger than memory.
        MtpExtractError: too little memory, or a device that is not there.
    """
    require_packages("torch", "transformers", "accelerate")
    chosen = _choose_device(device)
    room = int(free_memory(chosen) / _HEADROOM)
    directory = Path(fetch_checkpoint(name, largest=room))
    _require_memory(directory, room, chosen)
    try:
        with guard_memory("loading the base"):
            model, tokenizer, notes = _load_model_and_tokenizer(directory, chosen)
    except MtpExtractError:
        raise
    except Exception as error:  # transformers raises any class for a damaged file
        reason = escape(str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__)
        raise PairError(
            f"{escape(name)}: expected a Gemma 4 base model of transformers with its tokenizer, found: {reason}. "
            "Give a directory that has both, or a Hub id such as google/gemma-4-E4B-it."
        ) from error
    embedding = model.get_input_embeddings().weight
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    return LoadedBase(name, model, tokenizer, embedding.device, tuple(devices), str(embedding.dtype)[6:], notes)


def _require_memory(directory: Path, room: int, device: torch.device | None) -> None:
    """Raise MtpExtractError, before the machine swaps, if weights in ``directory`` exceed ``room``, in bytes."""
    size = sum(file.stat().st_size for file in directory.glob("model*.safetensors"))
    if size > room:
        raise MtpExtractError(
            f"too little memory on {device or 'all GPUs'}: the base has {size / 1e9:.1f} GB of weights, and there "
            f"is room for {room / 1e9:.1f} GB. Close other programs, use another device, or a machine with more",
            remedies=("device",),
        )


def _load_model_and_tokenizer(directory: Path, device: torch.device | None) -> tuple[Any, Any, tuple[str, ...]]:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    quiet_transformers()
    _require_few_layers(directory)
    config = AutoConfig.from_pretrained(directory)
    if str(config.model_type).endswith("_assistant"):
        raise ValueError(f"a drafter ({config.model_type})")
    half = torch.float16 in (getattr(config, "dtype", None), getattr(config.get_text_config(), "dtype", None))
    notes = ("the base is stored as float16, whose range Gemma 4 leaves: loaded as bfloat16",) if half else ()

    tokenizer = AutoTokenizer.from_pretrained(directory)
    # Tensors of another shape are refused below, by name; the error of transformers would only refer to its log.
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=torch.bfloat16 if half else "auto",
        device_map="auto" if device is None else {"": device},
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    model, info = loaded
    # transformers fills these with random numbers.
    if wrong := {*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])}:
        raise ValueError(
            f"tensors that are missing or of another shape than its config says: {list_few(sorted(wrong))}"
        )
    return model.eval().requires_grad_(False), tokenizer, notes


def _require_few_layers(directory: Path) -> None:
    """Raise ValueError for more than 1024 layers, or none: with a billion transformers would be busy for hours."""
    stored = json.loads((directory / "config.json").read_bytes())
    layers = (stored.get("text_config") or stored).get("num_hidden_layers", 1)
    if not 0 < layers <= _MOST_LAYERS:
        raise ValueError(f"{layers} layers")


def _choose_device(device: str) -> torch.device | None:
    """Return the torch device of this name, or None for all GPUs; MtpExtractError if the machine lacks it."""
    gpus = torch.cuda.device_count()
    if (gpus > 1 and device == "auto") or (gpus and device == "balanced"):
        return None
    try:
        name = ("cuda" if gpus else "cpu") if device == "auto" else device
        chosen = torch.empty(0, device=name).device
        if chosen.type in ("cpu", "cuda", "mps"):
            return chosen
    except (AssertionError, RuntimeError):  # torch raises either for a device that it does not have
        pass
    raise MtpExtractError(
        f"expected a device of this machine (auto, balanced, cpu, cuda:N or mps), found {escape(device)}. Use another.",
        remedies=("device=auto",),
    )


def free_memory(device: torch.device | None) -> int:
    """Return the free bytes of ``device``, or of all GPUs together for None."""
    from accelerate.utils import get_max_memory

    free = get_max_memory()  # by GPU number, or by name
    if device is None:
        return sum(free[gpu] for gpu in range(torch.cuda.device_count()))
    return int(free[(device.index or 0) if device.type == "cuda" else "mps" if "mps" in free else "cpu"])


@contextmanager
def guard_memory(doing: str) -> Iterator[None]:
    """Turn an out-of-memory error into an MtpExtractError that says what to do."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not any(sign in str(error) for sign in _OUT_OF_MEMORY):
            raise
        raise MtpExtractError(
            f"too little memory while {doing}. Use a smaller batch, fewer prompts or new tokens, the CPU, or a machine "
            "with more",
            remedies=("batch", "prompts", "new_tokens", "device=cpu"),
        ) from error
