"""Changes by `--set` to a recipe's mapping, before it is validated."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from quantkit.content import as_reference, is_path, parse_yaml
from quantkit.errors import InputError, did_you_mean


def demand_changes(changes: Any) -> Sequence[str]:
    """Check the argument `changes` of a Python call. Raises InputError `set-invalid`."""
    if isinstance(changes, Sequence) and not isinstance(changes, str) and all(isinstance(x, str) for x in changes):
        return changes
    rule, remedy = "a list of PATH=YAML", 'e.g. changes=["awq.grid=40"]'
    raise InputError("set-invalid", "changes", f"got {changes!r:.80}", rule, remedy)


def apply_change(data: dict[str, Any], change: str, keys: Collection[str]) -> dict[str, Any]:
    """Return a copy of a recipe's mapping with one `PATH=YAML` applied.

    PATH begins with one of the top-level `keys` (`scheme.weights.group=64`), or with the name of a pass or an export in
    it (`awq.grid=40`, `tensorrt.engine=false`). Raises InputError (`set-invalid`, `over-limit`).
    """
    path, equals, text = change.partition("=")
    if not equals or not path:
        raise InputError("set-invalid", where="--set", value=change, rule="PATH=YAML", remedy="e.g. awq.grid=40")
    try:
        value = parse_yaml(text, where=f"--set {path}")
    except InputError as error:
        if error.code == "over-limit":
            raise
        raise InputError("set-invalid", where=error.where, value=error.value, rule="the value is YAML") from None
    first, *inner = path.split(".")
    names: list[str] = []
    for key in ("passes", "export"):
        try:
            steps = steps_of(data.get(key) or [])
        except ValueError:
            continue  # the validation that follows reports it
        names += [_called(name) for name, _ in steps]
        if first in names and inner:
            changed = [(name, _with(old, inner, value) if _called(name) == first else old) for name, old in steps]
            return {**data, key: [{name: settings} for name, settings in changed]}
        if first in names:
            rule = f"one setting of {'a pass' if key == 'passes' else 'an export'} at a time"
            raise InputError("set-invalid", f"--set {path}", text, rule, f"{path}.SETTING=VALUE")
    if first in keys:
        return _with(data, [first, *inner], value)
    wrong = f"{first!r} is neither a key of the recipe nor one of its passes or exports"
    remedy = did_you_mean(first, [*keys, *names])
    raise InputError("set-invalid", where=f"--set {path}", value=wrong, remedy=remedy)


def _called(name: str) -> str:
    return Path(name).stem if is_path(name) else name


def _with(data: Any, keys: list[str], value: Any) -> dict[str, Any]:
    inner = data if isinstance(data, dict) else {}
    return {**inner, keys[0]: value if len(keys) == 1 else _with(inner.get(keys[0]), keys[1:], value)}


def steps_of(value: Any) -> list[tuple[str, dict[str, Any]]]:
    """List the passes or exports of a recipe: `[{awq: {grid: 20}}, "rtn"]` -> `[("awq", {"grid": 20}), ("rtn", {})]`.

    Raises ValueError if it is not such a list.
    """
    if not isinstance(value, list):
        raise ValueError("must be a list of {name: settings}")
    steps = []
    for entry in value:
        item = {entry: {}} if isinstance(entry, str | Path) else entry
        if not (isinstance(item, dict) and len(item) == 1):
            raise ValueError(f"each entry is one name with its settings, got {item!r}")
        name, settings = next(iter(item.items()))
        if not isinstance(settings, dict | None):
            raise ValueError(f"the settings of {name} are a mapping, got {settings!r}")
        steps.append((as_reference(name), settings or {}))
    return steps
