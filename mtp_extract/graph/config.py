"""Build the :class:`~mtp_extract.architecture.config.DrafterConfig` from what the graph says; nothing is assumed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mtp_extract.architecture import list_shapes
from mtp_extract.architecture.config import FULL, SLIDING, DrafterConfig, LayerConfig, RopeConfig, find_known_drafter
from mtp_extract.errors import RoleError, UnsupportedError, escape
from mtp_extract.graph.drafter import DrafterStructure, Layer
from mtp_extract.graph.rotation import read_rope


def read_config(structure: DrafterStructure, sliding_window: int | None = None) -> DrafterConfig:
    """Return the configuration of the drafter that has ``structure``.

    ``sliding_window`` is used only if the graph leaves the window to the runtime (an input ``mask_local``); None stands
    for that of a known drafter with the same shapes.

    Raises:
        RoleError: shapes do not fit together.
        UnsupportedError: no configuration can express the geometry, or the window is needed and not given.
    """
    if not structure.layers:
        raise RoleError("layers: no attention layer was found between the pre projection and the heads.")
    heads = {layer.heads for layer in structure.layers}
    if len(heads) > 1:
        raise UnsupportedError(f"The layers have different numbers of heads, {sorted(heads)}; no engine expects that.")
    shapes = {role.role: role.shape for role in structure.roles}
    vocab_size, hidden = shapes["lm_head"]
    config = DrafterConfig(
        backbone_hidden_size=shapes["post_projection"][0],
        hidden_size=hidden,
        intermediate_size=shapes["layers.0.gate_proj"][0],
        vocab_size=vocab_size,
        num_heads=heads.pop(),
        layers=_read_layers(structure.layers),
        final_logit_softcap=structure.soft_cap,
        rms_norm_eps=structure.rms_norm_eps,
        hidden_activation=structure.hidden_activation,
    )
    for role, expected in list_shapes(config).items():
        if shapes.get(role.name, expected) != expected:
            raise RoleError(f"{role.name}: expected shape {list(expected)}, found {list(shapes[role.name])}.")
    config.require_uniform()
    if SLIDING not in config.layer_types or config.sliding_window is not None:
        return config
    if sliding_window is None:
        sliding_window = _find_known_window(config)
    layers = (replace(la, sliding_window=sliding_window) if la.layer_type == SLIDING else la for la in config.layers)
    return replace(config, layers=tuple(layers))


def _read_layers(layers: Sequence[Layer]) -> tuple[LayerConfig, ...]:
    windows = {layer.window for layer in layers if layer.window is not None}
    if len(windows) > 1:
        raise UnsupportedError(f"The sliding layers have different windows: {sorted(windows)}.")
    window = next(iter(windows), None)

    types = _choose_layer_types(layers)
    ropes: dict[str, RopeConfig] = {}
    for index, (layer, kind) in enumerate(zip(layers, types, strict=True)):
        rope = read_rope(f"layers.{index}", layer.inverse_frequencies, layer.frequency_rounding, layer.head_dim)
        if ropes.setdefault(kind, rope) != rope:
            raise UnsupportedError(f"The {kind} layers use different RoPE parameters.")
    return tuple(
        LayerConfig(kind, layer.head_dim, layer.kv_heads, window if kind == SLIDING else None, ropes[kind])
        for layer, kind in zip(layers, types, strict=True)
    )


def _find_known_window(config: DrafterConfig) -> int:
    geometry = find_known_drafter(config)
    if geometry is None:
        raise UnsupportedError(
            "The graph does not say how long its sliding window is: the runtime applies it (an input mask_local), it "
            "is longer than the file's caches, or its masks are those of no window. No drafter with these shapes is "
            "known. Say how long it is.",
            remedies=("sliding_window=N",),
        )
    return int(geometry["sliding_window"])


def _choose_layer_types(layers: Sequence[Layer]) -> list[str]:
    """Return the type of each layer, by the slots it sees; if all see everything, by the caches they read."""
    # Newer runtimes pass the local mask in, so the graph has no window.
    types = [SLIDING if la.window is not None or any("local" in name for name in la.masks) else FULL for la in layers]
    caches = [{la.key, la.value} for la in layers]
    if SLIDING not in types and all(names == caches[-1] or not names & caches[-1] for names in caches):
        # A window that is longer than the file's caches hides nothing; the last layer is always a full one.
        types = [FULL if names == caches[-1] else SLIDING for names in caches]
    pairs = sorted({(kind, la.key, la.value) for kind, la in zip(types, layers, strict=True)})
    names = {name for _, key, value in pairs for name in (key, value)}
    if len(pairs) > len(set(types)) or len(names) < 2 * len(pairs):
        listed = ", ".join(f"{escape(key)} and {escape(value)} by {kind} layers" for kind, key, value in pairs)
        raise UnsupportedError(f"Engines hand each type of layer K and V of its own; the graph reads {listed}.")
    return types
