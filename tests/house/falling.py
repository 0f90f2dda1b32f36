"""Counts that may only fall, and how much of each there is: lines a package, circles, climbs, odd files, odd English.

    cd tests && python -m house.falling            lowers the limits to what there is
    cd tests && python -m house.falling NAME       lists what is counted under a name

What grows is raised by hand, in a commit that says why.
"""

import ast
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from house import prose
from house.source import PACKAGE, files, imports, nodes

FILE = Path(__file__).with_name("falling.txt")
# one thing a file, found by its name: as short as they are
PLUG_INS = ("formats", "graph.fuse", "model.layouts", "passes", "exporters", "runtimes", "cli.commands")
FEWEST, MOST = 80, 600
_VAGUE = {"found", "each", "said", "made", "given"}
_RELATIVE = {"what", "that", "which", "who", "whose", "whom", "whoever", "whatever", "whichever"}
# of a function's summary; no verb is among them
_NO_VERB = {
    *("the", "a", "an", "one", "two", "it", "its", "they", "their", "our", "this", "those", "these", "all", "both"),
    *("what", "whether", "which", "who", "whoever", "whose", "how", "where", "when", "why", "if", "of", "as", "in"),
    *(
        "by",
        "to",
        "from",
        "for",
        "with",
        "without",
        "at",
        "on",
        "every",
        "each",
        "some",
        "any",
        "no",
        "nothing",
        "same",
    ),
    *("everything", "something", "once", "there", "see", "so", "only", "more", "most", "other", "others"),
}
_KINDS = {
    **{"FORMATS": "formats", "PASSES": "passes", "EXPORTERS": "exporters", "RUNTIMES": "runtimes"},
    "LAYOUTS": "model.layouts",
}


@cache
def floors() -> dict[str, int]:
    """Package of quantkit -> its floor; 0 is the lowest."""
    settings = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    layers = settings["importlinter"]["contracts"][0]["layers"]
    return {layer.strip("()").removeprefix("quantkit."): floor for floor, layer in enumerate(reversed(layers))}


def package(module: str) -> str:
    """`quantkit.model.streaming.block` -> `model`; of a module that lies in quantkit itself, its name."""
    return module.split(".")[1] if "." in module else ""


def needed(module: str) -> Iterator[str]:
    """Modules that one needs: imports wherever they stand, and plug-ins that it asks the loader for."""
    yield from (name for _, name in imports(module))
    for node in nodes(module):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "plugins" and node.attr in _KINDS:
            yield f"quantkit.{_KINDS[node.attr]}"


def lines() -> dict[str, int]:
    """Package -> lines of Python."""
    counted: Counter[str] = Counter()
    for module, path in files().items():
        counted[f"lines of {package(module) or 'quantkit'}"] += len(path.read_text(encoding="utf-8").splitlines())
    return dict(counted)


def in_circles() -> list[str]:
    """Modules that need each other."""
    graph = {module: {name for name in needed(module) if name != module and name in files()} for module in files()}
    reached = {module: _reached(graph, module) for module in graph}
    return [module for module in graph if any(module in reached[name] for name in graph[module])]


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    seen, waiting = set(), [start]
    while waiting:
        for name in graph[waiting.pop()] - seen:
            seen.add(name)
            waiting.append(name)
    return seen


def climbs() -> list[str]:
    """Needs that run upward."""
    return [
        f"{module} -> {name}"
        for module in files()
        for name in set(needed(module))
        if floors().get(package(name), -1) > floors().get(package(module), len(floors()))
    ]


def odd_files() -> list[str]:
    """Files that are no plug-in and have fewer than 80 lines or more than 600."""
    return [
        module
        for module, path in files().items()
        if path.name != "__init__.py"
        and module.removeprefix("quantkit.").rpartition(".")[0] not in PLUG_INS
        and not FEWEST <= len(path.read_text(encoding="utf-8").splitlines()) <= MOST
    ]


def _summaries() -> Iterator[tuple[str, list[str]]]:
    for module in files():
        for node in nodes(module):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(node)):
                first = text.split("\n\n", 1)[0]
                yield f"{module}: {first[:80]}", re.findall(r"[a-z']+", first.lower())


def clauses() -> list[str]:
    """List summaries of modules and classes whose first word opens a clause."""
    listed = []
    for module in files():
        for node in nodes(module):
            if isinstance(node, ast.Module | ast.ClassDef) and (text := ast.get_docstring(node)):
                first = text.split("\n", 1)[0]
                if re.match(r"\W*(?:what|how|which|where|whether|who|whoever|of)\b", first, re.IGNORECASE):
                    listed.append(f"{module}: {first[:80]}")
    return listed


def no_verb() -> list[str]:
    """Summaries of functions that begin with no verb."""
    return [place for place, spoken in _summaries() if spoken and spoken[0] in _NO_VERB and spoken[0] != "see"]


def relative() -> list[str]:
    """Summaries of functions with a relative pronoun among their first five words."""
    return [place for place, spoken in _summaries() if _RELATIVE & set(spoken[:5])]


def vague() -> list[str]:
    """Values with a name that says nothing."""
    return [
        f"{module}:{node.lineno}"
        for module in files()
        for node in nodes(module)
        if (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in _VAGUE)
        or (isinstance(node, ast.arg) and node.arg in _VAGUE)
    ]


LISTED: dict[str, Callable[[], list[str]]] = (
    {"modules in circles": in_circles, "needs that run upward": climbs}
    | {"files of an odd size": odd_files, "summaries without a verb": no_verb}
    | {"summaries of modules and classes that open with a clause": clauses}
    | {"summaries with a relative pronoun": relative, "values named vaguely": vague}
    | {"long sentences in documents": prose.long_sentences, "long paragraphs in documents": prose.long_paragraphs}
    | {"sentences in documents that open with a clause": prose.clauses_first}
)


def counted() -> dict[str, int]:
    """Everything that is counted from the sources."""
    return {**lines(), **{name: len(listed()) for name, listed in LISTED.items()}}


def limits() -> dict[str, int]:
    """What there may be at most."""
    split = (line.rpartition(" ") for line in FILE.read_text(encoding="utf-8").splitlines() if line)
    return {name: int(count) for name, _, count in split}


def write(now: dict[str, int]) -> None:
    """Lowers the limits to what there is; a package that is gone has none."""
    known = limits() if FILE.exists() else {}
    kept = {name: count for name, count in known.items() if not name.startswith("lines of ") or name in now}
    lowered = {**kept, **{name: min(count, known.get(name, count)) for name, count in now.items()}}
    FILE.write_text("".join(f"{name} {count}\n" for name, count in sorted(lowered.items())), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:]:
        print(*LISTED[" ".join(sys.argv[1:])](), sep="\n")
    else:
        from house.walk import walk

        write({**counted(), **walk()})
