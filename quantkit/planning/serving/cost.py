"""What tokens cost and what energy they take, from the seconds that they keep a machine busy.

input          10⁶ · (seconds of prefill / tokens of the prompts) · c            a million tokens that go in
output         10⁶ · (seconds of a step / sequences in it) · c                   a million that come out
a request      (prompt · input + output · output) / 10⁶                          of the user's lengths
blended        10⁶ · a request / (prompt + output)                               a million tokens of the traffic
c              price of a busy second, all devices. Rented: p / u. Owned: f / u + e
  p            price of a rented hour; u: share of the hours paid for in which the machine works
  f            (purchase − residual) / (years · 8,760 h) + upkeep, of each hour owned
  e            watts · PUE · price of a kWh, of each hour that it works
owned or rented      u* = f / (p − e): above it owning is cheaper than renting just the hours that are worked
own or by the token  R* = f / (a − e · s): requests a second from which an own machine is cheaper, that costs f an
                     hour whatever it does (for a rented one p) and e an hour of work; a: what the API asks for a
                     request, s: seconds that it takes here. Beyond 1/s no machine goes: then the API is cheaper.
energy         watts · seconds: the power of the boards is the most they draw, so it is the most that is used; the
               machine around them is not in it unless the prices say so
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from quantkit.errors import InputError
from quantkit.planning.serving.prices import Api, Cloud, Dated, Owned, Prices

_MILLION = 1e6
_JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True)
class RequestTime:
    """What tokens keep a machine busy for.

    Args:
        input: seconds for a token of a prompt.
        output: seconds for a token that comes out.
        prompt: tokens of a request's prompt.
        tokens: that a request gets.
        devices: that do it together.
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
        """From the times of a batch.

        Args:
            prefill: seconds for the prompts of all its sequences.
            step: seconds for a token of each.
            prompt: tokens of each prompt.
            output: tokens of each output.
        """
        return cls(prefill / (batch * prompt), step / batch, prompt, output, devices)

    @property
    def request(self) -> float:
        """Seconds for a request."""
        return self.prompt * self.input + self.tokens * self.output


@dataclass(frozen=True)
class RequestCost:
    """What tokens cost on one basis.

    Args:
        basis: whose price, of when.
        per_hour: of the machine, when it works.
        input: a million tokens that go in.
        output: a million that come out.
        blended: a million of the traffic's, in and out together.
        utilisation: share of the hours paid for in which it works.
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
    """At most, in joules: the power of the boards for as long as it takes.

    Args:
        watts: of all devices.
        input: a token that goes in.
        output: a token that comes out.
        kwh: a million tokens of the traffic.
    """

    watts: float
    input: float
    output: float
    request: float
    kwh: float


@dataclass(frozen=True)
class BreakEven:
    """From when on one way is cheaper than another.

    Args:
        cheaper: which, above it.
        than: which, below it.
        utilisation: share of the hours; None where no load makes it so.
        rate: requests a second that this is; None likewise.
    """

    cheaper: str
    than: str
    utilisation: float | None
    rate: float | None

    def line(self, *, bound: bool = False) -> str:
        """In words; `bound`: the seconds are the least that there can be, and so is the share of the time."""
        if self.utilisation is None or self.rate is None:
            return f"{self.cheaper} is at no load cheaper than {self.than}"
        if self.utilisation <= 0:
            return f"{self.cheaper} is at any load cheaper than {self.than}"
        share = f"{'≥ ' if bound else ''}{self.utilisation:.0%} of the time at work, {self.rate:.3g} requests/s"
        return f"{self.cheaper} is cheaper than {self.than} from {share} on"


@dataclass(frozen=True)
class Bill:
    """All that the prices say of some work.

    Args:
        rented: by offer, the cheapest first.
        owned: None without a purchase price, or without what its power costs.
        energy: None where the target gives no power.
        break_even: owned against rented, own machines against APIs.
        warnings: old prices, and those that are missing.
    """

    rented: Sequence[RequestCost]
    owned: RequestCost | None
    energy: Energy | None
    break_even: Sequence[BreakEven]
    warnings: Sequence[str]

    @property
    def cheapest(self) -> RequestCost | None:
        """Of those that have a price."""
        found = [*self.rented, *([self.owned] if self.owned is not None else [])]
        return min(found, key=lambda cost: cost.request, default=None)

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
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
    """Reckon all of it.

    Args:
        work: seconds of a machine.
        device: the target's name.
        watts: that one device draws at most: the target's power.
        model: the model's name, for APIs that rent it out.
        utilisation: share of the hours paid for in which the machine works. Under a load of R requests a second a
            machine that always runs has R · `work.request`.
        today: for the age of prices.

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
        warnings.append(f"{name} says what {device} costs to buy, but not {without}: no cost of owning is reckoned")
    breaks = []
    used: list[Dated] = [*offers, *apis]
    if bought is not None and power is not None:
        used += [each for each in (bought, prices.electricity) if each is not None]
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
    """On a rented machine. Raises InputError `utilisation-invalid`."""
    _check(utilisation)
    notes = []
    if work.devices % offer.devices:
        notes.append(f"rented {offer.devices} devices at a time, of which {work.devices} are reckoned")
    per_hour = work.devices * offer.per_device / utilisation
    return _cost(work, offer, currency, per_hour, utilisation, notes)


def owned(
    work: RequestTime, bought: Owned, prices: Prices, watts: float | None = None, utilisation: float = 1.0
) -> RequestCost | None:
    """On an own machine; None where the price of its power is not known. Raises InputError `utilisation-invalid`."""
    _check(utilisation)
    power = running(work, bought, prices, watts)
    if power is None:
        return None
    notes = [each.line(prices.currency) for each in (prices.electricity, prices.pue) if each is not None]
    per_hour = work.devices * bought.per_hour / utilisation + power
    return _cost(work, bought, prices.currency, per_hour, utilisation, notes)


def running(work: RequestTime, bought: Owned, prices: Prices, watts: float | None = None) -> float | None:
    """Price of the power of an hour of work, all devices; None where something of it is not known.

    Args:
        bought: may say what it draws.
        prices: of electricity, with the PUE.
        watts: that one device draws at most, where `bought` does not say.
    """
    drawn = bought.watts or watts
    if drawn is None or prices.electricity is None or prices.pue is None:
        return None
    return work.devices * drawn / 1000 * prices.pue.value * prices.electricity.per_kwh


def energy(work: RequestTime, watts: float) -> Energy:
    """At most; watts of one device."""
    every = work.devices * watts
    request = every * work.request
    kwh = _MILLION * request / (work.prompt + work.tokens) / _JOULES_PER_KWH
    return Energy(every, every * work.input, every * work.output, request, kwh)


def against_cloud(work: RequestTime, bought: Owned, power: float, offer: Cloud) -> BreakEven:
    """From which utilisation on owning is cheaper than renting the hours that are worked."""
    spared = work.devices * offer.per_device - power
    share = work.devices * bought.per_hour / spared if spared > 0 else math.inf
    return _break_even(work, "owned", offer.label, share)


def against_api(work: RequestTime, what: str, fixed: float, power: float, api: Api) -> BreakEven:
    """From which load on a machine is cheaper than the same tokens of an API.

    Args:
        fixed: price of an hour, whatever it does.
        power: price of an hour of work besides.
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
        raise InputError(
            "utilisation-invalid",
            where="utilisation",
            value=utilisation,
            rule="the share of the hours in which the machine works: above 0, at most 1",
        )
