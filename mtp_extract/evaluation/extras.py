"""Check for the packages of the ``validate`` extra before any work is done."""

from __future__ import annotations

from importlib import import_module
from logging import CRITICAL

from mtp_extract.errors import MtpExtractError, escape

TRANSFORMERS_RELEASES = ">=5.16.1,!=5.23.0"  # releases that can build an assistant; the same as in pyproject.toml


def require_packages(*modules: str) -> None:
    """Import ``modules``; raise MtpExtractError if one cannot be imported."""
    for module in modules:
        if why := explain_import_failure(module):
            raise MtpExtractError(
                f"expected the package {module}, but {why}. Validation and tuning need more packages than "
                "extraction: pip install '.[validate]' in the clone of mtp-extract, with its constraints.txt"
            )


def explain_import_failure(module: str, *names: str) -> str:
    """Return why ``names`` cannot be imported from ``module``, as a clause; "" if they can."""
    try:
        imported = import_module(module)
        for name in names:
            getattr(imported, name)
    except Exception as error:  # noqa: BLE001 - a broken installation may raise anything
        return f"it cannot be imported: {escape(error)}"
    return ""


def quiet_transformers() -> None:
    """Keep the log and progress bars of transformers off the terminal; errors are raised here, in one line."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # untyped in transformers
    logging.set_verbosity(CRITICAL)
