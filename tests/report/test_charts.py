"""The report's figures: valid in plotly's own schema, with axes that hold their values and text that stays text."""

import math
from itertools import pairwise

import pytest
from plotly import graph_objects

from quantkit.report.kit import charts
from quantkit.report.kit.charts import ORIGINAL, QUANTIZED, BarPart, ChartPoint, Curve, Figure, Mark

ACROSS = charts.points_axis("batch", [1, 2, 4])
UP = charts.log_axis("ms", [1.0, 4.0])


def curves(label: str = "int4") -> list[Curve]:
    return [
        Curve(label, QUANTIZED, [1, 2, 4], [1.0, 1.5, 4.0], ["a", label, "c"], [(0.9, 1.1), None, (3.5, 4.5)]),
        Curve("float32", ORIGINAL, [1, 2], [3.0, 3.0], bound=True),
    ]


def drawn(text: str = "x") -> dict[str, Figure]:
    mark = [Mark(2.0, text), Mark(3.0, text, dotted=True)]
    return {
        "lines": charts.lines(curves(text), ACROSS, UP, noise=(0.9, 1.1), even=1.0, wins=[(1, 2)], marks=mark),
        "forest": charts.forest(
            [ChartPoint(text, 1.0, (0.9, 1.2), text), ChartPoint("b", 1.1, None, "1.1")],
            charts.straight_axis(text, [0.9, 1.2]),
            marks=mark,
        ),
        "heat": charts.heat(["0", "1"], [text, "b"], [[0.1, None], [0.2, 0.3]]),
        "stacked": charts.stacked([text, "b"], [BarPart(text, [1e6, 0.0], "quantized")], [text, "0 B"], text),
    }


@pytest.mark.parametrize("name", ["lines", "forest", "heat", "stacked"])
def test_plotly_takes_the_figure(name: str) -> None:
    graph_objects.Figure(drawn()[name])  # refuses what its schema does not know


@pytest.mark.parametrize("name", ["lines", "forest", "heat", "stacked"])
def test_text_of_others_is_no_markup(name: str) -> None:
    found = repr(drawn("<a href='x'>y</a>")[name])
    assert "&lt;a" in found
    # what hover shows is escaped too; the only raw form is a row's name inside a plotly category, and there is none
    assert "<a" not in found


def test_labels_that_a_telephone_has_no_room_for_take_two_lines() -> None:
    long = ChartPoint("decode step, batch 8, context 1,024", 1.0, (0.9, 1.2), "1.000 times as long (0.82 to <b>)")
    (label,) = charts.forest([long], charts.straight_axis("x", [0.9, 1.2]))["layout"]["annotations"]
    first, second = label["text"].split("<br>")
    assert (first, second) == (long.label, "1.000 times as long (0.82 to &lt;b&gt;)")


def test_labels_never_overlap() -> None:
    found = charts.spread([0.2, 0.21, 0.22, 0.99, 0.995], 0.07)
    assert all(b - a >= 0.07 - 1e-12 for a, b in pairwise(found))
    assert max(found) <= 1.0 and found[0] == 0.2


def test_an_annotation_stands_at_the_logarithm() -> None:
    notes = charts.lines(curves(), ACROSS, UP, marks=[Mark(4.0, "end")])["layout"]["annotations"]
    assert next(note for note in notes if note["text"] == "end")["x"] == pytest.approx(math.log10(4))


def test_rings_for_bounds_and_lines_without_points() -> None:
    ring = Curve("", "series-1", [1, 2], [1.0, 2.0], bound=True, hollow=True, symbol="diamond", texts=["1", ""])
    roof = Curve("", "ink", [1, 2], [2.0, 2.0], symbol="", texts=["", "<b>"])
    figure = charts.lines([ring, roof], ACROSS, UP)
    graph_objects.Figure(figure)
    first, second = figure["data"]
    assert (first["mode"], first["text"]) == ("lines+text", ["", "&lt;b&gt;"]), "what has no points is below"
    assert second["mode"] == "lines+markers+text" and second["marker"]["symbol"] == "diamond-open"
    # a bound at a single place would be invisible as a line
    (alone,) = charts.lines([Curve("x", "muted", [1], [1.0], bound=True)], ACROSS, UP)["data"]
    assert alone["mode"] == "lines+markers"


def test_a_mark_stays_visible_beyond_the_bars() -> None:
    figure = charts.stacked(["a"], [BarPart("x", [1e9], "rest")], ["1 GB"], "memory", marks=[Mark(3e9, "the card")])
    graph_objects.Figure(figure)
    (line,) = figure["layout"]["shapes"]
    assert line["x0"] == 3e9 < figure["layout"]["xaxis"]["range"][1]
    assert line["layer"] == "above", "a bar that is too long does not hide it"
    assert any(note["text"] == "the card" for note in figure["layout"]["annotations"])


# --- axes ---


@pytest.mark.parametrize("low", [3e-7, 0.0113, 0.93, 1.0, 47.0, 612.0])
@pytest.mark.parametrize("factor", [1.0, 1.07, 2.5, 30.0, 5e3, 1e6])
def test_a_log_axis_holds_its_values_between_few_round_labels(low: float, factor: float) -> None:
    axis = charts.log_axis("s", [low, low * factor])
    assert axis.range[0] < low <= low * factor < axis.range[1]
    assert axis.range[1] / axis.range[0] >= 2  # noise is not blown up to fill a figure
    assert 3 <= len(axis.ticks) <= 9
    assert len(set(axis.texts)) == len(axis.ticks)
    assert all(axis.range[0] <= tick <= axis.range[1] for tick in axis.ticks)


@pytest.mark.parametrize("ends", [(0.0, 1.0), (0.088, 0.25), (-3.0, 912.0), (5.0, 5.0), (0.0, 0.0), (0.7, 1.0)])
def test_a_straight_axis_holds_its_values(ends: tuple[float, float]) -> None:
    axis = charts.straight_axis("nats", ends)
    assert axis.range[0] <= ends[0] <= ends[1] < axis.range[1]
    assert 1 <= len(axis.ticks) <= 7
    steps = [b - a for a, b in pairwise(axis.ticks)]
    assert all(math.isclose(step, steps[0], rel_tol=1e-6) for step in steps)


def test_a_share_is_along_the_axis_as_it_is_drawn() -> None:
    log = charts.Axis("", [], [], (1.0, 100.0))
    assert (log.share(1.0), log.share(10.0), log.share(100.0)) == (0.0, pytest.approx(0.5), 1.0)
    assert log.place(100.0) == pytest.approx(2.0)
    straight = charts.Axis("", [], [], (0.0, 4.0), log=False)
    assert (straight.share(1.0), straight.place(3.0)) == (0.25, 3.0)


@pytest.mark.parametrize("batches", [[4], [1, 2, 4], [1, 2, 4, 8, 16, 32, 60, 64, 75, 128, 256], range(1, 100)])
def test_labels_of_points_stand_apart(batches: list[int]) -> None:
    axis = charts.points_axis("batch", batches)
    places = [axis.share(tick) for tick in axis.ticks]
    assert all(right - left > 0.09 for left, right in pairwise(places))
    assert set(axis.ticks) <= set(batches) and axis.ticks[0] == min(batches)
    assert len(batches) > 3 or list(axis.ticks) == batches
