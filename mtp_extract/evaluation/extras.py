"""The packages of the ``validate`` extra, asked for by name before anything is loaded."""

from __future__ import annotations

from importlib import import_module
from logging import CRITICAL

from mtp_extract.errors import MtpExtractError, escape

TRANSFORMERS_RELEASES = ">=5.16.1,!=5.23.0"  # releases that construct an assistant, as pyproject.toml has them


def require(*modules: str) -> None:
    """Import ``modules``: MtpExtractError, before any work is done, where one cannot be."""
    for module in modules:
        if why := explain_import_failure(module):
            raise MtpExtractError(
                f"expected the package {module}, but {why}. Validation and tuning need more packages than "
                "extraction: pip install '.[validate]' in the clone of mtp-extract, with its constraints.txt"
            )


def explain_import_failure(module: str, *names: str) -> str:
    """Why ``names`` cannot be imported from ``module``, as a clause; empty where they can."""
    try:
        imported = import_module(module)
        for name in names:
            getattr(imported, name)
    except Exception as error:  # noqa: BLE001 - a broken installation raises whatever it likes
        return f"it cannot be imported: {escape(error)}"
    return ""


def quiet_transformers() -> None:
    """Keep transformers' log and progress bars off the terminal: what matters of them is raised here, in a line."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # untyped in transformers
    logging.set_verbosity(CRITICAL)
