"""Compilation of a kernel for a GPU that is not present, and reading of its machine code.

Triton compiles for any target and ships ptxas and the disassembler. They give registers, shared memory, spills, and the
instructions of the inner loop, without a GPU or a driver. They say nothing about speed.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from quantkit.kernels.dispatch import Config
from quantkit.kernels.layout import KINDS

# threads of a warp
_LANES = 32
# first architecture with programmatic dependent launch
_OVERLAPS = 90
_LINE = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*)$")
_LABEL = re.compile(r"^(\.L_\w+):")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
# K is split -> types of sums and counters
_SPLIT: dict[bool, dict[str, str | None]] = {
    False: {"sums_ptr": None, "count_ptr": None},
    True: {"sums_ptr": "*fp32", "count_ptr": "*i32"},
}


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel for one architecture.

    Args:
        sm: architecture: 80, 89, 90.
        registers: registers per thread.
        shared_bytes: shared memory per program.
        spill_bytes: local memory per thread; 0 unless registers ran out.
        loop: full name -> count of the instructions in the loop around the matrix products.
        code: full name -> count of all instructions.
        early: full name -> count of the instructions before the wait for the previous kernel; empty without a wait.
        lead: full name -> count of the instructions of the loop before its first matrix product.
    """

    sm: int
    registers: int
    shared_bytes: int
    spill_bytes: int
    loop: Mapping[str, int]
    code: Mapping[str, int]
    early: Mapping[str, int]
    lead: Mapping[str, int]

    def programs(self, warps: int) -> int:
        """Return how many programs fit into the registers and threads of a multiprocessor."""
        wide = -(-self.registers // 8) * 8
        return min(65_536 // (wide * _LANES * warps), 2048 // (_LANES * warps))

    def count(self, *starts: str, loop: bool = True) -> int:
        """Count the instructions with one of these prefixes."""
        return sum(n for name, n in (self.loop if loop else self.code).items() if name.startswith(starts))


def weight_only(
    kind: str,
    sm: int,
    config: Config,
    *,
    group: int = 0,
    zero: bool = False,
    nested: bool = False,
    scale: str = "fp16",
    x: str = "fp16",
    decode: bool = True,
) -> CompiledKernel:
    """Compile the kernel of `matmul` for a weight whose sizes are multiples of the tile.

    Args:
        kind: format of the weight, in `matmul.DECODERS`.
        sm: architecture.
        config: tile sizes.
        group: columns that share a scale; 0 for a whole row.
        zero: True with zero points.
        nested: True for scales that are quantized themselves.
        scale: type of the scale: fp16, bf16, fp32.
        x: type of the activations: fp16, bf16.
        decode: False for the raw twin.
    """
    from quantkit.kernels import decode as whole
    from quantkit.kernels import matmul
    from quantkit.kernels.decoders import DECODERS

    decoder = DECODERS[kind]
    types = {"x_ptr": f"*{x}", "words_ptr": "*i32", "y_ptr": f"*{x}", "zero_ptr": "*u8" if zero else None}
    types |= {"scale_ptr": "*u8" if nested else f"*{scale}"}
    types |= dict.fromkeys(("absmax_ptr", "values_ptr", "offset_ptr"), "*fp32" if nested else None)
    types |= dict.fromkeys(("M", "N", "K", "TILES", "STRIDE", "GROUPS", "magic"), "i32")
    constants = {"decode": decoder.decode, "DECODE": decode, "GAIN": decoder.GAIN, "GROUP": group, "ON_GPU": True}
    constants |= {"COLUMNS": KINDS[kind].columns, "UNROLL": config.unroll}
    if not config.whole_k:
        types |= _SPLIT[config.split > 1]
        return _compile(matmul.weight_only_matmul, types, constants | {"SPLIT": config.split}, sm, config)
    types |= {"x_ptr": "*i32"}
    constants |= {"WARPS": config.warps, "RUN": whole.run_of(group, zero=zero)}
    return _compile(whole.whole_k_matmul, types, constants, sm, config)


def native(sm: int, config: Config, x: str) -> CompiledKernel:
    """Compile the kernel of `native`; `x` is `i8` or `fp8e4nv`."""
    from quantkit.kernels import native as module

    types: dict[str, str | None] = {"x_ptr": f"*{x}", "words_ptr": f"*{x}", "y_ptr": "*fp16"}
    types |= {**dict.fromkeys(("step_ptr", "scale_ptr"), "*fp32"), **_SPLIT[config.split > 1]}
    types |= dict.fromkeys(("M", "N", "K"), "i32")
    return _compile(module.native_matmul, types, {"STEP": 32 * config.unroll, "SPLIT": config.split}, sm, config)


def quantize(sm: int, x: str, *, whole: bool) -> CompiledKernel:
    """Compile the kernel of `native` that quantizes a token; `x` is `fp16` or `bf16`, `whole` True for int8."""
    from quantkit.kernels import native as module

    constants = {"REACH": 127.5 if whole else 448.0, "EPSILON": 2.0**-10, "WHOLE": whole, "BLOCK": 4096}
    constants["OVERLAP"] = sm >= _OVERLAPS
    types = {"x_ptr": f"*{x}", "code_ptr": "*i8", "step_ptr": "*fp32", "K": "i32"}
    options = {"num_warps": 8, "launch_pdl": sm >= _OVERLAPS}
    kernel = module.quantize_token
    return machine_code(kernel, types | dict.fromkeys(constants, "constexpr"), constants, types, sm, options)


def attention(sm: int, x: str, *, group: int = 4, size: int = 128, splits: int = 32) -> CompiledKernel:
    """Compile the kernel of `attention` for a cache of any length.

    Args:
        sm: architecture.
        x: type of queries, keys and values: fp16, bf16.
        group: query heads of a KV head.
        size: D, that of V too.
        splits: programs of a sequence and KV head.
    """
    from quantkit.kernels import attention as module

    kernel = module.split_attention
    constants = module.sizes(group, size, size) | {"SPLITS": splits, "ON_GPU": True, "OVERLAP": sm >= _OVERLAPS}
    types: dict[str, str | None] = dict.fromkeys(kernel.arg_names, "i32")
    types |= dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "y_ptr"), f"*{x}") | {"mask_ptr": "*u8", "scale": "fp32"}
    types |= {"sums_ptr": "*fp32", "count_ptr": "*i32"} if splits > 1 else {"sums_ptr": None, "count_ptr": None}
    known = constants | {name: None for name, kind in types.items() if kind is None}
    signature = {name: "constexpr" if name in known else kind for name, kind in types.items()}
    apart = ("S", "mask_batch", "scale", *known)
    options = {"num_warps": module.WARPS, "num_stages": module.STAGES, "launch_pdl": sm >= _OVERLAPS}
    return machine_code(kernel, signature, known, [name for name in signature if name not in apart], sm, options)


def _compile(
    kernel: Any, types: Mapping[str, str | None], constants: Mapping[str, Any], sm: int, config: Config
) -> CompiledKernel:
    blocks = {"EVEN_N": True, "EVEN_K": True, "BLOCK_N": config.block_n, "BLOCK_M": config.block_m}
    blocks |= {"OVERLAP": sm >= _OVERLAPS}
    known = blocks | dict(constants) | {name: None for name, kind in types.items() if kind is None}
    signature = {name: "constexpr" if name in known else types[name] for name in kernel.arg_names}
    # as at a real call: pointers and sizes of a weight are multiples of 16; M is any number
    even = [name for name, kind in signature.items() if name != "M" and kind != "constexpr"]
    options = {"num_warps": config.warps, "num_stages": max(config.stages, 1), "launch_pdl": sm >= _OVERLAPS}
    return machine_code(kernel, signature, known, even, sm, options)


def machine_code(
    kernel: Any,
    signature: Mapping[str, Any],
    constants: Mapping[str, Any],
    even: Iterable[str],
    sm: int,
    options: Mapping[str, Any],
) -> CompiledKernel:
    """Compile a kernel for an architecture and read its registers, spills and instructions.

    Args:
        kernel: the kernel.
        signature: type of each argument.
        constants: values of compile-time arguments.
        even: names of arguments that are multiples of 16.
        sm: architecture.
        options: options of the launch.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(kernel.arg_names)
    source = ASTSource(
        kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in even},
    )
    built = triton.compile(source, target=GPUTarget("cuda", sm, _LANES), options=options)
    return _read(built.asm["cubin"], sm, int(built.metadata.shared))


def _read(cubin: bytes, sm: int, shared: int) -> CompiledKernel:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = _tool("cuobjdump", "-res-usage", str(path))
        # -ndf skips a flow analysis for older GPUs: a quarter less time, the same output
        lines = _tool("nvdisasm", "-ndf", "-c", str(path)).splitlines()
    resources = re.search(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", usage)
    if resources is None:
        raise RuntimeError(f"cuobjdump reports no registers: {usage!r:.200}")
    names = [match[1] for line in lines if (match := _LINE.match(line))]
    code, loop = Counter(names), _loop(lines)
    spills = sum(n for name, n in code.items() if name.startswith(("LDL", "STL")))
    local = max(int(resources[2]), int(resources[3]), 4 * spills)
    early = Counter(names[: names.index("ACQBULK")] if "ACQBULK" in code else [])
    lead = Counter(takewhile(lambda name: "MMA" not in name, loop))
    return CompiledKernel(sm, int(resources[1]), shared, local, Counter(loop), code, early, lead)


def _loop(lines: list[str]) -> list[str]:
    """List the instructions of the shortest loop with a matrix product."""
    at: dict[str, int] = {}
    best: list[str] = []
    for number, line in enumerate(lines):
        if label := _LABEL.match(line):
            at[label[1]] = number
        match = _LINE.match(line)
        target = _TARGET.search(line)
        if match and match[1].startswith("BRA") and target and target[1] in at:
            body = [m[1] for inner in lines[at[target[1]] : number] if (m := _LINE.match(inner))]
            if any("MMA" in name for name in body) and (not best or len(body) < len(best)):
                best = body
    return best


def _tool(name: str, *arguments: str) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([str(path), *arguments], capture_output=True, text=True, check=True).stdout  # noqa: S603
