"""Insertion, the way back: a drafter's checkpoint → bundle, in one page.

The bundle's own graph, types, layout and other sections stay; what changes are the bytes of the drafter's constants,
or, where a shared constant is to differ, the drafter's section. Everything is planned, and checked, before a byte is
written.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from mtp_extract.architecture.roles import shapes_of
from mtp_extract.bundle import MODEL_TYPE, Opened, Shard, open_bundle
from mtp_extract.checkpoint.checkpoint import Checkpoint
from mtp_extract.checkpoint.codes import with_codes
from mtp_extract.errors import CheckpointError, FormatError, NoDrafterError, PairError, UnsupportedError, escape
from mtp_extract.formats import read_checkpoint
from mtp_extract.insertion.activations import Ranges, recalibrated
from mtp_extract.insertion.encoding import KEPT, Encoding, check_written, encode
from mtp_extract.insertion.fit import base_misfits, check_geometry
from mtp_extract.insertion.placing import Overlay, Site, new_tensors, overlays
from mtp_extract.insertion.plan import InsertionPlan
from mtp_extract.insertion.slots import Place, Slot, require_ones
from mtp_extract.io.laid import Laid, LaidSource, copied
from mtp_extract.io.opening import checkpoint_here
from mtp_extract.io.place import PathLike
from mtp_extract.litertlm.container import TFLITE_MODEL, TFLITE_WEIGHTS, read_bundle
from mtp_extract.litertlm.rebuild import rebuilt
from mtp_extract.litertlm.writer import Added, bundle_with
from mtp_extract.pipeline.extraction import checkpoint_of, prove_checkpoint
from mtp_extract.pipeline.unexpected import require_manifest
from mtp_extract.proof.proof import Proof
from mtp_extract.report.files import REPORT_FILES


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
        UnsupportedError: what is to change is not stored, or cannot be stored so; or a graph is given to a bundle that
            has one.
        MtpExtractError: a source that cannot be read.
    """
    source = checkpoint_here(source, or_bundle=True)
    with ExitStack() as stack:
        checkpoint = _checkpoint(source, stack)
        opened = stack.enter_context(open_bundle(bundle, section=section, signature=signature))
        window = checkpoint.mtp.sliding_window
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
    region, bundle = drafter.model.region, opened.bundle
    assert bundle is not None
    items = {k: str(v) for k, v in drafter.section.items.items()} if drafter.section else {}
    items = items or {"model_type": f"tf_lite_{MODEL_TYPE}", "backend_constraint": "cpu"}
    new = [Added(TFLITE_MODEL, items, copied(region.source, region.begin, region.size))]
    if (weights := drafter.model.weights) is not None:
        owned = {"model_type": items["model_type"]}
        new.append(Added(TFLITE_WEIGHTS, owned, copied(weights.source, weights.begin, weights.size)))
    virtual = LaidSource(bundle_with(bundle, {}, new), opened.source.name)
    grown = Opened(virtual, read_bundle(virtual), None, template.signature)
    if problems := list(base_misfits(grown, grown.drafter())):
        raise PairError(
            f"{opened.source.name}: its base cannot run the drafter of {template.source.name}: {'; '.join(problems)}. "
            "Take a drafter that was exported for this base."
        )
    return grown


def _plan(
    checkpoint: Checkpoint,
    drafter: Shard,
    inputs: tuple[PathLike | None, ...],
    ranges: Ranges | None,
    added: bool,
) -> InsertionPlan:
    opened, window = drafter.opened, checkpoint.mtp.sliding_window
    notes = check_geometry(checkpoint.mtp, drafter.config, opened.source.name)
    if not added and (problems := list(base_misfits(opened, drafter))):
        # What was there before stays, fit or not.
        notes.append(f"In this bundle the drafter could not run before: {'; '.join(problems)}.")
    encodings = {encoding.role: encoding for encoding in encode(list(_slots(checkpoint, drafter)))}
    layout, moved = _layout(drafter, _sites(drafter, encodings))
    if moved:
        virtual = LaidSource(layout, opened.source.name)
        section = drafter.section.index if drafter.section else None
        relaid = Opened(virtual, read_bundle(virtual) if opened.bundle else None, section, drafter.signature.key)
        drafter = relaid.drafter(window)
    calibrated, remarks = _activations(drafter, encodings.values(), ranges)

    def check(path: Path) -> Proof:
        with open_bundle(path, section=opened.section, signature=opened.signature) as new:
            found = new.drafter(window)
            check_written(path, encodings.values(), _slots(checkpoint, found))
            return prove_checkpoint(found, checkpoint_of(found))

    return InsertionPlan(
        name=opened.source.name,
        encodings={role: (encoding,) for role, encoding in encodings.items()},
        layout=layout,
        overlays=(*overlays(_sites(drafter, encodings), moved), *calibrated),
        notes=(*notes, *remarks),
        source=opened.source,
        inputs=inputs,
        check=check,
        added=added,
        rebuilt=len(moved),
    )


def _slots(checkpoint: Checkpoint, drafter: Shard) -> Iterator[Slot]:
    """Every constant of ``drafter`` with its weight in ``checkpoint``.

    Raises:
        UnsupportedError: a weight is missing, or one that no constant holds is not of ones.
    """
    found, weights = {role.role: role for role in drafter.walk.roles}, checkpoint.whole().tensors
    for role, shape in shapes_of(drafter.config).items():
        if (new := weights.get(role.name)) is None:
            raise UnsupportedError(f"{role.name}: the checkpoint has no such weight.")
        own = found.get(role.name)
        if own is None or own.tensor is None:
            require_ones(role.name, shape, new, checkpoint.dtype)
        else:
            yield Slot(role.name, (Place(drafter.signature.key, drafter.model, own),), new, checkpoint.dtype)


def _sites(drafter: Shard, encodings: Mapping[str, Encoding]) -> list[Site]:
    places = (Place(drafter.signature.key, drafter.model, role) for role in drafter.walk.roles)
    return [(place, encodings[place.found.role]) for place in places if place.found.role in encodings]


def _layout(drafter: Shard, sites: Sequence[Site]) -> tuple[Laid, frozenset[str]]:
    """The file that is written over, and the roles that have a new and empty place in it."""
    opened, changes = drafter.opened, [change for change, _ in new_tensors(drafter.model, sites)]
    source = opened.source
    if not changes:
        return (source.laid if isinstance(source, LaidSource) else copied(source, 0, source.size)), frozenset()
    section = rebuilt(drafter.model, changes)
    keys = {(change.subgraph, change.tensor) for change in changes}
    roles = frozenset(e.role for place, e in sites if (place.tensor.subgraph, place.tensor.index) in keys)
    if opened.bundle is None:
        return section, roles
    if drafter.section is None:
        raise FormatError(f"{source.name}: its drafter has no section.")
    return bundle_with(opened.bundle, {drafter.section.index: section}), roles


def _activations(
    drafter: Shard, encodings: Iterable[Encoding], ranges: Ranges | None
) -> tuple[list[Overlay], list[str]]:
    """New scales of static activations, and notes on them."""
    static = [role.role for role in drafter.walk.roles if role.input is not None]
    if not static:
        return [], ["The graph has no static activations: nothing was calibrated."] if ranges is not None else []
    if ranges is None:
        if all(encoding.how == KEPT for encoding in encodings):
            return [], []
        return [], [
            "The graph quantizes activations statically, with scales that were calibrated for the old weights: drafts "
            "may be accepted less often than the checkpoint's. A base and prompts give new ones."
        ]
    scales, kept = recalibrated(drafter, ranges)
    done = f"Static activations of {len(static)} matrices were calibrated anew."
    return [*scales], [done, *([f"Shared with other operators, so left: {', '.join(kept)}."] if kept else [])]
