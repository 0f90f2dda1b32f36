"""The record of a run out of the files of its stages, and the table that is printed of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit import machine
from quantkit.kernels.dispatch import HUMMING, LAYERS, KernelTiming, fastest

# what a layer of the swept formats runs: another library's kernel is taken for formats that ours lack
RUN = set(LAYERS) - {HUMMING}
# of which each stage says the same, once
_ONCE = ("device", "versions")
_LISTS = ("correct", "race", "solvers", "ceilings", "rows", "configs", "skipped", "compile", "profile", "model")
# the fields of a stage's file, and of the entries of sections what is read of them
_FIELDS = {"stage": str, "state": str, "seconds": int | float, "settings": dict, "sections": dict}
_READ = {
    **dict.fromkeys(_LISTS, ()),
    **dict.fromkeys(("correct", "race", "solvers"), ("ok",)),
    **{"ceilings": ("name", "value", "unit", "settings", "flags"), "rows": ("name", "runtime", "settings")},
    **{"timings": ("variant", "candidate", "shape"), "settles": ("line", "holds", "by")},
    **{"device": ("name",), "versions": ()},
}


def kept(path: Path) -> dict[str, Any] | None:
    """A stage's file; None where there is none, or what is there was not written by a stage."""
    try:
        found = json.loads(path.read_text())
        json.dumps(found, allow_nan=False)
        fits = all(isinstance(found[name], kind) for name, kind in _FIELDS.items())
        fits = fits and (found["error"] is None or isinstance(found["error"]["value"], str))
        for section, entries in found["sections"].items():
            fits = fits and isinstance(entries, list) and bool(entries)
            # an entry's fields: what is no object has none
            fits = fits and all(entry.keys() >= set(_READ[section]) for entry in entries if section in _READ)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return found if fits else None


def merged(folder: Path, names: Iterable[str]) -> dict[str, Any]:
    """All stages' sections together.

    Args:
        folder: of the results.
        names: of the stages, in their order.
    """
    found: dict[str, Any] = {"schema": 2, "stages": [], **{name: [] for name in _LISTS}}
    found |= {"settles": {}, "clocks": [], "drift": [], "throttled": False, "gpus": machine.gpus()[0]}
    timings: list[dict[str, Any]] = []
    for name in names:
        if (stage := kept(folder / f"{name}.json")) is None:
            continue
        found["stages"].append({key: stage[key] for key in ("stage", "state", "seconds", "settings", "error")})
        for section, entries in stage["sections"].items():
            if section in _ONCE:
                found.setdefault(section, entries[0])
            elif section == "settles":
                # what a later stage finds holds
                found["settles"] |= {each["line"]: {**each, "stage": name} for each in entries}
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


def report(found: dict[str, Any], ended: Mapping[str, dict[str, Any]]) -> int:
    """A short table; the exit status.

    Args:
        found: of `merged`.
        ended: stages of this run.
    """
    checks = [row for name in ("correct", "race", "solvers") for row in found[name]]
    wrong = [row for row in checks if row["ok"] is False]
    name = found.get("device", {}).get("name") or ", ".join(each["name"] for each in found["gpus"]) or "a CPU"
    print(f"{name}: {len(checks)} checks, {len(wrong)} wrong")
    for row in wrong[:10]:
        print("  wrong:", {key: row[key] for key in row if key != "ok"})
    for row in found["ceilings"]:
        kind, flags = row["settings"].get("compute_type", ""), "; ".join(row["flags"])
        print(f"  {row['name']} {kind} {row['value']} {row['unit']} {flags}")
    print("  N x K, format, M: candidate, us, times as fast as the baseline, bound us")
    for row in found["rows"]:
        if row["name"] == "latency.op" and row["runtime"] != "torch.linear":
            op, variant = row["op"], row["settings"]["variant"]
            bound = "" if op["bound_s"] is None else f"{1e6 * op['bound_s']:.2f}"
            figures = f"{1e6 * row['value']:.2f} {row['baseline']['ratio']:.2f} {bound}"
            print(f"  {op['N']}x{op['K']} {variant} {op['M']}: {row['runtime']} {figures}")
    print("  whole model, batch: ms, times as fast as 16 bits, of which ms not explained by its linears")
    for row in found["rows"]:
        if row["name"] == "latency.decode_step":
            rest = row["settings"]["residual_s"]
            unexplained = "" if rest is None else f"{1e3 * rest:.2f}"
            figures = f"{1e3 * row['value']:.2f} {row['baseline']['ratio']:.2f} {unexplained}"
            print(f"  {row['settings']['variant']} {row['batch']}: {figures}")
    for row in found["model"]:
        print("  model:", {key: row[key] for key in row if key not in ("warnings", "stages", "error")})
    for line, each in found["settles"].items():
        print(f"  {line}: {'holds' if each['holds'] else 'DOES NOT HOLD'}, {each['by']}")
    print(f"  {len(found['skipped'])} skipped; clocks fell: {found['throttled']}")
    for each, stage in ended.items():
        said = f": {stage['error']['value']}" if stage["error"] else ""
        print(f"  {each} {stage['state']} {stage['seconds']:.0f} s{said}")
    ends = {stage["state"] for stage in ended.values()}
    if wrong:
        return 1
    if "lost" in ends:
        return 2
    if ends & {"stopped", "no-time", "running"}:
        return 75
    return 3 if found["throttled"] else 0
