"""Do repeated measurements agree within their printed intervals?

    python benchmarks/repeat.py BUNDLE [--times 4] [--seconds 40]

Times a bundle's ONNX against the float model several times over, the shapes of `quantkit measure --quick`, and compares
every pair of runs row by row: two rows agree if their printed intervals overlap, `ratio_ci95` for the ratio to the
baseline and `ci95` for the value itself. Claim: at least 90 of 100 rows agree.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

from harness.record import parsing, record, show, verdicts

from quantkit.bundle import Bundle
from quantkit.measurement.rows import Row
from quantkit.pipeline.measure import QUICK, measure, original_of

_LEAST = 0.9


def main() -> int:
    parser = parsing(__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--times", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=QUICK.seconds)
    options = parser.parse_args()
    bundle = Bundle.load(options.bundle)
    original = original_of(bundle, None, "onnxruntime")
    runs = []
    for number in range(options.times):
        plan = replace(QUICK, seconds=options.seconds, seed=number)
        rows, _ = measure(bundle, original, "onnxruntime", accuracy=False, plan=plan)
        runs.append({_key(row): row for row in rows if row.name.startswith(("latency.", "throughput."))})
        print(f"run {number + 1} of {options.times} done", flush=True)
    kinds = {"ratio": _ratio, "value": _value}
    table, shares = [], {}
    for kind, interval in kinds.items():
        agreed = [
            _overlap(interval(one[key]), interval(other[key]))
            for one, other in itertools.combinations(runs, 2)
            for key in one
            if interval(one[key]) is not None
        ]
        shares[kind] = sum(agreed) / len(agreed)
        table.append({"of": kind, "agree": sum(agreed), "pairs": len(agreed), "share": 100 * shares[kind]})
    measured = [
        {"row": " ".join(map(str, key)), "values": [run[key].value for run in runs]}
        | {"ci95": [_value(run[key]) for run in runs], "ratio_ci95": [_ratio(run[key]) for run in runs]}
        | {"aa_spread": [run[key].aa_spread for run in runs]}
        for key in runs[0]
    ]
    columns = {"of": "interval of the", "agree": "agree:d", "pairs": "of:d", "share": "%:.0f"}
    show(f"{options.times} runs of {options.bundle.name}, every pair, row by row", table, columns)
    claim = "repeated measurements agree within their printed intervals in at least 90 of 100 rows"
    settings = {"times": options.times, "seconds": options.seconds, "agree": shares}
    record("repeat", claim, measured, settings)
    return verdicts({f"{kind}: {share:.0%} of the rows agree": share >= _LEAST for kind, share in shares.items()})


def _key(row: Row) -> tuple[object, ...]:
    return row.name, row.batch, *sorted((row.shape or {}).items())


def _ratio(row: Row) -> tuple[float, float] | None:
    return row.baseline.ratio_ci95 if row.baseline else None


def _value(row: Row) -> tuple[float, float] | None:
    return row.ci95


def _overlap(one: tuple[float, float] | None, other: tuple[float, float] | None) -> bool:
    return one is not None and other is not None and one[0] <= other[1] and other[0] <= one[1]


if __name__ == "__main__":
    raise SystemExit(main())
