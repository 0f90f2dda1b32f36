"""Split a test's parameters: `make test` runs some, `make test-all` adds the rest; see docs/decisions/suite.md."""

from collections.abc import Iterable
from typing import Any

import pytest


def beside(kept: Iterable[Any], all_: Iterable[Any]) -> list[Any]:
    """Return all values; those that are not `kept` are marked `thorough`."""
    stay = list(kept)
    values = [value if isinstance(value, tuple) else (value,) for value in all_]
    own = [value if isinstance(value, tuple) else (value,) for value in stay]
    return [pytest.param(*value, marks=() if value in own else pytest.mark.thorough) for value in values]
