"""Is a directory the drafter of a bundle? Asked of its config, its files, its tensors, what both compute, its record.

Everything is derived from the bundle again; nothing that the directory says of itself is believed. Commands that hold a
directory against a bundle (``mtp-inspect --against``, ``mtp-validate --source``) ask here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from mtp_extract._version import __version__
from mtp_extract.architecture.config import DrafterConfig
from mtp_extract.architecture.roles import shapes_of
from mtp_extract.bundle import Opened, Shard
from mtp_extract.checkpoint.checkpoint import CODES, Checkpoint
from mtp_extract.checkpoint.codes import CODES_FILE, with_codes
from mtp_extract.checkpoint.record import CHECKPOINT, of_bundle
from mtp_extract.checkpoint.rounding import RULES
from mtp_extract.checkpoint.stored import Stored
from mtp_extract.checkpoint.weight import Weight, filled, row_ranges
from mtp_extract.errors import CheckpointError, ProofError, UnsupportedError, escape, few
from mtp_extract.formats import format_of, read_checkpoint
from mtp_extract.formats.directory import static_scale
from mtp_extract.graph.roles import Activation
from mtp_extract.pipeline.chains import Chain, how_derived, in_words
from mtp_extract.pipeline.check import AGAIN, RECORD, Check, changed_files, read_record, unexpected_in, with_record
from mtp_extract.pipeline.extraction import checkpoint_of, prove_checkpoint
from mtp_extract.proof.proof import in_words as proof_in_words
from mtp_extract.report.card import roundings

NEEDED = ("config", "files", "tensors", "function")
"""The checks without which nothing is proven. The record refutes as well, and may be missing."""

_WHAT = {
    "config": "config.json agrees with the graph",
    "files": "no file and no key makes an engine load something else",
    "tensors": "every tensor equals what the bundle gives, bit for bit, after the named steps",
    "function": "every operator of the graph is a drafter's, and its numbers are the checkpoint's",
    "record": "extraction.json agrees with the files and the bundle",
}


def verify_against(directory: Path | str, opened: Opened) -> list[Check]:
    """Derive everything in ``directory`` from ``opened`` again and compare it: with its record, if it has one.

    Raises:
        CheckpointError: something differs; the message says what.
        MtpExtractError: ``opened`` cannot be read.
    """
    folder = with_record(Path(directory))
    opened.prefetch()
    found = check_identity(folder, drafter_for(opened, read_checkpoint(folder).mtp))
    failed = [check for check in found if check.passed is False]
    failed = failed or [check for check in found if check.name in NEEDED and not check.passed]
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


def check_identity(directory: Path, source: Shard) -> list[Check]:
    """Hold the checkpoint in ``directory`` against the bundle's drafter; whether it passed, the checks say.

    Tensors are derived only where the config agrees, and the graph is proven only where they are the file's.

    Raises:
        CheckpointError: the directory holds no checkpoint that can be read.
        MtpExtractError: the bundle cannot be read.
    """
    original, format_ = checkpoint_of(source), format_of(directory)
    written, chains = format_.read(directory), dict[str, Chain]()
    numbers, said = (asdict(replace(one.mtp, max_position_embeddings=None)) for one in (original, written))
    config = _check("config", _apart(numbers, said), ["every number agrees"])
    files = _check("files", unexpected_in(directory), ["nothing that would make an engine load something else"])
    wrong = _differing(directory, written, original, format_.name, chains) if config.passed else None
    tensors = _check("tensors", wrong, _summary(written, chains) if config.passed else ["not of the file's config"])
    proven, refuted, unproven = list[str](), None, "not of the file's config and tensors"
    if tensors.passed:
        try:
            refuted, proven = [], proof_in_words(prove_checkpoint(source, original))
        except ProofError as error:
            refuted = [str(error).split(". ")[0]]
        except UnsupportedError as error:
            # The graph is none that a proof can be made of: nothing is shown of the directory.
            unproven = str(error).split(". ")[0]
    function = _check("function", refuted, proven or [unproven])
    if (directory / RECORD).exists():
        wrong = _contradicted(directory, written, source, original, chains, proven)
        record = _check("record", wrong, ["every file is as recorded"])
    else:
        record = _check("record", None, [f"there is no {RECORD}"])
    return [config, files, tensors, function, record]


def _check(name: str, wrong: Iterable[str] | None, otherwise: Iterable[str]) -> Check:
    """What was checked, and what is ``wrong``: None where it was not; ``otherwise`` says why, or what it shows."""
    if wrong is None:
        return Check(name, _WHAT[name], None, "; ".join(otherwise))
    try:
        evidence = few(wrong, separator="; ")
    except CheckpointError as error:
        # What is damaged shows where it is read.
        evidence = " ".join(str(error).split())
    return Check(name, _WHAT[name], not evidence, evidence or "; ".join(otherwise))


def _apart(made: Any, said: Any, place: str = "") -> Iterator[str]:
    """Where what is ``said`` in a directory is not what is ``made`` of the bundle."""
    if isinstance(made, (list, tuple)) and isinstance(said, (list, tuple)):
        made, said = ({str(index): value for index, value in enumerate(one)} for one in (made, said))
    if isinstance(made, dict) and isinstance(said, dict):
        for key in {**made, **said}:
            yield from _apart(made.get(key), said.get(key), f"{place}.{key}" if place else key)
    elif made != said:
        yield f"{escape(place)} is {escape(made)}, not {escape(said)}"


def _differing(
    directory: Path, written: Checkpoint, original: Checkpoint, layout: str, chains: dict[str, Chain]
) -> Iterator[str]:
    """The first tensor that is not derived from the file's; what was done to the others is put into ``chains``.

    Raises:
        CheckpointError: scales, or codes that are kept beside it, are damaged.
    """
    # Where there are no static scales at all, none are claimed to be held.
    static = any(any(pair) for pair in written.activations.values())
    # The table of roles is in the order in which a drafter computes.
    for role, shape in shapes_of(written.config).items():
        there, name = written.tensors[role.name], f"{role.name} ({role.names.get(layout, role.name)})"
        chain = how_derived(original.tensors.get(role.name) or filled(shape), there)
        if chain is None:
            yield f"{name} {_other(there)}"
            return
        scales, own = (_static_scales(one.activations.get(role.name)) for one in (written, original))
        if static and there.scheme and scales != own:
            yield f"{name} has other static scales of activations than the file's"
            return
        chains[role.name] = chain
    for role_name, there in with_codes(directory, written.tensors).items():
        if there is not written.tensors[role_name]:
            chain, own_bits = how_derived(original.tensors[role_name], there), original.tensors[role_name].bits
            if chain is None or (not chain and own_bits != there.bits):
                yield f"{CODES_FILE}: {role_name} {_other(there)}"
            else:
                chains[f"{CODES_FILE}: {role_name}"] = chain


def _static_scales(pair: tuple[Activation | None, Activation | None] | None) -> list[np.float32]:
    """Of what goes into a matrix and comes out, 0 where there is none, as files hold them."""
    return [np.float32(static_scale(activation)) for activation in pair or (None, None)]


def _other(there: Weight) -> str:
    """What ``there`` is that no chain makes of the file's, as a clause about it."""
    if there.scheme is not None:
        return "holds other codes or scales than the file's"
    if not isinstance(there, Stored):
        return "is missing, and is not 1 in the file"
    if not all(bool(np.isfinite(there.floats(*rows)).all()) for rows in row_ranges(there)):
        return "holds numbers that are not finite"
    return "has other values than the file's"


def _summary(written: Checkpoint, chains: Mapping[str, Chain]) -> Iterator[str]:
    """How many tensors are the file's codes, codes that a rule made, or floats; and what was done to them."""
    kinds = Counter[tuple[str, Chain]]()
    for role, there in written.tensors.items():
        if (chain := chains.get(role)) is None:
            continue
        held = there.tensor.dtype if isinstance(there, Stored) else "no file, as they are 1"
        if there.scheme is not None:
            held = "codes" if any(step in RULES for step in chain) else "the file's codes"
        # What is stored in a type has been rounded to it.
        stored = chain and isinstance(there, Stored) and chain[-1].replace("FP16", "F16") == held
        kinds[held, chain[:-1] if stored else chain] += 1
    yield f"all {kinds.total()} are derived from the file's, every bit"
    for (held, chain), count in sorted(kinds.items()):
        yield f"{count} in {held}" + (f", rounded {in_words(chain)}" if chain else "")
    if beside := len(chains) - kinds.total():
        yield f"beside them {beside} have the file's codes"


def _contradicted(
    directory: Path,
    written: Checkpoint,
    source: Shard,
    original: Checkpoint,
    chains: Mapping[str, Chain],
    proven: list[str],
) -> Iterator[str]:
    """What the record says of a directory that is the bundle's drafter, and the bundle and the weights do not.

    What the file was called and where it lay, which directories there were in between, which release wrote them, and
    the card are no matter of the bundle. Of a directory that is not ``proven``, its files alone are compared.

    Raises:
        CheckpointError: the record is none that this release reads.
    """
    record = read_record(directory)
    yield from changed_files(directory, record)
    if not proven:
        return
    for key in ("tuning", "ordered_head"):
        if key in record:
            yield f"{key} says that the weights were changed, and they are the file's"
    done = {step for chain in chains.values() for step in chain}
    if record["source"]["kind"] != CHECKPOINT:
        made = {**of_bundle(source, original), "geometry": original.mtp.as_json()}
        made["source"] |= {key: record["source"][key] for key in ("name", "provenance")}
        made["geometry"]["max_position_embeddings"] = record["geometry"].get("max_position_embeddings")
        # Another release may say the same in other words.
        if record["proof"] is not None and record["tool"]["version"] == __version__:
            made["proof"] = proven
        yield from _apart(made, {key: record[key] for key in made})
        # A directory of unknown origin came with what had been done to it.
        if untold := sorted(done - {*roundings(*record["converted_from"], record)}):
            yield f"does not say that weights were rounded ({', '.join(untold)})"
    if record["rule"] and record["rule"] not in done:
        yield f"says that codes were made by {record['rule']}, and none were"
    if record["dtype"] not in (CODES, written.dtype):
        yield f"dtype is {escape(record['dtype'])}, and no weight is held so"
