"""What was tuned goes wherever an extraction goes, and comes back in the format it came in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.reporters import Recorder
from helpers.variant_files import variant
from seam import verify
from typer.testing import CliRunner

from mtp_extract import convert, extract
from mtp_extract.bundle import open_bundle
from mtp_extract.cli.inspect import app
from mtp_extract.drafter.load import load_drafter
from mtp_extract.errors import MtpExtractError, UnsupportedError
from mtp_extract.insertion.run import plan_insertion
from mtp_extract.pipeline.check import CheckpointDirectory
from mtp_extract.pipeline.extraction import build_checkpoint
from mtp_extract.pipeline.inspection import inspect_checkpoint
from mtp_extract.tuning.run import run_tuning

from .conftest import Plans


@pytest.fixture(scope="module")
def tuned(plan: Plans, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample tuned with ``qat``, so far that some codes change."""
    out = tmp_path_factory.mktemp("qat") / "tuned"
    outcome = run_tuning(plan(out, mode="qat", steps=6, learning_rate=0.002))
    assert outcome.record["best_step"]
    return out


def read_weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_drafter(CheckpointDirectory.of(directory).checkpoint, dtype=torch.float32).state_dict()


def read_inserted(directory: Path, bundle: Path, out: Path) -> dict[str, torch.Tensor]:
    """Return the weights of the drafter of ``bundle`` after ``directory`` has been inserted."""
    with plan_insertion(directory, bundle) as planned:
        planned.write(out)
    with open_bundle(out) as opened:
        return load_drafter(build_checkpoint(opened.read_drafter()), dtype=torch.float32).state_dict()


def test_codes_are_kept_in_another_format(tuned: Path, tmp_path: Path) -> None:
    """All formats are covered for any checkpoint in ``tests/formats/test_integer_formats.py``."""
    converted = convert(tuned, tmp_path / "converted", format="compressed-tensors")

    assert converted.record["tuning"] == verify(tuned)["tuning"] and converted.integers
    after = read_weights(tmp_path / "converted")
    for path, weight in read_weights(tuned).items():
        torch.testing.assert_close(after[path], weight, rtol=4e-3, atol=1e-2)


def test_inspect_shows_the_tuning(tuned: Path, extracted: Path) -> None:
    shown, before = (inspect_checkpoint(place).report["holds"] for place in (tuned, extracted))
    assert shown["stored_types"] == before["stored_types"]
    ran, tuning = CliRunner().invoke(app, [str(tuned)]), verify(tuned)["tuning"]
    assert ran.exit_code == 0 and "as recorded in extraction.json" in ran.output, ran.output
    ratio, texts = tuning["overall"]["rounds"]["ratio"], tuning["overall"]["texts"]
    expected = f"tuned beside {tuning['base']}: {ratio:.3f} times the tokens per round on {texts} held-out texts"
    assert expected in " ".join(ran.output.split())


def test_a_tuned_drafter_is_not_compared_with_its_bundle(tuned: Path, sample: Path) -> None:
    """The usual advice, to extract it again, would undo the tuning."""
    with pytest.raises(MtpExtractError, match="says that it was tuned since: compare it with a bundle that it was put"):
        inspect_checkpoint(tuned, sample)


def test_insertion_keeps_every_weight(tuned: Path, sample: Path, tmp_path: Path) -> None:
    inside = read_inserted(tuned, sample, tmp_path / "new.litertlm")
    for path, weight in read_weights(tuned).items():
        assert torch.equal(inside[path], weight), path


def test_shared_weights_stay_equal(plan: Plans, tmp_path: Path) -> None:
    """The bundle stores them once, so they could not be inserted otherwise."""
    bundle = variant("jax_published")
    separate = extract(bundle, tmp_path / "separate").directory
    run_tuning(plan(tmp_path / "tuned", directory=separate, mode="norms", steps=2, learning_rate=0.01))
    before, after = read_weights(separate), read_weights(tmp_path / "tuned")
    names = sorted(name for name in after if "q_norm" in name)[:2]
    assert torch.equal(*(after[name] for name in names)) and not torch.equal(before[names[0]], after[names[0]])
    inside = read_inserted(tmp_path / "tuned", bundle, tmp_path / "new.tflite")
    assert all(torch.equal(inside[name], after[name]) for name in names)


@pytest.mark.parametrize(("format_", "mode"), [("gguf", "qat"), ("gemma", "qat"), ("litert", "norms")])
def test_the_format_is_kept(plan: Plans, extracted: Path, tmp_path: Path, format_: str, mode: str) -> None:
    convert(extracted, tmp_path / "origin", format=format_)

    outcome = run_tuning(plan(tmp_path / "tuned", directory=tmp_path / "origin", mode=mode, learning_rate=0.002))

    old, new = (verify(tmp_path / name) for name in ("origin", "tuned"))
    assert (new["layout"], new["dtype"]) == (old["layout"], old["dtype"])
    before, after = read_weights(tmp_path / "origin"), read_weights(tmp_path / "tuned")
    assert outcome.record["best_step"] == 0 or any(not torch.equal(before[path], after[path]) for path in before)


@pytest.mark.parametrize("format_", ["mlx", "compressed-tensors", "gemma"])
def test_float_mode_is_refused_in_integer_formats(plan: Plans, extracted: Path, tmp_path: Path, format_: str) -> None:
    convert(extracted, tmp_path / "origin", format=format_)
    with pytest.raises(UnsupportedError, match=r"origin: .* room for what the mode float makes"):
        run_tuning(plan(tmp_path / "f", directory=tmp_path / "origin", mode="float", work=tmp_path / "work"))
    assert not (tmp_path / "work").exists()


def test_qat_is_refused_without_codes(plan: Plans, extracted: Path, tmp_path: Path) -> None:
    convert(extracted, tmp_path / "origin", format="transformers", dtype="bf16", codes=False)
    reporter = Recorder()
    with pytest.raises(
        MtpExtractError, match=r"pre_projection is in floats.*again with its codes \(`mtp-extract … --codes`\)"
    ) as caught:
        run_tuning(plan(tmp_path / "tuned", directory=tmp_path / "origin", mode="qat"), reporter)
    assert reporter.lines == [], "no base is loaded for it"
    assert caught.value.remedies == ("mode=norms", "mode=float")
