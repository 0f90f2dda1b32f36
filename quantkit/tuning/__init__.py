"""Mixed precision within a budget: measured harm per unit, an exact knapsack, a Pareto front, a recipe.

    candidates.py   which weight schemes a unit may have, and what each costs in bits and bytes
    harm.py         what each does to the model's output, measured unit by unit
    budget.py       what the user allows
    front.py        the best choice of one candidate a unit (scipy's HiGHS), for a sweep of budgets, and how well the
                    sum of harms predicts the whole
    answer.py       a choice as a recipe that people can read, and all that is left behind
    search.py       the order of these things

Importing this package is cheap: torch and scipy are imported where they are used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantkit.tuning.budget import Budget
    from quantkit.tuning.search import Tuned, TuneQuestion, asked, tune

__all__ = ["Budget", "TuneQuestion", "Tuned", "asked", "tune"]

_HOMES = {"Budget": "budget"}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(f"quantkit.tuning.{_HOMES.get(name, 'search')}"), name)
    raise AttributeError(f"module 'quantkit.tuning' has no attribute {name!r}")
