#!/usr/bin/env bash
# Install the wheel with what the tests need into .venv, then lint, type-check, build the docs and test that wheel.
# PYTHON names the interpreter (python3); further arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
elsewhere=$(mktemp -d)
trap 'rm -rf "$elsewhere"' EXIT
"${PYTHON:-python3}" -m venv .venv
# pip prints nothing but what goes wrong.
.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt ".[test]"
# A wheel of the same version as the one installed is not installed again unless told so.
.venv/bin/python -m pip install --quiet --disable-pip-version-check --force-reinstall --no-deps .
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
# A link that leads nowhere, or a page that no menu has, is an error (not so with --quiet). The site itself is not kept.
NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --site-dir "$elsewhere/site"
# From elsewhere, so that the installed wheel is imported and not this folder.
cd "$elsewhere"
# Two processes of one thread each: PyTorch's own threads only get in each other's way on tensors this small.
MTP_EXTRACT_TEST_INSTALLED=1 OMP_NUM_THREADS=1 "$root/.venv/bin/pytest" -c "$root/pyproject.toml" --rootdir "$root" -n 2 --dist loadgroup "$@" "$root/tests"
