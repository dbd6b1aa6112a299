"""The base's states are the same, to the bit, wherever they are kept; and what is kept on disk is what was written."""

from __future__ import annotations

import copy
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from mtp_extract.drafter.protocol import Needs
from mtp_extract.errors import CheckpointError, OutputError
from mtp_extract.speculate.target import Base
from mtp_extract.speculate.teacher import Text
from mtp_extract.tune import states as module
from mtp_extract.tune.states import Room, States, TextStates, states_of, token_bytes

from .conftest import Tiny
from .test_loop import assert_same

# A group of two texts takes 25 to 34 kB in F32.
SOME = 34_000


def tensors(item: TextStates) -> list[Tensor]:
    kv = [part for pair in item.shared_kv.values() for part in pair]
    return [item.hidden, item.choices, *item.layers.values(), *kv]


def assert_equal(ones: list[TextStates], others: list[TextStates]) -> None:
    for one, other in zip(ones, others, strict=True):
        assert one.text == other.text
        assert one.shared_kv.keys() == other.shared_kv.keys()
        for a, b in zip(tensors(one), tensors(other), strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Counts forwards of the base, of groups of two texts."""
    monkeypatch.setattr(module, "_TOKENS_AT_ONCE", 48)
    counted = Mock(side_effect=states_of)
    monkeypatch.setattr(module, "states_of", counted)
    return counted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_wherever_they_are_kept(tiny: Tiny, tmp_path: Path, forwards: Mock, dtype: torch.dtype) -> None:
    """In memory, on disk, or nowhere; in whichever order they are asked for; by a run before."""
    base = Base(copy.deepcopy(tiny.base.model).to(dtype))
    needs = Needs(40, 32, layers=(1, 3), shared_kv=tiny.drafter.needs.shared_kv)
    texts = [*tiny.texts, tiny.texts[0]]
    rooms = {
        "memory": Room(1 << 20),
        "nowhere": Room(),
        "disk": Room(0, 1 << 20, tmp_path / "disk", "a base"),
        "a share": Room(SOME, SOME, tmp_path / "share", "a base"),
    }
    if dtype == torch.bfloat16:
        rooms["a share"] = Room(SOME // 2, SOME // 2, tmp_path / "share", "a base")
    made = {name: States(base, needs, texts, 4, room, 80) for name, room in rooms.items()}
    assert [made[name].share for name in ("memory", "nowhere", "disk")] == [1, 0, 1]
    assert 0.3 < made["a share"].share < 1
    assert 0 < made["a share"].sizes["disk"] <= rooms["a share"].disk
    expected = made["memory"].of(texts)
    groups = forwards.call_count
    assert groups == 4
    for name, states in made.items():
        forwards.reset_mock()
        assert_equal(states.of(texts[::-1])[::-1], expected)
        assert forwards.call_count == (0 if name == "memory" else groups)
        assert_equal(states.of(texts), expected)
        # A run that goes on finds what lies on disk.
        forwards.reset_mock()
        assert_equal(States(base, needs, texts, 4, rooms[name], 80).of(texts), expected)
        assert forwards.call_count == {"memory": 4, "nowhere": 4, "disk": 0, "a share": 3}[name]
    sizes = [sum(tensor.nbytes for tensor in tensors(item)) for item in expected]
    assert sizes == [len(text.tokens) * token_bytes(needs, dtype.itemsize) for text in texts]
    made["disk"].forget()
    assert not (tmp_path / "disk").exists()


def test_a_long_text_is_computed_alone(tiny: Tiny, forwards: Mock) -> None:
    """So that no other is computed again with it; and never more together than a batch."""
    lengths = {4: 5, 30: 2, 100: 2}
    texts = [Text(tuple(range(number, number + length)), 1) for length, n in lengths.items() for number in range(n)]
    texts = [Text(tuple(token % 40 for token in text.tokens), 1) for text in texts]
    States(tiny.base, tiny.drafter.needs, texts, 3, Room(), 1 << 20).of(texts)
    assert [len(call.args[2]) for call in forwards.call_args_list] == [3, 2, 1, 1, 1, 1]


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "longer", "a folder"])
def test_a_damaged_file_is_said(tiny: Tiny, tmp_path: Path, damage: str) -> None:
    room = Room(0, 1 << 20, tmp_path, "a base")
    States(tiny.base, tiny.drafter.needs, tiny.texts, 4, room, 1 << 20).of(tiny.texts)
    path = min(tmp_path.iterdir())
    whole = path.read_bytes()
    if damage == "a folder":
        path.unlink()
        path.mkdir()
    else:
        middle = len(whole) // 2
        flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
        path.write_bytes({"cut": whole[:-1], "empty": b"", "flipped": flipped, "longer": whole + b"\0"}[damage])
    with pytest.raises(CheckpointError, match=rf"{path.name}: expected states of the base as they were kept"):
        States(tiny.base, tiny.drafter.needs, tiny.texts, 4, room, 1 << 20).of(tiny.texts)


def test_states_of_others_make_room(tiny: Tiny, tmp_path: Path) -> None:
    """Of another base, other texts, or another batch: they are never read, and go when new ones are written."""
    (tmp_path / "mine.txt").write_text("mine")
    others = [("another base", tiny.texts, 4), ("a base", tiny.texts[1:], 4), ("a base", tiny.texts, 3)]
    seen = set[str]()
    for name, texts, batch in [("a base", tiny.texts, 4), *others]:
        made = States(tiny.base, tiny.drafter.needs, texts, batch, Room(0, 1 << 20, tmp_path, name), 1 << 20)
        made.of(texts)
        there = {path.name for path in tmp_path.glob("*.states")}
        assert there
        assert not there & seen
        seen |= there
    (tmp_path / "x-00000.7.part").write_text("cut off")
    made.forget()
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_disk_that_is_full_is_said(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "states").write_text("no folder")
    states = States(tiny.base, tiny.drafter.needs, tiny.texts, 4, Room(0, 1 << 20, tmp_path / "states"), 1 << 20)
    with pytest.raises(OutputError, match="expected a place to keep text and state") as found:
        states.of(tiny.texts)
    assert found.value.remedies == ("work",)


def test_a_training_does_not_depend_on_the_room(tiny: Tiny, tmp_path: Path) -> None:
    """Nor when it was stopped, and went on with what lay on disk."""
    whole = tiny.train(tmp_path / "whole")
    assert_same(whole, tiny.train(tmp_path / "nowhere", room=Room()))
    part = Room(29_000, 22_000, tmp_path / "states", "a base")
    calls = iter(range(100))
    tiny.train(tmp_path / "part", stop=lambda: next(calls) == 4, room=part)
    assert any((tmp_path / "states").iterdir())
    assert_same(whole, tiny.train(tmp_path / "part", room=part))
