"""A base and a drafter with random weights, loaded, whose rounds are timed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import transformers

from mtp_extract.drafter.load import load_any
from mtp_extract.evaluate.base_model import load_base
from mtp_extract.speculate.loop import SpeculativeGenerator
from mtp_extract.speculate.trees import Tree

from .shapes import FULL, SLIDING, Shape

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "tests"))
from helpers.random_assistants import Geometry, random_assistant

CHAIN = 4
"""Drafts a round, where it is not their number that is varied."""
SHORT = 32
"""Tokens of a prompt, where it is not their number that is varied."""


def elapsed(call: Callable[[], object], device: torch.device) -> float:
    """Milliseconds that it takes, its work on the device done."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return 1e3 * (time.perf_counter() - start)


def synchronize(device: torch.device) -> None:
    """Wait for ``device``."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def write_assistant(shape: Shape, out: Path) -> None:
    """A random drafter for ``shape`` as transformers writes an assistant."""
    geometry = Geometry(
        backbone=shape.width,
        hidden=shape.drafter_width,
        intermediate=shape.drafter_ffn,
        layers=(SLIDING,) * 3 + (FULL,),
        heads=shape.drafter_heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        full_head_dim=shape.full_head_dim,
        window=shape.window,
        vocabulary=shape.vocab,
    )
    random_assistant(geometry).to(torch.bfloat16).save_pretrained(out)


class Pair:
    """Base and drafter on the device, and the same drafter as transformers' own."""

    def __init__(self, base: Path, drafter: Path, device: str) -> None:
        loaded = load_base(str(base), device)
        self.base, self.device = loaded.model, loaded.device
        self.drafter = load_any(drafter, dtype=loaded.drafter_dtype, device=loaded.device)
        self.generator = SpeculativeGenerator(self.base, self.drafter)
        assistant: Any = transformers.AutoModelForCausalLM.from_pretrained(drafter, dtype=loaded.drafter_dtype)
        self.assistant = assistant.to(loaded.device).eval()
        self.random = torch.Generator().manual_seed(0)

    def prompt(self, length: int) -> list[int]:
        """Random tokens, none of them special."""
        most = self.generator.base.vocab_size
        found: list[int] = torch.randint(300, most, (length,), generator=self.random).tolist()
        return found

    def ours(self, prompt: list[int], drafts: int | Tree, tokens: int) -> tuple[float, float, float]:
        """Milliseconds of drafting and of verifying in a round, and of the prompts' own forward."""
        made = self.generator.generate(prompt, max_new_tokens=tokens, drafts=drafts, stop_token_ids=[])
        full = [r for r in made.rounds if r.drafted or drafts == 0]
        return fmean(r.draft_ms for r in full), fmean(r.verify_ms for r in full), made.prefill_ms

    def theirs(self, prompt: list[int], drafts: int, tokens: int) -> float:
        """Milliseconds a round by transformers' own loop: a round is a forward of the base."""
        ids = torch.tensor([prompt], device=self.device)
        more = {"assistant_model": self.assistant} if drafts else {}
        self.assistant.generation_config.num_assistant_tokens = drafts or 1
        self.assistant.generation_config.num_assistant_tokens_schedule = "constant"
        rounds: list[int] = []
        hook = self.base.register_forward_pre_hook(lambda *_: rounds.append(1))
        settings = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, **more}
        try:
            took = elapsed(
                lambda: self.base.generate(ids, attention_mask=torch.ones_like(ids), **settings), self.device
            )
        finally:
            hook.remove()
        return took / len(rounds)

    def a_step(self) -> tuple[Callable[[], object], Callable[[], object]]:
        """One draft step, and the :data:`CHAIN` steps of a round, from the state of a round of a short prompt."""
        kept: list[Any] = []
        start = self.drafter.start

        def keeping(*args: Any, **kwargs: Any) -> Any:
            kept.append(start(*args, **kwargs))
            return kept[-1]

        setattr(self.drafter, "start", keeping)  # noqa: B010
        self.ours(self.prompt(SHORT), 1, 4)
        delattr(self.drafter, "start")
        token = torch.full((1, 1), 300, device=self.device)

        @torch.inference_mode()
        def chain() -> Any:
            state, last = kept[-1], token
            for _ in range(CHAIN):
                logits, state = self.drafter.step(state, last)
                last = logits.argmax(-1)
            return last

        @torch.inference_mode()
        def step() -> Any:
            return self.drafter.step(kept[-1], token)

        return step, chain
