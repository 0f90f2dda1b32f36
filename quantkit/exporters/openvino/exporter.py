"""Export a model in OpenVINO's own form (`openvino/model.xml`): codes as i4, u4 and u8 constants, the KV cache a state.

A graph is traced (`trace/transformer.py`), rewritten for OpenVINO and written as a temporary ONNX file. OpenVINO's
frontend reads that file; then the model gets its state and is saved (`model.py`). OpenVINO quantizes nothing: a check
reads every code back and compares it with the bundle's.

An NPU needs static shapes, and 4-bit weights without zero points, by group or row (OpenVINO's documentation). A growing
cache has no static shape.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from quantkit.bundle import Check, Decision
from quantkit.content import Closed
from quantkit.errors import InputError
from quantkit.exporters import Exporter, LayerSpec, unheld
from quantkit.exporters.onnx.exporter import demand_packages
from quantkit.exporters.onnx.nbits import refuse_bits
from quantkit.formats import load_format
from quantkit.runtimes.openvino.open import FOLDER, MODEL, Device, library
from quantkit.scheme import ActivationScheme, WeightScheme

if TYPE_CHECKING:
    from quantkit.exporters.values import Values
    from quantkit.model.sizes.storage import LaidOver, Storage
    from quantkit.target import State

_DOCS = "https://docs.openvino.ai/2025/openvino-workflow"
SHAPES = f"{_DOCS}/running-inference/inference-devices-and-modes/npu-device.html"
CODES = f"{_DOCS}-generative/inference-with-genai/inference-with-genai-on-npu.html"
_BITS = (4, 8)
_LEAVE = "leave `openvino` out of `export`"


class OpenvinoOptions(Closed):
    """Settings of `export: - openvino: {…}`.

    Args:
        device: device that will run the model: `CPU`, `GPU`, `NPU`, or `AUTO` (OpenVINO's choice).
        accuracy_level: accuracy of products with quantized weights on a CPU: 4 rounds their inputs to 8 bits in groups
            of 32 and is faster; 0 computes in float32.
        shape: static shape, which an NPU needs: [sequences, tokens] of an encoder, or [samples] of a graph.
    """

    # field that `model/sizes/storage.py` reads; always true here
    embedding: ClassVar = "float"
    prefill: ClassVar = "same"
    weight_codes: ClassVar = "int8"
    head_rows: ClassVar = 0

    device: Device = "CPU"
    accuracy_level: Literal[0, 4] = 4
    shape: tuple[()] | tuple[int] | tuple[int, int] = Field(default=())


class OpenvinoExporter(Exporter):
    """Exporter `openvino`."""

    name = "openvino"
    runtimes = ("openvino",)
    stores = "graph"
    moves = True
    adds = True
    reads_graphs = True
    place = FOLDER
    Options = OpenvinoOptions

    def accepts(self, options: OpenvinoOptions, asked: LayerSpec) -> None:
        """Refuse layers beyond OpenVINO or the device. Raises as `Exporter`; InputError `npu-unsupported`."""
        library()
        demand_packages("an OpenVINO export")
        asked.demand_graph(self.name)
        refuse(asked, options.device)
        if asked.source is not None:
            refuse_shape(asked.source.kind, options)

    def holds(self, options: OpenvinoOptions, runtime: str, asked: LayerSpec) -> State:
        """Return the support as `Exporter.holds` does."""
        refuse(asked, options.device)
        return "native"

    def storage(self, options: OpenvinoOptions, laid: LaidOver) -> Storage:
        """Predict the bytes as `Exporter.storage` does."""
        return laid.graph(options)

    def for_floats(self, options: OpenvinoOptions) -> OpenvinoOptions:
        """Drop the options about codes."""
        return OpenvinoOptions(**options.model_dump(exclude_unset=True, exclude={"accuracy_level"}))

    def export(self, folder: Path, values: Values, options: OpenvinoOptions) -> list[Decision]:
        """Trace and rewrite the model, convert it by OpenVINO, and write everything.

        Raises InputError: `npu-unsupported`, `attention-unsupported`, `export-untraceable`, `openvino-operator`;
        Stopped: `disk-full`; MissingDependency.
        """
        from quantkit.exporters.carried import carry
        from quantkit.exporters.onnx.exporter import context_of, dialect_weights, work
        from quantkit.exporters.openvino import model as openvino
        from quantkit.exporters.trace.rewrite import keep_few, save
        from quantkit.exporters.trace.transformer import trace

        source = values.source
        decoder = source.kind == "decoder"
        refuse_shape(source.kind, options)
        kind = "decoder" if decoder else "encoder"
        traced = trace(values.skeleton, kind, positions=decoder)
        graph = openvino.OpenvinoDialect(traced, dialect_weights(values)).apply()
        if decoder:
            keep_few(graph, optional=False)
        caches = [value.shape for value in graph.graph.inputs if str(value.name).startswith(openvino.PAST)]
        notes = {
            "kind": kind,
            "device": options.device,
            "accuracy_level": options.accuracy_level if values.schemes and not values.inputs else 0,
            "context": context_of(source.config),
            "vocabulary": int(source.config.get("vocab_size", 2)),
            "cache_bytes": sum(4 * int(shape[1]) * int(shape[3]) for shape in caches),  # type: ignore[index, arg-type, misc]
            **work(graph),
        }
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as beside:
            save(graph, Path(beside) / "model.onnx", "model.onnx.data")
            model = openvino.converted(Path(beside) / "model.onnx")
            openvino.without_guards(model)
            openvino.nibbles_around_zero(model)
            if decoder:
                model = openvino.with_state(model)
            if options.shape:
                openvino.fixed(model, options.shape)
            openvino.write(model, folder / MODEL, notes)
        carry(source, folder)
        return traced.decisions(self.name)

    def add_graph(self, graph: Path, folder: Path, options: OpenvinoOptions) -> list[Decision]:
        """Export as `Exporter.add_graph`. Raises InputError `npu-unsupported`, `openvino-operator`; Stopped."""
        from quantkit.exporters.openvino.model import converted, fixed, signed, write

        refuse_shape("network", options)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as beside:
            model = converted(signed(graph, Path(beside)))
        if options.shape:
            fixed(model, options.shape)
        write(model, folder / MODEL, {"kind": "network", "device": options.device})
        return []

    def check_graph(self, graph: Path, folder: Path, feed: Mapping[str, Any]) -> list[Check]:
        """Compare codes, bit by bit, and outputs with ONNX Runtime's: `openvino.codes`, `reload.openvino`."""
        from quantkit.exporters.openvino.model import check_graph

        return check_graph(graph, folder, feed)

    def check(self, bundle: Path, values: Values | None = None, options: Any = None, **how: Any) -> list[Check]:
        """Compare all codes (`openvino.codes`) and outputs (`reload.openvino`) with the expected values."""
        from quantkit.exporters.check import decided
        from quantkit.exporters.openvino.model import check

        values = values or decided(bundle)
        return [] if values is None else check(bundle / FOLDER, values)


def refuse(asked: LayerSpec, device: str) -> None:
    """Refuse layers beyond OpenVINO or the device.

    Raises InputError: `layout-unsupported`, naming the first layer; `npu-unsupported`.
    """
    asked.demand_float_cache("openvino")
    for linear, inputs in asked.activations.items():
        _refuse_inputs(linear, inputs, asked.schemes[linear])
    for linear, scheme in asked.schemes.items():
        if linear not in asked.activations:
            rule = f"OpenVINO stores integers of {' and '.join(map(str, _BITS))} bits packed"
            refuse_bits(linear, scheme, _BITS, rule, f"use int4 or int8, or {_LEAVE}")
        if device == "NPU" and load_format(scheme.format).bits == 4 and not scheme.symmetric:
            value, rule = "4-bit weights with zero points", "4-bit weights are symmetric"
            raise _refused_by_npu(linear, value, rule, CODES, "--recipe int4-symmetric")


def refuse_shape(kind: str, options: OpenvinoOptions) -> None:
    """Refuse, for an NPU, a model without a static shape. Raises InputError `npu-unsupported`."""
    if options.device != "NPU":
        return
    if kind == "decoder":
        value, remedy = "a decoder, whose cache grows", "export it with `openvino: {device: CPU}`, or GPU"
    elif not options.shape:
        value = "inputs of any shape"
        remedy = "export it with `openvino: {shape: [1, 128]}`, sequences and their tokens, or `shape: [1]`, samples"
    else:
        return
    raise _refused_by_npu("openvino.device", value, "only models with static shapes run on an NPU", SHAPES, remedy)


def _refused_by_npu(where: str, value: str, rule: str, source: str, remedy: str) -> InputError:
    return InputError("npu-unsupported", where=where, value=value, rule=f"{rule} ({source})", remedy=remedy)


def _refuse_inputs(linear: str, inputs: ActivationScheme, weight: WeightScheme) -> None:
    value = f"activations in {inputs.format}"
    if inputs.format != "int8":
        raise unheld(linear, value, "OpenVINO fuses pairs of 8-bit integers alone", _LEAVE)
    if inputs.dynamic or inputs.granularity != "tensor":
        rule = "OpenVINO chooses its own scales for dynamic inputs, whatever a file says"
        raise unheld(linear, f"{value}, scales by {inputs.granularity}", rule, f"fix them (--recipe int8), or {_LEAVE}")
    if weight.format not in ("int8", "int7") or weight.granularity not in ("channel", "tensor") or not weight.symmetric:
        rule = "a product of bytes has one scale a channel, and no zero point"
        raise unheld(linear, f"{value}, weights in {weight.format} by {weight.granularity}", rule, _LEAVE)


EXPORT = OpenvinoExporter()
