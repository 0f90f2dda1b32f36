"""Plans with known figures: bounds of real sizes on a real target, and the forecasts that a test asks for."""

from dataclasses import replace
from typing import Any

from quantkit import content
from quantkit.errors import InputError
from quantkit.model.sizes import configs
from quantkit.model.sizes.architecture import Architecture, Attention
from quantkit.planning import roofline
from quantkit.planning.forecast import TimedStep
from quantkit.planning.outlook import (
    Outlook,
    PlannedBatch,
    PlannedCell,
    PlannedMemory,
    PlannedRecipe,
    Recommendation,
    Workload,
)
from quantkit.planning.roofline import Cache, ModelStep, RooflineProduct
from quantkit.planning.traffic import RequestKind, Traffic
from quantkit.target import ComputeType, Target

BITS = {"bf16": 16.0, "fp8": 8.0, "int4": 4.3125}
COMPUTE: dict[str, ComputeType] = {"bf16": "bf16", "fp8": "fp8_e4m3", "int4": "bf16"}


def work(*batches: int, prompt: int = 1024, output: int = 256, rate: float | None = None) -> Workload:
    traffic = Traffic([RequestKind(prompt, output or 1)], rate)
    return Workload(batches, prompt, output, prompt + output, traffic, ["prompts of 1,024 tokens"])


WORK = work(1, 4, 16, 64)


def timed(bound: roofline.Bound, efficiency: float | None, because: str = "") -> TimedStep:
    least = bound.seconds
    if least is None:
        return TimedStep(bound, None, None, None, "the target has no figure for memory.read_bandwidth")
    if efficiency is None:
        return TimedStep(bound, least, None, None, "nothing was measured of this near here")
    interval = (least / min(1.0, 1.25 * efficiency), least / (0.75 * efficiency))
    return TimedStep(
        bound, least, least / efficiency, interval, because or "14 steps of 3 models measured on a GPU", True
    )


def candidate(
    label: str,
    architecture: Architecture,
    target: Target,
    workload: Workload = WORK,
    efficiency: float | None = 0.6,
    **more: Any,
) -> PlannedRecipe:
    """Make a recipe at its bounds; `efficiency` turns the bounds into forecasts."""
    form = label if label in BITS else "int4"
    head = [architecture.head] if architecture.head is not None else []
    products = [
        RooflineProduct(each, each.N * each.K * BITS[form] / 8, form, COMPUTE[form])
        for each in (*architecture.inside(), *head)
    ]

    def kept(each: Attention) -> float:
        return 2.0 * each.kv_heads * (each.head_dim + each.value_dim)

    cache = Cache("float16", kept)
    decodes = architecture.kind == "decoder"
    token = sum(kept(layer.attention) for layer in architecture.layers if layer.attention) if decodes else 0.0
    weights = sum(each.bytes * each.matrix.count for each in products)
    capacity = target.memory.capacity.number
    rows = []
    for batch in workload.batches:

        def bound(step: ModelStep) -> roofline.Bound:
            return roofline.bound(architecture, roofline.alike(products), cache, target, step, attention="bf16")

        prompts = bound(ModelStep(batch, workload.prompt))
        step = bound(ModelStep(batch, 1, workload.prompt + workload.output // 2)) if decodes else prompts
        held = batch * workload.context * token
        prefill = timed(prompts, efficiency) if decodes else None
        fits = None if capacity is None else weights + held + 2e9 <= capacity
        parts = {"weights": weights, "cache": held, "activations": 1.5e9, "runtime": 5e8}
        rows.append(PlannedBatch(batch, prefill, timed(step, efficiency), parts, fits))
    room = (capacity - weights - 2e9) if capacity is not None else None
    last = next((row for row in rows[::-1] if row.fits is not False), rows[0])
    memory = PlannedMemory(
        last.parts,
        last.batch,
        capacity,
        token,
        None if room is None or not token else max(0, int(room / token / workload.context)),
        None if room is None or not token else max(0, int(room / token / workload.batches[-1])),
        1,
        1 if room is None or room > 0 else 2,
    )
    known: dict[str, Any] = {
        "runtime": "vllm",
        "cells": [PlannedCell(form, f"{form} weights", "native", "vLLM documentation")],
    } | {"bits": None if form == "bf16" else BITS[form], "bytes": weights, "memory": memory, "rows": rows}
    return PlannedRecipe(label, {"bf16": "float", "int4": "int4-best"}.get(label, label), **(known | more))


def outlook(
    *labels: str,
    model: str = "llama-3-8b",
    target: str | Target = "h100",
    workload: Workload = WORK,
    efficiency: float | None = 0.6,
    **more: Any,
) -> Outlook:
    """Make a plan of these candidates; the last one is recommended."""
    architecture, where = configs.read(model), target if isinstance(target, Target) else Target.load(target)
    found = [candidate(each, architecture, where, workload, efficiency) for each in labels or ("bf16", "fp8", "int4")]
    reasons = ["a request (1024 tokens in, 256 out) takes 31 ms of the device at batch 64", "bf16: 58 ms, 1.9×"]
    known: dict[str, Any] = {
        "recommendation": Recommendation(found[-1].label, reasons),
        "notes": [f"assumed: {each}" for each in workload.assumed],
    }
    return Outlook(architecture, where, workload, found, **(known | more))


def refused(label: str = "nvfp4") -> PlannedRecipe:
    """Make a candidate that the target cannot run."""
    problem = InputError("target-cannot-run", where="h100", value="nvfp4 weights do not run in vllm", rule="SM 10.0 on")
    return PlannedRecipe(
        label, label, "vllm", [PlannedCell("nvfp4", "nvfp4 weights", "absent", "TensorRT docs")], problem=problem
    )


def with_first(found: Outlook, **changes: Any) -> Outlook:
    """Return the plan with its first candidate changed."""
    first, *others = found.candidates
    return replace(found, candidates=[replace(first, **changes), *others])


def unmeasured() -> Target:
    """Return a target whose figures `doctor` has yet to measure, even if this machine has measured them."""
    return Target.from_dict(content.read_yaml(content.find("export", "cpu-x86")), name="cpu-x86")
