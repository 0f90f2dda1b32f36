"""A thousand compiles in a night of ten hours: how many machines, by a simulation with a fixed seed.

    python benchmarks/fleet.py            after benchmarks/stage_ceilings.py, whose last record it reads

Models and recipes are drawn from `MODELS` and `RECIPES`: assumptions, no statistics. Seconds of a compile:

    cores    work of its stages at this machine's rates, times how much longer each stage took on SmolLM2
    peer     one GPU: llm-compressor 0.10's GPTQ takes 745 s for Llama-3-8B (its docs/guides/distributed_oneshot.md);
             by parameters for every recipe here; a thirtieth for rounding to nearest, as in its docs/guides/runtime.md
    ceiling  one H200: the least time; no compile can be as fast

A node is lost at random and is back after `DOWN`. Its job loses the last 30 s and begins anew elsewhere: `AGAIN`.
"""

from __future__ import annotations

import heapq
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.record import RESULTS, layout, parsing, record, show
from stage_ceilings import ALONE, card, least, specified, stages

MODELS = {"smollm2-135m": 0.2, "qwen3-0.6b": 0.25, "gemma-3-1b": 0.15, "llama-3-8b": 0.3, "qwen3-32b": 0.07}
MODELS |= {"llama-3-70b": 0.03}
RECIPES = {"rtn-int4": 0.2, "gptq-int4": 0.3, "awq-int4": 0.3, "int4-best": 0.2}
COUNT, NIGHT, SEED = 1000, 36_000.0, 1
# seconds: start of a compile, work that a lost node takes with it, a resume, and until a lost node is back
START, LOST, AGAIN, DOWN = 30.0, 30.0, 60.0, 600.0
# published seconds for 8.03e9 parameters on one GPU; times that a compile reads its source: blocks, check, scores
PEER, READS = 745.03 / 8.03e9, 3


@dataclass(frozen=True)
class Night:
    """Seconds until the last job is done, seconds of work on all nodes, and losses of a node at work."""

    seconds: float
    busy: float
    losses: int


def night(jobs: Sequence[float], nodes: int, *, longest: bool, every: float | None = None, seed: int = SEED) -> Night:
    """Give jobs to nodes, each the next one as it becomes free.

    Args:
        jobs: seconds of each, in the order in which they came.
        longest: whether the longest job goes first, or the first that came.
        every: mean seconds between two losses of one node; None for none.
        seed: of the losses.
    """
    dice = random.Random(seed)
    waiting = [(-seconds if longest else number, number, seconds) for number, seconds in enumerate(jobs)]
    heapq.heapify(waiting)
    free, coming, done, busy, losses = nodes, list[tuple[float, int, Any]](), 0.0, 0.0, 0
    now, serial = 0.0, 0
    while waiting or coming:
        while free and waiting:
            (_, number, seconds), free, serial = heapq.heappop(waiting), free - 1, serial + 1
            lost = dice.expovariate(1 / every) if every else float("inf")
            busy += min(lost, seconds)
            if lost >= seconds:
                heapq.heappush(coming, (now + seconds, serial, None))
                done = max(done, now + seconds)
                continue
            left, losses = seconds - max(lost - LOST, 0.0) + AGAIN, losses + 1
            heapq.heappush(coming, (now + lost, serial, (-left if longest else number, number, left)))
            heapq.heappush(coming, (now + lost + DOWN, serial, None))
        if coming:
            now, _, back = heapq.heappop(coming)
            if back is None:
                free += 1
            else:
                heapq.heappush(waiting, back)
    return Night(done, busy, losses)


def needed(jobs: Sequence[float], **how: Any) -> int:
    """The fewest nodes that are done by the end of the night."""
    low, high = 1, len(jobs)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if night(jobs, middle, **how).seconds <= NIGHT else (middle + 1, high)
    return low


def drawn() -> Iterator[tuple[str, str]]:
    """Model and recipe of each job."""
    dice = random.Random(SEED)
    for _ in range(COUNT):
        model, recipe = (dice.choices([*table], [*table.values()])[0] for table in (MODELS, RECIPES))
        yield model, recipe


def on_cores(model: str, recipe: str, known: Mapping[str, Any], ranks: int = 1) -> float:
    """Seconds on one core, or on one for each rank."""
    slower = known["slower"].get(recipe) or known["slower"]["gptq-int4"]
    works = stages(specified(model, recipe, ["gptq.gradients=0"] if ranks > 1 and recipe == "int4-best" else []))
    took = {name: work.least(known["core"]) * slower.get(name, 1.0) for name, work in works.items()}
    return START + sum(one / (1 if name in ALONE else ranks) for name, one in took.items())


def main() -> None:
    parsing(__doc__).parse_args()
    known = json.loads(sorted(RESULTS.glob("stage_ceilings-*.json"))[-1].read_text())["settings"]
    asked, rows = [*drawn()], list[dict[str, Any]]()
    pairs, size = (
        sorted(set(asked)),
        {model: specified(model, "rtn-int4", []).architecture.parameters for model in MODELS},
    )
    peer = {pair: START + size[pair[0]] * PEER / (30 if pair[1] == "rtn-int4" else 1) for pair in pairs}
    tables = {
        "cores": {pair: on_cores(*pair, known) for pair in pairs},
        "peer": peer,
        "ceiling": {pair: START + sum(least(specified(*pair, []), card()).values()) for pair in pairs},
    }
    moved = READS * sum(2 * size[model] for model, _ in asked) / NIGHT / 1e9
    for kind, table in tables.items():
        jobs = [table[pair] for pair in asked]
        fitting = [each for each in jobs if each <= NIGHT]
        for every in (None, 86_400.0, 7200.0):
            for longest in (True, False):
                count = needed(fitting, longest=longest, every=every)
                found = night(fitting, count, longest=longest, every=every)
                night_of = {"seconds": kind, "order": "longest first" if longest else "as they come", "nodes": count}
                night_of |= {"every": every / 3600 if every else None, "hours": found.seconds / 3600}
                night_of |= {"used": 100 * found.busy / count / found.seconds, "losses": found.losses, "reads": moved}
                left = {"longest": max(jobs) / 3600, "too_long": len(jobs) - len(fitting), "work": sum(fitting) / 3600}
                wide = [on_cores(*pair, known, 8) / 3600 for pair in asked if table[pair] > NIGHT]
                left |= {"longest_wide": max(wide, default=None), "wide": 8 * sum(wide)}
                rows.append(night_of | left)
    columns = "seconds | order | every=a loss a node, h:.0f | work=hours of work:,.0f | longest=longest, h:.1f"
    columns += " | too_long=too long | longest_wide=on 8 ranks, h:.1f | wide=their core hours:,.0f"
    columns += " | nodes | hours:.2f | used=used %:.0f | losses | reads=GB/s read:.2f"
    show("a night", rows, layout(columns))
    record("fleet", "no claim: nodes for a thousand compiles in a night", rows, {"models": MODELS, "recipes": RECIPES})


if __name__ == "__main__":
    main()
