"""The shape of a drafter, as its graph states it: widths, heads, layer types, window, RoPE, soft cap."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from mtp_extract.data import load_mapping
from mtp_extract.errors import RoleError, UnsupportedError, escape
from mtp_extract.graph import Layer, Walk

__all__ = ["FULL", "SLIDING", "Geometry", "Rope", "known_geometry", "read_geometry"]

SLIDING = "sliding_attention"
FULL = "full_attention"

_MOST_THETA_DIGITS = 7
_LARGEST_THETA_EXPONENT = 12


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of one layer type.

    Attributes:
        theta: base of the frequencies, ``theta^(−2i / head_dim)``.
        partial_rotary_factor: share of the head that is rotated; the remaining frequencies are 0.
    """

    theta: float
    partial_rotary_factor: float

    @property
    def kind(self) -> str:
        """transformers' ``rope_type``."""
        return "default" if self.partial_rotary_factor == 1.0 else "proportional"


@dataclass(frozen=True)
class Geometry:
    """Everything a configuration needs, read from the graph. Tuples have one entry per layer.

    Attributes:
        sliding_window: positions a query of a sliding layer sees, itself included; None when all layers are full.
        rope: per layer type.
        final_logit_softcap: ``cap`` of ``cap · tanh(logits / cap)``; None for none.
    """

    backbone_hidden_size: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_layers: int
    num_heads: int
    head_dims: tuple[int, ...]
    num_kv_heads: tuple[int, ...]
    layer_types: tuple[str, ...]
    sliding_window: int | None
    rope: dict[str, Rope]
    final_logit_softcap: float | None
    rms_norm_eps: float
    hidden_activation: str

    def as_json(self) -> dict[str, Any]:
        """For ``extraction.json`` and ``--json``."""
        return {
            **asdict(self),
            "head_dims": list(self.head_dims),
            "num_kv_heads": list(self.num_kv_heads),
            "layer_types": list(self.layer_types),
        }

    def per_type(self, layer_type: str, values: tuple[int, ...]) -> int | None:
        """The entry of ``values`` that all layers of ``layer_type`` share; None when there is no such layer."""
        found = {v for v, t in zip(values, self.layer_types, strict=True) if t == layer_type}
        if len(found) > 1:
            raise UnsupportedError(f"The {layer_type} layers differ among themselves: {sorted(found)}.")
        return found.pop() if found else None


def read_geometry(walk: Walk, sliding_window: int | None = None) -> Geometry:
    """The geometry of the drafter that ``walk`` found.

    ``sliding_window`` is used only where the graph leaves the window to the runtime (an input ``mask_local``) and the
    geometry is not a known one.

    Raises:
        RoleError: shapes that do not fit together.
        UnsupportedError: a shape that no configuration can express.
    """
    shapes = {role.role: role.shape for role in walk.roles}
    vocab_size, hidden = shapes["lm_head"]
    out, width = shapes["pre_projection"]
    backbone = shapes["post_projection"][0]
    _expect("pre_projection", (out, width), (hidden, 2 * backbone))
    _expect("post_projection", shapes["post_projection"], (backbone, hidden))
    _expect("final_norm", shapes["final_norm"], (hidden,))
    if not walk.layers:
        raise RoleError("layers: no attention layer was found between the pre projection and the heads.")
    ffn = shapes["layers.0.gate_proj"][0]
    for index, layer in enumerate(walk.layers):
        _check_layer(f"layers.{index}", shapes, layer, hidden, ffn)
    heads = {layer.heads for layer in walk.layers}
    if len(heads) > 1:
        raise UnsupportedError(f"The layers have different numbers of heads, {sorted(heads)}; no engine expects that.")
    types = tuple(_layer_type(layer) for layer in walk.layers)
    windows = {layer.window for layer in walk.layers if layer.window is not None}
    if len(windows) > 1:
        raise UnsupportedError(f"The sliding layers have different windows: {sorted(windows)}.")
    window = windows.pop() if windows else None
    geometry = Geometry(
        backbone,
        hidden,
        ffn,
        vocab_size,
        len(walk.layers),
        heads.pop(),
        tuple(layer.head_dim for layer in walk.layers),
        tuple(layer.kv_heads for layer in walk.layers),
        types,
        window,
        _ropes(walk.layers, types),
        walk.soft_cap,
        walk.rms_norm_eps,
        walk.hidden_activation,
    )
    _expect_one_cache_per_type(walk.layers, types)
    for layer_type in (SLIDING, FULL):
        geometry.per_type(layer_type, geometry.head_dims)
        geometry.per_type(layer_type, geometry.num_kv_heads)
    if SLIDING in types and window is None:
        return replace(geometry, sliding_window=_window_elsewhere(geometry, sliding_window))
    return geometry


def _window_elsewhere(geometry: Geometry, given: int | None) -> int:
    if given is not None:
        return given
    known = known_geometry(geometry)
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


def _expect(role: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise RoleError(f"{role}: expected shape {list(expected)}, found {list(found)}.")


def _check_layer(name: str, shapes: dict[str, tuple[int, ...]], layer: Layer, hidden: int, ffn: int) -> None:
    width = layer.heads * layer.head_dim
    expected = {
        "q_proj": (width, hidden),
        "o_proj": (hidden, width),
        "gate_proj": (ffn, hidden),
        "up_proj": (ffn, hidden),
        "down_proj": (hidden, ffn),
        "q_norm": (layer.head_dim,),
        "pre_attention_norm": (hidden,),
        "post_attention_norm": (hidden,),
        "pre_ffw_norm": (hidden,),
        "post_ffw_norm": (hidden,),
    }
    for role, shape in expected.items():
        _expect(f"{name}.{role}", shapes[f"{name}.{role}"], shape)


def _layer_type(layer: Layer) -> str:
    # A window in the graph makes a layer sliding. Newer runtimes hand the local mask in instead of building it.
    return SLIDING if layer.window is not None or any("local" in name for name in layer.masks) else FULL


def _ropes(layers: tuple[Layer, ...], types: tuple[str, ...]) -> dict[str, Rope]:
    ropes: dict[str, Rope] = {}
    for index, (layer, layer_type) in enumerate(zip(layers, types, strict=True)):
        rope = _read_rope(f"layers.{index}", layer.inverse_frequencies, layer.head_dim)
        if ropes.setdefault(layer_type, rope) != rope:
            raise UnsupportedError(f"The {layer_type} layers use different RoPE parameters.")
    return ropes


def _read_rope(name: str, table: np.ndarray, head_dim: int) -> Rope:
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
            return Rope(theta, 2 * rotated / head_dim)
    raise UnsupportedError(f"{name}: its RoPE table does not follow theta^(-2i/{head_dim}) for any theta.")


def known_geometry(geometry: Geometry) -> dict[str, Any] | None:
    """The entry of ``mappings/geometries.json`` with this geometry; None when it is not a known one."""
    mine = geometry.as_json()
    for entry in load_mapping("geometries")["geometries"]:
        if all(mine[key] in (entry[key], None) for key in entry if key in mine):
            known: dict[str, Any] = entry
            return known
    return None
