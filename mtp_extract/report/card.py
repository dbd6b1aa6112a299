"""The model card of a checkpoint directory: ``README.md`` with the Hub's metadata.

The same record and words give the same bytes: no dates, no network. Names come from untrusted files: in paragraphs
:mod:`.markdown` escapes them, and the metadata is written as JSON, which is valid YAML.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mtp_extract.errors import PlanError, escape
from mtp_extract.formats import ALL_FORMATS, find_format_architecture
from mtp_extract.io.address import HubAddress
from mtp_extract.io.typed import Excerpt
from mtp_extract.litertlm.published import find_base_model, find_bundle_of_origin, find_license
from mtp_extract.report.markdown import escape_markdown, escape_paragraph, format_code
from mtp_extract.report.serving import describe_serving, quote_shell_word
from mtp_extract.report.templates import render_template

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_LICENSE_ID = re.compile(r"[a-z0-9][a-z0-9.+-]*")

PROVEN: Final = "proven"
MEASURED: Final = "measured"
NAMED: Final = "named"
"""The evidence that a checkpoint computes what its file computes: proven for every input from the graph; measured
against Google's interpreter on some inputs; or none, as the weights were only identified by place and name.
"""

_VERDICT_WORDS = {PROVEN: "Verified", MEASURED: "Measured, not proven", NAMED: "Named, not proven"}


def describe_verdict(evidence: str | None, *, is_refuted: bool = False) -> str:
    """Return the verdict on what this run has shown, in a few words; every command takes it from here.

    Args:
        evidence: :data:`PROVEN`, :data:`MEASURED` or :data:`NAMED`; None without evidence.
        is_refuted: whether the checkpoint was shown to differ from its file.
    """
    return "Refuted" if is_refuted else _VERDICT_WORDS.get(evidence or "", "Not verified")


class Verdict(Excerpt):
    """The fields of a ``report.json`` that the card shows."""

    refuted: bool
    verdict: str


@dataclass(frozen=True)
class CardWords:
    """A publisher's statements for the card; None leaves it to the record.

    Raises:
        PlanError: a value is not of its form.
    """

    license: str | None = None  # as the Hub calls it: apache-2.0, gemma, …
    base_model: str | None = None  # the base's id on the Hub

    def __post_init__(self) -> None:
        if self.license is not None and not _LICENSE_ID.fullmatch(self.license):
            raise PlanError(f"license {escape(self.license)!r}: expected the Hub's name of one, such as apache-2.0.")
        if self.base_model is not None and not _HUB_ID.fullmatch(self.base_model):
            raise PlanError(f"base_model {escape(self.base_model)!r}: expected an id of the Hub, ORG/NAME.")


NO_CARD_WORDS = CardWords()


def render_model_card(
    record: Mapping[str, Any],
    limits: Sequence[str] = (),
    report: Verdict | None = None,
    words: CardWords = NO_CARD_WORDS,
) -> str:
    """Return the text of ``README.md`` for a checkpoint directory whose ``extraction.json`` holds ``record``.

    Args:
        limits: the format's notes on what an engine computes differently than the bundle.
        report: the verdict of the ``report.json`` that ``mtp-validate`` wrote, if any.
        words: the publisher's statements.
    """
    kind = find_format_architecture(record["layout"])
    base = _find_base(record, words)
    argument = _format_source_argument(record)
    published = find_bundle_of_origin(record)
    again = f"mtp-extract {argument}" if record["source"]["section"] else "mtp-convert DRAFTER"
    return render_template(
        "card.md",
        escape_markdown,
        {"code": format_code, "paragraph": escape_paragraph},
        metadata="".join(f"{key}: {json.dumps(value)}\n" for key, value in build_card_metadata(record, words).items()),
        rounded=list_roundings(*record["converted_from"]),
        serving=describe_serving(record, base or "BASE_MODEL", again=again),
        licence=find_license(record),
        published=published["name"] if published else None,
        record=record,
        named=NAMED,
        argument=argument,
        kind=kind,
        base=base,
        limits=limits,
        report=report,
        words=words,
    )


def build_card_metadata(record: Mapping[str, Any], words: CardWords = NO_CARD_WORDS) -> dict[str, str | list[str]]:
    """Return the card's YAML header as a dict, in the order in which it is written."""
    license_ = find_license(record)
    base = _find_base(record, words)
    tags = ["speculative-decoding", "draft-model", "gemma4", "mtp-extract"]
    metadata = {
        # "other" is the Hub's name for a licence that it does not list.
        "license": words.license or (license_["id"] if license_ else "other"),
        "license_link": license_["url"] if license_ and not words.license else None,
        "base_model": [base] if base else None,
        # Of the Hub's four relations (adapter, finetune, merge, quantized), adapter is the one that needs its base.
        # Without a relation the Hub assumes a finetune, and for a GGUF a quantized base.
        "base_model_relation": "adapter" if base else None,
        "library_name": ALL_FORMATS[record["layout"]].library or None,
        "pipeline_tag": "text-generation",
        "tags": [*tags, *find_format_architecture(record["layout"]).tags],
    }
    return {key: value for key, value in metadata.items() if value is not None}


def _find_base(record: Mapping[str, Any], words: CardWords) -> str | None:
    """Return the Hub id of the base; a local directory, which a head's config may name, does not count."""
    named = (words.base_model, record["geometry"].get("base"), find_base_model(record))
    return next((name for name in named if isinstance(name, str) and _HUB_ID.fullmatch(name)), None)


def list_roundings(*steps: Mapping[str, Any]) -> list[str]:
    """Return the dtypes and quantization rules that ``steps`` rounded to, sorted, each once."""
    return sorted({word for step in steps for word in (*step["rounded"], step["rule"]) if word})


def _format_source_argument(record: Mapping[str, Any]) -> str:
    """Return the bundle's address as one shell word, as exact as the record allows."""
    provenance = record["source"]["provenance"]
    bundle = find_bundle_of_origin(record) or {}
    repository, path, commit = (provenance.get(key) for key in ("repository", "path", "commit"))
    if not (repository and path):
        repository = bundle.get("repository")
        path = bundle.get("file")
        commit = None
    if repository and path:
        return quote_shell_word(HubAddress(repository, path, commit).name)
    return quote_shell_word(provenance.get("url") or "BUNDLE.litertlm")
