"""What the scripts of forecasts share: models made without being scored, this machine's target, rows and claims."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from harness.record import layout
from quantkit import content, machine
from quantkit.bundle import Build
from quantkit.content import read_yaml
from quantkit.pipeline import Request
from quantkit.pipeline.blocks.prepared import prepare
from quantkit.pipeline.blocks.subject import TransformerSubject
from quantkit.pipeline.compile import make
from quantkit.pipeline.progress import Progress, Stages
from quantkit.planning import efficiency
from quantkit.planning.efficiency import Sample
from quantkit.planning.forecast import TimedStep
from quantkit.target import Target

# targets: a share of the rows is that near, and within the printed interval
NEAR, WITHIN = 0.25, 0.8
COLUMNS = layout(
    "model | format | phase | batch:d | tokens:d | context:d | bound_ms=at best ms:.2f | forecast_ms=forecast ms:.2f | "
    "low_ms=from:.2f | high_ms=to:.2f | measured_ms=measured ms:.2f | error=off by:+.0%"
)


@contextmanager
def unscored(
    model: str, recipe: str, out: Path, changes: Sequence[str] = ()
) -> Iterator[tuple[Path, TransformerSubject]]:
    """Compile without measuring: the unfinished bundle's folder, and what was compiled."""
    subject = TransformerSubject(prepare(Request.of(model, recipe=recipe, out=out, changes=list(changes))))
    with Build.open(subject.prepared.out, subject.fingerprint(), resume=False) as build:
        subject.begin(build, Progress(), Stages("open"))
        make(subject)
        yield build.bundle, subject


def here(figures: Mapping[str, float]) -> Target:
    """This machine's target with measured ceilings."""
    known = {"memory.capacity": machine.memory_limit(), "memory.last_level_cache": machine.last_level_cache()}
    # `Target.load` would take what the doctor has measured
    target = Target.from_dict(read_yaml(content.find("export", "cpu-x86")), name="cpu-x86")
    isa = machine.isa_features()
    return target.resolve({"figures": known | dict(figures), "source": "this run", "isa": isa})


def figures(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The ceilings among some rows."""
    found = {}
    for row in rows:
        if row["name"] == "ceiling.read":
            found["memory.read_bandwidth"] = row["value"]
        if row["name"] == "ceiling.compute":
            found[f"compute.{row['settings']['compute_type']}"] = row["value"]
    return found


def ship(runtime: str, taught: Sequence[Sample]) -> None:
    """Replace what ships of a runtime."""
    others = [one for one in efficiency.shipped() if one.runtime != runtime]
    efficiency.SHIPPED.write_bytes(efficiency.dumped([*others, *taught]))


def learned(
    samples: Sequence[Sample], runtime: str, kinds: Sequence[str], device: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """What they say of a device: times as long as at the ceilings, and the interval of a step like theirs."""
    numbers: dict[str, Any] = {}
    where = device or machine.device()
    for what in kinds:
        known = efficiency.learn(samples, runtime=runtime, kind=where["kind"], what=what, device=where["id"], read=None)
        if known is not None:
            numbers |= {" ".join(term): value for term, value in known.terms.items()}
            numbers |= {f"interval {phase}": known.factor(phase) for phase in known.misses} | {"models": known.models}
    return numbers


def compared(forecast: TimedStep, seconds: float) -> dict[str, Any]:
    """A timed step beside its forecast."""
    step, (low, high) = forecast.bound.step, forecast.interval or (None, None)
    expected = forecast.forecast

    def ms(value: float | None) -> float | None:
        return None if value is None else 1e3 * value

    return (
        {"phase": step.phase, "batch": step.batch, "tokens": step.tokens, "context": step.context}
        | {"bound_ms": ms(forecast.least or 0.0), "forecast_ms": ms(expected), "low_ms": ms(low), "high_ms": ms(high)}
        | {"measured_ms": ms(seconds), "error": None if expected is None else expected / seconds - 1}
        | {"within": None if low is None or high is None else low <= seconds <= high, "because": forecast.because}
    )


def claims(rows: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """Whether the forecasts of each format are near, and within their intervals."""
    known = [row for row in rows if row["error"] is not None]
    held = {"every step has a forecast": len(known) == len(rows)}
    for form in dict.fromkeys(row["format"] for row in rows):
        off = [abs(row["error"]) for row in known if row["format"] == form]
        held[f"{form}: half of the rows within {NEAR:.0%}"] = bool(off) and median(off) <= NEAR
    inside = [row["within"] for row in known]
    held[f"at least {WITHIN:.0%} within their intervals"] = bool(inside) and sum(inside) >= WITHIN * len(inside)
    return held
