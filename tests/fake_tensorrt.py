"""Fake TensorRT's interface: its engines are networks that ONNX Runtime runs on the CPU.

An engine file holds the path of its network and the shapes it was built for; addresses are those of CPU tensors. Only
the library is fake: all code in `runtimes/tensorrt` is real.
"""

from __future__ import annotations

import ctypes
import enum
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir

from quantkit.exporters.tensorrt.check import RunningNetwork
from quantkit.exporters.tensorrt.profiles import ProfileShapes, inputs_of, shapes
from quantkit.runtimes.tensorrt.library import Library, Name
from quantkit.target import Profile

VERSION = "1.7.1.116"
GPU = {"name": "NVIDIA GeForce RTX 4090", "sm": "8.9", "memory": 24 << 30, "driver": "575"}
_WORDS = {"float16": "HALF", "float32": "FLOAT", "int64": "INT64", "int32": "INT32", "bfloat16": "BF16"}

DataType = enum.Enum("DataType", sorted(_WORDS.values()))
TensorIOMode = enum.Enum("TensorIOMode", ["INPUT", "OUTPUT"])
TensorLocation = enum.Enum("TensorLocation", ["DEVICE", "HOST"])
EngineValidity = enum.Enum("EngineValidity", ["VALID", "SUBOPTIMAL", "INVALID"])
LayerInformationFormat = enum.Enum("LayerInformationFormat", ["ONELINE", "JSON"])


class Diagnostics(enum.IntFlag):
    """Reason why an engine is invalid."""

    VERSION_MISMATCH = 1
    UNSUPPORTED_CC = 2
    OLD_CUDA_DRIVER = 4


class ILogger:
    """Base of a log."""

    Severity = enum.Enum("Severity", ["INTERNAL_ERROR", "ERROR", "WARNING"])


class IProfiler:
    """Base of a profiler."""


def library(name: Name = "tensorrt_rtx", version: str = VERSION, sms: tuple[str, ...] = ("SM86", "SM89")) -> Library:
    """Return one of the two libraries; `sms` is its list of GPUs."""
    api = SimpleNamespace(
        __version__=version,
        ComputeCapability=SimpleNamespace(**dict.fromkeys(sms, 1)),
        DataType=DataType,
        TensorIOMode=TensorIOMode,
        TensorLocation=TensorLocation,
        EngineValidity=EngineValidity,
        EngineInvalidityDiagnostics=Diagnostics,
        LayerInformationFormat=LayerInformationFormat,
        ILogger=ILogger,
        IProfiler=IProfiler,
        DynamicShapesKernelSpecializationStrategy=SimpleNamespace(EAGER="eager"),
        Runtime=_Runtime,
    )
    return Library(name, api)


def engine(folder: Path, profiles: list[Profile], *, layers: Any = (), **described: Any) -> Path:
    """Write `folder/sm89.engine` of `folder/network.onnx`, with its description."""
    made = shapes(inputs_of(folder / "network.onnx"), profiles)
    text = {"network": str(folder / "network.onnx"), "profiles": [each.model_dump() for each in made]}
    path = folder / "sm89.engine"
    path.write_text(json.dumps({**text, "layers": list(layers)}))
    record = {"library": "tensorrt_rtx", "version": VERSION, "sm": ["8.9"], "gpu": "", "options": {}, **described}
    path.with_suffix(".json").write_text(json.dumps(record))
    return path


# first bytes of an invalid engine -> reason
_INVALID = {b"foreign": 2, b"old": 4}


class _Runtime:
    def __init__(self, logger: Any) -> None:
        self.logger = logger

    def get_engine_validity(self, data: bytes) -> tuple[Any, int]:
        flags = next((flags for word, flags in _INVALID.items() if data.startswith(word)), 0)
        return (EngineValidity.INVALID, flags) if flags else (EngineValidity.VALID, 0)

    def deserialize_cuda_engine(self, data: bytes) -> _Engine | None:
        try:
            return _Engine(json.loads(data))
        except ValueError:
            self.logger.log(ILogger.Severity.ERROR, "Serialization assertion magicTag failed.")
            return None


class _Engine:
    def __init__(self, data: dict[str, Any]) -> None:
        self.path = path = Path(data["network"])
        model = ir.load(path)
        self.values = {str(each.name): each for each in (*model.graph.inputs, *model.graph.outputs)}
        self.names = list(self.values)
        self.ends = {str(each.name) for each in model.graph.outputs}
        self.profiles = [ProfileShapes.model_validate(each) for each in data["profiles"]]
        self.layers = data["layers"]
        self.running = RunningNetwork(model, path.parent)
        self.num_io_tensors = len(self.names)
        self.num_optimization_profiles = len(self.profiles)

    def get_tensor_name(self, place: int) -> str:
        return self.names[place]

    def get_tensor_shape(self, name: str) -> list[int]:
        return [each if isinstance(each, int) else -1 for each in self.values[name].shape]

    def get_tensor_dtype(self, name: str) -> Any:
        return DataType[_WORDS[self.dtype(name).name]]

    def dtype(self, name: str) -> Any:
        return self.values[name].dtype.numpy()

    def get_tensor_mode(self, name: str) -> Any:
        return TensorIOMode.OUTPUT if name in self.ends else TensorIOMode.INPUT

    def get_tensor_location(self, name: str) -> Any:
        return TensorLocation.HOST if name == "logits_to_keep" else TensorLocation.DEVICE

    def get_tensor_profile_shape(self, name: str, profile: int) -> Any:
        return self.profiles[profile].inputs[name]

    def create_execution_context(self, config: Any = None) -> _Context:
        return _Context(self)

    def create_runtime_config(self) -> Any:
        return _Config()

    def create_engine_inspector(self) -> Any:
        text = json.dumps({"Layers": self.layers})
        return SimpleNamespace(execution_context=None, get_engine_information=lambda form: text)


class _Config:
    """Configuration of the kernels that TensorRT-RTX compiles at run time."""

    def create_runtime_cache(self) -> Any:
        kept: list[bytes] = []
        return SimpleNamespace(kept=kept, deserialize=kept.append, serialize=lambda: b"kernels" + b"".join(kept))

    def set_runtime_cache(self, cache: Any) -> None:
        self.cache = cache


class _Context:
    """Context that reads and writes memory by address, as an engine's does."""

    def __init__(self, made: _Engine) -> None:
        self.engine, self.profile = made, 0
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.profiler: Any = None
        self.runs = 0

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self.profile = profile
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        least, _, most = self.engine.profiles[self.profile].inputs[name]
        self.shapes[name] = shape
        return all(a <= b <= c for a, b, c in zip(least, shape, most, strict=True))

    def get_tensor_shape(self, name: str) -> list[int]:
        if "input_ids" not in self.shapes:  # a graph's inputs: only the batch varies
            batch = next(iter(self.shapes.values()))[0]
            return [each if isinstance(each, int) else batch for each in self.engine.values[name].shape]
        rows, new = self.shapes["input_ids"]
        kept = new
        if "logits_to_keep" in self.engine.values:
            kept = min(int(self._array("logits_to_keep", (1,))[0]) or new, new)
        sizes = {"batch_size": rows, "batch": rows, "kept_length": kept, "sequence_length": new}
        return [each if isinstance(each, int) else sizes[str(each.value)] for each in self.engine.values[name].shape]

    def execute_async_v3(self, stream: int) -> bool:
        feed = {name: self._array(name, shape).copy() for name, shape in self.shapes.items()}
        for name, values in self.engine.running(feed).items():
            self._array(name, values.shape)[...] = values
        self.runs += 1
        if self.profiler is not None:
            for place, layer in enumerate(self.engine.layers):
                self.profiler.report_layer_time(layer["Name"], 0.1 * (place + 1))
        return True

    def _array(self, name: str, shape: tuple[int, ...]) -> Any:
        dtype = self.engine.dtype(name)
        size = int(np.prod(shape)) * dtype.itemsize
        raw = (ctypes.c_uint8 * size).from_address(self.addresses[name])
        return np.frombuffer(raw, np.uint8).view(dtype).reshape(shape)
