"""Extract the multi-token-prediction drafter of a LiteRT ``.litertlm`` bundle.

::

    import mtp_extract

    with mtp_extract.open("gemma-4-E4B-it.litertlm") as bundle:
        bundle.sections              # what the container holds
        drafter = bundle.drafter()   # the drafter: geometry, roles, the evidence for each
    mtp_extract.extract("gemma-4-E4B-it.litertlm", "drafter")   # a directory that transformers loads
    mtp_extract.convert("drafter", "gguf", format="gguf")       # the same for llama.cpp

Every command is a function of its name: ``inspect``, ``extract``, ``convert``, ``insert`` and ``upload`` take
arguments, ``validate``, ``tune`` and ``bench`` a ValidationPlan, a TuningPlan and a BenchPlan. Names are imported when
they are first used: ``import mtp_extract`` alone loads nothing heavy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mtp_extract._version import __version__

if TYPE_CHECKING:
    from mtp_extract.api import bench, insert, inspect, tune, validate
    from mtp_extract.bundle import Opened, Shard
    from mtp_extract.bundle import open_bundle as open
    from mtp_extract.errors import MtpExtractError
    from mtp_extract.hub.upload import UploadResult, upload
    from mtp_extract.pipeline.extraction import extract
    from mtp_extract.pipeline.writing import ExtractionResult, convert
    from mtp_extract.report.card import CardWords
    from mtp_extract.serving.plan import BenchPlan
    from mtp_extract.tuning.plan import TuningPlan
    from mtp_extract.validation.plan import ValidationPlan

__all__ = [
    "BenchPlan",
    "CardWords",
    "ExtractionResult",
    "MtpExtractError",
    "Opened",
    "Shard",
    "TuningPlan",
    "UploadResult",
    "ValidationPlan",
    "__version__",
    "bench",
    "convert",
    "extract",
    "insert",
    "inspect",
    "open",
    "tune",
    "upload",
    "validate",
]

# Module -> the public names that are its own.
_HOMES = {
    "api": ("bench", "insert", "inspect", "tune", "validate"),
    "bundle": ("Opened", "Shard", "open_bundle"),
    "errors": ("MtpExtractError",),
    "hub.upload": ("UploadResult", "upload"),
    "pipeline.extraction": ("extract",),
    "pipeline.writing": ("ExtractionResult", "convert"),
    "report.card": ("CardWords",),
    "serving.plan": ("BenchPlan",),
    "tuning.plan": ("TuningPlan",),
    "validation.plan": ("ValidationPlan",),
}


def __getattr__(name: str) -> Any:
    own = "open_bundle" if name == "open" else name
    for module, names in _HOMES.items():
        if name in __all__ and own in names:
            return getattr(import_module(f"mtp_extract.{module}"), own)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
