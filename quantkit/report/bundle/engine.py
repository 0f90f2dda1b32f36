"""Engine section of a bundle's report: the precision and time of each layer, from `measurement.engine_layers`.

Layers with more bits than asked come first; the others are grouped by kind.
"""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.measurement.accuracy.layerwise import LayerError
from quantkit.measurement.engine_layers import Costly, EngineProduct, Inspected
from quantkit.report.bundle import figures
from quantkit.report.kit import words
from quantkit.report.kit.tree import MARK, Exhibit, Line, Part, Remark, Sheet, Styled

_COST = ("layer of the engine", "share", "median", "fastest", "slowest", "kernel", "computes", "kernels tried")
_HEAD = ("layers of the model", "weights", "weights run as", "inputs", "inputs run as", "reason")
# most layers of a network in a table
SHOWN = 24


def sections(engines: Sequence[Inspected]) -> list[Exhibit]:
    """Build two exhibits for each engine: the precision by layer, and the costliest layers if they were timed."""
    exhibits = []
    for engine in engines:
        how = f"{engine.engine}, opened by {engine.library} on {engine.gpu}; from its inspector."
        exhibits.append(Exhibit(sentences(engine), [], [how], Sheet(_HEAD, _grouped(engine), 5), title=engine.engine))
        if costly := engine.costliest:
            share, verb = words.percent(sum(layer.share for layer in costly)), "takes" if len(costly) == 1 else "take"
            many = words.plural(len(costly), "layer")
            text = f"{many} {verb} {share} of a step's time, {costly[0].layer} the most."
            how = "Timed by the library's profiler, without CUDA graphs: the shares count, not the absolute times."
            sheet = Sheet(_COST, [_cost(layer) for layer in costly], 3)
            exhibits.append(Exhibit([text], [], [how, _tried(engine)], sheet, title="Costliest layers"))
    return exhibits


def sentences(engine: Inspected) -> list[str]:
    """Describe an engine: fallbacks to more bits, and its version of the network."""
    fallen = [product for product in engine.products if product.fell_back]
    unknown = sum(product.got is None for product in engine.products)
    count, whole = words.plural(len(engine.products), "quantized layer"), len(engine.products)
    if fallen:
        text = f"{len(fallen)} of {count} are multiplied in more bits than asked: {fallen[0].linear} first."
    elif unknown < whole:
        text = f"All named layers of {count} are multiplied as asked."
    else:
        text = f"The engine names none of {count}: their precision is not known."
    fusion = (
        f"{words.plural(engine.nodes, 'node')} became {words.plural(engine.layers, 'layer')}, {engine.fused} fused."
    )
    counted = {
        "Layers without a name in the engine": unknown if unknown < whole else 0,
        "Layers that only change a tensor's memory layout": len(engine.reformats),
        "Pairs of quantize and dequantize without a product behind them": len(engine.pairs),
    }
    return [text, *(f"{what}: {count}." for what, count in counted.items() if count), fusion]


def brief(engine: Inspected) -> list[Part]:
    """Build the screen of an engine: fallbacks, a line each, and the costliest layers."""
    fallen = [product for product in engine.products if product.fell_back]
    text = f": {' '.join(sentences(engine))}"
    parts: list[Part] = [Remark((MARK[not fallen], " ", Styled(engine.engine, "strong"), text))]
    if fallen:
        rows = [(product.linear, product.asked, str(product.got), product.why) for product in fallen[:10]]
        parts.append(Sheet(("fell back", "asked", "got", "reason"), rows, words=4))
    if engine.costliest:
        parts.append(Sheet(_COST[:6], [_cost(layer)[:6] for layer in engine.costliest], 1))
    return parts


def _grouped(engine: Inspected) -> list[list[str]]:
    fallen = [_product(product.linear, product) for product in engine.products if product.fell_back]

    def alike(product: EngineProduct) -> tuple[object, ...]:
        kind = figures.place(product.linear)[1]
        return kind, product.asked, product.got, product.inputs_asked, product.inputs_got

    groups = words.by((product for product in engine.products if not product.fell_back), alike)
    return fallen + [_product(f"{key[0]}, {len(group)} of them", group[0]) for key, group in groups.items()]


def _product(name: str, product: EngineProduct) -> list[str]:
    unsaid = "floats" if product.inputs_asked is None else "not known"
    inputs = [product.inputs_asked or "floats", product.inputs_got or unsaid]
    return [name, product.asked, product.got or "not known", *inputs, product.why]


def _cost(layer: Costly) -> list[str]:
    times = [words.duration(seconds) for seconds in (layer.seconds, layer.low, layer.high)]
    tried = ", ".join(f"{name} {words.duration(seconds)}" for name, seconds in layer.tried[:5])
    computed = ", ".join(layer.linears[:3]) or "–"
    return [layer.layer, words.percent(layer.share), *times, layer.tactic or layer.kind, computed, tried or "–"]


def _tried(engine: Inspected) -> str:
    if any(layer.tried for layer in engine.costliest):
        return "Kernels tried: times of the build, the fastest first."
    if engine.library.startswith("tensorrt_rtx"):
        return "TensorRT-RTX compiles ahead of time: it tries no kernels, so there are no times of others."
    return "The build tried no kernels: its timing cache had their times."


def layers(errors: Sequence[LayerError], notes: Sequence[str] = ()) -> list[Part]:
    """Build the table of the layers with the lowest cosines, and of the outputs, in the order of the network."""
    cosines = [-1.0 if error.cosine is None else error.cosine for error in errors]
    worst = sorted(range(len(errors)), key=lambda place: cosines[place])[:SHOWN]
    shown = sorted({*worst, *(place for place, error in enumerate(errors) if error.kind == "output")})
    engines = any(error.engine is not None for error in errors)

    def figure(value: float | None, how: str) -> str:
        return "–" if value is None else format(value, how)

    rows: list[list[Line]] = []
    for error in (errors[place] for place in shown):
        row: list[Line] = [error.layer, Styled(error.kind, "dim"), f"{error.max_error:.2%}", f"{error.mean_error:.2%}"]
        row += [figure(error.cosine, ".5f"), figure(error.snr, ".1f")]
        rows.append([*row, *([figure(error.engine, ".5f")] if engines else [])])
    head = ["layer", "", "max error", "mean error", "cosine", "SNR, dB", *(["engine"] if engines else [])]
    about = f"{len(errors)} layers; {len(shown)} are shown: the lowest cosines, and the outputs"
    return [Remark(about), Sheet(head, rows, words=2), *(Remark(note, "note") for note in notes)]
