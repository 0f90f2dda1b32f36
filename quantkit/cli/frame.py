"""The frame of all commands: parsing, running, and one way out for every result and every error."""

from __future__ import annotations

import functools
import gc
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

from quantkit import machine
from quantkit._version import __version__
from quantkit.cli.answer import Answer
from quantkit.cli.commands import device, nightly, runtime
from quantkit.cli.commands.batch import batch
from quantkit.cli.commands.compare import compare
from quantkit.cli.commands.compile import compile  # noqa: A004 (the word of the command line)
from quantkit.cli.commands.doctor import doctor
from quantkit.cli.commands.export import export
from quantkit.cli.commands.generate import generate
from quantkit.cli.commands.imatrix import imatrix
from quantkit.cli.commands.list import list_
from quantkit.cli.commands.measure import measure
from quantkit.cli.commands.plan import plan
from quantkit.cli.commands.recommend import recommend
from quantkit.cli.commands.show import show
from quantkit.cli.commands.sign import sign
from quantkit.cli.commands.tax import tax
from quantkit.cli.commands.tune import tune
from quantkit.cli.commands.verify import verify
from quantkit.errors import InputError, MissingDependency, QuantkitError, Rebuilt, Stopped, Told, escaped, printable
from quantkit.model.device import is_out_of_memory, out_of_memory
from quantkit.plugins import outside

SCHEMA = "quantkit/1"
# packages of each extra; a command that lacks one names the extra instead of failing to import
_OPTIONAL = {
    "compile": {
        *("torch", "transformers", "tokenizers", "scipy", "datasets", "compressed_tensors", "accelerate", "gguf"),
        *("psutil", "pyarrow", "pandas", "onnx", "onnx_ir", "onnxscript", "onnxruntime"),
    },
    "nightly": {"duckdb", "pyarrow"},
}
# read when torch is loaded. Spinning idle OpenMP threads make a busy machine ten times slower; sleeping ones cost an
# idle machine almost nothing. Large pages, where available, allocate a large tensor in a third of the time
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

# objects until a collection of each generation; Python's 700 walk the imported modules twenty times in a compile
_COLLECTING = (10_000, 20, 20)
_INTERRUPTED = 130  # exit code of typer for an interrupt while it parses

app = typer.Typer(
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Quantize and compile a model, and measure on the target whether it pays.",
    epilog="Exit codes: 0 fine; 1 a gate, check, comparison or --strict failed; 2 wrong use or input; 3 too noisy to "
    "decide; 75 stopped safely, continue with --resume. Start with: quantkit compile --recipe awq-int4; "
    "tab completion: quantkit --install-completion",
)
# in the order of the help
_COMMANDS = (
    *(compile, recommend, plan, measure, compare, tax, tune, export, verify, sign, list_, show, doctor, generate),
    *(imatrix, batch),
)
# a group has commands of its own: `quantkit nightly query`
_GROUPS = {
    "device": (device.HELP, device.COMMANDS),
    "nightly": (nightly.HELP, nightly.COMMANDS),
    "runtime": (runtime.HELP, runtime.COMMANDS),
}


def _parsed(work: Callable[..., Answer]) -> Callable[..., Callable[[], Answer]]:
    """Let typer parse a command, and `run` execute it, outside of typer's own handling of errors and signals."""

    @functools.wraps(work)
    def parsed(**options: Any) -> Callable[[], Answer]:
        return functools.partial(work, **options)

    return parsed


class _Command(TyperCommand):
    """A command that refuses an option given twice, unless it is repeatable."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments after a check for repeated options. Raises InputError `usage`."""
        _, _, options = self.make_parser(ctx).parse_args(list(args))
        for option in self.params:
            single = isinstance(option, TyperOption) and not (option.is_flag or option.multiple)
            if single and options.count(option) > 1:
                name, form = option.opts[0], option.metavar or ""
                where, rule = f"{ctx.command_path} {name}", "the option takes one value"
                remedy = f"all in one: {name} {form}" if "," in form else "remove one"
                raise InputError("usage", where, "given twice", rule, remedy)
        return super().parse_args(ctx, args)


def _help(context: typer.Context) -> None:
    """Print the help of a group that is called without a command."""
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
    """Run the command `quantkit`."""
    # first of all: importing torch and transformers takes seconds, and a signal must stop safely even then
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # background jobs of a shell ignore SIGINT
        signal.signal(signal.SIGINT, _interrupt)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    machine.keep_heap()
    gc.set_threshold(*_COLLECTING)
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
        # the reader has left; without this, Python complains again at shutdown
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    gc.freeze()  # else the interpreter searches a million objects for cycles before it ends, for a second
    sys.exit(code)


def _keep_streams() -> None:
    """Keep stdout for the answer: output of libraries that bypass Python (HiGHS, in C++) goes to stderr."""
    # a stream that our parent closed: its number must not become that of a file
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
    """Standard error that ignores a reader's departure (`2>&1 | head`), so that the work goes on."""

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
    """Build the parser of `app`: typer reads the signatures of all commands."""
    return typer.main.get_command(app)


def run(arguments: Sequence[str]) -> int:
    """Parse, execute and print; return the exit code."""
    name = _named(arguments)
    as_json = "--json" in arguments
    out = sys.stdout
    answer, rebuilt, parsed = Answer(None), list[str](), None
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
                rebuilt = [str(warning.message) for warning in caught]
    except BaseException as problem:  # a panic of a Rust library is not an `Exception`
        if parsed is None and isinstance(problem, SystemExit) and not problem.code:
            return 0  # typer has answered a shell's completion
        _empty_frames(problem)
        answer.error = _as_error(problem, name)
        if answer.error.code in ("internal-error", "plugin-failed") and os.environ.get("QUANTKIT_TRACEBACK"):
            traceback.print_exc()
    answer.warnings += rebuilt
    for line in () if isinstance(answer.error, Told) else rebuilt:
        print(printable(f"! {line}"), file=sys.stderr)
    code = answer.error.exit if answer.error else 0
    try:
        _print(answer, name, code, out, as_json=as_json)
    except BrokenPipeError:
        pass  # the reader has left
    except OSError as problem:
        value = problem.strerror or str(problem)
        full = Stopped("disk-full", "stdout", value, "the answer has to be printed", "make room")
        print(f"error: {full.line()}", file=sys.stderr)
        return full.exit
    return code


def _empty_frames(problem: BaseException | None) -> None:
    # what filled the memory is still held by the frames that failed, and to say so takes memory
    while problem is not None:
        traceback.clear_frames(problem.__traceback__)
        problem = problem.__cause__ or problem.__context__


def _named(arguments: Sequence[str]) -> str:
    """Return the command's name: the first word, and the second for a group; unknown words count too."""
    words = [argument for argument in arguments if not argument.startswith("-")]
    return " ".join(words[: 2 if words[:1] and words[0] in _GROUPS else 1])


def _print(answer: Answer, name: str, code: int, out: IO[str], *, as_json: bool) -> None:
    if isinstance(answer.error, Told):
        return
    if as_json:
        print(_envelope(answer, name, code), file=out, flush=True)
    elif answer.shown:
        from quantkit.report.kit.screen import write

        write(answer.shown, out)
        out.flush()
    if answer.error is not None:
        print(f"error: {answer.error.line()}", file=sys.stderr)


def _envelope(answer: Answer, name: str, code: int) -> str:
    """Return the object of `--json`, on one line."""
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
    except ValueError:  # JSON has no NaN: a damaged row gets null
        text = json.dumps(_finite(envelope), ensure_ascii=False, allow_nan=False, default=str)
    return escaped(text)


def _finite(value: Any) -> Any:
    """Replace NaN and infinity by None: JSON lacks them."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _as_error(problem: BaseException, name: str) -> QuantkitError:
    """Convert any exception to an error with a remedy."""
    if isinstance(problem, QuantkitError):
        return problem
    where = f"quantkit {_known(name)}".rstrip()
    if hasattr(problem, "format_message"):  # typer's error of usage; its class depends on the version
        message = str(problem.format_message()).rstrip(".")
        return InputError("usage", where=where, value=message, remedy=f"see `{where} --help`")
    interrupted = isinstance(problem, SystemExit) and problem.code == _INTERRUPTED
    if interrupted or isinstance(problem, KeyboardInterrupt | typer.Abort):
        return Stopped("interrupted", where, "no file is left half-written")
    if isinstance(problem, ImportError):
        package, group = (problem.name or "").split(".")[0], name.partition(" ")[0]
        # several extras have the package: the group's own comes first
        extras = sorted((extra for extra, brought in _OPTIONAL.items() if package in brought), key=group.__ne__)
        if extras:
            return MissingDependency(package, extra=extras[0], purpose=f"`{where}`")
    if isinstance(problem, RuntimeError) and "home directory" in str(problem):
        return InputError(
            "no-home", where=where, value=str(problem), remedy="set HOME, or QUANTKIT_CACHE for the cache"
        )
    if is_out_of_memory(problem):
        return out_of_memory(where, problem)
    if isinstance(problem, OSError) and problem.strerror:
        place = str(problem.filename or where)
        return InputError("os-error", where=place, value=problem.strerror, remedy="check the path and its permissions")
    if (culprit := outside.culprit(problem)) is not None:
        value, (origin, line) = f"{type(problem).__name__}: {problem}", culprit
        if line is not None:  # a file of the user's own
            remedy = "correct that line; QUANTKIT_TRACEBACK=1 shows the calls that led there"
            return InputError("plugin-failed", f"{origin}:{line}", value, "the file's code failed", remedy)
        remedy = "tell its author; QUANTKIT_TRACEBACK=1 shows where it failed"
        return InputError("plugin-failed", origin, value, "the plug-in's code failed", remedy)
    value, remedy = f"{type(problem).__name__}: {problem}", "QUANTKIT_TRACEBACK=1 shows where; please report it"
    return InputError("internal-error", where, value, "this is a bug in quantkit", remedy)


def _known(name: str) -> str:
    """Return the existing part of a command's name: all of it, its group, or ""."""
    group, _, member = name.partition(" ")
    works = _GROUPS[group][1] if group in _GROUPS else _COMMANDS
    names = [work.__name__.rstrip("_") for work in works]
    if group in _GROUPS:
        return name if member in names else group
    return name if name in names else ""
