"""Drafters side by side: the same texts, their own heads, the bytes they read, and what is said of them."""

from __future__ import annotations

import dataclasses
import json
import shutil
import struct
from collections.abc import Sequence
from math import prod
from pathlib import Path

import pytest
import torch
from helpers.commands import run_here
from helpers.first_pair import first_bundle
from helpers.random_assistants import GEOMETRIES, random_assistant
from helpers.record_document import TUNING
from helpers.schemas import validator
from safetensors.torch import load_file, save_file

import mtp_extract
from mtp_extract.errors import CheckpointError, PairError
from mtp_extract.evaluate.measured import compare, of_agreement
from mtp_extract.evaluate.reads import reads_of_a_step
from mtp_extract.formats import format_of
from mtp_extract.speculate.teacher import Agreement
from mtp_extract.validation.acceptance.drafters import facts_of
from mtp_extract.validation.page import tables, write_validation
from mtp_extract.validation.plan import ValidationPlan
from mtp_extract.validation.result import Validation
from mtp_extract.validation.run import run_validation

# They share the pair, and a whole validation of it.
pytestmark = pytest.mark.xdist_group("validation")

CLUSTERS = 16


def without_record(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    (target / "extraction.json").unlink()
    return target


def ordered(source: Path, target: Path, top_k: int) -> Path:
    """``source`` with an ordered head of 16 clusters of neighbouring rows; the centroid is their mean."""
    without_record(source, target)
    weights = load_file(target / "model.safetensors")
    table = weights["model.embed_tokens.weight"]
    ordering = torch.argsort(table[:, 0])
    weights["masked_embedding.token_ordering"] = ordering
    weights["masked_embedding.centroids.weight"] = table[ordering].view(CLUSTERS, -1, table.shape[1]).mean(1)
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config |= {"use_ordered_embeddings": True, "num_centroids": CLUSTERS, "centroid_intermediate_top_k": top_k}
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.fixture(scope="module")
def places(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same again: tuned by its record, with a fault, with ordered heads that look at all clusters and at one."""
    folder = tmp_path_factory.mktemp("beside")
    faulty = without_record(checkpoint, folder / "faulty")
    weights = load_file(faulty / "model.safetensors")
    weights["model.layers.3.self_attn.q_norm.weight"] *= -1
    weights["model.layers.0.layer_scalar"] *= 0.2
    save_file(weights, faulty / "model.safetensors", {"format": "pt"})
    tuned = folder / "tuned"
    shutil.copytree(checkpoint, tuned)
    record = json.loads((tuned / "extraction.json").read_text())
    (tuned / "extraction.json").write_text(json.dumps({**record, "tuning": TUNING}))
    return {
        "drafter": checkpoint,
        "tuned": tuned,
        "faulty": faulty,
        "all": ordered(checkpoint, folder / "all", CLUSTERS),
        "one": ordered(checkpoint, folder / "one", 1),
    }


@pytest.fixture(scope="module")
def found(plan: ValidationPlan, places: dict[str, Path]) -> Validation:
    directory, *beside = places.values()
    return run_validation(
        dataclasses.replace(plan, directory=directory, beside=beside, source=None, draft_steps=(3,), timed=1)
    )


def test_the_same_drafter_does_the_same(found: Validation) -> None:
    """Whether it is called tuned, or has an ordered head that looks at every cluster."""
    by_name = {drafter.facts.name: drafter for drafter in found.drafters}
    for same in (by_name["drafter"], by_name["tuned"], by_name["all"]):
        for change in (same.change, *same.changes.values()):
            assert change.mean == 0.0
            assert not change.better
            assert not change.worse
        assert same.change.interval is not None
        assert same.change.interval.low == -same.change.interval.high
        assert same.agreement == found.drafters[0].agreement
        assert same.workloads == found.drafters[0].workloads
        assert [r.accepted for r in same.generation.worth.values()] == [
            r.accepted for r in found.drafters[0].generation.worth.values()
        ]
    assert list(found.drafters[0].changes) == ["code", "prose"]


def test_a_worse_drafter_is_below(found: Validation) -> None:
    """One with a fault, and one whose head looks at a sixteenth of the tokens; the text is the base's with all."""
    first = found.drafters[0]
    for name in ("faulty", "one"):
        (worse,) = (drafter for drafter in found.drafters if drafter.facts.name == name)
        assert worse.change.worse
        after, before = worse.agreement.teacher_forced.value, first.agreement.teacher_forced.value
        assert after is not None and before is not None
        gap = after - before
        assert worse.change.mean == pytest.approx(gap)
        assert worse.change.interval is not None
        assert worse.change.interval.low < gap < worse.change.interval.high < 0
        assert all(result.same_text == result.prompts for result in worse.generation.worth.values())
        assert any(line.startswith(f"{name} drafts worse: -") for line in found.findings)


def test_differences_by_hand() -> None:
    """Text by text, over the rounds that have both targets."""
    text, anchor = torch.tensor([0, 0, 1, 1]), torch.arange(4)
    targets = torch.tensor([[1, 2], [1, 2], [1, 2], [1, -1]])

    def of(drafts: list[list[int]]) -> Agreement:
        return Agreement(text, anchor, torch.tensor(drafts), targets, torch.zeros(4, 2, dtype=torch.bool))

    before = of_agreement(of([[1, 9], [9, 2], [1, 2], [1, 2]]))
    after = of_agreement(of([[1, 2], [9, 2], [1, 9], [9, 9]]))
    assert before.teacher_forced == pytest.approx(1 + (1 + 0 + 2) / 3)
    assert compare(before, after).mean == pytest.approx((1 + 0 - 1) / 3)
    assert not (compare(before, after).better or compare(before, after).worse)


def test_what_they_are(found: Validation) -> None:
    assert [note for note in found.notes if note.startswith("tuned: tuned; on prompts that a drafter was tuned on")]
    facts = {drafter.facts.name: (drafter.facts.made, drafter.facts.mode) for drafter in found.drafters}
    assert facts == {
        "drafter": ("extracted", None),
        "tuned": ("tuned", "qat"),
        "faulty": ("unknown", None),
        "all": ("unknown", None),
        "one": ("unknown", None),
    }


def test_the_report(found: Validation, tmp_path: Path) -> None:
    write_validation(found, tmp_path / "report")
    validator("report")(json.loads((tmp_path / "report" / "report.json").read_text()))
    shown = {table.title: table for table in tables(found)}
    columns = [f"{name}: accepted %" for name in ("drafter", "tuned", "faulty", "all", "one")]
    assert shown["Acceptance by draft step"].columns == ["draft step", *columns]
    whats = [row[1] for row in shown["What a draft step costs"].rows]
    assert whats == [
        "extracted, transformers",
        "tuned (qat), transformers",
        "no record, transformers",
        "no record, ordered head, 16 of 16 clusters, transformers",
        "no record, ordered head, 1 of 16 clusters, transformers",
    ]
    assert "beside it, in teacher-forced tokens per round on the same texts, tuned +0.00 (-" in found.verdict


def lengths_in(path: Path) -> dict[str, int]:
    """Bytes of every tensor, from the file's header alone."""
    with path.open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    spans = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    return {name: end - begin for name, (begin, end) in spans.items()}


@pytest.mark.parametrize(
    ("layout", "dtype", "head"),
    [
        ("transformers", "f32", ("model.embed_tokens.",)),
        ("transformers", "bf16", ("model.embed_tokens.",)),
        ("mlx", None, ("lm_head.", "model.embed_tokens.")),
        ("compressed-tensors", None, ("lm_head.", "model.embed_tokens.")),
        ("gemma", None, ("lm_head.", "model.embed_tokens.")),
        ("litert", "f32", ("lm_head.",)),
    ],
)
def test_bytes_are_those_in_the_file(layout: str, dtype: str | None, head: Sequence[str], tmp_path: Path) -> None:
    mtp_extract.extract(first_bundle(), tmp_path / "out", format=layout, dtype=dtype)
    (file,) = (tmp_path / "out").glob("*.safetensors")
    lengths = lengths_in(file)
    reads = facts_of(tmp_path / "out", "x").reads
    assert reads.total == reads.stored == sum(lengths.values())
    assert reads.head == sum(length for name, length in lengths.items() if name.startswith(tuple(head)))


def test_bytes_of_a_gguf(tmp_path: Path) -> None:
    """llama.cpp's blocks of 32: 18 bytes of 4-bit codes, 34 of 8-bit ones."""
    from gguf import GGUFReader

    mtp_extract.extract(first_bundle(), tmp_path / "out", format="gguf")
    tensors = {
        tensor.name: int(tensor.n_bytes) for tensor in GGUFReader(next((tmp_path / "out").glob("*.gguf"))).tensors
    }
    reads = facts_of(tmp_path / "out", "x").reads
    assert reads.total == sum(tensors.values())
    assert reads.head == tensors["token_embd.weight"]


@pytest.mark.parametrize(("name", "top_k"), [("all", CLUSTERS), ("one", 1)])
def test_bytes_of_an_ordered_head(places: dict[str, Path], name: str, top_k: int) -> None:
    """All centroids; of rows (F32) and ordering (I64) those of the chosen clusters."""
    weights = load_file(places[name] / "model.safetensors")
    vocabulary, width = weights["model.embed_tokens.weight"].shape
    body = sum(prod(tensor.shape) * tensor.element_size() for key, tensor in weights.items() if "embed" not in key)
    layout = format_of(places[name])
    reads = reads_of_a_step(layout.name, layout.read(places[name]))
    assert reads.body == body
    assert reads.head == CLUSTERS * width * 4 + top_k * (vocabulary // CLUSTERS) * (width * 4 + 8)
    assert reads.stored == sum(lengths_in(places[name] / "model.safetensors").values())


def test_types_may_be_mixed(checkpoint: Path, tmp_path: Path) -> None:
    """As in an assistant that others made."""
    mixed = without_record(checkpoint, tmp_path / "mixed")
    weights = load_file(mixed / "model.safetensors")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].bfloat16()
    save_file(weights, mixed / "model.safetensors", {"format": "pt"})
    reads = facts_of(mixed, "x").reads
    assert reads.head == lengths_in(mixed / "model.safetensors")["model.embed_tokens.weight"]
    assert reads.stored == sum(lengths_in(mixed / "model.safetensors").values())


def test_one_that_does_not_fit_is_named(plan: ValidationPlan, checkpoint: Path, tmp_path: Path) -> None:
    """Before the base writes a word."""
    other, said = tmp_path / "other", list[str]()
    random_assistant(GEOMETRIES["dense"]).save_pretrained(other)
    wanted = dataclasses.replace(plan, source=None, beside=(checkpoint, other))
    with pytest.raises(PairError, match="other: expected a base with a vocabulary of 60, found 512"):
        run_validation(dataclasses.replace(wanted, say=said.append))
    assert said == [f"loading the base {plan.base}"]
    with pytest.raises(CheckpointError, match="/absent: expected a checkpoint's directory"):
        run_validation(dataclasses.replace(wanted, beside=(Path("/absent"),)))


def test_without_a_base_there_is_nothing_to_compare(checkpoint: Path) -> None:
    result = run_here("validate", checkpoint, "--source", first_bundle(), "--beside", checkpoint)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == (
        "error: expected a base to compare drafters beside, found none; give the model that is drafted for (--base)\n"
    )
