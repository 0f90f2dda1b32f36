"""The shape of what `--json` prints, by command: keys and types, not values.

A shape is a type's name, a list of alternatives, `{"[]": shape}` of a list, `{"{}": {key: shape}}` of an object; a key
with a question mark is not always there, and `*` stands for keys that are data. Every envelope that any test of a run
makes is compared.
"""

import json
import re
from typing import Any

from golden import RECORDING, goldens, write

Shape = Any
# what a decision changed: of any shape
_ANYTHING = re.compile(r"\.(from|to)$")
# places whose keys are names of models, layers, formats, settings, ...
_BY_NAME = re.compile(
    r"\.(versions|packages|settings|options|figures|compute|shape|seconds)$"
    r"|^list\.\w+$|\.formats(\.\*)?$|\.(passes|export)\[\](\.\*)?$"
)


def shape_of(value: Any, place: str = "") -> Shape:
    """The shape of a value that JSON can hold."""
    if _ANYTHING.search(place):
        return "anything"
    if isinstance(value, dict):
        if _BY_NAME.search(place):
            inner = [shape_of(part, f"{place}.*") for part in value.values()]
            return {"{}": {"*?": merged(*inner)} if inner else {}}
        return {"{}": {key: shape_of(part, f"{place}.{key}") for key, part in value.items()}}
    if isinstance(value, list):
        inner = [shape_of(part, f"{place}[]") for part in value]
        return {"[]": merged(*inner) if inner else "nothing"}
    if isinstance(value, bool):
        return "truth"
    return {int: "number", float: "number", str: "text", type(None): "null"}[type(value)]


def merged(*shapes: Shape) -> Shape:
    """One shape that all of some fit."""
    plain: set[str] = set()
    lists, objects = [], []
    for shape in shapes:
        for option in shape if isinstance(shape, list) else [shape]:
            if isinstance(option, str):
                plain.add(option)
            elif "[]" in option:
                lists.append(option["[]"])
            else:
                objects.append(option["{}"])
    options: list[Shape] = sorted(plain - {"nothing"})
    if lists:
        options.append({"[]": merged(*lists)})
    if objects:
        options.append({"{}": _merged_keys(objects)})
    return "nothing" if not options else options[0] if len(options) == 1 else options


def _merged_keys(objects: list[dict[str, Shape]]) -> dict[str, Shape]:
    plain = [{key.removesuffix("?"): shape for key, shape in keys.items()} for keys in objects]
    always = {key for key in plain[0] if all(key in keys for keys in objects)}
    every = sorted(set().union(*plain))
    return {key if key in always else f"{key}?": merged(*(keys[key] for keys in plain if key in keys)) for key in every}


def parts_of(envelope: dict[str, Any]) -> dict[str, Shape]:
    """The shapes of an envelope, by where they are kept: what is in it is of its command, how it fails of all."""
    command = envelope["command"]
    parts = {"envelope": shape_of({**envelope, "result": None, "decisions": [], "error": None})}
    parts["error"] = shape_of(envelope["error"])
    if envelope["result"] is not None:
        planned = command == "compile" and "bundle" not in envelope["result"]
        parts[f"result of {command}{' --dry-run' * planned}"] = shape_of(envelope["result"], command)
    if envelope["decisions"]:
        parts["decisions"] = shape_of(envelope["decisions"])
    return parts


def differences(envelope: dict[str, Any], known: dict[str, Shape]) -> list[str]:
    """Places where an envelope has another shape than what is known of it."""
    wrong = []
    for name, shape in parts_of(envelope).items():
        if name not in known:
            wrong.append(f"{name}: no such answer is known")
        else:
            wrong += _unfit(shape, known[name], name)
    return wrong


def _unfit(shape: Shape, known: Shape, place: str) -> list[str]:
    options = known if isinstance(known, list) else [known]
    wrong = []
    for option in shape if isinstance(shape, list) else [shape]:
        if isinstance(option, str):
            wrong += [] if option == "nothing" or option in options else [f"{place}: {option} for {known}"]
            continue
        kind = "[]" if "[]" in option else "{}"
        same = [other[kind] for other in options if isinstance(other, dict) and kind in other]
        if not same:
            wrong.append(f"{place}: {'a list' if kind == '[]' else 'an object'} for {known}")
        elif kind == "[]":
            wrong += _unfit(option[kind], same[0], f"{place}[]")
        else:
            wrong += _unfit_keys(option[kind], same[0], place)
    return wrong


def _unfit_keys(keys: dict[str, Shape], known: dict[str, Shape], place: str) -> list[str]:
    plain = {key.removesuffix("?"): shape for key, shape in known.items()}
    wrong = [f"{place}.{key}: missing" for key in known if not key.endswith("?") and key not in keys]
    for key, shape in keys.items():
        name = key.removesuffix("?")
        if name not in plain:
            wrong.append(f"{place}.{name}: a new key")
        else:
            wrong += _unfit(shape, plain[name], f"{place}.{name}")
    return wrong


_seen: dict[str, Shape] = {}


def check(text: str) -> None:
    """Compares an envelope with what is known, or records it."""
    envelope = json.loads(text)
    if RECORDING:
        for name, shape in parts_of(envelope).items():
            _seen[name] = merged(shape, _seen[name]) if name in _seen else shape
        return
    wrong = differences(envelope, goldens()["shapes"])
    assert not wrong, f"--json of `quantkit {envelope['command']}` changed: {'; '.join(wrong[:5])}"


def keep() -> None:
    """Adds what was recorded to the file."""
    if not RECORDING:
        return
    known = goldens().get("shapes", {})
    write("shapes", {**known, **{name: merged(shape, known.get(name, shape)) for name, shape in _seen.items()}})
