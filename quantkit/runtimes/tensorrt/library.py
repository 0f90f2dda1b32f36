"""Two libraries with one interface: TensorRT (builds for the GPU at hand) and TensorRT-RTX (builds ahead of time).

Everything that differs between them, and between versions 10 and 11, stands here: networks are strongly typed in all of
them, so there are no precision flags; TensorRT-RTX is told the compute capabilities and has no timing cache.
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
    """One of the two, as far as it says whose engines it loads: `Library` here, `InstalledLibrary` elsewhere."""

    @property
    def name(self) -> Name:
        """Of its module."""

    @property
    def version(self) -> str:
        """`1.7.1.116`."""

    @property
    def ahead_of_time(self) -> bool:
        """Whether it builds for a GPU that is not there."""


@dataclass(frozen=True)
class InstalledLibrary:
    """One of the two on another machine.

    Args:
        name: of its module.
        version: as pip has it there.
    """

    name: Name
    version: str

    @property
    def ahead_of_time(self) -> bool:
        """See `Versioned`."""
        return self.name in AHEAD_OF_TIME


@dataclass(frozen=True)
class Library:
    """One of the two, imported.

    Args:
        name: of its module.
        api: the module.
    """

    name: Name
    api: Any

    @property
    def version(self) -> str:
        """`1.7.1.116`."""
        return str(self.api.__version__)

    @property
    def ahead_of_time(self) -> bool:
        """Whether it builds for a GPU that is not there."""
        return self.name in AHEAD_OF_TIME

    def environment(self) -> dict[str, str]:
        """Tell Polygraphy, which asks once as it is imported, to use this one of the two; for a child process."""
        return {"POLYGRAPHY_USE_TENSORRT_RTX": "1" if self.ahead_of_time else "0"}

    def capabilities(self) -> list[str]:
        """Compute capabilities that it builds for ahead of time, rising: `8.9`; [] where it builds for the GPU here."""
        if not self.ahead_of_time:
            return []
        found = [re.fullmatch(r"SM(\d+)(\d)", name) for name in dir(self.api.ComputeCapability)]
        numbers = [(int(match[1]), int(match[2])) for match in found if match]
        return [f"{major}.{minor}" for major, minor in sorted(numbers)]

    def network(self, builder: Any) -> Any:
        """An empty network, strongly typed. Version 11 knows no other."""
        flag = getattr(self.api.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
        return builder.create_network(0 if flag is None else 1 << int(flag))


class Said:
    """The library's log: its errors, one line each, for a message of our own.

    Args:
        api: the module.
        verbose: hears what else it says.

    `first` of what it does at once says what failed, `last` what failed latest; `logger` is the library's.
    """

    def __init__(self, api: Any, verbose: Callable[[str], None] | None = None) -> None:
        said = self
        self.first = self.last = ""

        class Log(api.ILogger):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                api.ILogger.__init__(self)

            def log(self, severity: Any, text: str) -> None:
                if severity in (api.ILogger.Severity.ERROR, api.ILogger.Severity.INTERNAL_ERROR):
                    said.last = " ".join(text.split())[:240]
                    said.first = said.first or said.last
                elif verbose is not None and severity == api.ILogger.Severity.VERBOSE:
                    verbose(text)

        self.logger = Log()


def unsupported(library: Library, capability: str) -> InputError:
    """The refusal of a GPU that a library does not build for."""
    value = f"{library.name} {library.version} builds for {', '.join(library.capabilities())}"
    rule = "an engine is built for a GPU that the library lists"
    remedy = "a target whose runtimes list `tensorrt`, built on its own GPU; or another export"
    return InputError("sm-unsupported", f"SM {capability}", value, rule, remedy)


def load(name: Name) -> Library:
    """Import one. Raises MissingDependency."""
    try:
        api = importlib.import_module(name)
    except (ImportError, OSError):  # bindings without their shared library
        # the extra brings TensorRT-RTX; TensorRT itself goes to the machine with the GPU
        extra = "tensorrt" if name == "tensorrt_rtx" else None
        raise MissingDependency(name, extra=extra, purpose="a TensorRT engine") from None
    return Library(name, api)
