"""What exists is what stands in a folder: one file, or one folder, one thing.

A pass, format, exporter, runtime or layout is a module or a package in `quantkit/<kind>/` that has one constant:
`PASS`, `FORMAT`, `EXPORT`, `RUNTIME`, `LAYOUT`. Its name is the stem, its summary the first line of its docstring; both
are read without importing, so that listing needs no torch. What has no such constant is a helper. Beside those that
ship there are those that installed packages offer, and passes in a user's own file (`outside.py`): a shipped name stays
what it is, and what has to look at all of a kind looks at what ships.

`Kind` finds them. What a plug-in does is declared by a Protocol beside its kind, with a loader that returns it:
`load_format`, `load_pass`, `load_layout`, `load_exporter`, `load_runtime`. Floors below it read what a plug-in declares
as plain data: recipes validate settings.
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

# folder -> (the constant that a plug-in defines, one of the kind in a sentence)
_WORDS = {
    "passes": ("PASS", "pass"),
    "formats": ("FORMAT", "format"),
    "exporters": ("EXPORT", "exporter"),
    "runtimes": ("RUNTIME", "runtime"),
    "model.layouts": ("LAYOUT", "layout"),
}
Plugin_co = TypeVar("Plugin_co", covariant=True)


@dataclass(frozen=True)
class Kind(Generic[Plugin_co]):
    """Plug-ins of one kind, loaded as `Plugin_co`.

    Args:
        folder: in `quantkit/`, with dots: "passes", "model.layouts".
    """

    folder: str

    @property
    def constant(self) -> str:
        """Name that a module of this kind defines: `PASS`."""
        return _WORDS[self.folder][0]

    @property
    def singular(self) -> str:
        """Word for one of this kind: `pass`."""
        return _WORDS[self.folder][1]

    def summaries(self) -> dict[str, str]:
        """Map name -> one-line summary of all that ship, sorted."""
        return dict(_summaries(self.folder, self.constant))

    def shipped(self) -> list[str]:
        """List those that ship, sorted: what may be imported without being asked for."""
        return list(self.summaries())

    def about(self) -> dict[str, str]:
        """Map name -> one-line summary of all there are, with the package that brings it; nothing is imported."""
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
        """Map name -> the installed packages that offer one of that name."""
        return outside.offers(f"quantkit.{self.folder}")

    def names(self) -> list[str]:
        """List the names that exist, sorted."""
        return sorted({*self.summaries(), *self.offers()})

    def __contains__(self, name: object) -> bool:
        """Tell whether there is one of that name."""
        return isinstance(name, str) and (name in self.summaries() or name in self.offers())

    def load(self, name: str, *, where: str = "") -> Plugin_co:
        """Load the plug-in of that name; a near miss gets a did-you-mean.

        Raises:
            InputError: none of that name (`unknown-pass`, `unknown-format`, ...); `plugin-broken`, `plugin-clash`.
        """
        if name in self.summaries():
            module = importlib.import_module(f"quantkit.{self.folder}.{name}")
            return getattr(module, self.constant)  # type: ignore[no-any-return]
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
        """Run a user's own file: the plug-in in it is called like its stem.

        Raises:
            InputError: `plugin-clash`, a shipped one's name; those of `outside.run_file`.
        """
        if path.stem in self.summaries():
            value, rule = f"a {self.singular} called {path.stem!r} ships", "a shipped name stays what it is"
            raise InputError("plugin-clash", where=str(path), value=value, rule=rule, remedy="rename the file")
        code = outside.run_file(path, self.constant)
        self._whole(code.plugin, path.stem, str(path))
        return code

    def of(self, step: Step) -> Plugin_co:
        """Return the plug-in of a recipe's step: the one of its own file, else the one of its name."""
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
    """Names that a module assigns or imports at its top."""
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
    """What a scheme of one format may say, and what it means where it says nothing; `WeightScheme` consults it.

    Args:
        granularities: granularity -> its group where none is written; None: it has no group, or it has to be written.
            The first is the default.
        symmetric: with (False) or without (True) zero points; the first is the default.
        scales: storage types of the scale; the first is the default.
        groups: the group sizes there are; empty: any.
        codes: whether there are codes for a pass to assign; a plain floating-point number has none.
        activations: whether inputs, keys and values can be in it, under any scale.
        multiple: of how many weights a row is a multiple, where that is more than a group.
    """

    granularities: Mapping[str, int | None]
    symmetric: tuple[bool, ...]
    scales: tuple[str, ...]
    groups: tuple[int, ...] = ()
    codes: bool = True
    activations: bool = False
    multiple: int | None = None


class Step(Protocol):
    """Step of a recipe, which names a plug-in."""

    @property
    def name(self) -> str:
        """Stem of the file, or name of the folder; recipes write `-` for the `_` of a layout."""

    @property
    def code(self) -> outside.CodeFile | None:
        """The user's own file that it stands in."""


# what becomes of a model: a checkpoint's tensors, one file with everything, an ONNX graph, or a network with an engine
# built from it
Stores = Literal["tensors", "file", "graph", "engine"]


def exporters_that_store(stores: Stores) -> list[str]:
    """List the shipped exporters of one kind, by name."""
    return [name for name in EXPORTERS.shipped() if EXPORTERS.load(name).stores == stores]


# read as they are below the floor where a kind is declared; above it `load_format`, `load_pass`, ... say what they do
FORMATS: Kind[Any] = Kind("formats")
PASSES: Kind[Any] = Kind("passes")
EXPORTERS: Kind[Any] = Kind("exporters")
RUNTIMES: Kind[Any] = Kind("runtimes")
LAYOUTS: Kind[Any] = Kind("model.layouts")
KINDS = (PASSES, FORMATS, EXPORTERS, RUNTIMES, LAYOUTS)


def format_rules(name: str) -> Rules | None:
    """Return what the schemes of a format may say; None where no format is called so."""
    return FORMATS.load(name).rules if name in FORMATS else None  # type: ignore[no-any-return]


def format_names(*, activations: bool = False) -> list[str]:
    """List all formats, or the shipped ones that inputs can be in."""
    able = (name for name in FORMATS.shipped() if FORMATS.load(name).rules.activations)
    return list(able) if activations else FORMATS.names()
