"""Progress of a long command on stderr: a bar on a terminal or in a notebook, lines elsewhere.

    share     = parts of the finished stages, and of the current one, over all parts; it never decreases
    time left = of the current stage: seconds for a finished part times the parts to come, once one is finished

No total time is predicted. A terminal shows one bar for the whole command. Elsewhere there is a line at the start, at
every new stage, and every ten seconds.
"""

from __future__ import annotations

import html
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import IO, Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task
from rich.table import Column
from rich.text import Text

from quantkit.errors import in_line
from quantkit.report.kit import words
from quantkit.report.kit.screen import readable

# largest share before the end; extra time (share of the wait) for a part that takes longer than the previous ones
_MOST, _MORE = 0.99, 0.25
_EVERY = 10.0
# seconds between two drawings in a notebook's cell
_REDRAWN = 0.5


class Passed:
    """Share of the stages that is finished, and the time left for the current one; `clock` returns rising seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start the clock."""
        self._clock, self._start = clock, clock()
        self._stages: dict[str, float] = {}
        self._entered, self._last = (self._start, 0.0), (self._start, 0.0)
        self.share: float | None = None
        self.stage = self.detail = ""

    def plan(self, stages: Mapping[str, float]) -> None:
        """Set the stages in order, with the number of parts of each."""
        self._stages = dict(stages)
        self.share = self.share or 0.0

    def at(self, stage: str, done: float, detail: str = "") -> bool:
        """Record the share `done` (0 to 1) of a stage; return True for a new stage."""
        now, new = self._clock(), stage != self.stage
        if new:
            self._entered = self._last = (now, done)
        elif done > self._last[1]:
            self._last = (now, done)
        self.stage, self.detail = stage, detail
        if stage in self._stages:
            names = list(self._stages)
            over = sum(self._stages[name] for name in names[: names.index(stage)]) + done * self._stages[stage]
            self.share = max(self.share or 0.0, min(over / (sum(self._stages.values()) or 1.0), _MOST))
        return new

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._start

    def left(self) -> float | None:
        """Estimate the seconds left for the current stage; None before its first finished part."""
        (entered, first), (last, done) = self._entered, self._last
        if done <= first or last <= entered:
            return None
        waited = self._clock() - last
        return max((last - entered) / (done - first) * (1.0 - done) - waited, _MORE * waited)

    def line(self, what: str) -> str:
        """Describe the progress of a command that does `what`."""
        left = self.left()
        ending = f"{words.duration(self.elapsed)} so far"
        ending = f"{words.about(left)} left of {self.stage}" if left is not None and self.stage else ending
        share = f"{self.share:4.0%}" if self.share is not None else ""
        return words.joined(share, self.stage or what, self.detail, ending, by="  ")


class _Patient(Console):
    """Console that survives a closed pipe; rich would end the process and close its stdout."""

    def on_broken_pipe(self) -> None:
        """Print nothing more."""
        self.quiet = True


class _Line(ProgressColumn):
    """Column with the display's text, beside the bar."""

    def __init__(self, line: Callable[[], str]) -> None:
        super().__init__(Column(no_wrap=True, overflow="ellipsis"))
        self._of = line

    def render(self, task: Task) -> Text:
        """Render the current text."""
        return Text(self._of())


class NotebookBar:
    """Bar in a notebook's cell that redraws itself; rich's own bar needs a package of widgets.

    Args:
        shell: IPython's `display` module.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._handle: Any = None

    def draw(self, share: float | None, text: str) -> None:
        """Draw the bar at a share of the whole (None: unknown), with a text beside it."""
        value = "" if share is None else f' value="{share:.3f}"'
        shown = f'<progress max="1"{value}></progress> <span>{html.escape(text)}</span>'
        if self._handle is None:
            self._handle = self._shell.display(self._shell.HTML(shown), display_id=True)
        else:
            self._handle.update(self._shell.HTML(shown))

    def clear(self) -> None:
        """Remove the bar."""
        if self._handle is not None:
            self._handle.update(self._shell.HTML(""))


def notebook() -> NotebookBar | None:
    """Return a bar for the notebook cell of this run; None outside of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if getattr(shell, "kernel", None) is None:  # no IPython, or its terminal
        return None
    import IPython.display

    return NotebookBar(IPython.display)


class Display:
    """Context manager that shows the progress of a command while it runs.

    Args:
        file: output stream, such as stderr.
        live: True for a bar that redraws itself (terminals), else lines.
        every: seconds between lines.
        cell: notebook cell for the bar; notes are still lines of `file`.
        clock: function that returns rising seconds.
    """

    def __init__(
        self,
        file: IO[str],
        *,
        live: bool,
        every: float = _EVERY,
        cell: NotebookBar | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        console = readable(_Patient(file=file, highlight=False, markup=False, emoji=False, soft_wrap=True))
        self._passed = Passed(clock)
        self._every = every if cell is None else _REDRAWN
        self._live, self._cell = live and cell is None, cell
        self._lock, self._over = threading.Lock(), threading.Event()
        self._timer = threading.Thread(target=self._tick, daemon=True)
        self._told, self._what = 0.0, ""
        columns = (BarColumn(24, complete_style="cyan"), _Line(self._line))
        self._bar = Progress(*columns, console=console, transient=True, refresh_per_second=4, redirect_stdout=False)
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> Self:
        """Start to show progress."""
        if self._live:
            self._bar.start()
        else:
            self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the bar."""
        self._over.set()
        if self._live:
            self._bar.stop()
        elif self._timer.is_alive():
            self._timer.join(timeout=1.0)
        if self._cell is not None:
            self._cell.clear()

    def begin(self, what: str) -> None:
        """Show the current work; lines start with it."""
        with self._lock:
            self._what = in_line(what)
        if not self._live and self._cell is None:
            self.note(what)

    def plan(self, stages: Mapping[str, float]) -> None:
        """Set the coming stages in order, with the number of parts of each."""
        with self._lock:
            self._passed.plan(stages)

    def at(self, stage: str, done: float, detail: str = "") -> None:
        """Show the share `done` (0 to 1) of a stage."""
        with self._lock:
            new = self._passed.at(stage, done, in_line(detail))
            share = self._passed.share
        self._bar.update(self._task, total=None if share is None else 1.0, completed=share or 0.0)
        if not self._live and (new or time.monotonic() - self._told >= self._every):
            self._tell()

    def note(self, line: str) -> None:
        """Print a permanent line."""
        if not self._live:
            self._told = time.monotonic()
        try:
            self._bar.console.print(Text(in_line(line)))
        except OSError:
            # a closed pipe does not stop the work
            self._over.set()

    def _tick(self) -> None:
        while not self._over.wait(self._every / 4):
            if time.monotonic() - self._told >= self._every:
                self._tell()

    def _tell(self) -> None:
        if self._cell is None:
            self.note(self._line())
            return
        self._told = time.monotonic()
        self._cell.draw(self._passed.share, self._line())

    def _line(self) -> str:
        with self._lock:
            return self._passed.line(self._what)
