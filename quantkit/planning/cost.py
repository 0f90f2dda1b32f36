"""Cost and energy of tokens, from the seconds that they keep a machine busy.

input          10⁶ · (seconds of prefill / tokens of the prompts) · c            per million prompt tokens
output         10⁶ · (seconds of a step / sequences in it) · c                   per million output tokens
a request      (prompt · input + output · output) / 10⁶                          for the user's lengths
blended        10⁶ · a request / (prompt + output)                               per million tokens of the traffic
c              price of a busy second, all devices. Rented: p / u. Owned: f / u + e
  p            price of a rented hour; u: share of the paid hours in which the machine works
  f            (purchase − residual) / (years · 8,760 h) + upkeep, per owned hour
  e            watts · PUE · price of a kWh, per hour of work
owned or rented      u* = f / (p − e): above it owning is cheaper than renting only the hours of work
own or by the token  R* = f / (a − e · s): requests a second from which an own machine is cheaper; it costs f per hour
                     in any case (a rented one p) and e per hour of work; a: the API's price of a request, s: seconds
                     of a request here. A machine serves at most 1/s; beyond that the API is cheaper.
energy         watts · seconds: the boards' power limit, so an upper bound; the machine around them counts only if the
               prices include it

Prices are a document that the user edits: `prices.yaml` beside this file is a starting point; `--prices FILE` replaces
it, whole. No price is in the code, and each has its date and source.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from quantkit.content import Closed, read_yaml, validated
from quantkit.errors import InputError

# days after which a price is reported as old
STALE = 180
_SHIPPED = Path(__file__).with_name("prices.yaml")
_HOURS = 8760.0
_MILLION = 1e6
_JOULES_PER_KWH = 3.6e6

Name = Annotated[str, Field(min_length=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


# --- the document ----------------------------------------------------------------------------------------------------


class Dated(Closed):
    """A published figure.

    Args:
        date: day when it was read, or published: 2026-11-09.
        source: where it was published.
    """

    date: datetime.date | None = None
    source: Name | None = None

    @field_validator("date", mode="before")
    @classmethod
    def _a_day(cls, value: Any) -> Any:
        if isinstance(value, bool | int | float):  # else seconds since 1970
            raise ValueError("a day, like 2026-11-09")
        return value

    @field_validator("date")
    @classmethod
    def _not_to_come(cls, value: datetime.date | None) -> datetime.date | None:
        # one day ahead is allowed for other time zones
        if value is not None and value > datetime.date.today() + datetime.timedelta(days=1):
            raise ValueError("a day in the past")
        return value

    @model_validator(mode="after")
    def _sourced(self) -> Self:
        if self.known and (self.date is None or self.source is None):
            raise ValueError("a price has its date and its source")
        return self

    @property
    def known(self) -> bool:
        """True if there is a price, and not a null to fill in."""
        return True

    def line(self, currency: str) -> str:
        """Describe it in words."""
        raise NotImplementedError


class Offer(Dated):
    """Something to rent.

    Args:
        provider: who rents it out.
        offer: name of the offer there.
    """

    provider: Name
    offer: str = ""

    @property
    def label(self) -> str:
        """Name of provider and offer: `AWS (p5.48xlarge)`."""
        return f"{self.provider} ({self.offer})" if self.offer else self.provider


class Cloud(Offer):
    """A machine to rent.

    Args:
        device: name of the target: `h100`.
        devices: number of devices in the machine.
        per_hour: price of an hour of all devices; null to fill in.
    """

    device: Name
    devices: int = Field(default=1, ge=1)
    per_hour: Positive | None = None

    @property
    def known(self) -> bool:
        """True if there is a price."""
        return self.per_hour is not None

    @property
    def per_device(self) -> float:
        """Price of an hour of one device."""
        return (self.per_hour or 0.0) / self.devices

    def line(self, currency: str) -> str:
        """Describe it: `AWS (p5.48xlarge): 55.04 USD an hour for 8 devices, 2026-11-09`."""
        several = f" for {self.devices} devices" if self.devices > 1 else ""
        return f"{self.label}: {self.per_hour:g} {currency} an hour{several}, {self.date}"


class Owned(Dated):
    """A purchased device, with its share of the machine around it.

    Args:
        device: name of the target.
        purchase: price; null to fill in.
        residual: price at the end of the `years` of depreciation.
        years: years of even depreciation.
        upkeep_per_year: cost of place, network, service.
        watts: power at work, with the machine's share; by default the target's own power.
    """

    device: Name
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
        """True if there is a price."""
        return self.purchase is not None

    @property
    def per_hour(self) -> float:
        """Price of each hour of ownership, used or not."""
        return ((self.purchase or 0.0) - self.residual) / (self.years * _HOURS) + self.upkeep_per_year / _HOURS

    def line(self, currency: str) -> str:
        """Describe it: `bought for 30,000 USD, 4 years, 2026-11-09`."""
        left = f", sold for {self.residual:,g}" if self.residual else ""
        return f"bought for {self.purchase:,g} {currency}{left}, {self.years:g} years, {self.date}"


class Electricity(Dated):
    """Price of a kilowatt-hour."""

    per_kwh: Positive

    def line(self, currency: str) -> str:
        """Describe it: `0.146 USD a kWh, 2026-04-26`."""
        return f"{self.per_kwh:g} {currency} a kWh, {self.date}"


class Pue(Dated):
    """Power usage effectiveness: power of a site divided by power of its machines."""

    value: Annotated[float, Field(ge=1, allow_inf_nan=False)]

    def line(self, currency: str) -> str:
        """Describe it: `PUE 1.54, 2025-07-31`."""
        return f"PUE {self.value:g}, {self.date}"


class Api(Offer):
    """A model rented by the token.

    Args:
        model: quantkit's name of the model: `llama-3-70b`.
        input: price of a million prompt tokens.
        output: price of a million output tokens.
    """

    model: Name
    input: Positive
    output: Positive

    def line(self, currency: str) -> str:
        """Describe it: `DeepInfra (Llama 3.1 8B): 0.02 in and 0.04 USD out a million tokens, 2026-11-05`."""
        return f"{self.label}: {self.input:g} in and {self.output:g} {currency} out a million tokens, {self.date}"


class Prices(Closed):
    """The price document; `name` is its file."""

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
        names = [bought.device for bought in value]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{name} is listed twice")
        return value

    @classmethod
    def load(cls, path: str | Path | None = None) -> Prices:
        """Read the user's file, or the shipped one.

        Raises:
            InputError: `file-missing`, `file-unreadable`, `yaml-invalid`, `prices-invalid`.
        """
        file = _SHIPPED if path is None else Path(path).expanduser()
        return cls.from_dict(read_yaml(file), name=file.name, where=str(path or file.name))

    @classmethod
    def from_dict(cls, data: Any, *, name: str = "", where: str = "prices") -> Prices:
        """Validate a mapping. Raises InputError `prices-invalid`."""
        rule = "prices are a YAML mapping"
        return validated(cls, data, where=where, code="prices-invalid", rule=rule, name=name)

    def rented(self, device: str) -> list[Cloud]:
        """List a device's offers with a price, the cheapest first."""
        offers = [offer for offer in self.cloud if offer.device == device and offer.known]
        return sorted(offers, key=lambda offer: offer.per_device)

    def bought(self, device: str) -> Owned | None:
        """Return a device's purchase price, or None."""
        return next((bought for bought in self.owned if bought.device == device and bought.known), None)

    def by_token(self, model: str) -> list[Api]:
        """List the APIs for a model."""
        return [api for api in self.api if api.model == model]

    def stale(self, used: Iterable[Dated], today: datetime.date | None = None) -> list[str]:
        """Return a warning for each old price."""
        today = today or datetime.date.today()
        return [
            f"{price.line(self.currency)}: {(today - price.date).days} days old, look it up again ({price.source})"
            for price in used
            if price.date is not None and (today - price.date).days > STALE
        ]


# --- what work costs -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RequestTime:
    """Seconds that tokens keep a machine busy.

    Args:
        input: seconds per prompt token.
        output: seconds per output token.
        prompt: prompt tokens of a request.
        tokens: output tokens of a request.
        devices: devices that work together.
    """

    input: float
    output: float
    prompt: float
    tokens: float
    devices: int = 1

    @classmethod
    def of(
        cls, *, prefill: float, step: float, batch: float, prompt: float, output: float, devices: int = 1
    ) -> RequestTime:
        """Divide the times of a batch: `prefill` seconds for all its prompts, `step` seconds for a token of each
        sequence.
        """
        return cls(prefill / (batch * prompt), step / batch, prompt, output, devices)

    @property
    def request(self) -> float:
        """Seconds of a request."""
        return self.prompt * self.input + self.tokens * self.output


@dataclass(frozen=True)
class RequestCost:
    """Cost of tokens on one basis.

    Args:
        basis: source and date of the price.
        currency: ISO 4217 code.
        per_hour: price of an hour of work.
        input: price of a million prompt tokens.
        output: price of a million output tokens.
        blended: price of a million tokens of the traffic.
        request: price of a request.
        utilisation: share of the paid hours in which it works.
    """

    basis: str
    currency: str
    per_hour: float
    input: float
    output: float
    blended: float
    request: float
    utilisation: float
    notes: Sequence[str] = ()
    source: str = ""


@dataclass(frozen=True)
class Energy:
    """Upper bound of energy in joules: the power of all boards times the seconds.

    Args:
        watts: power of all boards.
        input: joules per prompt token.
        output: joules per output token.
        request: joules per request.
        kwh: kilowatt-hours per million tokens.
    """

    watts: float
    input: float
    output: float
    request: float
    kwh: float


@dataclass(frozen=True)
class BreakEven:
    """Load from which on one way is cheaper than another.

    Args:
        cheaper: the way that is cheaper at high load.
        than: the other way.
        utilisation: share of the hours; None if it is cheaper at no load.
        rate: the same load in requests a second; None likewise.
    """

    cheaper: str
    than: str
    utilisation: float | None
    rate: float | None

    def line(self, *, bound: bool = False) -> str:
        """Describe it in words; `bound` marks times that are lower bounds."""
        if self.utilisation is None or self.rate is None:
            return f"{self.cheaper} is at no load cheaper than {self.than}"
        if self.utilisation <= 0:
            return f"{self.cheaper} is at any load cheaper than {self.than}"
        share = f"{'≥ ' if bound else ''}{self.utilisation:.0%} of the time at work, {self.rate:.3g} requests/s"
        return f"{self.cheaper} is cheaper than {self.than} from {share} on"


@dataclass(frozen=True)
class Bill:
    """Costs of some work under the given prices.

    Args:
        rented: costs by offer, the cheapest first.
        owned: cost of an own machine; None without a price of purchase or of power.
        energy: energy; None if the target has no power figure.
        break_even: owned against rented, own machines against APIs.
        warnings: old and missing prices.
    """

    rented: Sequence[RequestCost]
    owned: RequestCost | None
    energy: Energy | None
    break_even: Sequence[BreakEven]
    warnings: Sequence[str]

    @property
    def cheapest(self) -> RequestCost | None:
        """Cheapest of the known costs."""
        costs = [*self.rented, *([self.owned] if self.owned is not None else [])]
        return min(costs, key=lambda cost: cost.request, default=None)

    def as_dict(self) -> dict[str, Any]:
        """Return it for `--json`."""
        return asdict(self)


def bill(
    work: RequestTime,
    prices: Prices,
    device: str,
    *,
    watts: float | None = None,
    model: str | None = None,
    utilisation: float = 1.0,
    today: datetime.date | None = None,
) -> Bill:
    """Compute all costs.

    Args:
        device: name of the target.
        watts: power limit of one device.
        model: name of the model, for APIs.
        utilisation: share of the paid hours in which the machine works. At R requests a second, a machine that always
            runs has R · `work.request`.
        today: day for the age of prices.

    Raises:
        InputError: `utilisation-invalid`.
    """
    _check(utilisation)
    name = prices.name or "the price list"
    offers, bought, apis = prices.rented(device), prices.bought(device), prices.by_token(model or "")
    power = running(work, bought, prices, watts) if bought is not None else None
    warnings = []
    if not offers and bought is None:
        warnings.append(f"{name} has no price for {device}: add one under cloud or owned")
    if bought is not None and power is None:
        missing = {"electricity": prices.electricity, "pue": prices.pue, "watts": bought.watts or watts}
        without = ", ".join(what for what, value in missing.items() if value is None)
        warnings.append(f"{name} has a purchase price for {device}, but no {without}: no cost of owning is computed")
    breaks = []
    used: list[Dated] = [*offers, *apis]
    if bought is not None and power is not None:
        used += [price for price in (bought, prices.electricity) if price is not None]
        breaks += [against_cloud(work, bought, power, offer) for offer in offers[:1]]
        breaks += [against_api(work, "owned", work.devices * bought.per_hour, power, api) for api in apis]
    for offer in offers[:1]:
        breaks += [against_api(work, offer.label, work.devices * offer.per_device, 0.0, api) for api in apis]
    return Bill(
        rented=[rented(work, offer, prices.currency, utilisation) for offer in offers],
        owned=owned(work, bought, prices, watts, utilisation) if bought is not None else None,
        energy=energy(work, watts) if watts is not None else None,
        break_even=breaks,
        warnings=[*warnings, *prices.stale(used, today)],
    )


def rented(work: RequestTime, offer: Cloud, currency: str, utilisation: float = 1.0) -> RequestCost:
    """Compute the cost on a rented machine. Raises InputError `utilisation-invalid`."""
    _check(utilisation)
    notes = []
    if work.devices % offer.devices:
        notes.append(f"rented {offer.devices} devices at a time, of which {work.devices} are counted")
    return _cost(work, offer, currency, work.devices * offer.per_device / utilisation, utilisation, notes)


def owned(
    work: RequestTime, bought: Owned, prices: Prices, watts: float | None = None, utilisation: float = 1.0
) -> RequestCost | None:
    """Compute the cost on an own machine; None without a price of power.

    Raises:
        InputError: `utilisation-invalid`.
    """
    _check(utilisation)
    power = running(work, bought, prices, watts)
    if power is None:
        return None
    notes = [price.line(prices.currency) for price in (prices.electricity, prices.pue) if price is not None]
    per_hour = work.devices * bought.per_hour / utilisation + power
    return _cost(work, bought, prices.currency, per_hour, utilisation, notes)


def running(work: RequestTime, bought: Owned, prices: Prices, watts: float | None = None) -> float | None:
    """Compute the price of power per hour of work, all devices; None if a figure is missing.

    Args:
        watts: power limit of one device, if `bought` has none.
    """
    drawn = bought.watts or watts
    if drawn is None or prices.electricity is None or prices.pue is None:
        return None
    return work.devices * drawn / 1000 * prices.pue.value * prices.electricity.per_kwh


def energy(work: RequestTime, watts: float) -> Energy:
    """Compute the energy; `watts` is the power of one device."""
    every = work.devices * watts
    request = every * work.request
    kwh = _MILLION * request / (work.prompt + work.tokens) / _JOULES_PER_KWH
    return Energy(every, every * work.input, every * work.output, request, kwh)


def against_cloud(work: RequestTime, bought: Owned, power: float, offer: Cloud) -> BreakEven:
    """Find the utilisation for owning to be cheaper than renting the hours of work."""
    spared = work.devices * offer.per_device - power
    share = work.devices * bought.per_hour / spared if spared > 0 else math.inf
    return _break_even(work, "owned", offer.label, share)


def against_api(work: RequestTime, what: str, fixed: float, power: float, api: Api) -> BreakEven:
    """Find the load for a machine to be cheaper than the same tokens from an API.

    Args:
        fixed: price of an hour, idle or not.
        power: additional price of an hour of work.
    """
    asked = (work.prompt * api.input + work.tokens * api.output) / _MILLION
    spared = asked - power / 3600 * work.request
    share = fixed / 3600 / spared * work.request if spared > 0 else math.inf
    return _break_even(work, what, f"{api.provider}'s API", share)


def _break_even(work: RequestTime, cheaper: str, than: str, share: float) -> BreakEven:
    within = share <= 1
    return BreakEven(cheaper, than, share if within else None, share / work.request if within else None)


def _cost(
    work: RequestTime, paid: Dated, currency: str, per_hour: float, utilisation: float, notes: Sequence[str]
) -> RequestCost:
    second = per_hour / 3600
    request = second * work.request
    return RequestCost(
        paid.line(currency),
        currency,
        per_hour,
        input=_MILLION * second * work.input,
        output=_MILLION * second * work.output,
        blended=_MILLION * request / (work.prompt + work.tokens),
        request=request,
        utilisation=utilisation,
        notes=notes,
        source=paid.source or "",
    )


def _check(utilisation: float) -> None:
    if not 0 < utilisation <= 1:
        rule = "the share of the hours in which the machine works: above 0, at most 1"
        raise InputError("utilisation-invalid", "utilisation", utilisation, rule)
