"""The record of a run out of the files of its stages, and the table that is printed of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit import machine
from quantkit.errors import InputError
from quantkit.kernels.dispatch import HUMMING, LAYERS, OTHER_PACKING, OURS, KernelTiming, fastest
from quantkit.planning.traffic import of_products

# what a layer of the swept formats runs; humming's packing is timed at every batch by stage `tax` alone (`packings`)
RUN = set(LAYERS) - {HUMMING}
# of which each stage says the same, once
_ONCE = ("device", "versions")
_CHECKS = ("correct", "race", "solvers")
_LISTS = (
    *_CHECKS,
    "ceilings",
    "rows",
    "configs",
    "skipped",
    "compile",
    "profile",
    "model",
    "functions",
    "launches",
    "commands",
    "real",
    "rtx",
)
# of metrics, as Nsight Compute calls them
DURATION = "gpu__time_duration.sum"
BANDWIDTH = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
ISSUE = "smsp__issue_active.avg.pct_of_peak_sustained_active"
# columns of the table of products that come first; rows of functions, and of a step's kernels, that are printed
_SIDES = {"torch.linear": 0, "quantkit": 1}
_SHOWN, _LONGEST = 20, 12
# the fields of a stage's file
_FIELDS = {"stage": str, "state": str, "seconds": int | float, "settings": dict, "sections": dict}


def kept(path: Path) -> dict[str, Any] | None:
    """A stage's file; None where there is none, or what is there was not written by a stage."""
    try:
        found = json.loads(path.read_text())
        json.dumps(found, allow_nan=False)
        fits = all(isinstance(found[name], kind) for name, kind in _FIELDS.items())
        fits = fits and (found["error"] is None or isinstance(found["error"]["value"], str))
        fits = fits and all(isinstance(entries, list) and bool(entries) for entries in found["sections"].values())
        # what a stage has written can be told, to the last field of an entry that is read
        for _ in lines(_joined([found])) if fits else ():
            pass
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
        return None
    return found if fits else None


def merged(folder: Path, names: Iterable[str]) -> dict[str, Any]:
    """All stages' sections together.

    Args:
        folder: of the results.
        names: of the stages, in their order.
    """
    found = _joined(stage for name in names if (stage := kept(folder / f"{name}.json")) is not None)
    return found | {"gpus": machine.gpus()[0]}


def _joined(stages: Iterable[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"schema": 2, "stages": [], **{name: [] for name in _LISTS}}
    found |= {"settles": {}, "clocks": [], "drift": [], "throttled": False, "gpus": []}
    timings: list[dict[str, Any]] = []
    for stage in stages:
        found["stages"].append({key: stage[key] for key in ("stage", "state", "seconds", "settings", "error")})
        for section, entries in stage["sections"].items():
            if section in _ONCE:
                found.setdefault(section, entries[0])
            elif section == "settles":
                # what a later stage finds holds
                found["settles"] |= {each["line"]: {**each, "stage": stage["stage"]} for each in entries}
            elif section == "throttled":
                found["throttled"] = found["throttled"] or any(entries)
            elif section == "timings":
                timings += entries
            else:
                found.setdefault(section, []).extend(entries)
    variants = dict.fromkeys(each["variant"] for each in timings)
    found["dispatch"] = {name: _table([each for each in timings if each["variant"] == name]) for name in variants}
    return found


def _table(timings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    able = [each for each in timings if each["candidate"] in RUN]
    named = [{key: value for key, value in each.items() if key != "variant"} for each in able]
    return fastest(KernelTiming(**{**each, "shape": tuple(each["shape"])}) for each in named).as_dict()


def packings(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Return variant -> shape -> packing that is faster over the assumed traffic, of rows of `quantkit tax`.

    Only shapes that were timed in both packings, one of them at every batch.
    """
    timed: dict[tuple[str, str], list[KernelTiming]] = {}
    for row in rows:
        op, kernel, name = row["op"] or {}, row["settings"].get("kernel"), str(row["settings"].get("variant"))
        if row["name"] == "latency.op" and row["value"] and op.get("N") and kernel in LAYERS:
            timing = KernelTiming(kernel, (op["N"], op["K"]), op["M"], row["value"], 0)
            timed.setdefault((name.removesuffix(OTHER_PACKING), f"{op['N']}x{op['K']}"), []).append(timing)
    found: dict[str, dict[str, str]] = {}
    for (name, shape), timings in timed.items():
        if {timing.candidate == HUMMING for timing in timings} == {True, False}:
            try:
                table = fastest(timings, traffic=of_products(timing.batch for timing in timings))
            except InputError:
                continue
            (choices,) = table.choices.values()
            found.setdefault(name, {})[shape] = HUMMING if choices[0].candidate == HUMMING else OURS
    return found


def _wrong(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for name in _CHECKS for row in found[name] if row["ok"] is False]


def lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield what `merged` found as tables, only those that have rows."""
    wrong, checks = _wrong(found), sum(len(found[name]) for name in _CHECKS)
    name = found.get("device", {}).get("name") or ", ".join(each["name"] for each in found["gpus"]) or "a CPU"
    yield f"{name}: {checks} checks, {len(wrong)} wrong"
    for row in wrong[:10]:
        shown = {key: row[key] for key in row if key != "ok"}
        yield f"  wrong: {shown}"
    for title, heads, rows in _tables(found):
        # what was written is told, or refused, to its last row
        cells = [heads, *([str(cell) for cell in row] for row in rows)]
        if len(cells) > 1:
            widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
            yield f"{title}"
            for row in cells:
                yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    clocks = "fell during the run: compare no time of it" if found["throttled"] else "did not fall"
    yield f"{len(found['skipped'])} cells skipped (`skipped` in run.json, with reasons); clocks {clocks}"


def _tables(found: dict[str, Any]) -> Iterator[tuple[str, list[str], list[list[Any]]]]:
    """Yield (title, heads, rows)."""
    ceilings = [
        [
            *(each["name"].removeprefix("ceiling."), each["settings"].get("compute_type", ""), _measured(each)),
            "; ".join(each["flags"]),
        ]
        for each in found["ceilings"]
    ]
    yield "What the device does at best", ["", "type", "", "doubts"], ceilings
    yield (
        "Linears, us; times as fast as torch.linear in 16 bits; K in one program (whole) or several (split)",
        *_products([row for row in found["rows"] if row["name"] == "latency.op"]),
    )
    heads = ["format", "N x K", "faster up to M", "interval", "faster at M"]
    yield "`quantkit tax`: break-even with 16 bits", heads, [*_break_evens(found["commands"])]
    steps = [row for row in found["rows"] if row["name"] == "latency.decode_step"]
    heads = ["weights", "torch.compile", "batch", "context", "ms", "times as fast as 16 bits", "ms outside linears"]
    yield "Decode steps", heads, [_step(row) for row in steps]
    yield (
        "Kernels of a decode step",
        ["weights", "torch.compile", "count", "us", "kernel"],
        [*_launches(found["launches"])],
    )
    heads = ["kernel", "of", "us", "% of bandwidth", "% of cycles with an instruction"]
    yield "Hardware counters (Nsight Compute)", heads, [*_counters(found["profile"])]
    heads = ["recipe", "on", "exit", "KL, nats", "checks that failed"]
    compiled = [[row["recipe"], row["at"], row["exit"], _of(row["kl"], 4), len(row["failed"])] for row in found["real"]]
    yield "A real model, compiled", heads, compiled
    heads = ["model of 8B's shapes", "s", "exit", "GPU, GB", "host, GB", "reached at s"]
    compiled = [
        [
            *(row["what"], _of(row.get("seconds"), 1), row.get("exit", ""), _of(row.get("gpu_peak_bytes"), 1, 1e9)),
            *(_of(row.get("host_peak_bytes"), 1, 1e9), row.get("reason") or row.get("reached", "")),
        ]
        for row in found["model"]
    ]
    yield "A compile of 8B's shapes", heads, compiled
    functions = [[f"{row['seconds']:.1f}", row["function"]] for row in found["functions"][:_SHOWN]]
    yield "Its functions, seconds with what they call", ["s", "function"], functions
    commands = [
        [
            *(" ".join(map(str, each["command"][:2])), each["exit"], _of(each.get("seconds"), 0)),
            (each.get("verdict") or {}).get("answer", ""),
            (each.get("error") or {}).get("value") or each.get("reason", ""),
        ]
        for each in found["commands"]
    ]
    yield "Commands", ["quantkit", "exit", "s", "verdict", "error"], commands
    heads = ["TensorRT-RTX", "SM", "builds", "runs", "error"]
    yield (
        "One product",
        heads,
        [
            [row["version"], row["capability"], row["built"], row["ran"], "; ".join(row["said"])[:100]]
            for row in found["rtx"]
        ],
    )
    settled = [
        [line, "holds" if each["holds"] else "DOES NOT HOLD", each["by"]] for line, each in found["settles"].items()
    ]
    yield "Lines of PENDING.md", ["line", "", "by"], settled


def _measured(row: Mapping[str, Any]) -> str:
    """A ceiling in its usual unit."""
    unit, scale = {"B/s": ("TB/s", 1e12), "op/s": ("T op/s", 1e12), "s": ("us", 1e-6)}[row["unit"]]
    return "none" if row["value"] is None else f"{row['value'] / scale:.2f} {unit}"


def _of(value: float | None, digits: int, scale: float = 1.0) -> str:
    return "" if value is None else f"{value / scale:.{digits}f}"


def _products(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """A line for each format, shape and batch; a column for each side."""
    cells: dict[tuple[str, int, int, int], dict[str, dict[str, Any]]] = {}
    for row in rows:
        op = row["op"]
        cells.setdefault((row["settings"]["variant"], op["N"], op["K"], op["M"]), {})[row["runtime"]] = row
    sides = sorted({side for cell in cells.values() for side in cell}, key=lambda side: (_SIDES.get(side, 2), side))
    found = []
    for (variant, rows_of, columns, batch), cell in sorted(cells.items()):
        ours, any_side = cell.get("quantkit"), next(iter(cell.values()))
        times = [_of(cell[side]["value"], 2, 1e-6) if side in cell else "" for side in sides]
        whole = "" if ours is None else "whole" if ours["settings"].get("stages") == 0 else "split"
        ratio = "" if ours is None else _of(ours["baseline"]["ratio"], 2)
        told = [variant, f"{rows_of}x{columns}", batch, *times, whole, ratio, _of(any_side["op"]["bound_s"], 2, 1e-6)]
        found.append(told)
    return ["format", "N x K", "M", *sides, "K", "quantkit: times as fast", "bound"], found


def _break_evens(commands: Sequence[dict[str, Any]]) -> Iterator[list[Any]]:
    for command in commands:
        for row in command.get("rows", ()):
            if row["name"] == "tax.break_even":
                op, settings = row["op"] or {}, row["settings"]
                where = f"{op['N']}x{op['K']}" if op.get("N") else "all"
                ends = "" if row["ci95"] is None else " to ".join(_of(end, 0) for end in row["ci95"])
                yield [settings.get("variant"), where, _of(row["value"], 0), ends, settings.get("win_intervals", "")]


def _step(row: dict[str, Any]) -> list[Any]:
    settings = row["settings"]
    told = [settings["variant"], settings["fuse"] or "no", row["batch"], row["shape"]["context"]]
    rest = _of(settings["residual_s"], 2, 1e-3)
    return [*told, _of(row["value"], 3, 1e-3), _of(row["baseline"]["ratio"], 2), rest]


def _launches(rows: Sequence[dict[str, Any]]) -> Iterator[list[Any]]:
    """All kernels of each side together, then the longest."""
    sides: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        sides.setdefault((row["side"], row["fuse"] or "no"), []).append(row)
    for (side, fuse), mine in sides.items():
        total = {name: sum(row[name] for row in mine) for name in ("count", "us")}
        for row in [{"kernel": "all", **total}, *mine[:_LONGEST]]:
            yield [side, fuse, f"{row['count']:.0f}", f"{row['us']:.1f}", row["kernel"][:70]]


def _counters(rows: Sequence[dict[str, Any]]) -> Iterator[list[Any]]:
    for row in rows:
        launches = row["launches"]
        one_each = len(launches) == len(row["of"])
        for place, launch in enumerate(launches):
            figures = (_of(float(launch[DURATION]), 2, 1e3), *(_of(float(launch[at]), 1) for at in (BANDWIDTH, ISSUE)))
            yield [row["kernel"], row["of"][place] if one_each else launch["Kernel Name"][:40], *figures]
        if not launches:
            yield [row["kernel"], row["reason"][:60], "", "", ""]


def report(found: dict[str, Any], ended: Mapping[str, dict[str, Any]]) -> int:
    """Print tables of all stages and how each of this run ended; return the exit status.

    Args:
        found: of `merged`.
        ended: stages of this run.
    """
    for line in lines(found):
        print(line)
    print("Stages of this run")
    for each, stage in ended.items():
        said = f": {stage['error']['value']}" if stage["error"] else ""
        print(f"  {each:<9} {stage['state']:<8} {stage['seconds']:4.0f} s{said}")
    ends = {stage["state"] for stage in ended.values()}
    if _wrong(found):
        return 1
    if "lost" in ends:
        return 2
    if ends & {"stopped", "no-time", "running"}:
        return 75
    return 3 if found["throttled"] else 0
