"""Kernels compiled before anything runs, by many processes: each launch of a stage, made once where no GPU is needed.

What Triton (3.6, `compiler.get_cache_key`) looks a compiled kernel up by is Triton itself, the kernel's source with the
types of its arguments, constants and what divides by 16, ptxas, options and environment: of the device only its
architecture. So a launch of tensors on the CPU, under a driver that names the GPU's architecture and launches nothing,
leaves in the cache what the same launch on the GPU looks for. Sizes count only by what divides them: a weight of 256
rows stands for all whose rows the tiles divide, one of 272 for the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from parts import attending, solvers
from parts.shapes import DTYPES, FIRST_SETTINGS, IN_WHOLE, INT4, PROFILED, SWEPT, VARIANTS, checked, settings
from quantkit.kernels.attention import sizes, split_kv, splits_of
from quantkit.kernels.dispatch import Config
from quantkit.kernels.layout import PackedWeight
from quantkit.kernels.matmul import dequantize, weight_only
from quantkit.kernels.native import native, quantize_tokens
from quantkit.measurement.cuda.sides import FormatVariant, known, weight

# bytes of shared memory that a program may have
_SHARED = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448}
_COLUMNS = 4096
# multiprocessors of an H100 or H200
_MANY = 132
# rows: whole tiles of every size, and not
_EVEN, _ODD = 256, 272
# tokens of a recipe's calibration, one text or all, and which of `solvers.SCHEMES` stands for its weights
_TOKENS, _COMPILED = (512, 16 * 512), "int4 zeros g128"
# a batch of each width of x, those of a whole model's first
_BATCHES = (8, 16, 64, 256, 32, 128)


class Compiler:
    """A driver of Triton's for an architecture: it compiles, and launches nothing.

    Args:
        sm: 80, 89, 90.
    """

    def __init__(self, sm: int) -> None:
        self.sm = sm
        self.utils = self

    def get_current_target(self) -> GPUTarget:
        """The architecture."""
        return GPUTarget("cuda", self.sm, 32)

    def get_current_device(self) -> int:
        """There is one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Nothing is launched."""
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        """What a kernel is held to before it is loaded."""
        return {"max_shared_mem": _SHARED.get(self.sm, max(_SHARED.values()))}

    def load_binary(self, *_: Any) -> tuple[None, None, int, int, int]:
        """Module, function, registers, spills, threads."""
        return None, None, 0, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """Launches nothing. The C that does is compiled where its library is: the same cache keeps it."""
        from triton.backends.nvidia.driver import CudaLauncher

        with suppress(Exception):
            CudaLauncher(source, metadata)
        return lambda *_: None


@dataclass(frozen=True)
class Launch:
    """One kernel to compile.

    Args:
        what: `product`, `tokens`, `expanded` or `attention`; `solver`, all kernels of one of `solvers.names`; `block`,
            all of a block's own.
        variant: of the weight.
        dtype: of x.
        even: whether tiles divide the weight's rows.
        config: of a product.
        batch: rows of x.
        decode: False: the raw twin.
        solver: of a block's work, on a weight of the scheme `variant`.
        case: of attention, with its splits.
    """

    what: str
    variant: str
    dtype: str
    even: bool = True
    config: Config | None = None
    batch: int = 16
    decode: bool = True
    solver: str = ""
    case: attending.Case | None = None


def launches(stages: Iterable[str], dtype: str, most: int | None = None) -> list[Launch]:
    """What the stages launch, each once, in the order in which it is wanted.

    Args:
        stages: names.
        dtype: of the sweep: `bf16`, `fp16`.
        most: settings of a width; None: all.
    """
    wanted: list[Launch] = []
    for stage in stages:
        wanted += _OF.get(stage, lambda dtype, most: [])(dtype, most)
    # one compilation serves every M
    first: dict[Launch, Launch] = {}
    for launch in wanted:
        first.setdefault(replace(launch, batch=0), launch)
    return list(first.values())


def _attention(cases: Iterable[attending.Case], dtypes: Iterable[str]) -> Iterator[Launch]:
    """Attention as an H100 or H200 splits it; lengths and batches share a compilation."""
    for case in cases:
        block = sizes(case.heads // case.kv_heads, case.size, case.value_size)["BLOCK"]
        splits = case.splits or splits_of(case.batch * case.kv_heads, case.room, block, _MANY)
        for dtype in dtypes:
            yield Launch(attending.NAME, "", dtype, case=replace(case, batch=2, length=1, room=16, splits=splits))


def _correct(dtype: str, most: int | None) -> Iterator[Launch]:
    yield from _attention(attending.CASES, DTYPES)
    for variant in VARIANTS:
        for each in DTYPES:
            for batch in (8, 16, 64, 256, 32):
                for config in checked(variant, batch):
                    yield Launch("product", variant.name, each, even=False, config=config, batch=batch)
            yield Launch("tokens" if variant.native else "expanded", variant.name, each, even=False)


def _race(dtype: str, most: int | None) -> Iterator[Launch]:
    yield from _attention(attending.RACED, (dtype,))
    for variant in VARIANTS:
        for batch in (8, 16, 64):
            for config in settings(variant, batch)[:most]:
                if config.split > 1 or config.whole_k:
                    yield Launch("product", variant.name, dtype, config=config, batch=batch)


def _sweep(dtype: str, most: int | None) -> Iterator[Launch]:
    """All of int4, then of the others the first settings of all widths: the sweep takes them in this order."""
    int4 = [variant for variant in VARIANTS[:SWEPT] if variant.name in INT4]
    rest = [variant for variant in VARIANTS[:SWEPT] if variant.name not in INT4]
    for mine, first in ((int4, True), (int4, False), (rest, True), (rest, False)):
        for variant in mine:
            yield Launch("tokens" if variant.native else "expanded", variant.name, dtype)
            for batch in _BATCHES:
                able = settings(variant, batch)[:most]
                for config in able[:FIRST_SETTINGS] if first else able[FIRST_SETTINGS:]:
                    for decode in (True,) if variant.native else (True, False):
                        yield Launch("product", variant.name, dtype, config=config, batch=batch, decode=decode)


def _steps(dtype: str, most: int | None) -> Iterator[Launch]:
    """Any setting may be the sweep's choice."""
    llama = attending.CASES[0]
    rooms = [(batch, context + 256) for batch in (1, 4, 16, 64) for context in (512, 4096)]
    yield from _attention((replace(llama, batch=batch, room=room) for batch, room in rooms), (dtype,))
    yield from (each for each in _sweep(dtype, most) if each.variant in IN_WHOLE and each.decode)


def _profile(dtype: str, most: int | None) -> Iterator[Launch]:
    yield from _attention(attending.CASES[:4], (dtype,))
    wanted = {name for name, _ in PROFILED.values()}
    yield from (e for e in _sweep(dtype, FIRST_SETTINGS) if e.variant in wanted and e.batch in (8, 16) and e.decode)


def _solvers(dtype: str, most: int | None) -> Iterator[Launch]:
    yield Launch("block", _COMPILED, "fp32", solver="damped as told")
    for name, scheme in solvers.SCHEMES.items():
        for solver in solvers.names(scheme["format"]):
            yield Launch("solver", name, "fp32", solver=solver)


def _model(dtype: str, most: int | None) -> Iterator[Launch]:
    """Of `gptq-int4`: in kernels one length of group divides by 16 as another does."""
    for solver in ("gptq", "damped by chance", "moments", "losses"):
        yield Launch("block", _COMPILED, "fp32", solver=solver)


_OF: dict[str, Callable[[str, int | None], Iterable[Launch]]] = {
    "correct": _correct,
    "race": _race,
    "sweep": _sweep,
    "steps": _steps,
} | {"profile": _profile, "solvers": _solvers, "model": _model}


def compiled(wanted: Sequence[Launch], sm: int, deadline: float) -> tuple[int, list[dict[str, Any]]]:
    """Makes each launch under `Compiler`.

    Args:
        wanted: launches.
        sm: of the GPU.
        deadline: `time.monotonic()` after which nothing new begins.

    Returns:
        how many were compiled, and `[{"launch", "reason"}]` of those that were not.
    """
    driver.set_active(Compiler(sm))
    done, failed = 0, []
    for launch in wanted:
        if time.monotonic() > deadline:
            failed.append({"launch": str(launch), "reason": "the time was up"})
            continue
        try:
            made(launch)
            done += 1
        except Exception as error:
            failed.append({"launch": str(launch), "reason": f"{type(error).__name__}: {error}"[:300]})
    return done, failed


def made(launch: Launch) -> None:
    """The launch."""
    if launch.what in ("solver", "block"):
        _solved(launch)
        return
    if launch.case is not None:
        *parts, seen = attending.drawn(launch.case, DTYPES[launch.dtype], "cpu")
        split_kv(*parts, seen, 1.0, splits=launch.case.splits)
        return
    variant, dtype = known()[launch.variant], DTYPES[launch.dtype]
    packed = _weight(variant, launch.even)
    x = torch.zeros(launch.batch, _COLUMNS, dtype=dtype)
    if launch.what == "tokens":
        quantize_tokens(x, variant.format)
    elif launch.what == "expanded":
        dequantize(packed, dtype)
        if not launch.even:
            dequantize(packed, torch.float32)
    elif variant.native:
        codes = torch.zeros(x.shape, dtype=torch.int8 if variant.format == "int8" else torch.float8_e4m3fn)
        assert launch.config is not None
        native(codes, torch.ones(launch.batch), packed, launch.config, dtype=dtype)
    else:
        assert launch.config is not None
        weight_only(x, packed, launch.config, decode=launch.decode)


def _solved(launch: Launch) -> None:
    """Kernels of the solvers, by their callers: nothing is computed, so that what they find means nothing."""
    from quantkit.kernels.solving.gptq import damped, unit_of
    from quantkit.kernels.solving.statistics import chance, moments_joined, moments_of_parts, quotient
    from quantkit.kernels.solving.stored import loss
    from quantkit.passes.solvers import device
    from quantkit.passes.solvers.factor import Factor
    from quantkit.passes.solvers.gptq import gptq_shared
    from quantkit.scheme import WeightScheme

    scheme = WeightScheme.model_validate(solvers.SCHEMES[launch.variant])
    weight, unit = torch.zeros(_EVEN, _EVEN), torch.eye(_EVEN)
    order = torch.arange(_EVEN)
    solved = Factor(unit, order, unit, torch.ones(_EVEN), 0.01, 0)
    with patch.object(device, "launched", lambda tensor: True):
        if launch.what == "solver":
            solvers.solve(launch.solver, weight, unit, solved, scheme)
        elif launch.solver == "gptq":
            gptq_shared([weight], solved, scheme)
        elif launch.solver == "moments":
            for tokens in _TOKENS:
                parts = moments_of_parts(torch.zeros(tokens, _EVEN), None)
                moments_joined(parts, *moments_joined(parts, None, None))
        elif launch.solver == "losses":
            codes = torch.zeros(weight.shape, dtype=torch.int8)
            scale = torch.zeros(_EVEN, 2, dtype=torch.float16)
            quotient(loss(weight, codes, scale, scale.to(torch.int8), None, None)[1], False)
        else:
            shrink = None
            if launch.solver == "damped by chance":
                shrink = quotient(chance(torch.stack([unit, unit]), list(_TOKENS), sum(_TOKENS)), True)
            damped(unit, order, torch.ones(_EVEN), shrink, 0.3 if shrink is None else 0.0, 0.01)
            unit_of(*torch.linalg.cholesky_ex(unit), order)


@cache
def _weight(variant: FormatVariant, even: bool) -> PackedWeight:
    return weight(variant, _EVEN if even else _ODD, _COLUMNS, "cpu")
