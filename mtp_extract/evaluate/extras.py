"""The packages of the ``validate`` extra, asked for by name before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from mtp_extract.errors import MtpExtractError, escape

TRANSFORMERS = ">=5.16.1,<5.23"
"""The releases of transformers that construct an assistant and were tried, as ``pyproject.toml`` asks for them."""

_PACKAGES = {"ai_edge_litert": "ai-edge-litert"}


def require(*modules: str) -> None:
    """Import ``modules``, so that a missing one is reported before any work is done.

    Raises:
        MtpExtractError: one is not installed, or cannot be imported.
    """
    for module in modules:
        _require(module)


def _require(module: str) -> None:
    try:
        import_module(module)
    except ImportError as error:
        package = _PACKAGES.get(module, module)
        found = "it is not installed" if error.name == module else f"importing it fails: {error}"
        raise MtpExtractError(
            f"expected the package {package}, but {found}. Validation and tuning need more packages than extraction: "
            "pip install 'mtp-extract[validate]'"
        ) from error


def unusable(module: str, *names: str) -> str:
    """Why ``module`` cannot be imported or lacks ``names``, for a check that is left out then; empty where it can."""
    top = module.partition(".")[0]
    package = _PACKAGES.get(top, top)
    try:
        import_module(top)
        found = import_module(module)
        lacking = [name for name in names if not hasattr(found, name)]
    except ModuleNotFoundError as error:
        if error.name == top:
            return f"{package} is not installed"
        return f"{package} cannot be imported: {escape(error)}"
    except Exception as error:  # noqa: BLE001 - a broken installation raises whatever it likes
        return f"{package} cannot be imported: {escape(' '.join(str(error).split()))}"
    return f"{package} is of a release that has no {', '.join(lacking)}" if lacking else ""


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
