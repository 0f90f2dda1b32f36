"""Export a model as a TensorRT engine and its network, which is checked on the CPU before the build.

`engine/` holds `network.onnx` with `network.onnx.data` (plain Q/DQ, `dialect.py`), the tokenizer, and for each kind of
GPU `NAME.engine` with `NAME.json`, the record of its build. An engine is executable code, so `runtimes.tensorrt` loads
it only from a verified bundle.

TensorRT-RTX builds ahead of time for a list of GPUs; TensorRT builds on the GPU itself. `engine: false` writes only the
network; `quantkit export BUNDLE --to tensorrt` then builds the engine on the machine with the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.bundle import Check, Decision
from quantkit.errors import InputError, MissingDependency
from quantkit.exporters import BuildReport, Exporter, LayerSpec, unheld
from quantkit.exporters.onnx.exporter import context_of, demand_packages, dialect_weights
from quantkit.exporters.tensorrt.engine import TENSORRT_ALONE, TensorrtOptions, build_engine
from quantkit.exporters.tensorrt.profiles import capacity, fitted, impossible
from quantkit.model.sizes.storage import padded
from quantkit.passes import NOTE, decision
from quantkit.runtimes.tensorrt.file import DATA, FOLDER, NETWORK
from quantkit.runtimes.tensorrt.library import Library, load, unsupported
from quantkit.scheme import ActivationScheme, CacheScheme, WeightScheme
from quantkit.target import Profile, State

if TYPE_CHECKING:
    from quantkit.exporters.tensorrt.dialect import CacheScales
    from quantkit.exporters.values import Values
    from quantkit.model.sizes.storage import LaidOver, Storage


class TensorrtExporter(Exporter):
    """Exporter `tensorrt`."""

    name = "tensorrt"
    runtimes = ("tensorrt_rtx", "tensorrt")
    stores = "engine"
    moves = True
    adds = True
    place = FOLDER
    builds = True
    Options = TensorrtOptions

    def accepts(self, options: TensorrtOptions, asked: LayerSpec) -> None:
        """Refuse unsupported layers. Raises the errors of `Exporter`; `sm-unsupported`, `gpu-absent`, `gpu-other`."""
        asked.demand_graph(self.name)
        _refuse(options, asked)
        if options.sm is not None:
            forms = {scheme.format: linear for linear, scheme in asked.schemes.items()}
            forms |= {inputs.format: linear for linear, inputs in asked.activations.items()}
            if asked.cache is not None:
                forms.setdefault(asked.cache.format, "scheme.kv_cache")
            for form, linear in forms.items():
                refuse_gpu(linear, form, options.library, options.sm)
        _demand(options)

    def holds(self, options: TensorrtOptions, runtime: str, asked: LayerSpec) -> State:
        """Return the support as `Exporter.holds` does."""
        _refuse(options, asked)
        return "native"

    def storage(self, options: TensorrtOptions, laid: LaidOver) -> Storage:
        """Predict the bytes as `Exporter.storage` does."""
        return laid.engine()

    def export(self, folder: Path, values: Values, options: TensorrtOptions) -> list[Decision]:
        """Write the network; `build` follows after the check.

        Raises InputError: `attention-unsupported`, `export-untraceable`, `profile-impossible`; Stopped: `disk-full`.
        """
        kind = "decoder" if values.source.kind == "decoder" else "encoder"
        profiles, cut = fitted(options.profiles, kind=kind, context=context_of(values.source.config))
        decisions = [decision("tensorrt", NOTE, FOLDER, words) for words in cut]
        decisions += write_network(folder, values, options, profiles)
        if not options.engine:
            reason = "engine: false; `quantkit export BUNDLE --to tensorrt` builds it where the GPU is"
            decisions.append(decision("tensorrt", NOTE, FOLDER, reason))
        return decisions

    def parser(self, options: TensorrtOptions) -> Library | None:
        """Return a library for checking networks by its parser, without a GPU; None if the engine is built elsewhere.

        Raises MissingDependency: the library that has to build an engine is not installed.
        """
        try:
            library = load(options.library)
        except MissingDependency:
            if options.engine:
                raise
            return None
        return library if library.ahead_of_time else None

    def capabilities(self, options: TensorrtOptions) -> list[str]:
        """List the library's GPUs for building ahead of time; [] if it builds on the GPU."""
        return load(options.library).capabilities()

    def build(self, bundle: Path, options: TensorrtOptions, progress: BuildReport | None = None) -> dict[str, str]:
        """Build the engine of a checked network.

        Raises InputError: `network-unsupported`, `build-failed`, `timeout`, `sm-unsupported`.
        """
        if not options.engine:
            return {}
        hashes = build_engine(bundle / FOLDER, options, progress)
        return {f"{FOLDER}/{name}": sha256 for name, sha256 in hashes.items()}

    def check(self, bundle: Path, values: Values | None = None, options: Any = None, **how: Any) -> list[Check]:
        """Compare on the CPU: checks `onnx.*`, `network.weights`, `network.pairs`, `network.logits`."""
        from quantkit.exporters.check import decided
        from quantkit.exporters.tensorrt.check import check

        values = values or decided(bundle)
        return [] if values is None else check(bundle / FOLDER / NETWORK, values)


def _refuse(options: TensorrtOptions, asked: LayerSpec) -> None:
    """Refuse layers beyond TensorRT on any GPU. Raises InputError `layout-unsupported`."""
    for linear, scheme in asked.schemes.items():
        refuse_weights(linear, scheme, asked.shapes[linear][1] if linear in asked.shapes else None)
    for linear, inputs in asked.activations.items():
        refuse_inputs(linear, inputs)
    cache = asked.cache
    if cache is None:
        return
    refuse_cache(cache)
    if options.cache == "in_place":
        value = f"a cache in {cache.format}, written in place"
        rule = "TensorScatter takes caches of 16 or 32 bits (TensorRT-RTX 1.7.1)"
        raise unheld("scheme.kv_cache", value, rule, "--set tensorrt.cache=grown")


def _demand(options: TensorrtOptions) -> None:
    demand_packages("a TensorRT network")
    if not options.engine:
        return
    refuse_flags(options)
    if options.library == "tensorrt_rtx":
        library = load(options.library)
        if options.sm is None:
            rule, remedy = "an engine is built for one kind of GPU", "--target rtx-4090 (or another GPU)"
            raise InputError("gpu-absent", "export tensorrt", "no compute capability", rule, remedy)
        if options.sm not in library.capabilities():
            raise unsupported(library, options.sm)
        return
    from quantkit import machine

    gpus, why = machine.gpus()
    if not gpus:
        rule = "TensorRT builds on the GPU that will run the engine"
        remedy = "--set tensorrt.engine=false keeps the network; `quantkit export BUNDLE --to tensorrt` builds there"
        raise InputError("gpu-absent", options.library, why, rule, remedy)
    if options.sm is not None and str(gpus[0]["sm"]) != options.sm:
        rule, remedy = f"the target is SM {options.sm}", "build on the target's GPU, or choose the target of this one"
        raise InputError("gpu-other", str(gpus[0]["name"]), f"SM {gpus[0]['sm']}", rule, remedy)


def refuse_flags(options: TensorrtOptions) -> None:
    """Refuse options beyond the library. Raises InputError `layout-unsupported`."""
    for name in TENSORRT_ALONE if options.library == "tensorrt_rtx" else ():
        if getattr(options, name):
            rule = "its engines are for one release and for named GPUs"
            remedy = f"--set tensorrt.{name}=false, or tensorrt.library=tensorrt on the GPU"
            raise unheld(f"tensorrt.{name}", "TensorRT-RTX", rule, remedy)


def write_network(
    folder: Path, values: Values, options: TensorrtOptions, profiles: Sequence[Profile]
) -> list[Decision]:
    """Write `network.onnx`, its weights, config and tokenizer. Raises InputError `profile-impossible`; of a trace."""
    import torch

    from quantkit.exporters.carried import carry
    from quantkit.exporters.tensorrt.dialect import TensorrtDialect
    from quantkit.exporters.trace.rewrite import keep_few, save
    from quantkit.exporters.trace.transformer import trace

    source = values.source
    decoder = source.kind == "decoder"
    kind, floats = "decoder" if decoder else "encoder", getattr(torch, options.type)
    traced = trace(values.skeleton, kind, floats=floats, positions=decoder, head=False)
    most = context_of(source.config)
    needed = capacity(profiles, most)
    if options.capacity is not None and not needed <= options.capacity <= most:
        value, rule = f"a cache of {options.capacity} tokens", f"the profiles need {needed}, the model has {most}"
        raise impossible("tensorrt.capacity", value, rule, "leave out `capacity`: the profiles determine it")
    model = TensorrtDialect(
        traced,
        dialect_weights(values),
        quantized=values.quantized,
        type=options.type,
        cache=options.cache,
        capacity=options.capacity or needed,
        stored_cache=_cache_scales(values),
    ).apply()
    if decoder:
        keep_few(model, optional=False)
    model.metadata_props.update({"quantkit.kind": source.kind, "quantkit.type": options.type})
    folder.mkdir(parents=True, exist_ok=True)
    save(model, folder / NETWORK, DATA)
    carry(source, folder)
    return traced.decisions("tensorrt")


def _cache_scales(values: Values) -> CacheScales | None:
    from quantkit.exporters.tensorrt.dialect import CacheScales

    how = values.run_time
    if how.cache is None:
        return None
    scales = {
        layer: (float(keys.scale.float().reshape(-1)[0]), float(own.scale.float().reshape(-1)[0]))
        for layer, (keys, own) in how.cache_scales.items()
    }
    return CacheScales(how.cache.format, scales)


# formats of weights that `dialect.py` stores
FORMATS = ("int8", "int7", "int4", "fp8_e4m3", "mxfp8", "nvfp4", "nf4")
# the first compute capability that supports each format: measured for TensorRT-RTX 1.7.1
# (benchmarks/tensorrt_formats.py), documented for TensorRT; a test compares them with the targets' cells
FIRST_SM = {
    "tensorrt_rtx": {"int4": 8.0, "nf4": 8.0, "fp8_e4m3": 8.9, "mxfp8": 8.9, "nvfp4": 12.0},
    "tensorrt": {"int4": 8.0, "nf4": 8.0, "fp8_e4m3": 8.9, "mxfp8": 10.0, "nvfp4": 10.0},
}
# formats that activations and the KV cache can have
RUNNING = ("int8", "fp8_e4m3")
_LEAST, _MOST = 16, 128
# nearest format for formats that TensorRT does not have
_NEAREST = {"int2": "int4", "int3": "int4", "mxfp4": "nvfp4", "fp8_e5m2": "fp8_e4m3"}


def refuse_weights(where: str, scheme: WeightScheme, columns: int | None) -> None:
    """Refuse weights without an operator in TensorRT. Raises InputError `layout-unsupported`."""
    if scheme.format not in FORMATS:
        rule, remedy = f"TensorRT supports {', '.join(FORMATS)}", _NEAREST.get(scheme.format, "int4")
        raise unheld(where, f"weights in {scheme.format}", rule, f"--set scheme.weights.format={remedy}")
    if not scheme.symmetric:
        remedy = "--set scheme.weights.symmetric=true"
        raise unheld(where, "weights with zero points", "TensorRT refuses any zero point", remedy)
    group = scheme.group
    if group is None:
        return
    sized = _LEAST <= group <= _MOST and not group & (group - 1)
    if not sized and scheme.format != "nf4":  # NF4 is looked up in a codebook
        rule = "TensorRT supports blocks of 16, 32, 64 and 128"
        raise unheld(where, f"groups of {group}", rule, "--set scheme.weights.group=64")
    if columns is not None and columns % group:
        raise padded(where, scheme, columns)


def refuse_inputs(where: str, scheme: ActivationScheme) -> None:
    """Refuse inputs without an operator in TensorRT. Raises InputError `layout-unsupported`."""
    rule = "TensorRT quantizes activations by one fixed scale a tensor, without zero point, to int8 or fp8_e4m3"
    if scheme.format not in RUNNING:
        remedy = "--set scheme.activations.format=int8, or fp8_e4m3"
        raise unheld(where, f"inputs in {scheme.format}", rule, remedy)
    if scheme.dynamic or scheme.granularity != "tensor":
        remedy = "--set scheme.activations.granularity=tensor --set scheme.activations.dynamic=false"
        raise unheld(where, f"inputs scaled by {scheme.granularity}, as the model runs", rule, remedy)
    if not scheme.symmetric:
        raise unheld(where, "inputs with zero points", rule, "--set scheme.activations.symmetric=true")


def refuse_cache(scheme: CacheScheme) -> None:
    """Refuse a KV cache without an operator in TensorRT. Raises InputError `layout-unsupported`."""
    if scheme.format not in RUNNING or scheme.granularity != "tensor" or scheme.dynamic or not scheme.symmetric:
        value = f"{scheme.format}, by {scheme.granularity}{'' if scheme.symmetric else ', with zero points'}"
        rule = "TensorRT's cache has one fixed scale a layer and no zero points, in int8 or fp8_e4m3"
        raise unheld("scheme.kv_cache", value, rule, "--set 'scheme.kv_cache={format: fp8_e4m3, granularity: tensor}'")


def refuse_gpu(where: str, form: str, library: str, sm: str) -> None:
    """Refuse a format beyond the library's kernels for a GPU. Raises InputError `layout-unsupported`."""
    firsts = FIRST_SM[library]
    if float(sm) >= firsts.get(form, 0.0):
        return
    remedy = "int4" if float(sm) >= firsts["int4"] else "int8"
    rule = f"{library} compiles it from SM {firsts[form]} on"
    raise unheld(where, f"{form} for SM {sm}", rule, f"--set scheme.weights.format={remedy}")


EXPORT = TensorrtExporter()
