"""The way back: what was extracted gives the same bundle, what was changed is in the new one, and nothing else is."""

from __future__ import annotations

import filecmp
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
from helpers.blocks import blockwise_int2
from helpers.make_bundle import DRAFTER, bundle, drafter_of, load, pack, parts_of, set_buffer
from helpers.variant_files import REFUSED, STORED, VARIANTS, variant
from safetensors.numpy import load_file, save_file

from mtp_extract import convert, extract
from mtp_extract.architecture.roles import MATRIX, roles_of
from mtp_extract.bundle import open_bundle
from mtp_extract.checkpoint.codes import CODES_FILE
from mtp_extract.errors import CheckpointError, NoDrafterError, PairError, UnsupportedError
from mtp_extract.formats import FORMATS
from mtp_extract.insertion.plan import InsertionPlan, InsertionResult
from mtp_extract.insertion.run import planned_insertion
from mtp_extract.litertlm.tflite import TensorType
from mtp_extract.pipeline.extraction import checkpoint_of

# Tests of one variant share its checkpoint, and so a process.
NAMES = sorted(set(VARIANTS) - REFUSED)
MADE = [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in NAMES]
CODED = ("torch_blockwise32", "torch_folded_softcap", "torch_asymmetric", "torch_int2")
EXACT = {"dtype": "f32", "codes": True}
HEAD = "model.embed_tokens.weight"
NORM = "model.layers.0.input_layernorm.weight"


def insert(source: Path, into: Path, out: Path, **options: Any) -> tuple[InsertionPlan, InsertionResult]:
    with planned_insertion(source, into, **options) as plan:
        return plan, plan.write(out)


def floats_of(path: Path) -> dict[str, np.ndarray]:
    """Role → what the drafter at ``path`` holds."""
    with open_bundle(path) as opened:
        return {role: tensor.array() for role, tensor in checkpoint_of(opened.drafter()).tensors.items()}


def hows(plan: InsertionPlan) -> set[str]:
    return {encoding.how for own in plan.encodings.values() for encoding in own}


@pytest.mark.parametrize("options", [EXACT, {"dtype": "bf16"}, {"dtype": "f16"}], ids=["f32+codes", "bf16", "f16"])
def test_an_untouched_checkpoint_gives_the_same_bundle(sample: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    source = extract(sample, tmp_path / "out", **options).directory
    plan, result = insert(source, sample, tmp_path / "new.litertlm")
    assert filecmp.cmp(sample, tmp_path / "new.litertlm", shallow=False)
    assert hows(plan) == {"kept"}
    assert result.proof is not None and result.proof["positions"]


@pytest.mark.parametrize("layout", [name for name, listed in FORMATS.items() if "codes" in listed.dtypes])
@pytest.mark.parametrize("name", [made for made in MADE if made.values[0] in CODED])
def test_integers_come_back_from_every_format(
    name: str, layout: str, own: Callable[[str], Path], tmp_path: Path
) -> None:
    """Scales that GGUF rounds to FP16 are those of the file, and so are those with a folded factor divided out."""
    source = convert(own(name), tmp_path / "out", format=layout).directory
    insert(source, variant(name), tmp_path / "new.tflite")
    assert filecmp.cmp(variant(name), tmp_path / "new.tflite", shallow=False)


def test_codes_beside_floats_are_taken(sample: Path, tmp_path: Path) -> None:
    """One code is another, as training on the grid leaves it; BF16 floats alone could not say which."""
    source = extract(sample, tmp_path / "out", dtype="bf16", codes=True).directory
    codes, floats = source / CODES_FILE, source / "model.safetensors"
    tensors, weights = load_file(codes), safetensors.torch.load_file(floats)
    tensors[f"{HEAD}.codes"][3, 5] = 3 if tensors[f"{HEAD}.codes"][3, 5] != 3 else 2
    changed = int(tensors[f"{HEAD}.codes"][3, 5])
    weights[HEAD][3, 5] = changed * float(tensors[f"{HEAD}.scale"].reshape(-1)[3])
    with safetensors.safe_open(codes, "np") as opened:
        save_file(tensors, codes, opened.metadata())
    safetensors.torch.save_file(weights, floats, {"format": "pt"})
    (source / "extraction.json").unlink()  # which is of the codes before
    plan, _ = insert(source, sample, tmp_path / "new.litertlm")
    assert plan.encodings["lm_head"][0].how == "codes"
    assert {role for role, (decision,) in plan.encodings.items() if decision.how != "kept"} == {"lm_head"}
    with open_bundle(sample) as old, open_bundle(tmp_path / "new.litertlm") as new:
        before, after = (checkpoint_of(o.drafter()).tensors["lm_head"].codes() for o in (old, new))
    assert np.argwhere(before != after).tolist() == [[3, 5]]
    assert after[3, 5] == changed


ROUNDED = [*((made, "f32") for made in NAMES), *((made, "bf16") for made in STORED)]


@pytest.mark.parametrize(
    ("name", "dtype"), [pytest.param(*both, marks=pytest.mark.xdist_group(both[0])) for both in ROUNDED]
)
def test_an_untouched_variant(name: str, dtype: str, own: Callable[[str], Path], tmp_path: Path) -> None:
    source = own(name)
    if dtype == "bf16":
        source = convert(source, tmp_path / "out", format="transformers", dtype=dtype).directory
    plan, _ = insert(source, variant(name), tmp_path / "new.tflite")
    assert hows(plan) == {"kept"}
    assert filecmp.cmp(variant(name), tmp_path / "new.tflite", shallow=False)


@pytest.mark.parametrize("name", MADE)
def test_a_changed_variant(name: str, own: Callable[[str], Path], changed: Callable[..., Path], tmp_path: Path) -> None:
    """Every matrix and every vector of it is another; the file holds them as well as its types can."""
    rng = np.random.default_rng(1)
    weights = load_file(own(name) / "model.safetensors")
    folded = any(word in name for word in ("unit", "noscalar", "april"))
    shared: dict[bytes, np.ndarray] = {}
    for key, tensor in weights.items():
        if tensor.ndim == 1 and folded:
            continue
        # Roles that share a constant stay equal, and so do the numbers of a vector that the file stores as one.
        factors = rng.uniform(0.9, 1.1, tensor.shape if np.ptp(tensor) else 1)
        weights[key] = shared.setdefault(tensor.tobytes(), (tensor * factors).astype(np.float32))
    plan, _ = insert(changed(weights, source=own(name)), variant(name), tmp_path / "new.tflite")
    assert "requantized" in hows(plan)
    assert (tmp_path / "new.tflite").stat().st_size == variant(name).stat().st_size
    worst = {"INT8": 0.02, "INT4": 0.2, "INT2": 0.9, "UINT8": 0.02, "FLOAT32": 0.0, "FLOAT16": 1e-3}
    for encoding in (encoding for own in plan.encodings.values() for encoding in own):
        assert encoding.error <= worst[encoding.storage.type.name], encoding.slot.role
    written = floats_of(tmp_path / "new.tflite")
    names = {role.name: role.names["transformers"] for role in roles_of(len(weights)) if role.kind != MATRIX}
    vectors = [] if folded else [role for role in written if role in names]
    assert folded or len(vectors) > 10
    assert all(np.array_equal(written[role], weights[names[role]]) for role in vectors)


def test_nothing_but_the_drafter_changes(sample: Path, noisy: Path, tmp_path: Path) -> None:
    """And it changes as it does in a model by itself."""
    out, bare = tmp_path / "new.litertlm", tmp_path / "drafter.tflite"
    insert(noisy, sample, out)
    old, new = parts_of(sample), parts_of(out)
    assert [(p.data_type, p.items) for p in old] == [(p.data_type, p.items) for p in new]
    assert [i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a.data != b.data] == [len(old) - 1]
    before, after = (load(parts[-1].data).subgraphs[0].tensors for parts in (old, new))
    assert [tensor.type for tensor in before] == [tensor.type for tensor in after]
    bare.write_bytes(drafter_of(sample))
    plan, _ = insert(noisy, bare, tmp_path / "new.tflite")
    assert "requantized" in hows(plan)
    assert (tmp_path / "new.tflite").read_bytes() == drafter_of(out)
    assert new[-1].items.items() >= DRAFTER.items()


def test_codes_go_in_as_they_are(sample: Path, extracted: Path, tmp_path: Path) -> None:
    """Codes of INT4 in a bundle that has INT8 there: the same codes and scales, and no error."""
    *others, last = parts_of(sample)
    model, wide = load(last.data), tmp_path / "wide.litertlm"
    for tensor in model.subgraphs[0].tensors:
        if tensor.type == TensorType.INT4:
            set_buffer(model, tensor, bytes(np.prod(tensor.shape)))
            tensor.type = TensorType.INT8
    wide.write_bytes(bundle([*others, replace(last, data=pack(model))]))
    plan, _ = insert(extracted, wide, tmp_path / "new.litertlm")
    assert hows(plan) == {"kept", "codes"}
    mine, theirs = floats_of(tmp_path / "new.litertlm"), floats_of(sample)
    assert all(np.array_equal(mine[role], theirs[role]) for role in theirs)


def one_tensor(model: Any, first: int, second: int) -> bytes:
    graph = model.subgraphs[0]
    for op in graph.operators:
        op.inputs = [first if index == second else index for index in op.inputs]
    # Nothing reads it any more: what is left of it is no constant.
    graph.tensors[second].buffer = 0
    return pack(model)


def overlapping(model: Any, first: int, second: int) -> bytes:
    """The second begins inside of the first, as no converter has it."""
    tensors, packed = model.subgraphs[0].tensors, bytes(1 << 20)
    elements = int(np.prod(tensors[first].shape))
    for _ in range(2):
        for i, index in enumerate((first, second)):
            buffer = model.buffers[tensors[index].buffer]
            buffer.data, buffer.offset, buffer.size = None, len(packed) + 16 * i, 4 * elements
        packed = pack(model)
    return packed + np.linspace(1, 2, elements + 4, dtype=np.float32).tobytes()


@pytest.mark.parametrize(("share", "apart"), [(one_tensor, 0), (overlapping, 4)])
def test_shared_constants_are_not_taken_apart(
    share: Callable[[Any, int, int], bytes], apart: int, sample: Path, exact: Path, noisy: Path, tmp_path: Path
) -> None:
    """The q norms of layers 0 and 1 have numbers in common: they stay, or the insertion is refused."""
    *others, last = parts_of(sample)
    with open_bundle(sample) as opened:
        roles = {role.role: role.tensor for role in opened.drafter().walk.roles}
    merged = tmp_path / "merged.litertlm"
    data = share(load(last.data), *(roles[f"layers.{i}.q_norm"].index for i in (0, 1)))
    merged.write_bytes(bundle([*others, replace(last, data=data)]))
    first, second = (floats_of(merged)[f"layers.{i}.q_norm"] for i in (0, 1))
    assert np.array_equal(first[apart:], second[: second.size - apart])

    source = extract(merged, tmp_path / "same", dtype="f32" if apart else "bf16").directory
    insert(source, merged, tmp_path / "same.litertlm")
    assert filecmp.cmp(merged, tmp_path / "same.litertlm", shallow=False)

    for checkpoint in (exact, noisy):
        with pytest.raises(UnsupportedError, match=r"q_norm: the file stores layers\.[01]\.q_norm in the same bytes"):
            insert(checkpoint, merged, tmp_path / "new.litertlm")
    assert not (tmp_path / "new.litertlm").exists()


def test_a_drafter_taken_out_and_added_again(sample: Path, exact: Path, noisy: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare.litertlm"
    bare.write_bytes(bundle(parts_of(sample)[:-1]))
    plan, _ = insert(sample, bare, tmp_path / "again.litertlm")
    assert plan.added
    assert parts_of(tmp_path / "again.litertlm") == parts_of(sample)
    plan, _ = insert(noisy, bare, tmp_path / "noisy.litertlm", graph_from=sample)
    assert plan.added
    np.testing.assert_array_equal(
        floats_of(tmp_path / "noisy.litertlm")["final_norm"],
        load_file(noisy / "model.safetensors")["model.norm.weight"],
    )
    gguf = convert(exact, tmp_path / "gguf", format="gguf").directory
    for source in (exact, next(gguf.glob("*.gguf"))):
        with pytest.raises(NoDrafterError, match="no section holds an MTP drafter") as raised:
            insert(source, bare, tmp_path / "none.litertlm")
        assert raised.value.remedies == ("graph_from",)


@pytest.mark.parametrize(
    ("signature", "name", "shape", "said"),
    [
        ("verify", "activations", None, "no signatures decode and verify that both have an output 'activations'"),
        ("decode", "kv_cache_k_3", None, "kv_cache_k_3 is missing in the base and FLOAT32 [1, 2, 256, 64]"),
        ("decode", "kv_cache_k_3", [1, 2, 64, 64], "kv_cache_k_3 is FLOAT32 [1, 2, 64, 64] in the base and FLOAT32"),
        ("decode", "activations", [1, 1, 96], "activations is 96 wide in the base and 64 wide in the drafter"),
    ],
)
def test_a_base_that_the_runtime_would_fail_with(
    signature: str, name: str, shape: list[int] | None, said: str, sample: Path, tmp_path: Path
) -> None:
    """An output is missing, or has another shape: that is the only reason that is given.

    Where the bundle has a drafter already, that it did not fit is said, and not what a runtime made of it.
    """
    *others, last, drafter = parts_of(sample)
    model = load(last.data)
    own = next(one for one in model.signatureDefs if one.signatureKey == signature.encode())
    output = next(one for one in own.outputs if one.name == name.encode())
    if shape is None:
        own.outputs.remove(output)
    else:
        model.subgraphs[own.subgraphIndex].tensors[output.tensorIndex].shape = shape
    base = tmp_path / "base.litertlm"
    parts = [*others, replace(last, data=pack(model))]
    base.write_bytes(bundle([*parts, drafter]))
    with planned_insertion(sample, base) as planned:
        (note,) = planned.notes
    assert note.startswith("In this bundle drafter and base did not fit before, and do not now: ") and said in note
    base.write_bytes(bundle(parts))
    with pytest.raises(PairError, match=re.escape(said)) as raised:
        insert(sample, base, tmp_path / "new.litertlm")
    assert ";" not in str(raised.value)
    assert not (tmp_path / "new.litertlm").exists()


def test_what_was_folded_away_cannot_change(
    own: Callable[[str], Path], changed: Callable[..., Path], tmp_path: Path
) -> None:
    """Layer scalars of 1 and norms of ones have no constant: they stay so, or the insertion is refused by name."""
    into = variant("jax_published_noscalar")
    source = changed({"model.layers.1.layer_scalar": np.array([0.5])}, source=own(into.stem))
    with pytest.raises(UnsupportedError, match=r"layers\.1\.layer_scalar: the graph multiplies by nothing"):
        insert(source, into, tmp_path / "new.tflite")
    assert not (tmp_path / "new.tflite").exists()


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("rms_norm_eps", 1e-5, "rms_norm_eps 1e-06 instead of 1e-05"),
        ("vocab_size", 504, "vocab_size 512 instead of 504"),
    ],
)
def test_another_geometry(key: str, value: float, said: str, sample: Path, changed: Callable[..., Path]) -> None:
    source = changed({HEAD: lambda head: head[:504]} if key == "vocab_size" else {})
    config = json.loads((source / "config.json").read_text())
    (config if key in config else config["text_config"])[key] = value
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(PairError, match=said), planned_insertion(source, sample):
        pass


def test_a_soft_cap_that_the_checkpoint_has_not(sample: Path, changed: Callable[..., Path]) -> None:
    """Google's own assistants say none: the graph's stays, and a note says so."""
    source = changed({})
    config = source / "config.json"
    config.write_text(config.read_text().replace('"final_logit_softcapping": 30.0', '"final_logit_softcapping": null'))
    with planned_insertion(source, sample) as plan:
        assert any("soft cap (30.0) stays" in note for note in plan.notes)
        assert hows(plan) == {"kept"}


def test_a_section_without_a_drafter_gets_none(sample: Path) -> None:
    with pytest.raises(NoDrafterError) as raised, planned_insertion(sample, sample, section=0):
        pass
    assert "graph_from" not in raised.value.remedies


@pytest.mark.parametrize(("name", "value"), [(NORM, np.nan), (HEAD, np.inf), (HEAD, 3e38)])
def test_values_that_cannot_be_stored_are_refused_in_the_plan(
    name: str, value: float, sample: Path, changed: Callable[..., Path]
) -> None:
    def spoil(tensor: np.ndarray) -> np.ndarray:
        tensor.flat[3] = value
        return tensor

    with (
        pytest.raises(CheckpointError, match="or train it again"),
        planned_insertion(changed({name: spoil}), sample),
    ):
        pass


@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("name", FORMATS)
def test_int2_in_blocks_goes_back_as_it_was(tmp_path: Path, name: str, block: int) -> None:
    """A row of 256 in blocks of 128 has as many scales in all as columns: they were taken for those of columns."""
    path = tmp_path / "blocks.tflite"
    path.write_bytes(blockwise_int2(block, zeros=True))
    try:
        extract(path, tmp_path / "d", format=name, codes=True)
    except UnsupportedError as error:
        assert name == "gemma" and block < 128, error
        return
    with planned_insertion(tmp_path / "d", path) as plan:
        plan.write(tmp_path / "again.tflite")
    assert (tmp_path / "again.tflite").read_bytes() == path.read_bytes()
