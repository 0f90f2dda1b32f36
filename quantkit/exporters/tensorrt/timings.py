"""Keep TensorRT's timings of kernels from build to build, and report the time that they save.

One file for each GPU, version and set of builder options: timings hold for those alone ("Optimizing Builder
Performance", TensorRT 10.16). It is written under a lock, whole or not at all, with what other builds have added
meanwhile: as a build goes on, and when it ends, however it ends. One that is killed outright loses what it has timed
since the last write, and nothing of what was there before. TensorRT-RTX measures nothing when it builds: it has no such
file.

Beside it stands what the first build of each network took, which knew none of it, or what other networks had left:

    saved = seconds of the first build - seconds of this one

A network is its graph and its shapes; other weights in the same graph take as long.

Which kernels it tried for each layer stands in its verbose log (`Tactics`):

    --------------- Timing Runner: LAYER (RUNNER)
    ... Set Tactic Name: KERNEL Tactic: 0x42
    Tactic: 0x42 Time: 0.0262451            milliseconds

as TensorRT 8.2 to 10 print it (10 has name and time in one line); nothing of it is documented, so a line that looks
otherwise is passed over.
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
    """Return the file of timings for equal builds; None ahead of time."""
    if library.ahead_of_time:
        return None
    key = json.dumps([library.name, library.version, gpu, dict(options)], sort_keys=True)
    return cache_dir() / "timing" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.cache"


class Timings:
    """The timing cache of one build: a file that Polygraphy's loaders read, written while the build goes on.

    Args:
        path: of the file; None: none is kept.
        every: seconds between two writes while the build goes on.

    `hit` says whether it knew anything (None: there is none), `problem` why it could not be written: no reason to give
    up a build.
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
        """Take a builder's configuration; the loaders have filled its cache from `file`."""
        if self._path is not None:
            before = self._stored(self._path)
            # a damaged file is begun anew: the loaders have taken an empty cache
            self._config, self.hit = config, bool(before) and config.create_timing_cache(before) is not None

    def step(self) -> None:
        """Write if it is time to, between two steps of the builder, which waits meanwhile."""
        if time.monotonic() - self._written >= self._every:
            self.keep()

    def keep(self) -> None:
        """Add the timings to the file."""
        if self._path is None or self._config is None:
            return
        self._written = time.monotonic()
        with self._told(self._path), self._locked(self._path):
            # a copy: the builder may be in the middle of using its own
            timed = self._config.get_timing_cache().serialize()
            kept = self._config.create_timing_cache(bytes(memoryview(timed)))
            now = self._stored(self._path)
            other = self._config.create_timing_cache(now) if now else None
            if other is not None:
                kept.combine(other, ignore_mismatch=False)
            write_atomic(self._path, bytes(memoryview(kept.serialize())))

    def first(self, network: Path, profiles: Sequence[ProfileShapes], seconds: float) -> float | None:
        """Return the seconds of a network's first build, where that was an earlier one; else note this one."""
        if self._path is None:
            return None
        shapes = json.dumps([profile.model_dump() for profile in profiles], sort_keys=True)
        key = hashlib.sha256(network.read_bytes() + shapes.encode()).hexdigest()
        beside, earlier = self._path.with_suffix(".json"), None
        with self._told(self._path), self._locked(self._path):
            known = _read(beside)
            # with an empty cache it is the first, whatever was noted
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
        """Let one process at a time in; the kernel frees the lock of a dead process."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with alone(path.with_suffix(".lock")):
            yield


def said(record: Mapping[str, Any]) -> str:
    """Describe the use of a timing cache in a build, from its record; "" without one."""
    hit, seconds, first = record.get("cache_hit"), float(record.get("seconds", 0.0)), record.get("first_seconds")
    if hit is None:
        return ""
    if record.get("cache_problem"):
        return f"built in {seconds:.1f} s; what was timed could not be kept in {record['cache_problem']}"
    if not hit:
        return f"built in {seconds:.1f} s; its timing cache was empty, and saves time from the next build on"
    if first is None:
        return f"built in {seconds:.1f} s; the timing cache knew other networks, and what that saved is not known"
    return f"built in {seconds:.1f} s, the first time in {first:.1f} s: the timing cache saved {first - seconds:.1f} s"


def _read(path: Path) -> dict[str, float]:
    try:
        return {str(key): float(value) for key, value in json.loads(path.read_bytes()).items()}
    except (OSError, ValueError, AttributeError, TypeError):  # damaged: begun anew
        return {}


# layers that are kept: those whose fastest kernel takes the longest
KEPT = 32
_RUNNER = re.compile(r"-{5,} Timing Runner: (?P<layer>.+) \((?P<runner>[^()]+)\)\s*$")
_NAMED = re.compile(r"Tactic Name: (?P<name>[^\s,]+),? Tactic: (?P<id>0x[0-9a-f]+)")
_TIMED = re.compile(r"Tactic: (?P<id>0x[0-9a-f]+),? Time: (?P<ms>[0-9.e+-]+|inf|nan)\b")


class Tried(Closed):
    """One kernel, by its name or its number, and the seconds that it took."""

    name: str
    seconds: float


class TimedLayer(Closed):
    """A layer, and every kernel that was timed for it, the fastest first."""

    layer: str
    tried: tuple[Tried, ...]

    @property
    def spread(self) -> float:
        """Time of the slowest kernel, as a multiple of the fastest's."""
        return self.tried[-1].seconds / self.tried[0].seconds


class Tactics:
    """Reads a log, line by line."""

    def __init__(self) -> None:
        self._layer, self._runner = "", ""
        self._names: dict[str, str] = {}
        self._layers: dict[str, dict[str, float]] = {}

    def hear(self, line: str) -> None:
        """Read one line of the log."""
        if runner := _RUNNER.search(line):
            self._layer, self._runner = runner["layer"], runner["runner"]
            return
        if "Fastest Tactic" in line:  # says again what has been said
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
