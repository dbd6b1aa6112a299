"""Reading the structure of a TFLite model: what :mod:`mtp_extract.litertlm.tflite` views."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MappingProxyType

from mtp_extract.data import load_mapping
from mtp_extract.errors import FormatError, escape
from mtp_extract.io.source import Region
from mtp_extract.litertlm.container import TFLITE_IDENTIFIER
from mtp_extract.litertlm.flatbuffer import Budget, FlatBuffer, Table
from mtp_extract.litertlm.tflite import (
    Blockwise,
    ExternalBuffer,
    Operator,
    Quantization,
    Signature,
    Subgraph,
    Tensor,
    TfliteModel,
)

_LARGEST_DIMENSION_PRODUCT = 1 << 40
_COMPOSITE_OPTIONS = 21
_DETAILS_BLOCKWISE = 2
_DETAILS_NAMES = MappingProxyType({0: "none", 1: "custom", 2: "blockwise", 3: "multi-axis"})

# Id in the union of options, of the operators whose options matter here.
_OPTION_TYPES: dict[str, int] = load_mapping("tflite_schema")["option_types"]

# Slot of `fused_activation_function` in the options of the operators that have one.
_ACTIVATION_SLOT = MappingProxyType(
    {
        **dict.fromkeys(("FULLY_CONNECTED", "ADD", "MUL", "SUB", "DIV", "L2_NORMALIZATION"), 0),
        "CONCATENATION": 1,
        "CONV_2D": 3,
    }
)


def read_model(region: Region, weights: Region | None = None, budget: Budget | None = None) -> TfliteModel:
    """Read the structure of the TFLite model in ``region``; no constant is read.

    ``budget`` bounds the work; whoever tries many candidates lets them share one.

    Raises:
        FormatError: not a TFLite model, or one that contradicts itself.
        TruncatedError: it leaves the region.
    """
    if region.size < 8 or region.read(4, 4) != TFLITE_IDENTIFIER:
        raise FormatError(f"{region.source.name}: {region.what} is not a TFLite model (no TFL3 identifier).")
    root = FlatBuffer(region, budget).root()
    codes = tuple(_operator_code(table) for table in root.tables(1))
    buffers = tuple((t.vector(0, 1), t.integer(1, "Q"), t.integer(2, "Q")) for t in root.tables(4))
    subgraphs = tuple(_subgraph(table, index, codes, len(buffers)) for index, table in enumerate(root.tables(2)))
    if not subgraphs:
        raise FormatError(f"{region.source.name}: {region.what} has no subgraph.")
    groups = tuple(table.string(0) or "" for table in root.tables(8))
    external = {}
    for table in root.tables(9):
        group = table.integer(1, "I")
        external[table.integer(0, "I")] = ExternalBuffer(
            groups[group] if group < len(groups) else f"(group {group} of {len(groups)})",
            table.integer(2, "Q"),
            table.integer(3, "Q"),
            table.string(4) or "",
        )
    return TfliteModel(
        region,
        weights,
        root.string(3) or "",
        subgraphs,
        tuple(_signature(table, subgraphs) for table in root.tables(7)),
        buffers,
        MappingProxyType(external),
    )


def _operator_code(table: Table) -> str:
    # Ids up to 126 are in the old one-byte field as well; whichever writer, the larger of the two is meant.
    code = max(table.integer(0, "b"), table.integer(3, "i"))
    names: list[str] = load_mapping("tflite_schema")["builtin_operators"]
    name = names[code] if 0 <= code < len(names) else f"unknown ({code})"
    return f"CUSTOM:{table.string(1) or ''}" if name == "CUSTOM" else name


def _subgraph(table: Table, index: int, codes: tuple[str, ...], buffers: int) -> Subgraph:
    tensors = tuple(_tensor(t, index, i, buffers) for i, t in enumerate(table.tables(0)))

    def check(indices: tuple[int, ...], what: str) -> tuple[int, ...]:
        for tensor in indices:
            if not -1 <= tensor < len(tensors):
                raise table.buffer.error(f"{what} of subgraph {index} names tensor {tensor}, and it has {len(tensors)}")
        return indices

    operators = tuple(_operators(table, index, codes, check))
    return Subgraph(
        index,
        table.string(4) or "",
        tensors,
        operators,
        check(table.integers(1, "i"), "the input list"),
        check(table.integers(2, "i"), "the output list"),
    )


_Check = Callable[[tuple[int, ...], str], tuple[int, ...]]


def _operators(table: Table, subgraph: int, codes: tuple[str, ...], check: _Check) -> Iterator[Operator]:
    for index, entry in enumerate(table.tables(3)):
        code = entry.integer(0, "I")
        if code >= len(codes):
            raise table.buffer.error(f"op {index} of subgraph {subgraph} has operator code {code} of {len(codes)}")
        kind = codes[code]
        # LiteRT takes options of another operator's type for none.
        options = entry.table(4) if entry.integer(3, "B") == _OPTION_TYPES.get(kind) else None
        composite = (
            entry.table(12) if kind == "STABLEHLO_COMPOSITE" and entry.integer(11, "B") == _COMPOSITE_OPTIONS else None
        )
        slot = _ACTIVATION_SLOT.get(kind)
        yield Operator(
            subgraph,
            index,
            kind,
            check(entry.integers(1, "i"), f"op {index}"),
            check(entry.integers(2, "i"), f"op {index}"),
            (composite.string(0) or "") if composite else None,
            composite.integer(1, "i", -1) if composite else -1,
            composite.vector(2, 1).bytes() if composite else b"",
            options.integer(slot, "b") if options and slot is not None else 0,
            options,
        )


def _tensor(table: Table, subgraph: int, index: int, buffers: int) -> Tensor:
    shape = table.integers(0, "i")
    product = 1
    for size in shape:
        product *= size
        if size < 0 or product > _LARGEST_DIMENSION_PRODUCT:
            raise table.buffer.error(f"tensor {index} of subgraph {subgraph} has shape {list(shape[:8])}")
    buffer = table.integer(2, "I")
    if buffer >= buffers:
        raise table.buffer.error(f"tensor {index} of subgraph {subgraph} names buffer {buffer} of {buffers}")
    quantization = table.table(4)
    return Tensor(
        subgraph,
        index,
        table.string(3) or "",
        shape,
        table.integer(1, "b"),
        buffer,
        table.integer(10, "I"),
        _quantization(quantization) if quantization else None,
        table.table(6) is not None,
        bool(table.integer(5, "B")),
    )


def _quantization(table: Table) -> Quantization | None:
    kind, details = table.integer(4, "B"), table.table(5)
    blockwise = None
    if kind == _DETAILS_BLOCKWISE and details:
        blockwise = Blockwise(details.integer(0, "i"), details.integer(1, "i"), details.integer(2, "i"))
    if not (table.at(2) or table.at(3) or kind):
        return None
    name = _DETAILS_NAMES.get(kind, f"unknown ({kind})")
    return Quantization(table.integer(6, "i"), name, blockwise, table.vector(2, 4), table.vector(3, 8))


def _signature(table: Table, subgraphs: tuple[Subgraph, ...]) -> Signature:
    key, index = table.string(2) or "", table.integer(4, "I")
    if index >= len(subgraphs):
        raise table.buffer.error(f"signature {escape(key)!r} names subgraph {index} of {len(subgraphs)}")

    def names(slot: int) -> MappingProxyType[str, int]:
        found = {}
        for entry in table.tables(slot):
            name, tensor = entry.string(0) or "", entry.integer(1, "I")
            if tensor >= len(subgraphs[index].tensors):
                raise table.buffer.error(f"signature {escape(key)!r} names tensor {tensor} as {escape(name)!r}")
            if name in found:
                raise table.buffer.error(f"signature {escape(key)!r} names {escape(name)!r} twice")
            found[name] = tensor
        return MappingProxyType(found)

    return Signature(key, index, names(0), names(1))
