"""What TensorRT can make of a graph: refused or kept in 16 bits before any work is done.

weights and inputs      int8 or fp8_e4m3 on both sides: convolutions and products of matrices
weights alone           int8, int4 or fp8_e4m3: products of matrices; a convolution of codes would be expanded first
neither                 all of the graph in 16 bits
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.bundle import Decision
from quantkit.errors import InputError
from quantkit.exporters import LayerSpec, load_exporter
from quantkit.exporters.tensorrt import EXPORT as TENSORRT
from quantkit.passes import decision
from quantkit.passes.mixed import Mixed
from quantkit.recipe import ExportStep, Recipe
from quantkit.runtimes.tensorrt.file import DATA, NETWORK

if TYPE_CHECKING:
    from quantkit.graph.open import FloatGraph
    from quantkit.graph.sites import Site
    from quantkit.runtimes.tensorrt.library import Library

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
