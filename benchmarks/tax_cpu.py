"""What every way to store a weight costs in ONNX Runtime on this CPU, measured twice: does the table reproduce?

    python benchmarks/tax_cpu.py
    python benchmarks/tax_cpu.py --shapes 1024x1024 --batches 1 --seconds 30 --no-record

`quantkit tax --format all` on a few shapes, at 1 and 2 threads, in fresh processes and twice over with other seeds:
fp32, fp16, INT8 QDQ static and dynamic, MatMulNBits of 4 and 8 bits in blocks of 32, 64 and 128 at levels 0 and 4, INT4
DequantizeLinear that fuses and that does not, FP8, NF4. Each is checked against our own dequantization first. A row
reproduces if the second run's ratio lies within the printed spread of the first: the intervals of the two ratios
overlap. Targets: at least 90 of 100 rows do (two true intervals of 95 % overlap more often than that), the verdict for
nf4 is "do not", and for int4 at level 4 "ship", with its break-even batch.
"""

from __future__ import annotations

import re
import sys
from typing import Any

from harness.record import layout, parsing, record, show, verdicts

from quantkit.errors import QuantkitError
from quantkit.measurement.rows import Row
from quantkit.pipeline.tax import Question, TaxAnswer, measure_tax, prepare

# a small model's, a square of a 1B model, and one of a 3B model
SHAPES = ["576x1536", "2048x2048", "3072x8192"]
BATCHES = [1, 8, 64]
SHARE = 0.9
# 4 bits at level 4, in the largest group that every shape takes: what quantkit exports
SHIPPED = re.compile(r"int4\.g(\d+)\.level4")


def key(row: Row) -> tuple[Any, ...]:
    """What makes two rows of two runs the same measurement."""
    assert row.op is not None
    return row.settings["threads"], row.op.K, row.op.N, row.op.M, row.settings["variant"]


def ratios(found: TaxAnswer) -> dict[tuple[Any, ...], Row]:
    """The timed rows that have a ratio."""
    return {
        key(row): row for row in found.rows if row.name == "latency.op" and row.baseline and row.baseline.ratio_ci95
    }


def overlap(one: Row, other: Row) -> bool:
    """Whether the intervals of two ratios have a point in common."""
    first, second = (row.baseline.ratio_ci95 for row in (one, other) if row.baseline)
    assert first is not None and second is not None
    return first[0] <= second[1] and second[0] <= first[1]


def main() -> int:
    parser = parsing(__doc__)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="KxN")
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES, help="M, rows of the activation")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--formats", nargs="+", default=["all"])
    parser.add_argument("--seconds", type=float, default=300.0, help="of one run, without preparing")
    options = parser.parse_args()

    runs = []
    for seed in (0, 1):
        question = Question(
            shapes=options.shapes,
            formats=options.formats,
            batches=options.batches,
            threads=options.threads,
            seconds=options.seconds,
            seed=seed,
        )
        try:
            runs.append(measure_tax(prepare(question)))
        except QuantkitError as problem:
            print(problem.line(), file=sys.stderr)
            return problem.exit
        print(f"run {seed + 1} of 2 done", file=sys.stderr)
    first, second = (ratios(found) for found in runs)
    taxes = {key(row): row for row in runs[0].rows if row.name == "tax.total"}
    rows = []
    for same in [each for each in first if each in second]:
        one, other = first[same], second[same]
        assert one.baseline is not None and other.baseline is not None
        threads, K, N, M, name = same
        tax = taxes[same]
        rows.append(
            {"threads": threads, "K": K, "N": N, "M": M, "variant": name}
            | {"kernel": one.settings.get("kernel"), "us": 1e6 * (one.value or 0)}
            | {"float32_us": 1e6 * one.baseline.value, "ratio": one.baseline.ratio}
            | {"ratio_ci95": list(one.baseline.ratio_ci95 or ()), "again": other.baseline.ratio}
            | {"again_ci95": list(other.baseline.ratio_ci95 or ()), "promised": tax.settings.get("promised")}
            | {"tax_us": 1e6 * tax.value if tax.value is not None else None, "aa_spread": one.aa_spread}
            | {"n": one.n, "reproduced": overlap(one, other), "flags": one.flags}
        )
    columns = layout(
        "threads:d | K:d | N:d | M:d | variant | us=µs:.0f | ratio=times as fast:.2f | "
        "ratio_ci95=95 %:.2f | again:.2f | again_ci95=95 % again:.2f | promised=ideal:.2f | aa_spread=A/A:.3f | "
        "reproduced=within"
    )
    show("Single products against float32, in ONNX Runtime", rows, columns)
    ceilings = [
        {"run": i, "name": row.name, "value": row.value, "unit": row.unit, "settings": row.settings}
        for i, found in enumerate(runs)
        for row in found.rows
        if row.name.startswith("ceiling.")
    ]
    judged = [
        {"run": i, "threads": threads, "format": each.format, "answer": each.answer, "batch": each.batch}
        for i, found in enumerate(runs)
        for threads, verdicts_ in found.verdicts.items()
        for each in verdicts_
    ]
    ends = [
        {"run": i, "shape": f"{row.op.K}x{row.op.N}"}
        | {"variant": row.settings["variant"], "threads": row.settings["threads"]}
        | {"break_even": row.value, "ci95": row.ci95, "flags": row.flags}
        for i, found in enumerate(runs)
        for row in found.rows
        if row.name == "tax.break_even" and row.op is not None
    ]
    absent = [row for found in runs for row in found.rows if row.name == "latency.op" and row.value is None]
    skipped = sorted({(str(row.settings.get("variant")), *row.flags) for row in absent})
    settings = {"seconds": options.seconds, "note": options.note, "ceilings": ceilings, "verdicts": judged}
    settings |= {"break_even": ends, "skipped": [list(each) for each in skipped]}
    record("tax_cpu", "the CPU table of quantkit tax reproduces", rows, settings)
    held = sum(row["reproduced"] for row in rows)
    groups = [int(match[1]) for each in judged if (match := SHIPPED.fullmatch(each["format"]))]
    shipped = f"int4.g{max(groups, default=0)}.level4"
    print(f"{held} of {len(rows)} rows within the printed spread; skipped: {skipped}")
    for each in judged:
        if each["format"] in (shipped, "nf4.g64"):
            about = f"run {each['run'] + 1}, {each['threads']} threads: {each['format']}"
            print(f"  {about} {each['answer']} {each['batch'] or ''}")
    of = {name: [each["answer"] for each in judged if each["format"] == name] for name in ("nf4.g64", shipped)}
    return verdicts(
        {
            "at least 90 of 100 rows reproduce": held >= SHARE * len(rows),
            "the verdict for nf4 is do not": set(of["nf4.g64"]) == {"do_not_quantize"},
            f"the verdict for {shipped} is ship": bool(of[shipped])
            and all(answer.startswith("ship") for answer in of[shipped]),
        }
    )


if __name__ == "__main__":
    raise SystemExit(main())
