"""A server on loopback that says, byte for byte, what a test wants: what no HTTP library would send."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

__all__ = ["RawServer", "Say", "drip", "raw_server"]

Say = Callable[[bytes], None]
_PAUSE = 0.01
"""Seconds between the drops of :func:`drip`: far less than any time that a test allows."""


@dataclass
class RawServer:
    """Start with :func:`raw_server`.

    Attributes:
        heads: every request's head.
    """

    url: str
    heads: list[str] = field(default_factory=list)


def drip(say: Say, pieces: Iterable[bytes]) -> None:
    """Say ``pieces`` with a little time between any two, until who hears them hangs up."""
    pause = threading.Event()  # tests may have stopped `time.sleep`
    for piece in pieces:
        say(piece)
        pause.wait(_PAUSE)


@contextmanager
def raw_server(script: Callable[[str, Say], None] | bytes) -> Iterator[RawServer]:
    """A running one; ``script`` may be the one answer to everything."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            head = b""
            while b"\r\n\r\n" not in head:
                more = self.request.recv(1 << 16)
                if not more:
                    return
                head += more
            server.heads.append(head.decode("latin-1"))
            try:
                if isinstance(script, bytes):
                    self.request.sendall(script)
                else:
                    script(server.heads[-1], self.request.sendall)
                # What was sent is to arrive, though more was asked that nobody reads.
                self.request.shutdown(socket.SHUT_WR)
            except OSError:
                return  # whoever asked hung up

    class Listener(socketserver.ThreadingTCPServer):
        daemon_threads = True
        block_on_close = False

    with Listener(("127.0.0.1", 0), Handler) as listener:
        server = RawServer(f"http://127.0.0.1:{listener.server_address[1]}")
        threading.Thread(target=listener.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield server
        finally:
            listener.shutdown()
