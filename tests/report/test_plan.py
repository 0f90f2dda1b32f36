"""A plan on a screen and as JSON: every figure is the outlook's, a bound is no forecast, nobody's text is markup."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import planned
import pytest

from quantkit.planning.outlook import Outlook, PlannedMemory, Recommendation
from quantkit.report.kit import words
from quantkit.report.kit.screen import write
from quantkit.report.plan import words as plan_words
from quantkit.report.plan.as_json import as_dict
from quantkit.report.plan.document import document


@pytest.fixture(scope="module")
def three() -> Outlook:
    found = planned.outlook("bf16", "fp8", "int4")
    return replace(found, candidates=[*found.candidates, planned.refused()])


@pytest.fixture(scope="module")
def one() -> Outlook:
    return planned.outlook("int4")


def text(outlook: Outlook, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    stream = io.StringIO()
    write([document(outlook)], stream)
    return stream.getvalue()


def line(shown: str, start: str, after: str = "") -> str:
    """The first line that starts so, of those after another."""
    lines = shown.splitlines()
    begin = next((i for i, each in enumerate(lines) if after and each.strip().startswith(after)), 0)
    return next(each for each in lines[begin:] if each.strip().startswith(start))


def test_the_screen_fits_and_answers(three: Outlook, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = text(three, monkeypatch)
    assert max(len(each) for each in shown.splitlines()) <= 80
    whole = " ".join(shown.split())
    for said in (
        *("llama-3-8b: decoder, 8.03 B parameters in bfloat16, 32 layers, contexts up to 8,192",),
        *("holds 84.9 GB, reads 3.35 TB/s, bf16 989 Tflop/s, fp8_e4m3 1.98 Pflop/s",),
        *("prompts of 1,024 and outputs of 256 tokens, context 1,280, batches 1 to 64",),
        *("Assumed: prompts of 1,024 tokens", "forecast: take int4", "1.9×"),
        *("all times 14 steps of 3 models measured on a GPU", "nvfp4 weights: absent in vllm (TensorRT docs)"),
        *(
            "quantkit compile MODEL --recipe int4-best --target h100",
            "quantkit measure BUNDLE --batch 1,4,16,64 --baseline MODEL",
        ),
    ):
        assert said in whole


def test_a_line_has_the_figures_of_its_candidate(three: Outlook, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = text(three, monkeypatch)
    fp8 = three.candidates[1]
    assert fp8.memory is not None
    total = f"✓ {words.size(fp8.memory.total)} 84.9 GB {fp8.memory.largest_batch}"
    assert line(shown, "fp8", "Does it fit").split() == f"fp8 vllm native 8.00 7.50 GB 64 {total}".split()
    timed = line(shown, "fp8", "How long")
    assert plan_words.forecast(fp8.rows[0].prefill).replace("\u00a0", " ") in timed.replace("\u00a0", " ")
    for row in (fp8.rows[0], fp8.rows[-1]):
        assert plan_words.forecast(row.step) in timed
    assert line(shown, "fp8", "What it gives").split()[-1] == "64"


@pytest.mark.parametrize("efficiency", [0.6, 0.3])
def test_forecasts_follow_the_outlook(efficiency: float, monkeypatch: pytest.MonkeyPatch) -> None:
    found = planned.outlook("bf16", "int4", efficiency=efficiency)
    step = found.candidates[0].rows[0].step
    assert step.least is not None
    expected = f"{float(f'{1e3 * step.least / efficiency:.1e}'):.2g} ms"
    assert expected in line(text(found, monkeypatch), "bf16", "How long").replace("\u00a0", " ")


def test_a_bound_is_marked_and_no_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = text(planned.outlook("bf16", "int4", efficiency=None), monkeypatch)
    timed = line(shown, "bf16", "How long").split("  ")
    assert all(each.strip().startswith("≥") for each in timed[3:] if each.strip())
    assert "≤" in line(shown, "bf16", "What it gives")
    assert "mark bounds" in shown
    assert "is a forecast" not in shown
    assert "nothing was measured of this near here" in shown
    forecasts = text(planned.outlook("bf16", "int4"), monkeypatch)
    assert "≥" not in line(forecasts, "bf16", "How long")


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
    alone = replace(row, prefill=None).rate(256)
    assert alone.most == pytest.approx(1 / row.step.least)


def test_of_a_single_candidate_every_batch_and_what_memory_goes_into(
    one: Outlook, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = text(one, monkeypatch)
    assert max(len(each) for each in shown.splitlines()) <= 80
    (candidate,) = one.candidates
    for row in candidate.rows:
        cells = line(shown, f"{row.batch} ", "How long")
        forecast = plan_words.forecast(row.step).split()[0]
        for said in (plan_words.bound(row.prefill), plan_words.bound(row.step), forecast):
            assert said in cells
        assert "memory" in cells
        assert cells.endswith("✓")
    for part, size in (("weights", "4.05 GB"), ("runtime", "500 MB"), ("a token of cache", "131 kB")):
        assert size in line(shown, part)
    assert "forecast: int4 fits and runs" in shown


def test_what_does_not_fit_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    found = planned.outlook("bf16", "int4", model="llama-3-70b")
    shown = text(found, monkeypatch)
    assert "✗" in line(shown, "bf16", "Does it fit")
    assert "does not fit" in line(shown, "bf16", "How long")
    assert "bf16: a sequence needs 2 devices" in shown
    assert line(shown, "bf16", "What it gives").split() == ["bf16", "–"]
    assert "that gives the most of those that fit" in shown


def test_without_times_there_is_no_table_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    notes = ["cpu-x86 has no figure for compute.fp32"]
    shown = text(planned.outlook("bf16", "int4", target=planned.unmeasured(), notes=notes), monkeypatch)
    assert "! cpu-x86 has no figure for compute.fp32" in shown
    assert "all times the target has no figure for memory.read_bandwidth" in " ".join(shown.split())
    assert "How long" not in shown
    assert "≥" not in shown


def test_several_devices_and_none_that_is_enough(one: Outlook, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = PlannedMemory({"weights": 71e9}, 8, 80e9, 1e5, 12, 4096, 2, 2, ["shared evenly <b>"])
    shown = text(planned.with_first(one, memory=memory), monkeypatch)
    assert "✓ 2 × 71.0 GB" in shown
    assert "shared evenly <b>" in shown
    none = replace(one, recommendation=Recommendation(None, ["int4 takes 90 GB of 80"]))
    shown = text(none, monkeypatch)
    assert "it does not fit or run" in shown
    assert "quantkit compile" not in shown


def test_rates_are_of_one_device_where_several_share_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    found = planned.outlook("bf16", "int4")
    memory = found.candidates[0].memory
    assert memory is not None
    alone = plan_words.best(found.candidates[0], found.workload)
    found = planned.with_first(found, memory=replace(memory, devices=4))
    shared = plan_words.best(found.candidates[0], found.workload)
    assert alone is not None and shared is not None
    assert alone[1].forecast is not None and alone[1].interval is not None
    assert shared[1].forecast == alone[1].forecast / 4
    assert shared[1].interval == (alone[1].interval[0] / 4, alone[1].interval[1] / 4)
    shown = text(found, monkeypatch)
    assert "tokens/s a device" in shown
    assert plan_words.expected(shared[1]) in line(shown, "bf16", "What it gives")


def test_an_encoder_has_passes_and_no_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = text(
        planned.outlook("int4", "bf16", model="bert-base", workload=planned.work(1, 8, prompt=128, output=0)),
        monkeypatch,
    )
    assert "sequences/s" in shown
    assert "pass," in shown
    assert "first token" not in shown


def test_nobodys_text_is_markup_and_long_names_wrap(monkeypatch: pytest.MonkeyPatch) -> None:
    label = "./recipes/[bold]a-very-long-name-of-a-recipe[/bold]-that-goes-on-and-on.yaml"
    found = planned.with_first(planned.outlook("bf16", "int4"), label=label, notes=["[red]a note[/red]"])
    shown = text(replace(found, notes=["[link]"]), monkeypatch)
    assert "[red]a note[/red]" in " ".join(shown.split())
    assert "[link]" in shown
    assert "[bold]" in shown
    assert max(len(each) for each in shown.splitlines()) <= 80
    recipe = planned.outlook("int4", model="smollm2-135m")
    assert "quantkit compile smollm2-135m --recipe int4-best" in text(recipe, monkeypatch)
    odd = planned.with_first(recipe, recipe="./a b; rm -rf")
    assert "--recipe './a b; rm -rf'" in text(odd, monkeypatch)


# --- JSON ------------------------------------------------------------------------------------------------------------


def test_json_has_units_in_its_names_and_no_nan(three: Outlook) -> None:
    found = as_dict(three)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["model"]["parameters"] == 8_030_261_248
    fp8, nvfp4 = found["candidates"][1], found["candidates"][3]
    row, own = fp8["rows"][0], three.candidates[1].rows[0]
    assert row["step"]["bound_s"] == own.step.least
    assert row["step"]["forecast_interval_s"] == list(own.step.interval or ())
    assert row["step"]["bytes"] == own.step.bound.bytes
    assert sum(op["bytes"] * op["times"] for op in row["prefill"]["ops"]) == pytest.approx(row["prefill"]["bytes"])
    assert fp8["memory"]["total_bytes"] == sum(fp8["memory"]["parts_bytes"].values())
    assert fp8["memory"]["fits"] is True
    assert nvfp4["problem"]["code"] == "target-cannot-run"
    assert nvfp4["memory"] is None and nvfp4["weights_bytes"] is None
    assert found["recommendation"] == {**found["recommendation"], "label": "int4", "forecast": True}


def test_json_has_null_for_what_is_not_known(one: Outlook) -> None:
    broken = planned.with_first(one, bits=math.nan, cost={"usd": math.inf})
    (found,) = as_dict(broken)["candidates"]
    assert found["bits_per_weight"] is None
    assert found["cost"] == {"usd": None}
    (bounds,) = as_dict(planned.outlook("int4", efficiency=None))["candidates"]
    assert bounds["rows"][0]["step"]["forecast_s"] is None
    assert bounds["rows"][0]["forecast_per_s"] is None
    assert bounds["forecast"] is False


def test_nothing_heavy_is_imported() -> None:
    """A plan answers in a second: neither torch nor what draws pages."""
    heavy = ("torch", "scipy", "plotly", "transformers", "jinja2")
    code = f"import sys, quantkit.report.plan.document; print([name for name in {heavy} if name in sys.modules])"
    done: Any = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
