"""The command line: thin commands over the library, one a file; `frame.py` runs them and prints their answers.

A command returns an `Answer`. `run` prints it as text or, with `--json`, as the only object on stdout. Output of
libraries meanwhile goes to stderr. Heavy imports stand inside the commands: help, `list` and `show` need none.
"""

from quantkit.cli.frame import main, run

__all__ = ["main", "run"]
