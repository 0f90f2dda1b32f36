"""Open, fuse and check a graph, its products and its samples before anything is written.

For TensorRT, products outside this table are kept in 16 bits or refused:

weights and inputs      int8 or fp8_e4m3 on both sides: convolutions and matrix products
weights alone           int8, int4 or fp8_e4m3: matrix products; TensorRT would expand a convolution's codes first
neither                 the whole graph in 16 bits
"""

from __future__ import annotations

import fnmatch
import glob
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit import plugins
from quantkit.bundle import Decision
from quantkit.errors import InputError, did_you_mean, one
from quantkit.exporters import LayerSpec, load_exporter
from quantkit.exporters.tensorrt import EXPORT as TENSORRT
from quantkit.model.device import AUTO, CPU
from quantkit.model.source.files import remember
from quantkit.passes import GRADIENTS, NOTE, UNGRADED, decision, pass_of
from quantkit.passes.gptq import Gptq
from quantkit.passes.mixed import Mixed
from quantkit.passes.rtn import Rtn
from quantkit.pipeline.blocks import tokens
from quantkit.pipeline.blocks.layers import about, account_graph
from quantkit.pipeline.graphs.answers import SampleCost, cost
from quantkit.pipeline.request import Request, default_out, located
from quantkit.planning.assigned import ROLES
from quantkit.planning.support import ask, demand_kind, graph_schemes
from quantkit.recipe import ExportStep, Recipe
from quantkit.runtimes.tensorrt.file import DATA, NETWORK

if TYPE_CHECKING:
    from quantkit.calibrate.sets.card import Split
    from quantkit.calibrate.sets.inputs import InputSet
    from quantkit.graph.open import FloatGraph
    from quantkit.graph.pairs.placement import Placement
    from quantkit.graph.sites import Site
    from quantkit.model.source.alias import Alias
    from quantkit.runtimes.tensorrt.library import Library

EXPORT = TENSORRT.name
WEIGHTS = ("int8", "int7", "int4", "fp8_e4m3")
_ONNX = ("", "ai.onnx")


@dataclass(frozen=True)
class PreparedGraph:
    """An opened, fused and checked float graph; nothing has been written.

    Attributes:
        ref: `alias:fashion-mnist-cnn` or `path:model.onnx`.
        sites: products to quantize.
        held: samples that decide which products stay in floats; None where no product may.
        cost: cost of one sample.
    """

    request: Request
    graph: FloatGraph
    ref: str
    sites: Sequence[Site]
    calib: InputSet
    scoring: InputSet
    held: InputSet | None
    cost: SampleCost
    out: Path
    decisions: list[Decision]

    def keeping(self, tensors: Collection[str], placed: Callable[[Collection[str]], Placement]) -> list[str]:
        """Return the tensors kept by the recipe, and the products to keep for leaving them without pairs."""
        from quantkit.graph.pairs.placement import without

        names = without(tensors, self.sites, [site.name for site in self.sites], placed)
        return [*self.request.recipe.keep, *map(glob.escape, names)] if names else []


def prepare(request: Request) -> PreparedGraph:
    """Open and check everything. Raises InputError."""
    if request.device not in (CPU, AUTO):
        value = f"{request.model} is a float ONNX graph"
        rule = "graphs are observed and solved in ONNX Runtime on the processor"
        raise InputError("device-unsupported", f"--device {request.device}", value, rule, "--device cpu, or auto")
    from quantkit.graph.fuse import fuse, fusions
    from quantkit.graph.open import open_graph
    from quantkit.graph.sites import sites

    recipe, file = request.recipe, located(request)
    graph, engine = open_graph(file.path, file.name), wanted(recipe)
    if file.alias is None:
        remember(graph.sha256, file.path.absolute())
    # an encoder is a graph all the same, and compiled as networks are
    demand_kind(recipe, request.target, (graph.kind, "network"), file.ref, f"{one(graph.kind)}, as an ONNX graph")
    tokens.demand_talking(recipe.calibration, graph.kind)
    as_asked = recipe
    if EXPORT in request.left_out:
        as_asked = recipe.model_copy(update={"export": [ExportStep(name=EXPORT)]})
    decisions = ask(as_asked, request.target, "network").decisions("network")
    weights, activations = (recipe.scheme.weights, recipe.scheme.activations) if engine else graph_schemes(recipe)
    if recipe.calibration.pictures is not None:
        rule, remedy = "of a graph it is the number of images", "--calibration names their set"
        raise InputError("calibration-images", "calibration.images", recipe.calibration.pictures, rule, remedy)
    calib = inputs_of(request, graph, "calib", file.alias, int(recipe.calibration.images))
    scoring = inputs_of(request, graph, "eval", file.alias, None)
    feed = calib.first(2)
    by_tensor = weights is not None and weights.granularity == "tensor"
    # with one scale a channel it gains weights nothing and costs activations something
    fused, _ = fuse(graph.model, [feed], chosen=fusions([feed], equalize=by_tensor))
    decisions += [decision(step.fusion, NOTE, step.node, step.reason) for step in fused if not step.done]
    products = sites(graph.model)
    _check_globs(recipe, [site.name for site in products])
    patterns = [*recipe.keep, *(override.match for override in recipe.overrides if override.weights is None)]
    chosen = [site for site in products if not any(fnmatch.fnmatch(site.name, pattern) for pattern in patterns)]
    if engine is not None:
        chosen, taken = takes(engine, recipe, graph, chosen)
        decisions += taken
    if not chosen and weights is not None:
        value = f"{len(products)} products with constant weights" + (", all kept" if products else "")
        remedy = "--set keep=[]" if products else "a float graph with convolutions or linears"
        raise InputError("no-linears", file.path.name, value, "something is quantized", remedy)
    if weights is not None:
        decisions += about(account_graph(graph.model, [site.name for site in chosen], decisions))
    for step, run in ((step, pass_of(step)) for step in recipe.passes):
        if run.scope == "answers":
            remedy = f"take `{step.name}` out of the recipe's passes, or compile the model's folder"
            raise InputError("recover-unable", graph.name, f"passes: {step.name}", run.on_graphs, remedy)
        if run.on_graphs:
            code = NOTE if run.for_blocks else "declined"
            decisions.append(decision(step.name, code, graph.name, run.on_graphs))
        elif GRADIENTS in run.needs_with(step.settings):
            reason = "only linears of a decoder's blocks have gradients"
            decisions.append(decision(step.name, UNGRADED, graph.name, reason, step.settings.gradients, 0))
    grouped = [site.name for site in chosen if site.group > 1]
    if by_tensor and grouped and any(step.name == Gptq.name for step in recipe.passes):
        reason = f"{len(grouped)} convolutions in groups have one scale, which no group can choose alone"
        decisions.append(decision(Gptq.name, "nearest", grouped[0], reason, Gptq.name, Rtn.name))
    sliding = sum(site.is_conv for site in chosen)
    dynamic = activations is not None and activations.dynamic
    if activations and dynamic and sliding and (activations.granularity, activations.symmetric) != ("tensor", False):
        reason = f"{sliding} convolutions sum over space: one scale and one zero point for all that comes in"
        decisions.append(decision("activations", "by-tensor", graph.name, reason, activations.granularity, "tensor"))
    mixed = next((step.settings for step in recipe.passes if step.name == Mixed.name), None)
    if mixed is not None and dynamic:
        value = "the pass mixed with dynamic activations"
        rule = "the pass keeps products in floats only among those with fixed scales"
        remedy = "--set scheme.activations.dynamic=false, or leave the pass out"
        raise InputError("scheme-unsupported", f"recipe {recipe.name}", value, rule, remedy)
    held = None if mixed is None else inputs_of(request, graph, "tune", file.alias, mixed.samples)
    sets = [calib, scoring] if held is None else [calib, scoring, held]
    decisions += [decision("calibrate", NOTE, data.name, note) for data in sets for note in data.notes]
    graph_export = plugins.exporters_that_store("graph")[0]
    becomes = ExportStep(name=graph_export, options={"dialect": "onnxruntime"}) if engine is None else engine
    others = [step.name for step in recipe.export if step.name != becomes.name]
    if others:
        whole = "onnx/model.onnx" if engine is None else "an engine"
        reason = f"a graph becomes {whole} alone, no {', '.join(others)}"
        decisions.append(decision("export", NOTE, graph.name, reason))
        recipe = recipe.model_copy(update={"export": [becomes]})
        request = replace(request, recipe=recipe)
    out = request.out or default_out(graph.name, recipe.name, resume=request.resume)
    costs = cost(graph.model, products, feed)
    if scoring.labels is not None and int(scoring.labels.max()) >= max(costs.outputs, 2):
        rule = f"the graph has {costs.outputs} outputs a sample, so classes are below that number"
        remedy = "score it on samples with labels of its own classes"
        raise InputError("label-out-of-range", scoring.name, f"label {int(scoring.labels.max())}", rule, remedy)
    return PreparedGraph(request, graph, file.ref, chosen, calib, scoring, held, costs, out, decisions)


def _check_globs(recipe: Recipe, names: Sequence[str]) -> None:
    """Refuse patterns without effect. Raises InputError `scheme-unsupported`, `-unmatched`."""
    for override in recipe.overrides:
        if override.weights is not None or override.activations is not None:
            where, remedy = f"overrides: {override.match}", "`weights: null` in the override, or keep"
            rule = "each product of a graph has the recipe's scheme or stays in float32"
            raise InputError("scheme-unsupported", where=where, value="a scheme of its own", rule=rule, remedy=remedy)
    asked = [("override", "overrides", override.match) for override in recipe.overrides]
    asked += [("keep", "keep", pattern) for pattern in recipe.keep if pattern not in ROLES]
    for code, where, pattern in asked:
        if not any(fnmatch.fnmatch(name, pattern) for name in names):
            value, remedy = f"{pattern!r} matches no product", did_you_mean(pattern, names)
            rule = "every glob matches something"
            raise InputError(f"{code}-unmatched", where=where, value=value, rule=rule, remedy=remedy)


def inputs_of(request: Request, graph: FloatGraph, split: Split, alias: Alias | None, samples: int | None) -> InputSet:
    """Load the recipe's set where the graph takes it, else the model's own. Raises InputError."""
    from quantkit.calibrate.sets.inputs import load_inputs

    recipe, how = request.recipe, alias.preprocess if alias is not None else None

    def load(name: str) -> InputSet:
        asked: dict[str, Any] = {"samples": samples, "seed": recipe.seed, "preprocess": how}
        return load_inputs(name, split, graph.inputs, where=graph.path.name, **asked)

    try:
        return load(recipe.calibration.set)
    except InputError as problem:
        if problem.code != "calibration-kind":
            raise
        if alias is not None:
            return load(alias.calibration)
        rule = f"a graph is calibrated on samples of its inputs: {', '.join(value.name for value in graph.inputs)}"
        remedy = "--calibration ./FILE.npz with an array for each input, or a folder of images"
        raise InputError(problem.code, recipe.calibration.set, problem.value, rule, remedy) from None


def wanted(recipe: Recipe) -> ExportStep | None:
    """Return the recipe's TensorRT export; None where a graph becomes one for ONNX Runtime."""
    return next((step for step in recipe.export if step.name == EXPORT), None)


def takes(
    step: ExportStep, recipe: Recipe, graph: FloatGraph, chosen: Sequence[Site]
) -> tuple[list[Site], list[Decision]]:
    """Choose the products to quantize for an engine, and explain each omission.

    Args:
        chosen: products not kept by the recipe.

    Raises InputError: `scheme-unsupported`, `layout-unsupported`, `network-unsupported`, `profile-unknown-size`,
    `gpu-absent`, `sm-unsupported`; MissingDependency: the library.
    """
    weights, activations = recipe.scheme.weights, recipe.scheme.activations
    exporter, library = load_exporter(EXPORT), TENSORRT.parser(step.settings)
    _demand_known(graph, library)
    if step.settings.type != "float16":
        rule = "a graph becomes a network in float16: no library here can check convolutions in bfloat16"
        raise InputError("layout-unsupported", "tensorrt.type", step.settings.type, rule, "--set tensorrt.type=float16")
    unsupported = ""
    sides = {form.format.replace("int7", "int8") for form in (weights, activations) if form is not None}
    if any(run.name == Mixed.name for run in recipe.passes):
        unsupported, rule = "the pass mixed", "what it keeps is searched for with ONNX Runtime's kernels"
        remedy = "--recipe int8-tensorrt; `keep` names the products that stay in 16 bits"
    elif weights is not None and (weights.format not in WEIGHTS or len(sides) > 1):
        unsupported = f"weights {weights.format}, inputs {activations.format if activations else 'float'}"
        rule = f"weights are in {', '.join(WEIGHTS)}; inputs have the weights' 8-bit format, or stay floats"
        remedy = "--recipe int8-tensorrt"
    if unsupported:
        where = f"recipe {recipe.name}"
        raise InputError("scheme-unsupported", where=where, value=unsupported, rule=rule, remedy=remedy)
    asked, decisions = LayerSpec(), list[Decision]()
    fitting: list[Site] = []
    for site in chosen if weights is not None else ():
        assert weights is not None
        columns = site.matrix().shape[1]
        if site.is_conv and activations is None:
            why = (
                "a convolution multiplies what has 8 bits on both sides, or floats: codes of weights alone are expanded"
            )
        elif recipe.on_indivisible == "keep" and weights.group and columns % weights.group:
            why = f"K {columns} is no multiple of {weights.group}"
        else:
            fitting.append(site)
            continue
        decisions.append(decision(EXPORT, "kept", site.name, why, weights.format, "float16"))
    if weights is not None:
        names = [site.name for site in fitting]
        asked = LayerSpec(
            dict.fromkeys(names, weights),
            shapes={site.name: site.matrix().shape for site in fitting},
            activations=dict.fromkeys(names, activations) if activations is not None else {},
        )
    exporter.accepts(step.settings, asked)
    _demand_read(graph, library)
    return fitting, decisions


def _demand_read(graph: FloatGraph, library: Library | None) -> None:
    """Let the library read the network with everything in 16 bits: a refusal there would come later too."""
    if library is None:
        return
    from quantkit.exporters.tensorrt.graph import network
    from quantkit.exporters.tensorrt.parser import demand_read
    from quantkit.exporters.trace.rewrite import save
    from quantkit.graph.run import Runner

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / NETWORK
        save(network(graph.model, {}, {}, "int8"), path, DATA)
        demand_read(library, path, graph.path.name)
        Runner(path, literal=True)  # which checks and scores the network


def _demand_known(graph: FloatGraph, library: Library | None) -> None:
    """Refuse operators unknown to engines, and free sizes missing from the profiles."""
    from quantkit.exporters.tensorrt.parser import Refused, refusal, unknown

    nodes = list(graph.model.graph.all_nodes())
    own = {node.op_type for node in nodes if node.domain in _ONNX}
    absent = unknown(library, own) if library is not None else set()
    refused = [
        Refused(node.op_type, node.name or "", domain="" if node.domain in _ONNX else node.domain)
        for node in nodes
        if node.domain not in _ONNX or node.op_type in absent
    ]
    if refused:
        raise refusal(graph.path.name, "TensorRT", refused)
    for entry in graph.inputs:
        if None in entry.shape[1:]:
            value = f"shape {['?' if size is None else size for size in entry.shape]}"
            rule = "only the batch of a graph may vary: profiles define no other size"
            remedy = "export the graph with fixed sizes behind the first"
            raise InputError("profile-unknown-size", entry.name, value, rule, remedy)
