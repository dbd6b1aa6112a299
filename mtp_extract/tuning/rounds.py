"""Rounds of drafts along texts: the base's states, K draft steps from every anchor, and their acceptance.

An *anchor* is a position of a text from which the drafter drafts. Where accelerate starts several processes, each
measures a share of the texts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from mtp_extract.drafter.load import Network
from mtp_extract.drafter.mtp import LITERT, Convention, MtpDrafter
from mtp_extract.drafter.protocol import BaseOutput, BaseRequirements, RoundStart
from mtp_extract.evaluation.agreement import Acceptance
from mtp_extract.evaluation.base_model import free_memory
from mtp_extract.evaluation.base_texts import group_by_length
from mtp_extract.speculate.target import Base
from mtp_extract.speculate.teacher import Text
from mtp_extract.tuning.loss import LOGITS_AT_ONCE, find_argmax_tokens
from mtp_extract.tuning.pair import Pair

_TOKENS_AT_ONCE = 256  # of short texts in one forward of the base: fewer take hardly less time
_OF_FREE_MEMORY = 0.5  # share that cached states may take

Columns = Mapping[str, Tensor]
"""The base's results over a text, in main memory, with a row for each token: ``tokens``, ``hidden`` (after the final
norm), ``choices`` (argmax after each token), ``layer 3`` (input of that layer), ``K of`` and ``V of`` a layer type."""


@torch.no_grad()
def compute_states(base: Base, needs: BaseRequirements, texts: Sequence[Text]) -> list[Columns]:
    """Compute with ``base`` the states that ``needs`` names, over ``texts`` in one forward."""
    tokens = pad_sequence([torch.tensor(text.tokens) for text in texts], batch_first=True).to(base.device)
    full = base.feed(tokens, needs.layers)
    choices = find_argmax_tokens(base.logits, full.hidden.flatten(0, 1), base.vocab_size).view(tokens.shape)
    columns = {"tokens": tokens, "hidden": full.hidden, "choices": choices}
    columns |= {f"layer {layer}": states for layer, states in full.layers.items()}
    for kind in needs.shared_kv:
        columns[f"K of {kind}"], columns[f"V of {kind}"] = (part.transpose(1, 2) for part in full.shared_kv[kind])
    # Copies, so that a cached text does not keep the tensors of the whole batch in memory.
    return [
        {name: column[row, : len(text.tokens)].to("cpu", copy=True) for name, column in columns.items()}
        for row, text in enumerate(texts)
    ]


class States:
    """The base's states over texts: cached until half of the free memory is used, else computed on every request.

    Texts of similar length share a forward, at most ``batch`` of them; a long text has its own. The groups depend on
    the texts alone, so the states are the same in every run, to the bit.
    """

    def __init__(self, base: Base, needs: BaseRequirements, texts: Sequence[Text], batch: int) -> None:
        self._base = base
        self._needs = needs
        self._bytes_free = int(_OF_FREE_MEMORY * free_memory(torch.device("cpu")))
        self._cache: dict[tuple[Text, ...], list[Columns]] = {}
        groups: list[list[Text]] = []
        for text in sorted(dict.fromkeys(texts), key=lambda text: len(text.tokens)):
            size = len(groups[-1]) if groups else batch
            if size == batch or (size + 1) * len(text.tokens) > _TOKENS_AT_ONCE:
                groups.append([])
            groups[-1].append(text)
        self._group_of = {text: tuple(group) for group in groups for text in group}

    def look_up(self, texts: Sequence[Text]) -> list[Columns]:
        """Return the states over ``texts``, which must be texts of the constructor."""
        columns_of: dict[Text, Columns] = {}
        for group in dict.fromkeys(self._group_of[text] for text in texts):
            items = self._cache.get(group) or compute_states(self._base, self._needs, group)
            columns_of.update(zip(group, items, strict=True))
            size = sum(column.nbytes for item in items for column in item.values())
            if group not in self._cache and size <= self._bytes_free:
                self._cache[group] = items
                self._bytes_free -= size
        return [columns_of[text] for text in texts]


# Rounds


@dataclass(frozen=True)
class Batch:
    """B texts, padded at their ends to L tokens, with A anchors each."""

    base_output: BaseOutput  # the base's output over the texts
    lengths: Tensor  # int64 [B]
    choices: Tensor  # int64 [B, L], the base's argmax after each token
    anchors: Tensor  # int64 [B, A]
    real: Tensor  # bool [B, A]; False for the placeholders of a text with fewer anchors

    @classmethod
    def of(
        cls, items: Sequence[Columns], needs: BaseRequirements, anchors: Tensor, real: Tensor, device: torch.device
    ) -> Batch:
        """Pad the texts of ``items`` and move them to ``device``."""
        padded = {name: pad_sequence([item[name] for item in items], batch_first=True).to(device) for name in items[0]}

        def transpose_heads(name: str) -> Tensor:  # [B, KV heads, L, head_dim]
            return padded[name].transpose(1, 2).contiguous()

        tokens = padded["tokens"]
        base_output = BaseOutput(
            tokens,
            torch.arange(tokens.shape[1], device=device).expand_as(tokens),
            padded["hidden"],
            {layer: padded[f"layer {layer}"] for layer in needs.layers},
            {kind: (transpose_heads(f"K of {kind}"), transpose_heads(f"V of {kind}")) for kind in needs.shared_kv},
        )
        lengths = torch.tensor([len(item["tokens"]) for item in items], device=device)
        return cls(base_output, lengths, padded["choices"], anchors.to(device), real.to(device))


def draw_anchors(texts: Sequence[Text], count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw ``count`` different anchors of each text; return them in order, int64 [B, count], and which are real, bool.

    A text with fewer anchors has all of them, then placeholders.
    """
    anchors = torch.ones(len(texts), count, dtype=torch.long)
    real = torch.zeros(len(texts), count, dtype=torch.bool)
    for row, text in enumerate(texts):
        chosen = torch.randperm(len(text.anchors), generator=generator)[:count].sort().values
        anchors[row, : len(chosen)] = chosen + text.anchors.start
        real[row, : len(chosen)] = True
    return anchors, real


class Rounds(nn.Module):
    """K draft steps from every anchor of a batch; a module, so that ``functional_call`` can replace its weights.

    Every step reads the text's token in place of the drafter's. Wherever a step counts, the two agree: in greedy text,
    all drafts before it are the text's tokens; in sampled text, an accepted draft has the base's distribution, as the
    text does.
    """

    def __init__(self, drafter: Network, steps: int) -> None:
        super().__init__()
        self.drafter = drafter
        self.steps = steps

    def forward(self, batch: Batch, embed: Callable[[Tensor], Tensor], convention: Convention) -> Tensor:
        """Return the states after the final norm, [K, B, A, width]."""
        drafter = self.drafter
        start = RoundStart(batch.base_output, batch.anchors, embed)
        state: Any = drafter.start(start, convention) if isinstance(drafter, MtpDrafter) else drafter.start(start)
        hidden_of_steps = []
        for token in batch.base_output.tokens.flatten()[find_target_positions(batch, self.steps)]:
            hidden, state = drafter.advance(state, token)
            hidden_of_steps.append(hidden)
        return torch.stack(hidden_of_steps)


def find_target_positions(batch: Batch, steps: int) -> Tensor:
    """Return the position, in the flattened B · L, whose next token each step drafts, int64 [K, B, A].

    Steps beyond the last token have the last position.
    """
    rows, length = batch.base_output.tokens.shape
    device = batch.anchors.device
    later = batch.anchors + torch.arange(steps, device=device)[:, None, None]
    return torch.arange(rows, device=device)[:, None] * length + later.clamp(max=length - 1)


def mark_counted_drafts(batch: Batch, steps: int, *, greedy: bool) -> Tensor:
    """Return which steps count, bool [K, B, A]: those whose target lies within the text.

    In ``greedy`` serving a step counts only while the text is what the base chooses; in human text it may not be, and
    the round would have ended there.
    """
    later = batch.anchors + torch.arange(1, steps + 1, device=batch.anchors.device)[:, None, None]
    counts = batch.real & (later < batch.lengths[:, None])
    if greedy:
        follows = torch.ones_like(batch.base_output.tokens, dtype=torch.bool)
        follows[:, 1:] = batch.base_output.tokens[:, 1:] == batch.choices[:, :-1]
        chosen = follows.flatten()[find_target_positions(batch, steps)]
        chosen[0] = True  # the token at the anchor is given
        counts &= chosen.int().cumprod(dim=0).bool()
    return counts


def draw_batch(pair: Pair, drafter: Network, texts: Sequence[Text], most: int | None = None) -> Batch:
    """Compute the base's states over ``texts``, and draw at most ``most`` anchors of each (all by default)."""
    count = max(len(text.anchors) for text in texts)
    generator = torch.Generator().manual_seed(pair.plan.seed)
    anchors, real = draw_anchors(texts, count if most is None else min(most, count), generator)
    columns = compute_states(pair.base, drafter.needs, texts)
    return Batch.of(columns, drafter.needs, anchors, real, drafter.lm_head.weight.device)


# Measuring


def measure_acceptance(pair: Pair, drafter: Network, texts: Sequence[Text]) -> Acceptance:
    """Measure how many drafts of ``drafter`` are accepted after each anchor of ``texts`` that has K targets.

    The plan's temperature decides between greedy and sampled acceptance.
    """
    accelerator = pair.accelerator
    shard = range(accelerator.process_index, len(texts), accelerator.num_processes)
    parts: list[Acceptance] = []
    for group in group_by_length([len(texts[index].tokens) for index in shard], pair.plan.batch):
        rows = [shard[position] for position in group]
        part = _measure_batch(pair, drafter, [texts[row] for row in rows])
        parts.append(replace(part, text=torch.tensor(rows)[part.text]))
    joined = Acceptance.from_parts(gather_object(parts))
    # Each text is in one part, so a stable sort keeps its anchors in order.
    return joined.where(torch.argsort(joined.text, stable=True))


@torch.no_grad()
def _measure_batch(pair: Pair, drafter: Network, texts: Sequence[Text]) -> Acceptance:
    """Measure the accepted drafts along ``texts``, which are one batch.

    A greedy draft is accepted if it is the text's token. A draft drawn from q is accepted with probability
    min(1, p / q), and an accepted draft has the base's distribution p. So along a text x drawn from p, the probability
    that the first i drafts are accepted is the mean of ∏ min(1, q(x) / p(x)), where Σ min(p, q), the mean over x,
    replaces the last factor.
    """
    steps = pair.plan.draft_steps
    batch = draw_batch(pair, drafter, texts)
    complete = mark_counted_drafts(batch, steps, greedy=False).all(dim=0)
    states = Rounds(drafter, steps)(batch, pair.base.embed, LITERT)[:, complete]  # [K, N, width]
    positions = find_target_positions(batch, steps)[:, complete]  # [K, N]
    rows_at_once = max(1, LOGITS_AT_ONCE // pair.base.vocab_size)
    rows = (torch.split(column, rows_at_once) for column in (states.flatten(0, 1), positions.flatten()))
    parts = [_compute_acceptance(pair, drafter, batch, *piece) for piece in zip(*rows, strict=True)]
    of_token, mean = (torch.cat(column).double().cpu().view(positions.shape) for column in zip(*parts, strict=True))

    # stands[i] = ∏ over the drafts before i of min(1, q(x) / p(x)), times Σ min(p, q)
    along = of_token.cumprod(dim=0)
    stands = torch.cat((torch.ones_like(along[:1]), along[:-1])) * mean
    text = torch.arange(len(texts))[:, None].expand(complete.shape)[complete.cpu()]
    return Acceptance.from_stands(text, batch.anchors[complete].cpu(), stands.T.contiguous(), along.T.contiguous())


def _compute_acceptance(
    pair: Pair, drafter: Network, batch: Batch, states: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Return min(1, q(x) / p(x)) for the text's next token x, and Σ min(p, q), its mean over all tokens; [n] each.

    ``positions`` int64 [n] are in the flattened B · L, and ``states`` [n, width] are the drafter's states there. In
    greedy serving both results say whether the draft is x.
    """
    logits = drafter.logits(states).float()
    next_token = batch.base_output.tokens.flatten()[positions + 1]
    temperature = pair.plan.temperature
    if temperature == 0:
        accepted = logits.argmax(-1) == next_token
        return accepted, accepted
    q = torch.softmax(logits / temperature, dim=-1)
    hidden = batch.base_output.hidden.flatten(0, 1)[positions]
    base_logits = pair.base.logits(hidden.to(pair.base.device)).to(logits.device)
    p = torch.softmax(base_logits / temperature, dim=-1)
    q_of_token = q.gather(1, next_token[:, None]).squeeze(1)
    p_of_token = p.gather(1, next_token[:, None]).squeeze(1)
    return (q_of_token / p_of_token).clamp(max=1), torch.minimum(p, q).sum(-1)
