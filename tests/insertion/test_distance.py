"""Slots: one pass over the rows finds what float64 finds number by number, and reads each row once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from copy import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from helpers.variant_files import variant

from mtp_extract.bundle import open_bundle
from mtp_extract.checkpoint import stored
from mtp_extract.checkpoint.dtypes import DTYPES
from mtp_extract.checkpoint.stored import FileWeight, TensorPlace
from mtp_extract.checkpoint.weight import Weight, wrap_array
from mtp_extract.errors import OutputError
from mtp_extract.insertion import slots as slots_module
from mtp_extract.insertion.comparison import DIFFERENT, EQUAL, HALF_STEP, RoleVerdict, compare_slots
from mtp_extract.insertion.encoding import KEPT, REQUANTIZED, check_written, encode_slots
from mtp_extract.insertion.slots import Location, RoleMatch, WeightSlot, match_roles

Floats = npt.NDArray[np.float32]
Moves = Callable[[Floats, Floats], Floats]


def move_by(steps: float) -> Moves:
    """Move every number by up to ``steps`` of its steps."""
    return lambda weight, step: weight + step * np.random.default_rng(0).uniform(-steps, steps, weight.shape)


def move_one(weight: Floats, step: Floats) -> Floats:
    """Move the last number."""
    moved = weight.copy()
    moved[-1, -1] += 2 * step[-1, -1]
    return moved


MOVES: dict[str, Moves] = {
    "not at all": lambda weight, step: weight,
    "a little": move_by(0.3),
    "further": move_by(2.0),
    "one": move_one,
    "far": lambda weight, step: weight * np.float32(1e20),
    "to nothing": lambda weight, step: weight * np.float32(0),
}


@pytest.fixture(scope="module")
def places() -> Iterator[dict[str, Location]]:
    """Matrices with zero points, in blocks, in 2, 4 and 8 bits, with a factor folded in."""
    locations: dict[str, Location] = {}
    with ExitStack() as stack:
        for name in ("torch_asymmetric", "torch_blockwise32", "torch_int2", "torch_static8_mix48_kv8"):
            drafter = stack.enter_context(open_bundle(variant(name))).read_drafter()
            for role in drafter.structure.roles:
                if role.tensor is not None and len(role.shape) == 2:
                    place = Location(drafter.model, role)
                    constant = place.constant
                    assert constant is not None
                    storage = constant.source.storage
                    locations.setdefault(f"{storage.type.name} {storage.kind}", place)
                    folded = replace(place, found=replace(role, factor=1.5))
                    locations.setdefault(f"{storage.type.name} with a factor", folded)
        yield locations


def get_constant(place: Location) -> Weight:
    assert place.constant is not None
    return place.constant


def judge(*slots: WeightSlot) -> RoleVerdict:
    """Compare ``slots``, which hold one role."""
    shape, places = slots[0].new.shape, tuple(place for slot in slots for place in slot.places)
    (verdict,) = compare_slots([RoleMatch("role", None, shape, places, list(slots), "")])
    return verdict


def compare_numbers(slot: WeightSlot, step: Floats) -> tuple[float, float, int]:
    """Return in float64 the error, the largest distance in steps, and the numbers that half a step does not explain."""
    stored_weight, wanted = slot.stored_weight.array().astype(np.float64), slot.new.array().astype(np.float64)
    distances = np.where(wanted == stored_weight, 0.0, np.abs(wanted - stored_weight) / step)
    slack = 0.5001 + DTYPES[slot.dtype].roundoff * np.abs(wanted) / step
    error = np.sqrt(np.square(wanted - stored_weight).sum() / np.square(wanted).sum()) if wanted.any() else np.inf
    return float(error), float(distances.max()), int((distances > slack).sum())


@pytest.mark.parametrize("name", MOVES)
def test_one_pass_finds_what_number_by_number_finds(
    places: dict[str, Location], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots_module, "_ELEMENTS", 1000)
    assert len(places) > 5
    for kind, place in places.items():
        if name == "far" and "blockwise" in kind:
            continue  # its scales are FP16, in which no such weight can be
        stored_weight = get_constant(place)
        weight, steps = stored_weight.array(), stored_weight.steps
        assert steps is not None
        step = np.broadcast_to(np.abs(np.repeat(steps.size, steps.block, axis=1)) / steps.factor, weight.shape)
        slot = WeightSlot("role", (place,), wrap_array(MOVES[name](weight, step).astype(np.float32)), "f32")
        verdict = judge(slot)
        expected, most, outside = compare_numbers(slot, step)
        error = np.inf if verdict.error is None else verdict.error
        assert error == pytest.approx(expected, rel=1e-4, abs=2e-5), kind
        assert verdict.steps == pytest.approx(most, rel=1e-4, abs=1e-4), kind
        assert verdict.verdict == (EQUAL if name == "not at all" else DIFFERENT if outside else HALF_STEP), kind
        assert verdict.verdict != DIFFERENT or str(verdict.why).startswith(f"{outside} weight"), kind
        (encoding,) = encode_slots([slot])["role"]
        assert encoding.how == KEPT if name == "not at all" else encoding.how == REQUANTIZED or not outside, kind


def test_rows_that_both_scales_hold_keep_the_files(places: dict[str, Location]) -> None:
    """Numbers that are 0 or three steps: those steps, and sevenths of the largest, store them exactly."""
    place = places["INT4 per_channel"]
    steps = get_constant(place).steps.size
    signs = np.random.default_rng(0).integers(-1, 2, get_constant(place).shape)
    signs[:, 0] = 1
    slot = WeightSlot("role", (place,), wrap_array((3 * steps * signs).astype(np.float32)), "f32")
    (encoding,) = encode_slots([slot])["role"]
    assert encoding.how == REQUANTIZED and encoding.error < 1e-6
    assert np.array_equal(encoding.scales.scale, steps[:, 0])


@pytest.fixture
def tables(places: dict[str, Location], tmp_path: Path) -> list[WeightSlot]:
    """Constants of one shape, and new weights that are columns of one tensor: for the first unchanged."""
    shape = next(place.found.shape for place in places.values() if place.found.shape[1] % 32 == 0)
    chosen = [place for place in places.values() if place.found.shape == shape]
    assert len(chosen) > 2
    beside = np.concatenate([get_constant(place).array() for place in chosen], axis=1)
    beside[:, shape[1] :] *= np.float32(1.01)
    path, data = tmp_path / "rows", DTYPES["bf16"].narrow(beside.reshape(-1), "rows").tobytes()
    path.write_bytes(data)
    table = FileWeight(path, TensorPlace("BF16", beside.shape, 0, len(data)))
    columns = [(at * shape[1], (at + 1) * shape[1]) for at in range(len(chosen))]
    beside_each_other = [replace(place, columns=range_) for place, range_ in zip(chosen, columns, strict=True)]
    (match,) = match_roles({"table": tuple(beside_each_other)}, {"table": table}, "bf16")
    return match.slots


def test_rows_that_several_tables_are_columns_of_are_read_once(
    tables: list[WeightSlot], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Comparing and encoding all tables reads each row as often as for one, and gives the same."""
    read: list[int] = []
    read_rows = stored.read_rows
    monkeypatch.setattr(stored, "read_rows", lambda *rows: read.append(rows[3] - rows[2]) or read_rows(*rows))

    def count_rows(action: Callable[[], object]) -> int:
        read.clear()
        action()
        return sum(read)

    fresh = [replace(slot, new=copy(slot.new)) for slot in tables]
    assert count_rows(lambda: judge(*fresh)) == fresh[0].new.rows
    assert count_rows(lambda: encode_slots(fresh[1:])) <= count_rows(lambda: encode_slots(fresh[-1:]))
    together, alone = encode_slots(fresh)["table"], [encode_slots([slot])["table"][0] for slot in fresh]
    assert {encoding.how for encoding in together} == {KEPT, REQUANTIZED}
    for ours, theirs in zip(together, alone, strict=True):
        assert (ours.how, ours.error) == (theirs.how, theirs.error)
        assert ours.encode_rows(0, ours.slot.new.rows) == theirs.encode_rows(0, theirs.slot.new.rows)
        assert np.array_equal(ours.scales.scale, theirs.scales.scale)
    with pytest.raises(OutputError, match="table reads back differently"):
        check_written(Path("new"), fresh, encode_slots(fresh))
