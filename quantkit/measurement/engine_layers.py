"""Map the layers of a TensorRT engine back to the model's, to check the types in which it multiplies.

The engine inspector lists layers after fusion. Each has its ONNX nodes (`Metadata`: `[ONNX Layer: NAME]`, separated by
U+001F) and the types of its inputs and outputs: `Format/Datatype` in TensorRT 10, `Datatype` beside `Format` in 11 and
TensorRT-RTX. The names of our nodes tell their roles: `LINEAR/output` is a product, `LINEAR.values` its dequantized
weight, `LINEAR/input.codes` and `LINEAR/input.values` the Q/DQ pair of its input. So a product

    reads codes         if its layer includes the weight's DequantizeLinear, or has an input of the codes' type
    reads 16 bits       if another layer dequantizes the weight, or the build folded it into floats

Sources: NVIDIA, "Engine Inspector" (TensorRT 10.16) and "Migrating IEngineInspector Usage from TensorRT 10.x to 11.x".
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from pydantic import ValidationError

from quantkit import limits
from quantkit.bundle import Check, Decision, LayerEntry
from quantkit.content import Closed
from quantkit.errors import InputError
from quantkit.passes import NOTE, decision
from quantkit.runtimes.tensorrt.file import FOLDER

NAME = "engine.precision"
SUFFIX = ".layers.json"
FALLBACK = "precision-fallback"
_NODE = re.compile(r"\[ONNX Layer: ([^\]\x1f]+?)\s*(?:\||\])")
_PROFILE = re.compile(r"\s*\[profile (\d+)\]\s*$")
# the library's words for types, in the order of the search
_TYPES = (
    (r"BF16|BFloat16", "bfloat16"),
    (r"FP16|Half", "float16"),
    (r"FP32|Float32|\bFloat\b", "float32"),
    (r"FP8|E4M3", "fp8"),
    (r"FP4|E2M1", "fp4"),
    (r"INT8|UINT8", "int8"),
    (r"INT4", "int4"),
    (r"INT32", "int32"),
    (r"INT64", "int64"),
    (r"BOOL", "bool"),
)
_FLOATS = ("float32", "bfloat16", "float16")
# the library's type of a format's codes
STORED = {
    **{"int4": "int4", "nf4": "int4", "int7": "int8", "int8": "int8"},
    **{"fp8_e4m3": "fp8", "mxfp8": "fp8", "nvfp4": "fp4"},
}


class Tensor(NamedTuple):
    """An input or output of a layer."""

    name: str
    type: str


@dataclass(frozen=True)
class EngineLayer:
    """One layer of an engine.

    Args:
        name: name in the profiler.
        kind: `gemm`, `kgen`, `Reformat`, ...
        tactic: kernel; "" if the engine does not name it.
        nodes: ONNX nodes of the layer.
        inputs, outputs: tensors of the layer.
        profile: index of its optimization profile.
    """

    name: str
    kind: str
    tactic: str = ""
    nodes: tuple[str, ...] = ()
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    profile: int = 0

    @property
    def reformats(self) -> bool:
        """Return True if it only changes a tensor's layout or type."""
        return self.kind.lower() == "reformat" or self.name.startswith(("Reformatting CopyNode", "Reformatted"))


class EngineProduct(Closed):
    """A quantized layer of the model, in the engine.

    Args:
        linear: name in the model.
        asked, inputs_asked: requested formats of its weights and inputs; None for floats.
        got, inputs_got: types in which the engine reads them; None if the engine does not name the layer.
        layer, tactic: layer of the engine, and its kernel.
        why: reason for another type than requested; "" without one.
    """

    linear: str
    asked: str
    got: str | None
    inputs_asked: str | None = None
    inputs_got: str | None = None
    layer: str = ""
    tactic: str = ""
    why: str = ""

    @property
    def fell_back(self) -> bool:
        """Return True if weights or inputs are multiplied in more bits than requested."""
        weights = self.got is not None and self.got != STORED.get(self.asked, self.asked)
        asked = None if self.inputs_asked is None else STORED.get(self.inputs_asked, self.inputs_asked)
        return weights or (asked is not None and self.inputs_got is not None and self.inputs_got != asked)


class Costly(Closed):
    """One of the slowest layers of an engine.

    Args:
        layer, kind, tactic: see `EngineLayer`.
        linears: the model's linears that it computes.
        seconds: median of its runs.
        low, high: shortest and longest run in seconds.
        share: share of the sum of all layers' times.
        tried: kernels that the build timed, with seconds, fastest first; empty without timings.
    """

    layer: str
    kind: str
    tactic: str
    linears: tuple[str, ...]
    seconds: float
    low: float
    high: float
    share: float
    tried: tuple[tuple[str, float], ...] = ()


class Inspected(Closed):
    """The report on one engine: `engine/NAME.layers.json`.

    Args:
        engine: file of the engine in the bundle.
        library: library that opened it.
        gpu: name of the GPU.
        layers: number of layers.
        fused: number of layers that combine several nodes.
        nodes: number of nodes that the layers name.
        reformats: names of layers that only change layout or type.
        pairs: DequantizeLinear nodes of inputs that no product's layer includes.
        products: quantized layers of the model.
        costliest: slowest layers; empty without a profile.
    """

    engine: str
    library: str
    gpu: str
    layers: int
    fused: int
    nodes: int
    reformats: tuple[str, ...] = ()
    pairs: tuple[str, ...] = ()
    products: tuple[EngineProduct, ...] = ()
    costliest: tuple[Costly, ...] = ()

    @property
    def check(self) -> Check:
        """Count layers multiplied in more bits than requested, as a check."""
        fallen = [product.linear for product in self.products if product.fell_back]
        return Check(name=NAME, value=len(fallen), limit=0, ok=not fallen, where="; ".join(fallen[:3]))

    def decisions(self) -> list[Decision]:
        """Record layers in more bits than requested, which `--strict` refuses, and one note on unnamed layers."""
        decisions = [
            decision("tensorrt", FALLBACK, product.linear, product.why, before=product.asked, after=product.got)
            for product in self.products
            if product.fell_back
        ]
        unknown = [product.linear for product in self.products if product.got is None]
        if unknown:
            words = f"{len(unknown)} layers are not named by the engine, so the type of their weights there is unknown"
            decisions.append(decision("tensorrt", NOTE, unknown[0], words))
        return decisions


def parse(information: Mapping[str, Any]) -> list[EngineLayer]:
    """Read the layers of `EngineInspector.get_engine_information(JSON)`.

    Raises InputError `engine-opaque` for an engine that was built without names of layers or details.
    """
    raw = information.get("Layers")
    if not isinstance(raw, Sequence) or not raw or any(not isinstance(layer, Mapping) for layer in raw):
        value, rule = "no details of its layers", "an engine must be built with ProfilingVerbosity.DETAILED"
        remedy = "build it anew: quantkit export BUNDLE --to tensorrt"
        raise InputError("engine-opaque", where="engine", value=value, rule=rule, remedy=remedy)
    return [_layer(layer) for layer in raw]


def stored(folder: Path) -> list[Inspected]:
    """Read the reports on a bundle's engines, by name; unreadable ones are skipped."""
    reports = []
    for path in sorted((folder / FOLDER).glob(f"*{SUFFIX}")):
        with contextlib.suppress(OSError, ValidationError):
            reports.append(Inspected.model_validate_json(limits.read(path)))
    return reports


def _layer(raw: Mapping[str, Any]) -> EngineLayer:
    name = str(raw.get("Name", ""))
    profile = _PROFILE.search(name)
    nodes = tuple(_NODE.findall(str(raw.get("Metadata", ""))))
    inputs = [*_tensors(raw.get("Inputs")), *_tensors(raw.get("Constants"))]
    kind, tactic, outputs = str(raw.get("LayerType", "")), str(raw.get("TacticName", "")), _tensors(raw.get("Outputs"))
    return EngineLayer(name, kind, tactic, nodes, tuple(inputs), tuple(outputs), int(profile[1]) if profile else 0)


def _tensors(raw: Any) -> Iterable[Tensor]:
    for tensor in raw if isinstance(raw, Sequence) and not isinstance(raw, str) else ():
        if isinstance(tensor, Mapping):
            # before version 11 the type is part of the words for the layout
            words = str(tensor.get("Datatype") or tensor.get("Format/Datatype") or "")
            yield Tensor(str(tensor.get("Name", "")), type_of(words))
        else:
            yield Tensor(str(tensor), "")


def type_of(words: str) -> str:
    """Return the type in the library's words: `float16` for `Row major linear FP16 format (kLINEAR)`; "" without one.

    >>> type_of("Thirty-two wide channel vectorized row major Int8 format.")
    'int8'
    """
    return next((name for pattern, name in _TYPES if re.search(pattern, words, re.IGNORECASE)), "")


def products(layers: Sequence[EngineLayer], linears: Sequence[LayerEntry]) -> list[EngineProduct]:
    """Map each quantized layer of the model to its layer in the engine; of several, the one in most bits."""
    # layers of each linear that hold its product, and that dequantize its weight
    multiply: dict[str, list[EngineLayer]] = {entry.name: [] for entry in linears}
    expand: dict[str, list[EngineLayer]] = {entry.name: [] for entry in linears}
    for layer in layers:
        for node in layer.nodes:
            name, _, part = node.rpartition(".")
            if node.endswith("/output") and node.removesuffix("/output") in multiply:
                multiply[node.removesuffix("/output")].append(layer)
            elif name in expand and "/" not in part:
                expand[name].append(layer)
    return [_product(entry, multiply[entry.name], expand[entry.name]) for entry in linears]


def _product(entry: LayerEntry, layers: Sequence[EngineLayer], expanders: Sequence[EngineLayer]) -> EngineProduct:
    asked = str(entry.scheme.get("format"))
    inputs = None if entry.activations is None else str(entry.activations.get("format"))
    read = [_read(entry, asked, inputs, layer, expanders) for layer in layers]
    if not read:
        return EngineProduct(linear=entry.name, asked=asked, got=None, inputs_asked=inputs)
    # with several profiles a product stands in several layers
    return next((product for product in read if product.fell_back), read[0])


def _read(
    entry: LayerEntry, asked: str, inputs_asked: str | None, layer: EngineLayer, expanders: Sequence[EngineLayer]
) -> EngineProduct:
    wanted = STORED.get(asked, asked)
    types = [tensor.type for tensor in layer.inputs]
    widest = next((name for name in _FLOATS if name in types), None)
    why, got = "", wanted
    if layer not in expanders and wanted not in types:
        apart = [expander for expander in expanders if expander.profile == layer.profile]
        got = widest or (apart[0].outputs[0].type if apart and apart[0].outputs else "")
        how = f"the layer {apart[0].name} dequantizes it" if apart else "it was folded into floats in the build"
        why = f"the product {layer.name} reads its weight in {got or 'another type'}: {how}"
    reads = None
    if inputs_asked is not None:
        stored = STORED.get(inputs_asked, inputs_asked)
        taken = f"{entry.name}/input.values" in layer.nodes
        reads = stored if stored in types or taken else widest
        if reads != stored:
            reason = f"its input is multiplied in {reads}: no kernel uses the Q/DQ pair before it"
            why = f"{why}; {reason}" if why else f"the product {layer.name}: {reason}"
    return EngineProduct(
        linear=entry.name,
        asked=asked,
        got=got or None,
        inputs_asked=inputs_asked,
        inputs_got=reads,
        layer=layer.name,
        tactic=layer.tactic,
        why=why,
    )


def unconsumed(layers: Sequence[EngineLayer]) -> list[str]:
    """List the inputs' DequantizeLinear nodes in layers without a product."""
    without = [layer.nodes for layer in layers if not any(node.endswith("/output") for node in layer.nodes)]
    return list(dict.fromkeys(node for nodes in without for node in nodes if node.endswith("/input.values")))


def costliest(
    layers: Sequence[EngineLayer],
    times: Mapping[str, Sequence[float]],
    tried: Mapping[str, Sequence[tuple[str, float]]] | None = None,
    count: int = 10,
) -> list[Costly]:
    """Rank the slowest layers.

    Args:
        layers: all layers.
        times: seconds of each run by layer, from the profiler.
        tried: kernels that the build timed, by layer.
        count: number of layers to return.
    """
    known = {layer.name: layer for layer in layers}
    medians = {name: median(taken) for name, taken in times.items() if taken}
    total = sum(medians.values())
    ranked = []
    for name in sorted(medians, key=lambda layer_name: -medians[layer_name])[:count]:
        layer = known.get(name, EngineLayer(name, ""))
        linears = [node.removesuffix("/output") for node in layer.nodes if node.endswith("/output")]
        ranked.append(
            Costly(
                layer=name,
                kind=layer.kind,
                tactic=layer.tactic,
                linears=tuple(dict.fromkeys(linears)),
                seconds=medians[name],
                low=min(times[name]),
                high=max(times[name]),
                share=medians[name] / total if total else 0.0,
                tried=tuple((tried or {}).get(name, ())),
            )
        )
    return ranked


def inspected(
    information: Mapping[str, Any],
    linears: Sequence[LayerEntry],
    *,
    engine: str,
    library: str,
    gpu: str,
    times: Mapping[str, Sequence[float]] | None = None,
    tried: Mapping[str, Sequence[tuple[str, float]]] | None = None,
) -> Inspected:
    """Build the report on an engine. Raises InputError `engine-opaque`."""
    layers = parse(information)
    return Inspected(
        engine=engine,
        library=library,
        gpu=gpu,
        layers=len(layers),
        fused=sum(len(layer.nodes) > 1 for layer in layers),
        nodes=len({node for layer in layers for node in layer.nodes}),
        reformats=tuple(layer.name for layer in layers if layer.reformats),
        pairs=tuple(unconsumed(layers)),
        products=tuple(products(layers, linears)),
        costliest=tuple(costliest(layers, times or {}, tried)),
    )
