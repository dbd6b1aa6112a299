"""Writes the skeleton of a drafter: its section without weights, to attach to an issue.

Codes of weights become 0, scales and norms 1, so that the graph is read, or refused, as before. RoPE tables, masks and
shapes stay. If the graph cannot be read to its end, every constant that may be a weight is left out.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mtp_extract.architecture.roles import SCALAR, load_role_table
from mtp_extract.bundle import ModelFile, open_bundle
from mtp_extract.errors import MtpExtractError, UnsupportedError
from mtp_extract.graph.call import CONVERSIONS, SELECTIONS
from mtp_extract.graph.drafter import DrafterReader, read_drafter_graph
from mtp_extract.graph.expressions import UnreadableError
from mtp_extract.graph.flat import Depends, FlatGraph, Node, Value
from mtp_extract.graph.kernels import LAYOUT
from mtp_extract.graph.matrices import PRODUCT, find_weight
from mtp_extract.graph.roles import find_named_roles
from mtp_extract.io.place import PathLike, check_place, stage_output
from mtp_extract.litertlm.skeleton import pack_skeleton
from mtp_extract.litertlm.storage import FLOAT_TYPES, NUMBER_TYPES
from mtp_extract.litertlm.tflite import Tensor, TensorType, TfliteModel

_PRODUCTS = frozenset({"FULLY_CONNECTED", "BATCH_MATMUL", "EMBEDDING_LOOKUP", "GATHER"})
_ONE: dict[TensorType | None, bytes] = {
    TensorType.FLOAT32: b"\0\0\x80?",
    TensorType.FLOAT16: b"\0<",
    TensorType.BFLOAT16: b"\x80?",
}
_LARGEST_NUMBER = 1 << 12
"""A constant of more elements counts as a weight if nothing else is known about it."""


@dataclass(frozen=True)
class Skeleton:
    """A skeleton that was written."""

    path: Path
    size: int  # bytes of the file
    weights: int  # constants that were left out because they play a role
    doubtful: int  # constants that were left out because they may play one
    left_out: int  # bytes of both


def write_skeleton(source: str | os.PathLike[str], out: PathLike) -> Skeleton:
    """Write the drafter's section of ``source`` without its weights to the new file ``out``.

    Raises:
        NoDrafterError, SourceError, FormatError, OutputError: as the names say; no file is left behind.
        UnsupportedError: the weights lie in a section of their own.
    """
    with open_bundle(source) as opened:
        check_place(out, overwrite=False, inputs=(opened.source.path,))
        model, roles, doubtful = _find_weights(opened)
        if model.weights is not None:
            why = "its weights lie in a section of their own. Give the model's section alone: that holds none."
            raise UnsupportedError(f"{opened.source.name}: {why}")
        opened.prefetch()
        blank, left_out = _clear_weights(model, (*roles, *doubtful))
        content = pack_skeleton(bytes(blank))
        with stage_output(out, overwrite=False, inputs=(opened.source.path,)) as stage:
            stage.write_bytes(content)
    return Skeleton(Path(out), len(content), len(roles), len(doubtful), left_out)


def _clear_weights(model: TfliteModel, weights: Collection[Tensor]) -> tuple[bytearray, int]:
    """Return the bytes of the model without numbers and scales of ``weights``, and the number of bytes left out."""
    blank = bytearray(model.region.source.read(model.region.begin, model.region.size))
    left_out = 0
    for tensor in weights:
        place = model.locate_data(tensor)
        begin = place.begin - model.region.begin
        # Matrices become zeros, vectors of floats ones.
        unit = b"\0" if len(tensor.shape) == 2 else _ONE.get(tensor.type, b"\0")
        blank[begin : begin + place.size] = unit * (place.size // len(unit))
        left_out += place.size
    _reset_scales(model, set(map(id, weights)), blank)
    return blank, left_out


_Key = tuple[int, int]
"""Subgraph and index of a tensor."""


def _find_weights(opened: ModelFile) -> tuple[TfliteModel, list[Tensor], list[Tensor]]:
    """Return the model, the constants that play a role in it, and those that may play one."""
    model = opened.find_model()
    stored = [tensor for graph in model.subgraphs for tensor in graph.tensors if model.has_data(tensor)]
    roles = dict[_Key, Tensor]()
    not_weights = set[_Key]()
    largest = _LARGEST_NUMBER
    scalars = list[Tensor]()
    with suppress(MtpExtractError):
        # A skeleton is meant for graphs that are refused.
        graph = opened.flatten_graph()
        largest = 1
        scalars = [value.tensor for value in graph.constants.values() if _is_named_scalar(value)]
        walker = DrafterReader(read_drafter_graph(graph))
        with suppress(MtpExtractError):
            walker.read_structure()
            not_weights = set(graph.constants)
        roles = {_get_key(role.tensor): role.tensor for role in walker.roles if role.tensor is not None}
        not_weights = not_weights or _find_other_constants(graph)
    possible = [tensor for tensor in stored if tensor.type in NUMBER_TYPES and tensor.elements > largest]
    possible = [tensor for tensor in possible if _get_key(tensor) not in not_weights]
    doubtful = [tensor for tensor in (*possible, *scalars) if _get_key(tensor) not in roles]
    return model, list(roles.values()), doubtful


def _get_key(tensor: Tensor) -> _Key:
    return tensor.subgraph, tensor.index


def _find_other_constants(graph: FlatGraph) -> set[_Key]:
    """Find the constants that play no role in a graph that could not be read to its end."""
    # From the end: the results of a value tell what it is used for.
    may_be = dict[int, bool]()
    for node in reversed(graph.nodes):
        may_be |= {id(result): _may_be_weight(graph, result, may_be) for result in node.outputs}
    return {key for key, value in graph.constants.items() if not _may_be_weight(graph, value, may_be)}


def _may_be_weight(graph: FlatGraph, value: Value, may_be: Mapping[int, bool]) -> bool:
    """Whether a constant is a matrix of a product, or is computed with an activation, selecting and moving left out.

    A rotation is no weight. ``may_be`` has the answer for each result of the constant, by id.
    """
    for node, _ in value.consumers:
        if node.kind == PRODUCT and _is_rotation(graph, node):
            return False
        meets = any(result.depends & Depends.DATA for result in node.outputs)
        if node.kind in _PRODUCTS or (meets and node.kind not in LAYOUT.keys() | SELECTIONS):
            return True
        is_handed_on = not meets and node.kind in LAYOUT.keys() | CONVERSIONS
        if is_handed_on and any(may_be.get(id(result), True) for result in node.outputs):
            return True
    results = (result for node, _ in value.consumers for result in node.outputs)
    meets_place = any(result.depends & (Depends.POSITION | Depends.MASK) for result in results)
    return value.tensor.elements > _LARGEST_NUMBER and not meets_place


def _is_rotation(graph: FlatGraph, node: Node) -> bool:
    try:
        find_weight(graph, node)
    except (UnreadableError, UnsupportedError) as refusal:
        return isinstance(refusal, UnsupportedError)
    return False


def _is_named_scalar(value: Value) -> bool:
    if value.tensor.elements != 1 or value.tensor.type not in FLOAT_TYPES:
        return False
    scalars = {role.name.rpartition(".")[2] for role in load_role_table() if role.kind == SCALAR}
    names = [tensor.name for node, _ in value.consumers for result in node.outputs for tensor in result.tensors]
    return any(role.rpartition(".")[2] in scalars for role in find_named_roles(names, is_matrix=False))


def _reset_scales(model: TfliteModel, weights: set[int], blank: bytearray) -> None:
    """Set to 1 every scale of a weight, and every list of several scales, since an activation has one."""
    for tensor in (tensor for graph in model.subgraphs for tensor in graph.tensors):
        quantization = tensor.quantization
        if (
            quantization is not None
            and quantization.scales.count
            and (id(tensor) in weights or quantization.scales.count > 1)
        ):
            begin, count = quantization.scales.start, quantization.scales.count
            blank[begin : begin + 4 * count] = _ONE[TensorType.FLOAT32] * count
