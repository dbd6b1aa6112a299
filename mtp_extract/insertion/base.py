"""The base in a bundle: where every signature stores each role, and whether a checkpoint or a drafter fits it.

Signatures share the codes of a matrix, but each has its own scales.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, astuple, replace
from functools import partial
from typing import NamedTuple

from msgspec import Struct, structs

from mtp_extract.architecture.config import DrafterConfig
from mtp_extract.bundle import MODEL_TYPE, BundledDrafter, ModelFile
from mtp_extract.checkpoint.documents import find_differences
from mtp_extract.errors import MtpExtractError, PairError, RoleError, UnsupportedError, escape
from mtp_extract.formats.reading import Size, attribute_errors_to, parse_fields
from mtp_extract.formats.transformers import Rope, parse_rope
from mtp_extract.graph.base import (
    BaseStructure,
    choose_decoder_signature,
    match_base_roles,
    read_base_structure,
    read_embedder,
)
from mtp_extract.graph.drafter import ACTIVATIONS, LOGITS, PROJECTED
from mtp_extract.graph.flat import FlatGraph, flatten
from mtp_extract.insertion.base_checkpoint import CONFIG, BaseCheckpoint
from mtp_extract.insertion.slots import Location
from mtp_extract.litertlm.container import TFLITE_MODEL, Section
from mtp_extract.litertlm.flatbuffer import Budget
from mtp_extract.litertlm.tflite import Signature, Tensor, TfliteModel

_DECODER = "prefill_decode"
_TABLES = {"embedder": "embed_tokens", "per_layer_embedder": "embed_tokens_per_layer"}
# The base of E2B has 976 subgraphs, and 35 layers in each of its signatures.
_BUDGET = 40_000_000
# Operators of all signatures with their composites expanded: about ten times those of E2B.
_MOST_NODES = 200_000

# Relative: exporters compute constants in float32, and configurations round them.
_CONFIG_TOLERANCE = 1e-5


class BundledBase(NamedTuple):
    """The base in a bundle."""

    opened: ModelFile
    structure: BaseStructure  # the graph of the signature that is read first
    places: Mapping[str, tuple[Location, ...]]  # role → its locations, one for each signature (and each table)


def find_base(opened: ModelFile) -> BundledBase:
    """Find the roles in every signature of the base's sections.

    Raises:
        UnsupportedError: a section is missing, or a graph computes something that Gemma 4 does not.
        RoleError: a role is missing in a graph, or a constant has no role.
        FormatError: a section is damaged.
    """
    sections = _find_model_sections(opened)
    elements, nodes = Budget(_BUDGET), Budget(_MOST_NODES)
    model = opened.read_model(sections[_DECODER], elements)
    decoder = _read_signature(model, choose_decoder_signature(model), read_base_structure, nodes)
    locations = [*_locate_decoder_roles(model, decoder, nodes)]
    for kind, role in _TABLES.items():
        if kind in sections:
            factor = decoder.per_layer_factor if kind == "per_layer_embedder" else 1.0
            locations += _locate_tables(opened.read_model(sections[kind], elements), role, factor, nodes)

    places = defaultdict[str, tuple[Location, ...]](tuple)
    for role, location in locations:
        places[role] += (location,)
    for role in ("lm_head", "embed_tokens"):
        if role not in places:
            raise RoleError(f"{opened.source.name}: no signature of its base reads a {role}.")
    return BundledBase(opened, decoder, places)


def _find_model_sections(opened: ModelFile) -> dict[str, Section]:
    """Return the sections with models, by model type."""
    sections = dict[str, Section]()
    for section in opened.sections:
        if section.data_type != TFLITE_MODEL:
            continue
        kind = section.model_type or _DECODER
        if kind in sections and kind in (_DECODER, *_TABLES):
            raise UnsupportedError(
                f"{opened.source.name}: expected one section {kind}, found several, of which the runtime reads one. "
                "Take the bundle as it was published."
            )
        sections[kind] = section
    for needed in (_DECODER, "embedder"):
        if needed not in sections:
            kinds = ", ".join(escape(k) for k in sections) or "none"
            raise UnsupportedError(
                f"{opened.source.name}: expected a section {needed}, where a base's weights are, found {kinds}."
            )
    return sections


def _locate_decoder_roles(model: TfliteModel, first: BaseStructure, nodes: Budget) -> Iterator[tuple[str, Location]]:
    """Locate every role in every signature of the decoder. ``first`` is the graph of the signature read first."""
    for signature in _list_distinct_signatures(model):
        is_first = signature.subgraph == choose_decoder_signature(model).subgraph
        walk = first if is_first else _read_signature(model, signature, partial(match_base_roles, decoder=first), nodes)
        for graph_role in walk.roles:
            # Without ``result``, which would keep the large graph in memory.
            yield graph_role.role, Location(model, replace(graph_role, result=None))


def _locate_tables(model: TfliteModel, role: str, factor: float, nodes: Budget) -> Iterator[tuple[str, Location]]:
    """Locate the tables of an embedder in every signature; several tables are columns of ``role`` side by side.

    ``factor``: the decoder multiplies the embeddings by it.
    """
    walk = partial(read_embedder, role=role, later=factor)
    for signature in _list_distinct_signatures(model):
        begin = 0
        for table in _read_signature(model, signature, walk, nodes).roles:
            end = begin + table.shape[1]
            columns = None if table.role == role else (begin, end)
            yield role, Location(model, replace(table, role=role, result=None), columns)
            begin = end


def _list_distinct_signatures(model: TfliteModel) -> list[Signature]:
    """List the signatures with graphs of their own, in file order; of signatures that share a graph, the first."""
    signatures = dict[int, Signature]()
    for signature in model.signatures:
        signatures.setdefault(signature.subgraph, signature)
    return list(signatures.values())


def _read_signature(
    model: TfliteModel, signature: Signature, walk: Callable[[FlatGraph], BaseStructure], nodes: Budget
) -> BaseStructure:
    """Read the graph of ``signature``, counting its operators against ``nodes``; errors name the signature."""
    try:
        graph = flatten(model, signature, nodes.elements)
        nodes.elements -= len(graph.nodes)
        return walk(graph)
    except (RoleError, UnsupportedError) as error:
        raise type(error)(f"{model.region.source.name}: signature {escape(signature.key)!r}: {error}") from error


class _RopeParameters(Struct):
    sliding_attention: Rope | None = None
    full_attention: Rope | None = None


class _AttentionSettings(Struct):
    """Keys of ``text_config`` that change no shape, but what a base computes."""

    rope_parameters: _RopeParameters | None = None
    sliding_window: Size | None = None


def check_base(checkpoint: BaseCheckpoint, base: BundledBase) -> list[str]:
    """Compare the configuration of ``checkpoint`` with the graph of ``base``.

    RoPE and the sliding window are those of the bundle's drafter, which reads the base's caches. A key that the
    configuration lacks is taken to be as the graph has it.

    Returns:
        A note if RoPE and window were compared with nothing.

    Raises:
        PairError: they differ; the text says where.
        CheckpointError: the configuration has RoPE or a window that transformers does not know for Gemma 4.
    """
    walk = base.structure
    layers_with_keys = sum(f"layers.{layer}.k_proj" in base.places for layer in range(walk.layers))
    graph: dict[str, object] = {
        "num_hidden_layers": walk.layers,
        "num_kv_shared_layers": walk.layers - layers_with_keys,
        "hidden_size": walk.width,
        "vocab_size": base.places["embed_tokens"][0].found.shape[0],
        "rms_norm_eps": walk.rms_norm_eps,
        "final_logit_softcapping": walk.soft_cap,
        "hidden_activation": walk.hidden_activation,
    }
    config = {key: checkpoint.text.get(key, value) for key, value in graph.items()}
    config["num_kv_shared_layers"] = config["num_kv_shared_layers"] or 0  # null is as good as 0
    drafter = _read_drafter_config(base.opened)
    if isinstance(drafter, DrafterConfig):
        of_graph, of_config = _list_attention_settings(drafter, checkpoint)
        graph |= of_graph
        config |= of_config
    if wrong := describe_differences(graph, config, _CONFIG_TOLERANCE):
        raise PairError(
            f"{escape(checkpoint.directory)} is another model than the base in {base.opened.source.name}: it has "
            f"{wrong}. Give the base of this bundle, or one tuned from it."
        )
    return [drafter] if isinstance(drafter, str) else []


def _list_attention_settings(
    drafter: DrafterConfig, checkpoint: BaseCheckpoint
) -> tuple[dict[str, object], dict[str, object]]:
    """Return RoPE and the window of ``drafter``, by key of ``text_config``, and those of ``checkpoint``.

    What one of the two leaves out is in neither.
    """
    with attribute_errors_to(checkpoint.directory / CONFIG):
        settings = parse_fields(checkpoint.text, _AttentionSettings)
    parameters = structs.asdict(settings.rope_parameters or _RopeParameters())

    expected = dict[str, object]()
    stated = dict[str, object]()
    # A drafter of full layers alone tells nothing of the window.
    if drafter.sliding_window is not None and settings.sliding_window is not None:
        expected["sliding_window"] = drafter.sliding_window
        stated["sliding_window"] = settings.sliding_window
    for layer_type, rope in drafter.rope.items():
        if parameters[layer_type] is not None:
            place = f"rope_parameters.{layer_type}"
            expected[place] = asdict(rope)
            stated[place] = asdict(parse_rope(parameters, layer_type))
    return expected, stated


def _read_drafter_config(opened: ModelFile) -> DrafterConfig | str:
    """Return the configuration of the drafter in ``opened``, or a note that says why there is none."""
    note = "RoPE and the sliding window in config.json were compared with nothing: the bundle keeps its own, and "
    if not any(section.model_type == MODEL_TYPE for section in opened.sections):
        return f"{note}has no drafter that tells them."
    try:
        return opened.read_drafter().config
    except MtpExtractError as error:
        # The drafter stays as it is, so it need not be one that this release reads.
        return f"{note}its drafter, which tells them, cannot be read: {error}"


def describe_differences(expected: Mapping[str, object], actual: Mapping[str, object], tolerance: float) -> str:
    """List the differences, of floats those beyond the relative ``tolerance``; empty if there are none."""
    rows = map(astuple, find_differences(expected, actual, tolerance))
    return "; ".join(f"{place} {escape(value)} instead of {escape(wanted)}" for place, wanted, value in rows)


def find_misfits(drafter: BundledDrafter) -> Iterator[str]:
    """List why the base in the bundle of ``drafter`` cannot run it; nothing if it can, or the bundle has no base.

    LiteRT-LM has the same requirements: it fails without ``verify``, aborts if caches have other names, and cannot
    invoke the drafter's graph if they have other sizes.
    """
    sections = [s for s in drafter.opened.sections if s.data_type == TFLITE_MODEL and s.model_type == _DECODER]
    if not sections:
        return
    model = drafter.opened.read_model(sections[0])
    signatures = [s for key in ("decode", "verify") if (s := model.signature(key)) and ACTIVATIONS in s.outputs]
    if len(signatures) < 2:
        yield f"the base has no signatures decode and verify that both have an output {ACTIVATIONS!r}"
        return
    outputs = {name: model.tensor(signatures[0].subgraph, index) for name, index in signatures[0].outputs.items()}
    of_drafter = {name: _describe_tensor(cache) for name, cache in drafter.structure.caches.items()}
    of_base = {name: _describe_tensor(outputs[name]) if name in outputs else "missing" for name in of_drafter}
    for name, drafter_output in ((ACTIVATIONS, PROJECTED), (LOGITS, LOGITS)):
        if name in outputs:
            shapes = drafter.graph.outputs[drafter_output].tensor.shape, outputs[name].shape
            of_drafter[name], of_base[name] = (f"{next(reversed(shape), 0)} wide" for shape in shapes)
    for name, expected in of_drafter.items():
        if of_base[name] != expected:
            yield f"{escape(name)} is {of_base[name]} in the base and {expected} in the drafter"


def _describe_tensor(tensor: Tensor) -> str:
    return f"{tensor.type_name} {list(tensor.shape)}"
