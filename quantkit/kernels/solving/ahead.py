"""Compilation of the solvers' kernels for GPUs that are not present, with the launch parameters of real calls."""

from __future__ import annotations

from typing import Any

from quantkit.kernels.ahead import CompiledKernel, machine_code
from quantkit.kernels.solving import gptq, losses, search, statistics, stored

# integer grids: mantissa bits that rounding of scales drops (see `search_integers`)
_WHOLE = {"EVEN": 13, "HALF": 17}
_NO_TABLE = ("values_ptr", "edges_ptr")


def variants() -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the variants to compile: name -> kernel, and keyword arguments of `compiled`."""
    return {
        "choose, int4 zeros": ("choose", {}),
        "choose, 16 values": ("choose", {"steps": 4}),
        "choose, 256 values": ("choose", {"steps": 8}),
        "choose, int4 zeros, tf32x3": ("choose", {"precision": "tf32x3"}),
        "descend, int4 zeros g32": ("descend", {"length": 32}),
        "descend, int4 zeros g64": ("descend", {"length": 64}),
        "descend, 256 values g32": ("descend", {"steps": 8, "length": 32}),
        "search, int4 zeros": ("search", {}),
        "search, 16 values": ("search", {"steps": 4}),
        "search, 256 values": ("search", {"steps": 8}),
        "search, int4 zeros, hessian": ("search", {"blocks": True}),
        "losses, int4 zeros, importance": ("losses", {}),
        "losses, int4 zeros, hessian": ("losses", {"blocks": True}),
    }


def compiled(
    name: str, sm: int, *, steps: int = 0, length: int = 128, blocks: bool = False, precision: str = "ieee"
) -> CompiledKernel:
    """Compile a kernel with its launch parameters.

    Args:
        name: `choose`, `descend`, `search` or `losses`.
        sm: architecture.
        steps: steps of the search in a table of values; 0 for integers with zero points.
        length: columns that share a scale.
        blocks: True to measure errors with blocks of a Hessian, or a whole one.
        precision: precision of products.
    """
    absent = {*(() if steps else _NO_TABLE), *(("zero_ptr",) if steps else ())}
    types, options, warps, stages = {"order_ptr": "*i64"}, {}, gptq.WARPS, 3
    if name in ("choose", "descend"):
        kernel = gptq.choose_rows if name == "choose" else gptq.descend_rows
        options = {"STEPS": steps, "PRECISION": precision, "ROWS": gptq.ROWS, "CHUNK": gptq.CHUNK}
        options |= {"PANEL": gptq.PANEL} if name == "choose" else {"BLOCK": gptq.block_of(length)}
        options |= {} if name == "choose" else {**_WHOLE, "REFIT": not steps}
        stages = gptq.STAGES
    elif name == "search":
        kernel, types = search.search_ranges, {} if steps or not blocks else {"scale_ptr": "*fp16", "zero_ptr": "*i8"}
        absent |= set() if steps else {"given_ptr", "fitted_ptr"}
        tries = {"GIVEN": 7, "TRIES": 0} if steps else {"GIVEN": 0, "TRIES": 5}
        piece, warps = search.tile_of(length, blocks=blocks)
        options = {**_WHOLE, **tries, "SMALLEST": 0.7, "REST": 0.3, "REFINEMENTS": 1, "BLOCKS": blocks, "STEPS": steps}
        options |= {"PIECE": piece, "ROWS": search.ROWS, "PRECISION": precision}
    else:
        kernel, warps = losses.rounding_losses, losses.WARPS
        absent |= {"given_ptr", *(("importance_ptr", "cost_ptr") if blocks else ("error_ptr",))}
        options = {**_WHOLE, "SYMMETRIC": False, "PIECE": losses.PIECE, "ROWS": losses.ROWS}
    constants = options | dict.fromkeys(absent & set(kernel.arg_names))
    return _built(kernel, sm, types, constants, warps, stages)


# other kernels of a block's work: name -> kernel, pointers that are not to float32, constants, warps
_SHARED = {"info_ptr": "*i32", "order_ptr": "*i64", "shrink_ptr": "*fp64", "parts_ptr": "*fp64", "found_ptr": "*fp64"}
_STORED = {"codes_ptr": "*i8", "scales_ptr": "*fp16", "scale_ptr": "*fp16", "zeros_ptr": "*i8", "zero_ptr": "*i8"}
_FEW = {"TILE": losses.TILE, "AT_ONCE": losses.AT_ONCE}
BLOCK: dict[str, tuple[Any, dict[str, str], dict[str, Any], int]] = {
    "moments": (
        statistics.column_moments,
        {"parts_ptr": "*fp32"},
        {"ROWS": statistics.ROWS, "COLUMNS": statistics.COLUMNS},
        statistics.WARPS,
    ),
    "moments joined": (
        statistics.joined_moments,
        {"parts_ptr": "*fp32", "before_sums_ptr": "*fp64", "sums_ptr": "*fp64"},
        {"PARTS": statistics.PARTS, "COLUMNS": statistics.COLUMNS},
        statistics.WARPS,
    ),
    "fit by turns": (
        search.fit_by_turns,
        {"scale_ptr": "*fp16", "best_ptr": "*fp16", "zero_ptr": "*i8", "shift_ptr": "*i8"},
        {**_WHOLE, "ROWS": search.FIT_ROWS, "PIECE": search.FIT_PIECE},
        search.FIT_WARPS,
    ),
    "sizes of tokens": (
        statistics.inverse_sizes_of_tokens,
        {},
        {"ROWS": statistics.ROWS, "COLUMNS": statistics.COLUMNS},
        statistics.WARPS,
    ),
    "sizes of inputs": (losses.shared_sizes, {"producers_ptr": "*i64"}, _FEW, losses.FEW),
    "powers of sizes": (losses.powers_of_sizes, {}, _FEW, losses.FEW),
    "least of costs": (losses.least_of, {"parts_ptr": "*fp32"}, {"PARTS": losses.PARTS}, losses.MANY),
    "norm absorbs": (losses.absorb_scales, {"index_ptr": "*i64"}, {**_FEW, "STORED": "bfloat16"}, losses.FEW),
    "chance": (statistics.apart_and_both, {}, {"SQUARE": statistics.SQUARE}, statistics.CHANCE_WARPS),
    "quotient": (
        statistics.quotient_of_sums,
        {},
        {"CAPPED": True, "PARTS": statistics.QUOTIENT_PARTS},
        statistics.WARPS,
    ),
    "damped": (gptq.damp_and_turn, {}, {"SQUARE": gptq.SQUARE, "AT_ONCE": gptq.AT_ONCE}, gptq.FACTOR_WARPS),
    "unit": (gptq.unit_and_pivots, {}, {"SQUARE": gptq.SQUARE}, gptq.FACTOR_WARPS),
    "stored codes": (
        stored.turn_codes,
        _STORED | {"scale_ptr": "*fp32", "zero_ptr": "*fp32"},
        {"SQUARE": stored.SQUARE},
        stored.WARPS,
    ),
    "codes read back": (
        stored.read_back,
        _STORED,
        {"ROWS": stored.ROWS, "COLUMNS": stored.COLUMNS, "book_ptr": None, "whole_ptr": None},
        stored.WARPS,
    ),
}


def compiled_of_block(name: str, sm: int) -> CompiledKernel:
    """Compile one of `BLOCK`."""
    kernel, types, constants, warps = BLOCK[name]
    return _built(kernel, sm, _SHARED | types, constants, warps, 3)


def _built(
    kernel: Any, sm: int, types: dict[str, str], constants: dict[str, Any], warps: int, stages: int
) -> CompiledKernel:
    """Compile a kernel; by default pointers are to float32, and numbers are integers."""
    floats = {"low", "high", "least", "most", "shrink", "share", "offset", "tokens", "first_count", "second_count"}
    floats |= {"norm", "beta", "growth"}
    signature = {
        name: "constexpr"
        if name in constants
        else types.get(name, "*fp32" if name.endswith("_ptr") else "fp32" if name in floats else "i32")
        for name in kernel.arg_names
    }
    even = [name for name, kind in signature.items() if kind[0] == "*" or name in ("N", "K", "GROUP", "length")]
    return machine_code(kernel, signature, constants, even, sm, {"num_warps": warps, "num_stages": stages})
