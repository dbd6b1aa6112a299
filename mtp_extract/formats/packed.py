"""What the formats have in common that pack a matrix's codes under transformers' names: planning, reading, checking."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from mtp_extract._version import __version__
from mtp_extract.architecture.config import DrafterConfig
from mtp_extract.architecture.roles import GEMMA4_MTP, INDEX, MATRIX, Role, shapes_of
from mtp_extract.checkpoint.checkpoint import CODES, INDICES, Checkpoint, Holding
from mtp_extract.checkpoint.dtypes import DTYPES
from mtp_extract.checkpoint.json_file import read_object
from mtp_extract.checkpoint.keys import AllowedKeys, at
from mtp_extract.checkpoint.planned import OutputFile, PlannedTensor, json_text
from mtp_extract.checkpoint.stored import StoredTensor, stored_weight
from mtp_extract.checkpoint.weight import RowCodes, Weight, has_exact_steps, row_codes
from mtp_extract.errors import NoCodesError, UnsupportedError, escape
from mtp_extract.formats import reading
from mtp_extract.formats.holding import hold_floats, plan_weight
from mtp_extract.formats.parts import Activations, Matrix, Packed, Part, plan_parts
from mtp_extract.formats.transformers import (
    GENERATION,
    GENERATION_FILE,
    config_document,
    parse_config,
    require_documents,
)

HEAD = "lm_head"
"""Role of the head, and name of its module where it is none with the embedding."""

EMBEDDING = "model.embed_tokens"
"""Module of the embedding, which is the head too where the two are tied."""

_WEIGHT = ".weight"
GROUPS = (128, 64, 32)
"""Neighbouring elements of a row that may share a scale, in the kernels of engines."""

_SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)


class PackedFormat(ABC):
    """A directory with transformers' names and configuration, in which matrices are packed integers."""

    name: str
    key: str  # of the configuration's entry that says how
    groups: tuple[int, ...] = ()  # neighbouring elements of a row that may share a scale, the longest first
    rows: bool  # whether a whole row may share one
    unfit: str  # why no other block of {block} elements is held, and what holds it
    unties: bool  # whether a packed head is a module of its own; else it is the embedding
    metadata: Mapping[str, str] = MappingProxyType({"format": "pt", "mtp_extract": __version__})  # of the weights file
    tolerated: AllowedKeys = MappingProxyType({})  # what that entry may say otherwise than it is written here
    marker = "config.json"
    weights_file = "model.safetensors"
    further_files = (GENERATION_FILE,)

    @abstractmethod
    def parts(self, packed: Packed) -> Sequence[Part]:
        """The tensors that hold a matrix, its codes first."""

    @abstractmethod
    def document(self, packed: Mapping[str, Packed], floats: Sequence[str]) -> dict[str, Any]:
        """The configuration's entry: modules that are packed, and matrices that stay in floats."""

    def fit(self, role: Role, codes: RowCodes) -> int:
        """How many neighbouring elements of a row will share a scale.

        Raises:
            NoCodesError: it will not be: why, and what keeps its codes.
        """
        block = codes.steps.block
        if self.rows and block == codes.shape[1]:
            return block
        group = next((group for group in self.groups if block % group == 0), None)
        if group is None:
            raise NoCodesError(self.unfit.format(block=block))
        return group

    def recognizes(self, directory: Path) -> bool:
        return reading.kind_of(directory / self.marker) == self.name

    def hold(self, role: Role, tensor: Weight, dtype: str) -> Holding:
        if role.kind == INDEX:
            return Holding(INDICES)
        try:
            self._packed(role, tensor)
        except NoCodesError as error:
            return hold_floats(tensor, "f32", str(error))
        # What a converter folded into the scales is divided out, and the quotient rounded once.
        return Holding(CODES) if has_exact_steps(tensor) else Holding(CODES, "F32", DTYPES["f32"].roundoff)

    def _packed(self, role: Role, tensor: Weight) -> tuple[RowCodes, Packed]:
        codes = row_codes(tensor)
        sizes = codes.steps.size
        if not has_exact_steps(tensor) and bool((sizes[sizes > 0] < _SMALLEST_NORMAL).any()):
            raise NoCodesError("its scales, less the factor folded into them, are too small for F32")
        if (sizes < 0).any():
            raise NoCodesError("it has negative scales (gguf holds them)")
        return codes, Packed(codes.shape, codes.bits, self.fit(role, codes))

    def plan(self, checkpoint: Checkpoint, dtype: str) -> Sequence[OutputFile]:
        shapes = shapes_of(checkpoint.mtp)
        matrices = {
            role: checkpoint.tensors[role.name]
            for role in shapes
            if role.kind == MATRIX and role.name in checkpoint.tensors
        }
        packed = {
            role.name: self._packed(role, tensor)
            for role, tensor in matrices.items()
            if self.hold(role, tensor, dtype).kept == CODES
        }
        if not packed:
            plain = any(tensor.scheme is None for tensor in matrices.values())
            such = "Extract the bundle in this format or with its codes, round the matrices to such, or choose"
            raise UnsupportedError(
                f"The {self.name} format is for matrices of integers, and this drafter has none that it holds. "
                f"{such if plain else 'Choose'} the transformers format, which the same engines load.",
                remedies=(*(("quantize",) if plain else ()), "format=transformers"),
            )
        if checkpoint.mtp.ordered_head is not None and HEAD in packed:
            raise UnsupportedError(
                f"lm_head: an ordered head picks rows of floats from it, and the {self.name} format would hold "
                "integers. Leave lm_head in floats."
            )
        tied = not (self.unties and HEAD in packed)
        tensors: list[PlannedTensor] = []
        modules: dict[str, Packed] = {}
        for role, shape in shapes.items():
            name = _name(role, tied)
            if role.name not in packed:
                tensors.append(plan_weight(checkpoint, role, shape, name, "f32"))
                continue
            (codes, how), module = packed[role.name], _module(name)
            modules[module] = how
            activations = checkpoint.activations.get(role.name, (None, None))
            tensors += plan_parts(module, role.name, codes, how, self.parts(how), activations)
        floats = [module for module in _modules(shapes, tied) if module not in modules]
        document = config_document(checkpoint.mtp, "float32", tied=tied)
        document[self.key] = self.document(modules, floats)
        return [
            OutputFile(self.weights_file, tensors=tuple(tensors), metadata=self.metadata),
            OutputFile(self.marker, text=json_text(document)),
            OutputFile(GENERATION_FILE, text=json_text(GENERATION)),
        ]

    def read_config(self, directory: Path) -> DrafterConfig:
        return self._read(directory)[0]

    def _read(self, directory: Path) -> tuple[DrafterConfig, Mapping[str, StoredTensor], dict[str, Packed], bool]:
        """The drafter's shape, its tensors, how each module is packed that is, and whether head and embedding are one.

        The shapes of a matrix's tensors say how it is packed: the configuration that would be written of that is the
        one that has to be there.
        """
        path = directory / self.marker
        document = read_object(path)
        stored = {name: tensor for name, (_, tensor) in reading.read_tensors(directory / self.weights_file).items()}
        tied = not any(name.startswith(f"{HEAD}.") for name in stored)
        with reading.naming(path):
            config = parse_config(document)
            shapes = shapes_of(config)
            modules = _modules(shapes, tied)
            packed = {name: how for name, shape in modules.items() if (how := self._found(name, shape, stored))}
            made = config_document(config, "", tied=tied)
        expected: dict[str, tuple[str, Part]] = {}
        for role, shape in shapes.items():
            name = _name(role, tied)
            parts = [Part("", "floats", "I64" if role.kind == INDEX else "F32", shape)]
            if how := packed.get(_module(name)):
                name, parts = _module(name), [*self.parts(how)]
            expected |= {name + part.suffix: (role.path, part) for part in parts}
        reading.check_tensors(
            {name: (path, part.shape) for name, (path, part) in expected.items()},
            {name: tensor.shape for name, tensor in stored.items()},
        )
        if wrong := [
            f"{escape(name)}: expected {part.dtype}, found {escape(stored[name].dtype)}"
            for name, (_, part) in expected.items()
            if stored[name].dtype != part.dtype
        ]:
            raise reading.mismatch(wrong)
        head = EMBEDDING if tied else HEAD
        if tied is (self.unties and head in packed):
            raise reading.mismatch(
                [f"{head}: expected {HEAD} packed, or tied to the embedding in floats, found neither"]
            )
        if packed:
            made[self.key] = self.document(packed, [module for module in modules if module not in packed])
        require_documents(directory, document, config, made, at([f"{self.key}."], self.tolerated))
        return config, stored, packed, tied

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
        config, stored, packed, tied = self._read(directory)
        path = directory / self.weights_file
        tensors: dict[str, Weight] = {}
        activations: dict[str, Activations] = {}
        for role in shapes_of(config):
            name = _name(role, tied)
            how = packed.get(_module(name))
            if how is None:
                tensors[role.name] = stored_weight(path, stored[name], name)
                continue
            matrix = Matrix(path, stored, _module(name), how, self.parts(how))
            tensors[role.name] = matrix.tensor()
            if any(pair := matrix.activations()):
                activations[role.name] = pair
        return Checkpoint(
            GEMMA4_MTP, config, MappingProxyType(tensors), "f32", activations=MappingProxyType(activations)
        )


def _name(role: Role, tied: bool) -> str:
    """transformers' name of the tensor of ``role``, were it not packed."""
    return f"{HEAD}{_WEIGHT}" if role.name == HEAD and not tied else role.names["transformers"]


def _module(name: str) -> str:
    return name.removesuffix(_WEIGHT)


def _modules(shapes: Mapping[Role, tuple[int, ...]], tied: bool) -> dict[str, tuple[int, ...]]:
    """Module → shape of every matrix."""
    return {_module(_name(role, tied)): shape for role, shape in shapes.items() if role.kind == MATRIX}
