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
from mtp_extract.checkpoint.checkpoint import CODES, Checkpoint
from mtp_extract.checkpoint.codes import CODES_FILE, with_codes
from mtp_extract.checkpoint.dtypes import DTYPES
from mtp_extract.checkpoint.rounding import RULES
from mtp_extract.checkpoint.stored import Stored
from mtp_extract.checkpoint.weight import Weight, filled, row_ranges
from mtp_extract.errors import CheckpointError, MtpExtractError, ProofError, UnsupportedError, escape, few
from mtp_extract.formats import format_of, read_checkpoint
from mtp_extract.formats.directory import static_scale
from mtp_extract.pipeline.chains import Chain, how_derived, in_words
from mtp_extract.pipeline.check import AGAIN, RECORD, Check, Verification, unexpected_in, verify, with_record
from mtp_extract.pipeline.extraction import checkpoint_of
from mtp_extract.proof.proof import Proof, prove
from mtp_extract.proof.proof import in_words as proof_in_words

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
    found = check_identity(folder, drafter_for(opened, read_checkpoint(folder).mtp), allowed)
    failed = [check for check in found.checks if check.passed is False]
    failed = failed or [check for check in found.checks if check.name in NEEDED and not check.passed]
    if failed:
        wrong = "; ".join(f"{check.name}: {check.evidence.removesuffix(f'. {AGAIN}')}" for check in failed)
        raise CheckpointError(
            f"{escape(folder)}: differs from what {escape(opened.source.name)} holds: {wrong}. It may be of another "
            f"bundle, or have been changed since. {AGAIN}"
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
        CheckpointError: the directory holds no checkpoint that can be read.
        MtpExtractError: the bundle cannot be read.
    """
    original, format_ = checkpoint_of(source), format_of(directory)
    written = format_.read(directory)
    differences = _apart(_meaning(original.mtp), _meaning(written.mtp))
    config = _check("config", differences, "every number agrees")
    try:
        files = _check("files", unexpected_in(directory, allowed), "all are the drafter's, or read by nobody")
    except MtpExtractError as error:
        files = _check("files", [_one_line(error)])
    derived: dict[str, Chain] = {}
    try:
        # Scales are read when they are asked for, and may turn out to be damaged.
        tensors = _tensors(directory, written, original, format_.name, derived)
    except CheckpointError as error:
        tensors = _check("tensors", [_one_line(error)])
    function, proof = Check("function", _WHAT["function"], None, "not of the shape of the file's drafter"), None
    if _shape(written.mtp) == _shape(original.mtp):
        function, proof = _function(source, written, original, derived, refuted=not tensors.passed)
    checks, own = (config, files, tensors, function), None
    if not (directory / RECORD).exists():
        record = Check("record", _WHAT["record"], None, f"there is no {RECORD}")
    else:
        try:
            own = verify(directory, allowed)
            record = _check("record", (), f"{own.files} files as recorded")
        except MtpExtractError as error:
            record = _check("record", [str(error)])
    wrong = list[str]()
    if own is not None and proof is not None and all(check.passed for check in checks):
        wrong = [*_contradicted(own.record, source, original, proof), *_untold(own.record, written, derived)]
    if wrong:
        record, own = _check("record", [f"{RECORD}: {few(wrong, separator='; ')}"]), None
    name, (said, count) = source.opened.source.name, (own.record, own.files) if own is not None else ({}, 0)
    return Verification(directory, said, count, name, (*checks, record))


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


def _tensors(
    directory: Path, written: Checkpoint, original: Checkpoint, layout: str, derived: dict[str, Chain]
) -> Check:
    """Derive every role from the file's again; what was done to it is put into ``derived``, by role.

    Raises:
        CheckpointError: the codes that are kept beside it are damaged.
    """
    shapes = {role.name: shape for role, shape in shapes_of(original.config).items()}
    # Where there are none at all, none are claimed to be held.
    static = any(any(pair) for pair in written.activations.values())
    wrong: list[str] = []
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
        return _check("tensors", [few(wrong, most=2, separator="; ")])
    coded = with_codes(directory, written).tensors
    beside = {name: weight for name, weight in coded.items() if weight is not written.tensors[name]}
    for name, there in beside.items():
        chain, own = how_derived(original.tensors[name], there), original.tensors[name].bits
        if chain is None or (not chain and own != there.bits):
            return _check("tensors", [f"{CODES_FILE}: {name} {_other(there)}"])
    kept = f"; beside them {len(beside)} have the file's codes" if beside else ""
    return _check("tensors", (), _summary(written, derived) + kept)


def _other(there: Weight) -> str:
    """What ``there`` is that no chain makes of the file's, as a clause about it."""
    if there.scheme is not None:
        return "holds other codes or scales than the file's"
    if not isinstance(there, Stored):
        return "is missing, and is not 1 in the file"
    if not all(bool(np.isfinite(there.floats(*rows)).all()) for rows in row_ranges(there)):
        return "holds numbers that are not finite"
    return "has other values than the file's"


def _static_scales(checkpoint: Checkpoint, role: str) -> list[np.float32]:
    """Of what goes into the matrix of ``role`` and comes out, 0 where there is none, as files hold them."""
    return [np.float32(static_scale(activation)) for activation in checkpoint.activations.get(role, (None, None))]


def _summary(written: Checkpoint, derived: Mapping[str, Chain]) -> str:
    """What all tensors are: how many codes, in what the others are, and what was done to them."""
    made, done, types = Counter[str](), Counter[Chain](), set[str]()
    for role, chain in derived.items():
        there = written.tensors[role]
        if there.scheme is not None:
            made[next((step for step in chain if step in RULES), "")] += 1
        elif isinstance(there, Stored):
            types.add(there.tensor.dtype)
        # What is stored in a type has been rounded to it.
        told = bool(chain) and isinstance(there, Stored) and chain[-1].replace("FP16", "F16") in types
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

    def undecided(why: str) -> tuple[Check, None]:
        return Check("function", _WHAT["function"], None, why), None

    try:
        with np.errstate(all="ignore"):
            proof = prove(source.graph, source.walk, written.mtp, read)
    except (ProofError, CheckpointError) as error:
        return _check("function", [str(error).split(". ")[0]]), None
    except UnsupportedError as error:
        # The graph is none that a proof can be made of: nothing is shown of the directory.
        return undecided(str(error).split(". ")[0])
    except (ValueError, ArithmeticError):
        if not refuted:
            raise
        return undecided("its numbers cannot be computed with")
    return _check("function", (), "; ".join(proof_in_words(proof))), proof


def _contradicted(record: Mapping[str, Any], source: Shard, original: Checkpoint, proof: Proof) -> Iterator[str]:
    """What ``record`` says of a sound directory's bundle, and the bundle does not.

    What the file was called and where it lay, which directories there were in between, which release wrote them, and
    the card are no matter of the bundle.
    """
    for key in ("tuning", "ordered_head"):
        if key in record:
            yield f"{key} says that the weights were changed, and they are the file's"
    if record["source"]["kind"] == records.CHECKPOINT:
        return
    made = records.of_bundle(source, original)
    made["source"] |= {key: record["source"][key] for key in ("name", "provenance")}
    if record["proof"] is not None:
        made["proof"] = records.proof_record(proof, inherited=record["proof"]["inherited"])
    yield from _apart(json.loads(json.dumps(made)), {key: record[key] for key in made})


def _untold(record: Mapping[str, Any], written: Checkpoint, derived: Mapping[str, Chain]) -> Iterator[str]:
    """What was done to the weights of a sound directory, or how they are held, and ``record`` does not say."""
    steps = (*record["converted_from"], record)
    told = {word for step in steps for word in step["rounded"]}
    told |= {step["made_codes"]["rule"] for step in steps if step["made_codes"]}
    done = {step for chain in derived.values() for step in chain}
    # A directory of unknown origin came with what had been done to it.
    if record["source"]["kind"] != records.CHECKPOINT and (untold := sorted(done - told)):
        yield f"does not say that weights were rounded ({', '.join(untold)})"
    types = {weight.tensor.dtype for weight in written.tensors.values() if isinstance(weight, Stored)}
    if record["dtype"] != CODES and DTYPES[record["dtype"]].safetensors not in types:
        yield f"dtype is {escape(record['dtype'])}, and no weight is held so"
