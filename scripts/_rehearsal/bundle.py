"""A ``.litertlm`` with the sections of a published bundle, twelve and the decoder's weights, written as it is made.

Narrower than a published one: attention in plain operators over caches in floats, no static activations, and random
bytes where images, sound and the tokenizer are.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from helpers.make_bundle import ALIGNMENT, Part, bundle
from helpers.make_graph import Model

from .decoder import build_decoder, build_embedder, build_per_layer_embedder
from .drafter import build_drafter
from .shapes import Shape

_TFLITE, _TOKENIZER, _METADATA, _WEIGHTS = 3, 4, 5, 7
_OPAQUE = ("audio_encoder_hw", "audio_adapter", "end_of_audio", "vision_encoder", "vision_adapter", "end_of_vision")


def write_bundle(shape: Shape, out: Path) -> None:
    """Write the bundle of ``shape``; the same shape gives the same bytes."""
    random = np.random.default_rng(1)
    models: list[tuple[str, Model | None]] = [
        ("embedder", build_embedder(shape)),
        ("per_layer_embedder", build_per_layer_embedder(shape)),
        *((kind, None) for kind in _OPAQUE),
        ("prefill_decode", build_decoder(shape)),
        ("mtp_drafter", build_drafter(shape)),
    ]
    # A part is what lies in the flatbuffer; its constants follow it, or are a section of their own.
    parts = [Part(_METADATA, random.bytes(12_000)), Part(_TOKENIZER, random.bytes(shape.opaque // 10))]
    behind: list[Model | int] = [0, 0]
    for kind, model in models:
        items = {"model_type": f"tf_lite_{kind}"}
        parts.append(Part(_TFLITE, b"" if model is None else model.packed(), items))
        external = model is not None and model.external
        behind.append(shape.opaque if model is None else 0 if external else model)
        if model is not None and external:
            parts.append(Part(_WEIGHTS, b"", items))
            behind.append(model)
    ranges, at = [], ALIGNMENT
    for part, more in zip(parts, behind, strict=True):
        end = at + len(part.data) + (more.outside if isinstance(more, Model) else more)
        ranges.append((at, end))
        at = -(-end // ALIGNMENT) * ALIGNMENT
    listing = bundle([Part(part.data_type, b"", part.items) for part in parts], ranges=ranges)
    with out.open("wb") as file:
        file.write(listing[:ALIGNMENT])
        for part, more, (begin, _) in zip(parts, behind, ranges, strict=True):
            file.seek(begin)
            file.write(part.data)
            if isinstance(more, Model):
                more.write_outside(file, random)
            elif more:
                file.write(random.bytes(more))
