"""A small OpenAI-compatible server: streams tokens with a delay each, and has vLLM's pages /health and /metrics.

In the stand-in for vLLM it is `vllm.entrypoints.openai.api_server`. STAND_IN in the environment says how it fails, and
STAND_IN_PIDS names a file for its process id.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class Handler(BaseHTTPRequestHandler):
    """Answers with as many tokens as asked, one after `delay` seconds each."""

    delay = 0.0
    refuses = False
    ends = False  # it closes its port at the first prompt, and keeps the stream open without a word

    def do_GET(self) -> None:
        pages = {"/health": "", "/v1/models": json.dumps({"data": [{"id": "m"}]})}
        pages["/metrics"] = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="40",engine="0"} 1.0\n'
        self.answer(200 if self.path in pages else 404, pages.get(self.path, ""))

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["model"] == "m"
        if self.refuses:
            self.answer(400, "the prompt is too long")
            return
        if self.ends:
            self.server.shutdown()
            self.server.server_close()
            time.sleep(60)
        self.answer(200, "")
        for _ in range(asked["max_tokens"]):
            time.sleep(self.delay)
            self.wfile.write(b'data: {"choices": [{"text": "a"}]}\n\n')
        self.wfile.write(b"data: [DONE]\n\n")

    def answer(self, code: int, text: str) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path)
    parser.add_argument("--port", type=int)
    options, _ = parser.parse_known_args()
    how, pids = os.environ.get("STAND_IN", ""), os.environ.get("STAND_IN_PIDS")
    if pids:
        with Path(pids).open("a") as file:
            file.write(f"{os.getpid()}\n")
    if how == "dies":
        print(
            "RuntimeError: no kernel for int3\nRuntimeError: Engine core initialization failed. See root cause above."
        )
        sys.exit(1)
    if how == "silent":
        time.sleep(600)
    Handler.delay = json.loads((options.model / "config.json").read_text()).get("delay", 0.0)
    Handler.refuses = how == "refuses"
    if how == "falls":
        threading.Timer(1.0, lambda: (print("MemoryError: bad alloc", flush=True), os._exit(3))).start()
    ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
