"""Scores of a task's items for one side, and the rows of two sides."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantkit.errors import InputError
from quantkit.measurement.accuracy.labelled import About, Drawn, difference_interval, share_interval
from quantkit.measurement.rows import Baseline, Interval, Row
from quantkit.measurement.tasks.defined import OpenTask, quiet
from quantkit.stats.clustered import clustered_mean, ratio_interval
from quantkit.stats.shares import for_loss, mcnemar

Array = NDArray[Any]
SCORE, DEPARTS = "task.score", "task.departs"
# loss that a task is to show; tokens after an open prompt
POINT, TOKENS = 0.01, 64
# right answers of a side below which the interval of recovery is that of the difference
FEW = 10


@dataclass(frozen=True, eq=False)
class Score:
    """Values of one score for n items, in their order.

    Args:
        metric: name in lm-eval: `acc`, `acc_norm`, `exact_match,strict-match`.
        values: `[n]`.
        higher: whether more is better.
    """

    metric: str
    values: Array
    higher: bool

    def first(self, count: int) -> Score:
        """Take the first items."""
        return Score(self.metric, self.values[:count], self.higher)


def build(tasks: Sequence[OpenTask], lm: Any, limit: int | None, chat: bool) -> None:
    """Write the requests of tasks. Raises InputError `task-too-long`, `task-unsupported`."""
    for one in tasks:
        if one.task is None:
            lm.demand_room(one.name, one.prompts[:limit], chat, TOKENS)
            continue
        with quiet():
            one.task.build_all_requests(
                limit=limit,
                rank=0,
                world_size=1,
                apply_chat_template=chat,
                chat_template=lm.apply_chat_template if chat else None,
                tokenizer_name=lm.tokenizer_name if chat else "",
            )
        lm.demand_fits(one.name, one.task.instances)


def answered(tasks: Sequence[OpenTask], lm: Any) -> dict[str, list[Score]]:
    """Let a side answer all requests of tasks, and score them: task -> its scores that are means over items."""
    requests: dict[str, list[Any]] = defaultdict(list)
    for one in tasks:
        for instance in one.task.instances if one.task is not None else ():
            instance.resps, instance.filtered_resps = [], {}
            requests[instance.request_type] += [instance] * instance.repeats
    for kind, asked in requests.items():
        for instance, answer in zip(asked, getattr(lm, kind)(asked), strict=True):
            instance.resps.append(answer)
    return {one.name: _scores(one.task) for one in tasks if one.task is not None}


def _scores(task: Any) -> list[Score]:
    with quiet():
        task.apply_filters()
        by_item = defaultdict(list)
        for instance in task.instances:
            by_item[instance.doc_id].append(instance)
        values: dict[str, list[float]] = defaultdict(list)
        means = {name for name, how in task.aggregation().items() if getattr(how, "__name__", "") == "mean"}
        higher = task.higher_is_better()
        for chosen in task.instances[0].filtered_resps:
            for instances in by_item.values():
                instances.sort(key=lambda one: one.idx)
                answers = [one.filtered_resps[chosen] for one in instances]
                for name, value in task.process_results(instances[0].doc, answers).items():
                    if name in means:
                        values[name if chosen == "none" else f"{name},{chosen}"].append(float(value))
    return [Score(name, np.array(own), bool(higher[name.split(",")[0]])) for name, own in values.items()]


def departures(before: Sequence[Sequence[int]], after: Sequence[Sequence[int]]) -> list[int | None]:
    """Return the number of tokens before two texts differ, for each pair; None if they never do."""
    places: list[int | None] = []
    for one, other in zip(before, after, strict=True):
        first = next((n for n, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), min(len(one), len(other)))
        places.append(None if list(one) == list(other) else first)
    return places


def departed(places: Sequence[int | None], about: About, settings: Mapping[str, Any]) -> Row:
    """Return `task.departs`: the median number of tokens before texts differ; `shape.same` counts those that do not."""
    value = float(np.median([TOKENS if place is None else place for place in places]))
    shape = {"same": sum(place is None for place in places), "tokens": TOKENS}
    told: dict[str, Any] = {"shape": shape, "settings": settings, "n": len(places), "stat": "median"}
    return about.row(DEPARTS, value, **told)


def rows(
    before: Score,
    after: Score,
    about: About,
    settings: Mapping[str, Any],
    flags: Sequence[str],
    clusters: Array | None = None,
) -> Row:
    """Return the row of a score: recovery in `baseline.ratio`, flips in `shape`, McNemar's test in `baseline`.

    Items with the same label in `clusters` [n] were drawn together.
    """
    one, other = before.values, after.values
    if one.shape != other.shape or not one.size:
        raise InputError("items-differ", about.data.set, f"{one.size} and {other.size} items", "both answer the same")
    whole = np.isin(np.concatenate([one, other]), (0.0, 1.0)).all()
    base, value, drawn = float(one.mean()), float(other.mean()), Drawn(one.size, "item", clusters)
    shape: dict[str, int] = {}
    test: dict[str, Any] = {}
    ci95: Interval | None
    if whole:
        right, was = other > 0, one > 0
        flips = mcnemar(was, right, clusters)
        shape = {"lost": flips.only_first, "gained": flips.only_second}
        shape["for_a_point"] = for_loss(POINT, (flips.only_first + flips.only_second) / one.size)
        test = {
            "difference": value - base,
            "difference_ci95": difference_interval(right, was, clusters),
            "p_value": flips.p,
        }
        ci95 = share_interval(right, clusters)
    else:
        ci95 = clustered_mean(other, drawn.labels).ci95
        test = {"difference": value - base, "difference_ci95": clustered_mean(other - one, drawn.labels).ci95}
    better = recovery(one, other, clusters) if after.higher else recovery(other, one, clusters)
    against = Baseline(subject=about.baseline, value=base, **better, **test)
    return about.row(
        SCORE,
        value,
        drawn,
        against=against,
        ci95=ci95,
        shape=shape or None,
        better="higher" if after.higher else "lower",
        settings={"metric": after.metric, **settings},
        flags=list(flags),
    )


def recovery(before: Array, after: Array, clusters: Array | None = None) -> dict[str, Any]:
    """Return the ratio of two means over the same items [n], and its interval; nothing where the original has none.

    Without a flip a bootstrap has no width: the interval is then that of the difference, over the original's score.
    """
    base, labels = float(before.mean()), np.arange(before.size) if clusters is None else clusters
    if base <= 0 or np.unique(labels).size < 2:
        return {}
    ratio = float(after.mean()) / base
    if (before == after).all():
        reach = (difference_interval(after > 0, before > 0, clusters) or (-1.0, 1.0))[1] / base
        return {"ratio": ratio, "ratio_ci95": (ratio - reach, ratio + reach)}
    if min(before.sum(), after.sum()) < FEW:  # a resample may have none
        ends = clustered_mean(after - before, labels).ci95 or (-base, base)
        low, high = (max(0.0, 1 + end / base) for end in ends)
    else:
        low, high = ratio_interval(after, before, clusters)
    return {"ratio": ratio, "ratio_ci95": (min(low, ratio), max(high, ratio))}
