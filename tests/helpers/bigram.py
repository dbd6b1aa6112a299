"""A third architecture, small enough to read at once: the token that a table says follows the last one.

This is all that a drafter of another kind takes, as docs/architecture.md tells it: its config, its roles, a network, a
format, and a row for each of the two tables.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from msgspec import Struct
from torch import Tensor, nn

from mtp_extract.architecture import list_shapes
from mtp_extract.architecture.architecture import Architecture
from mtp_extract.architecture.roles import MATRIX, NORM, Role, Shapes, resolve_shapes
from mtp_extract.checkpoint.checkpoint import Checkpoint
from mtp_extract.checkpoint.documents import compare_document, read_object
from mtp_extract.checkpoint.dtypes import DTYPES
from mtp_extract.checkpoint.files import OutputFile, format_json
from mtp_extract.checkpoint.format import Plan, StoredAs, store_all, store_floats
from mtp_extract.checkpoint.stored import FileWeight, find_common_dtype
from mtp_extract.checkpoint.weight import Weight
from mtp_extract.drafter.network import DrafterNetwork, RMSNorm
from mtp_extract.drafter.protocol import BaseRequirements, RoundStart
from mtp_extract.formats import FormatInfo, reading
from mtp_extract.formats.reading import Size

NAME = "bigram"


@dataclass(frozen=True)
class BigramConfig:
    """Everything there is to say of such a drafter, beside its weights."""

    backbone_hidden_size: int
    hidden_size: int
    vocab_size: int

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def _role(name: str, kind: str, shape: tuple[str, ...], tensor: str) -> Role:
    return Role(name, kind, shape, MappingProxyType({NAME: tensor}), published_names=())


ROLES = (
    _role("embed", MATRIX, ("vocab", "hidden"), "model.embed_tokens.weight"),
    _role("final_norm", NORM, ("hidden",), "model.norm.weight"),
    _role("lm_head", MATRIX, ("vocab", "hidden"), "lm_head.weight"),
)


def bigram_shapes(config: BigramConfig) -> Shapes:
    return resolve_shapes(ROLES, {"vocab": config.vocab_size, "hidden": config.hidden_size}, num_heads=0, head_dims=[0])


@dataclass(frozen=True)
class BigramState:
    """The state between two steps: there is nothing to remember."""

    def fork(self, width: int) -> BigramState:
        return self


class BigramDrafter(DrafterNetwork):
    """Reads the last token alone, and nothing of the base."""

    def __init__(self, config: BigramConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.final_norm = RMSNorm(config.hidden_size, 1e-6)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def needs(self) -> BaseRequirements:
        return BaseRequirements(self.config.vocab_size, self.config.backbone_hidden_size)

    def start(self, base: RoundStart) -> BigramState:
        return BigramState()

    def advance(self, state: BigramState, token: Tensor) -> tuple[Tensor, BigramState]:
        return self.final_norm(self.embed(token)), state

    def logits(self, h: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(h)
        return logits


class _Read(Struct):
    backbone_hidden_size: Size
    hidden_size: Size
    vocab_size: Size


class BigramFormat:
    """``config.json`` and ``model.safetensors``, as transformers calls them."""

    name = NAME
    marker = "config.json"
    weights_file = "model.safetensors"
    further_files: tuple[str, ...] = ()

    def store(self, role: Role, weight: Weight, dtype: str) -> StoredAs:
        return store_floats(weight, dtype)

    def plan(self, checkpoint: Checkpoint, dtype: str) -> Plan:
        config = checkpoint.config
        assert isinstance(config, BigramConfig)
        stored = store_all(self.store, checkpoint, dtype)
        roles = {role.names[NAME]: role.name for role in list_shapes(config)}
        tensors = tuple(stored[role].tensor(name) for name, role in roles.items())
        document = self.document(config, DTYPES[dtype].transformers)
        files = OutputFile(self.weights_file, tensors), OutputFile(self.marker, text=format_json(document))
        return Plan(self.name, checkpoint, dtype, stored, roles, files)

    def document(self, config: BigramConfig, dtype: str) -> dict[str, Any]:
        return {"model_type": NAME, **config.as_json(), "dtype": dtype}

    def read(self, directory: Path) -> Checkpoint:
        path = directory / self.marker
        document = read_object(path)
        with reading.attribute_errors_to(path):
            fields = reading.parse_fields(document, _Read)
        config = BigramConfig(fields.backbone_hidden_size, fields.hidden_size, fields.vocab_size)
        unread = compare_document(path, document, self.document(config, ""))
        stored = reading.read_weights(directory, self.weights_file)
        expected = {role.names[NAME]: (shape, reading.FLOAT_DTYPES) for role, shape in list_shapes(config).items()}
        reading.check_tensors(directory / self.weights_file, expected, stored)
        tensors = {role.name: FileWeight(*stored[role.names[NAME]], role.names[NAME]) for role in list_shapes(config)}
        return Checkpoint(config, MappingProxyType(tensors), find_common_dtype(tensors.values()), unread=unread)


FORMAT = BigramFormat()


def describe_bigram(geometry: Mapping[str, Any]) -> list[str]:
    return [f"a table of {geometry['vocab_size']} tokens", f"hidden {geometry['hidden_size']}"]


ARCHITECTURE = Architecture(
    name=NAME,
    title="bigram drafter",
    long_title="bigram drafter",
    config=BigramConfig,
    shapes=bigram_shapes,
    network="helpers.bigram:BigramDrafter",
    describe=describe_bigram,
    tags=("bigram",),
)

FORMAT_INFO = FormatInfo(
    "helpers.bigram:FORMAT",
    ("bf16", "f16", "f32"),
    "a bigram drafter",
    architecture=NAME,
    is_config=lambda config: config.get("model_type") == NAME,
)
