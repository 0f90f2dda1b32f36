"""`quantkit nightly`: comparisons that run every night, one function a command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantkit.cli.answer import Answer, showing
from quantkit.cli.options import Json
from quantkit.errors import InputError

if TYPE_CHECKING:
    from quantkit.nightly.store import Store

Config = Annotated[Path, typer.Argument(metavar="nightly.yaml", help="Configuration: models, recipes, targets, store.")]
StorePath = Annotated[
    Path | None,
    typer.Option("--store", metavar="PATH", help="Folder of the store; default: that of nightly.yaml."),
]
_CONFIG = Path("nightly.yaml")
_YAML = (".yaml", ".yml")
_SQL = "One reading statement in DuckDB's SQL, or a table: nights, results, times, items, decisions."


def run(
    config: Config = _CONFIG,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, list the cells, run nothing.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the last night if it was interrupted.")] = False,
    only: Annotated[
        str | None, typer.Option(metavar="GLOB", help="Only these cells: '*|awq-int4|*'.", show_default=False)
    ] = None,
    executor: Annotated[
        str, typer.Option(metavar="local|ray|ray://HOST:PORT", help="Build here, or on a Ray cluster.")
    ] = "local",
    as_json: Json = False,
) -> Answer:
    """Measure and decide all cells; exits 0 even if some are worse (see gate)."""
    from quantkit.nightly import gate as gates
    from quantkit.nightly import run as nights
    from quantkit.nightly.build import prepare
    from quantkit.nightly.config import Nightly
    from quantkit.nightly.store import QueryRows
    from quantkit.pipeline.many import executors
    from quantkit.report.kit import words

    chosen = executors.named(executor, where="--executor", prepare=prepare)
    if dry_run:
        expected = nights.dry_run(Nightly.load(config), only)
        names = ("model", "recipe", "target", "runtime", "batch", "baseline")
        rows = [tuple(cell[name] for name in names) for cell in expected["cells"]]
        lines = gates.rows(QueryRows(names, rows), f"of {words.plural(len(expected['builds']), 'build')}")
        return Answer(expected, [*lines, *gates.warned(expected["notes"])], warnings=expected["notes"])
    with showing() as progress:
        progress.begin(f"the cells of {config}")
        night = nights.run_night(config, chosen, resume=resume, only=only, progress=progress)
    opened = _store(config, None)
    gated = gates.gate(opened, night.night)
    notes = [*night.warnings, *gates.warnings(gated)]
    lines = [*gates.night(gated, night.results), *gates.shown(gated), *gates.warned(notes)]
    return Answer(night.as_dict(), lines, warnings=notes)


def query(
    sql: Annotated[str, typer.Argument(metavar="SQL", help=_SQL, show_default=False)],
    config: Config = _CONFIG,
    store: StorePath = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the result to a .csv or .json file.")] = None,
    as_json: Json = False,
) -> Answer:
    """Ask the store in SQL.

    quantkit nightly query "FROM decisions WHERE answer = 'worse'"
    """
    from rich.text import Text

    from quantkit.nightly import gate as gates
    from quantkit.report.kit import words

    if sql.endswith(_YAML):  # arguments in the other order, as in the other commands
        sql, config = str(config), Path(sql)
    opened = _store(config, store)
    answer = Answer(None)
    try:
        if out is not None:
            count = opened.export(sql, out)
            answer = Answer(
                {"out": str(out), "rows": count}, [Text(f"{words.plural(count, 'row')} in {out}", no_wrap=True)]
            )
        else:
            rows = opened.query(sql)
            answer = Answer(rows.as_json(), gates.rows(rows))
    except InputError as error:
        # skipped files may be the cause
        answer.error = error
    answer.shown = [*answer.shown, *gates.warned(opened.warnings)]
    answer.warnings = opened.warnings
    return answer


def gate(
    config: Config = _CONFIG,
    store: StorePath = None,
    night: Annotated[str | None, typer.Option(metavar="ID", help="Night to check; default: the last.")] = None,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write all decisions as JUnit XML.")] = None,
    github_summary: Annotated[
        Path | None,
        typer.Option(metavar="FILE", envvar="GITHUB_STEP_SUMMARY", help="Append a summary in GitHub Markdown."),
    ] = None,
    gitlab: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the failures as GitLab code-quality JSON.")
    ] = None,
    allow_inconclusive: Annotated[
        bool, typer.Option("--allow-inconclusive", help="Let undecided cells pass: exit 0 instead of 3.")
    ] = False,
    as_json: Json = False,
) -> Answer:
    """Check a night: exit 0 fine, 1 worse or failed, 3 undecided."""
    from quantkit.nightly import gate as gates

    opened = _store(config, store)
    gated = gates.gate(opened, night)
    if junit is not None:
        gates.write(junit, gates.junit(gated))
    if gitlab is not None:
        gates.write(gitlab, gates.gitlab(gated, config))
    if github_summary is not None:
        gates.append(github_summary, gates.github(gated))
    notes = [*opened.warnings, *gates.warnings(gated)]
    answer = Answer(gated.as_dict(), [*gates.shown(gated), *gates.warned(notes)], warnings=notes)
    answer.error = gates.error(gated, allow_inconclusive=allow_inconclusive)
    return answer


def page(
    config: Config = _CONFIG,
    store: StorePath = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder to write; default: that of nightly.yaml.")
    ] = None,
    as_json: Json = False,
) -> Answer:
    """Write the site: a grid of all cells, and one page a cell.

    It opens from a file or any web server. It never fails because of a night's results; `gate` does.
    """
    from quantkit.nightly import gate as gates
    from quantkit.nightly import page as site
    from quantkit.nightly.config import Nightly

    if out is None:
        named = Nightly.load(config, look=False)
        out = named.at(named.page)
    written = site.write(_store(config, store), out)
    return Answer(written.as_dict(), [*written.terminal(), *gates.warned(written.warnings)], warnings=written.warnings)


def _store(config: Path, store: Path | None) -> Store:
    from quantkit.nightly.config import Nightly
    from quantkit.nightly.store import Store

    if store is None:
        named = Nightly.load(config, look=False)
        store = named.at(named.store)
    return Store.open(store, config=config)


HELP = "Compare your bundles every night."
# in the order of the help
COMMANDS: tuple[Callable[..., Answer], ...] = (run, gate, page, query)
