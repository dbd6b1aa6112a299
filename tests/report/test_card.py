"""The model card: its metadata by huggingface_hub's own classes, its statements, and hostile names."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from typing import Any

import pytest
from helpers.record_document import RECORD, tuning
from helpers.report_document import REPORT
from helpers.schemas import validator
from huggingface_hub import ModelCard

from mtp_extract.errors import CheckpointError
from mtp_extract.formats import FORMATS, engines_for
from mtp_extract.io.source import Source
from mtp_extract.litertlm import published
from mtp_extract.litertlm.published import known_bundle, license_of
from mtp_extract.report.card import card_metadata, model_card


def card(**changes: Any) -> str:
    return model_card({**copy.deepcopy(RECORD), **changes}, None)


def test_the_record_that_other_tests_use_is_one() -> None:
    validator("extraction")(RECORD)


def test_the_metadata_is_what_huggingface_hub_reads() -> None:
    read = ModelCard(card()).data.to_dict()
    assert read == card_metadata(RECORD)
    assert read["license"] == "apache-2.0"
    assert read["base_model"] == ["google/gemma-4-E4B-it"]
    assert read["base_model_relation"] == "adapter"
    assert read["library_name"] == "transformers"
    assert read["pipeline_tag"] == "text-generation"
    assert read["license_link"] == "https://www.apache.org/licenses/LICENSE-2.0"


def test_what_the_card_states() -> None:
    text = card()
    for stated in (
        "[Apache License 2.0](https://www.apache.org/licenses/LICENSE-2.0)",
        "c" * 40,
        "5" * 64,
        "3,614,392,320 to 3,659,530,240",
        "| written as | `BF16` |",
        "model.generate(**inputs, assistant_model=drafter",
        '\'{"method":"mtp","model":"DRAFTER","num_speculative_tokens":4}\'',
        "--speculative-algorithm NEXTN",
        "--for gguf -o drafter-gguf",
        "-md drafter-gguf/mtp-*.gguf --spec-type draft-mtp",
        "--draft-kind mtp --draft-block-size 4",
        "hf://litert-community/gemma-4-E4B-it-litert-lm/gemma-4-E4B-it.litertlm@" + "c" * 40,
        "## Limits",
    ):
        assert stated in text, stated
    assert model_card(RECORD) == text


def test_an_unknown_bundle() -> None:
    text = card(known_as=None, source={**RECORD["source"], "size": 1, "provenance": {}})
    assert "base_model" not in ModelCard(text).data.to_dict()
    assert "BASE_MODEL" in text
    assert "--against BUNDLE.litertlm" in text


def test_the_licence_of_a_known_bundle_only() -> None:
    source = {**RECORD["source"], "size": 1, "provenance": {}}
    # A drafter of a known geometry may be anybody's.
    for known_as in (None, "Gemma 4 E4B"):
        text = card(known_as=known_as, source=source)
        assert ModelCard(text).data.license == "other"
        assert "terms of whoever made it hold" in text
        assert "Apache" not in text
    newer = {**source, "provenance": {"repository": "litert-community/gemma-4-E4B-it-litert-lm"}}
    assert ModelCard(card(source=newer)).data.license == "apache-2.0"


@pytest.mark.parametrize("layout", FORMATS)
def test_each_format_is_for_its_own_engines(layout: str) -> None:
    """One section for each engine that loads it, and a library name the Hub shows."""
    text = card(layout=layout, files={"mtp-x-Q4_0.gguf": {}} if layout == "gguf" else {})
    marks = {
        "transformers": "assistant_model=drafter",
        "vllm": "vllm serve",
        "sglang": "sglang.launch_server",
        "mlx-vlm": "mlx_vlm generate",
        "llama.cpp": "-md DRAFTER/mtp-x-Q4_0.gguf",
    }
    found = {engine for engine, mark in marks.items() if mark in text}
    assert found == set(engines_for(layout)) - {"tensorrt-llm", "ollama"}
    assert ModelCard(text).data.to_dict().get("library_name", "") == FORMATS[layout].library


def test_the_card_has_no_mark_of_its_template() -> None:
    for text in (card(), card(layout="litert"), card(known_as=None, notes=[]), card(layout="eagle3")):
        assert not re.search(r"\{[{%#]|[%#]\}", text)
        assert "\n\n\n" not in text
    assert "\n\n\n" not in model_card(RECORD, REPORT)


@pytest.mark.parametrize("repository", ["[x](http://y)/a", "<b>/x", "org", "a/b/c"])
def test_a_repository_that_is_none_is_no_base(repository: str) -> None:
    source = {**RECORD["source"], "size": 1, "provenance": {"repository": repository}}
    text = card(known_as=None, source=source)
    assert "drafter of its base model, extracted" in text
    assert "base_model" not in ModelCard(text).data.to_dict()


@pytest.mark.parametrize("lacking", ["source", "geometry", "layout", "notes"])
def test_a_record_that_lacks_what_the_card_states(lacking: str) -> None:
    record = {key: value for key, value in RECORD.items() if key != lacking}
    with pytest.raises(CheckpointError, match=f"lacks what the model card states .*{lacking}"):
        model_card(record)


def test_an_unknown_bundle_of_the_hub_names_its_repository() -> None:
    provenance = {"repository": "org/other", "path": "x.litertlm", "commit": "c" * 40}
    source = {**RECORD["source"], "size": 1, "provenance": provenance}
    assert card_metadata({**RECORD, "known_as": None, "source": source})["base_model"] == ["org/other"]


@pytest.mark.parametrize(
    "name", ["a`b", "x\n---\nlicense: mit\n", "|a|b|", '"\n- x', "]](http://x)", "\u202e", "\x1b[31m"]
)
def test_hostile_names_stay_names(name: str) -> None:
    source = {**RECORD["source"], "name": name, "provenance": {"repository": name, "path": name}}
    text = model_card({**RECORD, "known_as": None, "source": source})
    plain = card(known_as=None)
    assert ModelCard(text).data.license == "other"
    assert sum(line == "---" for line in text.splitlines()) == 2
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        line for line in plain.splitlines() if line.startswith("#")
    ]
    row = next(line for line in text.splitlines() if line.startswith("| file |"))
    assert row.replace("\\|", "").count("|") == 3
    assert row.count("`") == 2
    assert "\x1b" not in text and "\u202e" not in text


def test_importing_the_card_is_cheap() -> None:
    heavy = "{'huggingface_hub', 'jinja2', 'numpy', 'yaml'}"
    code = f"import sys, mtp_extract.report.card; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


class _Named(Source):
    def __init__(self, name: str, size: int, **provenance: str) -> None:
        self.name, self.size, self.provenance = name, size, provenance

    def read(self, offset: int, length: int) -> bytes:
        raise AssertionError("naming a bundle reads nothing")


_E4B = "0b2a8980ce155fd97673d8e820b4d29d9c7d99b8fa6806f425d969b145bd52e0"


def test_a_bundle_is_named_by_its_sha256() -> None:
    known = known_bundle(_Named("x", 3659530240, sha256=_E4B))
    assert known is not None and known["name"] == "Gemma 4 E4B"
    assert known_bundle(_Named("x", 3659530240, sha256="d" * 64)) is None
    # Inserting a tuned drafter in place keeps name and size.
    assert known_bundle(_Named("gemma-4-E4B-it.litertlm", 3659530240)) is None


def test_a_tuned_bundle_of_the_published_size_is_not_called_published() -> None:
    """Size, name, and where the section begins are those of the published file; its content is not."""
    source = {**RECORD["source"], "provenance": {}}
    text = card(source=source)
    assert ModelCard(text).data.license == "other"
    assert "Google" not in text and "| known as |" not in text
    assert "--against BUNDLE.litertlm" in text
    # The geometry fits this base, whoever trained the weights.
    assert ModelCard(text).data.base_model == ["google/gemma-4-E4B-it"]


def test_the_published_section_has_the_published_licence(monkeypatch: pytest.MonkeyPatch) -> None:
    table = copy.deepcopy(published.load_mapping("bundles"))
    table["bundles"][2]["drafter"]["sha256"] = "5" * 64
    monkeypatch.setattr(published, "load_mapping", lambda name: table)
    source = {**RECORD["source"], "provenance": {}}
    assert ModelCard(card(source=source)).data.license == "apache-2.0"
    source["section"] = {**source["section"], "sha256": "6" * 64}
    assert license_of({**RECORD, "source": source, "known_as": None}) is None


def test_where_an_engine_does_otherwise_is_a_limit() -> None:
    note = "llama.cpp does not load this drafter: it is as wide as its base (64)."
    text = card(layout="gguf", dtype="codes", files={"mtp-x-Q4_0.gguf": {}}, notes=[note])
    assert note in text.partition("## Limits")[2]
    assert note not in card()


def test_the_figures_of_a_report_come_first() -> None:
    text = model_card(RECORD, REPORT)
    titles = [line for line in text.splitlines() if line.startswith("## ")]
    assert titles == [
        "## How to serve it",
        "## Limits",
        "## Where it comes from, and how it was checked",
        "## Licence",
    ]
    first = text.partition("## How to serve it")[0]
    assert f"{REPORT['verdict']} All figures are in `report.json`." in first
    assert "report.json" not in model_card(RECORD)


def test_what_a_tuning_measured_is_stated() -> None:
    made = tuning("org/name")
    text = card(tuning=made)
    assert "no longer those they were extracted as" in text and "--against" not in text
    gain = "On 7 held-out texts a round yields 1.100 times the tokens (1.000 to 1.200 at 95 %)"
    assert f"{gain}; it was stopped before its end; it was not accepted, and written all the same: org/name." in text
    assert f"{gain}." in card(tuning={**made, "refused": [], "interrupted": False})


def test_codes_that_were_made_are_not_the_files() -> None:
    made = {"rule": "int4", "matrices": 1}
    step = {"layout": "transformers", "dtype": "bf16", "rounded": {"BF16": 3}, "made_codes": None}
    text = card(dtype="codes", made_codes=made, converted_from=[step])
    assert "1 matrices were rounded to integers here, by `int4`." in text
    assert "On the way here numbers were rounded: BF16." in text
    assert "rounded" not in card()


def test_what_a_validation_refutes_is_said_first() -> None:
    verdict = "Refuted: config: 1 number differs."
    text = model_card(RECORD, {**REPORT, "refuted": True, "verdict": verdict})
    assert f"**A validation refutes this copy.** {verdict}" in text.partition("## How to serve it")[0]
    assert "refutes this copy" not in model_card(RECORD, REPORT)
