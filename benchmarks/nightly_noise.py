"""Raw times of nights on which nothing changed, for `nightly_power.py` to draw from.

    python benchmarks/nightly_noise.py
    python benchmarks/nightly_noise.py --once
    python benchmarks/nightly_noise.py --nights 2 --no-record

A night is a fresh process that times four things beside themselves, in randomised ABBA blocks
and in rounds that go over all four. In each round both sides are loaded anew; with `--once`
they are loaded once a night, to see what that does. What differs between the sides is what a machine does by itself:
other programs, and where each load happens to lie in memory. The things: a product of one row whose weights are read
from memory and one of 32 rows whose weights stay in the cache, with one thread; the network `fashion-mnist-cnn` at
batch 1 and 16, with two threads. Short ones are repeated to make a step of about a millisecond or more. The times go
to `results/nightly_noise-DATE.npz`, float32 seconds [nights, cells, sides, blocks, 2, burst]; what they were taken on
beside it.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from typing import Any

import numpy as np
from harness.record import parsing, record, show
from harness.turns import in_turns

from quantkit.measurement.timing.schedule import Visit
from quantkit.model.source.alias import ALIASES, materialize
from quantkit.stats.slowdown import BLOCKS, BURST, ROUNDS, SETTLE

Step = Callable[[], object]
NETWORK = "fashion-mnist-cnn"
# (rows, K, N, runs a step): 64 MiB of weights that no cache holds, and 1 MiB that most do
PRODUCTS = {"product, from memory": (1, 4096, 4096, 1), "product, in the cache": (32, 512, 512, 8)}
# batch -> runs a step
BATCHES = {1: 4, 16: 1}
CELLS = (*PRODUCTS, *(f"network, batch {batch}" for batch in BATCHES))


def repeated(step: Step, runs: int) -> Step:
    def several() -> None:
        for _ in itertools.repeat(None, runs):
            step()

    return several


@cache
def product(K: int, N: int) -> bytes:
    """The graph of one product in float32 with normal weights."""
    from onnx import TensorProto, helper, numpy_helper

    weight = np.random.default_rng(0).normal(size=(K, N)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", K])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", N])],
        [numpy_helper.from_array(weight, "w")],
    )
    opset = helper.make_opsetid("", 17)
    return bytes(helper.make_model(graph, opset_imports=[opset], ir_version=8).SerializeToString())


def session(model: str | bytes, threads: int) -> Callable[[Any], object]:
    """Runs a graph of one input."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    found = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    name = found.get_inputs()[0].name
    return lambda values: found.run(None, {name: values})


def loaded() -> list[Step]:
    """A step of each cell, from a load of its own."""
    generator, steps = np.random.default_rng(0), []
    for rows, K, N, runs in PRODUCTS.values():
        run, x = session(product(K, N), 1), generator.normal(size=(rows, K)).astype(np.float32)
        steps.append(repeated(partial(run, x), runs))
    run = session(str(materialize(ALIASES[NETWORK]) / "model.onnx"), 2)
    for batch, runs in BATCHES.items():
        images = generator.normal(size=(batch, 1, 28, 28)).astype(np.float32)
        steps.append(repeated(partial(run, images), runs))
    return steps


def night(number: int, rounds: int, blocks: int, once: bool) -> tuple[Any, float, float]:
    """(seconds [cells, sides, rounds * blocks, 2, burst], what it took on the clock, and of the processors)."""
    generator = np.random.default_rng(number)
    began, used = time.perf_counter(), os.times()
    taken: list[list[Any]] = [[] for _ in CELLS]
    for turn in range(rounds):
        if turn == 0 or not once:
            sides = [loaded() for _ in range(2)]
        for cell, pair in enumerate(zip(*sides, strict=True)):
            for step in (*pair, *pair):
                step()
            # the one that was loaded first is not always the first of the two
            order = [0, 1] if once else generator.permutation(2)
            times = in_turns(
                [pair[i] for i in order],
                blocks=(blocks, blocks),
                seconds=0.0,
                generator=generator,
                visit=Visit(BURST, SETTLE),
            )
            taken[cell].append(np.stack(times))
    after = os.times()
    cpu = after.user + after.system - used.user - used.system
    return np.stack([np.concatenate(parts, axis=1) for parts in taken]), time.perf_counter() - began, cpu


def main() -> int:
    parser = parsing(__doc__)
    parser.add_argument("--nights", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--blocks", type=int, default=BLOCKS, help="ABBA blocks of a cell in each round")
    parser.add_argument("--once", action="store_true", help="load both sides once a night, not once a round")
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as pool:
        one = partial(night, rounds=options.rounds, blocks=options.blocks, once=options.once)
        found = list(pool.map(one, range(options.nights)))
    times = np.stack([each[0] for each in found]).astype(np.float32)
    rows = []
    for cell, name in enumerate(CELLS):
        flat = times[:, cell].reshape(len(found), -1)
        ratios = np.median(times[:, cell].reshape(len(found), 2, -1), axis=-1)
        ratios = ratios[:, 0] / ratios[:, 1]
        rows.append(
            {"cell": name, "p50": float(np.median(flat)), "p90": float(np.quantile(flat, 0.9))}
            | {"p99": float(np.quantile(flat, 0.99)), "night_low": float(np.median(flat, axis=1).min())}
            | {"night_high": float(np.median(flat, axis=1).max()), "ratio_low": float(ratios.min())}
            | {"ratio_high": float(ratios.max())}
        )
    columns = {"cell": "cell", "p50": "step, median, s:.2e", "p90": "p90:.2e", "p99": "p99:.2e"}
    columns |= {"night_low": "quietest night:.2e", "night_high": "slowest:.2e"}
    columns |= {"ratio_low": "ratio of medians, least:.3f", "ratio_high": "largest:.3f"}
    show(f"{len(found)} nights of {options.rounds} rounds of {options.blocks} blocks", rows, columns)
    settings = {"nights": options.nights, "rounds": options.rounds, "blocks": options.blocks, "once": options.once}
    settings |= {"burst": BURST, "settle": SETTLE, "note": options.note, "cells": list(CELLS)}
    settings |= {"seconds": sum(each[1] for each in found), "cpu_seconds": sum(each[2] for each in found)}
    name = "nightly_noise_once" if options.once else "nightly_noise"
    path = record(name, "raw times of equal sides", rows, settings)
    if path:
        np.savez_compressed(path.with_suffix(".npz"), times=times, rounds=options.rounds, cells=CELLS)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
