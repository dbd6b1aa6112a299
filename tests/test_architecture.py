"""Check docs/architecture.md: every room is listed, rooms import only rooms below them, and there is no cycle."""

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
def list_rooms() -> tuple[str, ...]:
    """Return the packages and modules directly in mtp_extract, the highest first."""
    (block,) = re.findall(r"```text\nmtp_extract/\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    return tuple(re.fullmatch(r"  (\S+) +\S.*", line).group(1) for line in block.splitlines())


def find_room(path: str) -> str:
    return next(room for room in list_rooms() if path == room or (room.endswith("/") and path.startswith(room)))


@cache
def list_modules() -> dict[str, str]:
    """Return dotted name → path relative to the package."""
    paths = {}
    for file in PACKAGE.rglob("*.py"):
        path = file.relative_to(PACKAGE)
        parts = path.with_suffix("").parts
        paths[".".join(("mtp_extract", *(parts[:-1] if parts[-1] == "__init__" else parts)))] = path.as_posix()
    return paths


@cache
def read_imports() -> dict[str, frozenset[str]]:
    """Return module → the modules of the package that it imports, also in functions and for type checkers."""
    return {name: frozenset(_list_imports(name)) for name in list_modules()}


def _list_imports(module: str) -> Iterator[str]:
    for node in ast.walk(ast.parse((PACKAGE / list_modules()[module]).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in list_modules())
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative imports hide where they go"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if name in list_modules():
                    yield name
                elif node.module in list_modules():
                    yield node.module


def test_every_room_is_listed() -> None:
    assert sorted(list_rooms()) == sorted(
        {path.split("/")[0] + "/" * ("/" in path) for path in list_modules().values()}
    )


def test_imports_run_downwards() -> None:
    order = {room: number for number, room in enumerate(list_rooms())}
    paths = list_modules()
    upwards = [
        f"{paths[module]} ({find_room(paths[module])}) imports {paths[target]} ({find_room(paths[target])})"
        for module, targets in read_imports().items()
        for target in targets
        if order[find_room(paths[module])] > order[find_room(paths[target])]
    ]
    assert not upwards


def test_there_is_no_cycle_of_imports() -> None:
    graph = {module: targets - {module} for module, targets in read_imports().items()}
    assert len(list(TopologicalSorter(graph).static_order())) == len(list_modules())


def test_the_imports_are_seen() -> None:
    """The tests above rely on it: an import in a function, one for type checkers, and one of a module."""
    assert "mtp_extract.pipeline.extraction" in read_imports()["mtp_extract.validation.run"]
    assert "mtp_extract.checkpoint.weight" in read_imports()["mtp_extract.checkpoint.checkpoint"]
    assert "mtp_extract.pipeline.extraction" in read_imports()["mtp_extract.api"]
    assert find_room("validation/report/verdict.py") == find_room("validation/run.py") == "validation/"


def test_dynamic_imports_hide_nothing() -> None:
    """Imports that are not seen here are those of modules that list names, and those of other packages."""
    paths = {path: (PACKAGE / path).read_text(encoding="utf-8") for path in list_modules().values()}
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
