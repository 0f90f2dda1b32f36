"""The user's devices on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from quantkit.report.kit import words
from quantkit.report.kit.screen import DIM, grid, pairs, table, titled


def listed(devices: Sequence[Mapping[str, Any]]) -> list[RenderableType]:
    """A line for each."""
    if not devices:
        return [Text("no devices; quantkit device add NAME ssh://USER@HOST", DIM)]
    shown = table(("device", "address", "processor", "cores", "memory", "probed"), left=3, fold=True)
    for each in devices:
        about = each["about"] or {}
        shown.add_row(
            each["name"],
            each["address"],
            str(about.get("processor", "")),
            str(about.get("cores", "")),
            words.size(about["memory"]) if about else "",
            str(each["probed"] or "never"),
        )
    return [shown]


def device(each: Mapping[str, Any]) -> list[RenderableType]:
    """All that is known of one."""
    about = each["about"]
    facts = pairs([("address", each["address"]), ("workdir", each["workdir"])])
    for name in ("python", "wheelhouse"):
        if each[name]:
            facts.add_row(name, each[name])
    if about is None:
        return titled(each["name"], facts, Text("never probed", DIM))[1:]
    board = f"{about['model']}, " if about["model"] else ""
    facts.add_row("machine", f"{board}{about['system']} {about['release']} {about['machine']}")
    facts.add_row("processor", f"{about['processor']}, {words.plural(about['cores'], 'core')}")
    facts.add_row("instructions", ", ".join(about["isa"]))
    facts.add_row("memory", f"{words.size(about['memory'])}, {words.size(about['memory_free'])} of it free")
    facts.add_row("disk", f"{words.size(about['disk_free'])} free")
    facts.add_row(
        "python", f"{about['implementation']} {about['python']}, {about['libc'].strip('-') or 'another libc'}"
    )
    gpus = [f"{gpu['name']} (SM {gpu['sm']}, driver {gpu['driver']})" for gpu in about["gpus"]]
    facts.add_row("GPUs", ", ".join(gpus) or "none that nvidia-smi lists")
    facts.add_row("packages", ", ".join(f"{name} {version}" for name, version in about["packages"].items()) or "none")
    if about["governor"]:
        facts.add_row("clock governor", about["governor"])
    if about["temperature"] is not None:
        facts.add_row("temperature", f"{about['temperature']:.0f} °C")
    if about["busy"]:
        facts.add_row("at work", about["busy"])
    facts.add_row("clock", "right" if abs(about["off"]) < 5 else f"{about['off']:+,.0f} s off")
    return [*titled(each["name"], facts)[1:], Text(f"probed {each['probed']}", DIM)]


def ceilings(name: str, rows: Sequence[Mapping[str, Any]], written: str | None) -> list[RenderableType]:
    """What a device can do at best."""
    shown = []
    for row in rows:
        kind = f" {row['settings']['compute_type']}" if row["settings"].get("compute_type") else ""
        value = "not measured" if row["value"] is None else words.rate(row["value"], row["unit"])
        shown.append((f"{row['name']}{kind}", Text(value, "bold")))
    keep = f"its target: --target {written}" if written else "`--write` makes a target of it"
    return [*titled(f"{name}: measured ceilings", grid(shown))[1:], Text(keep, DIM)]
