"""Add an export to a finished bundle: write it beside the bundle, check it in its runtime, then move it in."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from quantkit import plugins
from quantkit.bundle import Bundle, Check, Decision
from quantkit.content import parse_yaml
from quantkit.errors import InputError, MissingDependency, from_validation
from quantkit.exporters import LayerSpec, load_exporter
from quantkit.measurement.rows import Row
from quantkit.measurement.size import folder_of
from quantkit.pipeline import engines
from quantkit.pipeline.gates import demand
from quantkit.pipeline.graphs.bundles import file_of, holds_graph, is_network, samples_of
from quantkit.pipeline.progress import Progress
from quantkit.pipeline.verdict import REPORT, documents, of_original
from quantkit.planning.support import with_remedy
from quantkit.report.bundle import usage
from quantkit.scheme import ActivationScheme, CacheScheme, WeightScheme

# on which an exported graph is held against the bundle's
_SAMPLES = 16


@dataclass(frozen=True)
class Exported:
    """An added export.

    Attributes:
        bundle: bundle with the export; unchanged after a dry run.
        to: name of the exporter.
        engine: engine that was built, if the bundle already had its network.
    """

    bundle: Bundle
    to: str
    checks: Sequence[Check] = ()
    decisions: Sequence[Decision] = ()
    dry_run: bool = False
    engine: str = ""

    @property
    def says(self) -> str:
        """Sentence for people."""
        if self.dry_run:
            return f"dry run: {self.to} can be added; nothing was written"
        if self.engine:
            sentence = f"{self.engine} was built from the bundle's network; the bundle keeps its content_sha256"
            return ". ".join([sentence, *(taken.reason for taken in self.decisions)])
        sha256 = self.bundle.manifest.content_sha256
        return f"{folder_of(self.to)}/ was added; the bundle's content_sha256 is now {sha256}"

    def as_dict(self) -> dict[str, Any]:
        """Return the `result` of the `--json` envelope."""
        return {
            "bundle": str(self.bundle.path),
            "to": self.to,
            "content_sha256": self.bundle.manifest.content_sha256,
            "dry_run": self.dry_run,
            "engine": self.engine or None,
            "checks": [check.model_dump(mode="json") for check in self.checks],
        }


def export_bundle(
    bundle: Bundle,
    to: str,
    changes: Sequence[str] = (),
    *,
    calibration: str | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Exported:
    """Export a bundle's checkpoint to another destination.

    Args:
        changes: `NAME=YAML` options of the exporter.
        calibration: of a graph, where the set is that it was calibrated on, if that was a file: both are held against
            each other on its samples.
        dry_run: check what can be checked, write nothing.

    Raises InputError: `unknown-exporter`, `export-unsupported`, `export-exists`, `bundle-without-checkpoint`,
    `bundle-dense`, `bundle-not-writable`, `hash-mismatch`, `layout-unsupported`, the exporter's own; of a graph
    `calibration-needed` and those of `load_inputs`; GateError: `check-failed`, the result is not what the checkpoint
    is; nothing is added.
    """
    progress = progress or Progress()
    exporter, manifest, graph = load_exporter(to, where="--to"), bundle.manifest, holds_graph(bundle)
    if exporter.builds and engines.has_network(bundle, to):
        # the network is there already: an engine of it for this GPU, or for the one that was asked for
        chosen = exporter.Options(**engine_options(bundle, exporter, changes))
        exporter.accepts(chosen, LayerSpec())
        bundle.demand_writable()
        bundle.demand_intact(f"{folder_of(to)}/network")  # other engines may be of other machines
        if dry_run:
            return Exported(bundle, to, dry_run=True)
        added, path, notes = engines.add_engine(bundle, exporter, chosen, progress)
        return Exported(added, to, decisions=notes, engine=path)
    _demand_possible(bundle, exporter, calibration)
    options = options_of(exporter, changes, bundle)
    chosen = exporter.Options(**options)
    if not graph:
        # what a dry run finds is what the export finds
        layers = _layers(bundle)
        try:
            exporter.accepts(chosen, layers)
        except InputError as problem:
            if f"leave `{to}` out" in problem.remedy:  # a recipe's remedy: here nothing asked for it but the command
                problem = with_remedy(problem, _held(bundle, to, layers))
            raise problem from None
        _demand_codes(bundle)
    place = folder_of(to)
    bundle.demand_free(place)
    bundle.demand_writable()
    bundle.demand_intact()
    samples = samples_of(bundle, calibration).first(_SAMPLES) if graph else {}
    if dry_run:
        return Exported(bundle, to, dry_run=True)
    progress.plan({"export": 20.0, "check": 20.0})
    home = bundle.path.resolve().parent
    with tempfile.TemporaryDirectory(dir=home, prefix=f".{bundle.path.name}-{to}-") as temporary:
        beside = Path(temporary)
        progress.at("export", 0.0, to)
        decisions, checks = _made(bundle, exporter, chosen, beside, samples, progress)
        steps = [*manifest.recipe.get("export", []), {to: options}]
        added = bundle.add_content(
            place,
            beside / place,
            recipe={**manifest.recipe, "export": steps},
            decisions=[*manifest.decisions, *decisions],
            checks=[*manifest.checks, *checks],
        )
    # what they say of the bundle's exports and identity is of before
    rows = of_original([Row.model_validate(row) for row in added.measurements], manifest.model.source.sha256)
    files, missing = documents(added.manifest, rows, added.path)
    if not any(entry.path == REPORT for entry in manifest.files):
        files.pop(REPORT)  # nothing was measured that a page would show
    for taken in missing:
        progress.note(f"{taken.where}: {taken.reason}")
    added = added.put_all(files)
    progress.at("check", 1.0)
    return Exported(added, to, checks, decisions)


def _held(bundle: Bundle, to: str, layers: LayerSpec) -> str:
    """Name the exports for these layers; else the command to run the checkpoint."""
    others = []
    for name in plugins.EXPORTERS.names():
        other = load_exporter(name)
        if name != to and other.adds and not usage.has(bundle.manifest, f"{folder_of(name)}/"):
            with suppress(InputError, MissingDependency):
                other.accepts(other.Options(**options_of(other, (), bundle)), layers)
                others.append(f"--to {name}")
    runs = ["its checkpoint runs as it is", *usage.generate(bundle.manifest, str(bundle.path))]
    return f"what can hold it: {', '.join(others)}" if others else ": ".join(runs)


def _demand_possible(bundle: Bundle, exporter: Any, calibration: str | None) -> None:
    """Refuse a bundle or format without any possible export."""
    graph = holds_graph(bundle)
    if graph and (is_network(bundle) or not exporter.reads_graphs):
        raise InputError(
            "export-graph",
            where=str(bundle.path),
            value="compiled from an ONNX graph",
            rule="a graph's bundle has no checkpoint to export from; OpenVINO's export of integer graphs needs none",
            remedy=f"its graph runs as it is: {file_of(bundle)}"
            + ("; for ONNX Runtime's kernels, compile with int8-network" if is_network(bundle) else "")
            + ("; for an engine, compile the float graph with int8-tensorrt" if exporter.builds else ""),
        )
    if calibration is not None and not graph:
        rule = "the exports of a graph are compared on samples"
        raise InputError("usage", where="--calibration", value="the bundle holds no graph", rule=rule)
    if not exporter.adds:
        adding = [name for name in plugins.EXPORTERS.names() if load_exporter(name).adds]
        remedy = f"one of {', '.join(adding)}; or compile with --set 'export=[{{{exporter.name}: {{}}}}]'"
        where, value = f"--to {exporter.name}", "made by a compile only"
        rule = "an export that is made from a checkpoint"
        raise InputError("export-unsupported", where=where, value=value, rule=rule, remedy=remedy)


def _layers(bundle: Bundle) -> LayerSpec:
    """Describe the layers of a bundle with a checkpoint."""
    from quantkit.model.source.open import open_written

    manifest = bundle.manifest
    schemes = {layer.name: WeightScheme.model_validate(layer.scheme) for layer in manifest.layers}
    inputs = {layer.name: layer.activations for layer in manifest.layers if layer.activations is not None}
    cache = (manifest.recipe.get("scheme") or {}).get("kv_cache")
    return LayerSpec(
        schemes,
        list(schemes),
        activations={name: ActivationScheme.model_validate(scheme) for name, scheme in inputs.items()},
        cache=None if cache is None else CacheScheme.model_validate(cache),
        source=open_written(bundle.model_folder) if usage.has(manifest, "model/") else None,
        stacked=usage.experts(manifest),
    )


def _made(
    bundle: Bundle, exporter: Any, chosen: Any, beside: Path, samples: Mapping[str, Any], progress: Progress
) -> tuple[list[Decision], list[Check]]:
    """Make an export and check it, in a folder beside the bundle. Raises GateError `check-failed`."""
    from quantkit.exporters.values import Values

    place, graph = beside / folder_of(exporter.name), holds_graph(bundle)
    if graph:
        decisions = exporter.add_graph(file_of(bundle), place, chosen)
    else:
        decisions = exporter.export(place, Values.of_bundle(bundle.path), chosen)
        # the check reads the expected values from the checkpoint
        for name in ("model", "manifest.json"):
            (beside / name).symlink_to((bundle.path / name).resolve())
    progress.at("check", 0.0, f"reloading the {exporter.name}")
    checks = exporter.check_graph(file_of(bundle), place, samples) if graph else exporter.check(beside)
    demand(checks, "the export is not what the checkpoint is; nothing was added. Please report it")
    if exporter.builds:
        built = exporter.build(beside, chosen, lambda share, words: progress.at("build", share, words))
        decisions = [*decisions, *engines.notes(beside, built)]
    return decisions, checks


def engine_options(bundle: Bundle, exporter: Any, changes: Sequence[str]) -> dict[str, Any]:
    """Return the options of an engine from a bundle's network: for this GPU, where nobody asked for another."""
    options = options_of(exporter, changes, bundle)
    asked = {change.partition("=")[0] for change in changes}
    return engines.here(options, asked, exporter.capabilities(exporter.Options(**options)))


def _demand_codes(bundle: Bundle) -> None:
    """Refuse a bundle without the codes for an export."""
    if not usage.has(bundle.manifest, "model/"):
        code, value, remedy = "bundle-without-checkpoint", "no model/", "compile with `export: [checkpoint: {}]`"
    elif bundle.manifest.layers and not usage.packed(bundle.manifest):
        code, value = "bundle-dense", "its checkpoint holds dequantized weights"
        remedy = "compile with `export: [checkpoint: {layout: pack-quantized}]`"
    else:
        return
    rule = "an export is made from the codes in the checkpoint"
    raise InputError(code, where=str(bundle.path), value=value, rule=rule, remedy=remedy)


def options_of(exporter: Any, changes: Sequence[str], bundle: Bundle) -> dict[str, Any]:
    """Return the exporter's options: the target's, then those of the request."""
    target = bundle.manifest.target or {}
    read = [name for name in exporter.runtimes if name in target.get("runtimes", [])]
    defaults = dict(target.get("build", {}).get((read or exporter.runtimes)[0], {}))
    if read:
        defaults |= {"library": read[0], "profiles": target.get("profiles", [])}
        defaults |= {"sm": sm} if (sm := target.get("arch", {}).get("sm")) else {}
    options = {name: defaults[name] for name in exporter.Options.model_fields if name in defaults}
    for change in changes:
        name, equals, text = change.partition("=")
        if not equals:
            remedy = "e.g. accuracy_level=0"
            raise InputError("set-invalid", where="--set", value=change, rule="NAME=YAML", remedy=remedy)
        options[name] = parse_yaml(text, where=f"--set {name}")
    try:
        exporter.Options(**options)
    except ValidationError as error:
        known = {"": list(exporter.Options.model_fields)}
        raise from_validation(error, where="--set", code="set-invalid", known=known) from None
    return options
