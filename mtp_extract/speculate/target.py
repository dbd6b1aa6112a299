"""The base model as the loop needs it: final hidden states, logits, scaled embeddings, shared K and V."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from mtp_extract.drafter.protocol import BaseOutput, BaseRequirements, Drafter
from mtp_extract.errors import PairError, escape, format_count, list_few
from mtp_extract.speculate.drafts import DraftTree


class Base:
    """A Gemma 4 model of transformers (``Gemma4ForCausalLM``, ``Gemma4ForConditionalGeneration``).

    Its attention implementation must be ``sdpa``, the default. The LM head runs only when logits are needed.

    Attributes:
        device: the device of the embedding, to which token ids go.
        windows: layer type → sliding window; None for full attention.
        kv_providers: layer type → the last layer that computes its own K and V, which the drafter reads.

    Raises:
        PairError: the model is not of that kind.
    """

    def __init__(self, model: Any) -> None:
        try:
            config = model.config.get_text_config()
            layer_types = config.layer_types
            _ = model.lm_head, model.model
        except AttributeError as error:
            raise PairError(
                f"expected a Gemma 4 base model with layer_types and an LM head, found {type(model).__name__}. Load it "
                "with AutoModelForCausalLM, and give the base model, not the drafter."
            ) from error
        attention = getattr(config, "_attn_implementation", "sdpa")
        if attention != "sdpa":
            raise PairError(
                f"expected attention implementation sdpa, found {escape(attention)}. Load the base with "
                "attn_implementation='sdpa'."
            )
        self.model = model
        self.config = config
        self.device: torch.device = model.get_input_embeddings().weight.device
        self.vocab_size = int(config.vocab_size)
        self.width = int(config.hidden_size)
        self.num_layers = len(layer_types)
        self.windows = _read_windows(config)
        layers_with_kv = self.num_layers - int(getattr(config, "num_kv_shared_layers", 0) or 0)
        self.kv_providers: dict[str, int] = {kind: index for index, kind in enumerate(layer_types[:layers_with_kv])}
        # transformers 5.24 renamed the argument, and returns no K and V to callers that use the old name.
        arguments = inspect.signature(model.model.forward).parameters
        self._cache_argument = "cache" if "cache" in arguments else "past_key_values"

    @property
    def stop_token_ids(self) -> Sequence[int]:
        """Tokens that end a text, by ``generation_config.eos_token_id``."""
        configured = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        return [configured] if isinstance(configured, int) else configured or []

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed ``tokens`` [...] as [..., width], times sqrt(width), with Gemma 4's own module."""
        embedded: Tensor = self.model.get_input_embeddings()(tokens.to(self.device))
        return embedded

    def logits(self, hidden: Tensor) -> Tensor:
        """Return soft-capped logits, F32 [..., vocabulary], for ``hidden`` [..., width] after the final norm.

        The cap is applied in the head's dtype, as in transformers, so that a BF16 argmax comes out the same.
        """
        logits: Tensor = self.model.lm_head(hidden)
        if (cap := getattr(self.config, "final_logit_softcapping", None)) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits.float().to(self.device)

    def build_cache(self) -> DynamicCache:
        """Build an empty cache for one text, from which K and V of rejected drafts can be cropped.

        Sliding layers keep two slots more than the base needs, since the drafter's position conventions look at them.
        """
        cache = DynamicCache(config=self.config)
        cache.activate_past_recording()  # type: ignore[no-untyped-call]  # untyped in transformers
        for layer in cache.layers:
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.sliding_window += 2
        return cache

    def feed(
        self,
        tokens: Tensor,
        layers: Sequence[int] = (),
        cache: DynamicCache | None = None,
        *,
        tree: DraftTree | None = None,
    ) -> BaseOutput:
        """Run the base over texts from their start or, with a cache, over the tokens that follow the cached ones.

        Args:
            tokens: int64 [batch, n], right-padded with anything: no token sees the padding.
            layers: layers whose input states to return; the number of layers stands for the output of the last.
            cache: the cache of one text, which then holds these tokens too; call :meth:`keep` next.
            tree: the tree whose nodes the tokens are; without one they follow one another.
        """
        cached = 0 if cache is None else cache.get_seq_length()
        positions = cached + torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        masks = None
        if cache is not None and tree is not None and tree.width > 1:
            sees = torch.tensor(tree.sees, device=tokens.device)
            # A node sees itself and its ancestors, so their number less one is its depth.
            positions = cached + sees.sum(-1)[None] - 1
            masks = self._build_tree_masks(cache, positions, sees)

        with self._collect_hidden_states(layers) as states:
            output = self.model.model(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=masks,
                use_cache=cache is not None,
                return_shared_kv_states=True,
                **{self._cache_argument: cache},
            )
        shared_kv = getattr(output, "shared_kv_states", None)
        if shared_kv is None:
            raise PairError(f"expected a Gemma 4 base with shared_kv_states, found {type(self.model).__name__}")
        return BaseOutput(tokens, positions, output.last_hidden_state, states, dict(shared_kv))

    @contextmanager
    def _collect_hidden_states(self, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        decoder = self.model.get_decoder()
        modules = [*decoder.layers, decoder.norm]
        states: dict[int, Tensor] = {}
        with ExitStack() as hooks:
            for layer in layers:
                handle = modules[layer].register_forward_pre_hook(
                    lambda _, entering, layer=layer: states.update({layer: entering[0]})
                )
                hooks.enter_context(handle)
            yield states

    def keep(self, cache: DynamicCache, fed: BaseOutput, accepted_path: Sequence[int]) -> BaseOutput:
        """Keep only the tokens at ``accepted_path`` of the tokens ``fed`` last, as if they had followed one another."""
        path = list(accepted_path)
        count = fed.tokens.shape[1]

        _crop(cache, path, count)
        layers: list[Any] = cache.layers
        positions = fed.positions[:, :1] + torch.arange(len(path), device=fed.positions.device)
        states = {layer: states[:, path] for layer, states in fed.layers.items()}
        shared_kv = {kind: (layers[index].keys, layers[index].values) for kind, index in self.kv_providers.items()}
        return BaseOutput(fed.tokens[:, path], positions, fed.hidden[:, path], states, shared_kv)

    def _build_tree_masks(self, cache: DynamicCache, positions: Tensor, sees: Tensor) -> dict[str, Tensor]:
        """Return a mask by layer type, bool [1, 1, nodes, slots]: all earlier slots are visible, nodes by ``sees``."""
        nodes = len(sees)
        length = cache.get_seq_length()
        masks = {}
        for kind, window in self.windows.items():
            layer: Any = cache.layers[self.kv_providers[kind]]
            cached = torch.arange(length - layer.get_mask_sizes(nodes)[0] + nodes, length, device=sees.device)
            visible = torch.cat((sees.new_ones(nodes, len(cached)), sees), dim=1)
            if window is not None:
                visible &= torch.cat((cached, positions[0])) > positions[0][:, None] - window
            masks[kind] = visible[None, None]
        return masks


def _crop(cache: DynamicCache, path: Sequence[int], count: int) -> None:
    """Keep only those of the last ``count`` slots of every layer that are at ``path``, in that order."""
    order = list(dict.fromkeys((*path, *range(count))))
    layers: list[Any] = cache.layers
    for layer in layers:
        if layer.keys is None:
            continue  # a layer that shares K and V of an earlier one: transformers 5.24 has an empty entry for it
        if order != sorted(order):
            # Slots of the path move in front of the others, which are then cropped.
            start = layer.keys.shape[2] - count
            slots = [*range(start), *(start + node for node in order)]
            layer.keys = layer.keys[:, :, slots]
            layer.values = layer.values[:, :, slots]
        layer.crop(len(path) - count)


def _read_windows(config: Any) -> dict[str, int | None]:
    """Return the sliding window of each layer type, None for full attention; PairError for another type."""
    known_types = {"full_attention": None, "sliding_attention": getattr(config, "sliding_window", None)}
    unknown = sorted(set(config.layer_types) - set(known_types))
    if unknown:
        raise PairError(f"expected layer types {', '.join(known_types)} in the base, found {list_few(unknown)}")
    return {kind: known_types[kind] for kind in dict.fromkeys(config.layer_types)}


@torch.inference_mode()
def check_pair(base: Base, drafter: Drafter) -> None:
    """Raise PairError if vocabulary, width, layers, or K and V of ``base`` are not what ``drafter`` needs."""
    for requirement, expected, actual in compare_needs(base, drafter.needs):
        if expected != actual:
            raise PairError(
                f"expected a base with {requirement} {expected}, found {actual}. Give the base model that this drafter "
                "was made for."
            )


def compare_needs(base: Base, needs: BaseRequirements) -> Iterator[tuple[str, object, object]]:
    """Yield each requirement in words, its value, and the base's value. K and V are seen by a forward of one token."""
    yield "a vocabulary of", needs.vocab_size, base.vocab_size
    yield "the drafter's backbone width", needs.width, base.width
    for layer in needs.layers:
        # Layer num_layers stands for the output of the last layer.
        yield "a layer", layer, min(max(layer, 0), base.num_layers)
    for kind in needs.shared_kv:
        yield "layers with K and V of type", kind, kind if kind in base.kv_providers else "none"
    shared = base.feed(torch.zeros(1, 1, dtype=torch.long, device=base.device)).shared_kv
    for kind, (heads, width) in needs.shared_kv.items():
        if kind in shared:
            keys = shared[kind][0]
            yield (
                f"{kind}: K and V of",
                f"{format_count(heads, 'head')} of {width}",
                f"{format_count(keys.shape[1], 'head')} of {keys.shape[3]}",
            )
