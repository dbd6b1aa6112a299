"""Is a directory the drafter of a file? Asked of its config, its tensors, what both compute, and its record.

Everything is derived from the file again; nothing that the directory says of itself is believed. No torch is needed.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mtp_extract.architecture.config import DrafterConfig
from mtp_extract.architecture.roles import shapes_of
from mtp_extract.bundle import Opened, Shard
from mtp_extract.checkpoint.checkpoint import CODES, Checkpoint, require_mtp
from mtp_extract.checkpoint.codes import CODES_FILE, with_codes
from mtp_extract.checkpoint.rounding import SCALES, how_rounded
from mtp_extract.checkpoint.stored import stored_of
from mtp_extract.checkpoint.weight import Weight, filled, has_exact_steps, row_codes, same_codes, steps_alike
from mtp_extract.errors import (
    CheckpointError,
    MtpExtractError,
    NoCodesError,
    ProofError,
    UnsupportedError,
    escape,
    few,
)
from mtp_extract.formats import format_of
from mtp_extract.formats.parts import static_scale
from mtp_extract.pipeline.check import verify
from mtp_extract.pipeline.extraction import checkpoint_of
from mtp_extract.pipeline.staging import RECORD
from mtp_extract.pipeline.unexpected import unexpected_in
from mtp_extract.pipeline.verification import verify_against_drafter
from mtp_extract.proof.proof import prove
from mtp_extract.proof.words import in_words
from mtp_extract.report.tables import REPORT_FILES


@dataclass(frozen=True)
class Check:
    """One thing that was checked."""

    name: str  # key in the report
    what: str  # what it asks
    passed: bool | None  # None where it was not run
    evidence: str  # figures, or what is wrong, the first place first


NEEDED = ("config", "files", "tensors", "execution")
"""The checks without which nothing is proven. The others refute as well, and may be left out."""

_WHAT = {
    "config": "every number of the config that the graph fixes is the graph's",
    "files": "nothing lies here, and no file says anything, by which an engine would load something else",
    "tensors": "every tensor holds the file's codes, or its values, at most rounded once, bit for bit",
    "execution": "graph and checkpoint compute the same, operator by operator, nothing following the other",
    "record": "extraction.json describes what lies here",
}


def drafter_for(opened: Opened, config: DrafterConfig) -> Shard:
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


def check_identity(directory: Path, source: Shard) -> tuple[tuple[Check, ...], bool]:
    """Hold the checkpoint in ``directory`` against the file's drafter.

    Returns:
        The checks, and whether the two are at least of one shape, so that they can be run side by side.

    Raises:
        CheckpointError: the directory holds no configuration that can be read.
        MtpExtractError: the file cannot be read.
    """
    original = checkpoint_of(source)
    format_ = format_of(directory)
    found = require_mtp(format_.read_config(directory))
    config = _config(original, found)
    written: Checkpoint | None = None
    compared: _Compared | None = None
    try:
        written = format_.read(directory)
        # Scales are read when they are asked for, and may turn out to be damaged.
        compared = _tensors(written, original, format_.name)
        tensors = compared.check
        if tensors.passed:
            tensors = _with_codes(directory, written, original, tensors)
    except CheckpointError as error:
        tensors = _check("tensors", False, " ".join(str(error).split()))
    comparable = written is not None and _shape(found) == _shape(source.config)
    execution = _check("execution", None, "not of the shape of the file's drafter")
    if written is not None and compared is not None and comparable:
        execution = _execution(source, written, original, compared)
    checks = (config, _files(directory), tensors, execution)
    return (*checks, _record(directory, source, all(check.passed for check in checks))), comparable


def _check(name: str, passed: bool | None, evidence: str) -> Check:
    return Check(name, _WHAT[name], passed, evidence)


def _shape(config: DrafterConfig) -> object:
    """What decides the shapes of weights and caches."""
    layers = [(layer.layer_type, layer.head_dim, layer.num_kv_heads) for layer in config.layers]
    sizes = (config.backbone_hidden_size, config.hidden_size, config.intermediate_size, config.vocab_size)
    return layers, sizes, config.num_heads, config.ordered_head


def _files(directory: Path) -> Check:
    try:
        found = unexpected_in(directory, REPORT_FILES)
    except MtpExtractError as error:
        return _check("files", False, " ".join(str(error).split()))
    return _check(
        "files",
        not found,
        few(found, separator="; ") or "every file and key is one of the drafter's, or read by nobody",
    )


def _config(original: Checkpoint, found: DrafterConfig) -> Check:
    """By what is read from it, whatever form that has: what it says besides is a matter of the files."""
    expected, here = _meaning(original.mtp), _meaning(found)
    count, wrong = _differences(expected, here)
    wrong += [f"{key}: the graph has none" for key in here if key not in expected]
    if wrong:
        return _check("config", False, few(wrong, separator="; "))
    return _check("config", True, f"{count} values agree")


def _meaning(config: DrafterConfig) -> dict[str, Any]:
    """Every number of ``config`` that a graph fixes, by name."""
    fields = dataclasses.asdict(dataclasses.replace(config, max_position_embeddings=None))
    layers = fields.pop("layers")
    return {**fields, **{f"layers.{index}": layer for index, layer in enumerate(layers)}}


def _differences(expected: Mapping[str, Any], found: Mapping[str, Any], prefix: str = "") -> tuple[int, list[str]]:
    """How many values are in both, and those that differ, with both values."""
    count = 0
    wrong: list[str] = []
    for key, value in expected.items():
        name = f"{prefix}{key}"
        here = found.get(key)
        if isinstance(value, Mapping) and isinstance(here, Mapping):
            inner = _differences(value, here, f"{name}.")
            count, wrong = count + inner[0], wrong + inner[1]
            continue
        count += 1
        if value != here:
            wrong.append(f"{name} is {escape(value)} in the graph, {escape(here)} here")
    return count, wrong


@dataclass(frozen=True)
class _Compared:
    """Every role of a directory, compared with the file's."""

    check: Check  # whether all are the file's
    different: tuple[str, ...]  # roles that are not, in the order of execution
    rounded: frozenset[str]  # roles that are the file's but for one rounding


def _tensors(written: Checkpoint, original: Checkpoint, layout: str) -> _Compared:
    """Compare bit by bit, role by role."""
    wrong: dict[str, str] = {}
    types, steps = Counter[str](), {}
    names = {role.name: f"{role.name} ({role.names.get(layout, role.name)})" for role in shapes_of(written.config)}
    expected_shapes = {role.name: shape for role, shape in shapes_of(original.config).items()}
    # Where there are none at all, none are claimed to be held.
    held = any(any(pair) for pair in written.activations.values())
    # The table of roles is in the order of execution.
    for role in names:
        there = written.tensors[role]
        if role not in expected_shapes or there.shape != expected_shapes[role]:
            wrong[role] = f"is {list(there.shape)}, which the file has not"
            continue
        expected = original.tensors.get(role) or filled(expected_shapes[role])
        compare = _floats_compared if there.scheme is None else _codes_compared
        try:
            found = compare(there, expected)
        except _OtherTensorError as error:
            wrong[role] = str(error)
        else:
            static = _static_scales(original, role) if there.scheme and held else [0, 0]
            if _static_scales(written, role) != static:
                wrong[role] = "has other static scales of activations than the file's"
            elif found:
                steps[role] = found
        types[CODES if there.scheme is not None else _type(there)] += 1
    ordered, rounded = tuple(wrong), frozenset(steps)
    if missing := [name for name in expected_shapes if name not in names]:
        return _Compared(_check("tensors", False, f"the file has more: {', '.join(missing)}"), ordered, rounded)
    if ordered:
        evidence = "; ".join(f"{names[role]} {wrong[role]}" for role in ordered)
        return _Compared(_check("tensors", False, evidence), ordered, rounded)
    return _Compared(_check("tensors", True, _summary(types, steps.values())), (), rounded)


def _static_scales(checkpoint: Checkpoint, role: str) -> list[np.float32]:
    """Of what goes into the matrix of ``role`` and comes out, 0 where there is none, as files hold them."""
    return [np.float32(static_scale(activation)) for activation in checkpoint.activations.get(role, (None, None))]


class _OtherTensorError(Exception):
    """A tensor is not the file's; the message is why, as a clause about it."""


def _codes_compared(there: Weight, expected: Weight) -> tuple[str, ...]:
    """How the scales of ``there`` were rounded.

    Raises:
        _OtherTensorError: codes or scales are not those of ``expected``.
    """
    try:
        original = row_codes(expected)
    except NoCodesError as error:
        raise _OtherTensorError(f"holds codes, and in the file {error}") from error
    try:
        found = row_codes(there)
    except NoCodesError as error:
        raise _OtherTensorError(f"holds codes that are not the file's: {error}") from error
    if not same_codes(original, found):
        raise _OtherTensorError("holds other codes than the file's")
    stored, here = steps_alike(original, found)
    if np.array_equal(stored, here):
        return () if has_exact_steps(expected) else ("F32 scales",)
    with np.errstate(over="ignore"):
        half = stored.astype(np.float16).astype(np.float32)
    if not np.array_equal(half, here):
        raise _OtherTensorError("has other scales than the file's")
    return ("FP16 scales",)


def _floats_compared(there: Weight, expected: Weight) -> tuple[str, ...]:
    """How the numbers of ``there`` were rounded.

    Raises:
        _OtherTensorError: they are not those of ``expected``.
    """
    steps = how_rounded(expected, there)
    if steps is not None:
        return steps
    if stored_of(there) is None:
        raise _OtherTensorError("is missing, and is not 1 in the file")
    if not all(bool(np.isfinite(chunk).all()) for chunk in there.chunks()):
        raise _OtherTensorError("holds numbers that are not finite")
    raise _OtherTensorError("has other values than the file's")


def _type(tensor: Weight) -> str:
    stored = stored_of(tensor)
    return stored.tensor.dtype if stored is not None else ""


def _summary(types: Mapping[str, int], steps: Iterable[Sequence[str]]) -> str:
    """What all tensors are: how many codes, in what the others are, and what was rounded."""
    codes, count = types.get(CODES, 0), sum(types.values())
    floats = " and ".join(sorted(name for name in types if name not in (CODES, "")))
    done = Counter(step for each in steps for step in each)
    # What is stored in a type has been rounded to it.
    told = [
        f"the scales of {n} rounded to {step.removesuffix(SCALES)}"
        if step.endswith(SCALES)
        else f"{n} rounded to {step}"
        for step, n in sorted(done.items())
        if step.replace("FP16", "F16") not in types
    ]
    parts = [f"{count} tensors" + (f" in {floats}" if not codes else "")]
    if codes:
        parts = [f"{codes} of {count} tensors are the file's codes", f"the others in {floats}"]
    return ", ".join([*parts, *told, "every bit"])


def _execution(source: Shard, written: Checkpoint, original: Checkpoint, compared: _Compared) -> Check:
    """Run both. A tensor that is a rounding of the file's, to the bit, counts as the file's; any other as it is."""

    def read(role: str) -> Iterator[Any]:
        there: Weight = written.tensors[role]
        return (original.tensors.get(role, there) if role in compared.rounded else there).chunks()

    try:
        with np.errstate(all="ignore"):
            proof = prove(source.graph, source.walk, written.mtp, read)
    except (ProofError, CheckpointError) as error:
        return _check("execution", False, str(error).split(". ")[0])
    except UnsupportedError as error:
        # The graph is none that a proof can be made of: nothing is shown of the directory.
        return _check("execution", None, str(error).split(". ")[0])
    except (ValueError, ArithmeticError):
        if not compared.different:
            raise
        return _check("execution", None, "its numbers cannot be computed with")
    return _check("execution", True, "; ".join(in_words(proof.as_json())))


def _with_codes(directory: Path, written: Checkpoint, original: Checkpoint, tensors: Check) -> Check:
    """``tensors``, where the codes that are kept with the floats, if there are any, are the file's, too.

    Raises:
        CheckpointError: they are not those of the floats.
    """
    coded = with_codes(directory, written)
    more = {role: there for role, there in coded.tensors.items() if there is not written.tensors[role]}
    try:
        for role, there in more.items():
            _check_codes(there, original.tensors[role])
    except _OtherTensorError as error:
        return _check("tensors", False, f"{CODES_FILE}: {role} {error}")
    told = f"; beside them {len(more)} have the file's codes" if more else ""
    return _check("tensors", True, tensors.evidence + told)


def _check_codes(there: Weight, expected: Weight) -> None:
    """Hold the codes of ``there`` against those of ``expected``.

    Raises:
        _OtherTensorError: they are others.
    """
    original, found = expected.scheme, there.scheme
    if original is None or found is None or expected.steps is None or there.steps is None:
        raise _OtherTensorError("holds codes, and in the file it is stored as floats")
    if original.bits != found.bits:
        raise _OtherTensorError(f"holds codes of {found.bits} bits, and in the file of {original.bits}")
    try:
        row_codes(expected)
    except NoCodesError:
        # Scales that run across the rows.
        same = same_codes(expected, there)
        steps = [(one.block, one.size, one.zero_point, one.factor) for one in (expected.steps, there.steps)]
        if not (same and all(map(np.array_equal, *steps))):
            raise _OtherTensorError("holds other codes than the file's") from None
    else:
        _codes_compared(there, expected)


def _record(directory: Path, source: Shard, sound: bool) -> Check:
    """Of what is ``sound``, made anew; of anything else, held against what lies here."""
    if not (directory / RECORD).exists():
        return _check("record", None, f"there is no {RECORD}")
    try:
        found = verify_against_drafter(directory, source, REPORT_FILES) if sound else verify(directory, REPORT_FILES)
    except MtpExtractError as error:
        return _check("record", False, str(error))
    told = f"{found.files} files and {found.tensors} tensors as recorded"
    return _check("record", True, f"{told}, and the record is the one that the file gives" if sound else told)
