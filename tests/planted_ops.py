"""A bench with planted times, on a clock that only steps move, and the rows that follow."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quantkit.errors import InputError
from quantkit.measurement.operators import products as ops
from quantkit.measurement.operators import run as ops_rows
from quantkit.measurement.operators.ceilings import Ceiling
from quantkit.measurement.operators.products import SweepPlan
from quantkit.measurement.operators.run import Setting
from quantkit.measurement.operators.tax import Limits, StepCost
from quantkit.measurement.rows import Row
from quantkit.model.sizes.shapes import LinearShape

READ, FP32, INT8, LAUNCH = 10e9, 100e9, 400e9, 8e-6
LIMITS = Limits(READ, {"fp32": FP32, "int8": INT8})
UP, DOWN = LinearShape(name="up", K=1024, N=4096, count=2), LinearShape(name="down", K=4096, N=1024, count=1)
DEVICE = {"id": "x", "kind": "cpu", "name": "a processor"}
SETTING = Setting("onnxruntime", 2, DEVICE, {}, LIMITS, LAUNCH, 2**25, "float32")
CARD = {"id": "gpu-nvidia-h200", "kind": "gpu", "name": "NVIDIA H200"}
ON_GPU = Setting(
    "torch", None, CARD, {"torch": "2"}, Limits(READ, {"bf16": FP32, "int8": INT8}), LAUNCH, 2**25, "bfloat16"
)


@dataclass
class World:
    """Clock that only steps move, with the noise of a machine."""

    now: float = 0.0
    noise: float = 0.01
    rng: Any = field(default_factory=lambda: np.random.default_rng(0))

    def __call__(self) -> float:
        return self.now


def always(M: int) -> bool:
    return True


@dataclass
class FakeSide:
    world: World
    cost: StepCost
    seconds: Any  # M -> seconds of one product
    together: int = 1
    fits: Any = always
    resident_bytes: int | None = 5
    kernel: str = "fake"

    def settings(self, M: int) -> dict[str, Any]:
        tiles = {"config.block_n": 64, "config.block_m": 16} if self.kernel == "quantkit" else {}
        return {"kernel": self.kernel, **tiles}

    def step(self, M: int) -> Any:
        if not self.fits(M):
            raise InputError("out-of-memory", where=f"batch {M}")

        def one() -> None:
            noise = float(np.exp(self.world.noise * self.world.rng.normal()))
            self.world.now += self.together * self.seconds(M) * noise

        return one

    def products(self, M: int) -> int:
        return self.together

    def hot(self, M: int) -> Any:
        return None


def cost(linear: LinearShape, bits: float, kind: Any = "fp32", name: str = "int4") -> StepCost:
    weights = linear.K * linear.N
    io = 4.0 * (linear.K + linear.N)
    return StepCost(name, weights * bits / 8, flops_per_token=2.0 * weights, io_bytes_per_token=io, compute=kind)


@dataclass
class FakeBench:
    world: World
    times: Any  # variant -> (M -> seconds of a product)
    absent: dict[str, str] = field(default_factory=dict)
    products: int = 1
    fits: Any = always
    kernel: str = "fake"
    side: type[FakeSide] = FakeSide

    def quantizer(self, variant: str) -> str:
        return "quantize" if variant.startswith("int8") else ""

    def twin(self, variant: str) -> str:
        return f"{variant} raw" if f"{variant} raw" in self.times else ""

    def prepare(self, linear: LinearShape, variants: Any, batches: Any) -> dict[str, Any]:
        bits: dict[str, Any] = {"float32": (32, "fp32", "float32"), "quantize": (0, "fp32", "")}
        bits |= {"bfloat16": (16, "bf16", "bfloat16")}
        bits |= {name: (8.0, "int8", "int8") for name in variants if name.startswith("int8")}
        bits |= {name: (4.5, "fp32", "nf4") for name in variants if name.startswith("nf4")}
        found: dict[str, Any] = {}
        for name in variants:
            own = cost(linear, *bits.get(name, (4.5, "int8", "int4")))
            side = self.side(self.world, own, self.times[name], self.products, self.fits, kernel=self.kernel)
            found[name] = self.absent.get(name) or side
        return found


def sweep(
    times: Any,
    batches: Any = (1, 8, 64),
    linears: Any = (UP,),
    *,
    seconds: float = 0.0,
    world: World | None = None,
    baseline: str = "float32",
    bisections: int = 0,
    **more: Any,
) -> Any:
    """Time everything, in about ten blocks a cell unless more are allowed."""
    world = world or World()
    bench = FakeBench(world, {"quantize": lambda M: 1e-6, **times}, **more)
    variants = [name for name in times if name != baseline and not name.endswith(" raw")]
    plan = SweepPlan(batches, seconds or 0.1 * len(batches) * len(linears), bisections=bisections)
    return ops.measure(bench, linears, baseline, variants, plan, clock=world)


def falling(M: int) -> float:
    """Return a product's seconds: a quarter of a millisecond at M = 1, as slow as float32 at 16, slower beyond."""
    return float(1e-3 * 4 ** (np.log(M) / np.log(16) - 1))


TWO = {"float32": lambda M: 1e-3, "int4": falling}


def ceilings() -> list[Row]:
    found = [
        Ceiling("ceiling.read", "B/s", (READ,) * 7, {"threads": 2, "last_level_cache": 2**25}, {"bytes": 1}),
        Ceiling("ceiling.compute", "flop/s", (FP32,) * 7, {"compute_type": "fp32", "threads": 2}, {"M": 1}),
        Ceiling("ceiling.compute", "op/s", (INT8,) * 7, {"compute_type": "int8", "threads": 2}, {"M": 1}),
        Ceiling("ceiling.launch", "s", (LAUNCH,) * 7, {"threads": 2}, {"M": 1}),
    ]
    return [each.row(device=DEVICE, versions={"onnxruntime": "1"}) for each in found]


def rows_of_a_run(job: Any) -> list[Row]:
    """Return the rows of a run: int4 takes the time of `falling`, other formats eight times that of float32."""
    times = {name: falling if name.startswith("int4") else (lambda M: 8e-3) for name in job.variants}
    linears = [LinearShape.model_validate(dict(each)) for each in job.linears]
    if job.threads:
        timed = sweep({"float32": lambda M: 1e-3, **times}, job.batches, linears)
        return [*ceilings(), *ops_rows.rows(timed, SETTING, model=job.model)]
    # on a GPU a twin takes three quarters of its kernel's time
    raw = {f"{name} raw": lambda M, taken=taken: 0.75 * taken(M) for name, taken in times.items()}
    times = {"bfloat16": lambda M: 1e-3, **times, **raw}
    timed = sweep(times, job.batches, linears, baseline="bfloat16", kernel="quantkit")
    return [*ceilings(), *ops_rows.rows(timed, ON_GPU, model=job.model)]
