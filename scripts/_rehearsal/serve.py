"""A server of our own loop: the least of OpenAI's protocol that ``mtp-bench`` needs.

    python -m _rehearsal.serve BASE DRAFTER DEVICE

Prints its address when it listens; ends with SIGTERM.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

from mtp_extract.drafter.load import load_any
from mtp_extract.evaluate.base_model import load_base
from mtp_extract.speculate.loop import SpeculativeGenerator


def _handler(generator: SpeculativeGenerator) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            return

        def do_GET(self) -> None:
            found = self.path == "/v1/models"
            body = json.dumps({"object": "list", "data": [{"id": "rehearsal", "owned_by": "mtp-extract"}]}).encode()
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            chat = "messages" in asked
            prompt = asked["messages"][0]["content"] if chat else asked["prompt"]
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            tokens, given = generator.codec.encode(prompt, chat_template=chat), ""
            new: list[int] = []
            for made in generator.rounds(tokens, max_new_tokens=asked["max_tokens"], drafts=2):
                new += made.tokens
                text = generator.codec.decode(new) or ""
                more, given = text[len(given) :], text
                self._event({"delta": {"content": more}} if chat else {"text": more})
            self._event({"delta": {}} if chat else {"text": ""}, "length")
            self.wfile.write(b"data: [DONE]\n\n")

        def _event(self, content: dict[str, Any], reason: str | None = None) -> None:
            data = {"choices": [{"index": 0, "finish_reason": reason, **content}]}
            self.wfile.write(f"data: {json.dumps(data)}\n\n".encode())
            self.wfile.flush()

    return Handler


def main() -> None:
    """Serve until told to end."""
    base, drafter, device = sys.argv[1:]
    loaded = load_base(base, device)
    made = load_any(Path(drafter), dtype=loaded.drafter_dtype, device=loaded.device)
    generator = SpeculativeGenerator(loaded.model, made, loaded.tokenizer)
    server = HTTPServer(("127.0.0.1", 0), _handler(generator))
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
