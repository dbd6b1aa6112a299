"""A new EAGLE-3 head: what it starts as, that its training sees what generation sees, and that it learns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.random_heads import asked_for
from helpers.random_pairs import KINDS, base_alone, beside, random_base
from helpers.schemas import validator
from safetensors.torch import load_file
from seam import verify

from mtp_extract import convert
from mtp_extract.architecture.eagle3 import Eagle3Config
from mtp_extract.drafter.eagle3 import Eagle3Drafter
from mtp_extract.drafter.load import load_any_drafter
from mtp_extract.drafter.mtp import LITERT
from mtp_extract.formats import read_checkpoint
from mtp_extract.pipeline.check import CheckpointDirectory
from mtp_extract.speculate.loop import SpeculativeGenerator
from mtp_extract.speculate.target import Base
from mtp_extract.speculate.teacher import Text, draft_teacher_forced
from mtp_extract.tuning import loss, rounds
from mtp_extract.tuning import train as train_module
from mtp_extract.tuning.eagle3 import (
    add_untrained_head,
    build_head_config,
    build_untrained_head,
    choose_base_layers,
    choose_draft_tokens,
    measure_state_sizes,
)
from mtp_extract.tuning.latents import MODES, Latents
from mtp_extract.tuning.plan import TuningPlan
from mtp_extract.tuning.rounds import Batch, Rounds, States, measure_acceptance
from mtp_extract.tuning.run import run_tuning

from .conftest import Plans, train_in_memory

PROMPTS = ((1,), (3, 14, 15, 9, 2, 6, 5), (7, 3, 5, 9))


def build_head(base: Base, tokens: int, texts: list[Text] | None = None) -> Any:
    return build_untrained_head(base, texts or [], tokens, None, "float32", 0)


def write_texts(base: Base) -> list[Text]:
    return [Text(prompt + base_alone(base.model, prompt, 24), len(prompt)) for prompt in PROMPTS]


@pytest.mark.parametrize("kind", KINDS)
def test_states_and_teacher_of_every_kind(kind: str) -> None:
    """The states are the layers' inputs, and the logits are the base's, soft cap included."""
    base = Base(random_base(tie_word_embeddings=False, final_logit_softcapping=2.0, **KINDS[kind]))
    tokens, layer_inputs = torch.randint(40, (2, 11), generator=torch.Generator().manual_seed(1)), list[torch.Tensor]()
    for module in (*base.model.get_decoder().layers, base.model.get_decoder().norm):
        module.register_forward_pre_hook(lambda _, inputs: layer_inputs.append(inputs[0]))
    with torch.inference_mode():
        expected, states = base.model(tokens).logits, layer_inputs.copy()
        full = base.feed(tokens, range(base.num_layers + 1))
        logits = base.logits(full.hidden)
    assert len(states) == base.num_layers + 1 == len(full.layers)
    for layer, state in enumerate(states):
        torch.testing.assert_close(full.layers[layer], state, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert 1 < logits.abs().max() <= 2


def test_the_input_norm_equalizes_layers() -> None:
    """The layers' states differ 100-fold in size, and those of one token a thousandfold from all others."""
    base = Base(random_base())
    with torch.no_grad():
        base.model.get_decoder().layers[0].layer_scalar.fill_(0.1)
        base.model.get_decoder().layers[2].layer_scalar.fill_(30)
        base.model.get_input_embeddings().weight[7] *= 1000
    tokens = torch.randint(8, 40, (1, 30), generator=torch.Generator().manual_seed(0)).index_fill(1, torch.tensor(0), 7)
    texts = [Text(tuple(tokens[0].tolist()), 1)]
    config = build_head_config(base.config, 32, None)
    sizes = measure_state_sizes(base, config.base_layers, texts)
    assert max(sizes) > 50 * min(sizes)
    checkpoint = build_head(base, 32, texts)
    head = load_any_drafter(checkpoint)
    assert isinstance(head, Eagle3Drafter) and head.input_norm is not None
    with torch.inference_mode():
        states = base.feed(tokens, config.base_layers).layers
        normed = head.input_norm(torch.cat([states[layer] for layer in config.base_layers], dim=-1))[0, 1:]
    size = normed.unflatten(-1, (3, -1)).square().mean(-1).sqrt().median(0).values
    assert size.max() < 1.7 * size.min()
    # What it would learn, fc learns.
    latents = Latents(checkpoint, MODES["eagle3"], idle=("input_norm",))
    assert "input_norm" not in latents.values and "fc" in latents.values


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_for_every_kind_of_base(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It drafts without changing a text, is trained on the states it will read, and gets better."""
    base = Base(random_base(tie_word_embeddings=False, **KINDS[kind]))
    texts = write_texts(base)
    checkpoint = build_head(base, 32, texts)
    head = load_any_drafter(checkpoint)
    assert isinstance(head, Eagle3Drafter)
    loop = SpeculativeGenerator(base, head)
    results = [loop.generate(prompt, max_new_tokens=24, drafts=3, stop_token_ids=[]) for prompt in PROMPTS]
    assert [result.tokens for result in results] == [text.tokens[text.prompt_length :] for text in texts]

    states = States(base, head.needs, texts, 8)
    anchors = torch.tensor([[9, 12]] * 3)
    batch = Batch.of(states.look_up(texts), head.needs, anchors, anchors > 0, torch.device("cpu"))
    with torch.no_grad():
        first = head.logits(Rounds(head, 2)(batch, base.embed, LITERT)[0]).argmax(-1)
    drafted = draft_teacher_forced(base, head, texts, 1)
    chosen = torch.isin(drafted.anchor, torch.tensor([9, 12]))
    assert first.flatten().tolist() == drafted.drafts[chosen].flatten().tolist()

    # Room for more rows of the head's 32 tokens than of the base's: neither has more at a time.
    plan = TuningPlan(None, "base", tmp_path / "out", tmp_path, mode="eagle3", steps=16, batch=3)
    for module in (loss, rounds, train_module):
        monkeypatch.setattr(module, "LOGITS_AT_ONCE", 12 * base.vocab_size)
    monkeypatch.setattr(train_module, "EVALUATIONS", 2)
    logits, sizes = base.logits, list[int]()

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden) * base.vocab_size)
        return logits(hidden)

    monkeypatch.setattr(base, "logits", counted)
    before = measure_acceptance(pair := beside(plan, base, head), head, texts)
    latents = Latents(checkpoint, MODES["eagle3"])
    progress = train_in_memory(plan, base, head, latents, (tuple(texts),), tuple(texts))
    assert 0 < max(sizes) <= 12 * base.vocab_size
    losses = [entry["loss"] for entry in progress.history if "loss" in entry]
    assert losses[-1] < 0.7 * losses[0]
    after = measure_acceptance(pair, load_any_drafter(latents.build_checkpoint(progress.results)), texts)
    assert after.teacher_forced > before.teacher_forced + 0.2


def test_what_is_written_is_what_engines_load(tmp_path: Path) -> None:
    base = Base(random_base())
    texts, plan = [Text((1, 39, 38, 39), 1)], TuningPlan(None, "org/base", work=tmp_path, mode="eagle3", draft_vocab=24)
    taken: list[CheckpointDirectory] = []
    pair = beside(plan, base, None, loaded=SimpleNamespace(dtype="float32"), load_origin=taken.append)
    # What an earlier training left is replaced.
    for _ in range(2):
        add_untrained_head(pair, texts)
    assert not read_checkpoint(taken[1].directory).findings
    written = read_checkpoint(taken[1].directory)
    assert written.config == replace(build_head(base, 24, texts).config, base="org/base")
    loaded = load_any_drafter(written)
    assert isinstance(loaded, Eagle3Drafter)
    assert loaded.targets.tolist() == [*range(22), 38, 39]
    assert torch.equal(loaded.lm_head.weight, base.model.lm_head.weight[loaded.targets])
    assert loaded.find_rows(torch.tensor([0, 22, 39])).tolist() == [0, -1, 23]


def test_only_tokens_of_the_draft_vocabulary_are_targets(tmp_path: Path) -> None:
    """A head of 3 tokens learns from the positions where the base chooses one of them."""
    base = Base(random_base(tie_word_embeddings=False))
    texts = write_texts(base)
    checkpoint = build_head(base, 3, texts)
    for objective, temperature in (("ce", 0.0), ("kl", 1.0)):
        options = {"mode": "eagle3", "objective": objective, "temperature": temperature, "steps": 4, "batch": 3}
        plan = TuningPlan(None, "base", work=tmp_path / objective, **options)
        latents = Latents(checkpoint, MODES["eagle3"])
        progress = train_in_memory(plan, base, load_any_drafter(checkpoint), latents, (tuple(texts),), tuple(texts))
        losses = [entry["loss"] for entry in progress.history if "loss" in entry]
        assert all(np.isfinite(losses)) and losses[-1] < losses[0]


def test_draft_tokens_are_the_most_frequent() -> None:
    texts, always = [Text((9, 9, 9, 5, 5, 4), 3), Text((9, 7, 5), 1)], [8]
    assert [choose_draft_tokens(texts, n, 10) for n in (3, 2, 6)] == [[4, 5, 7], [4, 5], [0, 1, 2, 4, 5, 7]]
    assert choose_draft_tokens(texts, 2, 10, always) == [5, 8]
    assert choose_draft_tokens([], 10, 10) == list(range(10))


def test_base_layers() -> None:
    expected = {42: (2, 21, 39), 60: (2, 30, 57), 35: (2, 17, 32), 6: (1, 3, 5), 4: (1, 2, 3)}
    assert {count: choose_base_layers(count) for count in expected} == expected


def test_a_whole_training(plan: Plans, tmp_path: Path) -> None:
    """From a base to a directory that engines load, with record and card."""
    tuned = run_tuning(plan(tmp_path / "head", directory=None, mode="eagle3", steps=20, draft_vocab=128))
    assert tuned.directory == tmp_path / "head"
    config = read_checkpoint(tuned.directory).config
    assert isinstance(config, Eagle3Config)
    assert (config.draft_vocab_size, config.vocab_size, config.base_layers) == (128, 512, (1, 3, 5))
    record = verify(tuned.directory)
    validator("extraction")(record)
    assert record["tuning"]["mode"] == "eagle3" and record["tuning"]["recipe"]["draft_steps"] == 3
    card = (tuned.directory / "README.md").read_text()
    assert "Trained (eagle3)" in card and "--spec-type draft-eagle3" in card
    # What vLLM and SGLang ask for, in either layout.
    convert(tuned.directory, tmp_path / "speculators", format="speculators")
    for layout, directory in (("eagle3", tuned.directory), ("speculators", tmp_path / "speculators")):
        stored = load_file(directory / "model.safetensors")
        del stored["t2d"]
        assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == asked_for(config, layout)
        assert not any(finding.is_error for finding in read_checkpoint(directory).findings)
