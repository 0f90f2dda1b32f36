"""Numbers with units, spread, device and versions: accuracy, size, latency; one row each.

`quantkit.measure` is a function of the Python API too. Once this package is imported the name means the package, so the
package can be called, and does what the function does.
"""

import sys
from types import ModuleType
from typing import Any


class _Called(ModuleType):
    """A package that can be called (Python reference, "Customizing module attribute access")."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """`quantkit.measure(...)`."""
        # by its parent, which imports this: the floors allow no import upward
        return sys.modules["quantkit"].measure_again(*arguments, **named)


sys.modules[__name__].__class__ = _Called
