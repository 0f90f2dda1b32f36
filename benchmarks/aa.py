"""Is a thing ever called different from itself, and is a planted +10 % found?

    python benchmarks/aa.py
    python benchmarks/aa.py --comparisons 20 --no-record

The same comparison as everywhere (`quantkit/stats/abba.py`): randomised ABBA blocks, a ratio of medians with its 95 %
bootstrap interval. What is timed is a small product in ONNX Runtime, ten runs a step. In one half of the comparisons
both sides are that; in the other half one side runs it eleven times: +10 %, planted by counting, not by a clock. A
side is called different where the whole interval of the ratio lies beyond --margin, 2 %: an interval of 95 % that only
has to leave out 1 would call five in a hundred of equal sides different, and a smaller difference is nobody's concern.
Targets: of 200 equal pairs none is called different, and of 200 with +10 % at least 90 in 100 are.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable

import numpy as np
from harness.record import layout, parsing, record, show, verdicts
from harness.turns import in_turns

from quantkit.measurement.operators.onnxruntime import OnnxRuntimeBench
from quantkit.measurement.timing.schedule import Visit
from quantkit.model.sizes.shapes import LinearShape
from quantkit.stats.abba import Comparison, compare

LINEAR = LinearShape(name="product", K=256, N=256)
VARIANT = "int8.dynamic"
# runs of a side a step, and of the slower side
RUNS, SLOWER = 10, 11
SHARE = 0.9


def sides() -> tuple[Callable[[], object], Callable[[], object]]:
    """A step of ten runs, and one of eleven; short, so that most are not interrupted by what else runs here."""
    side = OnnxRuntimeBench(threads=1, cache=LINEAR.K * LINEAR.N // 4).prepare(LINEAR, [VARIANT], [1])[VARIANT]
    assert not isinstance(side, str), side
    one = side.step(1)

    def step(runs: int) -> Callable[[], object]:
        def repeated() -> None:
            for _ in itertools.repeat(None, runs):
                one()

        return repeated

    return step(RUNS), step(SLOWER)


def different(found: Comparison, margin: float) -> bool:
    """Whether the whole interval lies beyond the margin, on either side."""
    low, high = found.ratio_ci95
    return low > 1 + margin or high < 1 / (1 + margin)


def main() -> int:
    parser = parsing(__doc__)
    parser.add_argument("--comparisons", type=int, default=200, help="of each kind")
    parser.add_argument("--blocks", type=int, default=160, help="ABBA blocks a comparison")
    parser.add_argument("--margin", type=float, default=0.02, help="below this nobody cares")
    options = parser.parse_args()

    plain, slower = sides()
    began = time.perf_counter()
    kinds: dict[str, list[Comparison]] = {"the same": [], "10 % more work": []}
    for number in range(options.comparisons):
        # in turns: what else the machine does harms both kinds alike
        for kind, (name, other) in enumerate(zip(kinds, (plain, slower), strict=True)):
            generator = np.random.default_rng([number, kind])
            blocks = (options.blocks, options.blocks)
            first, second = in_turns((plain, other), blocks=blocks, seconds=0.0, generator=generator, visit=Visit(1, 1))
            kinds[name].append(compare(first, second, seed=number, resamples=999))
        if number % 20 == 19:
            print(f"{number + 1} of {options.comparisons}, {time.perf_counter() - began:.0f} s", file=sys.stderr)
    rows = []
    for name, found in kinds.items():
        ratios = np.array([each.ratio for each in found])
        called = [different(each, options.margin) for each in found]
        spans = [each.ratio_ci95[0] > 1 or each.ratio_ci95[1] < 1 for each in found]
        rows.append(
            {"side": name, "comparisons": len(found), "called_different": sum(called)}
            | {"interval_leaves_out_1": sum(spans), "ratio_p50": float(np.median(ratios))}
            | {"ratio_low": float(ratios.min()), "ratio_high": float(ratios.max())}
            | {"aa_spread_p50": float(np.median([each.aa_spread for each in found]))}
        )
    columns = layout(
        "side=other side | comparisons:d | called_different=called different:d | "
        "interval_leaves_out_1=interval leaves out 1:d | ratio_p50=ratio, median:.3f | ratio_low=least:.3f | "
        "ratio_high=largest:.3f | aa_spread_p50=A/A spread, median:.3f"
    )
    show(f"{LINEAR.label}, {VARIANT}, 1 thread, {options.blocks} blocks", rows, columns)
    settings = {"blocks": options.blocks, "margin": options.margin, "runs": RUNS, "note": options.note}
    settings |= {"seconds": time.perf_counter() - began}
    record("aa", "a thing is never called different from itself, +10 % is found", rows, settings)
    equal, planted = rows
    return verdicts(
        {
            "none of the equal pairs is called different": equal["called_different"] == 0,
            "+10 % is found in at least 90 of 100": planted["called_different"] >= SHARE * planted["comparisons"],
        }
    )


if __name__ == "__main__":
    raise SystemExit(main())
