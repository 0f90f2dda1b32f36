"""A plan on a screen, as JSON and as a page: every figure is the outlook's, a bound is no forecast, text stays text."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import forked
import planned
import pytest
from plotly import graph_objects

from quantkit import machine
from quantkit.errors import InputError, MissingDependency
from quantkit.planning.outlook import Outlook, PlannedMemory, Recommendation
from quantkit.report.kit import html, words
from quantkit.report.plan import figures as drawn
from quantkit.report.plan import words as say
from quantkit.report.plan.as_json import as_dict
from quantkit.report.plan.document import document
from report.shown import HOSTILE, figures, fits, printed


@pytest.fixture(scope="module")
def three() -> Outlook:
    outlook = planned.outlook("bf16", "fp8", "int4")
    return replace(outlook, candidates=[*outlook.candidates, planned.refused()])


@pytest.fixture(scope="module")
def one() -> Outlook:
    return planned.outlook("int4")


@pytest.fixture(scope="module")
def page(three: Outlook) -> str:
    return html.page(document(replace(three, notes=[*three.notes, "a <note> on `doctor`"])))


def text(outlook: Outlook, monkeypatch: pytest.MonkeyPatch) -> str:
    shown = printed([document(outlook)], monkeypatch)
    fits(shown, besides="quantkit compile")
    return shown.replace("\u00a0", " ")


def forecast(timed: Any) -> str:
    return say.forecast(timed).replace("\u00a0", " ")


def line(shown: str, start: str, after: str = "") -> str:
    """The first line that starts so, of those after another."""
    lines = [line.strip() for line in shown.splitlines()]
    begin = next((i for i, line in enumerate(lines) if after and line.startswith(after)), 0)
    return next(line for line in lines[begin:] if line.startswith(start))


def traces(panel: Any) -> list[dict[str, Any]]:
    assert panel is not None
    return [trace for trace in panel.figure["data"] if trace.get("hoverinfo") == "text"]


def test_the_screen_fits_and_answers(three: Outlook, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = text(three, monkeypatch)
    fits(shown)
    whole = " ".join(shown.split())
    for said in (
        "llama-3-8b: decoder, 8.03 B parameters in bfloat16, 32 layers, contexts up to 8,192",
        "holds 84.9 GB, reads 3.35 TB/s, bf16 989 Tflop/s, fp8_e4m3 1.98 Pflop/s",
        "prompts of 1,024 and outputs of 256 tokens, context 1,280, batches 1 to 64",
        *("Assumed: prompts of 1,024 tokens", "forecast: take int4", "1.9×"),
        *("all times 14 steps of 3 models measured on a GPU", "nvfp4 weights: absent in vllm (TensorRT docs)"),
        "quantkit compile hf:meta-llama/Meta-Llama-3-8B --recipe int4-best --target h100 --out ./Meta-",
        "quantkit measure ./Meta-Llama-3-8B--int4-best --batch 1,4,16,64",
    ):
        assert said in whole


def test_a_line_has_the_figures_of_its_candidate(three: Outlook, monkeypatch: pytest.MonkeyPatch) -> None:
    shown, fp8 = text(three, monkeypatch), three.candidates[1]
    assert fp8.memory is not None
    total = f"✓ {words.size(fp8.memory.total)} 84.9 GB {fp8.memory.largest_batch}"
    assert line(shown, "fp8", "Does it fit").split() == f"fp8 vllm native 8.00 7.50 GB 64 {total}".split()
    timed = line(shown, "fp8", "How long")
    assert all(forecast(step) in timed for step in (fp8.rows[0].prefill, fp8.rows[0].step, fp8.rows[-1].step))
    assert line(shown, "fp8", "Output").split()[-1] == "64"


@pytest.mark.parametrize("efficiency", [0.6, 0.3])
def test_forecasts_follow_the_outlook(efficiency: float, monkeypatch: pytest.MonkeyPatch) -> None:
    outlook = planned.outlook("bf16", "int4", efficiency=efficiency)
    step = outlook.candidates[0].rows[0].step
    assert step.least is not None
    expected = f"{float(f'{1e3 * step.least / efficiency:.1e}'):.2g} ms"
    shown = line(text(outlook, monkeypatch), "bf16", "How long")
    assert expected in shown and "≥" not in shown


def test_a_bound_is_marked_and_no_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = text(planned.outlook("bf16", "int4", efficiency=None), monkeypatch)
    timed = line(shown, "bf16", "How long").split("  ")
    assert all(cell.strip().startswith("≥") for cell in timed[1:] if cell.strip())
    assert "≤" in line(shown, "bf16", "Output")
    assert "mark bounds" in shown and "is a forecast" not in shown
    assert "nothing was measured of this near here" in shown


def test_a_rate_never_mixes_a_bound_with_a_forecast(one: Outlook) -> None:
    row = one.candidates[0].rows[0]
    assert row.prefill is not None
    assert row.prefill.least is not None and row.step.least is not None
    mixed = replace(row, prefill=replace(row.prefill, forecast=None, interval=None)).rate(256)
    assert mixed.forecast is None and mixed.interval is None
    assert mixed.most == pytest.approx(256 / (row.prefill.least + 256 * row.step.least))
    whole = row.rate(256)
    assert whole.forecast is not None and whole.interval is not None and whole.most is not None
    assert whole.interval[0] < whole.forecast < whole.interval[1] <= whole.most
    assert replace(row, prefill=None).rate(256).most == pytest.approx(1 / row.step.least)


def test_of_a_single_candidate_every_batch_and_what_memory_goes_into(
    one: Outlook, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = text(one, monkeypatch)
    fits(shown)
    for row in one.candidates[0].rows:
        cells = line(shown, f"{row.batch} ", "How long")
        told = (say.bound(row.prefill), say.bound(row.step), say.forecast(row.step).split()[0], "memory")
        assert all(said.replace("\u00a0", " ") in cells for said in told) and cells.endswith("✓")
    for part, size in (("weights", "4.05 GB"), ("runtime", "500 MB"), ("cache for a token", "131 kB")):
        assert size in line(shown, part)
    assert "forecast: int4 fits and runs" in shown


def test_what_does_not_fit_has_no_time_and_stands_against_the_card_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    outlook = planned.outlook("bf16", "int4", model="llama-3-70b")
    shown = text(outlook, monkeypatch)
    assert "✗" in line(shown, "bf16", "Does it fit") and "does not fit" in line(shown, "bf16", "How long")
    assert "bf16: a sequence needs 2 devices" in shown
    assert line(shown, "bf16", "Output").split() == ["bf16", "–"]
    assert "At the fitting batch with the most output" in shown
    assert all(trace.get("name") != "bf16" for panel in drawn.times(outlook) for trace in panel.figure["data"])
    assert any(trace.get("name") == "bf16" for trace in traces(drawn.memory_lines(outlook)))
    page = html.page(document(outlook))
    assert "does not fit" in page and "Batches that do not fit are in the table only." in page
    assert "No batch fits." in html.page(document(planned.outlook("bf16", model="llama-3-70b")))


def test_without_times_there_is_no_table_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    notes = ["cpu-x86 has no figure for compute.fp32"]
    outlook = planned.outlook("bf16", "int4", target=planned.unmeasured(), notes=notes)
    shown = text(outlook, monkeypatch)
    assert "! cpu-x86 has no figure for compute.fp32" in shown
    assert "all times the target has no figure for memory.read_bandwidth" in " ".join(shown.split())
    assert "How long" not in shown and "≥" not in shown
    page = html.page(document(outlook))
    assert notes[0] in page and "<h2>How long it takes</h2>" not in page


def test_several_devices_and_none_that_is_enough(one: Outlook, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = PlannedMemory({"weights": 71e9}, 8, 80e9, 1e5, 12, 4096, 2, 2, ["shared evenly <b>"])
    shown = text(planned.with_first(one, memory=memory), monkeypatch)
    assert "✓ 2 × 71.0 GB" in shown and "shared evenly <b>" in shown
    shown = text(replace(one, recommendation=Recommendation(None, ["int4 takes 90 GB of 80"])), monkeypatch)
    assert "it does not fit or run" in shown and "quantkit compile" not in shown


def test_rates_are_of_one_device_where_several_share_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    outlook = planned.outlook("bf16", "int4")
    memory = outlook.candidates[0].memory
    assert memory is not None
    alone = say.best(outlook.candidates[0], outlook.workload)
    outlook = planned.with_first(outlook, memory=replace(memory, devices=4))
    shared = say.best(outlook.candidates[0], outlook.workload)
    assert alone is not None and shared is not None
    assert alone[1].forecast is not None and alone[1].interval is not None
    assert shared[1].forecast == alone[1].forecast / 4
    assert shared[1].interval == (alone[1].interval[0] / 4, alone[1].interval[1] / 4)
    shown = text(outlook, monkeypatch)
    assert "tokens/s a device" in shown and say.expected(shared[1]) in line(shown, "bf16", "Output")


def test_an_encoder_has_passes_and_no_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    work = planned.work(1, 8, prompt=128, output=0)
    shown = text(planned.outlook("int4", "bf16", model="bert-base", workload=work), monkeypatch)
    assert "sequences/s" in shown and "pass," in shown and "first token" not in shown
    encoder = planned.outlook("int4", model="bert-base", workload=planned.work(8, prompt=128, output=0))
    shown = html.page(document(encoder))
    assert "sequences/s" in shown and "diamonds" not in shown and "cache for a token" not in shown
    assert not drawn.times(encoder), "a chart of one point is no chart"
    part = shown.split('id="time"')[1].split("</section>")[0]
    assert "<td" in part and "<details" not in part, "its table stands in the open"
    for figure in figures(shown):
        graph_objects.Figure(figure)
    parts = encoder.architecture, encoder.target, encoder.workload
    shown = html.page(document(Outlook(*parts, [planned.refused()], Recommendation(None, ["no"]))))
    assert not figures(shown) and "SM 10.0 on" in shown


def test_nobodys_text_is_markup_and_long_names_wrap(monkeypatch: pytest.MonkeyPatch) -> None:
    label = "./recipes/[bold]a-very-long-name-of-a-recipe[/bold]-that-goes-on-and-on.yaml"
    outlook = planned.with_first(planned.outlook("bf16", "int4"), label=label, notes=["[red]a note[/red]"])
    shown = text(replace(outlook, notes=["[link]"]), monkeypatch)
    assert "[red]a note[/red]" in " ".join(shown.split())
    assert "[link]" in shown and "[bold]" in shown
    recipe = planned.outlook("int4", model="smollm2-135m")
    assert "quantkit compile smollm2-135m --recipe int4-best" in text(recipe, monkeypatch)
    assert "--recipe './a b; rm -rf'" in text(planned.with_first(recipe, recipe="./a b; rm -rf"), monkeypatch)


# --- JSON ------------------------------------------------------------------------------------------------------------


def test_json_has_units_in_its_names_and_no_nan(three: Outlook) -> None:
    made = as_dict(three)
    assert json.loads(json.dumps(made, allow_nan=False)) == made
    assert made["model"]["parameters"] == 8_030_261_248
    fp8, nvfp4 = made["candidates"][1], made["candidates"][3]
    row, own = fp8["rows"][0], three.candidates[1].rows[0]
    assert row["step"]["bound_s"] == own.step.least
    assert row["step"]["forecast_interval_s"] == list(own.step.interval or ())
    assert row["step"]["bytes"] == own.step.bound.bytes
    assert sum(op["bytes"] * op["times"] for op in row["prefill"]["ops"]) == pytest.approx(row["prefill"]["bytes"])
    assert fp8["memory"]["total_bytes"] == sum(fp8["memory"]["parts_bytes"].values())
    assert fp8["memory"]["fits"] is True
    assert nvfp4["problem"]["code"] == "target-cannot-run"
    assert nvfp4["memory"] is None and nvfp4["weights_bytes"] is None
    assert made["recommendation"] == {**made["recommendation"], "label": "int4", "forecast": True}


def test_json_has_null_for_what_is_not_known(one: Outlook) -> None:
    (broken,) = as_dict(planned.with_first(one, bits=math.nan, cost={"usd": math.inf}))["candidates"]
    assert broken["bits_per_weight"] is None and broken["cost"] == {"usd": None}
    (bounds,) = as_dict(planned.outlook("int4", efficiency=None))["candidates"]
    assert bounds["rows"][0]["step"]["forecast_s"] is bounds["rows"][0]["forecast_per_s"] is None
    assert bounds["forecast"] is False


def test_nothing_heavy_is_imported() -> None:
    """A plan answers in a second: neither torch nor what draws pages."""
    heavy = ("torch", "scipy", "plotly", "transformers", "jinja2")
    code = f"import sys, quantkit.report.plan.document; print([name for name in {heavy} if name in sys.modules])"
    done: Any = forked.run("-c", code, light=True, check=True)
    assert done.stdout.strip() == "[]"


# --- the page --------------------------------------------------------------------------------------------------------


def test_one_offline_file_with_all_sections(page: str, three: Outlook, tmp_path: Path) -> None:
    assert not re.search(r"(src|href)=\"(https?:)?//", page)
    for title in ("Does it fit", "How long it takes", "Output", "Roofline", "Provenance"):
        assert f"<h2>{title}</h2>" in page
    # two of memory, two of time, one of output, the roofline
    assert len(figures(page)) == 6
    assert page.count("<summary>The data as a table") == 4
    for figure in figures(page):
        graph_objects.Figure(figure)  # refuses what its schema does not know
    told = ("a &lt;note&gt; on <code>doctor</code>", "Take int4.", "only a measurement decides")
    told += (
        "quantkit compile hf:meta-llama/Meta-Llama-3-8B --recipe int4-best --target h100 --out ./Meta-",
        three.target.memory.read_bandwidth.source,
    )
    assert all(said in page for said in (*told, "vLLM documentation", "14 steps of 3 models"))
    path = tmp_path / "plan.html"
    html.write(path, page)
    assert path.read_text(encoding="utf-8") == page


def test_every_table_has_the_figures_of_the_outlook(page: str, three: Outlook) -> None:
    for candidate in three.candidates[:3]:
        assert candidate.memory is not None
        for row in candidate.rows:
            for timed in (row.prefill, row.step):
                assert timed is not None
                assert say.bound(timed) in page and say.forecast(timed) in page
                assert words.size(timed.bound.bytes) in page
            assert say.expected(row.rate(256)) in page
        assert all(words.size(size) in page for size in candidate.memory.parts.values())
    for figure in three.target.figures().values():
        assert figure.number is not None
        assert words.rate(figure.number, figure.unit) in page
    first, *rows = three.candidates[0].rows
    changed = html.page(document(planned.with_first(three, rows=[replace(first, parts={"weights": 33.3e9}), *rows])))
    assert "33.3 GB" in changed and "33.3 GB" not in page


def test_points_lie_at_their_intensity_and_their_rate(three: Outlook) -> None:
    lines = traces(drawn.roofline(three))
    at_best, forecast = lines[0], next(each for each in lines if "open" not in each["marker"].get("symbol", ""))
    assert "open" in at_best["marker"]["symbol"] and at_best["line"]["dash"] == "dot"
    rows = three.candidates[0].rows
    for row, x, bound, expected in zip(rows, at_best["x"], at_best["y"], forecast["y"], strict=True):
        step = row.step.bound
        assert x == pytest.approx(step.operations / step.bytes)
        assert bound == pytest.approx(step.operations / step.seconds)
        assert expected == pytest.approx(0.6 * bound)


def test_a_roof_rises_with_the_memory_to_the_rate_of_its_type(three: Outlook) -> None:
    def roofs(outlook: Outlook) -> tuple[Any, list[dict[str, Any]]]:
        panel = drawn.roofline(outlook)
        assert panel is not None
        return panel, [each for each in panel.figure["data"] if each["line"].get("color") == "var(--ink)"]

    panel, found = roofs(three)
    assert [roof["text"][1].split()[0] for roof in found] == ["bf16", "fp8_e4m3"]
    beta = three.target.memory.read_bandwidth.number
    for roof, kind in zip(found, ("bf16", "fp8_e4m3"), strict=True):
        (left, corner, _), (low, rate, level) = roof["x"], roof["y"]
        assert rate == level == three.target.compute[kind].number
        assert low / left == pytest.approx(rate / corner) == pytest.approx(beta)
        inside = panel.figure["layout"]["yaxis"]["range"]
        assert inside[0] <= math.log10(low) < math.log10(level) < inside[1]
    # no point is above the roof of its own type: bounds are bounds
    for each in traces(panel):
        assert all(y <= 1.0001 * min(beta * x, found[1]["y"][1]) for x, y in zip(each["x"], each["y"], strict=True))
    compute = {**three.target.compute, "fp8_e4m3": three.target.compute["bf16"]}
    _, alike = roofs(replace(three, target=three.target.model_copy(update={"compute": compute})))
    assert [roof["text"][1] for roof in alike] == ["bf16, fp8_e4m3 989 Tflop/s"]


def test_memory_stands_against_the_capacity(three: Outlook) -> None:
    panel = drawn.memory_bars(three)
    assert panel is not None
    (line,) = panel.figure["layout"]["shapes"]
    assert line["x0"] == three.target.memory.capacity.number
    for i, candidate in enumerate(three.candidates[:3]):
        assert candidate.memory is not None
        assert sum(part["x"][i] for part in panel.figure["data"]) == pytest.approx(candidate.memory.total)
    bf16 = next(each for each in traces(drawn.memory_lines(three)) if each["name"] == "bf16")
    assert bf16["y"] == [pytest.approx(sum(row.parts.values())) for row in three.candidates[0].rows]


def test_bounds_alone_are_drawn_as_bounds() -> None:
    outlook = planned.outlook("bf16", "int4", efficiency=None)
    for panel in [*drawn.times(outlook), drawn.rates(outlook), drawn.roofline(outlook)]:
        lines = traces(panel)
        assert lines
        assert all(each["line"]["dash"] == "dot" and "open" in each["marker"]["symbol"] for each in lines)
    page = html.page(document(outlook))
    assert "is a forecast from measurements" not in page
    assert "\u2265 int4" in json.dumps(figures(page), ensure_ascii=False)


def test_hostile_text_stays_text() -> None:
    outlook = planned.outlook("bf16", "int4")
    cells = [replace(outlook.candidates[0].cells[0], source=HOSTILE, state="emulated")]
    hostile = planned.with_first(outlook, label=HOSTILE, recipe=HOSTILE, runtime=HOSTILE, cells=cells, notes=[HOSTILE])
    model = replace(outlook.architecture, name=HOSTILE, assumed=[HOSTILE])
    hostile = replace(hostile, architecture=model, recommendation=Recommendation(HOSTILE, [HOSTILE]), notes=[HOSTILE])
    shown = html.page(document(hostile))
    assert "<img" not in shown
    assert not any("<img" in json.dumps(figure) for figure in figures(shown)), "plotly reads some HTML in text"


def test_more_candidates_than_colours(one: Outlook) -> None:
    many = replace(one, candidates=[replace(one.candidates[0], label=f"int4-{i}") for i in range(9)])
    assert len(set(drawn.colours(many).values())) == 6 and len(figures(html.page(document(many)))) == 6


def test_what_the_page_needs(monkeypatch: pytest.MonkeyPatch, page: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="file-unwritable"):
        html.write(tmp_path / "nowhere" / "x.html", page)
    monkeypatch.setattr(machine, "has", lambda name: False)
    with pytest.raises(MissingDependency, match=r"-e '\.\[report\]'"):
        html.demand()
