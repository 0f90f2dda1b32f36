"""What a kernel becomes on a GPU that is not at hand: compiled ahead of time, its machine code read.

Triton compiles for any target, and ships ptxas and the disassembler: registers, shared memory, spills, and which
instructions the inner loop is made of, with no GPU and no driver. It says nothing about speed.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.kernels.dispatch import Config
from quantkit.kernels.layout import KINDS

# threads that share a multiprocessor's registers, in warps
_LANES = 32
# the first architecture whose kernels overlap
_OVERLAPS = 90
_LINE = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*)$")
_LABEL = re.compile(r"^(\.L_\w+):")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
# whether K is split -> sums and counters
_SPLIT: dict[bool, dict[str, str | None]] = {
    False: {"sums_ptr": None, "count_ptr": None},
    True: {"sums_ptr": "*fp32", "count_ptr": "*i32"},
}


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel for one architecture.

    Args:
        sm: 80, 89, 90.
        registers: a thread.
        shared_bytes: a program.
        spill_bytes: local memory a thread; 0 unless registers did not suffice.
        loop: instructions of the loop around the matrix products, by their whole names.
        code: instructions of all of it.
    """

    sm: int
    registers: int
    shared_bytes: int
    spill_bytes: int
    loop: Mapping[str, int]
    code: Mapping[str, int]

    def count(self, *starts: str, loop: bool = True) -> int:
        """Count the instructions whose name begins with one of `starts`."""
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
    """Compile the kernel of `matmul` for a weight whose sizes are whole tiles.

    Args:
        kind: of the weight, in `matmul.DECODERS`.
        group: columns that share a scale; 0: a row.
        zero: with zero points.
        nested: scales that are quantized themselves.
        scale: type of the scale: fp16, bf16, fp32.
        x: of the activations: fp16, bf16.
        decode: False is the raw twin.
    """
    from quantkit.kernels import matmul
    from quantkit.kernels.decoders import DECODERS

    decoder = DECODERS[kind]
    types = {"x_ptr": f"*{x}", "words_ptr": "*i32", "y_ptr": f"*{x}", "zero_ptr": "*u8" if zero else None}
    types |= {"scale_ptr": "*u8" if nested else f"*{scale}", **_SPLIT[config.split > 1]}
    types |= dict.fromkeys(("absmax_ptr", "values_ptr", "offset_ptr"), "*fp32" if nested else None)
    types |= dict.fromkeys(("M", "N", "K", "TILES", "STRIDE", "GROUPS", "magic"), "i32")
    constants = {"decode": decoder.decode, "DECODE": decode, "GAIN": decoder.GAIN, "GROUP": group, "ON_GPU": True}
    constants |= {"COLUMNS": KINDS[kind].columns, "UNROLL": config.unroll}
    return _compile(matmul.weight_only_matmul, types, constants, sm, config)


def native(sm: int, config: Config, x: str) -> CompiledKernel:
    """Compile the kernel of `native`; `x` is `i8` or `fp8e4nv`."""
    from quantkit.kernels import native as module

    types: dict[str, str | None] = {"x_ptr": f"*{x}", "words_ptr": f"*{x}", "y_ptr": "*fp16"}
    types |= {**dict.fromkeys(("step_ptr", "scale_ptr"), "*fp32"), **_SPLIT[config.split > 1]}
    types |= dict.fromkeys(("M", "N", "K"), "i32")
    return _compile(module.native_matmul, types, {"STEP": 32 * config.unroll}, sm, config)


def _compile(
    kernel: Any, types: Mapping[str, str | None], constants: Mapping[str, Any], sm: int, config: Config
) -> CompiledKernel:
    blocks = {"EVEN_N": True, "EVEN_K": True, "BLOCK_N": config.block_n, "BLOCK_M": config.block_m}
    blocks |= {"SPLIT": config.split, "OVERLAP": sm >= _OVERLAPS}
    known = blocks | dict(constants) | {name: None for name, kind in types.items() if kind is None}
    signature = {name: "constexpr" if name in known else types[name] for name in kernel.arg_names}
    # what Triton finds at a call: pointers and sizes of real weights are multiples of 16; M is any number
    even = [name for name, kind in signature.items() if name != "M" and kind != "constexpr"]
    options = {"num_warps": config.warps, "num_stages": config.stages, "launch_pdl": sm >= _OVERLAPS}
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
        even: arguments that are multiples of 16.
        options: of the launch.
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
    """Registers, spills and instructions of a compiled kernel."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = _tool("cuobjdump", "-res-usage", str(path))
        # what it would find out of the flow is of older GPUs: a quarter of its time, and not a letter of its output
        lines = _tool("nvdisasm", "-ndf", "-c", str(path)).splitlines()
    found = re.search(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump says nothing of registers: {usage!r:.200}")
    code = Counter(match[1] for line in lines if (match := _LINE.match(line)))
    spills = sum(n for name, n in code.items() if name.startswith(("LDL", "STL")))
    local = max(int(found[2]), int(found[3]), 4 * spills)
    return CompiledKernel(sm, int(found[1]), shared, local, _loop(lines), code)


def _loop(lines: list[str]) -> Counter[str]:
    """Instructions between a label and a jump back to it, of the shortest such stretch with a matrix product."""
    at: dict[str, int] = {}
    best: Counter[str] = Counter()
    for number, line in enumerate(lines):
        if label := _LABEL.match(line):
            at[label[1]] = number
        match = _LINE.match(line)
        target = _TARGET.search(line)
        if match and match[1].startswith("BRA") and target and target[1] in at:
            body = Counter(m[1] for inner in lines[at[target[1]] : number] if (m := _LINE.match(inner)))
            if any("MMA" in name for name in body) and (not best or body.total() < best.total()):
                best = body
    return best


def _tool(name: str, *arguments: str) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([str(path), *arguments], capture_output=True, text=True, check=True).stdout  # noqa: S603
