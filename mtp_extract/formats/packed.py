"""What the formats have in common that pack a matrix's codes under transformers' names: planning, reading, checking."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from mtp_extract._version import __version__
from mtp_extract.architecture.config import DrafterConfig
from mtp_extract.architecture.roles import GEMMA4_MTP, INDEX, MATRIX, Role, shapes_of
from mtp_extract.checkpoint.checkpoint import CODES, INDICES, Checkpoint, Holding
from mtp_extract.checkpoint.dtypes import DTYPES
from mtp_extract.checkpoint.integers import RowCodes, row_codes
from mtp_extract.checkpoint.lazy import LazyTensor
from mtp_extract.checkpoint.manifest import Keys, Manifest, said_by_header
from mtp_extract.checkpoint.planned import OutputFile, PlannedTensor, json_text
from mtp_extract.checkpoint.stored import StoredWeight
from mtp_extract.errors import DrafterError, NoCodesError, UnsupportedError, escape
from mtp_extract.formats import reading
from mtp_extract.formats.holding import hold_floats
from mtp_extract.formats.parts import Activations, Matrix, Packed, Part, plan_parts
from mtp_extract.formats.transformers import (
    GENERATION_FILE,
    config_document,
    generation_document,
    parse_config,
    plan_weight,
    said_of,
)

HEAD = "lm_head"
"""Role of the head, and name of its module where it is none with the embedding."""

_WEIGHT = ".weight"
GROUPS = (128, 64, 32)
"""Neighbouring elements of a row that may share a scale, in the kernels of engines."""

_SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)


def group_of(codes: RowCodes) -> int | None:
    """The longest of :data:`GROUPS` whose elements share a step; None where there is none."""
    return next((group for group in GROUPS if codes.block % group == 0), None)


class PackedFormat(ABC):
    """A directory with transformers' names and configuration, in which matrices are packed integers.

    Attributes:
        key: of the configuration's entry that says how.
        unties: whether a packed head is a module of its own; else it is the embedding.
        metadata: of the weights file.
        besides: what that entry may say otherwise than it is written here.
    """

    name: str
    key: str
    unties: bool
    metadata: Mapping[str, str] = MappingProxyType({"format": "pt", "mtp_extract": __version__})
    besides: Keys = MappingProxyType({})
    marker = "config.json"
    weights_file = "model.safetensors"

    @abstractmethod
    def fit(self, role: Role, codes: RowCodes) -> Packed | str:
        """How a matrix will be packed, or why it will not be and what keeps its codes."""

    @abstractmethod
    def parts(self, packed: Packed) -> Sequence[Part]:
        """The tensors that hold a matrix, its codes first."""

    @abstractmethod
    def document(self, packed: Mapping[str, Packed], floats: Sequence[str]) -> dict[str, Any]:
        """The configuration's entry: modules that are packed, and matrices that stay in floats."""

    @abstractmethod
    def packed_modules(
        self, document: Mapping[str, Any], modules: Mapping[str, tuple[int, ...]]
    ) -> dict[str, tuple[int, int]]:
        """What :meth:`document` says: packed module → bits and group, of all ``modules`` (name → shape) there may be.

        Raises:
            DrafterError: it says something that this format does not write.
        """

    def recognizes(self, directory: Path) -> bool:
        return reading.kind_of(directory / self.marker) == self.name

    def hold(self, role: Role, tensor: LazyTensor, dtype: str) -> Holding:
        if role.kind == INDEX:
            return Holding(INDICES)
        found = self._packed(role, tensor)
        if isinstance(found, str):
            return hold_floats(tensor, "f32", found)
        codes, _ = found
        # What a converter folded into the scales is divided out, and the quotient rounded once.
        return Holding(CODES) if codes.exact else Holding(CODES, "F32", DTYPES["f32"].roundoff)

    def _packed(self, role: Role, tensor: LazyTensor) -> tuple[RowCodes, Packed] | str:
        try:
            codes = row_codes(tensor)
        except NoCodesError as error:
            return str(error)
        if not codes.exact and bool((codes.steps[codes.steps > 0] < _SMALLEST_NORMAL).any()):
            return "its scales, less the factor folded into them, are too small for F32"
        if (codes.steps < 0).any():
            return "it has negative scales (gguf holds them)"
        packed = self.fit(role, codes)
        return packed if isinstance(packed, str) else (codes, packed)

    def plan(self, checkpoint: Checkpoint, dtype: str) -> Sequence[OutputFile]:
        shapes = shapes_of(checkpoint.mtp)
        found = {
            role.name: self._packed(role, checkpoint.tensors[role.name])
            for role in shapes
            if role.kind == MATRIX and role.name in checkpoint.tensors
        }
        packed = {role: how for role, how in found.items() if not isinstance(how, str)}
        if not packed:
            plain = any(checkpoint.tensors[role].scheme is None for role in found)
            raise UnsupportedError(
                f"The {self.name} format is for matrices of integers, and this drafter has none that it holds. "
                f"{'Round its matrices to such, or choose' if plain else 'Choose'} the transformers format, which the "
                "same engines load.",
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
        floats: list[str] = []
        for role, shape in shapes.items():
            name = _name(role, tied)
            module = name.removesuffix(_WEIGHT)
            if role.name in packed:
                codes, how = packed[role.name]
                modules[module] = how
                tensors += plan_parts(
                    module,
                    role.name,
                    checkpoint.tensors[role.name],
                    codes,
                    how,
                    self.parts(how),
                    checkpoint.activations.get(role.name, (None, None)),
                )
                continue
            if role.kind == MATRIX:
                floats.append(module)
            tensors.append(plan_weight(checkpoint, role, shape, name, "f32"))
        document = config_document(checkpoint.mtp, "float32", tied=tied)
        document[self.key] = self.document(modules, floats)
        return [
            OutputFile(self.weights_file, tensors=tuple(tensors), metadata=self.metadata),
            OutputFile(self.marker, text=json_text(document)),
            OutputFile(GENERATION_FILE, text=json_text(generation_document())),
        ]

    def read_config(self, directory: Path) -> DrafterConfig:
        return self._read_config(directory)[0]

    def _read_config(self, directory: Path) -> tuple[DrafterConfig, Mapping[str, Any], bool]:
        """The drafter's configuration, what it says of packing, and whether head and embedding are one."""
        document = reading.read_json(directory / self.marker)
        text = reading.table(document, "text_config")
        tied = [place.get("tie_word_embeddings", True) for place in (document, text)]
        if tied[0] != tied[1] or not isinstance(tied[0], bool):
            raise DrafterError(
                f"expected tie_word_embeddings to be the same in config.json and its text_config, found "
                f"{escape(tied[0])} and {escape(tied[1])}; extract the drafter anew"
            )
        if not (tied[0] or self.unties):
            raise DrafterError("expected tie_word_embeddings to be true, found false; check the config")
        plain = {key: value for key, value in document.items() if key not in (self.key, "tie_word_embeddings")}
        plain["text_config"] = {key: value for key, value in text.items() if key != "tie_word_embeddings"}
        return parse_config(plain), reading.table(document, self.key), tied[0]

    def manifest(self, directory: Path) -> Manifest:
        config, document, tied = self._read_config(directory)
        modules = {
            _name(role, tied).removesuffix(_WEIGHT): shape
            for role, shape in shapes_of(config).items()
            if role.kind == MATRIX
        }
        found = self.packed_modules(document, modules)
        packed = {module: Packed(modules[module], *found[module]) for module in modules if module in found}
        made = config_document(config, "", tied=tied)
        made[self.key] = self.document(packed, [module for module in modules if module not in packed])
        more = {f"{self.key}.{key}": fits for key, fits in self.besides.items()}
        said = [said_by_header(directory / self.weights_file), *said_of(directory, config, made, more)]
        return Manifest(frozenset(one.path.name for one in said), tuple(said))

    def read(self, directory: Path) -> Checkpoint:
        config, document, tied = self._read_config(directory)
        path = directory / self.weights_file
        stored = reading.read_tensors(path)
        names = {role: _name(role, tied) for role in shapes_of(config)}
        matrices = {
            names[role].removesuffix(_WEIGHT): shape for role, shape in shapes_of(config).items() if role.kind == MATRIX
        }
        packed = {
            module: self._checked(module, matrices[module], *how)
            for module, how in self.packed_modules(document, matrices).items()
        }
        expected: dict[str, tuple[str, tuple[int, ...]]] = {}
        types: dict[str, str] = {}
        for role, shape in shapes_of(config).items():
            module = names[role].removesuffix(_WEIGHT)
            parts = self.parts(packed[module]) if module in packed else ()
            if role.name == HEAD and parts and tied and self.unties:
                raise DrafterError(
                    f"expected tie_word_embeddings to be false where {module} is packed, found true; check the config"
                )
            floats = Part("", "floats", "I64" if role.kind == INDEX else "F32", shape)
            for name, part in [(module + part.suffix, part) for part in parts] or [(names[role], floats)]:
                expected[name], types[name] = (role.path, part.shape), part.dtype
        reading.check_tensors(expected, {name: tensor.shape for name, tensor in stored.items()})
        wrong = [
            f"{escape(name)}: expected {dtype}, found {escape(stored[name].dtype)}"
            for name, dtype in types.items()
            if stored[name].dtype != dtype
        ]
        if wrong:
            raise reading.mismatch(wrong)
        tensors: dict[str, LazyTensor] = {}
        activations: dict[str, Activations] = {}
        for role, name in names.items():
            module = name.removesuffix(_WEIGHT)
            if module not in packed:
                tensors[role.name] = StoredWeight(path, stored[name], name)
                continue
            matrix = Matrix(path, stored, module, packed[module], self.parts(packed[module]))
            tensors[role.name] = matrix.tensor()
            pair = matrix.activations()
            if any(pair):
                activations[role.name] = pair
        return Checkpoint(
            GEMMA4_MTP, config, MappingProxyType(tensors), "f32", activations=MappingProxyType(activations)
        )

    def _checked(self, module: str, shape: tuple[int, ...], bits: int, group: int) -> Packed:
        if bits not in (2, 4, 8) or group < 1 or shape[1] % group:
            raise DrafterError(
                f"{escape(module)}: expected codes of 2, 4 or 8 bits in groups that divide its rows of {shape[1]}, "
                f"found {escape(bits)} bits in groups of {escape(group)}; extract the drafter anew"
            )
        return Packed(shape, bits, group)


def _name(role: Role, tied: bool) -> str:
    """transformers' name of the tensor of ``role``, were it not packed."""
    return f"{HEAD}{_WEIGHT}" if role.name == HEAD and not tied else role.names["transformers"]
