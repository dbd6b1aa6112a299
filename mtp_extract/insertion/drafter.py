"""Insertion, the way back: a drafter's checkpoint → bundle, in one page.

The bundle's own graph, types, layout and other sections stay; what changes are the bytes of the drafter's constants.
Everything is planned, and checked, before a byte is written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from mtp_extract.architecture.roles import shapes_of
from mtp_extract.bundle import MODEL_TYPE, Opened, Shard, open_bundle
from mtp_extract.checkpoint.checkpoint import Checkpoint
from mtp_extract.checkpoint.codes import with_codes
from mtp_extract.errors import CheckpointError, NoDrafterError, PairError, UnsupportedError, escape
from mtp_extract.formats import read_checkpoint
from mtp_extract.graph.flat import Value
from mtp_extract.insertion.encoding import KEPT, check_written, encode
from mtp_extract.insertion.fit import base_misfits, check_geometry
from mtp_extract.insertion.plan import InsertionPlan, Overlay, overlays
from mtp_extract.insertion.slots import Place, Slot, slots_of
from mtp_extract.io.opening import checkpoint_here
from mtp_extract.io.place import PathLike
from mtp_extract.litertlm.container import TFLITE_MODEL, TFLITE_WEIGHTS, read_bundle
from mtp_extract.litertlm.tflite import Tensor, TensorType
from mtp_extract.litertlm.writer import Added, bundle_with
from mtp_extract.pipeline.check import require_manifest
from mtp_extract.pipeline.extraction import checkpoint_of, prove_checkpoint
from mtp_extract.proof.proof import Proof
from mtp_extract.report.files import REPORT_FILES

_LIMITS = {TensorType.INT8: (-128, 127), TensorType.INT16: (-32768, 32767)}
# The operators between floats and a quantized matrix product.
_ENTERS, _PRODUCTS, _LEAVES = "QUANTIZE", ("FULLY_CONNECTED", "BATCH_MATMUL"), "DEQUANTIZE"


Range = tuple[float, float]
"""The least and the largest value that was seen."""

Ranges = Mapping[str, tuple[Range, Range]]
"""Role of a matrix → what went into it and what came out."""


@contextmanager
def planned_insertion(
    source: str | os.PathLike[str],
    bundle: str | os.PathLike[str],
    *,
    ranges: Ranges | None = None,
    graph_from: str | os.PathLike[str] | None = None,
    section: int | None = None,
    signature: str | None = None,
) -> Iterator[InsertionPlan]:
    """Plan to put the weights of ``source`` into the drafter of ``bundle``.

    Args:
        source: a checkpoint's directory, or a bundle or model whose drafter is taken.
        bundle: where they go; it stays as it is.
        ranges: what the drafter's activations reach, for graphs that quantize them statically.
        graph_from: for a bundle without a drafter, the bundle or model whose drafter's graph is added; by default
            ``source``, where that is one.
        section, signature: the drafter's in ``bundle``, where there are several.

    Raises:
        PairError: the checkpoint does not fit the drafter, or the drafter not the base.
        UnsupportedError: what is to change is not stored, is stored once for several weights that are to differ, or
            cannot be stored so; or a graph is given to a bundle that has one.
        MtpExtractError: a source that cannot be read.
    """
    source = checkpoint_here(source, or_bundle=True)
    with ExitStack() as stack:
        checkpoint = _checkpoint(source, stack)
        window = checkpoint.mtp.sliding_window
        opened = stack.enter_context(open_bundle(bundle, section=section, signature=signature))
        added = False
        try:
            drafter = opened.drafter(window)
        except NoDrafterError as error:
            template = graph_from or (None if Path(source).is_dir() else source)
            if opened.bundle is None or section is not None or signature is not None:
                raise
            if template is None:
                raise NoDrafterError(
                    f"{error} To add a drafter to it, give a bundle whose drafter's graph it gets.",
                    remedies=("graph_from",),
                ) from error
            opened = _with_drafter(opened, stack.enter_context(open_bundle(template)))
            drafter, added = opened.drafter(window), True
        if graph_from is not None and not added:
            raise UnsupportedError(
                f"{opened.source.name}: has a drafter, whose graph stays; no other is added. Leave the other file out.",
                remedies=("graph_from",),
            )
        yield _plan(checkpoint, drafter, (bundle, source, graph_from), ranges, added)


def _checkpoint(source: str | os.PathLike[str], stack: ExitStack) -> Checkpoint:
    if Path(source).suffix == ".safetensors":
        raise CheckpointError(f"{escape(source)}: expected a checkpoint's directory, found a file of one. Give that.")
    if Path(source).is_dir() or Path(source).suffix == ".gguf":
        require_manifest(Path(source), REPORT_FILES)
        return with_codes(Path(source), read_checkpoint(Path(source)))
    opened = stack.enter_context(open_bundle(source))
    opened.prefetch()
    return checkpoint_of(opened.drafter())


def _with_drafter(opened: Opened, template: Opened) -> Opened:
    """``opened`` with the drafter's section of ``template`` (or the bare model that it is) at its end.

    Raises:
        PairError: the base in ``opened`` cannot run it.
    """
    drafter = template.drafter()
    region, weights, bundle = drafter.model.region, drafter.model.weights, opened.bundle
    assert bundle is not None
    items = {k: str(v) for k, v in drafter.section.items.items()} if drafter.section else {}
    items = items or {"model_type": f"tf_lite_{MODEL_TYPE}", "backend_constraint": "cpu"}
    new = [Added(TFLITE_MODEL, items, region)]
    if weights is not None:
        owned = {"model_type": items["model_type"]}
        new.append(Added(TFLITE_WEIGHTS, owned, weights))
    virtual = bundle_with(bundle, new)
    grown = Opened(virtual, read_bundle(virtual), None, template.signature)
    if problems := list(base_misfits(grown, grown.drafter())):
        raise PairError(
            f"{opened.source.name}: its base cannot run the drafter of {template.source.name}: {'; '.join(problems)}. "
            "Take a drafter that was exported for this base."
        )
    return grown


def _plan(
    checkpoint: Checkpoint, drafter: Shard, inputs: tuple[PathLike | None, ...], ranges: Ranges | None, added: bool
) -> InsertionPlan:
    opened, source = drafter.opened, drafter.opened.source
    notes = check_geometry(checkpoint.mtp, drafter.config, source.name)
    if not added and (problems := list(base_misfits(opened, drafter))):
        # What was there before stays, fit or not.
        notes.append(f"In this bundle the drafter could not run before: {'; '.join(problems)}.")
    encodings = encode(list(_slots(checkpoint, drafter)))
    every = [encoding for own in encodings.values() for encoding in own]
    changed = any(encoding.how != KEPT for encoding in every)
    calibrated, remarks = _activations(drafter, changed, ranges)

    def check(path: Path) -> Proof:
        with open_bundle(path, section=opened.section, signature=opened.signature) as new:
            found = new.drafter(checkpoint.mtp.sliding_window)
            check_written(path, list(_slots(checkpoint, found)))
            return prove_checkpoint(found, checkpoint_of(found))

    return InsertionPlan(
        source,
        encodings,
        (*overlays(every), *calibrated),
        (*notes, *remarks),
        inputs,
        check,
        added=added,
    )


def _slots(checkpoint: Checkpoint, drafter: Shard) -> Iterator[Slot]:
    """Every role of ``drafter`` with its weight in ``checkpoint``.

    Raises:
        PairError: a weight is missing, or of another shape.
    """
    found, weights = {role.role: role for role in drafter.walk.roles}, checkpoint.whole().tensors
    for role, shape in shapes_of(drafter.config).items():
        own, new = found.get(role.name), weights.get(role.name)
        if new is None or new.shape != shape:
            raise PairError(
                f"{role.name}: expected a weight {list(shape)} in the checkpoint, found "
                f"{'none' if new is None else list(new.shape)}. Give a checkpoint of the same geometry."
            )
        places = [Place(drafter.signature.key, drafter.model, own)] if own is not None else []
        yield from slots_of(role.name, places, new, checkpoint.dtype)


def _activations(drafter: Shard, changed: bool, ranges: Ranges | None) -> tuple[list[Overlay], list[str]]:
    """New scales of static activations, and notes on them; ``changed``: whether any weight is."""
    static = [role.role for role in drafter.walk.roles if role.input is not None]
    if not static:
        return [], ["The graph has no static activations: nothing was calibrated."] if ranges is not None else []
    if ranges is None:
        note = (
            "The graph quantizes activations statically, with scales that were calibrated for the old weights: drafts "
            "may be accepted less often than the checkpoint's. A base and prompts give new ones."
        )
        return [], [note] if changed else []
    scales, kept = _recalibrated(drafter, ranges)
    done = f"Static activations of {len(static)} matrices were calibrated anew."
    return [*scales], [done, *([f"Shared with other operators, so left: {', '.join(kept)}."] if kept else [])]


def _recalibrated(drafter: Shard, ranges: Ranges) -> tuple[list[tuple[int, bytes]], list[str]]:
    """New scales and zero points, each with where in the file it goes, and the roles that keep an old one because other
    operators share it.
    """
    # What several roles read has one range.
    written: dict[int, bytes] = {}
    kept: dict[str, None] = {}
    for role in drafter.walk.roles:
        node = role.result.producer if role.result is not None else None
        if role.input is None or node is None or role.role not in ranges:
            continue
        for value, bounds in zip((node.operand(0), node.outputs[0]), ranges[role.role], strict=True):
            if _is_own(value):
                written.update(_scale_bytes(drafter.model.region.begin, value.tensors[-1], bounds))
            else:
                kept[role.role] = None
    return list(written.items()), list(kept)


def _is_own(value: Value) -> bool:
    """Whether ``value`` lies between floats and one kind of matrix only."""
    maker, readers = value.producer, {node.kind for node, _ in value.consumers}
    if value.tensors[-1].type not in _LIMITS or maker is None:
        return False
    return (maker.kind == _ENTERS and readers <= set(_PRODUCTS)) or (maker.kind in _PRODUCTS and readers <= {_LEAVES})


def _scale_bytes(begin: int, tensor: Tensor, bounds: Range) -> Iterator[tuple[int, bytes]]:
    quantization, type_ = tensor.quantization, tensor.type
    assert quantization is not None and type_ is not None
    lowest, highest = _LIMITS[type_]
    low, high = min(bounds[0], 0.0), max(bounds[1], 0.0)
    symmetric = not quantization.zero_point.any()
    # As weights are quantized; a range of nothing keeps its scale.
    span, steps = (max(-low, high), highest) if symmetric else (high - low, highest - lowest)
    scale = np.float32(span) / np.float32(steps)
    if 0 < scale < np.inf:
        yield begin + quantization.scales.start, np.array([scale], "<f4").tobytes()
        if not symmetric:
            zero_point = np.rint(np.float32(lowest) - np.float32(low) / scale)
            yield begin + quantization.zero_points.start, np.array([zero_point], "<i8").tobytes()
