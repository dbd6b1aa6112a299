"""Hostile servers: whatever they send ends, in time, in one clear line or in the bytes of one file."""

from __future__ import annotations

import random
import re
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress

import huggingface_hub
import pytest
from helpers.bounds import HANG
from helpers.hub_fixtures import Patient, read_all, text_of
from helpers.hub_server import SIGNATURE, TOKEN, HubServer
from helpers.loopback import Listener

from mtp_extract.bundle import open_source
from mtp_extract.errors import SourceError
from mtp_extract.io import remote

DATA = random.Random(7).randbytes(1 << 18)
SIZE = len(DATA)

Say = Callable[[bytes], None]
Script = Callable[[str, Say], None] | bytes


@contextmanager
def serve_raw(script: Script) -> Iterator[str]:
    """Yield the URL of a server that sends what ``script`` is or says, byte for byte."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            request = b""
            while b"\r\n\r\n" not in request:
                if not (more := self.request.recv(1 << 16)):
                    return
                request += more
            with suppress(OSError):  # the client hung up
                if isinstance(script, bytes):
                    self.request.sendall(script)
                else:
                    script(request.decode("latin-1"), self.request.sendall)
                # Without this, unread bytes of the request would reset the connection before the answer arrives.
                self.request.shutdown(socket.SHUT_WR)

    with closing(Listener(Handler)) as listener:
        yield listener.url


def format_head(status: str = "206 Partial Content", **headers: object) -> bytes:
    lines = [f"HTTP/1.1 {status}", *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def answer_range(request: str, data: bytes = DATA, **headers: object) -> bytes:
    """Return the right answer to a request for a range, except for ``headers``."""
    match = re.search(r"(?im)^range: bytes=(\d+)-(\d+)", request)
    assert match is not None
    begin, end = int(match[1]), min(SIZE, int(match[2]) + 1)
    right = {"Connection": "close", "Content_Range": f"bytes {begin}-{end - 1}/{SIZE}", "Content_Length": end - begin}
    # The length is last: a head that is cut off has none.
    return format_head(**headers | right | headers) + data[begin:end]  # type: ignore[arg-type]


def lie(**headers: object) -> Callable[[str, Say], None]:
    return lambda request, say: say(answer_range(request, **{"ETag": '"a"'} | headers))


def trickle(request: str, say: Say) -> None:
    answer = answer_range(request, ETag='"a"')
    begin, pause = answer.index(b"\r\n\r\n") + 4, threading.Event()  # tests may have stopped `time.sleep`
    say(answer[:begin])
    for at in range(begin, len(answer)):
        say(answer[at : at + 1])
        pause.wait(0.01)


def stay_silent(request: str, say: Say) -> None:
    threading.Event().wait(HANG)


def check_refused(url: str, match: str, read: Callable[[str], object] = read_all) -> str:
    """Return the message of the error, after checking that it is one printable line without secrets."""
    with pytest.raises(SourceError, match=match) as caught:
        read(url)
    check_message(str(caught.value))
    assert SIGNATURE not in text_of(caught.value)
    return str(caught.value)


def check_message(message: str) -> None:
    assert message.isprintable()
    assert len(message) < 700
    assert message.endswith(".")
    for secret in (TOKEN, SIGNATURE):
        assert secret not in message


def redirect(to: str) -> bytes:
    return format_head("302 Found", Location=to, Content_Length=0, Connection="close")


def test_silence_is_ended(hub: HubServer, patience: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the Hub, huggingface_hub itself sends the HEAD request for commit and URL. Timeouts are of the real clock."""
    for name in ("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT"):
        monkeypatch.setattr(huggingface_hub.constants, name, 0.3)
    with serve_raw(stay_silent) as url:
        check_refused(url + "/a.litertlm", "does not answer in time")
        assert patience.waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0]
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
        template = url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        check_refused("hf://org/repo/a.litertlm", "does not answer in time")


def test_a_body_that_trickles_is_ended(hub: HubServer, patience: Patient) -> None:
    patience.per_look = 61.0
    with serve_raw(trickle) as url:
        check_refused(url + "/a.litertlm", r"too slow: \d+ bytes in 61 seconds \(attempt 7, the last")


NO_ADDRESS = "redirects to one that is not|reached|lost|is not HTTP"
LIES = {
    "a negative length": (lie(Content_Length=-5), "is not HTTP"),
    "a length of 5000 digits": (lie(Content_Length="9" * 5000), "is not HTTP"),
    "a short length": (lie(Content_Length=5), "Content-Length of 65536, the server sent 5"),
    "a long length": (lie(Content_Length=1 << 40), "the server sent 1099511627776"),
    "an early end": (lambda request, say: say(answer_range(request, ETag='"a"')[:-9]), "connection was lost"),
    "no length": (
        lambda request, say: say(answer_range(request, ETag='"a"').replace(b"Content-Length", b"X-Length")),
        "the server sent none",
    ),
    "a range backwards": (lie(Content_Range="bytes 65535-0/262144"), "the server sent bytes 65535-0"),
    "another range": (lie(Content_Range=f"bytes 1-65536/{SIZE}"), "the server sent bytes 1-65536"),
    "a range beyond the file": (lie(Content_Range="bytes 0-65535/10"), "the server sent bytes 0-65535"),
    "a file of no size": (lie(Content_Range="bytes 0-65535/*"), "without saying how many"),
    "a size of 5000 digits": (lie(Content_Range=f"bytes 0-65535/{'9' * 5000}"), "without saying how many"),
    "GZip, and more": (lie(Content_Encoding=" GZip, br"), r"found another answer \(206\)"),
    "several ranges": (lie(Content_Type="multipart/byteranges; boundary=a", Content_Range=""), "without saying"),
    "a page": (format_head("200 OK", Content_Type="text/html", Content_Length=3) + b"<p>", r"another answer \(200\)"),
    "nothing": (b"", "connection was lost"),
    "noise": (random.Random(3).randbytes(5000) + b"\r\n\r\n", "is not HTTP"),
    "a head of a megabyte": (format_head(X="y" * (1 << 20)), "is not HTTP"),
    "nothing modified": (format_head("304 Not Modified"), r"another answer \(304\)"),
    "other protocols": (
        format_head("101 Switching Protocols", Upgrade="x", Connection="upgrade"),
        r"\(101\)|is not HTTP",
    ),
    "redirects to itself": (redirect("/a.litertlm"), "or in circles"),
    "a redirect to nowhere": (format_head("302 Found", Content_Length=0), r"another answer \(302\)"),
    **{
        f"no validator but {told}": (lie(ETag=told), r"neither a strong ETag nor a date.* Download the file yourself")
        for told in ("", 'W/"a"', '""', "unquoted")
    },
    **{
        f"a redirect to {to}": (redirect(to), NO_ADDRESS)
        for to in ("file:///etc/passwd", "http://", "http://[::1", "http://[x]/", "//[x]/a", "http://localhost:x/")
    },
}


@pytest.mark.parametrize(("script", "message"), LIES.values(), ids=LIES)
def test_what_makes_no_sense_is_one_line(hub: HubServer, patience: Patient, script: Script, message: str) -> None:
    with serve_raw(script) as url:
        check_refused(url + "/a.litertlm?sig=" + SIGNATURE, message, open_source)
    assert len(patience.waits) <= 6


OTHER = DATA[:-100] + bytes(100)
TIME = "Sat, 21 Nov 2026 10:00:00 GMT"
LATER = "Sat, 21 Nov 2026 10:00:01 GMT"


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({"ETag": '"a"'}, {"ETag": '"b"'}, "another ETag"),
        ({"ETag": '"a"'}, {}, "another ETag"),
        ({"ETag": '"a"'}, {"ETag": 'W/"a"'}, "another ETag"),
        ({"Last_Modified": TIME}, {}, "another Last-Modified"),
        ({"ETag": 'W/"a"', "Last_Modified": TIME}, {"ETag": 'W/"a"', "Last_Modified": LATER}, "another Last-Modified"),
        ({"ETag": '"a"', "Last_Modified": TIME}, {"ETag": '"a"', "Last_Modified": LATER}, "another Last-Modified"),
        ({"ETag": '"a"'}, {"ETag": '"a"', "Content_Range": "bytes 65536-262143/262145"}, "another size"),
        ({"ETag": '"a"'}, None, r"another answer \(200"),
    ],
)
def test_a_file_that_changes_between_ranges(
    hub: HubServer, before: dict[str, object], after: dict[str, object] | None, message: str
) -> None:
    count = iter(range(99))
    complete = format_head("200 OK", Content_Length=SIZE, ETag='"a"') + OTHER

    def script(request: str, say: Say) -> None:
        later = complete if after is None else answer_range(request, OTHER, **after)
        say(later if next(count) else answer_range(request, **before))

    with serve_raw(script) as url:
        text = check_refused(url + "/a.litertlm", message)
    assert after is None or "the file changed while being read" in text


def test_a_redirect_to_less_safety() -> None:
    remote.check_redirects("a", "https://localhost/a", "https://elsewhere/b")
    remote.check_redirects("a", "http://localhost/a", "https://elsewhere/b", "https://third/c")
    for way in (["https://localhost/a", "http://elsewhere/b"], ["https://a/", "http://a/", "https://a/"]):
        with pytest.raises(SourceError, match="redirects to an address without https"):
            remote.check_redirects("a", *way)


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({"X-Repo-Commit": "../../../../etc"}, "to name the file's commit"),
        ({"X-Repo-Commit": "c" * 39 + "\u00e9"}, "to name the file's commit"),
        ({"Location": "file:///etc/passwd"}, NO_ADDRESS),
        ({"Location": "http://[::1"}, NO_ADDRESS),
        ({"Location": "http://localhost:99999/"}, NO_ADDRESS),
        ({"Location": f"http://{'a' * 300}/"}, NO_ADDRESS),
        ({"Location": "//[x]/a"}, NO_ADDRESS),
        ({"X-Linked-Size": "many"}, None),
        ({"X-Linked-Size": "7"}, "another size"),
    ],
)
def test_a_hub_that_lies(hub: HubServer, patience: Patient, headers: dict[str, str], message: str | None) -> None:
    hub.add("org/repo", "a.litertlm", DATA)
    hub.linked = headers
    if message is None:
        assert read_all("hf://org/repo/a.litertlm") == DATA
    else:
        check_refused("hf://org/repo/a.litertlm", message)


def mutate_head(random_: random.Random, answer: bytes) -> bytes:
    """Return ``answer`` with a few bytes of its head lost, doubled or invented."""
    head, _, body = answer.partition(b"\r\n\r\n")
    damaged = bytearray(head)
    for _ in range(random_.randint(1, 4)):
        at, size = random_.randrange(len(damaged)), random_.randint(1, 12)
        made_up = [b"\r\n", b"\0", b"-", b"9" * 30, b"\xff", b": ", b"W/", bytes([random_.randrange(256)])]
        doubled = damaged[at : at + size] * random_.randint(1, 50)
        damaged[at : at + random_.choice([0, 1, size])] = random_.choice([b"", doubled, *made_up])
        damaged = damaged or bytearray(b"x")
    return bytes(damaged) + b"\r\n\r\n" + body


def test_heads_at_random(hub: HubServer, patience: Patient) -> None:
    random_, sent, right = random.Random(19), list[bytes](), 0

    def script(request: str, say: Say) -> None:
        answer = answer_range(request, ETag='"a"', Last_Modified=TIME, Content_Type="application/octet-stream")
        sent.append(mutate_head(random_, answer) if random_.random() < 0.7 else answer)
        say(sent[-1])

    with serve_raw(script) as url:
        for _ in range(120):
            sent.clear()
            try:
                assert read_all(url + "/a.litertlm") == DATA, sent
                right += 1
            except SourceError as error:
                check_message(str(error))
    assert 10 < right < 110
