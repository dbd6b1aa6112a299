"""Windows are measured: what counts is which slots are seen, not how the mask is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.make_bundle import code_names, kind, load, pack
from helpers.variant_files import REFUSED, VARIANTS, variant

from mtp_extract import extract
from mtp_extract.bundle import open_bundle
from mtp_extract.errors import MtpExtractError

WINDOWS = dict.fromkeys(sorted(set(VARIANTS) - REFUSED), (16, 16, 16, None)) | {"torch_odd_sizes": (7, 7, 7, None)}


def measured(source: Path) -> tuple[int | None, ...]:
    with open_bundle(source) as opened:
        return tuple(layer.sliding_window for layer in opened.drafter().config.layers)


@pytest.mark.parametrize("name", sorted(WINDOWS))
def test_the_window_of_every_kind_of_drafter(name: str) -> None:
    assert measured(variant(name)) == WINDOWS[name]


def recoded(folder: Path, old: str, new: str) -> Path:
    """torch_plain_norm, every comparison ``old`` another one."""
    model = load(variant("torch_plain_norm").read_bytes())
    number = {name: code for code, name in code_names().items()}[new]
    for op in model.subgraphs[0].operators:
        if kind(model, op) == old:
            code = model.operatorCodes[op.opcodeIndex]
            code.builtinCode = code.deprecatedBuiltinCode = number
    (folder / "recoded.tflite").write_bytes(pack(model))
    return folder / "recoded.tflite"


def test_a_comparison_that_is_closed_makes_the_window_longer(tmp_path: Path) -> None:
    assert measured(recoded(tmp_path, "LESS", "LESS_EQUAL")) == (17, 17, 17, None)


@pytest.mark.parametrize(("old", "new"), [("GREATER_EQUAL", "GREATER"), ("LESS", "GREATER"), ("LESS", "NOT_EQUAL")])
def test_what_is_no_window_is_refused(tmp_path: Path, old: str, new: str) -> None:
    with pytest.raises(MtpExtractError, match=r"layers\.\d|different caches|sliding window"):
        extract(recoded(tmp_path, old, new), tmp_path / "out")
    assert not (tmp_path / "out").exists()
