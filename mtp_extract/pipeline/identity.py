"""Is a directory the drafter of a bundle? Asked of its config, its files, its tensors, what both compute, its record.

Everything is derived from the bundle again; nothing that the directory says of itself is believed. Commands that hold a
directory against a bundle (``mtp-inspect --against``, ``mtp-validate --source``) ask here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, field, replace
from itertools import permutations
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
from mtp_extract.checkpoint.format import Format
from mtp_extract.checkpoint.record import CHECKPOINT, describe_origin_of_bundle
from mtp_extract.checkpoint.rounding import RULES, SCALES, rounded_again
from mtp_extract.checkpoint.stored import Stored
from mtp_extract.checkpoint.weight import ROW_STEP, Weight, constant_weight, has_exact_steps, same_weight
from mtp_extract.errors import CheckpointError, ProofError, RoleError, UnsupportedError, escape, few
from mtp_extract.formats import format_named, format_of
from mtp_extract.formats.directory import static_scale
from mtp_extract.pipeline.check import (
    AGAIN,
    RECORD,
    Check,
    ReadDirectory,
    find_changed_files,
    read_record,
    unexpected_in,
)
from mtp_extract.pipeline.extraction import checkpoint_of, prove_checkpoint, prove_drafter, require_complete
from mtp_extract.pipeline.unproven import read_unproven
from mtp_extract.proof.proof import in_words
from mtp_extract.report.card import roundings

Chain = tuple[str, ...]
"""What was done to a weight, step by step, as :func:`~mtp_extract.checkpoint.rounding.rounded_again` takes it."""

_EXACT_SCALES = f"F32{SCALES}"
_STEPS = (*filter(None, ROUNDED_TO), f"FP16{SCALES}", _EXACT_SCALES, *RULES)
_SHORT_CHAINS: Sequence[Chain] = [chain for count in range(3) for chain in permutations(_STEPS, count)]
"""What may have been done without a word of it: nothing, one step, or two."""
_MOST_CLAIMED = 6
"""Kinds of steps that are followed where a record claims more than two: any order of them is tried."""


def find_chain(original: Weight, written: Weight, claimed: Collection[str] = ()) -> Chain | None:
    """The shortest chain that makes ``written`` of ``original``, to the bit; None where none does.

    Of a weight with codes, the codes and their scales are compared; of any other the numbers.

    Args:
        claimed: the steps that a record says, which may be a longer chain than is tried without one.
    """
    if original.shape != written.shape:
        return None
    # The first rows of a matrix alone refute almost every chain.
    pairs = [(_take_first_rows(original), _take_first_rows(written)), (original, written)]
    steps = [step for step in _STEPS if step in claimed][:_MOST_CLAIMED]
    longer = (chain for count in range(3, len(steps) + 1) for chain in permutations(steps, count))
    for chain in (*_SHORT_CHAINS, *longer):
        if all(_produces(before, chain, other) for before, other in pairs):
            # Scales that a factor was divided out of were rounded to F32, unless the factor is kept beside them.
            folded = written.scheme is not None and not has_exact_steps(original) and has_exact_steps(written)
            return chain or ((_EXACT_SCALES,) if folded else ())
    return None


def _produces(original: Weight, chain: Chain, written: Weight) -> bool:
    # Some admit of no such step: they have no codes, or numbers beyond FP16.
    with suppress(CheckpointError, UnsupportedError), np.errstate(all="ignore"):
        return same_weight(rounded_again(original, chain), written)
    return False


def _take_first_rows(weight: Weight) -> Weight:
    """The first rows of a matrix, as a weight."""
    if len(weight.shape) != 2:
        return weight
    shape = min(weight.rows, ROW_STEP), weight.columns
    if weight.scheme is None:
        return Weight(shape, weight.floats)
    steps, rows = weight.steps, slice(ROW_STEP)
    first = replace(steps, size=steps.size[rows], zero_point=steps.zero_point[rows])
    return Weight(shape, weight.codes, weight.scheme, first)


def _describe_chain(chain: Chain) -> str:
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
        why = f"It may be of another bundle, or have been changed since. {AGAIN}"
        if read.record.get("tuning"):
            why = f"Its {RECORD} says that it was tuned since: compare it with a bundle that it was put into."
        raise CheckpointError(
            f"{escape(read.directory)}: differs from what {escape(opened.source.name)} holds: {wrong}. {why}"
        )
    return checks


def drafter_for(opened: Opened, config: DrafterConfig) -> Shard:
    """The drafter of ``opened``, with the errors of :meth:`~mtp_extract.bundle.Opened.drafter`: where its graph leaves
    the window to the runtime, with that of ``config``; where it cannot be proven, what can be read of it."""
    for window in (None, config.sliding_window):
        with suppress(RoleError, UnsupportedError):
            return opened.drafter(window)
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
    format_ = format_named(read.layout) if read else format_of(directory)
    written = read.written if read else format_.read(directory)
    compared = _Comparison(directory, source, checkpoint_of(source), written, format_, read)
    config = compared.check_config()
    files = compared.check_files()
    tensors = compared.check_tensors(of_the_same_config=bool(config.passed))
    function = compared.check_function(of_the_same_tensors=bool(tensors.passed))
    return [config, files, tensors, function, compared.check_record()]


@dataclass
class _Comparison:
    """A directory, and what the bundle gives."""

    directory: Path
    source: Shard
    original: Checkpoint
    written: Checkpoint
    format: Format
    read: ReadDirectory | None  # what was read there; None where its files have not been compared with its record
    chains: dict[str, Chain] = field(default_factory=dict)  # what was done to each weight, as far as they are derived
    proven: list[str] = field(default_factory=list)  # what the proof shows, in sentences

    def check_config(self) -> Check:
        derived, stated = (
            asdict(replace(checkpoint.mtp, max_position_embeddings=None))
            for checkpoint in (self.original, self.written)
        )
        return _build_check("config", _describe_differences(derived, stated), ["every number agrees"])

    def check_files(self) -> Check:
        if self.read is not None:
            unread: Iterable[str] = self.read.checkpoint.unread
        else:
            unread = (*self.written.unread, *unexpected_in(self.directory, self.format))
        return _build_check("files", unread, ["nothing that would make an engine load something else"])

    def check_tensors(self, *, of_the_same_config: bool) -> Check:
        if not of_the_same_config:
            return _build_check("tensors", None, ["not of the file's config"])
        return _build_check("tensors", self._find_other_tensors(), _summarize_tensors(self.written, self.chains))

    def check_function(self, *, of_the_same_tensors: bool) -> Check:
        """The proof of the graph, where the tensors are the file's."""
        if not of_the_same_tensors:
            return _build_check("function", None, ["not of the file's config and tensors"])
        if self.source.not_proven:
            return _build_check("function", None, [f"not proven: {'; '.join(self.source.not_proven)}"])
        try:
            self.proven = in_words(prove_checkpoint(self.source, self.original))
        except (ProofError, UnsupportedError) as error:
            why = [str(error).split(". ")[0]]
            # Of a graph that no proof can be made of, nothing is shown.
            return _build_check("function", why if isinstance(error, ProofError) else None, why)
        return _build_check("function", [], self.proven)

    def check_record(self) -> Check:
        if not (self.directory / RECORD).exists():
            return _build_check("record", None, [f"there is no {RECORD}"])
        evidence = ["every file is as recorded"]
        return _build_check("record", self._find_contradictions(evidence), evidence)

    def _find_other_tensors(self) -> Iterator[str]:
        """The first tensor that is not derived from the file's; what was done to the others is put into ``chains``.
        CheckpointError where scales, or codes that are kept beside it, are damaged."""
        claimed = _read_claimed_steps(self.directory)
        # The table of roles is in the order in which a drafter computes.
        for role, shape in shapes_of(self.written.config).items():
            weight = self.written.tensors[role.name]
            original = self.original.tensors.get(role.name) or constant_weight(shape)
            chain = find_chain(original, weight, claimed)
            name = f"{role.name} ({role.names.get(self.format.name, role.name)})"
            if chain is None:
                yield f"{name} has other {'values' if weight.scheme is None else 'codes or scales'} than the file's"
                return
            if weight.scheme and self._has_other_static_scales(role.name):
                yield f"{name} has other static scales of activations than the file's"
                return
            self.chains[role.name] = chain
        yield from self._find_other_codes(claimed)

    def _has_other_static_scales(self, role: str) -> bool:
        """Whether scales of what goes in or comes out are others, as files hold them: 0 where there is none."""
        # Where there are no static scales at all, none are claimed to be held.
        if not any(any(pair) for pair in self.written.activations.values()):
            return False
        pairs = (checkpoint.activations.get(role, (None, None)) for checkpoint in (self.written, self.original))
        scales, scales_of_file = ([np.float32(static_scale(side)) for side in pair] for pair in pairs)
        return scales != scales_of_file

    def _find_other_codes(self, claimed: Collection[str]) -> Iterator[str]:
        """Codes beside floats that are not the file's."""
        # Reading a directory holds its codes against its floats, which takes both to be read whole.
        read = self.read
        tensors = read.checkpoint.tensors if read else with_codes(self.directory, self.written.tensors)
        for role, weight in tensors.items():
            if weight.scheme is not None and self.written.tensors[role].scheme is None:
                original = self.original.tensors[role]
                chain = find_chain(original, weight, claimed)
                if chain is None or (not chain and original.bits != weight.bits):
                    yield f"{CODES_FILE}: {role} has other codes or scales than the file's"
                else:
                    self.chains[f"{CODES_FILE}: {role}"] = chain

    def _find_contradictions(self, evidence: list[str]) -> Iterator[str]:
        """What the record says of a directory that is the bundle's drafter, and the bundle and the weights do not.

        Its past is no matter of the bundle: which file it came from and where that lay, which directories there were
        in between, whether it was tuned, which release wrote it, and the card. What was found in the section that it
        came from is compared where the bundle holds that section. Of a directory that is not ``proven``, its files
        alone are compared; of one that was ``read``, they have been.

        Args:
            evidence: is added to where the record names another file as its origin.
        """
        record = read_record(self.directory)
        if self.read is None:
            yield from find_changed_files(self.directory, record).values()
        if not self.proven and not self.source.not_proven:
            return
        stated: dict[str, Any] = {"dtype": CODES if record["dtype"] == CODES else self.written.dtype}
        # A directory of unknown origin came with what had been done to it.
        if record["source"]["kind"] != CHECKPOINT:
            geometry = self.original.mtp.as_json()
            geometry["max_position_embeddings"] = record["geometry"].get("max_position_embeddings")
            stated["geometry"] = geometry
        of_file = describe_origin_of_bundle(self.source, self.original)
        section = record["source"]["section"]
        section_of_file = of_file["source"]["section"]
        if section not in (None, section_of_file):
            name = escape(record["source"]["name"])
            evidence.append(f"it came from another file ({name}), with which nothing was compared")
        if section is not None and section["sha256"] == section_of_file["sha256"]:
            stated |= self._expect_of_section(record, of_file)
            done = {step for chain in self.chains.values() for step in chain}
            if untold := sorted(done - {*roundings(*record["converted_from"], record)}):
                yield f"does not say that weights were rounded ({', '.join(untold)})"
        yield from _describe_differences(stated, {key: record.get(key) for key in stated})

    def _expect_of_section(self, record: Mapping[str, Any], of_file: Mapping[str, Any]) -> dict[str, Any]:
        """What ``record`` has to say of the section that it came from; ``of_file`` is what one of the bundle would."""
        expected = {key: of_file[key] for key in ("known_as", "shared", "activations")}
        is_done = any(record["rule"] in chain for chain in self.chains.values())
        expected["rule"] = record["rule"] if is_done else None
        # Another release may say the same in other words.
        if record["tool"]["version"] == __version__:
            if record["proof"] is not None:
                expected["proof"] = self.proven or None
            if self.source.not_proven:
                expected["not_proven"] = list(self.source.not_proven)
        return expected


def _read_claimed_steps(directory: Path) -> Collection[str]:
    """What the record in ``directory`` says was done to weights; nothing where there is none that can be read."""
    # Why it cannot be read, the check of the record says.
    with suppress(CheckpointError):
        if record := read_record(directory):
            return roundings(*record["converted_from"], record)
    return ()


def _build_check(name: str, wrong: Iterable[str] | None, otherwise: Iterable[str]) -> Check:
    """What was checked, and what is ``wrong``: None where it was not; ``otherwise`` says why, or what it shows."""
    if wrong is None:
        return Check(name, _WHAT[name], None, "; ".join(otherwise))
    try:
        evidence = few(wrong, separator="; ")
    except CheckpointError as error:
        # What is damaged shows where it is read.
        evidence = " ".join(str(error).split())
    return Check(name, _WHAT[name], not evidence, evidence or "; ".join(otherwise))


def _describe_differences(derived: Mapping[str, Any], stated: Mapping[str, Any]) -> Iterator[str]:
    """Where what a directory has ``stated`` differs from what was ``derived`` from the bundle."""
    for place, expected, actual in map(astuple, differences(derived, stated)):
        yield f"{escape(place)} is {escape(expected)}, not {escape(actual)}"


def _summarize_tensors(written: Checkpoint, chains: Mapping[str, Chain]) -> Iterator[str]:
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
        yield f"{count} in {stored_as}" + (f", rounded {_describe_chain(chain)}" if chain else "")
    if beside := len(chains) - kinds.total():
        yield f"beside them {beside} have the file's codes"
