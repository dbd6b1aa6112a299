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
from mtp_extract.insertion.run import planned_insertion
from mtp_extract.pipeline.check import ReadDirectory
from mtp_extract.pipeline.extraction import checkpoint_of
from mtp_extract.pipeline.inspection import inspect_checkpoint
from mtp_extract.tuning.run import run_tuning

from .conftest import Plans


@pytest.fixture(scope="module")
def tuned(plan: Plans, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By codes, so far that some of them change."""
    out = tmp_path_factory.mktemp("qat") / "tuned"
    outcome = run_tuning(plan(out, mode="qat", steps=6, learning_rate=0.002))
    assert outcome.record["best_step"]
    return out


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_drafter(ReadDirectory.of(directory).checkpoint, dtype=torch.float32).state_dict()


def inserted(directory: Path, bundle: Path, out: Path) -> dict[str, torch.Tensor]:
    """What the drafter of ``bundle`` computes with when ``directory`` has been put into it."""
    with planned_insertion(directory, bundle) as planned:
        planned.write(out)
    with open_bundle(out) as opened:
        return load_drafter(checkpoint_of(opened.drafter()), dtype=torch.float32).state_dict()


def test_its_codes_are_kept_in_another_format(tuned: Path, tmp_path: Path) -> None:
    """As those of any checkpoint, format by format: ``tests/formats/test_integer_formats.py``."""
    converted = convert(tuned, tmp_path / "converted", format="compressed-tensors")

    assert converted.record["tuning"] == verify(tuned)["tuning"] and converted.integers
    after = weights(tmp_path / "converted")
    for path, weight in weights(tuned).items():
        torch.testing.assert_close(after[path], weight, rtol=4e-3, atol=1e-2)


def test_it_is_shown(tuned: Path, extracted: Path) -> None:
    """Of the types that the extraction has."""
    shown, before = (inspect_checkpoint(place).report["holds"] for place in (tuned, extracted))
    assert shown["stored_types"] == before["stored_types"]
    ran, tuning = CliRunner().invoke(app, [str(tuned)]), verify(tuned)["tuning"]
    assert ran.exit_code == 0 and "as recorded in extraction.json" in ran.output, ran.output
    ratio, texts = tuning["overall"]["rounds"]["ratio"], tuning["overall"]["texts"]
    expected = f"tuned beside {tuning['base']}: {ratio:.3f} times the tokens per round on {texts} held-out texts"
    assert expected in " ".join(ran.output.split())


def test_it_is_no_longer_what_its_bundle_holds(tuned: Path, sample: Path) -> None:
    """Extracting it again, as is advised of what was damaged, would undo the tuning."""
    with pytest.raises(MtpExtractError, match="says that it was tuned since: compare it with a bundle that it was put"):
        inspect_checkpoint(tuned, sample)


def test_back_into_its_bundle(tuned: Path, sample: Path, tmp_path: Path) -> None:
    """Number for number."""
    inside = inserted(tuned, sample, tmp_path / "new.litertlm")
    for path, weight in weights(tuned).items():
        assert torch.equal(inside[path], weight), path


def test_what_a_bundle_stores_once_is_tuned_as_one(plan: Plans, tmp_path: Path) -> None:
    """So it goes back, where nothing is stored twice."""
    bundle = variant("jax_published")
    separate = extract(bundle, tmp_path / "separate").directory
    run_tuning(plan(tmp_path / "tuned", directory=separate, mode="norms", steps=2, learning_rate=0.01))
    before, after = weights(separate), weights(tmp_path / "tuned")
    names = sorted(name for name in after if "q_norm" in name)[:2]
    assert torch.equal(*(after[name] for name in names)) and not torch.equal(before[names[0]], after[names[0]])
    inside = inserted(tmp_path / "tuned", bundle, tmp_path / "new.tflite")
    assert all(torch.equal(inside[name], after[name]) for name in names)


@pytest.mark.parametrize(("format_", "mode"), [("gguf", "qat"), ("gemma", "qat"), ("litert", "norms")])
def test_what_is_tuned_is_written_in_the_format_it_came_in(
    plan: Plans, extracted: Path, tmp_path: Path, format_: str, mode: str
) -> None:
    convert(extracted, tmp_path / "origin", format=format_)

    outcome = run_tuning(plan(tmp_path / "tuned", directory=tmp_path / "origin", mode=mode, learning_rate=0.002))

    old, new = (verify(tmp_path / name) for name in ("origin", "tuned"))
    assert (new["layout"], new["dtype"]) == (old["layout"], old["dtype"])
    before, after = weights(tmp_path / "origin"), weights(tmp_path / "tuned")
    assert outcome.record["best_step"] == 0 or any(not torch.equal(before[path], after[path]) for path in before)


@pytest.mark.parametrize("format_", ["mlx", "compressed-tensors", "gemma"])
def test_floats_are_refused_early_where_there_is_room_for_integers_alone(
    plan: Plans, extracted: Path, tmp_path: Path, format_: str
) -> None:
    convert(extracted, tmp_path / "origin", format=format_)
    with pytest.raises(UnsupportedError, match=r"origin: .* room for what the mode float makes"):
        run_tuning(plan(tmp_path / "f", directory=tmp_path / "origin", mode="float", work=tmp_path / "work"))
    assert not (tmp_path / "work").exists()


def test_floats_have_no_grid(plan: Plans, extracted: Path, tmp_path: Path) -> None:
    convert(extracted, tmp_path / "origin", format="transformers", dtype="bf16", codes=False)
    reporter = Recorder()
    with pytest.raises(
        MtpExtractError, match=r"pre_projection is in floats.*again with its codes \(`mtp-extract … --codes`\)"
    ) as caught:
        run_tuning(plan(tmp_path / "tuned", directory=tmp_path / "origin", mode="qat"), reporter)
    assert reporter.lines == [], "no base is loaded for it"
    assert caught.value.remedies == ("mode=norms", "mode=float")
