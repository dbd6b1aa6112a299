"""A base and a bundle built like Google's: every factor is found wherever an exporter puts it, trained scales are kept,
and an insertion that loses too much is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.bases import PREFIX, Weights
from helpers.commands import run_here
from helpers.twin_base import (
    MOBILE,
    TWIN,
    decoder_of,
    edited_twin,
    floats,
    logits_of_google,
    logits_of_transformers,
    multiplied,
    number,
    numbers_of,
    own_norms,
    scaled_matrix,
    tuned,
    twin_base,
)
from safetensors.numpy import load_file, save_file
from seam import DTYPES

from mtp_extract.bundle import open_bundle
from mtp_extract.errors import CheckpointError, MtpExtractError, PairError, UnsupportedError
from mtp_extract.graph import reading
from mtp_extract.graph.expressions import Expressions
from mtp_extract.insertion.base import find_base
from mtp_extract.insertion.base_checkpoint import read_base
from mtp_extract.insertion.comparison import EQUAL, NEAREST, BaseComparison, _compare_rows, compare_base
from mtp_extract.insertion.encoding import AS_CODES, KEPT, REQUANTIZED
from mtp_extract.insertion.run import plan_insertion
from mtp_extract.insertion.slots import match_roles
from mtp_extract.litertlm.storage import Packing, Storage
from mtp_extract.litertlm.tflite import TensorType

PROJECTION = "per_layer_model_projection"
_FEW_BITS = (Packing(2, signed=True), Packing(4, signed=True))
HALF, ROOT = 2**-0.5, 16**0.5


def compare(bundle: Path, base: Path) -> BaseComparison:
    with open_bundle(bundle) as opened:
        return compare_base(opened, base)


def insert_base(base: Path, bundle: Path, out: Path, **options: Any) -> Path:
    with plan_insertion(base, bundle) as plan:
        plan.write(out, **options)
    return out


@pytest.mark.parametrize("form", ["f32", "bf16", "mobile"])
def test_its_base_is_equal_in_every_form_and_changes_no_byte(tmp_path: Path, form: str) -> None:
    base = MOBILE if form == "mobile" else twin_base(tmp_path / "base", dtype="" if form == "f32" else form)
    assert compare(TWIN, base).counts == {EQUAL: 130}
    with plan_insertion(base, TWIN) as plan:
        assert {encoding.how for of_role in plan.encodings.values() for encoding in of_role} == {KEPT}
        assert plan.losses.roles == {}
        plan.write(tmp_path / "new.litertlm")
    assert (tmp_path / "new.litertlm").read_bytes() == TWIN.read_bytes()


def test_rope_and_window_are_said_to_be_compared_with_nothing_where_no_drafter_tells_them(tmp_path: Path) -> None:
    base = twin_base(tmp_path / "base")
    (note,) = compare(TWIN, base).notes
    assert note.endswith("the bundle keeps its own, and has no drafter that tells them.")
    with plan_insertion(base, TWIN) as plan:
        assert note in plan.notes


ROOTS = {
    "the projection's root in its scales": {"prefill_decode": scaled_matrix(PROJECTION, 1 / 8)},
    # The queries of layers with eight heads of 16 are multiplied, too, before their norm.
    "the projection's root in the graph": {"prefill_decode": multiplied("DEQUANTIZE", (8, 16), 1 / 8)},
    "the sum's root left out": {"prefill_decode": number(HALF, 1)},
    "the table's root in its scales": {
        "prefill_decode": number(ROOT, 1),
        "per_layer_embedder": scaled_matrix("per_layer_embedder", ROOT),
    },
    "the table's root in the embedder": {
        "prefill_decode": number(ROOT, 1),
        "per_layer_embedder": multiplied("CONCATENATION", (128,), ROOT),
    },
}


@pytest.mark.parametrize("where", ROOTS)
def test_a_root_is_found_wherever_it_stands(tmp_path: Path, where: str) -> None:
    bundle, base = edited_twin(tmp_path / "b.litertlm", **ROOTS[where]), twin_base(tmp_path / "base")
    assert compare(bundle, base).counts == {EQUAL: 130}
    assert insert_base(base, bundle, tmp_path / "same.litertlm").read_bytes() == bundle.read_bytes()
    new = insert_base(twin_base(tmp_path / "tuned", tuned), bundle, tmp_path / "new.litertlm")
    assert compare(new, tmp_path / "tuned").problem is None

    def size(path: Path) -> float:
        """Norm of the stored projection, read by the published schema."""
        model = decoder_of(path)
        matrix = next(t for t in model.subgraphs[0].tensors if t.name.decode().startswith(PROJECTION))
        codes = np.frombuffer(bytes(model.buffers[matrix.buffer].data), np.int8).reshape(128, 64)
        return float(np.linalg.norm(codes * matrix.quantization.scale[:, None]))

    assert size(new) == pytest.approx(size(bundle), rel=0.01)


def test_a_root_that_is_none_is_refused(tmp_path: Path) -> None:
    bundle = edited_twin(tmp_path / "b.litertlm", prefill_decode=number(ROOT, 3))
    with pytest.raises(MtpExtractError, match="per_layer_projection_norm: expected its result to be added"):
        compare(bundle, MOBILE)


def test_caches_are_not_looked_at_element_by_element(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the twin have 1536 elements and more, its logits 512."""
    with open_bundle(TWIN) as opened:
        expected = {role: len(places) for role, places in find_base(opened).places.items()}
        monkeypatch.setattr(reading, "_MOST_TRACKED_ELEMENTS", 1024)
        enumerated = list[int]()
        vector = Expressions.make_vector

        def counting(self: Any, *parts: Any, size: int) -> Any:
            enumerated.append(size)
            return vector(self, *parts, size=size)

        monkeypatch.setattr(Expressions, "make_vector", counting)
        assert {role: len(places) for role, places in find_base(opened).places.items()} == expected
    assert max(enumerated) <= 1024


def test_a_tuned_base_keeps_the_scales_that_were_trained(tmp_path: Path) -> None:
    base, out = twin_base(tmp_path / "tuned", tuned, "bf16"), tmp_path / "new.litertlm"
    with plan_insertion(base, TWIN) as plan:
        losses = plan.losses
        plan.write(out)
    # By the largest number of each row, two bits lose 0.8 of the feed-forward blocks of the upper layers.
    assert max(loss.relative_rms_error for loss in losses.roles.values()) < 0.022
    assert losses.total.relative_change == pytest.approx(0.02, abs=0.001)
    assert "Most of what the checkpoint changes is rounded away" in losses.warning
    comparison = compare(out, base)
    assert comparison.problem is None and max(role.error or 0 for role in comparison.roles) < 0.05
    with open_bundle(out) as opened:
        matches = list(match_roles(find_base(opened).places, read_base(base).weights))
    # All signatures agree: one slot for each role, except for the eight tables.
    assert {len(match.slots) for match in matches if match.role != "embed_tokens_per_layer"} == {1}
    # Inserting it again changes nothing; inserting the old base restores it to the bit.
    with plan_insertion(base, out) as plan:
        assert plan.overlays == ()
    with plan_insertion(MOBILE, out) as plan:
        hows = {encoding.how for role, of_role in plan.encodings.items() for encoding in of_role if role != PROJECTION}
        assert hows == {KEPT, AS_CODES}
        plan.write(tmp_path / "back.litertlm")
    counts = compare(tmp_path / "back.litertlm", MOBILE).counts
    assert counts[EQUAL] == 129  # but for the projection, whose floats have no codes


def read_stored_weights(bundle: Path, base: Path) -> Weights:
    """Read the tensors of ``base`` from ``bundle``, in floats."""
    weights = Weights()
    with open_bundle(bundle) as opened:
        for match in match_roles(find_base(opened).places, read_base(base).weights):
            if match.name is not None and match.role != "lm_head":
                columns = [slot.stored_weight.array() for slot in match.slots]
                weights[match.name] = np.concatenate(columns, axis=-1).reshape(match.shape)
    return weights


def test_what_a_bundle_computes_is_what_it_holds_of_a_tuned_base(tmp_path: Path) -> None:
    """Google's interpreter agrees with transformers on the new weights as on the old ones. Only rounding loses part of
    the tuned base: other scales would lose as much."""
    base = twin_base(tmp_path / "tuned", tuned)
    new = insert_base(base, TWIN, tmp_path / "new.litertlm")
    wanted = floats()
    tuned(wanted)
    stored = read_stored_weights(new, base)
    texts = np.random.default_rng(11).integers(3, 512, (4, 40))

    def correlation(bundle: Path, weights: Weights) -> float:
        pairs = [(logits_of_google(bundle, text), logits_of_transformers(weights, text)) for text in texts]
        return float(np.mean([np.corrcoef(google.ravel(), ours.ravel())[0, 1] for google, ours in pairs]))

    before, after = correlation(TWIN, floats()), correlation(new, stored)
    assert before > 0.93 and after > before - 0.01

    with plan_insertion(base, TWIN) as plan:
        encodings = {role: of_role for role, of_role in plan.encodings.items() if role.startswith("layers.5.")}
    few_bits = [
        encoding for of_role in encodings.values() for encoding in of_role if encoding.storage.packing in _FEW_BITS
    ]
    assert len(few_bits) == 5
    for encoding in few_bits:
        name = encoding.slot.new.name
        least = compute_least_loss(wanted[name], encoding.scales.scale, encoding.storage.bounds)
        assert np.square(stored[name] - wanted[name]).sum() < 1.05 * least.sum(), name


def compute_least_loss(weight: np.ndarray, scale: np.ndarray, bounds: tuple[int, int]) -> np.ndarray:
    """Return the least sum of squares that each row can lose, over scales around ``scale`` and the best scale for their
    codes."""
    least = np.full(len(weight), np.inf)
    for factor in np.linspace(0.6, 1.4, 161):
        codes = np.clip(np.rint(weight / (factor * scale[:, None])), *bounds)
        best = (weight * codes).sum(1) / np.maximum(np.square(codes).sum(1), 1)
        least = np.minimum(least, np.square(weight - codes * best[:, None]).sum(1))
    return least


def stretch_rows(weights: Weights) -> None:
    """Give every second row one number far beyond its trained scale."""
    weight = weights[f"{PREFIX}layers.5.mlp.down_proj.weight"]
    weight[::2] = 0
    weight[::2, 3] = 40


def test_a_row_that_the_old_scale_serves_badly_gets_the_rules(tmp_path: Path) -> None:
    role = "layers.5.down_proj"
    with plan_insertion(twin_base(tmp_path / "base", stretch_rows), TWIN) as plan:
        (encoding,) = plan.encodings[role]
        before = encoding.slot.stored_constant.source.scale.reshape(-1)
        assert encoding.how == REQUANTIZED
        assert (encoding.scales.scale[::2] == 40).all() and (encoding.scales.scale[1::2] == before[1::2]).all()
        assert plan.losses.roles.get(role) is None or plan.losses.roles[role].relative_rms_error < 1e-6


def replace_by_noise(weights: Weights) -> None:
    weight = weights[f"{PREFIX}layers.6.mlp.up_proj.weight"]
    weights[f"{PREFIX}layers.6.mlp.up_proj.weight"] = (
        np.random.default_rng(0).standard_normal(weight.shape).astype(np.float32) * weight.std()
    )


def test_a_listing_counts_roles_as_a_comparison_does_and_names_the_layers_of_tables(tmp_path: Path) -> None:
    """One of its 130 roles is stored as eight tables."""
    said = run_here("insert", twin_base(tmp_path / "base", tuned), TWIN, "--dry-run").stdout
    match = re.search(r": (\d+) of 130 roles change \((\d+) of 137 stored weights\)", said)
    assert match is not None and int(match[2]) - int(match[1]) == 7
    tables = re.findall(r"^  embed_tokens_per_layer(\S* \S+ \S+)", said, re.MULTILINE)
    assert tables == [f", layer {layer}" for layer in range(8)]


def test_a_base_that_would_lose_a_tenth_of_a_role_is_refused(tmp_path: Path) -> None:
    base, new = twin_base(tmp_path / "base", replace_by_noise), tmp_path / "new.litertlm"
    with pytest.raises(UnsupportedError, match=r"lose more than 10% of 1 roles: layers\.6\.up_proj \d\d\.") as raised:
        insert_base(base, TWIN, new)
    assert raised.value.remedies == ("force",) and not new.exists()
    process = run_here("insert", base, TWIN, "--dry-run")
    assert process.returncode == 1 and "most: layers.6.up_proj" in process.stdout and "(--force)" in process.stderr
    process = run_here("insert", base, TWIN, "-o", new, "--force", "--json")
    assert process.returncode == 0 and new.exists()
    report = json.loads(process.stdout)
    loss = report["loss"]["roles"]["layers.6.up_proj"]
    assert 0.2 < loss["relative_rms_error"] < 0.9 and loss["relative_change"] > 1
    assert report["loss"]["total"]["relative_rms_error"] == pytest.approx(loss["relative_rms_error"])
    # The new bundle holds this base, and the verdict states the loss.
    comparison = compare(new, base)
    verdict = next(role for role in comparison.roles if role.role == "layers.6.up_proj")
    assert comparison.problem is None and verdict.verdict == NEAREST
    assert verdict.error == pytest.approx(loss["relative_rms_error"], rel=1e-3)
    assert verdict.why == f"nearest codes of 2 bits: loses {verdict.error:.0%}"
    assert "layers.6.up_proj: " in str(compare(TWIN, base).problem)


# Norms that signatures do not share.


def change_norms(weights: Weights) -> None:
    for name, weight in weights.items():
        if weight.ndim == 1:
            weights[name] = weight * np.float32(1.1 if name.endswith("scalar") else 1.25)


def read_norms(path: Path) -> list[set[bytes]]:
    """Bytes of the float constants of each signature."""
    model = decoder_of(path)
    graphs = [model.subgraphs[signature.subgraphIndex] for signature in model.signatureDefs]
    return [{numbers_of(model, tensor).tobytes() for tensor in graph.tensors} for graph in graphs]


def test_every_signature_gets_the_new_norms(tmp_path: Path) -> None:
    bundle = edited_twin(tmp_path / "own.litertlm", prefill_decode=own_norms)
    base = twin_base(tmp_path / "base", change_norms)
    assert compare(bundle, MOBILE).counts == {EQUAL: 130}
    new = insert_base(base, bundle, tmp_path / "new.litertlm")
    shared = insert_base(base, TWIN, tmp_path / "shared.litertlm")
    assert read_norms(new) == read_norms(shared) != read_norms(bundle)
    assert compare(new, base).counts == {EQUAL: 130}


def test_a_signature_with_other_norms_is_refused(tmp_path: Path) -> None:
    """As after an insertion into decode alone: such a bundle was once called equal."""
    with open_bundle(TWIN) as opened:
        stored = find_base(opened).places["layers.1.pre_ffw_norm"][0].constant
        assert stored is not None
        values = stored.array()

    def change(model: Any) -> None:
        own_norms(model)
        prefill = next(s.subgraphIndex for s in model.signatureDefs if s.signatureKey == b"prefill_8")
        tensor = next(t for t in model.subgraphs[prefill].tensors if np.array_equal(numbers_of(model, t), values))
        model.buffers[tensor.buffer].data = np.frombuffer((values * 2).tobytes(), np.uint8)

    bundle = edited_twin(tmp_path / "other.litertlm", prefill_decode=change)
    with pytest.raises(
        UnsupportedError, match=r"'prefill_8': layers\.1\.pre_ffw_norm: expected the numbers with which"
    ):
        compare(bundle, MOBILE)


def test_roles_that_hold_the_same_change_together_or_are_refused(tmp_path: Path) -> None:
    first, second = (f"{PREFIX}layers.{layer}.self_attn.q_norm.weight" for layer in (0, 2))

    def alike(weights: Weights) -> None:
        weights[second] = weights[first].copy()

    def together(weights: Weights) -> None:
        weights[first] = weights[second] = weights[first] * np.float32(1.5)

    def apart(weights: Weights) -> None:
        together(weights)
        weights[second] = weights[second] * np.float32(1.01)

    base = twin_base(tmp_path / "base", alike)
    shared = insert_base(base, TWIN, tmp_path / "alike.litertlm")
    bundle = tmp_path / "own.litertlm"
    edited = edited_twin(bundle, source=shared, prefill_decode=own_norms)
    assert compare(edited, base).counts == {EQUAL: 130}
    new = insert_base(twin_base(tmp_path / "together", together), edited, tmp_path / "new.litertlm")
    assert compare(new, tmp_path / "together").counts == {EQUAL: 130}
    with pytest.raises(
        UnsupportedError, match=r"layers\.[02]\.q_norm: the file stores layers\.[02]\.q_norm in the same"
    ):
        insert_base(twin_base(tmp_path / "apart", apart), edited, tmp_path / "refused.litertlm")


# Checkpoints.


@pytest.mark.parametrize("with_base", [True, False])
def test_an_adapter_is_to_be_merged_first(tmp_path: Path, with_base: bool) -> None:
    base = twin_base(tmp_path / "base")
    (base / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    if not with_base:
        (base / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"a LoRA adapter .* merge it into its base first"):
        insert_base(base, TWIN, tmp_path / "new.litertlm")
    with pytest.raises(CheckpointError, match="a LoRA adapter"):
        compare(TWIN, base)


@pytest.mark.parametrize("prefix", ["", "base_model.model."])
def test_tensors_of_an_adapter_are_not_passed_over(tmp_path: Path, prefix: str) -> None:
    """Adapter tensors without a configuration were once ignored beside the model's own."""
    base = twin_base(tmp_path / "base")
    name = f"{prefix}{PREFIX}layers.0.mlp.up_proj.lora_A.weight"
    save_file({name: np.ones((4, 64), np.float32)}, base / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"expected merged weights, found tensors of a LoRA adapter"):
        insert_base(base, TWIN, tmp_path / "new.litertlm")


def copy_mobile(out: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    out.mkdir()
    (out / "config.json").write_text((MOBILE / "config.json").read_text())
    tensors = load_file(MOBILE / "model.safetensors")
    change(tensors)
    save_file(tensors, out / "model.safetensors")
    return out


def test_a_code_of_a_mobile_checkpoint_is_named(tmp_path: Path) -> None:
    def change(tensors: dict[str, Any]) -> None:
        tensors[f"{PREFIX}embed_tokens_per_layer.embedding_quantized"][7, 21] ^= 0x10

    comparison = compare(TWIN, copy_mobile(tmp_path / "one", change))
    assert {role.role: role.why for role in comparison.roles if role.verdict != EQUAL} == {
        "embed_tokens_per_layer": "1 weight differs, by up to 1 steps"
    }


@pytest.mark.parametrize(
    ("part", "values"),
    [
        ("weight", np.zeros((96, 33), np.uint8)),
        ("weight", np.zeros((96, 64), np.uint8)),
        ("weight_scale", np.full((96, 1), np.nan, np.float32)),
        ("weight_scale", np.ones((95, 1), np.float32)),
        ("weight_scale", np.ones((96, 3), np.float32)),
    ],
)
def test_codes_that_fit_no_matrix_are_refused(tmp_path: Path, part: str, values: np.ndarray) -> None:
    name = f"{PREFIX}layers.0.mlp.up_proj.{part}"
    base = copy_mobile(tmp_path / "bad", lambda tensors: tensors.update({name: values}))
    with pytest.raises(CheckpointError, match=r"expected .*layers\.0\.mlp\.up_proj\.weight as codes of 2, 4 or 8 bits"):
        compare(TWIN, base)


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_scales_of_a_mobile_checkpoint_may_be_half_as_wide(tmp_path: Path, dtype: str) -> None:
    kind = next(kind for kind in DTYPES.values() if kind.safetensors == dtype)

    def narrow(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.endswith("up_proj.weight_scale")]:
            scale = tensors[name]
            tensors[name] = kind.narrow(scale.reshape(-1), name).view(kind.transformers).reshape(scale.shape)

    base = copy_mobile(tmp_path / "narrow", narrow)
    assert compare(TWIN, base).problem is None
    with plan_insertion(base, TWIN) as plan:
        assert {encoding.how for encoding in plan.encodings["layers.0.up_proj"]} <= {KEPT, AS_CODES}


def delete_scalar(weights: Weights) -> None:
    del weights[f"{PREFIX}layers.2.layer_scalar"]


def test_a_layer_scalar_is_missed_where_others_are_there(tmp_path: Path) -> None:
    """It was once taken for 1, and written."""
    base = twin_base(tmp_path / "base", delete_scalar)
    assert "layers.2.layer_scalar: the checkpoint has no such tensor" in str(compare(TWIN, base).problem)
    with pytest.raises(PairError, match=r"layers\.2\.layer_scalar: the checkpoint has no such tensor"):
        insert_base(base, TWIN, tmp_path / "new.litertlm")


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_what_f16_holds_no_nearer_is_not_different(dtype: str) -> None:
    """Subnormal numbers, and numbers rounded to either type from the same floats, are no differences."""
    floats_of_both = (np.random.default_rng(0).standard_normal((96, 64)) * 1e-3).astype(np.float32)
    rounding = DTYPES[dtype]
    wanted = rounding.widen(rounding.narrow(floats_of_both.reshape(-1), "w").tobytes()).reshape(96, 64)
    stored = floats_of_both.astype(np.float16).astype(np.float32)
    storage = Storage(TensorType.FLOAT16, (96, 64), "none")
    constant = SimpleNamespace(folded=False, factor=1.0)
    slot: Any = SimpleNamespace(constant=constant, stored_constant=constant, storage=storage, dtype=dtype)
    assert not _compare_rows(slot, 0, 96, wanted, stored, has_wrong_code=False).outside
    assert _compare_rows(slot, 0, 96, wanted, stored * np.float32(1.02), has_wrong_code=False).outside > 5000
