"""``mtp-doctor`` from end to end: files, pairs, and servers that are our own loop, sound and with planted faults."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.bases import base_with
from helpers.commands import run_here
from helpers.first_pair import first_base, first_bundle
from helpers.loop_server import counting_server, played
from helpers.model_server import Written
from helpers.prompt_files import write_prompts
from helpers.random_heads import head_config, random_head, write_head
from helpers.schemas import validator

import mtp_extract
from mtp_extract.data import sample_base
from mtp_extract.doctor import run
from mtp_extract.doctor.plan import DoctorPlan
from mtp_extract.doctor.run import check_fit, identify, run_diagnosis
from mtp_extract.drafter.load import load_drafter
from mtp_extract.drafter.mtp import MtpDrafter
from mtp_extract.errors import MtpExtractError, PairError
from mtp_extract.evaluation.base_model import LoadedBase, load_base
from mtp_extract.report.page import convert_to_json
from mtp_extract.speculate.loop import SpeculativeGenerator

NEW_TOKENS, STEPS = 32, 3
FAULT = "unit_layer_scalars"
LOAD_ONCE = cache(load_base)
Answers = Mapping[str, Written]  # by prompt
Ask = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def answers(
    generator: SpeculativeGenerator, drafter: MtpDrafter, encoded: list[tuple[int, ...]], texts: list[str]
) -> Mapping[str, Answers]:
    """By what is wrong with the loop: what it answers and counts. ``scripts/doctor_faults.py`` has more of that."""
    scalars = {name: torch.ones(1) for name in drafter.state_dict() if name.endswith("layer_scalar")}
    found = {}
    for name, engine in {"sound": drafter, FAULT: drafter.with_tensors(scalars)}.items():
        loop = SpeculativeGenerator(generator.base, engine, generator.codec.tokenizer)
        results = [loop.generate(one, max_new_tokens=NEW_TOKENS, drafts=STEPS) for one in encoded]
        found[name] = {text: played(result, ids=True) for text, result in zip(texts, results, strict=True)}
    return found


@pytest.fixture
def asked(directory: Path, prompts_file: Path) -> DoctorPlan:
    settings: dict[str, Any] = {"max_tokens": NEW_TOKENS, "chat_template": False, "device": "cpu"}
    return DoctorPlan(str(directory), base=str(sample_base()), prompts=prompts_file, **settings)


@pytest.fixture
def ask(asked: DoctorPlan, tmp_path: Path) -> Ask:
    """Makes ``doctor.json`` of the sample's pair: of answers, the kind of their server, and what else the plan has."""

    def ask(
        answers: Answers | None = None, kind: str = "vLLM", *, drafting: bool = True, few: int = 0, **more: Any
    ) -> dict[str, Any]:
        plan = replace(asked, **more)
        if few:
            plan = replace(plan, prompts=write_prompts(tmp_path / "few.jsonl", {"few": list(answers or ())[:few]}))
        if answers is None:
            return checked(run_diagnosis(plan, Path(plan.place)))
        with counting_server(answers, kind) as server:
            server.drafts = drafting
            return checked(run_diagnosis(replace(plan, server=server.url), Path(plan.place)))

    return ask


def checked(found: Any) -> dict[str, Any]:
    """``doctor.json``, after a look at its form."""
    report: dict[str, Any] = convert_to_json(found)
    validator("doctor")(report)
    return report


@pytest.fixture(autouse=True)
def loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sample's base takes longer to load than to run."""
    monkeypatch.setattr(run, "load_base", LOAD_ONCE)


@pytest.mark.parametrize("kind", ["vLLM", "llama-server"])
@pytest.mark.parametrize("fault", ["sound", FAULT])
def test_what_is_wrong_with_a_server_is_named(ask: Ask, answers: Mapping[str, Answers], fault: str, kind: str) -> None:
    report = ask(answers[fault], kind)
    told, expected = report["served"], report["expected"]
    assert (report["serving"]["kind"], report["settings"]["drafts"]) == (kind, STEPS)
    assert (report["text"]["texts"], report["text"]["likeliest"]["value"]) == (told["texts"], 1)
    # Only vLLM tells drafts by step.
    assert (told["steps"] is not None) == (kind == "vLLM")
    if fault == "sound":
        assert (report["outcome"], report["suspect"]) == ("in line", None)
        assert told["accepted"] == pytest.approx(expected["accepted"])
    else:
        assert (report["outcome"], report["suspect"]) == ("below", fault)
        assert all(fit["behind_at_least"] > 0 for fit in report["fits"][1:])


def test_the_command_prints_the_suspect(asked: DoctorPlan, answers: Mapping[str, Answers]) -> None:
    with counting_server(answers[FAULT]) as server:
        done = run_here(
            *("doctor", asked.place, "--base", asked.base, "--prompts", asked.prompts),
            *("--max-tokens", str(NEW_TOKENS), "--no-chat-template", "--server", server.url),
        )
    assert (done.returncode, done.stderr.count("error")) == (0, 0)
    assert "Suspect: layer scalars set to 1" in done.stdout.splitlines()[0]
    assert "What to do next" in done.stdout.splitlines()


def test_without_a_server_it_says_what_is_to_be_expected(ask: Ask) -> None:
    report = ask()
    assert (report["outcome"], report["serving"], report["fits"]) == ("not served", None, [])
    assert 1 < report["expected"]["tokens_per_round"]["value"] < 1 + len(report["expected"]["steps"]) == 1 + STEPS
    assert report["convention"].startswith("n - 1")


def test_text_that_the_base_does_not_write_is_said(ask: Ask, answers: Mapping[str, Answers], texts: list[str]) -> None:
    """Answers to other prompts: fluent, and not what this base says here."""
    moved = {}
    for at, (text, own) in enumerate(answers["sound"].items()):
        told = {"prompt_tokens": own.prompt_tokens, "prompt_ids": own.prompt_ids}
        moved[text] = replace(answers["sound"][texts[at - 1]], **told)
    report = ask(moved)
    assert (report["outcome"], report["suspect"]) == ("another text", None)
    assert report["text"]["likeliest"]["value"] < 0.9


@pytest.mark.parametrize("kind", ["vLLM", "llama-server"])
def test_prompts_are_taken_as_the_server_read_them(
    ask: Ask, generator: SpeculativeGenerator, encoded: list[tuple[int, ...]], texts: list[str], kind: str
) -> None:
    """A server that adds no BOS token where we do: vLLM says which tokens it read, others how many."""
    bos = generator.codec.tokenizer.bos_token_id
    assert all(one[0] == bos for one in encoded)
    results = [generator.generate(one[1:], max_new_tokens=NEW_TOKENS, drafts=STEPS) for one in encoded]
    report = ask({text: played(one, ids=kind == "vLLM") for text, one in zip(texts, results, strict=True)}, kind)
    assert report["outcome"] == "in line"
    assert report["text"]["likeliest"]["value"] == 1
    assert report["text"]["prompts_alike"] == 0
    assert report["served"]["accepted"] == pytest.approx(report["expected"]["accepted"])
    assert any("BOS token is added here" in note for note in report["notes"])


def test_tokens_that_are_told_are_not_made_again(ask: Ask, answers: Mapping[str, Answers]) -> None:
    """The text says nothing here: tokens alone."""
    told = {text: replace(one, pieces=["?"]) for text, one in answers["sound"].items()}
    report = ask(told)
    assert report["outcome"] == "in line"
    assert (report["text"]["texts"], report["text"]["likeliest"]["value"]) == (report["served"]["texts"], 1)
    with pytest.raises(MtpExtractError, match="tokens below 512, found 512") as raised:
        ask({text: replace(one, ids=[[512]]) for text, one in told.items()})
    assert raised.value.remedies == ("base",)


@pytest.mark.parametrize(
    ("kind", "asked_for", "outcome", "said"),
    [
        ("llama-server", {"drafting": False}, "nothing drafted", "drafted nothing"),
        ("unknown", {}, "cannot tell", "reports nothing of its drafts"),
        ("vLLM", {"drafts": 5}, "cannot tell", "not the 5 expected"),
        ("llama-server", {"drafts": 2}, "cannot tell", "not the 2 expected"),
        ("vLLM", {"few": 4}, "cannot tell", ""),
    ],
)
def test_what_cannot_be_told_has_no_suspect(
    ask: Ask, answers: Mapping[str, Answers], kind: str, asked_for: dict[str, Any], outcome: str, said: str
) -> None:
    report = ask(answers[FAULT], kind, **asked_for)
    assert (report["outcome"], report["suspect"]) == (outcome, None)
    assert said in report["verdict"]
    if kind == "unknown":
        assert (report["fits"], report["settings"]["drafts_known"]) == ([], False)
        assert report["expected"]["texts"] == report["text"]["texts"] > 0


def test_a_head_is_in_line_or_below_and_nothing_else(
    ask: Ask, tmp_path: Path, generator: SpeculativeGenerator, encoded: list[tuple[int, ...]], texts: list[str]
) -> None:
    """An EAGLE-3 head has no faults to hold against."""
    base = generator.base
    sizes = dict.fromkeys(("backbone_hidden_size", "hidden_size"), base.width)
    sizes |= dict.fromkeys(("vocab_size", "draft_vocab_size"), base.vocab_size)
    head = random_head(head_config(**sizes, base_layers=(1, 3, base.num_layers)))
    out = write_head(tmp_path / "head", head)
    loop = SpeculativeGenerator(base, head, generator.codec.tokenizer)
    results = [loop.generate(one, max_new_tokens=NEW_TOKENS, drafts=STEPS) for one in encoded]
    report = ask({text: played(result) for text, result in zip(texts, results, strict=True)}, place=str(out))
    assert (report["outcome"], report["suspect"], report["convention"]) == ("in line", None, None)
    assert [fit["name"] for fit in report["fits"]] == ["sound"]


def test_a_pair_that_does_not_fit_is_not_run(directory: Path, prompts_file: Path) -> None:
    """The first pair's base has the sample's sizes, and another RoPE in its full layers."""
    done = run_here("doctor", directory, "--base", first_base(), "--prompts", prompts_file, "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["outcome"], report["expected"]) == (1, "does not fit", None)
    assert [check["name"] for check in report["checks"] if check["passed"] is False] == ["RoPE, full_attention"]


def test_every_difference_is_named(tmp_path: Path) -> None:
    out = tmp_path / "drafter"
    mtp_extract.extract(first_bundle(), out, format="transformers", dtype="f32")
    drafter, identity = load_drafter(out), identify(out, "pair")
    other = base_with(tmp_path / "other", sliding_window=8, final_logit_softcapping=20.0)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (other / name).write_bytes((first_base() / name).read_bytes())
    tokens = json.loads((first_base() / "tokenizer.json").read_text())
    vocabulary = tokens["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (out / "tokenizer.json").write_text(json.dumps(tokens))
    checks = {check.name: check.passed for check in check_fit(out, identity, drafter, load_base(str(other), "cpu"))}
    assert [name for name, passed in checks.items() if passed is False] == ["sliding window", "tokenizer"]
    assert checks["soft cap"] is checks["made for this base"] is None
    assert checks["a vocabulary"] is checks["the drafter's backbone width"] is True
    assert checks["full_attention: K and V"] is checks["layers with K and V of type"] is True


def test_a_tokenizer_longer_than_its_base_is_a_note_and_a_token_beyond_is_refused(
    directory: Path, drafter: MtpDrafter, generator: SpeculativeGenerator
) -> None:
    """transformers drafts with such a pair: many a tokenizer lists tokens that its base has no row for."""
    tokenizer = copy.deepcopy(generator.codec.tokenizer)
    tokenizer.add_tokens([f"<beyond {number}>" for number in range(600)])
    loaded = LoadedBase("base", generator.base.model, tokenizer, torch.device("cpu"), ("cpu",), "float32", ())
    (found,) = (
        check
        for check in check_fit(directory, identify(directory, "drafter"), drafter, loaded)
        if check.name == "tokenizer's size"
    )
    assert found.passed is None and "a text with a token beyond these is refused" in found.found
    longer = SpeculativeGenerator(generator.base.model, drafter, tokenizer)
    assert longer.codec.encode("abc") == generator.codec.encode("abc")
    with pytest.raises(PairError, match="which the base does not embed"):
        longer.codec.encode("abc <beyond 599>")
