"""The user's devices as trees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quantkit.report.kit import words
from quantkit.report.kit.tree import Cell, Facts, Line, Part, Remark, Section, Sheet, Styled


def listed(devices: Sequence[Mapping[str, Any]]) -> list[Part]:
    """Build a line for each device."""
    if not devices:
        return [Remark("no devices; quantkit device add NAME ssh://USER@HOST", "caption")]
    rows = []
    for device_ in devices:
        about = device_["about"] or {}
        known = [str(about.get(name, "")) for name in ("processor", "cores")]
        memory = words.size(about["memory"]) if about else ""
        rows.append([device_["name"], device_["address"], *known, memory, str(device_["probed"] or "never")])
    return [Sheet(("device", "address", "processor", "cores", "memory", "probed"), rows, words=3)]


def device(known: Mapping[str, Any]) -> list[Part]:
    """Build all that is known of one device."""
    about = known["about"]
    rows: list[tuple[Line, Cell]] = [(name, known[name]) for name in ("address", "workdir")]
    rows += [(name, known[name]) for name in ("python", "wheelhouse") if known[name]]
    if about is None:
        return [Remark(Styled(known["name"], "strong")), Facts(rows), Remark("never probed", "caption")]
    board = f"{about['model']}, " if about["model"] else ""
    libc = about["libc"].strip("-") or "another libc"
    gpus = [f"{gpu['name']} (SM {gpu['sm']}, driver {gpu['driver']})" for gpu in about["gpus"]]
    packages = ", ".join(f"{name} {version}" for name, version in about["packages"].items())
    rows += [
        ("machine", f"{board}{about['system']} {about['release']} {about['machine']}"),
        ("processor", f"{about['processor']}, {words.plural(about['cores'], 'core')}"),
        ("instructions", ", ".join(about["isa"])),
        ("memory", f"{words.size(about['memory'])}, {words.size(about['memory_free'])} of it free"),
        ("disk", f"{words.size(about['disk_free'])} free"),
        ("python", f"{about['implementation']} {about['python']}, {libc}"),
        ("GPUs", ", ".join(gpus) or "none that nvidia-smi lists"),
        ("packages", packages or "none"),
    ]
    rows += [("clock governor", about["governor"])] if about["governor"] else []
    rows += [("temperature", f"{about['temperature']:.0f} °C")] if about["temperature"] is not None else []
    rows += [("at work", about["busy"])] if about["busy"] else []
    rows.append(("clock", "right" if abs(about["off"]) < 5 else f"{about['off']:+,.0f} s off"))
    return [Remark(Styled(known["name"], "strong")), Facts(rows), Remark(f"probed {known['probed']}", "caption")]


def ceilings(name: str, rows: Sequence[Mapping[str, Any]], written: str | None) -> list[Part]:
    """Build what a device can do at best."""
    facts: list[tuple[Line, Cell]] = []
    for row in rows:
        kind = f" {row['settings']['compute_type']}" if row["settings"].get("compute_type") else ""
        value = "not measured" if row["value"] is None else words.rate(row["value"], row["unit"])
        facts.append((f"{row['name']}{kind}", Styled(value, "strong")))
    keep = f"its target: --target {written}" if written else "`--write` makes a target of it"
    return [Section(f"{name}: measured ceilings", [Facts(facts)]), Remark(keep, "caption")]
