"""An OpenAI-compatible server that needs only the standard library.

--exit N and --signal N: exits so at once. --socket PATH: listens on that socket, and on no port. A
request body with "eat" makes it allocate memory until it is killed.
"""

import json
import os
import signal
import socketserver
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer(b"ok", "text/plain")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if body.get("eat"):
            held = []
            while True:
                held.append(b"x" * (1 << 20))
        if body.get("stream"):
            events = [{"choices": [{"index": 0, "delta": {"content": t}}]} for t in ("a ", "b ", "c ")]
            self.answer("".join(f"data: {json.dumps(e)}\n\n" for e in events).encode() + b"data: [DONE]\n\n", "text/event-stream")
            return
        choice = {"index": 0, "text": "a b c ", "message": {"content": "a b c "}, "finish_reason": "stop"}
        self.answer(
            json.dumps({"choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 3}}).encode(), "application/json"
        )

    def answer(self, data: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Log no requests."""


def on_term(*_: object) -> None:
    sys.stderr.write("tiny: stopped by SIGTERM\n")
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if "--exit" in arguments:
        sys.exit(int(arguments[1]))
    if "--signal" in arguments:
        os.kill(os.getpid(), int(arguments[1]))
    signal.signal(signal.SIGTERM, on_term)
    if "--socket" in arguments:
        with socketserver.ThreadingUnixStreamServer(arguments[arguments.index("--socket") + 1], Handler) as server:
            server.serve_forever()
    ThreadingHTTPServer(("0.0.0.0", 9000), Handler).serve_forever()
