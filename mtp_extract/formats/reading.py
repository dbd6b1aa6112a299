"""Reading strictly: typed values of a configuration, tensors of one file or several, and tensors matched to roles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mtp_extract.architecture.roles import Role
from mtp_extract.checkpoint.json_file import read_object
from mtp_extract.checkpoint.manifest import Said, said_by_header, said_by_index
from mtp_extract.checkpoint.stored import StoredTensor, StoredWeight
from mtp_extract.checkpoint.tensor_file import read_header
from mtp_extract.errors import CheckpointError, DrafterError, escape, few

Stored = Mapping[str, tuple[Path, StoredTensor]]
"""Tensor → the file that holds it, and where in it."""

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
        config = read_object(path)
    except CheckpointError:
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


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """What is wrong with the shape that the file at ``path`` describes is said with its name.

    Raises:
        CheckpointError: for any that is raised inside, and for a shape that no drafter has.
    """
    try:
        yield
    except (CheckpointError, DrafterError) as error:
        raise CheckpointError(f"{escape(path)}: {error}") from error


_ANEW = "extract the drafter anew"


def read_tensors(path: Path, advice: str = _ANEW) -> Stored:
    """The tensors of the safetensors file at ``path``; ``advice`` is for whoever lacks it.

    Raises:
        CheckpointError: it is not there, or is none.
    """
    if not path.is_file():
        raise CheckpointError(f"expected {path.name} in {escape(path.parent)}, found none; {advice}")
    return {tensor: (path, stored) for tensor, stored in read_header(path).items()}


def read_shards(directory: Path, name: str, advice: str = _ANEW, *, listed_only: bool = False) -> Stored:
    """The tensors of the safetensors file ``name`` in ``directory``, or of the files that its index lists instead.

    Args:
        advice: what to do where a file is missing.
        listed_only: pass over tensors that the index does not list where they are, instead of refusing them.

    Raises:
        CheckpointError: it is not there, is none, or the index contradicts its files.
    """
    index = directory / f"{name}.index.json"
    if (directory / name).is_file() or not index.is_file():
        return read_tensors(directory / name, advice)
    document = read_object(index)
    with naming(index):
        places = table(document, "weight_map")
        files = dict.fromkeys(str(file) for file in places.values())
        if wrong := [file for file in files if Path(file).name != file]:
            raise CheckpointError(f"expected files beside it, found {escape(wrong[0])}; check the index")
        found: dict[str, tuple[Path, StoredTensor]] = {}
        for file in files:
            stored = read_tensors(directory / file, advice)
            if listed_only:
                stored = {tensor: place for tensor, place in stored.items() if places.get(tensor) == file}
            if twice := sorted(stored.keys() & found.keys()):
                raise CheckpointError(f"expected {escape(twice[0])} in one of its files, found it in two")
            found |= stored
        there = {tensor: path.name for tensor, (path, _) in found.items()}
        if odd := [tensor for tensor in {**places, **there} if places.get(tensor) != there.get(tensor)]:
            raise CheckpointError(
                f"expected {escape(odd[0])} where the index says it is, found it elsewhere or nowhere"
            )
    return found


def said_by_shards(directory: Path, name: str, places: Stored) -> list[Said]:
    """The files of the tensors that :func:`read_shards` has found at ``places``, and what they may say."""
    whole, index = directory / name, directory / f"{name}.index.json"
    if whole.is_file() or not index.is_file():
        return [said_by_header(whole)]
    headers = [said_by_header(path) for path in dict.fromkeys(path for path, _ in places.values())]
    return [*headers, said_by_index(index, {tensor: path.name for tensor, (path, _) in places.items()})]


def require(config: Mapping[str, Any], key: str) -> Any:
    """The value of ``key``, which must be there."""
    if config.get(key) is None:
        raise CheckpointError(f"expected {key} in the drafter's config, found no such key; the config is incomplete")
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
        raise _unlike(key, called, value)
    return value


def _unlike(key: str, expected: str, value: object) -> CheckpointError:
    return CheckpointError(f"expected {key} to be {expected}, found {escape(value)}; check the config")


def flag(config: Mapping[str, Any], key: str) -> bool:
    """The truth value under ``key``; False where it is absent or null."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise _unlike(key, "true or false", value)
    return bool(value)


def positive_integer(config: Mapping[str, Any], key: str) -> int:
    """The positive integer under ``key``."""
    value = require(config, key)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST_SIZE:
        raise _unlike(key, "a positive integer", value)
    return value


_LARGEST_SIZE = 1 << 24
_LARGEST_NUMBER = 1e30


def number(config: Mapping[str, Any], key: str, *, default: float | None = None) -> float:
    """The positive number under ``key``, neither vanishing nor vast; ``default`` where it is absent or null."""
    if default is not None and config.get(key) is None:
        return default
    value = require(config, key)
    # Compared as it is: an integer may be too large for a float.
    sound = isinstance(value, int | float) and not isinstance(value, bool)
    if not sound or not 1 / _LARGEST_NUMBER <= value <= _LARGEST_NUMBER:
        raise _unlike(key, "a positive number", value)
    return float(value)


def optional_integer(config: Mapping[str, Any], key: str) -> int | None:
    """As :func:`positive_integer`; None where it is absent or null."""
    return None if config.get(key) is None else positive_integer(config, key)


def optional_number(config: Mapping[str, Any], key: str) -> float | None:
    """As :func:`number`; None where it is absent or null."""
    return None if config.get(key) is None else number(config, key)


_ACTIVATIONS = ("gelu_pytorch_tanh", "gelu")


def activation(config: Mapping[str, Any], key: str, *, default: str | None = None) -> str:
    """transformers' name of a gate's function under ``key``, if it is one that the drafter has."""
    name = config.get(key, default)
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise CheckpointError(f"expected {key} {' or '.join(_ACTIVATIONS)}, found {escape(name)}; it is not supported")
    return name


def weights_of(
    shapes: Mapping[Role, tuple[int, ...]], names: Mapping[Role, str], stored: Stored, more: Iterable[str] = ()
) -> dict[str, StoredWeight]:
    """Role → its weight among those ``stored``, where it is called as ``names`` has it.

    Args:
        shapes: every role there is to be.
        more: names of tensors that may be there as well.

    Raises:
        CheckpointError: names every tensor that is missing, unexpected or of another shape.
    """
    expected = {names[role]: (role.path, shape) for role, shape in shapes.items()}
    check_tensors(expected, {name: tensor.shape for name, (_, tensor) in stored.items()}, more)
    return {role.name: StoredWeight(*stored[names[role]], names[role]) for role in shapes}


def check_tensors(
    expected: Mapping[str, tuple[str, tuple[int, ...]]], found: Mapping[str, tuple[int, ...]], more: Iterable[str] = ()
) -> None:
    """Hold the tensors of a file against what its config asks for.

    Args:
        expected: tensor name → path of the module that wants it, and its shape.
        found: tensor name → shape in the file.
        more: names that may be there as well.

    Raises:
        CheckpointError: names every tensor that is missing, unexpected or of another shape.
    """
    problems = []
    for name, (path, shape) in expected.items():
        if name not in found:
            problems.append(f"{escape(name)}: expected a tensor for {path}, found none")
        elif found[name] != shape:
            problems.append(f"{escape(name)}: expected shape {list(shape)}, found {list(found[name])}")
    problems += [
        f"{escape(name)}: expected no such tensor, found {list(found[name])}"
        for name in found.keys() - expected.keys() - set(more)
    ]
    if problems:
        raise mismatch(problems)


def mismatch(problems: Iterable[str]) -> CheckpointError:
    """The error that lists ``problems`` of a checkpoint."""
    return CheckpointError(
        "the checkpoint does not match its config; extract the drafter anew, or check which model the config "
        f"describes: {few(sorted(problems), separator='; ')}"
    )
