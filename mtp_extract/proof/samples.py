"""Drawn inputs: the same numbers for the graph, by the names of its inputs, and for a checkpoint, as a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mtp_extract.errors import ProofError
from mtp_extract.graph.drafter import ACTIVATIONS
from mtp_extract.graph.evaluate import Samples
from mtp_extract.graph.flat import MASK, MASK_LOCAL
from mtp_extract.litertlm.storage import FLOAT_TYPES
from mtp_extract.proof.forward import Cache, Step, Written
from mtp_extract.proof.inputs import Layouts, SignatureInputs, drawn_codes, reach_of
from mtp_extract.proof.tables import feed

_TINY = 1e-3
_FAR_BELOW = 1e-2
_LOUD = 20.0
_DRAWN_POSITIONS = 2
# Scores of a standard deviation of about one: every slot of a window has a say. V is small, so that the epsilon of the
# norm behind the attention shows.
_QUIET_SCORES = 1.2
_QUIET_CODE = 10
_SMALL_VALUES = 0.01


@dataclass(frozen=True)
class Sample:
    """Inputs at ``positions`` of the first query, read by one layout of the caches.

    Attributes:
        fed: for the graph, by name.
        step: for a checkpoint.
        additive: whether a mask of floats is 0 and a large negative number, or 1 and 0.
    """

    positions: npt.NDArray[np.int64]
    fed: Mapping[str, Samples]
    step: Step
    layouts: Layouts
    additive: bool


@dataclass(frozen=True)
class Drawing:
    """Draws the inputs of ``interface``, scaled by what ``checkpoint`` holds.

    Attributes:
        epsilon: of the graph's norms.
    """

    interface: SignatureInputs
    checkpoint: Written
    epsilon: float
    seed: int

    def every_reading(self) -> Iterator[Sample]:
        """The inputs, once for every way to read caches and to write a mask of floats."""
        positions, inputs = self._positions(), self.interface.graph.inputs
        masks = [name for name in (MASK, MASK_LOCAL) if name in self.interface.needed]
        floats = any(inputs[name].tensor.type in FLOAT_TYPES for name in masks)
        for additive in (True, False) if floats else (True,):
            for layouts in self.interface.layouts():
                yield self.sample(positions, layouts, additive)

    def _positions(self) -> npt.NDArray[np.int64]:
        """At the edges of window and caches, and some drawn anew."""
        last, window = self.interface.last, self.interface.window or self.interface.slots // 4
        edges = np.unique([p for p in (1, window - 1, window, last) if 0 <= p <= last])
        others = np.setdiff1d(np.arange(last + 1), edges)
        drawn = np.random.default_rng(self.seed).permutation(others)[:_DRAWN_POSITIONS]
        return np.union1d(edges, drawn).astype(np.int64)

    def sample(
        self, positions: npt.NDArray[np.int64], layouts: Layouts, additive: bool, *, ordinary: bool = False
    ) -> Sample:
        """Inputs at ``positions``: ordinary ones, or some very quiet, some very loud, and small numbers in V.

        Raises:
            ProofError: a norm of queries holds numbers that are not finite.
        """
        random, interface, config = np.random.default_rng(self.seed), self.interface, self.checkpoint.config
        masks = interface.drawn_masks(positions, random)
        for name, whole in interface.runtime_masks(positions).items():
            # Every second mask has no holes, as those of runtimes.
            masks[name][::2] = whole[::2]
        shape = (len(positions), interface.queries, 2 * config.backbone_hidden_size)
        activations = random.standard_normal(shape).astype(np.float32)
        if not ordinary:
            activations[0] *= np.float32(self._quiet_activations())
            activations[-1] *= np.float32(_LOUD)
        fed: dict[str, Samples] = {**feed(interface.graph, interface.needed, positions, interface.queries)}
        fed.update(interface.masks(masks, additive))
        # Of a quantized input too: on the grid, most numbers would leave the calibrated range.
        fed[ACTIVATIONS] = tuple(a.reshape(interface.graph.inputs[ACTIVATIONS].tensor.shape) for a in activations)
        caches: dict[str, Cache] = {}
        layers = interface.walk.layers
        for name in sorted({n for layer in layers for n in (layer.key, layer.value)}):
            fed[name], caches[name] = self._cache(name, layouts, random, ordinary)
        step = Step(
            activations,
            positions[:, None] + np.arange(interface.queries),
            [(caches[layer.key], caches[layer.value]) for layer in layers],
            [interface.seen(index, positions, masks) for index in range(len(config.layers))],
        )
        return Sample(positions, fed, step, layouts, additive)

    def _cache(self, name: str, layouts: Layouts, random: np.random.Generator, ordinary: bool) -> tuple[Samples, Cache]:
        """Quiet numbers; of K, so that scores are."""
        interface, layers = self.interface, self.interface.walk.layers
        reading = zip(self.checkpoint.config.layers, layers, strict=True)
        layer = next(config for config, found in reading if name in (found.key, found.value))
        norms = [
            float(np.linalg.norm(self.checkpoint.vector(f"layers.{i}.q_norm", layer.head_dim)))
            for i, found in enumerate(layers)
            if found.key == name
        ]
        if not np.isfinite(norms).all():
            raise ProofError("A norm of queries holds numbers that are not finite: the file is damaged.")
        floats = interface.graph.inputs[name].tensor.type in FLOAT_TYPES
        target = _QUIET_SCORES / max(*norms, 1e-6) if norms else 1.0 if ordinary else _SMALL_VALUES
        scale = 2.0 ** round(math.log2(target / (_QUIET_CODE if norms else 73))) if floats else interface.grid(name)[0]
        largest = interface.largest_code(name)
        reach = reach_of(target, scale, largest) if norms else largest
        codes = drawn_codes(layer.num_kv_heads, interface.slots, layer.head_dim, reach, random)
        numbers, cache = interface.cache(name, layouts, codes, scale)
        return (numbers,), cache

    def _quiet_activations(self) -> float:
        """A spread of activations that leaves the stream's mean square far below ``epsilon``, the graph's.

        A norm takes away what the epsilon of the one before it does to the scale; only where both see next to nothing
        does it show.
        """
        config = self.checkpoint.config
        unit = np.random.default_rng(0).standard_normal((1, 2 * config.backbone_hidden_size)).astype(np.float32)
        made = self.checkpoint.linear("pre_projection", unit, config.hidden_size)
        rms = float(np.sqrt(np.mean(np.square(made))))
        spread = _FAR_BELOW * self.epsilon**0.5 / rms if rms > 0 else 0.0
        return spread if 0 < spread < 1 else _TINY
