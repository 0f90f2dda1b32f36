"""A library with the interface of TensorRT's builder, for processes that build: put its folder on the path.

A network is a text, a layer a line; of one that is no text, the first lines. A layer that the timing cache does not
know takes a while; some lines do more:

    wait FOLDER COUNT   until so many builds have come here
    kill                ends the process as running out of memory does
    fail TEXT           no engine, and that is the reason
"""

from __future__ import annotations

import enum
import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

__version__ = "10.13.0"
TAKES = 0.03
NetworkDefinitionCreationFlag = enum.IntEnum("NetworkDefinitionCreationFlag", ["STRONGLY_TYPED"])
MemoryPoolType = enum.Enum("MemoryPoolType", ["WORKSPACE"])
ProfilingVerbosity = enum.Enum("ProfilingVerbosity", ["DETAILED"])
HardwareCompatibilityLevel = enum.Enum("HardwareCompatibilityLevel", ["AMPERE_PLUS"])
BuilderFlag = enum.Enum("BuilderFlag", ["VERSION_COMPATIBLE", "TF32"])
DeviceType = enum.Enum("DeviceType", ["GPU", "DLA"])


class ILogger:
    """The base of a log."""

    Severity = enum.Enum("Severity", ["INTERNAL_ERROR", "ERROR", "WARNING", "VERBOSE"])


class Logger(ILogger):
    """The library's own."""

    INTERNAL_ERROR, ERROR, WARNING, VERBOSE = ILogger.Severity
    INFO = "INFO"


def init_libnvinfer_plugins(logger: Any, namespace: str) -> None:
    """Nothing to load."""


class IProgressMonitor:
    """The base of a monitor."""


class _Cache:
    def __init__(self, data: bytes) -> None:
        self.layers: list[str] = json.loads(data) if data else []

    def serialize(self) -> bytes:
        return json.dumps(sorted(self.layers)).encode()

    def combine(self, other: _Cache, ignore_mismatch: bool) -> bool:
        self.layers = sorted({*self.layers, *other.layers})
        return True


class _Config(SimpleNamespace):
    DLA_core, default_device_type, num_optimization_profiles = -1, "GPU", 1

    def set_flag(self, flag: Any) -> None:
        """Kept by nobody."""

    def get_flag(self, flag: Any) -> bool:
        return False

    def get_timing_cache(self) -> _Cache:
        return self.cache

    def set_memory_pool_limit(self, pool: Any, size: int) -> None:
        self.workspace = size

    def add_optimization_profile(self, profile: Any) -> int:
        return 0

    def create_timing_cache(self, data: bytes) -> _Cache | None:
        try:
            return _Cache(data)
        except ValueError:
            return None

    def set_timing_cache(self, cache: _Cache, ignore_mismatch: bool) -> bool:
        self.cache = cache
        return True


class _Network(list[Any]):
    inputs: tuple[Any, ...] = ()

    @property
    def num_inputs(self) -> int:
        return len(self.inputs)

    def get_input(self, place: int) -> Any:
        return self.inputs[place]


class OnnxParser:
    """Reads lines."""

    def __init__(self, network: Any, logger: Any) -> None:
        self.network = network

    def parse_from_file(self, path: str) -> bool:
        lines = Path(path).read_bytes().split(b"\n")
        self.network.lines = [line.decode() for line in lines] if lines[0].isascii() else [str(x) for x in lines[:9]]
        self.network.num_layers = len(self.network.lines)
        if not lines[0].isascii():
            import onnx

            given = onnx.load(path, load_external_data=False).graph.input
            self.network.inputs = tuple(
                SimpleNamespace(name=each.name, is_shape_tensor=False, dtype="FLOAT", shape=()) for each in given
            )
        return True


class Builder:
    """Goes through the lines."""

    def __init__(self, logger: Any) -> None:
        self.logger = logger

    def create_network(self, flags: int) -> Any:
        return _Network()

    def create_optimization_profile(self) -> Any:
        return SimpleNamespace(set_shape=lambda *shape: None, set_shape_input=lambda *shape: None)

    def create_builder_config(self) -> _Config:
        return _Config()

    def build_serialized_network(self, network: Any, config: _Config) -> bytes | None:
        config.progress_monitor.phase_start("layers", None, network.num_layers)
        for place, line in enumerate(network.lines):
            if not self._layer(line, config.cache):
                return None
            if not config.progress_monitor.step_complete("layers", place):
                return None
        config.progress_monitor.phase_finish("layers")
        return "\n".join(network.lines).encode()

    def _layer(self, line: str, cache: _Cache) -> bool:
        word, _, rest = line.partition(" ")
        if word == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if word == "fail":
            self.logger.log(ILogger.Severity.ERROR, rest)
            return False
        if word == "wait":
            folder, count = rest.rsplit(" ", 1)
            (Path(folder) / str(os.getpid())).touch()
            while len(list(Path(folder).iterdir())) < int(count):
                time.sleep(0.01)
        elif line not in cache.layers:
            time.sleep(TAKES)
            cache.layers.append(line)
        return True
