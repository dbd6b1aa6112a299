"""The model card of a checkpoint directory: ``README.md`` with the Hub's metadata.

A card is a function of ``extraction.json``, of ``report.json`` where there is one, and of what whoever publishes it
says: no dates, no network, the same bytes for the same input. Names come from files nobody vouches for: what a
paragraph states of them goes through :mod:`mtp_extract.report.markdown`, and what the metadata states through JSON,
which is YAML.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from mtp_extract.architecture.roles import EAGLE3
from mtp_extract.errors import escape
from mtp_extract.formats import EVERY
from mtp_extract.io.typed import Excerpt
from mtp_extract.litertlm.published import base_model_of, bundle_of, license_of
from mtp_extract.report.markdown import code, listed, paragraph, plain, table
from mtp_extract.report.serving import how_to_serve, shell_word

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_LICENSE_ID = re.compile(r"[a-z0-9][a-z0-9.+-]*")
_UNKNOWN_LICENSE = "other"  # what the Hub calls a licence that is none of those it lists
_LIMIT = (
    "It works with its own base alone. A base quantized otherwise than the one it was trained against lowers "
    "acceptance, not correctness: the base verifies every token. Greedy text is the base's own in F32; in BF16 it may "
    "part from it where two tokens of the base nearly tie."
)


class Verdict(Excerpt):
    """What the card states of a ``report.json``."""

    refuted: bool
    verdict: str


@dataclass(frozen=True)
class CardWords:
    """What whoever publishes a checkpoint says on its card; None where the record says it.

    Raises:
        ValueError: one of them is nothing of the kind.
    """

    license: Annotated[
        str | None, typer.Option(help="Licence for the card, as the Hub calls it: apache-2.0, gemma, …", metavar="ID")
    ] = None
    base_model: Annotated[
        str | None, typer.Option(help="The base's id on the Hub, for the card.", metavar="ORG/NAME")
    ] = None

    def __post_init__(self) -> None:
        if self.license is not None and not _LICENSE_ID.fullmatch(self.license):
            raise ValueError(f"license {escape(self.license)!r}: expected the Hub's name of one, such as apache-2.0.")
        if self.base_model is not None and not _HUB_ID.fullmatch(self.base_model):
            raise ValueError(f"base_model {escape(self.base_model)!r}: expected an id of the Hub, ORG/NAME.")


UNSAID = CardWords()


def model_card(
    record: Mapping[str, Any], limits: Sequence[str] = (), report: Verdict | None = None, words: CardWords = UNSAID
) -> str:
    """The text of ``README.md`` for a checkpoint directory.

    Args:
        record: the content of ``extraction.json``, as its type has it.
        limits: where an engine does not do what the bundle says, as the format notes it.
        report: of the ``report.json`` that ``mtp-validate`` wrote, or None.
        words: what whoever publishes it says on it.
    """
    source, head, base = record["source"], is_head(record), _base_of(record, words)
    bundle, argument = source["section"] is not None, _source_argument(record)
    kind = "EAGLE-3 head" if head else "multi-token prediction (MTP) drafter"
    title = "EAGLE-3 head" if head else f"{record['known_as'] or 'MTP'} drafter"
    metadata = "".join(f"{key}: {json.dumps(value)}\n" for key, value in card_metadata(record, words).items())
    again = f"mtp-extract {argument}" if bundle else "mtp-convert DRAFTER"
    said = "".join(f"{text}\n\n" for text in _said(record, report, head))
    return f"""---
{metadata}---

# {plain(title)}

The {kind} of {f"[{base}](https://huggingface.co/{base})" if base else "its base model"}, \
{"extracted from" if bundle else "converted from the checkpoint"} {code(source["name"])} with mtp-extract
{plain(record["tool"]["version"])}. It proposes tokens that the base then verifies in one pass: speculative decoding.
It is of no use without that base.

{said}## How to serve it

`DRAFTER` is this directory or its id on the Hub. Releases are those that such a drafter was run with, on a CPU, or
whose source was read. Use BF16: Gemma 4's activations leave the range of FP16.

{how_to_serve(record, base or "BASE_MODEL", head=head, again=again)}

## Limits

{listed([_LIMIT, *limits])}

## Where it comes from, and how it was checked

{_origin(record, argument)}

## Licence

{_licence(record, words)}
"""


def card_metadata(record: Mapping[str, Any], words: CardWords = UNSAID) -> dict[str, str | list[str]]:
    """The card's YAML header as a dict, in the order in which it is written."""
    known, base = license_of(record), _base_of(record, words)
    kinds = ["eagle3"] if is_head(record) else ["multi-token-prediction", "mtp", "litert-lm"]
    metadata = {
        "license": words.license or (known["id"] if known else _UNKNOWN_LICENSE),
        "license_link": known["url"] if known and not words.license else None,
        "base_model": [base] if base else None,
        # Of the Hub's four relations (adapter, finetune, merge, quantized) the one of what is of no use without its
        # base; where none is stated, the Hub takes a finetune, and of a GGUF a quantized base.
        "base_model_relation": "adapter" if base else None,
        "library_name": EVERY[record["layout"]].library or None,
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "draft-model", "gemma4", "mtp-extract", *kinds],
    }
    return {key: value for key, value in metadata.items() if value is not None}


def _base_of(record: Mapping[str, Any], words: CardWords) -> str | None:
    """Hub id of the base: a head's own configuration may name it, or a directory, which means nothing elsewhere."""
    named = (words.base_model, record["geometry"].get("base"), base_model_of(record))
    return next((name for name in named if isinstance(name, str) and _HUB_ID.fullmatch(name)), None)


def is_head(record: Mapping[str, Any]) -> bool:
    """Whether what ``record`` describes is an EAGLE-3 head."""
    return EVERY[record["layout"]].architecture == EAGLE3


def roundings(*steps: Mapping[str, Any]) -> list[str]:
    """What numbers were rounded to in ``steps``, and the rules by which codes were made, each once."""
    return sorted({word for step in steps for word in (*step["rounded"], step["rule"]) if word})


def _said(record: Mapping[str, Any], report: Verdict | None, head: bool) -> Iterator[str]:
    """What a validation found, what training made of it, and what was done to numbers here and before."""
    if report is not None:
        refuted = "**A validation refutes this copy.** " if report.refuted else ""
        yield f"{refuted}{paragraph(report.verdict)} All figures are in `report.json`."
    if tuning := record.get("tuning"):
        what = "Trained" if head else "**These weights are no longer those they were extracted as**: tuned"
        yield f"{what} ({plain(tuning['mode'])}) on text that {code(tuning['base'])} wrote. {_accepted(tuning)}"
    if made := record.get("ordered_head"):
        yield (
            "**The head is not the one it was extracted with**: mtp-extract made an ordered head, which looks into "
            f"{made['top_k']:,} of {made['centroids']:,} clusters of tokens ({made['rows_read']:,} of "
            f"{made['rows_dense']:,} rows). {_accepted(made)}"
        )
    if before := roundings(*record["converted_from"]):
        yield f"On the way here numbers were rounded: {', '.join(map(plain, before))}."
    if rule := record["rule"]:
        yield f"Matrices that had no integers were rounded to such here, by {code(rule)}."


def _accepted(made: Mapping[str, Any]) -> str:
    """What held-out text said of it."""
    rounds, refused = made["overall"]["rounds"], "; ".join(map(plain, made["refused"]))
    interval = " ({:.3f} to {:.3f} at 95 %)".format(*rounds["interval"]) if rounds["interval"] else ""
    return (
        f"On {made['overall']['texts']} held-out texts a round yields {rounds['ratio']:.3f} times the tokens{interval}"
        + ("; it was stopped before its end" if made.get("interrupted") else "")
        + (f"; it was not accepted, and written all the same: {refused}." if refused else ".")
    )


def _origin(record: Mapping[str, Any], argument: str) -> str:
    source, section = record["source"], record["source"]["section"]
    rows = {"file": code(source["name"]), "size": f"{source['size']:,} bytes"}
    rows |= {plain(name).replace("_", " "): code(value) for name, value in source["provenance"].items()}
    if section:
        rows["bytes of its section"] = f"{section['begin']:,} to {section['end']:,}"
        rows["SHA-256 of its section"] = code(section["sha256"])
    rows |= {"format": code(record["layout"]), "written as": code(record["dtype"].upper())}
    said = [table(["", ""], list(rows.items()))]
    if record["proof"]:
        said.append(f"Proven before this was written: {'; '.join(map(plain, record['proof']))}.")
    if section and not (record.get("tuning") or record.get("ordered_head")):
        said.append(f"To compare every tensor with the bundle's: `mtp-inspect DRAFTER --against {argument}`.")
    return "\n\n".join(said)


def _source_argument(record: Mapping[str, Any]) -> str:
    """How to name the bundle on a command line, as one shell word, as exactly as the record allows."""
    provenance, bundle = record["source"]["provenance"], bundle_of(record)
    named = f"hf://{bundle['repository']}/{bundle['file']}" if bundle else "BUNDLE.litertlm"
    if provenance.get("repository") and provenance.get("path"):
        revision = provenance.get("commit") or provenance.get("revision")
        named = f"hf://{provenance['repository']}/{provenance['path']}" + (f"@{revision}" if revision else "")
    elif provenance.get("url"):
        named = provenance["url"]
    return shell_word(named)


def _licence(record: Mapping[str, Any], words: CardWords) -> str:
    known = license_of(record)
    if words.license:
        return f"Whoever published this copy states its licence: {code(words.license)}."
    if known is None:
        return (
            "Its source is not a published bundle that mtp-extract knows, so the metadata states no licence (`other`). "
            "The terms of whoever made it hold, and those of the model it was made from: `mtp-upload --license` states "
            "them."
        )
    tuned = ", of which the tuned ones are a modification" if record.get("tuning") else ""
    return (
        f"Google published the bundle under the [{known['name']}]({known['url']}), and so are these weights{tuned}. "
        "Where whoever published the bundle states another licence, that one holds."
    )
