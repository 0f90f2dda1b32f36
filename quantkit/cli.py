"""The command line: thin commands over the library, one way out for every result and every error.

A command returns an `Answer`; `run` prints it, as text or, under `--json`, as the one object on stdout. All that
libraries print meanwhile goes to stderr. Heavy imports stand in the commands: help, `list` and `show` need none.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

import quantkit
from quantkit.errors import GateError, Inconclusive, InputError, MissingDependency, QuantkitError, Stopped

if TYPE_CHECKING:
    from rich.console import RenderableType

    from quantkit.bundle import Bundle, Check, Manifest
    from quantkit.calibrate.sets import TokenSet
    from quantkit.pipeline import Prepared

SCHEMA = "quantkit/1"
# what the `compile` extra brings; a command that misses one says so instead of failing to import
_OPTIONAL = {
    *("torch", "transformers", "tokenizers", "scipy", "datasets", "compressed_tensors", "accelerate", "gguf"),
    *("psutil", "pyarrow", "pandas", "onnx", "onnx_ir", "onnxscript", "onnxruntime"),
}
# read when torch is loaded: idle OpenMP threads that spin make a busy machine ten times slower, and sleeping costs an
# idle one next to nothing
_ENVIRONMENT = {
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
    epilog="Exit codes: 0 fine; 1 a gate, check or --strict failed; 2 wrong use or input; 3 too noisy to decide; "
    "75 stopped safely, go on with --resume. Start with: quantkit compile --recipe awq-int4",
)


@dataclass
class Answer:
    """What a command has to say.

    Args:
        result: of the envelope; JSON.
        shown: the same for people.
        decisions: of the envelope.
        warnings: of the envelope.
        error: where the work was done and did not hold.
    """

    result: Any
    shown: Sequence[RenderableType] = ()
    decisions: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    error: QuantkitError | None = None


def command(work: Callable[..., Answer]) -> Callable[..., Callable[[], Answer]]:
    """A command that typer parses and `run` executes, outside of typer's own handling of errors and signals."""

    @functools.wraps(work)
    def parsed(**options: Any) -> Callable[[], Answer]:
        return functools.partial(work, **options)

    app.command(name=work.__name__.rstrip("_"))(parsed)
    return parsed


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, on failure too.")]
Runtime = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="What runs it; default: onnxruntime where the bundle has a graph, else torch."),
]
BundlePath = Annotated[Path, typer.Argument(metavar="BUNDLE", help="The folder of a bundle.", show_default=False)]


@command
def compile(  # noqa: A001 (the word of the command line)
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="An alias, a folder (./folder) or hf:org/name.")
    ] = "smollm2-135m",
    recipe: Annotated[str, typer.Option(metavar="NAME|PATH", help="A shipped recipe or a path.")] = "awq-int4",
    target: Annotated[
        str | None, typer.Option(metavar="NAME|PATH", help="A shipped target or a path; default: this processor.")
    ] = None,
    calibration: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|PATH", help="A shipped set or a path (.txt, .jsonl, .parquet, folder); default: the recipe's."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The bundle's folder; default: ./MODEL--RECIPE, then -2, ...")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=YAML", help="Change the recipe: scheme.weights.group=32."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a build that was stopped.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Any decision beyond the recipe is an error.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, say what would be done.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let code that comes with the model run.")
    ] = False,
    speed: Annotated[
        bool, typer.Option("--speed/--no-speed", help="Time the result against the float model, if the target is here.")
    ] = True,
    as_json: Json = False,
) -> Answer:
    """Quantize a model into a bundle, load it again, score it, time it."""
    from quantkit.pipeline import Request
    from quantkit.plan import machine
    from quantkit.report import progress as display
    from quantkit.report import terminal

    request = Request.of(
        model,
        recipe=recipe,
        target=target,
        calibration=calibration,
        out=out,
        changes=set_ or (),
        resume=resume,
        strict=strict,
        trust_remote_code=trust_remote_code,
        speed=speed,
    )
    with _progress() as progress:
        progress.begin(f"opening {model}", display.first_guess(model, request.recipe, machine.cores()))
        from quantkit.pipeline import compile_model, prepare

        if dry_run:
            prepared = prepare(request)
            plan = _plan(prepared)
            return Answer(plan, terminal.planned(plan), plan["decisions"], list(prepared.source.notes))
        compiled = compile_model(request, progress)
    manifest = compiled.bundle.manifest
    shown = terminal.summary(
        compiled.bundle.path,
        manifest,
        compiled.rows,
        compiled.warnings,
        seconds=compiled.seconds,
        memory_peak_bytes=compiled.memory_peak_bytes,
    )
    taken = [decision.model_dump(mode="json", by_alias=True) for decision in compiled.decisions]
    return Answer(compiled.as_dict(), shown, taken, compiled.warnings, _failed_gate(manifest))


@command
def measure(
    bundle: BundlePath,
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL|BUNDLE", help="A model or a bundle to compare with; default: what it was made from."
        ),
    ] = None,
    runtime: Runtime = None,
    batch: Annotated[
        str | None, typer.Option(metavar="N,N,…", help="Batches to time; default: the target's, up to 32.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=1, metavar="S", help="How long to time all shapes; default: 300.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Time the few shapes that a compile does.")] = False,
    speed: Annotated[bool, typer.Option("--speed/--no-speed", help="Time it against the float model.")] = True,
    as_json: Json = False,
) -> Answer:
    """Score, weigh and time a bundle again."""
    from quantkit import registry
    from quantkit.measure.latency import Plan
    from quantkit.pipeline.measure import batches_of, default_runtime, measure_bundle, with_changes
    from quantkit.pipeline.worth import QUICK
    from quantkit.report import figures, terminal

    opened = quantkit.load(bundle)
    chosen = runtime or default_runtime(opened)
    if not hasattr(registry.load("runtimes", chosen, where="--runtime"), "open"):
        rule = "it is a runtime that bundles are scored in"
        raise InputError("runtime-unsupported", where="--runtime", value=chosen, rule=rule, remedy="use torch")
    plan = with_changes(QUICK if quick else Plan(batches=batches_of(opened)), _batches(batch), seconds)
    with _progress() as progress:
        progress.begin(f"measuring {bundle}", 60.0)
        rows = measure_bundle(opened, baseline, progress, runtime=chosen, plan=plan, speed=speed)
    opened = quantkit.load(bundle)
    notes = figures.notes(opened.manifest)
    verdict = opened.manifest.verdict
    result = {
        "bundle": str(opened.path),
        "content_sha256": opened.manifest.content_sha256,
        "verdict": verdict.model_dump(mode="json") if verdict else None,
        "measurements": [row.as_dict() for row in rows],
    }
    error: QuantkitError | None = _failed_gate(opened.manifest)
    if (
        error is None
        and verdict is not None
        and verdict.answer == "inconclusive"
        and any(row.name.startswith("latency.") for row in rows)
    ):
        error = Inconclusive(
            "inconclusive",
            where=str(bundle),
            value="; ".join(verdict.because),
            rule="an interval lies above or below 1",
            remedy="measure again on a quieter machine, or for longer: --seconds 900",
        )
    return Answer(result, terminal.measured(opened.path, opened.manifest, rows, notes), warnings=notes, error=error)


def _batches(text: str | None) -> list[int] | None:
    """`1,2,4` as numbers."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise InputError("usage", where="--batch", value=text, rule="numbers from 1 up, with commas: 1,2,4")
    return [int(part) for part in parts]


@command
def tune(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="An alias, a folder (./folder) or hf:org/name.", show_default=False)
    ],
    budget: Annotated[
        list[str],
        typer.Option(metavar="KIND=N", help="bits=4.25, bytes=100MB, kl=0.05 or latency=12ms; several may hold."),
    ],
    recipe: Annotated[str, typer.Option(metavar="NAME|PATH", help="The recipe to start from.")] = "gptq-int4",
    formats: Annotated[
        str | None,
        typer.Option(metavar="F,F,…", help="Formats to choose from, and float; default: int3,int4,int8,float."),
    ] = None,
    scheme: Annotated[
        list[str] | None,
        typer.Option("--scheme", metavar="YAML", help="A candidate more: '{format: int4, group: 32}'."),
    ] = None,
    target: Annotated[
        str | None, typer.Option(metavar="NAME|PATH", help="A shipped target or a path; default: this processor.")
    ] = None,
    batch: Annotated[str | None, typer.Option(metavar="N,N,…", help="Batches of the timings that count.")] = None,
    timings: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Measurements with `latency.op` rows, for latency budgets.")
    ] = None,
    calibration: Annotated[
        str | None, typer.Option(metavar="NAME|PATH", help="A shipped set or a path; default: the recipe's.")
    ] = None,
    samples: Annotated[
        int, typer.Option(min=1, metavar="N", help="Sequences of 128 tokens that each harm is measured on.")
    ] = 2,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The folder to write; default: ./MODEL--tuned, then -2, ...")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=YAML", help="Change the recipe: calibration.samples=8."),
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Measure every candidate at the output; else one, and the others by it.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Compile and score the choice, and one scheme for all beside it.")
    ] = True,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let code that comes with the model run.")
    ] = False,
    as_json: Json = False,
) -> Answer:
    """Choose a format for every layer within a budget; write the recipe."""
    from quantkit.measure.rows import read_rows
    from quantkit.pipeline import Request
    from quantkit.report import front
    from quantkit.tune import Budget, Question

    allowed = Budget.parse(budget)
    request = Request.of(
        model,
        recipe=recipe,
        target=target,
        calibration=calibration,
        out=out,
        changes=set_ or (),
        trust_remote_code=trust_remote_code,
    )
    question = Question(
        request,
        allowed,
        formats=None if formats is None else [name.strip() for name in formats.split(",") if name.strip()],
        schemes=[_scheme(text) for text in scheme or ()],
        samples=samples,
        exact=exact,
        check=check,
        timings=read_rows(timings) if timings else (),
        batches=_batches(batch) or (),
    )
    with _progress() as progress:
        progress.begin(f"opening {model}", 300.0)
        from quantkit.tune import tune as search

        tuned = search(question, progress)
    taken = [decision.model_dump(mode="json", by_alias=True) for decision in tuned.decisions]
    error = None
    limit, found = allowed.kl, tuned.front["chosen"]["measured"]
    if limit is not None and found is not None and found > limit:
        error = GateError(
            "budget-missed",
            where="--budget",
            value=f"KL {found:.4g} measured",
            rule=f"at most {limit:g}",
            remedy="allow more, or add candidates (--formats, --scheme)",
        )
    return Answer(tuned.as_dict(), front.terminal(tuned.front, str(tuned.out)), taken, tuned.warnings, error)


def _scheme(text: str) -> dict[str, Any]:
    """A candidate's fields."""
    from quantkit.content import parse_yaml

    found = parse_yaml(text, where="--scheme")
    if not isinstance(found, dict):
        raise InputError(
            "usage", where="--scheme", value=text, rule="a YAML mapping", remedy="'{format: int4, group: 32}'"
        )
    return found


@command
def export(
    bundle: BundlePath,
    to: Annotated[str, typer.Option("--to", metavar="EXPORTER", help="What to add; see `quantkit list exporters`.")],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=YAML", help="An option of the exporter: accuracy_level=0."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, write nothing.")] = False,
    as_json: Json = False,
) -> Answer:
    """Add an export to a finished bundle: quantkit export BUNDLE --to onnx."""
    from quantkit.pipeline.export import export_bundle
    from quantkit.report import terminal

    with _progress() as progress:
        progress.begin(f"exporting {bundle}", 40.0)
        done = export_bundle(quantkit.load(bundle), to, set_ or (), dry_run=dry_run, progress=progress)
    shown = terminal.verified(done.bundle.path, done.bundle.manifest, done.checks, [done.says])
    return Answer(done.as_dict(), shown, [x.model_dump(mode="json", by_alias=True) for x in done.decisions])


@command
def verify(bundle: BundlePath, as_json: Json = False) -> Answer:
    """Check every file of a bundle, then load it again."""
    from quantkit.report import terminal

    opened = quantkit.load(bundle)
    with _progress() as progress:
        progress.begin(f"verifying {bundle}")
        found = opened.verify()
        reloaded, notes = _reload(opened) if all(check.ok for check in found) else ([], ["not loaded: files differ"])
    found = [*found, *reloaded]
    failed = next((check for check in found if not check.ok), None)
    error = None
    if failed is not None:
        error = GateError(
            "verify-failed",
            where=failed.where or str(bundle),
            value=f"{failed.name} is {failed.value}",
            rule=f"it is {failed.limit}" if failed.limit == 0 else f"at most {failed.limit}",
            remedy="fetch or compile the bundle again",
        )
    result = {
        "bundle": str(opened.path),
        "content_sha256": opened.manifest.content_sha256,
        "checks": [{**check.model_dump(mode="json"), "where": check.where} for check in found],
    }
    return Answer(result, terminal.verified(opened.path, opened.manifest, found, notes), warnings=notes, error=error)


@command
def list_(
    kind: Annotated[
        str | None,
        typer.Argument(
            metavar="KIND", help="recipes, passes, formats, exporters, targets, calibrations, models or runtimes."
        ),
    ] = None,
    as_json: Json = False,
) -> Answer:
    """What there is, by kind."""
    from quantkit.report import catalog, terminal

    found = catalog.listing(kind)
    return Answer(found, terminal.listing(found))


@command
def show(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A name from `quantkit list`, or a path (./...).", show_default=False)
    ],
    as_json: Json = False,
) -> Answer:
    """One thing in full: whatever `list` names, or a bundle."""
    from quantkit import content
    from quantkit.bundle.manifest import MANIFEST
    from quantkit.measure.rows import Row
    from quantkit.pipeline.worth import of_original
    from quantkit.report import catalog, figures, terminal

    if content.is_path(name) and (Path(name).expanduser() / MANIFEST).is_file():
        opened = quantkit.load(name)
        notes = figures.notes(opened.manifest)
        measured = [Row.model_validate(row) for row in opened.measurements]
        rows = of_original(measured, opened.manifest.model.source.sha256)
        result = {"kind": "bundle", "manifest": opened.manifest.as_dict(), "measurements": opened.measurements}
        return Answer(result, terminal.summary(opened.path, opened.manifest, rows, notes), warnings=notes)
    entries = [catalog.find_file(Path(name).expanduser())] if content.is_path(name) else catalog.find(name)
    shown = [part for entry in entries for part in terminal.entry(entry)]
    return Answer([{"kind": entry.kind, "name": entry.name, **entry.data} for entry in entries], shown)


@command
def doctor(
    target: Annotated[
        str | None, typer.Option(metavar="NAME|PATH", help="The target whose figures are wanted; default: this one.")
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="Keep the measured figures for this user.")] = False,
    as_json: Json = False,
) -> Answer:
    """What this machine is, and can do at best."""
    from quantkit.measure.doctor import doctor as examine
    from quantkit.pipeline.request import this_machine
    from quantkit.report import terminal
    from quantkit.target import Target

    aimed = Target.load(target or this_machine())
    with _progress() as progress:
        progress.begin("measuring this machine", 10.0 if aimed.kind == "cpu" else None)
        report = examine(aimed, write=write)
    return Answer(report, terminal.machine(report), warnings=report["warnings"])


@command
def generate(
    bundle: BundlePath,
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="The text to go on from.", show_default=False)],
    runtime: Runtime = None,
    new_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens to add at most.")] = 64,
    sample: Annotated[bool, typer.Option("--sample", help="Draw, instead of the most likely token.")] = False,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Of the drawing.")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")] = False,
    as_json: Json = False,
) -> Answer:
    """Let a bundle's model go on from a prompt."""
    from rich.text import Text

    from quantkit import registry
    from quantkit.pipeline.measure import default_runtime

    opened = quantkit.load(bundle)
    runner = registry.load("runtimes", runtime or default_runtime(opened), where="--runtime")
    with _progress() as progress:
        progress.begin(f"loading {bundle}", 15.0)
        made = runner.generate(opened, prompt, new_tokens=new_tokens, sample=sample, seed=seed, chat=chat)
    text = made["text"] if chat else f"{prompt}{made['text']}"
    return Answer({"prompt": prompt, **made}, [Text(text)])


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"quantkit {quantkit.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


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
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # a terminal without ✓ or × gets a question mark, not an error
            stream.reconfigure(errors="replace")
    code = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # whoever read has enough; without this, Python complains once more while it shuts down
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def run(arguments: Sequence[str]) -> int:
    """Parse, execute, print; the exit code."""
    name = next((argument for argument in arguments if not argument.startswith("-")), "")
    as_json = "--json" in arguments
    out = sys.stdout
    answer = Answer(None)
    try:
        parsed = typer.main.get_command(app).main(list(arguments), prog_name="quantkit", standalone_mode=False)
        if parsed == _INTERRUPTED:
            raise KeyboardInterrupt
        if not callable(parsed):
            return int(parsed or 0)
        with redirect_stdout(sys.stderr):
            answer = parsed()
    except (Exception, KeyboardInterrupt, SystemExit) as problem:
        answer.error = _as_error(problem, name)
        if answer.error.code == "internal-error" and os.environ.get("QUANTKIT_TRACEBACK"):
            traceback.print_exc()
    code = answer.error.exit if answer.error else 0
    with suppress(BrokenPipeError):
        _print(answer, name, code, out, as_json=as_json)
    return code


def _print(answer: Answer, name: str, code: int, out: IO[str], *, as_json: bool) -> None:
    if as_json:
        print(_envelope(answer, name, code), file=out, flush=True)
    elif answer.shown:
        from quantkit.report import terminal

        terminal.write(answer.shown, out)
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
    return json.dumps(envelope, ensure_ascii=False, allow_nan=False, default=str)


def _as_error(problem: BaseException, name: str) -> QuantkitError:
    """Any exception as one that says what to do."""
    if isinstance(problem, QuantkitError):
        return problem
    known = {str(command.name) for command in app.registered_commands}
    where = f"quantkit {name}" if name in known else "quantkit"
    if hasattr(problem, "format_message"):  # wrong use, as typer finds it; which class it is depends on its version
        message = str(problem.format_message()).rstrip(".")
        return InputError("usage", where=where, value=message, remedy=f"see `{where} --help`")
    interrupted = isinstance(problem, SystemExit) and problem.code == _INTERRUPTED
    if interrupted or isinstance(problem, KeyboardInterrupt | typer.Abort):
        return Stopped("interrupted", where=where, value="nothing is left half-written")
    if isinstance(problem, ImportError) and (package := (problem.name or "").split(".")[0]) in _OPTIONAL:
        return MissingDependency(package, extra="compile", purpose=f"`{where}`")
    if isinstance(problem, OSError) and problem.strerror:
        place = str(problem.filename or where)
        return InputError("os-error", where=place, value=problem.strerror, remedy="check the path and its permissions")
    return InputError(
        "internal-error",
        where=where,
        value=f"{type(problem).__name__}: {problem}",
        rule="this is a mistake in quantkit",
        remedy="QUANTKIT_TRACEBACK=1 shows where; please report it",
    )


@contextmanager
def _progress() -> Iterator[Any]:
    """A progress that shows itself on stderr."""
    from quantkit.pipeline.progress import Progress
    from quantkit.report.progress import Display

    class Shown(Display, Progress):
        """The display, as the pipeline knows it."""

    with Shown(sys.stderr, live=sys.stderr.isatty()) as shown:
        yield shown


def _plan(prepared: Prepared) -> dict[str, Any]:
    """What a compile would do: the result of `--dry-run`."""
    from quantkit import registry
    from quantkit.pipeline.estimate import estimate
    from quantkit.report import figures

    source, layers, recipe = prepared.source, prepared.layers, prepared.request.recipe
    counts: dict[str, list[float]] = {}
    for name, scheme in layers.schemes.items():
        rows, columns = layers.shapes[name]
        padded = (rows, columns + scheme.padding(columns))
        bits = registry.load("formats", scheme.format).bits_per_weight(padded, scheme) * padded[1] / columns
        found = counts.setdefault(figures.scheme_of(scheme.model_dump(mode="json")), [0, 0, 0.0])
        found[0] += 1
        found[1] += rows * columns
        found[2] += rows * columns * bits
    asked, expected = recipe.as_dict(), estimate(prepared)
    return {
        "model": {
            "name": source.name,
            "ref": source.ref,
            "kind": source.kind,
            "dtype": source.dtype,
            "was": source.was,
            "bytes": source.weights.total_bytes(),
        },
        "recipe": recipe.name,
        "target": prepared.request.target.name,
        "schemes": [
            {"scheme": scheme, "layers": int(count), "bits_per_weight": bits / weights}
            for scheme, (count, weights, bits) in counts.items()
        ],
        "kept": [name for name in layers.shapes if name not in layers.schemes] if layers.schemes else [],
        "passes": asked["passes"],
        "export": asked["export"],
        "calibration": _tokens(prepared.calibration) if prepared.calibration else None,
        "scoring": _tokens(prepared.scoring),
        "seconds": expected.seconds,
        "memory_bytes": round(expected.memory),
        "disk_bytes": {"bundle": round(expected.bundle), "work": round(expected.work), "cache": round(expected.cache)},
        "out": str(prepared.out),
        "decisions": [decision.model_dump(mode="json", by_alias=True) for decision in prepared.decisions],
        "notes": list(source.notes),
    }


def _tokens(tokens: TokenSet) -> dict[str, Any]:
    samples, length = tokens.ids.shape
    return {"set": tokens.name, "split": tokens.split, "samples": samples, "tokens": length}


def _reload(bundle: Bundle) -> tuple[list[Check], list[str]]:
    """Each export's own checks; what could not be run is a note."""
    from quantkit import registry

    found: list[Check] = []
    try:
        import torch  # noqa: F401

    except ImportError as problem:
        note = f"not loaded: {problem.name} is not installed (pip install 'quantkit[compile]'); files and hashes hold"
        return found, [note]
    notes = []
    for name in (next(iter(step)) for step in bundle.manifest.recipe.get("export", [])):
        try:
            found += registry.load("export", name).check(bundle.path)
        except (ImportError, MissingDependency) as problem:
            missing = problem.where if isinstance(problem, MissingDependency) else problem.name
            why = f"{missing} is not installed" if missing else str(problem)
            notes.append(f"{name} not loaded: {why} (pip install 'quantkit[compile]')")
    return found, notes


def _failed_gate(manifest: Manifest) -> GateError | None:
    """The error of a bundle whose gate failed."""
    from quantkit.report import figures

    failed = [check for check in figures.gates(manifest.checks) if not check.ok]
    if manifest.state == "complete" or not failed:
        return None
    first = failed[0]
    more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
    return GateError(
        "gate-failed",
        where=f"{first.name}{more}",
        value=f"{first.value:.6g}",
        rule=f"{'at least' if first.name.endswith('_min') else 'at most'} {first.limit:g}",
        remedy="the bundle is kept; use another recipe, or change the gate if that is good enough",
    )
