"""How far a long command is, with the time left from the first second, on stderr.

    time left = rest + others · (all later stages)                               in expected seconds
    rest      = max(own · (rest of this stage) - waited, waited / 4)              waited: since it was last heard of
    own       = (spent in this stage + p·stage·others) / (expected seconds of what is done of it + p·stage)
    others    = sqrt((spent in all + p·total) / (expected seconds of all that is done + p·total))

A stage that takes longer than expected tells half of it, on a logarithmic scale, of the others: either the machine is
slow, or the guess about that stage was wrong. One that is silent for longer than all of it was to take is expected to
take a quarter more of what it took, and tells the others so. p = 0.05 keeps both near 1 until enough was done to know
better. The share that has passed is 99 % at most, and goes back where much more is left than it looked. On a terminal
it is one bar over the whole command; elsewhere a line at the start, at every new stage and every ten seconds.
"""

from __future__ import annotations

import html
import math
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import IO, Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from quantkit.errors import in_line
from quantkit.report.kit import words
from quantkit.report.kit.screen import readable

_PRIOR = 0.05
# of what a silent stage has taken beyond all expectation, how much more it will
_MORE = 0.25
# what is not over has not passed as a whole; a bar goes back where it is so far off
_MOST, _OFF = 0.99, 0.1
_EVERY = 10.0
# of a notebook's cell, in which a bar stands still between
_REDRAWN = 0.5
_WIDTH = 24


class TimeLeft:
    """The time left of stages with expected seconds, corrected by what the finished share took.

    Args:
        clock: seconds, rising.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """The clock starts."""
        self._clock = clock
        self._start = clock()
        self._guess: float | None = None
        self._known = False
        self._stages: dict[str, float] = {}
        self._since = self._start
        self._done: dict[str, float] = {}
        self._skipped = 0.0
        self._last = self._start
        self._entered = (self._start, 0.0, 1.0)
        self.stage = ""
        self.detail = ""

    def guess(self, expected: float | Mapping[str, float] | None) -> None:
        """What the whole may take, before it is looked at; by stages, the first of which has begun."""
        if not isinstance(expected, Mapping):
            self._guess = expected
            return
        self.plan(expected)
        self.stage = next(iter(expected))
        self._done[self.stage], self._known = 0.0, False

    def plan(self, stages: Mapping[str, float]) -> None:
        """The stages in order. What came before counts for the pace if it is the first of them."""
        self._stages = {name: max(seconds, 1e-3) for name, seconds in stages.items()}
        self._known = True
        if self.stage not in self._stages:
            self._since = self._last = self._clock()

    def at(self, stage: str, done: float, detail: str = "") -> bool:
        """A stage is `done` (0..1). Returns whether it is another stage than before."""
        new = stage != self.stage
        self._stages.setdefault(stage, 1e-3)
        if new:
            # what earlier runs did, or what was not needed, was not spent now and says nothing about the pace
            for earlier in self._stages:
                if earlier == stage:
                    break
                left = 1.0 - self._done.get(earlier, 0.0)
                if earlier not in self._done:
                    self._skipped += left * self._stages[earlier]
                self._done[earlier] = 1.0
            self._skipped += done * self._stages[stage]
        self.stage, self.detail = stage, detail
        self._done[stage] = max(self._done.get(stage, 0.0), min(done, 1.0))
        self._last = self._clock()
        if new:
            self._entered = (self._last, done, self._others())
        return new

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return self._clock() - self._start

    def left(self) -> float | None:
        """Seconds to go; None where nothing is known."""
        if not self._stages:
            return None if self._guess is None else _rest(self._guess, self.elapsed)
        expected = self._stages.get(self.stage, 0.0)
        share = self._done.get(self.stage, 0.0)
        entered, first, before = self._entered
        prior = _PRIOR * expected + 1e-9
        own = (self._last - entered + prior * before) / ((share - first) * expected + prior)
        here = (1.0 - share) * expected
        later = sum(self._stages.values()) - self._finished() - here
        waited = self._clock() - self._last
        rest = _rest(own * here, waited)
        return rest + later * self._others(waited, here * waited / max(waited + rest, 1e-9))

    def _finished(self) -> float:
        return sum(self._stages[name] * share for name, share in self._done.items())

    def _others(self, waited: float = 0.0, meanwhile: float = 0.0) -> float:
        """The pace to expect of a stage that has not begun.

        Args:
            waited: seconds since the last report.
            meanwhile: expected seconds of what was done in them.
        """
        prior = _PRIOR * sum(self._stages.values())
        spent, done = self._last - self._since + waited, self._finished() - self._skipped + meanwhile
        return math.sqrt(max((spent + prior) / (done + prior), 0.0))

    @property
    def known(self) -> bool:
        """Whether the stages are those of what was opened, and not a guess before that."""
        return self._known

    def share(self) -> float:
        """How much of the whole time has passed, 0..1."""
        left = self.left()
        return 0.0 if left is None else self.elapsed / max(self.elapsed + left, 1e-9)


def _rest(expected: float, spent: float) -> float:
    """Seconds that are left of what was expected to take so many; beyond them, a part of what it has taken."""
    return max(expected - spent, _MORE * spent)


class _Patient(Console):
    """A console whose reader may go away: rich would leave the process and close its stdout."""

    def on_broken_pipe(self) -> None:
        """Say nothing more."""
        self.quiet = True


class NotebookBar:
    """A bar in a notebook's cell, which redraws itself: what `rich` shows there needs a package of widgets.

    Args:
        shell: IPython's `display` module.
    """

    def __init__(self, shell: Any) -> None:
        """Nothing is shown yet."""
        self._shell = shell
        self._handle: Any = None

    def draw(self, share: float | None, text: str) -> None:
        """The bar at a share of the whole (None: unknown), and a text beside it."""
        value = "" if share is None else f' value="{share:.3f}"'
        shown = f'<progress max="1"{value}></progress> <span>{html.escape(text)}</span>'
        if self._handle is None:
            self._handle = self._shell.display(self._shell.HTML(shown), display_id=True)
        else:
            self._handle.update(self._shell.HTML(shown))

    def clear(self) -> None:
        """The bar goes."""
        if self._handle is not None:
            self._handle.update(self._shell.HTML(""))


def notebook() -> NotebookBar | None:
    """The cell that runs this, in a notebook; None elsewhere."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if getattr(shell, "kernel", None) is None:  # none, or IPython's own terminal
        return None
    import IPython.display

    return NotebookBar(IPython.display)


class Display:
    """Shows an `Estimate` while a command runs; a context manager.

    Args:
        file: where to; stderr.
        live: a bar that redraws itself, for terminals; else lines.
        cell: of a notebook, which gets the bar instead; notes are lines of `file`.
        estimate: to be shown.
        every: seconds between lines.
    """

    def __init__(
        self,
        file: IO[str],
        *,
        live: bool,
        estimate: TimeLeft | None = None,
        every: float = _EVERY,
        cell: NotebookBar | None = None,
    ) -> None:
        """Nothing is shown before `__enter__`."""
        self._console = readable(_Patient(file=file, highlight=False, markup=False, emoji=False, soft_wrap=True))
        self._estimate = estimate or TimeLeft()
        self._every = every if cell is None else _REDRAWN
        self._live = live and cell is None
        self._cell = cell
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._timer: threading.Thread | None = None
        self._said = 0.0
        self._shown = 0.0
        self._what = ""
        self._bar = Live(
            get_renderable=self._render,
            console=self._console,
            transient=True,
            refresh_per_second=4,
            redirect_stdout=False,
        )

    def __enter__(self) -> Self:
        """Itself, showing."""
        if self._live:
            self._bar.start()
        else:
            self._timer = threading.Thread(target=self._tick, daemon=True)
            self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The bar goes; what it said is in the summary."""
        self._over.set()
        if self._live:
            self._bar.stop()
        if self._timer is not None:
            self._timer.join(timeout=1.0)
        if self._cell is not None:
            self._cell.clear()

    def begin(self, what: str, expected: float | Mapping[str, float] | None = None) -> None:
        """The first line: what is being done, and how long the whole may take, or its stages."""
        with self._lock:
            self._what = in_line(what)
            self._estimate.guess(expected)
        if not self._live and self._cell is None:
            total = sum(expected.values()) if isinstance(expected, Mapping) else expected
            self._say(what if total is None else f"{what}; {words.about(total)} expected")

    def plan(self, stages: Mapping[str, float]) -> None:
        """The stages to come, with their expected seconds."""
        with self._lock:
            self._estimate.plan(stages)

    def at(self, stage: str, done: float, detail: str = "") -> None:
        """A stage is `done` (0..1)."""
        with self._lock:
            new = self._estimate.at(stage, done, in_line(detail))
            late = time.monotonic() - self._said >= self._every
        if not self._live and (new or late):
            self._tell()

    def note(self, line: str) -> None:
        """A line that stays."""
        if self._live:
            self._bar.console.print(Text(in_line(line)))
        else:
            self._say(line)

    def _tick(self) -> None:
        while not self._over.wait(self._every / 4):
            if time.monotonic() - self._said >= self._every:
                self._tell()

    def _tell(self) -> None:
        if self._cell is None:
            self._say(self._line())
            return
        self._said = time.monotonic()
        share = self._now()[-1]
        self._cell.draw(share if self._estimate.left() is not None else None, self._line())

    def _say(self, line: str) -> None:
        self._said = time.monotonic()
        try:
            self._console.print(Text(in_line(line)))
        except OSError:
            # nobody reads: that is no reason to stop working
            self._over.set()

    def _line(self) -> str:
        stage, detail, left, share = self._now()
        if left is None:
            return f"{self._what}  {words.duration(self._estimate.elapsed)} so far"
        parts = [f"{share:4.0%}", stage or self._what]
        if detail:
            parts.append(detail)
        parts.append(f"{words.about(left)} left")
        return "  ".join(parts)

    def _now(self) -> tuple[str, str, float | None, float]:
        with self._lock:
            share = min(self._estimate.share(), _MOST)
            # one that goes back a little says less than one that waits
            self._shown = share if share < self._shown - _OFF else max(self._shown, share)
            stage = self._estimate.stage if self._estimate.known else ""
            return stage, self._estimate.detail, self._estimate.left(), self._shown

    def _render(self) -> RenderableType:
        stage, detail, left, shown = self._now()
        table = Table.grid(padding=(0, 2, 0, 0))
        bar = ProgressBar(total=1.0, completed=shown, width=_WIDTH, pulse=left is None, complete_style="cyan")
        cells: list[Any] = [bar, Text(f"{shown:4.0%}" if left is not None else "")]
        elapsed = f"{words.duration(self._estimate.elapsed)} so far"
        cells.append(Text(f"{words.about(left)} left" if left is not None else elapsed, "cyan"))
        cells.append(Text(f"{stage}  {detail}" if stage else self._what, no_wrap=True, overflow="ellipsis"))
        table.add_row(*cells)
        return Group(table)
