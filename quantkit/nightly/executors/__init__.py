"""Where the builds of a night run: one executor a file."""

from __future__ import annotations

from quantkit.errors import InputError, did_you_mean
from quantkit.nightly.running.jobs import Executor

NAMES = ("local", "ray")


def named(name: str) -> Executor:
    """The executor of that name, with its defaults. Raises InputError `usage`."""
    if name == "local":
        from quantkit.nightly.executors.local import Local

        return Local()
    if name == "ray":
        from quantkit.nightly.executors.ray import Ray

        return Ray()
    raise InputError("usage", where="--executor", value=name, remedy=did_you_mean(name, NAMES))
