"""Loading a base model and its tokenizer, and saying clearly why one cannot be."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mtp_extract.errors import HubError, MtpExtractError, PairError, SourceError, escape, few
from mtp_extract.evaluate.base_size import BaseSize, check_room, give_back, size_of
from mtp_extract.evaluate.extras import quiet_transformers, require
from mtp_extract.io.http_library import FaultError, faults
from mtp_extract.io.place import files_of

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
# Weights, and what a forward needs beside them.
_HEADROOM = 1.15
_PATIENCE = 20.0
_MOST_LAYERS, _WIDEST = 1024, 1 << 20
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


def load_base(name: str, device: str = "auto") -> LoadedBase:
    """Load the base ``name``: a directory, or ``org/name`` (``@revision``) of the Hugging Face Hub.

    Args:
        device: ``auto`` (all GPUs when there are several, else the GPU, else the CPU), ``cpu``, ``cuda``,
            ``cuda:N``, ``mps``; or ``balanced`` to spread over all GPUs.

    Raises:
        PairError: no such directory, no model or no tokenizer in it.
        HubError: the Hub cannot be reached, or has no such model, or wants a token.
        MtpExtractError: too little memory, or a device that is not there.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    placed = placement(device)
    where, found, config = _configured(name)
    local = Path(where).is_dir()
    notes = []
    dtype: str | torch.dtype = "auto"
    if (
        getattr(config, "dtype", None) is torch.float16
        or getattr(config.get_text_config(), "dtype", None) is torch.float16
    ):
        dtype = torch.bfloat16
        notes.append("the base is stored as float16, whose range Gemma 4 leaves: loaded as bfloat16")
    with _explained(name, local, "tokenizer"):
        if local and not any((Path(where) / file).is_file() for file in _TOKENIZER_FILES):
            raise OSError(f"none of {', '.join(_TOKENIZER_FILES)}")
        tokenizer = AutoTokenizer.from_pretrained(where, **found)
    # Reading Gemma 4's, 28 MB of JSON, leaves 310 MB of it.
    give_back()
    _check_room(size_of(where, found, config).weights or 0, placed)
    with memory_guard("loading the base"), _explained(name, local, "model"), quiet_transformers():
        if placed is None:
            found["device_map"] = "auto"
        # What has another shape is refused below, by name; transformers would say that its log tells.
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            where, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, **found
        )
        model, info = loaded
        _check_whole(name, model, info)
        model = (model if placed is None else model.to(placed)).eval().requires_grad_(False)
    embedding = model.get_input_embeddings().weight
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    return LoadedBase(name, model, tokenizer, embedding.device, tuple(devices), str(embedding.dtype)[6:], tuple(notes))


def read_size(name: str) -> BaseSize:
    """How large the base ``name`` is; its weights are not read, and from the Hub come headers alone.

    Raises:
        PairError, HubError: as for :func:`load_base`.
    """
    return size_of(*_configured(name))


def _configured(name: str) -> tuple[str, dict[str, Any], Any]:
    """Where it lies, what to pass to ``from_pretrained``, and its config."""
    from transformers import AutoConfig, PretrainedConfig

    where, revision = _locate(name)
    local = Path(where).is_dir()
    found: dict[str, Any] = {} if local else _reach(where, revision)
    with _explained(name, local, "model"):
        stored, _ = PretrainedConfig.get_config_dict(where, **found)
    # Before transformers sees it: a config of a billion layers keeps it busy for hours.
    text = stored.get("text_config")
    _check_size(name, text if isinstance(text, dict) else stored)
    with _explained(name, local, "model"):
        config = AutoConfig.from_pretrained(where, **found)
    if str(config.model_type).endswith("_assistant"):
        raise PairError(
            f"expected a base model in {escape(name)}, found a drafter ({config.model_type}); give the model that it "
            "drafts for"
        )
    return where, found, config


def _check_room(weights: int, device: torch.device | None) -> None:
    """Refuse a load that cannot succeed, before the machine starts to swap."""
    check_room(int(weights * _HEADROOM), device, "the base needs")
    if device is not None and device.type == "cuda":
        check_room(weights, torch.device("cpu"), f"reading the base for {device} needs")


def _check_size(name: str, config: Mapping[str, Any]) -> None:
    """Refuse a model that nobody has, before it is built."""
    limits = {"num_hidden_layers": _MOST_LAYERS, "hidden_size": _WIDEST, "intermediate_size": _WIDEST}
    limits |= {"head_dim": _WIDEST, "num_attention_heads": _WIDEST, "vocab_size": _WIDEST << 4}
    for key, most in limits.items():
        value = config.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most):
            raise PairError(
                f"expected {key} of {escape(name)} to be 1 to {most}, found {escape(value)}; check its config"
            )


def _locate(name: str) -> tuple[str, str | None]:
    if Path(name).is_dir():
        if not (Path(name) / "config.json").is_file():
            raise PairError(
                f"expected a model's config.json in {escape(name)}, found none; give the base model's directory"
            )
        if odd := [file.name for file in files_of(name) if file.exists() and not file.is_file()]:
            raise PairError(
                f"expected regular files in {escape(name)}, found {few(odd)}; put the files themselves there"
            )
        return name, None
    if name.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(name):
        raise PairError(
            f"expected a directory or a Hub id such as google/gemma-4-E4B-it, found {escape(name)}, which is neither"
        )
    where, _, revision = name.partition("@")
    return where, revision or None


def _reach(repository: str, revision: str | None) -> dict[str, Any]:
    """Ask the Hub once, rather than for every file; returns what to pass to ``from_pretrained``.

    Raises:
        HubError: there is no such model, it is gated, or the Hub cannot be reached and nothing is cached.
    """
    from huggingface_hub import HfApi, constants, try_to_load_from_cache

    found: dict[str, Any] = {"revision": revision} if revision else {}
    try:
        with faults(repository):
            HfApi().model_info(repository, revision=revision, timeout=_PATIENCE)
    except (FaultError, SourceError) as error:
        unreachable = isinstance(error, FaultError) or constants.HF_HUB_OFFLINE
        if unreachable and isinstance(try_to_load_from_cache(repository, "config.json", revision=revision), str):
            return {**found, "local_files_only": True}
        where = "" if str(error).startswith(repository) else f"{repository} is no directory here, and "
        what = str(error).rstrip(".")
        raise HubError(
            f"{where}{what}. To do without the Hub, give a local directory as the base", remedies=("base",)
        ) from error
    return found


def placement(device: str) -> torch.device | None:
    """The one device that ``device`` means, or None for all GPUs.

    Raises:
        MtpExtractError: it is not there.
    """
    count = torch.cuda.device_count()
    if device == "auto":
        device = "balanced" if count > 1 else "cuda:0" if count else "cpu"
    if device == "balanced":
        if not count:
            raise MtpExtractError(
                "expected GPUs to balance the base over, found none; use the CPU", remedies=("device=cpu",)
            )
        require("accelerate")
        return None
    try:
        kind = torch.device(device)
    except RuntimeError as error:
        raise MtpExtractError(
            f"expected a device such as auto, cpu, cuda or cuda:0, found {escape(device)}; let it be chosen",
            remedies=("device=auto",),
        ) from error
    available = {"cpu": True, "cuda": (kind.index or 0) < count, "mps": torch.backends.mps.is_available()}
    if not available.get(kind.type, False):
        raise MtpExtractError(
            f"expected the device {escape(device)} to be there, but torch finds {count} CUDA GPUs; let it be chosen",
            remedies=("device=auto",),
        )
    return kind


@contextmanager
def _explained(name: str, local: bool, what: str) -> Iterator[None]:
    """Turns what transformers raises for a missing or broken part into an error of ours."""
    try:
        yield
    except (MtpExtractError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # What a damaged part raises in there has no class of its own.
        if any(sign in str(error) for sign in _OUT_OF_MEMORY):
            raise
        reason = escape(str(error).strip().split("\n")[0] or type(error).__name__)
        if local or not isinstance(error, OSError):
            advice = (
                "the base's tokenizer files belong in the same directory"
                if what == "tokenizer"
                else "give a Gemma 4 base model in transformers' format"
            )
            raise PairError(f"expected a {what} in {escape(name)}, found: {reason}; {advice}") from error
        raise HubError(
            f"expected the {what} of {escape(name)} from the Hugging Face Hub, but: {reason}. Check the id and the "
            "network; for a gated model accept its terms and log in (hf auth login); or give a local directory"
        ) from error


@contextmanager
def memory_guard(doing: str) -> Iterator[None]:
    """Turns running out of memory into an error that says what to do.

    Raises:
        MtpExtractError: memory ran out.
    """
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError, RuntimeError) as error:
        if (
            isinstance(error, RuntimeError)
            and not isinstance(error, torch.OutOfMemoryError)
            and not any(sign in str(error) for sign in _OUT_OF_MEMORY)
        ):
            raise
        raise MtpExtractError(
            f"too little memory while {doing}. Use a smaller batch, fewer prompts or new tokens, the CPU, or a machine "
            "with more",
            remedies=("batch", "prompts", "new_tokens", "device=cpu"),
        ) from error


def _check_whole(name: str, model: Any, info: Mapping[str, Any]) -> None:
    """Refuse what transformers would have filled with random numbers, and numbers that are none.

    Raises:
        PairError: a tensor is missing, has another shape, or is not finite.
    """
    wrong = [
        f"{what}: {few(sorted(map(_key, info[key])))}"
        for key, what in (("missing_keys", "missing"), ("mismatched_keys", "of another shape than its config says"))
        if info[key]
    ]
    tensors = (*model.named_parameters(), *model.named_buffers())
    if odd := [key for key, value in tensors if value.is_floating_point() and not _is_finite(value)]:
        wrong.append(f"not finite: {few(sorted(odd))}")
    if wrong:
        raise PairError(
            f"expected every tensor of the base in {escape(name)}, found {'; '.join(wrong)}. Fetch the model again"
        )


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether all of it is: its least and greatest number tell, in one pass without a copy, since NaN is both."""
    return not tensor.numel() or bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())


def _key(found: Any) -> str:
    """The name in what transformers tells of a tensor: alone, or with shapes."""
    return str(found[0] if isinstance(found, tuple) else found)
