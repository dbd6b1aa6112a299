"""Measure whole commands, side by side in one run, and print a table.

    python scripts/bench.py [FILE.litertlm]

Without FILE, a drafter of the E4B shape with random weights is written first (a LM head and MLPs in INT4, the rest in
INT8, 78 M parameters), in a bundle padded to 4 GB with a hole. Every pair of figures is taken alternately, and the
median is reported. Needs what the tests need.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mtp_extract.bundle import open_bundle
from mtp_extract.formats import FORMATS, format_named
from mtp_extract.litertlm.storage import CHUNK_ELEMENTS, QuantizedTensor
from mtp_extract.litertlm.tflite import TensorType

ROOT = Path(__file__).resolve().parent.parent
BUNDLE_SIZE = 4_000_000_000


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


def seconds(run: Callable[[], object]) -> float:
    """Wall-clock time of one run."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def alternately(
    runs: dict[str, Callable[[], object]], repeats: int, between: Callable[[], object] = lambda: None
) -> dict[str, float]:
    """Median seconds of each of ``runs``, taken in turn so that a busy moment hits all of them.

    ``between`` is called before each run and not timed.
    """
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats + 1):
        for name, run in runs.items():
            between()
            taken[name].append(seconds(run))
    for times in taken.values():
        # The first of each only warms up.
        del times[0]
    return {name: statistics.median(times) for name, times in taken.items()}


def command(*words: str) -> Callable[[], object]:
    """A run of one of our commands in an interpreter of its own."""
    return lambda: subprocess.run([sys.executable, "-c", *words], check=True, stdout=subprocess.DEVNULL)


def peak_memory(*words: str) -> float:
    """Peak resident memory of a process of its own, in MB."""
    process = subprocess.Popen([sys.executable, "-c", *words], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    assert status == 0
    return used.ru_maxrss * 1024 / 1e6


def entry(name: str) -> str:
    """Code that runs a command as its entry point does."""
    return f"import sys; sys.argv[0] = 'mtp-{name}'; from mtp_extract.cli.{name} import main; main()"


WITHOUT_PROOF = (
    "import types, mtp_extract.pipeline.extraction as e; "
    "said = {'positions': 1, 'position_values': 0, 'mask_rows': {'computed': 1, 'of': 1, 'alike': True}, "
    "'largest_scores': [], 'cache_axes': {}, 'activations_held_in': {}, 'fewest_codes': None, "
    "'largest_share_cut_off': 0, 'coarse_tables': []}; "
    "e.prove_written = lambda *_: types.SimpleNamespace(as_json=lambda: said); "
)
"""Code before a command that leaves the proof out, to see what the rest of extraction takes."""


def proving(source: Path) -> list[tuple[str, str]]:
    """The proof alone, in CPU time: the least of three."""
    from mtp_extract.pipeline.extraction import checkpoint_of, prove_checkpoint

    with open_bundle(source) as opened:
        drafter = opened.drafter()
        checkpoint = checkpoint_of(drafter)
        taken = []
        for _ in range(3):
            start = time.process_time()
            proof = prove_checkpoint(drafter, checkpoint)
            taken.append(time.process_time() - start)
    what = f"the proof alone, caches of {proof.positions} slots, CPU time"
    return [(what, f"{min(taken):.2f} s")]


def extraction_against_copying(source: Path, work: Path, repeats: int) -> list[tuple[str, str]]:
    """F32 extraction against copying the file it writes."""
    out, copy = work / "out", work / "copy"
    written = work / "written"
    extract = command(entry("extract"), str(source), "-o", str(out), "--dtype", "f32")
    peak = peak_memory(entry("extract"), str(source), "-o", str(out), "--dtype", "f32")
    (out / "model.safetensors").rename(written)

    def cleaning() -> None:
        copy.unlink(missing_ok=True)
        shutil.rmtree(out, ignore_errors=True)

    def copying() -> None:
        shutil.copyfile(written, copy)

    start = command("import mtp_extract.pipeline.extraction, mtp_extract.cli.extract")
    unproven = command(WITHOUT_PROOF + entry("extract"), str(source), "-o", str(out), "--dtype", "f32")
    runs = {"copy": copying, "extract": extract, "unproven": unproven, "python": command("pass"), "start": start}
    times = alternately(runs, repeats, cleaning)
    size = written.stat().st_size / 1e6
    net = times["unproven"] - times["start"]
    without = peak_memory(WITHOUT_PROOF + entry("extract"), str(source), "-o", str(work / "unproven"), "--dtype", "f32")
    return [
        (f"copying the output file ({size:.0f} MB)", f"{times['copy']:.3f} s"),
        ("starting the interpreter; with what the command imports", f"{times['python']:.3f} s; {times['start']:.3f} s"),
        ("`mtp-extract --dtype f32`, read back, compared and proven by execution", f"{times['extract']:.3f} s"),
        ("… without the proof", f"{times['unproven']:.3f} s"),
        ("… … less that start, over copying", f"{net / times['copy']:.2f} ×"),
        ("… peak memory; without the proof", f"{peak:.0f} MB; {without:.0f} MB"),
    ]


def formats_against_floats(source: Path, work: Path, repeats: int) -> list[tuple[str, str]]:
    """Extraction into every format that keeps integers, against extraction in F32; the proof and the check of what was
    written included.
    """
    out = work / "out"
    words = {"f32": ("--dtype", "f32")} | {
        name: ("--for", name) for name, listed in FORMATS.items() if "codes" in listed.dtypes and not listed.read_as
    }
    runs = {name: command(entry("extract"), str(source), "-o", str(out), *options) for name, options in words.items()}
    times = alternately(runs, repeats, lambda: shutil.rmtree(out, ignore_errors=True))
    rows = []
    for name, options in words.items():
        if name == "f32":
            continue
        shutil.rmtree(out, ignore_errors=True)
        peak = peak_memory(entry("extract"), str(source), "-o", str(out), *options)
        size = next(out.glob(format_named(name).weights_file)).stat().st_size / 1e6
        figures = f"{times[name]:.3f} s, {times[name] / times['f32']:.2f} ×; {size:.1f} MB; {peak:.0f} MB"
        rows.append((f"`--for {name}`: time, over that of F32; size; peak memory", figures))
    return rows


UNPROVEN_INSERTION = (
    "import types, mtp_extract.insertion.drafter as i; "
    "said = {'positions': 1, 'position_values': 0, 'mask_rows': {'computed': 1, 'of': 1, 'alike': True}, "
    "'largest_scores': [], 'cache_axes': {}, 'activations_held_in': {}, 'fewest_codes': None, "
    "'largest_share_cut_off': 0, 'coarse_tables': []}; "
    "i.prove_checkpoint = lambda *_: types.SimpleNamespace(as_json=lambda: said); "
)
"""The same for insertion."""


def insertion_against_copying(source: Path, work: Path, repeats: int) -> list[tuple[str, str]]:
    """Every weight changed and put back, against copying the bundle."""
    checkpoint, out, copy = work / "checkpoint", work / "inserted.litertlm", work / "copy"
    subprocess.run([sys.executable, "-c", entry("extract"), source, "-o", checkpoint, "--dtype", "f32"], check=True)
    weights = checkpoint / "model.safetensors"
    changing = (
        "import sys, numpy as np; from safetensors.numpy import load_file, save_file; t = load_file(sys.argv[1]); "
        "save_file({k: v * np.float32(1.01) for k, v in t.items()}, sys.argv[1], {'format': 'pt'})"
    )
    subprocess.run([sys.executable, "-c", changing, weights], check=True)

    def cleaning() -> None:
        copy.unlink(missing_ok=True)
        out.unlink(missing_ok=True)

    words = (UNPROVEN_INSERTION + entry("insert"), str(checkpoint), str(source), "-o", str(out))
    peak = peak_memory(*words)
    runs = {"copy": lambda: shutil.copyfile(source, copy), "insert": command(*words)}
    times = alternately(runs, repeats, cleaning)
    size = source.stat().st_size / 1e9
    return [
        (f"copying the bundle ({size:.1f} GB)", f"{times['copy']:.2f} s"),
        ("`mtp-insert` of 78 M changed weights, read back and compared, without the proof", f"{times['insert']:.2f} s"),
        ("… over copying; peak memory", f"{times['insert'] / times['copy']:.2f} ×; {peak:.0f} MB"),
    ]


def plain_numpy(source: QuantizedTensor, stored: np.ndarray[Any, np.dtype[np.uint8]]) -> np.ndarray[Any, Any]:
    """The usual way: shift, interleave, multiply."""
    codes = np.empty(stored.size * 2, np.int8)
    codes[0::2] = (stored & 0xF).astype(np.int8)
    codes[1::2] = (stored >> 4).astype(np.int8)
    codes = np.where(codes > 7, codes - 16, codes)
    result: np.ndarray[Any, Any] = codes.reshape(source.tensor.shape).astype(np.float32) * source.scale[:, None]
    return result


def dequantizing(source: Path, repeats: int) -> list[tuple[str, str]]:
    """The LM head, on one core, against the plain NumPy route."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        with open_bundle(source) as opened:
            drafter = opened.drafter()
            role = next(r for r in drafter.walk.roles if r.role == "lm_head")
            assert role.tensor is not None
            assert role.tensor.type is TensorType.INT4
            head = QuantizedTensor.of(drafter.model, role.tensor)
            stored = np.frombuffer(head.location.read(), np.uint8)
            np.testing.assert_array_equal(plain_numpy(head, stored), head.dequantize())

            def ours() -> None:
                for first in range(0, head.tensor.elements, CHUNK_ELEMENTS):
                    head.floats(first, min(first + CHUNK_ELEMENTS, head.tensor.elements))

            times = alternately({"numpy": lambda: plain_numpy(head, stored), "ours": ours}, repeats)
    finally:
        os.sched_setaffinity(0, cores)
    millions = role.tensor.elements / 1e6
    return [
        (f"dequantizing the INT4 LM head ({millions:.0f} M) with plain NumPy, one core", f"{times['numpy']:.3f} s"),
        ("… with the table, reading included", f"{times['ours']:.3f} s"),
        ("… faster by", f"{times['numpy'] / times['ours']:.0f} ×"),
    ]


def inspecting(source: Path, repeats: int) -> list[tuple[str, str]]:
    """Bytes that ``mtp-inspect`` reads of the bundle, and the time that it and ``--help`` take."""
    from mtp_extract.io.source import LocalSource
    from mtp_extract.pipeline.inspection import inspect

    class Counting(LocalSource):
        count = 0

        def read(self, offset: int, length: int) -> bytes:
            Counting.count += length
            return super().read(offset, length)

    with open_bundle(Counting(source)) as opened:
        inspect(opened)
    runs = {"inspect": command(entry("inspect"), str(source)), "help": command(entry("extract"), "--help")}
    times = alternately(runs, repeats)
    size = source.stat().st_size / 1e9
    return [
        (f"`mtp-inspect` of a {size:.1f} GB bundle", f"{times['inspect']:.3f} s"),
        ("… bytes read", f"{Counting.count / 1e6:.2f} MB"),
        ("`mtp-extract --help`", f"{times['help']:.3f} s"),
    ]


def main() -> None:
    """Measure, and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, help="a bundle with a drafter whose LM head is INT4")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        source = options.file
        if source is None:
            source = work / "e4b-shaped.litertlm"
            # In a process of its own: a child's peak memory begins with what its parent held when it was forked.
            maker = multiprocessing.get_context("spawn").Process(target=write_e4b_shaped, args=(source,))
            maker.start()
            maker.join()
        rows = extraction_against_copying(source, work, options.repeats)
        rows += formats_against_floats(source, work, options.repeats)
        rows += proving(source)
        rows += insertion_against_copying(source, work, max(1, options.repeats // 3))
        rows += dequantizing(source, max(3, options.repeats // 2))
        rows += inspecting(source, options.repeats)
    print("| what | measured |\n| --- | --- |")
    for what, figure in rows:
        print(f"| {what} | {figure} |")


if __name__ == "__main__":
    main()
