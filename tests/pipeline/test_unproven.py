"""A drafter with an unknown operator: ``--unproven`` extracts it, and nothing then calls it verified."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import run_here
from helpers.make_bundle import load
from helpers.surgery import Graph, sound
from helpers.variant_files import variant

from mtp_extract import extract
from mtp_extract.bundle import open_bundle
from mtp_extract.errors import MtpExtractError, ProofError
from mtp_extract.pipeline import unproven

WEIGHTS = "model.safetensors"
TWINS = ("twin_e2b_may", "twin_e4b_april")
"""Drafters like Google's, as far as these are known."""
STYLES = ("torch", "jax", *TWINS)


def pass_through(graph: Graph, tensor: int, alpha: float = 1.0, into: list[Any] | None = None) -> None:
    """Put LEAKY_RELU, which no drafter has, behind ``tensor``: with an ``alpha`` of 1 it does nothing."""
    graph.insert(tensor, lambda x: graph.call("LEAKY_RELU", x, alpha=alpha), into)


def in_soft_cap(graph: Graph) -> None:
    tanh = next(op for op in graph.ops if graph.kind(op) == "TANH" and graph.shape(op.outputs[0])[-1] == 512)
    pass_through(graph, int(tanh.inputs[0]), into=[tanh])


def in_attention(graph: Graph) -> None:
    softmax = next(op for op in graph.ops if graph.kind(op) == "SOFTMAX")
    pass_through(graph, int(softmax.inputs[0]), into=[softmax])


def in_mask(graph: Graph) -> None:
    """Positions are never negative."""
    compared = next(op for op in graph.ops if graph.kind(op) in ("GREATER", "GREATER_EQUAL", "LESS", "LESS_EQUAL"))
    position = next(int(i) for i in compared.inputs if not graph.is_constant(int(i)))
    graph.insert(position, lambda x: graph.call("RELU", x), into=[compared])


EDITS: dict[str, Callable[[Graph], None]] = {
    "LEAKY_RELU in the soft cap": in_soft_cap,
    "LEAKY_RELU in an attention": in_attention,
    "RELU in a mask": in_mask,
}


def edited(place: Path, edit: Callable[[Graph], object], style: str = "torch") -> Path:
    graph = Graph(load(variant(style).read_bytes()), {}) if style in TWINS else sound(style)
    edit(graph)
    place.write_bytes(graph.data())
    return place


def words_of(done: Any, directory: Path) -> str:
    """Everything that was printed, and written for people."""
    files = [directory / name for name in ("README.md", "extraction.json") if (directory / name).exists()]
    return "\n".join([done.stdout, done.stderr, *(file.read_text() for file in files)])


@pytest.fixture(scope="module")
def proven(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Style → the weights of the drafter, extracted with a proof."""
    place = tmp_path_factory.mktemp("proven")
    for style in STYLES:
        extract(edited(place / f"{style}.tflite", lambda _: None, style), place / style)
    return {style: (place / style / WEIGHTS).read_bytes() for style in STYLES}


@pytest.fixture
def odd(tmp_path: Path) -> tuple[Path, Path]:
    """A model with LEAKY_RELU in an attention, and the drafter that was extracted from it without a proof."""
    file, drafter = edited(tmp_path / "odd.tflite", in_attention), tmp_path / "drafter"
    assert run_here("extract", file, "-o", drafter, "--unproven").returncode == 0
    return file, drafter


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_the_weights_are_those_of_the_proven_drafter_and_nothing_calls_it_verified(
    tmp_path: Path, proven: dict[str, bytes], edit: Callable[[Graph], None], style: str
) -> None:
    file, drafter = edited(tmp_path / "odd.tflite", edit, style), tmp_path / "drafter"

    refused = run_here("extract", file, "-o", drafter)
    done = run_here("extract", file, "-o", drafter, "--unproven")

    assert refused.returncode == 1 and str(file) in refused.stderr and "(--unproven)" in refused.stderr
    assert done.returncode == 0, done.stderr
    assert (drafter / WEIGHTS).read_bytes() == proven[style]
    record = json.loads((drafter / "extraction.json").read_text())
    assert record["proof"] is None
    assert re.search(r"op \d+ (LEAKY_)?RELU", record["not_proven"][0])
    assert re.search(r"(\d+) of \1 matrices by place, (\d+) of \2 vectors by place", record["not_proven"][-1])
    words = words_of(done, drafter)
    assert "Named, not proven" in words and "is not proven" in words
    assert not re.search(r"(?i)\bverified\b|^proven", words, re.MULTILINE)


def test_every_command_says_that_it_is_not_proven(odd: tuple[Path, Path], tmp_path: Path) -> None:
    file, drafter = odd

    compared = run_here("inspect", drafter, "--against", file)
    converted = run_here("convert", drafter, "--for", "llama.cpp", "-o", tmp_path / "gguf")
    sent = run_here("upload", drafter, "me/drafter", "--dry-run")

    for done in (run_here("inspect", drafter), compared, converted, sent):
        assert done.returncode == 0 and "ot proven" in done.stdout and "erified" not in done.stdout
    assert "derived from the file's, every bit" in compared.stdout
    assert json.loads((tmp_path / "gguf" / "extraction.json").read_text())["not_proven"]


def test_a_record_that_does_not_say_so_is_contradicted(odd: tuple[Path, Path]) -> None:
    file, drafter = odd
    record = json.loads((drafter / "extraction.json").read_text())
    del record["not_proven"]
    (drafter / "extraction.json").write_text(json.dumps(record))

    compared = run_here("inspect", drafter, "--against", file)

    assert compared.returncode == 1
    assert re.search(r"record: not_proven is \['op \d+ LEAKY_RELU.*, not None", compared.stderr.replace("\n", " "))


def test_a_graph_that_can_be_proven_is_proven_all_the_same(tmp_path: Path) -> None:
    file = edited(tmp_path / "whole.tflite", lambda _: None)

    unproven_record = extract(file, tmp_path / "unproven", unproven=True).record

    assert unproven_record == extract(file, tmp_path / "usual").record
    assert unproven_record["proof"] and "not_proven" not in unproven_record


def test_what_is_known_to_be_another_function_is_refused_all_the_same(tmp_path: Path) -> None:
    def halve_scores(graph: Graph) -> None:
        graph.insert(graph.layer(0).scores, lambda x: graph.call("MUL", x, 0.5))

    file = edited(tmp_path / "other.tflite", halve_scores)

    with pytest.raises(ProofError, match=r"other\.tflite: .*scores are 0\.5 times"):
        extract(file, tmp_path / "drafter", unproven=True)
    assert not (tmp_path / "drafter").exists()
    inspected = run_here("inspect", file, "--graph")
    assert inspected.returncode == 1
    assert "other.tflite: layers.0.attention: " in inspected.stderr.replace("\n", " ")


def hide_an_attention(graph: Graph) -> None:
    """One operator reads two values of an activation, so that the scores cannot be followed."""
    graph.insert(graph.layer(0).scores, lambda x: graph.call("MAXIMUM", x, graph.call("MUL", x, 0.5)))


def test_where_attentions_cannot_be_read_place_name_and_the_known_geometry_decide(
    tmp_path: Path, proven: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_bundle(edited(tmp_path / "whole.tflite", lambda _: None, "jax")) as opened:
        shape = opened.read_drafter().config.as_json()
    numbers = {name: shape.pop(name) for name in ("final_logit_softcap", "rms_norm_eps", "hidden_activation")}
    published = {"layer_types": shape.pop("layer_types"), "rope": shape.pop("rope"), "numbers": numbers}
    known = {"name": "a small one", "base_model": "org/base", **shape, "published": published}
    file = edited(tmp_path / "odd.tflite", hide_an_attention, "jax")

    with pytest.raises(MtpExtractError, match="fit no known geometry"):
        extract(file, tmp_path / "unknown", unproven=True)
    monkeypatch.setattr(unproven, "load_mapping", lambda _: {"geometries": [known]})
    *_, assumed, counts = extract(file, tmp_path / "placed", unproven=True).record["not_proven"]

    assert (tmp_path / "placed" / WEIGHTS).read_bytes() == proven["jax"]
    assert "types of layers are those of a small one" in assumed
    assert "by place" in counts and "by name" not in counts

    def break_the_stream(graph: Graph) -> None:
        hide_an_attention(graph)
        norm = graph.normed("final_norm")
        graph.insert(norm, lambda x: graph.call("MAXIMUM", x, graph.call("MUL", x, 0.5)))

    def name_scalars(graph: Graph) -> None:
        break_the_stream(graph)
        for tensor in graph.main.tensors:
            tensor.name = tensor.name.replace(b"post_qkv/mul", b"post_qkv/_maybe_apply_skip_scale/mul")

    with pytest.raises(MtpExtractError, match=r"MUL may be the scalar of a layer, but does not have its name"):
        extract(edited(tmp_path / "unnamed.tflite", break_the_stream, "jax"), tmp_path / "unnamed", unproven=True)
    named = extract(edited(tmp_path / "named.tflite", name_scalars, "jax"), tmp_path / "named", unproven=True)

    assert (tmp_path / "named" / WEIGHTS).read_bytes() == proven["jax"]
    counts = named.record["not_proven"][-1]
    assert "matrices by name" in counts and "by place" not in counts


@pytest.mark.torch
def test_googles_interpreter_measures_what_is_not_proven(odd: tuple[Path, Path], tmp_path: Path) -> None:
    file, drafter = odd

    done = run_here("validate", drafter, "--source", file, "--report", tmp_path / "report")

    assert done.returncode == 0
    assert done.stdout.startswith("Measured, not proven: Google's interpreter computes the same of")
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert (report["evidence"], report["inputs"], report["verified"]) == ("measured", 16, False)


@pytest.mark.torch
def test_an_operator_that_does_something_is_found_by_the_interpreter(tmp_path: Path) -> None:
    file = edited(tmp_path / "odd.tflite", lambda g: pass_through(g, g.normed("final_norm"), 0.3))
    assert run_here("extract", file, "-o", tmp_path / "drafter", "--unproven").returncode == 0

    done = run_here("validate", tmp_path / "drafter", "--source", file)

    assert done.returncode == 1
    assert done.stdout.startswith("Refuted: interpreter")
