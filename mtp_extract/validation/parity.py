"""Compare the outputs of another program with those of the reference, on the same random draft steps.

Here the program is transformers, which must load the checkpoint without missing or unexpected keys; in ``interpreter``
it is Google's interpreter.

Positions go from 1 to well past the window. Inputs have a standard deviation of an eighth of what the section's
integers can hold, or of 1 if it has floats. A program may fail because its release is broken: it refutes a drafter only
if it passes the sample's drafter, which is known to be right.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from packaging.specifiers import SpecifierSet

from mtp_extract.architecture.config import FULL, SLIDING, DrafterConfig
from mtp_extract.bundle import BundledDrafter, open_bundle
from mtp_extract.data import sample_bundle
from mtp_extract.drafter.load import load_drafter
from mtp_extract.drafter.mtp import MtpDrafter
from mtp_extract.drafter.protocol import KV, BaseOutput, RoundStart
from mtp_extract.errors import escape
from mtp_extract.evaluation.extras import TRANSFORMERS_RELEASES, explain_import_failure, quiet_transformers
from mtp_extract.formats import detect_format
from mtp_extract.graph.drafter import ACTIVATIONS
from mtp_extract.graph.flat import INPUT_POS, MASK, MASK_LOCAL, PARAM_TENSOR
from mtp_extract.graph.forms import CacheAxes
from mtp_extract.litertlm.storage import CODE_TYPES, Floats
from mtp_extract.litertlm.tflite import Tensor
from mtp_extract.pipeline.check import Check
from mtp_extract.pipeline.extraction import extract_drafter
from mtp_extract.pipeline.plan import WritingPlan

_LONGEST = 768  # slots; filling all 32003 of a published file would prove no more
# At E2B's input, quantized up to 24.4, real tokens have a root mean square of 3.2. With twice this share
# later activations clip so much that a drafter of E4B's size and its file correlate by 0.67; with this one by 0.91.
_SHARE_OF_RANGE = 0.125
_QUIET = np.float32(1e-3)  # factor of activations so small that epsilons of norms show
# Standard deviation of attention scores: a query has the norm √head_dim, so keys deviate by this over √head_dim.
_KEY_SPREAD = 3.0

FIRST_POSITIONS = 8  # RoPE angles at positions below it are exact but for the last bits
TOLERANCE = 1e-4  # largest difference from transformers, as a share of an output's range: float32 in another order
_SAMPLES = 4  # steps that transformers runs
_KEYS = ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")

# Inputs of one draft step by name; activations and caches in float32. Not all signatures take all of them.
GraphInputs = Mapping[str, NDArray[Any]]
Outputs = tuple[Floats, Floats]  # logits [vocabulary] and projected state [base width] of one step
# (directory, its drafter in float32, the file's drafter) → whether both agree (None: unknown), and the evidence.
Examination = Callable[[Path, MtpDrafter, BundledDrafter], tuple[bool | None, str]]


@dataclass(frozen=True)
class OutputDifference:
    """Differences of two programs' outputs, over all steps."""

    logits: float  # largest difference, as a share of the range of that step's logits; infinite for NaN
    state: float  # the same of projected states
    correlation: float  # mean over the steps; the lower one of logits and states
    top1: int  # steps with the same argmax

    @property
    def worst(self) -> float:
        """The larger of both differences."""
        return max(self.logits, self.state)


def list_cache_inputs(source: BundledDrafter) -> dict[str, tuple[tuple[str, CacheAxes], tuple[str, CacheAxes]]]:
    """Return, by layer type, the input names of K and V, each with its axes of heads, slots and dimensions."""
    axes: dict[str, CacheAxes] = {}
    for layer in source.structure.layers:
        axes |= {layer.key: layer.attention.scores.axes, layer.value: layer.attention.axes}
    caches = {}
    for kind, (key, value) in source.kv.items():
        if key not in axes or value not in axes:
            # No attention was read: assume the layout of all published files, where V is transposed.
            axes |= {key: (1, 2, 3), value: (1, 3, 2)}
        caches[kind] = (key, axes[key]), (value, axes[value])
    return caches


def view_by_slot(cache: NDArray[Any], axes: CacheAxes) -> NDArray[Any]:
    """Return a view of ``cache`` as [1, KV heads, slots, head_dim]; writing to it writes to ``cache``."""
    heads, slots, dimensions = axes
    in_order = [axis for axis in (heads, slots, dimensions) if axis is not None]
    unit_axes = [axis for axis in range(cache.ndim) if axis not in in_order]
    ordered = cache.transpose(*unit_axes, *in_order)
    view: NDArray[Any] = ordered.reshape(1, -1, *ordered.shape[-2:])
    return view


def draw_inputs(source: BundledDrafter, count: int, seed: int = 0, *, quiet: bool = False) -> Iterator[GraphInputs]:
    """Draw ``count`` random steps at positions from 1 to the end of the caches, or of their first 768 slots.

    With ``quiet`` each step at one of the :data:`FIRST_POSITIONS` is repeated with a thousandth of its activations,
    which shows the epsilons of norms.
    """
    random = np.random.default_rng(seed)
    first = next(role.input for role in source.structure.roles if role.role == "pre_projection")
    unit = first.scale * np.iinfo(first.type).max * _SHARE_OF_RANGE if first else 1.0
    shape = (1, 1, 2 * source.config.backbone_hidden_size)
    for position in choose_positions(source, count):
        activations = (random.standard_normal(shape) * unit).astype(np.float32)
        inputs = {
            ACTIVATIONS: activations,
            **_build_position_inputs(source, position),
            **_draw_caches(source, position, random),
        }
        yield inputs
        if quiet and position < FIRST_POSITIONS:
            yield {**inputs, ACTIVATIONS: activations * _QUIET}


def _build_position_inputs(source: BundledDrafter, position: int) -> dict[str, NDArray[Any]]:
    """Return the inputs of a step that depend on its position alone: position, masks, and parameters."""
    end = find_longest_cache(source)
    slots = np.arange(end)
    past = slots <= position
    in_window = slots > position - (source.config.sliding_window or end)
    # [start, end, end]: the newest slot, and one past the last readable slot.
    parameters = [position, position + 1, position + 1, 0, 0, 0, 0]
    return {
        INPUT_POS: np.array([position], np.int32),
        MASK: past[None, None, None],
        MASK_LOCAL: (past & in_window)[None, None, None],
        PARAM_TENSOR: np.array([[[parameters]]], np.int32),
    }


def _draw_caches(source: BundledDrafter, position: int, random: np.random.Generator) -> dict[str, NDArray[Any]]:
    """Draw K and V of every layer type, by input name: random up to ``position``, zeros after it."""
    contents: dict[str, NDArray[Any]] = {}
    for kind, (keys, values) in list_cache_inputs(source).items():
        key_spread = _KEY_SPREAD / source.config.kv_layers[kind].head_dim ** 0.5
        for (name, axes), spread in ((keys, key_spread), (values, 1.0)):
            tensor = source.structure.caches[name]
            contents[name] = np.zeros(tensor.shape, np.float32)
            visible = view_by_slot(contents[name], axes)[:, :, : position + 1]
            visible[:] = _draw_cache(random, visible.shape, tensor, spread)
    return contents


def choose_positions(source: BundledDrafter, count: int, *, quiet: bool = False) -> list[int]:
    """Return the positions of :func:`draw_inputs`; with ``quiet``, those below :data:`FIRST_POSITIONS` twice."""
    last = min(find_longest_cache(source), _LONGEST) - 1
    positions: list[int] = np.geomspace(1, last, count).round().astype(int).tolist()
    return sorted(positions + [position for position in positions if quiet and position < FIRST_POSITIONS])


def find_longest_cache(source: BundledDrafter) -> int:
    """Return the number of slots of the longest cache."""
    return max(
        source.structure.caches[key].shape[slots] for (key, (_, slots, _)), _ in list_cache_inputs(source).values()
    )


def compute_allowed_difference(terms: int, position: int) -> float:
    """Return the largest difference, as a share of an output's range, that two programs in float32 may show.

    It is 2⁻²⁴ · (10 · √terms + 2 · position), with at least 256 terms. One rounding is off by up to 2⁻²⁴ of a number;
    the errors of a sum of ``terms`` products in another order grow with √terms. The factor 10 covers a drafter's thirty
    sums one after another; 1 to 5 were measured at widths of 240 to 5120. Roots, exponentials and tangents round, too,
    hence the least of 256. A RoPE angle at ``position`` is a product of two rounded numbers.
    """
    return 2**-24 * (10 * math.sqrt(max(terms, 256)) + 2 * position)


def _draw_cache(
    random: np.random.Generator, shape: tuple[int, ...], tensor: Tensor, spread: float
) -> NDArray[np.float64]:
    """Draw the contents of a cache. A quantized cache gets values that its codes can represent exactly.

    The standard deviation is ``spread`` for floats, an eighth of the largest representable value for codes.
    """
    packing = CODE_TYPES.get(tensor.type) if tensor.type is not None else None
    quantization = tensor.quantization
    numbers = random.standard_normal(shape)
    if packing is None or quantization is None or not quantization.scales.count:
        return numbers * spread
    scale = float(quantization.scale[0])
    zero_point = int(quantization.zero_point[0]) if quantization.zero_point.size else 0
    codes = np.rint(numbers * (packing.highest - zero_point) * _SHARE_OF_RANGE)
    return np.clip(codes, packing.lowest - zero_point, packing.highest - zero_point) * scale


def read_visible_slots(source: BundledDrafter, inputs: GraphInputs) -> dict[str, KV]:
    """Return, by layer type, K and V up to the step's position, each [1, KV heads, position + 1, head_dim]."""
    slots = int(inputs[INPUT_POS][0]) + 1

    def read(name: str, axes: CacheAxes) -> torch.Tensor:
        return torch.from_numpy(view_by_slot(inputs[name], axes)[:, :, :slots])

    return {kind: (read(*keys), read(*values)) for kind, (keys, values) in list_cache_inputs(source).items()}


@torch.inference_mode()
def run_reference(drafter: MtpDrafter, source: BundledDrafter, inputs: GraphInputs) -> Outputs:
    """Run ``drafter``, float32 on the CPU, on ``inputs``."""
    position = torch.from_numpy(inputs[INPUT_POS])[None].long()
    embedding, hidden = torch.from_numpy(inputs[ACTIVATIONS]).chunk(2, dim=-1)
    base = BaseOutput(position, position, hidden, {}, read_visible_slots(source, inputs))
    state = drafter.start(RoundStart(base, position + 1, lambda _: embedding))
    logits, after = drafter.step(state, position)
    return logits.numpy().reshape(-1), after.hidden.numpy().reshape(-1)


@np.errstate(all="ignore")
def compare_outputs(ours: Sequence[Outputs], theirs: Sequence[Outputs]) -> OutputDifference:
    """Compare two programs' outputs step by step."""
    pairs = list(zip(ours, theirs, strict=True))
    logits = [(a[0], b[0].astype(np.float64)) for a, b in pairs]
    states = [(a[1], b[1].astype(np.float64)) for a, b in pairs]
    top1 = sum(int(a.argmax() == b.argmax()) for a, b in logits)
    correlation = min(_compute_mean_correlation(logits), _compute_mean_correlation(states))
    return OutputDifference(_find_largest_difference(logits), _find_largest_difference(states), correlation, top1)


def _find_largest_difference(pairs: Iterable[tuple[Floats, NDArray[np.float64]]]) -> float:
    """Return max |a - b| / (max b - min b) over all pairs; infinite for NaN."""
    shares = [float(np.abs(a - b).max() / np.ptp(b)) for a, b in pairs]
    return max(share if math.isfinite(share) else math.inf for share in shares)


def _compute_mean_correlation(pairs: Iterable[tuple[Floats, NDArray[np.float64]]]) -> float:
    return float(np.mean([np.corrcoef(a, b)[0, 1] for a, b in pairs]))


def run_check(
    name: str, what: str, examine: Examination, directory: Path, drafter: MtpDrafter, source: BundledDrafter
) -> Check:
    """Run ``examine`` as the check ``name``; it stays open if ``examine`` fails with the sample's drafter, too."""
    passed, evidence = examine(directory, drafter, source)
    if passed is False:
        with tempfile.TemporaryDirectory() as folder, open_bundle(sample_bundle()) as opened:
            sample = Path(folder) / "sample"
            extract_drafter(sample_bundle(), sample, WritingPlan(dtype="f32"))
            sample_passed, _ = examine(sample, load_drafter(sample), opened.read_drafter())
        if not sample_passed:
            passed = None
            evidence = f"it fails with a drafter that is known to be right, too: {evidence}"
    return Check(name, what, passed, evidence)


# transformers


def check_transformers(directory: Path, drafter: MtpDrafter, source: BundledDrafter) -> Check:
    """Load ``directory`` with transformers and compare it with ``drafter``, float32, on random inputs.

    The check stays open if transformers cannot be imported, if it fails with the sample's drafter, too, or if it fails
    and is not a supported release. ``source``, the file's drafter, has the signature of the inputs.
    """
    what = "transformers loads it strictly, and computes what the reference does"
    if detect_format(directory).name != "transformers":
        return Check("transformers", what, None, "this is asked of the transformers format only")
    if why := explain_import_failure("transformers", "Gemma4AssistantForCausalLM"):
        return Check("transformers", what, None, f"transformers: {why}; {TRANSFORMERS_RELEASES} works")
    check = run_check("transformers", what, _compare_with_transformers, directory, drafter, source)
    version = str(sys.modules["transformers"].__version__)
    if check.passed is False and not SpecifierSet(TRANSFORMERS_RELEASES).contains(version, prereleases=True):
        check = replace(check, passed=None, evidence=f"it is of no release that was tried: {check.evidence}")
    if check.passed is None:
        why = f"transformers {escape(version)}: {check.evidence}; {TRANSFORMERS_RELEASES} works"
        check = replace(check, evidence=why)
    return check


def _compare_with_transformers(directory: Path, drafter: MtpDrafter, source: BundledDrafter) -> tuple[bool, str]:
    from transformers import AutoModelForCausalLM

    try:
        quiet_transformers()
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, local_files_only=True, trust_remote_code=False, output_loading_info=True
        )
        model, info = loaded
        if faults := {name.replace("_", " "): info[name] for name in _KEYS if info.get(name)}:
            return False, "; ".join(f"{name} {escape(', '.join(map(str, keys)))}" for name, keys in faults.items())
        theirs = [
            _run_transformers_step(model, source, drafter.config, inputs) for inputs in draw_inputs(source, _SAMPLES)
        ]
        worst = compare_outputs(
            [run_reference(drafter, source, x) for x in draw_inputs(source, _SAMPLES)], theirs
        ).worst
    except Exception as error:  # noqa: BLE001 - transformers raises any class for a damaged directory
        return False, f"it does not load, or does not run: {escape(' '.join(str(error).split()))}"
    evidence = f"outputs within {worst:.1g} of their range for {_SAMPLES} inputs, {TOLERANCE:g} being allowed"
    return worst <= TOLERANCE, evidence


@torch.inference_mode()
def _run_transformers_step(model: Any, source: BundledDrafter, config: DrafterConfig, inputs: GraphInputs) -> Outputs:
    # The caches hold only the slots that the query may see, so no mask has to hide any.
    kv = {
        kind: tuple(part[:, :, -(config.kv_layers[kind].sliding_window or part.shape[2]) :] for part in pair)
        for kind, pair in read_visible_slots(source, inputs).items()
    }
    any_kv = next(iter(kv.values()))
    output = model(
        inputs_embeds=torch.from_numpy(inputs[ACTIVATIONS]),
        position_ids=torch.from_numpy(inputs[INPUT_POS])[None].long(),
        # transformers makes masks of both kinds, even of one that no layer has.
        shared_kv_states={SLIDING: any_kv, FULL: any_kv, **kv},
    )
    logits = output.logits.float()
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    if cap is not None:  # transformers applies the cap in sampling only
        logits = torch.tanh(logits / cap) * cap
    return logits.numpy().reshape(-1), output.last_hidden_state.float().numpy().reshape(-1)
