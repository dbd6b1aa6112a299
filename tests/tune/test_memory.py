"""What a run is said to take: each part against the thing itself, and refused before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mtp_extract.architecture.roles import shapes_of
from mtp_extract.errors import MtpExtractError
from mtp_extract.evaluate import base_size
from mtp_extract.evaluate.base_size import BaseSize
from mtp_extract.evaluate.prompts import Prompt
from mtp_extract.options import Bytes
from mtp_extract.tune import memory, pair
from mtp_extract.tune.head import HeadPlan, run_ordered_head
from mtp_extract.tune.memory import Demand, Estimate, Phase, estimate, needs_of
from mtp_extract.tune.modes import MODES, NEW_HEAD, Latents
from mtp_extract.tune.new_head import head_for
from mtp_extract.tune.prompts import side_of
from mtp_extract.tune.run import TuningPlan, run_tuning
from mtp_extract.tune.setting import Setting

from .conftest import Tiny

SETTING = Setting(Path("d"), "base", Path("w"), new_tokens=10, batch=4)
ITEMS = [Prompt("code", "word" * 9, str(number)) for number in range(40)]


def of(tiny: Tiny, mode: str, setting: Setting = SETTING) -> dict[str, Phase]:
    size = BaseSize(tiny.base.config, 10**9, 4)
    found = estimate(setting, Demand(MODES[mode]), size, tiny.checkpoint.config, ITEMS)
    return {phase.name: phase for phase in found.phases}


@pytest.mark.parametrize("mode", MODES)
def test_what_is_trained(tiny: Tiny, mode: str) -> None:
    """Latents, gradient and both moments, and the best of them: of as many numbers as are trained."""
    latents = Latents(tiny.checkpoint, MODES[mode])
    parts = of(tiny, mode)["training"].parts
    assert parts["what is trained"] == 4 * latents.numbers
    assert parts["gradient and moments"] == 3 * 4 * latents.numbers
    best = of(tiny, mode)["measuring"].parts["the best"]
    assert best == sum(tensor.nbytes for tensor in latents.results().values())
    optimizer = torch.optim.AdamW(latents.groups())
    for value in latents.values.values():
        value.grad = torch.ones_like(value)
    optimizer.step()
    held = [part for state in optimizer.state.values() for part in state.values() if part.ndim]
    gradients = [value.grad for value in latents.values.values() if value.grad is not None]
    assert parts["gradient and moments"] == sum(tensor.nbytes for tensor in (*held, *gradients))
    assert parts["the drafter"] == sum(tensor.nbytes for tensor in tiny.drafter.state_dict().values())
    assert parts["the base"] == 10**9


def test_k_and_v(tiny: Tiny) -> None:
    """Of a batch whose texts are as long as they may become."""
    prompt = len(ITEMS[0].content) // 3 + 8
    steps = SETTING.draft_steps
    cache = tiny.base.new_cache(batch=4, capacity=prompt + 10, queries=steps + 1)
    with torch.no_grad():
        tokens, starts = torch.zeros(4, prompt, dtype=torch.long), torch.zeros(4, dtype=torch.long)
        tiny.base.forward(tokens, starts, cache, torch.full((4,), prompt))
    assert of(tiny, "norms")["writing text"].parts["K and V"] == cache.nbytes


def test_states_are_counted_as_far_as_they_are_kept(tiny: Tiny) -> None:
    some, all_ = (
        of(tiny, "norms", replace(SETTING, states_memory=Bytes(size)))["training"].parts["the base's states"]
        for size in (1000, 10**9)
    )
    assert some == 1000
    trained = sum(side_of(item.source) == "trained" for item in ITEMS)
    # Of five kinds and places: as it is served, otherwise, and three places within that.
    assert all_ == 5 * trained * (len(ITEMS[0].content) // 3 + 8 + 10) * (4 * (32 + 2 * 2 * 20) + 8)


def test_a_larger_batch_takes_more(tiny: Tiny) -> None:
    small, large = (of(tiny, "qat", replace(SETTING, batch=batch)) for batch in (1, 4))
    for name in ("writing text", "training", "measuring"):
        assert small[name].bytes < large[name].bytes
    assert small["loading"] == large["loading"]


def test_a_new_head(tiny: Tiny) -> None:
    """Of its own shape, which reads layers of the base, and not its K and V."""
    config = head_for(tiny.base.config, 8, None)
    demand = Demand(NEW_HEAD, "kl", 8)
    found = estimate(SETTING, demand, BaseSize(tiny.base.config, None, 4), config, ITEMS)
    training = next(phase for phase in found.phases if phase.name == "training")
    weights = sum(torch.Size(shape).numel() for role, shape in shapes_of(config).items() if role.name != "d2t")
    assert training.parts["the drafter"] == pytest.approx(4 * weights, rel=0.01)
    assert training.parts["the base"] == 0
    assert (len(needs_of(config).layers), needs_of(config).shared_kv) == (3, {})


def test_what_is_said() -> None:
    large = Phase("training", {"the base": 3_000_000_000, "a": 1, "logits": 2, "the drafter": 1_500_000_000})
    found = Estimate((Phase("loading", {"the base": 3_000_000_000}), large))
    assert found.line() == (
        "it takes about 4.5GB of memory, most while training: 3GB the base, 1.5GB the drafter, 2B logits"
    )


def test_processes_share_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Estimate((Phase("training", {"the base": 3_000_000_000}),))
    monkeypatch.setattr(base_size, "free_memory", lambda: 5_000_000_000)
    found.check(torch.device("cpu"))
    with pytest.raises(MtpExtractError, match=r"training in 2 processes takes about 6\.0 GB, 5\.0 GB are free"):
        found.check(torch.device("cpu"), 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert memory.processes_here(8) == 2


@pytest.mark.parametrize("kind", ["norms", "qat", "new", "ordered"])
def test_refused_before_anything_is_loaded(
    plan: Callable[..., TuningPlan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(base_size, "free_memory", lambda: 1_000_000)
    monkeypatch.setattr(pair, "load_base", None)
    changes = {"directory": None} if kind == "new" else {"mode": kind} if kind != "ordered" else {}
    made = plan(tmp_path / "out", **changes)
    said = list[str]()
    with pytest.raises(MtpExtractError, match=r"too little memory on cpu: .* takes about 0\.\d GB") as found:
        if kind == "ordered":
            run_ordered_head(HeadPlan(made.setting, made.out), said.append)
        else:
            run_tuning(made, said.append)
    assert "batch" in found.value.remedies
    assert len(said) == 1
    assert said[0].startswith("it takes about ")
    assert said[0].endswith("; 1MB are free")
