"""Money and energy: by hand, and that each break-even is where both cost the same."""

import datetime
import json
from typing import Any

import pytest

from quantkit.errors import InputError
from quantkit.planning.cost import Prices, RequestTime, against_api, against_cloud, bill, energy, owned, rented, running

DATED = {"date": "2026-01-02", "source": "a page"}
TODAY = datetime.date(2026, 1, 3)
# 2 s for the prompts of 4 sequences of 500 tokens, 20 ms for a token of each
WORK = RequestTime.of(prefill=2.0, step=0.02, batch=4, prompt=500, output=100)


def prices(**changed: Any) -> Prices:
    chosen: dict[str, Any] = {
        "schema": 1,
        "currency": "EUR",
        "cloud": [
            {"device": "h100", "provider": "A", "offer": "one", "per_hour": 3.6, **DATED},
            {"device": "h100", "provider": "B", "offer": "eight", "devices": 8, "per_hour": 36.0, **DATED},
        ],
        "owned": [{"device": "h100", "purchase": 35040, "residual": 8760, "years": 3, "upkeep_per_year": 876, **DATED}],
        "electricity": {"per_kwh": 0.25, **DATED},
        "pue": {"value": 1.6, **DATED},
        "api": [{"model": "m", "provider": "C", "input": 1.0, "output": 5.0, **DATED}],
    }
    return Prices.from_dict(chosen | changed, name="mine.yaml")


def test_seconds_of_a_token() -> None:
    assert WORK.input == 0.001
    assert WORK.output == 0.005
    assert WORK.request == pytest.approx(500 * 0.001 + 100 * 0.005)


def test_a_rented_machine_by_hand() -> None:
    cost = rented(WORK, prices().rented("h100")[0], "EUR")
    assert cost.input == pytest.approx(1.0), "a thousand seconds at a thousandth"
    assert cost.output == pytest.approx(5.0)
    assert cost.request == pytest.approx(0.001)
    assert cost.blended == pytest.approx(1e6 * 0.001 / 600)
    assert cost.basis == "A (one): 3.6 EUR an hour, 2026-01-02"
    half = rented(WORK, prices().rented("h100")[0], "EUR", 0.5)
    assert (half.input, half.blended) == pytest.approx((2 * cost.input, 2 * cost.blended))


def test_devices_cost_their_share_of_an_offer() -> None:
    work = RequestTime.of(prefill=2.0, step=0.02, batch=4, prompt=500, output=100, devices=2)
    cost = rented(work, prices().rented("h100")[1], "EUR")
    assert cost.per_hour == pytest.approx(9.0)
    assert cost.notes == ["rented 8 devices at a time, of which 2 are counted"]


def test_an_own_machine_by_hand() -> None:
    """26,280 over 3 years is 1 an hour, upkeep 0.1; 500 W at a PUE of 1.6 is 0.8 kWh, 0.2 an hour."""
    found = prices()
    bought = found.bought("h100")
    assert bought is not None
    assert bought.per_hour == pytest.approx(1.1)
    assert running(WORK, bought, found, 500) == pytest.approx(0.2)
    always, seldom = (owned(WORK, bought, found, 500, share) for share in (1.0, 0.25))
    assert always is not None
    assert seldom is not None
    assert always.per_hour == pytest.approx(1.3)
    assert seldom.per_hour == pytest.approx(4.4 + 0.2)
    assert always.notes == ["0.25 EUR a kWh, 2026-01-02", "PUE 1.6, 2026-01-02"]
    own_watts = prices(owned=[{"device": "h100", "purchase": 8760, "years": 1, "watts": 1000, **DATED}])
    assert running(WORK, own_watts.owned[0], own_watts, 500) == pytest.approx(0.4)


def test_at_break_even_owning_and_renting_cost_the_same() -> None:
    found = prices()
    bought, offer = found.owned[0], found.rented("h100")[0]
    point = against_cloud(WORK, bought, 0.2, offer)
    assert point.utilisation == pytest.approx(1.1 / 3.4)
    same = owned(WORK, bought, found, 500, point.utilisation or 0)
    assert same is not None
    assert same.request == pytest.approx(rented(WORK, offer, "EUR").request)
    assert "owned is cheaper than A (one) from 32% of the time at work" in point.line()
    assert "from ≥ 32% of the time" in point.line(bound=True)
    dear = against_cloud(WORK, bought, 3.5, offer)
    assert (dear.utilisation, dear.rate) == (None, None)
    assert dear.line() == "owned is at no load cheaper than A (one)"


def test_at_break_even_a_machine_costs_what_the_api_asks() -> None:
    found = prices()
    api = found.api[0]
    point = against_api(WORK, "owned", 1.1, 0.2, api)
    assert point.rate is not None
    asked = point.rate * 3600 * (500 * 1.0 + 100 * 5.0) / 1e6
    assert 1.1 + 0.2 * point.rate * WORK.request == pytest.approx(asked)
    assert point.utilisation == pytest.approx(point.rate * WORK.request)
    assert against_api(WORK, "rented", 3.6, 0.0, api).utilisation == pytest.approx(1.0)
    assert against_api(WORK, "rented", 3.7, 0.0, api).utilisation is None, "it would have to work more than always"
    assert against_api(WORK, "owned", 0.1, 3.7, api).utilisation is None, "its power alone costs more"


def test_energy_is_the_power_for_as_long_as_it_takes() -> None:
    work = RequestTime.of(prefill=2.0, step=0.02, batch=4, prompt=500, output=100, devices=2)
    found = energy(work, 350)
    assert found.watts == 700
    assert found.input == pytest.approx(0.7)
    assert found.output == pytest.approx(3.5)
    assert found.request == pytest.approx(700.0)
    assert found.kwh == pytest.approx(1e6 / 600 * 700 / 3.6e6)


def test_a_bill_lists_rent_ownership_energy_and_break_even() -> None:
    found = bill(WORK, prices(), "h100", watts=500, model="m", today=TODAY)
    assert [cost.per_hour for cost in found.rented] == pytest.approx([3.6, 4.5])
    assert found.owned is not None
    assert found.cheapest == found.owned
    assert found.energy is not None
    assert [(each.cheaper, each.than) for each in found.break_even] == [
        ("owned", "A (one)"),
        ("owned", "C's API"),
        ("A (one)", "C's API"),
    ]
    assert not found.warnings
    assert json.loads(json.dumps(found.as_dict()))["rented"][0]["currency"] == "EUR"
    low = bill(WORK, prices(), "h100", watts=500, utilisation=0.1, today=TODAY)
    assert low.owned is not None
    assert low.owned.input > found.owned.input


def test_what_is_missing_or_old_is_said() -> None:
    nothing = bill(WORK, prices(), "l4", today=TODAY)
    assert (nothing.rented, nothing.owned, nothing.energy, nothing.cheapest) == ([], None, None, None)
    assert nothing.warnings == ["mine.yaml has no price for l4: add one under cloud or owned"]
    some = bill(WORK, prices(electricity=None), "h100", today=TODAY)
    assert some.owned is None
    assert "but no electricity, watts: no cost of owning is computed" in some.warnings[0]
    old = bill(WORK, prices(), "h100", watts=500, model="m", today=datetime.date(2026, 12, 1))
    assert len(old.warnings) == 5, "two offers, an API, a purchase, electricity"
    assert all("333 days old" in each for each in old.warnings)


@pytest.mark.parametrize("value", [0.0, -0.5, 1.5, float("nan")])
def test_utilisation_is_a_share(value: float) -> None:
    with pytest.raises(InputError, match="utilisation-invalid"):
        bill(WORK, prices(), "h100", utilisation=value, today=TODAY)
