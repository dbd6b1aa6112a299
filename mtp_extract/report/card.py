"""The model card of an extracted drafter: ``README.md`` with the Hub's metadata.

A card is a function of ``extraction.json`` and, where there is one, ``report.json``: no dates, no network,
the same bytes for the same input. Its text is ``card.md`` beside this file, or ``eagle3.md`` of an EAGLE-3 head; here
are the values. Names come from files nobody vouches for, so they are escaped for Markdown and for YAML.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher
from pathlib import Path
from string import Template
from types import MappingProxyType
from typing import Annotated, Any

from mtp_extract.architecture.roles import EAGLE3, HEAD_ROLES
from mtp_extract.errors import CheckpointError, escape
from mtp_extract.formats import ENGINES, EVERY
from mtp_extract.litertlm.published import base_model_of, bundle_of, license_of
from mtp_extract.options import About
from mtp_extract.proof.words import in_words
from mtp_extract.report.markdown import code, listed, paragraph, plain, table
from mtp_extract.report.tables import measurements

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

_UNKNOWN_LICENSE = "other"
"""What the Hub calls a licence that is none of those it lists."""

# What stands between the two marks is part of the card if, or if not, the value has that name and is true. Marks on
# lines of their own go with them. The innermost blocks first.
_BLOCK = re.compile(r"<!-- if (not )?(\w+) -->(\n?)((?:(?!<!-- if ).)*?)<!-- end -->\3", re.DOTALL)


@dataclass(frozen=True)
class CardWords:
    """What whoever makes a checkpoint has to say on its card; None where that follows from the record.

    Raises:
        ValueError: one of them is nothing of the kind.
    """

    license: Annotated[
        str | None, About("Licence for the card, as the Hub calls it: apache-2.0, gemma, …", metavar="ID")
    ] = None
    base_model: Annotated[str | None, About("The base's id on the Hub, for the card.", metavar="ORG/NAME")] = None
    title: Annotated[str | None, About("Title of the card.", metavar="TEXT")] = None

    def __post_init__(self) -> None:
        for name, value, fits, expected in (
            ("license", self.license, _LICENSE_ID.fullmatch, "the Hub's name of one, such as apache-2.0"),
            ("base_model", self.base_model, _HUB_ID.fullmatch, "an id of the Hub, ORG/NAME"),
            ("title", self.title, lambda text: text.strip() and text.isprintable(), "one line of text"),
        ):
            if value is not None and not fits(value):
                raise ValueError(f"{name} {escape(value)!r}: expected {expected}.")

    def over(self, record: Mapping[str, Any] | None) -> CardWords:
        """These, and where there are none, those of a ``record``.

        Raises:
            CheckpointError: it says something else.
        """
        known = asdict(_words(record or {}))
        return CardWords(**{key: value or known[key] for key, value in asdict(self).items()})

    def as_json(self) -> dict[str, str | None] | None:
        """For ``extraction.json``."""
        return asdict(self) if any(asdict(self).values()) else None


UNSAID = CardWords()


def merged(old: str, mine: str, new: str) -> tuple[str, int]:
    """``mine``, which was ``old`` before it was changed by hand, with what became of ``old`` in ``new``.

    Returns:
        The text, and how many changes of ``new`` fell on lines that were changed by hand, and were left out.
    """
    before, own, after = (text.splitlines(keepends=True) for text in (old, mine, new))
    place = {
        block.a + k: block.b + k
        for block in SequenceMatcher(None, before, own, autojunk=False).get_matching_blocks()
        for k in range(block.size)
    }
    left = 0
    # From the end, so that places before stay where they are.
    for tag, first, last, begin, end in reversed(SequenceMatcher(None, before, after, autojunk=False).get_opcodes()):
        if tag == "equal":
            continue
        # The line before, and those that change, as whoever changed the text left them: one after the other.
        around = [place.get(line, -1) for line in range(max(first - 1, 0), last)]
        begins = around[0] if around else 0
        if begins < 0 or around != list(range(begins, begins + len(around))):
            left += 1
            continue
        start = begins + (first > 0)
        own[start : start + last - first] = after[begin:end]
    return "".join(own), left


def card_metadata(extraction: Mapping[str, Any]) -> dict[str, str | list[str]]:
    """The card's YAML header as a dict, in the order in which it is written."""
    license_, given = license_of(extraction), _words(extraction).license
    metadata: dict[str, str | list[str]] = {"license": given or (license_.id if license_ else _UNKNOWN_LICENSE)}
    base = _base_of(extraction)
    if base:
        metadata["base_model"] = [base]
    format_ = EVERY.get(extraction["layout"])
    if format_ is not None and format_.library:
        metadata["library_name"] = format_.library
    metadata["pipeline_tag"] = "text-generation"
    metadata["tags"] = list(_HEAD_TAGS if _is_head(extraction) else _TAGS)
    return metadata


def model_card(extraction: Mapping[str, Any], report: Mapping[str, Any] | None = None) -> str:
    """The text of ``README.md`` for a checkpoint directory.

    Args:
        extraction: the content of ``extraction.json``.
        report: the content of the ``report.json`` that ``mtp-validate`` wrote, or None.

    Raises:
        KeyError, TypeError, ...: one of them is not what this package writes.
    """
    base, known_as, license_ = _base_of(extraction), extraction.get("known_as"), license_of(extraction)
    # A role may have more than one tensor in the file; those of its scales say nothing of their own here.
    tensors = {name: entry for name, entry in extraction["tensors"].items() if "part" not in entry}
    kept = [entry for entry in tensors.values() if entry.get("kept") == "codes"]
    aside, format_ = extraction.get("set_aside") or [], EVERY.get(extraction["layout"])
    engines = format_.engines if format_ else ()
    bundle = extraction["source"].get("kind") != "checkpoint"
    tuning, head = (extraction.get(key) or {} for key in ("tuning", "ordered_head"))
    return _filled(
        (Path(__file__).parent / ("eagle3.md" if _is_head(extraction) else "card.md")).read_text("utf-8"),
        {
            "metadata": _yaml(card_metadata(extraction)),
            "heading": plain(_words(extraction).title or "") or _heading(known_as, _is_head(extraction)),
            "target": f"[{escape(base)}](https://huggingface.co/{escape(base)})" if base else "its base model",
            "file": code(extraction["source"]["name"]),
            "version": plain(extraction["tool"]["version"]),
            "provenance": table(("", ""), _provenance(extraction)),
            "bundle": bundle,
            "origin": "bundle" if bundle else "checkpoint",
            "again": f"mtp-extract {_source_argument(extraction)}" if bundle else "mtp-convert DRAFTER",
            "source": _source_argument(extraction),
            "proven": "; ".join(map(plain, in_words(extraction["proof"]))) if extraction.get("proof") else "",
            "before": ", ".join(sorted({plain(s) for e in tensors.values() for s in e.get("rounded_before") or ()})),
            "made": _made(list(tensors.values())),
            "ordered": any(entry.get("role", "") in HEAD_ROLES for entry in tensors.values()),
            "layout": code(extraction["layout"]),
            "engines": engines,
            **{engine: engine in engines for engine in ENGINES},
            "converts_to_gguf": not any(extraction["geometry"].get(flag) for flag in ("fc_norm", "norm_output")),
            "compressed": extraction["layout"].startswith("compressed-tensors"),
            "notes": listed(extraction.get("notes", [])),
            "weights": next((_word(name) for name in extraction["files"] if name.endswith(".gguf")), ""),
            "known_base": base,
            "base": _word(base or "BASE_MODEL"),
            "dtype_name": plain(extraction["dtype"]).upper(),
            "geometry": table(("", ""), [(code(key), code(value)) for key, value in extraction["geometry"].items()]),
            "tensor_count": len(tensors),
            "keeps_codes": kept,
            "kept_count": len(kept),
            "rounded": " and ".join(sorted({plain(entry["rounded_to"]) for entry in kept if entry.get("rounded_to")})),
            "aside": len(aside),
            "tensors": table(
                ("tensor", "role", "stored as", "quantization") if bundle else ("tensor", "role", "written as"),
                [
                    (code(name), code(entry.get("role", "")), code(_stored(entry)), code(_quantization(entry)))
                    if bundle
                    else (code(name), code(entry.get("role", "")), code(entry.get("dtype", "")))
                    for name, entry in tensors.items()
                ],
            ),
            "validated": report is not None,
            "verdict": paragraph(report["verdict"]) if report is not None else "",
            "measurements": "\n\n".join(
                part.markdown(3) for part in (measurements(report) if report is not None else ()) if not part.detail
            ),
            "untuned_codes": any(entry.get("quantization") for entry in tensors.values()) and not tuning,
            **_tuned(tuning),
            **_head(head),
            "changed": tuning or head,
            "static": _static(extraction),
            "license_given": code(_words(extraction).license or "") if _words(extraction).license else "",
            "license_name": license_.name if license_ else "",
            "license_url": license_.url if license_ else "",
        },
    )


_TRAINED: Mapping[str, str] = MappingProxyType(
    {
        "norms": "norms and layer scalars, and nothing else",
        "qat": "codes, on the grid of the scales they had, norms and layer scalars",
        "float": "every weight, as floats",
    }
)


def _tuned(tuning: Mapping[str, Any]) -> dict[str, object]:
    """What the card says of a tuning; nothing where there was none."""
    if not tuning:
        return dict.fromkeys(("tuned", "tuned_what", "tuned_base", "tuned_verdict", "tuned_drafts"), "")

    return {
        "tuned": _compared(tuning, ("before", "after"), "all that it was tuned for"),
        "tuned_what": _TRAINED[tuning["mode"]],
        "tuned_base": code(tuning["base"]),
        "tuned_verdict": _accepted(tuning) + (", and it was stopped before its end" if tuning["interrupted"] else ""),
        "tuned_drafts": str(tuning["recipe"]["draft_steps"]),
    }


def _head(head: Mapping[str, Any]) -> dict[str, object]:
    """What the card says of an ordered head that was made here; nothing where none was."""
    names = ("states", "looked", "clusters", "read", "dense", "base", "kept", "verdict", "drafts")
    if not head:
        return dict.fromkeys(("head", *(f"head_{name}" for name in names)), "")
    low, high = head["kept"]["interval"] or (None, None)
    bounds = "" if low is None else f" ({low:.2%} to {high:.2%} at 95 %)"
    found = (
        *(f"{head[key]:,}" for key in ("states", "top_k", "centroids", "rows_read", "rows_dense")),
        code(head["base"]),
        f"{head['kept']['share']:.2%}{bounds}",
        _accepted(head),
        str(head["draft_steps"]),
    )
    return {
        "head": _compared(head, ("dense", "ordered"), "all that it was made for"),
        **{f"head_{name}": value for name, value in zip(names, found, strict=True)},
    }


def _accepted(made: Mapping[str, Any]) -> str:
    refused = "; ".join(map(plain, made["refused"]))
    return f"it was not accepted, and written all the same: {refused}" if refused else "it was accepted"


def _compared(made: Mapping[str, Any], names: tuple[str, str], overall: str) -> str:
    """Mean accepted lengths before and after, under these names."""

    def row(name: str, found: Mapping[str, Any]) -> tuple[str, ...]:
        cells = [_length(found[key]["mean_accepted_length"], found[key]["interval"]) for key in ("before", "after")]
        change = _length(found["change"]["mean"], found["change"]["interval"], "+")
        return (plain(name), str(found["texts"]), *cells, change)

    rows = [row(name, found) for name, found in made["workloads"].items()]
    rows.append(row(overall, made["overall"]))
    if other := made["other_serving"]:
        served = f"at temperature {other['temperature']:g}" if other["temperature"] else "greedily"
        rows.append(row(f"the same prompts, served {served}", other["comparison"]))
    return table(("workload", "texts", *names, "change"), rows)


def _length(mean: float, interval: Sequence[float] | None, sign: str = "") -> str:
    bounds = f" ({interval[0]:{sign}.3f} to {interval[1]:{sign}.3f})" if interval else ""
    return f"{mean:{sign}.3f}{bounds}"


def _base_of(extraction: Mapping[str, Any]) -> str | None:
    """Hub id of the base: a head's own configuration may name it, or a directory, which means nothing elsewhere."""
    if given := _words(extraction).base_model:
        return given
    named = extraction["geometry"].get("base")
    return named if named and _HUB_ID.fullmatch(named) else base_model_of(extraction)


def _words(extraction: Mapping[str, Any]) -> CardWords:
    try:
        return CardWords(**(extraction.get("card") or {}))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"What the record says of the card is not what mtp-extract writes: {error}") from error


def _is_head(extraction: Mapping[str, Any]) -> bool:
    """Whether it is an EAGLE-3 head's, which has a card of its own."""
    format_ = EVERY.get(extraction["layout"])
    return format_ is not None and format_.architecture == EAGLE3


def _heading(known_as: str | None, head: bool) -> str:
    if head:
        return "EAGLE-3 head"
    return f"{plain(known_as)}: multi-token prediction drafter" if known_as else "MTP drafter"


def _filled(template: str, values: Mapping[str, object]) -> str:
    """``template`` with its blocks chosen and its names replaced; what is put in is not looked at again."""
    text, chosen = template, 1
    while chosen:
        text, chosen = _BLOCK.subn(lambda block: block[4] if bool(values[block[2]]) != bool(block[1]) else "", text)
    return Template(text).substitute(values)


def _yaml(metadata: Mapping[str, str | list[str]]) -> str:
    # JSON strings are YAML strings: quoting everything leaves nothing for a hostile name to break out of.
    lines = ["---"]
    for key, value in metadata.items():
        if isinstance(value, list):
            lines += [f"{key}:", *(f"- {json.dumps(item)}" for item in value)]
        else:
            lines.append(f"{key}: {json.dumps(value)}")
    return "\n".join([*lines, "---"])


def _provenance(extraction: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    source, section = extraction["source"], extraction["source"].get("section") or {}
    bundle = bundle_of(extraction)
    yield "file", code(source["name"])
    yield "size", f"{int(source['size']):,} bytes"
    if source.get("kind"):
        yield "format", code(f"{source['kind']} {_version(source.get('version'))}".strip())
    if bundle is not None:
        same_file = bundle.size == source["size"]
        yield "known as", f"{bundle.name}" + (f" ({bundle.note})" if same_file and bundle.note else "")
    for key, value in (source.get("provenance") or {}).items():
        yield key.replace("_", " "), code(value)
    if section:
        yield "section", f"{plain(section.get('index', '–'))} ({code(section.get('model_type') or 'mtp_drafter')})"
        if "begin" in section:
            yield "bytes of the section", f"{int(section['begin']):,} to {int(section['end']):,}"
        yield "SHA-256 of the section", code(section.get("sha256", ""))
        if section.get("found_by"):
            yield "found by", code(section["found_by"])


def _version(version: object) -> str:
    if isinstance(version, (list, tuple)):
        return ".".join(str(part) for part in version)
    return str(version) if version else ""


def _source_argument(extraction: Mapping[str, Any]) -> str:
    """How to name the bundle on a command line, as exactly as the record allows."""
    provenance = extraction["source"].get("provenance") or {}
    if provenance.get("repository") and provenance.get("path"):
        revision = provenance.get("commit") or provenance.get("revision")
        at = f"@{revision}" if revision else ""
        return _word(f"hf://{provenance['repository']}/{provenance['path']}{at}")
    if provenance.get("url"):
        return _word(provenance["url"])
    bundle = bundle_of(extraction)
    return f"hf://{bundle.repository}/{bundle.file}" if bundle else "BUNDLE.litertlm"


def _word(text: object) -> str:
    """``text`` as one shell word within a fenced block."""
    word = escape(text).replace("`", "")
    safe = all(c.isalnum() or c in "/:@._-+%=," for c in word)
    return word if safe else "'" + word.replace("'", "'\\''") + "'"


def _stored(entry: Mapping[str, Any]) -> str:
    source = entry.get("source") or {}
    dtype, shape = source.get("dtype"), source.get("shape")
    if dtype is None:
        return "not in the graph"
    return f"{dtype} {list(shape)}" if shape is not None else str(dtype)


def _quantization(entry: Mapping[str, Any]) -> str:
    quantization = entry.get("quantization") or {}
    if not quantization:
        return "none"
    kind = quantization.get("kind") or quantization.get("scheme")
    axis, block = quantization.get("axis"), quantization.get("block_size") or quantization.get("block")
    words = [str(kind)] if kind else []
    words += [f"axis {axis}"] if axis is not None else []
    words += [f"blocks of {block}"] if block else []
    return ", ".join(words) or "per tensor"


def _made(tensors: Sequence[Mapping[str, Any]]) -> str:
    """A sentence on codes that the source has none of; empty where there are none."""
    made = [entry["made_codes"] for entry in tensors if entry.get("made_codes")]
    if not made:
        return ""
    rms, largest = (max(error[key] for error in made) for key in ("rms", "largest"))
    rules = " and ".join(sorted({code(error["rule"]) for error in made}))
    return (
        f"{len(made)} matrices were rounded to integers here, by {rules}; the source has none of them. At worst they "
        f"are {rms:.2g} of a matrix's range off (root mean square), {largest:.2g} at one place."
    )


def _static(extraction: Mapping[str, Any]) -> bool:
    """Whether the graph quantizes activations or the key/value cache with scales of its own."""
    caches = (extraction.get("kv_inputs") or {}).values()
    activations = (entry.get("activations") or {} for entry in extraction["tensors"].values())
    return any(cache.get("scale") for cache in caches) or any(one.get("input") for one in activations)
