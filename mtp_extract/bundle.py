"""Open a file and find the drafter in it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from mtp_extract.architecture.config import DrafterConfig, find_known_drafter
from mtp_extract.errors import (
    FormatError,
    MtpExtractError,
    NoDrafterError,
    SourceError,
    TruncatedError,
    UnsupportedError,
    escape,
    list_few,
)
from mtp_extract.graph.config import read_config
from mtp_extract.graph.drafter import ACTIVATIONS, LOGITS, PROJECTED, DrafterStructure, read_drafter_structure
from mtp_extract.graph.flat import FlatGraph, flatten
from mtp_extract.graph.kinds import OWN_CACHES_SIGNATURE, describe_other_kind
from mtp_extract.graph.roles import NameCheck, check_names
from mtp_extract.io.address import HubAddress
from mtp_extract.io.file_kinds import FIRST_BYTES_READ, describe_file_kind
from mtp_extract.io.opening import Named, list_bundles, open_source
from mtp_extract.io.source import Region, Source
from mtp_extract.litertlm.container import (
    TFLITE_IDENTIFIER,
    TFLITE_MODEL,
    BundleHeader,
    Section,
    is_bundle,
    read_bundle_header,
)
from mtp_extract.litertlm.flatbuffer import Budget
from mtp_extract.litertlm.skeleton import unpack_skeleton
from mtp_extract.litertlm.tflite import Signature, TfliteModel, read_model
from mtp_extract.progress import SILENT, Reporter

MODEL_TYPE = "mtp_drafter"
GPU_MODEL_TYPE = "artisan_text_decoder"
SIGNATURE = "mtp_drafter"

# Elements of all models together that are read if no section is called a drafter.
_SEARCH_BUDGET = 3_000_000

_MOST_HEADERS = 64
"""Largest number of bundles in a repository without a file named: of each, a header of 64 KiB is read."""

_MOST_LISTED = 20


@dataclass(frozen=True)
class BundledDrafter:
    """The drafter of a file: where it lies, and everything that was read from its graph."""

    opened: ModelFile
    section: Section | None  # None for a bare model
    found_by: str  # "model_type", "signature" or "bare model"
    model: TfliteModel
    signature: Signature
    graph: FlatGraph
    structure: DrafterStructure
    config: DrafterConfig
    names: NameCheck
    known: dict[str, Any] | None  # the entry of ``mappings/geometries.json`` it matches; None for an unknown geometry
    kv: Mapping[str, tuple[str, str]]  # by layer type, the names of the inputs that hold K and V
    not_proven: tuple[str, ...] = ()  # why it cannot be proven, and what stands for it, in clauses; empty if it can


@dataclass(frozen=True)
class ModelFile(AbstractContextManager["ModelFile"]):
    """A source that has been opened: ``with mtp_extract.open(path) as opened: …``."""

    source: Source
    bundle: BundleHeader | None
    # Index of the drafter's section and key of its signature, if the user named them; else they are looked for.
    section: int | None = None
    signature: str | None = None
    # The other bundles of the repository, if this one was chosen because its header lists a drafter.
    passed_over: tuple[str, ...] = ()
    skeleton: bool = False  # whether it is a model without weights

    @property
    def remarks(self) -> tuple[str, ...]:
        """How the file was chosen, in a sentence; empty if the user named it."""
        others = list_few(self.passed_over, most=_MOST_LISTED)
        chosen = f"{self.source.name} is the bundle of that repository with a drafter. Without one: {others}."
        return (chosen,) if self.passed_over else ()

    @property
    def sections(self) -> tuple[Section, ...]:
        """Sections of the bundle; empty for a bare model."""
        return self.bundle.sections if self.bundle else ()

    @property
    def model_types(self) -> set[str]:
        """The types of sections that the header lists: ``prefill_decode``, ``mtp_drafter``, …"""
        return {section.model_type for section in self.sections if section.model_type}

    @property
    def is_model(self) -> bool:
        """Whether the source begins as a TFLite model does."""
        return self.source.size >= 8 and self.source.read(4, 4) == TFLITE_IDENTIFIER

    def read_model(self, section: Section, budget: Budget | None = None) -> TfliteModel:
        """Read the TFLite model in ``section`` with the weights that belong to it; ``budget`` as for read_model."""
        if self.bundle is None:
            raise FormatError(f"{self.source.name} has no sections.")
        weights = self.bundle.find_weights(section)
        return read_model(self.bundle.region(section), self.bundle.region(weights) if weights else None, budget)

    def read_drafter(
        self, sliding_window: int | None = None, passed: Collection[tuple[int, int]] = ()
    ) -> BundledDrafter:
        """Find and read the drafter.

        Args:
            sliding_window: length of the window, for files that leave it to the runtime.
            passed: as for :func:`~mtp_extract.graph.flat.flatten`; the result is then not the file's graph.

        Raises:
            NoDrafterError: there is none.
            UnsupportedError: the graph has another window than ``sliding_window``.
            RoleError: a constant of its graph has no role, or a role no constant.
            MtpExtractError: the file is damaged, or uses what this release cannot read.
        """
        with name_file_in_errors(self.source.name):
            graph = self.flatten_graph(passed)
            walked = read_drafter_structure(graph)
            config = read_config(walked, sliding_window)
        if sliding_window is not None and config.sliding_window != sliding_window:
            raise UnsupportedError(
                f"{self.source.name}: expected a sliding window of {sliding_window}, found one of "
                f"{config.sliding_window} in its graph. Leave it out.",
                remedies=("sliding_window",),
            )
        pairs = zip(config.layer_types, walked.layers, strict=True)
        return self.make_drafter(graph, walked, config, {kind: (layer.key, layer.value) for kind, layer in pairs})

    def make_drafter(
        self, graph: FlatGraph, walked: DrafterStructure, config: DrafterConfig, kv: Mapping[str, tuple[str, str]]
    ) -> BundledDrafter:
        """Put together what was read of ``graph``, its section, its names and its geometry."""
        section, found_by, model = self._locate
        names = check_names(walked.roles, config.num_layers)
        geometry = find_known_drafter(config)
        config = replace(config, max_position_embeddings=geometry["max_position_embeddings"] if geometry else None)
        return BundledDrafter(
            self, section, found_by, model, graph.signature, graph, walked, config, names, geometry, kv
        )

    def find_model(self) -> TfliteModel:
        """Return the drafter's model; its graph is not read."""
        return self._locate[2]

    def flatten_graph(self, passed: Collection[tuple[int, int]] = ()) -> FlatGraph:
        """Flatten the drafter's operators without reading what they compute; ``passed`` as in :meth:`read_drafter`."""
        model = self._locate[2]
        return flatten(model, self._require_signature(model), passed=passed)

    def prefetch(self) -> None:
        """Fetch the drafter's bytes in a request or two, before all of them are read; a local file ignores it."""
        typed = self.list_chosen()
        section = typed[0] if len(typed) == 1 else self._locate[0]
        if self.bundle is None or section is None:
            self.source.prefetch(0, self.source.size)
            return
        for part in filter(None, (section, self.bundle.find_weights(section))):
            self.source.prefetch(part.begin, part.size)

    def list_chosen(self) -> list[Section]:
        """Return the section that the user named, or those that the header calls drafters.

        Raises:
            NoDrafterError: the named section holds no model.
        """
        models = self._models
        if self.section is None:
            return [s for s in models if s.model_type == MODEL_TYPE]
        chosen = [s for s in models if s.index == self.section]
        if not chosen:
            raise NoDrafterError(
                f"{self.source.name}: expected a TFLite model in section {self.section}; the models are in sections "
                f"{', '.join(str(s.index) for s in models) or 'none'}. Leave it out to have the drafter found.",
                remedies=("section",),
            )
        return chosen

    @property
    def _models(self) -> list[Section]:
        return [s for s in self.sections if s.data_type == TFLITE_MODEL]

    @cached_property
    def _locate(self) -> tuple[Section | None, str, TfliteModel]:
        """The drafter's section (None for a bare model), how it was found, and its model."""
        if self.bundle is None and self.is_model:
            return None, "bare model", read_model(Region(self.source, 0, self.source.size, "the model"))
        typed = self.list_chosen() if self.bundle is not None else []
        by_signature = [] if typed else self._find_by_signature()
        sections = typed or [section for section, _ in by_signature]
        if len(sections) > 1:
            labels = ", ".join(s.label for s in sections)
            raise NoDrafterError(
                f"{self.source.name}: expected one drafter, found more than one drafter ({labels}). Say which.",
                remedies=("section=N",),
            )
        if typed:
            return typed[0], "model_type", self.read_model(typed[0])
        if by_signature:
            return sections[0], "signature", by_signature[0][1]
        raise NoDrafterError(self._explain_no_drafter())

    def _find_by_signature(self) -> list[tuple[Section, TfliteModel]]:
        """Find the models with a drafter's signature, without damaged ones: what is reported is a missing drafter."""
        budget = Budget(_SEARCH_BUDGET)
        models = list[tuple[Section, TfliteModel]]()
        for section in self._models:
            with suppress(MtpExtractError):
                model = self.read_model(section, budget)
                if self._list_candidates(model):
                    models.append((section, model))
        return models

    def _list_candidates(self, model: TfliteModel) -> list[Signature]:
        """List signatures that may be the drafter's: the one the user named, else by name, or by inputs and outputs."""
        if self.signature is not None:
            return [s for s in model.signatures if s.key == self.signature]
        # LiteRT-LM runs the first signature of the section, so the right name there decides.
        if model.signatures and model.signatures[0].key == SIGNATURE:
            return [model.signatures[0]]
        signatures = [
            s
            for s in model.signatures
            if s.key.lower() == SIGNATURE or ({LOGITS, PROJECTED} <= set(s.outputs) and ACTIVATIONS in s.inputs)
        ]
        # Two keys for the same inputs and outputs of one graph count as one signature.
        return list(
            {(s.subgraph, *sorted(s.inputs.items()), *sorted(s.outputs.items())): s for s in signatures}.values()
        )

    def _require_signature(self, model: TfliteModel) -> Signature:
        candidates = self._list_candidates(model)
        if len(candidates) == 1:
            return candidates[0]
        name = model.region.source.name
        keys = ", ".join(escape(s.key) for s in candidates or model.signatures) or "none"
        if candidates:
            raise NoDrafterError(
                f"{name}: expected one signature of a drafter, found {keys}. Say which.", remedies=("signature=NAME",)
            )
        if self.signature is None and OWN_CACHES_SIGNATURE in {s.key for s in model.signatures}:
            kind = describe_other_kind(f"K and V of its own: the signature {OWN_CACHES_SIGNATURE!r}, as of Qwen3.5's")
            raise UnsupportedError(f"{name}: {model.region.what} holds {kind}")
        raise NoDrafterError(
            f"{name}: expected the signature {escape(self.signature or SIGNATURE)} in {model.region.what}, found "
            f"{keys}. Leave section and signature out, or give a file with a drafter.",
            remedies=("section", "signature"),
        )

    def _explain_no_drafter(self) -> str:
        name = self.source.name
        if self.bundle is None:
            kind = describe_file_kind(self.source.read(0, min(FIRST_BYTES_READ, self.source.size)))
            return f"{name}: expected a .litertlm bundle or a drafter's .tflite, found {kind}"
        kinds = ", ".join(map(escape, sorted(self.model_types)))
        advice = "Give a file of E2B or E4B that has one, such as gemma-4-E4B-it.litertlm."
        if GPU_MODEL_TYPE in self.model_types:
            advice = "Files for GPU and web have none: take the file without a suffix, such as gemma-4-E4B-it.litertlm."
        return f"{name}: no section holds an MTP drafter. Models in it: {kinds or 'none'}. {advice}"

    def close(self) -> None:
        """Close the source."""
        self.source.close()

    def __exit__(self, *error: object) -> None:
        self.close()


@contextmanager
def name_file_in_errors(file: str) -> Iterator[None]:
    """Put the name of the file in front of errors that do not have it yet."""
    try:
        yield
    except MtpExtractError as error:
        if file not in str(error):
            error.args = (f"{file}: {error}",)
        raise


def open_bundle(
    source: Named | Source,
    *,
    token: str | bool | None = None,
    reporter: Reporter = SILENT,
    section: int | None = None,
    signature: str | None = None,
    skeleton: bool = False,
) -> ModelFile:
    """Open a bundle as :func:`mtp_extract.open` explains; with ``skeleton`` also a model without weights."""
    bundles = list_bundles(source, token)
    if len(bundles) > 1:
        opened = _open_bundle_with_drafter(bundles, token, reporter)
    else:
        opened = _open(bundles[0] if bundles else source, token, reporter)
    if opened.skeleton and not skeleton:
        opened.close()
        why = "is a skeleton without weights: it can be inspected alone. Give the file that it was made of."
        raise UnsupportedError(f"{opened.source.name}: {why}")
    return replace(opened, section=section, signature=signature)


def _open(source: Named | Source, token: str | bool | None, reporter: Reporter) -> ModelFile:
    opened = open_source(source, token=token, reporter=reporter)
    try:
        if opened.size == 0:
            raise SourceError(
                f"{opened.name}: expected a .litertlm or .tflite file, found an empty file. Fetch it again."
            )
        if (bare := unpack_skeleton(opened)) is not None:
            if bare is not opened:
                opened.close()
            return ModelFile(bare, None, skeleton=True)
        return ModelFile(opened, read_bundle_header(opened) if is_bundle(opened) else None)
    except BaseException:
        opened.close()
        raise


def _open_bundle_with_drafter(
    addresses: Sequence[HubAddress], token: str | bool | None, reporter: Reporter
) -> ModelFile:
    """Open the bundle of a repository whose header lists a drafter; of the others only the header is read."""
    repository = addresses[0].repository
    if len(addresses) > _MOST_HEADERS:
        raise SourceError(f"{repository}: expected at most {_MOST_HEADERS} bundles, found {len(addresses)}. Name one.")
    contents = dict[str, str]()
    with ExitStack() as stack:
        candidates = list[ModelFile]()
        for address in addresses:
            opened, contents[address.name] = _look_into(address, token, reporter)
            if opened is not None:
                candidates.append(stack.enter_context(opened))
        if len(candidates) == 1:
            stack.pop_all()
            others = tuple(name for name in contents if name != candidates[0].source.name)
            return replace(candidates[0], passed_over=others)
    count = len(candidates) or "none"
    listed = list_few((f"{name} ({kinds})" for name, kinds in contents.items()), most=_MOST_LISTED, separator="; ")
    raise NoDrafterError(
        f"{repository}: expected one bundle with an MTP drafter, found {count} among {len(addresses)}: {listed}. Name "
        "one of these addresses."
    )


def _look_into(address: HubAddress, token: str | bool | None, reporter: Reporter) -> tuple[ModelFile | None, str]:
    """Open the bundle at ``address`` if its header lists a drafter; also return what it lists, or the error."""
    try:
        opened = _open(address, token, reporter)
    except (FormatError, TruncatedError, UnsupportedError) as error:
        # The bundle for an NPU may be of a version that this release does not read; the others still count.
        return None, str(error).removeprefix(f"{address.name}: ").partition(". ")[0]
    kinds = list_few(sorted(opened.model_types)) or "no models"
    if MODEL_TYPE in opened.model_types:
        return opened, kinds
    opened.close()
    return None, kinds
