"""What the compile of a graph will take of memory and disk: an opened graph in sizes."""

from __future__ import annotations

from quantkit.pipeline.graphs.prepared import PreparedGraph
from quantkit.pipeline.graphs.quantized import BATCH, SOLVING
from quantkit.planning.compiling import Compiling, GraphSpec


def estimate(prepared: PreparedGraph) -> Compiling:
    """For a graph whose inputs were opened."""
    return spec(prepared).compiling()


def spec(prepared: PreparedGraph) -> GraphSpec:
    """The compile in sizes."""
    graph, sites, weights = prepared.graph.model.graph, prepared.sites, prepared.request.recipe.scheme.weights
    rows = sum(site.weight.shape[site.rows] for site in sites)
    return GraphSpec(
        bytes=prepared.graph.bytes,
        stored=sum(value.const_value.nbytes for value in graph.initializers.values() if value.const_value is not None),
        nodes=len(graph),
        inner=prepared.cost.inner,
        products=len(sites),
        weights=sum(site.weight.size for site in sites) if weights is not None else 0,
        scales=rows if weights is not None and weights.granularity == "channel" else len(sites),
        rows=rows,
        solved=min(SOLVING, len(prepared.calib)),
        together=prepared.calib.batch or BATCH,
        inputs=sum(each.nbytes for data in (prepared.calib, prepared.scoring) for each in data.arrays.values()),
        mixed=prepared.held is not None,
    )
