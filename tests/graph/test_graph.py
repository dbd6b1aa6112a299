"""Roles, geometry and names of every variant."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from helpers.make_bundle import Memory, code_of, kind, load, pack
from helpers.make_drafter import DrafterSpec, plain_model
from helpers.variant_files import HERE, REFUSED, VARIANTS, variant
from seam import (
    MTP_FORMATS,
    BundledDrafter,
    MtpExtractError,
    UnsupportedError,
    list_roles,
    load_role_table,
    prove,
    read,
)
from seam import RopeConfig as Rope

from mtp_extract.graph.rotation import read_rope

MADE = sorted(set(VARIANTS) - REFUSED)
GEOMETRY = json.loads((HERE / "variants" / "geometry.json").read_text())
"""What the record says of the usual variant, and by name of a variant what is otherwise."""


def read_variant(name: str) -> BundledDrafter:
    return read(variant(name))


@pytest.mark.parametrize("name", MADE)
def test_geometry(name: str) -> None:
    assert read_variant(name).config.as_json() == GEOMETRY["usual"] | GEOMETRY.get(name, {})


@pytest.mark.parametrize("name", MADE)
def test_roles_are_complete_and_unique(name: str) -> None:
    drafter = read_variant(name)
    roles = Counter(r.role for r in drafter.structure.roles)
    assert max(roles.values()) == 1
    expected = {r.name for r in list_roles(4)}
    without_scalars = {r for r in expected if not r.endswith("layer_scalar")}
    scalars = set(roles) - without_scalars
    assert set(roles) - scalars == without_scalars
    assert scalars in (set(), expected - without_scalars)
    # No constant plays two roles, but for those that equal values share.
    shared = Counter(
        (r.tensor.index, r.role.split(".")[-1]) for r in drafter.structure.roles if r.tensor and r.tensor.elements > 1
    )
    assert {role for (_, role), count in shared.items() if count > 1} <= {"q_norm"}


def test_shared_q_norm_is_one_constant() -> None:
    tensors = {
        r.role: r.tensor for r in read_variant("jax_published_noscalar").structure.roles if r.role.endswith("q_norm")
    }
    assert tensors["layers.0.q_norm"] is tensors["layers.1.q_norm"] is tensors["layers.2.q_norm"]
    assert tensors["layers.3.q_norm"] is not tensors["layers.0.q_norm"]


def test_weights_of_one_that_were_folded_away_are_ones() -> None:
    norms = [r for r in read_variant("torch_unit_plain_norm").structure.roles if "norm" in r.role]
    assert norms
    assert all(r.tensor is None for r in norms)


def test_folded_soft_cap_is_divided_out() -> None:
    head = next(r for r in read_variant("torch_folded_softcap").structure.roles if r.role == "lm_head")
    assert head.factor == pytest.approx(1 / 30, rel=1e-12)


def test_a_window_left_to_the_runtime_must_be_said() -> None:
    longer_than_the_caches = Memory(pack(plain_model(DrafterSpec(windows=(1000, None)))))
    with pytest.raises(UnsupportedError, match="how long") as caught:
        read(longer_than_the_caches)
    assert caught.value.remedies == ("sliding_window=N",)
    assert read(longer_than_the_caches, sliding_window=1000).config.sliding_window == 1000


def replace_comparison(old: str, new: str) -> Memory:
    """torch_plain_norm, every comparison ``old`` another one."""
    model = load(variant("torch_plain_norm").read_bytes())
    for op in [op for op in model.subgraphs[0].operators if kind(model, op) == old]:
        op.opcodeIndex = code_of(model, new)
    return Memory(pack(model))


def test_a_comparison_that_is_closed_makes_the_window_longer() -> None:
    """Which slots are seen counts, and not how the mask is written."""
    longer = read(replace_comparison("LESS", "LESS_EQUAL")).config
    assert [layer.sliding_window for layer in longer.layers] == [17, 17, 17, None]


@pytest.mark.parametrize(("old", "new"), [("GREATER_EQUAL", "GREATER"), ("LESS", "GREATER"), ("LESS", "NOT_EQUAL")])
def test_what_is_no_window_is_refused(old: str, new: str) -> None:
    with pytest.raises(MtpExtractError, match=r"layers|different caches|sliding window"):
        prove(replace_comparison(old, new))


def test_published_names_confirm(sample: Path) -> None:
    names = read(sample).names
    # A layer scalar is an anonymous factor; everything else carries its published name.
    assert set(names.unrecognised) == {f"layers.{i}.layer_scalar" for i in range(4)}
    assert (len(names.confirmed), names.contradicted) == (44, {})


def test_unknown_names_neither_confirm_nor_contradict() -> None:
    names = read_variant("torch_plain_norm").names
    assert not names.confirmed
    assert len(names.unrecognised) == 48


def test_role_table() -> None:
    table = load_role_table()
    columns = {column for r in table for column in r.names}
    assert columns <= MTP_FORMATS.keys() and {"transformers", "litert", "gguf"} <= columns
    for values in ([r.name for r in table], *([r.names[c] for r in table if c in r.names] for c in columns)):
        assert len(set(values)) == len(values)
    names = [r.name for r in list_roles(4)]
    assert len(names) == 48
    assert not any("{i}" in n for n in names)
    assert all(re.compile(p) for r in table for p in (*r.published_names, *r.also_seen))


@pytest.mark.parametrize(("theta", "partial"), [(1e4, 1.0), (1e6, 0.25), (5e5, 0.5), (123456.0, 1.0)])
def test_rope_is_read_from_its_table(theta: float, partial: float) -> None:
    dim = 256
    index = np.arange(dim // 2)
    table = np.where(index < partial * dim / 2, theta ** (-2 * index / dim), 0).astype(np.float32).astype(np.float64)
    assert read_rope("layers.0", table, 1e-6 * table, dim) == Rope(theta, partial)


@pytest.mark.parametrize("damage", ["scaled", "gap", "noise"])
def test_other_rope_tables_are_refused(damage: str) -> None:
    table = 1e4 ** (-np.arange(64) / 64)
    if damage == "scaled":
        table /= 8
    elif damage == "gap":
        table[3] = 0
    else:
        table[10] *= 1.001
    with pytest.raises(UnsupportedError, match="RoPE"):
        read_rope("layers.0", table, 1e-6 * table, 128)


def test_a_drafter_shown_fits_a_screen_or_a_few(sample: Path) -> None:
    """Values name their producers, which name their inputs: shown in full, a graph is gigabytes of text."""
    assert len(repr(read(sample))) < 200_000
