"""What may be wrong with a base, and what the user is told."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.hub_fixtures import hub, no_secrets  # noqa: F401 - fixtures
from helpers.hub_server import Content, HubServer
from safetensors.torch import load_file, save_file

from mtp_extract.errors import MtpExtractError, PairError, SourceError
from mtp_extract.evaluation import base_model
from mtp_extract.evaluation.base_model import free_memory, guard_memory, load_base


@pytest.fixture
def base_copy(base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(base, tmp_path / "base"))


def test_loads_the_sample(base: Path) -> None:
    loaded = load_base(str(base), "cpu")
    assert (loaded.dtype, loaded.devices, loaded.drafter_dtype) == ("float32", ("cpu",), torch.float32)
    # A training would make gradients of its embeddings, which are larger than a drafter.
    assert not [name for name, parameter in loaded.model.named_parameters() if parameter.requires_grad]


def test_float16_is_not_computed_in(base_copy: Path) -> None:
    config = json.loads((base_copy / "config.json").read_text())
    config["dtype"] = config["text_config"]["dtype"] = "float16"
    (base_copy / "config.json").write_text(json.dumps(config))
    loaded = load_base(str(base_copy), "cpu")
    assert (loaded.dtype, loaded.drafter_dtype) == ("bfloat16", torch.bfloat16)
    assert "loaded as bfloat16" in loaded.notes[0]


def spoil_file(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    """Other weights."""

    def plant(directory: Path) -> None:
        change(tensors := load_file(directory / "model.safetensors"))
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

    return plant


def change_config(key: str, value: object) -> Callable[[Path], object]:
    def plant(directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        config["text_config"][key] = value
        (directory / "config.json").write_text(json.dumps(config))

    return plant


NORM = "model.language_model.layers.1.input_layernorm.weight"
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (shutil.rmtree, r"found: .*config\.json.* Hub id such as"),
    "no tokenizer": (
        lambda d: [path.unlink() for path in d.glob("tokenizer*")],
        "with its tokenizer, found: .*tokenizer",
    ),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), r"found: .*model\.safetensors"),
    "a tensor missing": (
        spoil_file(lambda t: t.pop(NORM)),
        r"found: tensors that are missing or of .*: model\.\S*layers\.1\.input_layernorm\.weight\. Give",
    ),
    "mis-shaped": (spoil_file(lambda t: t.update({NORM: t[NORM][:5].clone()})), "of another shape"),
    **{
        f"{size} bytes": (lambda d, size=size: os.truncate(d / "model.safetensors", size), "found: ")  # type: ignore[misc]
        for size in (0, 7, 5000)
    },
    "layers": (change_config("num_hidden_layers", 10**9), "found: 1000000000 layers"),
    "vocabulary": (change_config("vocab_size", 0), "found: "),
    "width": (change_config("hidden_size", "64"), "found: "),
    "head dim": (change_config("head_dim", [1]), "found: "),
}


@pytest.mark.parametrize(("plant", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_not_whole(base_copy: Path, plant: Callable[[Path], object], message: str) -> None:
    plant(base_copy)
    with pytest.raises(PairError, match=f"base: expected a Gemma 4 base model .*{message}") as caught:
        load_base(str(base_copy), "cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("device", ["meta", "cuda:99"])
def test_no_such_device(base: Path, device: str) -> None:
    with pytest.raises(MtpExtractError, match=f"expected a device of this machine .*, found {device}. Use another"):
        load_base(str(base), device)


def test_what_is_free() -> None:
    assert 1 << 20 < free_memory(torch.device("cpu")) < 1 << 50
    assert (free_memory(None) > 0) == torch.cuda.is_available()


def test_the_size_is_that_of_the_weights(
    base: Path,
    tmp_path: Path,
    hub: HubServer,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the files in a directory, or of their listing on the Hub, where nothing but that was fetched."""
    shutil.copy(base / "config.json", tmp_path)
    for name, size in (("model.safetensors", 2_000_000_000), ("other.safetensors", 9_000_000_000)):
        with open(tmp_path / name, "wb") as file:
            file.truncate(size)
        hub.add("org/base", name, Content.of_file(tmp_path / name, "0" * 64), lfs=True)
    hub.add("org/base", "config.json", Content.of((base / "config.json").read_bytes()))
    monkeypatch.setattr(base_model, "free_memory", lambda device: 1_150_000_000)
    with pytest.raises(MtpExtractError, match=r"too little memory on cpu: the base has 2\.0 GB of weights") as found:
        load_base(str(tmp_path), "cpu")
    assert found.value.remedies == ("device",)
    with pytest.raises(SourceError, match=r"org/base@main: expected at most 1\.0 GB .*memory has\), found 11\.0 GB"):
        load_base("org/base@main", "cpu")
    assert not [request for request in hub.requests if request.server == "storage"]
    with pytest.raises(SourceError, match="org/none"):
        load_base("org/none", "cpu")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 1 bytes"),
    ],
)
def test_running_out_of_memory(error: Exception) -> None:
    with pytest.raises(MtpExtractError, match="too little memory while thinking"), guard_memory("thinking"):
        raise error


def test_other_errors_are_not_hidden() -> None:
    with pytest.raises(RuntimeError, match="shape"), guard_memory("thinking"):
        raise RuntimeError("shape")
