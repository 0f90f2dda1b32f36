"""The words of the command line, read off its parser, and the codes of errors, read off the sources."""

import ast
import re
from collections.abc import Iterator
from typing import Any

import typer
from house.source import files, nodes

from quantkit import errors
from quantkit.cli.frame import app

# what makes an error, and which of its arguments is the code
_MAKERS = {
    name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.QuantkitError)
}


def words() -> dict[str, dict[str, list[str]]]:
    """Command -> option or argument -> how it is written and of which type."""
    found: dict[str, dict[str, list[str]]] = {}

    def visit(command: Any, name: str) -> None:
        found[name] = {parameter.name: _form(parameter) for parameter in command.params}
        for inner, member in getattr(command, "commands", {}).items():
            visit(member, f"{name} {inner}".strip())

    visit(typer.main.get_command(app), "quantkit")
    return found


def _form(parameter: Any) -> list[str]:
    several = parameter.nargs != 1 or getattr(parameter, "multiple", False)
    spelled = [*parameter.opts, *parameter.secondary_opts, parameter.metavar or ""]
    return [*spelled, "several" if several else "one", "required" if parameter.required else "optional"]


def codes() -> list[str]:
    """Every code that an error is constructed with, as far as it is written there as a text."""
    return sorted({code for code in _codes() if re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", code)})


def _codes() -> Iterator[str]:
    for module in files():
        for node in nodes(module):
            if isinstance(node, ast.Call):
                yield from _of_call(node)
            elif isinstance(node, ast.FunctionDef):
                pairs = zip(reversed(node.args.args), reversed(node.args.defaults), strict=False)
                named = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
                yield from _texts(*(value for argument, value in (*pairs, *named) if argument.arg == "code"))
            elif (
                isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "absent"
            ):  # code and rule, of a runtime
                yield from _texts(*node.value.elts[:1] if isinstance(node.value, ast.Tuple) else ())


def _of_call(node: ast.Call) -> Iterator[str]:
    if ast.unparse(node.func).rpartition(".")[2] in _MAKERS - {"MissingDependency"} and node.args:
        yield from _texts(node.args[0])
    yield from _texts(*(keyword.value for keyword in node.keywords if keyword.arg == "code"))


def _texts(*values: ast.expr | None) -> Iterator[str]:
    for value in values:
        if isinstance(value, ast.IfExp):
            yield from _texts(value.body, value.orelse)
        elif isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value.value


def exits() -> dict[str, int]:
    """Class of error -> what a command exits with."""
    return {name: vars(errors)[name].exit for name in sorted(_MAKERS) if hasattr(vars(errors)[name], "exit")}
