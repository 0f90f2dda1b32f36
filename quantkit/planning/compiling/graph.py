"""What the compile of a float ONNX graph computes, holds and writes: products of a graph instead of blocks.

Its rates are those of an ordinary core and were not fitted: multiply-accumulates, the numbers of inner tensors that are
looked at or summed up, and what starting a session of ONNX Runtime takes for each product that is solved.
"""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.planning.compiling.result import Disk, Rates
from quantkit.planning.compiling.work import WorkCounts

# mixed precision: forwards of each product alone, and points that are solved again
_ALONE, _POINTS = 32, 4
# what Python with torch and ONNX Runtime takes; how often the weights are in memory: the file, the graph, a clone, and
# a session of it; how often what inner tensors hold of a feed
_INTERPRETER, _COPIES, _HELD = 0.7e9, 5, 3
# bytes of a node in a file; of a product's quantizers and names; of its step: a line of the journal, a file's head
_NODE, _SITE, _STEP = 200, 1500, 600
# two sessions and the clones of the graph for one product; 10 billion multiply-accumulates a second of a core, 60
# million numbers that are looked at and 8 million that become sums
RATES = Rates(
    {
        "seconds": {"of": "clock", "value": 1.0, "parallel": False},
        "sessions": {"of": "clock", "value": 0.15, "parallel": False},
        "macs": {"of": "clock", "value": 1 / 10e9, "parallel": True},
        "scanned": {"of": "clock", "value": 1 / 60e6, "parallel": False},
        "summed": {"of": "clock", "value": 1 / 8e6, "parallel": False},
    },
    {},
    (1.0, 1.0),
    {},
)


@dataclass(frozen=True)
class GraphSpec:
    """One compile of a graph.

    Args:
        stored: bytes of its constants.
        macs: multiply-accumulates of one sample.
        inner: numbers in the tensors between its nodes, of one sample.
        products: that are quantized.
        weights, scales, rows: of those products; no weights where nothing is quantized.
        samples: that calibrate.
        solved: of them, those that products are solved on.
        together: samples of one feed.
        inputs: bytes of all samples.
        scored: samples that score.
        fixed: whether ranges of activations are measured.
        mixed: whether products may stay in float32.
        timed: seconds that timing takes; 0 where nothing is timed.
    """

    bytes: int
    stored: int
    nodes: int
    macs: int
    inner: int
    products: int
    weights: int
    scales: int
    rows: int
    samples: int
    solved: int
    together: int
    inputs: int
    scored: int
    fixed: bool
    mixed: bool
    timed: float = 0.0


def counted(spec: GraphSpec) -> dict[str, WorkCounts]:
    """Part -> kind of work -> how much of it."""
    parts = {}
    if spec.fixed:
        looked = {"macs": spec.samples * spec.macs, "scanned": spec.samples * spec.inner}
        parts["ranges"] = WorkCounts({"seconds": 1.0, **looked})
    # the graph runs twice, and what every product sees becomes sums
    run = {"macs": 2 * spec.solved * spec.macs, "summed": spec.solved * spec.inner}
    parts["codes"] = WorkCounts({"sessions": spec.products, **run})
    if spec.mixed:
        again = {kind: _POINTS * amount for kind, amount in parts["codes"].items()}
        parts["mixed"] = WorkCounts({"seconds": spec.products, "macs": _ALONE * spec.products * spec.macs}) + again
    parts["score"] = WorkCounts({"seconds": 1.0, "macs": 2 * spec.scored * spec.macs})
    if spec.timed:
        parts["speed"] = WorkCounts({"seconds": spec.timed})
    return parts


def peaks(spec: GraphSpec) -> dict[str, float]:
    """Part -> bytes resident at its peak; all of a graph's compile is one part.

    Held of activations: what is shown of one feed, or what products that are still to be solved read of all of them.
    """
    activations = 4.0 * spec.inner * max(_HELD * spec.together, spec.solved / 2)
    return {"codes": _INTERPRETER + _COPIES * spec.bytes + spec.inputs + activations}


def disk(spec: GraphSpec) -> Disk:
    """Bytes of the bundle, and of what stands beside it until it is finished."""
    network = spec.stored + _NODE * spec.nodes
    if not spec.weights:
        return Disk(network, 0, 0)
    # codes are bytes, whatever they hold; of each row a scale and a sum of biases
    bundle = network - 3 * spec.weights + 12 * spec.scales + _SITE * spec.products
    # in steps a second sum of biases, and where products may be kept, two more solves
    step = spec.weights + 4 * spec.scales + 8 * spec.rows + _STEP * spec.products
    return Disk(bundle, 3 * step if spec.mixed else step, 0)
