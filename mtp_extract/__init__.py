"""Extract the multi-token-prediction drafter of a LiteRT ``.litertlm`` bundle.

::

    import mtp_extract

    with mtp_extract.open("gemma-4-E4B-it.litertlm") as bundle:
        bundle.sections                   # what the container holds
        drafter = bundle.read_drafter()   # the drafter: geometry, roles, the evidence for each
    mtp_extract.extract("gemma-4-E4B-it.litertlm", "drafter")   # a directory that transformers loads
    mtp_extract.convert("drafter", "gguf", format="gguf")       # the same for llama.cpp

Every command is a function of its name, and ``mtp-doctor`` is ``diagnose``. ``inspect``, ``extract``, ``convert``,
``insert`` and ``upload`` take arguments; ``validate``, ``tune``, ``bench`` and ``diagnose`` a ValidationPlan, a
TuningPlan, a BenchPlan and a DoctorPlan. Names are imported when they are first used: ``import mtp_extract`` alone
loads nothing heavy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mtp_extract._version import __version__

if TYPE_CHECKING:
    from mtp_extract.api import bench, convert, diagnose, extract, insert, inspect, open, tune, upload, validate
    from mtp_extract.bundle import BundledDrafter, ModelFile
    from mtp_extract.doctor.plan import DoctorPlan
    from mtp_extract.errors import MtpExtractError
    from mtp_extract.hub.upload import UploadResult
    from mtp_extract.pipeline.writing import ExtractionResult
    from mtp_extract.progress import Reporter
    from mtp_extract.report.card import CardWords
    from mtp_extract.serving.plan import BenchPlan
    from mtp_extract.tuning.plan import TuningPlan
    from mtp_extract.validation.plan import ValidationPlan

__all__ = [
    "BenchPlan",
    "BundledDrafter",
    "CardWords",
    "DoctorPlan",
    "ExtractionResult",
    "ModelFile",
    "MtpExtractError",
    "Reporter",
    "TuningPlan",
    "UploadResult",
    "ValidationPlan",
    "__version__",
    "bench",
    "convert",
    "diagnose",
    "extract",
    "insert",
    "inspect",
    "open",
    "tune",
    "upload",
    "validate",
]

_MODULES = {
    "BenchPlan": "serving.plan",
    "BundledDrafter": "bundle",
    "CardWords": "report.card",
    "DoctorPlan": "doctor.plan",
    "ExtractionResult": "pipeline.writing",
    "MtpExtractError": "errors",
    "ModelFile": "bundle",
    "Reporter": "progress",
    "TuningPlan": "tuning.plan",
    "UploadResult": "hub.upload",
    "ValidationPlan": "validation.plan",
}
"""Public name → the module that defines it; the functions are those of ``api``."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"mtp_extract.{_MODULES.get(name, 'api')}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
