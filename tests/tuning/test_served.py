"""Text that a server writes: tuned on as the base's own, stored as it comes, refused where it is another base's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.loop_server import writer
from helpers.model_server import ModelServer, Written, model_server
from helpers.reporters import Recorder
from helpers.schemas import validator
from seam import verify

from mtp_extract.errors import MtpExtractError, PairError, ServerError
from mtp_extract.speculate.loop import SpeculativeGenerator
from mtp_extract.tuning.corpus import gather_texts
from mtp_extract.tuning.pair import Pair
from mtp_extract.tuning.plan import TuningPlan
from mtp_extract.tuning.run import run_tuning

from .conftest import Plans

Write = Callable[[dict[str, Any]], Written]


@pytest.fixture(scope="module")
def write(plan: Plans, tmp_path_factory: pytest.TempPathFactory) -> Write:
    """Return a function that answers like the base of ``plan``, and computes equal requests once."""
    pair = Pair(plan(tmp_path_factory.mktemp("none") / "none"))
    answer = writer(SpeculativeGenerator(pair.base, pair.drafter, pair.loaded.tokenizer))
    answers: dict[str, Written] = {}

    def write(request: dict[str, Any]) -> Written:
        key = json.dumps([request[name] for name in ("prompt", "temperature", "seed", "max_tokens")])
        return answers.get(key) or answers.setdefault(key, answer(request))

    return write


@pytest.fixture
def served(write: Write) -> Iterator[ModelServer]:
    with model_server("vLLM") as server:
        server.write = write
        yield server


def plan_with_server(plan: Plans, out: Path, server: ModelServer, **changes: Any) -> TuningPlan:
    return plan(out, work=out.with_name("work"), text_from=server.url, **changes)


def test_a_tuning_with_text_of_a_server(plan: Plans, served: ModelServer, tmp_path: Path) -> None:
    """The record names the writer and its agreement with the base; the texts are those the base writes."""
    outcome = run_tuning(plan_with_server(plan, tmp_path / "tuned", served))
    record = verify(tmp_path / "tuned")
    validator("extraction")(record)
    writer_record = record["tuning"]["text_from"]
    assert (writer_record["kind"], writer_record["model"]) == ("vLLM", "google/gemma-4-E4B-it")
    assert (writer_record["agreement"], writer_record["positions"]) == (1.0, 16 * writer_record["texts"])
    assert any("would have written 100.0% of" in note for note in outcome.notes)
    by_base = gather_texts(Pair(plan(tmp_path / "by_base")))
    assert outcome.corpus.kinds[0] == by_base.kinds[0]
    assert outcome.corpus.held_out == by_base.held_out
    # Greedily, and once more as it is served otherwise.
    assert {request["temperature"] for _, request in served.asked} == {0.0, 1.0}
    assert len({request["seed"] for _, request in served.asked if request["temperature"]}) > 1


def test_a_run_resumes_with_the_missing_texts(plan: Plans, served: ModelServer, tmp_path: Path) -> None:
    class Stopped(BaseException):
        pass

    class Stopping(Recorder):
        def report_progress(self, part: str, number: int, total: int, unit: str = "") -> None:
            if number >= 8:
                raise Stopped

    setting = plan_with_server(plan, tmp_path / "tuned", served)
    with pytest.raises(Stopped):
        gather_texts(Pair(setting), Stopping())
    file = setting.work / "texts.jsonl"
    assert len(file.read_text().splitlines()) == 2
    # As a killed run leaves it: the last batch is asked for again.
    file.write_bytes(file.read_bytes()[:-2])
    served.asked.clear()
    first = gather_texts(Pair(setting))
    prompts = {(request["prompt"], request["temperature"]) for _, request in served.asked}
    every = sum(len(json.loads(line)["tokens"]) for line in file.read_text().splitlines())
    assert len(served.asked) == len(prompts) == every - 4, "nothing else is asked twice"
    served.asked.clear()
    again = gather_texts(Pair(setting))
    assert (served.asked, again) == ([], first)


def test_text_without_token_ids_is_encoded(plan: Plans, served: ModelServer, write: Write, tmp_path: Path) -> None:
    served.write = lambda request: replace(write(request), ids=None)
    pair = Pair(plan_with_server(plan, tmp_path / "tuned", served))
    for text in gather_texts(pair).kinds[0]:
        assert pair.codec.encode_continuation(pair.codec.decode(text.continuation) or "") == text.continuation


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_another_base_is_noticed_before_training(
    plan: Plans, served: ModelServer, write: Write, tmp_path: Path, temperature: float
) -> None:
    """Every third token of its text is another; with sampled text, its greedy text shows that."""
    setting = plan_with_server(plan, tmp_path / "tuned", served, temperature=temperature)
    text_from = gather_texts(Pair(setting)).text_from
    assert text_from is not None and text_from["agreement"] == 1

    def another(request: dict[str, Any]) -> Written:
        written = write(request)
        assert written.ids is not None
        moved = [[token if at % 3 else (token * 7 + 3) % 512 for at, token in enumerate(ids)] for ids in written.ids]
        return replace(written, ids=moved)

    served.write = another
    (setting.kept_in / "texts.jsonl").unlink()
    with pytest.raises(PairError, match="vLLM to write at least 90% of tokens as the base at hand") as caught:
        gather_texts(Pair(setting))
    assert caught.value.remedies == ("base",)


def test_thoughts_without_token_ids_are_dropped(plan: Plans, served: ModelServer, tmp_path: Path) -> None:
    def thinking(handler: Any) -> None:
        choices = {"delta": {"reasoning": "hm"}}, {"delta": {"content": "yes"}, "finish_reason": "stop"}
        data = "".join(f"data: {json.dumps({'choices': [choice]})}\n\n" for choice in choices)
        handler.answer(200, f"{data}data: [DONE]\n\n".encode(), Content_Type="text/event-stream")

    served.overrides["/v1/completions"] = thinking
    with pytest.raises(MtpExtractError, match=r"expected (at least . )?texts of more than 3 tokens"):
        gather_texts(Pair(plan_with_server(plan, tmp_path / "tuned", served)))
    stored = list(map(json.loads, (tmp_path / "work" / "texts.jsonl").read_text().splitlines()))
    assert stored and not any(tokens for row in stored for tokens in row["tokens"])


def test_errors_name_the_arguments_of_the_plan(plan: Plans, served: ModelServer, tmp_path: Path) -> None:
    served.key = "sesame"
    with pytest.raises(ServerError, match="found 401 Unauthorized") as caught:
        gather_texts(Pair(plan_with_server(plan, tmp_path / "tuned", served)))
    assert caught.value.remedies == ("text_key",)
