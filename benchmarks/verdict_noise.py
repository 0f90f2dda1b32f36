"""Does a verdict ever ship what is no faster, and does it ship what is?

    python benchmarks/verdict_noise.py
    python benchmarks/verdict_noise.py --verdicts 50 --no-record

Noise is planted (`stats/slowdown.py`): steps of both sides vary log-normally, follow their neighbours, and some
are interrupted and take three times as long; a quiet machine, a busy one and a noisy one, with few blocks and with
many. Nothing differs in one half of the verdicts; in the other half the subject takes 1/1.3 of the time. Each verdict
is about batches 1, 4 and 16, by the one function that compile, measure and tax share. What the plain 95 % intervals
would have shipped stands beside it. Target: of the verdicts in which nothing differs at most one in 300 ships.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from harness.record import layout, parsing, record, show, verdicts

from quantkit.measurement.rows import Row
from quantkit.measurement.timing.latency import latency_row
from quantkit.measurement.verdict import MeasuredFormat, verdict
from quantkit.stats.abba import compare
from quantkit.stats.slowdown import Noise

NOISES = {"quiet": Noise(), "busy": Noise(0.05, 0.05, 3.0, 0.9), "noisy": Noise(0.2, 0.1, 3.0, 0.9)}
BLOCKS, BATCHES, FASTER = (4, 8, 24), (1, 4, 16), 1.3
WON = ("ship_it", "ship_up_to", "intervals")


def rows(noise: Noise, blocks: int, seed: int, faster: float) -> list[Row]:
    """A latency at each batch, of sides of which the subject is so many times as fast."""
    found = []
    for batch in BATCHES:
        ours, theirs = noise.night(np.random.default_rng([seed, batch, blocks]), blocks)
        timed = compare(ours / faster, theirs, resamples=999, seed=seed)
        common: dict[str, Any] = {"subject": "a", "batch": batch, "n": timed.n, "aa_spread": timed.aa_spread}
        found.append(latency_row("latency.decode_step", timed, "b", settings={}, flags=[], common=common))
    return found


def main() -> int:
    parser = parsing(__doc__)
    parser.add_argument("--verdicts", type=int, default=100, help="of each noise and number of blocks")
    options = parser.parse_args()
    table = []
    for name, noise in NOISES.items():
        for blocks in BLOCKS:
            counts = dict.fromkeys(("shipped", "plain", "found"), 0)
            for seed in range(options.verdicts):
                equal = rows(noise, blocks, seed, 1.0)
                plain = [row.model_copy(update={"aa_spread": None}) for row in equal]
                for what, measured in (
                    ("shipped", equal),
                    ("plain", plain),
                    ("found", rows(noise, blocks, seed, FASTER)),
                ):
                    counts[what] += verdict(MeasuredFormat("int4", measured), BATCHES).answer in WON
            table.append({"noise": name, "blocks": blocks, "verdicts": options.verdicts, **counts})
    columns = layout(
        "noise | blocks:d | verdicts:d | shipped:d | plain=by plain intervals:d | found=shipped of 1.3 times as fast:d"
    )
    show("verdicts in which nothing differs", table, columns)
    settings = {"batches": list(BATCHES), "faster": FASTER}
    claim = "of verdicts on planted noise in which nothing differs at most one in 300 ships something"
    record("verdict_noise", claim, table, settings)
    total, shipped = (sum(row[key] for row in table) for key in ("verdicts", "shipped"))
    return verdicts({f"{shipped} of {total} ship, at most one in 300": shipped <= total / 300})


if __name__ == "__main__":
    raise SystemExit(main())
