"""The proof by execution alone, without the walk in front of it: it tells mutations from the drafter they were made of.

The walk refuses most mutations by their looks, and will refuse fewer. So the graph of a mutation is held against the
checkpoint of the sound drafter: what the proof does not see here, nothing sees.
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.make_bundle import Memory
from helpers.surgery import STYLES, Graph, sound
from safetensors.numpy import load_file

from adversary.mutations import MUTATIONS
from mtp_extract import extract
from mtp_extract.architecture.roles import roles_of
from mtp_extract.bundle import open_bundle
from mtp_extract.checkpoint.formats import read_checkpoint
from mtp_extract.errors import MtpExtractError
from mtp_extract.graph import flatten
from mtp_extract.graph.drafter import walk
from mtp_extract.io.source import Region
from mtp_extract.litertlm.tflite import read_model
from mtp_extract.proof import proof

FAMILIES = list(dict.fromkeys(case.family for case in MUTATIONS))


def flat(graph: Graph) -> Any:
    data = graph.data()
    model = read_model(Region(Memory(data), 0, len(data), "the model"))
    return flatten(model, model.signatures[0])


@cache
def checkpoint(style: str) -> tuple[Any, Any, dict[str, np.ndarray]]:
    """Walk, config and tensors of the sound drafter."""
    graph = sound(style)
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder) / "drafter.tflite", Path(folder) / "out"
        file.write_bytes(graph.data())
        extract(file, out, dtype="f32")
        config = read_checkpoint(out).config
        stored = load_file(out / "model.safetensors")
        with open_bundle(file) as opened:
            drafter = opened.drafter()
            found = walk(flatten(drafter.model, drafter.signature))
    return found, config, {role.name: stored[role.names["transformers"]].reshape(-1) for role in roles_of(graph.layers)}


def prove(graph: Graph, style: str) -> object:
    found, config, tensors = checkpoint(style)
    return proof.prove(flat(graph), found, config, lambda role: [tensors[role]])


@pytest.mark.parametrize("style", STYLES)
def test_the_sound_drafter_is_proven(style: str) -> None:
    assert prove(sound(style), style)


@pytest.mark.parametrize("family", FAMILIES)
def test_mutations_are_told_from_the_sound_drafter(family: str) -> None:
    """One in six of each family, by turns of style."""
    mine = [case for case in MUTATIONS if case.family == family and not case.why][::6]
    seen = []
    for index, case in enumerate(mine):
        style = list(STYLES)[index % 2]
        graph = case.apply(style)
        if graph is None:
            continue
        try:
            prove(graph, style)
        except MtpExtractError:
            continue
        seen.append(f"{style} {case.label}")
    assert not seen
