"""The frame of all commands: how they are parsed and run, one way out for every result and every error."""

from __future__ import annotations

import functools
import io
import json
import math
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from typing import IO, Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

from quantkit._version import __version__
from quantkit.cli.answer import Answer
from quantkit.cli.commands import device, nightly
from quantkit.cli.commands.compare import compare
from quantkit.cli.commands.compile import compile  # noqa: A004 (the word of the command line)
from quantkit.cli.commands.doctor import doctor
from quantkit.cli.commands.export import export
from quantkit.cli.commands.generate import generate
from quantkit.cli.commands.imatrix import imatrix
from quantkit.cli.commands.list import list_
from quantkit.cli.commands.measure import measure
from quantkit.cli.commands.plan import plan
from quantkit.cli.commands.show import show
from quantkit.cli.commands.sign import sign
from quantkit.cli.commands.tax import tax
from quantkit.cli.commands.tune import tune
from quantkit.cli.commands.verify import verify
from quantkit.errors import InputError, MissingDependency, QuantkitError, Rebuilt, Stopped, escaped, printable
from quantkit.model.device import is_out_of_memory, out_of_memory
from quantkit.plugins import outside

SCHEMA = "quantkit/1"
# what the extras bring; a command that misses one says so instead of failing to import
_OPTIONAL = {
    "compile": {
        *("torch", "transformers", "tokenizers", "scipy", "datasets", "compressed_tensors", "accelerate", "gguf"),
        *("psutil", "pyarrow", "pandas", "onnx", "onnx_ir", "onnxscript", "onnxruntime"),
    },
    "nightly": {"duckdb", "pyarrow"},
}
# read when torch is loaded. Idle OpenMP threads that spin make a busy machine ten times slower, and sleeping costs an
# idle one next to nothing. With large pages, where the system gives them, a large tensor is made in a third of the time
_ENVIRONMENT = {
    "THP_MEM_ALLOC_ENABLE": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "0",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "DATASETS_VERBOSITY": "error",
    "TQDM_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

_INTERRUPTED = 130  # what typer makes of an interrupt while it parses

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Quantize and compile a model, and measure on the target whether it was worth it.",
    epilog="Exit codes: 0 fine; 1 a gate, check, comparison or --strict failed; 2 wrong use or input; 3 too noisy to "
    "decide; 75 stopped safely, go on with --resume. Start with: quantkit compile --recipe awq-int4",
)
# in the order in which help names them
_COMMANDS = (compile, plan, measure, compare, tax, tune, export, verify, sign, list_, show, doctor, generate, imatrix)
# a group has commands of its own: `quantkit nightly query`
_GROUPS = {"device": (device.HELP, device.COMMANDS), "nightly": (nightly.HELP, nightly.COMMANDS)}


def _parsed(work: Callable[..., Answer]) -> Callable[..., Callable[[], Answer]]:
    """A command that typer parses and `run` executes, outside of typer's own handling of errors and signals."""

    @functools.wraps(work)
    def parsed(**options: Any) -> Callable[[], Answer]:
        return functools.partial(work, **options)

    return parsed


class _Command(TyperCommand):
    """A command whose options are given once, unless they are made to be repeated: no value replaces another unsaid."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As it does, after a look at how often each is there. Raises InputError `usage`."""
        _, _, given = self.make_parser(ctx).parse_args(list(args))
        for option in self.params:
            single = isinstance(option, TyperOption) and not (option.is_flag or option.multiple)
            if single and given.count(option) > 1:
                name, form = option.opts[0], option.metavar or ""
                where, rule = f"{ctx.command_path} {name}", "it takes one value"
                remedy = f"all in one: {name} {form}" if "," in form else "leave one out"
                raise InputError("usage", where, "given twice", rule, remedy)
        return super().parse_args(ctx, args)


def _help(context: typer.Context) -> None:
    """What a group says that is given no command."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


for _work in _COMMANDS:
    app.command(name=_work.__name__.rstrip("_"), cls=_Command)(_parsed(_work))
for _name, (_about, _members) in _GROUPS.items():
    _group = typer.Typer(rich_markup_mode=None, callback=_help, invoke_without_command=True, help=_about)
    for _work in _members:
        _group.command(name=_work.__name__.rstrip("_"), cls=_Command)(_parsed(_work))
    app.add_typer(_group, name=_name)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"quantkit {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    _help(context)


def main() -> None:
    """The entry point of the command `quantkit`."""
    # first of all: torch and transformers take seconds to import, in which a signal must already stop safely
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # a shell's background jobs ignore it
        signal.signal(signal.SIGINT, _interrupt)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    _keep_streams()
    # a terminal without ✓ or × gets a question mark, not an error
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    if isinstance(sys.stderr, io.TextIOWrapper):
        encoding = sys.stderr.encoding
        sys.stderr = _Said(sys.stderr.detach(), encoding=encoding, errors="replace", line_buffering=True)
    code = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except OSError:
        # whoever read has enough; without this, Python complains once more while it shuts down
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _keep_streams() -> None:
    """Stdout is the answer's alone: what libraries print past Python (HiGHS does, in C++) goes to stderr."""
    # one that is closed by whoever started us; its number must not become that of a file
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            setattr(sys, name, os.fdopen(number, "w"))
    with suppress(AttributeError, OSError):
        kept = os.dup(sys.stdout.fileno())
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        sys.stdout = os.fdopen(kept, "w", encoding=sys.stdout.encoding)


class _Said(io.TextIOWrapper):
    """Standard error: when whoever reads it leaves (`2>&1 | head`), the work goes on."""

    def write(self, text: str) -> int:
        with self._heard():
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with self._heard():
            super().flush()

    @contextmanager
    def _heard(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@functools.cache
def _parser() -> Any:
    """The parser of `app`: typer reads the signatures of all commands to make it."""
    return typer.main.get_command(app)


def run(arguments: Sequence[str]) -> int:
    """Parse, execute, print; the exit code."""
    name = _named(arguments)
    as_json = "--json" in arguments
    out = sys.stdout
    answer, rebuilt = Answer(None), list[str]()
    try:
        parsed = _parser().main(list(arguments), prog_name="quantkit", standalone_mode=False)
        if parsed == _INTERRUPTED:
            raise KeyboardInterrupt
        if not callable(parsed):
            return int(parsed or 0)
        with redirect_stdout(sys.stderr), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", Rebuilt)
            try:
                answer = parsed()
            finally:
                rebuilt = [str(each.message) for each in caught]
    except BaseException as problem:  # panics of libraries in Rust are no `Exception`
        answer.error = _as_error(problem, name)
        if answer.error.code in ("internal-error", "plugin-failed") and os.environ.get("QUANTKIT_TRACEBACK"):
            traceback.print_exc()
    answer.warnings += rebuilt
    for line in rebuilt:
        print(printable(f"! {line}"), file=sys.stderr)
    code = answer.error.exit if answer.error else 0
    try:
        _print(answer, name, code, out, as_json=as_json)
    except BrokenPipeError:
        pass  # whoever read has enough
    except OSError as problem:
        value = problem.strerror or str(problem)
        full = Stopped("disk-full", "stdout", value, "the answer is printed", "make room")
        print(f"error: {full.line()}", file=sys.stderr)
        return full.exit
    return code


def _named(arguments: Sequence[str]) -> str:
    """The command that is meant: its first word, and the second of a group's; what is no command's name counts too."""
    words = [argument for argument in arguments if not argument.startswith("-")]
    return " ".join(words[: 2 if words[:1] and words[0] in _GROUPS else 1])


def _print(answer: Answer, name: str, code: int, out: IO[str], *, as_json: bool) -> None:
    if as_json:
        print(_envelope(answer, name, code), file=out, flush=True)
    elif answer.shown:
        from quantkit.report.kit.screen import write

        write(answer.shown, out)
        out.flush()
    if answer.error is not None:
        print(f"error: {answer.error.line()}", file=sys.stderr)


def _envelope(answer: Answer, name: str, code: int) -> str:
    """The one object that `--json` prints, on one line."""
    envelope = {
        "schema": SCHEMA,
        "command": name,
        "exit": code,
        "result": answer.result,
        "decisions": answer.decisions,
        "warnings": answer.warnings,
        "error": answer.error.as_dict() if answer.error else None,
    }
    try:
        text = json.dumps(envelope, ensure_ascii=False, allow_nan=False, default=str)
    except ValueError:  # JSON has no NaN: what a damaged row holds is null
        text = json.dumps(_finite(envelope), ensure_ascii=False, allow_nan=False, default=str)
    return escaped(text)


def _finite(value: Any) -> Any:
    """A document without the numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _as_error(problem: BaseException, name: str) -> QuantkitError:
    """Any exception as one that says what to do."""
    if isinstance(problem, QuantkitError):
        return problem
    where = f"quantkit {_known(name)}".rstrip()
    if hasattr(problem, "format_message"):  # wrong use, as typer finds it; which class it is depends on its version
        message = str(problem.format_message()).rstrip(".")
        return InputError("usage", where=where, value=message, remedy=f"see `{where} --help`")
    interrupted = isinstance(problem, SystemExit) and problem.code == _INTERRUPTED
    if interrupted or isinstance(problem, KeyboardInterrupt | typer.Abort):
        return Stopped("interrupted", where, "nothing is left half-written")
    if isinstance(problem, ImportError):
        package, group = (problem.name or "").split(".")[0], name.partition(" ")[0]
        # several extras bring some packages: a group's own comes first
        extras = sorted((extra for extra, brought in _OPTIONAL.items() if package in brought), key=group.__ne__)
        if extras:
            return MissingDependency(package, extra=extras[0], purpose=f"`{where}`")
    if isinstance(problem, RuntimeError) and "home directory" in str(problem):
        return InputError(
            "no-home", where=where, value=str(problem), remedy="set HOME, and QUANTKIT_CACHE if it is not it"
        )
    if is_out_of_memory(problem):
        return out_of_memory(where, problem)
    if isinstance(problem, OSError) and problem.strerror:
        place = str(problem.filename or where)
        return InputError("os-error", where=place, value=problem.strerror, remedy="check the path and its permissions")
    if (origin := outside.culprit(problem)) is not None:
        value, remedy = f"{type(problem).__name__}: {problem}", "QUANTKIT_TRACEBACK=1 shows where; tell its author"
        return InputError("plugin-failed", origin, value, "its code was at work", remedy)
    value, remedy = f"{type(problem).__name__}: {problem}", "QUANTKIT_TRACEBACK=1 shows where; please report it"
    return InputError("internal-error", where, value, "this is a mistake in quantkit", remedy)


def _known(name: str) -> str:
    """As much of a command's name as there is: all of it, its group, or nothing."""
    group, _, member = name.partition(" ")
    works = _GROUPS[group][1] if group in _GROUPS else _COMMANDS
    names = [work.__name__.rstrip("_") for work in works]
    if group in _GROUPS:
        return name if member in names else group
    return name if name in names else ""
