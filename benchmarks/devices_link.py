"""The way to a device is in no time, its install is small, and its first row comes soon. Needs an sshd.

    python benchmarks/devices_link.py                  a small random decoder; pip fetches the wheels
    python benchmarks/devices_link.py --wheelhouse DIR --rounds 4 --seconds 20

The device is this machine, by a real sshd on its loopback address (`tests/devices/loopback.py`), with a Python that has
no package. Between the two stands a proxy that can make each byte late, as a far network does: its bandwidth stays.

    install   bytes that lie there unpacked, beside bytes that travelled
    first     seconds from the last file's arrival to the first row: of the score, and of the times, each shape of the
              default plan taking its own seconds
    latency   the same measuring in turns with 0 and 200 ms each way; of each shape the median over runs with latency
              lies within what two runs without it differ by
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from devices.loopback import Loopback
from harness.random_model import LARGE, make
from harness.record import parsing, record, show, verdicts

from quantkit.cli import run
from quantkit.devices.answers import Cells
from quantkit.devices.link import Link
from quantkit.measurement.rows import read_rows
from quantkit.pipeline import Request, compile_model
from quantkit.recipe import Recipe

DELAY, MOST_BYTES, MOST_SECONDS = 0.2, 150e6, 30.0
RECIPE = (
    {"summary": "int4, for its size alone", "calibration": {"set": "prose-en", "samples": 2, "tokens": 64}}
    | {"scheme": {"weights": {"format": "int4", "granularity": "group", "group": 32, "symmetric": False}}}
    | {"passes": ["rtn"], "export": [{"onnx": {}}]}
)
TIMED = ("latency.decode_step", "latency.prefill")


def main() -> int:
    """See the module."""
    parser = parsing(__doc__)
    parser.add_argument("--rounds", type=int, default=4, help="runs with latency, and as many without")
    parser.add_argument("--seconds", type=float, default=10.0, help="of times, a run")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--wheelhouse", type=Path, help="a folder of wheels, where there is no network")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return measured(Path(folder), args)


def measured(work: Path, args: argparse.Namespace) -> int:
    """All three."""
    os.environ |= {"XDG_CONFIG_HOME": str(work / "settings"), "QUANTKIT_CACHE": str(work / "cache")}
    (work / "sshd").mkdir()
    far = Loopback(work / "sshd")
    far.begin()
    os.environ["PATH"] = f"{far.path}{os.pathsep}{os.environ['PATH']}"
    try:
        make(work / "model", layers=args.layers, **LARGE)
        bundle, recipe = work / "bundle", Recipe.from_dict(RECIPE, name="rtn")
        compile_model(Request.of(str(work / "model"), recipe=recipe, out=bundle, speed=False))
        words = ["--workdir", str(work / "there"), "--python", str(Path(sys.base_prefix) / "bin/python3")]
        said("device", "add", "plain", "ssh://plain", *words, *house(args))
        install, first = begun(work, bundle, far)
        rows = in_turns(work, bundle, far, args)
    finally:
        far.close()
    show("seconds", [first], {"score": "first row of a score:.1f", "times": "first row of times:.1f"})
    columns = {"shape": "shape", "near": "0 ms, s:.6f", "far": "200 ms, s:.6f", "moved": "moved by:.3f"}
    show("medians of runs", rows, {**columns, "spread": "runs without differ by:.3f"})
    print(f"install: {install['there'] / 1e6:.0f} MB there, {install['carried'] / 1e6:.0f} MB carried")
    checks = {
        f"the install is at most {MOST_BYTES / 1e6:.0f} MB": install["there"] <= MOST_BYTES,
        f"the first rows come within {MOST_SECONDS:.0f} s": max(first.values()) <= MOST_SECONDS,
        "medians stay with 200 ms of latency": all(abs(row["moved"]) <= row["spread"] for row in rows),
    }
    settings = {"delay": DELAY, "rounds": args.rounds, "seconds": args.seconds, "layers": args.layers, **LARGE}
    found = [{"what": "install", **install}, {"what": "first row", **first}, *rows]
    record("devices_link", "; ".join(checks), found, settings)
    return verdicts(checks)


def house(args: argparse.Namespace) -> list[str]:
    """The option, where it is given."""
    return ["--wheelhouse", str(args.wheelhouse)] if args.wheelhouse else []


def said(*words: str) -> dict[str, Any]:
    """What a command answers."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = run([*words, "--json"])
    answer: dict[str, Any] = json.loads(out.getvalue())
    if code not in (0, 3):  # whether it is faster is not the question
        raise SystemExit(f"{words[0]}: {answer['error']}")
    return answer


class Enough(Exception):
    """The first row of times is there."""


@contextlib.contextmanager
def watched(see: Callable[[str], None], arrived: Callable[[], None]) -> Iterator[None]:
    """Tell each cell that comes, and each time that files have arrived."""
    carry, run = Link.carry, Link.run

    def carrying(self: Link, *words: Any) -> str:
        place = carry(self, *words)
        arrived()
        return place

    def running(self: Link, *words: Any, row: Any = None, **how: Any) -> Cells:
        def come(cells: Cells, cell: str) -> None:
            see(cell)
            if row is not None:
                row(cells, cell)

        return run(self, *words, row=come, **how)

    Link.carry, Link.run = carrying, running  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        Link.carry, Link.run = carry, run  # type: ignore[method-assign]


def begun(work: Path, bundle: Path, far: Loopback) -> tuple[dict[str, int], dict[str, float]]:
    """Bytes of the install, and seconds to the first rows, by the default plan, until the first times have come."""
    from quantkit.bundle import Bundle
    from quantkit.devices.measure import measure_on
    from quantkit.devices.named import reach
    from quantkit.measurement.timing.schedule import TimingPlan

    far.wires["plain"].fresh()
    with reach("plain") as found:
        found.link.install()
    carried = far.wires["plain"].carried
    wheels = [path for path in (work / "there/wheels").rglob("*") if path.is_file()]
    install = {"there": sum(path.stat().st_size for path in wheels), "carried": carried}
    last, first = [0.0], dict[str, float]()

    def arrived() -> None:
        last[0] = time.monotonic()

    def see(cell: str) -> None:
        kind = "score" if cell.startswith("scored-") else "times" if cell.startswith("decode-") else ""
        if kind and kind not in first:
            first[kind] = time.monotonic() - last[0]
        if kind == "times":
            raise Enough

    with watched(see, arrived), contextlib.suppress(Enough), reach("plain", runtimes=["onnxruntime"]) as device:
        measure_on(Bundle.load(bundle), device, str(work / "model"), runtime="onnxruntime", plan=TimingPlan())
    return install, first


def in_turns(work: Path, bundle: Path, far: Loopback, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Of each shape the medians with and without latency."""
    taken: dict[float, dict[str, list[float]]] = {0.0: {}, DELAY: {}}
    for number in range(2 * args.rounds):
        # ABBA: what grows with time is in both alike
        delay = DELAY if number % 4 in (1, 2) else 0.0
        far.wires["plain"].delay = delay
        words = ["--baseline", str(work / "model"), "--batch", "1,8", "--seconds", str(args.seconds)]
        said("measure", str(bundle), "--on", "plain", *words)
        for row in read_rows(bundle / "measurements.jsonl"):
            if row.on == "plain" and row.name in TIMED and row.value:
                shape = f"{row.name}, batch {row.batch}, {row.shape}"
                taken[delay].setdefault(shape, []).append(row.value)
    found = []
    for shape, near in taken[0.0].items():
        far_away = statistics.median(taken[DELAY][shape])
        moved = far_away / statistics.median(near) - 1
        spread = max(near) / min(near) - 1
        values = {"near": statistics.median(near), "far": far_away, "moved": moved, "spread": spread}
        found.append({"shape": shape, **values, "runs": {"near": near, "far": taken[DELAY][shape]}})
    return found


if __name__ == "__main__":
    sys.exit(main())
