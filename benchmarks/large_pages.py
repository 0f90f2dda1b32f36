"""Large tensors in pages of 2 MB against pages of 4 kB: what `THP_MEM_ALLOC_ENABLE`, which the command sets, is worth.

    python benchmarks/large_pages.py [--million 60] [--rounds 5]

Claim: where the system gives large pages on request, making a large tensor takes less time with them. Each side is a
process of its own, in turns; seconds are medians over rounds of each process's median.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness.record import parsing, record, show, verdicts

_GIVEN = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_SIDE = """
import json, sys, time, torch
torch.set_num_threads(2)
x = torch.randn(int(sys.argv[1]) * 10**6)
def median(run):
    taken = []
    for _ in range(7):
        begin = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begin)
    return sorted(taken)[3]
ways = {"a sum": lambda: x + 1, "a copy": lambda: x.clone(), "rounded to bfloat16": lambda: x.bfloat16()}
print(json.dumps({name: median(run) for name, run in ways.items()}))
"""


def main() -> int:
    """Time, record."""
    parser = parsing(__doc__)
    parser.add_argument("--million", type=int, default=60, help="numbers of the tensor, in float32")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    taken: dict[str, list[dict[str, float]]] = {"0": [], "1": []}
    for _ in range(args.rounds):
        for large, found in taken.items():
            environment = {**os.environ, "THP_MEM_ALLOC_ENABLE": large}
            command = [sys.executable, "-c", _SIDE, str(args.million)]
            found.append(json.loads(subprocess.check_output(command, env=environment)))
    rows: list[dict[str, Any]] = []
    for name in taken["0"][0]:
        small, large = (statistics.median(each[name] for each in taken[side]) for side in taken)
        rows.append({"what": name, "small": small, "large": large, "ratio": large / small})
    columns = {"what": "what", "small": "4 kB, s:.3f", "large": "2 MB, s:.3f", "ratio": "ratio:.2f"}
    show(f"a tensor of {4 * args.million} MB", rows, columns)
    given = _GIVEN.read_text().strip() if _GIVEN.exists() else "none"
    settings = {"million": args.million, "rounds": args.rounds, "given": given}
    record("large-pages", "large pages are faster", rows, settings)
    return verdicts({f"{row['what']}: faster in large pages": row["ratio"] < 1 for row in rows})


if __name__ == "__main__":
    sys.exit(main())
