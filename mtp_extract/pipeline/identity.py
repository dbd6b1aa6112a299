"""Checks whether a directory holds the drafter of a bundle: its config, files, tensors, function and record.

Everything is derived from the bundle again; nothing that the directory states is believed. ``mtp-inspect --against``
and ``mtp-validate --source`` use it.
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
from mtp_extract.architecture import list_shapes
from mtp_extract.architecture.config import DrafterConfig
from mtp_extract.bundle import BundledDrafter, ModelFile
from mtp_extract.checkpoint.checkpoint import CODES, Checkpoint
from mtp_extract.checkpoint.codes import CODES_FILE, attach_codes
from mtp_extract.checkpoint.documents import find_differences
from mtp_extract.checkpoint.dtypes import ROUNDED_TO
from mtp_extract.checkpoint.format import Format
from mtp_extract.checkpoint.record import CHECKPOINT, describe_origin_of_bundle
from mtp_extract.checkpoint.rounding import RULES, SCALES, repeat_roundings
from mtp_extract.checkpoint.stored import FileWeight
from mtp_extract.checkpoint.weight import ROW_STEP, Weight, build_constant_weight, has_exact_steps, is_same_weight
from mtp_extract.errors import CheckpointError, ProofError, RoleError, UnsupportedError, escape, list_few
from mtp_extract.formats import detect_format, load_format
from mtp_extract.formats.directory import find_int8_scale
from mtp_extract.pipeline.check import (
    AGAIN,
    RECORD,
    Check,
    CheckpointDirectory,
    find_changed_files,
    find_unexpected_files,
    read_record,
)
from mtp_extract.pipeline.extraction import build_checkpoint, prove_checkpoint, prove_drafter, require_complete
from mtp_extract.pipeline.unproven import read_unproven
from mtp_extract.proof.proof import describe_proof
from mtp_extract.report.card import list_roundings

Chain = tuple[str, ...]
"""The steps by which a weight was rounded, as :func:`~mtp_extract.checkpoint.rounding.repeat_roundings` takes them."""

_EXACT_SCALES = f"F32{SCALES}"
_STEPS = (*filter(None, ROUNDED_TO), f"FP16{SCALES}", _EXACT_SCALES, *RULES)
_SHORT_CHAINS: Sequence[Chain] = [chain for count in range(3) for chain in permutations(_STEPS, count)]
"""The chains that are tried without a record: no step, one or two."""
_MOST_CLAIMED = 6
"""Most steps that are taken from a record; every order of three or more of them is tried."""


def find_chain(original: Weight, written: Weight, claimed: Collection[str] = ()) -> Chain | None:
    """Find the shortest chain that makes ``original`` equal to ``written``, to the bit; None if there is none.

    Codes and scales are compared, or the floats of a weight without codes.

    Args:
        claimed: the steps that a record states; they may be more than the two that are tried without a record.
    """
    if original.shape != written.shape:
        return None
    # The first rows refute almost every chain.
    pairs = [(_take_first_rows(original), _take_first_rows(written)), (original, written)]
    steps = [step for step in _STEPS if step in claimed][:_MOST_CLAIMED]
    longer = (chain for count in range(3, len(steps) + 1) for chain in permutations(steps, count))
    for chain in (*_SHORT_CHAINS, *longer):
        if all(_produces(before, chain, after) for before, after in pairs):
            # Dividing a factor out of the scales rounded them to F32, unless the factor is stored beside them.
            is_unfolded = written.scheme is not None and not has_exact_steps(original) and has_exact_steps(written)
            return chain or ((_EXACT_SCALES,) if is_unfolded else ())
    return None


def _produces(original: Weight, chain: Chain, written: Weight) -> bool:
    # A step may be impossible: the weight has no codes, or numbers beyond FP16.
    with suppress(CheckpointError, UnsupportedError), np.errstate(all="ignore"):
        return is_same_weight(repeat_roundings(original, chain), written)
    return False


def _take_first_rows(weight: Weight) -> Weight:
    if len(weight.shape) != 2:
        return weight
    shape = min(weight.rows, ROW_STEP), weight.columns
    if weight.scheme is None:
        return Weight(shape, weight.floats)
    steps = weight.steps
    first_steps = replace(steps, size=steps.size[:ROW_STEP], zero_point=steps.zero_point[:ROW_STEP])
    return Weight(shape, weight.codes, weight.scheme, first_steps)


def _describe_chain(chain: Chain) -> str:
    rules = {rule: f"integers by {rule}" for rule in RULES}
    return ", then ".join("to " + rules.get(step, step.replace(SCALES, " in their scales")) for step in chain)


_LONGEST_VALUE = 80
"""Characters of a value in the evidence of a check."""

NEEDED = ("config", "files", "tensors", "function")
"""The checks that a proof needs. The record's check may refute a directory, too, and the record may be missing."""

_STATEMENTS = {
    "config": "config.json agrees with the graph",
    "files": "no file and no key makes an engine load something else",
    "tensors": "every tensor equals what the bundle gives, bit for bit, after the named steps",
    "function": "every operator of the graph is a drafter's, and its numbers are the checkpoint's",
    "record": "extraction.json agrees with the files and the bundle",
}


def verify_against(read: CheckpointDirectory, opened: ModelFile) -> list[Check]:
    """Compare the directory ``read``, and its record if it has one, with what the bundle ``opened`` gives.

    Raises:
        CheckpointError: something differs; the text says what.
        MtpExtractError: ``opened`` cannot be read.
    """
    opened.prefetch()
    checks = check_identity(read.directory, read_drafter_for(opened, read.written.mtp), read)
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


def read_drafter_for(opened: ModelFile, config: DrafterConfig) -> BundledDrafter:
    """Read the drafter of ``opened`` to compare a checkpoint with it.

    The window is that of ``config`` if the graph leaves it to the runtime. A graph that cannot be proven is read as far
    as possible. Errors are those of :meth:`~mtp_extract.bundle.ModelFile.read_drafter`.
    """
    for window in (None, config.sliding_window):
        with suppress(RoleError, UnsupportedError):
            return opened.read_drafter(window)
    # The check of the function says that there is no proof.
    return read_unproven(opened, config.sliding_window, prove_drafter)[0]


def check_identity(directory: Path, source: BundledDrafter, read: CheckpointDirectory | None = None) -> list[Check]:
    """Compare the checkpoint in ``directory`` with the bundle's drafter ``source``, and return the checks.

    Tensors are derived only if the config agrees, and the graph is proven only if the tensors agree.

    Args:
        read: the directory, if it was read before; its files then were compared with its record.

    Raises:
        CheckpointError: the directory holds no checkpoint that can be read.
        MtpExtractError: the bundle cannot be read.
    """
    require_complete(source)
    format_ = load_format(read.layout) if read else detect_format(directory)
    written = read.written if read else format_.read(directory)
    compared = _Comparison(directory, source, build_checkpoint(source), written, format_, read)
    config = compared.check_config()
    files = compared.check_files()
    tensors = compared.check_tensors(of_the_same_config=bool(config.passed))
    function = compared.check_function(of_the_same_tensors=bool(tensors.passed))
    return [config, files, tensors, function, compared.check_record()]


@dataclass
class _Comparison:
    """A directory and the bundle that it is compared with."""

    directory: Path
    source: BundledDrafter
    original: Checkpoint
    written: Checkpoint
    format: Format
    read: CheckpointDirectory | None  # None if the files have not been compared with the record
    chains: dict[str, Chain] = field(default_factory=dict)  # of the weights that were derived so far
    proven: list[str] = field(default_factory=list)  # the proof, in sentences

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
            unread = (*self.written.unread, *find_unexpected_files(self.directory, self.format))
        return _build_check("files", unread, ["nothing that would make an engine load something else"])

    def check_tensors(self, *, of_the_same_config: bool) -> Check:
        if not of_the_same_config:
            return _build_check("tensors", None, ["not of the file's config"])
        return _build_check("tensors", self._find_other_tensors(), _summarize_tensors(self.written, self.chains))

    def check_function(self, *, of_the_same_tensors: bool) -> Check:
        if not of_the_same_tensors:
            return _build_check("function", None, ["not of the file's config and tensors"])
        if self.source.not_proven:
            return _build_check("function", None, [f"not proven: {'; '.join(self.source.not_proven)}"])
        try:
            self.proven = describe_proof(prove_checkpoint(self.source, self.original))
        except (ProofError, UnsupportedError) as error:
            why = [str(error).split(". ")[0]]
            # An unsupported graph neither passes nor fails.
            return _build_check("function", why if isinstance(error, ProofError) else None, why)
        return _build_check("function", [], self.proven)

    def check_record(self) -> Check:
        if not (self.directory / RECORD).exists():
            return _build_check("record", None, [f"there is no {RECORD}"])
        evidence = ["every file is as recorded"]
        check = _build_check("record", self._find_contradictions(evidence), evidence)
        if check.passed and not self._compares_record_with_bundle():
            return _build_check("record", None, [*evidence, "what it says of the bundle was not compared"])
        return check

    def _compares_record_with_bundle(self) -> bool:
        """Whether the record's facts of the bundle can be compared: the weights are the bundle's."""
        return bool(self.proven or self.source.not_proven)

    def _find_other_tensors(self) -> Iterator[str]:
        """Yield the first tensor that does not follow from the file's; put the chains of the others into ``chains``."""
        claimed = _read_claimed_steps(self.directory)
        # Roles are in the order in which a drafter computes.
        for role, shape in list_shapes(self.written.config).items():
            weight = self.written.tensors[role.name]
            original = self.original.tensors.get(role.name) or build_constant_weight(shape)
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
        """Whether static scales of activations differ as float32; a missing scale counts as 0."""
        # A format without static scales does not claim to hold them.
        if not any(any(pair) for pair in self.written.activations.values()):
            return False
        pairs = (checkpoint.activations.get(role, (None, None)) for checkpoint in (self.written, self.original))
        scales, scales_of_file = ([np.float32(find_int8_scale(side)) for side in pair] for pair in pairs)
        return scales != scales_of_file

    def _find_other_codes(self, claimed: Collection[str]) -> Iterator[str]:
        """Yield codes beside floats that are not the file's."""
        # Codes of a directory that was read are not compared with its floats again, which takes reading both.
        read = self.read
        tensors = read.checkpoint.tensors if read else attach_codes(self.directory, self.written.tensors)
        for role, weight in tensors.items():
            if weight.scheme is not None and self.written.tensors[role].scheme is None:
                original = self.original.tensors[role]
                chain = find_chain(original, weight, claimed)
                if chain is None or (not chain and original.bits != weight.bits):
                    yield f"{CODES_FILE}: {role} has other codes or scales than the file's"
                else:
                    self.chains[f"{CODES_FILE}: {role}"] = chain

    def _find_contradictions(self, evidence: list[str]) -> Iterator[str]:
        """Yield what the record states and the bundle or the weights contradict.

        The bundle cannot tell the origin's name and place, directories in between, a tuning, the release or the card.
        Facts on the drafter's section are compared if the bundle has that section. If the function was not proven, only
        the files are compared, unless they were compared on reading.

        Args:
            evidence: gets a sentence if the record names another file as the origin.
        """
        record = read_record(self.directory)
        if self.read is None:
            yield from find_changed_files(self.directory, record).values()
        if not self._compares_record_with_bundle():
            return
        stated: dict[str, Any] = {"dtype": CODES if record["dtype"] == CODES else self.written.dtype}
        # A directory of unknown origin may have been changed before.
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
            steps = {step for chain in self.chains.values() for step in chain}
            if unstated := sorted(steps - {*list_roundings(*record["converted_from"], record)}):
                yield f"does not say that weights were rounded ({', '.join(unstated)})"
        yield from _describe_differences(stated, {key: record.get(key) for key in stated})

    def _expect_of_section(self, record: Mapping[str, Any], of_file: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields that ``record`` must have on the section; ``of_file`` has those that the bundle gives."""
        expected = {key: of_file[key] for key in ("known_as", "shared", "activations")}
        was_applied = any(record["rule"] in chain for chain in self.chains.values())
        expected["rule"] = record["rule"] if was_applied else None
        # Another release may word the same facts otherwise.
        if record["tool"]["version"] == __version__:
            if record["proof"] is not None:
                expected["proof"] = self.proven or None
            if self.source.not_proven:
                expected["not_proven"] = list(self.source.not_proven)
        return expected


def _read_claimed_steps(directory: Path) -> Collection[str]:
    # The check of the record reports the error.
    with suppress(CheckpointError):
        if record := read_record(directory):
            return list_roundings(*record["converted_from"], record)
    return ()


def _build_check(name: str, problems: Iterable[str] | None, facts: Iterable[str]) -> Check:
    """Build the check ``name``; ``problems`` is None if it was not run.

    ``facts`` are the evidence if there are no problems, or the reason for not running it.
    """
    if problems is None:
        return Check(name, _STATEMENTS[name], None, "; ".join(facts))
    try:
        evidence = list_few(problems, separator="; ")
    except CheckpointError as error:
        # Damage shows when the problems are looked for.
        evidence = " ".join(str(error).split())
    return Check(name, _STATEMENTS[name], not evidence, evidence or "; ".join(facts))


def _describe_differences(derived: Mapping[str, Any], stated: Mapping[str, Any]) -> Iterator[str]:
    """Yield each place at which what a directory ``stated`` differs from what the bundle gives."""
    for place, expected, actual in map(astuple, find_differences(derived, stated)):
        # Both values are shown, however long the first one is.
        yield f"{escape(place)} is {escape(expected, _LONGEST_VALUE)}, not {escape(actual, _LONGEST_VALUE)}"


def _summarize_tensors(written: Checkpoint, chains: Mapping[str, Chain]) -> Iterator[str]:
    """Yield the number of tensors of each type and chain: the file's codes, codes of a rule, or floats."""
    counts = Counter[tuple[str, Chain]]()
    for role, weight in written.tensors.items():
        if (chain := chains.get(role)) is None:
            continue
        if isinstance(weight, FileWeight):
            stored_as = weight.tensor.dtype
            # The type itself says that numbers were rounded to it.
            if chain and chain[-1].replace("FP16", "F16") == stored_as:
                chain = chain[:-1]
        elif weight.scheme:
            stored_as = "codes" if any(step in RULES for step in chain) else "the file's codes"
        else:
            stored_as = "no file, as they are 1"
        counts[stored_as, chain] += 1

    yield f"all {counts.total()} are derived from the file's, every bit"
    for (stored_as, chain), count in sorted(counts.items()):
        yield f"{count} in {stored_as}" + (f", rounded {_describe_chain(chain)}" if chain else "")
    if beside := len(chains) - counts.total():
        yield f"beside them {beside} have the file's codes"
