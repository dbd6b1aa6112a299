"""Directories with transformers' names and configuration, in which matrices are floats or packed integers.

A packed matrix is several tensors: its codes, its scales, and arrays that follow from the scales; reading computes
these again and compares. The shapes of codes and scales say how a matrix is packed, so reading builds the configuration
from the tensors and compares it with the stored one.
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
from mtp_extract.architecture import list_shapes
from mtp_extract.architecture.activation import Activation
from mtp_extract.architecture.config import DrafterConfig
from mtp_extract.architecture.roles import INDEX, MATRIX, Role
from mtp_extract.checkpoint.checkpoint import CODES, Activations, Checkpoint
from mtp_extract.checkpoint.documents import read_object
from mtp_extract.checkpoint.dtypes import BLOCKS, DTYPES, count_row_bytes, pack, unpack
from mtp_extract.checkpoint.files import OutputFile, PlannedTensor, format_json, plan_array, plan_rows
from mtp_extract.checkpoint.format import INDICES, Plan, StoredAs, store_all, store_floats
from mtp_extract.checkpoint.stored import FileWeight, TensorPlace, find_common_dtype, read_array, read_rows
from mtp_extract.checkpoint.weight import Rows, Steps, Weight, center_codes, has_exact_steps
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
"""Role of the head, and its module if it is not tied to the embedding."""

EMBEDDING = "model.embed_tokens"
"""Module of the embedding, and of a tied head."""

_WEIGHT = ".weight"
_SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix whose codes are packed into one tensor, with its scales in another."""

    module: str  # the tensor names without their suffixes
    shape: tuple[int, ...]  # [out, in]
    bits: int  # per code
    group: int  # elements of a row that share a scale; ``in`` if a row has one scale


PackedMatrices = Mapping[str, PackedMatrix]


@dataclass(frozen=True)
class DirectoryFormat:
    """``config.json``, ``generation_config.json`` and ``model.safetensors``.

    Matrices are packed if ``entry_key`` is given. A suffix stands behind the name of a matrix's module.
    """

    name: str
    entry_key: str = ""  # of the entry of config.json that says how matrices are packed
    codes: tuple[str, str] = ("", "")  # suffix and dtype of the codes; 8-bit codes in U8 are stored as I8
    # Suffix → array, made of the scales, F32 [out, in / group]; the scales themselves come first.
    build_arrays: Callable[[PackedMatrix, Floats], dict[str, npt.NDArray[Any]]] = lambda matrix, scales: {}
    # Suffixes of the static scales of a matrix's input and output activations; a scale of 0 means none.
    activation_suffixes: tuple[str, ...] = ()
    # The entry of config.json, from the packed matrices by module and the modules that stay in floats.
    build_entry: Callable[[PackedMatrices, Sequence[str]], dict[str, Any]] = lambda packed, floats: {}
    # Elements of a row that may share a scale, the longest group first; None for a whole row of any length.
    group_sizes: tuple[int | None, ...] = ()
    unfit_reason: str = ""  # why blocks of {block} elements are not held, and which format holds them
    unties_head: bool = True  # a packed head is a module of its own, not the embedding
    floats_head_for: str = ""  # an engine that takes a head of floats only
    tensor_format: str = "pt"  # ``format`` in the metadata of the weights file
    # Fill in the entry as other programs write it, given the packed modules, so that it compares with our own.
    complete_entry: Callable[[Mapping[str, Any], Sequence[str]], Mapping[str, Any]] = lambda entry, packed: entry
    offsets_suffix: str = ""  # of the number added to every group; other programs' offsets may be no whole code
    marker: str = "config.json"
    weights_file: str = "model.safetensors"
    further_files: tuple[str, ...] = (GENERATION_FILE,)

    def store(self, role: Role, weight: Weight, dtype: str) -> StoredAs:
        if role.kind == INDEX:
            return StoredAs(INDICES, weight)
        if not self.entry_key:
            return store_floats(weight, dtype)
        try:
            codes = center_codes(weight)
            exact = has_exact_steps(weight)
            self._require_fit(role, codes, exact)
        except NoCodesError as error:
            return store_floats(weight, "f32", str(error))
        # A factor that a converter folded into the scales is divided out, and the quotient rounded once.
        return StoredAs(CODES, codes, "" if exact else "F32")

    def _require_fit(self, role: Role, codes: Weight, exact: bool) -> None:
        """Raise NoCodesError if the format cannot hold ``codes``; ``exact``: their scales are the bundle's own."""
        sizes = codes.steps.size
        if not exact and (sizes[sizes > 0] < _SMALLEST_NORMAL).any():
            raise NoCodesError("its scales, less the factor folded into them, are too small for F32")
        if (sizes < 0).any():
            raise NoCodesError("it has negative scales (gguf holds them)")
        if self.floats_head_for and role.name == HEAD:
            raise NoCodesError(f"{self.floats_head_for} takes a head of floats only; without it the codes are kept")
        if self._choose_group_size(codes) is None:
            raise NoCodesError(self.unfit_reason.format(block=codes.steps.block))

    def _list_group_sizes(self, columns: int) -> tuple[int, ...]:
        return tuple(size or columns for size in self.group_sizes)

    def _choose_group_size(self, codes: Weight) -> int | None:
        """Return the longest group that divides the blocks of ``codes``; None if the format cannot hold them."""
        return next((size for size in self._list_group_sizes(codes.columns) if codes.steps.block % size == 0), None)

    def plan(self, checkpoint: Checkpoint, dtype: str) -> Plan:
        stored = store_all(self.store, checkpoint, dtype)
        config = checkpoint.mtp
        packed = self._plan_packing(config, stored)
        names = self._name_tensors(config, packed)
        roles = {name: role.name for role, name in names.items() if role.name not in packed}
        tensors = tuple(self._plan_tensors(checkpoint, stored, packed))
        metadata = {"format": self.tensor_format, "mtp_extract": __version__}
        notes = tuple(_describe_static_scales(checkpoint, packed)) if self.activation_suffixes else ()
        document = self._build_config(config, packed, DTYPES["f32" if self.entry_key else dtype].transformers)
        files = (
            OutputFile(self.weights_file, tensors, metadata=metadata, notes=notes),
            OutputFile(self.marker, text=format_json(document)),
            OutputFile(GENERATION_FILE, text=format_json(GENERATION)),
        )
        return Plan(self.name, checkpoint, dtype, stored, roles, files)

    def _plan_tensors(
        self, checkpoint: Checkpoint, stored: Mapping[str, StoredAs], packed: PackedMatrices
    ) -> Iterator[PlannedTensor]:
        for role, name in self._name_tensors(checkpoint.mtp, packed).items():
            if role.name in packed:
                activations = checkpoint.activations.get(role.name, (None, None))
                yield from self._plan_matrix(stored[role.name].weight, packed[role.name], activations)
            else:
                yield stored[role.name].tensor(name)

    def _plan_packing(self, config: DrafterConfig, stored: Mapping[str, StoredAs]) -> dict[str, PackedMatrix]:
        """Return how each matrix that is stored as codes is packed, by role; UnsupportedError if the format cannot."""
        codes = {role: stored_as.weight for role, stored_as in stored.items() if stored_as.how == CODES}
        packed = {
            role.name: PackedMatrix(name.removesuffix(_WEIGHT), weight.shape, weight.bits, group)
            for role, name in self._name_tensors(config, codes).items()
            if (weight := codes.get(role.name)) and (group := self._choose_group_size(weight))
        }
        if self.entry_key and not packed:
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
        """Role → tensor name, ending in ``.weight``; a packed matrix has other suffixes instead."""
        names = {role: role.names["transformers"] for role in list_shapes(config)}
        own_head = self.unties_head and HEAD in packed
        return {role: f"{HEAD}{_WEIGHT}" if role.name == HEAD and own_head else name for role, name in names.items()}

    def _build_config(self, config: DrafterConfig, packed: PackedMatrices, dtype: str) -> dict[str, Any]:
        """Return ``config.json`` of a drafter whose roles in ``packed`` are packed."""
        document = build_assistant_config(config, dtype, tied=not (self.unties_head and HEAD in packed))
        if packed:
            names = {role: name for role, name in self._name_tensors(config, packed).items() if role.kind == MATRIX}
            floats = [name.removesuffix(_WEIGHT) for role, name in names.items() if role.name not in packed]
            document[self.entry_key] = self.build_entry({matrix.module: matrix for matrix in packed.values()}, floats)
        return document

    def _list_matrix_tensors(self, matrix: PackedMatrix) -> reading.ExpectedTensors:
        """Return the tensors that hold a matrix, by suffix: its codes, its scales, the rest."""
        (suffix, dtype), (rows, columns) = self.codes, matrix.shape
        if matrix.bits == 8 and dtype == "U8":
            dtype = "I8"
        size = BLOCKS[dtype][1]
        arrays = self.build_arrays(matrix, np.broadcast_to(np.float32(0), (rows, columns // matrix.group)))
        arrays |= dict.fromkeys(self.activation_suffixes, np.zeros((), np.float32))
        tensors: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
            suffix: ((rows, count_row_bytes(columns, matrix.bits, size) // size), (dtype,))
        }
        for name, array in arrays.items():
            planned = plan_array(name, array)
            # Programs that choose their own offsets store these and the scales in BF16 and F16, too.
            is_any_float = bool(self.offsets_suffix) and planned.dtype == "F32"
            tensors[name] = (planned.shape, reading.FLOAT_DTYPES if is_any_float else (planned.dtype,))
        return tensors

    def _plan_matrix(self, codes: Weight, matrix: PackedMatrix, activations: Activations) -> Iterator[PlannedTensor]:
        suffix, (shape, (dtype,)) = next(iter(self._list_matrix_tensors(matrix).items()))

        def pack_rows(first: int, last: int) -> Rows:
            rows = codes.codes(first, last)
            return rows if dtype == "I8" else pack(rows, matrix.bits, BLOCKS[dtype][1])

        yield plan_rows(f"{matrix.module}{suffix}", codes, dtype, pack_rows, shape)
        arrays = self.build_arrays(matrix, np.repeat(codes.steps.size, codes.steps.block // matrix.group, axis=1))
        for name, activation in zip(self.activation_suffixes, activations, strict=False):
            arrays[name] = np.asarray(np.float32(find_int8_scale(activation)))
        yield from (plan_array(f"{matrix.module}{name}", array) for name, array in arrays.items())

    def read(self, directory: Path) -> Checkpoint:
        path = directory / self.marker
        document = read_object(path)
        stored = reading.read_weights(directory, self.weights_file)
        with reading.attribute_errors_to(path):
            config = parse_config(document)
            packed = self._detect_packing(config, stored)
            written = self._build_config(config, packed, "")
        expected = self._list_expected_tensors(config, packed)
        # Without packed matrices the name of an unknown quantization explains more than its unexpected tensors do.
        if packed:
            reading.check_tensors(directory / self.weights_file, expected, stored)
        unread = compare_documents(directory, self._normalize_config(document, packed), config, written)
        unread += reading.find_index_conflicts(directory, self.weights_file, stored)
        if not packed:
            reading.check_tensors(directory / self.weights_file, expected, stored)

        tensors, activations = self._read_tensors(config, packed, stored)
        dtype = "f32" if self.entry_key else find_common_dtype(tensors.values())
        return Checkpoint(
            config, MappingProxyType(tensors), dtype, activations=MappingProxyType(activations), unread=unread
        )

    def _read_tensors(
        self, config: DrafterConfig, packed: PackedMatrices, stored: reading.Tensors
    ) -> tuple[dict[str, Weight], dict[str, Activations]]:
        """Return every weight, and the static quantization of activations where a matrix has any, both by role."""
        tensors: dict[str, Weight] = {}
        activations: dict[str, Activations] = {}
        for role, name in self._name_tensors(config, packed).items():
            if role.name not in packed:
                tensors[role.name] = FileWeight(*stored[name], name)
                continue
            tensors[role.name], pair = self._read_matrix(packed[role.name], stored)
            if any(pair):
                activations[role.name] = pair
        return tensors, activations

    def _detect_packing(self, config: DrafterConfig, stored: reading.Tensors) -> dict[str, PackedMatrix]:
        """Return how each packed matrix is packed, by role, from the shapes of the stored tensors."""
        if not self.entry_key:
            return {}
        own_head = (HEAD,) if any(name.startswith(f"{HEAD}.") for name in stored) else ()
        names, packed = self._name_tensors(config, own_head), dict[str, PackedMatrix]()
        for role, shape in list_shapes(config).items():
            if role.kind == MATRIX:
                module = names[role].removesuffix(_WEIGHT)
                if (matrix := self._detect_matrix_packing(module, shape, stored)) is not None:
                    packed[role.name] = matrix
        return packed

    def _normalize_config(self, document: Mapping[str, Any], packed: PackedMatrices) -> dict[str, Any]:
        """Return ``document`` with the entry of its packed modules as we would write it."""
        entry = document.get(self.entry_key)
        if not isinstance(entry, Mapping) or not packed:
            return dict(document)
        modules = [matrix.module for matrix in packed.values()]
        completed = {**document, self.entry_key: self.complete_entry(entry, modules)}
        # MLX's converters write the same entry under both keys.
        if completed.get("quantization_config") == entry and self.entry_key != "quantization_config":
            del completed["quantization_config"]
        return completed

    def _list_expected_tensors(self, config: DrafterConfig, packed: PackedMatrices) -> reading.ExpectedTensors:
        shapes = list_shapes(config)
        expected: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {}
        for role, name in self._name_tensors(config, packed).items():
            if matrix := packed.get(role.name):
                tensors = self._list_matrix_tensors(matrix).items()
                expected |= {f"{matrix.module}{suffix}": tensor for suffix, tensor in tensors}
            else:
                expected[name] = shapes[role], ("I64",) if role.kind == INDEX else reading.FLOAT_DTYPES
        return expected

    def _detect_matrix_packing(
        self, module: str, shape: tuple[int, ...], stored: reading.Tensors
    ) -> PackedMatrix | None:
        """Return how a matrix [out, in] is packed, by the shapes of its codes and scales; None if it is not."""
        for bits, group in product((2, 4, 8), self._list_group_sizes(shape[1])):
            matrix = PackedMatrix(module, shape, bits, group)
            if shape[1] % group == 0 and all(
                module + suffix in stored and stored[module + suffix][1].shape == tensor_shape
                for suffix, (tensor_shape, _) in list(self._list_matrix_tensors(matrix).items())[:2]
            ):
                return matrix
        return None

    def _read_matrix(self, matrix: PackedMatrix, stored: reading.Tensors) -> tuple[Weight, Activations]:
        """Read all of a packed matrix but its codes, which are read on demand; CheckpointError if it is damaged.

        Return the weight, and the static quantization of its input and output activations.
        """
        suffix, *array_suffixes = self._list_matrix_tensors(matrix)
        path, codes = stored[matrix.module + suffix]
        arrays = {name: _read_small_tensor(*stored[matrix.module + name]) for name in array_suffixes}
        scales = arrays[array_suffixes[0]]
        place = f"{escape(path)}: {escape(matrix.module)}"

        def read_codes(first: int, last: int) -> Rows:
            packed = read_rows(path, codes, first, last)
            return packed.view(np.int8) if codes.dtype == "I8" else unpack(packed, matrix.bits, matrix.shape[1])

        if self.offsets_suffix:
            offsets = arrays[self.offsets_suffix]
            if not np.array_equal(offsets, self.build_arrays(matrix, scales)[self.offsets_suffix]):
                is_finite = all(np.isfinite(array).all() for array in arrays.values())
                _require(is_finite, place, "finite scales and biases, found others")
                # MLX's own quantization rounds scales and offsets, so that no code stands for 0: only floats are left.
                return _build_affine_weight(matrix, read_codes, scales, offsets), (None, None)
        self._check_arrays(place, matrix, scales, arrays)
        activations = [_build_activation(place, float(arrays[name])) for name in self.activation_suffixes]
        steps = Steps.around_zero(matrix.group, scales).merge_equal_blocks()
        weight = Weight(matrix.shape, read_codes, Packing(matrix.bits, True), steps, origin=(path, codes.offset))
        return weight, (activations[0], activations[1]) if activations else (None, None)

    def _check_arrays(
        self, place: str, matrix: PackedMatrix, scales: Floats, arrays: Mapping[str, npt.NDArray[Any]]
    ) -> None:
        """Raise CheckpointError if the scales are damaged, or another array is not what the scales make of it."""
        with np.errstate(over="ignore", invalid="ignore"):
            is_sound = (scales >= 0) & np.isfinite(scales * np.float32(1 << matrix.bits - 1))
        _require(bool(is_sound.all()), place, "scales that are finite and not negative, found others")
        for name, expected in self.build_arrays(matrix, scales).items():
            is_same = np.array_equal(arrays[name], expected)
            _require(is_same, place, f"{name[1:]} as its shape and scales make it, found others")


TRANSFORMERS_LAYOUT = DirectoryFormat("transformers")
"""Floats, which ``Gemma4AssistantForCausalLM.from_pretrained`` loads, and vLLM, SGLang and llama.cpp's converter."""


def _require(is_sound: bool, place: str, what: str) -> None:
    if not is_sound:
        raise CheckpointError(f"{place}: expected {what}. Extract the drafter anew.")


def _build_affine_weight(
    matrix: PackedMatrix, read_codes: Callable[[int, int], Rows], scales: Floats, offsets: Floats
) -> Weight:
    """Return a weight of F32 numbers, ``scale · unsigned code + offset``."""

    def read_floats(first: int, last: int) -> Rows:
        half = 1 << matrix.bits - 1
        unsigned = (read_codes(first, last).astype(np.float32) + half).reshape(last - first, -1, matrix.group)
        numbers: Floats = unsigned * scales[first:last, :, None] + offsets[first:last, :, None]
        return numbers.reshape(last - first, -1)

    return Weight(matrix.shape, read_floats)


def _build_activation(place: str, scale: float) -> Activation | None:
    """Return the quantization by a stored ``scale``; None for 0, which stands for no quantization."""
    _require(0 <= scale < np.inf, place, f"a scale of activations that is finite and not negative, found {scale}")
    return Activation("int8", scale, 0) if scale else None


def _read_small_tensor(path: Path, tensor: TensorPlace) -> npt.NDArray[Any]:
    """Read a whole tensor; BF16 and F16 become float32."""
    is_narrow = tensor.dtype in reading.FLOAT_DTYPES and tensor.dtype != "F32"
    return FileWeight(path, tensor).array() if is_narrow else read_array(path, tensor)


def find_int8_scale(activation: Activation | None) -> float:
    """Return the scale of an activation quantized to INT8 around zero; 0 for any other, or none."""
    if activation is None or activation.type != "int8" or activation.zero_point != 0:
        return 0.0
    return activation.scale


def _describe_static_scales(checkpoint: Checkpoint, packed: PackedMatrices) -> Iterator[str]:
    static = {role: [a for a in pair if a] for role, pair in checkpoint.activations.items() if any(pair)}
    lost = [role for role, pair in static.items() if role not in packed or not all(map(find_int8_scale, pair))]
    if len(lost) < len(static):
        yield "Static scales of activations are held, and transformers rounds by them as the graph does."
    if lost:
        yield (
            f"Activations of {', '.join(lost)} are not rounded: the format has static scales for INT8 around 0 "
            "alone, and for matrices of integers."
        )
