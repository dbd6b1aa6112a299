"""The size of a base, from its config and headers alone: of a directory, of shards, and of the Hub, by ranges."""

from __future__ import annotations

import ctypes
import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.hub_fixtures import hub, no_secrets  # noqa: F401 - fixtures
from helpers.hub_server import Content, HubServer
from safetensors.torch import load_file, save_file

from mtp_extract.errors import HubError, MtpExtractError
from mtp_extract.evaluate import base_size
from mtp_extract.evaluate.base_model import read_size
from mtp_extract.evaluate.base_size import check_room, free_memory, free_on, give_back


@pytest.fixture(scope="module")
def taken(base: Path) -> int:
    """Bytes of the loaded base's parameters."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    state = [*model.parameters(), *model.buffers()]
    held = {tensor.data_ptr(): tensor.nbytes for tensor in state if tensor.is_floating_point()}
    return sum(held.values())


def sharded(base: Path, out: Path) -> None:
    """The base in two files, with a third that no index names."""
    shutil.copytree(base, out)
    tensors = load_file(out / "model.safetensors")
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, out / file, metadata={"format": "pt"})
    weight_map = {name: file for file, part in parts.items() for name in part}
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_it_is_what_the_loaded_base_takes(base: Path, taken: int, tmp_path: Path) -> None:
    """But for what a model computes when it is made, and has no file of: the angles of its rotation."""
    found = read_size(str(base))
    assert found.weights == pytest.approx(taken, rel=0.01)
    assert (found.itemsize, found.config.hidden_size) == (4, 64)
    sharded(base, tmp_path / "shards")
    assert read_size(str(tmp_path / "shards")).weights == found.weights


def test_as_it_is_loaded(base: Path, tmp_path: Path) -> None:
    """In the type that the config names, whatever the file holds; a head that is tied is no second copy."""
    shutil.copytree(base, tmp_path / "half")
    config = json.loads((base / "config.json").read_text())
    config["dtype"] = config["text_config"]["dtype"] = "bfloat16"
    (tmp_path / "half/config.json").write_text(json.dumps(config))
    whole, half = read_size(str(base)), read_size(str(tmp_path / "half"))
    assert whole.weights is not None
    assert (half.weights, half.itemsize) == (whole.weights // 2, 2)
    tensors = load_file(base / "model.safetensors")
    (name,) = (name for name in tensors if name.endswith("embed_tokens.weight"))
    tensors["lm_head.weight"] = tensors[name].clone()
    save_file(tensors, tmp_path / "half/model.safetensors", metadata={"format": "pt"})
    assert read_size(str(tmp_path / "half")).weights == half.weights


@pytest.mark.parametrize("shards", [False, True])
def test_of_the_hub_come_headers_alone(base: Path, tmp_path: Path, hub: HubServer, shards: bool) -> None:  # noqa: F811
    sharded(base, tmp_path / "base")
    files = sorted((tmp_path / "base").glob("model-*")) if shards else [tmp_path / "base/model.safetensors"]
    small = ["config.json", *(["model.safetensors.index.json"] if shards else [])]
    for file in small:
        hub.add("org/base", file, (tmp_path / "base" / file).read_bytes(), lfs=False)
    for path in files:
        hub.add("org/base", path.name, Content.of(path.read_bytes()))
    found, local = read_size("org/base"), read_size(str(base))
    assert (found.weights, found.itemsize) == (local.weights, local.itemsize)
    ranges = [request.range for request in hub.requests if request.server == "storage"]
    assert ranges
    assert None not in ranges
    assert hub.sent["storage"] < sum(path.stat().st_size for path in files)


def test_what_has_no_headers_is_not_guessed(base: Path, tmp_path: Path, hub: HubServer) -> None:  # noqa: F811
    hub.add("org/base", "config.json", (base / "config.json").read_bytes(), lfs=False)
    hub.add("org/base", "pytorch_model.bin", b"pickled")
    assert read_size("org/base").weights is None
    shutil.copytree(base, tmp_path / "base")
    (tmp_path / "base/model.safetensors").write_bytes(b"damaged")
    assert read_size(str(tmp_path / "base")).weights is None
    with pytest.raises(HubError, match="org/none"):
        read_size("org/none")


def test_room(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 << 20 < free_memory() < 1 << 50
    assert free_on(torch.device("mps")) == math.inf
    monkeypatch.setattr(base_size, "free_memory", lambda: 5_000_000_000)
    check_room(5_000_000_000, torch.device("cpu"), "it takes")
    with pytest.raises(MtpExtractError, match=r"on cpu: it takes about 5\.1 GB, 5\.0 GB are free") as found:
        check_room(5_100_000_000, torch.device("cpu"), "it takes", ("batch",))
    assert found.value.remedies == ("batch",)


@pytest.mark.skipif(
    sys.platform == "win32" or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library keeps what is free"
)
def test_what_is_free_in_the_heap_is_given_back() -> None:
    """64 MB in small pieces below one that stays."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.free.argtypes = (ctypes.c_void_p,)
    pieces = [libc.malloc(4000) for _ in range(16_000)]
    for piece in pieces:
        ctypes.memset(piece, 1, 4000)
    for piece in pieces[:-1]:
        libc.free(piece)
    before = _resident()
    give_back()
    assert before - _resident() > 32_000_000
    libc.free(pieces[-1])


def _resident() -> int:
    """Bytes of this process that are no pages of files."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) * 1024
