"""pair.json: buffers as large as the tensors that are really there, and the metrics of the report."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.random_heads import head_config, random_head
from helpers.random_pairs import random_base, random_drafter
from helpers.schemas import validator
from torch import Tensor, nn

from mtp_extract.drafter.load import Network
from mtp_extract.speculate.cache import SlotCache
from mtp_extract.speculate.generate import Options, SpeculativeGenerator
from mtp_extract.speculate.target import Base
from mtp_extract.speculate.trees import AutoTree, Tree
from mtp_extract.validate.acceptance.drafting import Drafting
from mtp_extract.validate.acceptance.pair import BUFFERS, PairFacts, measure_pair
from mtp_extract.validate.report.document import as_json
from mtp_extract.validate.report.pages import buffers, write_report
from mtp_extract.validate.report.pair import pair_as_json
from mtp_extract.validate.result import Validation
from mtp_extract.validate.run import ValidationPlan

# They share the pair, and a whole validation of it.
pytestmark = pytest.mark.xdist_group("validation")

PROMPT = (2, 7, 9, 3, 5, 30, 21)
NEW = 12
DRAFTED = {
    "3": Drafting("3", 3, None),
    "4x2x1": Drafting("4x2x1", Tree.parse("4x2x1"), None),
    "auto:6": Drafting("auto:6", AutoTree(6), None),
}


def drafter_of(base: Base, kind: str) -> Network:
    return random_drafter(base.model) if kind == "mtp" else random_head(head_config())


@pytest.fixture(scope="module")
def base() -> Base:
    return Base(random_base())


def seen(base: Base, kind: str, name: str) -> PairFacts:
    found = measure_pair(base, drafter_of(base, kind), PROMPT, DRAFTED[name], new_tokens=NEW)
    assert found is not None
    return found


def nbytes(facts: PairFacts, name: str) -> int:
    return sum(held.nbytes for held in facts.buffers[name])


@pytest.mark.parametrize("name", DRAFTED)
@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
def test_the_bases_cache_is_the_one_that_the_loop_made(
    base: Base, kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[SlotCache] = []
    new_cache = base.new_cache

    def kept(**sizes: int) -> SlotCache:
        made.append(new_cache(**sizes))
        return made[-1]

    monkeypatch.setattr(base, "new_cache", kept)
    facts = seen(base, kind, name)
    (cache,) = made
    assert nbytes(facts, "target_kv_cache") == cache.nbytes > 0
    held = facts.buffers["target_kv_cache"]
    assert sum(tensors.copies for tensors in held) == 2 * len(cache.shapes)
    assert {tensors.shape for tensors in held} == set(cache.shapes)


@pytest.mark.parametrize("name", DRAFTED)
@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
def test_every_size_is_that_of_its_tensors(base: Base, kind: str, name: str) -> None:
    facts, drafting = seen(base, kind, name), DRAFTED[name]
    assert tuple(facts.buffers) == BUFFERS
    for tensors in (held for buffer in facts.buffers.values() for held in buffer):
        assert len(tensors.axes) == len(tensors.shape)
        assert tensors.nbytes == tensors.copies * math.prod(tensors.shape) * getattr(torch, tensors.dtype).itemsize
    (stream,), (drafts,) = facts.buffers["target_main_stream"], facts.buffers["candidate_tokens"]
    (logits,), (accepted,) = facts.buffers["target_logits"], facts.buffers["accepted_tokens"]
    assert drafts.shape == (1, drafting.drafts)
    assert stream.shape == (1, facts.fed, 32) == (1, drafting.drafts + 1, 32)
    assert (logits.shape, logits.dtype) == ((1, facts.fed, 40), "float32")
    assert accepted.shape == (1, drafting.depth + 1)
    assert facts.positions == len(PROMPT) + NEW
    masks = facts.buffers["verifier_scratch"][:-1]
    slots = {shape[2] for shape in (held.shape for held in facts.buffers["target_kv_cache"])}
    assert {mask.shape for mask in masks} == {(1, 1, facts.fed, count) for count in slots}


def test_an_mtp_drafter_has_no_cache_and_an_eagle3_head_has(base: Base) -> None:
    mtp, head = seen(base, "mtp", "3"), seen(base, "eagle3", "3")
    assert mtp.buffers["draft_kv_cache"] == ()
    assert not mtp.needs.own_cache
    verified, own = head.buffers["draft_kv_cache"]
    # Every token but the first has a state before it, and the last was fed to nothing.
    assert verified.shape[1] >= head.positions - 2
    assert (verified.shape[0], *verified.shape[2:]) == (1, 2, 8)
    assert own.shape == (1, 1, 3, 2, 8)
    assert [held.what[-1] for held in head.buffers["draft_backbone_stream"]] == ["1", "3", "5"]
    assert {held.shape for held in head.buffers["draft_backbone_stream"]} == {(1, 4, 32)}
    assert [held.shape for held in mtp.buffers["draft_backbone_stream"]] == [(1, 1, 32)]
    assert [held.shape[-1] for held in mtp.buffers["draft_main_stream"]] == [mtp.width]


@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
def test_the_two_are_as_large_as_their_weights(base: Base, kind: str) -> None:
    drafter = drafter_of(base, kind)
    facts = measure_pair(base, drafter, PROMPT, DRAFTED["3"], new_tokens=NEW)
    assert facts is not None
    for side, module in ((facts.target, base.model), (facts.draft, drafter)):
        tensors = {t.data_ptr(): t for t in (*module.parameters(), *module.buffers()) if t.numel()}
        assert side.nbytes == sum(map(_size, tensors.values()))
        assert side.parameters == sum({p.data_ptr(): p.numel() for p in module.parameters()}.values())
        assert side.dtype == "float32"


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def test_looking_changes_nothing(base: Base) -> None:
    drafter = drafter_of(base, "mtp")
    generator = SpeculativeGenerator(base, drafter)
    options = Options(max_new_tokens=NEW, drafts=3)
    before = generator.generate_batch([list(PROMPT)], options)[0].tokens
    measure_pair(base, drafter, PROMPT, DRAFTED["3"], new_tokens=NEW)
    assert generator.generate_batch([list(PROMPT)], options)[0].tokens == before
    for module in (base.model.model, base.model.lm_head, drafter.final_norm):
        assert isinstance(module, nn.Module)
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_nothing_to_draft(base: Base) -> None:
    assert measure_pair(base, drafter_of(base, "mtp"), PROMPT, DRAFTED["3"], new_tokens=2) is None


def test_the_file(
    plan: ValidationPlan, validation: Validation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtp_extract.report.web.draw", lambda *_: [])
    assert "pair.json" in write_report(validation, tmp_path / "report")
    found: dict[str, Any] = json.loads((tmp_path / "report" / "pair.json").read_text())
    validator("pair")(found)
    report = as_json(validation)
    assert found["target"]["hidden_size"] == found["draft"]["backbone_hidden_size"] == 64
    assert found["bridge"]["shape"] == ["T", 64]
    assert found["draft"]["assistant_role"] == "mtp_drafter"
    assert found["buffers"]["draft_kv_cache"]["shared_with"] == "target_kv_cache"
    assert found["buffers"]["draft_kv_cache"]["bytes"] == 0
    assert found["draft"]["parameters"] == report["drafters"][0]["parameters_a_step"]["stored"]
    for place in (plan.directory, plan.base):
        assert str(place) not in json.dumps([found, report]), "where things lie here is nobody else's"
    assert found["verify"]["drafts"] == "3"
    table = buffers(found)
    assert {row[0] for row in table.rows} == set(BUFFERS) - {"draft_kv_cache"}
    assert table.markdown() in (tmp_path / "report" / "report.md").read_text()
    assert list(found["metrics"]) == list(report["generation"])
    for name, metrics in found["metrics"].items():
        measured = report["generation"][name]
        assert metrics["backbone_only_tok_per_sec"] == measured["base_tokens_per_s"]
        assert metrics["speculative_tok_per_sec"] == measured["speculative_tokens_per_s"]
        assert metrics["draft_tokens_per_batch"] == int(name)
        assert metrics["accepted_tokens/drafted_tokens"] == measured["accepted"] / measured["drafted"]
        assert metrics["target_verify_ms"] == measured["verify_ms"]
        assert metrics["assistant_draft_ms"] == measured["draft_ms"]
        assert metrics["why"] == {}


def test_what_was_not_measured_has_a_reason(validation: Validation) -> None:
    first = validation.drafters[0]
    untimed = tuple(
        dataclasses.replace(result, verify_ms=math.nan, draft_ms=math.nan, what=Tree.parse("4x2x1"))
        for result in first.generation.lengths
    )
    drafter = dataclasses.replace(first, generation=dataclasses.replace(first.generation, lengths=untimed))
    found = pair_as_json(dataclasses.replace(validation, drafters=(drafter, drafter)))
    assert found is not None
    validator("pair")(json.loads(json.dumps(found, allow_nan=False)))
    for metrics in (*found["metrics"].values(), *found["beside"][0]["metrics"].values()):
        assert {name for name, value in metrics.items() if value is None} == set(metrics["why"]) == {
            "target_verify_ms",
            "assistant_draft_ms",
            "accepted_tokens/drafted_tokens",
        }  # fmt: skip


def test_without_a_base_there_is_none(validation: Validation) -> None:
    assert pair_as_json(dataclasses.replace(validation, base=None, drafters=())) is None
