"""What extraction takes, its proof with it, beside a short NumPy script: both in one run, as a Markdown table.

    python scripts/bench.py [FILE.litertlm] [--repeats N]

Without FILE, a drafter of E4B's shape with random weights is written first, in a bundle padded to 4 GB with a hole. The
NumPy script reads the same section with the ``tflite`` package, dequantizes every matrix, saves them in F32, and checks
nothing. The last row is a validation against the bundle, once, for which Google's interpreter runs the section over
caches of their whole length. CPU time is user and system, memory the largest resident set; each is the median of
processes of their own, taken alternately after one that warms up. Needs Linux, and what the tests need.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np
from _rehearsal.measure import Measured, Running
from _rehearsal.shapes import SHAPES
from rehearse import ROOT, build_environment

from mtp_extract.bundle import open_bundle
from mtp_extract.formats import MTP_FORMATS
from mtp_extract.pipeline.extraction import build_checkpoint, prove_checkpoint

sys.path.insert(0, str(ROOT / "tests"))
from _rehearsal.drafter import build_drafter
from helpers.make_bundle import ALIGNMENT, DRAFTER, Part, bundle

BUNDLE_SIZE = 4_000_000_000
NUMPY = """
import sys, numpy as np, tflite
from safetensors.numpy import save_file
path, begin, size, out = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
with open(path, "rb") as file:
    file.seek(begin)
    data = file.read(size)
model = tflite.Model.GetRootAs(data, 0)
graph, tensors = model.Subgraphs(0), {}
for index in range(graph.TensorsLength()):
    tensor = graph.Tensors(index)
    buffer, quantized = model.Buffers(tensor.Buffer()), tensor.Quantization()
    raw = buffer.DataAsNumpy()
    if buffer.Size():
        raw = np.frombuffer(data, np.uint8, buffer.Size(), buffer.Offset())
    if isinstance(raw, int) or not quantized or tensor.Type() not in (9, 17):
        continue
    codes = raw.view(np.int8)
    if tensor.Type() == 17:
        codes = np.empty(raw.size * 2, np.int8)
        codes[0::2], codes[1::2] = raw & 15, raw >> 4
        codes = np.where(codes > 7, codes - 16, codes)
    scale = quantized.ScaleAsNumpy()
    tensors[str(index)] = codes.reshape(tensor.ShapeAsNumpy()).astype(np.float32) * scale.reshape(-1, 1)
save_file(tensors, out)
"""
"""Arguments: the bundle, where its section begins, its bytes, and what to write."""


def write_e4b_shaped(path: Path) -> None:
    """A bundle with a random drafter of E4B's shape behind a hole of almost 4 GB."""
    model = build_drafter(SHAPES["e4b"])
    data = model.packed()
    size = len(data) + model.outside
    begin = (BUNDLE_SIZE - size) // ALIGNMENT * ALIGNMENT
    with path.open("wb") as file:
        file.write(bundle([Part(3, b"", DRAFTER)], ranges=[(begin, begin + size)]))
        file.seek(begin)
        file.write(data)
        model.write_outside(file, np.random.default_rng(1))


def run_alternately(commands: dict[str, Sequence[object]], repeats: int, out: Path) -> dict[str, list[Measured]]:
    """Run ``commands`` in turn, ``repeats`` times each after a warm-up; they write to ``out``.

    Raises:
        SystemExit: one failed.
    """
    taken: dict[str, list[Measured]] = {name: [] for name in commands}
    for turn in range(repeats + 1):
        for name, words in commands.items():
            shutil.rmtree(out) if out.is_dir() else out.unlink(missing_ok=True)
            measured = Running([sys.executable, *map(str, words)], out.with_name("log"), build_environment()).finished()
            if measured.status:
                raise SystemExit(f"{name}: exit status {measured.status}: {measured.output[-600:]}")
            taken[name] += [measured] if turn else []
    return taken


def measure_proof(source: Path) -> float:
    """Measure the CPU seconds of reading the graph and proving its checkpoint; the least of three."""
    taken = []
    for _ in range(3):
        start = time.process_time()
        with open_bundle(source) as opened:
            prove_checkpoint(shard := opened.read_drafter(), build_checkpoint(shard))
        taken.append(time.process_time() - start)
    return min(taken)


def measure_validation(source: Path, folder: Path) -> Measured:
    """Measure ``mtp-validate --source`` for the drafter of ``source``.

    Raises:
        SystemExit: it, or the extraction before it, failed.
    """
    drafter = folder / "drafter"
    program = ("-m", "mtp_extract")
    steps = [("extract", source, "-o", drafter), ("validate", drafter, "--source", source)]
    for words in steps:
        taken = Running([sys.executable, *program, *map(str, words)], folder / "log", build_environment()).finished()
        if taken.status:
            raise SystemExit(f"{words[0]}: exit status {taken.status}: {taken.output[-600:]}")
    return taken


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, help="a bundle with a drafter")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source, out = options.file or Path(folder) / "e4b-shaped.litertlm", Path(folder) / "out"
        if options.file is None:
            write_e4b_shaped(source)
        with open_bundle(source) as opened:
            region = opened.read_drafter().model.region
        ours = ("-m", "mtp_extract", "extract", source, "-o", out)
        commands: dict[str, Sequence[object]] = {
            "NumPy alone, in F32": ("-c", NUMPY, source, region.begin, region.size, out),
            "`mtp-extract --dtype f32`": (*ours, "--dtype", "f32"),
            "`mtp-extract`": ours,
        }
        coded = [name for name, listed in MTP_FORMATS.items() if "codes" in listed.dtypes and not listed.read_as]
        commands |= {f"`mtp-extract --for {name}`": (*ours, "--for", name) for name in coded}
        commands |= {"`mtp-inspect`": (*ours[:2], "inspect", source), "`mtp --help`": (*ours[:2], "--help")}
        print("| what | CPU s | peak memory |\n| --- | --- | --- |")
        for name, runs in run_alternately(commands, options.repeats, out).items():
            print(f"| {name} | {median(m.cpu_s for m in runs):.2f} | {median(m.host for m in runs) / 1e6:.0f} MB |")
        print(f"| reading the graph and proving, within extraction | {measure_proof(source):.2f} | |")
        taken = measure_validation(source, Path(folder))
        print(f"| `mtp-validate --source` | {taken.cpu_s:.2f} | {taken.host / 1e6:.0f} MB |")


if __name__ == "__main__":
    main()
