"""Directories with transformers' names and configuration in which matrices are packed integers.

A matrix is several tensors. The first holds its codes, the second its scales; whatever else a format wants is made of
the scales, and compared with that when it is read. The shapes of the first two say how a matrix is packed, so that the
configuration is made of the tensors and compared with the one that lies beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_extract._version import __version__
from mtp_extract.architecture.config import DrafterConfig
from mtp_extract.architecture.roles import GEMMA4_MTP, INDEX, MATRIX, Role, shapes_of
from mtp_extract.checkpoint.checkpoint import CODES, INDICES, Checkpoint, Holding
from mtp_extract.checkpoint.dtypes import DTYPES
from mtp_extract.checkpoint.json_file import read_object
from mtp_extract.checkpoint.keys import AllowedKeys, at
from mtp_extract.checkpoint.packing import pack, unpack
from mtp_extract.checkpoint.planned import DTYPE_SIZES, OutputFile, PlannedTensor, json_text, plan_array
from mtp_extract.checkpoint.stored import StoredTensor, read_array, read_rows, stored_weight
from mtp_extract.checkpoint.weight import RowCodes, Steps, Weight, has_exact_steps, of_codes, row_codes, row_ranges
from mtp_extract.errors import CheckpointError, NoCodesError, UnsupportedError, escape
from mtp_extract.formats import reading
from mtp_extract.formats.holding import hold_floats, plan_weight
from mtp_extract.formats.transformers import (
    GENERATION,
    GENERATION_FILE,
    config_document,
    parse_config,
    require_documents,
)
from mtp_extract.graph.roles import Activation
from mtp_extract.litertlm.storage import Floats, Packing

HEAD = "lm_head"
"""Role of the head, and its module where it is none with the embedding."""

EMBEDDING = "model.embed_tokens"
"""Module of the embedding, which is the head too where the two are tied."""

Activations = tuple[Activation | None, Activation | None]
"""The static quantization of what goes into a matrix and of what comes out."""

_WEIGHT = ".weight"
_SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)
_TYPES: Mapping[str, np.dtype[Any]] = MappingProxyType({"F32": np.dtype("<f4"), "I64": np.dtype("<i8")})


@dataclass(frozen=True)
class Packed:
    """How a matrix is packed."""

    shape: tuple[int, ...]  # [out, in]
    bits: int  # of a code
    group: int  # neighbouring elements of a row that share a scale; ``in`` where a row has one


@dataclass(frozen=True)
class Part:
    """One of the tensors that hold a matrix.

    Attributes:
        suffix: what its name adds to the module's.
        dtype: safetensors' name of its type; codes of type I8 are not packed.
        make: its values from the scales, float32 ``[out, in / group]``; None for codes and static scales.
    """

    suffix: str
    dtype: str
    shape: tuple[int, ...]
    make: Callable[[Floats], npt.NDArray[Any]] | None = None


@dataclass(frozen=True)
class PackedFormat:
    """A directory with ``config.json``, ``generation_config.json`` and ``model.safetensors``.

    Attributes:
        key: of the configuration's entry that says how matrices are packed.
        parts: the tensors that hold a matrix, its codes first, its scales second.
        document: the configuration's entry, of the modules that are packed and the matrices that stay in floats.
        groups: neighbouring elements of a row that may share a scale, the longest first.
        rows: whether a whole row may share one, whatever its length.
        unfit: why no other block of {block} elements is held, and what holds it.
        unties: whether a packed head is a module of its own; else it is the embedding.
        floats_head_for: an engine that takes a head of floats only.
        static: suffixes of two further tensors, the static scales of what goes in and comes out, 0 where there are
            none.
        header: what the weights file calls its tensors' format.
        tolerated: what the configuration's entry may say otherwise than it is written here.
    """

    name: str
    key: str
    parts: Callable[[Packed], Sequence[Part]]
    document: Callable[[Mapping[str, Packed], Sequence[str]], dict[str, Any]]
    groups: tuple[int, ...]
    rows: bool
    unfit: str
    unties: bool = True
    floats_head_for: str = ""
    static: tuple[str, ...] = ()
    header: str = "pt"
    tolerated: AllowedKeys = field(default_factory=dict)
    marker: str = "config.json"
    weights_file: str = "model.safetensors"
    further_files: tuple[str, ...] = (GENERATION_FILE,)

    def recognizes(self, directory: Path) -> bool:
        return reading.kind_of(directory / self.marker) == self.name

    def hold(self, role: Role, tensor: Weight, dtype: str) -> Holding:
        if role.kind == INDEX:
            return Holding(INDICES)
        try:
            self._fit(role, tensor)
        except NoCodesError as error:
            return hold_floats(tensor, "f32", str(error))
        # What a converter folded into the scales is divided out, and the quotient rounded once.
        return Holding(CODES) if has_exact_steps(tensor) else Holding(CODES, "F32", DTYPES["f32"].roundoff)

    def _fit(self, role: Role, tensor: Weight) -> tuple[RowCodes, Packed]:
        """The codes of a matrix and how they will be packed.

        Raises:
            NoCodesError: they cannot be: why, and what keeps them.
        """
        codes = row_codes(tensor)
        sizes, block, row = codes.steps.size, codes.steps.block, codes.shape[1]
        if not has_exact_steps(tensor) and bool((sizes[sizes > 0] < _SMALLEST_NORMAL).any()):
            raise NoCodesError("its scales, less the factor folded into them, are too small for F32")
        if (sizes < 0).any():
            raise NoCodesError("it has negative scales (gguf holds them)")
        if role.name == HEAD and self.floats_head_for:
            raise NoCodesError(f"{self.floats_head_for} takes a head of floats only; without it the codes are kept")
        fitting = [group for group in self.groups if block % group == 0]
        if self.rows and block == row:
            fitting.insert(0, row)
        if not fitting:
            raise NoCodesError(self.unfit.format(block=block))
        return codes, Packed(codes.shape, codes.bits, fitting[0])

    def plan(self, checkpoint: Checkpoint, dtype: str) -> Sequence[OutputFile]:
        shapes = shapes_of(checkpoint.mtp)
        matrices = {role: tensor for role in _matrices(shapes) if (tensor := checkpoint.tensors.get(role.name))}
        fit: dict[str, tuple[RowCodes, Packed]] = {}
        for role, tensor in matrices.items():
            with suppress(NoCodesError):
                fit[role.name] = self._fit(role, tensor)
        if not fit:
            raise self._useless(plain=any(tensor.scheme is None for tensor in matrices.values()))
        if checkpoint.mtp.ordered_head is not None and HEAD in fit:
            raise UnsupportedError(
                f"lm_head: an ordered head picks rows of floats from it, and the {self.name} format would hold "
                "integers. Leave lm_head in floats."
            )
        packed = {name: how for name, (_, how) in fit.items()}
        tensors: list[PlannedTensor] = []
        for role, (stem, parts) in self._layout(shapes, packed).items():
            if role.name in fit:
                activations = checkpoint.activations.get(role.name, (None, None))
                tensors += _plan_matrix(stem, role.name, fit[role.name], parts, activations)
            else:
                tensors.append(plan_weight(checkpoint, role, shapes[role], stem, "f32"))
        return [
            OutputFile(
                self.weights_file,
                tensors=tuple(tensors),
                metadata={"format": self.header, "mtp_extract": __version__},
                notes=tuple(_notes(checkpoint, packed)) if self.static else (),
            ),
            OutputFile(self.marker, text=json_text(self._document(checkpoint.mtp, packed, "float32"))),
            OutputFile(GENERATION_FILE, text=json_text(GENERATION)),
        ]

    def _useless(self, plain: bool) -> UnsupportedError:
        """Nothing of a drafter would be integers; ``plain`` says whether some matrices are floats by now."""
        such = "Extract the bundle in this format or with its codes, round the matrices to such, or choose"
        return UnsupportedError(
            f"The {self.name} format is for matrices of integers, and this drafter has none that it holds. "
            f"{such if plain else 'Choose'} the transformers format, which the same engines load.",
            remedies=(*(("quantize",) if plain else ()), "format=transformers"),
        )

    def _layout(
        self, shapes: Mapping[Role, tuple[int, ...]], packed: Mapping[str, Packed]
    ) -> dict[Role, tuple[str, tuple[Part, ...]]]:
        """What the tensors of every role are called: what their names begin with, and what each adds."""
        found: dict[Role, tuple[str, tuple[Part, ...]]] = {}
        for role, shape in shapes.items():
            name = f"{HEAD}{_WEIGHT}" if role.name == HEAD and self._unties(packed) else role.names["transformers"]
            if how := packed.get(role.name):
                static = (Part(suffix, "F32", ()) for suffix in self.static)
                found[role] = name.removesuffix(_WEIGHT), (*self.parts(how), *static)
            else:
                found[role] = name, (Part("", "I64" if role.kind == INDEX else "F32", shape),)
        return found

    def _unties(self, packed: Mapping[str, Packed]) -> bool:
        return self.unties and HEAD in packed

    def _document(self, config: DrafterConfig, packed: Mapping[str, Packed], dtype: str) -> dict[str, Any]:
        """``config.json`` of a drafter, some of whose roles are ``packed``."""
        document = config_document(config, dtype, tied=not self._unties(packed))
        if packed:
            layout = self._layout(shapes_of(config), packed)
            modules = {role.name: layout[role][0].removesuffix(_WEIGHT) for role in layout if role.kind == MATRIX}
            document[self.key] = self.document(
                {module: packed[role] for role, module in modules.items() if role in packed},
                [module for role, module in modules.items() if role not in packed],
            )
        return document

    def read_config(self, directory: Path) -> DrafterConfig:
        return self._read(directory)[0]

    def _read(self, directory: Path) -> tuple[DrafterConfig, Mapping[str, StoredTensor], dict[str, Packed]]:
        """The drafter's shape, its tensors, and how each role is packed that is."""
        path = directory / self.marker
        document = read_object(path)
        stored = {name: tensor for name, (_, tensor) in reading.read_tensors(directory / self.weights_file).items()}
        own_head = any(name.startswith(f"{HEAD}.") for name in stored)
        with reading.naming(path):
            config = parse_config(document)
            shapes = shapes_of(config)
            packed: dict[str, Packed] = {}
            for role in _matrices(shapes):
                module = HEAD if role.name == HEAD and own_head else role.names["transformers"].removesuffix(_WEIGHT)
                if how := self._found(module, shapes[role], stored):
                    packed[role.name] = how
            made = self._document(config, packed, "")
        expected = {
            stem + part.suffix: reading.Expected(role.path, part.shape, part.dtype)
            for role, (stem, parts) in self._layout(shapes, packed).items()
            for part in parts
        }
        reading.check_tensors(expected, stored)
        require_documents(directory, document, config, made, at([f"{self.key}."], self.tolerated))
        return config, stored, packed

    def _found(self, module: str, shape: tuple[int, ...], stored: Mapping[str, StoredTensor]) -> Packed | None:
        """How ``module``, a matrix of this ``shape`` [out, in], is packed, by the shapes of its codes and scales; None
        where it is not.
        """
        row = shape[1]
        for bits, group in product((2, 4, 8), (*self.groups, *((row,) if self.rows else ()))):
            how = Packed(shape, bits, group)
            parts = self.parts(how)[:2]
            there = [stored.get(module + part.suffix) for part in parts]
            if row % group == 0 and [part.shape for part in parts] == [tensor and tensor.shape for tensor in there]:
                return how
        return None

    def read(self, directory: Path) -> Checkpoint:
        config, stored, packed = self._read(directory)
        path = directory / self.weights_file
        tensors: dict[str, Weight] = {}
        activations: dict[str, Activations] = {}
        for role, (stem, parts) in self._layout(shapes_of(config), packed).items():
            if how := packed.get(role.name):
                matrix = _Matrix(path, stem, how, tuple((part, stored[stem + part.suffix]) for part in parts))
                tensors[role.name] = matrix.weight()
                if any(pair := [matrix.activation(suffix) for suffix in self.static]):
                    activations[role.name] = pair[0], pair[1]
            else:
                tensors[role.name] = stored_weight(path, stored[stem], stem)
        return Checkpoint(
            GEMMA4_MTP, config, MappingProxyType(tensors), "f32", activations=MappingProxyType(activations)
        )


def _matrices(shapes: Mapping[Role, tuple[int, ...]]) -> list[Role]:
    return [role for role in shapes if role.kind == MATRIX]


def _plan_matrix(
    module: str, role: str, fit: tuple[RowCodes, Packed], parts: Sequence[Part], activations: Activations
) -> Iterator[PlannedTensor]:
    """``parts`` of the matrix of ``role``."""
    (codes, packed), (first, *others) = fit, parts
    rows = partial(_packed_rows, codes, packed.bits, first.dtype)
    yield PlannedTensor(f"{module}{first.suffix}", first.dtype, first.shape, rows, role, codes)
    scales = codes.steps.in_blocks(packed.group)
    static = iter(activations)
    for part in others:
        array = part.make(scales) if part.make else np.array(static_scale(next(static)), np.float32)
        yield replace(plan_array(f"{module}{part.suffix}", array, part=part.suffix), role=role)


def _packed_rows(codes: RowCodes, bits: int, dtype: str) -> Iterator[npt.NDArray[np.generic]]:
    """All codes, some rows at a time, packed in elements of ``dtype``; in I8 as they are."""
    for first, last in row_ranges(codes):
        rows = codes.codes(first, last).astype(np.int8, copy=False)
        yield rows if dtype == "I8" else pack(rows, bits, DTYPE_SIZES[dtype])


@dataclass(frozen=True)
class _Matrix:
    """A packed matrix in the file at ``path``: its tensors, the codes first, the scales second."""

    path: Path
    module: str
    packed: Packed
    parts: tuple[tuple[Part, StoredTensor], ...]

    def weight(self) -> RowCodes:
        """It as a weight; what lies beside its codes is read and checked when it is asked for."""
        (part, codes), shape, bits = self.parts[0], self.packed.shape, self.packed.bits

        def rows(first: int, last: int) -> npt.NDArray[np.int8]:
            found = read_rows(self.path, codes, first, last)
            return found.view(np.int8) if part.dtype == "I8" else unpack(found, bits, shape[1])

        return of_codes(shape, Packing(bits, signed=True), rows, self._steps, origin=(self.path, codes.offset))

    def _steps(self) -> Steps:
        scales, *others = (self._array(stored) for _, stored in self.parts[1:])
        with np.errstate(over="ignore", invalid="ignore"):
            sound = (scales >= 0) & np.isfinite(scales * np.float32(1 << self.packed.bits - 1))
        if not sound.all():
            raise self._damaged("expected scales that are finite and not negative, found others")
        for (part, _), found in zip(self.parts[2:], others, strict=True):
            if part.make and not np.array_equal(found, part.make(scales)):
                raise self._damaged(f"expected {part.suffix[1:]} as its shape and scales make it, found others")
        return Steps.around_zero(self.packed.group, scales).by_row()

    def activation(self, suffix: str) -> Activation | None:
        """The static quantization that ``suffix`` has a scale of, where that is not 0.

        Raises:
            CheckpointError: it is damaged.
        """
        scale = float(self._array(next(stored for part, stored in self.parts if part.suffix == suffix)))
        if not 0 <= scale < np.inf:
            raise self._damaged(f"expected a scale of activations that is finite and not negative, found {scale}")
        return Activation("int8", scale, 0) if scale else None

    def _array(self, stored: StoredTensor) -> npt.NDArray[Any]:
        return read_array(self.path, stored, _TYPES[stored.dtype]).reshape(stored.shape)

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{escape(self.path)}: {escape(self.module)}: {what}. Extract the drafter anew.")


def static_scale(activation: Activation | None) -> float:
    """The scale of what is quantized to INT8 around zero, 0 for anything else."""
    if activation is None or activation.type != "int8" or activation.zero_point != 0:
        return 0.0
    return activation.scale


def _notes(checkpoint: Checkpoint, packed: Mapping[str, Packed]) -> Iterator[str]:
    """What a user should know of the static scales of activations."""
    static = {role: [a for a in pair if a] for role, pair in checkpoint.activations.items() if any(pair)}
    lost = [role for role, pair in static.items() if role not in packed or not all(map(static_scale, pair))]
    if len(lost) < len(static):
        yield "Static scales of activations are held, and transformers rounds by them as the graph does."
    if lost:
        yield (
            f"Activations of {', '.join(lost)} are not rounded: the format has static scales for INT8 around 0 "
            "alone, and for matrices of integers."
        )
