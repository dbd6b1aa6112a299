"""The first pair that was the package's sample: what most tests look at, because truth is stored for it.

Its base was trained on Python source alone, and it was exported with jax2tf, as published files seem to be, which
``scripts/build_sample.py`` does not do. The package's own sample may change; this one does not.
"""

from __future__ import annotations

from pathlib import Path

_DATA = Path(__file__).resolve().parent.parent / "data"


def first_bundle() -> Path:
    """The ``.litertlm``; quantizer's numbers and the interpreter's outputs lie in ``tests/truth/e2e_jax_mix48.*``."""
    return _DATA / "sample.litertlm"


def first_base() -> Path:
    """The transformers checkpoint of its base."""
    return _DATA / "base"
