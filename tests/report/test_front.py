"""The page and the screen of a search."""

import io
import json
import re
from typing import Any

import pytest

from quantkit.report.kit import html
from quantkit.report.kit.screen import write
from quantkit.report.tune import document, verdict

NAMES = ("int4 g32", "int8 g32", "float")
BITS = (4.5, 8.5, 32.0)


def data(**changes: Any) -> dict[str, Any]:
    def point(bits: float, predicted: float, **units: int) -> dict[str, Any]:
        found = {"bits": bits, "bytes": round(1e5 * bits), "predicted": predicted, "expected": 1.2 * predicted}
        return found | {"units": {name.replace("_", " "): count for name, count in units.items()}}

    text = {"set": "prose-en", "split": "tune", "sha256": "a" * 64, "samples": 2, "tokens": 128, "items": 254}
    kinds = (["q_proj", "k_proj"], ["o_proj"])
    units = [
        {
            "block": block,
            "members": [f"m.{block}.{name}" for name in kind],
            "weights": 10,
            "harm": dict(zip(NAMES, (1e-3 * (block + 1), 1e-5, 0.0), strict=True)),
            "chosen": NAMES[block],
        }
        for block in range(2)
        for kind in kinds
    ]
    scored = {"name": "tuned", "measured": 0.0031, "held_out": 0.0033, "held_out_ci95": [0.003, 0.0036]}
    return {
        "schema": 1,
        "quantkit": "0.1.0",
        "created": "2026-01-01T00:00:00+00:00",
        "model": {"name": "a <model>", "ref": "path:tiny", "sha256": "b" * 64, "dtype": "float32"},
        "base": "gptq-int4",
        "target": "cpu-x86",
        "budget": {"bits": 6.5},
        "candidates": [{"name": name, "scheme": None} for name in NAMES],
        "texts": {"harm": text, "check": {**text, "items": 6000}},
        "anchor": "int4 g32",
        "factor": 1.2,
        "chosen": {**point(6.5, 0.0026, int4_g32=2, int8_g32=2), **scored},
        "checks": [{**scored}],
        "uniform": {"name": "int4 g32", "bits": 6.4, "file_bytes": 450_000, "measured": 0.0072, "held_out": 0.0075},
        "alone": [
            {"name": name, **point(bits, harm)}
            for name, bits, harm in zip(NAMES, BITS, (0.006, 4e-5, 0.0), strict=True)
        ],
        "front": [point(4.5 + i / 5, 0.006 / 1.2**i, int4_g32=4) for i in range(20)],
        "timings": [],
        "units": units,
        "decisions": [
            {"pass": "tune", "code": "made-symmetric", "where": "x", "from": False, "to": True, "reason": "a mixture"}
        ],
        "notes": ["a note about the source"],
        "seconds": 200.0,
        **changes,
    }


def shown(given: dict[str, Any]) -> str:
    out = io.StringIO()
    write([document(given)], out)
    return out.getvalue()


def test_a_mixture_that_wins_says_by_how_much() -> None:
    tone, answer, because = verdict(data())
    assert tone == "good"
    assert answer == "Mixed precision is better by 57 % of the KL"
    assert any("0.00720" in reason for reason in because)


def test_a_mixture_that_does_not_win_says_so() -> None:
    worse = data()
    worse["uniform"]["measured"] = 0.003
    tone, answer, _ = verdict(worse)
    assert (tone, answer) == ("bad", "A mixture is no better than int4 g32 throughout")


def test_a_scheme_of_far_fewer_bits_is_no_comparison() -> None:
    fewer = data()
    fewer["uniform"]["bits"] = 4.5
    tone, answer, because = verdict(fewer)
    assert tone == "open"
    assert "no single scheme has as many bits" in answer
    assert any("no comparison at equal size" in reason for reason in because)


def test_a_prediction_is_called_one() -> None:
    given = data(uniform=None, checks=[], factor=None)
    given["chosen"] |= {"measured": None, "held_out": None}
    given["texts"] |= {"check": None}
    assert "prediction" in verdict(given)[1]
    assert "predicted, not compiled" in html.page(document(given, "schema: 1\n"))
    assert "prediction" in shown(given)


def test_a_limit_on_kl_that_was_not_met_is_named() -> None:
    assert verdict(data(budget={"kl": 0.001}))[1] == "The limit on KL was not met"


def test_the_screen_holds_every_name_and_fits() -> None:
    text = shown(data())
    assert all(name in text for name in ("chosen", "int4 g32", "int8 g32", "int4 g32, compiled"))
    assert max(len(line) for line in text.splitlines()) <= 80
    assert len(text.splitlines()) < 30


def test_the_page_has_every_figure_and_is_escaped() -> None:
    page = html.page(document(data(), "schema: 1\nsummary: <b>\n"))
    figures = [json.loads(text) for text in re.findall(r'<script type="application/json">(.*?)</script>', page, re.S)]
    assert len(figures) == 3
    assert "a &lt;model&gt;" in page and "<b>" not in page and "summary: &lt;b&gt;" in page
    # the choice as measured, one scheme for all as measured, and the front as expected
    points = {(x, y) for trace in figures[0]["data"] for x, y in zip(trace["x"], trace["y"], strict=True)}
    assert {(6.5, 0.0031), (6.4, 0.0072)} <= points
    assert figures[0]["data"][0]["y"][0] == pytest.approx(0.0072)
    # bars by depth add up to the harms of the scheme that most units are in
    assert sum(sum(trace["y"]) for trace in figures[1]["data"]) == pytest.approx(2 * 1e-3 + 2 * 2e-3)
    assert figures[2]["data"][0]["z"] == [[4.5, 8.5], [4.5, 8.5]]
    assert "No timings were given" in page


def test_the_same_data_give_the_same_page() -> None:
    assert html.page(document(data(), "x")) == html.page(document(json.loads(json.dumps(data())), "x"))


def test_a_small_share_of_the_weights_is_not_rounded_to_nothing() -> None:
    from quantkit.bundle import WeightsEntry
    from quantkit.report.bundle import figures

    def entry(elements: int, state: str, reason: str) -> WeightsEntry:
        common = {"tensors": 1, "asked": True, "linear": True, "example": "a.weight"}
        return WeightsEntry.model_validate({**common, "elements": elements, "state": state, "reason": reason})

    kept = [entry(12, "carried", "the first layer"), entry(250_000, "carried", "the head")]
    (line,) = figures.weights([entry(1_000_000, "quantized", ""), *kept])
    assert line == "80.0% of the linear weights are quantized, in floats: 20.0% the head; 0.00096 % the first layer"
