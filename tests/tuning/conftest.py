"""A random pair with codes, texts for it, and what a training of it takes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.random_pairs import beside, random_base, random_drafter
from helpers.reporters import Recorder
from helpers.threads import single_thread  # noqa: F401 - a fixture

from mtp_extract.architecture import list_shapes
from mtp_extract.architecture.roles import MATRIX
from mtp_extract.checkpoint.checkpoint import Checkpoint
from mtp_extract.checkpoint.weight import Steps, Weight, wrap_array, wrap_codes
from mtp_extract.drafter.load import Network, load_drafter
from mtp_extract.drafter.mtp import MtpDrafter
from mtp_extract.evaluation.prompts import load_shipped_prompts
from mtp_extract.litertlm.storage import Packing
from mtp_extract.progress import SILENT
from mtp_extract.speculate.target import Base
from mtp_extract.speculate.teacher import Text
from mtp_extract.tuning import corpus, ordered, pair, rounds
from mtp_extract.tuning import train as train_module
from mtp_extract.tuning.corpus import HELD_OUT, TRAINED, WATCHED, Corpus, choose_side
from mtp_extract.tuning.latents import MODES, Latents
from mtp_extract.tuning.plan import TuningPlan
from mtp_extract.tuning.train import TrainingProgress, train

Plans = Callable[..., TuningPlan]
"""Makes the plan of a result's place and of changes."""


def quantize_rows(weight: np.ndarray, bits: int = 4) -> Weight:
    """Quantize ``weight`` symmetrically with a scale for each row, as ai-edge-quantizer does."""
    most = (1 << bits - 1) - 1
    size = (np.abs(weight).max(axis=1, keepdims=True) / most).astype(np.float32)
    codes = np.rint(weight / size).astype(np.int8)
    return wrap_codes(codes, Packing(bits, True), Steps.around_zero(weight.shape[1], size))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests that share the base's text in one process."""
    for item in items:
        uses_plan = item.path.parent == Path(__file__).parent and "plan" in getattr(item, "fixturenames", ())
        if item.config.pluginmanager.hasplugin("xdist") and uses_plan:
            item.add_marker(pytest.mark.xdist_group("tune"))


@dataclass(frozen=True)
class Tiny:
    """A random base with a random drafter, and greedy texts of the base."""

    base: Base
    checkpoint: Checkpoint
    drafter: MtpDrafter
    texts: tuple[Text, ...]

    def train(
        self,
        folder: Path,
        mode: str = "qat",
        stop: Callable[[], bool] = lambda: False,
        dtype: torch.dtype = torch.float32,
        memory: int = 1 << 20,
        evaluations: int = 4,
        anchors: int = 4,
        **changes: Any,
    ) -> tuple[Latents, TrainingProgress]:
        """Train into ``folder``, or go on there."""
        folder.mkdir(exist_ok=True)
        options: dict[str, Any] = {"steps": 12, "batch": 3} | changes
        plan = TuningPlan(Path("drafter"), "base", folder / "out", folder, mode=mode, **options)
        idle = ("post_projection",) if plan.draft_steps == 1 else ()
        latents = Latents(self.checkpoint, MODES[mode], idle=idle)
        drafter, kinds = load_drafter(self.checkpoint, dtype=dtype), (self.texts[:3], self.texts[3:5])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train_module, "EVALUATIONS", evaluations)
            patch.setattr(train_module, "ANCHORS", anchors)
            patch.setattr(rounds, "free_memory", lambda device: 2 * memory)
            return latents, train_in_memory(plan, self.base, drafter, latents, kinds, self.texts[5:], stop=stop)


def train_in_memory(
    plan: TuningPlan, base: Base, drafter: Network, latents: Latents, *texts: Any, stop: Any = bool
) -> TrainingProgress:
    """Train without a directory: on kinds of texts and watched ``texts``, with a loaded base."""
    more = {"base_fingerprint": "", "origin": SimpleNamespace(sums={}), "say": SILENT.say}
    return train(beside(plan, base, drafter, **more), Corpus(*texts, (), 0), latents, Recorder(stop))


@pytest.fixture(scope="session")
def tiny() -> Tiny:
    base = Base(random_base())
    drafter = random_drafter(base.model, final_logit_softcap=30.0)
    tensors = dict[str, Weight]()
    for role, shape in list_shapes(drafter.config).items():
        weight = drafter.state_dict()[role.path].numpy().reshape(shape)
        tensors[role.name] = quantize_rows(weight) if role.kind == MATRIX else wrap_array(weight)
    checkpoint = Checkpoint(drafter.config, MappingProxyType(tensors), "f32")
    generator = torch.Generator().manual_seed(5)
    starts = torch.randint(40, (8, 3), generator=generator)
    written = base.model.generate(starts, attention_mask=torch.ones_like(starts), max_new_tokens=21, do_sample=False)
    # Of unlike lengths.
    texts = tuple(Text(tuple(row.tolist()[: 24 - index]), 3) for index, row in enumerate(written))
    return Tiny(base, checkpoint, load_drafter(checkpoint), texts)


HEADS = ("class ", "def ", "import ", "for ", "if ", "return ", "with ", "raise ", "    self.", "try:\n    ", "from ")
TAILS = ("a", "Foo", "os", "i in range(", "self", "None", "open(", "value", "name = 1\n", "x(", "ValueError", "sys")


@pytest.fixture(scope="package", autouse=True)
def _use_small_inputs() -> Iterator[None]:
    """Load the base once, and use few shipped prompts, for each of which the base writes a text."""
    few = load_shipped_prompts(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "load_shipped_prompts", lambda each: few if each else ())
        patch.setattr(train_module, "ANCHORS", 6)
        patch.setattr(ordered, "RANDOM_PROMPTS", 64)
        patch.setattr(pair, "load_base", cache(pair.load_base))
        yield


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """Write a file of prompts or texts, an object in each line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def choose_sources(sources: Iterable[str], sides: Mapping[str, int]) -> list[list[str]]:
    """Return for each side the first of the ``sources`` that are on it, as many as ``sides`` says."""
    every = list(sources)
    chosen = [[source for source in every if choose_side(source) == side][:count] for side, count in sides.items()]
    assert [*map(len, chosen)] == [*sides.values()]
    return chosen


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "code.jsonl"
    chosen = choose_sources((head + tail for head in HEADS for tail in TAILS), {TRAINED: 8, WATCHED: 4, HELD_OUT: 6})
    return write_rows(path, ({"prompt": prompt, "source": prompt, "workload": "code"} for prompt in chain(*chosen)))


@pytest.fixture(scope="session")
def plan(extracted: Path, base: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Plans:
    """Return a function that makes plans, which share the base's text."""
    work = tmp_path_factory.mktemp("work")

    def make(out: Path, **changes: Any) -> TuningPlan:
        options: dict[str, Any] = {"directory": extracted, "base": str(base), "work": work, "prompts": prompts}
        options |= {"new_tokens": 16, "batch": 4, "device": "cpu", "chat_template": False}
        options |= {"steps": 4, "force": True}
        return TuningPlan(out=out, **(options | changes))

    return make
