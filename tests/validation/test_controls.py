"""Controls: each breaks one thing and nothing else, and is told apart from the real drafter where it matters."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.reporters import Recorder
from msgspec import structs

import mtp_extract
from mtp_extract.data import sample_base, sample_bundle, sample_prompts
from mtp_extract.drafter.load import load_drafter
from mtp_extract.drafter.mtp import TRANSFORMERS, MtpDrafter
from mtp_extract.drafter.protocol import BaseOutput, RoundStart
from mtp_extract.evaluation.base_model import load_base
from mtp_extract.evaluation.base_texts import Continuations, write_texts
from mtp_extract.evaluation.prompts import read_prompts
from mtp_extract.speculate.loop import SpeculativeGenerator
from mtp_extract.speculate.target import Base
from mtp_extract.speculate.teacher import Agreement
from mtp_extract.validation.controls import CONTROLS, compare_with_control, draft_together
from mtp_extract.validation.page import build_controls_table as table_of
from mtp_extract.validation.result import Validation, conclude

# They share the pair, and a whole validation of it.
pytestmark = pytest.mark.xdist_group("validation")

BY_NAME = {control.name: control for control in CONTROLS}
PROMPTS_PER_WORKLOAD = 8


def test_of_the_sample_every_control_is_clearly_below(tmp_path_factory: pytest.TempPathFactory) -> None:
    """It is a pair to measure on: whatever is broken shows."""
    directory = tmp_path_factory.mktemp("sample") / "drafter"
    mtp_extract.extract(sample_bundle(), directory, dtype="f32")
    loaded, all_prompts = load_base(str(sample_base()), "cpu"), read_prompts(sample_prompts())
    generator = SpeculativeGenerator(loaded.model, load_drafter(directory), loaded.tokenizer)
    names = dict.fromkeys(prompt.workload for prompt in all_prompts)
    prompts = [one for name in names for one in [p for p in all_prompts if p.workload == name][:PROMPTS_PER_WORKLOAD]]
    sizes = {"new_tokens": 48, "batch": 32}
    written = write_texts(generator.base, generator.codec, prompts, **sizes, chat_template=True)
    _, results = draft_together(generator.base, [(generator.drafter, 1, False)], written, batch=32)
    assert [result.name for result in results] == list(BY_NAME)
    for result in results:
        assert result.standing == "below", result.name
        assert (result.difference.value or 0) > 0.08, result.name


def build_agreement(hits: list[int], texts: int = 20) -> Agreement:
    """Positions of so many texts; 1 for a hit."""
    drafts, count = torch.tensor(hits)[:, None], len(hits)
    ones = torch.ones(count, 1).long()
    return Agreement(torch.arange(count) % texts, torch.arange(count), drafts, ones, 1 - drafts)


@pytest.mark.parametrize(
    ("ours", "theirs", "standing"),
    [
        ([1] * 160 + [0] * 40, [1] * 60 + [0] * 140, "below"),
        ([1] * 160 + [0] * 40, [1] * 146 + [0] * 54, "below"),
        ([1] * 140 + [0] * 60, [1] * 170 + [0] * 30, "above"),
        ([1] * 160 + [0] * 40, [1] * 160 + [0] * 40, "same"),
        # Twenty positions of 4000, in twenty texts.
        ([1] * 2020 + [0] * 1980, [1] * 2000 + [0] * 2000, "same"),
        # One text lost, of twenty: so may others be.
        ([*[1] * 19, 1] * 20, [*[1] * 19, 0] * 20, "undecided"),
        ([1, 0] * 10, [0, 1] * 10, "undecided"),
    ],
)
def test_standing(ours: list[int], theirs: list[int], standing: str) -> None:
    result = compare_with_control(CONTROLS[0], build_agreement(ours), build_agreement(theirs))
    assert result.standing == standing
    assert result.top1.value == pytest.approx(sum(theirs) / len(theirs))
    assert result.difference.value == pytest.approx((sum(ours) - sum(theirs)) / len(ours))


def test_four_texts_decide_nothing() -> None:
    for theirs in ([0] * 40, [1] * 40):
        result = compare_with_control(CONTROLS[0], build_agreement([1] * 40, 4), build_agreement(theirs, 4))
        assert result.standing == "undecided"


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("shuffled_kv", "kv"),
        ("zero_hidden", "hidden"),
        ("unscaled_embedding", "embedding"),
        ("position_off_by_one", "sine"),
    ],
)
def test_changes_one_argument(drafter: MtpDrafter, name: str, field: str) -> None:
    """Of all that the first layer reads, in each step of a round of two, for two texts."""
    torch.manual_seed(0)
    tokens, positions = torch.randint(9, (2, 7)), torch.arange(7).expand(2, 7)
    shapes = {kind: (2, layer.num_kv_heads, 7, layer.head_dim) for kind, layer in drafter.config.kv_layers.items()}
    kv = {kind: (torch.randn(shape), torch.randn(shape)) for kind, shape in shapes.items()}
    table, fed = torch.randn(9, 64), BaseOutput(tokens, positions, torch.randn(2, 7, 64), {}, kv)
    known = RoundStart(fed, torch.tensor([[3], [5]]), lambda tokens: table[tokens])
    assert BY_NAME[name].drafter(drafter) is drafter
    state = drafter.start(known)
    changed = {
        "kv": lambda before: before.roll(1, 1),
        "hidden": torch.zeros_like,
        "embedding": lambda before: before / 8,
        "sine": lambda before: drafter.start(known, TRANSFORMERS).views[0].angles.sine,
    }
    one = BY_NAME[name].build_faulty(drafter)
    other = one.start(known)
    for _ in range(2):
        reads = []
        for fed_with in (state, one.every_step(replace(other, hidden=state.hidden))):
            keys, values, bias, angles = fed_with.views[0]
            assert bias is not None
            given = {"kv": torch.stack((keys, values)), "sine": angles.sine, "masks": bias, "hidden": fed_with.hidden}
            reads.append({**given, "embedding": fed_with.embed(tokens[:, :1])})
        before, after = reads
        for part in before:
            assert torch.equal(after[part], changed[part](before[part]) if part == field else before[part]), part
        _, state = drafter.step(state, tokens[:, :1])


@pytest.mark.parametrize(
    ("name", "part"), [("sqrt_d_attention", {"q_norm"}), ("full_rope", set()), ("unit_layer_scalars", {"layer_scalar"})]
)
def test_changes_one_part_of_the_drafter(drafter: MtpDrafter, name: str, part: set[str]) -> None:
    twin = BY_NAME[name].drafter(drafter)
    assert twin is not None
    before, after = drafter.state_dict(), twin.state_dict()
    assert {key.split(".")[2] for key in before if not torch.equal(before[key], after[key])} == part
    assert (twin.config == drafter.config) == (name != "full_rope")
    if name == "sqrt_d_attention":
        assert drafter.config.layers[0].head_dim == 32
        torch.testing.assert_close(after["layers.0.q_norm.weight"], before["layers.0.q_norm.weight"] / 32**0.5)
    else:
        assert BY_NAME[name].drafter(twin) is None, "there is nothing left to change"
    if name == "full_rope":
        assert {layer.rope.partial_rotary_factor for layer in twin.config.layers} == {1.0}


def test_what_would_change_nothing_is_left_out(
    generator: SpeculativeGenerator, continuations: Continuations, drafter: MtpDrafter
) -> None:
    """K and V of another text need another text; and of a head rotated whole there is no more to rotate."""
    alone = Continuations(continuations.prompts[:1], continuations.texts[:1])
    rotated = BY_NAME["full_rope"].drafter(drafter)
    assert rotated is not None
    _, controls = draft_together(generator.base, [(rotated, 1, False)], alone, batch=4)
    assert [one.name for one in controls] == [name for name in BY_NAME if name not in ("shuffled_kv", "full_rope")]


def test_the_base_reads_a_batch_once(
    generator: SpeculativeGenerator, continuations: Continuations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever drafts beside it, and however many controls."""
    read: list[int] = []
    feed = Base.feed
    monkeypatch.setattr(Base, "feed", lambda *given: read.append(len(given[1])) or feed(*given))
    reporter = Recorder()
    requests = [(generator.drafter, 2, False)] * 2 + [(generator.drafter, 3, True)] * 2
    results, controls = draft_together(generator.base, requests, continuations, batch=4, reporter=reporter)
    assert sum(read) == len(continuations.usable)
    assert reporter.parts == [("drafts after every token", done, 2) for done in (1, 2)]
    assert all(torch.equal(own.drafts, other.drafts) for own, other in (results[:2], results[2:]))
    assert [one.steps for one in results] == [2, 2, 3, 3]
    assert len(controls) == len(CONTROLS)


def set_standings(validation: Validation, **standings: str) -> Validation:
    controls = [structs.replace(r, standing=standings.get(r.name, "below")) for r in validation.controls]
    return conclude(structs.replace(validation, controls=controls))


def test_verdict_points_at_a_suspect_only_above(validation: Validation) -> None:
    assert (
        "7 of 7 controls score below it, none above, so they point at no suspect" in set_standings(validation).verdict
    )
    better = set_standings(validation, unscaled_embedding="above")
    assert "The control unscaled_embedding scores above it: look at the embedding's scale" in better.verdict
    (row_text,) = (row[-1] for row in table_of(better).rows if row[0] == "unscaled_embedding")
    assert "above the real drafter" in str(row_text) and "look at the embedding's scale" in str(row_text)
    for standing in ("same", "undecided"):
        judged = set_standings(validation, unit_layer_scalars=standing)
        assert "6 of 7 controls score below it, none above" in judged.verdict
        assert not any("look at" in str(row[-1]) for row in table_of(judged).rows)
