"""What a device answers, taken line by line, checked, and made of it what was asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import closing
from typing import Any, Self

from quantkit.devices.answers import DeviceFacts, read
from quantkit.devices.job import At, Failed, Found, Job, Note
from quantkit.devices.link import Link
from quantkit.errors import GateError, Inconclusive, InputError, Stopped
from quantkit.pipeline.progress import Progress

Rows = tuple[dict[str, Any], ...]


class PackedRows(MutableMapping[str, Rows]):
    """Rows of cells as text, made objects of one cell at a time: as objects, what `job.ANSWER` lets through would take
    twenty times as much memory."""

    def __init__(self) -> None:
        self._texts: dict[str, bytes] = {}

    def __getitem__(self, cell: str) -> Rows:
        return tuple(json.loads(self._texts[cell]))

    def __setitem__(self, cell: str, rows: Rows) -> None:
        self._texts[cell] = json.dumps(rows, separators=(",", ":")).encode()

    def __delitem__(self, cell: str) -> None:
        del self._texts[cell]

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)


class CollectedCells:
    """The cells of one job, each as it came.

    Args:
        cells: name -> rows.
        on: what the device is called.
    """

    def __init__(self, on: str) -> None:
        self.on = on
        self.cells: MutableMapping[str, Rows] = PackedRows()

    def one(self, kind: Any, cell: str) -> Any:
        """The only row of a cell, as what it has to be. Raises InputError `answer-invalid`."""
        rows = self.cells.get(cell, ())
        return read(kind, rows[0] if len(rows) == 1 else None, self.on)

    @property
    def about(self) -> DeviceFacts:
        """The device. Raises InputError `answer-invalid`."""
        found: DeviceFacts = self.one(DeviceFacts, "about")
        return found

    @classmethod
    def of(
        cls,
        link: Link,
        job: Job,
        progress: Progress,
        stage: str,
        found: Callable[[Self, str], None] = lambda answers, cell: None,
    ) -> Self:
        """Do a job there, or go on with it, and hear it to its end.

        Args:
            stage: of the progress.
            found: told each cell that has come.

        Raises:
            InputError, GateError, Inconclusive, Stopped: what ended it there; those of the link.
        """
        answers = cls(link.name)
        # whatever is wrong with an answer, or Ctrl-C: the work there ends with it
        with closing(link.follow(link.start(job))) as lines:
            for line in lines:
                if isinstance(line, At):
                    progress.at(stage, line.share, f"{line.words}, on {link.name}")
                elif isinstance(line, Note):
                    progress.note(f"{link.name}: {line.words}")
                elif isinstance(line, Found):
                    answers.cells[line.cell] = line.rows
                    found(answers, line.cell)
                elif isinstance(line, Failed):
                    raise failed(line, link.name)
        return answers


def failed(answer: Failed, on: str) -> InputError | GateError | Inconclusive | Stopped:
    """What ended the work there, as the error that it is; that its words are the device's stands before them.

    Args:
        on: what the device is called.
    """
    kinds: Mapping[int, Any] = {each.exit: each for each in (GateError, Inconclusive, Stopped)}
    kind = kinds.get(answer.exit, InputError)
    error: InputError | GateError | Inconclusive | Stopped = kind(
        answer.code,
        where=f"{on} says: {answer.where}".removesuffix(": "),
        value=answer.value,
        rule=answer.rule,
        remedy=answer.remedy,
    )
    return error
