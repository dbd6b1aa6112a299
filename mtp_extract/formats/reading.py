"""Reading strictly: the few fields of a configuration that count, and the tensors of a file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta, Struct

from mtp_extract.checkpoint.documents import HEADER, read_object, require_keys
from mtp_extract.checkpoint.dtypes import FLOAT_NAMES
from mtp_extract.checkpoint.files import read_safetensors
from mtp_extract.checkpoint.stored import StoredTensor
from mtp_extract.errors import CheckpointError, DrafterError, UnsupportedError, either, escape, few
from mtp_extract.io.typed import read

FLOATS = tuple(FLOAT_NAMES)
"""Names of the types that floats are stored in."""

Tensors = Mapping[str, tuple[Path, StoredTensor]]
"""Tensor → the file that holds it, and where in it."""

Expected = Mapping[str, tuple[tuple[int, ...], tuple[str, ...]]]
"""Tensor → the shape that it is to have, and the types that it may have."""

Fields = TypeVar("Fields", bound=Struct)

Size = Annotated[int, Meta(ge=1, le=1 << 24)]
Number = Annotated[float, Meta(ge=1e-30, le=1e30)]
Share = Annotated[float, Meta(ge=1e-30, le=1.0)]
Activation = Literal["gelu_pytorch_tanh", "gelu"]
"""transformers' name of a gate's function."""

_QUANTIZED = ("compressed-tensors", "gemma")
_EAGLE3 = "eagle3"


def kind_of(path: Path) -> str:
    """The name of the format whose ``config.json`` lies at ``path``.

    It is "transformers" for a method of quantization that no format here has.

    Raises:
        CheckpointError: the file cannot be read.
    """
    config = read_object(path)
    if "speculators_model_type" in config:
        return "speculators"
    if _EAGLE3 in str(config.get("architectures")).lower():
        return _EAGLE3
    if isinstance(config.get("quantization"), dict):
        return "mlx"
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    return method if method in _QUANTIZED else "transformers"


def fields_of(document: Mapping[str, Any], kind: type[Fields]) -> Fields:
    """The fields of ``document`` that ``kind`` has; those that it has not are passed over.

    Raises:
        CheckpointError: one is missing, of another type or out of range; the message names it.
    """
    try:
        return read(document, kind)
    except ValueError as error:
        what = str(error).removeprefix("the whole: ")
        raise CheckpointError(f"{escape(what)}. Check the config.") from error


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """What is wrong with the shape that the file at ``path`` describes is said with its name.

    Raises:
        CheckpointError: for any that is raised inside, and for a shape that no drafter or no such file has.
    """
    try:
        yield
    except (CheckpointError, DrafterError, UnsupportedError) as error:
        raise CheckpointError(f"{escape(path)}: {error}") from error


def read_weights(directory: Path, name: str) -> Tensors:
    """The tensors of the safetensors file ``name`` in ``directory``.

    Raises:
        CheckpointError: it is not there or damaged, or says more beside its tensors than engines pass over.
    """
    path = directory / name
    if not path.is_file():
        raise CheckpointError(
            f"{escape(directory)}: expected {name} there, found none. Extract the drafter anew, or save it as one file."
        )
    stored, metadata = read_safetensors(path)
    require_keys(path, metadata, {}, HEADER)
    return {tensor: (path, found) for tensor, found in stored.items()}


def check_tensors(expected: Expected, found: Tensors, more: Expected = MappingProxyType({})) -> None:
    """Hold the tensors of a file against what its config asks for.

    Args:
        more: tensors that may be there as well.

    Raises:
        CheckpointError: names every tensor that is missing, unexpected, or of another shape or type.
    """
    problems = []
    for name, (shape, dtypes) in {**more, **expected}.items():
        if name not in found:
            problems += [f"{escape(name)}: expected a tensor, found none"] if name in expected else []
        elif (tensor := found[name][1]).shape != shape:
            problems.append(f"{escape(name)}: expected shape {list(shape)}, found {list(tensor.shape)}")
        elif tensor.dtype not in dtypes:
            problems.append(f"{escape(name)}: expected {either(dtypes)}, found {escape(tensor.dtype)}")
    problems += [
        f"{escape(name)}: expected no such tensor, found {list(found[name][1].shape)}"
        for name in found.keys() - expected.keys() - more.keys()
    ]
    if problems:
        raise mismatch(problems)


def mismatch(problems: Iterable[str]) -> CheckpointError:
    """The error that lists ``problems`` of a checkpoint."""
    return CheckpointError(
        f"the checkpoint does not match its config: {few(sorted(problems), separator='; ')}. Extract the drafter anew, "
        "or check which model the config describes."
    )
