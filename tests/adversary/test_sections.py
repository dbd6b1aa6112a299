"""Two sections that claim to be the same: which one a runtime reads is not ours to guess."""

from __future__ import annotations

from pathlib import Path

import pytest
from ai_edge_litert import schema_py_generated as schema
from helpers.make_bundle import DRAFTER, Part, bundle
from helpers.surgery import sound
from seam import MtpExtractError

from mtp_extract import extract
from mtp_extract.litertlm.container import TFLITE_MODEL, TFLITE_WEIGHTS

ROLE = "layers.0.down_proj"
SPELLINGS = ("tf_lite_mtp_drafter", "TF_LITE_MTP_DRAFTER", "mtp_drafter", " tf_lite_mtp_drafter ")


def divided() -> tuple[bytes, bytes]:
    """A drafter whose weight ``ROLE`` lies in another section, and that section."""
    graph = sound("torch")
    tensor = graph.main.tensors[graph.roles[ROLE]]
    stored = bytes(graph.model.buffers[tensor.buffer].data)
    group = schema.ExternalBufferGroupT(name=b"tflite_weights")
    entry = schema.ExternalBufferT(id=7, group=0, offset=0, length=len(stored), packing=b"")
    graph.model.externalBufferGroups, graph.model.externalBuffers = [group], [entry]
    tensor.buffer, tensor.externalBuffer = 0, 7
    return graph.data(), stored


def written(folder: Path, parts: list[Part]) -> bytes:
    folder.mkdir(exist_ok=True)
    (folder / "model.litertlm").write_bytes(bundle(parts))
    extract(folder / "model.litertlm", folder / "out", dtype="f32")
    return (folder / "out" / "model.safetensors").read_bytes()


def test_a_weights_section_is_read(tmp_path: Path) -> None:
    model, stored = divided()
    whole = written(tmp_path / "one", [Part(TFLITE_MODEL, sound("torch").data(), DRAFTER)])
    parts = [Part(TFLITE_MODEL, model, DRAFTER), Part(TFLITE_WEIGHTS, stored, DRAFTER)]
    assert written(tmp_path / "other", parts) == whole


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("first", [True, False])
def test_two_weights_sections_are_not_taken_in_order(spelling: str, first: bool, tmp_path: Path) -> None:
    model, stored = divided()
    right = Part(TFLITE_WEIGHTS, stored, DRAFTER)
    # The same number of bytes, and other weights.
    other = Part(TFLITE_WEIGHTS, stored[::-1], {"model_type": spelling})
    parts = [Part(TFLITE_MODEL, model, DRAFTER), *([right, other] if first else [other, right])]
    with pytest.raises(MtpExtractError):
        written(tmp_path, parts)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_two_drafters_are_not_taken_in_order(spelling: str, tmp_path: Path) -> None:
    one, other = (sound("torch", layers).data() for layers in ((0, 3), (3, 0)))
    with pytest.raises(MtpExtractError, match="more than one drafter"):
        written(tmp_path, [Part(TFLITE_MODEL, one, DRAFTER), Part(TFLITE_MODEL, other, {"model_type": spelling})])
    assert not (tmp_path / "out").exists()
