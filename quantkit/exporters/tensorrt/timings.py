"""What TensorRT has measured of its kernels, kept from build to build, and the time that it saves.

One file for each GPU, version and set of builder options: timings hold for those alone ("Optimizing Builder
Performance", TensorRT 10.16). It is written under a lock, whole or not at all, with what other builds have added
meanwhile: as a build goes on, and when it ends, however it ends. One that is killed outright loses what it has timed
since the last write, and nothing of what was there before. TensorRT-RTX measures nothing when it builds: it has no such
file.

Beside it stands what the first build of each network took, which knew none of it, or what other networks had left:

    saved = seconds of the first build - seconds of this one

A network is its graph and its shapes; other weights in the same graph take as long.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit.bundle.disk import alone, write_atomic
from quantkit.content import cache_dir
from quantkit.exporters.tensorrt.profiles import ProfileShapes
from quantkit.runtimes.tensorrt.library import Library


def place(library: Library, gpu: str, options: Mapping[str, Any]) -> Path | None:
    """The file that keeps the timings of builds alike; None ahead of time."""
    if library.ahead_of_time:
        return None
    key = json.dumps([library.name, library.version, gpu, dict(options)], sort_keys=True)
    return cache_dir() / "timing" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.cache"


class Timings:
    """The timing cache of one build.

    Args:
        config: of the builder; it gets the cache.
        path: of the file; None: none is kept.
        every: seconds between two writes while the build goes on.

    `hit` says whether it knew anything (None: there is none), `problem` why it could not be written: no reason to give
    up a build.
    """

    def __init__(self, config: Any, path: str | None, every: float) -> None:
        self._config, self._path, self._every = config, None if path is None else Path(path), every
        self._written = time.monotonic()
        self._cache: Any = None
        self.hit: bool | None = None
        self.problem = ""
        if self._path is None:
            return
        before = self._stored()
        self._cache = config.create_timing_cache(before)
        if self._cache is None or not config.set_timing_cache(self._cache, ignore_mismatch=False):
            before, self._cache = b"", config.create_timing_cache(b"")  # damaged: begun anew
            config.set_timing_cache(self._cache, ignore_mismatch=False)
        self.hit = bool(before)

    def step(self) -> None:
        """Between two steps of the builder, which stands still meanwhile: write, if it is time to."""
        if self._path is not None and time.monotonic() - self._written >= self._every:
            self.keep()

    def keep(self) -> None:
        """Add what was timed to the file."""
        if self._path is None:
            return
        self._written = time.monotonic()
        with self._told(), self._locked():
            # a copy: the builder may be in the middle of using its own
            kept = self._config.create_timing_cache(bytes(memoryview(self._cache.serialize())))
            now = self._stored()
            other = self._config.create_timing_cache(now) if now else None
            if other is not None:
                kept.combine(other, ignore_mismatch=False)
            write_atomic(self._path, bytes(memoryview(kept.serialize())))

    def first(self, network: Path, profiles: Sequence[ProfileShapes], seconds: float) -> float | None:
        """Seconds of a network's first build, where that was an earlier one; else this one is noted as the first."""
        if self._path is None:
            return None
        shapes = json.dumps([each.model_dump() for each in profiles], sort_keys=True)
        key = hashlib.sha256(network.read_bytes() + shapes.encode()).hexdigest()
        beside = self._path.with_suffix(".json")
        found = None
        with self._told(), self._locked():
            known = _read(beside)
            # with an empty cache it is the first, whatever was noted
            found = known.get(key) if self.hit else None
            if found is None:
                write_atomic(beside, json.dumps({**known, key: seconds}, indent=1).encode())
        return found

    def _stored(self) -> bytes:
        assert self._path is not None
        with self._told():
            return self._path.read_bytes() if self._path.is_file() else b""
        return b""

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as problem:
            self.problem = f"{self._path}: {problem.strerror or problem}"

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One process at a time; the kernel lets go of the lock when the process dies."""
        assert self._path is not None
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with alone(self._path.with_suffix(".lock")):
            yield


def said(record: Mapping[str, Any]) -> str:
    """What a timing cache did for a build, from its description; empty where there is none."""
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
