"""Compiled for GPUs that are not here: no spill, no conversion in a decode loop, no detour of the weight.

In a process of its own, because in this one the interpreter takes Triton's place.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from thorough import beside

pytest.importorskip("triton")  # Linux alone has it

# name -> (what to compile, with which words)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "int4": ("weight_only", {"kind": "int4", "group": 128}),
    "int4 zeros": ("weight_only", {"kind": "int4", "group": 128, "zero": True}),
    "int4 twin": ("weight_only", {"kind": "int4", "group": 128, "zero": True, "decode": False}),
    "int8": ("weight_only", {"kind": "int8"}),
    "nf4": ("weight_only", {"kind": "nf4", "group": 64, "nested": True}),
    "nf4 bf16": ("weight_only", {"kind": "nf4", "group": 64, "nested": True, "x": "bf16"}),
    "fp8_e4m3 bf16": ("weight_only", {"kind": "fp8_e4m3", "x": "bf16"}),
    "int4 bf16": ("weight_only", {"kind": "int4", "group": 64, "zero": True, "x": "bf16"}),
    "int4 prefill": ("weight_only", {"kind": "int4", "group": 128, "block_m": 128}),
    "whole int4 zeros": ("weight_only", {"kind": "int4", "group": 64, "zero": True, "tiles": (16, 8, 2, 1, 8, 0)}),
    "whole int4": ("weight_only", {"kind": "int4", "group": 128, "tiles": (16, 8, 4, 1, 8, 0)}),
    "whole int4 wide": ("weight_only", {"kind": "int4", "group": 64, "zero": True, "tiles": (32, 16, 4, 1, 4, 0)}),
    "whole int8": ("weight_only", {"kind": "int8", "zero": True, "tiles": (16, 8, 4, 1, 8, 0)}),
    "whole nf4": ("weight_only", {"kind": "nf4", "group": 64, "nested": True, "tiles": (16, 8, 2, 1, 8, 0)}),
    "whole fp8 bf16": ("weight_only", {"kind": "fp8_e4m3", "x": "bf16", "tiles": (16, 8, 4, 1, 8, 0)}),
    "w8a8 int8": ("native", {"x": "i8"}),
    "w8a8 fp8": ("native", {"x": "fp8e4nv"}),
    "attention": ("attention", {"x": "bf16"}),
    "attention wide": ("attention", {"x": "fp16", "size": 256, "group": 16}),
}
# every case on the newest; on the others the one most in use
WANTED = [(90, name) for name in CASES] + [(80, "int4"), (80, "w8a8 int8"), (89, "w8a8 fp8")]
FRAGMENTS = [name for name in CASES if not name.startswith(("whole", "attention"))]
WHOLE = [name for name in CASES if name.startswith("whole")]
OLDER = [(80, "whole int4 zeros"), (80, "whole int4 wide"), (89, "whole int4 zeros")]
WANTED += [*OLDER, (80, "attention"), (89, "attention")]
MORE = [(90, "int4"), (90, "int8"), (90, "int4 prefill"), (80, "w8a8 int8")]
MORE += [*((90, name) for name in WHOLE[1:]), *OLDER[1:], (90, "attention wide")]
# tokens to codes: architecture, dtype of x, int8 (else FP8)
TOKENS = [(80, "fp16", True), (90, "bf16", False)]
# every kernel on the newest, with whole numbers and with the largest table; all others are in kernel_resources.py
SOLVERS = [
    *((90, f"choose, {grid}") for grid in ("int4 zeros", "256 values")),
    *((90, name) for name in ("descend, int4 zeros g64", "search, int4 zeros, hessian")),
    (90, "losses, int4 zeros, hessian"),
]
PROGRAM = """
import json, sys
from quantkit.kernels import ahead
from quantkit.kernels.dispatch import Config
from quantkit.kernels.solving.ahead import BLOCK, compiled, compiled_of_block, variants
products, solvers, tokens = json.load(sys.stdin)
found = []
for sm, made, words in products:
    m = words.pop("block_m", 16)
    unroll = 4 if made == "native" else 2
    config = Config(64, 16, unroll, 4, 4, 3) if m == 16 else Config(128, m, 2, 1, 8, 3)
    config = Config(*words.pop("tiles", None) or config.as_dict().values())
    got = getattr(ahead, made)(sm=sm, **words, **({} if made == "attention" else {"config": config}))
    waits = [got.count(name, loop=False) for name in ("PREEXIT", "ACQBULK")]
    found.append({"registers": got.registers, "spills": got.spill_bytes, "loop": got.loop, "waits": waits,
                  "early": got.early, "lead": got.lead})
solved, known = [], variants()
for sm, name in solvers:
    kernel, words = known[name]
    got = compiled(kernel, sm, **words)
    products = got.count("FFMA", "HMMA", "HGMMA", loop=False)
    solved.append([sm, name, got.spill_bytes, got.registers, got.shared_bytes, products])
for name in BLOCK if solvers else ():
    got = compiled_of_block(name, 90)
    solved.append([90, name, got.spill_bytes, got.registers, got.shared_bytes, 1])
maxima = [ahead.quantize(sm, x, whole=whole).code for sm, x, whole in tokens]
print(json.dumps([found, solved, maxima]))
"""


class MachineCode(dict[tuple[int, str], dict[str, Any]]):
    """What products were compiled to, those of `MORE` once one is asked for; `solved`, what solvers were."""

    def __init__(self, cache: str) -> None:
        self.cache = cache
        self.solved, self.tokens = self.compile([case for case in WANTED if case not in MORE], SOLVERS, TOKENS)

    def __missing__(self, case: tuple[int, str]) -> dict[str, Any]:
        self.compile(MORE, [], [])
        return self[case]

    def compile(self, wanted: list[tuple[int, str]], solvers: list[Any], tokens: list[Any]) -> tuple[Any, Any]:
        """In one process."""
        asked = json.dumps([[(sm, *CASES[name]) for sm, name in wanted], solvers, tokens])
        environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": self.cache}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], input=asked, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        products, solved, maxima = json.loads(done.stdout)
        self.update(zip(wanted, products, strict=True))
        return solved, maxima


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> MachineCode:
    return MachineCode(str(tmp_path_factory.mktemp("triton")))


def count(found: dict[str, Any], *starts: str) -> int:
    return sum(n for name, n in found["loop"].items() if name.startswith(starts))


@pytest.mark.parametrize(("sm", "name"), beside([case for case in WANTED if case not in MORE], WANTED))
def test_nothing_spills_and_nothing_is_converted_in_the_loop(compiled: Any, sm: int, name: str) -> None:
    found = compiled[sm, name]
    assert found["spills"] == 0
    assert 0 < found["registers"] <= 255
    assert count(found, "HMMA", "HGMMA", "IMMA", "IGMMA", "QMMA", "QGMMA") > 0
    assert count(found, "I2F", "F2I", "LDL", "STL") == 0


@pytest.mark.parametrize("name", beside([name for name in FRAGMENTS if (90, name) not in MORE], FRAGMENTS))
def test_a_weight_stays_in_the_registers_it_was_decoded_in(compiled: Any, name: str) -> None:
    """Hopper: 16-byte loads, asynchronous or out of shared memory, no store there, no exchange between lanes."""
    found = compiled[90, name]
    assert count(found, "STS", "STSM", "LDSM", "SHFL") == 0
    # codes of 8 bits never pass through registers: the tensor core reads them where they were copied to
    assert count(found, "LDS.128") == 0 if name.startswith("w8a8") else count(found, "LDS.128") > 0
    assert count(found, "LDGSTS.E.BYPASS.128") > 0


@pytest.mark.parametrize(("sm", "name"), beside([(90, WHOLE[0]), OLDER[0]], [*((90, n) for n in WHOLE), *OLDER]))
def test_a_whole_k_streams_through_registers_and_begins_before_the_wait(compiled: Any, sm: int, name: str) -> None:
    found, (rows, _, unroll, *_) = compiled[sm, name], CASES[name][1]["tiles"]
    tiles, loads = unroll * rows // 16, ("LDG.E.128", "LDG.E.U16", "LDG.E.U8")
    assert count(found, "HMMA.16816") > 0 and count(found, "HGMMA") == 0
    # neither words nor x meet shared memory, another lane or a barrier in the loop
    assert count(found, "STS", "LDS", "LDGSTS", "SHFL", "BAR", "ATOM", "RED") == 0
    # the next step's words are on their way before this step's first product, scales and zero points too
    assert {one: count({"loop": found["lead"]}, one) for one in loads} == {one: count(found, one) for one in loads}
    assert count(found, "LDG.E.128") == tiles
    if sm == 90:
        assert count({"loop": found["early"]}, "LDG.E.128") == tiles
        assert count({"loop": found["early"]}, "LDG.E.U16", "LDG.E.U8") >= count(found, "LDG.E.U16", "LDG.E.U8")


def test_decoding_two_weights_takes_a_mask_and_an_fma(compiled: Any) -> None:
    plain, twin = compiled[90, "int4 zeros"], compiled[90, "int4 twin"]
    # 64 rows x 2 tiles of 64 columns on 128 threads: 64 weights, 32 pairs each
    assert count(plain, "HFMA2", "HADD2", "HMUL2") - count(twin, "HFMA2", "HADD2", "HMUL2") == 32
    # a mask a pair, and what widens the scales and zero points of 2 rows x 2 tiles: each zero point is one IMAD more
    assert 32 <= count(plain, "LOP3", "PRMT") <= 32 + 12
    assert compiled[90, "int4 bf16"]["loop"].get("HFMA2.BF16_V2") == 32


def test_bfloat16_is_decoded_as_such_and_not_converted(compiled: Any) -> None:
    half, brain = compiled[90, "nf4"]["loop"], compiled[90, "nf4 bf16"]["loop"]
    assert sum(brain.values()) == sum(half.values()), "another table, the same instructions"
    # 64 rows x 2 tiles of 32 columns on 128 threads: 32 weights, a product a pair beside what float16 takes
    assert count(compiled[90, "fp8_e4m3 bf16"], "HMUL2.BF16", "HFMA2.BF16") == 16
    assert all(count(compiled[90, name], "F2F") == 0 for name in ("nf4 bf16", "fp8_e4m3 bf16"))


def test_a_kernel_lets_the_next_one_begin_and_waits_for_the_last_where_a_gpu_can(compiled: Any) -> None:
    assert all(found["waits"] == ([1, 1] if sm == 90 else [0, 0]) for (sm, _), found in compiled.items())


@pytest.mark.parametrize("sm", [89, 90])
def test_sums_of_fp8_leave_the_tensor_core_after_every_step(compiled: Any, sm: int) -> None:
    """64 x 16 sums on 128 threads: eight additions in float32 a step, which no compiler may fold into the product."""
    found = compiled[sm, "w8a8 fp8"]
    assert (count(found, "FADD"), count(found, "QMMA", "QGMMA")) == (8, 8 if sm == 89 else 4)


def test_the_largest_of_a_token_keeps_nan(compiled: MachineCode) -> None:
    for code in compiled.tokens:
        # 16 elements a thread of 256: 16 maxima with the last ones, 15 among themselves, 8 across threads
        assert code["FMNMX.NAN"] == 39
        assert code["FMNMX"] == 32, "codes are cut to their range after that"


def test_the_raw_twin_loads_and_multiplies_the_same(compiled: Any) -> None:
    plain, twin = compiled[90, "int4 zeros"], compiled[90, "int4 twin"]
    for names in (("LDGSTS",), ("LDS.128",), ("HGMMA",), ("LDG",)):
        ours = {name: n for name, n in plain["loop"].items() if name.startswith(names)}
        theirs = {name: n for name, n in twin["loop"].items() if name.startswith(names)}
        assert ours.keys() == theirs.keys() and ours
        # a row's zero points: the twin needs them once a group, decoding once a tile
        same = ours if names != ("LDG",) else {}
        assert all(theirs[name] == n for name, n in same.items())


def test_no_solver_spills(compiled: MachineCode) -> None:
    assert len(compiled.solved) > len(SOLVERS)
    for sm, name, spills, registers, shared, products in compiled.solved:
        assert spills == 0, (sm, name)
        # two programs of eight warps have room: of 65,536 registers, and of the shared memory of an A100
        assert registers <= 168 and shared <= 80 * 1024, (sm, name)
        assert products > 0, (sm, name)
