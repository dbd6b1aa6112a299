"""Windows are measured: what counts is which slots are seen, not how the mask is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.make_bundle import Memory, code_names, kind, load, pack
from helpers.variant_files import VARIANTS, variant

from mtp_extract.errors import UnsupportedError
from mtp_extract.graph.flat import FlatGraph, flatten
from mtp_extract.graph.probe import windows
from mtp_extract.io.source import LocalSource, Region, Source
from mtp_extract.litertlm.tflite import read_model

WINDOWS = dict.fromkeys(VARIANTS, (16, 16, 16, None)) | {
    "torch_odd_sizes": (7, 7, 7, None),
    # Its runtime hands the window in.
    "jax_published_mask_local": (None, None, None, None),
}


def graph_of(source: Path | bytes) -> FlatGraph:
    opened: Source = Memory(source) if isinstance(source, bytes) else LocalSource(source)
    model = read_model(Region(opened, 0, opened.size, "the model"))
    return flatten(model, model.signatures[0])


def measured(source: Path | bytes) -> tuple[int | None, ...]:
    graph = graph_of(source)
    return windows(graph, [node.outputs[0] for node in graph.nodes if node.kind == "SOFTMAX"])


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_the_window_of_every_kind_of_drafter(name: str) -> None:
    assert measured(variant(name)) == WINDOWS[name]


def recoded(old: str, new: str) -> bytes:
    """torch_plain_norm, every comparison ``old`` another one."""
    model = load(variant("torch_plain_norm").read_bytes())
    number = {name: code for code, name in code_names().items()}[new]
    for op in model.subgraphs[0].operators:
        if kind(model, op) == old:
            code = model.operatorCodes[op.opcodeIndex]
            code.builtinCode = code.deprecatedBuiltinCode = number
    return pack(model)


def test_a_comparison_that_is_closed_makes_the_window_longer() -> None:
    assert measured(recoded("LESS", "LESS_EQUAL")) == (17, 17, 17, None)


@pytest.mark.parametrize(("old", "new"), [("GREATER_EQUAL", "GREATER"), ("LESS", "GREATER"), ("LESS", "NOT_EQUAL")])
def test_what_is_no_window_is_refused(old: str, new: str) -> None:
    with pytest.raises(UnsupportedError, match=r"layers\.0: at position \d+ its attention sees|no slot"):
        measured(recoded(old, new))
