"""HTTP servers on loopback, in a thread of their own."""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import BaseRequestHandler
from typing import Any


class Listener(ThreadingHTTPServer):
    """A running one; ``attributes`` are those of its ``handler``, ``errors`` what went wrong in that."""

    daemon_threads = True
    request_queue_size = 1024  # many come at once

    def __init__(self, handler: type[BaseRequestHandler], **attributes: Any) -> None:
        super().__init__(("127.0.0.1", 0), type("Handler", (handler,), attributes))
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.errors: list[BaseException | None] = []
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def handle_error(self, *args: Any) -> None:
        # Clients hang up when they have seen enough; anything else is a bug of the test's server.
        error = sys.exc_info()[1]
        if not isinstance(error, ConnectionError):
            self.errors.append(error)

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        assert self.errors == []


class Handler(BaseHTTPRequestHandler):
    """Answers whole, and writes no log."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *args: Any) -> None:
        return

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def json(self, data: Any, status: int = 200, **headers: str) -> None:
        self.answer(status, json.dumps(data).encode(), Content_Type="application/json", **headers)
