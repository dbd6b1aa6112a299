"""Extract the multi-token-prediction drafter of a LiteRT ``.litertlm`` bundle.

::

    import mtp_extract

    with mtp_extract.open("gemma-4-E4B-it.litertlm") as bundle:
        bundle.sections              # what the container holds
        drafter = bundle.drafter()   # the drafter: geometry, roles, the evidence for each
    mtp_extract.extract("gemma-4-E4B-it.litertlm", "drafter")   # a directory that transformers loads

Names are imported when they are first used: ``import mtp_extract`` alone loads nothing heavy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mtp_extract._version import __version__

if TYPE_CHECKING:
    from mtp_extract.drafter_source import Drafter, Opened, open
    from mtp_extract.errors import MtpExtractError
    from mtp_extract.extraction import ExtractionResult, extract

__all__ = ["Drafter", "ExtractionResult", "MtpExtractError", "Opened", "__version__", "extract", "open"]

_HOMES = {
    "Drafter": "mtp_extract.drafter_source",
    "ExtractionResult": "mtp_extract.extraction",
    "MtpExtractError": "mtp_extract.errors",
    "Opened": "mtp_extract.drafter_source",
    "extract": "mtp_extract.extraction",
    "open": "mtp_extract.drafter_source",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
