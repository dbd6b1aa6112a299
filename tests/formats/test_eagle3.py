"""EAGLE-3 heads in the two layouts of their trainers: names as engines ask for them, strict reading, conversion."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.random_heads import LAYOUTS, asked_for, edit, head_config, random_head, write_head
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from seam import verify

from mtp_extract import convert
from mtp_extract.checkpoint.dtypes import DTYPES
from mtp_extract.drafter.load import load_any_drafter, load_drafter
from mtp_extract.errors import CheckpointError, UnsupportedError
from mtp_extract.formats import detect_format, read_checkpoint

IDS = "eagle_aux_hidden_state_layer_ids"
WHOLE = {"own_embedding": True, "draft_vocab_size": 40}


def test_what_is_said_of_a_head_that_was_converted(tmp_path: Path) -> None:
    source = write_head(tmp_path / "head", random_head(head_config(fc_norm=True, norm_output=True, base="org/base")))
    convert(source, tmp_path / "other", format="speculators", dtype="f32")
    assert len(verify(tmp_path / "other")["files"]) == 3
    card = (tmp_path / "other" / "README.md").read_text()
    assert "EAGLE-3" in card and "MTP" not in card and "multi-token" not in card
    assert "llama-server" not in card
    assert 'base_model: ["org/base"]' in card and "vllm serve org/base" in card


@settings(max_examples=12, deadline=None)
@given(
    flags=st.fixed_dictionaries({name: st.booleans() for name in ("fc_norm", "norm_before_fc", "norm_output")}),
    full=st.booleans(),
    own=st.booleans(),
    dtype=st.sampled_from(["f32", "bf16", "f16"]),
    layers=st.lists(st.integers(0, 40), min_size=3, max_size=3, unique=True).map(sorted),
)
def test_there_and_back_is_the_same_to_the_byte(
    flags: dict[str, bool], full: bool, own: bool, dtype: str, layers: list[int]
) -> None:
    """With any flags that both layouts can hold, tensors have the names that engines ask for, and converting forth and
    back gives the same files and the same head."""
    more = {"own_embedding": True, "backbone_hidden_size": 48} if own else {}
    config = head_config(**flags, **more, draft_vocab_size=40 if full else 24, base_layers=tuple(layers), base="o/b")
    head = random_head(config)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        place = write_head(folder / "theirs", head)
        marks = torch.zeros(40, dtype=torch.bool).index_fill(0, head.targets, True)
        for step, layout in enumerate(("eagle3", "speculators", "eagle3", "speculators")):
            convert(place, folder / str(step), format=layout, dtype=dtype)
            place = folder / str(step)
            tensors = load_file(place / "model.safetensors")
            assert ("t2d" in tensors) == config.reduced and (tensors.pop("t2d", marks) == marks).all()
            assert {key: tuple(tensor.shape) for key, tensor in tensors.items()} == asked_for(config, layout)
        for before, after in (("0", "2"), ("1", "3")):
            for file in ("config.json", "model.safetensors"):
                assert (folder / before / file).read_bytes() == (folder / after / file).read_bytes()
        assert read_checkpoint(place).config == replace(config, max_position_embeddings=131072)
        assert not any(finding.is_error for finding in read_checkpoint(place).findings)
        loaded = load_any_drafter(place, dtype=torch.float32).state_dict()
        kind = getattr(torch, DTYPES[dtype].transformers)
        for key, tensor in head.state_dict().items():
            assert torch.equal(loaded[key], tensor.to(kind).float() if tensor.is_floating_point() else tensor), key


def test_a_head_of_several_types(tmp_path: Path) -> None:
    """A head with F32 and F16 weights is loaded as F32, without loss."""
    head = random_head(head_config())
    directory = write_head(tmp_path / "head", head)
    tensors = load_file(directory / "model.safetensors")
    halved = {name: tensor.half() if tensor.ndim == 2 else tensor for name, tensor in tensors.items()}
    save_file(halved, directory / "model.safetensors")
    assert read_checkpoint(directory).dtype == "f32"
    loaded = load_any_drafter(directory, dtype=torch.float32).state_dict()
    for name, tensor in head.state_dict().items():
        assert torch.equal(loaded[name], tensor.half().float() if tensor.ndim == 2 else tensor), name
    assert not read_checkpoint(directory).findings


def test_layers_are_written_as_each_engine_counts(tmp_path: Path) -> None:
    """vLLM sorts and takes ids at the top level as they are; SGLang adds 1 to those of eagle_config."""
    write_head(tmp_path / "head", random_head(head_config(base_layers=(0, 2, 5))))
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config[IDS] == [0, 2, 5] and [i + 1 for i in config["eagle_config"][IDS]] == [0, 2, 5]


def test_transformers_reads_the_same_llama(tmp_path: Path) -> None:
    """Both engines read the configuration through transformers' LlamaConfig."""
    write_head(tmp_path / "head", random_head(head_config(rope_theta=5e5)))
    config = transformers.AutoConfig.from_pretrained(tmp_path / "head")
    assert isinstance(config, transformers.LlamaConfig)
    assert config.rope_parameters["rope_theta"] == 5e5 and config.rope_parameters["rope_type"] == "default"
    assert (config.head_dim, config.num_key_value_heads, config.hidden_act) == (8, 2, "silu")
    assert (config.draft_vocab_size, config.target_hidden_size, config.tie_word_embeddings) == (24, 32, False)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {IDS: ...},
        {"eagle_config": ...},
        {"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ],
)
def test_other_ways_to_say_it(tmp_path: Path, changes: dict[str, Any]) -> None:
    """The optional t2d is left out, too."""
    directory = edit(write_head(tmp_path / "head", random_head(head_config()), marks=False), **changes)
    assert read_checkpoint(directory).config == head_config(max_position_embeddings=131072)


@pytest.mark.parametrize("path", ["/home/somebody/base", "./somebody", "~/somebody", "C:\\\\somebody"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_path_of_whoever_trained_is_handed_on(tmp_path: Path, layout: str, path: str) -> None:
    directory = write_head(tmp_path / "head", random_head(head_config(base=path)), layout)
    assert "somebody" in (directory / "config.json").read_text()
    for to in LAYOUTS:
        convert(directory, tmp_path / to, format=to)
        for name in ("config.json", "extraction.json", "README.md"):
            assert "somebody" not in (tmp_path / to / name).read_text()


def test_zeros_for_the_whole_vocabulary(tmp_path: Path) -> None:
    """SpecForge writes a d2t of zeros, vLLM refuses it: it is read, and not written again."""
    directory = write_head(tmp_path / "head", random_head(head_config(draft_vocab_size=40)))
    tensors = load_file(directory / "model.safetensors")
    save_file(tensors | {"d2t": torch.zeros(40, dtype=torch.int64)}, directory / "model.safetensors")
    convert(directory, tmp_path / "out", format="eagle3")
    assert "d2t" not in load_file(tmp_path / "out" / "model.safetensors")
    assert not read_checkpoint(tmp_path / "out").findings


def _edit_tensor(name: str, make: Callable[[dict[str, torch.Tensor]], torch.Tensor | None]) -> Callable[[Path], object]:
    def change(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        tensor = make(tensors)
        tensors.pop(name, None)
        save_file(tensors | ({name: tensor} if tensor is not None else {}), directory / "model.safetensors")

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: edit(d, model_type="gemma4"), "model_type"),
        (lambda d: edit(d, rope_theta=...), "expected rope_theta"),
        (lambda d: edit(d, rope_parameters={"full_attention": {"rope_theta": 1e6}}), "unknown field `full_attention`"),
        (lambda d: edit(d, rope_parameters={"rope_type": "default", "rope_theta": 1e4}), "says rope_theta 1000000"),
        (lambda d: edit(d, **{IDS: ..., "eagle_config": ...}), "engines take 2, n // 2 and n − 3"),
        (lambda d: edit(d, **{IDS: [0, 2, 4]}), "says eagle_config.eagle_aux_hidden_state_layer_ids"),
        (lambda d: edit(d, eagle_config={"use_aux_hidden_state": False}), "says eagle_config.use_aux_hidden_state"),
        (lambda d: edit(d, draft_vocab_size=23), r"d2t: expected shape \[23\], found \[24\]"),
        (lambda d: edit(d, target_hidden_size=31), "beside a base of 31"),
        (_edit_tensor("d2t", lambda t: t["d2t"] + torch.arange(24)), "expected differences"),
        (
            _edit_tensor("d2t", lambda t: t["d2t"].index_fill(0, torch.tensor([1]), int(t["d2t"][0]) - 1)),
            "distinct tokens",
        ),
        (_edit_tensor("d2t", lambda t: None), "d2t: expected a tensor"),
        (_edit_tensor("t2d", lambda t: ~t["t2d"]), "t2d: expected the tokens that d2t names"),
        (_edit_tensor("extra.weight", lambda t: torch.ones(3)), "extra.weight: expected no such tensor"),
        (_edit_tensor("fc.weight", lambda t: t["fc.weight"].char()), "fc.weight: expected F32, BF16 or F16"),
        (_edit_tensor("fc.weight", lambda t: t["fc.weight"] * math.inf), "fc.weight: expected finite numbers"),
        (_edit_tensor("d2t", lambda t: torch.full((24,), torch.iinfo(torch.int64).max)), "expected differences"),
        (lambda d: edit(d, **{IDS: [5, 3, 1], "eagle_config": ...}), "the lowest first"),
        (lambda d: edit(d, **{IDS: [1, 3, True], "eagle_config": ...}), "got `bool`"),
        (lambda d: (d / "model.safetensors").unlink(), "head: expected model.safetensors there, or its parts"),
    ],
)
def test_what_is_refused(tmp_path: Path, change: Callable[[Path], object], message: str) -> None:
    directory = write_head(tmp_path / "head", random_head(head_config()))
    change(directory)
    with pytest.raises(CheckpointError, match=message):
        convert(directory, tmp_path / "out", format="speculators")
    assert not (tmp_path / "out").exists()


LLAMA = "transformer_layer_config"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_before_residual": ...}, "norm_before_residual"),
        ({"speculators_model_type": "dflash"}, "speculators_model_type"),
        ({IDS: ...}, IDS),
        ({LLAMA: ...}, LLAMA),
        ({LLAMA: {"model_type": "qwen3"}}, "model_type"),
        # A Llama configuration without its RoPE has 10000 in engines, whatever stands at the top level.
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, LLAMA: "rope_theta"}, "expected rope_theta"),
    ],
)
def test_what_is_refused_of_speculators(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """A string instead of a Llama configuration names the key to remove from it."""
    directory = write_head(tmp_path / "head", random_head(head_config()), "speculators")
    inside = json.loads((directory / "config.json").read_text())[LLAMA]
    if isinstance(key := changes.get(LLAMA), str):
        changes = {**changes, LLAMA: {name: value for name, value in inside.items() if name != key}}
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(edit(directory, **changes))


@pytest.mark.parametrize(
    ("layout", "flags", "changes", "expected"),
    [
        ("eagle3", {}, {}, []),
        ("speculators", WHOLE, {}, []),
        ("eagle3", {}, {IDS: ...}, [("vLLM", "not at the top level"), ("llama.cpp", "not at the top level")]),
        ("eagle3", {}, {"eagle_config": ...}, [("SGLang", "missing in eagle_config")]),
        ("eagle3", {}, {"norm_before_residual": True}, [("SGLang", "norm_before_residual")]),
        ("eagle3", {"norm_output": True}, {}, [("llama.cpp", "before the norm")]),
        ("eagle3", {"draft_vocab_size": 40}, {"draft_vocab_size": None}, [("SGLang", "LM head")]),
        ("eagle3", {"own_embedding": True, "hidden_size": 96}, {}, [("SGLang", "leaves fc out")]),
        ("eagle3", {"own_embedding": True}, {}, [("SGLang", "takes the base's embeddings")]),
        ("speculators", WHOLE | {"norm_before_residual": True}, {}, []),
        ("speculators", WHOLE | {"base_layers": (0, 2, 5)}, {}, [("mlx-vlm", "output of layer 0")]),
        ("speculators", {"own_embedding": True}, {}, [("mlx-vlm", "the text changes")]),
        ("speculators", WHOLE | {"norm_output": True}, {}, [("llama.cpp", "before"), ("mlx-vlm", "before")]),
    ],
)
def test_what_engines_make_of_it(
    tmp_path: Path, layout: str, flags: dict[str, Any], changes: dict[str, Any], expected: list[tuple[str, str]]
) -> None:
    """A misreading by the layout's own engines is an error, by others a note."""
    directory = edit(write_head(tmp_path / "head", random_head(head_config(**flags)), layout), **changes)
    findings = read_checkpoint(directory).findings
    assert [finding.engine.split(" 0")[0] for finding in findings] == [engine for engine, _ in expected]
    for finding, (engine, reason) in zip(findings, expected, strict=True):
        assert reason in finding.what
        assert finding.is_error == (engine in ("vLLM", "SGLang"))


def test_what_the_other_layout_cannot_hold(tmp_path: Path) -> None:
    """SGLang would silently begin the residual before the norm."""
    directory = write_head(tmp_path / "head", random_head(head_config(norm_before_residual=True)), "speculators")
    with pytest.raises(UnsupportedError, match=r"eagle3 layout cannot hold this head: SGLang.*norm_before_residual"):
        convert(directory, tmp_path / "out", format="eagle3")
    assert not (tmp_path / "out").exists()
    convert(directory, tmp_path / "out", format="speculators")


def test_drafters_of_the_other_architecture(tmp_path: Path, extracted: Path) -> None:
    directory = write_head(tmp_path / "head", random_head(head_config()))
    for source, name in ((extracted, "eagle3"), (directory, "transformers"), (directory, "gguf")):
        with pytest.raises(UnsupportedError, match="format holds drafters of the architecture"):
            convert(source, tmp_path / "out", format=name)
    with pytest.raises(UnsupportedError, match="Expected an MTP drafter, found an EAGLE-3 head"):
        load_drafter(directory)
    assert detect_format(extracted).name == "transformers" and detect_format(directory).name == "eagle3"
