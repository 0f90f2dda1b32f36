"""Prices as a document that the user edits: what machines cost to rent, to own and to run, and what an API asks.

`prices.yaml` beside this file is a starting point; `--prices FILE` takes its place, whole. No price stands in code, and
each carries the day it was read and where.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from quantkit.content import Closed, read_yaml, validated

# days after which a price is warned of
STALE = 180
_SHIPPED = Path(__file__).parent / "prices.yaml"
_HOURS = 8760.0

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Dated(Closed):
    """What was published somewhere, once.

    Args:
        date: when it was read, or published: 2026-11-09.
        source: where.
    """

    date: datetime.date | None = None
    source: str | None = Field(default=None, min_length=1)

    @field_validator("date", mode="before")
    @classmethod
    def _a_day(cls, value: Any) -> Any:
        if isinstance(value, bool | int | float):  # else seconds since 1970
            raise ValueError("a day, as 2026-11-09")
        return value

    @field_validator("date")
    @classmethod
    def _not_to_come(cls, value: datetime.date | None) -> datetime.date | None:
        # a day ahead is another time zone
        if value is not None and value > datetime.date.today() + datetime.timedelta(days=1):
            raise ValueError("a day that has been")
        return value

    @model_validator(mode="after")
    def _sourced(self) -> Self:
        if self.known and (self.date is None or self.source is None):
            raise ValueError("a price has its date and its source")
        return self

    @property
    def known(self) -> bool:
        """Whether there is a price, and not a null to fill in."""
        return True

    def line(self, currency: str) -> str:
        """In words."""
        raise NotImplementedError


class Offer(Dated):
    """What somebody rents out."""

    provider: str = Field(min_length=1)
    offer: str = ""

    @property
    def label(self) -> str:
        """`AWS (p5.48xlarge)`."""
        return f"{self.provider} ({self.offer})" if self.offer else self.provider


class Cloud(Offer):
    """A machine to rent.

    Args:
        device: the target's name: `h100`.
        provider: who rents it out.
        offer: what it is called there.
        devices: how many it has.
        per_hour: of all of them; null: fill it in.
    """

    device: str = Field(min_length=1)
    devices: int = Field(default=1, ge=1)
    per_hour: Positive | None = None

    @property
    def known(self) -> bool:
        """Whether there is a price."""
        return self.per_hour is not None

    @property
    def per_device(self) -> float:
        """An hour of one device."""
        return (self.per_hour or 0.0) / self.devices

    def line(self, currency: str) -> str:
        """`AWS (p5.48xlarge): 55.04 USD an hour for 8 devices, 2026-11-09`."""
        several = f" for {self.devices} devices" if self.devices > 1 else ""
        return f"{self.label}: {self.per_hour:g} {currency} an hour{several}, {self.date}"


class Owned(Dated):
    """A device that is bought, with its share of the machine around it.

    Args:
        device: the target's name.
        purchase: price; null: fill it in.
        residual: what it is sold for at the end.
        years: in which it is written off, evenly.
        upkeep_per_year: place, network, service.
        watts: drawn when it works, the machine's share included; default: the target's own power.
    """

    device: str = Field(min_length=1)
    purchase: Positive | None = None
    residual: NotNegative = 0.0
    years: Positive
    upkeep_per_year: NotNegative = 0.0
    watts: Positive | None = None

    @model_validator(mode="after")
    def _loses_value(self) -> Self:
        if self.purchase is not None and self.residual >= self.purchase:
            raise ValueError(f"residual is below the purchase price, got {self.residual:g} of {self.purchase:g}")
        return self

    @property
    def known(self) -> bool:
        """Whether there is a price."""
        return self.purchase is not None

    @property
    def per_hour(self) -> float:
        """Of each hour that it is owned, used or not."""
        return ((self.purchase or 0.0) - self.residual) / (self.years * _HOURS) + self.upkeep_per_year / _HOURS

    def line(self, currency: str) -> str:
        """`bought for 30,000 USD, 4 years, 2026-11-09`."""
        left = f", sold for {self.residual:,g}" if self.residual else ""
        return f"bought for {self.purchase:,g} {currency}{left}, {self.years:g} years, {self.date}"


class Electricity(Dated):
    """What a kilowatt-hour costs."""

    per_kwh: Positive

    def line(self, currency: str) -> str:
        """`0.146 USD a kWh, 2026-04-26`."""
        return f"{self.per_kwh:g} {currency} a kWh, {self.date}"


class Pue(Dated):
    """Power usage effectiveness: all that a site draws for each watt of its machines."""

    value: Annotated[float, Field(ge=1, allow_inf_nan=False)]

    def line(self, currency: str) -> str:
        """`PUE 1.54, 2025-07-31`."""
        return f"PUE {self.value:g}, {self.date}"


class Api(Offer):
    """A model that is rented by the token.

    Args:
        model: as quantkit names it: `llama-3-70b`.
        provider: who rents it out.
        offer: what it is called there.
        input: price of a million tokens that go in.
        output: of a million that come out.
    """

    model: str = Field(min_length=1)
    input: Positive
    output: Positive

    def line(self, currency: str) -> str:
        """`DeepInfra (Llama 3.1 8B): 0.02 in and 0.04 USD out a million tokens, 2026-11-05`."""
        return f"{self.label}: {self.input:g} in and {self.output:g} {currency} out a million tokens, {self.date}"


class Prices(Closed):
    """The document. `name` is its file."""

    schema_: Annotated[Literal[1], Field(alias="schema")] = 1
    name: str = ""
    currency: Annotated[str, Field(pattern=r"^[A-Z]{3}$")]
    cloud: list[Cloud] = Field(default=[])
    owned: list[Owned] = Field(default=[])
    electricity: Electricity | None = None
    pue: Pue | None = None
    api: list[Api] = Field(default=[])

    @field_validator("currency", mode="before")
    @classmethod
    def _code(cls, value: Any) -> Any:
        if not (isinstance(value, str) and len(value) == 3 and value.isascii() and value.isalpha() and value.isupper()):
            raise ValueError("a currency is three capital letters (ISO 4217): USD, EUR; one for the whole file")
        return value

    @field_validator("owned")
    @classmethod
    def _bought_once(cls, value: list[Owned]) -> list[Owned]:
        names = [each.device for each in value]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{name} stands there twice")
        return value

    @classmethod
    def load(cls, path: str | Path | None = None) -> Prices:
        """The user's file, or the one that ships.

        Raises:
            InputError: `file-unreadable`, `yaml-invalid`, `prices-invalid`: one line, with a did-you-mean.
        """
        file = _SHIPPED if path is None else Path(path).expanduser()
        return cls.from_dict(read_yaml(file), name=file.name, where=str(path or file.name))

    @classmethod
    def from_dict(cls, data: Any, *, name: str = "", where: str = "prices") -> Prices:
        """Validate a mapping; InputError `prices-invalid`."""
        rule = "prices are a YAML mapping"
        return validated(cls, data, where=where, code="prices-invalid", rule=rule, name=name)

    def rented(self, device: str) -> list[Cloud]:
        """Offers of a device that have a price, the cheapest first."""
        found = [each for each in self.cloud if each.device == device and each.known]
        return sorted(found, key=lambda each: each.per_device)

    def bought(self, device: str) -> Owned | None:
        """A device's price of purchase; None where there is none."""
        return next((each for each in self.owned if each.device == device and each.known), None)

    def by_token(self, model: str) -> list[Api]:
        """APIs that rent a model out."""
        return [each for each in self.api if each.model == model]

    def stale(self, used: Iterable[Dated], today: datetime.date | None = None) -> list[str]:
        """A warning for each price that is old."""
        today = today or datetime.date.today()
        return [
            f"{each.line(self.currency)}: {(today - each.date).days} days old, look it up again ({each.source})"
            for each in used
            if each.date is not None and (today - each.date).days > STALE
        ]
