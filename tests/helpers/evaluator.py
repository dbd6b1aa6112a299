"""What a drafter is worth on given prompts, by transformers and PyTorch alone.

Shares no code with the package: base and drafter are transformers' own classes, text is ``generate``'s, rounds are
counted in a greedy loop without caches, intervals are a bootstrap over texts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor

SharedKV = dict[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Found:
    continuation: tuple[int, ...]  # what the base writes greedily
    accepted: tuple[int, ...]  # drafts that agree, by position of the pending token that leaves room for all of them
    path: tuple[int, ...]  # the same in the rounds of a real loop, as far as all drafts have room

    @property
    def teacher_forced(self) -> float:
        """Over all positions, whether a round starts there or not; NaN for a text too short for one."""
        return 1 + sum(self.accepted) / len(self.accepted) if self.accepted else float("nan")

    @property
    def rounds(self) -> int:
        return len(self.path)

    @property
    def tokens(self) -> int:
        """What these rounds advanced by."""
        return self.rounds + sum(self.path)


class Evaluator:
    """A base and its drafter, a ``Gemma4AssistantForCausalLM``.

    Queries stand as newer LiteRT-LM puts them: at the last verified token, with the window as it is. Slots of rejected
    drafts are not seen.
    """

    def __init__(self, base_dir: str | Path, drafter_dir: str | Path, k: int = 3) -> None:
        config = transformers.AutoConfig.from_pretrained(base_dir)
        kind = getattr(transformers, config.architectures[0])
        self.base = kind.from_pretrained(base_dir, dtype=torch.float32).eval()
        self.drafter = transformers.Gemma4AssistantForCausalLM.from_pretrained(drafter_dir, dtype=torch.float32).eval()
        self.embed = self.base.get_input_embeddings()
        self.k, self.window = k, int(self.drafter.config.get_text_config().sliding_window)

    @torch.inference_mode()
    def read(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor, SharedKV]:
        """The base's choice after each token [S], its states [S, width], K and V [1, heads, S, size] by layer type."""
        ids = torch.tensor([list(tokens)])
        out = self.base(ids, output_hidden_states=True, return_shared_kv_states=True, use_cache=False)
        return out.logits[0].argmax(-1), out.hidden_states[-1][0], out.shared_kv_states

    @torch.inference_mode()
    def draft(self, tokens: Sequence[int], hidden: Tensor, kv: SharedKV, at: Sequence[int]) -> list[list[int]]:
        """K drafts after each of the positions ``at``, of which each sees the base up to the position before it."""
        place = torch.tensor(list(at))
        slots = int(place.max())
        # The newest slot of each row comes last; what would be before the text is masked.
        index = place[:, None] - slots + torch.arange(slots)
        real = index >= 0
        shared = {}
        for name, (keys, values) in kv.items():
            rows = (index[:, -self.window :] if name == "sliding_attention" else index).clamp(min=0)
            shared[name] = tuple(part[0][:, rows].transpose(0, 1) for part in (keys, values))
        mask = None if bool(real.all()) else real.long()
        token, state = torch.tensor(list(tokens))[place][:, None], hidden[place - 1][:, None]
        position = place[:, None] - 1
        drafts = []
        for _ in range(self.k):
            both = torch.cat((self.embed(token), state), dim=-1)
            out = self.drafter(
                inputs_embeds=both, attention_mask=mask, position_ids=position, shared_kv_states=shared, use_cache=False
            )
            token, state = out.logits.argmax(-1), out.last_hidden_state
            drafts.append(token[:, 0])
        return torch.stack(drafts, dim=1).tolist()

    def loop(self, prompt: Sequence[int], length: int) -> tuple[list[int], tuple[int, ...]]:
        """A greedy loop that is given the prompt alone: its text, and the drafts accepted in every round.

        The base reads all it knows again in each round. Rounds end where K drafts no longer fit into ``length``
        tokens; the text may be a few shorter.
        """
        choices, hidden, kv = self.read(prompt)
        known, path = [*prompt, int(choices[-1])], []
        while len(known) + self.k <= length:
            (drafts,) = self.draft(known, hidden, kv, [len(known) - 1])
            choices, hidden, kv = self.read([*known, *drafts])
            own = choices[len(known) - 1 :].tolist()
            accepted = _agreeing(drafts, own)
            known += [*drafts[:accepted], own[accepted]]
            path.append(accepted)
        return known, tuple(path)

    def found(self, prompt: Sequence[int], new_tokens: int) -> Found:
        """Raises AssertionError where the loop does not write the base's own text."""
        ids = torch.tensor([list(prompt)])
        out = self.base.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)
        text = out[0].tolist()
        known, path = self.loop(prompt, len(text))
        shorter = min(len(known), len(text))
        assert known[:shorter] == text[:shorter], "the loop wrote another text than the base"
        _, hidden, kv = self.read(text)
        at = range(len(prompt), len(text) - self.k)
        drafts = self.draft(text, hidden, kv, at) if at else []
        accepted = tuple(_agreeing(row, text[n + 1 :]) for n, row in zip(at, drafts, strict=True))
        return Found(tuple(text[len(prompt) :]), accepted, path)


def _agreeing(drafts: Sequence[int], following: Sequence[int]) -> int:
    pairs = enumerate(zip(drafts, following, strict=False))
    return next((count for count, (draft, token) in pairs if draft != token), len(drafts))


def evaluate(
    base_dir: str | Path, drafter_dir: str | Path, prompts: Sequence[Sequence[int]], new_tokens: int
) -> list[Found]:
    """Each of ``prompts``, in tokens, continued by ``new_tokens`` at most."""
    evaluator = Evaluator(base_dir, drafter_dir)
    return [evaluator.found(prompt, new_tokens) for prompt in prompts]


def bootstrap(before: Sequence[Found], after: Sequence[Found]) -> dict[str, tuple[float, float, float]]:
    """Changes with 95 % bounds (value, low, high), texts drawn again with replacement.

    ``teacher_forced`` is the difference over all positions; ``rounds`` how many rounds there were before for one
    after.
    """
    pairs = [pair for pair in zip(before, after, strict=True) if pair[0].accepted]
    generator, draws = random.Random(0), 2000

    def changes(chosen: Sequence[tuple[Found, Found]]) -> tuple[float, float]:
        positions = sum(len(old.accepted) for old, _ in chosen)
        gained = sum(sum(new.accepted) - sum(old.accepted) for old, new in chosen)
        return gained / positions, sum(old.rounds for old, _ in chosen) / sum(new.rounds for _, new in chosen)

    drawn = [changes(generator.choices(pairs, k=len(pairs))) for _ in range(draws)]
    found = {}
    for index, name in enumerate(("teacher_forced", "rounds")):
        ordered = sorted(row[index] for row in drawn)
        found[name] = (changes(pairs)[index], ordered[int(0.025 * draws)], ordered[int(0.975 * draws)])
    return found
