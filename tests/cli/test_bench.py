"""``mtp-bench``: what it measures of servers of every kind, what it says where they tell nothing, and how it fails."""

from __future__ import annotations

import dataclasses
import json
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.bounds import HANG
from helpers.commands import run_here
from helpers.model_server import KEY, MANNERS, ModelServer, Written, account, model_server, prompt_of, words_of
from helpers.prompt_files import write_prompts
from helpers.reporters import Recorder
from helpers.schemas import validator
from msgspec.structs import replace

from mtp_extract.errors import MtpExtractError
from mtp_extract.io import threads
from mtp_extract.io.typed import Figure
from mtp_extract.report.page import convert_to_json
from mtp_extract.serving import client as client_module
from mtp_extract.serving.benchmark import compute_figures, measure_side, run_benchmark
from mtp_extract.serving.client import Answer, Server
from mtp_extract.serving.counters import Counters
from mtp_extract.serving.plan import BenchPlan
from mtp_extract.serving.result import Benchmark, Request, Side, Window
from mtp_extract.serving.verdict import build_benchmark_table

FEW = {"code": ["class Foo:", "import os", "for a in b:"], "prose": ["Snow fell.", "The harbour was empty."]}
TOKENS = 8
COUNTED = {name: [account(len(words_of(text, TOKENS))) for text in texts] for name, texts in FEW.items()}


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "few.jsonl", FEW)


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[ModelServer, ModelServer]]:
    kind = getattr(request, "param", "vLLM")
    with model_server(kind) as server, model_server(kind, drafts=False) as baseline:
        yield server, baseline


def plan(prompts: Path, server: ModelServer, baseline: ModelServer | None = None, **more: Any) -> BenchPlan:
    return BenchPlan(server.url, baseline and baseline.url, prompts, max_tokens=TOKENS, **more)


def checked(found: Benchmark) -> dict[str, Any]:
    """``bench.json``, after a look at its form."""
    report: dict[str, Any] = convert_to_json(found)
    validator("bench")(report)
    assert all(len(row) == len(build_benchmark_table(found).columns) for row in build_benchmark_table(found).rows)
    return report


def summed(name: str, workloads: Any = FEW) -> int:
    return sum(counted[name] for workload in workloads for counted in COUNTED[workload])


def drafts_of(side: Side) -> tuple[int | None, ...]:
    return side.counted, side.drafted, side.accepted, side.rounds


@pytest.mark.parametrize("concurrency", [1, 2])
@pytest.mark.parametrize("pair", sorted(set(MANNERS) - {"unknown"}), indirect=True)
def test_drafts_are_the_servers(pair: tuple[ModelServer, ModelServer], prompts: Path, concurrency: int) -> None:
    """Told in answers or on the page, by window: the sums are the same."""
    reporter = Recorder()
    found = run_benchmark(plan(prompts, *pair, concurrency=concurrency), reporter)
    checked(found)
    # After each window of both sides, until all are done.
    windows = len(found.windows["server"])
    assert reporter.parts == [("asking", done + 1, windows) for done in range(windows)]
    # Of what rolls, a page of counters tells no workload.
    together = concurrency > 1 and found.servers["server"]["kind"] in ("llama-server", "vLLM")
    told = found.servers["server"]["kind"] != "vLLM"
    for name, of in (*found.workloads.items(), ("all", found.total)):
        names = list(FEW) if name == "all" else [name]
        texts = sum(len(FEW[workload]) for workload in names)
        drafted, accepted, rounds = (summed(what, names) for what in ("drafted", "accepted", "rounds"))
        assert of.sides["server"].tokens == summed("tokens", names)
        assert (of.texts, of.identical) == (texts, texts)
        if together and name != "all":
            assert drafts_of(of.sides["server"]) == (
                (texts, drafted, accepted, None) if told else (0, None, None, None)
            )
            assert of.sides["server"].output_throughput is None
            continue
        assert drafts_of(of.sides["server"]) == (texts, drafted, accepted, rounds)
        assert of.sides["server"].acceptance.value == accepted / drafted
        assert of.sides["server"].tokens_per_round.value == pytest.approx(1 + accepted / rounds)
    # These two say of themselves that they drafted nothing.
    idle = found.total.sides["baseline"]
    none = (5, 0, 0) if found.servers["server"]["kind"] in ("llama-server", "mlx-vlm") else (0, None, None)
    assert (idle.counted, idle.drafted, idle.accepted, idle.acceptance.value) == (*none, None)
    # Windows are the draws, and several at a time are one window.
    assert (found.total.sides["server"].tokens_per_round.ci95 is None) == (concurrency > 1)


def test_a_prompt_that_repeats_another_is_not_asked(pair: tuple[ModelServer, ModelServer], tmp_path: Path) -> None:
    """A prompt and its copies, in whatever workload, are one text."""
    path = tmp_path / "copies.jsonl"
    write_prompts(path, {"code": [*FEW["code"], FEW["code"][0]], "prose": [*FEW["prose"], FEW["code"][1]]})
    found = run_benchmark(plan(path, *pair))
    assert {name: of.texts for name, of in found.workloads.items()} == {"code": 3, "prose": 2}
    assert checked(found)["total"]["texts"] == 5


def test_messages_are_asked_as_they_are(pair: tuple[ModelServer, ModelServer], tmp_path: Path) -> None:
    """As a chat; to be continued they cannot be, which is said before anything is asked."""
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    rows = [{"prompt": "first"}, {"messages": [*said, {"role": "assistant", "content": "So."}]}, {"messages": said}]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    server = pair[0]
    with pytest.raises(MtpExtractError, match="messages where no chat template is applied"):
        run_benchmark(plan(path, server, chat_template=False))
    assert server.asked == []
    found = run_benchmark(plan(path, server, warm_up=0))
    assert [asked["messages"] for _, asked in server.asked] == [[{"role": "user", "content": "first"}], said]
    assert found.total.texts == 2


def test_the_two_are_asked_in_turn(pair: tuple[ModelServer, ModelServer], prompts: Path) -> None:
    server, baseline = pair
    order: list[str] = []
    for name, one in (("server", server), ("baseline", baseline)):
        own = one.answer
        one.answer = lambda prompt, most, name=name, own=own: (order.append(name), own(prompt, most))[1]
    run_benchmark(plan(prompts, server, baseline, warm_up=0))
    assert order == ["server", "baseline", "baseline", "server"] * 2 + ["server", "baseline"]
    order.clear()
    # Twelve requests fill three places four times: five are one window, and forty are three.
    found = run_benchmark(plan(prompts, server, baseline, warm_up=0, concurrency=3))
    assert order == ["server"] * 5 + ["baseline"] * 5
    write_prompts(prompts, {"many": [f"prompt {number}" for number in range(40)]})
    found = run_benchmark(plan(prompts, server, baseline, warm_up=0, concurrency=3))
    assert [len(window.requests) for window in found.windows["server"]] == [14, 13, 13]


def test_windows_are_full_of_all_workloads(tmp_path: Path) -> None:
    """As many in flight as were asked for, over all prompts; each window has every workload as all of them do."""
    many = {"code": [f"c{n}" for n in range(24)], "prose": [f"p{n}" for n in range(8)]}
    path = write_prompts(tmp_path / "many.jsonl", many)
    waiting = threading.Barrier(4)
    with model_server("vLLM") as server:
        own = server.answer
        # Nobody is answered before four are there.
        server.answer = lambda prompt, most: (waiting.wait(HANG), own(prompt, most))[1]
        found = run_benchmark(plan(path, server, warm_up=0, concurrency=4))
    windows = found.windows["server"]
    counts = [Counter(request.workload for request in window.requests) for window in windows]
    assert counts == [{"code": 12, "prose": 4}] * 2
    checked(found)


def test_a_server_that_tells_nothing(prompts: Path) -> None:
    with model_server("unknown") as server:
        found = run_benchmark(plan(prompts, server))
    report = checked(found)
    side = found.total.sides["server"]
    assert drafts_of(side) == (0, None, None, None)
    assert (side.tokens, side.tokens_per_s.value, side.output_throughput, side.acceptance.value) == (None,) * 4
    assert side.ttft_ms is not None
    assert report["verdict"] == "Measured: – tokens/s; the server does not say how many drafts were accepted."
    name = f"{server.url} (unknown)"
    assert report["notes"] == [
        f"{name} reports no draft counters for 5 of 5 answers.",
        f"{name} does not say how many tokens 5 of 5 answers had: they have no tokens/s (OpenAI's field is usage).",
    ]


@pytest.mark.parametrize(
    "moves",
    [
        {"requests": 1, **account(8)},  # somebody else's request
        {"tokens": 3, "rounds": 1, "drafted": 4, "accepted": 2},  # one that has not ended
        {"told": True, "drafted": 1},  # other than the answers say
        {"rounds": -20},
        {"drafted": -20},
        {"accepted": 20},
        {"drafted": 1 << 40, "accepted": 800},
        {"drafted": 900, "accepted": 800},
        {"rounds": 1 << 40},
        {"tokens": 1 << 40},
    ],
)
def test_counters_that_others_moved_or_that_move_as_none_can(
    pair: tuple[ModelServer, ModelServer], prompts: Path, monkeypatch: pytest.MonkeyPatch, moves: dict[str, int]
) -> None:
    """Nothing is computed with the page; what answers tell is right, and is used."""
    monkeypatch.setattr(client_module, "_SETTLING_TIME", 0.0)
    server, own = pair[0], pair[0].answer
    server.told = told = "told" in moves

    def moving(prompt: str, most: int) -> list[str]:
        server.moved.update(moves)
        return own(prompt, most)

    server.answer = moving
    found = run_benchmark(plan(prompts, server, warm_up=0))
    assert all(window.disturbed for window in found.windows["server"])
    assert "moved by other than these requests 5 of 5 times" in checked(found)["notes"][0]
    side = found.total.sides["server"]
    assert (side.tokens, side.drafted) == (summed("tokens"), summed("drafted") if told else None)


def test_drafts_by_their_place_in_a_round(prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the page counts them."""
    monkeypatch.setattr(client_module, "_SETTLING_TIME", 0.1)
    counted = {"requests": 1, "tokens": 5, "rounds": 2, "drafted": 6, "accepted": 3, "accepted_0": 2, "accepted_1": 1}
    with model_server("vLLM") as server:
        server.write = lambda asked: Written(["a", "b"], [2, 3], counted)
        found = run_benchmark(plan(prompts, server, concurrency=2, warm_up=0))
        apart = run_benchmark(plan(prompts, server, warm_up=0)).total.sides["server"].acceptance_by_position
        # An answer of one token, in no round, beside others.
        some = [{**counted, "tokens": 1, "rounds": 0, "drafted": 0, "accepted": 0, "accepted_0": 0, "accepted_1": 0}]
        server.write = lambda asked: Written(["a"], [1], some.pop()) if some else Written(["a", "b"], [2, 3], counted)
        without = run_benchmark(plan(prompts, server, warm_up=0)).total.sides["server"].acceptance_by_position
        # Drafts in the second place of more rounds than there were.
        server.write = lambda asked: Written(["a", "b"], [2, 3], counted | {"accepted_0": 0, "accepted_1": 3})
        wrong = run_benchmark(plan(prompts, server, warm_up=0))
    shares = [1, 0.5, 0, 0]
    assert found.total.sides["server"].acceptance_by_position == [Figure(share, 10) for share in shares]
    # One at a time, each text is a draw: there are five, and so intervals.
    assert [place.value for place in apart or ()] == [place.value for place in without or ()] == shares
    assert all(place.ci95 is not None and place.ci95[0] <= place.value <= place.ci95[1] for place in apart or ())
    assert all(of.sides["server"].acceptance_by_position is None for of in found.workloads.values())
    assert all(window.disturbed for window in wrong.windows["server"])
    (window,) = checked(found)["windows"]["server"]
    assert found.total.sides["server"].output_throughput == pytest.approx(25 / window["wall_s"])
    assert any(note.endswith("by position in a round: 100.0, 50.0, 0.0, 0.0 %.") for note in found.notes)


def test_texts_that_part(pair: tuple[ModelServer, ModelServer], prompts: Path) -> None:
    """A text that only ends elsewhere does not part."""
    server, baseline = pair
    ends = {"import os": ["!"], "for a in b:": [], "Snow fell.": [" and", " on"]}
    baseline.answer = lambda prompt, most: words_of(prompt, most)[:-1] + ends.get(prompt, words_of(prompt, most)[-1:])
    found = run_benchmark(plan(prompts, server, baseline))
    place = len("".join(words_of("import os", TOKENS)[:-1]))
    parted = {one.prompt: one.leaves_at for window in found.windows["server"] for one in window.requests}
    assert (parted[1], parted[0]) == (place, None)
    report = checked(found)
    leaving, ending = report["findings"]
    places = f"2 at character {place + 1}, 4 at character {parted[3] + 1}"
    assert leaving == f"the text leaves the baseline's in prompt {places}"
    end = "3 goes on after the baseline's end, at token 7 of 8"
    assert ending == f"the text is the baseline's but for its end: prompt {end}"
    assert "in 2 of 5 answers" in report["verdict"]
    # What is drawn at random is not compared.
    drawn = run_benchmark(plan(prompts, server, baseline, temperature=0.7))
    assert (drawn.total.identical, drawn.total.compared) == (None, None)
    assert all(one.leaves_at is None for window in drawn.windows["server"] for one in window.requests)
    assert server.asked[-1][1]["temperature"] == 0.7


def test_a_text_that_ends_early_is_told_by_its_tokens(pair: tuple[ModelServer, ModelServer], prompts: Path) -> None:
    server, baseline = pair
    server.answer = lambda prompt, most: words_of(prompt, most)[: 3 if prompt == "Snow fell." else None]
    (finding,) = checked(run_benchmark(plan(prompts, server, baseline)))["findings"]
    assert finding == "the text is the baseline's but for its end: prompt 4 ends early, at token 3 of 8"


@pytest.mark.parametrize(
    ("kind", "details", "is_known"), [("vLLM", False, True), ("unknown", True, True), ("mlx-vlm", False, False)]
)
def test_thoughts_that_are_counted_and_not_streamed(prompts: Path, kind: str, details: bool, is_known: bool) -> None:
    """They are generated tokens, but not of the time of the text."""
    thoughts = 100
    with model_server(kind) as server:
        server.details = details
        answer = lambda asked: server.plain({**asked, "max_tokens": TOKENS})  # noqa: E731
        server.write = lambda asked: dataclasses.replace(answer(asked), thoughts=thoughts)
        server.kind = "vLLM" if kind == "unknown" else kind  # so that it says usage
        found = run_benchmark(dataclasses.replace(plan(prompts, server), max_tokens=200))
    answers = [request.answer for window in found.windows["server"] for request in window.requests]
    for one in answers:
        written = (one.tokens or 0) - thoughts
        assert (one.unstreamed, one.timed_tokens) == (True, written - 1 if is_known else None)
    assert (found.total.sides["server"].tokens_per_s.n > 0) is is_known
    (note,) = [note for note in checked(found)["notes"] if "did not stream, as of thoughts, in 5 of 5 answers" in note]
    assert note.endswith("only of all tokens/s." if is_known else "have no tokens/s.")


def test_answers_without_a_speed_have_a_reason(prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_SETTLING_TIME", 0.0)
    with model_server("llama-server") as server:
        own = server.write
        server.write = lambda asked: dataclasses.replace(
            own(asked), pieces=["".join(own(asked).pieces)], sizes=[len(own(asked).pieces)]
        )
        at_once = checked(run_benchmark(plan(prompts, server)))["notes"]
        server.write, server.streams = own, False
        no_stream = checked(run_benchmark(plan(prompts, server)))["notes"]
        server.streams, server.lies = True, dict.fromkeys(FEW["prose"], TOKENS + 1)
        beyond = checked(run_benchmark(plan(prompts, server)))["notes"]
    name = f"{server.url} (llama-server)"
    buffered = "sent all of the text at once for 5 of 5 answers, as a proxy that buffers does: they have no tokens/s."
    assert f"{name} {buffered}" in at_once
    assert f"{name} streamed nothing, and sent a JSON object, for 5 of 5 answers: they have no tokens/s." in no_stream
    assert f"{name} counted one token more than the 8 that were asked for in 2 of 5 answers." in beyond


def test_a_bad_answer_is_counted_and_left_out(pair: tuple[ModelServer, ModelServer], prompts: Path) -> None:
    server, baseline = pair
    server.fails, baseline.fails = {"import os": 500}, {"Snow fell.": 503}
    found = run_benchmark(plan(prompts, server, baseline))
    report = checked(found)
    assert (found.total.texts, found.total.compared, found.total.identical) == (4, 3, 3)
    reason = f"{server.url}: expected /v1/chat/completions, found 500 Internal Server Error: the engine is dead"
    assert report["findings"][0] == f"1 of 5 requests to the server failed, and are left out: {reason} (1 time)"
    assert report["findings"][1].startswith("1 of 5 requests to the baseline failed")
    lost = COUNTED["code"][FEW["code"].index("import os")]["tokens"]
    assert found.total.sides["server"].tokens == summed("tokens") - lost
    assert report["ended_early"] is None


def test_accepted_drafts_without_a_count_of_drafts(prompts: Path) -> None:
    """Of three prompts the answer says what was accepted alone: it is no part of the share."""
    with model_server("mlx-vlm") as server:
        own = server.write

        def write(asked: dict[str, Any]) -> Written:
            made = own(asked)
            some = {"drafted": None} if prompt_of(asked) in FEW["code"] else {}
            return dataclasses.replace(made, counted={**made.counted, **some})

        server.write = write
        found = run_benchmark(plan(prompts, server, warm_up=0))
    of_prose = [summed(name, ["prose"]) for name in ("drafted", "accepted")]
    assert [found.total.sides["server"].drafted, found.total.sides["server"].accepted] == of_prose
    assert found.workloads["code"].sides["server"].acceptance.value is None
    assert found.workloads["code"].sides["server"].accepted == summed("accepted", ["code"])
    side = found.total.sides["server"]
    assert side.tokens_per_round.value == pytest.approx(1 + summed("accepted") / summed("rounds"))
    assert side.tokens_per_round.ci95 is None
    checked(found)


def test_a_baseline_that_is_none(prompts: Path) -> None:
    with model_server("llama-server", drafts=False) as server, model_server("vLLM") as baseline:
        baseline.models[0]["id"] = "another"
        report = checked(run_benchmark(plan(prompts, server, baseline)))
    assert report["findings"][0].startswith("the server drafted nothing")
    assert report["findings"][1].startswith(f"the baseline drafts too ({summed('drafted')} drafts)")
    assert [note for note in report["notes"] if "differ in more than the drafter: llama-server" in note]
    assert [note for note in report["notes"] if note.endswith("google/gemma-4-E4B-it and vLLM another.")]


def windows(*answers: tuple[int | None, float, float | None]) -> list[Window]:
    """A window for each answer of so many tokens, seconds, and seconds to its first text."""
    asked = (Request("code", n, Answer("text", tokens, first, took)) for n, (tokens, took, first) in enumerate(answers))
    return [Window([one], 4.0, Counters(), False) for one in asked]


def test_speed_is_tokens_after_the_first_over_their_time() -> None:
    fast, slow = windows((11, 1.0, 0.5), (21, 1.0, 0.1)), windows((11, 4.0, 0.5), (41, 6.0, 0.5))
    found = compute_figures({"server": fast, "baseline": slow}, {"code"}, compared=False)
    server, baseline = found.sides["server"], found.sides["baseline"]
    assert server.tokens_per_s.value == pytest.approx((10 + 20) / 2)
    assert server.output_throughput == pytest.approx(32 / 8)
    assert server.ttft_ms is not None
    assert server.ttft_ms["mean"] == pytest.approx(1e3 * 0.6 / 2)
    assert baseline.tokens_per_s.value == pytest.approx((10 + 40) / 10)
    # The first text: 4 s for as many tokens; the second: 6 s for 40, so 3 for 20.
    assert found.speedup.value == pytest.approx((4 + 3) / (1 + 1))
    assert (found.speedup.n, found.speedup.ci95) == (2, None), "two texts"
    more = [windows(*((11, seconds * time, 0.5) for time in (1.0, 1.2, 0.8, 1.1, 0.9))) for seconds in (1, 2)]
    faster = compute_figures({"server": more[0], "baseline": more[1]}, {"code"}, compared=False).speedup
    assert (faster.value, faster.ci95) == (pytest.approx(2), pytest.approx([2, 2]))


@pytest.mark.parametrize(
    "odd", [windows(one)[0] for one in ((1, 0.0, 0.5), (0, 0.0, None), (None, 1.0, 0.5), (9, 0.0, 0.5))]
)
def test_answers_without_a_speed(odd: Window) -> None:
    alone = measure_side([odd], {"code"})
    assert (alone.tokens_per_s, alone.tpot_ms) == (Figure(None, 0), None)
    odd = replace(odd, requests=[replace(odd.requests[0], prompt=1)])
    assert measure_side([*windows((11, 2.0, 0.5)), odd], {"code"}).tokens_per_s.value == 5


def test_latency_is_as_vllm_has_it() -> None:
    """By NumPy's percentiles, of what the definitions of `vllm bench serve` come to."""
    found = measure_side(windows(*((count, 0.4 * count, 0.5 + count) for count in (2, 3, 5))), {"code"})
    expected = {"ttft_ms": np.array([2500, 3500, 5500]), "tpot_ms": np.array([800 / 1, 1200 / 2, 2000 / 4])}
    for name, values in expected.items():
        latency = getattr(found, name)
        assert (latency["mean"], latency["p99"]) == pytest.approx((values.mean(), np.percentile(values, 99)))


def test_the_command(pair: tuple[ModelServer, ModelServer], prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server, baseline = pair
    server.key = baseline.key = KEY
    monkeypatch.setenv("THE_KEY", KEY)
    # Neither is offline mode of the Hub a server's affair.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    common = (server.url, "--baseline", f"{baseline.url}/v1", "--prompts", prompts, "--api-key-env", "THE_KEY")
    done = run_here("bench", *common, "--max-tokens", str(TOKENS))
    assert (done.returncode, KEY in done.stdout + done.stderr) == (0, False)
    assert f"{summed('accepted')} of {summed('drafted')} drafts accepted" in done.stdout.splitlines()[0]
    assert "in 5 of 5 answers" in done.stdout.splitlines()[0]
    printed = run_here("bench", *common, "--json", "--no-chat-template", "--concurrency", "3")
    assert (printed.returncode, KEY in printed.stdout + printed.stderr) == (0, False)
    validator("bench")(json.loads(printed.stdout))
    assert server.asked[-1][0] == "/v1/completions"


@pytest.mark.parametrize("status", [1, 130])
def test_the_command_prints_what_was_measured_until_then(
    pair: tuple[ModelServer, ModelServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """Where the server dies, which eight failures in a row show, and at Ctrl-C; then the error."""
    server, many = pair[0], [f"prompt {number}" for number in range(30)]
    asked = write_prompts(tmp_path / "many.jsonl", {"many": many})
    if status == 1:
        server.fails = dict.fromkeys(many[6:], 500)
    else:
        own = Server.try_each

        def interrupted(*given: Any) -> Any:
            # As Python calls its handler between two instructions of the main thread; one request warms up.
            return threads.interrupt(signal.SIGINT, None) if len(server.asked) == 7 else own(*given)

        monkeypatch.setattr(Server, "try_each", interrupted)

    done = run_here("bench", server.url, "--prompts", asked, "--max-tokens", str(TOKENS), "--json")

    assert done.returncode == status
    report = json.loads(done.stdout)
    validator("bench")(report)
    assert (report["total"]["texts"], len(server.asked)) == (6, 15 if status == 1 else 7)
    assert any(finding.startswith("it ended after ") for finding in report["findings"])
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: interrupted; " if status == 130 else f"error: {server.url}: expected /v1/chat")
