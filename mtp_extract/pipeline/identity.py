"""Is a directory the drafter of a bundle? Asked of its config, its files, its tensors, what both compute, its record.

Everything is derived from the bundle again; nothing that the directory says of itself is believed. Commands that hold a
directory against a bundle (``mtp-inspect --against``, ``mtp-validate --source``) ask here.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mtp_extract.architecture.config import DrafterConfig
from mtp_extract.architecture.roles import shapes_of
from mtp_extract.bundle import Opened, Shard
from mtp_extract.checkpoint import record as records
from mtp_extract.checkpoint.checkpoint import CODES, Checkpoint, require_mtp
from mtp_extract.checkpoint.codes import CODES_FILE, with_codes
from mtp_extract.checkpoint.dtypes import DTYPES
from mtp_extract.checkpoint.rounding import RULES
from mtp_extract.checkpoint.stored import stored_of
from mtp_extract.checkpoint.weight import Weight, filled
from mtp_extract.errors import CheckpointError, MtpExtractError, ProofError, UnsupportedError, escape, few
from mtp_extract.formats import format_of
from mtp_extract.formats.directory import static_scale
from mtp_extract.pipeline.chains import Chain, how_derived, in_words
from mtp_extract.pipeline.check import Check, Verification, verify, with_record
from mtp_extract.pipeline.extraction import checkpoint_of
from mtp_extract.pipeline.staging import RECORD
from mtp_extract.pipeline.unexpected import unexpected_in
from mtp_extract.proof.proof import Proof, prove
from mtp_extract.proof.words import in_words as proof_in_words

NEEDED = ("config", "files", "tensors", "function")
"""The checks without which nothing is proven. The others refute as well, and may be left out."""

_WHAT = {
    "config": "every number of the config that the graph fixes is the graph's",
    "files": "nothing lies here, and no file says anything, by which an engine would load something else",
    "tensors": "every tensor is derived from the file's again, bit for bit, by the steps that are named",
    "function": "every operator of the graph was read as a drafter's, whose numbers are all the checkpoint's",
    "record": "extraction.json describes what lies here, and what it was taken from",
}


def verify_against(directory: Path | str, opened: Opened, allowed: Container[str] = ()) -> Verification:
    """Derive everything in ``directory`` from ``opened`` again and compare it: with its record, if it has one.

    Args:
        allowed: names of files that may be there though the record does not list them: those of a report.

    Raises:
        CheckpointError: something differs; the message says what.
        MtpExtractError: ``opened`` cannot be read.
    """
    folder = with_record(Path(directory))
    opened.prefetch()
    config = require_mtp(format_of(folder).read_config(folder))
    found = check_identity(folder, drafter_for(opened, config), allowed)
    failed = [check for check in found.checks if check.passed is False]
    failed = failed or [check for check in found.checks if check.name in NEEDED and not check.passed]
    if failed:
        wrong = "; ".join(f"{check.name}: {check.evidence}" for check in failed)
        raise CheckpointError(
            f"{escape(folder)}: differs from what {escape(opened.source.name)} holds: {wrong}. It may be of another "
            "bundle, or have been changed since. Extract it again, or fetch it again."
        )
    return found


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


def check_identity(directory: Path, source: Shard, allowed: Container[str] = ()) -> Verification:
    """Hold the checkpoint in ``directory`` against the bundle's drafter; whether it passed, its checks say.

    Raises:
        CheckpointError: the directory holds no configuration that can be read.
        MtpExtractError: the bundle cannot be read.
    """
    original, format_ = checkpoint_of(source), format_of(directory)
    config = require_mtp(format_.read_config(directory))
    written: Checkpoint | None = None
    derived: dict[str, Chain] = {}
    try:
        written = format_.read(directory)
        # Scales are read when they are asked for, and may turn out to be damaged.
        tensors, derived = _tensors(directory, written, original, format_.name)
    except CheckpointError as error:
        tensors = _check("tensors", [_one_line(error)])
    comparable = written is not None and _shape(config) == _shape(source.config)
    function, proof = Check("function", _WHAT["function"], None, "not of the shape of the file's drafter"), None
    if written is not None and comparable:
        function, proof = _function(source, written, original, derived, refuted=not tensors.passed)
    differences = _apart(_meaning(original.mtp), _meaning(config))
    checks = (_check("config", differences, "every number agrees"), _files(directory, allowed), tensors, function)
    record, own = _record(directory, allowed)
    if own and written and proof and all(check.passed for check in checks):
        wrong = [*_contradicted(own.record, source, proof), *_untold(own.record, written, derived)]
        if wrong:
            record, own = _check("record", [f"{RECORD}: {few(wrong, separator='; ')}"]), None
    name, (said, files) = source.opened.source.name, (own.record, own.files) if own else ({}, 0)
    return Verification(directory, said, files, name, (*checks, record), comparable)


def _check(name: str, wrong: Iterable[str], sound: str = "") -> Check:
    """What was checked, and what is ``wrong``; where nothing is, that it is ``sound``."""
    evidence = few(wrong, separator="; ")
    return Check(name, _WHAT[name], not evidence, evidence or sound)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _shape(config: DrafterConfig) -> object:
    """What decides the shapes of weights and caches."""
    layers = [(layer.layer_type, layer.head_dim, layer.num_kv_heads) for layer in config.layers]
    sizes = (config.backbone_hidden_size, config.hidden_size, config.intermediate_size, config.vocab_size)
    return layers, sizes, config.num_heads, config.ordered_head


def _meaning(config: DrafterConfig) -> dict[str, Any]:
    """Every number of ``config`` that a graph fixes, whatever form a configuration has."""
    fields = dataclasses.asdict(dataclasses.replace(config, max_position_embeddings=None))
    return {**fields, "layers": {str(index): layer for index, layer in enumerate(fields["layers"])}}


def _apart(made: Any, said: Any, place: str = "") -> Iterator[str]:
    """Where what is ``said`` in a directory is not what is ``made`` of the bundle."""
    if isinstance(made, dict) and isinstance(said, dict):
        for key in {**made, **said}:
            yield from _apart(made.get(key), said.get(key), f"{place}.{key}" if place else key)
    elif made != said:
        yield f"{escape(place)} is {escape(made)}, not {escape(said)}"


def _files(directory: Path, allowed: Container[str]) -> Check:
    try:
        return _check("files", unexpected_in(directory, allowed), "all are the drafter's, or read by nobody")
    except MtpExtractError as error:
        return _check("files", [_one_line(error)])


def _tensors(directory: Path, written: Checkpoint, original: Checkpoint, layout: str) -> tuple[Check, dict[str, Chain]]:
    """Derive every role from the file's again, and the codes that are kept beside it; by role, what was done to it."""
    shapes = {role.name: shape for role, shape in shapes_of(original.config).items()}
    # Where there are none at all, none are claimed to be held.
    static = any(any(pair) for pair in written.activations.values())
    wrong: list[str] = []
    derived: dict[str, Chain] = {}
    # The table of roles is in the order in which a drafter computes.
    for role in shapes_of(written.config):
        there, why = written.tensors[role.name], ""
        chain = how_derived(original.tensors.get(role.name) or filled(there.shape), there)
        if there.shape != shapes.pop(role.name, None):
            why = f"is {list(there.shape)}, which the file has not"
        elif chain is None:
            why = _other(there)
        else:
            derived[role.name] = chain
            scales = _static_scales(original, role.name) if there.scheme and static else [0, 0]
            if _static_scales(written, role.name) != scales:
                why = "has other static scales of activations than the file's"
        if why:
            wrong.append(f"{role.name} ({role.names.get(layout, role.name)}) {why}")
    if shapes:
        wrong = [f"the file has more: {', '.join(shapes)}"]
    if wrong:
        return _check("tensors", [few(wrong, most=2, separator="; ")]), derived
    coded = with_codes(directory, written).tensors
    beside = {name: weight for name, weight in coded.items() if weight is not written.tensors[name]}
    for name, there in beside.items():
        own = original.tensors[name]
        chain = how_derived(own, there)
        if chain is None or (not chain and (own.scheme and own.scheme.bits) != (there.scheme and there.scheme.bits)):
            return _check("tensors", [f"{CODES_FILE}: {name} {_other(there)}"]), derived
    kept = f"; beside them {len(beside)} have the file's codes" if beside else ""
    return _check("tensors", (), _summary(written, derived) + kept), derived


def _other(there: Weight) -> str:
    """What ``there`` is that no chain makes of the file's, as a clause about it."""
    if there.scheme is not None:
        return "holds other codes or scales than the file's"
    if stored_of(there) is None:
        return "is missing, and is not 1 in the file"
    if not all(bool(np.isfinite(chunk).all()) for chunk in there.chunks()):
        return "holds numbers that are not finite"
    return "has other values than the file's"


def _static_scales(checkpoint: Checkpoint, role: str) -> list[np.float32]:
    """Of what goes into the matrix of ``role`` and comes out, 0 where there is none, as files hold them."""
    return [np.float32(static_scale(activation)) for activation in checkpoint.activations.get(role, (None, None))]


def _summary(written: Checkpoint, derived: Mapping[str, Chain]) -> str:
    """What all tensors are: how many codes, in what the others are, and what was done to them."""
    made, done, types = Counter[str](), Counter[Chain](), set[str]()
    for role, chain in derived.items():
        stored = stored_of(written.tensors[role])
        if written.tensors[role].scheme is not None:
            made[next((step for step in chain if step in RULES), "")] += 1
        elif stored is not None:
            types.add(stored.tensor.dtype)
        # What is stored in a type has been rounded to it.
        told = bool(chain) and stored is not None and chain[-1].replace("FP16", "F16") in types
        done[chain[:-1] if told else chain] += 1
    floats, count = " and ".join(sorted(types)), len(derived)
    codes = made.pop("", 0)
    parts = [f"{codes} of {count} tensors are the file's codes"] if codes else []
    parts += [
        f"{n} of {count} tensors are integers that {rule} makes of the file's numbers" for rule, n in made.items()
    ]
    parts = [*parts, f"the others in {floats}"] if parts else [f"{count} tensors in {floats}"]
    parts += [f"{n} rounded {in_words(chain)}" for chain, n in sorted(done.items()) if chain]
    return ", ".join([*parts, "every bit"])


def _function(
    source: Shard, written: Checkpoint, original: Checkpoint, derived: Mapping[str, Chain], refuted: bool
) -> tuple[Check, Proof | None]:
    """Read the graph beside the checkpoint; ``refuted``: whether a tensor is none of the file's.

    A tensor that was derived from the file's, to the bit, counts as the file's; any other as it is.
    """

    def read(role: str) -> Weight:
        there: Weight = written.tensors[role]
        return original.tensors.get(role, there) if derived.get(role) else there

    try:
        with np.errstate(all="ignore"):
            proof = prove(source.graph, source.walk, written.mtp, read)
    except (ProofError, CheckpointError) as error:
        return _check("function", [str(error).split(". ")[0]]), None
    except UnsupportedError as error:
        # The graph is none that a proof can be made of: nothing is shown of the directory.
        return Check("function", _WHAT["function"], None, str(error).split(". ")[0]), None
    except (ValueError, ArithmeticError):
        if not refuted:
            raise
        return Check("function", _WHAT["function"], None, "its numbers cannot be computed with"), None
    return _check("function", (), "; ".join(proof_in_words(proof.as_json()))), proof


def _record(directory: Path, allowed: Container[str]) -> tuple[Check, Verification | None]:
    """Hold the record against the files."""
    if not (directory / RECORD).exists():
        return Check("record", _WHAT["record"], None, f"there is no {RECORD}"), None
    try:
        found = verify(directory, allowed)
    except MtpExtractError as error:
        return _check("record", [str(error)]), None
    return _check("record", (), f"{found.files} files as recorded"), found


def _contradicted(record: Mapping[str, Any], source: Shard, proof: Proof) -> Iterator[str]:
    """What ``record`` says of a sound directory's bundle, and the bundle does not.

    What the file was called and where it lay, which directories there were in between, which release wrote them, and
    the card are no matter of the bundle.
    """
    for key in ("tuning", "ordered_head"):
        if key in record:
            yield f"{key} says that the weights were changed, and they are the file's"
    if record["source"]["kind"] == records.CHECKPOINT:
        return
    made = records.of_bundle(source, checkpoint_of(source), records.sha256_of_section(source))
    made["source"] |= {key: record["source"][key] for key in ("name", "provenance")}
    made["counts"]["held"] = record["counts"]["held"]
    if record["proof"] is not None:
        made["proof"] = {**proof.as_json(), "inherited": record["proof"]["inherited"]}
    yield from _apart(json.loads(json.dumps(made)), {key: record[key] for key in made})


def _untold(record: Mapping[str, Any], written: Checkpoint, derived: Mapping[str, Chain]) -> Iterator[str]:
    """What was done to the weights of a sound directory, or how they are held, and ``record`` does not say."""
    told = {word for step in (*record["converted_from"], record) for word in step["rounded"]}
    told |= {step["made_codes"]["rule"] for step in (*record["converted_from"], record) if step["made_codes"]}
    done = {step for chain in derived.values() for step in chain}
    # A directory of unknown origin came with what had been done to it.
    if record["source"]["kind"] != records.CHECKPOINT and (untold := sorted(done - told)):
        yield f"does not say that weights were rounded ({', '.join(untold)})"
    tensors = written.tensors.values()
    held = {CODES for tensor in tensors if tensor.scheme is not None}
    held |= {stored.tensor.dtype for stored in map(stored_of, tensors) if stored is not None}
    if held != record["counts"]["held"].keys():
        yield f"counts.held is of {', '.join(sorted(held))}, not {escape(', '.join(record['counts']['held']))}"
    if record["dtype"] != CODES and DTYPES[record["dtype"]].safetensors not in held:
        yield f"dtype is {escape(record['dtype'])}, and no weight is held so"
