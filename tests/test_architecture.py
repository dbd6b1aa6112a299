"""The rooms of docs/architecture.md: the list is whole, imports run downwards, and nothing imports in a circle."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "mtp_extract"
DOCUMENT = ROOT / "docs" / "architecture.md"


@cache
def rooms() -> tuple[str, ...]:
    """What stands directly below the package, highest first."""
    (block,) = re.findall(r"```text\nmtp_extract/\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    return tuple(re.fullmatch(r"  (\S+) +\S.*", line).group(1) for line in block.splitlines())


def room_of(path: str) -> str:
    """The room of a file."""
    return next(room for room in rooms() if path == room or (room.endswith("/") and path.startswith(room)))


@cache
def modules() -> dict[str, str]:
    """Dotted name → path relative to the package."""
    found = {}
    for file in PACKAGE.rglob("*.py"):
        path = file.relative_to(PACKAGE)
        parts = path.with_suffix("").parts
        found[".".join(("mtp_extract", *(parts[:-1] if parts[-1] == "__init__" else parts)))] = path.as_posix()
    return found


@cache
def imports() -> dict[str, frozenset[str]]:
    """Module → the modules of the package that it imports anywhere in it, in functions and for type checkers too."""
    return {name: frozenset(_imported(name)) for name in modules()}


def _imported(module: str) -> Iterator[str]:
    for node in ast.walk(ast.parse((PACKAGE / modules()[module]).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules())
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative imports hide where they go"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if name in modules():
                    yield name
                elif node.module in modules():
                    yield node.module


def test_every_room_is_listed() -> None:
    there = {path.split("/")[0] + "/" * ("/" in path) for path in modules().values()}
    assert len(set(rooms())) == len(rooms())
    assert set(rooms()) == there


def test_imports_run_downwards() -> None:
    order = {room: number for number, room in enumerate(rooms())}
    paths = modules()
    upwards = [
        f"{paths[module]} ({room_of(paths[module])}) imports {paths[other]} ({room_of(paths[other])})"
        for module, others in imports().items()
        for other in others
        if order[room_of(paths[module])] > order[room_of(paths[other])]
    ]
    assert not upwards


def test_no_import_goes_round_in_a_circle() -> None:
    graph = {module: others - {module} for module, others in imports().items()}
    assert len(list(TopologicalSorter(graph).static_order())) == len(modules())


def test_the_imports_are_seen() -> None:
    """The tests above are worth what this reading is: one of a function, one for type checkers, one of a module."""
    assert "mtp_extract.pipeline.extraction" in imports()["mtp_extract.validation.run"]
    assert "mtp_extract.checkpoint.weight" in imports()["mtp_extract.checkpoint.checkpoint"]
    assert "mtp_extract.pipeline.extraction" in imports()["mtp_extract.api"]
    assert room_of("validation/report/verdict.py") == "validation/"
    assert room_of("validation/run.py") == "validation/"


def test_imports_by_a_name_in_a_variable_hide_nothing() -> None:
    """An import that this reading cannot see stands where names are listed, or asks for another package."""
    paths = {path: (PACKAGE / path).read_text(encoding="utf-8") for path in modules().values()}
    listing = {f"{room}__init__.py" for room in ("", "cli/", "formats/")} | {"architecture/architecture.py"}
    others = {"io/http_library.py", "evaluation/extras.py"}
    assert {path for path, text in paths.items() if re.search("import_module|resolve_name", text)} == listing | others
    assert not [path for path, text in paths.items() if "__import__" in text]


PAGES = ["README.md", "CONTRIBUTING.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md")))]


@pytest.mark.parametrize("name", PAGES)
def test_every_path_that_is_named_exists(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    spans = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL) + re.findall(r"`([^`\n]+)`", text)
    words = {word.strip("()[],:;'\"").split("::")[0] for span in spans for word in span.split()}
    tops = {path.name for folder in (ROOT, PACKAGE) for path in folder.iterdir() if path.is_dir()}
    named = sorted(word for word in words if "/" in word and word.split("/")[0] in tops)
    assert not [path for path in named if not any((top / path).exists() for top in (ROOT, PACKAGE, ROOT / "tests"))]
    assert named or name not in ("README.md", "docs/architecture.md")
