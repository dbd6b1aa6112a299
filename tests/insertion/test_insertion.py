"""Insertion of a drafter: an extracted checkpoint gives the same bundle; a changed one changes its weights alone."""

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
from helpers.make_bundle import DRAFTER, bundle, drafter_of, load, pack, parts_of, set_buffer
from helpers.make_drafter import blockwise_int2
from helpers.variant_files import REFUSED, STORED, VARIANTS, variant
from safetensors.numpy import load_file, save_file

from mtp_extract import convert, extract
from mtp_extract.architecture.roles import MATRIX, list_roles
from mtp_extract.bundle import open_bundle
from mtp_extract.checkpoint.codes import CODES_FILE
from mtp_extract.errors import CheckpointError, NoDrafterError, PairError, UnsupportedError
from mtp_extract.formats import MTP_FORMATS
from mtp_extract.insertion.plan import InsertionPlan, InsertionResult
from mtp_extract.insertion.run import plan_insertion
from mtp_extract.litertlm.tflite import TensorType
from mtp_extract.pipeline.extraction import build_checkpoint

# Tests of one variant run in one process, because they share its checkpoint.
NAMES = sorted(set(VARIANTS) - REFUSED)
PARAMS = [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in NAMES]
CODED = ("torch_blockwise32", "torch_folded_softcap", "torch_asymmetric", "torch_int2")
EXACT = {"dtype": "f32", "codes": True}
HEAD = "model.embed_tokens.weight"
NORM = "model.layers.0.input_layernorm.weight"


def insert(source: Path, into: Path, out: Path, **options: Any) -> tuple[InsertionPlan, InsertionResult]:
    with plan_insertion(source, into, **options) as plan:
        return plan, plan.write(out)


def read_floats(path: Path) -> dict[str, np.ndarray]:
    """Role → weight of the drafter at ``path``."""
    with open_bundle(path) as opened:
        return {role: tensor.array() for role, tensor in build_checkpoint(opened.read_drafter()).tensors.items()}


def list_encodings(plan: InsertionPlan) -> set[str]:
    return {encoding.how for of_role in plan.encodings.values() for encoding in of_role}


@pytest.mark.parametrize("options", [EXACT, {"dtype": "bf16"}, {"dtype": "f16"}], ids=["f32+codes", "bf16", "f16"])
def test_an_untouched_checkpoint_gives_the_same_bundle(sample: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    source = extract(sample, tmp_path / "out", **options).directory
    plan, result = insert(source, sample, tmp_path / "new.litertlm")
    assert filecmp.cmp(sample, tmp_path / "new.litertlm", shallow=False)
    assert list_encodings(plan) == {"kept"}
    assert result.proof is not None and result.proof["positions"]


@pytest.mark.parametrize("layout", [name for name, listed in MTP_FORMATS.items() if "codes" in listed.dtypes])
@pytest.mark.parametrize("name", [param for param in PARAMS if param.values[0] in CODED])
def test_integers_come_back_from_every_format(
    name: str, layout: str, extracted_variant: Callable[[str], Path], tmp_path: Path
) -> None:
    """Scales that GGUF rounds to FP16 are those of the file, and so are those with a folded factor divided out."""
    source = convert(extracted_variant(name), tmp_path / "out", format=layout).directory
    insert(source, variant(name), tmp_path / "new.tflite")
    assert filecmp.cmp(variant(name), tmp_path / "new.tflite", shallow=False)


def test_codes_beside_floats_are_taken(sample: Path, tmp_path: Path) -> None:
    """Training on the grid changed one code, which BF16 floats alone could not tell."""
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
        before, after = (build_checkpoint(o.read_drafter()).tensors["lm_head"].codes() for o in (old, new))
    assert np.argwhere(before != after).tolist() == [[3, 5]]
    assert after[3, 5] == changed


ROUNDED = [*((name, "f32") for name in NAMES), *((name, "bf16") for name in STORED)]


@pytest.mark.parametrize(
    ("name", "dtype"), [pytest.param(*both, marks=pytest.mark.xdist_group(both[0])) for both in ROUNDED]
)
def test_an_untouched_variant(name: str, dtype: str, extracted_variant: Callable[[str], Path], tmp_path: Path) -> None:
    source = extracted_variant(name)
    if dtype == "bf16":
        source = convert(source, tmp_path / "out", format="transformers", dtype=dtype).directory
    plan, _ = insert(source, variant(name), tmp_path / "new.tflite")
    assert list_encodings(plan) == {"kept"}
    assert filecmp.cmp(variant(name), tmp_path / "new.tflite", shallow=False)


@pytest.mark.parametrize("name", PARAMS)
def test_a_changed_variant(
    name: str, extracted_variant: Callable[[str], Path], changed: Callable[..., Path], tmp_path: Path
) -> None:
    """Every matrix and vector changes; the file holds them as precisely as its types allow."""
    rng = np.random.default_rng(1)
    weights = load_file(extracted_variant(name) / "model.safetensors")
    folded = any(word in name for word in ("unit", "noscalar", "april"))
    shared: dict[bytes, np.ndarray] = {}
    for key, tensor in weights.items():
        if tensor.ndim == 1 and folded:
            continue
        # Roles that share a constant stay equal, and so do the numbers of a vector that the file stores as one.
        factors = rng.uniform(0.9, 1.1, tensor.shape if np.ptp(tensor) else 1)
        weights[key] = shared.setdefault(tensor.tobytes(), (tensor * factors).astype(np.float32))
    plan, _ = insert(changed(weights, source=extracted_variant(name)), variant(name), tmp_path / "new.tflite")
    assert "requantized" in list_encodings(plan)
    assert (tmp_path / "new.tflite").stat().st_size == variant(name).stat().st_size
    worst = {"INT8": 0.02, "INT4": 0.2, "INT2": 0.9, "UINT8": 0.02, "FLOAT32": 0.0, "FLOAT16": 1e-3}
    for encoding in (encoding for of_role in plan.encodings.values() for encoding in of_role):
        assert encoding.error <= worst[encoding.storage.type.name], encoding.slot.role
    written = read_floats(tmp_path / "new.tflite")
    names = {role.name: role.names["transformers"] for role in list_roles(len(weights)) if role.kind != MATRIX}
    vectors = [] if folded else [role for role in written if role in names]
    assert folded or len(vectors) > 10
    assert all(np.array_equal(written[role], weights[names[role]]) for role in vectors)


def test_nothing_but_the_drafter_changes(sample: Path, noisy: Path, tmp_path: Path) -> None:
    """In a bundle the drafter changes as in a bare model."""
    out, bare = tmp_path / "new.litertlm", tmp_path / "drafter.tflite"
    insert(noisy, sample, out)
    old, new = parts_of(sample), parts_of(out)
    assert [(p.data_type, p.items) for p in old] == [(p.data_type, p.items) for p in new]
    assert [i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a.data != b.data] == [len(old) - 1]
    before, after = (load(parts[-1].data).subgraphs[0].tensors for parts in (old, new))
    assert [tensor.type for tensor in before] == [tensor.type for tensor in after]
    bare.write_bytes(drafter_of(sample))
    plan, _ = insert(noisy, bare, tmp_path / "new.tflite")
    assert "requantized" in list_encodings(plan)
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
    assert list_encodings(plan) == {"kept", "codes"}
    mine, theirs = read_floats(tmp_path / "new.litertlm"), read_floats(sample)
    assert all(np.array_equal(mine[role], theirs[role]) for role in theirs)


def merge_tensors(model: Any, first: int, second: int) -> bytes:
    graph = model.subgraphs[0]
    for op in graph.operators:
        op.inputs = [first if index == second else index for index in op.inputs]
    # Nothing reads the tensor any more, so it must not be a constant.
    graph.tensors[second].buffer = 0
    return pack(model)


def overlap_buffers(model: Any, first: int, second: int) -> bytes:
    """Let the second begin inside the first, which no converter does."""
    tensors, packed = model.subgraphs[0].tensors, bytes(1 << 20)
    elements = int(np.prod(tensors[first].shape))
    for _ in range(2):
        for i, index in enumerate((first, second)):
            buffer = model.buffers[tensors[index].buffer]
            buffer.data, buffer.offset, buffer.size = None, len(packed) + 16 * i, 4 * elements
        packed = pack(model)
    return packed + np.linspace(1, 2, elements + 4, dtype=np.float32).tobytes()


@pytest.mark.parametrize(("share", "offset"), [(merge_tensors, 0), (overlap_buffers, 4)])
def test_shared_constants_are_not_taken_apart(
    share: Callable[[Any, int, int], bytes], offset: int, sample: Path, exact: Path, noisy: Path, tmp_path: Path
) -> None:
    """The q norms of layers 0 and 1 share bytes: an insertion that changes them differently is refused."""
    *others, last = parts_of(sample)
    with open_bundle(sample) as opened:
        roles = {role.role: role.tensor for role in opened.read_drafter().structure.roles}
    merged = tmp_path / "merged.litertlm"
    data = share(load(last.data), *(roles[f"layers.{i}.q_norm"].index for i in (0, 1)))
    merged.write_bytes(bundle([*others, replace(last, data=data)]))
    first, second = (read_floats(merged)[f"layers.{i}.q_norm"] for i in (0, 1))
    assert np.array_equal(first[offset:], second[: second.size - offset])

    source = extract(merged, tmp_path / "same", dtype="f32" if offset else "bf16").directory
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
        read_floats(tmp_path / "noisy.litertlm")["final_norm"],
        load_file(noisy / "model.safetensors")["model.norm.weight"],
    )
    gguf = convert(exact, tmp_path / "gguf", format="gguf").directory
    for source in (exact, next(gguf.glob("*.gguf"))):
        with pytest.raises(NoDrafterError, match="no section holds an MTP drafter") as raised:
            insert(source, bare, tmp_path / "none.litertlm")
        assert raised.value.remedies == ("graph_from",)


@pytest.mark.parametrize(
    ("signature", "name", "shape", "message"),
    [
        ("verify", "activations", None, "no signatures decode and verify that both have an output 'activations'"),
        ("decode", "kv_cache_k_3", None, "kv_cache_k_3 is missing in the base and FLOAT32 [1, 2, 256, 64]"),
        ("decode", "kv_cache_k_3", [1, 2, 64, 64], "kv_cache_k_3 is FLOAT32 [1, 2, 64, 64] in the base and FLOAT32"),
        ("decode", "activations", [1, 1, 96], "activations is 96 wide in the base and 64 wide in the drafter"),
    ],
)
def test_a_base_that_the_runtime_would_fail_with(
    signature: str, name: str, shape: list[int] | None, message: str, sample: Path, tmp_path: Path
) -> None:
    """A missing output or another shape is the only reason given; for a bundle with a drafter it is a note."""
    *others, last, drafter = parts_of(sample)
    model = load(last.data)
    definition = next(entry for entry in model.signatureDefs if entry.signatureKey == signature.encode())
    output = next(entry for entry in definition.outputs if entry.name == name.encode())
    if shape is None:
        definition.outputs.remove(output)
    else:
        model.subgraphs[definition.subgraphIndex].tensors[output.tensorIndex].shape = shape
    base = tmp_path / "base.litertlm"
    parts = [*others, replace(last, data=pack(model))]
    base.write_bytes(bundle([*parts, drafter]))
    with plan_insertion(sample, base) as planned:
        (note,) = planned.notes
    assert note.startswith("In this bundle drafter and base did not fit before, and do not now: ") and message in note
    base.write_bytes(bundle(parts))
    with pytest.raises(PairError, match=re.escape(message)) as raised:
        insert(sample, base, tmp_path / "new.litertlm")
    assert ";" not in str(raised.value)
    assert not (tmp_path / "new.litertlm").exists()


def test_what_was_folded_away_cannot_change(
    extracted_variant: Callable[[str], Path], changed: Callable[..., Path], tmp_path: Path
) -> None:
    """Layer scalars of 1 have no constant: a change is refused by name."""
    into = variant("jax_published_noscalar")
    source = changed({"model.layers.1.layer_scalar": np.array([0.5])}, source=extracted_variant(into.stem))
    with pytest.raises(UnsupportedError, match=r"layers\.1\.layer_scalar: the graph multiplies by nothing"):
        insert(source, into, tmp_path / "new.tflite")
    assert not (tmp_path / "new.tflite").exists()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("rms_norm_eps", 1e-5, "rms_norm_eps 1e-06 instead of 1e-05"),
        ("vocab_size", 504, "vocab_size 512 instead of 504"),
    ],
)
def test_another_geometry(key: str, value: float, message: str, sample: Path, changed: Callable[..., Path]) -> None:
    source = changed({HEAD: lambda head: head[:504]} if key == "vocab_size" else {})
    config = json.loads((source / "config.json").read_text())
    (config if key in config else config["text_config"])[key] = value
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(PairError, match=message), plan_insertion(source, sample):
        pass


def test_a_soft_cap_that_the_checkpoint_has_not(sample: Path, changed: Callable[..., Path]) -> None:
    """Google's assistants state none: the graph's stays, and a note says so."""
    source = changed({})
    config = source / "config.json"
    config.write_text(config.read_text().replace('"final_logit_softcapping": 30.0', '"final_logit_softcapping": null'))
    with plan_insertion(source, sample) as plan:
        assert any("soft cap (30.0) stays" in note for note in plan.notes)
        assert list_encodings(plan) == {"kept"}


def test_a_section_without_a_drafter_gets_none(sample: Path) -> None:
    with pytest.raises(NoDrafterError) as raised, plan_insertion(sample, sample, section=0):
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
        plan_insertion(changed({name: spoil}), sample),
    ):
        pass


@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("name", MTP_FORMATS)
def test_int2_in_blocks_goes_back_as_it_was(tmp_path: Path, name: str, block: int) -> None:
    """Blocks whose number of scales equals the number of columns were once read as columns."""
    path = tmp_path / "blocks.tflite"
    path.write_bytes(blockwise_int2(block, zeros=True))
    try:
        extract(path, tmp_path / "d", format=name, codes=True)
    except UnsupportedError as error:
        assert name == "gemma" and block < 128, error
        return
    with plan_insertion(tmp_path / "d", path) as plan:
        plan.write(tmp_path / "again.tflite")
    assert (tmp_path / "again.tflite").read_bytes() == path.read_bytes()
