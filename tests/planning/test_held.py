"""KV blocks by vLLM's formula; a plan of a measured load beside its rows."""

import json
import subprocess
from collections.abc import Sequence
from typing import Any

import pytest

from quantkit.model.sizes import configs
from quantkit.model.sizes.architecture import Architecture, Attention, BlockShapes
from quantkit.planning.batching import Server, TimeGrid
from quantkit.planning.held import HeldFigure, held
from quantkit.planning.load import visit
from quantkit.planning.memory import cache_of, kv_blocks
from quantkit.planning.traffic import RequestKind, Traffic
from quantkit.runtimes import apart
from quantkit.scheme import CacheScheme

REAL = apart.find("vllm")
GIB, FP8 = 2**30, CacheScheme(format="fp8_e4m3")
# (heads of keys and values, width of a head, window) of each layer
LLAMA = [(3, 64, None)] * 30
WINDOWED = [(8, 128, 4096)] * 32
ALTERNATING = [(8, 64, 128), (8, 64, None)] * 12
GEMMA = [*([(16, 128, 1024)] * 5 + [(16, 128, None)]) * 10, *[(16, 128, 1024)] * 2]
UNEVEN = [(4, 64, 512)] * 12 + [(4, 64, None)] * 13
MIXED = [(8, 64, None), (4, 64, None)] * 4
Layers = Sequence[tuple[int, int, int | None]]
# vLLM 0.32's own answer for requests of 8,192 tokens: blocks, and requests that they hold
CASES: list[tuple[Layers, CacheScheme | None, int, int, int]] = [
    (LLAMA, None, 1, 364, 5),
    (LLAMA, FP8, 1, 728, 11),
    (WINDOWED, None, 8, 512, 10),
    (ALTERNATING, None, 8, 2730, 33),
    (GEMMA, FP8, 16, 3276, 15),
    (UNEVEN, None, 1, 630, 7),
    (MIXED, None, 1, 682, 10),
]
# blocks by vLLM's own code
ASKED = """
import json, sys, types, torch
from unittest.mock import MagicMock
from vllm.v1.core import kv_cache_utils as own
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
config, layout, answers = MagicMock(), own.KVCacheLayout.LBHNC, []
config.scheduler_config.disable_hybrid_kv_cache_manager = False
config.attention_config.hisparse_config = None
config.cache_config.get_resolved_kv_cache_layout.return_value = layout
config.model_config.max_model_len, config.max_in_flight_tokens = 8192, 2048
config.parallel_config.decode_context_parallel_size = 1
for layers, dtype, space in json.load(sys.stdin):
    specs = {}
    for at, (heads, width, window) in enumerate(layers):
        about = dict(block_size=128, num_kv_heads=heads, head_size=width, dtype=getattr(torch, dtype))
        kind = FullAttentionSpec(**about) if window is None else SlidingWindowSpec(**about, sliding_window=window)
        specs[str(at)] = kind
    groups = own.get_kv_cache_groups(config, specs)
    blocks = space // own._get_kv_cache_bytes_per_block(groups, layout)
    whole = types.SimpleNamespace(kv_cache_groups=groups, num_blocks=blocks, hisparse_host_num_blocks=None)
    answers.append([blocks, int(own.get_max_concurrency_for_kv_cache_config(config, whole))])
print("answer", json.dumps(answers))
"""


def model(layers: Layers) -> Architecture:
    blocks = [
        BlockShapes(f"{at}", [], Attention("full", heads, heads, width, width, window))
        for at, (heads, width, window) in enumerate(layers)
    ]
    return Architecture("test", "decoder", "llama", "bfloat16", 64, blocks, embeddings=0, others=0, head=None)


@pytest.mark.parametrize(("layers", "scheme", "gib", "blocks", "requests"), CASES)
def test_blocks_are_those_of_vllm(
    layers: Layers, scheme: CacheScheme | None, gib: int, blocks: int, requests: int
) -> None:
    assert kv_blocks(model(layers), cache_of(scheme, "bfloat16"), gib * GIB, 8192) == (blocks, requests)


@pytest.mark.thorough
@pytest.mark.skipif(REAL is None, reason="vLLM is not installed: quantkit runtime add vllm --install")
def test_the_cases_are_what_vllm_answers() -> None:
    assert REAL is not None
    asked = [(layers, "float8_e4m3fn" if form else "bfloat16", gib * GIB) for layers, form, gib, _, _ in CASES]
    command = [REAL.python, "-c", ASKED]
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, check=True)
    answers = next(line for line in done.stdout.splitlines() if line.startswith("answer")).removeprefix("answer")
    assert json.loads(answers) == [[blocks, requests] for *_, blocks, requests in CASES]


def test_windows_of_other_widths_are_not_guessed() -> None:
    layers: Layers = [(8, 64, 128), (4, 64, None)]
    assert kv_blocks(model(layers), cache_of(None, "bfloat16"), GIB, 1024) is None
    assert kv_blocks(configs.read("bert-base"), cache_of(None, "bfloat16"), GIB, 512) is None


def row(name: str, value: float, base: float | None = None, unit: str = "s", **settings: Any) -> dict[str, Any]:
    beside = {"subject": "b", "value": base} if base is not None else None
    return {"name": name, "value": value, "unit": unit, "baseline": beside, "settings": settings}


def test_each_figure_of_a_load_has_the_plan_s_beside_it() -> None:
    # 10 ms a prompt of 10 tokens, 10 ms a step of any batch: a request of 11 tokens alone takes 0.11 s
    grid = TimeGrid([1], [1], [[0.01]])
    traffic, server = Traffic([RequestKind(10, 11)]), Server(grid, grid, 10_000, 8)
    visits = {rate: visit(server, traffic, rate, 40) for rate in (0.1, 1e4)}
    rows = [
        row("load.tokens", 2.2, unit="token/s", rate=0.1),
        row("load.requests", 40.0, 20.0, "request/s", rate=1e4),
        *(row("load.e2el", 0.22, 0.11, rate=rate, quantile="p50") for rate in (0.1, 1e4)),
        row("load.e2el", 0.3, rate=0.1, quantile="p99"),
        row("load.kv_blocks", 364.0, 364.0, "1", fits=121),
        row("load.memory", 1e9, unit="B"),
    ]
    ours = {(one.what, one.rate): one for one in held("int4", rows, visits, (182, 121))}
    assert ours["load.tokens", 0.1].ratio == pytest.approx(0.5, rel=0.1)
    assert ours["load.e2el p50", 0.1].ratio == pytest.approx(0.5, rel=0.02)
    # all forty at once, eight of them served at a time: the median request waits for two or three batches
    assert 0.2 < (ours["load.e2el p50", 1e4].planned or 0.0) < 0.5
    assert 60 < (ours["load.requests", 1e4].planned or 0.0) < 80
    assert ours["load.kv_blocks", None].ratio == 0.5
    assert ours["load.fits", None].near
    assert ("load.e2el p99", 0.1) not in ours
    assert not any(what == "load.memory" for what, _ in ours)
    theirs = [(one.what, one.rate, one.measured) for one in held("float", rows, {}, None, original=True)]
    assert theirs == [
        ("load.requests", 1e4, 20.0),
        *(("load.e2el p50", rate, 0.11) for rate in (0.1, 1e4)),
        ("load.kv_blocks", None, 364.0),
    ]


@pytest.mark.parametrize(
    ("what", "planned", "near"),
    [
        ("tokens", 1.25, True),
        ("tokens", 1.26, False),
        ("kv_blocks", 1.02, False),
        ("fits", None, False),
    ],
)
def test_a_ratio_is_near_within_a_quarter_and_of_blocks_a_hundredth(
    what: str, planned: float | None, near: bool
) -> None:
    assert HeldFigure("int4", f"load.{what}", "1", None, planned, 1.0).near is near
