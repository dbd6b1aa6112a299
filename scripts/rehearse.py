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
from collections.abc import Sequence
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path

from _rehearsal.budgets import Sizes, allowed, exceeded, shown
from _rehearsal.commands import Command, Place, commands
from _rehearsal.measure import Measured, Running
from _rehearsal.shapes import SHAPES, Shape

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = ("wall_s", "cpu_s", "host", "private", "device", "read", "written")
_PATIENCE = 1800.0  # seconds for a server to load its model


def environment() -> dict[str, str]:
    """That of the commands: they import what lies here."""
    paths = [ROOT, ROOT / "tests", ROOT / "scripts"]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "TERM": "dumb", "COLUMNS": "200"}


def make(place: Place, shape: Shape) -> None:
    """Base, bundle and prompts, unless they are there; in a process of its own, as this one's memory is measured too.

    Raises:
        SystemExit: the folder holds those of another shape.
    """
    told = place.root / "shape.json"
    wanted = json.dumps(asdict(shape))
    if told.exists():
        if told.read_text() != wanted:
            raise SystemExit(f"{place.root}: holds another shape than {shape.name}; name another folder.")
        return
    shutil.rmtree(place.base, ignore_errors=True)
    code = (
        "import json, sys; from pathlib import Path; from _rehearsal import base, bundle, commands, shapes;"
        "place = commands.Place(Path(sys.argv[1])); shape = shapes.Shape(**json.loads(sys.argv[2]));"
        "base.write_base(shape, place.base); bundle.write_bundle(shape, place.bundle); commands.write_prompts(place)"
    )
    subprocess.run([sys.executable, "-c", code, place.root, wanted], check=True, env=environment())
    told.write_text(wanted)


def run(command: Command, place: Place, device: str) -> dict[str, Measured]:
    """Run it; its figures by name, and those of the server that it asks."""
    logs = place.root / "logs"
    logs.mkdir(exist_ok=True)
    code = f"from mtp_extract.cli.{command.program} import main; main()"
    line = [sys.executable, "-c", code]
    if not command.served:
        started = Running([*line, *map(str, command.arguments)], logs / f"{command.name}.log", environment())
        return {command.name: started.finished()}
    drafter = place.out("extract-transformers")
    serve = [sys.executable, "-m", "_rehearsal.serve", str(place.base), str(drafter), device]
    server = Running(serve, logs / "serve.log", environment())
    try:
        address = listening(server)
        asking = Running([*line, address, *map(str, command.arguments)], logs / f"{command.name}.log", environment())
        found = asking.finished()
    finally:
        server.stop()
        served = server.finished()
    return {"serve": served, command.name: found}


def listening(server: Running) -> str:
    """Its address, once it listens.

    Raises:
        SystemExit: it does not, and what it printed.
    """
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end and server.alive():
        if found := re.search(r"^http://\S+$", server.output(), re.MULTILINE):
            return found[0]
        time.sleep(0.1)
    raise SystemExit(f"the server does not listen: {server.output()[-400:]}")


def problems(command: Command, found: Measured) -> list[str]:
    """How it ended otherwise than expected."""
    wrong = []
    if found.status not in command.status:
        wrong.append(f"exit status {found.status}")
    if re.search(command.says, found.output, re.MULTILINE) is None:
        wrong.append(f"nothing like {command.says!r} is printed")
    return [f"{each}: {found.output.strip()[-600:]}" for each in wrong]


def rehearse(place: Place, shape: Shape, device: str, only: Sequence[str]) -> int:
    """Run what ``only`` names, print the table, write it down; how many commands failed."""
    make(place, shape)
    place.out("").mkdir(exist_ok=True)
    sizes = Sizes(sum(file.stat().st_size for file in place.base.iterdir()), place.bundle.stat().st_size)
    print(f"{shape.name}, {shape.layers} layers: base {sizes.base / 1e9:.2f} GB, bundle {sizes.bundle / 1e9:.2f} GB\n")
    print(f"| command | exit | {' | '.join(COLUMNS)} | |\n| --- | --- |{' --- |' * (len(COLUMNS) + 1)}", flush=True)
    failed = 0
    kept: dict[str, dict[str, float | str]] = {}
    for command in commands(place, shape, device):
        if not any(fnmatchcase(command.name, pattern) for pattern in only):
            continue
        clear(command)
        for name, found in run(command, place, device).items():
            own = replace(command, name=name) if name == command.name else Command(name, "", (), "^http", (0,))
            wrong = problems(own, found) or exceeded(found, allowed(own.kind, sizes))
            failed += bool(wrong)
            figures = {what: getattr(found, what) for what in COLUMNS}
            kept[name] = figures | {"exit": found.status, "wrong": "; ".join(wrong)}
            cells = " | ".join(shown(what, number) for what, number in figures.items())
            print(f"| {name} | {found.status} | {cells} | {'; '.join(wrong) or 'ok'} |", flush=True)
    (place.root / "figures.json").write_text(json.dumps(kept, indent=1))
    return failed


def clear(command: Command) -> None:
    """Remove what an earlier run of it wrote, but for the text that a base wrote for its tunings."""
    for option, given in pairwise(command.arguments):
        found = [Path(given)] if option in ("-o", "--report") else []
        if option == "--work" and Path(given).is_dir():
            found = [path for path in Path(given).iterdir() if path.name != "text"]
        for path in found:
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
        return int(rehearse(Place(root), shape, options.device, options.only) > 0)


if __name__ == "__main__":
    sys.exit(main())
