"""The base model as the loop needs it: final hidden states, logits, scaled embeddings, shared K and V."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mtp_extract.drafter.protocol import KV, Drafter, Fed
from mtp_extract.errors import PairError, escape, few
from mtp_extract.speculate.cache import SlotCache
from mtp_extract.speculate.growing import Nodes

# What an attention implementation wants in place of a boolean mask: itself, or a number to add.
_MASK_FORMS = {"sdpa": False, "eager": True}


@dataclass(frozen=True)
class FullPass(Fed):
    """One forward over whole sequences, without a cache."""

    shared_kv: Mapping[str, KV]  # layer type → K and V, each [batch, KV heads, length, head_dim]


class Base:
    """A Gemma 4 model of transformers (``Gemma4ForCausalLM``, ``Gemma4ForConditionalGeneration``).

    The model's body is called without its head, so that the head runs only where logits are needed and the
    hidden state after the final norm comes without storing every layer's.

    Args:
        model: the loaded model. Its attention implementation must be ``sdpa`` (the default) or ``eager``.

    Raises:
        PairError: the model is not of that kind.
    """

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config() if hasattr(getattr(model, "config", None), "get_text_config") else None
        layer_types = getattr(config, "layer_types", None)
        if config is None or not layer_types or not hasattr(model, "lm_head") or not hasattr(model, "model"):
            raise PairError(
                f"expected a Gemma 4 base model with layer_types and an LM head, found {type(model).__name__}; load it "
                "with AutoModelForCausalLM, and give the base model, not the drafter"
            )
        attention = getattr(config, "_attn_implementation", "sdpa")
        if attention not in _MASK_FORMS:
            raise PairError(
                f"expected attention implementation {' or '.join(_MASK_FORMS)}, found {escape(attention)}, which takes "
                "no explicit mask; load the base with attn_implementation='sdpa'"
            )
        self.model = model
        self.config = config
        self.vocab_size = int(config.vocab_size)
        self.width = int(config.hidden_size)
        self.num_layers = len(layer_types)
        self._additive = _MASK_FORMS[attention]
        own = len(layer_types) - int(getattr(config, "num_kv_shared_layers", 0) or 0)
        windows = {"full_attention": None, "sliding_attention": getattr(config, "sliding_window", None)}
        if unknown := sorted(set(layer_types) - set(windows)):
            raise PairError(f"expected layer types {', '.join(windows)} in the base, found {few(unknown)}")
        self.windows: dict[str, int | None] = {kind: windows[kind] for kind in dict.fromkeys(layer_types)}
        self._layer_windows = [windows[kind] for kind in layer_types[:own]]
        self.kv_providers: dict[str, int] = {kind: index for index, kind in enumerate(layer_types[:own])}
        """Layer type → the last layer that computes its own K and V: those the drafter reads."""

    @property
    def device(self) -> torch.device:
        """Where token ids go."""
        device: torch.device = self.model.get_input_embeddings().weight.device
        return device

    @property
    def stop_token_ids(self) -> Sequence[int]:
        """Tokens that end a text, by ``generation_config.eos_token_id``."""
        configured = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        return [configured] if isinstance(configured, int) else configured or []

    def embed(self, tokens: Tensor) -> Tensor:
        """[..., width]: the embedding of ``tokens`` [...], times sqrt(width), by Gemma 4's own module."""
        embedded: Tensor = self.model.get_input_embeddings()(tokens.to(self.device))
        return embedded

    def logits(self, hidden: Tensor) -> Tensor:
        """F32 [..., vocabulary], soft-capped like the base, of ``hidden`` [..., width] after the final norm.

        The cap is applied in the head's dtype, as transformers does, so that a BF16 argmax comes out the
        same.
        """
        logits: Tensor = self.model.lm_head(hidden)
        cap = getattr(self.config, "final_logit_softcapping", None)
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits.float().to(self.device)

    def new_cache(self, *, batch: int, capacity: int, queries: int) -> SlotCache:
        """An empty cache for ``batch`` sequences of ``capacity`` tokens, fed ``queries`` at a time."""
        return SlotCache(self._layer_windows, batch=batch, capacity=capacity, queries=queries, device=self.device)

    def forward(
        self,
        tokens: Tensor,
        starts: Tensor,
        cache: SlotCache,
        lengths: Tensor | None = None,
        layers: Sequence[int] = (),
        tree: Nodes | None = None,
    ) -> Fed:
        """Feed ``tokens`` [batch, queries] at positions ``starts[b]`` on, and store their K and V.

        Args:
            tokens: int64; right-padded when ``lengths`` is given.
            starts: int64 [batch], position of each sequence's first token. Everything before it must be in the cache.
            cache: written to; entries at later positions count as absent.
            lengths: int64 [batch], in the first forward, each prompt's true length.
            layers: those whose incoming hidden states are wanted too.
            tree: what the tokens are, where they do not follow one another; :meth:`SlotCache.take` is to come after.
        """
        places = cache.begin(starts, tokens.shape[1], lengths)
        positions = places if tree is None else starts[:, None] + tree.depth
        masks = {}
        for kind, window in self.windows.items():
            keys, query = cache.key_positions(window, places), positions[:, :, None]
            if tree is None:
                visible = keys[:, None, :] <= query
            else:
                keys, visible = _in_tree(keys, starts, positions, tree)
            if window is not None:
                visible = visible & (keys[:, None, :] > query - window)
            masks[kind] = self._mask(visible[:, None])
        output, states = self._run(
            layers,
            input_ids=tokens,
            attention_mask=masks,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )
        cache.end()
        return Fed(tokens, positions, output.last_hidden_state, states)

    def read_kv(self, cache: SlotCache, kinds: Iterable[str]) -> tuple[dict[str, KV], dict[str, Tensor]]:
        """The shared K and V of these layer types, in F32, and the position in each of their slots."""
        kv, positions = {}, {}
        for kind in kinds:
            keys, values, positions[kind] = cache.read_wide(self.kv_providers[kind])
            kv[kind] = (keys, values)
        return kv, positions

    def full_pass(self, tokens: Tensor, layers: Sequence[int] = ()) -> FullPass:
        """One forward over ``tokens`` [batch, length], right-padded with anything: no token sees the padding.

        ``layers`` are those whose incoming hidden states are wanted too.

        Raises:
            PairError: the base does not return its shared K and V.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        output, states = self._run(
            layers, input_ids=tokens, position_ids=positions, use_cache=False, return_shared_kv_states=True
        )
        kv = getattr(output, "shared_kv_states", None)
        if kv is None:
            raise PairError(
                f"expected {type(self.model).__name__} to return shared_kv_states, found none; it needs "
                "transformers 5.16.1 or newer"
            )
        return FullPass(tokens, positions, output.last_hidden_state, states, dict(kv))

    def _run(self, layers: Sequence[int], **inputs: Any) -> tuple[Any, dict[int, Tensor]]:
        """The body's output, and the hidden states that enter ``layers``."""
        last: list[Tensor] = []
        with ExitStack() as stack:
            if self.num_layers in layers:
                # transformers' own last state is the one after the final norm.
                norm = self.model.get_decoder().norm
                hook = norm.register_forward_pre_hook(lambda _, entering: last.append(entering[0]))
                stack.callback(hook.remove)
            output = self.model.model(**inputs, output_hidden_states=bool(layers))
        states = {layer: last[0] if layer == self.num_layers else output.hidden_states[layer] for layer in layers}
        return output, states

    def _mask(self, visible: Tensor) -> Tensor:
        if not self._additive:
            return visible
        dtype = self.model.get_input_embeddings().weight.dtype
        return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(
            ~visible, torch.finfo(dtype).min
        )


def _in_tree(keys: Tensor, starts: Tensor, positions: Tensor, tree: Nodes) -> tuple[Tensor, Tensor]:
    """Where slots stand, int64 [batch, slots], and which a node sees, bool [batch, nodes, slots], windows aside.

    Args:
        keys: int64 [batch, slots], what slots hold: positions before the root, and from it on nodes in their order.
        starts: int64 [batch], position of the root.
        positions: int64 [batch, nodes].
    """
    batch, nodes = positions.shape
    node = keys - starts[:, None]
    inside = (node >= 0) & (node < nodes)
    node = node.clamp(0, nodes - 1)
    sees = tree.sees.expand(batch, -1, -1).gather(2, node[:, None].expand(-1, nodes, -1))
    visible = torch.where(inside[:, None], sees, (keys < starts[:, None])[:, None])
    return torch.where(inside, positions.gather(1, node), keys), visible


@torch.inference_mode()
def check_pair(base: Base, drafter: Drafter, tokenizer: Any = None) -> None:
    """Check that ``base`` can give what ``drafter`` needs.

    The base's K and V are looked at in a forward of one token, not taken from its config.

    Raises:
        PairError: vocabulary, width, or the K and V of a layer type differ, or a layer is missing; or the
            tokenizer has more tokens than the base.
    """
    advice = "give the base model this drafter was made for"
    needs = drafter.needs
    if needs.vocab_size != base.vocab_size:
        raise PairError(
            f"expected a base with the drafter's vocabulary of {needs.vocab_size}, found {base.vocab_size}; {advice}"
        )
    if needs.width != base.width:
        raise PairError(f"expected a base of the drafter's backbone width {needs.width}, found {base.width}; {advice}")
    if absent := sorted(set(needs.shared_kv) - set(base.kv_providers)):
        raise PairError(
            f"expected the base to compute K and V for {', '.join(absent)}, found only "
            f"{', '.join(base.kv_providers) or 'none'}; {advice}"
        )
    if absent_layers := [layer for layer in needs.layers if not 0 <= layer <= base.num_layers]:
        raise PairError(
            f"expected the base to have a layer {absent_layers[0]}, found layers 0 to {base.num_layers - 1}, and "
            f"{base.num_layers} for what leaves the last; {advice}"
        )
    shared = base.full_pass(torch.zeros(1, 1, dtype=torch.long, device=base.device)).shared_kv
    for kind, expected in needs.shared_kv.items():
        found = tuple(shared[kind][0].shape[i] for i in (1, 3))
        if expected != found:
            raise PairError(
                f"{kind}: expected K and V of {expected[0]} heads of {expected[1]}, found {found[0]} heads of "
                f"{found[1]} in the base; {advice}"
            )
    if tokenizer is not None and len(tokenizer) > base.vocab_size:
        raise PairError(
            f"expected a tokenizer of at most {base.vocab_size} tokens, found {len(tokenizer)}; give the "
            "base model's own tokenizer"
        )
