"""Answers of loaded servers, as the job `load` of `runtimes/vllm/inside.py` gives them."""

from __future__ import annotations

from typing import Any

import numpy as np

TOKENS = 5


def answer(
    side: str, turn: int, rate: float, ttft: Any, gap: Any, *, failed: int = 0, seconds: float | None = None
) -> dict[str, Any]:
    """Return an answer whose requests take these times; the last ones failed."""
    ttft, gap = np.broadcast_arrays(np.asarray(ttft, dtype=float), np.asarray(gap, dtype=float))
    count = len(ttft)
    lost = [at >= count - failed for at in range(count)]
    return {
        "side": side,
        "turn": turn,
        "rate": rate,
        "ttfts": ttft.tolist(),
        "itls": [[float(one)] * (TOKENS - 1) for one in gap],
        "latencies": (ttft + (TOKENS - 1) * gap).tolist(),
        "output_lens": [0 if one else TOKENS for one in lost],
        "start_times": [at / rate for at in range(count)],
        "failed": lost,
        "duration": seconds or count / rate,
        "in_flight": 3.0,
        "began": 1.7e9,
    }
