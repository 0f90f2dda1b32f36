"""The price list: what ships is dated and sourced, what is wrong is one line, what is old is warned of."""

import datetime
import math
from pathlib import Path
from typing import Any

import pytest

from quantkit import content
from quantkit.errors import InputError
from quantkit.model.sizes import configs
from quantkit.planning.cost import STALE, Prices

DATED = {"date": "2026-01-02", "source": "a page"}
OFFER = {"device": "h100", "provider": "A", "per_hour": 2.0, **DATED}
BOUGHT = {"device": "h100", "purchase": 100.0, "years": 4, **DATED}


def prices(**changed: Any) -> Prices:
    return Prices.from_dict({"schema": 1, "currency": "USD"} | changed, name="mine.yaml", where="mine.yaml")


def refused(**changed: Any) -> str:
    with pytest.raises(InputError) as caught:
        prices(**changed)
    assert caught.value.code in {"prices-invalid", "yaml-invalid"}
    assert "\n" not in caught.value.line()
    return caught.value.line()


def test_what_ships_is_dated_sourced_and_of_what_quantkit_knows() -> None:
    found = Prices.load()
    assert found.currency == "USD"
    every = [*found.cloud, *found.owned, *found.api]
    assert all(each.date and each.source for each in every if each.known)
    assert any(not each.known for each in found.cloud), "what nobody published is there to be filled in"
    assert {each.device for each in (*found.cloud, *found.owned)} <= set(content.names("export"))
    assert {each.model for each in found.api} <= set(configs.shipped_names())
    rates = [each.per_device for each in found.rented("h100")]
    assert len(rates) >= 3
    assert rates == sorted(rates)
    assert found.rented("l4") == []
    assert found.bought("h100") is None


def test_a_users_file_takes_its_place_whole(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "schema: 1\ncurrency: EUR\ncloud:\n"
        "  - {device: h100, provider: B, offer: big, devices: 4, per_hour: 8, date: 2026-01-02, source: a page}\n"
    )
    found = Prices.load(path)
    assert (found.name, found.currency, found.electricity, found.api) == ("mine.yaml", "EUR", None, [])
    offer = found.rented("h100")[0]
    assert offer.per_device == 2
    assert offer.line(found.currency) == "B (big): 8 EUR an hour for 4 devices, 2026-01-02"
    with pytest.raises(InputError, match="file-missing"):
        Prices.load(tmp_path / "absent.yaml")
    path.write_text("schema: 1\ncurrency: EUR\ncurrency: USD\n")
    with pytest.raises(InputError, match="yaml-invalid"):
        Prices.load(path)


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, "much"])
def test_prices_are_numbers_above_zero(value: Any) -> None:
    assert "cloud.0.per_hour" in refused(cloud=[OFFER | {"per_hour": value}])
    assert "owned.0.purchase" in refused(owned=[BOUGHT | {"purchase": value}])
    assert "electricity.per_kwh" in refused(electricity={"per_kwh": value, **DATED})
    assert "api.0.output" in refused(api=[{"model": "m", "provider": "A", "input": 1, "output": value, **DATED}])


@pytest.mark.parametrize("missing", ["date", "source"])
def test_a_price_without_its_date_or_source_is_refused_and_a_null_needs_none(missing: str) -> None:
    bare = {key: value for key, value in OFFER.items() if key != missing}
    assert "a price has its date and its source" in refused(cloud=[bare])
    assert "a price has its date and its source" in refused(electricity={"per_kwh": 0.1, "date": "2026-01-02"})
    assert not prices(cloud=[{"device": "h100", "provider": "A", "per_hour": None}]).rented("h100")


@pytest.mark.parametrize("value", ["2099-01-01", 20260102, "soon", 2026, True])
def test_dates_are_days_that_have_been(value: Any) -> None:
    assert "cloud.0.date" in refused(cloud=[OFFER | {"date": value}])


def test_other_things_that_cannot_be() -> None:
    assert "did you mean 'per_hour'" in refused(cloud=[OFFER | {"per_huor": 2}])
    assert "did you mean 'cloud'" in refused(clouds=[])
    assert "three capital letters" in refused(currency="$")
    assert "three capital letters" in refused(currency="usd")
    assert "pue.value" in refused(pue={"value": 0.9, **DATED})
    assert "residual is below the purchase price" in refused(owned=[BOUGHT | {"residual": 100}])
    assert "listed twice" in refused(owned=[BOUGHT, BOUGHT])
    assert "owned.0.years" in refused(owned=[BOUGHT | {"years": 0}])
    assert "cloud.0.devices" in refused(cloud=[OFFER | {"devices": 0}])
    assert "schema" in refused(schema=2)
    with pytest.raises(InputError, match="not a mapping"):
        Prices.from_dict([1])


def test_old_prices_are_warned_of_with_their_date() -> None:
    found = prices(cloud=[OFFER])
    day = datetime.date(2026, 1, 2)
    assert not found.stale(found.cloud, day + datetime.timedelta(days=STALE))
    old = found.stale(found.cloud, day + datetime.timedelta(days=STALE + 1))
    assert old == ["A: 2 USD an hour, 2026-01-02: 181 days old, look it up again (a page)"]
