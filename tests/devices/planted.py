"""Devices that answer what is planted, or work in this process: see `quantkit.devices.link.Link`."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from quantkit.devices import there
from quantkit.devices.answers import Cells, DeviceFacts, dumped
from quantkit.devices.named import NamedDevice, Reached
from quantkit.devices.openssh import Lost
from quantkit.devices.probed import Probed

FACTS: dict[str, Any] = {"id": "x", "name": "Cortex", "machine": "aarch64", "isa": "neon", "cores": 4}
ABOUT = DeviceFacts(**FACTS, memory=1 << 30, versions={"numpy": "2"})


def about(**changes: Any) -> tuple[str, list[dict[str, Any]]]:
    """The cell of the device."""
    return "about", [{**dumped(ABOUT), **changes}]


class Planted:
    """Its cells, up to one at which the line breaks; what was carried and asked.

    Args:
        cells: (name, rows) of each.
        cut: where the line breaks.
        of: which cells a kind of work answers; None: all.
    """

    def __init__(
        self,
        *cells: tuple[str, Sequence[Any]],
        name: str = "pi5",
        cut: str = "",
        of: Callable[[str, str], bool] = lambda work, cell: True,
    ) -> None:
        self.cells, self.name, self.cut, self.of = cells, name, cut, of
        self.carried: list[Path] = []
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.heard: list[str] = []

    def install(self, progress: Any = None) -> None: ...

    def carry(self, name: str, files: Mapping[str, Path], progress: Any = None) -> str:
        self.carried += files.values()
        return f"files/{name}"

    def run(self, work: str, job: Mapping[str, Any], progress: Any = None, *, row: Any = None, **_: Any) -> Cells:
        self.asked.append((work, json.loads(json.dumps(job))))
        found = Cells(self.name)
        for cell, rows in self.cells:
            if not self.of(work, cell):
                continue
            if cell == self.cut:
                raise Lost("device-gone", where=self.name)
            self.heard.append(cell)
            found.add(cell, rows)
            if row is not None:
                row(found, cell)
        return found


class Within(Planted):
    """A device whose work is done in this process, so that what it takes can be stood in for.

    Args:
        workdir: its folder, in which this process then is.
    """

    def __init__(self, workdir: Path, patch: pytest.MonkeyPatch, name: str = "box") -> None:
        super().__init__(name=name)
        self.workdir, self._patch = workdir, patch

    def carry(self, name: str, files: Mapping[str, Path], progress: Any = None) -> str:
        for place, path in files.items():
            (self.workdir / "files" / name / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, self.workdir / "files" / name / place)
        return f"files/{name}"

    def run(
        self, work: str, job: Mapping[str, Any], progress: Any = None, *, row: Any = None, note: Any = None, **_: Any
    ) -> Cells:
        self.asked.append((work, json.loads(json.dumps(job))))
        told = Told(self.name, row, note)
        with self._patch.context() as patch:
            patch.chdir(self.workdir)
            there.work({"work": work, "job": self.asked[-1][1], "cells": {}}, told)  # type: ignore[arg-type]
        return told.cells


class Told:
    """A child's caller: keeps the cells that it is told."""

    def __init__(self, name: str = "pi5", row: Any = None, note: Any = None) -> None:
        self.cells, self._row, self._note = Cells(name), row, note

    def row(self, data: Any) -> None:
        found = json.loads(json.dumps(data, allow_nan=False))
        self.cells.add(found["cell"], found["rows"])
        if self._row is not None:
            self._row(self.cells, found["cell"])

    def at(self, share: float, words: str) -> None: ...

    def note(self, line: str) -> None:
        if self._note is not None:
            self._note(f"{self.cells.on}: {line}")


def reached(link: Any, probed: Probed | None = None) -> Reached:
    """A device at hand, by its way; what is not said of it is not asked."""
    room = {"memory": 1 << 60, "memory_free": 1 << 60, "disk_free": 1 << 60, "last_level_cache": None, "gpus": []}
    return Reached(NamedDevice(name=link.name, address="ssh://there"), probed or Probed.model_construct(**room), link)
