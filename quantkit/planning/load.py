"""Waiting under a load of R requests a second: a queueing simulation with continuous batching.

    arrivals      Poisson: the gaps are exponential with mean 1/R
    served        by `batching.run`: what is not simulated is listed there; step times are whatever the server was given
    percentiles   of all measured requests of RUNS independent runs. A run's first fifth is left out (it starts with
                  nothing to do) and its last tenth (nobody comes after it).
    interval      of a percentile: Student's t over the logarithms of the runs' own, about that of all together
                  (sectioning: Asmussen and Glynn, Stochastic Simulation, 2007, III.5). Of M/M/1 it covers p50 and p90
                  as often as it says and p99, which rests on a few rushes, somewhat less. It is the simulation's noise
                  alone: how far the step times are from real ones is not in it.
    capacity      requests a second that come out where all are there at the start: more cannot be sustained (the
                  saturation rule: Baccelli and Foss, Journal of Applied Probability 32, 1995). Beyond it the queue
                  grows as long as the load lasts, no percentile exists, and none is given.

The same seed gives the same answer, and all loads meet the same requests in the same order, so that answers for
different loads and servers differ by those and not by luck.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.planning.batching import Policy, Server, Trace, run, too_long
from quantkit.planning.traffic import Traffic
from quantkit.stats.clustered import Estimate

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
METRICS = ("ttft", "tpot", "latency")
RUNS = 8
REQUESTS = 1000
# Student's t at 97.5 %, seven degrees: scipy takes longer to import than the simulation does to run
_STUDENT = 2.3646
# a run is at most so many times as long, however long its queue takes to settle
_PATIENCE = 3
# requests that stay of a hundred that come; from here on a queue is said to grow
_DRIFT = 0.05
# the share of capacity from which on single rushes decide what the slowest wait for
_CROWDED = 0.85


@dataclass(frozen=True)
class Load:
    """A server under a load. Times in seconds.

    Args:
        rate: requests a second that come; `capacity`: that it can serve.
        stable: whether the queue stays finite. Where it does not, the rest is what the full server does.
        growth: requests a second by which the queue grows; 0 where it is stable.
        ttft: time to first token, from arrival on: `mean`, `p50`, `p90`, `p99`; empty where unstable.
        tpot: time per output token after the first, of requests with more than one.
        latency: from arrival to the last token.
        tokens_per_second: of output.
        batch: sequences in a decode step on average.
        in_system: requests that wait or run, on average over time; None where unstable.
        busy: share of the time in which anything runs.
        refused: share of the requests that need more than the whole cache; they are counted nowhere else.
        cut: share of the requests that were cut to the longest context.
        notes: what a reader must know, in words.
    """

    rate: float
    capacity: float
    stable: bool
    growth: float
    ttft: Mapping[str, Estimate]
    tpot: Mapping[str, Estimate]
    latency: Mapping[str, Estimate]
    tokens_per_second: float
    prompt_tokens_per_second: float
    batch: float
    in_system: float | None
    busy: float
    refused: float
    cut: float
    policy: Policy
    requests: int
    seed: int
    notes: Sequence[str] = ()

    @property
    def load(self) -> float:
        """Share of what the server could do that is asked of it; above 1 it is unstable."""
        return self.rate / self.capacity

    def as_dict(self) -> dict[str, Any]:
        """Return it for `--json`: percentiles as `{"value", "ci95"}`, absent ones as null."""
        fields = vars(self) | {"load": self.load, "notes": list(self.notes)}
        for metric in METRICS:
            estimates = getattr(self, metric).items()
            fields[metric] = {name: {"value": one.value, "ci95": one.ci95} for name, one in estimates} or None
        return fields


@dataclass(frozen=True)
class _Drawn:
    """Requests in order of arrival, one a second; those that never fit are left out."""

    arrivals: NDArray[Any]
    prompts: list[int]
    outputs: list[int]
    refused: float
    cut: float

    @property
    def notes(self) -> list[str]:
        """What happened to requests before anything was served."""
        notes = []
        if self.refused:
            notes.append(f"{self.refused:.1%} of the requests need more than the whole cache and are refused")
        if self.cut:
            notes.append(f"{self.cut:.1%} of the requests are cut to the longest context")
        return notes


def simulate(
    server: Server,
    traffic: Traffic,
    rate: float | None = None,
    *,
    limit: int | None = None,
    requests: int = REQUESTS,
    seed: int = 0,
    most: float | None = None,
) -> Load:
    """Put a load on a server.

    Args:
        rate: of arrivals, requests a second; default: the traffic's.
        limit: tokens of the longest context.
        requests: of each run at least; more where the batch is large or the load close to capacity.
        most: what `capacity` returned, if it was asked before.

    Raises:
        InputError: `load-invalid`; `request-too-long`, where no request fits the cache.
    """
    rate = traffic.rate if rate is None else rate
    if rate is None or not 0 < rate < math.inf:
        raise InputError("load-invalid", where="--rate", value=rate, rule="requests a second, above 0")
    if requests < 100:
        raise InputError("load-invalid", where="requests", value=requests, rule="100 a run at least")
    most = capacity(server, traffic, limit=limit, seed=seed) if most is None else most
    why, growth = [], rate - most
    if rate < most:
        least = max(requests, 5 * server.max_batch)
        # a queue with one server forgets how it began in 1 / (1 - sqrt(load))^2 services
        settles = 30 / (1 - math.sqrt(rate / most)) ** 2
        count = int(min(max(least, settles), _PATIENCE * least))
        drawn = [_draw(server, traffic, count, (seed, which), limit) for which in range(RUNS)]
        traces = [run((one.arrivals / rate).tolist(), one.prompts, one.outputs, server) for one in drawn]
        drift = float(np.mean([_drift(trace) for trace in traces]))
        if drift <= _DRIFT:
            return _stable(drawn, traces, server, rate, most, seed)
        why, growth = [f"below the capacity, but of 100 requests {100 * drift:.0f} more come than go"], drift * rate
    # more comes than goes: what the full server does, and no percentile
    full, trace = _full(server, traffic, limit, seed)
    reason = f"unstable: the queue grows by {growth:.3g} requests/s, so that no percentile exists"
    return Load(
        rate,
        most,
        stable=False,
        growth=growth,
        ttft={},
        tpot={},
        latency={},
        tokens_per_second=sum(trace.output) / trace.end,
        prompt_tokens_per_second=sum(trace.prompt) / trace.end,
        batch=trace.decoded / max(1, trace.steps),
        in_system=None,
        busy=1.0,
        refused=full.refused,
        cut=full.cut,
        policy=server.policy,
        requests=len(trace.arrival),
        seed=seed,
        notes=[reason, *why, *full.notes],
    )


def _stable(
    drawn: Sequence[_Drawn], traces: Sequence[Trace], server: Server, rate: float, most: float, seed: int
) -> Load:
    times = [_times(trace) for trace in traces]
    estimates = {name: _estimates([one[name] for one in times]) for name in METRICS}
    notes = drawn[0].notes
    if rate > _CROWDED * most:
        notes.append(
            f"at {rate / most:.0%} of the capacity single rushes decide: longer runs may show higher percentiles"
        )
    return Load(
        rate,
        most,
        stable=True,
        growth=0.0,
        **estimates,
        tokens_per_second=float(np.mean([_delivered(trace, trace.output) for trace in traces])),
        prompt_tokens_per_second=float(np.mean([_delivered(trace, trace.prompt) for trace in traces])),
        batch=sum(trace.decoded for trace in traces) / max(1, sum(trace.steps for trace in traces)),
        in_system=float(np.mean([_in_system(trace) for trace in traces])),
        busy=sum(trace.busy for trace in traces) / sum(trace.end - trace.arrival[0] for trace in traces),
        refused=float(np.mean([one.refused for one in drawn])),
        cut=float(np.mean([one.cut for one in drawn])),
        policy=server.policy,
        requests=sum(one["ttft"].size for one in times),
        seed=seed,
        notes=notes,
    )


def capacity(server: Server, traffic: Traffic, *, limit: int | None = None, seed: int = 0) -> float:
    """Count the requests a second that a server sustains: those of a run in which all are there at the start.

    Refused ones count among them: they cost nothing. It is a little less than the limit, since the batch fills at the
    run's beginning and empties at its end.

    Raises:
        InputError: `request-too-long`, where no request fits the cache.
    """
    drawn, trace = _full(server, traffic, limit, seed)
    return len(trace.arrival) / (1 - drawn.refused) / trace.end


def _full(server: Server, traffic: Traffic, limit: int | None, seed: int) -> tuple[_Drawn, Trace]:
    """Run requests that are all there at the start."""
    drawn = _draw(server, traffic, max(4 * REQUESTS, 20 * server.max_batch), (seed, 0), limit)
    return drawn, run([0.0] * len(drawn.prompts), drawn.prompts, drawn.outputs, server)


def _draw(server: Server, traffic: Traffic, count: int, seed: tuple[int, int], limit: int | None) -> _Drawn:
    """Draw the requests of one run; the first of them are the same for every rate and server."""
    arriving, long = (np.random.default_rng([*seed, which]) for which in (0, 1))
    arrivals = np.cumsum(arriving.exponential(1.0, count))
    prompts, outputs, cut = traffic.draw(count, long, limit)
    need = prompts + outputs
    fits = need <= server.cache_tokens
    if not fits.any():
        raise too_long(int(need.min()), server.cache_tokens)
    return _Drawn(arrivals[fits], prompts[fits].tolist(), outputs[fits].tolist(), 1 - float(fits.mean()), cut / count)


def _measured(trace: Trace) -> slice:
    """Without those that meet an empty server, and those after whom nobody comes."""
    count = len(trace.arrival)
    return slice(count // 5, count - count // 10)


def _times(trace: Trace) -> dict[str, NDArray[Any]]:
    """Seconds of each measured request by metric; `tpot` of those with more than one token."""
    which = _measured(trace)
    arrival, first, finish = (np.asarray(times)[which] for times in (trace.arrival, trace.first, trace.finish))
    after = np.asarray(trace.output)[which] - 1
    several = after > 0
    return {"ttft": first - arrival, "tpot": (finish - first)[several] / after[several], "latency": finish - arrival}


def _estimates(runs: Sequence[NDArray[Any]]) -> dict[str, Estimate]:
    """Mean and percentiles over all runs, each with its interval; empty where a run measured nothing."""
    if not all(times.size for times in runs):
        return {}
    every = np.concatenate(runs)
    quantiles = list(QUANTILES.values())
    values, *own = (np.array([times.mean(), *np.quantile(times, quantiles)]) for times in (every, *runs))
    errors = np.sqrt(np.sum(np.log(np.array(own) / values) ** 2, axis=0) / (len(runs) - 1) / len(runs))
    return {
        name: Estimate(
            value=float(value),
            standard_error=float(value * error),
            ci95=(float(value * np.exp(-_STUDENT * error)), float(value * np.exp(_STUDENT * error))),
            clusters=len(runs),
            n=every.size,
        )
        for name, value, error in zip(("mean", *QUANTILES), values, errors, strict=True)
    }


def _window(trace: Trace) -> tuple[float, float, NDArray[Any]]:
    """From the first measured arrival to the last, and which requests are done in between."""
    arrivals, finish = trace.arrival[_measured(trace)], np.asarray(trace.finish)
    return arrivals[0], arrivals[-1], (finish > arrivals[0]) & (finish <= arrivals[-1])


def _delivered(trace: Trace, tokens: Sequence[int]) -> float:
    """Tokens a second of the requests that are done in the window."""
    start, end, done = _window(trace)
    return float(np.asarray(tokens)[done].sum() / (end - start))


def _in_system(trace: Trace) -> float:
    """Requests that wait or run, averaged over the window."""
    start, end, _ = _window(trace)
    there = np.minimum(np.asarray(trace.finish), end) - np.maximum(np.asarray(trace.arrival), start)
    return float(np.maximum(there, 0).sum() / (end - start))


def _drift(trace: Trace) -> float:
    """By how many requests more are there at the end of the window, for each that came in it."""
    return 1 - int(_window(trace)[2].sum()) / (len(trace.arrival[_measured(trace)]) - 1)
