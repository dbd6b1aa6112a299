"""Where decisions go: which tensors need a place of their own, and every byte that is then written.

First the layout: a rebuilt section in which every role that changes its type, or no longer equals what it shares a
constant with, has a tensor of its own. Then the content, in place, over that layout or the file as it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128

from mtp_extract.bundle import Drafter
from mtp_extract.errors import UnsupportedError
from mtp_extract.insert.decision import KEPT, Content, Decision
from mtp_extract.litertlm.quantized import QuantizedTensor
from mtp_extract.litertlm.rebuild import NewTensor, readers_of
from mtp_extract.litertlm.storage import CODE_TYPES, Storage, float_bytes
from mtp_extract.litertlm.tflite import Tensor, TfliteModel
from mtp_extract.litertlm.writer import Piece, made

_MATRIX_READER = "FULLY_CONNECTED"
_VECTOR_READER = "MUL"


@dataclass(frozen=True)
class _Stored:
    """One stored tensor, or some of its rows, and the roles that it plays."""

    tensor: Tensor
    decisions: tuple[Decision, ...]
    part: bool

    @property
    def key(self) -> tuple[int, int]:
        return self.tensor.subgraph, self.tensor.index

    @property
    def agreed(self) -> bool:
        """Whether all its roles want the same."""
        if len(self.decisions) == 1 or all(d.how == KEPT for d in self.decisions):
            return True
        return len({fingerprint(d) for d in self.decisions}) == 1


def fingerprint(decision: Decision) -> str:
    """Equal for decisions that write the same."""
    digest = xxh3_128(f"{decision.storage.type} {decision.storage.shape}".encode())
    digest.update(decision.content.scale.tobytes())
    digest.update(decision.content.zero_point.tobytes())
    for chunk in decision.content.produce():
        digest.update(chunk)
    return digest.hexdigest()


def _stored(drafter: Drafter, decisions: Mapping[str, Decision]) -> list[_Stored]:
    found: dict[tuple[int, int, int | None], tuple[Tensor, list[Decision]]] = {}
    for role in drafter.walk.roles:
        if role.tensor is not None and role.role in decisions:
            entry = found.setdefault((role.tensor.subgraph, role.tensor.index, role.first), (role.tensor, []))
            entry[1].append(decisions[role.role])
    return [_Stored(tensor, tuple(group), first is not None) for (*_, first), (tensor, group) in found.items()]


def new_tensors(drafter: Drafter, decisions: Mapping[str, Decision]) -> list[NewTensor]:
    """The tensors that have to be made for ``decisions``; none where all of it can be written in place.

    Raises:
        UnsupportedError: what is to change cannot be given a tensor of its own; the message names the roles.
    """
    stored = []
    for entry in _stored(drafter, decisions):
        if not entry.part:
            stored.append(entry)
        elif any(decision.how != KEPT for decision in entry.decisions):
            _check_part(drafter.model, entry)
    return [*_split(drafter, stored), *_retyped(drafter, stored), *_unshared(drafter, stored)]


def _check_part(model: TfliteModel, entry: _Stored) -> None:
    """Check that rows of a tensor can be written over, without what lies beside them.

    Raises:
        UnsupportedError: they cannot.
    """
    tensor, storage, quantization = entry.tensor, entry.decisions[0].storage, entry.tensor.quantization
    role = " and ".join(decision.role for decision in entry.decisions)
    own = set(spans(model, tensor))
    others = [t for graph in model.subgraphs for t in graph.tensors if (t.subgraph, t.index) != entry.key]
    why = None
    if not entry.agreed or any(own & set(spans(model, other)) for other in others):
        why = "its bytes are another tensor's, too"
    elif storage.type is not tensor.type:
        why = f"it is {tensor.type_name}, and so they stay"
    elif storage.kind not in ("none", "per_channel"):
        why = "they share scales"
    elif quantization is not None and storage.kind != "none" and quantization.zero_point_count == 1:
        why = "they share a zero point"
    if why is not None:
        raise UnsupportedError(f"{role}: {tensor.label} holds it beside other weights, and {why}. Keep the weight.")


def _split(drafter: Drafter, stored: Iterable[_Stored]) -> Iterator[NewTensor]:
    """One tensor plays several roles, which now differ: every reader but the first gets its own."""
    for entry in stored:
        if entry.agreed:
            continue
        roles = " and ".join(d.role for d in entry.decisions)
        storages = {d.storage for d in entry.decisions}
        readers = readers_of(drafter.model, *entry.key)
        if len(readers) != len(entry.decisions) or len(storages) > 1:
            raise UnsupportedError(
                f"{roles}: {entry.tensor.label} holds all of them, and they are to differ; it is read by "
                f"{len(readers)} operators for {len(entry.decisions)} roles, so it cannot be split. Let them be equal."
            )
        # The first reader keeps the tensor there is, in its new type if it has one.
        storage = storages.pop()
        if not _fits(storage, entry.tensor):
            yield NewTensor(*entry.key, storage)
        yield from (NewTensor(*entry.key, storage, (reader,)) for reader in readers[1:])


def _fits(storage: Storage, tensor: Tensor) -> bool:
    """Whether ``tensor`` is of the type and shape that ``storage`` has."""
    return (storage.type, storage.shape) == (tensor.type, tensor.shape)


def _retyped(drafter: Drafter, stored: Iterable[_Stored]) -> Iterator[NewTensor]:
    """A tensor of another type or shape than it has."""
    for entry in stored:
        decision = entry.decisions[0]
        if not entry.agreed or _fits(decision.storage, entry.tensor):
            continue
        operators = drafter.model.subgraphs[entry.tensor.subgraph].operators
        expected = _MATRIX_READER if decision.storage.type is not entry.tensor.type else _VECTOR_READER
        for operator, position in readers_of(drafter.model, *entry.key):
            if operators[operator].kind != expected or position != 1:
                raise UnsupportedError(
                    f"{decision.role}: {entry.tensor.label} is read by {operators[operator].label}; its type can be "
                    f"changed only where a {expected} reads it directly. Keep its type."
                )
        yield NewTensor(*entry.key, decision.storage)


def _unshared(drafter: Drafter, stored: list[_Stored]) -> Iterator[NewTensor]:
    """Several tensors have one buffer, and are to differ: those that change get buffers of their own."""
    model = drafter.model
    owners: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for graph in model.subgraphs:
        for tensor in graph.tensors:
            for span in spans(model, tensor):
                owners[span].append((graph.index, tensor.index))
    check_overlaps(model, owners)
    by_key = {entry.key: entry for entry in stored}
    for entry in stored:
        if entry.decisions[0].how == KEPT or not entry.agreed or not _fits(entry.decisions[0].storage, entry.tensor):
            continue
        written = list(spans(model, entry.tensor))[: None if entry.tensor.type in CODE_TYPES else 1]
        sharing = {key for span in written for key in owners[span]}
        print_ = fingerprint(entry.decisions[0]) if len(sharing) > 1 else ""
        if any(key not in by_key or fingerprint(by_key[key].decisions[0]) != print_ for key in sharing - {entry.key}):
            yield NewTensor(*entry.key, entry.decisions[0].storage)


def spans(model: TfliteModel, tensor: Tensor) -> Iterator[tuple[int, int]]:
    """The bytes of the file that are a tensor's: data, scales, zero points."""
    span = model.span(tensor)
    if span is not None and span[0] < span[1]:
        yield span
    quantization, begin = tensor.quantization, model.region.begin
    if span is not None and quantization is not None:
        for at, size in (
            (quantization.scale_at, 4 * quantization.scale_count),
            (quantization.zero_point_at, 8 * quantization.zero_point_count),
        ):
            if size:
                yield begin + at, begin + at + size


def check_overlaps(model: TfliteModel, owners: Iterable[tuple[int, int]]) -> None:
    """Check that the spans ``owners`` are the same or apart.

    Raises:
        UnsupportedError: two overlap.
    """
    reached = (0, 0)
    for span in sorted(owners):
        if span[0] < reached[1] and span != reached:
            raise UnsupportedError(
                f"{model.region.source.name}: buffers of {model.region.what} overlap at byte {span[0]}, so nothing can "
                "be written into one of them."
            )
        reached = max(reached, span, key=lambda s: s[1])


def patches(drafter: Drafter, decisions: Mapping[str, Decision], moved: frozenset[str]) -> list[Piece]:
    """What to write where, over the bytes of ``drafter``, so that its roles hold what ``decisions`` say.

    Args:
        moved: roles that have a place of their own by now, which is still empty, so that what is kept is written too.

    Raises:
        UnsupportedError: two roles want different bytes in one place.
    """
    pieces: dict[int, Piece] = {}
    for role in drafter.walk.roles:
        decision = decisions.get(role.role)
        if decision is None or role.tensor is None or (decision.how == KEPT and role.role not in moved):
            continue
        for piece in role_pieces(drafter.model, role.role, role.tensor, decision, role.first):
            if piece.at in pieces and sum_of(pieces[piece.at]) != sum_of(piece):
                raise UnsupportedError(f"{role.role}: shares what lies at byte {piece.at} with another role.")
            pieces[piece.at] = piece
    return list(pieces.values())


def sum_of(piece: Piece) -> str:
    """XXH3-128 of what is made for ``piece``."""
    digest = xxh3_128()
    for chunk in piece.produce() if piece.produce is not None else ():
        digest.update(chunk)
    return digest.hexdigest()


def role_pieces(
    model: TfliteModel, role: str, tensor: Tensor, decision: Decision, first: int | None = None
) -> Iterator[Piece]:
    """What to write over ``tensor``'s data, scales and zero points, from row ``first`` on.

    Raises:
        UnsupportedError: there is no place for the new zero points.
    """
    content, storage, quantization = decision.content, decision.storage, tensor.quantization
    location = model.locate(tensor)
    if first is not None:
        location = QuantizedTensor.of(model, tensor).rows(first, storage.shape[0]).location
    yield Piece(location.file_offset, location.length, produce=content.produce)
    if not content.scale.size or quantization is None:
        return
    if storage.kind == "blockwise":
        yield from _block_scales(model, role, tensor, content)
        return
    begin, held = model.region.begin, quantization.zero_point_count
    row = first or 0
    yield _vector(begin + quantization.scale_at + 4 * row, content.scale.astype("<f4", copy=False))
    zero_point = content.zero_point[:1] if held == 1 else content.zero_point
    if held:
        yield _vector(begin + quantization.zero_point_at + 8 * row, zero_point.astype("<i8", copy=False))
    if content.zero_point.any() and (not held or (held == 1 and np.ptp(content.zero_point))):
        raise UnsupportedError(f"{role}: {tensor.label} has no place for its new zero points.")


def _vector(at: int, values: npt.NDArray[Any]) -> Piece:
    """``values`` at ``at``; made into bytes when they are written, since a vocabulary has a scale a row."""
    return Piece(at, values.nbytes, produce=lambda: iter([values.tobytes()]))


def _block_scales(model: TfliteModel, role: str, tensor: Tensor, content: Content) -> Iterator[Piece]:
    source = QuantizedTensor.of(model, tensor)
    assert tensor.quantization is not None and tensor.quantization.blockwise is not None
    if not np.array_equal(source.zero_point.reshape(-1), content.zero_point):
        raise UnsupportedError(f"{role}: {tensor.label} has blocks with zero points, and new ones cannot be written.")
    scales = model.tensor(tensor.subgraph, tensor.quantization.blockwise.scales)
    assert scales.type is not None
    yield made(model.locate(scales).file_offset, float_bytes(content.scale, scales.type, role))
