"""From the walk to the one :class:`~mtp_extract.architecture.config.DrafterConfig`: read, never assumed."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from mtp_extract.architecture.config import FULL, SLIDING, DrafterConfig, LayerConfig, RopeConfig, known_drafter
from mtp_extract.architecture.roles import shapes_of
from mtp_extract.errors import RoleError, UnsupportedError, escape
from mtp_extract.graph.drafter import Layer, Walk

__all__ = ["read_config"]

_MOST_THETA_DIGITS = 7
_LARGEST_THETA_EXPONENT = 12


def read_config(walk: Walk, sliding_window: int | None = None) -> DrafterConfig:
    """The shape of the drafter that ``walk`` found.

    ``sliding_window`` is used only where the graph leaves the window to the runtime (an input ``mask_local``) and the
    shape is not a known one.

    Raises:
        RoleError: shapes that do not fit together.
        UnsupportedError: a shape that no configuration can express.
    """
    if not walk.layers:
        raise RoleError("layers: no attention layer was found between the pre projection and the heads.")
    heads = {layer.heads for layer in walk.layers}
    if len(heads) > 1:
        raise UnsupportedError(f"The layers have different numbers of heads, {sorted(heads)}; no engine expects that.")
    windows = {layer.window for layer in walk.layers if layer.window is not None}
    if len(windows) > 1:
        raise UnsupportedError(f"The sliding layers have different windows: {sorted(windows)}.")
    types = tuple(_layer_type(layer) for layer in walk.layers)
    _expect_one_cache_per_type(walk.layers, types)
    ropes = _ropes(walk.layers, types)
    shapes = {role.role: role.shape for role in walk.roles}
    vocab_size, hidden = shapes["lm_head"]
    window = next(iter(windows), None)
    config = DrafterConfig(
        backbone_hidden_size=shapes["post_projection"][0],
        hidden_size=hidden,
        intermediate_size=shapes["layers.0.gate_proj"][0],
        vocab_size=vocab_size,
        num_heads=heads.pop(),
        layers=tuple(
            LayerConfig(
                layer_type=layer_type,
                head_dim=layer.head_dim,
                num_kv_heads=layer.kv_heads,
                sliding_window=window if layer_type == SLIDING else None,
                rope=ropes[layer_type],
            )
            for layer, layer_type in zip(walk.layers, types, strict=True)
        ),
        final_logit_softcap=walk.soft_cap,
        rms_norm_eps=walk.rms_norm_eps,
        hidden_activation=walk.hidden_activation,
    )
    for role, expected in shapes_of(config).items():
        if shapes.get(role.name, expected) != expected:
            raise RoleError(f"{role.name}: expected shape {list(expected)}, found {list(shapes[role.name])}.")
    config.require_uniform()
    if SLIDING in types and window is None:
        return _with_window(config, _window_elsewhere(config, sliding_window))
    return config


def _with_window(config: DrafterConfig, window: int) -> DrafterConfig:
    layers = (
        replace(layer, sliding_window=window) if layer.layer_type == SLIDING else layer for layer in config.layers
    )
    return replace(config, layers=tuple(layers))


def _window_elsewhere(config: DrafterConfig, given: int | None) -> int:
    if given is not None:
        return given
    known = known_drafter(config)
    if known is None:
        raise UnsupportedError(
            "The sliding window is applied by the runtime (an input mask_local), so the file does not say how long it "
            "is, and its geometry is not a known one. Say how long it is.",
            remedies=("sliding_window=N",),
        )
    return int(known["sliding_window"])


def _expect_one_cache_per_type(layers: tuple[Layer, ...], types: tuple[str, ...]) -> None:
    # Engines hand a drafter one pair of caches for each layer type.
    for layer_type in (SLIDING, FULL):
        pairs = sorted({(la.key, la.value) for la, t in zip(layers, types, strict=True) if t == layer_type})
        if len(pairs) > 1:
            found = ", ".join(f"{escape(key)} and {escape(value)}" for key, value in pairs)
            raise UnsupportedError(f"The {layer_type} layers read different caches: {found}; no engine expects that.")


def _layer_type(layer: Layer) -> str:
    # A window in the graph makes a layer sliding. Newer runtimes hand the local mask in instead of building it.
    return SLIDING if layer.window is not None or any("local" in name for name in layer.masks) else FULL


def _ropes(layers: tuple[Layer, ...], types: tuple[str, ...]) -> dict[str, RopeConfig]:
    ropes: dict[str, RopeConfig] = {}
    for index, (layer, layer_type) in enumerate(zip(layers, types, strict=True)):
        rope = _read_rope(f"layers.{index}", layer.inverse_frequencies, layer.head_dim)
        if ropes.setdefault(layer_type, rope) != rope:
            raise UnsupportedError(f"The {layer_type} layers use different RoPE parameters.")
    return ropes


def _read_rope(name: str, table: np.ndarray, head_dim: int) -> RopeConfig:
    """Theta and the rotated share behind a table of inverse frequencies, checked against the whole table."""
    rotated = int(np.count_nonzero(table))
    in_range = bool(((table >= 0) & (table <= 1)).all())
    if not in_range or rotated < 2 or np.any(table[rotated:]) or table[0] != 1.0:
        raise UnsupportedError(f"{name}: its RoPE table is neither default nor proportional.")
    # The last frequency pins theta best: its exponent is the largest.
    exponent = -math.log10(table[rotated - 1]) * head_dim / (2 * (rotated - 1))
    if exponent > _LARGEST_THETA_EXPONENT:
        raise UnsupportedError(f"{name}: its RoPE table would need a theta of 1e{exponent:.0f}.")
    exact = float(table[rotated - 1]) ** (-head_dim / (2 * (rotated - 1)))
    for digits in range(1, _MOST_THETA_DIGITS + 1):
        theta = float(f"{exact:.{digits - 1}e}")
        expected = np.where(np.arange(table.size) < rotated, theta ** (-2 * np.arange(table.size) / head_dim), 0.0)
        if np.allclose(table, expected, rtol=2e-6, atol=0):
            return RopeConfig(theta, 2 * rotated / head_dim)
    raise UnsupportedError(f"{name}: its RoPE table does not follow theta^(-2i/{head_dim}) for any theta.")
