"""llama.cpp: its converter, server and ``llama-speculative-simple``, as the source of llama-cpp-python has them."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .outcome import Outcome, last_line, run

__all__ = ["PROGRAMS", "SDIST", "Llama", "build", "counts", "reason", "timings", "version", "with_tokenizer"]

SDIST = "llama-cpp-python==0.3.36"
DRAFTS = 3
PROGRAMS = ("llama-server", "llama-speculative-simple")
# K and V in F16, the default, are not those of the base elsewhere. Two threads that wait for each other on a busy
# machine take minutes.
_OPTIONS = ("-ctk", "f32", "-ctv", "f32", "-t", "1")
_GREEDY = {"temperature": 0, "top_k": 1, "cache_prompt": False}
_SECONDS_TO_START = 120
_TRIES = 10
_TINY = 100_000_000


def build(folder: Path) -> tuple[Path, Path]:
    """Download and build :data:`SDIST` in ``folder``: where its programs are, and its source.

    Takes a quarter of an hour on two cores.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-python", SDIST]
    subprocess.run([*pip, "--dest", str(folder)], check=True)
    with tarfile.open(next(folder.glob("llama_cpp_python-*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    source, made = next(folder.glob("llama_cpp_python-*/vendor/llama.cpp")), folder / "build"
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DLLAMA_CURL=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_WEBUI=OFF"]
    subprocess.run(["cmake", "-B", str(made), *options, str(source)], check=True)
    jobs = str(os.cpu_count() or 1)
    subprocess.run(["cmake", "--build", str(made), "--parallel", jobs, "--target", *PROGRAMS], check=True)
    return made / "bin", source


def with_tokenizer(directory: Path, base: Path, made: Path) -> Path:
    """A copy of ``directory`` with the base's tokenizer, which the converter wants."""
    shutil.copytree(directory, made)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(base / name, made / name)
    return made


def version(printed: str) -> str:
    """What ``llama-server --version`` says, in short: the commit that was built."""
    found = re.search(r"version: (\S+).*?(?:commit |\()([0-9a-f]{7,})\)", printed)
    return f"{found[1]} {found[2]}" if found else last_line(printed)


def counts(log: str) -> tuple[int, int]:
    """(drafted, accepted) of the log of ``llama-speculative-simple``.

    Raises:
        ValueError: it did not come to its end.
    """
    found = {name: int(number) for name, number in re.findall(r"n_(drafted|accept) += (\d+)", log)}
    if set(found) != {"drafted", "accept"}:
        raise ValueError(f"llama-speculative-simple: expected n_drafted and n_accept, found {last_line(log)!r}.")
    return found["drafted"], found["accept"]


def timings(answer: Mapping[str, Any]) -> tuple[int, int]:
    """(drafted, accepted) of a server's answer; nothing drafted is not said there."""
    told = answer["timings"]
    return int(told.get("draft_n", 0)), int(told.get("draft_n_accepted", 0))


@dataclass(frozen=True)
class Llama:
    """llama.cpp's programs in ``programs``, and a base to run them with."""

    programs: Path
    base: Path
    prompt: str
    tokens: int
    kind: str = "draft-mtp"

    def convert(self, source: Path, directory: Path, out: Path, python: str, *options: str) -> None:
        """``directory`` as a GGUF in F32, by llama.cpp's own converter in the tree at ``source``."""
        environment = {**os.environ, "PYTHONPATH": str(source / "gguf-py")}
        command = [python, str(source / "convert_hf_to_gguf.py"), str(directory), "--outtype", "f32", *options]
        done = run([*command, "--outfile", str(out)], environment)
        if done.returncode:
            raise RuntimeError(f"convert_hf_to_gguf.py: {last_line(done.stderr)}")

    def check(self, drafter: Path, format_: str) -> list[Outcome]:
        """What the server does with ``drafter``, and ``llama-speculative-simple`` if it was built."""
        made = Outcome("", format_, version(self._version()), loads=True)
        plain = self._answer(None)
        try:
            answer = self._answer(drafter)
        except RuntimeError as error:
            return [replace(made, engine="llama-server", loads=False, note=str(error))]
        drafted, accepted = timings(answer)
        same = answer["content"] == plain["content"]
        outcomes = [replace(made, engine="llama-server", identical=same, drafted=drafted, accepted=accepted)]
        simple = self.programs / PROGRAMS[1]
        if simple.is_file():
            options = ["-p", self.prompt, "-n", str(self.tokens), "--temp", "0", *self._slow_to_end()]
            done = _whole([str(simple), *self._options(drafter), *options])
            drafted, accepted = counts(done.stderr)
            # It prints the prompt and its first token too, and stops where a round ends.
            text = done.stdout.strip("\n").partition(self.prompt)[2]
            same = text.strip().startswith(plain["content"].strip())
            outcomes.append(replace(made, engine=simple.name, identical=same, drafted=drafted, accepted=accepted))
        return outcomes

    def _version(self) -> str:
        done = run([str(self.programs / PROGRAMS[0]), "--version"])
        return done.stdout + done.stderr

    def _options(self, drafter: Path | None) -> list[str]:
        options = ["-m", str(self.base), *_OPTIONS]
        if drafter is not None:
            options += ["-md", str(drafter), "--spec-type", self.kind, "--spec-draft-n-max", str(DRAFTS)]
        return options

    def _slow_to_end(self) -> tuple[str, ...]:
        """A cache that takes a while to be given back, where a tiny base would not."""
        return ("-c", "65536") if self.base.stat().st_size < _TINY else ()

    def _answer(self, drafter: Path | None) -> dict[str, Any]:
        with self._serving(drafter) as address:
            asked = json.dumps({"prompt": self.prompt, "n_predict": self.tokens, **_GREEDY}).encode()
            with urllib.request.urlopen(f"{address}/completion", asked) as reply:
                answer: dict[str, Any] = json.load(reply)
                return answer

    @contextmanager
    def _serving(self, drafter: Path | None) -> Iterator[str]:
        """The address of a server that is ready.

        Raises:
            RuntimeError: it ended before it was; with the last thing it said.
        """
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [str(self.programs / PROGRAMS[0]), *self._options(drafter), "-np", "1", "--port", str(port)]
        address = f"http://127.0.0.1:{port}"
        with tempfile.TemporaryFile("w+", errors="replace") as log:
            server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            try:
                for _ in range(_SECONDS_TO_START * 10):
                    if server.poll() is not None:
                        log.seek(0)
                        raise RuntimeError(reason(log.read()))
                    try:
                        urllib.request.urlopen(f"{address}/health").close()
                        break
                    except urllib.error.URLError:
                        time.sleep(0.1)
                yield address
            finally:
                server.kill()
                server.wait()


def _whole(command: list[str]) -> subprocess.CompletedProcess[str]:
    """``command`` with all that it prints.

    0c1e570 ends without waiting for what its log's thread has still to write: on a busy machine most runs of a tiny
    model lack their figures, and with a large cache to give back hardly one does.
    """
    for _ in range(_TRIES):
        done = run(command)
        if done.returncode or "n_accept" in done.stderr:
            break
    return done


def reason(log: str) -> str:
    """Of what a server said before it ended, the first error that is one."""
    errors = [line for line in log.splitlines() if " E " in line and "this warning is normal" not in line]
    return errors[0].partition(" E ")[2].strip() if errors else last_line(log)
