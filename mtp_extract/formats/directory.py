"""Directories with transformers' names and configuration, in which matrices are floats or packed integers.

A packed matrix is several tensors: its codes, its scales, and whatever else a format wants, which is made of the scales
and compared with that when it is read. The shapes of codes and scales say how a matrix is packed, so that the
configuration is made of the tensors and compared with the one that lies beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_extract._version import __version__
from mtp_extract.architecture import shapes_of
from mtp_extract.architecture.activation import Activation
from mtp_extract.architecture.config import DrafterConfig
from mtp_extract.architecture.roles import INDEX, MATRIX, Role
from mtp_extract.checkpoint.checkpoint import CODES, Activations, Checkpoint
from mtp_extract.checkpoint.documents import read_object
from mtp_extract.checkpoint.dtypes import BLOCKS, DTYPES, pack, row_bytes, unpack
from mtp_extract.checkpoint.files import OutputFile, PlannedTensor, json_text, plan_array, plan_rows
from mtp_extract.checkpoint.format import INDICES, Plan, StoredAs, store_all, store_floats
from mtp_extract.checkpoint.stored import Stored, StoredTensor, common_dtype, read_array, read_rows
from mtp_extract.checkpoint.weight import Rows, Steps, Weight, has_exact_steps, row_codes
from mtp_extract.errors import CheckpointError, NoCodesError, UnsupportedError, escape
from mtp_extract.formats import reading
from mtp_extract.formats.transformers import (
    GENERATION,
    GENERATION_FILE,
    build_assistant_config,
    compare_documents,
    parse_config,
)
from mtp_extract.litertlm.storage import Floats, Packing

HEAD = "lm_head"
"""Role of the head, and its module where it is none with the embedding."""

EMBEDDING = "model.embed_tokens"
"""Module of the embedding, which is the head too where the two are tied."""

_WEIGHT = ".weight"
_SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class PackedMatrix:
    """How a matrix is packed."""

    module: str  # before the names of its tensors
    shape: tuple[int, ...]  # [out, in]
    bits: int  # of a code
    group: int  # neighbouring elements of a row that share a scale; ``in`` where a row has one


@dataclass(frozen=True)
class DirectoryFormat:
    """``config.json``, ``generation_config.json`` and ``model.safetensors``; packed, if ``key`` is given."""

    name: str
    key: str = ""  # of the configuration's entry that says how matrices are packed
    # What stands behind a module's name for its matrix's codes, and their type: in U8, codes of 8 bits are I8.
    codes: tuple[str, str] = ("", "")
    # What stands there for its other tensors, the scales first → these, made of scales, float32 [out, in / group].
    arrays: Callable[[PackedMatrix, Floats], dict[str, npt.NDArray[Any]]] = lambda packed, scales: {}
    # What stands there for the static scales of what goes into a matrix and comes out, 0 where there are none.
    static: tuple[str, ...] = ()
    # The configuration's entry, of the modules that are packed and the matrices that stay in floats.
    document: Callable[[Mapping[str, PackedMatrix], Sequence[str]], dict[str, Any]] = lambda packed, floats: {}
    # Neighbouring elements of a row that may share a scale, the longest first; None for a whole row of any length.
    groups: tuple[int | None, ...] = ()
    unfit: str = ""  # why no other block of {block} elements is held, and what holds it
    unties: bool = True  # whether a packed head is a module of its own; else it is the embedding
    floats_head_for: str = ""  # an engine that takes a head of floats only
    header: str = "pt"  # what the weights file calls its tensors' format
    # The configuration's entry in full, of one as other programs write it and of the modules that are packed.
    in_full: Callable[[Mapping[str, Any], Sequence[str]], Mapping[str, Any]] = lambda entry, packed: entry
    # What stands there for what is added to every group, where other programs make zero points of it that are no codes.
    offsets: str = ""
    marker: str = "config.json"
    weights_file: str = "model.safetensors"
    further_files: tuple[str, ...] = (GENERATION_FILE,)

    def store(self, role: Role, weight: Weight, dtype: str) -> StoredAs:
        if role.kind == INDEX:
            return StoredAs(INDICES, weight)
        if not self.key:
            return store_floats(weight, dtype)
        try:
            codes = row_codes(weight)
            exact = has_exact_steps(weight)
            self._require_fit(role, codes, exact)
        except NoCodesError as error:
            return store_floats(weight, "f32", str(error))
        # What a converter folded into the scales is divided out, and the quotient rounded once.
        return StoredAs(CODES, codes, "" if exact else "F32")

    def _require_fit(self, role: Role, codes: Weight, exact: bool) -> None:
        """Raise NoCodesError where the format does not hold ``codes``; their scales may be ``exact``, as stored."""
        sizes = codes.steps.size
        if not exact and (sizes[sizes > 0] < _SMALLEST_NORMAL).any():
            raise NoCodesError("its scales, less the factor folded into them, are too small for F32")
        if (sizes < 0).any():
            raise NoCodesError("it has negative scales (gguf holds them)")
        if self.floats_head_for and role.name == HEAD:
            raise NoCodesError(f"{self.floats_head_for} takes a head of floats only; without it the codes are kept")
        if self._choose_group_size(codes) is None:
            raise NoCodesError(self.unfit.format(block=codes.steps.block))

    def _list_group_sizes(self, row: int) -> tuple[int, ...]:
        """How many neighbouring elements of a row of ``row`` may share a scale, the best first."""
        return tuple(group or row for group in self.groups)

    def _choose_group_size(self, codes: Weight) -> int | None:
        """How many share one where ``codes`` are held; None where they cannot be."""
        return next((group for group in self._list_group_sizes(codes.columns) if codes.steps.block % group == 0), None)

    def plan(self, checkpoint: Checkpoint, dtype: str) -> Plan:
        stored = store_all(self.store, checkpoint, dtype)
        config = checkpoint.mtp
        packed = self._plan_packing(config, stored)
        names = self._name_tensors(config, packed)
        roles = {name: role.name for role, name in names.items() if role.name not in packed}
        tensors = tuple(self._plan_tensors(checkpoint, stored, packed))
        metadata = {"format": self.header, "mtp_extract": __version__}
        notes = tuple(_describe_static_scales(checkpoint, packed)) if self.static else ()
        document = self._build_config(config, packed, DTYPES["f32" if self.key else dtype].transformers)
        files = (
            OutputFile(self.weights_file, tensors, metadata=metadata, notes=notes),
            OutputFile(self.marker, text=json_text(document)),
            OutputFile(GENERATION_FILE, text=json_text(GENERATION)),
        )
        return Plan(self.name, checkpoint, dtype, stored, roles, files)

    def _plan_tensors(
        self, checkpoint: Checkpoint, stored: Mapping[str, StoredAs], packed: Mapping[str, PackedMatrix]
    ) -> Iterator[PlannedTensor]:
        for role, name in self._name_tensors(checkpoint.mtp, packed).items():
            if role.name in packed:
                activations = checkpoint.activations.get(role.name, (None, None))
                yield from self._plan_matrix(stored[role.name].weight, packed[role.name], activations)
            else:
                yield stored[role.name].tensor(name)

    def _plan_packing(self, config: DrafterConfig, stored: Mapping[str, StoredAs]) -> dict[str, PackedMatrix]:
        """How each matrix is packed whose codes are stored, by role; UnsupportedError where that cannot be."""
        codes = {role: stored_as.weight for role, stored_as in stored.items() if stored_as.how == CODES}
        packed = {
            role.name: PackedMatrix(name.removesuffix(_WEIGHT), weight.shape, weight.bits, group)
            for role, name in self._name_tensors(config, codes).items()
            if (weight := codes.get(role.name)) and (group := self._choose_group_size(weight))
        }
        if self.key and not packed:
            raise UnsupportedError(
                f"The {self.name} format needs matrices of integers, and this drafter has none of its kind. Round its "
                "floats here, or choose the transformers format, which its engines load too.",
                remedies=("quantize", "format=transformers"),
            )
        if config.ordered_head is not None and HEAD in packed:
            raise UnsupportedError(
                f"lm_head: an ordered head picks rows of floats from it, and the {self.name} format would hold "
                "integers. Leave lm_head in floats."
            )
        return packed

    def _name_tensors(self, config: DrafterConfig, packed: Container[str]) -> dict[Role, str]:
        """The tensor of every role; the tensors of a packed matrix have other endings."""
        names = {role: role.names["transformers"] for role in shapes_of(config)}
        own_head = self.unties and HEAD in packed
        return {role: f"{HEAD}{_WEIGHT}" if role.name == HEAD and own_head else name for role, name in names.items()}

    def _build_config(self, config: DrafterConfig, packed: Mapping[str, PackedMatrix], dtype: str) -> dict[str, Any]:
        """``config.json`` of a drafter, some of whose roles are ``packed``."""
        document = build_assistant_config(config, dtype, tied=not (self.unties and HEAD in packed))
        if packed:
            matrices = {
                role.name: name for role, name in self._name_tensors(config, packed).items() if role.kind == MATRIX
            }
            floats = [name.removesuffix(_WEIGHT) for role, name in matrices.items() if role not in packed]
            document[self.key] = self.document({how.module: how for how in packed.values()}, floats)
        return document

    def _list_matrix_tensors(self, how: PackedMatrix) -> reading.ExpectedTensors:
        """The tensors that hold a matrix, by what their names add to the module's: its codes, its scales, the rest."""
        (suffix, dtype), (rows, columns) = self.codes, how.shape
        if how.bits == 8 and dtype == "U8":
            dtype = "I8"
        size = BLOCKS[dtype][1]
        arrays = self.arrays(how, np.broadcast_to(np.float32(0), (rows, columns // how.group)))
        arrays |= dict.fromkeys(self.static, np.zeros((), np.float32))
        parts: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
            suffix: ((rows, row_bytes(columns, how.bits, size) // size), (dtype,))
        }
        for name, array in arrays.items():
            planned = plan_array(name, array)
            # Where other programs make zero points, they store these and scales in shorter types, too.
            is_any_float = bool(self.offsets) and planned.dtype == "F32"
            parts[name] = (planned.shape, reading.FLOAT_DTYPES if is_any_float else (planned.dtype,))
        return parts

    def _plan_matrix(self, codes: Weight, how: PackedMatrix, activations: Activations) -> Iterator[PlannedTensor]:
        """The tensors of a matrix: its codes, some rows at a time, and what lies beside them."""
        suffix, (shape, (dtype,)) = next(iter(self._list_matrix_tensors(how).items()))

        def rows(first: int, last: int) -> Rows:
            some = codes.codes(first, last)
            return some if dtype == "I8" else pack(some, how.bits, BLOCKS[dtype][1])

        yield plan_rows(f"{how.module}{suffix}", codes, dtype, rows, shape)
        arrays = self.arrays(how, np.repeat(codes.steps.size, codes.steps.block // how.group, axis=1))
        arrays |= {name: np.float32(static_scale(of)) for name, of in zip(self.static, activations, strict=False)}
        yield from (plan_array(f"{how.module}{name}", np.asarray(array)) for name, array in arrays.items())

    def read(self, directory: Path) -> Checkpoint:
        path = directory / self.marker
        document = read_object(path)
        stored = reading.read_weights(directory, self.weights_file)
        with reading.naming(path):
            config = parse_config(document)
            packed = self._detect_packing(config, stored)
            written = self._build_config(config, packed, "")
        expected = self._list_expected_tensors(config, packed)
        # What a quantization is called says more than the tensors that are not as expected; codes say more than names.
        if packed:
            reading.check_tensors(directory / self.weights_file, expected, stored)
        unread = compare_documents(directory, self._normalize_config(document, packed), config, written)
        unread += reading.find_index_conflicts(directory, self.weights_file, stored)
        if not packed:
            reading.check_tensors(directory / self.weights_file, expected, stored)

        tensors, activations = self._read_tensors(config, packed, stored)
        dtype = "f32" if self.key else common_dtype(tensors.values())
        return Checkpoint(
            config, MappingProxyType(tensors), dtype, activations=MappingProxyType(activations), unread=unread
        )

    def _read_tensors(
        self, config: DrafterConfig, packed: Mapping[str, PackedMatrix], stored: reading.Tensors
    ) -> tuple[dict[str, Weight], dict[str, Activations]]:
        """By role: its weight, and the static quantization beside a packed matrix that has any."""
        matrices = {role: self._read_matrix(how, stored) for role, how in packed.items()}
        tensors = {
            role.name: matrices[role.name][0] if role.name in matrices else Stored(*stored[name], name)
            for role, name in self._name_tensors(config, packed).items()
        }
        return tensors, {role: pair for role, (_, pair) in matrices.items() if any(pair)}

    def _detect_packing(self, config: DrafterConfig, stored: reading.Tensors) -> dict[str, PackedMatrix]:
        """How each matrix that is packed is, by role."""
        if not self.key:
            return {}
        shapes = shapes_of(config)
        own_head = (HEAD,) if any(name.startswith(f"{HEAD}.") for name in stored) else ()
        matrices = {role: name for role, name in self._name_tensors(config, own_head).items() if role.kind == MATRIX}
        packed = {
            r.name: self._detect_matrix_packing(name.removesuffix(_WEIGHT), shapes[r], stored)
            for r, name in matrices.items()
        }
        return {role: how for role, how in packed.items() if how is not None}

    def _normalize_config(self, document: Mapping[str, Any], packed: Mapping[str, PackedMatrix]) -> dict[str, Any]:
        """``document`` with its entry of packed modules in the form in which it is written here."""
        entry = document.get(self.key)
        if not isinstance(entry, Mapping) or not packed:
            return dict(document)
        in_full = {**document, self.key: self.in_full(entry, [how.module for how in packed.values()])}
        # MLX's converters write the same entry under both names.
        if in_full.get("quantization_config") == entry and self.key != "quantization_config":
            del in_full["quantization_config"]
        return in_full

    def _list_expected_tensors(
        self, config: DrafterConfig, packed: Mapping[str, PackedMatrix]
    ) -> reading.ExpectedTensors:
        """Every tensor of a drafter, some of whose roles are ``packed``."""
        shapes = shapes_of(config)
        expected: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {}
        for role, name in self._name_tensors(config, packed).items():
            if how := packed.get(role.name):
                expected |= {how.module + suffix: part for suffix, part in self._list_matrix_tensors(how).items()}
            else:
                expected[name] = shapes[role], ("I64",) if role.kind == INDEX else reading.FLOAT_DTYPES
        return expected

    def _detect_matrix_packing(
        self, module: str, shape: tuple[int, ...], stored: reading.Tensors
    ) -> PackedMatrix | None:
        """How ``module``, a matrix [out, in], is packed, by the shapes of its codes and scales; None if it is not."""
        for bits, group in product((2, 4, 8), self._list_group_sizes(shape[1])):
            how = PackedMatrix(module, shape, bits, group)
            if shape[1] % group == 0 and all(
                module + suffix in stored and stored[module + suffix][1].shape == part_shape
                for suffix, (part_shape, _) in list(self._list_matrix_tensors(how).items())[:2]
            ):
                return how
        return None

    def _read_matrix(self, how: PackedMatrix, stored: reading.Tensors) -> tuple[Weight, Activations]:
        """A packed matrix, and the static quantization of what goes in and comes out; all but its codes is read here,
        and where that is damaged, CheckpointError raised."""
        suffix, *others = self._list_matrix_tensors(how)
        path, codes = stored[how.module + suffix]
        arrays = {name: _read_small_tensor(*stored[how.module + name]) for name in others}
        scales = arrays[others[0]]
        place = f"{escape(path)}: {escape(how.module)}"

        def rows(first: int, last: int) -> Rows:
            packed = read_rows(path, codes, first, last)
            return packed.view(np.int8) if codes.dtype == "I8" else unpack(packed, how.bits, how.shape[1])

        if self.offsets and not np.array_equal(arrays[self.offsets], self.arrays(how, scales)[self.offsets]):
            is_finite = all(np.isfinite(array).all() for array in arrays.values())
            _require(is_finite, place, "finite scales and biases, found others")
            offsets = arrays[self.offsets]

            def floats(first: int, last: int) -> Rows:
                half = 1 << how.bits - 1
                stored = (rows(first, last).astype(np.float32) + half).reshape(last - first, -1, how.group)
                numbers: Floats = stored * scales[first:last, :, None] + offsets[first:last, :, None]
                return numbers.reshape(last - first, -1)

            # MLX's own quantization rounds scales and offsets, so that 0 is no code.
            return Weight(how.shape, floats), (None, None)
        self._check_arrays(place, how, scales, arrays)
        static = [_build_activation(place, float(arrays[name])) for name in self.static]
        steps = Steps.around_zero(how.group, scales).by_row()
        weight = Weight(how.shape, rows, Packing(how.bits, True), steps, origin=(path, codes.offset))
        return weight, (static[0], static[1]) if static else (None, None)

    def _check_arrays(
        self, place: str, how: PackedMatrix, scales: Floats, arrays: Mapping[str, npt.NDArray[Any]]
    ) -> None:
        """Raise CheckpointError where the scales at ``place`` are damaged, or what is made of them is not so made."""
        with np.errstate(over="ignore", invalid="ignore"):
            sound = (scales >= 0) & np.isfinite(scales * np.float32(1 << how.bits - 1))
        _require(bool(sound.all()), place, "scales that are finite and not negative, found others")
        for name, expected in self.arrays(how, scales).items():
            is_same = np.array_equal(arrays[name], expected)
            _require(is_same, place, f"{name[1:]} as its shape and scales make it, found others")


TRANSFORMERS_LAYOUT = DirectoryFormat("transformers")
"""Floats, which ``Gemma4AssistantForCausalLM.from_pretrained`` loads, and vLLM, SGLang and llama.cpp's converter."""


def _require(sound: bool, place: str, what: str) -> None:
    if not sound:
        raise CheckpointError(f"{place}: expected {what}. Extract the drafter anew.")


def _build_activation(place: str, scale: float) -> Activation | None:
    """The quantization by a stored ``scale``; None where that is 0, which stands for none."""
    _require(0 <= scale < np.inf, place, f"a scale of activations that is finite and not negative, found {scale}")
    return Activation("int8", scale, 0) if scale else None


def _read_small_tensor(path: Path, tensor: StoredTensor) -> npt.NDArray[Any]:
    """All of a small tensor, in float32 where it is of floats."""
    is_narrow = tensor.dtype in reading.FLOAT_DTYPES and tensor.dtype != "F32"
    return Stored(path, tensor).array() if is_narrow else read_array(path, tensor)


def static_scale(activation: Activation | None) -> float:
    """The scale of what is quantized to INT8 around zero, 0 for anything else."""
    if activation is None or activation.type != "int8" or activation.zero_point != 0:
        return 0.0
    return activation.scale


def _describe_static_scales(checkpoint: Checkpoint, packed: Mapping[str, PackedMatrix]) -> Iterator[str]:
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
