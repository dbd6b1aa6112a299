"""No role can be lost: take any weight-bearing op or tensor away, and the drafter is refused; the message says where.

Two drafters are taken apart: the sample (composites, Google's names) and one of plain operators with names that say
nothing (see ``make_drafter``).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from helpers.first_pair import first_bundle
from helpers.make_bundle import Memory, code_of, drafter_of, load, pack
from helpers.make_drafter import DrafterSpec, plain_drafter
from seam import BundledDrafter, MtpExtractError, list_roles, prove, read

from mtp_extract import extract

LAYERS = {"sample": 4, "plain": 2}
REPEATED = ("layers.1.", "layers.2.")  # As the sample's first: nothing is taken from those.
ROLES = [(o, r.name) for o, n in LAYERS.items() for r in list_roles(n) if o == "plain" or r.name[:9] not in REPEATED]
PLACE = re.compile(r"op \d+ [A-Z_]+|tensor \d+ |output '|layers\.-?\d+|final_norm|lm_head|p\w+_projection")
"""What a refusal names: an operator, a tensor, an output or a role."""


@cache
def make_data(origin: str) -> bytes:
    return drafter_of(first_bundle()) if origin == "sample" else plain_drafter(DrafterSpec(windows=(4, None)))


@cache
def read_sound(origin: str) -> BundledDrafter:
    return read(Memory(make_data(origin)))


@cache
def list_tensors(origin: str) -> dict[str, int]:
    """Role → index of its constant in the main subgraph."""
    return {role.role: role.tensor.index for role in read_sound(origin).structure.roles if role.tensor is not None}


def find_reader(model: Any, tensor: int) -> tuple[Any, int]:
    """The one op of the main subgraph that reads ``tensor``, and at which operand."""
    (found,) = [(op, i) for op in model.subgraphs[0].operators for i, t in enumerate(op.inputs) if t == tensor]
    return found


def load_with_reader(origin: str, role: str) -> tuple[Any, Any, int]:
    """A fresh model, the op that reads the weight of ``role``, and at which operand."""
    model = load(make_data(origin))
    return model, *find_reader(model, list_tensors(origin)[role])


def check_refused(model: Any) -> str:
    with pytest.raises(MtpExtractError) as raised:
        prove(Memory(pack(model)))
    assert PLACE.search(str(raised.value))
    return str(raised.value)


def turn_into_sub(model: Any, op: Any) -> None:
    op.opcodeIndex, op.builtinOptions2 = code_of(model, "SUB"), None


DAMAGES: dict[str, Callable[[Any, Any, int], object]] = {
    "delete the op": lambda model, op, position: model.subgraphs[0].operators.remove(op),
    "another op": lambda model, op, position: turn_into_sub(model, op),
    "no operand": lambda model, op, position: op.inputs.__setitem__(position, -1),
    "no buffer": lambda model, op, position: setattr(model.subgraphs[0].tensors[op.inputs[position]], "buffer", 0),
}


def test_every_role_is_there() -> None:
    """The lists of cases below are complete: every role of the table is a constant of its own in both drafters."""
    for origin, layers in LAYERS.items():
        assert set(list_tensors(origin)) == {role.name for role in list_roles(layers)}
        assert len(set(list_tensors(origin).values())) == len(list_tensors(origin))


@pytest.mark.parametrize(("origin", "role"), ROLES)
def test_a_role_that_is_lost_is_refused(origin: str, role: str) -> None:
    for damage in DAMAGES.values():
        model, op, position = load_with_reader(origin, role)
        damage(model, op, position)
        check_refused(model)


@pytest.mark.parametrize(("origin", "role"), ROLES)
def test_a_role_that_reads_the_weight_of_another_is_refused(origin: str, role: str) -> None:
    """With a constant of the same size, the graph is sound but for the weight that nothing reads any more."""
    model, op, position = load_with_reader(origin, role)
    indices, tensors = list_tensors(origin), model.subgraphs[0].tensors
    shape = tensors[indices[role]].shape
    same = [i for r, i in indices.items() if r != role and list(tensors[i].shape) == list(shape)]
    op.inputs[position] = (same or [indices["final_norm"]])[0]
    check_refused(model)


def test_a_stored_weight_that_nothing_reads_is_refused() -> None:
    """A scalar folded away by hand: the graph is sound without it, and the constant tells."""
    model, op, position = load_with_reader("plain", "layers.0.layer_scalar")
    graph, scaled = model.subgraphs[0], op.inputs[1 - position]
    graph.operators.remove(op)
    for other in graph.operators:
        other.inputs = [scaled if tensor == op.outputs[0] else tensor for tensor in other.inputs]
    assert "no op reads it" in check_refused(model)


def list_contradictions(model: Any, folder: Path) -> dict[str, tuple[str, ...]]:
    """What the names of ``model`` say against its graph, which is extracted all the same."""
    (folder / "model.tflite").write_bytes(pack(model))
    notes = extract(folder / "model.tflite", folder / "out").notes
    found = dict(read(folder / "model.tflite").names.contradicted)
    assert all(any(role in note and "the graph decides" in note for note in notes) for role in found)
    return found


SWAPS = [("layers.0.gate_proj", "layers.0.up_proj"), ("layers.0.o_proj", "layers.1.down_proj")]


@pytest.mark.parametrize(("first", "second"), SWAPS)
def test_names_that_contradict_are_said_and_not_refused(tmp_path: Path, first: str, second: str) -> None:
    """Two weights are swapped: the graph says one thing and the names another."""
    model, one, position = load_with_reader("sample", first)
    other, at = find_reader(model, list_tensors("sample")[second])
    one.inputs[position], other.inputs[at] = other.inputs[at], one.inputs[position]
    assert list_contradictions(model, tmp_path) == {first: (second,), second: (first,)}


def test_the_name_of_another_norm_is_said(tmp_path: Path) -> None:
    role, other = "layers.1.pre_ffw_norm", "layers.1.post_ffw_norm"
    model, op, _ = load_with_reader("sample", role)
    theirs, _ = find_reader(model, list_tensors("sample")[other])
    for mine, named in zip(list_results(model, op), list_results(model, theirs), strict=True):
        mine.name = named.name
    assert list_contradictions(model, tmp_path) == {role: (other,)}


def list_results(model: Any, op: Any) -> tuple[Any, Any]:
    """The output tensor of a composite, in the graph and in its body."""
    body = model.subgraphs[op.builtinOptions2.decompositionSubgraphIndex]
    return model.subgraphs[0].tensors[op.outputs[0]], body.tensors[body.outputs[0]]


def list_other_ops(origin: str) -> list[int]:
    """Indices of the ops of the main subgraph that read no weight, but for those of repeated layers."""
    weights, repeated = set(list_tensors(origin).values()), range(0)
    operators = read_sound(origin).model.subgraphs[0].operators
    if origin == "sample":
        begins = [list_tensors(origin)[f"layers.{layer}.pre_attention_norm"] for layer in (1, 3)]
        repeated = range(*(op.index for op in operators for tensor in begins if tensor in op.inputs))
    return [op.index for op in operators if not weights & set(op.inputs) and op.index not in repeated]


@pytest.mark.parametrize("origin", LAYERS)
def test_an_op_without_a_weight_is_needed(origin: str) -> None:
    for index in list_other_ops(origin):
        model = load(make_data(origin))
        model.subgraphs[0].operators.pop(index)
        check_refused(model)
