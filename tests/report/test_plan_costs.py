"""Money, energy and waiting: what is shown is the bill at the bound and at the forecast, each marked as what it is."""

import datetime
import json
from dataclasses import replace
from typing import Any

import planned
import pytest

from quantkit.planning.compiling import Compiling, Disk
from quantkit.planning.cost import Prices, RequestTime, bill
from quantkit.planning.load import Load
from quantkit.planning.outlook import Outlook, PlannedRecipe
from quantkit.report.kit import html
from quantkit.report.plan import figures
from quantkit.report.plan import words as plan_costs
from quantkit.report.plan.as_json import as_dict
from quantkit.report.plan.document import document
from quantkit.stats.clustered import Estimate
from report.shown import fits, printed

PRICES = Prices.from_dict(
    {
        "schema": 1,
        "currency": "EUR",
        "cloud": [
            {"device": "h100", "provider": "a <cloud>", "per_hour": 3.6, "date": "2026-11-09", "source": "its page"},
            {"device": "h100", "provider": "another", "per_hour": 7.2, "date": "2025-01-01", "source": "its list"},
        ],
        "api": [
            {"model": "llama-3-8b", "provider": "P", "input": 1.0, "output": 3.0, "date": "2026-11-05", "source": "x"}
        ],
    }
)


def billed(candidate: PlannedRecipe, output: int) -> PlannedRecipe:
    """With bills by the times that a plan takes: the forecast where there is one, else the bound."""
    rows = []
    for row in candidate.rows:
        first = row.prefill or row.step
        assert first.seconds is not None and row.step.seconds is not None
        step = row.step.seconds if row.prefill is not None else 0.0
        work = RequestTime.of(prefill=first.seconds, step=step, batch=row.batch, prompt=1024, output=output)
        today = datetime.date(2026, 11, 20)
        rows.append(replace(row, cost=bill(work, PRICES, "h100", watts=700.0, model="llama-3-8b", today=today)))
    return replace(candidate, rows=rows, cost=rows[-1].cost)


def priced(*labels: str, **more: Any) -> Outlook:
    found = planned.outlook(*labels, **more)
    output = found.workload.output
    return replace(found, candidates=[billed(each, output) for each in found.candidates])


def loaded(found: Outlook) -> Outlook:
    """Under a load whose percentiles are known; the first keeps up, the others do not."""

    def several(value: float) -> dict[str, Estimate]:
        return {
            name: Estimate(value * k, None, (value * k * 0.9, value * k * 1.1), 8, 8000)
            for name, k in (("mean", 1), ("p50", 2), ("p90", 3), ("p99", 4))
        }

    def load(stable: bool) -> Load:
        waits = [several(each) if stable else {} for each in (0.011, 0.0023, 0.7)]
        return Load(
            *(4.0, 10.0 if stable else 3.0, stable, 0.0 if stable else 1.0, *waits, 900.0, 3600.0, 17.0),
            *(21.0 if stable else None, 0.4, 0.0, 0.0, "chunked", 8000, 0),
            notes=[] if stable else ["unstable: the queue grows by 1 requests/s, so no percentile exists"],
        )

    work = replace(found.workload, traffic=replace(found.workload.traffic, rate=4.0))
    candidates = [replace(each, load=load(i == 0)) for i, each in enumerate(found.candidates)]
    return replace(found, workload=work, candidates=candidates)


def text(found: Outlook, monkeypatch: pytest.MonkeyPatch) -> str:
    shown = printed([document(found)], monkeypatch)
    fits(shown)
    return shown


def test_an_amount_follows_its_own_time() -> None:
    (candidate,) = priced("int4", efficiency=0.5).candidates
    row = candidate.rows[0]
    assert row.cost is not None and row.prefill is not None
    cost = row.cost.cheapest
    assert cost is not None
    second = 3.6 / 3600
    whole = plan_costs.together(row, 256, cost.blended)
    rate = row.rate(256)
    assert rate.most is not None and rate.forecast is not None
    # 1,280 tokens in all for each 256 that come out
    assert whole.least == pytest.approx(1e6 * second * 256 / 1280 / rate.most)
    assert whole.forecast == pytest.approx(1e6 * second * 256 / 1280 / rate.forecast) == pytest.approx(cost.blended)
    assert whole.interval is not None and whole.interval[0] < cost.blended < whole.interval[1]
    amounts = plan_costs.amounts(priced("int4", efficiency=0.5), row)
    assert len(amounts) == len(plan_costs.amounts_head(priced("int4"))) == 4
    step = row.step
    assert step.forecast is not None
    assert amounts[1].startswith(f"{float(f'{1e6 * second * step.forecast:.1e}'):.2g} (")
    assert amounts[3].startswith(f"{float(f'{700 * step.forecast:.1e}'):.2g} (")


def test_bounds_are_marked_in_money_too() -> None:
    found = priced("bf16", "int4", efficiency=None)
    best = [plan_costs.best(each, found.workload) for each in found.candidates]
    assert best[0] is not None and best[0][0].batch == 64
    assert all(cell.startswith("≥") for each in best if each for cell in plan_costs.amounts(found, each[0]))


def test_a_bill_at_a_mixture_is_taken_apart() -> None:
    """A forecast of the steps and a bound of the prompts: what both cost together is known at the bounds alone."""
    found = planned.outlook("int4")
    (candidate,) = found.candidates
    rows = [
        replace(row, prefill=replace(row.prefill, forecast=None, interval=None))
        for row in candidate.rows
        if row.prefill is not None
    ]
    (mixed,) = replace(found, candidates=[billed(replace(candidate, rows=rows), 256)]).candidates
    into, out, both, _ = plan_costs.amounts(priced("int4"), mixed.rows[0])
    assert into.startswith("≥") and both.startswith("≥")
    assert "(" in out
    (bounds,) = priced("int4", efficiency=None).candidates
    assert both == plan_costs.amounts(priced("int4"), bounds.rows[0])[2]


def test_the_screen_shows_prices_and_load(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = text(loaded(priced("bf16", "int4")), monkeypatch)
    whole = " ".join(shown.split())
    assert "by a <cloud>: 3.6 EUR an hour, 2026-11-09" in whole
    assert "4 requests/s, in a simulation of continuous batching" in whole
    waits = next(line for line in shown[shown.index("Under load") :].splitlines() if line.strip().startswith("bf16"))
    assert " ".join(waits.split()) == "bf16 40 % 22 ms 44 ms 4.6 ms 9.2 ms 1.4 s 2.8 s"
    assert "int4: 3.00 requests/s can be served" in whole and "no percentile exists" in whole
    assert "is cheaper than P's API" in whole
    single = text(priced("int4"), monkeypatch)
    assert "EUR, both" in single


def test_old_prices_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    found = priced("bf16", "int4")
    (first, second) = found.candidates
    assert first.cost is not None
    old = replace(first.cost, warnings=["a price of 2024: look it up again"])
    found = replace(found, candidates=[replace(first, cost=old), replace(second, cost=old)])
    assert text(found, monkeypatch).count("look it up again") == 1
    assert html.page(document(found)).count("look it up again") == 1


def test_the_page_shows_prices_and_load() -> None:
    page = html.page(document(loaded(priced("bf16", "int4"))))
    for said in (
        "Output and cost",
        "Under load",
        "EUR a million tokens",
        "its page",
        "its list",
        "7.20 EUR",
    ):
        assert said in page
    assert "a &lt;cloud&gt;" in page and "<cloud>" not in page
    assert "The compile itself" not in page
    panel = figures.costs(priced("bf16", "int4"))
    assert panel is not None
    names = [each.get("name") for each in panel.figure["data"] if each.get("name")]
    assert names == ["bf16", "int4"]
    assert figures.costs(planned.outlook("bf16")) is None


def test_an_encoder_pays_by_the_pass() -> None:
    found = priced("int4", model="bert-base", workload=planned.work(1, 8, prompt=128, output=0))
    assert plan_costs.amounts_head(found) == ["EUR a million sequences", "J a sequence, full power"]
    (candidate,) = found.candidates
    row = candidate.rows[0]
    assert row.step.forecast is not None
    price, joules = plan_costs.amounts(found, row)
    assert price.startswith(f"{float(f'{1e6 * 3.6 / 3600 * row.step.forecast:.1e}'):,.2g}"[:3])
    assert float(joules.partition(" ")[0]) == pytest.approx(700 * row.step.forecast, rel=0.06)


def test_without_prices_energy_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    found = priced("int4")
    (candidate,) = found.candidates
    rows = [replace(row, cost=replace(row.cost, rented=[], owned=None)) for row in candidate.rows if row.cost]
    found = replace(found, candidates=[replace(candidate, rows=rows, cost=rows[-1].cost)])
    assert plan_costs.amounts_head(found) == ["J a token, full power"]
    assert "J a token" in text(found, monkeypatch) and "<h2>Output</h2>" in html.page(document(found))


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(None, "known after its first block"), ({"quantize": 6600.0}, "quantize 1 h 50 min")],
)
def test_what_the_compile_takes(seconds: dict[str, float] | None, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, disk = {"quantize": 12e9, "score": 3e9}, Disk(8e9, 1e9, 5e9)
    found = planned.outlook("bf16", "int4")
    found = planned.with_first(found, compiling=Compiling(memory, disk, ("a note",), seconds=seconds))
    shown = text(found, monkeypatch).replace("\u00a0", " ")
    (line,) = [each for each in shown[shown.index("The compile itself") :].splitlines() if "12.0 GB" in each]
    assert " ".join(line.split()) == "bf16 12.0 GB quantize 9.00 GB"
    page = html.page(document(found))
    assert "A note." in shown and "The compile itself" in page
    assert told in shown and told in page
    total = sum(seconds.values()) if seconds else None
    assert as_dict(found)["candidates"][0]["compiling"]["total_seconds"] == total


def test_json_has_the_bills_and_the_load() -> None:
    found = as_dict(loaded(priced("bf16", "int4")))
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    first, second = found["candidates"]
    assert first["rows"][0]["cost"]["rented"][0]["per_hour"] == 3.6
    assert first["cost"]["rented"][0]["source"] == "its page"
    assert first["load"]["ttft"]["p99"]["value"] == pytest.approx(0.044)
    assert second["load"]["ttft"] is None and second["load"]["stable"] is False
