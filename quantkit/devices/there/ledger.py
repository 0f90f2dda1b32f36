"""The answers of a job on the disk: whole lines, each written once, so that what is there need not be done again."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quantkit import limits
from quantkit.devices.job import Failed, Found, parse
from quantkit.errors import InputError, QuantkitError

FILE = "rows.jsonl"
# seconds between two lines of progress: writing disturbs what is timed
_OFTEN = 1.0


class Ledger:
    """`rows.jsonl`, which only grows.

    A line that was cut off by the end of its writer is removed, and so is the error that ended the run before this one.

    Args:
        folder: of the job.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / FILE
        kept: list[bytes] = []
        self.cells: dict[str, Sequence[dict[str, Any]]] = {}
        self.is_done = False
        for line in limits.read(path, limits.DATA).splitlines(keepends=True) if path.is_file() else ():
            try:
                answer = parse(line.removesuffix(b"\n"), where=FILE) if line.endswith(b"\n") else None
            except InputError:
                answer = None
            if answer is None or isinstance(answer, Failed) or answer.n != len(kept):
                break
            kept.append(line)
            self.is_done = answer.kind == "done"
            if isinstance(answer, Found):
                self.cells[answer.cell] = answer.rows
        self._stream = path.open("ab")
        self._stream.truncate(sum(map(len, kept)))
        self._n = len(kept)
        self._last = 0.0

    def at(self, share: float, words: str) -> None:
        """Progress, at most once a second."""
        if time.monotonic() - self._last > _OFTEN:
            self._last = time.monotonic()
            self._write({"kind": "progress", "share": min(max(share, 0.0), 1.0), "words": words[:2000]}, sync=False)

    def note(self, words: str) -> None:
        """Something worth a line."""
        self._write({"kind": "note", "words": words[:2000]})

    def found(self, cell: str, rows: Sequence[dict[str, Any]]) -> None:
        """What a cell gave; on the disk when this returns."""
        self.cells[cell] = rows
        self._write({"kind": "row", "cell": cell, "rows": list(rows)})

    def failed(self, problem: QuantkitError) -> None:
        """What ended the work."""
        fields = {name: text[:2000] for name, text in problem.as_dict().items()}
        self._write({"kind": "error", **fields, "exit": problem.exit})

    def done(self) -> None:
        """All cells have answered."""
        self._write({"kind": "done"})

    def _write(self, data: dict[str, Any], *, sync: bool = True) -> None:
        line = json.dumps({"n": self._n, **data}, allow_nan=False, separators=(",", ":"))
        self._stream.write(f"{line}\n".encode())
        self._stream.flush()
        if sync:
            os.fsync(self._stream.fileno())
        self._n += 1
