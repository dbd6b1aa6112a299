"""One file that llama.cpp loads, with the integers of the LiteRT file in it.

Codes of 4 bits and less become Q4_0, of 8 bits Q8_0, with the row's step repeated in every block of 32 and rounded to
FP16, the only type that steps have there. Norms, scalars and what cannot be held so are F32.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from mtp_extract._version import __version__
from mtp_extract.architecture.roles import GEMMA4_MTP, MATRIX, Role, roles_of, shapes_of
from mtp_extract.checkpoint.arranged import NOTHING, Arranged, Kept, keep_floats
from mtp_extract.checkpoint.checkpoint import CODES, Checkpoint
from mtp_extract.checkpoint.dtypes import DTYPES
from mtp_extract.checkpoint.gguf_file import ARCHITECTURE, read_gguf
from mtp_extract.checkpoint.packing import BLOCK, BLOCK_TYPES
from mtp_extract.checkpoint.planned import OutputFile, PlannedTensor, plan_array, plan_rows
from mtp_extract.checkpoint.rounding import SCALES, rounded_again
from mtp_extract.checkpoint.stored import Stored, StoredTensor, read_rows
from mtp_extract.checkpoint.weight import Steps, Weight, has_exact_steps, row_codes, row_ranges
from mtp_extract.errors import CheckpointError, NoCodesError, escape
from mtp_extract.formats import reading
from mtp_extract.formats.gguf_metadata import (
    ARCH,
    OWN,
    config_metadata,
    config_of,
    rope_frequency_factors,
)
from mtp_extract.litertlm.storage import Packing

_ROPE = "rope_freqs.weight"
_TOKENIZER, _TOKENS = "tokenizer.ggml.model", "tokenizer.ggml.tokens"
_QUANTIZED = MappingProxyType({kind.name: kind for kind in BLOCK_TYPES.values()})
# llama_ftype, of the type that most matrices have.
_FILE_TYPES = MappingProxyType({"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7, "BF16": 32})
_QUANTIZATION_VERSION = 2
_DROPPED = "llama.cpp computes the dense head, of which the ordered one looks at a part"
_EXACT_GELU = "The gate is an exact GELU, of which llama.cpp computes the tanh approximation."
_READ = 1 << 20
"""Elements of which the steps are read at a time."""


class GgufFormat:
    """``mtp-BASE-TYPE.gguf``; what is read may also be a single file of any name.

    llama.cpp pairs a file with a base of the same repository or folder of the Hub where ``mtp-`` is in its name
    (``find_best_mtp`` of its common/download.cpp), and of several takes the one whose type, before the ending, is the
    base's or nearest to it.
    """

    name = "gguf"
    marker = "mtp-*.gguf"
    weights_file = marker
    further_files: tuple[str, ...] = ()

    def keep(self, role: Role, weight: Weight, dtype: str) -> Kept:
        if self.name not in role.names:
            return Kept(NOTHING, weight, why=_DROPPED)
        if role.kind != MATRIX:
            return keep_floats(weight, "f32", "llama.cpp multiplies by vectors of F32")
        if dtype != CODES:
            return keep_floats(weight, dtype, "floats were asked for")
        try:
            codes = _codes(weight)
        except NoCodesError as error:
            return keep_floats(weight, "f32", str(error))
        if (codes.steps.size == codes.steps.size.astype(np.float16)).all():
            return Kept(CODES, codes, "" if has_exact_steps(weight) else "F32")
        return Kept(CODES, rounded_again(codes, [f"FP16{SCALES}"]), "FP16")

    def files(self, arranged: Arranged) -> Sequence[OutputFile]:
        config, origin = arranged.checkpoint.mtp, arranged.checkpoint.provenance
        metadata = config_metadata(config)
        planned: list[PlannedTensor] = []
        for role in (role for role in shapes_of(config) if self.name in role.names):
            kept, name = arranged.kept[role.name], role.names[self.name]
            if kept.how != CODES:
                planned.append(kept.tensor(name, role))
                continue
            planned.append(_plan_blocks(name, role.name, kept.weight))
        factors = rope_frequency_factors(config)
        if factors is not None:
            planned.append(plan_array(_ROPE, factors))
        matrices = [tensor for tensor in planned if len(tensor.shape) > 1]
        most = max(_FILE_TYPES, key=lambda kind: sum(tensor.dtype == kind for tensor in matrices))
        everything: dict[str, Any] = {
            ARCHITECTURE: ARCH,
            "general.type": "model",
            **_origin(origin),
            **_name_parts(_base_of(origin)),
            "general.file_type": _FILE_TYPES[most],
            "general.quantization_version": _QUANTIZATION_VERSION,
            **metadata,
            f"{OWN}version": __version__,
            **{OWN + key: text for key, text in origin.items()},
            _TOKENIZER: "no_vocab",  # drafts are tokens of the base
        }
        name = f"mtp-{_base_of(origin)}-{most}.gguf"
        notes = (_EXACT_GELU,) if config.hidden_activation == "gelu" else ()
        return [OutputFile(name, tensors=tuple(planned), metadata=everything, notes=notes)]

    def read(self, directory: Path) -> Checkpoint:
        path = _file_in(directory)
        metadata, stored = read_gguf(path)
        found = {name: (path, tensor) for name, tensor in stored.items()}
        head = next(role.names[self.name] for role in roles_of(1) if role.name == "lm_head")
        rows = stored[head].shape[0] if head in stored else 0
        if rows and (tokens := metadata.get(_TOKENS, rows)) != rows:
            raise CheckpointError(
                f"expected {rows} tokens in {escape(path)}, found {escape(tokens)}; the file contradicts itself"
            )
        turns = Stored(*found[_ROPE]).array().reshape(-1) if _ROPE in found else None
        config = config_of(path, metadata, rows, turns)
        names = {role: role.names[self.name] for role in shapes_of(config)}
        known = (*reading.FLOATS, *_QUANTIZED)
        expected = {names[role]: (shape, known) for role, shape in shapes_of(config).items()}
        reading.check_tensors(expected, found, more=(_ROPE,))
        tensors = {role.name: _weight(path, stored[name], name) for role, name in names.items()}
        types = {stored[name].dtype for role, name in names.items() if role.kind == MATRIX} - set(_QUANTIZED)
        dtype = next((name for name, dtype in DTYPES.items() if {dtype.safetensors} == types), "f32")
        return Checkpoint(GEMMA4_MTP, config, MappingProxyType(tensors), dtype)


FORMAT = GgufFormat()


def _file_in(place: Path) -> Path:
    """The file at or in ``place``; of several the first, beside which the others do not belong."""
    if place.suffix == Path(FORMAT.marker).suffix and place.is_file():
        return place
    return min(place.glob(FORMAT.marker), default=place / FORMAT.marker)


_ENDINGS = (".litertlm", ".tflite", ".gguf", "-assistant", "-mtp-drafter")
"""Of the name of a source, what is not of its base's."""
_UNFIT = re.compile(r"[^A-Za-z0-9._-]+")
_PARTS = re.compile(
    r"(?P<basename>.+?)-(?P<size_label>(?:\d+x)?[AE]?\d+(?:\.\d+)?[BKM](?:-A\d+B)?)(?:-(?P<finetune>.+))?"
)


def _base_of(provenance: Mapping[str, str]) -> str:
    """What the base is called in a file's name, by the name of the bundle or directory that all came from."""
    name = provenance.get("source.name", "").rstrip("/").rpartition("/")[2]
    for ending in _ENDINGS:
        name = name.removesuffix(ending)
    return _UNFIT.sub("-", name).removeprefix("mtp-").strip("-.") or "drafter"


def _name_parts(base: str) -> dict[str, str]:
    """The parts of a base's name that GGUF's naming convention has, as far as it has them: gemma-4, E4B, it."""
    found = _PARTS.fullmatch(base)
    parts = {"basename": base} if found is None else {key: part for key, part in found.groupdict().items() if part}
    return {f"general.{key}": part for key, part in parts.items()}


def _codes(tensor: Weight) -> Weight:
    """``tensor`` as Q4_0 or Q8_0 hold it.

    Raises:
        NoCodesError: they cannot.
    """
    try:
        codes = row_codes(tensor)
    except NoCodesError as error:
        raise NoCodesError(
            f"{error}, and Q4_0 and Q8_0 have a scale for each {BLOCK} numbers of a row and no zero point (its codes "
            "can be kept beside the floats)"
        ) from error
    if codes.shape[1] % BLOCK or codes.steps.block % BLOCK:
        what = f"rows of {codes.shape[1]}" if codes.shape[1] % BLOCK else f"blocks of {codes.steps.block}"
        raise NoCodesError(
            f"it has {what}, and Q4_0 and Q8_0 have a scale for each {BLOCK} numbers of a row (the compressed-tensors "
            "format keeps rows of any length)"
        )
    sizes = codes.steps.size
    with np.errstate(over="ignore", under="ignore"):
        rounded = sizes.astype(np.float16).astype(np.float32)
    unlike = np.abs(rounded - sizes) > DTYPES["f16"].roundoff * np.abs(sizes)
    if unlike.any() or not np.isfinite(rounded).all():
        raise NoCodesError(
            f"a scale of {float(sizes[unlike][0]):.2g} is out of FP16's range, the only type of scale there is "
            "in Q4_0 and Q8_0 (mlx, compressed-tensors and gemma have F32)"
        )
    return codes


def _origin(provenance: Mapping[str, str]) -> dict[str, str]:
    """Where it came from, in the keys that the standard has for it."""
    found = {"general.name": f"MTP drafter of {provenance['source.name']}"} if "source.name" in provenance else {}
    if "source.repository" in provenance:
        found["general.source.repo_url"] = f"https://huggingface.co/{provenance['source.repository']}"
    if "source.url" in provenance:
        found["general.source.url"] = provenance["source.url"]
    return found


def _weight(path: Path, stored: StoredTensor, name: str) -> Weight:
    """The tensor called ``name`` as a weight, of codes where it is of blocks."""
    kind = _QUANTIZED.get(stored.dtype)
    if kind is None:
        return Stored(path, stored, name)

    def steps() -> Steps:
        size = np.concatenate([kind.steps(read(*some)) for some in row_ranges(weight, elements=_READ)])
        if not np.isfinite(size).all():
            raise CheckpointError(f"{escape(path)}: a scale of a matrix is not finite: the file is damaged.")
        return Steps.around_zero(BLOCK, size).by_row()

    read, packing = partial(read_rows, path, stored), Packing(kind.bits, signed=True)
    weight = Weight(
        stored.shape, lambda first, last: kind.codes(read(first, last)), packing, steps, origin=(path, stored.offset)
    )
    return weight


def _plan_blocks(name: str, role: str, codes: Weight) -> PlannedTensor:
    """``codes`` around zero, of rows and blocks that divide by 32, in the type for their width."""
    kind, sizes = BLOCK_TYPES[max(codes.bits, min(BLOCK_TYPES))], codes.steps.in_blocks(BLOCK)
    return plan_rows(
        name, role, codes, kind.name, lambda first, last: kind.pack(codes.codes(first, last), sizes[first:last])
    )
