"""The packages of the ``validate`` extra, asked for by name before anything is loaded."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from mtp_extract.errors import MtpExtractError, escape

TRANSFORMERS = ">=5.16.1,<5.23"
"""The releases of transformers that construct an assistant and were tried, as ``pyproject.toml`` asks for them."""


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Without looking for garbage: nearly all objects that an import makes stay, and looking takes a fifth of it."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@nothing_collected()
def require(*modules: str) -> None:
    """Import ``modules``, so that a missing one is reported before any work is done.

    Raises:
        MtpExtractError: one is not installed, or cannot be imported.
    """
    for module in modules:
        if why := unusable(module):
            raise MtpExtractError(
                f"expected the package {module}, but {why}. Validation and tuning need more packages than "
                "extraction: pip install 'mtp-extract[validate]'"
            )


def unusable(module: str, *names: str) -> str:
    """Why ``module`` cannot be imported or lacks ``names``, as a clause; empty where it can."""
    top = module.partition(".")[0]
    try:
        found = import_module(module)
    except Exception as error:  # noqa: BLE001 - a broken installation raises whatever it likes
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == top:
            return "it is not installed"
        return f"importing it fails: {escape(' '.join(str(error).split()))}"
    lacking = [name for name in names if not hasattr(found, name)]
    return f"this release of it has no {', '.join(lacking)}" if lacking else ""


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without what transformers logs while it loads: what matters of it is raised here, in a line."""
    from logging import CRITICAL

    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # untyped in transformers
    level = logging.get_verbosity()
    logging.set_verbosity(CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(level)
