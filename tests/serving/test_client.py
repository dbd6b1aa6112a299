"""Servers: each kind is recognised, its answers and counters are read, and nothing it sends does harm."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from time import sleep
from typing import Any

import pytest
from helpers.bounds import HANG, bounded
from helpers.model_server import KEY, MANNERS, MODEL, PAGES, ModelServer, account, model_server, words_of

from mtp_extract.cli._options import read_key
from mtp_extract.errors import MtpExtractError, ServerError
from mtp_extract.serving import client
from mtp_extract.serving.client import Answer, Server, build_request, read_answer
from mtp_extract.serving.counters import Counters, parse_page_counters, read_answer_counters

PROMPT = "class Foo(object):"
RECORDED = PAGES.parent / "data" / "vllm-0.32.0"


def ask(server: Server, prompt: str = PROMPT, most: int = 3, *, chat: bool = False, **more: Any) -> Answer:
    (answer,) = server.ask([build_request(prompt, most, chat, **more)])
    return answer


def encode_events(*events: Any) -> bytes:
    """Encode ``events`` as a server sends them; bytes are sent unchanged."""
    datas = (event if isinstance(event, bytes) else json.dumps(event).encode() for event in events)
    return b"".join(b"data: " + data + b"\n\n" for data in datas)


def read_pieces(*pieces: tuple[float, bytes], limit: int = 9) -> Answer:
    """Read the answer from ``pieces``, which arrive at these seconds."""
    return read_answer((piece for _, piece in pieces), 10.0, limit, iter([at for at, _ in pieces]).__next__)


Connect = Callable[..., Server]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Return a function that connects to a server until the end of the test."""
    with ExitStack() as stack:
        yield lambda url, **arguments: stack.enter_context(Server(url, **arguments))


@pytest.fixture
def vllm() -> Iterator[ModelServer]:
    with model_server("vLLM") as server:
        yield server


@pytest.mark.parametrize("kind", sorted(MANNERS))
def test_each_kind_is_recognized_and_answers(connect: Connect, kind: str) -> None:
    with model_server(kind) as server:
        connection, tokens, counted = connect(server.url + "/v1/"), words_of(PROMPT, 6), account(6)
        assert (connection.kind.name, connection.model, connection.name) == (kind, MODEL, server.url)
        answer = ask(connection, most=6, chat=True, temperature=0)
    path, request = server.asked[-1]
    assert (path, request["messages"]) == ("/v1/chat/completions", [{"role": "user", "content": PROMPT}])
    assert (request["model"], request["max_tokens"], request["temperature"]) == (MODEL, 6, 0)
    assert answer.text == "".join(tokens)
    assert (answer.tokens, answer.prompt_tokens) == ((None, None) if kind == "unknown" else (6, 5))
    assert answer.first_s is not None and answer.first_s > 0
    drafts = {name: counted[name] for name in ("drafted", "accepted")}
    assert answer.counted == {
        "llama-server": Counters(tokens=6, **drafts),
        "mlx-vlm": Counters(tokens=6, rounds=counted["rounds"], **drafts),
        "SGLang": Counters(rounds=counted["rounds"], **drafts),
    }.get(kind)


def test_a_completion_is_not_a_chat(connect: Connect, vllm: ModelServer) -> None:
    odd = "\ud800 half of a pair"
    assert ask(connect(vllm.url), odd).tokens == 3
    assert [(path, body.get("prompt")) for path, body in vllm.asked] == [("/v1/completions", odd)]


def test_counters_of_the_pages() -> None:
    """The numbers in the files, summed over labels, and the difference of two pages of a real vLLM."""
    expected = {
        "vLLM": Counters(5, 493, 131, 524, 321, positions=(109, 91, 69, 52)),
        "SGLang": Counters(requests=2, tokens=192, rounds=55),
        "llama-server": Counters(None, 21236, 5867, 22891, 14987, (4721, 4060, 3434, 2772)),
    }
    pages = {name: (PAGES / manner.page).read_text() for name, manner in MANNERS.items() if manner.page}
    assert {name: parse_page_counters(page) for name, page in pages.items()} == expected
    before, after = (
        parse_page_counters((RECORDED / f"metrics_{when}.txt").read_text()) for when in ("before", "after")
    )
    assert after - before == Counters(3, 60, 34, 102, 27, (15, 9, 3))


def test_a_missing_count_is_not_zero() -> None:
    """Except for drafts, if all of their counters are missing."""
    without = read_answer_counters({"predicted_n": 3, "predicted_ms": 8.5}, None, None)
    assert without == Counters(tokens=3, rounds=0, drafted=0, accepted=0)
    for name, ours in (("draft_n_accepted", "accepted"), ("draft_n", "drafted")):
        assert read_answer_counters({"predicted_n": 3, name: 4}, None, None) == Counters(tokens=3, **{ours: 4})


def test_times_are_those_of_arrival() -> None:
    """A piece may end anywhere, and all its events arrive at one time."""
    data = encode_events(TEXT, TEXT, {"choices": [{"text": "b"}]}, FINISHED | make_usage(4))
    second, third = (data.index(b"data", at) + 9 for at in (1, data.index(b'"b"')))
    answer = read_pieces((11.0, data[:second]), (11.5, data[second:third]), (13.0, data[third:]), limit=5)
    assert (answer.text, answer.tokens) == ("aab", 4)
    assert (answer.first_s, answer.seconds) == (1.0, 2.0)
    # Text that comes at once has no speed: a proxy keeps it until it ends, and sends the end after it.
    answer = read_pieces((11.0, encode_events(TEXT)), (13.0, encode_events(FINISHED | make_usage(3))))
    assert (answer.tokens, answer.first_s, answer.seconds) == (3, 1.0, 0.0)


def make_pieces(*sizes: int, thoughts: int = 0, so_far: bool = False, **details: Any) -> list[tuple[float, bytes]]:
    """Return a text with so many 4-letter tokens in each event, a second apart, after ``thoughts`` tokens."""
    events, sent = list[tuple[float, bytes]](), thoughts
    for number, size in enumerate(sizes):
        sent += size
        event = {"choices": [{"text": "word" * size}]} | (make_usage(sent) if so_far else {})
        events.append((11.0 + number, encode_events(event)))
    return [
        *events,
        (11.0 + len(sizes) - 1, encode_events(FINISHED, {"usage": {"completion_tokens": sent, **details}})),
    ]


@pytest.mark.parametrize(
    ("usage", "first", "timed"),
    [
        ({}, None, None),  # it has more tokens than bytes: how many of them are its text's, nobody says
        ({"so_far": True}, 102, 8),
        ({"completion_tokens_details": {"reasoning_tokens": 100}}, 101, 9),
        ({"reasoning_tokens": 100}, 101, 9),
    ],
)
def test_thoughts_that_are_not_streamed_are_no_part_of_the_text(
    usage: dict[str, Any], first: int | None, timed: int | None
) -> None:
    """Ten tokens in four seconds follow a hundred that were not sent."""
    answer = read_pieces(*make_pieces(2, 2, 2, 2, 2, thoughts=100, **usage), limit=200)
    assert (answer.tokens, answer.seconds, answer.unstreamed) == (110, 4.0, True)
    assert (answer.first_tokens, answer.timed_tokens) == (first, timed)


def test_thoughts_that_are_streamed_are_text() -> None:
    """The first text counts as one token, unless the server reports how many it has."""
    thought = encode_events({"choices": [{"delta": {"reasoning": "hm, "}}]})
    end = encode_events({"choices": [{"delta": {"content": "so"}}]}, FINISHED, {"usage": {"completion_tokens": 2}})
    counted = end.replace(b'"completion_tokens": 2', b'"completion_tokens": 2, "reasoning_tokens": 1')
    for data in (end, counted):
        answer = read_pieces((11.0, thought), (12.0, data))
        assert (answer.first_tokens, answer.timed_tokens, answer.unstreamed) == (None, 1, False)
    assert read_pieces(*make_pieces(3, 2, 2, so_far=True)).timed_tokens == 4
    assert read_pieces(*make_pieces(3, 2, 2)).timed_tokens == 6


def test_an_answer_that_is_not_streamed(connect: Connect) -> None:
    with model_server("llama-server") as server:
        server.streams = False
        answers = [ask(connect(server.url), chat=chat) for chat in (True, False)]
    for answer in answers:
        assert answer.text == "".join(words_of(PROMPT, 3))
        assert (answer.tokens, answer.seconds, answer.streamed) == (3, 0.0, False)
        assert answer.counted == Counters(tokens=3, drafted=4, accepted=1)


def test_one_token_beyond_the_limit_is_an_answer(connect: Connect, vllm: ModelServer) -> None:
    vllm.lies = {PROMPT: 4}
    assert ask(connect(vllm.url)).tokens == 4


def test_a_line_in_single_bytes_takes_linear_time() -> None:
    data = encode_events({"choices": [{"text": "a" * (1 << 20)}]}, FINISHED)
    with bounded(20):  # it was three minutes
        answer = read_answer((data[at : at + 1] for at in range(len(data))), 0.0, 100, lambda: 0.0)
    assert len(answer.text) == 1 << 20


def test_token_ids_must_be_complete() -> None:
    def ids(*ids_of_events: Any) -> tuple[int, ...] | None:
        events = ({"choices": [{"text": "a", "token_ids": token_ids}]} for token_ids in ids_of_events)
        return read_pieces((11.0, encode_events(*events, make_usage(3) | FINISHED))).token_ids

    assert ids([5], [7, 0]) == (5, 7, 0)
    assert ids([5], [7]) is None, "fewer than were counted"
    for wrong in ([7, -1], [7, True], "567"):
        with pytest.raises(ServerError, match="expected an event of an answer"):
            ids([5], wrong)


ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
POSITIONS = (f'{ACCEPTED}_per_pos_total{{position="0"}} 4', f'{ACCEPTED}_per_pos_total{{a="1",position="2"}} 3')

LINES = (
    # The value of a line stands before its time and its exemplar.
    'vllm:generation_tokens_total{model_name="a # } 7 b"} 493 # {trace_id="x"} 1',
    'vllm:generation_tokens_total{model_name="b\\" } 2"} 7 1795404470000',
    "vllm:request_success_total 3 # {} 1 1.5",
    'vllm:request_success_total{a="} 9',
    "vllm:request_success_total",
    "# vllm:request_success_total 5",
)


def test_lines_of_a_page_and_their_differences() -> None:
    assert parse_page_counters("\n".join(LINES)) == Counters(requests=3, tokens=500)
    counters = parse_page_counters("\n".join((f"{ACCEPTED}_total 7", *POSITIONS)))
    assert counters == Counters(accepted=7, positions=(4, 0, 3))
    assert counters - Counters(accepted=2, positions=(2,)) == Counters(accepted=5, positions=(2, 0, 3))
    assert counters - Counters(accepted=2) == Counters(accepted=5)


def test_the_model_is_chosen(connect: Connect) -> None:
    with model_server("mlx-vlm") as server:
        server.models.append({"id": "another"})
        assert connect(server.url, model="another").model == "another"
        with pytest.raises(ServerError, match=f"expected one model, found {MODEL}, another"):
            connect(server.url)
        with pytest.raises(ServerError, match="expected the model x, found") as caught:
            connect(server.url, model="x")
        assert caught.value.remedies == ("model",)
        # Where the list has no names, whoever names one knows more.
        server.models[:] = [{"object": "model"}]
        with pytest.raises(ServerError, match=r"expected one model, found none\. Name one"):
            connect(server.url)
        assert connect(server.url, model="mine").model == "mine"


def test_the_key_is_sent_and_never_shown(connect: Connect, vllm: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    vllm.key = KEY
    monkeypatch.setenv("SOME_KEY", f" {KEY}\n")
    assert ask(connect(vllm.url, key=read_key("SOME_KEY"))).tokens == 3
    assert {header for _, header in vllm.seen} == {f"Bearer {KEY}"}
    with pytest.raises(ServerError, match="expected /v1/models, found 401 Unauthorized") as caught:
        connect(vllm.url, key=KEY + "x")
    assert KEY not in str(caught.value)
    assert caught.value.remedies == ("key",)


@pytest.mark.parametrize("value", ["", "  ", "two words", "schlüssel"])
def test_invalid_keys(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", value)
    with pytest.raises(MtpExtractError, match="environment variable SOME_KEY"):
        read_key("SOME_KEY")


@pytest.mark.parametrize(
    "url",
    [
        *("", "localhost:8000", "ftp://host", "http://", "http://[::1", "http://a b", "http://h\n"),
        *("http://\u2603:1", "http://[v1.a]:1", f"http://host/{'a' * 70_000}", "http://user:pa%20ss@h/?token=secret"),
        "http://host:99999",
    ],
)
def test_invalid_urls(connect: Connect, url: str) -> None:
    """A login in a URL is refused and not shown."""
    with pytest.raises(MtpExtractError, match="expected the URL of a server, without a login") as caught:
        connect(url)
    assert not any(secret in str(caught.value) for secret in ("user", "pa%20ss", "secret"))


def status(number: int, message: str = "because") -> Callable[[Any], None]:
    return lambda handler: handler.json({"error": {"message": message}}, number)


def body(data: bytes, kind: str = "application/json") -> Callable[[Any], None]:
    return lambda handler: handler.answer(200, data, Content_Type=kind)


def stream(*events: Any, end: bool = True) -> Callable[[Any], None]:
    return body(encode_events(*events) + (b"data: [DONE]\n\n" if end else b""), "text/event-stream")


def send_head(handler: Any, kind: str, length: int) -> None:
    handler.send_response(200)
    handler.send_header("Content-Type", kind)
    handler.send_header("Content-Length", str(length))
    handler.end_headers()


def send_part(handler: Any) -> None:
    """Close the connection before the announced length."""
    send_head(handler, "text/event-stream", 1000)
    handler.wfile.write(b'data: {"choices": [{"text": "a"}]}\n\n')
    handler.close_connection = True


def send_endlessly(line: bytes, kind: str, pause: float = 0.0) -> Callable[[Any], None]:
    """Return a handler that sends ``line`` without end, with ``pause`` seconds before each."""

    def answer(handler: Any) -> None:
        send_head(handler, kind, 1 << 34)
        while True:
            sleep(pause)
            handler.wfile.write(line)

    return answer


TEXT = {"choices": [{"text": "a"}]}
FINISHED = {"choices": [{"text": "", "finish_reason": "stop"}]}


def make_usage(tokens: Any) -> dict[str, Any]:
    return {"usage": {"completion_tokens": tokens}}


def make_draft_metrics(**counters: Any) -> dict[str, Any]:
    return {"metrics": {"speculative_decoding": {"num_draft_tokens": 4, "num_accepted_draft_tokens": 2, **counters}}}


NO_EVENTS: tuple[Any, ...] = (
    *({"choices": choices} for choices in ([{"text": 5}], "none", [None], [{"delta": {"content": ["a"]}}])),
    *({"usage": usage} for usage in ({"completion_tokens": "many"}, [])),
)


IMPOSSIBLE: tuple[dict[str, int], ...] = (
    *({"num_accepted_draft_tokens": 5}, {"num_spec_steps": 0}, {"num_spec_steps": 6}),
    {"num_draft_tokens": 800, "num_accepted_draft_tokens": 800},
)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (status(401), "expected /v1/completions, found 401 Unauthorized: because"),
        (status(503, "Loading model"), "found 503 Service Unavailable: Loading model"),
        (status(500, "x" * 5000), "found 500 Internal Server Error: x+…"),
        (status(400, "\x1b[31mred\nline"), r"found 400 Bad Request: \\x1b\[31mred\\nline"),
        (status(302), "found 302 Found"),
        (body(b"<html>"), "expected an event of an answer as JSON, found <html>"),
        (body(b"<html>", "text/html"), "expected a stream of events"),
        (body(b'{"detail": "no"}'), "expected a stream of events"),
        (send_part, "the connection was lost"),
        (stream(TEXT, end=False), "expected a stream of events"),
        (stream(TEXT, b"not json"), "expected an event of an answer as JSON, found not json"),
        (stream(TEXT, b"[1]"), "expected an event of an answer"),
        (stream(b"[" * 100_000), "expected an event of an answer"),
        (stream(b'{"usage": {"completion_tokens": ' + b"9" * 5000 + b"}}"), "expected an event of an answer"),
        (stream(TEXT, {"error": {"message": "out of\nmemory"}}), r"ended in an error: out of\\nmemory"),
        (stream(TEXT, {"error": "gone"}), "ended in an error: gone"),
        *((stream(event, FINISHED), "expected an event of an answer as JSON") for event in NO_EVENTS),
        (stream(TEXT, make_draft_metrics(num_draft_tokens=-1)), "expected a count for num_draft_tokens, found -1"),
        *(
            (stream(TEXT, make_draft_metrics(num_draft_tokens=odd)), "expected a count for num_draft_tokens, found ")
            for odd in (1.5, 1 << 60, [], True, "1_0", "4", "١٢")
        ),
        (stream(TEXT, make_usage(5), FINISHED), "expected counts of an answer of up to 3 tokens, found 5 tokens"),
        (stream(TEXT, make_usage(0), FINISHED), "expected counts of an answer of up to 3 tokens, found 0 tokens"),
        *((stream(TEXT, make_draft_metrics(**odd)), "expected counts of an answer") for odd in IMPOSSIBLE),
        (send_endlessly(b"a" * (1 << 16), "text/event-stream"), "too large"),
        (send_endlessly(b'data: {"choices": [{"text": "a"}]}\n' * 1000, "text/event-stream"), "too large"),
    ],
)
def test_invalid_answers(connect: Connect, vllm: ModelServer, answer: Callable[[Any], None], message: str) -> None:
    server = connect(vllm.url)
    vllm.overrides["/v1/completions"] = answer
    with pytest.raises(ServerError, match=message) as caught:
        ask(server)
    text = str(caught.value)
    assert text.startswith(f"{vllm.url}: ") and text.endswith(".") and text.isprintable() and len(text) < 600


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        ({"choices": None, "usage": None}, ""),
        ({"choices": [{"delta": None, "text": None}]}, ""),
        ({"metrics": {"speculative_decoding": 5}}, ""),
        ({"choices": [{"delta": {"reasoning": "hm ", "reasoning_content": "hm ", "content": "yes"}}]}, "hm yes"),
    ],
)
def test_events_of_other_forms(connect: Connect, vllm: ModelServer, event: dict[str, Any], expected: str) -> None:
    server = connect(vllm.url)
    vllm.overrides["/v1/completions"] = stream(event, FINISHED)
    answer = ask(server)
    assert (answer.text, answer.tokens, answer.counted) == (expected, None, None)
    assert answer.reasoning is bool(expected)


def test_pages_without_counters(connect: Connect, vllm: ModelServer) -> None:
    """The page is missing, of another program, endless, or its values are not counts."""
    server = connect(vllm.url)
    other_page = b"}" * 100_000 + b"\n\x00\xff\nvllm: 5\nvllm:other 7\n" + b"a{" * 100_000
    values = (b"NaN", b"-1", b"1e400", b"1.5", b"1_0", "١".encode(), b"\xff\x1b[31m")
    pages = [body(page, "a/b") for page in (other_page, *(b"vllm:request_success_total " + value for value in values))]
    for answer in (status(501), *pages, send_endlessly(b"}{" * (1 << 15), "text/plain")):
        vllm.overrides["/metrics"] = answer
        assert server.read_counters() == Counters()


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        (b"<html></html>", "expected a list of models, found <html>"),
        (b"[]", "expected a list of models"),
        (b"{}", "expected one model, found none"),
        (b'{"data": {"id": "a"}}', "expected one model, found none"),
        (b'{"data": [{"id": 7}, null, "a"]}', "expected one model, found none. Name one"),
    ],
)
def test_invalid_lists_of_models(connect: Connect, vllm: ModelServer, listed: bytes, message: str) -> None:
    vllm.overrides["/v1/models"] = body(listed)
    with pytest.raises(ServerError, match=message) as caught:
        connect(vllm.url)
    assert str(caught.value).startswith(f"{vllm.url}: ")


def trickling_head(handler: Any) -> None:
    """Send headers without end; only closing the connection stops it."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        handler.wfile.write(b"X: y\r\n")
        sleep(0.01)


@pytest.mark.parametrize("answer", [send_endlessly(b": still here\n", "text/event-stream", pause=0.01), trickling_head])
def test_an_answer_that_takes_too_long(
    connect: Connect, vllm: ModelServer, monkeypatch: pytest.MonkeyPatch, answer: Callable[[Any], None]
) -> None:
    """The client's clock decides, though data keeps arriving; pages have a timeout of their own."""
    server = connect(vllm.url)
    with monkeypatch.context() as patched, pytest.raises(ServerError, match="expected an answer within"):
        patched.setattr(client, "_PAGE_TIMEOUT", 0.1)
        patched.setitem(vllm.overrides, "/v1/models", answer)
        connect(vllm.url)
    monkeypatch.setattr(client, "_ANSWER_TIMEOUT", 0.1)
    vllm.overrides["/v1/completions"] = answer
    with pytest.raises(ServerError, match=rf"^{vllm.url}: expected an answer within 0\.1 seconds"):
        ask(server)


@pytest.mark.parametrize(
    ("name", "tokens", "prompt_tokens", "counters", "text"),
    [
        ("chat_stream", 12, 25, Counters(rounds=8, drafted=24, accepted=5), "1 Foro(Coro):"),
        ("completions_stream", 24, 13, Counters(rounds=13, drafted=39, accepted=11), "\n        return Not "),
    ],
)
def test_answers_of_a_real_vllm(name: str, tokens: int, prompt_tokens: int, counters: Counters, text: str) -> None:
    """Recorded from vLLM 0.32.0 on a CPU, and read in pieces of any size."""
    data = (RECORDED / f"{name}.txt").read_bytes().partition(b"\r\n\r\n")[2]
    for size in (1, 100, len(data)):
        pieces = [(11.0 + number, data[at : at + size]) for number, at in enumerate(range(0, len(data), size))]
        answer = read_pieces(*pieces, limit=24)
        assert (answer.tokens, answer.counted) == (tokens, counters)
        assert answer.text.startswith(text) and len(answer.token_ids or ()) == tokens
        assert answer.prompt_tokens == len(answer.prompt_ids or ()) == prompt_tokens


def test_sixty_four_of_sixty_four_are_in_flight(connect: Connect, vllm: ModelServer) -> None:
    """The server answers none of them before all have arrived."""
    waiting, usual_answer = threading.Barrier(64), vllm.answer
    vllm.answer = lambda prompt, most: (waiting.wait(HANG), usual_answer(prompt, most))[1]
    answers = connect(vllm.url).ask([build_request("x" * number, 3) for number in range(64)], 64)
    assert [answer.text for answer in answers] == ["".join(words_of("x" * number, 3)) for number in range(64)]


def test_the_next_is_sent_as_soon_as_one_has_ended(connect: Connect, vllm: ModelServer) -> None:
    """Of two at a time: the third is answered while the second still waits."""
    third, usual_answer = threading.Event(), vllm.answer

    def answer(prompt: str, most: int) -> list[str]:
        if prompt == "b":
            assert third.wait(HANG)
        if prompt == "c":
            third.set()
        return usual_answer(prompt, most)

    vllm.answer = answer
    answers = connect(vllm.url).ask([build_request(prompt, 3) for prompt in "abc"], 2)
    assert [answer.text for answer in answers] == ["".join(words_of(prompt, 3)) for prompt in "abc"]


def test_the_first_error_ends_all(connect: Connect, vllm: ModelServer) -> None:
    """It does not wait for the others, and sends few more."""
    never, usual_answer = threading.Event(), vllm.answer
    vllm.answer = lambda prompt, most: usual_answer(prompt, most) if prompt == "a" else [str(never.wait(HANG))]
    vllm.lies = {"a": 1 << 40}
    with pytest.raises(ServerError, match="expected counts of an answer"):
        connect(vllm.url).ask([build_request(prompt, 3) for prompt in "abcdefgh"], 2)
    assert len(vllm.asked) <= 3
    never.set()


def test_each_request_has_a_connection_of_its_own(connect: Connect, vllm: ModelServer) -> None:
    """A kept connection may be closed as the next request arrives."""
    addresses, server = [], connect(vllm.url)
    vllm.overrides["/metrics"] = lambda handler: addresses.append(handler.client_address) or handler.json({}, 404)
    for _ in range(3):
        server.read_counters()
    assert len(set(addresses)) == 3
