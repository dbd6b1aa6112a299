"""Parity: the drafter section under Google's interpreter, and the checkpoint under the reference, on the same inputs.

Two figures. *Float* is the checkpoint as it is; what separates it from the interpreter is the interpreter's own
rounding of activations, up to a few hundredths of the logits' range. *Emulated* repeats that rounding
(:mod:`~mtp_extract.validate.parity.emulation`) and takes the file's precision for tensors that the checkpoint holds
rounded; what is left then is the order of float additions. A weight in the wrong place, a missing scalar, a
transposed cache show at once, and the table of roles shows where.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mtp_extract.bundle import Shard
from mtp_extract.drafter.mtp import MtpDrafter
from mtp_extract.errors import PairError, UnsupportedError
from mtp_extract.litertlm.storage import Floats
from mtp_extract.pipeline.check import Check
from mtp_extract.validate.parity.cases import Case, random_cases, reference_arguments, signature_inputs
from mtp_extract.validate.parity.control import known_good
from mtp_extract.validate.parity.emulation import (
    Emulation,
    Followed,
    Guide,
    Operand,
    Restored,
    Scheme,
    attention_schemes,
    restore,
    schemes,
)
from mtp_extract.validate.parity.interface import Interface, read_interface
from mtp_extract.validate.parity.oracle import Kernels, Oracle, OracleRun

EMULATED_BOUND = 1e-3
"""Largest difference of emulated logits, as a share of their range, that counts as the same function."""

_TOP = 5
_SAMPLES = 16


@dataclass(frozen=True)
class Comparison:
    """Differences over all samples. ``range`` is the interpreter's largest output less its smallest, per sample."""

    n: int  # samples
    max_abs: float  # largest absolute difference
    max_of_range: float  # largest difference as a share of the sample's range
    relative: float  # largest ‖difference‖ / ‖interpreter's‖
    cosine: float  # smallest cosine
    top1: float  # share of samples with the same largest entry
    top5: float  # mean share of the five largest entries in common


@dataclass(frozen=True)
class RoleParity:
    """One operator of the graph against the reference's value at the same place."""

    role: str
    float: Comparison
    emulated: Comparison


@dataclass(frozen=True)
class Parity:
    kernels: str  # the interpreter's
    float: Comparison  # of the logits
    emulated: Comparison  # of the logits
    emulated_alone: Comparison  # emulated, each value rounded by itself even where the last bit of a sum decides
    float_projected: Comparison  # of the projected state
    emulated_projected: Comparison  # of the projected state
    roles: tuple[RoleParity, ...]  # in order of execution, for every operator whose result could be read
    kinds: Mapping[str, int]  # how many matrices the graph multiplies in which way
    rounded_attention: bool  # whether the graph computes attention in integers too
    followed: Followed  # values rounded as the interpreter did, of all rounded
    weights: Restored  # how the checkpoint's tensors compare with the file's
    cases: tuple[str, ...]  # where the samples are from

    @property
    def agrees(self) -> bool:
        """Whether rounding explains all that the two are apart.

        Emulated logits and state must be within :data:`EMULATED_BOUND`, every largest logit the same; and what the
        emulation leaves when nothing follows the interpreter must be no more than without any.
        """
        return (
            self.emulated.max_of_range <= EMULATED_BOUND
            and self.emulated_projected.max_of_range <= EMULATED_BOUND
            and self.emulated.top1 == 1.0
            and self.emulated_alone.max_of_range <= max(self.float.max_of_range, EMULATED_BOUND)
        )

    @property
    def first_apart(self) -> str | None:
        """The first role, in order of execution, that is further apart under emulation than the bound."""
        return next((r.role for r in self.roles if not r.emulated.max_of_range <= EMULATED_BOUND), None)


@dataclass(frozen=True)
class _Run:
    logits: Floats
    projected: Floats
    watched: Mapping[str, Floats]


def measure_parity(
    drafter: MtpDrafter,
    source: Shard,
    *,
    cases: Callable[[Interface], Sequence[Case]] | None = None,
    samples: int = _SAMPLES,
    seed: int = 0,
    kernels: Kernels = Kernels.XNNPACK,
) -> Parity:
    """Compare ``drafter``, on the CPU, with the interpreter: on ``samples`` random cases, and on those from a base.

    Raises:
        PairError: the file holds a drafter of another shape.
        UnsupportedError: the interpreter cannot run the file.
    """
    check_geometry(drafter, source)
    interface = read_interface(source)
    chosen = random_cases(drafter.config, interface, samples, seed)
    chosen += list(cases(interface)) if cases else []
    restored, weights = restore(drafter, source)
    plan = schemes(source)
    plain = drafter.with_config(drafter.config).float()
    attention = attention_schemes(source)
    alone, guided = (Emulation(restored, plan, attention, kernels) for _ in range(2))
    models = {"float": plain, "alone": alone.drafter, "emulated": guided.drafter}
    oracle = Oracle(source, kernels)
    reference: dict[str, list[_Run]] = {name: [] for name in models}
    interpreted: list[OracleRun] = []
    for case in chosen:
        interpreted.append(oracle.run(signature_inputs(case, interface)))
        guided.follow(_guide(interpreted[-1], plan))
        for name, model in models.items():
            arguments = reference_arguments(case, drafter.config, interface, as_stored=name != "float")
            reference[name].append(_reference(model, arguments, interpreted[-1].watched))

    def compare(name: str, pick: Callable[[Any], Floats]) -> Comparison:
        return _compare([pick(run) for run in reference[name]], [pick(run) for run in interpreted])

    def compare_role(role: str) -> RoleParity:
        return RoleParity(role, *(compare(name, lambda run: run.watched[role]) for name in ("float", "emulated")))

    return Parity(
        kernels=kernels.value,
        float=compare("float", lambda run: run.logits),
        emulated=compare("emulated", lambda run: run.logits),
        emulated_alone=compare("alone", lambda run: run.logits),
        float_projected=compare("float", lambda run: run.projected),
        emulated_projected=compare("emulated", lambda run: run.projected),
        roles=tuple(map(compare_role, interpreted[0].watched)),
        kinds=dict(Counter(scheme.kind for scheme in plan.values())),
        rounded_attention=bool(attention),
        followed=guided.followed,
        weights=weights,
        cases=tuple(case.label for case in chosen),
    )


def check_interpreter(drafter: MtpDrafter, source: Shard, **options: Any) -> tuple[Parity | None, Check]:
    """:func:`measure_parity`, and what it says of the checkpoint.

    Nothing where the interpreter cannot run the file, or calls a drafter wrong that is known to be right.
    """
    what = "Google's interpreter computes the same, but for its rounding"
    try:
        parity = measure_parity(drafter, source, **options)
    except UnsupportedError as error:
        return None, Check("interpreter", what, None, str(error))
    emulated = parity.emulated
    figures = (
        f"with its rounding emulated, logits within {parity.emulated_alone.max_of_range:.1e} of their range; within "
        f"{emulated.max_of_range:.1e} once ties are rounded as it rounds them, the same top token in "
        f"{round(emulated.top1 * emulated.n)} of {emulated.n} samples"
    )
    if not parity.agrees and (why := _unreliable()):
        return parity, Check("interpreter", what, None, f"{why}; {figures}")
    where = f"; first apart at {parity.first_apart}" if parity.first_apart else ""
    return parity, Check("interpreter", what, parity.agrees, figures + where)


def _unreliable() -> str:
    """Why Google's interpreter is no judge here; empty where it is one."""
    with known_good() as (_, drafter, source):
        try:
            agrees = measure_parity(drafter, source, samples=2).agrees
        except UnsupportedError as error:
            return str(error)
    return "" if agrees else "Google's interpreter computes another thing of a drafter that is known to be right, too"


def _guide(run: OracleRun, plan: Mapping[str, Scheme]) -> Guide:
    def tensor(values: Floats | None) -> Tensor | None:
        return None if values is None else torch.from_numpy(values)

    return Guide(
        {role: Operand(tensor(run.operands.get(role)), tensor(run.watched.get(role))) for role in plan},
        {layer: tuple(tensor(end) for end in ends) for layer, ends in run.products.items()},
    )


_SHAPE = (
    "hidden_size",
    "backbone_hidden_size",
    "intermediate_size",
    "vocab_size",
    "num_heads",
    "layer_types",
    "head_dims",
    "num_kv_heads",
)


def check_geometry(drafter: MtpDrafter, source: Shard) -> None:
    """Check that the checkpoint has the shape of the file's drafter.

    Raises:
        PairError: a size, a layer type or the soft cap differs.
    """
    expected, found = source.config.as_json(), drafter.config.as_json()
    wrong = [f"{what} {expected[what]}, found {found[what]}" for what in _SHAPE if expected[what] != found[what]]
    if wrong:
        raise PairError(
            f"expected the drafter of {source.model.region.source.name}: {'; '.join(wrong)}; give the file that the "
            "checkpoint was extracted from"
        )


@torch.inference_mode()
def _reference(model: MtpDrafter, arguments: Iterable[Any], roles: Iterable[str]) -> _Run:
    """One call of the reference, with the values the interpreter shows."""
    watched: dict[str, Floats] = {}

    def keep(role: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            watched[role] = output.float().numpy().reshape(-1)

        return hook

    # The scalar's operator gives the output of the whole layer.
    handles = [
        model.get_submodule(role.removesuffix(".layer_scalar")).register_forward_hook(keep(role)) for role in roles
    ]
    try:
        logits, projected = model(*arguments)
    finally:
        for handle in handles:
            handle.remove()
    return _Run(logits.float().numpy().reshape(-1), projected.float().numpy().reshape(-1), watched)


@np.errstate(all="ignore")
def _compare(reference: Sequence[Floats], interpreted: Sequence[Floats]) -> Comparison:
    """Sample by sample; a value that is not finite makes every figure say so."""
    pairs = [(a.astype(np.float64), b.astype(np.float64)) for a, b in zip(reference, interpreted, strict=True)]
    absolute = [float(np.abs(a - b).max()) for a, b in pairs]
    return Comparison(
        n=len(pairs),
        max_abs=_largest(absolute),
        max_of_range=_largest(_ratio(d, float(b.max() - b.min())) for d, (_, b) in zip(absolute, pairs, strict=True)),
        relative=_largest(_ratio(float(np.linalg.norm(a - b)), float(np.linalg.norm(b))) for a, b in pairs),
        cosine=-_largest(-_cosine(a, b) for a, b in pairs),
        top1=float(np.mean([a.argmax() == b.argmax() for a, b in pairs])),
        top5=float(np.mean([_top5_in_common(a, b) for a, b in pairs])),
    )


def _largest(values: Iterable[float]) -> float:
    listed = list(values)
    return math.nan if any(math.isnan(value) for value in listed) else max(listed)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else (0.0 if part == 0 else math.inf)


def _cosine(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    # Two zero vectors are the same; one zero vector is like nothing.
    return float(a @ b) / lengths if lengths else float(not a.any() and not b.any())


def _top5_in_common(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    count = min(_TOP, a.size)
    best = [set(np.argpartition(-x, count - 1)[:count].tolist()) for x in (a, b)]
    return len(best[0] & best[1]) / count
