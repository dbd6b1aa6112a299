"""Insertion: put the checkpoint of a drafter or of a base back into a bundle.

The bundle keeps its graph, types, layout and other sections; only the bytes of constants change. Everything is planned
and checked before a byte is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from mtp_extract.architecture import list_shapes
from mtp_extract.architecture.config import DrafterConfig
from mtp_extract.bundle import MODEL_TYPE, BundledDrafter, ModelFile, open_bundle
from mtp_extract.checkpoint.checkpoint import Checkpoint
from mtp_extract.errors import CheckpointError, NoDrafterError, PairError, UnsupportedError, escape, list_few
from mtp_extract.insertion.activations import (
    Ranges,
    StaticActivations,
    calibrate_activations,
    describe_static_activations,
)
from mtp_extract.insertion.base import check_base, describe_differences, find_base, find_misfits
from mtp_extract.insertion.base_checkpoint import BaseCheckpoint, check_merged, holds_base, read_base
from mtp_extract.insertion.encoding import KEPT, check_written, encode_slots
from mtp_extract.insertion.plan import InsertionPlan, Losses, build_overlays
from mtp_extract.insertion.slots import Location, WeightSlot, match_roles
from mtp_extract.io.opening import is_checkpoint
from mtp_extract.io.place import PathLike, list_files
from mtp_extract.litertlm.container import TFLITE_MODEL, TFLITE_WEIGHTS, read_bundle_header
from mtp_extract.litertlm.writer import NewSection, add_sections
from mtp_extract.pipeline.check import CheckpointDirectory
from mtp_extract.pipeline.extraction import build_checkpoint, prove_checkpoint
from mtp_extract.progress import SILENT, Reporter, make_counter
from mtp_extract.proof.proof import Proof

# Relative: exporters compute constants in float32, and configurations round them.
_CONFIG_TOLERANCE = 1e-6

_COMPARED = (
    *("backbone_hidden_size", "hidden_size", "intermediate_size", "vocab_size", "num_heads", "num_layers"),
    *("layer_types", "head_dims", "num_kv_heads", "sliding_window", "rms_norm_eps", "attention_scale"),
    "hidden_activation",
)


@contextmanager
def plan_insertion(
    source: PathLike,
    bundle: PathLike,
    *,
    measure: Callable[[], Ranges] | None = None,
    cut_off: Callable[[StaticActivations], tuple[float, float]] | None = None,
    graph_from: PathLike | None = None,
    section: int | None = None,
    reporter: Reporter = SILENT,
) -> Iterator[InsertionPlan]:
    """Plan to put the weights of ``source`` into ``bundle``; other arguments are those of :func:`mtp_extract.insert`.

    Args:
        measure: measures the ranges of the drafter's activations, for graphs that quantize them statically.
        cut_off: measures the share of activations that static scales clip, for the old base and the new one.

    Raises:
        PairError: the checkpoint does not fit the bundle, or the drafter does not fit the base.
        UnsupportedError: a new weight cannot be stored, or the arguments contradict each other.
        MtpExtractError: a source cannot be read.
    """
    check_merged(Path(source))
    with ExitStack() as stack:
        if holds_base(Path(source)):
            drafter_options = {"graph_from": graph_from, "base": measure, "section": section}
            if wrong := tuple(name for name, value in drafter_options.items() if value is not None):
                raise UnsupportedError(
                    f"{escape(source)}: expected a drafter's checkpoint, found a base's. Leave out what is for a "
                    "drafter.",
                    remedies=wrong,
                )
            base, opened = read_base(Path(source)), stack.enter_context(open_bundle(bundle))
            yield _plan_base(base, opened, (bundle, *list_files(source)), cut_off, reporter)
            return

        template = None
        if is_checkpoint(source):
            checkpoint = CheckpointDirectory.of(source).checkpoint
        else:
            template = stack.enter_context(open_bundle(source))
            template.prefetch()
            checkpoint = build_checkpoint(template.read_drafter())

        opened, window = stack.enter_context(open_bundle(bundle, section=section)), checkpoint.mtp.sliding_window
        if graph_from is not None:
            template = stack.enter_context(open_bundle(graph_from))
        try:
            drafter, added = opened.read_drafter(window), False
        except NoDrafterError as error:
            drafter, added = _add_drafter(opened, template, window, error), True
        if graph_from is not None and not added:
            raise UnsupportedError(
                f"{opened.source.name}: has a drafter, whose graph stays; no other is added. Leave the other file out.",
                remedies=("graph_from",),
            )
        yield _plan_drafter(checkpoint, drafter, (bundle, source, graph_from), measure, added)


def _add_drafter(
    opened: ModelFile, template: ModelFile | None, window: int | None, error: NoDrafterError
) -> BundledDrafter:
    """Add the model of ``template``'s drafter as a new last section of ``opened``, and return the drafter there.

    Raises:
        NoDrafterError: there is no template, or no section can be added; ``error`` says why ``opened`` has no drafter.
        PairError: the base in ``opened`` cannot run the drafter.
    """
    if (bundle := opened.bundle) is None or opened.section is not None:
        raise error
    if template is None:
        raise NoDrafterError(
            f"{error} To add a drafter to it, give a bundle whose drafter's graph it gets.", remedies=("graph_from",)
        ) from error
    drafter = template.read_drafter()
    items = {key: str(value) for key, value in drafter.section.items.items()} if drafter.section else {}
    items = items or {"model_type": f"tf_lite_{MODEL_TYPE}", "backend_constraint": "cpu"}
    sections = [NewSection(TFLITE_MODEL, items, drafter.model.region)]
    if (weights := drafter.model.weights) is not None:
        sections.append(NewSection(TFLITE_WEIGHTS, {"model_type": items["model_type"]}, weights))
    virtual = add_sections(bundle, sections)
    added = ModelFile(virtual, read_bundle_header(virtual), None, template.signature).read_drafter(window)
    if problems := "; ".join(find_misfits(added)):
        raise PairError(
            f"{opened.source.name}: its base cannot run the drafter of {template.source.name}: {problems}. Take a "
            "drafter that was exported for this base."
        )
    return added


def _plan_drafter(
    checkpoint: Checkpoint,
    drafter: BundledDrafter,
    inputs: tuple[PathLike | None, ...],
    measure: Callable[[], Ranges] | None,
    added: bool,
) -> InsertionPlan:
    opened, source = drafter.opened, drafter.opened.source
    notes = [*checkpoint.notes, *opened.remarks]
    notes += _compare_configs(checkpoint.mtp, drafter.config, source.name)
    if not added and (problems := "; ".join(find_misfits(drafter))):
        # Not an error: the insertion does not change it.
        notes.append(f"In this bundle drafter and base did not fit before, and do not now: {problems}.")
    encodings = encode_slots(_match_drafter(drafter, checkpoint))
    all_encodings = [encoding for of_role in encodings.values() for encoding in of_role]
    overlays = [*build_overlays(all_encodings)]
    changes_weights = any(encoding.how != KEPT for encoding in all_encodings)
    scales, remarks = calibrate_activations(drafter, changes_weights, measure)

    def check(path: Path) -> Proof:
        with open_bundle(path, section=opened.section, signature=opened.signature) as new:
            new_drafter = new.read_drafter(checkpoint.mtp.sliding_window)
            check_written(path, _match_drafter(new_drafter, checkpoint), encodings)
            return prove_checkpoint(new_drafter, build_checkpoint(new_drafter))

    return InsertionPlan(source, encodings, (*overlays, *scales), (*notes, *remarks), inputs, check, added=added)


def _compare_configs(checkpoint: DrafterConfig, graph: DrafterConfig, name: str) -> list[str]:
    """Return notes on differences between the configurations of ``checkpoint`` and ``graph``; raise PairError if their
    shapes differ, or they compute differently.

    The graph computes with its own constants (RoPE, epsilon, soft cap): those of the checkpoint's config are lost.
    """
    expected = {key: getattr(checkpoint, key) for key in _COMPARED}
    of_graph = {key: getattr(graph, key) for key in _COMPARED}
    for layer_type, rope in graph.rope.items():
        for key in ("theta", "partial_rotary_factor", "factor"):
            place = f"RoPE's {key} in {layer_type}"
            expected[place] = getattr(checkpoint.rope.get(layer_type), key, None)
            of_graph[place] = getattr(rope, key)
    if wrong := describe_differences(expected, of_graph, _CONFIG_TOLERANCE):
        raise PairError(
            f"{name}: the checkpoint does not fit its drafter, which has {wrong}. Give the checkpoint of a drafter for "
            "this bundle."
        )
    notes = []
    if (cap_of_checkpoint := checkpoint.final_logit_softcap) != (cap := graph.final_logit_softcap):
        notes.append(
            f"The graph's soft cap ({cap}) stays; the checkpoint's is {cap_of_checkpoint}. The best token is the same."
        )
    if checkpoint.ordered_head is not None:
        notes.append("The checkpoint's centroid head stays behind: the graph's head is dense.")
    return notes


def _match_drafter(drafter: BundledDrafter, checkpoint: Checkpoint) -> list[WeightSlot]:
    places = {role.role: (Location(drafter.model, role),) for role in drafter.structure.roles}
    tensors = checkpoint.complete().tensors
    weights = {role.name: tensors[role.name] for role in list_shapes(drafter.config) if role.name in tensors}
    return [slot for match in match_roles(places, weights, checkpoint.dtype) for slot in match.require_slots()]


def _plan_base(
    checkpoint: BaseCheckpoint,
    opened: ModelFile,
    inputs: tuple[PathLike | None, ...],
    cut_off: Callable[[StaticActivations], tuple[float, float]] | None,
    reporter: Reporter,
) -> InsertionPlan:
    if checkpoint.unknown:
        raise CheckpointError(
            f"{escape(checkpoint.directory)}: {len(checkpoint.unknown)} tensors play no role in Gemma 4's text model: "
            f"{list_few(checkpoint.unknown)}. They cannot be put into a bundle."
        )
    slots, notes = _match_base(opened, checkpoint)
    notes = [*opened.remarks, *notes]
    encodings = encode_slots(
        slots, make_counter(reporter, "encoding", sum(math.prod(slot.new.shape) for slot in slots))
    )
    overlays = tuple(build_overlays(encoding for of_role in encodings.values() for encoding in of_role))
    if warning := Losses.of(encodings).warning:
        notes.append(warning)
    if overlays:
        roles = [place.found for slot in slots for place in slot.places]
        grids = {role.role: (role.input, role.output) for role in roles if role.input or role.output}
        notes += describe_static_activations(grids, cut_off)
        if any(section.model_type == MODEL_TYPE for section in opened.sections):
            notes.append("The drafter was made for the base that was there: its drafts may be accepted less often.")

    def check(path: Path) -> None:
        with open_bundle(path) as new:
            check_written(path, _match_base(new, checkpoint)[0], encodings)

    return InsertionPlan(opened.source, encodings, overlays, tuple(notes), inputs, check, of_base=True)


def _match_base(opened: ModelFile, checkpoint: BaseCheckpoint) -> tuple[list[WeightSlot], list[str]]:
    """Return the slots of the base in ``opened`` with the checkpoint's weights, and notes on their configurations."""
    base = find_base(opened)
    notes = check_base(checkpoint, base)
    matches = match_roles(base.places, checkpoint.weights)
    return [slot for match in matches for slot in match.require_slots()], notes
