"""What tests may use of the package's inner modules, in one place: names, opening and calling, and nothing else.

A test goes through the public names of ``mtp_extract``, a command, or this module; only the unit tests of a module
import that one. Where the package is rebuilt inside, this file changes, and no verdict of a test does.
"""

# ruff: noqa: F401 - what is imported here is what tests may use.
from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from helpers.make_bundle import Memory

from mtp_extract import bundle as bundle_module
from mtp_extract.architecture import list_shapes
from mtp_extract.architecture.config import DrafterConfig, RopeConfig
from mtp_extract.architecture.roles import GEMMA4, list_roles, load_role_table
from mtp_extract.bundle import BundledDrafter, ModelFile, open_bundle
from mtp_extract.checkpoint.dtypes import DTYPES
from mtp_extract.checkpoint.safetensors_file import read_safetensors
from mtp_extract.checkpoint.weight import Weight, build_constant_weight, wrap_array
from mtp_extract.errors import (
    CheckpointError,
    FormatError,
    MtpExtractError,
    NoDrafterError,
    ProofError,
    RoleError,
    SourceError,
    TruncatedError,
    UnsupportedError,
)
from mtp_extract.evaluation.prompts import read_prompts
from mtp_extract.formats import MTP_FORMATS, load_format
from mtp_extract.graph import roles as roles_module
from mtp_extract.graph.evaluate import evaluate
from mtp_extract.graph.flat import FlatGraph, flatten
from mtp_extract.graph.roles import FoundRole, check_names
from mtp_extract.hub.upload import plan_upload
from mtp_extract.insertion import base as base_module
from mtp_extract.insertion.base import find_base
from mtp_extract.insertion.base_checkpoint import read_base
from mtp_extract.insertion.run import plan_insertion
from mtp_extract.io.address import parse_address
from mtp_extract.io.files import open_regular, read_regular
from mtp_extract.io.source import Region, Source
from mtp_extract.litertlm.flexbuffer import read_numbers
from mtp_extract.litertlm.tflite import TfliteModel, read_model
from mtp_extract.pipeline.check import Check, CheckpointDirectory
from mtp_extract.pipeline.extraction import build_checkpoint, prove_checkpoint
from mtp_extract.pipeline.identity import verify_against as _verify_against
from mtp_extract.pipeline.inspection import inspect, inspect_checkpoint
from mtp_extract.pipeline.skeleton import write_skeleton
from mtp_extract.proof.proof import Proof, describe_proof
from mtp_extract.proof.proof import prove as _prove

Floats = npt.NDArray[np.float32]
Read = Callable[[str], Weight]
"""Role → its tensor as it would be written."""


def verify(place: Path | str) -> Mapping[str, Any]:
    """The record of the checkpoint at ``place``, which is held against it; empty where there is none."""
    found = CheckpointDirectory.of(place)
    return found.record if found.is_recorded else {}


def verify_against(place: Path | str, opened: ModelFile) -> list[Check]:
    """The checks of the checkpoint at ``place`` against its bundle, all of them passed or not to be made."""
    return _verify_against(CheckpointDirectory.of(place), opened)


def read(source: Path | Source, sliding_window: int | None = None) -> BundledDrafter:
    """The drafter of a bundle or a bare model: roles, layers and config as its graph has them."""
    with open_bundle(source) as opened:
        return opened.read_drafter(sliding_window)


def prove(
    source: Path | Source,
    config: Callable[[DrafterConfig], DrafterConfig] = lambda config: config,
    read: Callable[[Read], Read] = lambda read: read,
) -> Proof:
    """The proof of the drafter in ``source``; ``config`` and ``read`` plant faults in its checkpoint."""
    with open_bundle(source) as opened:
        drafter = opened.read_drafter()
        tensors = {role.name: build_constant_weight(shape) for role, shape in list_shapes(drafter.config).items()}
        tensors |= build_checkpoint(drafter).tensors
        return _prove(drafter.graph, drafter.structure, config(drafter.config), read(tensors.__getitem__))


def model_of(data: bytes) -> TfliteModel:
    return read_model(Region(Memory(data), 0, len(data), "the model"))


def flat(data: bytes) -> FlatGraph:
    """The graph of the first signature of the TFLite model ``data``, its composites opened."""
    found = model_of(data)
    return flatten(found, found.signatures[0])


def base(path: Path) -> Any:
    """Where the weights of the base in the bundle ``path`` are, and the walk through its decoder."""
    with open_bundle(path) as opened:
        return find_base(opened)
