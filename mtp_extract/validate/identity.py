"""Is a directory the drafter of a file? Asked of its config, its tensors, what both compute, and its record.

Everything is derived from the file again; nothing that the directory says of itself is believed. No torch is needed.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mtp_extract.architecture.config import FULL, SLIDING, DrafterConfig
from mtp_extract.architecture.roles import shapes_of
from mtp_extract.bundle import Drafter as SourceDrafter
from mtp_extract.bundle import Opened
from mtp_extract.checkpoint.check import verify
from mtp_extract.checkpoint.checkpoint import Checkpoint
from mtp_extract.checkpoint.dtypes import DTYPES
from mtp_extract.checkpoint.formats import format_of, reading
from mtp_extract.checkpoint.lazy import FilledTensor, LazyTensor, read_floats
from mtp_extract.checkpoint.planned import PlannedTensor, plan_floats
from mtp_extract.checkpoint.proof import prove
from mtp_extract.checkpoint.staging import RECORD
from mtp_extract.checkpoint.stored import StoredWeight
from mtp_extract.checkpoint.tensor_file import differing
from mtp_extract.errors import CheckpointError, DrafterError, ProofError, UnsupportedError, escape
from mtp_extract.extraction import checkpoint_of
from mtp_extract.validate.report.tables import REPORT_FILES

__all__ = ["NEEDED", "Check", "check_identity", "drafter_for"]


@dataclass(frozen=True)
class Check:
    """One thing that was checked.

    Attributes:
        name: key in the report.
        what: what it asks.
        passed: None where it was not run.
        evidence: figures, or what is wrong, the first place first.
    """

    name: str
    what: str
    passed: bool | None
    evidence: str


NEEDED = ("config", "tensors", "execution")
"""The checks without which nothing is proven. The others refute as well, and may be left out."""

_WHAT = {
    "config": "every number of the config that the graph fixes is the graph's",
    "tensors": "every tensor holds the file's values rounded to its type, bit for bit",
    "execution": "graph and checkpoint compute the same, operator by operator, nothing following the other",
    "record": "extraction.json describes what lies here",
}

# What no graph says, and what only names things.
_FREE = frozenset(
    {
        *(
            "architectures",
            "dtype",
            "initializer_range",
            "max_position_embeddings",
            "model_type",
            "tensors",
            "use_cache",
        ),
        *("attention_dropout", "vocab_size_per_layer_input", "num_centroids", "centroid_intermediate_top_k"),
        # Read strictly: what is there changes nothing.
        *("num_kv_shared_layers", "use_bidirectional_attention"),
        # What they come to is compared by layer.
        *("attention_k_eq_v", "num_global_key_value_heads"),
    }
)


def drafter_for(opened: Opened, config: DrafterConfig) -> SourceDrafter:
    """The drafter of ``opened``; where its graph leaves the window to the runtime, with that of ``config``.

    Raises:
        MtpExtractError: as :meth:`~mtp_extract.bundle.Opened.drafter`.
    """
    try:
        return opened.drafter()
    except UnsupportedError as error:
        if config.sliding_window is None or not any(r.startswith("sliding_window") for r in error.remedies):
            raise
        return opened.drafter(config.sliding_window)


def check_identity(directory: Path, source: SourceDrafter) -> tuple[tuple[Check, ...], bool]:
    """Hold the checkpoint in ``directory`` against the file's drafter.

    Returns:
        The checks, and whether the two are at least of one shape, so that they can be run side by side.

    Raises:
        DrafterError: the directory holds no configuration that can be read.
        MtpExtractError: the file cannot be read.
    """
    original = checkpoint_of(source)
    format_ = format_of(directory)
    found = format_.read_config(directory)
    config = _config(directory, original, found)
    written, tensors = None, _check("tensors", False, "they were not read")
    different: tuple[str, ...] = ()
    try:
        written = format_.read(directory)
    except (DrafterError, CheckpointError) as error:
        tensors = _check("tensors", False, " ".join(str(error).split()))
    comparable = written is not None and _shape(found) == _shape(source.config)
    if written is not None:
        tensors, different = _tensors(written, original, format_.name)
    execution = _check("execution", None, "not of the shape of the file's drafter")
    if written is not None and comparable:
        execution = _execution(source, written, original, different)
    return (config, tensors, execution, _record(directory, source)), comparable


def _check(name: str, passed: bool | None, evidence: str) -> Check:
    return Check(name, _WHAT[name], passed, evidence)


def _shape(config: DrafterConfig) -> object:
    """What decides the shapes of weights and caches."""
    layers = [(layer.layer_type, layer.head_dim, layer.num_kv_heads) for layer in config.layers]
    sizes = (config.backbone_hidden_size, config.hidden_size, config.intermediate_size, config.vocab_size)
    return layers, sizes, config.num_heads, config.ordered_head


def _config(directory: Path, original: Checkpoint, found: DrafterConfig) -> Check:
    """By key, as the directory's format writes them; and by what is read from it, whatever form that has."""
    format_ = format_of(directory)
    types = set(original.config.layer_types)
    free = {*_FREE, *({SLIDING, FULL} - types), *(() if SLIDING in types else ("sliding_window",))}
    document = next(file for file in format_.plan(original, "f32") if file.name == format_.marker)
    count, wrong = _differences(json.loads(document.text), reading.read_json(directory / format_.marker), free)
    if not wrong:
        mine, theirs = (_meaning(config) for config in (original.config, found))
        count, wrong = max(count, len(mine)), _differences(mine, theirs, frozenset())[1]
        wrong += [f"{key}: the graph has none" for key in theirs if key not in mine]
    if wrong:
        return _check("config", False, "; ".join(wrong))
    return _check("config", True, f"{count} values agree")


def _meaning(config: DrafterConfig) -> dict[str, Any]:
    """Every number of ``config`` that a graph fixes, by name."""
    fields = dataclasses.asdict(dataclasses.replace(config, max_position_embeddings=None))
    layers = fields.pop("layers")
    return {**fields, **{f"layers.{index}": layer for index, layer in enumerate(layers)}}


def _differences(
    expected: Mapping[str, Any], found: Mapping[str, Any], free: Collection[str], prefix: str = ""
) -> tuple[int, list[str]]:
    """How many values are in both, and those that differ, with both values."""
    count = 0
    wrong: list[str] = []
    for key, value in expected.items():
        name = f"{prefix}{key}"
        if key in free or key.endswith("_token_id") or key not in found:
            continue
        theirs = found[key]
        if isinstance(value, Mapping) and isinstance(theirs, Mapping):
            inner = _differences(value, theirs, free, f"{name}.")
            count, wrong = count + inner[0], wrong + inner[1]
            continue
        count += 1
        if value != theirs:
            wrong.append(f"{name} is {escape(value)} in the graph, {escape(theirs)} here")
    return count, wrong


def _tensors(written: Checkpoint, original: Checkpoint, layout: str) -> tuple[Check, tuple[str, ...]]:
    """Compare bit by bit, role by role; also the roles that differ, in the order of execution."""
    wrong: dict[str, str] = {}
    planned: dict[Path, list[PlannedTensor]] = {}
    names, types = {}, set()
    expected_shapes = {role.name: shape for role, shape in shapes_of(original.config).items()}
    for role in shapes_of(written.config):
        there = written.tensors[role.name]
        expected = original.tensors.get(role.name)
        names[role.name] = f"{role.name} ({role.names[layout]})"
        if role.name not in expected_shapes or there.shape != expected_shapes[role.name]:
            wrong[role.name] = f"is {list(there.shape)}, which the file has not"
            continue
        expected = expected or FilledTensor(expected_shapes[role.name])
        if not isinstance(there, StoredWeight):
            if not np.array_equal(read_floats(there), read_floats(expected)):
                wrong[role.name] = "is missing, and is not 1 in the file"
            continue
        dtype = next(name for name, dtype in DTYPES.items() if dtype is there.dtype)
        types.add(there.dtype.safetensors)
        planned.setdefault(there.path, []).append(plan_floats(role.name, role.name, expected, dtype))
        if not all(bool(np.isfinite(chunk).all()) for chunk in there.floats()):
            wrong[role.name] = "holds numbers that are not finite"
    for path, tensors in planned.items():
        stored = {t.name: w.stored for t in tensors if isinstance(w := written.tensors[t.name], StoredWeight)}
        wrong = {**dict.fromkeys(differing(path, stored, tensors), "has other values than the file's"), **wrong}
    if missing := [name for name in expected_shapes if name not in names]:
        return _check("tensors", False, f"the file has more: {', '.join(missing)}"), tuple(wrong)
    # The table of roles is in the order of execution.
    ordered = tuple(role for role in names if role in wrong)
    if ordered:
        return _check("tensors", False, "; ".join(f"{names[role]} {wrong[role]}" for role in ordered)), ordered
    return _check("tensors", True, f"{len(names)} tensors in {' and '.join(sorted(types))}, every bit"), ()


def _execution(source: SourceDrafter, written: Checkpoint, original: Checkpoint, different: Sequence[str]) -> Check:
    """Run both. A tensor that is the rounding of the file's, to the bit, counts as the file's; any other as it is."""

    def read(role: str) -> Iterator[Any]:
        there: LazyTensor = written.tensors[role]
        rounded = isinstance(there, StoredWeight) and there.dtype is not DTYPES["f32"] and role not in different
        return (original.tensors.get(role, there) if rounded else there).floats()

    try:
        with np.errstate(all="ignore"):
            proof = prove(source.graph, source.walk, written.config, read)
    except (ProofError, CheckpointError) as error:
        return _check("execution", False, str(error).split(". ")[0])
    except (ValueError, ArithmeticError):
        if not different:
            raise
        return _check("execution", None, "its numbers cannot be computed with")
    figures = ", ".join(
        f"{name} within {max(f):.1g}" for name, f in (("logits", proof.logits), ("state", proof.projected))
    )
    return _check(
        "execution",
        True,
        f"{figures} of their range at {len(proof.positions)} positions, {proof.tolerance:g} being allowed",
    )


def _record(directory: Path, source: SourceDrafter) -> Check:
    if not (directory / RECORD).exists():
        return _check("record", None, f"there is no {RECORD}")
    try:
        found = verify(directory, REPORT_FILES)
    except CheckpointError as error:
        return _check("record", False, str(error))
    geometry = json.loads(json.dumps(source.config.as_json()))
    if geometry != found.record["geometry"]:
        wrong = _differences(geometry, found.record["geometry"], frozenset(), "geometry.")[1]
        return _check("record", False, "; ".join(wrong) or "its geometry is incomplete")
    return _check("record", True, f"{found.files} files and {found.tensors} tensors as recorded")
