"""Pages that were never downloaded are distinguished from rows that really are zero."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import run_here
from helpers.make_bundle import drafter_of, load, pack, set_buffer

import mtp_extract
from mtp_extract.bundle import ModelFile
from mtp_extract.io.files import align_up
from mtp_extract.io.source import BytesSource, Region
from mtp_extract.litertlm.holes import PAGE, find_missing_rows, find_zero_pages
from mtp_extract.litertlm.quantized import QuantizedTensor
from mtp_extract.litertlm.storage import Floats, Storage
from mtp_extract.litertlm.tflite import Tensor, TensorType

ROWS, COLUMNS = 512, 64
TINY = np.float32(1e-9) / np.float32(127)
"""ai-edge-quantizer's scale of a row of zeros in INT8."""


def make_matrix(
    zeros: slice,
    scale: Floats,
    *,
    type_: TensorType = TensorType.INT8,
    kind: str = "per_channel",
    before: int = 0,
    shape: tuple[int, int] = (ROWS, COLUMNS),
) -> QuantizedTensor:
    """Make a matrix whose codes are 0 in the rows ``zeros`` alone, ``before`` bytes after a page of its file."""
    codes = np.random.default_rng(4).choice([-3, -2, -1, 1, 2, 3, 7], shape)
    codes[zeros] = 0
    storage = Storage(type_, shape, kind, 0, 32 if kind == "blockwise" else 0)
    data = storage.pack_codes(codes.reshape(-1)) if storage.packing else codes.astype(np.float32).tobytes()
    source = BytesSource(bytes(2 * PAGE + before) + data)
    tensor = Tensor(0, 0, "w", shape, int(type_), 0, 0, None, False, False)
    region = Region(source, 2 * PAGE + before, len(data), "w")
    return QuantizedTensor(tensor, region, storage, scale, np.zeros(scale.shape, np.int64))


def make_scales(count: int = ROWS) -> Floats:
    """Make scales as rows of ordinary weights have: all different."""
    return np.random.default_rng(5).uniform(1e-3, 1e-2, count).astype(np.float32)


@pytest.mark.parametrize(("before", "wanted"), [(0, range(128, 256)), (16, range(128, 255)), (4000, range(130, 257))])
def test_a_page_of_zeros_is_a_hole_where_its_rows_have_scales_of_their_own(before: int, wanted: range) -> None:
    """A page has 64 of these rows; the zeros around the whole pages do not count."""
    assert find_missing_rows(make_matrix(slice(100, 300), make_scales(), before=before)) == wanted


def test_rows_of_four_bits_and_blocks_are_found_too() -> None:
    assert find_missing_rows(make_matrix(slice(128, 384), make_scales(), type_=TensorType.INT4)) == range(128, 384)
    # The scales of blocks are two a row; the message counts blocks.
    blocks = make_matrix(slice(128, 384), make_scales(2 * ROWS), type_=TensorType.INT4, kind="blockwise")
    assert find_missing_rows(blocks) == range(256, 768)


def test_a_matrix_of_which_nothing_was_downloaded_is_a_hole() -> None:
    assert find_missing_rows(make_matrix(slice(None), make_scales())) == range(ROWS)


@pytest.mark.parametrize("value", [TINY, 0.0, 1.0, 0.005, 2**-24])
def test_rows_that_a_quantizer_wrote_as_zeros_are_sound(value: float) -> None:
    """A quantizer gives all of them the same scale."""
    zeros, row_scales = slice(64, 320), make_scales()
    row_scales[zeros] = value
    assert find_missing_rows(make_matrix(zeros, row_scales)) is None


def test_what_is_no_whole_page_is_sound() -> None:
    """Single rows of zeros, and fewer than a page."""
    assert find_missing_rows(make_matrix(slice(65, 127), make_scales())) is None
    assert find_missing_rows(make_matrix(slice(1, None, 2), make_scales())) is None


def test_of_one_scale_for_all_or_floats_nothing_can_be_said() -> None:
    assert find_missing_rows(make_matrix(slice(64, 320), make_scales(1), kind="per_tensor")) is None
    floats = make_matrix(slice(64, 320), np.empty(0, np.float32), type_=TensorType.FLOAT32, kind="none")
    assert find_missing_rows(floats) is None
    assert [end - begin for begin, end in find_zero_pages(floats.location)] == [256 * COLUMNS * 4]


def test_a_single_long_row_is_a_hole_where_its_scale_is_an_ordinary_one() -> None:
    long = (8, 3 * PAGE)
    ordinary = np.linspace(1e-3, 1e-2, 8, dtype=np.float32)
    assert find_missing_rows(make_matrix(slice(3, 4), ordinary, shape=long)) == range(3, 4)
    for value in (TINY, 0, 1):
        ordinary[3] = value
        assert find_missing_rows(make_matrix(slice(3, 4), ordinary, shape=long)) is None


def test_a_page_of_scales_that_are_0_is_a_hole_where_codes_are_not() -> None:
    shape, row_scales = (2048, COLUMNS), make_scales(2048)
    row_scales[500:1524] = 0
    assert find_missing_rows(make_matrix(slice(0, 0), row_scales, shape=shape)) == range(500, 501)
    assert find_missing_rows(make_matrix(slice(500, 1524), row_scales, shape=shape)) is None
    row_scales[500:600] = 1e-3
    assert find_missing_rows(make_matrix(slice(0, 0), row_scales, shape=shape)) is None


def find_head(opened: ModelFile) -> Tensor:
    return next(role.tensor for role in opened.read_drafter().structure.roles if role.role == "lm_head" and role.tensor)


def test_a_bundle_with_a_hole_is_refused_by_tensor_and_rows(sample: Path, extracted: Path, tmp_path: Path) -> None:
    """A download misses 8 KiB of the head."""
    hollow = Path(shutil.copy(sample, tmp_path / "hollow.litertlm"))
    with mtp_extract.open(sample) as opened, hollow.open("r+b") as file:
        head = opened.find_model().locate(find_head(opened))
        file.seek(align_up(head.begin, PAGE))
        file.write(bytes(2 * PAGE))
    for command in (
        ("extract", hollow, "-o", tmp_path / "out"),
        ("inspect", hollow, "--graph"),
        ("inspect", extracted, "--against", hollow),
    ):
        process = run_here(*map(str, command))
        assert process.returncode == 1
        assert re.fullmatch(
            r"error: \S*hollow\.litertlm: rows \d+ to \d+ of lm_head \(tensor .*\) hold zeros .* not downloaded "
            r"completely\? Fetch the file again, and compare its SHA-256 with the publisher's\.\n",
            process.stderr,
        ), process.stderr
    assert not (tmp_path / "out").exists()


def test_zeros_in_floats_are_said_and_extracted(sample: Path, tmp_path: Path) -> None:
    """Pruned rows are valid: 400 rows of 256 bytes of a head in F32."""
    model = load(drafter_of(sample))
    with mtp_extract.open(sample) as opened:
        head = find_head(opened)
    tensor = model.subgraphs[head.subgraph].tensors[head.index]
    values = np.random.default_rng(6).standard_normal(head.shape).astype(np.float32)
    values[100:500] = 0
    tensor.type, tensor.quantization = int(TensorType.FLOAT32), None
    set_buffer(model, tensor, values.tobytes())
    (tmp_path / "pruned.tflite").write_bytes(pack(model))
    result = mtp_extract.extract(tmp_path / "pruned.tflite", tmp_path / "out", dtype="f32")
    said = r"lm_head holds (98,304|102,400) bytes of zeros in whole pages\."
    assert any(re.match(said, note) for note in result.notes)
