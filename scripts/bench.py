"""Measure whole commands on a drafter of E4B's shape, in turn, and print a table.

    python scripts/bench.py [FILE.litertlm] [--repeats N]

Without FILE, a drafter with random weights is written first (a LM head and MLPs in INT4, the rest in INT8, 78 M
parameters), in a bundle padded to 4 GB with a hole. Extraction stands beside a short NumPy script that reads the same
section with the ``tflite`` package, dequantizes every tensor and saves it, and checks nothing. CPU time (user and
system) is the median, of processes of their own, taken alternately. Needs what the tests need.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from mtp_extract.bundle import open_bundle
from mtp_extract.formats import FORMATS
from mtp_extract.pipeline.extraction import checkpoint_of, prove_checkpoint

ROOT = Path(__file__).resolve().parent.parent
BUNDLE_SIZE = 4_000_000_000

NUMPY = """
import sys, numpy as np, tflite
from safetensors.numpy import save_file
path, begin, end, out = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
with open(path, "rb") as file:
    file.seek(begin)
    data = file.read(end - begin)
model = tflite.Model.GetRootAs(data, 0)
graph, tensors = model.Subgraphs(0), {}
for index in range(graph.TensorsLength()):
    tensor = graph.Tensors(index)
    raw, quantized = model.Buffers(tensor.Buffer()).DataAsNumpy(), tensor.Quantization()
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
"""Arguments: the bundle, where its section begins and ends, and what to write."""


def write_e4b_shaped(path: Path) -> None:
    """A bundle with a random drafter of the E4B shape behind a hole of almost 4 GB."""
    sys.path.insert(0, str(ROOT / "tests"))
    from ai_edge_litert import schema_py_generated as schema
    from helpers.make_bundle import ALIGNMENT, Part, bundle, pack
    from helpers.make_drafter import DrafterSpec, plain_model

    model = plain_model(
        DrafterSpec(
            windows=(512, 512, 512, None),
            hidden=256,
            ffn=2048,
            heads=4,
            kv_heads=2,
            head_dim=256,
            vocab=262144,
            backbone=2560,
            cache=32003,
        )
    )
    for tensor in model.subgraphs[0].tensors:
        # The LM head and the MLPs in INT4: half of the bytes, read as twice the codes.
        if tensor.type == schema.TensorType.INT8 and {262144, 2048} & set(tensor.shape):
            buffer = model.buffers[tensor.buffer]
            tensor.type, buffer.data = schema.TensorType.INT4, buffer.data[: len(buffer.data) // 2]
    data = pack(model)
    begin = (BUNDLE_SIZE - len(data)) // ALIGNMENT * ALIGNMENT
    items = {"model_type": "tf_lite_mtp_drafter"}
    header = bundle([Part(3, b"", items)], ranges=[(begin, begin + len(data))])
    with open(path, "wb") as file:
        file.write(header)
        file.seek(begin)
        file.write(data)


def run(words: Sequence[object]) -> tuple[float, float]:
    """CPU seconds and peak resident memory in MB of a process of its own.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    arguments = [sys.executable, *map(str, words)]
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise subprocess.CalledProcessError(status, arguments)
    return used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / 1e6


def alternately(commands: dict[str, Sequence[object]], repeats: int, out: Path) -> dict[str, tuple[float, float]]:
    """Median CPU seconds and MB of each of ``commands``, which write to ``out``, after one that warms up."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for _ in range(repeats + 1):
        for name, words in commands.items():
            shutil.rmtree(out, ignore_errors=True)
            out.unlink(missing_ok=True)
            taken[name].append(run(words))
    columns = {name: zip(*runs[1:], strict=True) for name, runs in taken.items()}
    return {name: (statistics.median(next(each)), statistics.median(next(each))) for name, each in columns.items()}


def proving(source: Path) -> float:
    """CPU seconds of reading the graph and proving its checkpoint, the least of three."""
    taken = []
    for _ in range(3):
        start = time.process_time()
        with open_bundle(source) as opened:
            drafter = opened.drafter()
            prove_checkpoint(drafter, checkpoint_of(drafter))
        taken.append(time.process_time() - start)
    return min(taken)


def main() -> None:
    """Measure, and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, help="a bundle with a drafter")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source, out, drafter = options.file, Path(folder) / "out", Path(folder) / "drafter"
        if source is None:
            source = Path(folder) / "e4b-shaped.litertlm"
            # In a process of its own: a child's peak memory begins with what its parent held when it was forked.
            maker = multiprocessing.get_context("spawn").Process(target=write_e4b_shaped, args=(source,))
            maker.start()
            maker.join()
        with open_bundle(source) as opened:
            region = opened.drafter().model.region
        ours = ("-m", "mtp_extract")
        run([*ours, "extract", source, "-o", drafter, "--dtype", "f32"])
        commands: dict[str, Sequence[object]] = {
            "NumPy alone, in F32": ("-c", NUMPY, source, region.begin, region.begin + region.size, out),
            "`mtp-extract --dtype f32`": (*ours, "extract", source, "-o", out, "--dtype", "f32"),
            "`mtp-extract`": (*ours, "extract", source, "-o", out),
        }
        coded = [name for name, listed in FORMATS.items() if "codes" in listed.dtypes and not listed.read_as]
        commands |= {
            f"`mtp-extract --for {name}`": (*ours, "extract", source, "-o", out, "--for", name) for name in coded
        }
        commands |= {
            "`mtp-insert` of the same weights": (*ours, "insert", drafter, source, "-o", out),
            "`mtp-inspect`": (*ours, "inspect", source),
            "`mtp --help`": (*ours, "--help"),
        }
        print("| what | CPU s | peak memory |\n| --- | --- | --- |")
        for name, (cpu, peak) in alternately(commands, options.repeats, out).items():
            print(f"| {name} | {cpu:.2f} | {peak:.0f} MB |")
        print(f"| reading the graph and proving, within extraction | {proving(source):.2f} | |")


if __name__ == "__main__":
    main()
