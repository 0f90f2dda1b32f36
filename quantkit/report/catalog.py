"""What there is, by kind and by name, for `list` and `show`; read without importing anything heavy."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from quantkit import content, plugins
from quantkit.errors import InputError, unknown_name
from quantkit.exporters import load_exporter
from quantkit.formats import load_format
from quantkit.model.sizes import configs
from quantkit.passes import load_pass
from quantkit.report.kit import words

_UNMEASURED = "not measured; `quantkit doctor --write` does it"


@dataclass(frozen=True)
class CatalogEntry:
    """One thing that goes by a name.

    Args:
        kind: recipe, pass, format, exporter, runtime, target, calibration set, model.
        name: its name.
        summary: one line.
        facts: (label, value) in the order to show them.
        source: the text that defines it, where that is short.
        data: the same for machines.
    """

    kind: str
    name: str
    summary: str
    facts: list[tuple[str, str]]
    source: str
    data: dict[str, Any]


def listing(kind: str | None = None) -> dict[str, dict[str, str]]:
    """Kind -> name -> summary; of one kind or of all.

    Raises:
        InputError: `unknown-kind`.
    """
    if kind is not None and kind not in _LISTS:
        raise unknown_name("kind", kind, [*_LISTS, "matrix"], where="quantkit list")
    return {name: _LISTS[name]() for name in ([kind] if kind else _LISTS)}


def find(name: str) -> list[CatalogEntry]:
    """Everything that goes by a shipped name: mostly one thing.

    Raises:
        InputError: `unknown-name` with a did-you-mean over all kinds.
    """
    found = [_DETAILS[kind](name) for kind, names in _NAMES.items() if name in names()]
    if not found:
        known = {known for names in _NAMES.values() for known in names()}
        error = unknown_name("name", name, known, where="quantkit show")
        if Path(name).is_dir():
            remedy = f"a folder is written ./{name}"
            raise InputError(error.code, where=error.where, value=error.value, remedy=remedy)
        raise error
    return found


def find_file(path: Path, *, allow_code: bool = False) -> CatalogEntry:
    """A user's own recipe, target or calibration set, by what its first keys are.

    Raises:
        InputError: `file-missing`, `file-unknown`, or what is wrong in it.
    """
    if not path.exists():
        raise InputError("file-missing", where=str(path), value="no such file or folder", remedy="check the path")
    if path.is_dir():
        if (path / "card.yaml").is_file():
            return _card_entry(path.name, path / "card.yaml")
        raise InputError(
            "file-unknown",
            where=str(path),
            value="a folder without manifest.json or card.yaml",
            rule="show takes a name, a bundle, a calibration set, a recipe or a target",
        )
    data = content.read_yaml(path)
    keys = set(data) if isinstance(data, dict) else set()
    if keys & {"arch", "memory", "compute"}:
        return _target_entry(str(path), path)
    if keys & {"sampling", "files", "licence"}:
        return _card_entry(path.parent.resolve().name, path)
    return _recipe_entry(path, path, allow_code=allow_code)


def _recipes() -> dict[str, str]:
    return {name: _summary(content.find("recipes", name)) for name in content.names("recipes")}


def _targets() -> dict[str, str]:
    return {name: _summary(content.find("export", name)) for name in content.names("export")}


def _calibrations() -> dict[str, str]:
    return {name: _summary(content.find("calibration", name)) for name in content.names("calibration")}


def _models() -> dict[str, str]:
    from quantkit.model.source.alias import ALIASES

    found = {}
    for name, alias in ALIASES.items():
        try:
            alias.source.find(name)
            state = "installed"
        except InputError as error:
            state = f"not installed: {error.remedy.split(' (')[0]}"
        about = ", ".join(filter(None, (alias.kind, alias.was, alias.licence)))
        found[name] = f"{about}; {state}"
    sizes = {name: f"{about}; sizes alone" for name, about in configs.shipped_summaries().items()}
    return {**found, **{name: about for name, about in sizes.items() if name not in found}}


_LISTS: dict[str, Callable[[], dict[str, str]]] = {
    "recipes": _recipes,
    "passes": plugins.PASSES.about,
    "formats": plugins.FORMATS.about,
    "exporters": plugins.EXPORTERS.about,
    "targets": _targets,
    "calibrations": _calibrations,
    "models": _models,
    "runtimes": plugins.RUNTIMES.about,
}
KINDS = tuple(_LISTS)


def _summary(path: Path) -> str:
    # a whole target takes a tenth of a second to parse, and this is one line of it
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("summary: ") and not line.startswith(("summary: >", "summary: |")):
            return str(yaml.safe_load(line)["summary"])
    data = content.read_yaml(path)
    return str(data.get("summary", "")) if isinstance(data, dict) else ""


def _model_names() -> list[str]:
    from quantkit.model.source.alias import ALIASES

    return sorted({*ALIASES, *configs.shipped_names()})


_NAMES: dict[str, Callable[[], list[str]]] = {
    "recipes": lambda: content.names("recipes"),
    "passes": plugins.PASSES.names,
    "formats": plugins.FORMATS.names,
    "exporters": plugins.EXPORTERS.names,
    "targets": lambda: content.names("export"),
    "calibrations": lambda: content.names("calibration"),
    "models": _model_names,
    "runtimes": plugins.RUNTIMES.names,
}


def _recipe(name: str) -> CatalogEntry:
    return _recipe_entry(name, content.find("recipes", name))


def _recipe_entry(reference: str | Path, path: Path, *, allow_code: bool = False) -> CatalogEntry:
    from quantkit.recipe import Recipe

    recipe = Recipe.load(reference, allow_code=allow_code)
    text = path.read_text(encoding="utf-8")
    return CatalogEntry("recipe", recipe.name, recipe.summary, [], text, recipe.as_dict())


def _target(name: str) -> CatalogEntry:
    return _target_entry(name, content.find("export", name))


def _target_entry(reference: str, path: Path) -> CatalogEntry:
    from quantkit.target import Target

    target = Target.load(reference)
    facts = [("kind", f"{target.kind}, {target.arch.vendor}{f' SM {target.arch.sm}' if target.arch.sm else ''}")]
    for place, figure in target.figures().items():
        label = place.replace("_", " ").removeprefix("memory.").removeprefix("compute.")
        value = _UNMEASURED
        if figure.number is not None:
            value = f"{words.rate(figure.number, figure.unit)}  ({figure.state}: {figure.source})"
        facts.append((label, value))
    facts += [("runtimes", f"{', '.join(target.runtimes)} (the first is the default)"), ("baseline", target.baseline)]
    facts.append(("batches", ", ".join(str(batch) for batch in target.batches)))
    for name, cells in target.formats.items():
        states = []
        for runtime, cell in cells.items():
            states.append(f"{runtime} {cell.state}{', symmetric only' if cell.symmetric_only else ''}")
        facts.append((name, "; ".join(states)))
    data = target.as_dict()
    data["figures"] = {
        place: {"value": figure.number, "unit": figure.unit, "state": figure.state, "source": figure.source}
        for place, figure in target.figures().items()
    }
    return CatalogEntry("target", target.name, target.summary, facts, "", data)


def _calibration(name: str) -> CatalogEntry:
    return _card_entry(name, content.find("calibration", name))


def _card_entry(name: str, path: Path) -> CatalogEntry:
    from quantkit.calibrate.sets.card import Card

    card = Card.load(path)
    facts = [("kind", card.kind), ("licence", card.licence), ("source", card.source.title)]
    facts += [(key, str(value)) for key in ("author", "url", "retrieved") if (value := getattr(card.source, key))]
    if card.source.cut:
        facts.append(("cut", card.source.cut))
    facts += [(file.split, f"{file.path}, {words.size(file.bytes)}, sha256 {file.sha256[:16]}…") for file in card.files]
    # how texts are joined and chopped says nothing of images
    whole = {"pack", "drop_remainder", "special_tokens"} if card.kind in ("images", "pairs") else set()
    facts.append(("sampling", _listed(card.sampling.model_dump(exclude=whole))))
    if card.preprocess:
        facts.append(("preprocess", _listed(card.preprocess.model_dump())))
    return CatalogEntry("calibration set", name, card.summary, facts, "", card.model_dump(mode="json", by_alias=True))


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{key} {_rounded(value)}" for key, value in values.items())


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return round(value, 4) if isinstance(value, float) else value


def _pass(name: str) -> CatalogEntry:
    found = load_pass(name)
    facts = [("paper", found.paper)] if found.paper else []
    facts += [("scope", found.scope), ("looks at", ", ".join(sorted(found.needs)) or "no data")]
    facts += [(label, ", ".join(sorted(value))) for label, value in _facts_of(found) if value]
    settings = {}
    for key, field in found.Settings.model_fields.items():
        settings[key] = field.default
        about = _described(found.Settings.__doc__ or "", key)
        facts.append((f"{name}.{key}", _setting(field.default, about)))
    data = {"paper": found.paper, "scope": found.scope, "needs": sorted(found.needs), "settings": settings}
    return CatalogEntry("pass", name, plugins.PASSES.about()[name], facts, "", data)


def _facts_of(found: Any) -> Iterator[tuple[str, frozenset[str]]]:
    yield "requires", found.requires
    yield "ensures", found.ensures


def _setting(default: Any, about: str) -> str:
    value = json.dumps(default, default=str).strip('"')
    return f"{value}  {about}".rstrip()


def _described(docstring: str, key: str) -> str:
    """What the `Args:` of a docstring say about a key: `key: text`, with the lines that go on deeper."""
    lines = docstring.splitlines()
    for number, line in enumerate(lines):
        if line.strip().startswith(f"{key}: "):
            depth = len(line) - len(line.lstrip())
            text = [line.strip().removeprefix(f"{key}: ")]
            for more in lines[number + 1 :]:
                if not more.strip() or len(more) - len(more.lstrip()) <= depth:
                    break
                text.append(more.strip())
            return " ".join(text)
    return ""


def _format(name: str) -> CatalogEntry:
    found = load_format(name)
    rules = found.rules
    sizes = f"{', '.join(str(size) for size in rules.groups)}" if rules.groups else ""
    facts = [
        ("bits", f"{found.bits:g}"),
        ("granularity", ", ".join(_sharing(each, group, sizes) for each, group in rules.granularities.items())),
        (
            "zero points",
            "without, or with" if len(rules.symmetric) > 1 else "never" if rules.symmetric[0] else "always",
        ),
        ("scale", ", ".join(rules.scales)),
    ]
    from quantkit.planning import matrix

    cells = [each for each in matrix.entries(form=name) if each.part == "weights"]
    for target in dict.fromkeys(each.target for each in cells):
        states = [f"{each.runtime} {each.state}" for each in cells if each.target == target]
        facts.append((target, "; ".join(states)))
    stated = {
        "bits": found.bits,
        "granularities": dict(rules.granularities),
        "groups": list(rules.groups),
        "symmetric": list(rules.symmetric),
        "scales": list(rules.scales),
    }
    return CatalogEntry("format", name, plugins.FORMATS.about()[name], facts, "", stated)


def _sharing(name: str, group: int | None, sizes: str) -> str:
    """`group of 64 (32, 64, 128)`: with its default, and what else there is."""
    of = f" of {group}" if group else ""
    return f"{name}{of} ({sizes})" if sizes and sizes != str(group) else f"{name}{of}"


def _exporter(name: str) -> CatalogEntry:
    found = load_exporter(name)
    options = {key: field.default for key, field in found.Options.model_fields.items()}
    facts = [("read by", ", ".join(found.runtimes))]
    for key, default in options.items():
        about = _described(found.Options.__doc__ or "", key)
        facts.append((key, _setting(default, about)))
    data = {"runtimes": list(found.runtimes), "options": options}
    return CatalogEntry("exporter", name, plugins.EXPORTERS.about()[name], facts, "", data)


def _runtime(name: str) -> CatalogEntry:
    return CatalogEntry("runtime", name, plugins.RUNTIMES.about()[name], [], "", {})


def _model(name: str) -> CatalogEntry:
    from quantkit.model.source.alias import ALIASES

    if name not in ALIASES:
        return _sizes(name)
    alias = ALIASES[name]
    facts = [("kind", alias.kind), ("licence", alias.licence), ("calibration", alias.calibration)]
    if alias.preprocess:
        facts.append(("preprocess", _listed(alias.preprocess.model_dump())))
    if alias.was:
        facts.append(("was", alias.was))
    if alias.note:
        facts.append(("note", alias.note))
    if alias.source.install:
        facts += [("file", str(alias.source)), ("install", alias.source.install)]
    return CatalogEntry("model", name, _models()[name], facts, "", dict(facts))


def _sizes(name: str) -> CatalogEntry:
    """A model of which only the config ships."""
    given, model = configs.shipped(name), configs.read(name)
    facts = [("kind", model.kind), ("parameters", f"{model.parameters:,}")]
    if model.active_parameters != model.parameters:
        facts.append(("active", f"{model.active_parameters:,} of them for each token"))
    facts += [("published", f"{given.published.parameters:,}: {given.published.source}"), ("source", given.source)]
    return CatalogEntry("model", name, _models()[name], facts, "", given.model_dump(mode="json", by_alias=True))


_DETAILS: dict[str, Callable[[str], CatalogEntry]] = {
    "recipes": _recipe,
    "passes": _pass,
    "formats": _format,
    "exporters": _exporter,
    "targets": _target,
    "calibrations": _calibration,
    "models": _model,
    "runtimes": _runtime,
}
