"""The model card: its metadata by huggingface_hub's own classes, its statements, hostile names, what people add."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.record_document import RECORD, REPORT, tuning
from helpers.schemas import validator
from huggingface_hub import ModelCard
from seam import verify

import mtp_extract
from mtp_extract import convert
from mtp_extract.errors import HubError
from mtp_extract.formats import MTP_FORMATS, list_engines_for
from mtp_extract.hub.upload import plan_upload
from mtp_extract.io.address import HubAddress, parse_address
from mtp_extract.litertlm import published
from mtp_extract.litertlm.published import find_license, find_published_bundle
from mtp_extract.report.card import NO_CARD_WORDS, CardWords, Verdict, build_card_metadata, render_model_card

WORDS = CardWords("apache-2.0", base_model="org/base")
E4B_MAY = "0b2a8980ce155fd97673d8e820b4d29d9c7d99b8fa6806f425d969b145bd52e0"
"""SHA-256 of a published file, which the Hub states as its ETag."""
IDENTIFIED = {**RECORD["source"], "provenance": {**RECORD["source"]["provenance"], "etag": E4B_MAY}}
UNKNOWN = {**RECORD["source"], "size": 1, "provenance": {}}


def describe_source(repository: str) -> dict[str, Any]:
    return {**UNKNOWN, "provenance": {"repository": repository, "path": "x", "commit": "ab"}}


def render_card(**changes: Any) -> str:
    return render_model_card({**copy.deepcopy(RECORD), **changes})


def test_the_metadata_is_what_huggingface_hub_reads() -> None:
    record = {**RECORD, "source": IDENTIFIED}
    validator("extraction")(record)
    read = ModelCard(render_card(source=IDENTIFIED)).data.to_dict()
    assert read == build_card_metadata(record)
    assert read == {
        "license": "apache-2.0",
        "license_link": "https://www.apache.org/licenses/LICENSE-2.0",
        "base_model": ["google/gemma-4-E4B-it"],
        "base_model_relation": "adapter",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": [
            *("speculative-decoding", "draft-model", "gemma4", "mtp-extract"),
            *("multi-token-prediction", "mtp", "litert-lm"),
        ],
    }


STEP = {"layout": "transformers", "dtype": "bf16", "rounded": ["BF16"], "rule": None}
TUNED = tuning("org/name")
GAIN = "On 7 held-out texts a round yields 1.100 times the tokens (1.000 to 1.200 at 95 %)"
COMMIT = f"hf://litert-community/gemma-4-E4B-it-litert-lm@{'c' * 40}/gemma-4-E4B-it.litertlm"


@pytest.mark.parametrize(
    ("changes", "expected", "unexpected"),
    [
        (
            {"source": IDENTIFIED},
            (
                "# Gemma 4 E4B drafter\n\nThe multi-token prediction (MTP) drafter of [google/gemma-4-E4B-it](https://",
                *("vllm serve google/gemma-4-E4B-it", f"| ETag, as the server states it | `{E4B_MAY}` |"),
                *("[Apache License 2.0](https://www.apache.org/licenses/LICENSE-2.0)", "5" * 64, COMMIT),
                *("3,614,392,320 to 3,659,530,240", "| written as | `BF16` |", "--for gguf -o drafter-gguf"),
                '\'{"method":"mtp","model":"DRAFTER","num_speculative_tokens":4}\'',
            ),
            ("rounded", "report.json", "Proven", "BASE_MODEL", "not said", "| SHA-256 |", "| sha256 |"),
        ),
        ({"proof": ["all holds", "but one"]}, ("Proven before this was written: all holds; but one.",), ()),
        # What was converted was not held against its file: anybody can write a record.
        (
            {"proof": ["all holds"], "converted_from": [RECORD]},
            ("The record says that it was proven when it was extracted: all holds.",),
            ("Proven before",),
        ),
        (
            {"known_as": None, "source": UNKNOWN},
            ("BASE_MODEL", "--against BUNDLE.litertlm", 'license: "other"', "terms of whoever made it hold"),
            ("base_model:", "Apache"),
        ),
        # A drafter of a known shape may be anybody's, and of anybody's base.
        (
            {"known_as": "Gemma 4 E4B", "source": UNKNOWN},
            (
                *('license: "other"', "terms of whoever made it hold", "vllm serve BASE_MODEL"),
                "# MTP drafter\n\nA multi-token prediction (MTP) drafter of Gemma 4 E4B's shape, extracted from",
                "Which base that is, is not said",
            ),
            ("Apache", "google/gemma-4-E4B-it", "base_model"),
        ),
        # Of another server an ETag is any text.
        (
            {"source": {**UNKNOWN, "provenance": {"url": "https://x/y.litertlm", "etag": E4B_MAY}}},
            ("Which base that is, is not said",),
            ("google/", "Apache"),
        ),
        # Size, name, and where the section begins are those of the published file; its content is not.
        (
            {"source": {**RECORD["source"], "provenance": {}}},
            ('license: "other"', "--against BUNDLE.litertlm", "vllm serve BASE_MODEL"),
            ("Google", "| known as |", "google/gemma-4-E4B-it"),
        ),
        # Whose repository it is says the licence, and not which of its files' bases it is for.
        (
            {"source": describe_source("litert-community/gemma-4-E4B-it-litert-lm")},
            ('license: "apache-2.0"', "not said"),
            ("base_model",),
        ),
        (
            {"known_as": None, "source": describe_source("org/other")},
            ("hf://org/other@ab/x", "not said"),
            ("base_model",),
        ),
        (
            {"tuning": TUNED},
            (
                "no longer those they were extracted as",
                f"{GAIN}; it was stopped before its end; it was not accepted, and written all the same: org/name.",
            ),
            ("--against",),
        ),
        ({"tuning": {**TUNED, "refused": [], "interrupted": False}}, (f"{GAIN}.",), ()),
        # It is for the base that it was fitted to, whatever it was extracted for.
        ({"tuning": TUNED, "source": IDENTIFIED}, ('base_model: ["org/name"]', "vllm serve org/name"), ("google/",)),
        ({"tuning": {**TUNED, "base": "mine"}, "source": IDENTIFIED}, ("vllm serve BASE_MODEL",), ("google/",)),
        (
            {"dtype": "codes", "rule": "int4", "converted_from": [STEP]},
            ("were rounded to such here, by `int4`.", "On the way here numbers were rounded: BF16."),
            (),
        ),
        # A directory, or no text at all, is no id of the Hub.
        ({"known_as": None, "source": UNKNOWN, "geometry": {"base": 1}}, (), ("base_model:",)),
    ],
)
def test_statements_by_record(changes: dict[str, Any], expected: Sequence[str], unexpected: Sequence[str]) -> None:
    text = render_card(**changes)
    assert [part for part in expected if part not in text] == []
    assert [part for part in unexpected if part in text] == []


@pytest.mark.parametrize("layout", MTP_FORMATS)
def test_each_format_is_for_its_own_engines(layout: str) -> None:
    """Each engine that loads it has a section, and the library name is one of the Hub's."""
    text = render_card(layout=layout, files={"mtp-x-Q4_0.gguf": {}} if layout == "gguf" else {})
    marks = {
        "transformers": "assistant_model=drafter",
        "vllm": "vllm serve",
        "sglang": "sglang.launch_server",
        "mlx-vlm": "mlx_vlm generate",
        "llama.cpp": "-md DRAFTER/mtp-x-Q4_0.gguf",
    }
    engines = {engine for engine, mark in marks.items() if mark in text}
    assert engines == set(list_engines_for(layout)) - {"tensorrt-llm", "ollama"}
    assert ModelCard(text).data.to_dict().get("library_name", "") == MTP_FORMATS[layout].library


def test_no_template_markup_is_left() -> None:
    limited = render_model_card(RECORD, ["It is wide."], Verdict(True, "Refuted: config."))
    assert "\n- It is wide.\n" in limited and "**A validation refutes this copy.** Refuted: config." in limited
    for text in (
        render_card(),
        render_card(layout="litert"),
        render_card(known_as=None),
        render_card(layout="eagle3"),
        limited,
    ):
        assert not re.search(r"\{[{%#]|[%#]\}|\n\n\n", text)


@pytest.mark.parametrize(
    "name", ["a`b", "x\n---\nlicense: mit\n", "|a|b|", '"\n- x', "]](http://x)", "<b>/x", "org", "\u202e", "\x1b[31m"]
)
def test_hostile_names_stay_names(name: str) -> None:
    source = {**RECORD["source"], "name": name, "provenance": {"repository": name, "path": name}}
    text, plain = (render_card(known_as=None, **changes) for changes in ({"source": source}, {}))
    data = ModelCard(text).data
    assert data.license == "other" and "base_model" not in data.to_dict()
    assert sum(line == "---" for line in text.splitlines()) == 2
    titles = [[line for line in card.splitlines() if line.startswith("#")] for card in (text, plain)]
    assert titles[0] == titles[1]
    assert "\x1b" not in text and "\u202e" not in text


def test_a_bundle_is_known_by_its_sha256_alone() -> None:
    """Inserting a tuned drafter in place keeps name and size."""
    sums = {
        E4B_MAY: "Gemma 4 E4B",
        "f335f2bfd1b758dc6476db16c0f41854bd6237e2658d604cbe566bcefd00a7bc": "Gemma 4 E4B",
        "181938105e0eefd105961417e8da75903eacda102c4fce9ce90f50b97139a63c": "Gemma 4 E2B",
        "ab7838cdfc8f77e54d8ca45eadceb20452d9f01e4bfade03e5dce27911b27e42": "Gemma 4 E2B",
        "d" * 64: None,
        "": None,
    }
    for sha256, name in sums.items():
        provenance = {"repository": "org/any", "etag": sha256}
        known: Any = find_published_bundle(SimpleNamespace(name="x", size=3659530240, provenance=provenance))
        assert (known and known["name"]) == name


def test_the_published_section_has_the_published_licence(monkeypatch: pytest.MonkeyPatch) -> None:
    table = copy.deepcopy(published.load_mapping("bundles"))
    table["bundles"][2]["drafter"]["sha256"] = "5" * 64
    monkeypatch.setattr(published, "load_mapping", lambda name: table)
    source = {**RECORD["source"], "provenance": {}}
    assert ModelCard(render_card(source=source)).data.license == "apache-2.0"
    source["section"] = {**source["section"], "sha256": "6" * 64}
    assert find_license({**RECORD, "source": source, "known_as": None}) is None


def test_the_verdict_of_a_report_comes_first() -> None:
    text = render_model_card(RECORD, report=Verdict(False, "Verified."))
    assert "\n\nVerified. All figures are in `report.json`.\n\n## How to serve it" in text


def read_sent_card(directory: Path, words: CardWords = NO_CARD_WORDS) -> tuple[str, tuple[str, ...]]:
    files, notes = plan_upload(directory, words)
    with next(file for file in files if file.path_in_repo == "README.md").as_file() as file:
        return file.read().decode(), notes


def test_an_edited_card_is_sent_unchanged(extracted: Path, tmp_path: Path) -> None:
    """For example with the licence, which the card itself asks for."""
    edited = Path(shutil.copytree(extracted, tmp_path / "d"))
    written = (edited / "README.md").read_text()
    (edited / "README.md").write_text(written.replace('license: "other"', "license: mit") + "\nThanks.\n")
    verify(edited)
    convert(edited, tmp_path / "out", format="litert")
    (edited / "report.json").write_text(json.dumps(REPORT))
    assert read_sent_card(edited) == (
        (edited / "README.md").read_text(),
        ("README.md was changed since mtp-extract wrote it, and is sent as it is.",),
    )
    with pytest.raises(HubError, match=r"README\.md: expected the card that mtp-extract wrote"):
        read_sent_card(edited, WORDS)
    # As the message says: without it, the card is made anew.
    (edited / "README.md").unlink()
    assert 'base_model: ["org/base"]' in read_sent_card(edited, WORDS)[0]


def test_the_publishers_words_are_on_the_card(extracted: Path) -> None:
    before = (extracted / "README.md").read_text()
    text, notes = read_sent_card(extracted, WORDS)
    assert 'license: "apache-2.0"\nbase_model: ["org/base"]\nbase_model_relation: "adapter"' in text
    assert "states its licence: `apache-2.0`." in text and "(`other`)" not in text
    assert not notes, "neither the directory nor its record says it"
    assert (extracted / "README.md").read_text() == read_sent_card(extracted)[0] == before


def test_the_source_is_an_address_that_commands_open() -> None:
    wanted = HubAddress("litert-community/gemma-4-E4B-it-litert-lm", "gemma-4-E4B-it.litertlm", "c" * 40)
    assert parse_address(COMMIT) == wanted


def test_verdicts_are_literals_of_one_module() -> None:
    """A function chooses them by the evidence; a literal elsewhere could claim anything."""
    package = Path(mtp_extract.__file__).parent
    for word in ("Verified", "Refuted", "Not verified", "Measured, not proven", "Named, not proven"):
        places = [path.name for path in package.rglob("*.py") if f'"{word}' in path.read_text(encoding="utf-8")]
        assert places == ["card.py"], word
