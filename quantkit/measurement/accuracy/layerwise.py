"""Compare a quantized network with the float network of the same model, layer by layer, with Polygraphy.

    max error   max |q - f| / max |f|        mean error   mean |q - f| / mean |f|        cosine, SNR in dB

The compared tensors are the outputs of each product (with its bias), attention and norm that has the same name in both
networks. Each network runs on its own intermediate values, so an error includes those of all earlier layers. ONNX
Runtime runs both without graph optimizations, so Q/DQ pairs are computed as written. An engine is built with the same
tensors as outputs. TensorRT cannot fuse across outputs, so the values are those of its kernels but the speed is not.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError, MissingDependency
from quantkit.runtimes import child
from quantkit.runtimes.tensorrt.library import Library, load

if TYPE_CHECKING:
    import onnx_ir as ir

Array = NDArray[Any]
Feed = Mapping[str, Array]
# makes an engine's runner from the network, the names of its outputs, and the feed
MakeRunner = Callable[[Path, list[str], Feed], Any]
_LAYERS = ("MatMul", "Gemm", "Conv", "ConvTranspose", "Attention", "RMSNormalization", "LayerNormalization")
_FLOATS = ("FLOAT", "FLOAT16", "BFLOAT16")


@dataclass(frozen=True)
class LayerError:
    """Errors of one layer.

    Args:
        layer: name in the networks: a linear, a convolution, `attention.3`, a norm, an output of the network.
        kind: ONNX operator.
        max_error, mean_error, cosine, snr: see the module; cosine and SNR (dB) are None for outputs of zeros.
        engine: cosine of the engine's output to the float network's; None without an engine.
    """

    layer: str
    kind: str
    max_error: float
    mean_error: float
    cosine: float | None
    snr: float | None
    engine: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return its `--json` form."""
        return asdict(self)


def with_engine(floats: Path, network: Path, feed: Feed, library: Library) -> list[LayerError]:
    """Run both networks and the engine in a child process: Polygraphy supports only one of TensorRT's libraries a
    process.

    Args:
        floats, network, feed: see `compared`.
        library: TensorRT library that builds the engine for this machine's GPU.

    Raises InputError: as `compared`; `cache-in-place`; `network-unrunnable`, if the child dies; MissingDependency:
    polygraphy.
    """
    with tempfile.TemporaryDirectory(prefix="quantkit-layers-") as place:
        np.savez(Path(place) / "feed.npz", **feed)  # type: ignore[arg-type]
        job = {"floats": str(floats), "network": str(network), "place": place, "library": library.name}
        rows = child.run(
            _with_engine,
            job,
            remedy="to compare both networks on the CPU, leave out `--runtime`",
            died="network-unrunnable",
            where=str(network),
            environment=library.environment(),
        )
    return [LayerError(**row) for row in rows]


def _with_engine(job: Mapping[str, str], caller: child.Caller) -> None:
    library, place = load(job["library"]), Path(job["place"])  # type: ignore[arg-type]
    feed = dict(np.load(place / "feed.npz", allow_pickle=False))

    def make(network: Path, tensors: list[str], feed: Feed) -> Any:
        from polygraphy.backend.trt import EngineFromNetwork, TrtRunner

        return TrtRunner(EngineFromNetwork(*prepared(network, place, tensors, feed, library)), name="engine")

    for layer in compared(Path(job["floats"]), Path(job["network"]), feed, make):
        caller.row(layer.as_dict())


def compared(floats: Path, network: Path, feed: Feed, engine: MakeRunner | None = None) -> list[LayerError]:
    """Run both networks on one feed.

    Args:
        floats: network of the float model.
        network: quantized network.
        feed: values of each input of both networks.
        engine: function that makes a runner for the network's engine; None for no engine.

    Returns:
        layers in the order of the network.

    Raises InputError: `networks-differ` if no layer has the same name in both; `network-unrunnable`, with the runtime's
    message; MissingDependency: polygraphy.
    """
    try:
        from polygraphy.backend.onnxrt import OnnxrtRunner
        from polygraphy.comparator import Comparator, CosineSimilarityCompareFunc, SimpleCompareFunc, SnrCompareFunc
        from polygraphy.exception import PolygraphyException
        from polygraphy.logger import G_LOGGER
    except ImportError:
        raise MissingDependency("polygraphy", extra="tensorrt", purpose="comparing networks layer by layer") from None
    import onnx_ir as ir

    loaded = [ir.load(path) for path in (floats, network)]
    (before, after) = (layers(model) for model in loaded)
    names = {name: tensor for name, tensor in after.items() if name in before}
    if not names:
        value = f"none of its {len(after)} layers has the name of a layer of {floats}"
        rule, remedy = "both networks must be exports of one model", "compile the same model with --recipe float"
        raise InputError("networks-differ", where=str(network), value=value, rule=rule, remedy=remedy)
    tensors = [tensor for tensor, _ in names.values()]
    runners = [
        OnnxrtRunner(_session(model, path.parent, tensors), name=name)
        for model, path, name in zip(loaded, (floats, network), ("float", "quantized"), strict=True)
    ]
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL):
        if engine is not None:
            runners.append(engine(network, tensors, feed))
        try:
            ran = Comparator.run(runners, data_loader=[dict(feed)])
            pairs = [(0, place) for place in range(1, len(runners))]
            measures = [SimpleCompareFunc(), CosineSimilarityCompareFunc(), SnrCompareFunc()]
            simple, cosine, snr = Comparator.compare_accuracy(ran, comparisons=pairs, compare_func=measures)
        except (PolygraphyException, RuntimeError) as problem:
            raise _unrunnable(network, problem) from None
    keys = [(runners[0].name, runner.name) for runner in runners[1:]]
    of_float = ran[runners[0].name][0]
    errors = []
    for name, (tensor, kind) in names.items():
        apart = simple[keys[0]][0][tensor]
        sizes = np.abs(np.asarray(of_float[tensor], dtype=np.float64))
        errors.append(
            LayerError(
                layer=name,
                kind=kind,
                max_error=apart.max_absdiff / max(float(sizes.max(initial=0)), 1e-30),
                mean_error=apart.mean_absdiff / max(float(sizes.mean()), 1e-30),
                cosine=_number(cosine[keys[0]][0][tensor].cosine_similarity),
                snr=_number(snr[keys[0]][0][tensor].snr),
                engine=_number(cosine[keys[1]][0][tensor].cosine_similarity) if engine is not None else None,
            )
        )
    return errors


def layers(model: ir.Model) -> dict[str, tuple[str, str]]:
    """Return (output tensor, ONNX operator) by layer; the output of a product with a bias is that after the bias."""
    by_name: dict[str, tuple[str, str]] = {}
    fixed = set(model.graph.initializers.values())
    for node in model.graph:
        if node.op_type not in _LAYERS or all(value in fixed for value in node.inputs):
            continue
        value, uses = node.outputs[0], tuple(node.outputs[0].uses())
        follower = uses[0].node if len(uses) == 1 else None
        if follower is not None and follower.op_type == "Add" and any(entry in fixed for entry in follower.inputs):
            value = follower.outputs[0]  # a pass may have moved a part of the product into the bias
        if value.dtype is not None and value.dtype.name in _FLOATS:
            name = str(node.outputs[0].name)
            by_name[name.removesuffix("/output").removesuffix("/heads")] = (str(value.name), node.op_type)
    for value in model.graph.outputs:
        if not str(value.name).startswith("present.") and value.dtype is not None and value.dtype.name in _FLOATS:
            by_name = {name: entry for name, entry in by_name.items() if entry[0] != value.name}
            by_name[str(value.name)] = (str(value.name), "output")
    return by_name


def prepared(
    network: Path, place: Path, tensors: list[str], feed: Feed, library: Library, sm: str | None = None
) -> tuple[Any, Any]:
    """Return Polygraphy's loaders of the network with its layers as outputs, and of its build configuration.

    Args:
        place: folder for the marked network and a copy of its weights.
        feed: arrays whose shapes make the engine's only profile.
        sm: compute capability of an absent GPU, such as "8.9"; None for this machine's.

    Raises InputError: `cache-in-place`.
    """
    import onnx_ir as ir
    from polygraphy.backend.tensorrt_rtx import CreateConfigRTX
    from polygraphy.backend.trt import CreateConfig, NetworkFromOnnxPath, Profile

    model = ir.load(network)
    if any(node.op_type == "TensorScatter" for node in model.graph):
        value, rule = "a cache that is written in place", "Polygraphy does not support outputs that share input memory"
        remedy = "compile with --set tensorrt.cache=grown to compare layers on a GPU"
        raise InputError("cache-in-place", where=str(network), value=value, rule=rule, remedy=remedy)
    _mark(model, tensors)
    for data in network.parent.glob("*.data"):
        shutil.copyfile(data, place / data.name)
    ir.save(model, place / network.name)
    profile = Profile()
    for source in model.graph.inputs:
        array = feed[str(source.name)]
        shape = tuple(int(size) for size in array) if source.name == "logits_to_keep" else array.shape
        profile.add(str(source.name), shape, shape, shape)
    target: dict[str, Any] = {}
    if library.ahead_of_time:
        target = {"use_gpu": True} if sm is None else {"compute_capabilities": [tuple(map(int, sm.split(".")))]}
    make = CreateConfigRTX if library.ahead_of_time else CreateConfig
    return NetworkFromOnnxPath(str(place / network.name), strongly_typed=True), make(profiles=[profile], **target)


def _session(model: ir.Model, folder: Path, tensors: list[str]) -> Callable[[], Any]:
    def load() -> Any:
        import onnx_ir as ir
        import onnxruntime

        _mark(model, tensors)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
        proto = ir.to_proto(model).SerializeToString()
        try:
            return onnxruntime.InferenceSession(proto, options, providers=["CPUExecutionProvider"])
        except Exception as problem:  # ONNX Runtime has its own exception type for each status
            raise _unrunnable(folder, problem) from None

    return load


def _mark(model: ir.Model, tensors: list[str]) -> None:
    values = {str(value.name): value for node in model.graph for value in node.outputs}
    model.graph.outputs.clear()
    model.graph.outputs.extend(values[name] for name in tensors)


def _unrunnable(where: Path, problem: Exception) -> InputError:
    value = " ".join(str(problem).split())[:240]
    rule = "both networks run in ONNX Runtime on the CPU, which does not support FP4 and bfloat16"
    remedy = "use a bundle in float16 with int4, int8 or fp8"
    return InputError("network-unrunnable", where=str(where), value=value, rule=rule, remedy=remedy)


def _number(value: Any) -> float | None:
    return float(value) if value is not None and np.isfinite(value) else None
