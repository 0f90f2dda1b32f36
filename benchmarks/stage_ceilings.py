"""Work of each stage of a compile from shapes, the least time that it takes, and the time that it took on SmolLM2.

    python benchmarks/stage_ceilings.py                        measures SmolLM2 (a minute a recipe), counts 8B and 70B
    python benchmarks/stage_ceilings.py --recipes gptq-int4 --models qwen3-30b-a3b

    least time of a stage = max(operations / rate of products, bytes / rate of memory)

On one core of this machine both rates are measured before and after the compile; two cores take half of the time at
best. On an H200 they are those of `export/h200.yaml`: no stage is as fast. Eight of them share the sequences and the
rows; each one reads all weights and factors all Hessians. Opening and the proof of the stream are left out.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from harness.process import helper
from harness.record import layout, parsing, record, show

from quantkit.model.sizes import configs
from quantkit.model.sizes.architecture import BlockShapes
from quantkit.planning.compiling import OUTWARD, CompileSpec, described, elements, predict, shared
from quantkit.recipe import Recipe
from quantkit.target import Target

# NVIDIA's data sheet of the H200 SXM: PCIe Gen5 128 GB/s, NVLink 900 GB/s, both ways together
PCIE, NVLINK, CARDS = 64e9, 450e9, 8
# values tried for each weight: 5 shorter ranges, min-max, one refinement; operations of one (scale, round, clamp twice,
# decode, subtract, square, weigh)
TRIED, EACH = 7, 8
# stages that every rank does for itself, or the first one for all
ALONE = ("read", "factors", "output factors", "write", "check", "score")
MODEL = "smollm2-135m"
FEW = ["calibration.samples=8", "calibration.tokens=512", "export=[{checkpoint: {layout: pack-quantized}}]"]


@dataclass
class Work:
    """Work of a stage: operations, bytes of memory, and whether its products are in bfloat16 where that pays."""

    operations: float = 0.0
    bytes: float = 0.0
    half: bool = False

    def least(self, rates: Mapping[str, float]) -> float:
        """The least seconds that it takes at these rates."""
        return max(self.operations / rates["bf16" if self.half else "fp32"], self.bytes / rates["memory"])


def attention(spec: CompileSpec, layer: BlockShapes, tokens: float) -> float:
    """Operations of a block's causal attention: half of its square."""
    kind = layer.attention
    return 0.0 if kind is None else tokens * spec.length * kind.heads * (kind.head_dim + kind.value_dim)


def forward(spec: CompileSpec, layer: BlockShapes, tokens: float, *, until: int | None = None) -> Work:
    """Work of a block's forward on so many tokens, up to a shared input."""
    done, groups = Work(), shared(layer)
    for number, group in enumerate(groups[:until]):
        for matrix in group:
            done.operations += 2 * tokens * matrix.active * matrix.N * matrix.K
            done.bytes += 4 * (matrix.count * matrix.N * matrix.K + tokens * matrix.active * (matrix.N + matrix.K))
        if number == 0:
            done.operations += attention(spec, layer, tokens)
    return done


def added(works: Iterator[Work], times: float = 1.0) -> Work:
    """The sum of some work."""
    found = list(works)
    return Work(times * sum(one.operations for one in found), times * sum(one.bytes for one in found))


def stages(spec: CompileSpec, *, at_once: bool = False) -> dict[str, Work]:
    """Work of every stage of a compile by its recipe.

    Args:
        at_once: whether the activations of all sequences fit, as on a GPU; else a block of a large model runs again up
            to each of its shared inputs, as on a processor.
    """
    model, found, tokens = spec.architecture, dict[str, Work](), float(spec.tokens)
    steps = {step.name: step.settings for step in spec.recipe.passes}
    gptq, awq, width = steps.get("gptq"), steps.get("awq"), 4 if model.dtype == "float32" else 2
    again = not at_once and spec.sequences > spec.chunk

    def put(stage: str, operations: float, moved: float, half: bool = False) -> None:
        one = found.setdefault(stage, Work(half=half))
        one.operations, one.bytes = one.operations + operations, one.bytes + moved

    for layer in model.layers:
        groups, weights = shared(layer), elements(layer.matrices)
        put("read", 0, (width + 4) * weights)
        runs = [forward(spec, layer, tokens)] if spec.sequences else []
        runs += [forward(spec, layer, tokens, until=number) for number in range(len(groups))] if again and runs else []
        whole = added(iter(runs))
        put("forwards", whole.operations, whole.bytes)
        if spec.corrected:
            put("float forwards", whole.operations, whole.bytes)
        for group in groups:
            first, rows = group[0], sum(matrix.N for matrix in group)
            K, times = first.K, first.count
            here, values, outward = tokens * first.active, times * rows * K, first.name.rpartition(".")[2] in OUTWARD
            if gptq is not None:
                put("sums", here * K * K, 4 * (here * K + times * K * K))
                put("factors", times * K**3 / 3, 8 * times * K * K)
                put("choosing", values * K, 4 * (2 * values + times * K * K))
            put("choosing", TRIED * EACH * values, 4 * values)  # its ranges
            if spec.corrected:
                # of an output that is added to a stream: how far it is behind, then its products with inputs
                sums = 4 * here * rows * K if outward else 2 * here * K * K
                put("sums", sums, 4 * (here * K + (values if outward else times * K * K)))
                put("factors", times * K**3 / 3, 8 * times * K * K)
                put("correction", (2 if outward else 4) * values * K, 4 * (2 * values + 2 * times * K * K))
            if awq is not None:
                few = float(min(awq.sequences or spec.sequences, spec.sequences) * spec.length * first.active)
                put("scales", few * K * K + times * K**3 / 3, 4 * (few * K + 2 * times * K * K))
                put("scales", (awq.grid + 1) * EACH * values, 4 * values)
        if awq is not None:
            few = float(min(awq.sequences or spec.sequences, spec.sequences) * spec.length)
            run = forward(spec, layer, few, until=len(groups) - 1)
            put("scales", run.operations, run.bytes)
        if spec.gradients:
            graded = float(spec.gradients * spec.length)
            for matrix in layer.matrices:
                N, K, times = matrix.N, matrix.K, matrix.count
                put("output factors", graded * matrix.active * N * N + times * N**3 / 3, 12 * times * N * N)
                put("choosing", times * (N * N * K + 2 * N * K * K), 4 * times * N * N)
            run = forward(spec, layer, graded)  # once, then again with its backward, of inputs alone
            put("gradients", 3 * run.operations + attention(spec, layer, graded), 3 * run.bytes / 2, half=True)
    head = model.head.N * model.head.K if model.head is not None else 0
    if spec.gradients:
        put("gradients", 4 * spec.gradients * spec.length * head, 4 * head, half=True)
    if gptq is None and not spec.sequences:
        del found["forwards"]
    disk = predict(spec).disk
    put("write", 0, disk.work + disk.bundle)
    weights = sum(elements(layer.matrices) for layer in model.layers)
    put("check", 0, 16 * weights)  # expanded by quantkit and by the layout's library, then compared
    scored = added(forward(spec, layer, float(spec.scored)) for layer in model.layers)
    put("score", 2 * (scored.operations + 2 * spec.scored * head), 2 * (scored.bytes + 4 * head))
    return found


def travelling(spec: CompileSpec, ranks: int = CARDS) -> tuple[float, float]:
    """Bytes that a rank sends of its sums, and of the codes that it has chosen for the others."""
    sums, codes = 0.0, 0.0
    for layer in spec.architecture.layers:
        for group in shared(layer):
            K, times, rows = group[0].K, group[0].count, sum(matrix.N for matrix in group)
            beside = 4 * K * (rows if group[0].name.rpartition(".")[2] in OUTWARD else K) if spec.corrected else 0
            sums += math.log2(ranks) * times * (2 * K * K + beside)  # the upper half, in a swap for each level
            codes += times * rows * K / ranks
    return sums, codes


def specified(model: str, recipe: str, changes: list[str]) -> CompileSpec:
    """Sizes of one compile."""
    return described(configs.read(model), Recipe.load(recipe, changes))


def card(*, tf32: bool = False) -> dict[str, float]:
    """Rates of an H200; products are in float32 unless `--tf32` is given, gradients in bfloat16."""
    target = Target.load("h200")
    fp32 = target.compute["tf32" if tf32 else "fp32"].number
    return {"fp32": fp32, "bf16": target.compute["bf16"].number, "memory": target.memory.read_bandwidth.number}


def least(spec: CompileSpec, rates: Mapping[str, float], ranks: int = 1) -> dict[str, float]:
    """The least seconds of each stage on one card or several."""
    found = {
        stage: work.least(rates) / (1 if stage in ALONE else ranks)
        for stage, work in stages(spec, at_once=True).items()
    }
    found["read"] = max(found["read"], spec.architecture.parameters * 2 / PCIE)
    if ranks > 1:
        sums, codes = travelling(spec, ranks)
        found["between ranks"] = sums / NVLINK + codes * ranks / PCIE  # codes go through the host, to all
    return found


def main() -> None:
    parser = parsing(__doc__)
    parser.add_argument("--models", nargs="*", default=["llama-3-8b", "llama-3-70b"])
    parser.add_argument("--recipes", nargs="+", default=["gptq-int4", "awq-int4", "int4-best"])
    asked, rows, slower = parser.parse_args(), list[dict[str, Any]](), dict[str, dict[str, float]]()
    core: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as place:
        for recipe in asked.recipes:
            request = {"model": MODEL, "recipe": recipe, "changes": FEW, "out": f"{place}/{recipe}"}
            told, _ = helper("stage_side.py", request, threads=1)
            core = {kind: max(rate, core.get(kind, 0.0)) for kind, rate in told["rates"].items()}
            took = told["stages"] | {"check": told["stages"]["export"] + told["stages"]["check"]}
            works = stages(specified(MODEL, recipe, FEW))
            slower[recipe] = {stage: took[stage] / work.least(core) for stage, work in works.items() if stage in took}
            for stage, work in works.items():
                found = {"bound": work.least(core), "took": took.get(stage), "times": slower[recipe].get(stage)}
                rows.append({"model": MODEL, "recipe": recipe, "stage": stage, **vars(work), **found})
            rows.append({"model": MODEL, "recipe": recipe, "stage": "rest of the blocks", "took": took["rest"]})
            for model in asked.models:
                spec = specified(model, recipe, FEW[-1:])
                works, one = stages(spec), least(spec, card())
                # ranks refuse gradients
                ungraded = ["gptq.gradients=0"] if spec.gradients else []
                eight = least(specified(model, recipe, FEW[-1:] + ungraded), card(), CARDS)
                for stage in dict.fromkeys((*works, *eight)):
                    work = works.get(stage, Work())
                    found = {"bound": work.least(core), "h200": one.get(stage), "eight": eight.get(stage)}
                    found["took"] = found["bound"] * slower[recipe].get(stage, 1.0)  # by what SmolLM2 took
                    rows.append({"model": model, "recipe": recipe, "stage": stage, **vars(work), **found})
    for row in rows:
        row |= {"giga": row.get("operations", 0.0) / 1e9, "gb": row.get("bytes", 0.0) / 1e9}
    columns = "model | recipe | stage | giga=Gop:,.0f | gb=GB:,.1f | bound=least, one core s:,.2f"
    columns += " | took=CPU s:,.2f | times:.1f | h200=least, H200 s:.2f | eight=8 of them s:.2f"
    show("stages of a compile; seconds of large models are foretold", rows, layout(columns))
    settings = {"set": FEW, "core": core, "slower": slower, "h200": card()}
    record("stage_ceilings", "no claim: work and least time of the stages of a compile", rows, settings)


if __name__ == "__main__":
    main()
