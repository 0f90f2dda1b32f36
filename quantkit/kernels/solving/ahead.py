"""The solvers' kernels compiled for GPUs that are not at hand, as they are launched there."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from quantkit.kernels.ahead import CompiledKernel, machine_code
from quantkit.kernels.solving import chance, choose, descend, factored, losses, moments, quotient, search, stored

# of whole numbers: their zero points, float16 scales that are exact in products with codes
_WHOLE = {"EVEN": 13, "HALF": 17}
_NO_TABLE = ("values_ptr", "edges_ptr")


def variants() -> dict[str, tuple[str, dict[str, Any]]]:
    """What is worth compiling: a name -> the kernel's, and the words of `compiled`."""
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
    """A kernel with the tiles that it is launched with.

    Args:
        name: `choose`, `descend`, `search` or `losses`.
        steps: of the search in a table of values; 0: whole numbers with zero points.
        length: columns that share a scale.
        blocks: measured by blocks of a Hessian, or by a whole one.
        precision: of products.
    """
    absent = {*(() if steps else _NO_TABLE), *(("zero_ptr",) if steps else ())}
    types, options, warps, stages = {"order_ptr": "*i64"}, {}, choose.WARPS, 3
    if name in ("choose", "descend"):
        module = choose if name == "choose" else descend
        kernel = choose.choose_rows if name == "choose" else descend.descend_rows
        options = {"STEPS": steps, "PRECISION": precision, "ROWS": module.ROWS, "CHUNK": module.CHUNK}
        options |= {"PANEL": choose.PANEL} if name == "choose" else {"BLOCK": descend.block_of(length)}
        options |= {} if name == "choose" else {**_WHOLE, "REFIT": not steps}
        stages = module.STAGES
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


# of the kernels that a block is worked on with beside the solvers: kernel, pointers that are not to float32, warps
_SHARED = {"info_ptr": "*i32", "order_ptr": "*i64", "shrink_ptr": "*fp64", "parts_ptr": "*fp64", "found_ptr": "*fp64"}
_STORED = {"codes_ptr": "*i8", "scales_ptr": "*fp16", "scale_ptr": "*fp16", "zeros_ptr": "*i8", "zero_ptr": "*i8"}
_FEW = {"TILE": losses.TILE, "AT_ONCE": losses.AT_ONCE}
BLOCK: dict[str, tuple[Any, dict[str, str], dict[str, Any], int]] = {
    "moments": (
        moments.column_moments,
        {"parts_ptr": "*fp32"},
        {"ROWS": moments.ROWS, "COLUMNS": moments.COLUMNS},
        moments.WARPS,
    ),
    "moments joined": (
        moments.joined_moments,
        {"parts_ptr": "*fp32", "before_sums_ptr": "*fp64", "sums_ptr": "*fp64"},
        {"PARTS": moments.PARTS, "COLUMNS": moments.COLUMNS},
        moments.WARPS,
    ),
    "fit by turns": (
        search.fit_by_turns,
        {"scale_ptr": "*fp16", "best_ptr": "*fp16", "zero_ptr": "*i8", "shift_ptr": "*i8"},
        {**_WHOLE, "ROWS": search.FIT_ROWS, "PIECE": search.FIT_PIECE},
        search.FIT_WARPS,
    ),
    "sizes of tokens": (
        moments.inverse_sizes_of_tokens,
        {},
        {"ROWS": moments.ROWS, "COLUMNS": moments.COLUMNS},
        moments.WARPS,
    ),
    "sizes of inputs": (losses.shared_sizes, {"producers_ptr": "*i64"}, _FEW, losses.FEW),
    "powers of sizes": (losses.powers_of_sizes, {}, _FEW, losses.FEW),
    "least of costs": (losses.least_of, {"parts_ptr": "*fp32"}, {"PARTS": losses.PARTS}, losses.MANY),
    "norm absorbs": (losses.absorb_scales, {"index_ptr": "*i64"}, {**_FEW, "STORED": "bfloat16"}, losses.FEW),
    "chance": (chance.apart_and_both, {}, {"SQUARE": chance.SQUARE}, chance.WARPS),
    "quotient": (quotient.quotient_of_sums, {}, {"CAPPED": True, "PARTS": quotient.PARTS}, quotient.WARPS),
    "damped": (factored.damp_and_turn, {}, {"SQUARE": factored.SQUARE, "AT_ONCE": factored.AT_ONCE}, factored.WARPS),
    "unit": (factored.unit_and_pivots, {}, {"SQUARE": factored.SQUARE}, factored.WARPS),
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
    """One of `BLOCK`."""
    kernel, types, constants, warps = BLOCK[name]
    return _built(kernel, sm, _SHARED | types, constants, warps, 3)


def _built(
    kernel: Any, sm: int, types: dict[str, str], constants: dict[str, Any], warps: int, stages: int
) -> CompiledKernel:
    """A kernel whose pointers are to float32, and whose numbers are whole, unless it is said otherwise."""
    floats = {"low", "high", "least", "most", "shrink", "share", "offset", "tokens", "first_count", "second_count"}
    floats |= {"norm", "beta", "growth"}
    signature = {
        each: "constexpr"
        if each in constants
        else types.get(each, "*fp32" if each.endswith("_ptr") else "fp32" if each in floats else "i32")
        for each in kernel.arg_names
    }
    names = list(kernel.arg_names)
    even = [each for each, kind in signature.items() if kind[0] == "*" or each in ("N", "K", "GROUP", "length")]
    source = ASTSource(
        kernel,
        signature=signature,
        constexprs={(names.index(each),): value for each, value in constants.items()},
        attrs={(names.index(each),): [["tt.divisibility", 16]] for each in even},
    )
    built = triton.compile(source, target=GPUTarget("cuda", sm, 32), options={"num_warps": warps, "num_stages": stages})
    return machine_code(built, sm)
