"""The formulas of `quantkit.measurement.accuracy.positions`, one position at a time, in float64."""

from typing import Any

import numpy as np


def log_softmax(row: Any) -> Any:
    row = np.asarray(row, dtype=np.float64)
    top = row.max()
    return row - top - np.log(np.exp(row - top).sum())


def score(ids: Any, original: Any, candidate: Any) -> dict[str, Any]:
    found: dict[str, list[Any]] = {"nll_original": [], "nll_candidate": [], "kl": []} | {
        "agree": [],
        "right_original": [],
        "right_candidate": [],
    }
    for position in range(len(ids) - 1):
        following = int(ids[position + 1])
        log_p, log_q = log_softmax(original[position]), log_softmax(candidate[position])
        possible = log_p > -np.inf
        kl = np.sum(np.exp(log_p[possible]) * (log_p[possible] - log_q[possible]))
        found["nll_original"].append(-log_p[following])
        found["nll_candidate"].append(-log_q[following])
        found["kl"].append(kl)
        found["agree"].append(log_p.argmax() == log_q.argmax())
        found["right_original"].append(log_p.argmax() == following)
        found["right_candidate"].append(log_q.argmax() == following)
    return {name: np.asarray(values) for name, values in found.items()}
