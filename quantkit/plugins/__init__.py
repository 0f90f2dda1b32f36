"""Find and load plug-ins: one file, or one folder, is one plug-in.

A pass, format, exporter, runtime or layout is a module or a package in `quantkit/<kind>/` that defines one constant:
`PASS`, `FORMAT`, `EXPORT`, `RUNTIME`, `LAYOUT`. Its name is the stem, its summary the first line of its docstring; both
are read without importing, so that listing needs no torch. A module without that constant is a helper. Installed
packages can offer more, and a recipe can name a pass in a file (`outside.py`). They cannot replace a shipped name, and
code that looks at all plug-ins of a kind looks at the shipped ones.

`Kind` finds them. Every kind has a Protocol that states what its plug-ins do, with a loader that returns it:
`load_format`, `load_pass`, `load_layout`, `load_exporter`, `load_runtime`. Floors below the Protocol read the
declarations of a plug-in as plain data; this is how recipes validate settings.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar

from quantkit.errors import InputError, unknown_name
from quantkit.plugins import outside

# folder -> (constant that a plug-in defines, word for one plug-in)
_WORDS = {
    "passes": ("PASS", "pass"),
    "formats": ("FORMAT", "format"),
    "exporters": ("EXPORT", "exporter"),
    "runtimes": ("RUNTIME", "runtime"),
    "model.layouts": ("LAYOUT", "layout"),
}
Plugin_co = TypeVar("Plugin_co", covariant=True)
_module = cache(importlib.import_module)


@dataclass(frozen=True)
class Kind(Generic[Plugin_co]):
    """Plug-ins of one kind, loaded as `Plugin_co`.

    Args:
        folder: folder in `quantkit/`, with dots: "passes", "model.layouts".
    """

    folder: str

    @property
    def constant(self) -> str:
        """Name of the constant in every module of this kind: `PASS`."""
        return _WORDS[self.folder][0]

    @property
    def singular(self) -> str:
        """Word for one plug-in of this kind: `pass`."""
        return _WORDS[self.folder][1]

    def summaries(self) -> dict[str, str]:
        """Map the name of every shipped plug-in to its one-line summary, sorted."""
        return dict(_summaries(self.folder, self.constant))

    def shipped(self) -> list[str]:
        """List the shipped names, sorted; these may be imported without asking the user."""
        return list(self.summaries())

    def about(self) -> dict[str, str]:
        """Map every name to its one-line summary and the package that offers it; nothing is imported."""
        about = self.summaries()
        for name, offered in self.offers().items():
            packages = " and ".join(sorted(offer.origin for offer in offered))
            if name in self.summaries():
                about[name] += f" (refused: one of this name that {packages} offers)"
            elif len(offered) > 1:
                about[name] = f"refused: {packages} offer one of this name each"
            else:
                about[name] = f"{offered[0].summary} ({packages})"
        return dict(sorted(about.items()))

    def offers(self) -> dict[str, list[outside.OfferedPlugin]]:
        """Map every name to the installed packages that offer it."""
        return outside.offers(f"quantkit.{self.folder}")

    def names(self) -> list[str]:
        """List all names, sorted."""
        return sorted({*self.summaries(), *self.offers()})

    def __contains__(self, name: object) -> bool:
        """Tell whether a plug-in has this name."""
        return isinstance(name, str) and (name in _summaries(self.folder, self.constant) or name in self.offers())

    def load(self, name: str, *, where: str = "") -> Plugin_co:
        """Load a plug-in by name; the error for an unknown name suggests a close one.

        Raises:
            InputError: `unknown-pass`, `unknown-format`, ...; `plugin-broken`, `plugin-clash`.
        """
        if name in _summaries(self.folder, self.constant):
            return getattr(_module(f"quantkit.{self.folder}.{name}"), self.constant)  # type: ignore[no-any-return]
        offered = self.offers().get(name, [])
        if len(offered) > 1:
            value = " and ".join(sorted(offer.origin for offer in offered))
            rule = f"one package offers a {self.singular} of that name"
            remedy = f"pip uninstall {offered[0].package}, or {offered[1].package}"
            raise InputError("plugin-clash", where or f"{self.singular} {name}", value, rule, remedy)
        if not offered:
            raise unknown_name(self.singular, name, self.names(), where=where)
        return self._whole(offered[0].load(self.constant), name, offered[0].origin)

    def run(self, path: Path) -> outside.CodeFile:
        """Run a user's file and return its plug-in, named after the file's stem.

        Raises:
            InputError: `plugin-clash`, the name is shipped; those of `outside.run_file`.
        """
        if path.stem in self.summaries():
            value, rule = f"a {self.singular} called {path.stem!r} ships", "a shipped name stays what it is"
            raise InputError("plugin-clash", where=str(path), value=value, rule=rule, remedy="rename the file")
        code = outside.run_file(path, self.constant)
        self._whole(code.plugin, path.stem, str(path))
        return code

    def of(self, step: Step) -> Plugin_co:
        """Return the plug-in of a recipe's step: from the step's file, else by name."""
        return self.load(step.name) if step.code is None else step.code.plugin

    def _whole(self, plugin: Any, name: str, origin: str) -> Plugin_co:
        home = importlib.import_module(f"quantkit.{self.folder}")
        unkept = getattr(home, "unkept", lambda _: "")
        outside.demand_whole(plugin, name, origin, getattr(home, self.singular.title()), self.singular, unkept)
        return plugin  # type: ignore[no-any-return]


@cache
def _summaries(kind: str, constant: str) -> dict[str, str]:
    folder = Path(__file__).parents[1].joinpath(*kind.split("."))
    summaries = {}
    for path in sorted({*folder.glob("*.py"), *folder.glob("*/__init__.py")}):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if constant in _defined(tree):
            name = path.parent.name if path.name == "__init__.py" else path.stem
            summaries[name] = outside.summary_of(tree)
    return dict(sorted(summaries.items()))


def _defined(tree: ast.Module) -> set[str]:
    """Collect the names at the top level of a module, assigned or imported."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


@dataclass(frozen=True)
class Rules:
    """Values that the scheme of a format may have, and its defaults; `WeightScheme` consults them.

    Args:
        granularities: granularity -> default group; None: it has no group, or the recipe has to state one.
            The first is the default.
        symmetric: allowed values: with (False) or without (True) zero points; the first is the default.
        scales: storage types of the scale; the first is the default.
        groups: allowed group sizes; empty: any.
        codes: whether a pass assigns codes; a plain floating-point format has none.
        activations: whether inputs, keys and values can be in it, under any scale.
        multiple: number of weights that a row must be a multiple of, if that is more than a group.
    """

    granularities: Mapping[str, int | None]
    symmetric: tuple[bool, ...]
    scales: tuple[str, ...]
    groups: tuple[int, ...] = ()
    codes: bool = True
    activations: bool = False
    multiple: int | None = None


class Step(Protocol):
    """Step of a recipe: it names a plug-in."""

    @property
    def name(self) -> str:
        """Stem of the file, or name of the folder; recipes write `-` for the `_` in a layout's name."""

    @property
    def code(self) -> outside.CodeFile | None:
        """User's file with the step's plug-in, or None."""


# output of an exporter: a checkpoint's tensors, one file with everything, an ONNX graph, or a network and the engine
# built from it
Stores = Literal["tensors", "file", "graph", "engine"]


def exporters_that_store(stores: Stores) -> list[str]:
    """List the names of shipped exporters with one kind of output."""
    return [name for name in EXPORTERS.shipped() if EXPORTERS.load(name).stores == stores]


# untyped, for floors below the Protocols; higher floors use `load_format`, `load_pass`, ...
FORMATS: Kind[Any] = Kind("formats")
PASSES: Kind[Any] = Kind("passes")
EXPORTERS: Kind[Any] = Kind("exporters")
RUNTIMES: Kind[Any] = Kind("runtimes")
LAYOUTS: Kind[Any] = Kind("model.layouts")
KINDS = (PASSES, FORMATS, EXPORTERS, RUNTIMES, LAYOUTS)


def format_rules(name: str) -> Rules | None:
    """Return the rules for schemes of a format; None if the format is unknown."""
    return FORMATS.load(name).rules if name in FORMATS else None  # type: ignore[no-any-return]


def format_names(*, activations: bool = False) -> list[str]:
    """List all formats, or only the shipped ones that activations can have."""
    able = (name for name in FORMATS.shipped() if FORMATS.load(name).rules.activations)
    return list(able) if activations else FORMATS.names()
