"""Load code from outside: a file by its path, run only if allowed, and plug-ins of installed packages.

A package offers plug-ins by entry points of the groups `quantkit.passes`, `quantkit.formats`, `quantkit.exporters` and
`quantkit.runtimes`. They are found in its metadata; its code is imported when one of them is used. Anything that goes
wrong in code from outside is one error that names the file or the package.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from quantkit import limits
from quantkit.errors import InputError, absent, one

# prefix of the groups of entry points
GROUPS = ("quantkit.passes", "quantkit.formats", "quantkit.exporters", "quantkit.runtimes")
# prefix of the module name of a file; a hash of its path and content follows
_FILE = "quantkit_file_"
Returned = TypeVar("Returned")


@dataclass(frozen=True)
class CodeFile:
    """A plug-in in a user's file.

    Args:
        path: absolute path.
        sha256: hash of the bytes that ran.
        plugin: plug-in that the file defines.
    """

    path: Path
    sha256: str
    plugin: Any = field(compare=False, repr=False)

    @property
    def public(self) -> str:
        """Name in a bundle: the file's name, as if it were beside the recipe, without a path of this machine."""
        return f"./{self.path.name}"


def run_file(path: Path, constant: str) -> CodeFile:
    """Run a Python file once and return the plug-in that it defines as `constant`.

    Raises:
        InputError: `file-missing`, `file-unreadable`, `over-limit`, `plugin-broken`.
    """
    path = path.expanduser().absolute()
    try:
        source = limits.read(path)
    except FileNotFoundError:
        raise absent(path, "a path begins at the recipe that names it") from None
    except OSError as problem:
        reason = problem.strerror or str(problem)
        raise InputError("file-unreadable", where=str(path), value=reason, remedy="check the file") from None
    digest = hashlib.sha256(source).hexdigest()
    name = _FILE + hashlib.sha256(f"{path}\n{digest}".encode()).hexdigest()[:16]
    with _blaming(str(path)):
        if name not in sys.modules:
            module = ModuleType(name)
            module.__file__ = str(path)
            sys.modules[name] = module  # dataclasses and pydantic look up the module that defines them
            try:
                exec(compile(source, str(path), "exec"), module.__dict__)  # noqa: S102 (asked for by the caller)
            except BaseException:
                del sys.modules[name]
                raise
        plugin = _constant(sys.modules[name], constant)
    return CodeFile(path, digest, plugin)


def function(reference: str, option: str) -> Callable[..., Any]:
    """Import a user's function by the text of an option: `module:function`, or `./file.py:function`.

    Raises InputError: `plugin-broken`, and those of `run_file`.
    """
    place, _, name = reference.rpartition(":")
    if not place or not name.isidentifier():
        raise InputError("usage", option, reference, "a function is named module:function, or ./file.py:function")
    if place.endswith(".py"):
        named = run_file(Path(place), name).plugin
    else:
        with _blaming(place):
            named = _constant(importlib.import_module(place), name)
    if not callable(named):
        raise InputError("plugin-broken", place, f"{name} is {one(type(named).__name__)}", "a function is named")
    return named  # type: ignore[no-any-return]


@dataclass(frozen=True)
class OfferedPlugin:
    """A plug-in of an installed package.

    Args:
        entry: entry point: the module that defines the constant, or `module:object`.
        package: name of the package.
        version: version of the package.
    """

    entry: metadata.EntryPoint
    package: str
    version: str

    @property
    def origin(self) -> str:
        """Package and version: `package acme-quant 1.0`."""
        return f"package {self.package} {self.version}"

    @property
    def summary(self) -> str:
        """First line of the module's docstring, read without importing it; else the package's summary."""
        dist = self.entry.dist
        if dist is None:
            return ""
        stem = self.entry.module.replace(".", "/")
        for place in (f"{stem}.py", f"{stem}/__init__.py"):
            try:
                tree = ast.parse(limits.read(Path(str(dist.locate_file(place)))))
            except (OSError, SyntaxError, ValueError):
                continue
            return summary_of(tree)
        return str(dist.metadata["Summary"] or "")

    def load(self, constant: str) -> Any:
        """Import its module and return the plug-in. Raises InputError `plugin-broken`."""
        with _blaming(self.origin):
            loaded = self.entry.load()
            _imported_sha256(_home(self.entry.module))  # hashed now: a later edit is not what runs
            return _constant(loaded, constant) if isinstance(loaded, ModuleType) else loaded

    @property
    def sha256(self) -> str:
        """Hash of all Python files of the top-level package that is imported."""
        importlib.import_module(self.entry.module)
        return _imported_sha256(_home(self.entry.module))


def summary_of(tree: ast.Module) -> str:
    """Return the first line of a module's docstring."""
    return (ast.get_docstring(tree) or "").split("\n", 1)[0].strip()


def offers(group: str) -> dict[str, list[OfferedPlugin]]:
    """Map every name in a group of entry points to the packages that offer it."""
    return _offers(group, tuple(sys.path)) if group in GROUPS else {}


@cache
def _offers(group: str, path: tuple[str, ...]) -> dict[str, list[OfferedPlugin]]:
    """Read the entry points of a group on a search path, once."""
    offered: dict[str, list[OfferedPlugin]] = {}
    for entry in metadata.entry_points(group=group):
        if entry.dist is not None:
            offered.setdefault(entry.name, []).append(OfferedPlugin(entry, entry.dist.name, entry.dist.version))
    return offered


def demand_whole(
    plugin: Any, name: str, origin: str, protocol: type, singular: str, unkept: Callable[[Any], str] = lambda _: ""
) -> None:
    """Refuse a plug-in without a part that its kind requires or that it declares.

    Args:
        unkept: function that describes a missing declared part; "" if nothing is missing.

    Raises:
        InputError: `plugin-broken`.
    """
    bases = [base for base in protocol.__mro__ if getattr(base, "_is_protocol", False)]
    members = {member for base in bases for member in (*vars(base), *getattr(base, "__annotations__", ()))}
    missing = sorted(member for member in members if not member.startswith("_") and not hasattr(plugin, member))
    value = ""
    if missing:
        value = f"{one(type(plugin).__name__)} without {missing[0]}"
    elif plugin.name != name:
        value = f"its name is {plugin.name!r}"
    elif broken := unkept(plugin):
        value = f"{one(type(plugin).__name__)} without {broken}"
    if value:
        rule = f"an object of a class that goes on from {protocol.__module__}.{protocol.__name__}, of the same name"
        remedy = "correct it, or ask its author; docs/plugins.md has an example"
        raise InputError("plugin-broken", origin, f"{singular} {name}: {value}", rule, remedy)


def demand_returned(answer: Any, kind: type[Returned], plugin: Any, method: str) -> Returned:
    """Refuse a plug-in method's return value of the wrong type. Raises InputError `plugin-failed`."""
    if isinstance(answer, kind):
        return answer
    value = f"{method} of {plugin.name} returned {'None' if answer is None else one(type(answer).__name__)}"
    rule = f"it returns {kind.__module__}.{kind.__name__}(…)"
    remedy = "correct it, or tell its author; docs/plugins.md has an example"
    raise InputError("plugin-failed", origin(type(plugin).__module__) or plugin.name, value, rule, remedy)


def origin(name: str) -> str | None:
    """Name the file or package from outside that a module belongs to; None for our own modules."""
    if name.startswith(_FILE):
        return str(sys.modules[name].__file__)
    every = (offer for group in GROUPS for offered in offers(group).values() for offer in offered)
    package = name.partition(".")[0]
    return next((offer.origin for offer in every if offer.entry.module.partition(".")[0] == package), None)


def culprit(problem: BaseException) -> tuple[str, int | None] | None:
    """Find the file, with the line that failed, or the package from outside that an exception passed through.

    Returns: the file and its line, a package and None; or None if there is none.
    """
    names = (str(frame.f_globals.get("__name__", "")) for frame, _ in traceback.walk_tb(problem.__traceback__))
    place = next((place for place in map(origin, names) if place is not None), None)
    return None if place is None else (place, _line_in(problem, place))


def _line_in(problem: BaseException, file: str) -> int | None:
    """Return the last line of a file that an exception passed through; None if it passed through none."""
    frames = traceback.walk_tb(problem.__traceback__)
    lines = [line for frame, line in frames if frame.f_code.co_filename == file]
    lines += [problem.lineno or 1] if isinstance(problem, SyntaxError) and problem.filename == file else []
    return lines[-1] if lines else None


def _home(name: str) -> ModuleType:
    """Return the package or module that an imported module belongs to: the topmost with a file of its own."""
    parts = name.split(".")
    above = [sys.modules[".".join(parts[: count + 1])] for count in range(len(parts))]
    return next((module for module in above if getattr(module, "__file__", None)), above[-1])


@cache
def _imported_sha256(module: ModuleType) -> str:
    """Hash the module's Python files and their paths; read once after an import."""
    file = Path(str(module.__file__))
    files = sorted(file.parent.rglob("*.py")) if hasattr(module, "__path__") else [file]
    lines = [f"{hashlib.sha256(limits.read(path)).hexdigest()}  {path.relative_to(file.parent)}\n" for path in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _constant(module: ModuleType, name: str) -> Any:
    if not hasattr(module, name):
        raise AttributeError(f"it defines no {name}")
    return getattr(module, name)


@contextmanager
def _blaming(origin: str) -> Iterator[None]:
    """Turn any error while importing code from outside into an error that names its file or package."""
    try:
        yield
    except (KeyboardInterrupt, MemoryError):
        raise
    except BaseException as problem:  # the code may also call sys.exit
        line = (str(problem).splitlines() or [""])[0][:200]
        value = f"{type(problem).__name__}: {line}".removesuffix(": ")
        remedy = "correct it, or ask its author; docs/plugins.md has an example"
        number = _line_in(problem, origin)
        value += "" if number is None else f" (line {number})"
        raise InputError("plugin-broken", origin, value, "a plug-in's module can be imported", remedy) from None
