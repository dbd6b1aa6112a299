"""No role can be lost: take any weight-bearing op or tensor away, and extraction fails and says which role is missing.

Two drafters are taken apart: the sample (composites, Google's names) and one of plain operators with names that say
nothing (see ``make_drafter``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from helpers.first_pair import first_bundle
from helpers.make_bundle import Memory, drafter_of, kind, load, pack
from helpers.make_drafter import DrafterSpec, plain_drafter

from mtp_extract import Shard, extract
from mtp_extract.architecture.roles import roles_of
from mtp_extract.bundle import open_bundle
from mtp_extract.errors import MtpExtractError, RoleError

Damage = Callable[[Any, Any, int, int], None]

LAYERS = {"sample": 4, "plain": 2}
REPEATED = ("layers.1.", "layers.2.")
"""The sample's layers that are as its first: nothing is taken from those."""
ROLES = [
    (origin, role.name)
    for origin, layers in LAYERS.items()
    for role in roles_of(layers)
    if origin == "plain" or not role.name.startswith(REPEATED)
]


@cache
def data_of(origin: str) -> bytes:
    return drafter_of(first_bundle()) if origin == "sample" else plain_drafter(DrafterSpec(windows=(4, None)))


@cache
def sound(origin: str) -> Shard:
    return open_bundle(Memory(data_of(origin))).drafter()


@cache
def tensors_of(origin: str) -> dict[str, int]:
    """Role → index of its constant in the main subgraph."""
    return {role.role: role.tensor.index for role in sound(origin).walk.roles if role.tensor is not None}


def reader(model: Any, tensor: int) -> tuple[Any, int]:
    """The one op of the main subgraph that reads ``tensor``, and at which operand."""
    found = [(op, i) for op in model.subgraphs[0].operators for i, t in enumerate(op.inputs) if t == tensor]
    assert len(found) == 1
    return found[0]


def checkpoint(data: bytes, folder: Path) -> dict[str, bytes]:
    """What extraction makes of ``data``: the files that say what the drafter is."""
    folder.mkdir()
    (folder / "model.tflite").write_bytes(data)
    extract(folder / "model.tflite", folder / "out")
    return {name: (folder / "out" / name).read_bytes() for name in ("model.safetensors", "config.json")}


def refused(data: bytes, folder: Path) -> str:
    """The message with which extraction of ``data`` fails; nothing is left behind."""
    (folder / "out").mkdir(parents=True)
    (folder / "model.tflite").write_bytes(data)
    with pytest.raises(MtpExtractError) as raised:
        extract(folder / "model.tflite", folder / "out" / "x")
    assert not any((folder / "out").iterdir())
    return str(raised.value)


def code(model: Any, name: str) -> int:
    """Index of the operator code ``name``, which the model has."""
    return next(int(op.opcodeIndex) for g in model.subgraphs for op in g.operators if kind(model, op) == name)


def delete_op(model: Any, op: Any, position: int, tensor: int) -> None:
    model.subgraphs[0].operators.remove(op)


def recode_op(model: Any, op: Any, position: int, tensor: int) -> None:
    op.opcodeIndex = code(model, "SUB")
    op.builtinOptions2 = None


def unwire(model: Any, op: Any, position: int, tensor: int) -> None:
    op.inputs[position] = -1


def drop_data(model: Any, op: Any, position: int, tensor: int) -> None:
    model.subgraphs[0].tensors[tensor].buffer = 0


def empty_data(model: Any, op: Any, position: int, tensor: int) -> None:
    model.buffers[model.subgraphs[0].tensors[tensor].buffer].data = None


DAMAGES: dict[str, Damage] = {
    "delete the op": delete_op,
    "another op": recode_op,
    "no operand": unwire,
    "no buffer": drop_data,
    "empty buffer": empty_data,
}


def test_every_role_is_there() -> None:
    """The lists of cases below are complete: every role of the table is a constant of its own in both drafters."""
    for origin, layers in LAYERS.items():
        assert set(tensors_of(origin)) == {role.name for role in roles_of(layers)}
        assert len(set(tensors_of(origin).values())) == len(tensors_of(origin))


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(("origin", "role"), ROLES)
def test_a_role_that_is_lost_is_named(tmp_path: Path, origin: str, role: str, damage: str) -> None:
    model = load(data_of(origin))
    tensor = tensors_of(origin)[role]
    op, position = reader(model, tensor)
    DAMAGES[damage](model, op, position, tensor)
    assert role in refused(pack(model), tmp_path)


@pytest.mark.parametrize(("origin", "role"), ROLES)
def test_a_role_that_reads_the_weight_of_another_is_named(tmp_path: Path, origin: str, role: str) -> None:
    """With a constant of the same size, the graph is sound but for the weight that nothing reads any more."""
    indices = tensors_of(origin)
    tensors = sound(origin).model.subgraphs[0].tensors
    mine = tensors[indices[role]]
    same = [r for r, i in indices.items() if r != role and tensors[i].shape == mine.shape]
    for count, other in enumerate((same or ["final_norm"])[:2]):
        model = load(data_of(origin))
        op, position = reader(model, indices[role])
        op.inputs[position] = indices[other]
        assert role in refused(pack(model), tmp_path / str(count))


@pytest.mark.parametrize("origin", LAYERS)
def test_weights_with_meaningless_names_are_the_same(tmp_path: Path, origin: str) -> None:
    expected = checkpoint(data_of(origin), tmp_path / "sound")
    model = load(data_of(origin))
    for count, tensor in enumerate(tensors_of(origin).values()):
        model.subgraphs[0].tensors[tensor].name = b"\xff\x1b[31m;;/garbage/../%d" % (count % 2)
        if count == 8:
            assert checkpoint(pack(model), tmp_path / f"{count}") == expected
    assert checkpoint(pack(model), tmp_path / "all") == expected


def named_tensor(role: str) -> int:
    """The tensor whose name says what ``role`` is: the constant of a matrix, the result of anything else."""
    found = next(r for r in sound("sample").walk.roles if r.role == role)
    if len(found.shape) == 2:
        return tensors_of("sample")[role]
    op, _ = reader(load(data_of("sample")), tensors_of("sample")[role])
    return int(op.outputs[0])


NAMED = [name for origin, name in ROLES if origin == "sample" and not name.endswith("layer_scalar")]


@pytest.mark.parametrize("role", NAMED)
def test_a_weight_with_the_name_of_another_is_refused(tmp_path: Path, role: str) -> None:
    """The graph says one thing and the name another: both are in the message."""
    is_matrix = {r.role: len(r.shape) == 2 for r in sound("sample").walk.roles}
    # The post projection's name is one that exporters put on the head as well.
    others = [n for n in NAMED if n != role and is_matrix[n] == is_matrix[role] and n != "post_projection"]
    for count, other in enumerate((others[0], others[-1])):
        model = load(data_of("sample"))
        tensors = model.subgraphs[0].tensors
        tensors[named_tensor(role)].name = tensors[named_tensor(other)].name
        # A norm carries the name of its composite's body as well.
        op, _ = reader(model, tensors_of("sample")[role])
        if not is_matrix[role]:
            theirs, _ = reader(model, tensors_of("sample")[other])
            for mine, name in zip(_results(model, op), _results(model, theirs), strict=True):
                mine.name = name.name
        message = refused(pack(model), tmp_path / str(count))
        assert f"{role}:" in message
        assert other in message


def _results(model: Any, op: Any) -> Iterator[Any]:
    """The output tensor of a composite, in the graph and in its body."""
    yield model.subgraphs[0].tensors[op.outputs[0]]
    body = model.subgraphs[op.builtinOptions2.decompositionSubgraphIndex]
    yield body.tensors[body.outputs[0]]


def pairs_of_equal_shape() -> list[tuple[str, str]]:
    """Matrices of the sample, each with the next one that it could be mistaken for."""
    shapes = {r.role: r.shape for r in sound("sample").walk.roles if len(r.shape) == 2}
    pairs = []
    for role, shape in shapes.items():
        following = [other for other in list(shapes)[list(shapes).index(role) + 1 :] if shapes[other] == shape]
        pairs += [(role, other) for other in following[:2]]
    return pairs


@pytest.mark.parametrize(("first", "second"), pairs_of_equal_shape())
def test_two_weights_that_are_swapped_are_refused(tmp_path: Path, first: str, second: str) -> None:
    model = load(data_of("sample"))
    one, two = (reader(model, tensors_of("sample")[role]) for role in (first, second))
    one[0].inputs[one[1]], two[0].inputs[two[1]] = tensors_of("sample")[second], tensors_of("sample")[first]
    message = refused(pack(model), tmp_path)
    assert first in message
    assert second in message


def other_ops(origin: str) -> list[int]:
    """Indices of the ops of the main subgraph that read no weight, but for those of repeated layers."""
    weights = set(tensors_of(origin).values())
    operators = sound(origin).model.subgraphs[0].operators
    repeated = range(0)
    if origin == "sample":
        begins = [tensors_of(origin)[f"layers.{layer}.pre_attention_norm"] for layer in (1, 3)]
        repeated = range(*(op.index for op in operators for tensor in begins if tensor in op.inputs))
    return [op.index for op in operators if not weights & set(op.inputs) and op.index not in repeated]


@pytest.mark.parametrize("bypass", [False, True], ids=["deleted", "bypassed"])
@pytest.mark.parametrize("origin", LAYERS)
def test_an_op_without_a_weight_is_needed_or_changes_nothing(tmp_path: Path, origin: str, bypass: bool) -> None:
    """Whichever op is taken out, its readers left with nothing or with its own first operand."""
    expected = checkpoint(data_of(origin), tmp_path / "sound")
    refusals = 0
    for index in other_ops(origin):
        model = load(data_of(origin))
        graph = model.subgraphs[0]
        op = graph.operators.pop(index)
        if bypass:
            for left in graph.operators:
                left.inputs = [op.inputs[0] if t == op.outputs[0] else t for t in left.inputs]
        try:
            found = checkpoint(pack(model), tmp_path / str(index))
        except MtpExtractError:
            assert not (tmp_path / str(index) / "out").exists()
            refusals += 1
            continue
        assert bypass, f"op {index} {kind(model, op)} was deleted, and its result is read"
        assert found == expected, f"op {index} {kind(model, op)}"
    assert refusals >= (0 if bypass else len(other_ops(origin)))


def test_a_stored_weight_that_nothing_reads_is_refused(tmp_path: Path) -> None:
    """A scalar folded away by hand: the graph is sound without it, and the constant tells."""
    model = load(data_of("plain"))
    op, position = reader(model, tensors_of("plain")["layers.0.layer_scalar"])
    for left in model.subgraphs[0].operators:
        left.inputs = [op.inputs[1 - position] if t == op.outputs[0] else t for t in left.inputs]
    model.subgraphs[0].operators.remove(op)
    with pytest.raises(RoleError, match=r"no op reads it.*layers\.0\.layer_scalar"):
        open_bundle(Memory(pack(model))).drafter()
