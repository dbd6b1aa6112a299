"""A pair at work: which tensors a round of it holds, as they are seen while it runs.

The names are those of the seed's plan for a speculative pair. Sizes are not worked out from a config: a base and a
drafter generate, and what goes into them and comes out is looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mtp_extract.drafter.eagle3 import Eagle3State
from mtp_extract.drafter.load import Network
from mtp_extract.drafter.protocol import BaseState, DraftState, Needs
from mtp_extract.speculate.cache import SlotCache
from mtp_extract.speculate.generate import Options, SpeculativeGenerator
from mtp_extract.speculate.target import Base
from mtp_extract.validate.acceptance.drafting import Drafting

BUFFERS = (
    "target_main_stream",
    "target_kv_cache",
    "target_logits",
    "draft_backbone_stream",
    "draft_main_stream",
    "draft_kv_cache",
    "draft_logits",
    "candidate_tokens",
    "accepted_tokens",
    "verifier_scratch",
)


@dataclass(frozen=True)
class Held:
    what: str  # in words
    shape: tuple[int, ...]  # of one
    axes: tuple[str, ...]  # what each dimension counts; ``T`` are the tokens of one forward of the base
    dtype: str  # torch's name
    copies: int  # how many there are
    nbytes: int  # of all of them


@dataclass(frozen=True)
class Side:
    """One of the two, as it is loaded."""

    dtype: str  # of most of its numbers
    parameters: int  # numbers in its weights, each once
    nbytes: int  # of its weights and buffers, each once


@dataclass(frozen=True)
class PairFacts:
    """A pair, and a round of it, one sequence."""

    target: Side
    draft: Side
    needs: Needs  # what of the base the drafter reads
    layers: int  # of the base
    width: int  # of the drafter's own stream
    drafts: str  # name of what was drafted
    fed: int  # T, tokens of one forward of the base
    positions: int  # tokens in the end, prompt included
    # by name of :data:`BUFFERS`, in that order; empty for one that this pair has not
    buffers: Mapping[str, tuple[Held, ...]]


def measure_pair(
    base: Base, drafter: Network, prompt: Sequence[int], drafting: Drafting, *, new_tokens: int
) -> PairFacts | None:
    """Let a pair continue one prompt greedily, and say what it held; None where the text left nothing to draft."""
    seen, options = _Observations(), Options(max_new_tokens=new_tokens, drafts=drafting.what)
    with seen.attached(base, drafter.final_norm):
        (done,) = SpeculativeGenerator(base, _Observed(drafter, seen)).generate_batch([list(prompt)], options)
    if seen.cache is None or not done.drafted:
        return None
    seen.take_in(seen.cache)
    (logits,) = seen.tensors["target_logits"].values()
    # These two the loop keeps to itself; their sizes follow from what it gives.
    choices = torch.empty(logits.shape[:2], dtype=torch.long, device="meta")
    seen.note("verifier_scratch", "what the base says after the tokens of T", "batch T", choices)
    # Of the new tokens one is the prompt's, and one the base's own after the drafts.
    most = min(drafting.depth, new_tokens - 2) + 1
    accepted = torch.empty(1, most, dtype=torch.long, device="meta")
    seen.note("accepted_tokens", "drafts that stand, and the base's own token after them", "batch tokens", accepted)
    return PairFacts(
        target=_side(base.model),
        draft=_side(drafter),
        needs=drafter.needs,
        layers=base.num_layers,
        width=drafter.config.hidden_size,
        drafts=drafting.name,
        fed=logits.shape[1],
        positions=len(done.prompt_tokens) + len(done.tokens),
        buffers={name: tuple(seen.tensors.get(name, {}).values()) for name in BUFFERS},
    )


def _side(module: nn.Module) -> Side:
    weights = {id(tensor): tensor for tensor in module.parameters()}
    tensors = {**weights, **{id(tensor): tensor for tensor in module.buffers()}}
    numbers: Counter[torch.dtype] = Counter()
    for tensor in tensors.values():
        numbers[tensor.dtype] += tensor.numel()
    ((dtype, _),) = numbers.most_common(1)
    parameters = sum(tensor.numel() for tensor in weights.values())
    return Side(_name(dtype), parameters, sum(map(_size, tensors.values())))


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass
class _Observations:
    """What went by, each at its largest."""

    rounds: int = 0  # that were begun
    tensors: dict[str, dict[str, Held]] = field(default_factory=dict)  # by buffer, then in words
    cache: SlotCache | None = None  # the base's

    def note(self, name: str, what: str, axes: str, tensor: Tensor, copies: int = 1) -> None:
        """Of a buffer, so many tensors like this one."""
        size, known = copies * _size(tensor), self.tensors.setdefault(name, {})
        if what not in known or known[what].nbytes < size:
            known[what] = Held(what, tuple(tensor.shape), tuple(axes.split()), _name(tensor.dtype), copies, size)

    def take_in(self, cache: SlotCache) -> None:
        """The base's K and V, when all is written."""
        alike = Counter(cache.shapes)
        for layer, shape in enumerate(cache.shapes):
            if layers := alike.pop(shape, 0):
                what = f"keys and values of {layers} of {len(cache.shapes)} layers that have them"
                self.note("target_kv_cache", what, "batch heads slots head_dim", cache.read(layer)[0], 2 * layers)

    @contextmanager
    def attached(self, base: Base, norm: nn.Module) -> Iterator[None]:
        """Look at each forward of the base, and at what the drafter's last norm gives."""
        body, head = base.model.model, base.model.lm_head
        with ExitStack() as stack:
            stack.callback(head.register_forward_hook(self._says).remove)
            stack.callback(body.register_forward_pre_hook(self._enters, with_kwargs=True).remove)
            stack.callback(body.register_forward_hook(self._leaves).remove)
            stack.callback(norm.register_forward_hook(self._drafts).remove)
            yield

    def _enters(self, _: nn.Module, __: Any, given: Mapping[str, Any]) -> None:
        # Before the first round it is the prompt, or a check that the two belong together.
        if not self.rounds:
            return
        self.cache = given["past_key_values"]
        drafts = given["input_ids"][:, 1:]
        self.note("candidate_tokens", "drafts", "batch drafts", drafts)
        for kind, mask in given["attention_mask"].items():
            self.note("verifier_scratch", f"mask, {kind}", "batch heads T slots", mask)

    def _leaves(self, _: nn.Module, __: Any, output: Any) -> None:
        if self.rounds:
            self.note("target_main_stream", "after the final norm", "batch T width", output.last_hidden_state)

    def _says(self, _: nn.Module, __: Any, logits: Tensor) -> None:
        if self.rounds:
            # The loop compares them in F32.
            self.note("target_logits", "after the tokens of T", "batch T vocabulary", logits.float())

    def _drafts(self, _: nn.Module, __: Any, state: Tensor) -> None:
        self.note("draft_main_stream", "after the final norm", "batch queries width", state)

    def begins(self, base: BaseState, needs: Needs) -> None:
        """A round begins, with what the base knows."""
        if self.rounds == 1:
            # What stands there is of the whole prompt.
            self.tensors.pop("draft_backbone_stream", None)
        self.rounds += 1
        if needs.final_hidden:
            what = "the base's state that predicted the pending token; the drafter's own takes its place"
            self.note("draft_backbone_stream", what, "batch queries width", base.hidden)
        for layer in needs.layers:
            what = f"the base's state that enters layer {layer}"
            self.note("draft_backbone_stream", what, "batch T width", base.fed.layers[layer])

    def stepped(self, logits: Tensor, state: DraftState) -> None:
        self.note("draft_logits", "of the next token", "batch queries vocabulary", logits)
        if isinstance(state, Eagle3State):
            what, axes = "keys and values of verified positions", "batch slots heads head_dim"
            self.note("draft_kv_cache", what, axes, state.cache[0], 2)
            if state.own is not None:
                what, axes = "keys and values of the round's steps", "batch queries steps heads head_dim"
                self.note("draft_kv_cache", what, axes, state.own[0], 2)


@dataclass(frozen=True)
class _Observed:
    """A drafter whose tensors are looked at."""

    drafter: Network
    seen: _Observations

    @property
    def needs(self) -> Needs:
        return self.drafter.needs

    def start(self, base: BaseState) -> DraftState:
        self.seen.begins(base, self.needs)
        return self.drafter.start(base)

    def step(self, state: DraftState, token: Tensor) -> tuple[Tensor, DraftState]:
        logits, following = self.drafter.step(state, token)
        self.seen.stepped(logits, following)
        return logits, following

    def fork(self, state: DraftState, parents: Tensor) -> DraftState:
        return self.drafter.fork(state, parents)
