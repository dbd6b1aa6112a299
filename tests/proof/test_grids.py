"""Activations that a file rounds: all of them are listed, and none of them is a reason to refuse."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from adversary.edits import Edit, edge, over_int
from helpers.make_bundle import Memory
from helpers.surgery import sound
from helpers.variant_files import variant
from seam import Proof, describe_proof, prove

from mtp_extract import extract


def prove_with(place: str, edit: Edit) -> Proof:
    """The proof of a sound drafter, ``edit`` put behind ``place``."""
    graph = sound("torch")
    edge(place, edit)(graph)
    return prove(Memory(graph.data()))


@pytest.mark.parametrize(
    ("place", "edit", "expected"),
    [
        ("0.up", over_int(0.02), {"type": "INT8", "steps": [0.02, 0.02], "narrowest": [-2.56, 2.54]}),
        ("1.ffw_in", over_int(0.05, 5), {"type": "INT8", "steps": [0.05, 0.05], "narrowest": [-6.65, 6.1]}),
        ("state", over_int(0.001), {"type": "INT8", "steps": [0.001, 0.001], "narrowest": [-0.128, 0.127]}),
        ("state", over_int(2.0), {"type": "INT8", "steps": [2.0, 2.0], "narrowest": [-256.0, 254.0]}),
        (
            "1.stream",
            over_int(1e-6, 0, np.int16),
            {"type": "INT16", "steps": [1e-6, 1e-6], "narrowest": [-0.0328, 0.0328]},
        ),
    ],
)
def test_a_rounded_activation_is_listed_however_coarse_it_is(
    place: str, edit: Edit, expected: dict[str, object]
) -> None:
    proof = prove_with(place, edit)
    assert proof["rounded_activations"] == [{"of": "activation", "count": 1, "logits": False, **expected}]


def test_rounded_logits_are_said() -> None:
    proof = prove_with("logits", over_int(0.01))
    assert proof["rounded_activations"][0]["logits"] is True
    assert any(
        "1 activation is INT8 in the bundle (steps of 0.01," in line and "logits" in line
        for line in describe_proof(proof)
    )


def test_a_drafter_of_floats_has_nothing_to_list() -> None:
    proof = prove(Memory(sound("torch").data()))
    assert proof["rounded_activations"] == []
    assert not any("activation" in line for line in describe_proof(proof))


def test_the_coarsest_and_the_shortest_grids_of_a_file_are_listed() -> None:
    """Of the file's own scales, read by Google's schema: all tensors of codes that are no constants and no caches."""
    (entry,) = prove(variant("torch_static8_mix48_kv8"))["rounded_activations"]
    assert (entry["type"], entry["count"], entry["logits"]) == ("INT8", 40, False)
    assert entry["steps"] == [0.0135, 0.0946]
    assert entry["narrowest"] == [-1.72, 1.71]


@pytest.mark.parametrize(
    ("layout", "ending"), [("transformers", "; the checkpoint computes in floats."), ("gemma", ".")]
)
def test_an_extraction_says_so_in_one_line(tmp_path: Path, layout: str, ending: str) -> None:
    result = extract(variant("torch_static8_mix48_kv8"), tmp_path / "out", format=layout)
    lines = [note for note in result.notes if "in the bundle" in note]
    assert lines == [f"40 activations are INT8 in the bundle (steps 0.0135 to 0.0946){ending}"]
    assert any("40 activations are INT8" in line and "-1.72 to 1.71" in line for line in result.record["proof"])
