"""Waiting times under a load of R requests a second: a queueing simulation with continuous batching.

    arrivals      Poisson: the gaps are exponential with mean 1/R
    service       by `batching.run`, which lists what is not simulated
    percentiles   over all measured requests of RUNS independent runs. A run's first fifth is left out (it starts
                  empty) and its last tenth (no request follows it).
    interval      of a percentile: Student's t over the logarithms of the runs' own percentiles, about that of all runs
                  together (sectioning: Asmussen and Glynn, Stochastic Simulation, 2007, III.5). For M/M/1 it covers p50
                  and p90 as often as stated, and p99, which depends on a few bursts, a little less often. It is the
                  simulation's noise alone and excludes errors of the step times.
    capacity      output rate if all requests are present at the start: more cannot be sustained (the saturation rule:
                  Baccelli and Foss, Journal of Applied Probability 32, 1995). Above it the queue grows as long as the
                  load lasts, and no percentile exists.

The same seed gives the same answer, and all loads get the same requests in the same order, so that differences between
loads and servers are not due to chance.
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
# limit of the extension of a run whose queue settles slowly
_PATIENCE = 3
# share of arriving requests that stay; above it the queue counts as growing
_DRIFT = 0.05
# runs of a visit, which is short
_VISITS = 32
# share of capacity from which on single bursts determine the slowest waits
_CROWDED = 0.85


@dataclass(frozen=True)
class Load:
    """A server under a load. Times in seconds.

    Args:
        rate: arriving requests a second.
        capacity: requests a second that it can serve.
        stable: True if the queue stays finite. If not, the other figures are those of the full server.
        growth: requests a second by which the queue grows; 0 if it is stable.
        ttft: time to first token, from arrival: `mean`, `p50`, `p90`, `p99`; empty if unstable.
        tpot: time per output token after the first, for requests with more than one.
        latency: time from arrival to the last token.
        tokens_per_second: output tokens a second.
        prompt_tokens_per_second: prompt tokens a second.
        batch: mean number of sequences in a decode step.
        in_system: mean number of waiting and running requests; None if unstable.
        busy: share of the time with any work.
        refused: share of the requests that exceed the whole cache; no other figure counts them.
        cut: share of the requests that were cut to the longest context.
        policy: order of prefill and decoding.
        requests: number of measured requests.
        seed: seed of the requests.
        notes: remarks for the reader.
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
        """Rate divided by capacity; above 1 it is unstable."""
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
        """Remarks on refused and cut requests."""
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
    """Simulate a server under a load.

    Args:
        rate: arriving requests a second; by default the traffic's.
        limit: tokens of the longest context.
        requests: fewest requests of each run; more for a large batch or a load close to capacity.
        most: result of an earlier call of `capacity`.

    Raises:
        InputError: `load-invalid`; `request-too-long` if no request fits the cache.
    """
    rate = traffic.rate if rate is None else rate
    if rate is None or not 0 < rate < math.inf:
        raise InputError("load-invalid", where="--rate", value=rate, rule="requests a second, above 0")
    if requests < 100:
        raise InputError("load-invalid", where="requests", value=requests, rule="at least 100 per run")
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
        why, growth = [f"below the capacity, but {100 * drift:.0f} of 100 arriving requests stay"], drift * rate
    # unstable: figures of the full server, without percentiles
    full, trace = _full(server, traffic, limit, seed)
    reason = f"unstable: the queue grows by {growth:.3g} requests/s, so no percentile exists"
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
    times = [_times(trace, _measured(trace)) for trace in traces]
    estimates = {name: _estimates([one[name] for one in times]) for name in METRICS}
    notes = drawn[0].notes
    if rate > _CROWDED * most:
        notes.append(
            f"at {rate / most:.0%} of the capacity single bursts matter: longer runs may show higher percentiles"
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
    """Return the requests a second that a server sustains, from a run with all requests present at the start.

    Refused requests count, since they cost nothing. The result is slightly below the limit, since the batch fills at
    the
    beginning and empties at the end.

    Raises:
        InputError: `request-too-long` if no request fits the cache.
    """
    drawn, trace = _full(server, traffic, limit, seed)
    return len(trace.arrival) / (1 - drawn.refused) / trace.end


def visit(
    server: Server, traffic: Traffic, rate: float, requests: int, *, limit: int | None = None, seed: int = 0
) -> dict[str, float]:
    """Simulate a visit of vLLM's generator: requests to an empty server, the last after requests / rate seconds.

    Returns:
        Medians of 32 runs: `requests` and `tokens` a second until the last is done, and the median request's times.
    """
    rows = []
    for which in range(_VISITS):
        drawn = _draw(server, traffic, requests, (seed, which), limit)
        arrivals = drawn.arrivals * (requests / rate / drawn.arrivals[-1])
        trace = run(arrivals.tolist(), drawn.prompts, drawn.outputs, server)
        waits = {name: float(np.median(times)) for name, times in _times(trace, slice(None)).items() if times.size}
        rows.append({"requests": len(trace.finish) / trace.end, "tokens": sum(trace.output) / trace.end, **waits})
    return {name: float(np.median([row[name] for row in rows])) for name in rows[0]}


def _full(server: Server, traffic: Traffic, limit: int | None, seed: int) -> tuple[_Drawn, Trace]:
    """Run requests with all of them present at the start."""
    drawn = _draw(server, traffic, max(4 * REQUESTS, 20 * server.max_batch), (seed, 0), limit)
    return drawn, run([0.0] * len(drawn.prompts), drawn.prompts, drawn.outputs, server)


def _draw(server: Server, traffic: Traffic, count: int, seed: tuple[int, int], limit: int | None) -> _Drawn:
    """Draw the requests of one run; they start with the same ones for every rate and server."""
    arriving, long = (np.random.default_rng([*seed, which]) for which in (0, 1))
    arrivals = np.cumsum(arriving.exponential(1.0, count))
    prompts, outputs, cut = traffic.draw(count, long, limit)
    need = prompts + outputs
    fits = need <= server.cache_tokens
    if not fits.any():
        raise too_long(int(need.min()), server.cache_tokens)
    return _Drawn(arrivals[fits], prompts[fits].tolist(), outputs[fits].tolist(), 1 - float(fits.mean()), cut / count)


def _measured(trace: Trace) -> slice:
    """Select the measured requests: without those at an empty server, and without the last ones."""
    count = len(trace.arrival)
    return slice(count // 5, count - count // 10)


def _times(trace: Trace, which: slice) -> dict[str, NDArray[Any]]:
    """Return the seconds of some requests by metric; `tpot` for those with more than one token."""
    arrival, first, finish = (np.asarray(times)[which] for times in (trace.arrival, trace.first, trace.finish))
    after = np.asarray(trace.output)[which] - 1
    several = after > 0
    return {"ttft": first - arrival, "tpot": (finish - first)[several] / after[several], "latency": finish - arrival}


def _estimates(runs: Sequence[NDArray[Any]]) -> dict[str, Estimate]:
    """Return mean and percentiles over all runs, with intervals; empty if a run measured nothing."""
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
    """Return the first and the last measured arrival, and the mask of requests finished in between."""
    arrivals, finish = trace.arrival[_measured(trace)], np.asarray(trace.finish)
    return arrivals[0], arrivals[-1], (finish > arrivals[0]) & (finish <= arrivals[-1])


def _delivered(trace: Trace, tokens: Sequence[int]) -> float:
    """Return tokens a second of the requests finished in the window."""
    start, end, done = _window(trace)
    return float(np.asarray(tokens)[done].sum() / (end - start))


def _in_system(trace: Trace) -> float:
    """Return the mean number of waiting and running requests in the window."""
    start, end, _ = _window(trace)
    there = np.minimum(np.asarray(trace.finish), end) - np.maximum(np.asarray(trace.arrival), start)
    return float(np.maximum(there, 0).sum() / (end - start))


def _drift(trace: Trace) -> float:
    """Return the growth of the queue over the window, per arriving request."""
    return 1 - int(_window(trace)[2].sum()) / (len(trace.arrival[_measured(trace)]) - 1)
