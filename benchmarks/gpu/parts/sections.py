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
)
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
    """A short table of what `merged` found."""
    wrong, checks = _wrong(found), sum(len(found[name]) for name in _CHECKS)
    name = found.get("device", {}).get("name") or ", ".join(each["name"] for each in found["gpus"]) or "a CPU"
    yield f"{name}: {checks} checks, {len(wrong)} wrong"
    for row in wrong[:10]:
        shown = {key: row[key] for key in row if key != "ok"}
        yield f"  wrong: {shown}"
    for row in found["ceilings"]:
        kind, flags = row["settings"].get("compute_type", ""), "; ".join(row["flags"])
        yield f"  {row['name']} {kind} {row['value']} {row['unit']} {flags}"
    yield "  N x K, format, M: candidate, us, times as fast as the baseline, bound us"
    for row in found["rows"]:
        if row["name"] == "latency.op" and row["runtime"] != "torch.linear":
            op, variant = row["op"], row["settings"]["variant"]
            bound = "" if op["bound_s"] is None else f"{1e6 * op['bound_s']:.2f}"
            figures = f"{1e6 * row['value']:.2f} {row['baseline']['ratio']:.2f} {bound}"
            yield f"  {op['N']}x{op['K']} {variant} {op['M']}: {row['runtime']} {figures}"
    yield "  step, batch, context: ms, times as fast as 16 bits, of which ms not explained by its linears"
    for row in found["rows"]:
        if row["name"] == "latency.decode_step":
            settings, rest = row["settings"], row["settings"]["residual_s"]
            unexplained = "" if rest is None else f"{1e3 * rest:.2f}"
            figures = f"{1e3 * row['value']:.2f} {row['baseline']['ratio']:.2f} {unexplained}"
            side = f"{settings['variant']}{', fused' if settings['fuse'] else ''}"
            yield f"  {side} {row['batch']} {row['shape']['context']}: {figures}"
    for row in found["functions"]:
        yield f"  function: {row['seconds']:.1f} s, {row['function']}"
    for row in found["launches"]:
        how = "fused" if row["fuse"] else "apart"
        yield f"  launch: {row['side']}, {how}: {row['count']:.1f} of {row['us']:.1f} us, {row['kernel']}"
    for command in found["commands"]:
        yield f"  quantkit {command['command'][0]}: exit {command['exit']}"
        for row in command.get("rows", ()):
            if row["name"] == "tax.break_even":
                op = row["op"] or {}
                where = f"{op.get('N')}x{op.get('K')} {row['settings'].get('variant')}"
                ends = {name: value for name, value in row["settings"].items() if name.startswith("win_")}
                yield f"    break-even {where}: {row['value']} {ends}"
    for row in found["model"]:
        shown = {key: row[key] for key in row if key not in ("warnings", "stages", "error")}
        yield f"  model: {shown}"
    for line, each in found["settles"].items():
        yield f"  {line}: {'holds' if each['holds'] else 'DOES NOT HOLD'}, {each['by']}"
    yield f"  {len(found['skipped'])} skipped; clocks fell: {found['throttled']}"


def report(found: dict[str, Any], ended: Mapping[str, dict[str, Any]]) -> int:
    """A short table; the exit status.

    Args:
        found: of `merged`.
        ended: stages of this run.
    """
    for line in lines(found):
        print(line)
    for each, stage in ended.items():
        said = f": {stage['error']['value']}" if stage["error"] else ""
        print(f"  {each} {stage['state']} {stage['seconds']:.0f} s{said}")
    ends = {stage["state"] for stage in ended.values()}
    if _wrong(found):
        return 1
    if "lost" in ends:
        return 2
    if ends & {"stopped", "no-time", "running"}:
        return 75
    return 3 if found["throttled"] else 0
