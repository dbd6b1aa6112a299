"""What ``scripts/engines.py`` makes of what engines print: recorded outputs of the versions it names."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import engines
import pytest
from _engines import llama_cpp
from engines import Outcome, find_last_line, format_cells, list_shortfalls, parse_outcome
from helpers.make_drafter import blockwise_int2

REFUSED = """\
0.00.003.701 W srv  llama_server: security: no API key is set and CORS allows all origins
0.00.022.002 E llama_init_from_model: failed to initialize the context: Gemma4Assistant requires ctx_other to be set \
(this warning is normal during memory fitting)
0.00.024.873 E llama_model_load: error loading model: Gemma 4 assistant requires embedding_length_out to carry the \
target hidden size
0.00.024.938 E srv    load_model: failed to load draft model, 'narrow.gguf'
0.00.030.334 E srv  llama_server: exiting due to model loading error
"""

LITERT_LM = "I0000 00:00:1795278794.727281    2366 llm_litert_mtp_drafter.cc:298] MTP Drafter - Success rate: 0.6625\n"

MLX_VLM = """\
{"version": "0.7.10", "identical": true, "drafted": 131, "accepted": 84, "text": "\\n    Return the file object."}
"""


def test_what_engines_print_is_read() -> None:
    found = parse_outcome("mlx-vlm", "mlx", "Fetching 3 files\n" + MLX_VLM)
    assert found == Outcome("mlx-vlm", "mlx", "0.7.10", True, True, 131, 84)
    assert format_cells(found) == ["mlx-vlm", "0.7.10", "mlx", "yes", "yes", "84 of 131", ""]
    assert llama_cpp.read_draft_counts({"timings": {"predicted_n": 120, "draft_n": 107, "draft_n_accepted": 83}}) == (
        107,
        83,
    )
    assert llama_cpp.read_draft_counts({"timings": {"predicted_n": 120}}) == (0, 0)
    assert (
        llama_cpp.shorten_version("version: 0.5.0-dev (build 1, commit 0c1e570)\nbuilt with GNU") == "0.5.0-dev 0c1e570"
    )
    assert llama_cpp.shorten_version("version: 5943 (c82d48ec)\nbuilt with cc") == "5943 c82d48ec"
    assert engines.read_success_rate(LITERT_LM) == "0.6625"


def test_what_engines_end_with_is_said() -> None:
    for printed in ("", "{}\n"):
        with pytest.raises(ValueError, match="mlx-vlm: expected a line of JSON with a version"):
            parse_outcome("mlx-vlm", "mlx", printed)
    with pytest.raises(ValueError, match="expected a success rate"):
        engines.read_success_rate("speculative decoding is off\n")
    expected = "Gemma 4 assistant requires embedding_length_out to carry the target hidden size"
    assert llama_cpp.find_reason(REFUSED).endswith(expected)
    assert llama_cpp.find_reason("no such option\n") == "no such option"
    assert find_last_line('Traceback:\n  File "x"\nValueError: not filled\n\n') == "ValueError: not filled"
    assert find_last_line("\n") == "it said nothing"


def test_what_falls_short() -> None:
    reference = Outcome("mlx-vlm", "transformers F32", "0.7.10", True, True, 131, 84)
    good = [reference, Outcome("mlx-vlm", "mlx", "0.7.10", True, True, 131, 84), Outcome("vllm", "–")]
    assert list_shortfalls(good) == []
    bad = [
        reference,
        Outcome("mlx-vlm", "mlx", "0.7.10", True, False, 134, 83),
        Outcome("transformers", "gemma", loads=False, note="RuntimeError: float"),
        # Another engine's figures are its own.
        Outcome("transformers", "gemma", "5.22.2", True, True, 127, 84),
    ]
    assert list_shortfalls(bad) == [
        "mlx-vlm, mlx: the text is not the base's own",
        "mlx-vlm, mlx: expected 84 of 131 accepted, as with transformers F32, found 83 of 134",
        "transformers, gemma: it does not load: RuntimeError: float",
    ]


def test_the_end_of_a_full_cache_is_not_compared() -> None:
    plain, assisted = "a data data dat\n", "a data data the data\n"
    assert engines.is_same_until_full(plain, plain)
    assert engines.is_same_until_full(plain, assisted)
    assert not engines.is_same_until_full(plain, "a data the data data\n")
    assert not engines.is_same_until_full("\n", "a data")


def test_an_engine_that_is_not_there_is_said_to_be_absent(tmp_path: Path) -> None:
    """In an interpreter without site packages no engine is installed, and nothing fell short."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    pythons = [word for name in engines.SCRIPTED for word in ("--python", f"{name}={bare}")]
    command = [sys.executable, engines.__file__, *pythons, "--python", f"litert-lm={bare}", "--json", tmp_path / "rows"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = json.loads((tmp_path / "rows").read_text())
    assert {row["engine"] for row in rows} == set(engines.ENGINES)
    assert all(row["loads"] is None for row in rows)
    assert done.stdout.count("not installed") == len(engines.ENGINES) - 1


def test_an_interpreter_that_is_none_is_wrong_usage() -> None:
    command = [sys.executable, engines.__file__, "--python", "mlx-vlm=nowhere/python"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "expected one of transformers, mlx-vlm" in done.stderr


def test_a_format_that_cannot_hold_the_drafter_is_a_row(
    monkeypatch: pytest.MonkeyPatch, base: Path, tmp_path: Path
) -> None:
    """gemma has a scale a row, and this drafter one for each block of 32: it is said, and the next format is run."""
    finished = subprocess.CompletedProcess([], 0, '{"version": "5", "identical": true}', "")
    monkeypatch.setattr(engines, "run", Mock(return_value=finished))
    (tmp_path / "blocks.tflite").write_bytes(blockwise_int2(32))
    drafter = engines.Drafter(tmp_path / "blocks.tflite", tmp_path)
    found = {o.format: o for o in engines.run_scripted("transformers", sys.executable, base, drafter)}
    assert [(o.loads, o.identical) for o in found.values()] == [(True, True), (True, True), (None, None)], found
    assert found["gemma"].note.startswith("not written: The gemma format needs matrices of integers")
    assert list_shortfalls(found.values()) == []
