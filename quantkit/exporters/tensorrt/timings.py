"""Keep TensorRT's kernel timings from build to build, and report the saved time.

There is one file for each GPU, library version and set of builder options, because timings are valid for these alone
("Optimizing Builder Performance", TensorRT 10.16). The file is written atomically under a lock, merged with the timings
of other builds: at intervals during a build, and when it ends, even by an error. A killed build loses only its timings
since the last write. TensorRT-RTX times nothing when it builds, so it has no such file.

A second file holds the seconds of each network's first build, with an empty cache or with timings of other networks:

    saved = seconds of the first build - seconds of this one

A network is its graph and its shapes; the same graph with other weights takes as long.

The kernels tried for each layer are read from the verbose log (`Tactics`):

    --------------- Timing Runner: LAYER (RUNNER)
    ... Set Tactic Name: KERNEL Tactic: 0x42
    Tactic: 0x42 Time: 0.0262451            milliseconds

TensorRT 8.2 to 10 print these lines (10 puts name and time on one line). The format is not documented; other lines are
ignored.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit.bundle.disk import alone, write_atomic
from quantkit.content import Closed, cache_dir
from quantkit.exporters.tensorrt.profiles import ProfileShapes
from quantkit.runtimes.tensorrt.library import Library


def place(library: Library, gpu: str, options: Mapping[str, Any]) -> Path | None:
    """Return the file of timings for builds of this kind; None for builds ahead of time."""
    if library.ahead_of_time:
        return None
    key = json.dumps([library.name, library.version, gpu, dict(options)], sort_keys=True)
    return cache_dir() / "timing" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.cache"


class Timings:
    """Timing cache of one build: a file that Polygraphy's loaders read, and that is written during the build.

    Args:
        path: path of the file; None keeps none.
        every: least seconds between two writes during the build.

    `hit` is True if the file held any timings (None without a file); `problem` is the reason for a failed write, which
    does not end the build.
    """

    def __init__(self, path: str | None, every: float) -> None:
        self._path, self._every = None if path is None else Path(path), every
        self._written = time.monotonic()
        self._config: Any = None
        self.hit: bool | None = None
        self.problem = ""

    @property
    def file(self) -> str | None:
        """File name, if there is a file to read."""
        return str(self._path) if self._path is not None and self._stored(self._path) else None

    def attach(self, builder: Any, network: Any, config: Any) -> None:
        """Take the builder's configuration; the loaders have filled its cache from `file`."""
        if self._path is not None:
            before = self._stored(self._path)
            # the loaders take an empty cache instead of a damaged file
            self._config, self.hit = config, bool(before) and config.create_timing_cache(before) is not None

    def step(self) -> None:
        """Write if `every` seconds have passed; the builder waits meanwhile."""
        if time.monotonic() - self._written >= self._every:
            self.keep()

    def keep(self) -> None:
        """Add the timings to the file."""
        if self._path is None or self._config is None:
            return
        self._written = time.monotonic()
        with self._told(self._path), self._locked(self._path):
            # a copy, because the builder may be using its own
            timed = self._config.get_timing_cache().serialize()
            kept = self._config.create_timing_cache(bytes(memoryview(timed)))
            now = self._stored(self._path)
            other = self._config.create_timing_cache(now) if now else None
            if other is not None:
                kept.combine(other, ignore_mismatch=False)
            write_atomic(self._path, bytes(memoryview(kept.serialize())))

    def first(self, network: Path, profiles: Sequence[ProfileShapes], seconds: float) -> float | None:
        """Return the seconds of a network's first build, or record these and return None."""
        if self._path is None:
            return None
        shapes = json.dumps([profile.model_dump() for profile in profiles], sort_keys=True)
        key = hashlib.sha256(network.read_bytes() + shapes.encode()).hexdigest()
        beside, earlier = self._path.with_suffix(".json"), None
        with self._told(self._path), self._locked(self._path):
            known = _read(beside)
            # with an empty cache this is the first build, even if one is recorded
            earlier = known.get(key) if self.hit else None
            if earlier is None:
                write_atomic(beside, json.dumps({**known, key: seconds}, indent=1).encode())
        return earlier

    def _stored(self, path: Path) -> bytes:
        with self._told(path):
            return path.read_bytes() if path.is_file() else b""
        return b""

    @contextlib.contextmanager
    def _told(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as problem:
            self.problem = f"{path}: {problem.strerror or problem}"

    @contextlib.contextmanager
    def _locked(self, path: Path) -> Iterator[None]:
        """Hold the lock of the file; the kernel frees that of a dead process."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with alone(path.with_suffix(".lock")):
            yield


def said(record: Mapping[str, Any]) -> str:
    """Describe the use of a timing cache in a build, from its record; "" without one."""
    hit, seconds, first = record.get("cache_hit"), float(record.get("seconds", 0.0)), record.get("first_seconds")
    if hit is None:
        return ""
    if record.get("cache_problem"):
        return f"built in {seconds:.1f} s; its kernel timings could not be written to {record['cache_problem']}"
    if not hit:
        return f"built in {seconds:.1f} s; the timing cache was empty; it saves time from the next build on"
    if first is None:
        return f"built in {seconds:.1f} s; the timing cache held other networks' timings; the saved time is unknown"
    return f"built in {seconds:.1f} s, the first time in {first:.1f} s: the timing cache saved {first - seconds:.1f} s"


def _read(path: Path) -> dict[str, float]:
    try:
        return {str(key): float(value) for key, value in json.loads(path.read_bytes()).items()}
    except (OSError, ValueError, AttributeError, TypeError):  # a damaged file counts as empty
        return {}


# number of layers to report: those whose fastest kernel takes the longest
KEPT = 32
_RUNNER = re.compile(r"-{5,} Timing Runner: (?P<layer>.+) \((?P<runner>[^()]+)\)\s*$")
_NAMED = re.compile(r"Tactic Name: (?P<name>[^\s,]+),? Tactic: (?P<id>0x[0-9a-f]+)")
_TIMED = re.compile(r"Tactic: (?P<id>0x[0-9a-f]+),? Time: (?P<ms>[0-9.e+-]+|inf|nan)\b")


class Tried(Closed):
    """Kernel, by name or number, and its seconds."""

    name: str
    seconds: float


class TimedLayer(Closed):
    """Layer and the kernels timed for it, the fastest first."""

    layer: str
    tried: tuple[Tried, ...]

    @property
    def spread(self) -> float:
        """Time of the slowest kernel, as a multiple of the fastest's."""
        return self.tried[-1].seconds / self.tried[0].seconds


class Tactics:
    """Reader of a verbose log, line by line."""

    def __init__(self) -> None:
        self._layer, self._runner = "", ""
        self._names: dict[str, str] = {}
        self._layers: dict[str, dict[str, float]] = {}

    def hear(self, line: str) -> None:
        """Read one line of the log."""
        if runner := _RUNNER.search(line):
            self._layer, self._runner = runner["layer"], runner["runner"]
            return
        if "Fastest Tactic" in line:  # repeats a line
            return
        if named := _NAMED.search(line):
            self._names[named["id"]] = named["name"]
        if (timed := _TIMED.search(line)) and self._layer:
            seconds = float(timed["ms"]) / 1e3
            if not 0 < seconds < float("inf"):
                return
            name = self._names.get(timed["id"], f"{self._runner} {timed['id']}")
            times = self._layers.setdefault(self._layer, {})
            # the same kernel is timed for several layouts of its tensors
            times[name] = min(seconds, times.get(name, seconds))

    def timed(self, count: int = KEPT) -> list[TimedLayer]:
        """List the slowest layers, without conversions of layouts."""
        layers = []
        for layer, times in self._layers.items():
            if not layer.startswith("Optimizer Reformat"):
                kernels = [Tried(name=name, seconds=seconds) for name, seconds in times.items()]
                tried = tuple(sorted(kernels, key=lambda kernel: kernel.seconds))
                layers.append(TimedLayer(layer=layer, tried=tried))
        return sorted(layers, key=lambda layer: -layer.tried[0].seconds)[:count]


def of(record: object) -> list[TimedLayer]:
    """Read `tactics` of an engine's description."""
    return [TimedLayer.model_validate(layer) for layer in record] if isinstance(record, Sequence) else []
