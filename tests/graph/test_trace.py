"""The trace of a graph prints how the reader understood each value, operator by operator."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from adversary.edits import edge, with_number
from helpers.commands import run_here
from helpers.surgery import sound
from helpers.variant_files import variant

PUBLISHED = "jax_published"


def trace(file: Path) -> tuple[list[dict[str, object]], str]:
    """Return the trace of ``file`` in JSON, and the error message."""
    result = run_here("inspect", file, "--graph", "--json")
    return json.loads(result.stdout)["trace"], result.stderr


def test_every_matrix_and_norm_of_a_drafter_stands_in_the_trace_with_its_role() -> None:
    lines, error = trace(variant(PUBLISHED))

    assert not error
    counts = Counter(line["what"] for line in lines)
    roles = ("pre_projection", "lm_head", "post_projection", "final_norm", "layers.0.q_norm", "layers.3.down_proj")
    assert {role: counts[role] for role in roles} == dict.fromkeys(roles, 1)
    forms = {line["read_as"] for line in lines}
    assert {"norm", "stream", "product", "cache", "rotated query", "score", "weights", "mixed", "position"} <= forms


def test_the_trace_ends_at_the_operator_that_the_error_names(tmp_path: Path) -> None:
    graph, file = sound("jax"), tmp_path / "drafter.tflite"
    softmax = next(op for op in graph.ops if graph.kind(op) == "SOFTMAX")
    graph.insert(softmax.inputs[0], lambda x: graph.call("TANH", x), into=[softmax])
    file.write_bytes(graph.data())

    lines, error = trace(file)

    assert [line["read_as"] for line in lines].count("refused") == 1
    assert (lines[-1]["kind"], lines[-1]["read_as"]) == ("TANH", "refused")
    label = f"op {lines[-1]['op']} TANH"
    assert label in error
    assert lines[-1]["what"], "it says why"
    assert f"{label} {lines[-1]['what']}" in error or f"{label}: {lines[-1]['what']}" in error


@pytest.mark.parametrize(
    ("place", "what"),
    [
        ("1.stream", "layers.0: expected the sum of the residual stream and a norm, found a sum"),
        ("0.query", "layers.0.q_proj: expected a product with a matrix, found a sum"),
        ("0.activated", "layers.0.gate_proj, layers.0.up_proj: expected a product of GELU(gate) and up"),
    ],
)
def test_the_row_of_a_block_that_is_not_found_is_marked(tmp_path: Path, place: str, what: str) -> None:
    graph, file = sound("torch"), tmp_path / "drafter.tflite"
    edge(place, with_number("ADD", 1e-3))(graph)
    file.write_bytes(graph.data())

    lines, error = trace(file)

    (row,) = [line for line in lines if line["read_as"] == "refused"]
    assert str(row["what"]).startswith(what)
    assert str(row["what"]) in error
    assert row is not lines[-1], "the trace goes on after the block"


def test_the_row_of_a_refused_operator_has_the_reason() -> None:
    shown = run_here("inspect", variant("jax_hadamard"), "--graph").stdout

    assert "refused        [1,64]       is a Hadamard rotation: the weights beside it are stored rotated" in shown


def test_every_tensor_of_a_refused_graph_is_listed() -> None:
    shown = run_here("inspect", variant("jax_hadamard"), "--tensors").stdout
    report = json.loads(run_here("inspect", variant("jax_hadamard"), "--tensors", "--json").stdout)

    assert report["drafter"] is None
    tensors = report["model"]["tensors"]
    assert len(tensors) == report["model"]["tensors_in_all"] > 100
    assert "Tensors" in shown and all(tensor["name"] in shown for tensor in tensors[:3])


@pytest.mark.parametrize("columns", [80, 120])
def test_the_trace_fits_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))

    shown = run_here("inspect", variant(PUBLISHED), "--graph").stdout.splitlines()

    begin = next(at for at, line in enumerate(shown) if line.endswith("in the order of the graph"))
    assert max(map(len, shown[begin : begin + 200])) <= columns
    assert any("norm(" in line for line in shown[begin:])
