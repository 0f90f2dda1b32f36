"""Exporters, one destination a file: write it, load it again in other people's code, compare.

An exporter's constant `EXPORT` has `name`, `runtimes` (that read it), `fuses` (whether it gains from linears that are
stored as one), `Options`, and the functions `holds`, `accepts`, `write` and `check`; see `checkpoint.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantkit import plugins


def reader(name: str, options: Mapping[str, Any]) -> str:
    """The runtime that reads what an exporter writes: the library that its options name, else its first."""
    runtimes = plugins.load("export", name).runtimes
    asked = options.get("library")
    return str(asked if asked in runtimes else runtimes[0])
