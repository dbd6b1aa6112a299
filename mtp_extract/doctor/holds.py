"""Does a file hold a drafter, which, and for which base? By header ranges alone."""

from __future__ import annotations

from dataclasses import dataclass

from mtp_extract.bundle import open_bundle
from mtp_extract.errors import NoDrafterError
from mtp_extract.litertlm.published import known_bundle


@dataclass(frozen=True)
class Holding:
    name: str  # of the file, safe to show
    size: int  # bytes
    drafter: str | None  # the name of its geometry, or its sizes where it has none; None where there is no drafter
    base: str | None  # Hub id of the model it drafts for; None where nothing names it
    why: str  # how it was found, or why not

    @property
    def line(self) -> str:
        if self.drafter is None:
            return self.why
        base = f"for {self.base}" if self.base else "for a base that nothing here names"
        return f"{self.name}: holds an MTP drafter, {self.drafter}, {base} ({self.why})."


def holds(source: str) -> Holding:
    """Look into a ``.litertlm`` or ``.tflite``, by path or address; no weight is read.

    Raises:
        MtpExtractError: it cannot be read, or holds a drafter that this release cannot read.
    """
    with open_bundle(source) as opened:
        name, size = opened.source.name, opened.source.size
        try:
            drafter = opened.drafter()
        except NoDrafterError as error:
            return Holding(name, size, None, None, str(error))
        published = known_bundle(opened.source)
    config = drafter.config
    found = drafter.known["name"] if drafter.known else f"of no known size (backbone {config.backbone_hidden_size})"
    shape = f"{config.num_layers} layers of {config.hidden_size}, vocabulary {config.vocab_size}"
    base = drafter.known["base_model"] if drafter.known else published.base_model if published else None
    where = f"section {drafter.section.index}, " if drafter.section else ""
    return Holding(name, size, f"{found}, {shape}", base, f"{where}found by {drafter.found_by}")
