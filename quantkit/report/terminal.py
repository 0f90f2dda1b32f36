"""Screens of the smaller commands, as trees. Nothing here prints, computes or reads files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit.bundle import Check, Decision, Manifest
from quantkit.report.bundle import figures
from quantkit.report.catalog import CatalogEntry
from quantkit.report.kit import words
from quantkit.report.kit.tree import MARK, Cell, Code, Facts, Line, Part, Remark, Section, Sheet, Styled

_Rows = list[tuple[Line, Cell]]


def verified(
    path: Path, manifest: Manifest, checks: Sequence[Check], notes: Sequence[str], seals: Sequence[str] = ()
) -> list[Part]:
    """Build the result of `verify`; `seals` are lines about the bundle's seal and signer."""
    failed = sum(not check.ok for check in checks)
    outcome = f"{failed} of {len(checks)} checks failed" if failed else f"all {len(checks)} checks hold"
    rows: list[list[Line]] = [
        [(MARK[check.ok], " ", check.name), figures.relation(check), Styled(check.where, "dim")] for check in checks
    ]
    return [
        Remark((MARK[not failed], " ", Styled(manifest.model.name, "strong"), f": {outcome}")),
        Code("", "\n".join([str(path), f"content_sha256 {manifest.content_sha256}", *seals])),
        Sheet(["", "", ""], rows, words=3),
        *(Remark(note, "note") for note in notes),
    ]


def planned(plan: Mapping[str, Any]) -> list[Part]:
    """Build the screen of `compile --dry-run` from `result` of its JSON envelope."""
    model, seen, disk, left_out = plan["model"], plan["calibration"], plan["disk_bytes"], plan["kept"]
    layers = []
    for scheme in plan["schemes"]:
        bits = f"{words.short(scheme['bits_per_weight'])} bits a weight"
        layers.append(f"{words.plural(scheme['layers'], 'layer')}, {bits}: {scheme['scheme']}")
    if left_out:
        more = f" and {len(left_out) - 3} more" if len(left_out) > 3 else ""
        layers.append(f"{len(left_out)} kept as they are: {', '.join(left_out[:3])}{more}")
    was = f", converted from {model['was']}" if model["was"] else ""
    weights = f"{words.size(model['bytes'])} of {model['dtype']}{was}"
    rows: _Rows = [
        ("model", f"{model['ref']}, {words.article(model['kind'])}, {weights}"),
        ("target", str(plan["target"])),
        ("layers", list(layers) or Styled("none is quantized", "dim")),
    ]
    if macs := plan.get("macs"):
        share = words.percent(macs["quantized"] / macs["all"])
        products = f"{macs['all']:,} multiply-accumulates a sample, {share} of them in integers"
        if left := plan["floats"]:
            products += f"; {words.percent(left)} of the products' weights cannot be integers and stay in floats"
        rows.append(("products", products))
    kept = f", {words.size(disk['cache'])} for the float baseline" if disk["cache"] else ""
    building = words.size(disk["bundle"] + disk["work"])
    rows += [
        ("passes", [_call(step) for step in plan["passes"]] or "none"),
        ("calibrates on", _tokens(seen) if seen else "nothing: no pass looks at data"),
        ("scores on", _tokens(plan["scoring"])),
        ("exports", ", ".join(_call(step) for step in plan["export"])),
        ("time", "known after the first block"),
        ("needs", f"about {words.size(plan['memory_bytes'])} of memory, {building} of disk while it is built"),
        ("leaves", f"about {words.size(disk['bundle'])}{kept}"),
    ]
    decisions = figures.grouped([Decision.model_validate(entry) for entry in plan["decisions"]])
    return [
        Remark((Styled("would compile ", "dim"), Styled(model["name"], "strong"), f" with {plan['recipe']}")),
        Section("", [Facts(rows)]),
        *([Section("decisions", [figures.decisions_table(decisions)])] if decisions else []),
        *(Remark(note, "note") for note in plan["notes"]),
        Section("", [Code("nothing was written; it would write", str(plan["out"]))]),
    ]


def batch(told: Mapping[str, Any]) -> list[Part]:
    """Build the table of `quantkit batch` from `result` of its JSON envelope; of a dry run, the states of its jobs."""

    def sure(row: Mapping[str, Any], name: str) -> str:
        ends = row.get(f"{name}_ci95")
        more = f"\u00a0±{words.figure((ends[1] - ends[0]) / 2, 1)}" if ends else ""
        return words.or_dash(row.get(name), lambda value: f"{words.short(value)}{more}")

    rows: list[list[Cell]] = []
    for row in told["jobs"]:
        error = row.get("error")
        # a dry run has no figures: there `done` says that nothing is left
        ended = row.get("verdict") or ("not timed" if "kl" in row and row["state"] == "done" else row["state"])
        ended = f"[{error['code']}] {error['value']}" if error else ended
        figured = [
            sure(row, "kl"),
            words.or_dash(row.get("bits_per_weight"), words.short),
            words.or_dash(row.get("bytes"), words.size).replace(" ", "\u00a0"),
            sure(row, "speed_ratio"),
            words.or_dash(row.get("seconds"), lambda seconds: f"{seconds:,.0f}\u00a0s"),
        ]
        last = [Styled(ended, "bad" if error else ""), Styled(row.get("node") or "", "dim")]
        recipe = Path(row["recipe"]).stem
        # two jobs of one model and one recipe are told apart by the name of one
        recipe += "" if row["job"].endswith(f"--{recipe}") else f" ({row['job']})"
        rows.append([row["model"], recipe, *figured, *last])
    head = ["model", "recipe", "KL (nats)", "bits", "size", "speed-up", "took", "verdict", "node"]
    few = len({row.get("node") for row in told["jobs"]}) < 2
    rows = [row[:-1] for row in rows] if few else rows
    sheet = Sheet(head[:-1] if few else head, rows, words=2, remarks=2 - few)
    return [sheet, Remark(Styled(told["out"], "dim"))]


def listing(kinds: Mapping[str, Mapping[str, str]]) -> list[Part]:
    """Build the names and summaries of each kind."""
    width = max((len(name) for names in kinds.values() for name in names), default=1)
    parts: list[Part] = []
    for kind, names in kinds.items():
        facts = Facts([(Styled(name.ljust(width), "name"), about) for name, about in names.items()])
        parts.append(Section(kind, [facts]) if len(kinds) > 1 else facts)
    return parts


def entry(shown: CatalogEntry) -> list[Part]:
    """Build one catalog entry: summary, facts, and its defining text."""
    title = Remark((Styled(shown.name, "strong"), Styled(f"  {shown.kind}", "dim")))
    facts = [Section("", [Facts(shown.facts)])] if shown.facts else []
    source = [Section("", [Code("", shown.source.rstrip())])] if shown.source else []
    return [title, Remark(shown.summary), *facts, *source]


def machine(report: Mapping[str, Any], programs: Mapping[str, str]) -> list[Part]:
    """Build the report of `doctor`; `programs`: runtimes with a Python of their own, the compiler."""
    from quantkit.measurement.doctor import place_of

    about = report["machine"]
    gpus = ", ".join(str(gpu.get("name", gpu)) for gpu in about.get("gpus") or [])
    packages, cache = about.get("packages", {}), about.get("last_level_cache")
    missing = [name for name, version in packages.items() if version is None and name not in programs]
    rows: _Rows = [
        ("processor", f"{about['device']['name']}, {words.plural(about['cores'], 'core')}"),
        ("instructions", ", ".join(about["isa"])),
        ("memory", f"{words.size(about['memory_limit'])} for this process"),
        *([("last-level cache", words.size(cache))] if cache else []),
        ("GPUs", gpus or str(about.get("gpus_absent") or "none")),
        ("packages", ", ".join(f"{name} {version}" for name, version in packages.items() if version)),
        *([("not installed", Styled(", ".join(missing), "dim"))] if missing else []),
        *((library["library"], _library(library)) for library in report.get("tensorrt", [])),
        *programs.items(),
    ]
    measured: _Rows = []
    for row in report["measurements"]:
        share = report["stated"].get(place_of(row))
        of_stated = f", {share:.0%} of what the target states" if share else ""
        kind = row["settings"].get("compute_type")
        name = f"{row['name'].removeprefix('ceiling.')}{f' {kind}' if kind else ''}"
        measured.append((name, (Styled(_ceiling(row), "strong"), Styled(of_stated, "dim"))))
    of = f" of {report['measurements'][0]['device']['name']}" if measured and report["stated"] else ""
    kept: list[Part] = []
    if report["written"]:
        kept = [Code("figures written to", str(report["written"]))]
    elif report["figures"]:
        kept = [Remark(f"{words.plural(len(report['figures']), 'figure')} measured; `--write` keeps them", "caption")]
    if report["unmeasured"]:
        kept.append(Remark(f"not measured: {', '.join(report['unmeasured'])}", "caption"))
    return [
        Remark(Styled("this machine", "strong")),
        Facts(rows),
        *([Section(f"measured ceilings{of}", [Facts(measured)])] if measured else []),
        Section(f"target {report['target']}", kept),
        *(Remark(warning, "note") for warning in report["warnings"]),
    ]


def _ceiling(row: Mapping[str, Any]) -> str:
    if row["value"] is None:
        return ", ".join(row["flags"]) or "not measured"
    return words.moment(row["value"]) if row["unit"] == "s" else words.rate(row["value"], row["unit"])


def _library(library: Mapping[str, Any]) -> Line:
    able = f"{library['version']}, builds for SM {', '.join(library['builds_for'])}" if library["builds_for"] else ""
    missing = "; ".join(library["missing"])
    return (able, "; " if able and missing else "", Styled(missing, "dim"))


def _call(step: Mapping[str, Any]) -> str:
    name, settings = next(iter(step.items()))
    inner = ", ".join(f"{key}: {json.dumps(value)}" for key, value in (settings or {}).items()).replace(chr(34), "")
    return f"{name}{words.bracketed(inner)}"


def _tokens(tokens: Mapping[str, Any]) -> str:
    named = f"{tokens['set']} ({tokens['split']})"
    if "pairs" in tokens:
        return f"{named}, {tokens['pairs']} pairs"
    # samples of a graph have no tokens
    what = f"sequences of {tokens['tokens']} tokens" if "tokens" in tokens else "samples"
    more = figures.written(tokens.get("generated")) + figures.begins(tokens.get("begins"))
    return f"{named}, {tokens['samples']} {what}{more}"


def listed(devices: Sequence[Mapping[str, Any]]) -> list[Part]:
    """Build the table of devices."""
    if not devices:
        return [Remark("no devices; quantkit device add NAME ssh://USER@HOST", "caption")]
    rows = []
    for known in devices:
        about = known["about"] or {}
        machine = [str(about.get(name, "")) for name in ("processor", "cores")]
        memory = words.size(about["memory"]) if about else ""
        rows.append([known["name"], known["address"], *machine, memory, str(known["probed"] or "never")])
    return [Sheet(("device", "address", "processor", "cores", "memory", "probed"), rows, words=3)]


def device(known: Mapping[str, Any]) -> list[Part]:
    """Build the facts of one device."""
    about, name = known["about"], Remark(Styled(known["name"], "strong"))
    rows: _Rows = [(field, known[field]) for field in ("address", "workdir")]
    rows += [(field, known[field]) for field in ("python", "wheelhouse") if known[field]]
    if about is None:
        return [name, Facts(rows), Remark("never probed", "caption")]
    board = f"{about['model']}, " if about["model"] else ""
    libc = about["libc"].strip("-") or "another libc"
    gpus = [f"{gpu['name']} (SM {gpu['sm']}, driver {gpu['driver']})" for gpu in about["gpus"]]
    packages = ", ".join(f"{package} {version}" for package, version in about["packages"].items())
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
    return [name, Facts(rows), Remark(f"probed {known['probed']}", "caption")]


def ceilings(name: str, rows: Iterable[Mapping[str, Any]], written: str | None) -> list[Part]:
    """Build a device's measured ceilings."""
    facts: _Rows = []
    for row in rows:
        kind = f" {row['settings']['compute_type']}" if row["settings"].get("compute_type") else ""
        value = "not measured" if row["value"] is None else words.rate(row["value"], row["unit"])
        facts.append((f"{row['name']}{kind}", Styled(value, "strong")))
    keep = f"its target: --target {written}" if written else "`--write` makes a target of it"
    return [Section(f"{name}: measured ceilings", [Facts(facts)]), Remark(keep, "caption")]
