"""An ordered head for the sample: what is written, what is kept of the dense one, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
from helpers.first_pair import first_bundle
from helpers.schemas import validator
from safetensors.numpy import load_file
from seam import verify
from torch import Tensor

from mtp_extract import convert
from mtp_extract.architecture.config import OrderedHeadConfig
from mtp_extract.bundle import open_bundle
from mtp_extract.drafter.load import load_drafter
from mtp_extract.errors import UnsupportedError
from mtp_extract.evaluation.agreement import Change
from mtp_extract.evaluation.intervals import Interval
from mtp_extract.formats import read_checkpoint
from mtp_extract.tuning import ordered
from mtp_extract.tuning.ordered import (
    HeadSample,
    build_head,
    choose_top_k,
    find_token_clusters,
    learn_centroids,
    list_head_refusals,
    rank_clusters,
)
from mtp_extract.tuning.run import Outcome, run_tuning
from mtp_extract.tuning.verdict import Comparison
from mtp_extract.validation.parity import check_transformers

from .conftest import Plans
from .test_verdict import ANCHORS, measure

CENTROIDS = "masked_embedding.centroids.weight"
ORDERING = "masked_embedding.token_ordering"


@pytest.fixture(scope="module")
def make(plan: Plans) -> Callable[..., Outcome]:
    def run(out: Path, directory: Path | None = None, top_k: int = 4, **changes: Any) -> Outcome:
        of = {} if directory is None else {"directory": directory}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ordered, "choose_top_k", lambda *of: top_k)
            return run_tuning(plan(out, **({"mode": "ordered", "steps": 30, **of} | changes)))

    return run


@pytest.fixture(scope="module")
def headed(make: Callable[..., Outcome], tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return make(tmp_path_factory.mktemp("headed") / "out")


def test_only_the_head_changes(headed: Outcome, extracted: Path) -> None:
    """The head is a permutation of the tokens, and centroids; record and card describe it."""
    assert headed.directory is not None
    before, after = (load_file(directory / "model.safetensors") for directory in (extracted, headed.directory))
    assert after.keys() - before.keys() == {CENTROIDS, ORDERING}
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)
    codes = "codes/codes.safetensors"
    assert (headed.directory / codes).read_bytes() == (extracted / codes).read_bytes()
    vocabulary = len(before["model.embed_tokens.weight"])
    assert after[ORDERING].dtype == np.int64
    assert np.array_equal(np.sort(after[ORDERING]), np.arange(vocabulary))
    assert after[CENTROIDS].shape == (32, before["model.embed_tokens.weight"].shape[1])
    config = json.loads((headed.directory / "config.json").read_text())
    keys = ("use_ordered_embeddings", "num_centroids", "centroid_intermediate_top_k")
    assert [config[key] for key in keys] == [True, 32, 4]
    record = verify(headed.directory)
    validator("extraction")(record)
    assert record["proof"] is None
    head = record["ordered_head"]
    assert head == {**json.loads(json.dumps(headed.record)), "made_from": head["made_from"]}
    assert set(head["kinds"]) == {"as trained on", "shipped prompts", "random tokens"}
    card = (headed.directory / "README.md").read_text(encoding="utf-8")
    assert "looks into 4 of 32 clusters" in card
    assert "--against" not in card and "The LM head is dense" not in card


def test_transformers_loads_it_strictly_and_computes_the_same(headed: Outcome) -> None:
    assert headed.directory is not None
    with open_bundle(first_bundle()) as opened:
        drafter = load_drafter(headed.directory, dtype=torch.float32)
        check = check_transformers(headed.directory, drafter, opened.read_drafter())
    assert check.passed, check.evidence


def test_a_head_replaces_another(headed: Outcome, make: Callable[..., Outcome], tmp_path: Path) -> None:
    """The dense rows are still there, so a head can be made anew; a conversion keeps the head."""
    assert headed.directory is not None
    outcome = make(tmp_path / "other", headed.directory, top_k=32)
    assert outcome.record["kinds"]["as trained on"]["share"] == 1
    assert outcome.comparisons.overall.change.mean == 0 and outcome.refused == ()
    assert read_checkpoint(tmp_path / "other").config.ordered_head == OrderedHeadConfig(32, 32)
    half = convert(headed.directory, tmp_path / "bf16", format="transformers", dtype="bf16")
    assert half.record["ordered_head"]["centroids"] == 32
    # Made of the same rows, it is the same, to the byte.
    again = make(tmp_path / "again", headed.directory)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (headed.directory / name).read_bytes(), name
    assert again.record["kinds"] == headed.record["kinds"]


def test_a_head_that_loses_too_much_is_not_written(make: Callable[..., Outcome], tmp_path: Path) -> None:
    outcome = make(tmp_path / "out", top_k=1, steps=1, force=False)
    assert outcome.directory is None and not (tmp_path / "out").exists()
    assert "of the dense head's choices on held-out text" in outcome.refused[0]
    assert any("(random tokens)" in reason for reason in outcome.refused)


@pytest.mark.parametrize("format_", ["litert", "gguf", "gemma"])
def test_formats_without_room_are_refused(
    make: Callable[..., Outcome], extracted: Path, tmp_path: Path, format_: str
) -> None:
    convert(extracted, tmp_path / "origin", format=format_)
    with pytest.raises(UnsupportedError, match=r"origin: .* room for what the mode ordered makes"):
        make(tmp_path / "out", tmp_path / "origin")
    assert not (tmp_path / "out").exists()


def test_clusters_divide_a_vocabulary() -> None:
    assert [ordered.choose_cluster_count(size) for size in (262144, 512)] == [2048, 32]
    assert 262145 % ordered.choose_cluster_count(262145) == 0


def test_heads_and_states_of_equal_rows_or_zeros() -> None:
    generator = torch.Generator().manual_seed(0)
    choices = torch.randint(24, (64,), generator=generator)
    for states in (torch.randn(64, 6, generator=generator), torch.zeros(64, 6)):
        samples = [HeadSample(states, choices, torch.arange(64))]
        for head in (torch.zeros(24, 6), torch.ones(24, 6)):
            ordering, centroids, _ = build_head(head, samples, samples, 6, 4, 0)
            assert torch.equal(ordering.sort().values, torch.arange(24)) and bool(torch.isfinite(centroids).all())
            assert torch.equal(torch.bincount(find_token_clusters(ordering, 6)), torch.full((6,), 4))


def test_top_k_is_the_least_that_loses_little_on_every_kind() -> None:
    first_rank, other_rank = (torch.zeros(size, dtype=torch.long) for size in (2000, 2000))
    first_rank[::1000] = 3
    # All but 0.1 % lie in the first: more than 99.875 %.
    assert choose_top_k([first_rank, other_rank], 1024, 64) == 1
    first_rank[::250] = 3
    assert choose_top_k([first_rank, other_rank], 1024, 64) == 4
    other_rank[:] = 5
    assert choose_top_k([first_rank, other_rank], 1024, 64) == 8
    # No more than half of the rows, centroids among them.
    first_rank[:] = 40
    assert choose_top_k([first_rank, other_rank], 1024, 64) == 28


@pytest.mark.parametrize(
    ("share", "change", "loses", "expected"),
    [
        (0.999, Change(-0.01, Interval(-0.019, -0.001), 50), True, []),
        (0.994, Change(0.0, Interval(0.0, 0.0), 50), True, ["99.40% .*noise"]),
        (0.999, Change(-0.01, Interval(-0.021, 0.0), 50), True, ["may lose more than 0.02"]),
        (0.999, Change(-0.1, Interval(-0.2, -0.05), 50), True, ["may lose more than 0.02", "more than 0.02 on code"]),
        # No draft of fifty texts is lost, and none of four.
        (1.0, Change(0.0, Interval(-0.3, 0.3), 50), False, []),
        (1.0, Change(0.0, None, 4), False, ["not decided: 4 texts, at least 5 are needed"]),
    ],
)
def test_refusals_of_a_head(share: float, change: Change, loses: bool, expected: list[str]) -> None:
    both = [measure(5, torch.ones(5) - lost * loses) for lost in (0.0, 0.5)]
    comparison = msgspec.structs.replace(Comparison.of(*both, torch.ones(5 * ANCHORS, dtype=torch.bool)), change=change)
    comparisons = cast("Any", SimpleNamespace(overall=comparison, workloads={"code": comparison}))
    refusals = list(list_head_refusals({"as trained on": {"share": 1.0}, "noise": {"share": share}}, comparisons))
    assert len(refusals) == len(expected)
    assert all(re.search(part, reason) for part, reason in zip(expected, refusals, strict=True))


# Clusters and centroids

CLUSTERS, WIDTH = 12, 16


def make_sample(count: int, seed: int) -> HeadSample:
    """Return states whose cluster shows in small differences along few axes, beside a large common part."""
    centres = torch.randn(CLUSTERS, WIDTH, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    cluster = torch.randint(CLUSTERS, (count,), generator=generator)
    states = centres[cluster] + 0.3 * torch.randn(count, WIDTH, generator=generator)
    states *= torch.logspace(0, 2, WIDTH)
    states[:, -1] += 300
    return HeadSample(states, cluster, cluster)


def compute_means(training: HeadSample) -> Tensor:
    return torch.stack([training.states[training.choices == number].mean(dim=0) for number in range(CLUSTERS)])


def test_learned_centroids_are_better_than_means() -> None:
    means = compute_means(training := make_sample(3000, 1))
    centroids, step = learn_centroids([training], [make_sample(1500, 2)], means, steps=60, seed=3)
    states, cluster, _ = make_sample(3000, 4)
    before, after = (float((rank_clusters(states, rows, cluster) < 1).double().mean()) for rows in (means, centroids))
    assert after > before + 0.1 and step > 0


def test_centroids_are_chosen_by_the_worst_kind() -> None:
    """Centroids learned from wrong labels fit such states; the chosen ones serve the right labels too."""
    training, right = make_sample(3000, 1), make_sample(1500, 2)
    means, wrong = compute_means(training), training._replace(choices=(training.choices + 1) % CLUSTERS)
    alone, step = learn_centroids([wrong], [wrong], means, steps=60, seed=0)
    both, _ = learn_centroids([wrong], [wrong, right], means, steps=60, seed=0)
    of_kinds = (
        [rank_clusters(kind.states, rows, kind.choices) for kind in (wrong, right)] for rows in (both, means, alone)
    )
    kept, *others = (max(float(rank.double().median()) for rank in ranks_by_kind) for ranks_by_kind in of_kinds)
    assert step > 0 and kept <= min(others)
