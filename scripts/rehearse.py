"""Every command on a pair of Gemma 4's real geometry, one by one, each in a process, each against its budget.

    python scripts/rehearse.py --shape e2b [--layers 15] [--device cpu] [--work DIR] [--only 'extract*' …]

Makes a base with random weights (BF16, in shards, with a tokenizer of its size), and a bundle with its sections and a
drafter; then runs extraction, inspection, validation, tuning, conversion, insertion and a benchmark of our own loop as
a server. Prints a line a command: wall-clock and CPU seconds, the largest memory of host and device, bytes read and
written. A command that ends otherwise than expected, or takes more than ``_rehearsal/budgets.json`` allows, makes the
exit status 1. What is made stays in ``--work``, and is used again; what commands write lies in its folder ``out``.

E2B takes 14 GB of disk and 12 GB of memory, E4B 22 GB and 19 GB; ``--layers`` makes either smaller. Needs Linux, and
what the tests need. Weights being random, no draft is accepted: nothing here says how well anything drafts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path

from _rehearsal.commands import Command, list_commands
from _rehearsal.measure import Measured, Running
from _rehearsal.shapes import SHAPES, Shape

ROOT = Path(__file__).resolve().parent.parent
BUDGETS = Path(__file__).resolve().parent / "_rehearsal" / "budgets.json"
COLUMNS = ("wall_s", "cpu_s", "host", "private", "device", "read", "written")
_PATIENCE = 1800.0  # seconds for a server to load its model
_MAKE = """
import json, sys
from pathlib import Path
from _rehearsal import base, bundle, commands, shapes
root, shape = Path(sys.argv[1]), shapes.Shape(**json.loads(sys.argv[2]))
base.write_base(shape, root / "base")
bundle.write_bundle(shape, root / "bundle.litertlm")
commands.write_prompts(root)
"""
_SERVE = """
import signal, sys
from pathlib import Path
from helpers.loop_server import writer
from helpers.model_server import model_server
from mtp_extract.drafter.load import load_any_drafter
from mtp_extract.evaluation.base_model import load_base
from mtp_extract.speculate.loop import SpeculativeGenerator
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
loaded = load_base(sys.argv[1], sys.argv[3])
drafter = load_any_drafter(Path(sys.argv[2]), dtype=loaded.drafter_dtype, device=loaded.device)
with model_server("vLLM") as server:
    server.write = writer(SpeculativeGenerator(loaded.model, drafter, loaded.tokenizer), drafts=2)
    print(server.url, flush=True)
    signal.sigwait({signal.SIGTERM})
"""


def build_environment() -> dict[str, str]:
    """Build the environment of the commands: they import this checkout, compiled once, as pip does."""
    paths = [ROOT, ROOT / "tests", ROOT / "scripts"]
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**inherited, "PYTHONPATH": os.pathsep.join(map(str, paths)), "TERM": "dumb", "COLUMNS": "200"}


def make_inputs(root: Path, shape: Shape) -> None:
    """Base, bundle and prompts, unless they are there; in a process of its own, as this one's memory is measured too.

    Raises:
        SystemExit: the folder holds those of another shape.
    """
    marker, wanted = root / "shape.json", json.dumps(asdict(shape))
    if marker.exists():
        if marker.read_text() != wanted:
            raise SystemExit(f"{root}: holds another shape than {shape.name}; name another folder.")
        return
    shutil.rmtree(root / "base", ignore_errors=True)
    subprocess.run([sys.executable, "-c", _MAKE, root, wanted], check=True, env=build_environment())
    marker.write_text(wanted)


def run_command(command: Command, root: Path, device: str) -> dict[str, Measured]:
    """Run it; its figures by name, and those of the server that it asks."""
    logs = root / "logs"
    logs.mkdir(exist_ok=True)
    line = [sys.executable, "-m", "mtp_extract", command.program]
    if not command.served:
        return {
            command.name: Running(
                [*line, *map(str, command.arguments)], logs / f"{command.name}.log", build_environment()
            ).finished()
        }
    pair = [str(root / "base"), str(root / "out" / "extract-transformers")]
    server = Running([sys.executable, "-c", _SERVE, *pair, device], logs / "serve.log", build_environment())
    try:
        end = time.monotonic() + _PATIENCE
        while not (address := re.search(r"^http://\S+$", server.output(), re.MULTILINE)):
            if time.monotonic() > end or not server.alive():
                raise SystemExit(f"the server does not listen: {server.output()[-400:]}")
            time.sleep(0.1)
        words = [*line, address[0], *map(str, command.arguments)]
        measured = Running(words, logs / f"{command.name}.log", build_environment()).finished()
    finally:
        server.stop()
        served = server.finished()
    return {"serve": served, command.name: measured}


def compute_allowance(kind: str, base: int, bundle: int, table: Path = BUDGETS) -> dict[str, float]:
    """What a command of ``kind`` may take beside a base and a bundle of so many bytes: ``cpu_s``, and bytes of
    ``host``, ``device``, ``read`` and ``written``. A budget is a number, and shares of these bytes on top; of time,
    seconds, and seconds a gigabyte of the two.

    Raises:
        KeyError: the table has no such command.
    """
    read = json.loads(table.read_text(encoding="utf-8"))
    terms: Mapping[str, Mapping[str, float]] = {**read["any"], **read["commands"][kind]}
    allowed = {}
    for figure, of in terms.items():
        by_size = base * of.get("base", 0.0) + bundle * of.get("bundle", 0.0)
        allowed[figure] = of.get("fixed", 0.0) + by_size / (1e9 if figure == "cpu_s" else 1)
    return allowed


def list_problems(command: Command, measured: Measured, most: Mapping[str, float]) -> list[str]:
    """List how a command ended otherwise than expected, or which budgets it exceeded."""
    wrong = []
    if measured.status not in command.status:
        wrong.append(f"exit status {measured.status}: {measured.output.strip()[-600:]}")
    if re.search(command.says, measured.output, re.MULTILINE) is None:
        wrong.append(f"nothing like {command.says!r} is printed: {measured.output.strip()[-600:]}")
    taken = {figure: getattr(measured, figure) for figure in most}
    over = [
        f"{w} {format_figure(w, taken[w])} of at most {format_figure(w, most[w])}" for w in most if taken[w] > most[w]
    ]
    return wrong or over


def format_figure(name: str, number: float) -> str:
    """Format a figure for people."""
    return f"{number:.1f} s" if name.endswith("_s") else f"{number / 1e6:,.0f} MB"


def rehearse(root: Path, shape: Shape, device: str, only: Sequence[str]) -> int:
    """Run what ``only`` names, print the table, write it down; how many commands failed."""
    make_inputs(root, shape)
    (root / "out").mkdir(exist_ok=True)
    base = sum(file.stat().st_size for file in (root / "base").iterdir())
    bundle = (root / "bundle.litertlm").stat().st_size
    print(f"{shape.name}, {shape.layers} layers: base {base / 1e9:.2f} GB, bundle {bundle / 1e9:.2f} GB\n")
    print(f"| command | exit | {' | '.join(COLUMNS)} | |\n| --- | --- |{' --- |' * (len(COLUMNS) + 1)}", flush=True)
    failed = 0
    kept: dict[str, dict[str, float | str]] = {}
    for command in list_commands(root, shape, device):
        if not any(fnmatchcase(command.name, pattern) for pattern in only):
            continue
        clear_outputs(command)
        for name, measured in run_command(command, root, device).items():
            shown = command if name == command.name else Command(name, (), "^http")
            wrong = "; ".join(list_problems(shown, measured, compute_allowance(shown.kind, base, bundle)))
            failed += bool(wrong)
            figures = {figure: getattr(measured, figure) for figure in COLUMNS}
            kept[name] = figures | {"exit": measured.status, "wrong": wrong}
            cells = " | ".join(format_figure(figure, number) for figure, number in figures.items())
            print(f"| {name} | {measured.status} | {cells} | {wrong or 'ok'} |", flush=True)
    (root / "figures.json").write_text(json.dumps(kept, indent=1))
    return failed


def clear_outputs(command: Command) -> None:
    """Remove what an earlier run of it wrote, but for the text that a base wrote for its tunings."""
    for option, value in pairwise(command.arguments):
        outputs = [Path(value)] if option in ("-o", "--report") else []
        if option == "--work" and Path(value).is_dir():
            outputs = [path for path in Path(value).iterdir() if path.name != "texts.jsonl"]
        for path in outputs:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--device", default="cpu", help="of base and drafter: cpu, cuda (default cpu)")
    parser.add_argument("--layers", type=int, help="of the base; by default all")
    parser.add_argument("--work", type=Path, help="keep everything there, and use what is there (default: nothing)")
    parser.add_argument("--only", nargs="+", default=["*"], help="patterns of names of commands, as the table has them")
    options = parser.parse_args(arguments)
    shape = SHAPES[options.shape]
    try:
        shape = shape if options.layers is None else shape.with_layers(options.layers)
    except ValueError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory() as folder:
        root = options.work or Path(folder)
        root.mkdir(parents=True, exist_ok=True)
        return int(rehearse(root, shape, options.device, options.only) > 0)


if __name__ == "__main__":
    sys.exit(main())
