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
    from mtp_extract.api import CheckpointInspection, bench, insert, inspect, tune, validate
    from mtp_extract.bundle import Opened, Shard
    from mtp_extract.bundle import open_bundle as open
    from mtp_extract.errors import MtpExtractError
    from mtp_extract.hub.upload import UploadResult, upload
    from mtp_extract.pipeline.conversion import convert
    from mtp_extract.pipeline.extraction import extract
    from mtp_extract.pipeline.writing import ExtractionResult
    from mtp_extract.report.card import CardWords
    from mtp_extract.serving.plan import BenchPlan
    from mtp_extract.tuning.plan import TuningPlan
    from mtp_extract.validation.plan import ValidationPlan

__all__ = [
    "BenchPlan",
    "CardWords",
    "CheckpointInspection",
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

# Public name -> module and the name there.
_HOMES = {
    **{name: ("mtp_extract.api", name) for name in ("bench", "insert", "inspect", "tune", "validate")},
    "BenchPlan": ("mtp_extract.serving.plan", "BenchPlan"),
    "TuningPlan": ("mtp_extract.tuning.plan", "TuningPlan"),
    "ValidationPlan": ("mtp_extract.validation.plan", "ValidationPlan"),
    "CardWords": ("mtp_extract.report.card", "CardWords"),
    "CheckpointInspection": ("mtp_extract.api", "CheckpointInspection"),
    "UploadResult": ("mtp_extract.hub.upload", "UploadResult"),
    "upload": ("mtp_extract.hub.upload", "upload"),
    "Shard": ("mtp_extract.bundle", "Shard"),
    "ExtractionResult": ("mtp_extract.pipeline.writing", "ExtractionResult"),
    "MtpExtractError": ("mtp_extract.errors", "MtpExtractError"),
    "Opened": ("mtp_extract.bundle", "Opened"),
    "convert": ("mtp_extract.pipeline.conversion", "convert"),
    "extract": ("mtp_extract.pipeline.extraction", "extract"),
    "open": ("mtp_extract.bundle", "open_bundle"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted(__all__)
