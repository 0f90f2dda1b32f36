"""Registers, shared memory and spills of the GPU kernels, compiled ahead of time: no GPU is needed.

    python benchmarks/kernel_resources.py [--sm 90] [--all]

Claim: no configuration spills on SM 9.0, no inner loop converts an integer, and a decoded weight stays in the registers
it was decoded in. The figures are the compiler's; they say nothing about speed. Without `--all` the first
configuration of each width of x is compiled, with it every one that `quantkit/kernels/dispatch.py` lists.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from harness.record import layout, parsing, record, show, verdicts

from quantkit.kernels import ahead
from quantkit.kernels.dispatch import candidates
from quantkit.kernels.layout import KINDS

# what is compiled: kind, words, name
WEIGHTS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("int4", {"group": 128}, "int4 g128"),
    ("int4", {"group": 128, "zero": True}, "int4 g128 zeros"),
    ("int4", {"group": 64, "zero": True}, "int4 g64 zeros"),
    ("int4", {"group": 128, "x": "bf16"}, "int4 g128 bf16"),
    ("int8", {}, "int8"),
    ("fp8_e4m3", {}, "fp8_e4m3"),
    ("fp8_e4m3", {"x": "bf16"}, "fp8_e4m3 bf16"),
    ("nf4", {"group": 64, "nested": True}, "nf4 g64 double"),
    ("nf4", {"group": 64, "nested": True, "x": "bf16"}, "nf4 g64 double bf16"),
    ("int4", {"group": 128, "zero": True, "x": "bf16"}, "int4 g128 zeros bf16"),
)
NATIVE = (("i8", "int8 w8a8"), ("fp8e4nv", "fp8_e4m3 w8a8"))


def main() -> int:
    """Compile, print, record."""
    parser = parsing(__doc__)
    parser.add_argument("--sm", type=int, action="append", choices=(80, 89, 90), help="architectures; all three")
    parser.add_argument("--all", action="store_true", help="every configuration")
    args = parser.parse_args()
    rows = []
    for sm in args.sm or (80, 89, 90):
        for batch in (8, 16, 32, 64, 128, 512):
            known = candidates(batch)
            # with the first of a whole K
            for config in known if args.all else known[: 2 if known[1].whole_k else 1]:
                for kind, words, name in WEIGHTS:
                    # a whole K's warp takes all rows of the tiles; a split K's warps share them
                    sharing = 32 if config.whole_k else 32 * config.warps
                    weights = config.block_n * config.unroll * KINDS[kind].columns / sharing
                    found = ahead.weight_only(kind, sm, config, **words)
                    rows.append(_row(found, name, config, weights, batch))
        for batch in (16, 32):
            known = candidates(batch, native=True)
            for config in known if args.all else known[:1]:
                for kind, name in NATIVE if sm > 80 else NATIVE[:1]:
                    weights = config.block_n * config.unroll * 32 / (32 * config.warps)
                    rows.append(_row(ahead.native(sm, config, kind), name, config, weights, batch))
    columns = layout(
        "sm=SM | rows=rows of x:d | name=format | config=n x m, unroll, split, warps, stages | registers:d"
    )
    columns |= {"shared_bytes": "shared B:d", "spill_bytes": "spill B:d", "per_weight": "instructions a weight:.2f"}
    show(
        "the inner loop, compiled ahead of time", rows, columns | {"in_flight": "B in flight:d", "detours": "detours:d"}
    )
    solvers = _solvers(args.sm or (80, 89, 90))
    shown = {"sm": "SM", "name": "kernel", "registers": "registers:d", "shared_bytes": "shared B:d"}
    show("solvers, compiled ahead of time", solvers, shown | {"spill_bytes": "spill B:d", "code": "instructions:d"})
    rows += solvers
    record("kernel-resources", "nothing spills on SM 9.0", rows, {"all": args.all})
    hopper = [row for row in rows if row["sm"] == 90]
    most: dict[tuple[int, str], int] = {}
    for row in (row for row in hopper if row.get("in_flight")):
        most[row["rows"], row["name"]] = max(most.get((row["rows"], row["name"]), 0), row["in_flight"])
    streams = {"SM 9.0: 30 KB in flight in some tiles of every format and width": min(most.values()) >= 30_000}
    return verdicts(
        (streams if args.all and most else {})
        | {
            "SM 9.0: nothing spills": all(row["spill_bytes"] == 0 for row in hopper),
            "no inner loop converts an integer": all(row.get("conversions", 0) == 0 for row in rows),
            "SM 9.0: weights stay in their registers": all(row.get("detours", 0) == 0 for row in hopper),
        }
    )


def _solvers(architectures: Sequence[int]) -> list[dict[str, Any]]:
    """The solvers' kernels, with the tiles that they are launched with."""
    from quantkit.kernels.solving.ahead import BLOCK, compiled, compiled_of_block, variants

    rows = []
    for sm in architectures:
        made = {name: compiled(kernel, sm, **words) for name, (kernel, words) in variants().items()}
        for name, found in {**made, **{name: compiled_of_block(name, sm) for name in BLOCK}}.items():
            sizes = {"registers": found.registers, "shared_bytes": found.shared_bytes, "spill_bytes": found.spill_bytes}
            rows.append({"sm": sm, "name": name, **sizes, "code": sum(found.code.values())})
    return rows


def _row(found: ahead.CompiledKernel, name: str, config: Any, weights: float, batch: int) -> dict[str, Any]:
    streamed = config.warps * config.unroll * config.block_n // 16 * 512 if config.whole_k else 0
    cut = f"{config.block_n} x {config.block_m}, {config.unroll}, {config.split}, {config.warps}, {config.stages}"
    return {
        "sm": found.sm,
        "rows": batch,
        "block_m": config.block_m,
        "name": name,
        "config": cut,
        "registers": found.registers,
        "shared_bytes": found.shared_bytes,
        "spill_bytes": found.spill_bytes,
        # all of the loop: loads, addresses and products too
        "per_weight": sum(found.loop.values()) / weights,
        # through shared memory or another lane; a few stores are scales on their way to their rows
        "detours": found.count("SHFL") + max(found.count("STS") - 4, 0),
        # words, before the wait for the previous kernel
        "early": sum(n for loaded, n in found.early.items() if loaded.startswith("LDG.E.128")),
        # least bytes of words on their way in a multiprocessor
        "in_flight": found.programs(config.warps) * streamed,
        "conversions": found.count("I2F", "F2I"),
    }


if __name__ == "__main__":
    sys.exit(main())
