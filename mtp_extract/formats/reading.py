"""Strict reading, shared by all formats: the fields of a configuration, and the tensors of weights files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta, Struct

from mtp_extract.checkpoint.documents import read_object
from mtp_extract.checkpoint.dtypes import FLOAT_NAMES
from mtp_extract.checkpoint.safetensors_file import read_safetensors
from mtp_extract.checkpoint.stored import TensorPlace
from mtp_extract.errors import (
    CheckpointError,
    DrafterError,
    UnsupportedError,
    escape,
    format_choice,
    format_count,
    list_few,
)
from mtp_extract.io.typed import parse_record

FLOAT_DTYPES = tuple(FLOAT_NAMES)
"""Names of the dtypes that floats are stored in."""

Tensors = Mapping[str, tuple[Path, TensorPlace]]
"""Tensor name → the file that holds it, and its place there."""

ExpectedTensors = Mapping[str, tuple[tuple[int, ...], tuple[str, ...]]]
"""Tensor name → its shape, and the dtypes that it may have."""

Fields = TypeVar("Fields", bound=Struct)

Size = Annotated[int, Meta(ge=1, le=1 << 24)]
PositiveNumber = Annotated[float, Meta(ge=1e-30, le=1e30)]
PositiveShare = Annotated[float, Meta(ge=1e-30, le=1.0)]
GateFunction = Literal["gelu_pytorch_tanh", "gelu"]
"""transformers' name of the activation of a gated MLP."""

INDEX_ENDING = ".index.json"
"""Ends the name of the index that lists the parts of a weights file."""

_SAFETENSORS = ".safetensors"


def parse_fields(document: Mapping[str, Any], kind: type[Fields]) -> Fields:
    """Parse ``document`` as a ``kind``; keys without a field are ignored.

    Raises:
        CheckpointError: a field is missing, of another type or out of range; the message names it.
    """
    try:
        return parse_record(document, kind)
    except ValueError as error:
        problem = str(error).removeprefix("the whole: ")
        raise CheckpointError(f"{escape(problem)}. Check the config.") from error


@contextmanager
def attribute_errors_to(path: Path) -> Iterator[None]:
    """Turn errors of the block, which reads a config from ``path``, into CheckpointErrors that name the file."""
    try:
        yield
    except (CheckpointError, DrafterError, UnsupportedError) as error:
        raise CheckpointError(f"{escape(path)}: {error}") from error


def find_weight_files(directory: Path, name: str) -> list[Path]:
    """Find the weights file ``name``, such as ``model.safetensors``, in ``directory``, or its parts.

    First the file itself, then the files that ``NAME.index.json`` lists, as transformers does; without an index
    ``model-00001-of-00002.safetensors`` and so on, as vLLM does.

    Raises:
        CheckpointError: no file is found, or the index names something that is no file beside it.
    """
    single = directory / name
    index = directory / f"{name}{INDEX_ENDING}"
    stem = name.removesuffix(_SAFETENSORS)
    if single.is_file():
        return [single]
    if index.is_file():
        return [directory / part for part in dict.fromkeys(_read_weight_map(index).values())]
    # If a part is missing, its tensors are reported later.
    if parts := sorted(directory.glob(f"{stem}-*-of-*{_SAFETENSORS}")):
        return parts
    raise CheckpointError(
        f"{escape(directory)}: expected {name} there, or its parts, found none. Fetch it again, or name the directory "
        "that has them."
    )


def _read_weight_map(index: Path) -> Mapping[str, str]:
    """Read tensor name → file name from an index; CheckpointError unless every file lies beside it."""
    weight_map = read_object(index).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    for name in names or [None]:
        # A downloaded index must not point out of its directory.
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(_SAFETENSORS):
            raise CheckpointError(
                f"{escape(index)}: expected a weight_map of tensors and {_SAFETENSORS} files beside it, found "
                f"{escape(name)}. Fetch it again."
            )
        if not (index.parent / name).is_file():
            raise CheckpointError(f"{escape(index)}: names {escape(name)}, which is not there. Fetch it again.")
    assert weight_map is not None
    return MappingProxyType(weight_map)


def read_weights(directory: Path, name: str) -> Tensors:
    """Locate the tensors of the safetensors file ``name`` in ``directory``, or of its parts.

    Raises:
        CheckpointError: a file is missing or damaged, or two files hold the same tensor.
    """
    tensors: dict[str, tuple[Path, TensorPlace]] = {}
    for path in find_weight_files(directory, name):
        stored, _ = read_safetensors(path)
        if repeated := sorted(tensors.keys() & stored.keys()):
            raise CheckpointError(f"{escape(path)}: holds {list_few(repeated)}, as another part does. Fetch it again.")
        tensors |= {tensor: (path, place) for tensor, place in stored.items()}
    return tensors


def find_index_conflicts(directory: Path, name: str, tensors: Tensors) -> tuple[str, ...]:
    """Describe, as a clause, what an engine would load otherwise by the index of ``name``; empty if nothing.

    Raises:
        CheckpointError: the index is wrong, and there is no single file ``name`` to read instead.
    """
    index = directory / f"{name}{INDEX_ENDING}"
    if not index.is_file():
        return ()
    is_needed = not (directory / name).is_file()
    files = {tensor: path.name for tensor, (path, _) in tensors.items()}
    try:
        misplaced = list_few(
            sorted(tensor for tensor, file in _read_weight_map(index).items() if files.get(tensor) != file)
        )
        if misplaced and is_needed:
            raise CheckpointError(f"{escape(index)}: {misplaced} is not in the file that it names. Fetch it again.")
    except CheckpointError:
        if is_needed:
            raise
        misplaced = "another file"
    return (f"{escape(index.name)} names {misplaced}",) if misplaced else ()


def check_tensors(
    path: Path, expected: ExpectedTensors, tensors: Tensors, more: ExpectedTensors = MappingProxyType({})
) -> None:
    """Compare the tensors of the file at ``path``, or of its parts, with those that its config requires.

    Args:
        more: optional tensors.

    Raises:
        CheckpointError: names every tensor that is missing, unexpected, or of another shape or dtype.
    """
    problems, wrong_types = _list_problems(expected, tensors, more)
    if problems:
        raise build_mismatch_error(path, [*problems, *wrong_types])
    if wrong_types:
        rest = f" (and {format_count(len(wrong_types) - 1, 'tensor')} more)" if len(wrong_types) > 1 else ""
        advice = "which is not read. Ask for the drafter in such a type"
        raise CheckpointError(f"{escape(path)}: {wrong_types[0]}{rest}, {advice}.")


def _list_problems(expected: ExpectedTensors, tensors: Tensors, more: ExpectedTensors) -> tuple[list[str], list[str]]:
    """Describe, a clause each, tensors that are missing, unexpected or of another shape; and those of another dtype."""
    problems = [
        f"{escape(name)}: expected no such tensor, found {list(tensors[name][1].shape)}"
        for name in tensors.keys() - expected.keys() - more.keys()
    ]
    wrong_types = list[str]()
    for name, (shape, dtypes) in {**more, **expected}.items():
        if name not in tensors:
            if name in expected:
                problems.append(f"{escape(name)}: expected a tensor, found none")
            continue
        stored = tensors[name][1]
        if stored.shape != shape:
            problems.append(f"{escape(name)}: expected shape {list(shape)}, found {list(stored.shape)}")
        elif stored.dtype not in dtypes:
            wrong_types.append(f"{escape(name)}: expected {format_choice(dtypes)}, found {escape(stored.dtype)}")
    return problems, wrong_types


def build_mismatch_error(path: Path, problems: Iterable[str]) -> CheckpointError:
    """Build the error that lists ``problems`` of the tensors in the file at ``path``."""
    listed = list_few(sorted(problems), separator="; ")
    return CheckpointError(
        f"{escape(path)}: the checkpoint does not match its config: {listed}. Extract the drafter anew, "
        "or check which model the config describes."
    )
