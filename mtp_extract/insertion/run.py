"""Insertion, the way back: the checkpoint of a drafter, or of a base → bundle, in one page.

The bundle's own graph, types, layout and other sections stay; what changes are the bytes of constants.
Everything is planned, and checked, before a byte is written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from mtp_extract.architecture.roles import shapes_of
from mtp_extract.bundle import MODEL_TYPE, Opened, Shard, open_bundle
from mtp_extract.checkpoint.checkpoint import Checkpoint
from mtp_extract.errors import CheckpointError, NoDrafterError, PairError, UnsupportedError, escape
from mtp_extract.insertion.activations import Ranges, calibrated
from mtp_extract.insertion.base import plan_base
from mtp_extract.insertion.base_checkpoint import holds_base, read_base
from mtp_extract.insertion.encoding import KEPT, check_written, encode
from mtp_extract.insertion.fit import base_misfits, check_geometry
from mtp_extract.insertion.plan import InsertionPlan, overlays
from mtp_extract.insertion.slots import Place, Slot, slots_of
from mtp_extract.io.opening import checkpoint_here
from mtp_extract.io.place import PathLike, files_of
from mtp_extract.io.source import Progress, nothing_shown
from mtp_extract.litertlm.container import TFLITE_MODEL, TFLITE_WEIGHTS, read_bundle
from mtp_extract.litertlm.writer import Added, bundle_with
from mtp_extract.pipeline.extraction import checkpoint_of, prove_checkpoint
from mtp_extract.pipeline.reading import ReadDirectory
from mtp_extract.proof.proof import Proof


@contextmanager
def planned_insertion(
    source: PathLike,
    bundle: PathLike,
    *,
    ranges: Ranges | None = None,
    graph_from: PathLike | None = None,
    section: int | None = None,
    progress: Progress = nothing_shown,
) -> Iterator[InsertionPlan]:
    """Plan to put the weights of ``source`` into ``bundle``; arguments are those of :func:`mtp_extract.insert`.

    Args:
        ranges: what the drafter's activations reach, for graphs that quantize them statically.
        progress: of the weights of a base.

    Raises:
        PairError: the checkpoint does not fit what the bundle holds, or the drafter not the base.
        UnsupportedError: what is to change is not stored, is stored once for several weights that are to differ, or
            cannot be stored so; or a graph is given to a bundle that has one.
        MtpExtractError: a source that cannot be read.
    """
    source = checkpoint_here(source, or_bundle=True)
    with ExitStack() as stack:
        if holds_base(Path(source)):
            base, opened = read_base(Path(source)), stack.enter_context(open_bundle(bundle))
            yield plan_base(base, opened, (bundle, *files_of(source)), progress)
            return
        checkpoint = _checkpoint(source, stack)
        opened = stack.enter_context(open_bundle(bundle, section=section))
        template = graph_from or (None if Path(source).is_dir() else source)
        drafter, added = _drafter_of(opened, checkpoint.mtp.sliding_window, template, stack)
        if graph_from is not None and not added:
            raise UnsupportedError(
                f"{opened.source.name}: has a drafter, whose graph stays; no other is added. Leave the other file out.",
                remedies=("graph_from",),
            )
        yield _plan(checkpoint, drafter, (bundle, source, graph_from), ranges, added)


def _drafter_of(opened: Opened, window: int | None, template: PathLike | None, stack: ExitStack) -> tuple[Shard, bool]:
    """The drafter in ``opened``, or else that of ``template`` added to it; and whether it was added."""
    try:
        return opened.drafter(window), False
    except NoDrafterError as error:
        if opened.bundle is None or opened.section is not None:
            raise
        if template is None:
            raise NoDrafterError(
                f"{error} To add a drafter to it, give a bundle whose drafter's graph it gets.",
                remedies=("graph_from",),
            ) from error
        return _with_drafter(opened, stack.enter_context(open_bundle(template))).drafter(window), True


def _checkpoint(source: str | os.PathLike[str], stack: ExitStack) -> Checkpoint:
    if Path(source).suffix == ".safetensors":
        raise CheckpointError(f"{escape(source)}: expected a checkpoint's directory, found a file of one. Give that.")
    if Path(source).is_dir() or Path(source).suffix == ".gguf":
        return ReadDirectory.of(source).checkpoint
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
    scales, remarks = calibrated(drafter, changed, ranges)

    def check(path: Path) -> Proof:
        with open_bundle(path, section=opened.section, signature=opened.signature) as new:
            found = new.drafter(checkpoint.mtp.sliding_window)
            check_written(path, list(_slots(checkpoint, found)))
            return prove_checkpoint(found, checkpoint_of(found))

    return InsertionPlan(
        source,
        encodings,
        (*overlays(every), *scales),
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
