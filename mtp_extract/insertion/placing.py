"""Where encodings go: which tensors need a place of their own, and every byte that is then written over the file.

Nothing is written over bytes that a tensor without a role has, or another role that is to hold something else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_extract.errors import UnsupportedError
from mtp_extract.insertion.encoding import KEPT, Encoding
from mtp_extract.insertion.slots import Place
from mtp_extract.io.laid import Span
from mtp_extract.litertlm.rebuild import NewTensor, readers_of
from mtp_extract.litertlm.storage import CODE_TYPES, QuantizedTensor, float_bytes
from mtp_extract.litertlm.tflite import Tensor, TfliteModel

_VECTOR_READER = "MUL"

Key = tuple[int, int]
"""A tensor of a model: subgraph and index."""
Change = tuple[NewTensor, str]
"""A tensor that needs a constant of its own, and why."""
Site = tuple[Place, Encoding]
"""A constant, and what is to become of it."""
Bytes = bytes | memoryview
Overlay = tuple[int, Bytes | Encoding]
"""Bytes, or the rows of an encoding, and where in the file they go."""


def new_tensors(model: TfliteModel, sites: Iterable[Site]) -> list[Change]:
    """The tensors of ``model`` that need a constant of their own, each with the reason; none where all of it can be
    written in place.

    Raises:
        UnsupportedError: one cannot be given its own; the message names the roles.
    """
    owners, found = _owners(model), defaultdict[Key, list[Encoding]](list)
    for place, encoding in sites:
        # Signatures may run one graph, and have one encoding.
        if encoding not in (own := found[place.tensor.subgraph, place.tensor.index]):
            own.append(encoding)
    split, longer, unshared = list[Change](), list[Change](), list[Change]()
    for key, own in found.items():
        tensor, what = model.tensor(*key), _roles(own)
        changes = any(encoding.how != KEPT for encoding in own)
        if len(own) > 1 and changes and len({encoding.digest for encoding in own}) > 1:
            split += _split(model, tensor, own, f"{what}: {tensor.label} holds all of them, and they are to differ")
        elif own[0].storage.shape != tensor.shape:
            _require_vector_readers(model, tensor, what)
            longer.append((NewTensor(*key, own[0].storage), f"{what}: {tensor.label} would have to become a vector"))
        elif own[0].how != KEPT and (why := _shared_with(model, tensor, own[0], found, owners)):
            unshared.append((NewTensor(*key, own[0].storage), why))
    return [*split, *longer, *unshared]


def _roles(encodings: Iterable[Encoding]) -> str:
    return " and ".join(dict.fromkeys(encoding.role for encoding in encodings))


def _owners(model: TfliteModel) -> Mapping[Span, list[Key]]:
    """The tensors that have their data, scales or zero points in each range of the file.

    Raises:
        UnsupportedError: two ranges overlap and are not the same.
    """
    owners = defaultdict[Span, list[Key]](list)
    for graph in model.subgraphs:
        for tensor in graph.tensors:
            for span in _spans(model, tensor):
                owners[span].append((graph.index, tensor.index))
    reached = (0, 0)
    for span in sorted(owners):
        if span[0] < reached[1] and span != reached:
            raise UnsupportedError(
                f"{model.region.source.name}: buffers of {model.region.what} overlap at byte {span[0]}, so nothing can "
                "be written into one of them."
            )
        reached = max(reached, span, key=lambda s: s[1])
    return owners


def _spans(model: TfliteModel, tensor: Tensor) -> Iterator[Span]:
    """The bytes of the file that are a tensor's: data, scales, zero points."""
    if not model.has_data(tensor):
        return
    data, quantization, begin = model.data_of(tensor), tensor.quantization, model.region.begin
    if data.size:
        yield data.begin, data.begin + data.size
    for vector in (quantization.scales, quantization.zero_points) if quantization is not None else ():
        if vector.count:
            yield begin + vector.start, begin + vector.start + vector.width * vector.count


def _split(model: TfliteModel, tensor: Tensor, own: list[Encoding], why: str) -> Iterator[Change]:
    """A tensor for every reader but the first, which keeps the one there is, as a vector where it was one number."""
    key, storage = (tensor.subgraph, tensor.index), own[0].storage
    readers = readers_of(model, *key)
    if len(readers) != len(own) or any(encoding.storage != storage for encoding in own):
        raise UnsupportedError(
            f"{why}; it is read by {len(readers)} operators for {len(own)} roles, so it cannot be split. Let them be "
            "equal."
        )
    if storage.shape != tensor.shape:
        yield NewTensor(*key, storage), why
    yield from ((NewTensor(*key, storage, (reader,)), why) for reader in readers[1:])


def _require_vector_readers(model: TfliteModel, tensor: Tensor, what: str) -> None:
    """Check that whatever reads one number takes a vector as well.

    Raises:
        UnsupportedError: an operator does not.
    """
    operators = model.subgraphs[tensor.subgraph].operators
    for operator, position in readers_of(model, tensor.subgraph, tensor.index):
        if operators[operator].kind != _VECTOR_READER or position != 1:
            raise UnsupportedError(
                f"{what}: {tensor.label} is read by {operators[operator].label}; it can become a vector only where a "
                f"{_VECTOR_READER} reads it directly. Keep its numbers equal."
            )


def _shared_with(
    model: TfliteModel,
    tensor: Tensor,
    encoding: Encoding,
    found: Mapping[Key, list[Encoding]],
    owners: Mapping[Span, list[Key]],
) -> str:
    """That another tensor has bytes of this one, and is not to change alike; empty where none has."""
    # Scales of floats mean nothing, and are not written.
    written = list(_spans(model, tensor))[: None if tensor.type in CODE_TYPES else 1]
    for key in (key for span in written for key in owners[span]):
        where = f"{tensor.label} has the bytes of {model.tensor(*key).label}"
        if not (others := found.get(key)):
            return f"{encoding.role}: {where}, which plays no role"
        if others[0] is not encoding and others[0].digest != encoding.digest:
            return f"{_roles([encoding, *others])}: {where}, and the two are to differ"
    return ""


def overlays(sites: Iterable[Site], moved: frozenset[str] = frozenset()) -> Iterator[Overlay]:
    """What to write so that every constant of ``sites`` holds what was decided, each byte once.

    Args:
        moved: roles that have a place of their own by now, which is still empty, so that what is kept is written too.

    Raises:
        UnsupportedError: two roles want different bytes in one place, or zero points have none.
    """
    written: dict[int, tuple[Bytes | Encoding, str]] = {}
    for place, encoding in sites:
        if encoding.how == KEPT and encoding.role not in moved:
            continue
        rows: Overlay = place.model.locate(place.tensor).begin, encoding
        for at, what in (rows, *_scale_bytes(place, encoding)):
            if at not in written:
                yield at, what
            other, role = written.setdefault(at, (what, encoding.role))
            if other is not what and _content(other) != _content(what):
                raise UnsupportedError(f"{encoding.role}: shares what lies at byte {at} with {role}.")


def _content(what: Bytes | Encoding) -> Bytes | str:
    return what.digest if isinstance(what, Encoding) else what


def _scale_bytes(place: Place, encoding: Encoding) -> Iterator[tuple[int, Bytes]]:
    """Scales and zero points of ``encoding``, each with where in the file they go.

    Raises:
        UnsupportedError: there is no place for the zero points.
    """
    model, tensor, quantization = place.model, place.tensor, place.tensor.quantization
    scale, zero_point = encoding.scales
    if not scale.size or quantization is None:
        return
    changed = not np.array_equal(QuantizedTensor.of(model, tensor).zero_point.reshape(-1), zero_point)
    held, begin = quantization.zero_points.count, model.region.begin
    if quantization.blockwise is not None:
        held, blocks = 0, model.tensor(tensor.subgraph, quantization.blockwise.scales)
        assert blocks.type is not None
        yield model.locate(blocks).begin, float_bytes(scale, blocks.type, encoding.role)
    else:
        yield begin + quantization.scales.start, _bytes_of(scale.astype("<f4", copy=False))
    if not changed:
        return
    if held != zero_point.size and (held != 1 or np.ptp(zero_point)):
        raise UnsupportedError(f"{encoding.role}: {tensor.label} has no place for its new zero points.")
    yield begin + quantization.zero_points.start, _bytes_of(zero_point[:held].astype("<i8", copy=False))


def _bytes_of(array: npt.NDArray[Any]) -> memoryview:
    # Not copied: a vocabulary has a scale a row, and a table a layer.
    return np.ascontiguousarray(array).data.cast("B")
