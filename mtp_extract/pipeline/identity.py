"""Is a directory the drafter of a bundle? Asked of its config, its files, its tensors, what both compute, its record.

Everything is derived from the bundle again; nothing that the directory says of itself is believed. Commands that hold a
directory against a bundle (``mtp-inspect --against``, ``mtp-validate --source``) ask here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, replace
from itertools import permutations, product
from pathlib import Path
from typing import Any

import numpy as np

from mtp_extract._version import __version__
from mtp_extract.architecture import shapes_of
from mtp_extract.architecture.config import DrafterConfig
from mtp_extract.bundle import Opened, Shard
from mtp_extract.checkpoint.checkpoint import CODES, Checkpoint
from mtp_extract.checkpoint.codes import CODES_FILE, with_codes
from mtp_extract.checkpoint.documents import differences
from mtp_extract.checkpoint.dtypes import ROUNDED_TO
from mtp_extract.checkpoint.record import CHECKPOINT, of_bundle
from mtp_extract.checkpoint.rounding import RULES, SCALES, rounded_again
from mtp_extract.checkpoint.stored import Stored
from mtp_extract.checkpoint.weight import ROW_STEP, Weight, constant_weight, has_exact_steps, same_weight
from mtp_extract.errors import CheckpointError, ProofError, RoleError, UnsupportedError, escape, few
from mtp_extract.formats import format_named, format_of
from mtp_extract.formats.directory import static_scale
from mtp_extract.pipeline.check import AGAIN, RECORD, Check, ReadDirectory, changed_files, read_record, unexpected_in
from mtp_extract.pipeline.extraction import checkpoint_of, prove_checkpoint, prove_drafter, require_complete
from mtp_extract.pipeline.unproven import read_unproven
from mtp_extract.proof.proof import in_words
from mtp_extract.report.card import roundings

Chain = tuple[str, ...]
"""What was done to a weight, step by step, as :func:`~mtp_extract.checkpoint.rounding.rounded_again` takes it."""

_EXACT_SCALES = f"F32{SCALES}"
_FLOATS = [word for word in ROUNDED_TO if word]

# Of scales, then of numbers: each at most once, or numbers to both short types.
_ROUNDINGS: list[Chain] = [
    *(tuple(filter(None, words)) for words in product(("", f"FP16{SCALES}", _EXACT_SCALES), ("", *_FLOATS))),
    *permutations(_FLOATS, 2),
]
CHAINS: Sequence[Chain] = sorted(
    [*_ROUNDINGS, *((*before, rule, *after) for before, rule, after in product(_ROUNDINGS, RULES, _ROUNDINGS))], key=len
)
"""Every chain that is tried, the shortest first."""


def how_derived(original: Weight, written: Weight) -> Chain | None:
    """The shortest chain that makes ``written`` of ``original``, to the bit; None where none does.

    Of a weight with codes, the codes and their scales are compared; of any other the numbers.
    """
    if original.shape != written.shape:
        return None
    # The first rows of a matrix alone refute almost every chain.
    pairs = [(_first_rows(original), _first_rows(written)), (original, written)]
    for chain in CHAINS:
        if all(_gives(before, chain, other) for before, other in pairs):
            # Scales that a factor was divided out of were rounded to F32, unless the factor is kept beside them.
            folded = written.scheme is not None and not has_exact_steps(original) and has_exact_steps(written)
            return chain or ((_EXACT_SCALES,) if folded else ())
    return None


def _gives(original: Weight, chain: Chain, written: Weight) -> bool:
    try:
        with np.errstate(all="ignore"):
            return same_weight(rounded_again(original, chain), written)
    except (CheckpointError, UnsupportedError):
        # It admits of no such step: it has no codes, or numbers beyond FP16.
        return False


def _first_rows(weight: Weight) -> Weight:
    """The first rows of a matrix, as a weight."""
    if len(weight.shape) != 2:
        return weight
    shape = min(weight.rows, ROW_STEP), weight.columns
    if weight.scheme is None:
        return Weight(shape, weight.floats)
    steps, rows = weight.steps, slice(ROW_STEP)
    first = replace(steps, size=steps.size[rows], zero_point=steps.zero_point[rows])
    return Weight(shape, weight.codes, weight.scheme, first)


def _in_words(chain: Chain) -> str:
    """What was done to a weight, in words."""
    rules = {rule: f"integers by {rule}" for rule in RULES}
    return ", then ".join("to " + rules.get(step, step.replace(SCALES, " in their scales")) for step in chain)


NEEDED = ("config", "files", "tensors", "function")
"""The checks without which nothing is proven. The record refutes as well, and may be missing."""

_WHAT = {
    "config": "config.json agrees with the graph",
    "files": "no file and no key makes an engine load something else",
    "tensors": "every tensor equals what the bundle gives, bit for bit, after the named steps",
    "function": "every operator of the graph is a drafter's, and its numbers are the checkpoint's",
    "record": "extraction.json agrees with the files and the bundle",
}


def verify_against(read: ReadDirectory, opened: Opened) -> list[Check]:
    """Derive everything that was ``read`` from ``opened`` again and compare it: with its record, if it has one.

    Raises:
        CheckpointError: something differs; the message says what.
        MtpExtractError: ``opened`` cannot be read.
    """
    opened.prefetch()
    checks = check_identity(read.directory, drafter_for(opened, read.written.mtp), read)
    left_open = "function" if read.record.get("not_proven") else None
    unproven = [check for check in checks if check.name in NEEDED and not check.passed and check.name != left_open]
    if failed := [check for check in checks if check.passed is False] or unproven:
        wrong = "; ".join(f"{check.name}: {check.evidence.removesuffix(f'. {AGAIN}')}" for check in failed)
        raise CheckpointError(
            f"{escape(read.directory)}: differs from what {escape(opened.source.name)} holds: {wrong}. It may be of "
            f"another bundle, or have been changed since. {AGAIN}"
        )
    return checks


def drafter_for(opened: Opened, config: DrafterConfig) -> Shard:
    """The drafter of ``opened``: where its graph leaves the window to the runtime, with that of ``config``; where it
    cannot be proven, what can be read of it.

    Raises:
        MtpExtractError: as :meth:`~mtp_extract.bundle.Opened.drafter`.
    """
    try:
        return opened.drafter()
    except (RoleError, UnsupportedError):
        try:
            return opened.drafter(config.sliding_window)
        except (RoleError, UnsupportedError):
            # What can be compared is compared; that it is no proof, its check says.
            return read_unproven(opened, config.sliding_window, prove_drafter)[0]


def check_identity(directory: Path, source: Shard, read: ReadDirectory | None = None) -> list[Check]:
    """Hold the checkpoint in ``directory`` against the bundle's drafter; whether it passed, the checks say.

    Tensors are derived only where the config agrees, and the graph is proven only where they are the file's.

    Args:
        read: what was read there; then its files have been held against its record.

    Raises:
        CheckpointError: the directory holds no checkpoint that can be read.
        MtpExtractError: the bundle cannot be read.
    """
    require_complete(source)
    original, chains = checkpoint_of(source), dict[str, Chain]()
    format_ = format_named(read.layout) if read else format_of(directory)
    written = read.written if read else format_.read(directory)
    numbers, stated = (
        asdict(replace(checkpoint.mtp, max_position_embeddings=None)) for checkpoint in (original, written)
    )
    config = _check("config", _apart(numbers, stated), ["every number agrees"])
    unread = read.checkpoint.unread if read else (*written.unread, *unexpected_in(directory, format_))
    files = _check("files", unread, ["nothing that would make an engine load something else"])
    wrong = _differing(directory, written, original, format_.name, chains) if config.passed else None
    tensors = _check("tensors", wrong, _summary(written, chains) if config.passed else ["not of the file's config"])
    proven = list[str]()
    refuted = list[str]()
    why = "not of the file's config and tensors"
    if tensors.passed and source.not_proven:
        why = f"not proven: {'; '.join(source.not_proven)}"
    elif tensors.passed:
        try:
            proven = in_words(prove_checkpoint(source, original))
        except (ProofError, UnsupportedError) as error:
            why = str(error).split(". ")[0]
            # Of a graph that no proof can be made of, nothing is shown.
            refuted = [why] if isinstance(error, ProofError) else []
    function = _check("function", refuted if proven or refuted else None, proven or [why])
    record = _check("record", None, [f"there is no {RECORD}"])
    if (directory / RECORD).exists():
        of_file, evidence = of_bundle(source, original), ["every file is as recorded"]
        wrong = _contradicted(directory, read, of_file, written, original, chains, proven, source.not_proven, evidence)
        record = _check("record", wrong, evidence)
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


def _apart(derived: Mapping[str, Any], stated: Mapping[str, Any]) -> Iterator[str]:
    """Where what a directory has ``stated`` differs from what was ``derived`` from the bundle."""
    for place, expected, actual in map(astuple, differences(derived, stated)):
        yield f"{escape(place)} is {escape(expected)}, not {escape(actual)}"


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
        chain = how_derived(original.tensors.get(role.name) or constant_weight(shape), there)
        if chain is None:
            yield f"{name} has other {'values' if there.scheme is None else 'codes or scales'} than the file's"
            return
        # As files hold them, 0 where there is none: of what goes in, and of what comes out.
        pairs = (checkpoint.activations.get(role.name, (None, None)) for checkpoint in (written, original))
        scales, scales_of_file = ([np.float32(static_scale(side)) for side in pair] for pair in pairs)
        if static and there.scheme and scales != scales_of_file:
            yield f"{name} has other static scales of activations than the file's"
            return
        chains[role.name] = chain
    for role_name, there in with_codes(directory, written.tensors).items():
        if there is not written.tensors[role_name]:
            chain, own_bits = how_derived(original.tensors[role_name], there), original.tensors[role_name].bits
            if chain is None or (not chain and own_bits != there.bits):
                yield f"{CODES_FILE}: {role_name} has other codes or scales than the file's"
            else:
                chains[f"{CODES_FILE}: {role_name}"] = chain


def _summary(written: Checkpoint, chains: Mapping[str, Chain]) -> Iterator[str]:
    """How many tensors are the file's codes, codes that a rule made, or floats; and what was done to them."""
    kinds = Counter[tuple[str, Chain]]()
    for role, there in written.tensors.items():
        if (chain := chains.get(role)) is None:
            continue
        coded = "codes" if any(step in RULES for step in chain) else "the file's codes"
        stored_as = (
            there.tensor.dtype if isinstance(there, Stored) else coded if there.scheme else "no file, as they are 1"
        )
        # What is stored in a type has been rounded to it.
        stored = chain and isinstance(there, Stored) and chain[-1].replace("FP16", "F16") == stored_as
        kinds[stored_as, chain[:-1] if stored else chain] += 1
    yield f"all {kinds.total()} are derived from the file's, every bit"
    for (stored_as, chain), count in sorted(kinds.items()):
        yield f"{count} in {stored_as}" + (f", rounded {_in_words(chain)}" if chain else "")
    if beside := len(chains) - kinds.total():
        yield f"beside them {beside} have the file's codes"


def _contradicted(
    directory: Path,
    read: ReadDirectory | None,
    of_file: Mapping[str, Any],
    written: Checkpoint,
    original: Checkpoint,
    chains: Mapping[str, Chain],
    proven: list[str],
    not_proven: Sequence[str],
    evidence: list[str],
) -> Iterator[str]:
    """What the record says of a directory that is the bundle's drafter, and the bundle and the weights do not.

    Its past is no matter of the bundle: which file it came from and where that lay, which directories there were in
    between, whether it was tuned, which release wrote it, and the card. What was found in the section that it came
    from is compared where the bundle holds that section. Of a directory that is not ``proven``, its files alone are
    compared; of one that was ``read``, they have been.

    Args:
        of_file: what a record of the bundle would say of it.
        evidence: is added to where the record names another file as its origin.
    """
    record = read_record(directory)
    if read is None:
        yield from changed_files(directory, record).values()
    if not proven and not not_proven:
        return
    done = {step for chain in chains.values() for step in chain}
    stated: dict[str, Any] = {"dtype": CODES if record["dtype"] == CODES else written.dtype}
    # A directory of unknown origin came with what had been done to it.
    if record["source"]["kind"] != CHECKPOINT:
        geometry = original.mtp.as_json()
        geometry["max_position_embeddings"] = record["geometry"].get("max_position_embeddings")
        stated["geometry"] = geometry
    section, section_of_file = record["source"]["section"], of_file["source"]["section"]
    if section not in (None, section_of_file):
        name = escape(record["source"]["name"])
        evidence.append(f"it came from another file ({name}), with which nothing was compared")
    if section is not None and section["sha256"] == section_of_file["sha256"]:
        stated |= {key: of_file[key] for key in ("known_as", "shared", "activations")}
        stated["rule"] = record["rule"] if record["rule"] in done else None
        # Another release may say the same in other words.
        if record["tool"]["version"] == __version__:
            if record["proof"] is not None:
                stated["proof"] = proven or None
            if not_proven:
                stated["not_proven"] = list(not_proven)
        if untold := sorted(done - {*roundings(*record["converted_from"], record)}):
            yield f"does not say that weights were rounded ({', '.join(untold)})"
    yield from _apart(stated, {key: record[key] for key in stated})
