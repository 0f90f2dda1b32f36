"""Two libraries with one interface: TensorRT (builds for the GPU at hand) and TensorRT-RTX (builds ahead of time).

All their differences, and those between versions 10 and 11, are here. Networks are strongly typed in all of them, so
there are no precision flags. TensorRT-RTX is told the compute capabilities and has no timing cache.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from quantkit.errors import InputError, MissingDependency

Name = Literal["tensorrt", "tensorrt_rtx"]
NAMES: tuple[Name, ...] = ("tensorrt_rtx", "tensorrt")
AHEAD_OF_TIME = ("tensorrt_rtx",)


class Versioned(Protocol):
    """Interface for telling which engines a library loads: `Library` here, `InstalledLibrary` on a device."""

    @property
    def name(self) -> Name:
        """Name of its module."""

    @property
    def version(self) -> str:
        """Version: `1.7.1.116`."""

    @property
    def ahead_of_time(self) -> bool:
        """True if it builds for a GPU of another machine."""


@dataclass(frozen=True)
class InstalledLibrary:
    """One of the two libraries on another machine.

    Args:
        name: name of its module.
        version: version by pip.
    """

    name: Name
    version: str

    @property
    def ahead_of_time(self) -> bool:
        """True if it builds for a GPU of another machine."""
        return self.name in AHEAD_OF_TIME


@dataclass(frozen=True)
class Library:
    """One of the two libraries, imported.

    Args:
        name: name of its module.
        api: the module.
    """

    name: Name
    api: Any

    @property
    def version(self) -> str:
        """Version: `1.7.1.116`."""
        return str(self.api.__version__)

    @property
    def ahead_of_time(self) -> bool:
        """True if it builds for a GPU of another machine."""
        return self.name in AHEAD_OF_TIME

    def environment(self) -> dict[str, str]:
        """Return environment variables for Polygraphy, which reads them at import: use this library."""
        return {"POLYGRAPHY_USE_TENSORRT_RTX": "1" if self.ahead_of_time else "0"}

    def capabilities(self) -> list[str]:
        """List compute capabilities for building ahead of time, ascending: `8.9`; [] if it builds for the GPU here."""
        if not self.ahead_of_time:
            return []
        members = [re.fullmatch(r"SM(\d+)(\d)", name) for name in dir(self.api.ComputeCapability)]
        numbers = [(int(match[1]), int(match[2])) for match in members if match]
        return [f"{major}.{minor}" for major, minor in sorted(numbers)]

    def network(self, builder: Any) -> Any:
        """Make an empty, strongly typed network; version 11 has no other."""
        flag = getattr(self.api.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
        return builder.create_network(0 if flag is None else 1 << int(flag))


class Said:
    """Log of the library: its errors, one line each, for our own messages.

    Args:
        api: the module.
        verbose: callback for its other messages.

    `first` and `last` are its first and last error; `logger` is the library's object.
    """

    def __init__(self, api: Any, verbose: Callable[[str], None] | None = None) -> None:
        heard = self
        self.first = self.last = ""

        class Log(api.ILogger):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                api.ILogger.__init__(self)

            def log(self, severity: Any, text: str) -> None:
                if severity in (api.ILogger.Severity.ERROR, api.ILogger.Severity.INTERNAL_ERROR):
                    heard.last = " ".join(text.split())[:240]
                    heard.first = heard.first or heard.last
                elif verbose is not None and severity == api.ILogger.Severity.VERBOSE:
                    verbose(text)

        self.logger = Log()


def unsupported(library: Library, capability: str) -> InputError:
    """Make the error for a GPU that a library does not build for."""
    value = f"{library.name} {library.version} builds for {', '.join(library.capabilities())}"
    rule = "an engine is built for a GPU that the library lists"
    remedy = "a target whose runtimes list `tensorrt`, built on its own GPU; or another export"
    return InputError("sm-unsupported", f"SM {capability}", value, rule, remedy)


def load(name: Name) -> Library:
    """Import one of the libraries. Raises MissingDependency."""
    try:
        api = importlib.import_module(name)
    except (ImportError, OSError):  # OSError: the bindings lack their shared library
        # the extra installs TensorRT-RTX; TensorRT is installed on the machine with the GPU
        extra = "tensorrt" if name == "tensorrt_rtx" else None
        raise MissingDependency(name, extra=extra, purpose="a TensorRT engine") from None
    return Library(name, api)
