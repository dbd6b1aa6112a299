"""A matrix in codes beside floats: what one pass over rows finds is what number by number finds, on any threads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from mtp_extract.base import distance
from mtp_extract.base.distance import DIFFERENT, EQUAL, measure_columns, measure_distance
from mtp_extract.bundle import open_bundle
from mtp_extract.checkpoint import stored
from mtp_extract.checkpoint.constant import Constant
from mtp_extract.checkpoint.dtypes import DTYPES
from mtp_extract.checkpoint.stored import Stored, StoredTensor, columns_of, stored_weight
from mtp_extract.checkpoint.weight import Weight, of_array
from mtp_extract.errors import OutputError
from mtp_extract.insert.decision import decide, table_of
from mtp_extract.io.threads import in_turn

VARIANTS = Path(__file__).resolve().parent.parent / "variants"
Floats = npt.NDArray[np.float32]
Moves = Callable[[Floats, Floats], Floats]


def moved_by(steps: float) -> Moves:
    """Every number, by up to so many of its steps."""
    return lambda weight, step: weight + step * np.random.default_rng(0).uniform(-steps, steps, weight.shape)


def one(weight: Floats, step: Floats) -> Floats:
    """One number alone, the last."""
    other = weight.copy()
    other[-1, -1] += 2 * step[-1, -1]
    return other


def on_the_edge(weight: Floats, step: Floats) -> Floats:
    """Where half a step ends, and rounding with it: just below, on it and above."""
    edges = np.float32([0.4999, 0.5, 0.50005, 0.5001, 0.50011, 0.5002])
    return weight + step * np.resize(edges, weight.size).reshape(weight.shape)


MOVES: dict[str, Moves] = {
    "not at all": lambda weight, step: weight,
    "a little": moved_by(0.3),
    "further": moved_by(2.0),
    "one": one,
    "the edge": on_the_edge,
    "far": lambda weight, step: weight * np.float32(1e20),
    "to nothing": lambda weight, step: weight * np.float32(0),
    "beyond": lambda weight, step: np.where(step == step.max(), np.float32(np.nan), weight),
}


@pytest.fixture(scope="module")
def matrices() -> Iterator[dict[str, Constant]]:
    """With zero points, in blocks, in 2, 4 and 8 bits, with a factor folded in."""
    found = {}
    with (
        open_bundle(VARIANTS / "torch_asymmetric.tflite") as first,
        open_bundle(VARIANTS / "torch_blockwise32.tflite") as second,
        open_bundle(VARIANTS / "torch_int2.tflite") as third,
        open_bundle(VARIANTS / "torch_static8_mix48_kv8.tflite") as fourth,
    ):
        for opened in (first, second, third, fourth):
            drafter = opened.drafter()
            for role in drafter.walk.roles:
                if role.tensor is not None and len(role.shape) == 2:
                    constant = Constant.of(drafter.model, role)
                    if constant.by_rows:
                        storage = constant.source.storage
                        found.setdefault(f"{storage.type.name} {storage.kind}", constant)
                        factor = Constant(constant.shape, constant.source, 1.5)
                        found.setdefault(f"{storage.type.name} with a factor", factor)
        yield found


@pytest.mark.parametrize("name", MOVES)
def test_one_pass_finds_what_number_by_number_finds(
    matrices: dict[str, Constant], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distance, "_BLOCK", 1000)
    monkeypatch.setattr(distance, "_PART", 3000)
    assert len(matrices) > 5
    verdicts = set()
    for kind, constant in matrices.items():
        rows, columns = constant.shape
        if name == "far" and constant.source.storage.kind == "blockwise":
            continue  # its scales are FP16, in which no such weight can be
        steps = constant.weight.steps
        assert steps is not None
        step = (np.abs(steps.in_blocks(1)) / steps.factor).astype(np.float32)
        weight = constant.weight.array()
        new = of_array(MOVES[name](weight, np.broadcast_to(step, (rows, columns))).astype(np.float32))
        with ThreadPoolExecutor(3) as pool:
            found = measure_distance(constant.weight, new, pool)
        assert found == measure_distance(constant.weight, new), kind
        with monkeypatch.context() as patch:
            patch.setattr(Constant, "by_rows", False)
            slow = measure_distance(constant.weight, new)
        assert (found.verdict, found.codes_apart) == (slow.verdict, slow.codes_apart), kind
        assert found.why.split(" lie ")[0] == slow.why.split(" lie ")[0], kind  # how many lie too far
        for ours, theirs in ((found.error, slow.error), (found.steps, slow.steps)):
            same = ours == theirs or math.isclose(ours or 0, theirs or 0, rel_tol=1e-5, abs_tol=2e-5)
            assert same, (kind, ours, theirs)
        verdicts.add(found.verdict)
        at_once = distance.differs_at_once(constant.weight, new)
        assert found.verdict == DIFFERENT if at_once else name != "far" or not constant.by_rows, kind
    assert (verdicts == {EQUAL}) == (name == "not at all")


def test_numbers_that_are_not_equal_are_not_rounded_to_the_end(
    matrices: dict[str, Constant], monkeypatch: pytest.MonkeyPatch
) -> None:
    constant = next(iter(matrices.values()))
    asked: list[int] = []
    is_same = distance._is_same
    monkeypatch.setattr(distance, "_is_same", lambda held, *rest: asked.append(held.size) or is_same(held, *rest))
    measure_distance(constant.weight, of_array(constant.weight.array() * np.float32(1.001)))
    assert asked == [8 * constant.shape[1]]


Tables = list[tuple[Constant, Weight]]


@pytest.fixture
def tables(matrices: dict[str, Constant], tmp_path: Path) -> Tables:
    """Constants of one shape, and what they are to hold side by side in a file: the first its own, the others more."""
    shape = next(constant.shape for constant in matrices.values() if constant.shape[1] % 32 == 0)
    chosen = [constant for constant in matrices.values() if constant.shape == shape]
    assert len(chosen) > 1
    beside = np.concatenate([constant.weight.array() for constant in chosen], axis=1)
    beside[:, shape[1] :] *= np.float32(1.01)
    path, data = tmp_path / "rows", DTYPES["bf16"].narrow(beside.reshape(-1), "rows").tobytes()
    path.write_bytes(data)
    whole = stored_weight(path, StoredTensor("BF16", beside.shape, 0, len(data)))
    return [(constant, columns_of(whole, at * shape[1], (at + 1) * shape[1])) for at, constant in enumerate(chosen)]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each reading of a file was of."""
    found: list[int] = []
    rows = stored.read_rows
    monkeypatch.setattr(stored, "read_rows", lambda *given: found.append(given[3] - given[2]) or rows(*given))
    return found


def test_columns_of_one_matrix_are_compared_together(
    tables: Tables, read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every table of several in one pass over whole rows, with what a pass for each finds."""
    alone = [measure_distance(constant.weight, columns) for constant, columns in tables]
    rows, columns = tables[0][1].shape
    monkeypatch.setattr(distance, "_BLOCK", 16 * columns)
    read.clear()
    with ThreadPoolExecutor(3) as pool:
        together = measure_columns(tables, pool)
    # The first eight say what is asked of the others.
    assert read[0] == 8 and sum(read) == rows + 8 and max(read) == 16
    for ours, theirs in zip(together, alone, strict=True):
        assert (ours.verdict, ours.codes_apart) == (theirs.verdict, theirs.codes_apart)
        assert ours.error == pytest.approx(theirs.error) and ours.steps == theirs.steps
    assert len({found.verdict for found in together}) > 1


def test_columns_of_one_matrix_are_put_in_together(tables: Tables, read: list[int]) -> None:
    """Decided, encoded and compared with what was decided: each time in turn, so that each row is read once."""
    alone = [in_turn([decide("table", constant, columns, "bf16")])[0] for constant, columns in tables]
    whole = tables[0][1].source
    assert isinstance(whole, Stored)
    assert len({table_of(decision.new) for decision in alone}) == 1 and table_of(alone[0].new) is not None
    again = stored_weight(whole.path, whole.tensor)
    fresh = [(constant, columns_of(again, *columns.source.columns)) for constant, columns in tables]
    read.clear()
    decided = in_turn([decide("table", constant, columns, "bf16") for constant, columns in fresh])
    assert read == [whole.tensor.shape[0]]
    for ours, theirs in zip(decided, alone, strict=True):
        assert (ours.how, ours.error, ours.fingerprint) == (theirs.how, theirs.error, theirs.fingerprint)
    with pytest.raises(OutputError, match="table reads back differently"):
        in_turn([own.check_written(whole.path, held.weight) for own, (held, _) in zip(decided, fresh, strict=True)])
