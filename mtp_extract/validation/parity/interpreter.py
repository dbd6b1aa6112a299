"""Google's interpreter as a witness: it runs the drafter's section, PyTorch the drafter, on the same inputs.

Twice. *In floats* (:mod:`~mtp_extract.validation.parity.floats`) the same kernels and operators run, nothing rounds,
and the two differ by the order of float additions alone. *As it is*, the section computes with its integers and rounds
activations: how far that is from floats is reported, and bounded loosely, which shows that the floats are its own.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from mtp_extract.bundle import Shard
from mtp_extract.drafter.mtp import MtpDrafter
from mtp_extract.errors import UnsupportedError, escape
from mtp_extract.evaluate.extras import unusable
from mtp_extract.graph.drafter import LOGITS, PROJECTED
from mtp_extract.io.typed import Count, Record
from mtp_extract.litertlm.storage import Floats
from mtp_extract.pipeline.check import Check
from mtp_extract.validation.parity.cases import (
    Case,
    codes_of,
    known_drafter,
    random_cases,
    reference_arguments,
    signature_inputs,
)
from mtp_extract.validation.parity.floats import write_in_floats

IN_FLOATS = 1e-5
"""Largest difference of an output in floats, as a share of its range, that counts as the same function."""

AS_IT_IS = 0.5
"""Least correlation, over all cases, with what the section computes of its integers."""

_WHAT = "Google's interpreter computes the same"
# Epsilons of norms show where activations are small, and there the float32 angle of a far position would, too.
_QUIET, _NEAR = np.float32(1e-3), 32

Outputs = tuple[Floats, Floats]
"""Logits [vocabulary] and projected state [base width] of one case."""


class Apart(Record):
    """Two programs' outputs over all cases."""

    logits: float  #: largest difference, as a share of that case's range
    state: float  #: likewise
    correlation: float  #: mean over the cases, of the output where it is less
    top1: Count  #: cases with the same largest logit


class Parity(Record):
    """A drafter beside Google's interpreter."""

    in_floats: Apart  #: with every tensor of codes as floats
    as_it_is: Apart  #: with the file's integers, which round activations
    cases: Count  #: random inputs; in floats those at near positions are run again with small activations

    @property
    def agrees(self) -> bool:
        """Whether the two compute the same function."""
        exact = self.in_floats
        return exact.logits <= IN_FLOATS and exact.state <= IN_FLOATS and self.as_it_is.correlation >= AS_IT_IS


def measure_parity(drafter: MtpDrafter, source: Shard, cases: Sequence[Case]) -> Parity:
    """Compare ``drafter``, float32 on the CPU, with the interpreter.

    In floats each case at a near position is run again with its activations at a thousandth: there the epsilon of the
    norms shows.

    Raises:
        UnsupportedError: the interpreter is not there, or cannot run the section.
    """
    near = [case for case in cases if case.position < _NEAR]
    quiet = [replace(case, embedding=case.embedding * _QUIET, hidden=case.hidden * _QUIET) for case in near]
    ours = reference_outputs(drafter, [*cases, *quiet])
    exact = apart(ours, interpreted(source, [*cases, *quiet], floats=True))
    return Parity(exact, apart(ours[: len(cases)], interpreted(source, cases, floats=False)), len(cases))


def check_interpreter(drafter: MtpDrafter, source: Shard, *, samples: int) -> tuple[Parity | None, Check]:
    """:func:`measure_parity` on ``samples`` random cases, and what it says of ``drafter``.

    The check is left open where the interpreter cannot run the file, or calls a drafter wrong that is known to be
    right.
    """
    try:
        parity = measure_parity(drafter, source, random_cases(source, samples))
        passed: bool | None = parity.agrees
        exact, rough, excuse = parity.in_floats, parity.as_it_is, ""
        if not passed:
            with known_drafter() as (_, known, file):
                if not measure_parity(known, file, random_cases(file, 2)).agrees:
                    passed = None
                    excuse = "Google's interpreter computes another thing of a drafter that is known to be right, too; "
    except UnsupportedError as error:
        return None, Check("interpreter", _WHAT, None, str(error))
    evidence = (
        f"{excuse}with the file's integers as floats, outputs within {max(exact.logits, exact.state):.1e} of their "
        f"range, {IN_FLOATS:.0e} being allowed; with integers, within {max(rough.logits, rough.state):.1e}, correlated "
        f"by {rough.correlation:.3f}, the same top token in {rough.top1} of {parity.cases} samples"
    )
    return parity, Check("interpreter", _WHAT, passed, evidence)


@torch.inference_mode()
def reference_outputs(drafter: MtpDrafter, cases: Sequence[Case]) -> list[Outputs]:
    """What ``drafter`` computes of each of ``cases``."""
    found = (drafter(*reference_arguments(case, drafter.config)) for case in cases)
    return [(logits.numpy().reshape(-1), projected.numpy().reshape(-1)) for logits, projected in found]


def interpreted(source: Shard, cases: Sequence[Case], *, floats: bool) -> list[Outputs]:
    """What Google's interpreter, with the CPU kernels that LiteRT-LM uses, computes of each of ``cases``.

    Args:
        floats: run the section in floats. It lies in a temporary file meanwhile.

    Raises:
        UnsupportedError: the interpreter is not there, or cannot run the section.
    """
    name, region = source.model.region.source.name, source.model.region
    if why := unusable("ai_edge_litert.interpreter", "Interpreter"):
        raise UnsupportedError(f"{name}: Google's interpreter (ai-edge-litert) cannot be asked: {why}.")
    if source.model.weights is not None:
        raise UnsupportedError(
            f"{name}: the drafter's weights lie in a section of their own, which the interpreter cannot be given. "
            "Parity is possible for files that hold them in the drafter's section."
        )
    from ai_edge_litert.interpreter import Interpreter

    def floats_of(output: str, given: dict[str, Floats]) -> Floats:
        codes, values = codes_of(source, output), given[output].reshape(-1)
        return codes.decode(values) if codes is not None and values.dtype != np.float32 else values

    try:
        with tempfile.TemporaryDirectory() as folder, _quiet():
            path = Path(folder) / "drafter.tflite"
            if floats:
                write_in_floats(source.model, path)
            else:
                path.write_bytes(region.read(0, region.size))
            interpreter = Interpreter(model_path=str(path), num_threads=1)
            interpreter.allocate_tensors()
            run = interpreter.get_signature_runner(source.signature.key)
            # One case at a time: the caches of a published file are 130 MB.
            made = (run(**signature_inputs(source, case, floats=floats)) for case in cases)
            return [(floats_of(LOGITS, given), floats_of(PROJECTED, given)) for given in made]
    except UnsupportedError:
        raise
    except Exception as error:  # What a tool of another release raises has no class of its own.
        raise UnsupportedError(f"{name}: Google's interpreter cannot run the drafter: {escape(error)}.") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the interpreter's C++ writes to stderr; what goes wrong comes as an exception too."""
    sys.stderr.flush()
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


@np.errstate(all="ignore")
def apart(ours: Sequence[Outputs], theirs: Sequence[Outputs]) -> Apart:
    """How far ``ours`` are from ``theirs``, case by case; infinitely where a number is none."""
    far, alike = list[float](), list[float]()
    for mine, other in zip(zip(*ours, strict=True), zip(*theirs, strict=True), strict=True):
        pairs = [(a, b.astype(np.float64)) for a, b in zip(mine, other, strict=True)]
        gaps = [float(np.abs(a - b).max() / np.ptp(b)) for a, b in pairs]
        far.append(max(gap if math.isfinite(gap) else math.inf for gap in gaps))
        alike.append(float(np.mean([np.corrcoef(a, b)[0, 1] for a, b in pairs])))
    top1 = sum(int(a[0].argmax() == b[0].argmax()) for a, b in zip(ours, theirs, strict=True))
    return Apart(far[0], far[1], min(alike), top1)
