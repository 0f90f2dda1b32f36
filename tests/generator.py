"""A stand-in for `vllm.benchmarks.serve`: Poisson arrivals, a thread for each request, vLLM's names of the results."""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import random
import threading
import time
from typing import Any
from urllib.parse import urlsplit

_FLAGS = ("ignore-eos", "disable-tqdm", "save-detailed")
_VALUES = ("backend", "base-url", "model", "tokenizer", "dataset-name", "num-prompts", "request-rate", "seed")


def add_cli_args(parser: argparse.ArgumentParser) -> None:
    for name in (*_VALUES, "random-input-len", "random-output-len", "temperature", "ready-check-timeout-sec"):
        parser.add_argument(f"--{name}", required=True)
    for name in _FLAGS:
        parser.add_argument(f"--{name}", action="store_true", required=True)


def _one(url: str, model: str, tokens: int, done: dict[str, Any]) -> None:
    place, begin = urlsplit(url), time.perf_counter()
    asked = {"model": model, "prompt": "a", "max_tokens": tokens, "stream": True}
    done |= {"start_times": begin, "ttfts": 0.0, "itls": [], "output_lens": 0, "errors": "", "latencies": 0.0}
    try:
        link = http.client.HTTPConnection(str(place.hostname), place.port, timeout=60)
        link.request("POST", "/v1/completions", json.dumps(asked))
        answer, last = link.getresponse(), begin
        if answer.status != 200:
            raise OSError(answer.read().decode())
        for line in answer:
            if line.startswith(b"data: {"):
                now = time.perf_counter()
                if done["output_lens"]:
                    done["itls"].append(now - last)
                else:
                    done["ttfts"] = now - begin
                done["output_lens"], last = done["output_lens"] + 1, now
        done["latencies"] = last - begin
    except OSError as problem:
        done["errors"] = f"Traceback\n{problem}\n"


async def main_async(options: argparse.Namespace) -> dict[str, Any]:
    drawn, count, rate = random.Random(int(options.seed)), int(options.num_prompts), float(options.request_rate)
    done: list[dict[str, Any]] = [{} for _ in range(count)]
    begin, threads = time.perf_counter(), []
    for one in done:
        await asyncio.sleep(drawn.expovariate(rate) if rate < float("inf") else 0.0)
        asked = (options.base_url, options.model, int(options.random_output_len), one)
        threads.append(threading.Thread(target=_one, args=asked, daemon=True))
        threads[-1].start()
    while any(thread.is_alive() for thread in threads):
        await asyncio.sleep(0.002)
    lists = {name: [one[name] for one in done] for name in done[0]}
    return {**lists, "duration": time.perf_counter() - begin, "max_concurrent_requests": count}
