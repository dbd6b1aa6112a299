"""Where decisions go: which tensors need a place of their own, and every byte that is then written.

First the layout: a role that no longer equals what it shares a constant with needs a tensor of its own. Then the
content, in place, over that layout or the file as it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_extract.errors import UnsupportedError
from mtp_extract.graph.roles import FoundRole
from mtp_extract.insert.decision import KEPT, Decision, digest, table_of
from mtp_extract.io.laid import Piece, Span, made
from mtp_extract.litertlm.rebuild import NewTensor, readers_of
from mtp_extract.litertlm.storage import CODE_TYPES, QuantizedTensor, float_bytes
from mtp_extract.litertlm.tflite import Tensor, TfliteModel

_VECTOR_READER = "MUL"

Key = tuple[int, int]
"""A tensor of a model: subgraph and index."""
Change = tuple[NewTensor, str]
"""A tensor that has to be made, and why."""


@dataclass(frozen=True)
class Site:
    """A constant of a graph that plays a role, and what becomes of it."""

    model: TfliteModel
    found: FoundRole
    decision: Decision

    @property
    def tensor(self) -> Tensor:
        """The constant."""
        assert self.found.tensor is not None
        return self.found.tensor


@dataclass(frozen=True)
class _Stored:
    """One stored tensor, and what becomes of the roles that it plays."""

    tensor: Tensor
    decisions: tuple[Decision, ...]

    @property
    def key(self) -> Key:
        return self.tensor.subgraph, self.tensor.index

    @property
    def roles(self) -> str:
        return " and ".join(decision.role for decision in self.decisions)

    @property
    def agreed(self) -> bool:
        """Whether all its roles want the same."""
        if len(self.decisions) == 1 or all(d.how == KEPT for d in self.decisions):
            return True
        return len({decision.fingerprint for decision in self.decisions}) == 1


def new_tensors(model: TfliteModel, sites: Iterable[Site]) -> list[Change]:
    """The tensors of ``model`` that have to be made for ``sites``, each with the reason; none where all of it can be
    written in place.

    Raises:
        UnsupportedError: what is to change cannot be given a tensor of its own; the message names the roles.
    """
    owners = _owners(model)
    found: dict[Key, list[Site]] = defaultdict(list)
    for site in sites:
        found[site.tensor.subgraph, site.tensor.index].append(site)
    # Signatures may run one graph, and have one decision.
    stored = {
        key: _Stored(group[0].tensor, tuple({id(site.decision): site.decision for site in group}.values()))
        for key, group in found.items()
    }
    split, longer, unshared = list[Change](), list[Change](), list[Change]()
    for entry in stored.values():
        decision = entry.decisions[0]
        if not entry.agreed:
            split += _split(model, entry)
        elif decision.storage.shape != entry.tensor.shape:
            longer.append((NewTensor(*entry.key, decision.storage), _why_longer(model, entry)))
        elif decision.how != KEPT and (why := _why_unshared(model, entry, stored, owners)):
            unshared.append((NewTensor(*entry.key, decision.storage), why))
    return [*split, *longer, *unshared]


def _owners(model: TfliteModel) -> Mapping[Span, list[Key]]:
    """The tensors that have their data, scales or zero points in each range of the file.

    Raises:
        UnsupportedError: two ranges overlap and are not the same.
    """
    owners: dict[Span, list[Key]] = defaultdict(list)
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


def _split(model: TfliteModel, entry: _Stored) -> Iterator[Change]:
    """One tensor plays several roles, which now differ: every reader but the first gets its own."""
    storages = {d.storage for d in entry.decisions}
    readers = readers_of(model, *entry.key)
    why = f"{entry.roles}: {entry.tensor.label} holds all of them, and they are to differ"
    if len(readers) != len(entry.decisions) or len(storages) > 1:
        raise UnsupportedError(
            f"{why}; it is read by {len(readers)} operators for {len(entry.decisions)} roles, so it cannot be split. "
            "Let them be equal."
        )
    # The first reader keeps the tensor there is, as a vector where it was one number.
    storage = storages.pop()
    if storage.shape != entry.tensor.shape:
        yield NewTensor(*entry.key, storage), why
    yield from ((NewTensor(*entry.key, storage, (reader,)), why) for reader in readers[1:])


def _why_longer(model: TfliteModel, entry: _Stored) -> str:
    """That a vector is stored as one number, and is to have several.

    Raises:
        UnsupportedError: an operator reads it that would not take it so.
    """
    tensor = entry.tensor
    operators = model.subgraphs[tensor.subgraph].operators
    for operator, position in readers_of(model, *entry.key):
        if operators[operator].kind != _VECTOR_READER or position != 1:
            raise UnsupportedError(
                f"{entry.roles}: {tensor.label} is read by {operators[operator].label}; it can become a vector only "
                f"where a {_VECTOR_READER} reads it directly. Keep its numbers equal."
            )
    return f"{entry.roles}: {tensor.label} would have to become a vector"


def _why_unshared(
    model: TfliteModel, entry: _Stored, stored: Mapping[Key, _Stored], owners: Mapping[Span, list[Key]]
) -> str:
    """That another tensor has bytes of this one, and is not to change alike; empty where none has."""
    decision, tensor = entry.decisions[0], entry.tensor
    # Scales of floats mean nothing, and are not written.
    written = list(_spans(model, tensor))[: None if tensor.type in CODE_TYPES else 1]
    for key in (key for span in written for key in owners[span]):
        where = f"{tensor.label} has the bytes of {model.tensor(*key).label}"
        if (other := stored.get(key)) is None:
            return f"{entry.roles}: {where}, which plays no role"
        if other.decisions[0] is not decision and other.decisions[0].fingerprint != decision.fingerprint:
            return f"{' and '.join(dict.fromkeys((entry.roles, other.roles)))}: {where}, and the two are to differ"
    return ""


def pieces_of(sites: Iterable[Site], moved: frozenset[str] = frozenset()) -> list[Piece]:
    """What to write where, so that every constant of ``sites`` holds what was decided; each byte once.

    Args:
        moved: roles that have a place of their own by now, which is still empty, so that what is kept is written too.

    Raises:
        UnsupportedError: two roles want different bytes in one place.
    """
    pieces: dict[int, tuple[Piece, Decision]] = {}
    for site in sites:
        decision = site.decision
        if decision.how == KEPT and decision.role not in moved:
            continue
        for piece in _site_pieces(site):
            other, by = pieces.setdefault(piece.at, (piece, decision))
            if by is not decision and _digest(other) != _digest(piece):
                raise UnsupportedError(f"{decision.role}: shares what lies at byte {piece.at} with {by.role}.")
    return [piece for piece, _ in pieces.values()]


def _digest(piece: Piece) -> str:
    return digest(piece.produce() if piece.produce is not None else iter([piece.data or b""]))


def _site_pieces(site: Site) -> Iterator[Piece]:
    """What to write over the data, scales and zero points of the constant.

    Raises:
        UnsupportedError: there is no place for the new zero points.
    """
    model, tensor, quantization = site.model, site.tensor, site.tensor.quantization
    content, storage = site.decision.content, site.decision.storage
    location = model.locate(tensor)
    yield Piece(location.begin, location.size, produce=content.produce, table=table_of(site.decision.new))
    if not content.scale.size or quantization is None:
        return
    if storage.kind == "blockwise":
        yield _block_scales(site)
        return
    begin, held = model.region.begin, quantization.zero_points.count
    yield _vector(begin + quantization.scales.start, content.scale.astype("<f4", copy=False))
    zero_point = content.zero_point[:1] if held == 1 else content.zero_point
    if held:
        yield _vector(begin + quantization.zero_points.start, zero_point.astype("<i8", copy=False))
    if content.zero_point.any() and (not held or (held == 1 and np.ptp(content.zero_point))):
        raise UnsupportedError(f"{site.decision.role}: {tensor.label} has no place for its new zero points.")


def _vector(at: int, values: npt.NDArray[Any]) -> Piece:
    """``values`` at ``at``; made into bytes when they are written, since a vocabulary has a scale a row."""
    return Piece(at, values.nbytes, produce=lambda: iter([values.tobytes()]))


def _block_scales(site: Site) -> Piece:
    model, tensor, content = site.model, site.tensor, site.decision.content
    source = QuantizedTensor.of(model, tensor)
    assert tensor.quantization is not None and tensor.quantization.blockwise is not None
    if not np.array_equal(source.zero_point.reshape(-1), content.zero_point):
        raise UnsupportedError(
            f"{site.decision.role}: {tensor.label} has blocks with zero points, and new ones cannot be written."
        )
    scales = model.tensor(tensor.subgraph, tensor.quantization.blockwise.scales)
    assert scales.type is not None
    return made(model.locate(scales).begin, float_bytes(content.scale, scales.type, site.decision.role))
