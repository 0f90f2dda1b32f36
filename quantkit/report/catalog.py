"""Catalog of recipes, formats, targets and more, for `quantkit list` and `show`; importing it loads nothing heavy."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from quantkit import content, plugins
from quantkit.errors import InputError, absent, unknown_name
from quantkit.exporters import load_exporter
from quantkit.formats import load_format
from quantkit.model.sizes import configs
from quantkit.passes import load_pass
from quantkit.report.kit import words

_UNMEASURED = "not measured; `quantkit doctor --write` does it"
Fact = tuple[str, str]


@dataclass(frozen=True)
class CatalogEntry:
    """Description of one name in the catalog.

    Args:
        kind: recipe, pass, format, exporter, runtime, target, calibration set or model.
        summary: one line.
        facts: (label, value) pairs in display order.
        source: text of the file that defines the entry, if it is short; else empty.
        data: the same facts for `--json`.
    """

    kind: str
    name: str
    summary: str
    facts: list[Fact]
    source: str
    data: dict[str, Any]


def listing(kind: str | None = None) -> dict[str, dict[str, str]]:
    """List the names of one kind, or of all: kind -> name -> summary.

    Raises:
        InputError: `unknown-kind`.
    """
    if kind is not None and kind not in _KINDS:
        raise unknown_name("kind", kind, [*_KINDS, "matrix"], where="quantkit list")
    return {name: _KINDS[name].about() for name in ([kind] if kind else _KINDS)}


def find(name: str) -> list[CatalogEntry]:
    """Find the entries with a name: one, unless two kinds share the name.

    Raises:
        InputError: `unknown-name`, with the closest name of any kind.
    """
    if entries := [kind.entry(name) for kind in _KINDS.values() if name in kind.names()]:
        return entries
    known = {other for kind in _KINDS.values() for other in kind.names()}
    error = unknown_name("name", name, known, where="quantkit show")
    if Path(name).is_dir():
        raise InputError(error.code, where=error.where, value=error.value, remedy=f"a folder is written ./{name}")
    raise error


def find_file(path: Path, *, allow_code: bool = False) -> CatalogEntry:
    """Describe a recipe, target or calibration set in the user's own file; its top-level keys tell which one it is.

    Raises:
        InputError: `file-missing`, `file-unknown`, or the error of an invalid file.
    """
    if not path.exists():
        raise absent(path)
    if path.is_dir():
        if (path / "card.yaml").is_file():
            return _card(path.name, path / "card.yaml")
        value = "a folder without manifest.json or card.yaml"
        rule = "show takes a name, a bundle, a calibration set, a recipe or a target"
        remedy = f"sizes of a model: quantkit plan {content.near(path)}" if (path / "config.json").is_file() else ""
        raise InputError("file-unknown", where=str(path), value=value, rule=rule, remedy=remedy)
    data = content.read_yaml(path)
    keys = set(data) if isinstance(data, dict) else set()
    if keys & {"arch", "memory", "compute"}:
        return _target(str(path))
    if keys & {"sampling", "files", "licence"}:
        return _card(path.parent.resolve().name, path)
    return _recipe(path, path, allow_code=allow_code)


def _summary(path: Path) -> str:
    # parsing a whole target takes 0.1 s; the summary is one line of it
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("summary: ") and not line.startswith(("summary: >", "summary: |")):
            return str(yaml.safe_load(line)["summary"])
    data = content.read_yaml(path)
    return str(data.get("summary", "")) if isinstance(data, dict) else ""


def _models() -> dict[str, str]:
    from quantkit.model.source.alias import ALIASES

    about = {name: f"{text}; sizes alone" for name, text in configs.shipped_summaries().items()}
    models = {}
    for name, alias in ALIASES.items():
        try:
            alias.source.find(name)
            state = "installed"
        except InputError as error:
            state = f"not installed: {error.remedy.split(' (')[0]}"
        models[name] = f"{words.joined(alias.kind, alias.was or '', alias.licence)}; {state}"
    return {**models, **{name: text for name, text in about.items() if name not in models}}


def _model_names() -> list[str]:
    from quantkit.model.source.alias import ALIASES

    return sorted({*ALIASES, *configs.shipped_names()})


def _recipe(reference: str | Path, path: Path | None = None, *, allow_code: bool = False) -> CatalogEntry:
    from quantkit.recipe import Recipe

    recipe = Recipe.load(reference, allow_code=allow_code)
    text = (path or content.find("recipes", str(reference))).read_text(encoding="utf-8")
    return CatalogEntry("recipe", recipe.name, recipe.summary, [], text, recipe.as_dict())


def _target(reference: str) -> CatalogEntry:
    from quantkit.target import Target

    target = Target.load(reference)
    facts = [("kind", f"{target.kind}, {target.arch.vendor}{f' SM {target.arch.sm}' if target.arch.sm else ''}")]
    for place, figure in target.figures().items():
        value = _UNMEASURED
        if figure.number is not None:
            value = f"{words.rate(figure.number, figure.unit)}  ({figure.state}: {figure.source})"
        facts.append((place.replace("_", " ").removeprefix("memory.").removeprefix("compute."), value))
    facts += [("runtimes", f"{', '.join(target.runtimes)} (the first is the default)"), ("baseline", target.baseline)]
    facts.append(("batches", ", ".join(map(str, target.batches))))
    for name, cells in target.formats.items():
        states = (f"{r} {cell.state}{', symmetric only' if cell.symmetric_only else ''}" for r, cell in cells.items())
        facts.append((name, "; ".join(states)))
    figures = {
        place: {"value": figure.number, "unit": figure.unit, "state": figure.state, "source": figure.source}
        for place, figure in target.figures().items()
    }
    return CatalogEntry("target", target.name, target.summary, facts, "", {**target.as_dict(), "figures": figures})


def _card(name: str, path: Path | None = None) -> CatalogEntry:
    from quantkit.calibrate.sets.card import Card

    card = Card.load(path or content.find("calibration", name))
    facts = [("kind", card.kind), ("licence", card.licence), ("source", card.source.title)]
    facts += [(key, str(value)) for key in ("author", "url", "retrieved") if (value := getattr(card.source, key))]
    facts += [("cut", card.source.cut)] if card.source.cut else []
    facts += [(file.split, f"{file.path}, {words.size(file.bytes)}, sha256 {file.sha256[:16]}…") for file in card.files]
    # how texts are joined and cut does not apply to images
    whole = {"pack", "drop_remainder", "special_tokens"} if card.kind in ("images", "pairs") else set()
    facts.append(("sampling", _listed(card.sampling.model_dump(exclude=whole))))
    facts += [("preprocess", _listed(card.preprocess.model_dump()))] if card.preprocess else []
    return CatalogEntry("calibration set", name, card.summary, facts, "", card.model_dump(mode="json", by_alias=True))


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{key} {_rounded(value)}" for key, value in values.items())


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return round(value, 4) if isinstance(value, float) else value


def _pass(name: str) -> CatalogEntry:
    loaded = load_pass(name)
    facts = [("paper", loaded.paper)] if loaded.paper else []
    facts += [("scope", loaded.scope), ("looks at", _sorted(loaded.needs) or "no data")]
    facts += [(what, _sorted(v)) for what, v in (("requires", loaded.requires), ("ensures", loaded.ensures)) if v]
    settings, described = _options(loaded.Settings)
    data = {"paper": loaded.paper, "scope": loaded.scope, "needs": sorted(loaded.needs), "settings": settings}
    facts += [(f"{name}.{key}", text) for key, text in described]
    return CatalogEntry("pass", name, plugins.PASSES.about()[name], facts, "", data)


def _sorted(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _options(schema: Any) -> tuple[dict[str, Any], list[Fact]]:
    defaults = {key: field.default for key, field in schema.model_fields.items()}
    shown = {key: json.dumps(default, default=str).strip('"') for key, default in defaults.items()}
    return defaults, [(key, f"{shown[key]}  {_described(schema.__doc__ or '', key)}".rstrip()) for key in defaults]


def _described(docstring: str, key: str) -> str:
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
    from quantkit.planning import matrix

    loaded = load_format(name)
    rules = loaded.rules
    sizes = ", ".join(map(str, rules.groups))
    shared = []
    for granularity, group in rules.granularities.items():
        # `group of 64 (32, 64, 128)`: the default size, then all sizes
        of = f" of {group}" if group else ""
        shared.append(f"{granularity}{of}{words.bracketed(sizes if sizes != str(group) else '')}")
    zero = "without, or with" if len(rules.symmetric) > 1 else "never" if rules.symmetric[0] else "always"
    facts = [("bits", f"{loaded.bits:g}"), ("granularity", ", ".join(shared)), ("zero points", zero)]
    facts.append(("scale", ", ".join(rules.scales)))
    cells = [cell for cell in matrix.entries(form=name) if cell.part == "weights"]
    for target, own in words.by(cells, lambda cell: cell.target).items():
        facts.append((target, "; ".join(f"{cell.runtime} {cell.state}" for cell in own)))
    data = {"bits": loaded.bits, "granularities": dict(rules.granularities), "groups": list(rules.groups)}
    data |= {"symmetric": list(rules.symmetric), "scales": list(rules.scales)}
    return CatalogEntry("format", name, plugins.FORMATS.about()[name], facts, "", data)


def _exporter(name: str) -> CatalogEntry:
    loaded = load_exporter(name)
    options, described = _options(loaded.Options)
    facts = [("read by", ", ".join(loaded.runtimes)), *described]
    data = {"runtimes": list(loaded.runtimes), "options": options}
    return CatalogEntry("exporter", name, plugins.EXPORTERS.about()[name], facts, "", data)


def _runtime(name: str) -> CatalogEntry:
    return CatalogEntry("runtime", name, plugins.RUNTIMES.about()[name], [], "", {})


def _model(name: str) -> CatalogEntry:
    from quantkit.model.source.alias import ALIASES

    if name not in ALIASES:
        return _sizes(name)
    alias = ALIASES[name]
    facts = [("kind", alias.kind), ("licence", alias.licence), ("calibration", alias.calibration)]
    facts += [("preprocess", _listed(alias.preprocess.model_dump()))] if alias.preprocess else []
    facts += [(label, value) for label, value in (("was", alias.was), ("note", alias.note)) if value]
    if alias.source.install:
        facts += [("file", str(alias.source)), ("install", alias.source.install)]
    return CatalogEntry("model", name, _models()[name], facts, "", dict(facts))


def _sizes(name: str) -> CatalogEntry:
    shipped, model = configs.shipped(name), configs.read(name)
    facts = [("kind", model.kind), ("parameters", f"{model.parameters:,}")]
    if model.active_parameters != model.parameters:
        facts.append(("active", f"{model.active_parameters:,} of them for each token"))
    facts.append(("published", f"{shipped.published.parameters:,}: {shipped.published.source}"))
    facts.append(("source", shipped.source))
    return CatalogEntry("model", name, _models()[name], facts, "", shipped.model_dump(mode="json", by_alias=True))


class _Kind(NamedTuple):
    """Summaries by name, the names, and a function that describes one name."""

    about: Callable[[], dict[str, str]]
    names: Callable[[], Iterable[str]]
    entry: Callable[[str], CatalogEntry]


def _files(folder: Literal["recipes", "calibration", "export"], entry: Callable[[str], CatalogEntry]) -> _Kind:
    def about() -> dict[str, str]:
        return {name: _summary(content.find(folder, name)) for name in content.names(folder)}

    return _Kind(about, partial(content.names, folder), entry)


_KINDS = {
    "recipes": _files("recipes", _recipe),
    "passes": _Kind(plugins.PASSES.about, plugins.PASSES.names, _pass),
    "formats": _Kind(plugins.FORMATS.about, plugins.FORMATS.names, _format),
    "exporters": _Kind(plugins.EXPORTERS.about, plugins.EXPORTERS.names, _exporter),
    "targets": _files("export", _target),
    "calibrations": _files("calibration", _card),
    "models": _Kind(_models, _model_names, _model),
    "runtimes": _Kind(plugins.RUNTIMES.about, plugins.RUNTIMES.names, _runtime),
}
KINDS = tuple(_KINDS)
