"""Does a busy machine make equal sides differ, and does it hide a factor of two?

    python benchmarks/busy.py
    python benchmarks/busy.py --comparisons 10 --load 2 --no-record

The verdict's rule (`SpeedUp` of `quantkit/stats/evidence.py`) on short comparisons, as a compile times one shape: five
rounds of 0.7 s. Meanwhile processes multiply matrices (--load), begun and ended by chance every second. In one half
both sides multiply a matrix by a vector six times; in the other half one side does it twelve times. Targets: of equal
pairs at most one in forty is decided; of pairs with a factor of two at least half are.
"""

from __future__ import annotations

import multiprocessing
import time
from functools import partial

import numpy as np
from harness.record import layout, parsing, record, show, verdicts

from quantkit.measurement.timing.schedule import BASELINE, SUBJECT, Step, Timing, Visit, interleave, runs_of, warm
from quantkit.stats.evidence import SpeedUp

RUNS, FACTOR, ROUNDS, SECONDS = 6, 2, 5, 0.7


def disturb(seed: int) -> None:
    """Multiply for a second, or sleep, by the toss of a coin."""
    generator = np.random.default_rng(seed)
    matrix = np.ones((600, 600), dtype=np.float32)
    while True:
        until = time.monotonic() + 1.0
        if generator.random() < 0.5:
            time.sleep(1.0)
        while time.monotonic() < until:
            matrix @ matrix


def times(runs: int) -> Step:
    """Return a step that multiplies a matrix by a vector so many times."""
    matrix, vector = np.ones((1500, 1500), dtype=np.float32), np.ones(1500, dtype=np.float32)

    def step() -> None:
        for _ in range(runs):
            matrix @ vector

    return step


def compared(steps: dict[str, Step], seed: int) -> SpeedUp:
    """Compare two sides as a compile does."""
    generator = np.random.default_rng(seed)
    longest = max(warm(step) for step in steps.values())
    visit = Visit.fitting(longest, runs=runs_of(longest))
    one_round = partial(interleave, steps, blocks=(2, 40), seconds=SECONDS, generator=generator, visit=visit)
    result = Timing.joined([one_round() for _ in range(ROUNDS)]).compared(SUBJECT, BASELINE, seed=seed)
    assert result is not None
    return SpeedUp(result.ratio, result.ratio_ci95, result.aa_spread, noisy="noisy" in result.flags)


def main() -> int:
    parser = parsing(__doc__)
    parser.add_argument("--comparisons", type=int, default=40, help="of each kind")
    parser.add_argument("--load", type=int, default=4, help="processes that disturb")
    options = parser.parse_args()
    others = [multiprocessing.Process(target=disturb, args=(seed,), daemon=True) for seed in range(options.load)]
    for other in others:
        other.start()
    rows = []
    for name, factor in (("equal", 1), ("a factor of two", FACTOR)):
        steps = {SUBJECT: times(RUNS), BASELINE: times(RUNS * factor)}
        speeds = [compared(steps, seed) for seed in range(options.comparisons)]
        sure = [speed for speed in speeds if not speed.interval[0] <= 1 <= speed.interval[1]]
        rows.append(
            {"sides": name, "comparisons": len(speeds), "noisy": sum(speed.noisy for speed in speeds)}
            | {"decided": len(sure), "decided_of_noisy": sum(speed.noisy for speed in sure)}
            | {"ratio_p50": float(np.median([speed.ratio for speed in speeds]))}
        )
    columns = layout(
        "sides | comparisons:d | noisy:d | decided:d | decided_of_noisy=of the noisy:d | ratio_p50=ratio, median:.2f"
    )
    show(f"{options.load} processes beside", rows, columns)
    settings = {"load": options.load, "rounds": ROUNDS, "seconds": SECONDS, "note": options.note}
    record("busy", "a busy machine decides no equal sides, and hides no factor of two", rows, settings)
    equal, planted = rows
    return verdicts(
        {
            "at most one in forty equal pairs is decided": 40 * equal["decided"] <= equal["comparisons"],
            "at least half of a factor of two are decided": 2 * planted["decided"] >= planted["comparisons"],
        }
    )


if __name__ == "__main__":
    raise SystemExit(main())
