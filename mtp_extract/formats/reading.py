"""What reading has in common: JSON files, typed values, and tensors matched strictly to roles."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mtp_extract.checkpoint.json_file import once
from mtp_extract.checkpoint.manifest import Manifest, said_by_header, said_by_index
from mtp_extract.checkpoint.stored import StoredTensor
from mtp_extract.checkpoint.tensor_file import read_header
from mtp_extract.errors import CheckpointError, DrafterError, escape, few
from mtp_extract.io.regular import read_regular

_LARGEST_JSON = 1 << 24


def read_json(path: Path, largest: int = _LARGEST_JSON) -> dict[str, Any]:
    """The JSON object in the file at ``path``, of at most ``largest`` bytes.

    Raises:
        DrafterError: it cannot be read, or holds something else.
    """
    try:
        parsed = json.loads(read_regular(path, largest).decode("utf-8"), object_pairs_hook=once)
    except (OSError, ValueError, RecursionError) as error:
        found = error.strerror if isinstance(error, OSError) else error
        raise DrafterError(
            f"expected JSON in {escape(path)}, found: {escape(found)}; extract the drafter anew"
        ) from error
    if not isinstance(parsed, dict):
        raise DrafterError(f"expected a JSON object in {escape(path)}, found a {type(parsed).__name__}")
    return parsed


_QUANTIZED = ("compressed-tensors", "gemma")


_EAGLE3 = "eagle3"


def kind_of(path: Path) -> str | None:
    """Of which kind the ``config.json`` at ``path`` is: the layout of an EAGLE-3 head, or how an MTP drafter is
    quantized ("mlx", or a method that a format here has).

    Empty for an MTP drafter's floats, for a method no format here has, and for a file that cannot be read, which
    reading it reports; None where there is no file.
    """
    if not path.is_file():
        return None
    try:
        config = read_json(path)
    except DrafterError:
        return ""
    if "speculators_model_type" in config:
        return "speculators"
    if _EAGLE3 in str(config.get("architectures")).lower():
        return _EAGLE3
    if isinstance(config.get("quantization"), dict):
        return "mlx"
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    return method if method in _QUANTIZED else ""


def read_tensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of the safetensors file at ``path``.

    Raises:
        DrafterError: it is not there, or is none.
    """
    if not path.is_file():
        raise DrafterError(f"expected {path.name} in {escape(path.parent)}, found none; extract the drafter anew")
    try:
        return read_header(path)
    except CheckpointError as error:
        raise DrafterError(
            f"expected safetensors in {escape(path)}, found: {error} Extract the drafter anew"
        ) from error


def read_shards(directory: Path, name: str) -> dict[str, tuple[Path, StoredTensor]]:
    """The tensors of the safetensors file ``name`` in ``directory``, or of the files that its index lists instead.

    Raises:
        DrafterError: it is not there, is none, or the index contradicts its files.
    """
    index = directory / f"{name}.index.json"
    if (directory / name).is_file() or not index.is_file():
        return {tensor: (directory / name, stored) for tensor, stored in read_tensors(directory / name).items()}
    places = table(read_json(index), "weight_map")
    files = dict.fromkeys(str(file) for file in places.values())
    if wrong := [file for file in files if Path(file).name != file]:
        raise DrafterError(
            f"expected files beside {escape(index)} in it, found {escape(wrong[0])}; check the directory"
        )
    found: dict[str, tuple[Path, StoredTensor]] = {}
    for file in files:
        stored = read_tensors(directory / file)
        if twice := sorted(stored.keys() & found.keys()):
            raise DrafterError(f"{escape(twice[0])}: expected it in one file of {escape(index)}, found it in two")
        found |= {tensor: (directory / file, there) for tensor, there in stored.items()}
    there = {tensor: path.name for tensor, (path, _) in found.items()}
    if odd := [tensor for tensor in {**places, **there} if places.get(tensor) != there.get(tensor)]:
        raise DrafterError(f"expected {escape(odd[0])} where {escape(index)} says it is, found it elsewhere or nowhere")
    return found


def shards_of(directory: Path, name: str, places: Mapping[str, tuple[Path, StoredTensor]]) -> Manifest:
    """What belongs to the tensors that :func:`read_shards` has found at ``places``."""
    files = {path.name: path for path, _ in places.values()}
    said = [said_by_header(path) for path in files.values()]
    index = directory / f"{name}.index.json"
    if name in files or not index.is_file():
        return Manifest(frozenset({*files, name}), tuple(said))
    said.append(said_by_index(index, {tensor: path.name for tensor, (path, _) in places.items()}))
    return Manifest(frozenset({*files, index.name}), tuple(said))


def require(config: Mapping[str, Any], key: str) -> Any:
    """The value of ``key``, which must be there."""
    if config.get(key) is None:
        raise DrafterError(f"expected {key} in the drafter's config, found no such key; the config is incomplete")
    return config[key]


def table(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object under ``key``."""
    found: Mapping[str, Any] = _of_type(config, key, dict, "an object")
    return found


def sequence(config: Mapping[str, Any], key: str) -> list[Any]:
    """The list under ``key``."""
    found: list[Any] = _of_type(config, key, list, "a list")
    return found


def _of_type(config: Mapping[str, Any], key: str, kind: type, called: str) -> Any:
    value = require(config, key)
    if not isinstance(value, kind):
        raise DrafterError(f"expected {key} to be {called}, found {escape(value)}; check the config")
    return value


def flag(config: Mapping[str, Any], key: str) -> bool:
    """The truth value under ``key``; False where it is absent or null."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise DrafterError(f"expected {key} to be true or false, found {escape(value)}; check the config")
    return bool(value)


def positive_integer(config: Mapping[str, Any], key: str, *, least: int = 1) -> int:
    """The integer under ``key``, positive unless said otherwise."""
    value = require(config, key)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _LARGEST_SIZE:
        raise DrafterError(f"expected {key} to be a positive integer, found {escape(value)}; check the config")
    return value


_LARGEST_SIZE = 1 << 24
_LARGEST_NUMBER = 1e30


def optional_integer(config: Mapping[str, Any], key: str, *, least: int = 1) -> int | None:
    """The positive integer under ``key``; None where it is absent or null."""
    return None if config.get(key) is None else positive_integer(config, key, least=least)


def number(config: Mapping[str, Any], key: str, *, default: float | None = None) -> float:
    """The positive number under ``key``, neither vanishing nor vast; ``default`` where it is absent or null."""
    if default is not None and config.get(key) is None:
        return default
    value = require(config, key)
    # Compared as it is: an integer may be too large for a float.
    sound = isinstance(value, int | float) and not isinstance(value, bool)
    if not sound or not 1 / _LARGEST_NUMBER <= value <= _LARGEST_NUMBER:
        raise DrafterError(f"expected {key} to be a positive number, found {escape(value)}; check the config")
    return float(value)


def optional_number(config: Mapping[str, Any], key: str) -> float | None:
    """The positive number under ``key``; None where it is absent or null."""
    return None if config.get(key) is None else number(config, key)


def check_tensors(
    expected: Mapping[str, tuple[str, tuple[int, ...]]],
    found: Mapping[str, tuple[int, ...]],
    more: Iterable[str] = (),
) -> None:
    """Hold the tensors of a file against what its config asks for.

    Args:
        expected: tensor name → path of the module that wants it, and its shape.
        found: tensor name → shape in the file.
        more: names that may be there as well.

    Raises:
        DrafterError: names every tensor that is missing, unexpected or of another shape.
    """
    problems = [
        f"{escape(name)}: expected a tensor for {path}, found none"
        for name, (path, _) in expected.items()
        if name not in found
    ]
    problems += [
        f"{escape(name)}: expected no such tensor, found {list(shape)}"
        for name, shape in found.items()
        if name not in expected and name not in more
    ]
    problems += [
        f"{escape(name)}: expected shape {list(shape)}, found {list(found[name])}"
        for name, (_, shape) in expected.items()
        if name in found and found[name] != shape
    ]
    if problems:
        raise mismatch(problems)


def mismatch(problems: Iterable[str]) -> DrafterError:
    """The error that lists ``problems`` of a checkpoint."""
    return DrafterError(
        "the checkpoint does not match its config; extract the drafter anew, or check which model the config "
        f"describes: {few(sorted(problems), separator='; ')}"
    )


_ACTIVATIONS = ("gelu_pytorch_tanh", "gelu")


def activation(name: object) -> str:
    """transformers' name of a gate's function, if it is one that the drafter has."""
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise DrafterError(
            f"expected hidden_activation {' or '.join(_ACTIVATIONS)}, found {escape(name)}; it is not supported"
        )
    return str(name)
