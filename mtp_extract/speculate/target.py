"""The base model as the loop needs it: final hidden states, logits, scaled embeddings, shared K and V."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from mtp_extract.drafter.protocol import Drafter, Fed
from mtp_extract.errors import PairError, escape, few
from mtp_extract.speculate.trees import Tree

# What an attention implementation wants in place of a boolean mask: itself, or a number to add.
_MASK_FORMS = {"sdpa": False, "eager": True}


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
        self.device: torch.device = model.get_input_embeddings().weight.device
        """Where token ids go."""
        self.vocab_size = int(config.vocab_size)
        self.width = int(config.hidden_size)
        self.num_layers = len(layer_types)
        self._additive = _MASK_FORMS[attention]
        own = len(layer_types) - int(getattr(config, "num_kv_shared_layers", 0) or 0)
        windows = {"full_attention": None, "sliding_attention": getattr(config, "sliding_window", None)}
        if unknown := sorted(set(layer_types) - set(windows)):
            raise PairError(f"expected layer types {', '.join(windows)} in the base, found {few(unknown)}")
        self.windows: dict[str, int | None] = {kind: windows[kind] for kind in dict.fromkeys(layer_types)}
        self.kv_providers: dict[str, int] = {kind: index for index, kind in enumerate(layer_types[:own])}
        """Layer type → the last layer that computes its own K and V: those the drafter reads."""

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

    def new_cache(self) -> DynamicCache:
        """An empty cache for one text, from which what rejected drafts wrote can be taken back.

        Sliding layers keep two slots more than the base looks at next, which the drafter's two conventions look at.
        """
        cache = DynamicCache(config=self.config)
        cache.activate_past_recording()  # type: ignore[no-untyped-call]  # untyped in transformers
        for layer in cache.layers:
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.sliding_window += 2
        return cache

    def feed(self, tokens: Tensor, cache: DynamicCache, layers: Sequence[int] = (), *, tree: Tree | None = None) -> Fed:
        """One forward over the tokens that follow those in ``cache``, which then holds them too.

        Args:
            tokens: int64 [1, n].
            layers: those whose incoming hidden states are wanted too.
            tree: what the tokens are, where they do not follow one another.
        """
        start = cache.get_seq_length()
        places = torch.arange(tokens.shape[1]) if tree is None else torch.tensor([len(path) for path in tree.nodes])
        positions = (start + places)[None].to(tokens.device)
        masks = None if tree is None else self._tree_masks(cache, positions, tree)
        return self._run(tokens, positions, layers, attention_mask=masks, past_key_values=cache, use_cache=True)

    def keep(self, cache: DynamicCache, fed: Fed, way: Sequence[int]) -> Fed:
        """Of the tokens that were ``fed`` last keep those of ``way`` alone, as if they had followed one another."""
        at, count = list(way), fed.tokens.shape[1]
        order = [*at, *(node for node in range(count) if node not in at)]
        layers: list[Any] = cache.layers  # of this cache each has keys and values
        for layer in layers:
            if order != sorted(order):
                before = layer.keys.shape[2] - count
                slots = [*range(before), *(before + node for node in order)]
                layer.keys, layer.values = layer.keys[:, :, slots], layer.values[:, :, slots]
            layer.crop(len(at) - count)
        first = fed.positions[:, :1]
        return Fed(
            fed.tokens[:, at],
            first + torch.arange(len(at), device=first.device),
            fed.hidden[:, at],
            {layer: states[:, at] for layer, states in fed.layers.items()},
            {kind: (layers[i].keys, layers[i].values) for kind, i in self.kv_providers.items()},
        )

    def _tree_masks(self, cache: DynamicCache, positions: Tensor, tree: Tree) -> dict[str, Tensor]:
        """Layer type → what a node sees, [1, 1, nodes, slots]: all before the tree, and what is on the way to it."""
        sees, masks = torch.tensor(tree.sees, device=positions.device), {}
        for kind, window in self.windows.items():
            layer: Any = cache.layers[self.kv_providers[kind]]
            slots = layer.get_mask_sizes(positions.shape[1])[0]
            before = slots - positions.shape[1]
            known = torch.arange(int(cache.get_seq_length()) - before, cache.get_seq_length(), device=positions.device)
            visible = torch.cat((sees.new_ones(len(sees), before), sees), dim=1)
            if window is not None:
                visible &= torch.cat((known, positions[0])) > positions[0][:, None] - window
            masks[kind] = self._mask(visible[None, None])
        return masks

    def full_pass(self, tokens: Tensor, layers: Sequence[int] = ()) -> Fed:
        """One forward over ``tokens`` [batch, length], right-padded with anything: no token sees the padding.

        ``layers`` are those whose incoming hidden states are wanted too.

        Raises:
            PairError: the base does not return its shared K and V.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return self._run(tokens, positions, layers, use_cache=False)

    def _run(self, tokens: Tensor, positions: Tensor, layers: Sequence[int], **more: Any) -> Fed:
        """The body's output, with the hidden states that enter ``layers``."""
        last: list[Tensor] = []
        with ExitStack() as stack:
            if self.num_layers in layers:
                # transformers' own last state is the one after the final norm.
                norm = self.model.get_decoder().norm
                hook = norm.register_forward_pre_hook(lambda _, entering: last.append(entering[0]))
                stack.callback(hook.remove)
            output = self.model.model(
                input_ids=tokens,
                position_ids=positions,
                output_hidden_states=bool(layers),
                return_shared_kv_states=True,
                **more,
            )
        kv = getattr(output, "shared_kv_states", None)
        if kv is None:
            raise PairError(
                f"expected {type(self.model).__name__} to return shared_kv_states, found none; it needs "
                "transformers 5.16.1 or newer"
            )
        states = {layer: last[0] if layer == self.num_layers else output.hidden_states[layer] for layer in layers}
        return Fed(tokens, positions, output.last_hidden_state, states, dict(kv))

    def _mask(self, visible: Tensor) -> Tensor:
        if not self._additive:
            return visible
        dtype = self.model.get_input_embeddings().weight.dtype
        return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(
            ~visible, torch.finfo(dtype).min
        )


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
