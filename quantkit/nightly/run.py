"""Run a night: run its builds, decide on their results, repeat the alarms, decide again.

    begin -> a job a build -> decide -> again those with cells that alarmed, all loaded anew -> decide

All state is in the store, so a night that is killed at any moment can continue with its missing cells: `resume` takes
the last unfinished night of the same file, identified by hash. Nothing resumes by itself: a new run starts a new night.
"""

from __future__ import annotations

import socket
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from quantkit.devices import named
from quantkit.errors import InputError, Stopped
from quantkit.nightly.build import build
from quantkit.nightly.bundles import Bundles
from quantkit.nightly.config import Nightly, builds
from quantkit.nightly.decide import decide_night
from quantkit.nightly.records import BuildJob, Night, NightCell, Result, StoredDecision, night_id
from quantkit.nightly.store import Store, plain
from quantkit.pipeline.many.jobs import Executor, Work
from quantkit.pipeline.progress import Progress

# last nights whose bundles are kept, whatever their decisions
KEPT = 7


@dataclass(frozen=True)
class Summary:
    """A finished night: last attempt of each cell, decisions, cells measured twice."""

    night: str
    store: Path
    seconds: float
    results: Sequence[Result]
    decisions: Sequence[StoredDecision]
    repeated: Sequence[str]
    warnings: Sequence[str]

    def as_dict(self) -> dict[str, Any]:
        """Return its JSON form; NaN and infinity become null."""
        cells = [
            {name: getattr(result, name) for name in ("cell", "state", "attempt", "seconds", "error", "flags")}
            for result in self.results
        ]
        return {
            "night": self.night,
            "store": str(self.store),
            "seconds": self.seconds,
            "cells": cells,
            "answers": dict(Counter(decision.answer for decision in self.decisions)),
            "decisions": [plain(asdict(decision)) for decision in self.decisions],
            "repeated": list(self.repeated),
        }


def run_night(
    path: str | Path,
    executor: Executor,
    *,
    resume: bool = False,
    only: str | None = None,
    work: Work = build,
    progress: Progress | None = None,
) -> Summary:
    """Run a night, or continue one.

    Args:
        path: path of the `nightly.yaml`.
        resume: True to continue the last night of the same file that lacks results or decisions.
        only: glob of cell keys; the night has only these.
        work: function that each job runs.

    Raises:
        InputError: errors of the configuration, the store and the executor; `nothing-to-resume`, `no-such-cells`.
        Stopped: interrupted, or the disk is full; committed results are kept.
    """
    began, progress = time.monotonic(), progress or Progress()
    place = Path(path).expanduser().absolute()
    config = Nightly.load(place)
    store = Store.open(config.at(config.store), create=True, config=path)
    executor.ready()
    night = _resumed(store, config, place) if resume else _begun(store, config, place, only)
    cells = [NightCell.of(key) for key in night.matrix if only is None or fnmatchcase(key, only)]
    if not cells:  # only possible when resuming
        remedy = f"one cell is {night.matrix[0]}"
        raise InputError("no-such-cells", where="--only", value=only, rule=f"cells of {night.night}", remedy=remedy)
    running = _Running(store, config, place, night, executor, work, progress)
    try:
        running.attempt(1, cells)
        judged = decide_night(store, night.night, config)
        if judged.repeat:
            progress.note(f"{len(judged.repeat)} of the times alarmed and are measured again")
            running.attempt(2, judged.repeat)
            judged = decide_night(store, night.night, config)
        # last: decisions mark the night as finished
        store.decide(night.night, judged.decisions)
    except (KeyboardInterrupt, Stopped) as problem:
        raise _stopped(problem, store, night, place) from None
    _prune(store, config)
    # the second of two attempts
    last = {result.cell: result for result in store.results(night.night)}
    results = [last[key] for key in night.matrix if key in last]
    repeated = sorted(store.committed(night.night, 2))
    seconds = time.monotonic() - began
    return Summary(night.night, store.path, seconds, results, judged.decisions, repeated, store.warnings)


def dry_run(config: Nightly, only: str | None = None) -> dict[str, Any]:
    """Return the cells and builds of a night, as JSON; durations are unknown before the first timing.

    Raises InputError: `no-such-cells`, `only` matches none.
    """
    cells = config.chosen(only)
    kept: dict[str, Any] = {"seconds": None}
    return {
        "cells": [
            {"cell": cell.key, "build": cell.build, **asdict(cell), "baseline": config.baseline_of(cell).kind, **kept}
            for cell in cells
        ],
        "builds": [{"build": build, **kept} for build in builds(cells)],
        "seconds": {"compile": None, "measure": None},
        "total_seconds": None,
        "notes": ["the duration is known after the first cell"],
    }


@dataclass(frozen=True)
class _Running:
    store: Store
    config: Nightly
    place: Path
    night: Night
    executor: Executor
    work: Work
    progress: Progress

    def attempt(self, number: int, cells: Sequence[NightCell]) -> None:
        """Run the builds of cells without a result for an attempt; failures are results too."""
        done = self.store.committed(self.night.night, number)
        limit = 3600 * self.config.limit
        jobs = [
            BuildJob(
                self.night.night,
                str(self.place),
                self.night.config_sha256,
                tuple(cell.key for cell in members),
                number,
                limit,
                named.find(members[0].on).text() if members[0].on else "",
            )
            for members in builds(cell for cell in cells if cell.key not in done).values()
        ]
        self.progress.plan({job.name: float(len(job.cells)) for job in jobs})
        for outcome in self.executor.run(jobs, self.work, self.progress):
            if outcome.state == "done":
                continue
            there = self.store.committed(self.night.night, number)
            for key in outcome.job.cells:
                if key not in there:
                    values: dict[str, Any] = {"attempt": number, "error": outcome.error}
                    self.store.commit(Result.of(self.night.night, NightCell.of(key), outcome.state, **values))


def _begun(store: Store, config: Nightly, place: Path, only: str | None) -> Night:
    keys = tuple(cell.key for cell in config.chosen(only))
    started = datetime.now(UTC)
    if any(other.night.startswith(f"{started:%Y%m%dT%H%M%SZ}") for other in store.nights()):
        # names of nights sort by second, and a later night is compared with an earlier one
        time.sleep(1 - started.microsecond / 1e6)
        started = datetime.now(UTC)
    host, commit = socket.gethostname(), _commit(place.parent)
    return store.begin(Night(night_id(started), started, commit, config.sha256, host, keys))


def _resumed(store: Store, config: Nightly, place: Path) -> Night:
    """Return the last unfinished night of the same file."""
    nights = store.nights()
    for night in reversed(nights):
        if night.config_sha256 == config.sha256:
            if set(night.matrix) - store.committed(night.night) or not store.decisions(night.night):
                return night
            break
    same = [night.night for night in nights if night.config_sha256 == config.sha256]
    value = (
        f"{same[-1]}, the last night of this file, is finished"
        if same
        else "this file, in its current form, has no night"
    )
    remedy = "start a night: the same command without --resume"
    raise InputError("nothing-to-resume", where=str(place), value=value, remedy=remedy)


def _stopped(problem: BaseException, store: Store, night: Night, place: Path) -> Stopped:
    """Return the error of a stopped night, with the kept cells and the command to continue."""
    kept = len(store.committed(night.night))
    full = isinstance(problem, Stopped) and problem.code == "disk-full"
    return Stopped(
        "disk-full" if full else "interrupted",
        where=problem.where if isinstance(problem, Stopped) and full else night.night,
        value=f"{kept} of {len(night.matrix)} cells are kept",
        remedy=f"{'make room, then ' if full else ''}quantkit nightly run {place} --resume",
    )


def _commit(folder: Path) -> str | None:
    """Return the commit of the repository around a folder; None outside of one."""
    command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _prune(store: Store, config: Nightly) -> None:
    """Delete bundles without further use: neither accepted nor of the last nights."""
    keep = {result.content_sha256 for result in store.accepted().values()}
    for night in store.nights()[-KEPT:]:
        for result in store.results(night.night):
            keep |= {result.content_sha256, result.baseline_sha256, result.release_sha256}
    Bundles(config.at(config.bundles)).prune({content for content in keep if content})
