"""The command line: thin commands over the library, a file each; `frame.py` runs them and prints what they say.

A command returns an `Answer`; `run` prints it, as text or, under `--json`, as the one object on stdout. All that
libraries print meanwhile goes to stderr. Heavy imports stand in the commands: help, `list` and `show` need none.
"""

from quantkit.cli.frame import main, run

__all__ = ["main", "run"]
