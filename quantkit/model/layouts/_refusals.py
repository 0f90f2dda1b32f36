"""What a layout says of weights that it cannot hold."""

from __future__ import annotations

from collections.abc import Mapping

from quantkit.errors import InputError
from quantkit.scheme import WeightScheme

DENSE = "export: checkpoint: {layout: dense}"


def unsupported(where: str, value: str, rule: str, remedy: str = DENSE) -> InputError:
    """`layout-unsupported` of one linear."""
    return InputError("layout-unsupported", where=where, value=value, rule=rule, remedy=remedy)


def check_format(layout: str, held: str, schemes: Mapping[str, WeightScheme], remedy: str = DENSE) -> None:
    """Of a layout that holds one format: refuse the first linear of another.

    Raises:
        InputError: `layout-unsupported`.
    """
    for linear, scheme in schemes.items():
        if scheme.format != held:
            raise unsupported(linear, f"{layout} of {scheme.format}", f"this layout holds {held}", remedy)
