"""What the package tells people to type exists: commands, options, recipes, targets, settings of a recipe.

Read off the text literals of the package, docstrings left out; what a sentence fills in (`{name}`) is not known here.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import typer

from house.source import files, nodes
from quantkit import content, plugins
from quantkit.cli.frame import app
from quantkit.errors import InputError
from quantkit.recipe import Recipe

# options of other programs
OTHERS = {
    "--no-deps": "pip",
    "--index-url": "pip",
    "--quiet": "pip",
    "--only-binary": "pip",
    "--disable-pip-version-check": "pip",
    "--dest": "pip",
    **dict.fromkeys(("--include", "--local-dir"), "hf"),
    **dict.fromkeys(
        ("--implementation", "--python-version", "--abi", "--platform", "--no-index", "--find-links"), "pip"
    ),
    "--query-gpu": "nvidia-smi",
    "--format": "nvidia-smi, and our own",
    "--id": "nvidia-smi",
    "--linear-backend": "vLLM",
    **dict.fromkeys(("--model", "--host", "--port", "--dtype", "--max-model-len", "--enforce-eager"), "vLLM"),
    **dict.fromkeys(("--no-enable-prefix-caching", "--disable-uvicorn-access-log", "--backend", "--base-url"), "vLLM"),
    **dict.fromkeys(("--tokenizer", "--dataset-name", "--num-prompts", "--request-rate", "--seed"), "vLLM"),
    **dict.fromkeys(("--random-input-len", "--random-output-len", "--ignore-eos", "--temperature"), "vLLM"),
    **dict.fromkeys(("--ready-check-timeout-sec", "--disable-tqdm", "--save-detailed"), "vLLM"),
    "--loadEngine": "trtexec",
    "--resources": "ray",
    "--head": "ray",
    **dict.fromkeys(("--num-cpus", "--num-gpus"), "ray"),
}
# words after `quantkit` in sentences that name no command
PROSE = {"again", "raw", "reads", "that", "never"}
FILLED = "\0"  # what is filled in when the sentence is made


@cache
def told() -> tuple[tuple[str, str], ...]:
    """(module, literal), placeholders as one character."""
    found = []
    for module in files():
        inner = {id(part) for node in nodes(module) if isinstance(node, ast.JoinedStr) for part in node.values}
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        for node in nodes(module):
            if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
                inner.add(id(node.body[0].value))  # type: ignore[attr-defined]
        for node in nodes(module):
            if id(node) in inner:
                continue
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append((module, node.value))
            elif isinstance(node, ast.JoinedStr):
                parts = (str(part.value) if isinstance(part, ast.Constant) else FILLED for part in node.values)
                found.append((module, "".join(parts)))
    return tuple(found)


@cache
def commands() -> dict[str, set[str]]:
    """`nightly run` -> its options; groups by their names too."""
    found: dict[str, set[str]] = {}

    def visit(command: Any, name: str) -> None:
        found[name] = {option for each in command.params for option in (*each.opts, *each.secondary_opts)} | {"--help"}
        for inner, each in getattr(command, "commands", {}).items():
            visit(each, f"{name} {inner}".strip())

    visit(typer.main.get_command(app), "")
    return found


def named(pattern: str) -> Iterator[tuple[str, str, str]]:
    """(module, literal, first group) of each match."""
    for module, text in told():
        yield from ((module, text, match[1]) for match in re.finditer(pattern, text))


def test_every_command_exists_and_has_the_options_it_is_given() -> None:
    seen = 0
    for module, text, typed in named(r"(?<![\w.-])quantkit ([a-z][^`;,\n]*)"):
        first, second, *_ = (*re.split(r"[\s:]+", typed), "", "")
        if first in PROSE or " " not in text:
            continue
        name = f"{first} {second}" if f"{first} {second}" in commands() else first
        assert name in commands(), (module, text)
        options = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", typed))
        assert options <= commands()[name], (module, text)
        seen += 1
    assert seen > 30


def test_every_option_exists() -> None:
    known = set().union(*commands().values()) | OTHERS.keys()
    for module, text, option in named(r"(?<![\w-])(?<!\()(--[a-zA-Z][a-zA-Z0-9-]*)"):
        assert option in known, (module, text)


@pytest.mark.parametrize(
    ("option", "names"),
    [
        ("recipe", set(content.names("recipes"))),
        ("target", set(content.names("export"))),
        ("runtime", set(plugins.RUNTIMES.names())),
        ("to", set(plugins.EXPORTERS.names())),
        ("device", {"cpu", "cuda", "auto"}),
        ("executor", {"local", "ray"}),
    ],
)
def test_every_name_after_an_option_exists(option: str, names: set[str]) -> None:
    for module, text, name in named(rf"--{option} ([a-z][\w.+-]*)"):
        assert set(name.rstrip(".").split("+")) <= names or name in ("and", "both", "with", "or", "out"), (module, text)


def refused(data: Any, name: str, change: str) -> str | None:
    """What is said of a change to a recipe; None where it is taken."""
    try:
        Recipe.from_dict(data, name=name, changes=[change])
    except InputError as problem:
        return problem.line()
    return None


def test_every_setting_is_one_of_a_recipe() -> None:
    recipes = [(name, content.read_yaml(content.find("recipes", name))) for name in content.names("recipes")]
    seen = 0
    for module, text in told():
        for quoted, bare in re.findall(r"--set (?:'([^']+)'|([\w.]+=[^\s,;]*))", text):
            change = quoted or bare
            path, _, value = change.partition("=")
            if FILLED in path or path == "library":  # of an export, which `quantkit export` takes
                continue
            seen += 1
            # the path alone, where the value is filled in: nothing else but its value may be wrong then
            filled = FILLED in value
            said = [refused(data, name, f"{path}=0" if filled else change) for name, data in recipes]
            taken = [each is None or (filled and not re.search("set-invalid|unknown key", each)) for each in said]
            assert any(taken), (module, text, said[0])
    assert seen > 15
