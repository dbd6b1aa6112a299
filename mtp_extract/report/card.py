"""The model card of an extracted drafter: ``README.md`` with the Hub's metadata.

A card is a function of ``extraction.json`` and, where there is one, ``report.json``: no dates, no network,
the same bytes for the same input. Its text is ``card.md`` beside this file, or ``eagle3.md`` for an EAGLE-3 head; here
is what they are given. Names come from files nobody vouches for: the templates escape them for Markdown, and
:func:`_yaml` for YAML.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any

from mtp_extract.architecture.roles import EAGLE3, HEAD_ROLES
from mtp_extract.errors import CheckpointError, escape
from mtp_extract.formats import EVERY
from mtp_extract.litertlm.published import base_model_of, bundle_of, license_of
from mtp_extract.options import About
from mtp_extract.proof.words import in_words
from mtp_extract.report.columns import number
from mtp_extract.report.markdown import code, listed, paragraph, plain
from mtp_extract.report.tables import measurements
from mtp_extract.report.templates import Templates

_TAGS = (
    "speculative-decoding",
    "multi-token-prediction",
    "mtp",
    "draft-model",
    "gemma4",
    "litert-lm",
    "mtp-extract",
)

_HEAD_TAGS = ("speculative-decoding", "eagle3", "draft-model", "gemma4", "mtp-extract")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

_LICENSE_ID = re.compile(r"[a-z0-9][a-z0-9.+-]*")

_LINK = re.compile(r"https://[^\s\"'<>]+|LICENSE(\.md|\.txt)?")

_UNKNOWN_LICENSE = "other"
"""What the Hub calls a licence that is none of those it lists."""


@dataclass(frozen=True)
class CardWords:
    """What whoever publishes a checkpoint says on its card; None where the record says it.

    Raises:
        ValueError: one of them is nothing of the kind.
    """

    license: Annotated[
        str | None, About("Licence for the card, as the Hub calls it: apache-2.0, gemma, …", metavar="ID")
    ] = None
    license_name: Annotated[
        str | None, About('What a licence is called that the Hub calls "other": gemma-terms-of-use.', metavar="NAME")
    ] = None
    license_link: Annotated[str | None, About("Where its text is: a URL, or LICENSE.", metavar="URL")] = None
    base_model: Annotated[str | None, About("The base's id on the Hub, for the card.", metavar="ORG/NAME")] = None
    title: Annotated[str | None, About("Title of the card.", metavar="TEXT")] = None

    def __post_init__(self) -> None:
        for name, value, fits, expected in (
            ("license", self.license, _LICENSE_ID.fullmatch, "the Hub's name of one, such as apache-2.0"),
            ("license_name", self.license_name, _LICENSE_ID.fullmatch, "one word in small letters, such as my-terms"),
            ("license_link", self.license_link, _LINK.fullmatch, "an https:// URL, LICENSE or LICENSE.md"),
            ("base_model", self.base_model, _HUB_ID.fullmatch, "an id of the Hub, ORG/NAME"),
            ("title", self.title, lambda text: text.strip() and text.isprintable(), "one line of text"),
        ):
            if value is not None and not fits(value):
                raise ValueError(f"{name} {escape(value)!r}: expected {expected}.")
        if self.license_name is not None and self.license not in (None, _UNKNOWN_LICENSE):
            raise ValueError(
                f"license_name {escape(self.license_name)!r}: expected for a licence that the Hub calls "
                f"{_UNKNOWN_LICENSE} alone, found {escape(self.license)}."
            )


UNSAID = CardWords()


def card_metadata(extraction: Mapping[str, Any], words: CardWords = UNSAID) -> dict[str, str | list[str]]:
    """The card's YAML header as a dict, in the order in which it is written."""
    known, format_ = license_of(extraction), EVERY.get(extraction["layout"])
    given = words.license or (_UNKNOWN_LICENSE if words.license_name or words.license_link else None)
    metadata: dict[str, str | list[str]] = {"license": given or (known.id if known else _UNKNOWN_LICENSE)}
    if words.license_name:
        metadata["license_name"] = words.license_name
    if link := words.license_link or (known.url if known and not given else None):
        metadata["license_link"] = link
    if base := _base_of(extraction, words):
        metadata["base_model"] = [base]
        # Of the Hub's four relations (adapter, finetune, merge, quantized) the one of what is of no use without its
        # base; where none is stated, the Hub takes a finetune, and of a GGUF a quantized base.
        metadata["base_model_relation"] = "adapter"
    if format_ and format_.library:
        metadata["library_name"] = format_.library
    metadata["pipeline_tag"] = "text-generation"
    metadata["tags"] = list(_HEAD_TAGS if _is_head(extraction) else _TAGS)
    return metadata


def model_card(
    extraction: Mapping[str, Any], report: Mapping[str, Any] | None = None, words: CardWords = UNSAID
) -> str:
    """The text of ``README.md`` for a checkpoint directory.

    Args:
        extraction: the content of ``extraction.json``.
        report: the content of the ``report.json`` that ``mtp-validate`` wrote, or None.
        words: what whoever publishes it says on it.

    Raises:
        CheckpointError: one of them lacks what a card states.
    """
    try:
        return _CARDS.render("eagle3.md" if _is_head(extraction) else "card.md", **_values(extraction, report, words))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            "extraction.json or report.json lacks what the model card states "
            f"({type(error).__name__}: {escape(error)}). Extract or validate again."
        ) from error


def _values(extraction: Mapping[str, Any], report: Mapping[str, Any] | None, words: CardWords) -> dict[str, object]:
    """What the templates are given."""
    source = extraction["source"]
    # A role may have more than one tensor in the file; those of its scales say nothing of their own here.
    tensors = {name: entry for name, entry in extraction["tensors"].items() if "part" not in entry}
    entries = list(tensors.values())
    format_ = EVERY.get(extraction["layout"])
    return {
        "record": extraction,
        "report": report,
        "measurements": () if report is None else [part for part in measurements(report) if not part.detail],
        "yield": _yield(report),
        "metadata": card_metadata(extraction, words),
        "words": words,
        "base": _base_of(extraction, words),
        "license": license_of(extraction),
        "source": source,
        "published": bundle_of(extraction),
        "source_argument": _source_argument(extraction),
        "from_bundle": source["kind"] != "checkpoint",
        "proven": in_words(extraction["proof"]) if extraction["proof"] else (),
        "tuning": extraction.get("tuning"),
        "trained": _TRAINED,
        "head": extraction.get("ordered_head"),
        "engines": format_.engines if format_ else (),
        "weights": next((name for name in extraction["files"] if name.endswith(".gguf")), ""),
        "tensors": tensors,
        "kept": [entry for entry in entries if entry["kept"] == "codes"],
        "rounded_to": sorted({e["rounded_to"] for e in entries if e["kept"] == "codes" and e["rounded_to"]}),
        "rounded_before": sorted({step for entry in entries for step in entry["rounded_before"]}),
        "made_codes": [entry["made_codes"] for entry in entries if entry["made_codes"]],
        "quantized": any(entry["quantization"] for entry in entries),
        "ordered": any(entry["role"] in HEAD_ROLES for entry in entries),
        "static": any(cache["scale"] for cache in extraction["kv_inputs"].values())
        or any((entry["activations"] or {}).get("input") for entry in entries),
    }


_TRAINED: Mapping[str, str] = MappingProxyType(
    {
        "norms": "norms and layer scalars, and nothing else",
        "qat": "codes, on the grid of the scales they had, norms and layer scalars",
        "float": "every weight, as floats",
    }
)
"""Of a tuning's mode, what was trained."""


def _base_of(extraction: Mapping[str, Any], words: CardWords) -> str | None:
    """Hub id of the base: a head's own configuration may name it, or a directory, which means nothing elsewhere."""
    named = (words.base_model, extraction["geometry"].get("base"), base_model_of(extraction))
    return next((name for name in named if name and _HUB_ID.fullmatch(name)), None)


def _is_head(extraction: Mapping[str, Any]) -> bool:
    format_ = EVERY.get(extraction["layout"])
    return format_ is not None and format_.architecture == EAGLE3


def _source_argument(extraction: Mapping[str, Any]) -> str:
    """How to name the bundle on a command line, as exactly as the record allows."""
    provenance, bundle = extraction["source"]["provenance"], bundle_of(extraction)
    if provenance.get("repository") and provenance.get("path"):
        revision = provenance.get("commit") or provenance.get("revision")
        at = f"@{revision}" if revision else ""
        return f"hf://{provenance['repository']}/{provenance['path']}{at}"
    if provenance.get("url"):
        return str(provenance["url"])
    return f"hf://{bundle.repository}/{bundle.file}" if bundle else "BUNDLE.litertlm"


def _yield(report: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What drafting was worth at its best, by a report; None where none measured it, or it was worth nothing."""
    if not report or not report["arithmetic"] or not (drafts := report["arithmetic"]["best_draft_steps"]):
        return None
    found = report["generation"][str(drafts)]
    return {
        "drafts": drafts,
        "mean_accepted_length": found["mean_accepted_length"],
        "interval": found["mean_accepted_length_ci95"],
        "texts": report["agreement"]["texts"],
        "measured": report["arithmetic"]["speedups"][str(drafts)]["measured"],
    }


# Filters of the templates: values → Markdown, escaped.


def _yaml(metadata: Mapping[str, str | list[str]]) -> str:
    # JSON strings are YAML strings: quoting everything leaves nothing for a hostile name to break out of.
    lines = ["---"]
    for key, value in metadata.items():
        if isinstance(value, list):
            lines += [f"{key}:", *(f"- {json.dumps(item)}" for item in value)]
        else:
            lines.append(f"{key}: {json.dumps(value)}")
    return "\n".join([*lines, "---"])


def _word(text: object) -> str:
    """``text`` as one shell word within a fenced block."""
    word = escape(text).replace("`", "")
    safe = all(c.isalnum() or c in "/:@._-+%=," for c in word)
    return word if safe else "'" + word.replace("'", "'\\''") + "'"


def _kept(found: Mapping[str, Any]) -> str:
    low, high = found["interval"] or (None, None)
    return f"{found['share']:.2%}" + ("" if low is None else f" ({low:.2%} to {high:.2%} at 95 %)")


def _rounds(found: Mapping[str, Any]) -> str:
    before, after = (found[when]["tokens_a_round"] for when in ("before", "after"))
    times = number(found["rounds"]["ratio"], ".3f", found["rounds"]["interval"], between=" to ")
    return f"{before:.2f} → {after:.2f}, × {times}"


def _share_of(part: int, whole: int) -> str:
    return f"{part / whole:.1%}"


def _stored(source: Mapping[str, Any] | None) -> str:
    return code(f"{source['dtype']} {source['shape']}" if source else "not in the graph")


def _quantization(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return code("none")
    axis = [f"axis {found['axis']}"] if found["axis"] is not None else []
    blocks = [f"blocks of {found['block_size']}"] if found["block_size"] else []
    return code(", ".join([found["kind"], *axis, *blocks]))


_CARDS = Templates(
    plain,
    accepted=lambda found: number(found["mean_accepted_length"], ".3f", found["interval"], between=" to "),
    change=lambda found: number(found["mean"], "+.3f", found["interval"], between=" to "),
    code=code,
    count=lambda value: f"{int(value):,}",
    joined=lambda items, separator: separator.join(map(plain, items)),
    kept=_kept,
    share_of=_share_of,
    listed=listed,
    paragraph=paragraph,
    quantization=_quantization,
    rounds=_rounds,
    sections=lambda tables: "\n\n".join(table.markdown(3) for table in tables),
    stored=_stored,
    word=_word,
    yaml=_yaml,
)
