"""Reading strictly: the few fields of a configuration that count, and the tensors of a file."""

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
from mtp_extract.checkpoint.stored import StoredTensor
from mtp_extract.errors import CheckpointError, DrafterError, UnsupportedError, either, escape, few, several
from mtp_extract.io.typed import read

FLOAT_DTYPES = tuple(FLOAT_NAMES)
"""Names of the types that floats are stored in."""

Tensors = Mapping[str, tuple[Path, StoredTensor]]
"""Tensor → the file that holds it, and where in it."""

ExpectedTensors = Mapping[str, tuple[tuple[int, ...], tuple[str, ...]]]
"""Tensor → the shape that it is to have, and the types that it may have."""

Fields = TypeVar("Fields", bound=Struct)

Size = Annotated[int, Meta(ge=1, le=1 << 24)]
PositiveNumber = Annotated[float, Meta(ge=1e-30, le=1e30)]
PositiveShare = Annotated[float, Meta(ge=1e-30, le=1.0)]
GateFunction = Literal["gelu_pytorch_tanh", "gelu"]
"""transformers' name of a gate's function."""

INDEX_ENDING = ".index.json"
"""Behind the name of a file of tensors: where the parts that stand for it are listed."""

_SAFETENSORS = ".safetensors"


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
    """Around reading the shape that the file at ``path`` describes: whatever is wrong with it is a CheckpointError that
    names the file."""
    try:
        yield
    except (CheckpointError, DrafterError, UnsupportedError) as error:
        raise CheckpointError(f"{escape(path)}: {error}") from error


def find_weight_files(directory: Path, name: str) -> list[Path]:
    """The files in ``directory`` that hold what ``name``, such as ``model.safetensors``, does: it, or its parts.

    As transformers looks for them: the file itself, else the files that ``NAME.index.json`` lists; without an index, as
    vLLM does, ``model-00001-of-00002.safetensors`` and so on.

    Raises:
        CheckpointError: neither is there, or an index names what is no file beside it.
    """
    single = directory / name
    index = directory / f"{name}{INDEX_ENDING}"
    stem = name.removesuffix(_SAFETENSORS)
    if single.is_file():
        return [single]
    if index.is_file():
        return [directory / part for part in dict.fromkeys(_read_weight_map(index).values())]
    # Where one is missing, so are its tensors.
    if parts := sorted(directory.glob(f"{stem}-*-of-*{_SAFETENSORS}")):
        return parts
    raise CheckpointError(
        f"{escape(directory)}: expected {name} there, or its parts, found none. Fetch it again, or name the directory "
        "that has them."
    )


def _read_weight_map(index: Path) -> Mapping[str, str]:
    """Tensor → file, as the index at ``index`` says; every file lies beside it."""
    weight_map = read_object(index).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    for name in names or [None]:
        # Nothing in a file that was fetched may point out of its directory.
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
    """The tensors in ``directory`` of the safetensors file ``name``, or of its parts (:func:`find_weight_files`);
    CheckpointError where a file is missing or damaged, or two hold the same tensor."""
    tensors: dict[str, tuple[Path, StoredTensor]] = {}
    for path in find_weight_files(directory, name):
        stored, _ = read_safetensors(path)
        if twice := sorted(tensors.keys() & stored.keys()):
            raise CheckpointError(f"{escape(path)}: holds {few(twice)}, as another part does. Fetch it again.")
        tensors |= {tensor: (path, place) for tensor, place in stored.items()}
    return tensors


def find_index_conflicts(directory: Path, name: str, tensors: Tensors) -> tuple[str, ...]:
    """Why an engine that goes by the index of ``name`` would read other tensors, as a clause; none where it would not.

    Where the index is the only way to the tensors, that is a CheckpointError.
    """
    index = directory / f"{name}{INDEX_ENDING}"
    if not index.is_file():
        return ()
    is_needed = not (directory / name).is_file()
    files = {tensor: path.name for tensor, (path, _) in tensors.items()}
    try:
        misplaced = few(sorted(tensor for tensor, file in _read_weight_map(index).items() if files.get(tensor) != file))
        if misplaced and is_needed:
            raise CheckpointError(f"{escape(index)}: {misplaced} is not in the file that it names. Fetch it again.")
    except CheckpointError:
        if is_needed:
            raise
        misplaced = "another file"
    return (f"{escape(index.name)} names {misplaced}",) if misplaced else ()


def check_tensors(
    path: Path, expected: ExpectedTensors, found: Tensors, more: ExpectedTensors = MappingProxyType({})
) -> None:
    """Hold the tensors of the file at ``path``, or of its parts, against what its config asks for.

    Args:
        more: tensors that may be there as well.

    Raises:
        CheckpointError: names every tensor that is missing, unexpected, or of another shape or type.
    """
    problems = list(_list_wrong_tensors(expected, found, more))
    types = list(_list_wrong_types({**more, **expected}, found))
    if problems:
        raise build_mismatch_error(path, [*problems, *types])
    if types:
        others = f" (and {several(len(types) - 1, 'tensor')} more)" if len(types) > 1 else ""
        advice = "which is not read. Ask for the drafter in such a type"
        raise CheckpointError(f"{escape(path)}: {types[0]}{others}, {advice}.")


def _list_wrong_tensors(expected: ExpectedTensors, tensors: Tensors, more: ExpectedTensors) -> Iterator[str]:
    """Tensors that are missing, of another shape, or too many, each as a clause."""
    for name, (shape, _) in {**more, **expected}.items():
        if name not in tensors:
            if name in expected:
                yield f"{escape(name)}: expected a tensor, found none"
        elif tensors[name][1].shape != shape:
            yield f"{escape(name)}: expected shape {list(shape)}, found {list(tensors[name][1].shape)}"
    for name in tensors.keys() - expected.keys() - more.keys():
        yield f"{escape(name)}: expected no such tensor, found {list(tensors[name][1].shape)}"


def _list_wrong_types(expected: ExpectedTensors, tensors: Tensors) -> Iterator[str]:
    """Tensors of the right shape and another type, each as a clause."""
    for name, (shape, dtypes) in expected.items():
        if name in tensors and tensors[name][1].shape == shape and tensors[name][1].dtype not in dtypes:
            yield f"{escape(name)}: expected {either(dtypes)}, found {escape(tensors[name][1].dtype)}"


def build_mismatch_error(path: Path, problems: Iterable[str]) -> CheckpointError:
    """The error that lists ``problems`` of the tensors in the file at ``path``."""
    named = few(sorted(problems), separator="; ")
    return CheckpointError(
        f"{escape(path)}: the checkpoint does not match its config: {named}. Extract the drafter anew, "
        "or check which model the config describes."
    )
