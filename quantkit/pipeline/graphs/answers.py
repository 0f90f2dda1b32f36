"""Compare the answers of a graph with those of its quantized version, and count the cost of a sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quantkit import machine
from quantkit.errors import InputError
from quantkit.measurement.rows import Data, Device, Row

if TYPE_CHECKING:
    import onnx_ir as ir

    from quantkit.calibrate.sets.inputs import Feed, InputSet
    from quantkit.graph.outputs import OutputKinds
    from quantkit.graph.sites import Site

Array = NDArray[Any]
# a graph in some runtime: values of its inputs to those of its outputs
Run = Callable[[Mapping[str, Array]], Mapping[str, Array]]
RUNTIME = "onnxruntime"
# samples of one run that is scored
_SCORED = 32


@dataclass(frozen=True)
class SampleCost:
    """Cost of one sample: multiply-accumulates by site, numbers of the outputs, numbers between products."""

    macs: Mapping[str, int]
    outputs: int
    inner: int


def cost(model: ir.Model, sites: Sequence[Site], feed: Feed) -> SampleCost:
    """Count on the shapes of a run with real inputs.

    Raises:
        InputError: `onnx-unrunnable`; `onnx-outputs` where they are no finite floats, which nothing could be scored by.
    """
    from quantkit.graph.outputs import steady
    from quantkit.graph.run import Runner

    by = steady(model)
    shown = Runner(model, [*(site.output for site in sites), *by])(feed)
    samples = len(next(iter(feed.values())))
    macs = {site.name: site.macs(shown[site.output].shape, samples) for site in sites}
    outputs = [str(value.name) for value in model.graph.outputs]
    compared = list(dict.fromkeys([*outputs, *by]))
    floats = [name for name in compared if shown[name].dtype.kind == "f"]
    bad = [name for name in floats if not np.isfinite(shown[name]).all()]
    if bad or not floats:
        value = "NaN or infinity for calibration samples" if bad else "no floats"
        rule = "outputs are finite floats, so that the quantized graph can be compared"
        remedy = "check the samples and the weights" if bad else "make the last operator's input an output, too"
        raise InputError("onnx-outputs", ", ".join(bad or compared), value, rule, remedy)
    came = sum(shown[name].size for name in outputs)
    return SampleCost(macs, came // samples, sum(shown[site.output].size for site in sites) // samples)


def kinds_of(graph: ir.Model | Path) -> OutputKinds:
    """Return a graph's own description of its outputs."""
    import onnx_ir as ir

    from quantkit.graph.outputs import kinds

    return kinds(ir.load(graph) if isinstance(graph, Path) else graph)


def answers(
    graph: ir.Model | Path | Run,
    samples: InputSet,
    report: Callable[[float], None] = lambda done: None,
    size: int = _SCORED,
) -> dict[str, Array]:
    """Return each output's [n, ...] by its name; of rows whose number differs, an array [n] of arrays.

    Where an output has no row a sample, each sample is run by itself, if the graph takes one.
    """
    from quantkit.graph.run import Runner

    runner: Run = graph if callable(graph) else Runner(graph)
    values_of: dict[str, list[Array]] = {}
    done, apart = 0, samples.batch is None and size > 1
    for feed in samples.feeds(size):
        count = len(next(iter(feed.values())))
        for name, value in runner(feed).items():
            values_of.setdefault(name, []).append(value)
            if apart and (value.ndim == 0 or len(value) != count):
                return answers(runner, samples, report, size=1)
        done += count
        report(done / len(samples))
    sizes = [len(next(iter(feed.values()))) for feed in samples.feeds(size)]
    return {name: _joined(values, sizes) for name, values in values_of.items()}


def _joined(values: Sequence[Array], sizes: Sequence[int]) -> Array:
    """Join the answers to feeds of so many samples: a row per sample, or an item per feed."""
    tails = {value.shape[1:] for value in values}
    if len(tails) == 1 and all(value.ndim and len(value) == size for value, size in zip(values, sizes, strict=True)):
        return np.concatenate(values)
    if len({value.shape for value in values}) == 1:
        return np.stack(values)
    items = np.empty(len(values), object)
    for place, value in enumerate(values):
        items[place] = value[0] if all(part.ndim > 1 and len(part) == 1 for part in values) else value
    return items


def classes_of(expected: Mapping[str, Array], samples: InputSet, kinds: OutputKinds) -> list[str]:
    """Name the outputs with a score per class: those marked by the graph, else the one with labels."""
    shapes = {name: value.shape for name, value in expected.items() if value.dtype.kind == "f"}
    lists = {shape[1] for shape in shapes.values() if len(shape) > 2}
    # what has a column for each row of another output is one number of each: `scores` beside `boxes`
    flat = [
        name
        for name, shape in shapes.items()
        if (len(shape) == 2 and shape[1] not in lists) or (len(shape) == 1 and samples.labels is not None)
    ]
    rows = [name for name in flat if name not in kinds.selected]
    wide = [name for name in rows if shapes[name][1:] > (1,)]
    named = [name for name in wide if name in kinds.classes or shapes[name][1] in kinds.widths]
    if named or samples.labels is None:
        return named
    # labels of two classes may be for one number: a chance, or its logit
    single = rows if not wide and int(samples.labels.max()) <= 1 else []
    return wide if len(wide) == 1 else single if len(single) == 1 else []


def of_classes(values: Array) -> Array:
    """Return logits or chances of classes [n, C]; of a single number those of no and of yes."""
    values = values.reshape(len(values), -1)
    if values.shape[1] > 1:
        return values
    chance = bool((values >= 0).all() and (values <= 1).all())
    return np.concatenate([1 - values if chance else np.zeros_like(values), values], axis=1)


def agreement(
    expected: Mapping[str, Array],
    answered: Mapping[str, Array],
    samples: InputSet,
    kinds: OutputKinds,
    *,
    subject: str,
    baseline: str,
    runtime: str = RUNTIME,
) -> list[Row]:
    """Score one graph's answers against another's; `kinds` describes the graph's outputs."""
    from quantkit.measurement.accuracy.labelled import About, classification
    from quantkit.measurement.accuracy.outputs import outputs

    about = About(
        subject=subject,
        baseline=baseline,
        runtime=runtime,
        data=Data(set=samples.name, split=samples.split, sha256=samples.sha256, items=len(samples)),
        device=Device.model_validate(machine.device()),
        versions=machine.versions(),
    )
    names = classes_of(expected, samples, kinds)
    unit = "sample" if samples.channels is None else "image"
    rows: list[Row] = []
    # of several answers none says that it is the one that the labels are for
    labels, clusters = samples.labels if len(names) == 1 else None, samples.clusters
    for name in names:
        sides = of_classes(expected[name]), of_classes(answered[name])
        own = about if len(names) == 1 else replace(about, settings={**about.settings, "output": name})
        rows += classification(*sides, labels, about=own, unit=unit, clusters=clusters)
    # without labels it may be no answer but a vector; and what stands beside the answer may be lost on its own
    others = {name: value for name, value in expected.items() if name not in names or labels is None}
    if not others:
        return rows
    mine = {name: answered[name] for name in others}
    return rows + outputs(others, mine, about=about, clusters=clusters, chosen=kinds.selected)
