"""The packages of the ``validate`` extra, asked for by name before anything is loaded."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from mtp_extract.errors import MtpExtractError, escape

TRANSFORMERS = ">=5.16.1,<5.23"
"""The releases of transformers that construct an assistant and were tried, as ``pyproject.toml`` asks for them."""


def require(*modules: str) -> None:
    """Import ``modules``, so that a missing one is reported before any work is done.

    Raises:
        MtpExtractError: one cannot be imported.
    """
    for module in modules:
        if why := unusable(module):
            raise MtpExtractError(
                f"expected the package {module}, but {why}. Validation and tuning need more packages than "
                "extraction: pip install 'mtp-extract[validate]'"
            )


def unusable(module: str, *names: str) -> str:
    """Why ``names`` cannot be imported from ``module``, as a clause; empty where they can."""
    try:
        found = import_module(module)
        _ = [getattr(found, name) for name in names]
    except Exception as error:  # noqa: BLE001 - a broken installation raises whatever it likes
        return f"it cannot be imported: {escape(error)}"
    return ""


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without what transformers logs while it loads: what matters of it is raised here, in a line."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]  # untyped in transformers
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
