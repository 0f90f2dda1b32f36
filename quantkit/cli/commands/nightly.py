"""`quantkit nightly`: comparisons of every night, a command a function."""

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

Config = Annotated[Path, typer.Argument(metavar="nightly.yaml", help="What is compared, and where results are.")]
StorePath = Annotated[
    Path | None,
    typer.Option("--store", metavar="PATH", help="The folder of the store; default: the one nightly.yaml names."),
]
_CONFIG = Path("nightly.yaml")
_YAML = (".yaml", ".yml")
_SQL = "One statement that reads, in DuckDB's dialect, or a table: nights, results, times, items, decisions."


def run(
    config: Config = _CONFIG,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything and say which cells there are.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the last night, if it was stopped.")] = False,
    only: Annotated[
        str | None, typer.Option(metavar="GLOB", help="These cells alone: '*|awq-int4|*'.", show_default=False)
    ] = None,
    executor: Annotated[
        str, typer.Option(metavar="local|ray", help="Builds run here, or on the Ray cluster that this machine is of.")
    ] = "local",
    as_json: Json = False,
) -> Answer:
    """Measure all cells and decide on them. What is worse is the gate's: this exits 0."""
    from quantkit.nightly import executors
    from quantkit.nightly import gate as gates
    from quantkit.nightly import run as nights
    from quantkit.nightly.config import Nightly
    from quantkit.nightly.store import QueryRows
    from quantkit.report.kit import words

    chosen = executors.named(executor)
    if dry_run:
        expected = nights.dry_run(Nightly.load(config), only)
        names = ("model", "recipe", "target", "runtime", "batch", "baseline")
        rows = [tuple(cell[name] for name in names) for cell in expected["cells"]]
        lines = gates.rows(QueryRows(names, rows), f"of {words.plural(len(expected['builds']), 'build')}")
        return Answer(expected, [*lines, *gates.warned(expected["notes"])], warnings=expected["notes"])
    with showing() as progress:
        progress.begin(f"the cells of {config}")
        found = nights.run_night(config, chosen, resume=resume, only=only, progress=progress)
    opened = _store(config, None)
    gated = gates.gate(opened, found.night)
    said = [*found.warnings, *gates.warnings(gated)]
    lines = [*gates.night(gated, found.results), *gates.shown(gated), *gates.warned(said)]
    return Answer(found.as_dict(), lines, warnings=said)


def query(
    sql: Annotated[str, typer.Argument(metavar="SQL", help=_SQL, show_default=False)],
    config: Config = _CONFIG,
    store: StorePath = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write all that is found there, .csv or .json.")
    ] = None,
    as_json: Json = False,
) -> Answer:
    """Ask the store in SQL.

    quantkit nightly query "FROM decisions WHERE answer = 'worse'"
    """
    from rich.text import Text

    from quantkit.nightly import gate as gates
    from quantkit.report.kit import words

    if sql.endswith(_YAML):  # in the other order, as the other commands have it
        sql, config = str(config), Path(sql)
    opened = _store(config, store)
    found = Answer(None)
    try:
        if out is not None:
            count = opened.export(sql, out)
            found = Answer(
                {"out": str(out), "rows": count}, [Text(f"{words.plural(count, 'row')} in {out}", no_wrap=True)]
            )
        else:
            rows = opened.query(sql)
            found = Answer(rows.as_json(), gates.rows(rows))
    except InputError as error:
        # what was passed over may be why
        found.error = error
    found.shown = [*found.shown, *gates.warned(opened.warnings)]
    found.warnings = opened.warnings
    return found


def gate(
    config: Config = _CONFIG,
    store: StorePath = None,
    night: Annotated[str | None, typer.Option(metavar="ID", help="Which; default: the last.")] = None,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write all decisions as JUnit XML.")] = None,
    github_summary: Annotated[
        Path | None,
        typer.Option(metavar="FILE", envvar="GITHUB_STEP_SUMMARY", help="Append a summary in GitHub's Markdown."),
    ] = None,
    gitlab: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write what is not fine as GitLab's code-quality JSON.")
    ] = None,
    allow_inconclusive: Annotated[
        bool, typer.Option("--allow-inconclusive", help="What is not known passes: exit 0 in place of 3.")
    ] = False,
    as_json: Json = False,
) -> Answer:
    """Whether a night passes: 0 fine, 1 worse or failed, 3 not known."""
    from quantkit.nightly import gate as gates

    opened = _store(config, store)
    found = gates.gate(opened, night)
    if junit is not None:
        gates.write(junit, gates.junit(found))
    if gitlab is not None:
        gates.write(gitlab, gates.gitlab(found, config))
    if github_summary is not None:
        gates.append(github_summary, gates.github(found))
    said = [*opened.warnings, *gates.warnings(found)]
    answer = Answer(found.as_dict(), [*gates.shown(found), *gates.warned(said)], warnings=said)
    answer.error = gates.error(found, allow_inconclusive=allow_inconclusive)
    return answer


def page(
    config: Config = _CONFIG,
    store: StorePath = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where; default: the one nightly.yaml names.")
    ] = None,
    as_json: Json = False,
) -> Answer:
    """Write the site: a grid of all cells, and a page a cell.

    It opens from a file or any web server, whatever the night found: `gate` is what fails.
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
    """The store that is meant."""
    from quantkit.nightly.config import Nightly
    from quantkit.nightly.store import Store

    if store is None:
        named = Nightly.load(config, look=False)
        store = named.at(named.store)
    return Store.open(store, config=config)


HELP = "Compare what you compile, every night."
# in the order in which help names them
COMMANDS: tuple[Callable[..., Answer], ...] = (run, gate, page, query)
