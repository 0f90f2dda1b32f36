"""Bundle in a notebook: verdict and figures as a table, and the charts of its page as plotly figures."""

from __future__ import annotations

import re
from typing import Any

from quantkit.bundle import Bundle
from quantkit.errors import InputError, MissingDependency, did_you_mean
from quantkit.measurement.rows import Row
from quantkit.report.bundle import accuracy, curves, figures, harm, speed
from quantkit.report.kit import html as page
from quantkit.report.kit.charts import Plot, plain
from quantkit.report.kit.tree import Code, Conclusion, Part, Remark, Styled


def html(bundle: Bundle) -> str:
    """Return the HTML of a bundle for a notebook, with all foreign text escaped.

    Raises:
        InputError: `measurements-invalid`.
    """
    manifest, rows = bundle.manifest, _rows(bundle)
    dtype = manifest.model.source.dtype
    failed = ", a gate failed" if manifest.state != "complete" else ""
    title = f"{manifest.model.name}, {manifest.recipe.get('name', 'quantized')}{failed}"
    answer, because = figures.verdict(manifest, rows)
    table = figures.results_table(rows, layers=len(manifest.layers), dtype=dtype)
    parts: list[Part] = [Remark(Styled(title, "strong")), Conclusion(answer, "", because)]
    parts += [table] if table.rows else []
    parts += [Remark(line) for series in curves.series(manifest, rows) for line in curves.results(series)]
    return page.fragment([*parts, Code("", str(bundle.path))])


def plot(bundle: Bundle, title: str | None = None) -> Any:
    """Return one chart of a bundle's page as `plotly.graph_objects.Figure`.

    Args:
        title: title of the chart; None for the speed-up, or else the first chart.

    Raises:
        InputError: `unknown-figure`, `nothing-to-plot`, `measurements-invalid`.
        MissingDependency: plotly, extra `report`.
    """
    with MissingDependency.unless_found("plotly", extra="report", purpose="a figure"):
        from plotly import graph_objects
    panels = _panels(bundle)
    if not panels:
        raise InputError(
            "nothing-to-plot",
            where=str(bundle.path),
            value="it holds no measurement for a chart",
            remedy=f"quantkit measure {bundle.path}",
        )
    first = next((name for name, panel in panels.items() if panel.title.startswith("Speed-up")), next(iter(panels)))
    chosen = first if title is None else title
    if chosen not in panels:
        raise InputError("unknown-figure", where="plot", value=repr(title), remedy=did_you_mean(str(title), panels))
    figure = graph_objects.Figure(_coloured(panels[chosen].figure, _colours()))
    figure.update_layout(title={"text": plain(chosen)}, margin_t=60)
    return figure


def _rows(bundle: Bundle) -> list[Row]:
    return [Row.model_validate(row) for row in bundle.measurements]


def _panels(bundle: Bundle) -> dict[str, Plot]:
    manifest, rows = bundle.manifest, _rows(bundle)
    parts = [
        *speed.sections(manifest, rows),
        *accuracy.accuracy(manifest, rows),
        *harm.sizes(manifest, rows),
        *harm.weights(manifest),
    ]
    return {": ".join(filter(None, (part.title, panel.title))): panel for part in parts for panel in part.charts}


def _colours() -> dict[str, str]:
    declaration = r"--([a-z0-9-]+):\s*(?:light-dark\()?(#\w+|rgba?\([^)]*\)|[^;]+)"
    named = dict(re.findall(declaration, page.read("page.css")))
    return {name: named[text[6:-1]] if text.startswith("var(--") else text for name, text in named.items()}


def _coloured(value: Any, colours: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _coloured(item, colours) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_coloured(item, colours) for item in value]
    if isinstance(value, str) and value.startswith("var(--"):
        return colours[value[6:-1]]
    return value
