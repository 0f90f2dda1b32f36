"""A graph that is to be compiled: opened, fused, its products and images found good, before anything is written.

What TensorRT can make of a graph: refused or kept in 16 bits before any work is done.

weights and inputs      int8 or fp8_e4m3 on both sides: convolutions and products of matrices
weights alone           int8, int4 or fp8_e4m3: products of matrices; a convolution of codes would be expanded first
neither                 all of the graph in 16 bits
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
from quantkit.model.sizes.assigned import ROLES
from quantkit.passes import NOTE, decision, pass_of
from quantkit.passes.gptq import Gptq
from quantkit.passes.mixed import Mixed
from quantkit.passes.rtn import Rtn
from quantkit.pipeline.blocks import tokens
from quantkit.pipeline.blocks.layers import about, account_graph
from quantkit.pipeline.graphs.answers import SampleCost, cost
from quantkit.pipeline.request import Request, default_out, located
from quantkit.planning.support import ask, demand_kind, graph_schemes
from quantkit.recipe import ExportStep, Recipe
from quantkit.runtimes.tensorrt.file import DATA, NETWORK
from quantkit.scheme import ActivationScheme

if TYPE_CHECKING:
    from quantkit.calibrate.sets.card import Split
    from quantkit.calibrate.sets.inputs import InputSet
    from quantkit.graph.open import FloatGraph
    from quantkit.graph.pairs.placement import Placement
    from quantkit.graph.sites import Site
    from quantkit.model.source.alias import Alias
    from quantkit.runtimes.tensorrt.library import Library


@dataclass(frozen=True)
class PreparedGraph:
    """Opened and found good; nothing has been written.

    Args:
        request: as asked.
        graph: float, fused.
        ref: `alias:fashion-mnist-cnn` or `path:model.onnx`.
        sites: that are quantized.
        calib: what calibrates.
        scoring: what scores.
        held: what the choice of products to keep is measured on; None where none is made.
        cost: of one sample.
        out: the bundle's place.
        decisions: so far.
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
        """Return what the recipe keeps, and the products without which none of these tensors has a pair."""
        from quantkit.graph.pairs.placement import without

        names = without(tensors, self.sites, [site.name for site in self.sites], placed)
        return [*self.request.recipe.keep, *map(glob.escape, names)] if names else []


def _demand_processor(request: Request) -> None:
    """Raises InputError (`device-unsupported`)."""
    if request.device not in (CPU, AUTO):
        raise InputError(
            "device-unsupported",
            where=f"--device {request.device}",
            value=f"{request.model} is a float ONNX graph",
            rule="graphs are observed and solved in ONNX Runtime on the processor",
            remedy="--device cpu, or auto",
        )


def prepare(request: Request) -> PreparedGraph:
    """Open and check everything. Raises InputError."""
    _demand_processor(request)
    from quantkit.graph.fuse import fuse, fusions
    from quantkit.graph.open import open_graph
    from quantkit.graph.sites import sites

    recipe, file = request.recipe, located(request)
    path, ref, alias = file.path, file.ref, file.alias
    graph = open_graph(path, file.name)
    # an encoder is a graph all the same, and compiled as networks are
    demand_kind(recipe, request.target, (graph.kind, "network"), ref, f"{one(graph.kind)}, as an ONNX graph")
    tokens.demand_talking(recipe.calibration, graph.kind)
    engine = wanted(recipe)
    as_asked = recipe
    if EXPORT in request.left_out:
        as_asked = recipe.model_copy(update={"export": [ExportStep(name=EXPORT)]})
    answer = ask(as_asked, request.target, "network")
    weights, activations = (recipe.scheme.weights, recipe.scheme.activations) if engine else graph_schemes(recipe)
    decisions = answer.decisions("network")
    calib = inputs_of(request, graph, "calib", alias, recipe.calibration.images)
    scoring = inputs_of(request, graph, "eval", alias, None)
    feed = calib.first(2)
    by_tensor = weights is not None and weights.granularity == "tensor"
    # with one scale a channel it gains weights nothing and costs activations something
    chosen_fusions = fusions([feed], equalize=by_tensor)
    fused, _ = fuse(graph.model, [feed], chosen=chosen_fusions)
    missed = [each for each in fused if not each.done]
    decisions += [decision(each.fusion, NOTE, each.node, each.reason) for each in missed]
    found = sites(graph.model)
    _check_globs(recipe, [site.name for site in found])
    chosen = [site for site in found if not _kept(site.name, recipe)]
    if engine is not None:
        chosen, taken = takes(engine, recipe, graph, chosen)
        decisions += taken
    if not chosen and weights is not None:
        raise InputError(
            "no-linears",
            where=path.name,
            value=f"{len(found)} products with constant weights" + (", all kept" if found else ""),
            rule="something is quantized",
            remedy="--set keep=[]" if found else "a float graph with convolutions or linears",
        )
    if weights is not None:
        decisions += about(account_graph(graph.model, [site.name for site in chosen], decisions))
    for step in recipe.passes:
        each = pass_of(step)
        if each.on_graphs:
            code = NOTE if each.for_blocks else "declined"
            decisions.append(decision(step.name, code, graph.name, each.on_graphs))
    grouped = [site.name for site in chosen if site.group > 1]
    if by_tensor and grouped and any(step.name == Gptq.name for step in recipe.passes):
        reason = f"{len(grouped)} convolutions in groups have one scale, which no group can choose alone"
        decisions.append(decision(Gptq.name, "nearest", grouped[0], reason, Gptq.name, Rtn.name))
    sliding = sum(site.is_conv for site in chosen)
    if activations and activations.dynamic and sliding and not _by_tensor(activations):
        reason = f"{sliding} convolutions sum over space: one scale and one zero point for all that comes in"
        decisions.append(decision("activations", "by-tensor", graph.name, reason, activations.granularity, "tensor"))
    mixed = next((step.settings for step in recipe.passes if step.name == Mixed.name), None)
    dynamic = activations is not None and activations.dynamic
    if mixed is not None and dynamic:
        raise InputError(
            "scheme-unsupported",
            where=f"recipe {recipe.name}",
            value="the pass mixed, and activations quantized as the model runs",
            rule="products are kept high among those with fixed scales",
            remedy="--set scheme.activations.dynamic=false, or leave the pass out",
        )
    held = None if mixed is None else inputs_of(request, graph, "tune", alias, mixed.samples)
    sets = [calib, scoring] if held is None else [calib, scoring, held]
    decisions += [decision("calibrate", NOTE, each.name, note) for each in sets for note in each.notes]
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
    costs = cost(graph.model, found, feed)
    if scoring.labels is not None and int(scoring.labels.max()) >= max(costs.outputs, 2):
        raise InputError(
            "label-out-of-range",
            where=scoring.name,
            value=f"label {int(scoring.labels.max())}",
            rule=f"the graph gives {costs.outputs} numbers a sample, so that its classes are below that",
            remedy="score it on samples with labels of its own classes",
        )
    return PreparedGraph(request, graph, ref, chosen, calib, scoring, held, costs, out, decisions)


def _check_globs(recipe: Recipe, names: Sequence[str]) -> None:
    """Refuse what would be passed over in silence. Raises InputError `scheme-unsupported`, `-unmatched`."""
    for each in recipe.overrides:
        if each.weights is not None or each.activations is not None:
            raise InputError(
                "scheme-unsupported",
                where=f"overrides: {each.match}",
                value="a scheme of its own",
                rule="of a graph, a product has the recipe's scheme or stays in float32",
                remedy="`weights: null` in the override, or keep",
            )
    asked = [("override-unmatched", "overrides", each.match) for each in recipe.overrides]
    asked += [("keep-unmatched", "keep", pattern) for pattern in recipe.keep if pattern not in ROLES]
    for code, where, pattern in asked:
        if not any(fnmatch.fnmatch(name, pattern) for name in names):
            raise InputError(
                code,
                where=where,
                value=f"{pattern!r} matches no product",
                rule="every glob matches something",
                remedy=did_you_mean(pattern, names),
            )


def _by_tensor(scheme: ActivationScheme) -> bool:
    """Whether it has one scale and one zero point for all that comes in."""
    return (scheme.granularity, scheme.symmetric) == ("tensor", False)


def _kept(name: str, recipe: Recipe) -> bool:
    patterns = [*recipe.keep, *(each.match for each in recipe.overrides if each.weights is None)]
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def inputs_of(request: Request, graph: FloatGraph, split: Split, alias: Alias | None, samples: int | None) -> InputSet:
    """The recipe's set where the graph takes it, else the model's own. Raises InputError."""
    from quantkit.calibrate.sets.inputs import load_inputs

    recipe = request.recipe

    def load(name: str) -> InputSet:
        how = alias.preprocess if alias is not None else None
        asked: dict[str, Any] = {"samples": samples, "seed": recipe.seed, "preprocess": how}
        return load_inputs(name, split, graph.inputs, where=graph.path.name, **asked)

    try:
        return load(recipe.calibration.set)
    except InputError as problem:
        if problem.code != "calibration-kind":
            raise
        if alias is not None:
            return load(alias.calibration)
        raise InputError(
            problem.code,
            where=recipe.calibration.set,
            value=problem.value,
            rule=f"a graph is calibrated on samples of what it takes: {', '.join(each.name for each in graph.inputs)}",
            remedy="--calibration ./FILE.npz with an array for each input, or a folder of images",
        ) from None


EXPORT = TENSORRT.name
_ONNX = ("", "ai.onnx")
WEIGHTS = ("int8", "int7", "int4", "fp8_e4m3")


def wanted(recipe: Recipe) -> ExportStep | None:
    """The recipe's TensorRT export; None where a graph becomes one for ONNX Runtime."""
    return next((step for step in recipe.export if step.name == EXPORT), None)


def takes(
    step: ExportStep, recipe: Recipe, graph: FloatGraph, chosen: Sequence[Site]
) -> tuple[list[Site], list[Decision]]:
    """The products that are quantized, and what is not and why.

    Args:
        chosen: products that the recipe does not keep.

    Raises:
        InputError: `scheme-unsupported`, `layout-unsupported`, `network-unsupported`, `profile-unknown-size`,
            `gpu-absent`, `sm-unsupported`.
        MissingDependency: the library.
    """
    weights, activations = recipe.scheme.weights, recipe.scheme.activations
    exporter = load_exporter(EXPORT)
    library = TENSORRT.parser(step.settings)
    _demand_known(graph, library)
    if step.settings.type != "float16":
        raise InputError(
            "layout-unsupported",
            where="tensorrt.type",
            value=step.settings.type,
            rule="a graph becomes a network in float16: nothing here computes convolutions in bfloat16 to check it by",
            remedy="--set tensorrt.type=float16",
        )
    if any(each.name == Mixed.name for each in recipe.passes):
        raise InputError(
            "scheme-unsupported",
            where=f"recipe {recipe.name}",
            value="the pass mixed",
            rule="what it keeps is searched for with ONNX Runtime's kernels",
            remedy="--recipe int8-tensorrt; `keep` names what stays in 16 bits",
        )
    if weights is None:
        exporter.accepts(step.settings, LayerSpec())
        _demand_read(graph, library)
        return [], []
    sides = {weights.format.replace("int7", "int8"), activations.format if activations else ""}
    if weights.format not in WEIGHTS or (activations is not None and len(sides) > 1):
        raise InputError(
            "scheme-unsupported",
            where=f"recipe {recipe.name}",
            value=f"weights {weights.format}, inputs {activations.format if activations else 'float'}",
            rule=f"weights are in {', '.join(WEIGHTS)}; inputs are as the weights, in 8 bits, or floats",
            remedy="--recipe int8-tensorrt",
        )
    found, decisions = [], []
    for site in chosen:
        reason = _why_kept(site, recipe)
        if reason:
            decisions.append(decision(EXPORT, "kept", site.name, reason, weights.format, "float16"))
        else:
            found.append(site)
    names = [site.name for site in found]
    asked = LayerSpec(
        dict.fromkeys(names, weights),
        shapes={site.name: site.matrix().shape for site in found},
        activations=dict.fromkeys(names, activations) if activations is not None else {},
    )
    exporter.accepts(step.settings, asked)
    _demand_read(graph, library)
    return found, decisions


def _demand_read(graph: FloatGraph, library: Library | None) -> None:
    """Let the library read the network in which everything stays in 16 bits: what it refuses there, it would later."""
    if library is None:
        return
    from quantkit.exporters.tensorrt.network.graph import network
    from quantkit.exporters.tensorrt.parser import demand_read
    from quantkit.exporters.trace.rewrite import save
    from quantkit.graph.run import Runner

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / NETWORK
        save(network(graph.model, {}, {}, "int8"), path, DATA)
        demand_read(library, path, graph.path.name)
        Runner(path, literal=True)  # which checks and scores the network


def _why_kept(site: Site, recipe: Recipe) -> str:
    weights = recipe.scheme.weights
    assert weights is not None
    if site.is_conv and recipe.scheme.activations is None:
        return "a convolution multiplies what has 8 bits on both sides, or floats: codes of weights alone are expanded"
    columns = site.matrix().shape[1]
    if recipe.on_indivisible == "keep" and weights.group and columns % weights.group:
        return f"K {columns} is no multiple of {weights.group}"
    return ""


def _demand_known(graph: FloatGraph, library: Library | None) -> None:
    """Refuse operators that no engine can be made of, and free sizes that no profile speaks of."""
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
    for each in graph.inputs:
        if None in each.shape[1:]:
            raise InputError(
                "profile-unknown-size",
                where=each.name,
                value=f"shape {['?' if size is None else size for size in each.shape]}",
                rule="of a graph's sizes the batch alone is free: profiles speak of no other",
                remedy="export the graph with fixed sizes behind the first",
            )
