"""How large a base is, by its config and the headers of its weights alone; and whether there is room for it."""

from __future__ import annotations

import ctypes
import json
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mtp_extract.checkpoint.safetensors_file import CONTAINER
from mtp_extract.errors import MtpExtractError
from mtp_extract.io.http_library import FaultError, faults, hide_queries

_INDEX = "model.safetensors.index.json"
_NUMBERS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # bytes


@dataclass(frozen=True)
class BaseSize:
    config: Any  # of transformers, its text part
    weights: int | None  # bytes in memory; None where the headers are of another kind than safetensors, or not at hand
    itemsize: int  # bytes of a number that it computes in


def size_of(where: str, found: Mapping[str, Any], config: Any) -> BaseSize:
    """The size of the base at ``where``; from the Hub come headers alone.

    Args:
        where: a directory, or a repository of the Hub.
        found: what ``from_pretrained`` is given: ``revision``, ``local_files_only``.
        config: of transformers.
    """
    text = config.get_text_config()
    dtype = getattr(config, "dtype", None) or getattr(text, "dtype", None)
    folder = Path(where) if Path(where).is_dir() else _cached(where, found)
    try:
        stored = list(_local(folder) if folder else _remote(where, found.get("revision")))
    # What is wrong with the weights is said by those who load them.
    except (FaultError, MtpExtractError, OSError, ValueError, LookupError, TypeError):
        stored = []
    tied = getattr(text, "tie_word_embeddings", False)
    numbers = [
        (kind, count)
        for name, kind, count in stored
        if kind in _NUMBERS and not (tied and name.endswith("lm_head.weight"))
    ]
    known = dtype.itemsize if isinstance(dtype, torch.dtype) else None
    itemsize = known or (_NUMBERS[numbers[0][0]] if numbers else 4)
    weights = sum(count * (known or _NUMBERS[kind]) for kind, count in numbers)
    return BaseSize(text, weights or None, itemsize)


def _cached(where: str, found: Mapping[str, Any]) -> Path | None:
    """The Hub's cache, where that is all there is."""
    from huggingface_hub import try_to_load_from_cache

    if not found.get("local_files_only"):
        return None
    config = try_to_load_from_cache(where, "config.json", revision=found.get("revision"))
    return Path(config).parent if isinstance(config, str) else None


def _local(folder: Path) -> Iterator[tuple[str, str, int]]:
    """Name, type and count of every tensor."""
    files = sorted(folder.glob("*.safetensors"))
    if (folder / _INDEX).is_file():
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        files = [folder / name for name in sorted(set(index["weight_map"].values()))]
    for file in files:
        for name, tensor in CONTAINER.read_header(file).items():
            yield name, tensor.dtype, math.prod(tensor.shape)


def _remote(repository: str, revision: str | None) -> Iterator[tuple[str, str, int]]:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

    hide_queries()
    try:
        with faults(repository):
            found = HfApi().get_safetensors_metadata(repository, revision=revision)
    except (NotASafetensorsRepoError, SafetensorsParsingError):
        return
    for file in found.files_metadata.values():
        for name, tensor in file.tensors.items():
            yield name, tensor.dtype, math.prod(tensor.shape)


def check_room(needed: int, device: torch.device | None, what: str, remedies: tuple[str, ...] = ("device",)) -> None:
    """Refuse what cannot succeed, before the machine starts to swap.

    Args:
        needed: bytes.
        device: None for all GPUs together.
        what: a clause that says what needs so much.

    Raises:
        MtpExtractError: there is less.
    """
    available = free_on(device)
    if needed > available:
        raise MtpExtractError(
            f"too little memory on {device or 'all GPUs'}: {what} about {needed / 1e9:.1f} GB, "
            f"{available / 1e9:.1f} GB are free. Close other programs, use another device, or a machine with more",
            remedies=remedies,
        )


def free_on(device: torch.device | None) -> float:
    """Bytes that can be had on ``device``, or on all GPUs together; infinity where nobody knows."""
    if device is None:
        return sum(torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count()))
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return math.inf if device.type == "mps" else free_memory()


def give_back() -> None:
    """Give to the system what of the heap is free, where the C library can; glibc by itself keeps it."""
    trim = None if sys.platform == "win32" else getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def free_memory() -> int:
    """Bytes of main memory that can be had without swapping."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            found = re.search(r"MemAvailable:\s+(\d+) kB", file.read())
        if found:
            return int(found[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
