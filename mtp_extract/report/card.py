"""The model card of a checkpoint directory: ``README.md`` with the Hub's metadata.

A card is a function of ``extraction.json``, of ``report.json`` where there is one, and of what whoever publishes it
says: no dates, no network, the same bytes for the same input. It says what a directory is, how to serve it, where it
came from, how that was checked, and its licence. Names come from files nobody vouches for: what a paragraph states of
them goes through :mod:`mtp_extract.report.markdown`, and what the metadata states through JSON, which is YAML.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from mtp_extract.architecture.roles import EAGLE3
from mtp_extract.errors import CheckpointError, escape
from mtp_extract.formats import EVERY
from mtp_extract.litertlm.published import base_model_of, bundle_of, license_of
from mtp_extract.options import About
from mtp_extract.proof.words import in_words
from mtp_extract.report.markdown import code, listed, paragraph, plain, table
from mtp_extract.report.serving import how_to_serve, shell_word

_TAGS = ("speculative-decoding", "multi-token-prediction", "mtp", "draft-model", "gemma4", "litert-lm", "mtp-extract")
_HEAD_TAGS = ("speculative-decoding", "eagle3", "draft-model", "gemma4", "mtp-extract")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_LICENSE_ID = re.compile(r"[a-z0-9][a-z0-9.+-]*")
_LINK = re.compile(r"https://[^\s\"'<>]+|LICENSE(\.md|\.txt)?")
_UNKNOWN_LICENSE = "other"
"""What the Hub calls a licence that is none of those it lists."""
_TRAINED = {
    "norms": "norms and layer scalars, and nothing else",
    "qat": "codes, on the grid of the scales they had, norms and layer scalars",
    "float": "every weight, as floats",
}
"""Of a tuning's mode, what was trained."""
_WRITTEN = {"codes": "integers with their scales, where the format has room for them; the others as `F32`"}


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


def model_card(record: Mapping[str, Any], report: Mapping[str, Any] | None = None, words: CardWords = UNSAID) -> str:
    """The text of ``README.md`` for a checkpoint directory.

    Args:
        record: the content of ``extraction.json``.
        report: the content of the ``report.json`` that ``mtp-validate`` wrote, or None.
        words: what whoever publishes it says on it.

    Raises:
        CheckpointError: one of them lacks what a card states.
    """
    try:
        return _card(record, report, words)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            "extraction.json or report.json lacks what the model card states "
            f"({type(error).__name__}: {escape(error)}). Extract or validate again."
        ) from error


def card_metadata(record: Mapping[str, Any], words: CardWords = UNSAID) -> dict[str, str | list[str]]:
    """The card's YAML header as a dict, in the order in which it is written."""
    known, format_ = license_of(record), EVERY.get(record["layout"])
    given = words.license or (_UNKNOWN_LICENSE if words.license_name or words.license_link else None)
    metadata: dict[str, str | list[str]] = {"license": given or (known.id if known else _UNKNOWN_LICENSE)}
    if words.license_name:
        metadata["license_name"] = words.license_name
    if link := words.license_link or (known.url if known and not given else None):
        metadata["license_link"] = link
    if base := _base_of(record, words):
        metadata["base_model"] = [base]
        # Of the Hub's four relations (adapter, finetune, merge, quantized) the one of what is of no use without its
        # base; where none is stated, the Hub takes a finetune, and of a GGUF a quantized base.
        metadata["base_model_relation"] = "adapter"
    if format_ and format_.library:
        metadata["library_name"] = format_.library
    metadata["pipeline_tag"] = "text-generation"
    metadata["tags"] = list(_HEAD_TAGS if _is_head(record) else _TAGS)
    return metadata


def _base_of(record: Mapping[str, Any], words: CardWords) -> str | None:
    """Hub id of the base: a head's own configuration may name it, or a directory, which means nothing elsewhere."""
    named = (words.base_model, record["geometry"].get("base"), base_model_of(record))
    return next((name for name in named if name and _HUB_ID.fullmatch(name)), None)


def _is_head(record: Mapping[str, Any]) -> bool:
    format_ = EVERY.get(record["layout"])
    return format_ is not None and format_.architecture == EAGLE3


def _card(record: Mapping[str, Any], report: Mapping[str, Any] | None, words: CardWords) -> str:
    source, head, base = record["source"], _is_head(record), _base_of(record, words)
    kind = "EAGLE-3 head" if head else "multi-token prediction (MTP) drafter"
    title = words.title or ("EAGLE-3 head" if head else f"{record['known_as'] or 'MTP'} drafter")
    bundle = source["kind"] != "checkpoint"
    made = "extracted from" if bundle else "converted from the checkpoint"
    target = f"[{base}](https://huggingface.co/{base})" if base else "its base model"
    metadata = "".join(
        f"{key}: {json.dumps(value)}\n"
        if isinstance(value, str)
        else f"{key}:\n" + "".join(f"- {json.dumps(item)}\n" for item in value)
        for key, value in card_metadata(record, words).items()
    )
    return f"""---
{metadata}---

# {plain(title)}

The {kind} of {target}, {made} {code(source["name"])} with mtp-extract
{plain(record["tool"]["version"])}. It proposes tokens that the base then verifies in one pass: speculative decoding.
It is of no use without that base.

{_measured(report)}{_tuned(record, head)}{_ordered_head(record)}## How to serve it

{how_to_serve(record, base or "BASE_MODEL", head=head, source=_source_argument(record) if bundle else None)}
## Limits

{listed([_LIMIT, *record["notes"]])}

## Where it comes from, and how it was checked

{_origin(record)}

## Licence

{_licence(record, words, "bundle" if bundle else "checkpoint")}
"""


_LIMIT = (
    "It works with its own base alone. A base quantized otherwise than the one it was trained against lowers "
    "acceptance, not correctness: the base verifies every token."
)


def _measured(report: Mapping[str, Any] | None) -> str:
    """What a validation found, and what drafting was worth at its best."""
    if report is None:
        return ""
    said = "**A validation refutes this copy.** " if report["refuted"] else "Validated: "
    said += paragraph(report["verdict"])
    if report["drafters"]:
        generation = report["drafters"][0]["generation"]
        best = generation["worth"][generation["best"]]
        length, speed = best["tokens_per_round"], best["measured_speedup"]
        said += f" Beside {code(report['base']['name'])}, rounds of {best['drafts']} drafts gave "
        said += f"**{_with_interval(length['value'], length['ci95'])} tokens each**"
        said += f" and **{speed:.2f} times the speed** of the base in mtp-extract's own loop." if speed else "."
    return f"{said} All figures are in `report.json`.\n\n"


def _with_interval(value: float, interval: tuple[float, float] | None) -> str:
    return f"{value:.3f}" + (f" ({interval[0]:.3f} to {interval[1]:.3f} at 95 %)" if interval else "")


def _tuned(record: Mapping[str, Any], head: bool) -> str:
    if not (tuning := record.get("tuning")):
        return ""
    said = "" if head else "**These weights are no longer those they were extracted as.** "
    said += f"mtp-extract {'trained' if head else 'tuned'} {_TRAINED[tuning['mode']]}, on text that "
    return f"{said}{code(tuning['base'])} wrote; {_accepted(tuning)}\n\n{_lengths(tuning)}\n\n"


def _ordered_head(record: Mapping[str, Any]) -> str:
    if not (head := record.get("ordered_head")):
        return ""
    kinds = ", ".join(
        f"{plain(name)} {found['share']:.2%}" + (f" ({low:.2%} to {high:.2%})" if (low, high) != (None, None) else "")
        for name, found in head["kinds"].items()
        for low, high in [found["interval"] or (None, None)]
    )
    return (
        "**The head is not the one it was extracted with.** mtp-extract made an ordered head, which looks into "
        f"{head['top_k']:,} of {head['centroids']:,} clusters of tokens ({head['rows_read']:,} of "
        f"{head['rows_dense']:,} rows); {_accepted(head)} Of the dense head's choices it keeps, by kind of text (95 % "
        f"intervals over texts): {kinds}.\n\n{_lengths(head)}\n\n"
    )


def _accepted(made: Mapping[str, Any]) -> str:
    said = "it was stopped before its end, and " if made.get("interrupted") else ""
    if not made["refused"]:
        return f"{said}it was accepted."
    return f"{said}it was not accepted, and written all the same: {'; '.join(map(plain, made['refused']))}."


def _lengths(made: Mapping[str, Any]) -> str:
    """Mean accepted lengths on held-out text, before and after."""
    compared = [*made["workloads"].items(), ("all that it was made for", made["overall"])]
    if other := made["other_serving"]:
        served = f"at temperature {other['temperature']:g}" if other["temperature"] else "greedily"
        compared.append((f"the same prompts, served {served}", other["comparison"]))
    rows = [
        [
            plain(name),
            str(found["texts"]),
            *(
                _with_interval(one["mean_accepted_length"], one["interval"])
                for one in (found["before"], found["after"])
            ),
            _with_interval(found["rounds"]["ratio"], found["rounds"]["interval"]),
        ]
        for name, found in compared
    ]
    return table(["held-out text", "texts", "mean accepted length before", "after", "tokens a round, times"], rows)


def _origin(record: Mapping[str, Any]) -> str:
    source, section = record["source"], record["source"]["section"]
    rows: list[list[str]] = [["file", code(source["name"])], ["size", f"{source['size']:,} bytes"]]
    rows += [[plain(name).replace("_", " "), code(value)] for name, value in source["provenance"].items()]
    if section:
        rows.append(["bytes of its section", f"{section['begin']:,} to {section['end']:,}"])
        rows.append(["SHA-256 of its section", code(section["sha256"])])
    rows += [
        ["format", code(record["layout"])],
        ["written as", _WRITTEN.get(record["dtype"], code(record["dtype"].upper()))],
    ]
    said = table(["", ""], rows) + "\n\n" + _rounded(record)
    if record["proof"]:
        said += (
            f"Held against the file before this was written: {'; '.join(map(plain, in_words(record['proof'])))}.\n\n"
        )
    if source["kind"] == "checkpoint":
        said += "What that checkpoint was made from is not recorded: nothing was checked against a LiteRT file."
    elif not record.get("tuning") and not record.get("ordered_head"):
        command = f"mtp-inspect DRAFTER --against {_source_argument(record)}"
        said += f"To compare every tensor with the bundle's:\n\n```sh\n{command}\n```"
    return said.rstrip()


def _rounded(record: Mapping[str, Any]) -> str:
    """What was done to numbers here and before."""
    said, steps = "", record["converted_from"]
    before = {word for step in steps for word in step["rounded"]}
    before |= {step["made_codes"]["rule"] for step in steps if step["made_codes"]}
    if before:
        said += f"On the way here numbers were rounded: {', '.join(map(plain, sorted(before)))}.\n\n"
    if made := record["made_codes"]:
        said += (
            f"Of the matrices {made['matrices']} were rounded to integers here, by {code(made['rule'])}; the source "
            f"has none of them. At worst they are {made['rms']:.2g} of a matrix's range off (root mean square), "
            f"{made['largest']:.2g} at one place.\n\n"
        )
    return said


def _source_argument(record: Mapping[str, Any]) -> str:
    """How to name the bundle on a command line, as one shell word, as exactly as the record allows."""
    provenance, bundle = record["source"]["provenance"], bundle_of(record)
    named = f"hf://{bundle.repository}/{bundle.file}" if bundle else "BUNDLE.litertlm"
    if provenance.get("repository") and provenance.get("path"):
        revision = provenance.get("commit") or provenance.get("revision")
        named = f"hf://{provenance['repository']}/{provenance['path']}" + (f"@{revision}" if revision else "")
    elif provenance.get("url"):
        named = str(provenance["url"])
    return shell_word(named)


def _licence(record: Mapping[str, Any], words: CardWords, origin: str) -> str:
    known = license_of(record)
    if words.license:
        return f"Whoever published this copy states its licence: {code(words.license)}."
    if known is None:
        return (
            f"The {origin} is not a published one that mtp-extract knows, so the metadata states no licence (`other`). "
            f"The terms of whoever made the {origin} hold, and with them those of the model it was made from: "
            "`mtp-upload --license` states them."
        )
    tuned = ", of which the tuned ones are a modification" if record.get("tuning") else ""
    return (
        f"The bundle is one that Google published under the [{known.name}]({known.url}), and so are these weights"
        f"{tuned}; extraction changes the format, not the terms. Where whoever published the bundle states another "
        "licence, that one holds."
    )
