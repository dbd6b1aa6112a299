"""A drafter of a third kind, which this package has never heard of, is used like the two that it knows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers import bigram
from helpers.prompt_files import write_prompts
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from mtp_extract import ValidationPlan, convert, validate
from mtp_extract.architecture import ARCHITECTURES
from mtp_extract.cli import inspect as inspect_command
from mtp_extract.data import sample_base
from mtp_extract.drafter.load import load_any_drafter, load_drafter
from mtp_extract.errors import UnsupportedError
from mtp_extract.formats import ALL_FORMATS

CONFIG = bigram.BigramConfig(backbone_hidden_size=64, hidden_size=16, vocab_size=512)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add its rows to both tables; the package knows nothing else of it."""
    monkeypatch.setitem(ARCHITECTURES, bigram.NAME, bigram.ARCHITECTURE)
    monkeypatch.setitem(ALL_FORMATS, bigram.NAME, bigram.FORMAT_INFO)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A bigram drafter, written as its trainer would."""
    torch.manual_seed(0)
    place = tmp_path / "drafter"
    place.mkdir()
    state = bigram.BigramDrafter(CONFIG).state_dict()
    save_file({role.names[bigram.NAME]: state[role.path] for role in bigram.ROLES}, place / "model.safetensors")
    (place / "config.json").write_text(json.dumps(bigram.FORMAT.document(CONFIG, "float32")))
    return place


def test_it_is_loaded(directory: Path) -> None:
    network = load_any_drafter(directory)
    assert isinstance(network, bigram.BigramDrafter)
    stored = load_file(directory / "model.safetensors")
    torch.testing.assert_close(network.embed.weight, stored["model.embed_tokens.weight"], rtol=0, atol=0)
    with pytest.raises(UnsupportedError, match="Expected an MTP drafter, found a bigram drafter, which no LiteRT"):
        load_drafter(directory)


def test_it_is_converted(directory: Path, tmp_path: Path) -> None:
    result = convert(directory, tmp_path / "out", format="bigram", dtype="bf16")
    assert result.record["geometry"] == CONFIG.as_json() and result.record["layout"] == "bigram"
    assert result.parameters == 2 * 512 * 16 + 16
    original = load_file(directory / "model.safetensors")
    for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items():
        torch.testing.assert_close(tensor, original[name].to(torch.bfloat16), rtol=0, atol=0)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "# bigram drafter\n" in card and '"bigram"]' in card and "A bigram drafter, converted from" in card
    with pytest.raises(UnsupportedError, match="mlx format holds drafters of the architecture gemma4-mtp"):
        convert(directory, tmp_path / "mlx", format="mlx")
    with pytest.raises(UnsupportedError, match="vllm loads no drafter of the architecture bigram"):
        convert(directory, tmp_path / "vllm", format="vllm")


def test_it_is_shown(directory: Path) -> None:
    shown = CliRunner().invoke(inspect_command.app, [str(directory)])
    assert shown.exit_code == 0, shown.output
    assert "0.02 M parameters, a table of 512 tokens\n  hidden 16\n  bigram format: 3 weights (3 F32)\n" in shown.output


def test_it_is_measured(directory: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", {"code": ["def ", "import os"]})
    settings = {"prompts": prompts, "draft_steps": (2,), "new_tokens": 8, "chat_template": False}
    validation = validate(ValidationPlan(directory, base=str(sample_base()), **settings))
    (drafter,) = validation.drafters
    assert drafter.worth["2"].same_text == 2 and not validation.controls
    assert validation.pair is not None and validation.pair["draft"]["assistant_role"] == "drafter"
