"""What the compile of a graph will take, said before it begins: the predictor's description of an opened graph."""

from __future__ import annotations

from quantkit import machine
from quantkit.pipeline.estimate import here
from quantkit.pipeline.graphs.measure import QUICK
from quantkit.pipeline.graphs.prepared import PreparedGraph
from quantkit.pipeline.graphs.quantized import BATCH, SOLVING
from quantkit.pipeline.request import runs_here
from quantkit.planning.compiling.forecast import predict
from quantkit.planning.compiling.graph import GraphSpec
from quantkit.planning.compiling.result import Compiling

# seconds of measuring the machine's ceilings, beside the times of the model
_CEILINGS = 12.0


def estimate(prepared: PreparedGraph) -> Compiling:
    """For a graph whose inputs were opened, on this machine."""
    return predict(spec(prepared), here(machine.cores()))


def spec(prepared: PreparedGraph) -> GraphSpec:
    """The compile in sizes."""
    graph, request, sites = prepared.graph.model.graph, prepared.request, prepared.sites
    weights, activations = request.recipe.scheme.weights, request.recipe.scheme.activations
    rows = sum(site.weight.shape[site.rows] for site in sites)
    return GraphSpec(
        bytes=prepared.graph.bytes,
        stored=sum(value.const_value.nbytes for value in graph.initializers.values() if value.const_value is not None),
        nodes=len(graph),
        macs=sum(prepared.cost.macs.values()),
        inner=prepared.cost.inner,
        products=len(sites),
        weights=sum(site.weight.size for site in sites) if weights is not None else 0,
        scales=rows if weights is not None and weights.granularity == "channel" else len(sites),
        rows=rows,
        samples=len(prepared.calib),
        solved=min(SOLVING, len(prepared.calib)),
        together=prepared.calib.batch or BATCH,
        inputs=sum(each.nbytes for data in (prepared.calib, prepared.scoring) for each in data.arrays.values()),
        scored=len(prepared.scoring),
        fixed=activations is not None and not activations.dynamic,
        mixed=prepared.held is not None,
        timed=QUICK.seconds + _CEILINGS if request.speed and runs_here(request.target) else 0.0,
    )
