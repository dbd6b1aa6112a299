"""What a proof says that it held: positions, rows, tables of few bits, operators that choose."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from adversary.edits import Case
from adversary.mutations import MUTATIONS
from adversary.rewrites import REWRITES
from helpers.make_bundle import Memory
from helpers.make_drafter import DrafterSpec, plain_drafter
from helpers.proving import held
from helpers.surgery import sound
from helpers.variant_files import variant

from mtp_extract import extract
from mtp_extract.bundle import open_bundle
from mtp_extract.errors import MtpExtractError, ProofError, RoleError, UnsupportedError
from mtp_extract.proof.inputs import signature_inputs
from mtp_extract.proof.operators import check_operators
from mtp_extract.proof.proof import seed_of
from mtp_extract.proof.rows import _chosen
from mtp_extract.proof.shifts import rows_are_alike
from mtp_extract.proof.words import in_words


def case(label: str) -> Case:
    (found,) = [c for c in (*MUTATIONS, *REWRITES) if c.label == label]
    return found


def of(label: str, style: str = "torch") -> Memory:
    graph = case(label).apply(style)
    assert graph is not None
    return Memory(graph.data())


def test_every_position_and_row_of_a_small_cache_is_held(sample: Path) -> None:
    proof = held(sample)
    assert (proof.tables.positions, proof.rows.tried, proof.rows.of) == (256, 256, 256)
    assert len(proof.tables.tables) >= 4
    assert set(proof.as_json()["choosing"]["mask"]) == {"LOGICAL_AND", "SELECT_V2"}


def test_of_a_large_cache_rows_at_the_edges_and_some_others_are() -> None:
    spec = DrafterSpec(windows=(16, None), cache=6000)
    proof = held(Memory(plain_drafter(spec)))
    assert proof.tables.positions == proof.rows.of == 6000
    assert proof.rows.alike
    assert 20 < proof.rows.tried < 6000
    with open_bundle(Memory(plain_drafter(spec))) as opened:
        drafter = opened.drafter()
        interface = signature_inputs(drafter.graph, drafter.walk, drafter.config, frozenset(drafter.graph.inputs))
    rows = set(_chosen(interface, 500, np.random.default_rng(1)).tolist())
    assert {0, 1, 2, 14, 15, 16, 17, 31, 32, 33, 5997, 5998, 5999} <= rows
    assert len(rows) > 450


def test_rows_that_are_not_alike_are_all_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a window that opens in one row alone, which no sample would find among thousands."""
    monkeypatch.setattr("mtp_extract.proof.rows._MOST_SCORES", 0)
    with pytest.raises(ProofError, match="position 37"):
        held(of("positions/window_of_all_at_37"))
    assert held(variant("torch_plain_norm")).rows.tried < 100


def test_slots_that_are_read_irregularly_are_refused_where_not_all_rows_are_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mtp_extract.proof.rows._MOST_RESULTS", 0)
    with pytest.raises(UnsupportedError, match="cannot be followed over 256 rows"):
        held(of("positions/value_halved_at_2"))
    assert held(variant("jax_published")).rows.moved < 256


NOT_ALIKE = [
    "positions/window_of_all_at_37",
    "positions/window_late_at_37",
    "positions/value_halved_at_2",
    "positions/keys_scaled_from_120_to_250",
    "tables/window_table_row_37",
    "mistakes/window_by_position_modulo_200",
    "mistakes/window_in_blocks_of_3_above_120",
]


@pytest.mark.parametrize("label", NOT_ALIKE)
def test_a_change_of_one_row_is_no_shift(label: str) -> None:
    with open_bundle(of(label)) as opened:
        drafter = opened.drafter()
        attentions = check_operators(drafter.graph, drafter.walk, list(drafter.graph.outputs.values())).attentions
        assert not rows_are_alike(drafter.graph, attentions, 256, 255)


def test_what_is_drawn_follows_from_the_bytes(sample: Path) -> None:
    with open_bundle(sample) as opened:
        first = opened.drafter()
        assert seed_of(first.graph) == seed_of(opened.drafter().graph) == held(sample).seed
        seed = seed_of(first.graph)
    with open_bundle(variant("torch_plain_norm")) as opened:
        assert seed_of(opened.drafter().graph) != seed


@pytest.mark.parametrize(("table", "kind"), [("fp16", "FLOAT16"), ("int16", "INT16"), ("int8", "INT8")])
def test_a_coarse_table_is_said_and_the_exact_theta_is_written(table: str, kind: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = extract(of(f"same: rounded/{table}_rope_tables"), out)
    tables = result.record["proof"]["coarse_tables"]
    assert [entry["layer"] for entry in tables] == [0, 1]
    assert all(kind in entry["held_in"] for entry in tables)
    assert all(0 < entry["outputs_move_by"] < 0.01 for entry in tables)
    assert any("exact theta" in line for line in in_words(result.record["proof"]))
    config = json.loads((out / "config.json").read_text())
    assert "10000.0" in json.dumps(config)


def test_a_fine_table_is_not_called_coarse(sample: Path) -> None:
    assert held(sample).coarse == ()


@pytest.mark.parametrize(
    ("label", "error", "named"),
    [
        ("positions/angle_at_37", (ProofError, UnsupportedError), "position 37"),
        ("positions/window_of_all_at_37", (ProofError,), "position 37"),
        ("mask kinds/minus_100", (ProofError,), "lowered by 100 only"),
        ("mask kinds/all_of_16_shown", (UnsupportedError,), "brings slots of a mask together"),
        ("loudness/keys_within_30", (UnsupportedError,), "cuts off activations"),
        ("loudness/largest_score_favoured", (UnsupportedError,), "chooses by|another end"),
        ("number types/position_int8", (UnsupportedError,), "cut off"),
        ("number types/query_int8_within_a_half", (UnsupportedError,), "cut off"),
        ("loudness/keys_by_tanh", (UnsupportedError,), "TANH"),
        ("smooth/scores_plus_sigmoid_above_90", (UnsupportedError,), "inside of an attention"),
        ("smooth/row_and_hole", (UnsupportedError,), "two slots of a mask"),
        ("tables/row_37_of_cos_is_1", (ProofError,), "position 37"),
        ("interfaces/value_unmapped", (RoleError,), "does not name"),
    ],
)
def test_the_true_cause_is_named(label: str, error: tuple[type[MtpExtractError], ...], named: str) -> None:
    with pytest.raises(error, match=named):
        held(of(label))


def test_a_bound_that_never_binds_is_named() -> None:
    assert any("never binds" in idiom for idiom in held(of("same: spelled/relu_of_probabilities")).allowed.idioms)


def test_activations_in_few_bits_are_counted() -> None:
    proof = held(variant("torch_static8_mix48_kv8"))
    assert proof.as_json()["activations_held_in"]["INT8"] > 10
    assert 0 < proof.cut_off < 0.2
    assert held(Memory(sound("torch").data())).as_json()["activations_held_in"] == {}
