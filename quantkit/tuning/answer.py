"""Write the files of a search.

tuned.yaml     the recipe, for `quantkit compile`
front.json     the result as data; the page is made from it alone
harm.jsonl     one line per unit and candidate
report.html    the page
bundle/        the compiled choice

In the recipe, the scheme of most weights is the default. Other layers get overrides, with as few globs as possible:
first a kind of layer in most blocks (`*.mlp.down_proj`), then parts of single blocks, then single layers. The last
override that matches a layer wins. Every override names a whole scheme, so none depends on another.

Measured harms are cached as they become known, one JSON line per unit and candidate. The file is named by the hash of
everything that a harm depends on, so a killed search continues and a second budget needs no new measurements.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from quantkit import content
from quantkit.bundle.disk import write_atomic
from quantkit.recipe import Recipe
from quantkit.scheme import WeightScheme
from quantkit.tuning import front
from quantkit.tuning.front import FrontPoint, Tables
from quantkit.tuning.harm import UnitHarm

if TYPE_CHECKING:
    from quantkit.calibrate.tokens.ids import TokenSet
    from quantkit.tuning.harm import UnitHarm


RECIPE, FRONT, HARMS, REPORT = "tuned.yaml", "front.json", "harm.jsonl", "report.html"


def front_of(
    facts: Mapping[str, Any],
    tables: Tables,
    chosen: FrontPoint,
    measured: Sequence[tuple[FrontPoint, Mapping[str, Any]]],
    uniform: Mapping[str, Any] | None,
    points: Sequence[FrontPoint],
) -> dict[str, Any]:
    """Return the content of `front.json`.

    Args:
        facts: model, base recipe, target, budget, candidates, texts, factor, decisions, notes.
        tables: harms and costs of all units.
        chosen: the choice.
        measured: all compiled and scored choices, the final one last.
        uniform: the best single scheme within the choice's bits, compiled and scored.
        points: the Pareto front.
    """
    factor = facts["factor"] or 1.0
    alone = {name: tables.uniform(name) for name in tables.names}
    return {
        "schema": 1,
        **facts,
        "chosen": {
            **chosen.as_dict(tables, factor),
            **(measured[-1][1] if measured else {"measured": None, "held_out": None}),
        },
        "checks": [{**scored, **point.as_dict(tables, factor)} for point, scored in measured],
        "uniform": uniform,
        "alone": [
            {"name": name, **front.point(tables, choice).as_dict(tables, factor)}
            for name, choice in alone.items()
            if choice is not None
        ],
        "front": [one.as_dict(tables, factor) for one in points],
        "timings": sorted(tables.seconds),
        "units": [
            {
                "block": unit.block,
                "members": list(unit.members),
                "weights": unit.weights,
                "harm": {
                    name: float(value)
                    for name, value in zip(tables.names, tables.harm[u], strict=True)
                    if value == value  # noqa: PLR0124 (not nan: the unit has this candidate)
                },
                "chosen": tables.names[int(chosen.choice[u])],
            }
            for u, unit in enumerate(tables.units)
        ],
    }


def write(folder: Path, recipe: Recipe, data: Mapping[str, Any], harms: Sequence[UnitHarm]) -> None:
    """Write everything but the bundle. Raises MissingDependency (plotly)."""
    from quantkit.report.kit import html
    from quantkit.report.tune import document

    write_atomic(folder / RECIPE, recipe_text(recipe, comment(data)).encode())
    Recipe.load(folder / RECIPE, allow_code=bool(recipe.code))  # the written recipe can be read again
    write_atomic(folder / HARMS, harms_text(harms).encode())
    write_atomic(folder / FRONT, (json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode())
    text = (folder / RECIPE).read_text(encoding="utf-8")
    write_atomic(folder / REPORT, html.page(document(data, text, code=bool(recipe.code))).encode())


def comment(data: Mapping[str, Any]) -> list[str]:
    """Write the comment above the recipe: the measurements."""
    chosen, seen, check = data["chosen"], data["texts"]["harm"], data["texts"]["check"]
    limits = ", ".join(f"{kind}={value:g}" for kind, value in data["budget"].items())
    lines = [
        f"{data['model']['name']} within {limits}, chosen by quantkit tune from {data['base']}.",
        f"{len(data['units'])} units, each measured alone on {seen['samples']} x {seen['tokens']} tokens of"
        f" {seen['set']} ({seen['split']}).",
        f"{chosen['bits']:.4f} bits a weight; sum of harms {chosen['predicted']:.4f} nats a token.",
    ]
    if chosen["measured"] is not None and check is not None:
        lines.append(
            f"Compiled: KL {chosen['measured']:.4f} on {check['items']} positions of {check['set']}"
            f" ({check['split']}){_held_out(chosen)}."
        )
    if data["uniform"]:
        alone = data["uniform"]
        lines.append(
            f"{alone['name']} throughout, {alone['bits']:.4f} bits: KL {alone['measured']:.4f}{_held_out(alone)}."
        )
    return lines


def _held_out(scored: Mapping[str, Any]) -> str:
    return f", {scored['held_out']:.4f} on its eval split" if scored["held_out"] is not None else ""


def text_of(text: TokenSet) -> dict[str, Any]:
    """Describe a text as `front.json` names it."""
    samples, tokens = text.ids.shape
    return {
        "set": text.name,
        "split": text.split,
        "sha256": text.sha256,
        "samples": samples,
        "tokens": tokens,
        "items": text.items,
        **({} if text.begins is None else {"begins": text.begins}),
    }


# layer's full name -> its scheme; None: left in high precision
Assignment = Mapping[str, WeightScheme | None]


def recipe_of(base: Recipe, assignment: Assignment, sizes: Mapping[str, int], *, name: str, summary: str) -> Recipe:
    """Return the base recipe with these schemes. Raises InputError: `recipe-invalid`.

    Args:
        base: passes, exports, gates, and overrides of layers that are not assigned here.
        assignment: every tuned layer.
        sizes: layer -> how many weights.
    """
    weights: Counter[WeightScheme] = Counter()
    for layer, scheme in assignment.items():
        if scheme is not None:
            weights[scheme] += sizes[layer]
    default = weights.most_common(1)[0][0] if weights else None
    if default is None:
        # all in high precision: a recipe without passes says just that
        data = {**base.as_dict(), "name": name, "summary": summary, "passes": [], "scheme": {}, "overrides": []}
        return Recipe.from_dict(data, name=name, allow_code=bool(base.code))
    overrides = [{"match": match, "weights": fields(scheme)} for match, scheme in globs(assignment, default, sizes)]
    data = base.as_dict()
    data |= {
        "name": name,
        "summary": summary,
        "scheme": {**data["scheme"], "weights": default.model_dump(mode="json", exclude_none=True)},
        # the user's own come last and win; none of them names a tuned layer
        "overrides": [*overrides, *data["overrides"]],
    }
    recipe = Recipe.from_dict(data, name=name, allow_code=bool(base.code))
    wrong = [layer for layer, scheme in assignment.items() if recipe.weights_for(layer) != scheme]
    assert not wrong, f"{wrong[0]} would get {recipe.weights_for(wrong[0])}"
    return recipe


def fields(scheme: WeightScheme | None) -> dict[str, Any] | None:
    """Return all fields of a scheme, for an override."""
    return None if scheme is None else scheme.model_dump(mode="json", exclude_none=True)


def globs(
    assignment: Assignment, default: WeightScheme, sizes: Mapping[str, int]
) -> list[tuple[str, WeightScheme | None]]:
    """Return the overrides as (glob, scheme), in order; a later one wins over an earlier one.

    >>> int8 = WeightScheme(format="int8")
    >>> int4 = WeightScheme(format="int4")
    >>> layers = {f"model.layers.{i}.mlp.up_proj": int8 if i else int4 for i in range(3)}
    >>> [match for match, _ in globs(layers, int4, dict.fromkeys(layers, 1))]
    ['*.mlp.up_proj', 'model.layers.0.mlp.up_proj']
    """
    kinds: dict[str, list[str]] = {}
    for layer in assignment:
        kinds.setdefault(_kind(layer), []).append(layer)
    matches: list[tuple[str, WeightScheme | None]] = []
    now: dict[str, WeightScheme | None] = dict.fromkeys(assignment, default)
    for kind, layers in kinds.items():
        weights: Counter[WeightScheme | None] = Counter()
        for layer in layers:
            weights[assignment[layer]] += 1
        most, count = weights.most_common(1)[0]
        glob = f"*.{kind}"
        only_these = all(_kind(layer) == kind for layer in assignment if fnmatchcase(layer, glob))
        if most != default and count > 1 and 2 * count > len(layers) and only_these:
            matches.append((glob, most))
            now |= dict.fromkeys(layers, most)
    left = [layer for layer, scheme in assignment.items() if now[layer] != scheme]
    while left:
        layer = left[0]
        scheme = assignment[layer]
        stem = layer.rpartition(".")[0]
        # a whole part of a block, if every layer that the glob matches has this scheme
        for glob in (f"{stem.rpartition('.')[0]}.*", f"{stem}.*", layer):
            matched = [other for other in assignment if fnmatchcase(other, glob)]
            saves = sum(other in left for other in matched) > 1
            if glob == layer or (saves and all(assignment[other] == scheme for other in matched)):
                break
        matches.append((glob, scheme))
        left = [other for other in left if other not in matched]
    return matches


def _kind(layer: str) -> str:
    """Return a layer's name within its block: `mlp.down_proj` of `model.layers.3.mlp.down_proj`."""
    parts = layer.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[numbers[0] + 1 :]) if numbers else layer


def recipe_text(recipe: Recipe, comment: Sequence[str]) -> str:
    """Write the recipe as YAML below a comment, with one line per key and per override."""
    data = recipe.as_dict()
    lines = [f"# {line}".rstrip() for line in comment]
    lines.append(f"schema: {data.pop('schema')}")
    data.pop("name")
    for key, value in data.items():
        if key == "overrides" and value:
            lines.append("overrides:")
            lines += [f"  - {_flow(entry)}" for entry in value]
        elif key in ("passes", "export"):
            lines.append(f"{key}:" if value else f"{key}: []")
            lines += [f"  - {name}: {_flow(settings)}" for entry in value for name, settings in entry.items()]
        elif key == "scheme":
            lines.append("scheme:")
            lines += [f"  {part}: {_flow(fields_)}" for part, fields_ in value.items()]
        elif key == "gates":
            set_ = {gate: limit for gate, limit in value.items() if limit is not None}
            lines += [f"gates: {_flow(set_)}"] if set_ else []
        else:
            lines.append(f"{key}: {_flow(value)}")
    return "\n".join(lines) + "\n"


def _flow(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, sort_keys=False, width=math.inf)
    return text.removesuffix("...\n").rstrip("\n")


def harms_place(key: Mapping[str, Any]) -> Path:
    """Return the cache file for the harms of `key`."""
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    return content.cache_dir() / "tune" / f"{name}.jsonl"


def read_harms(path: Path) -> list[UnitHarm]:
    """Read the cached harms; an empty list if the file is missing or damaged."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        return [UnitHarm(**{**row, "members": tuple(row["members"])}) for row in rows]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def keep_harms(path: Path, harms: Sequence[UnitHarm]) -> None:
    """Write harms to the cache. An unwritable cache is no error: the next search measures again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, harms_text(harms).encode())
    except OSError:
        return


def harms_text(harms: Sequence[UnitHarm]) -> str:
    """Return the harms as JSON lines."""
    return "".join(json.dumps(asdict(harm)) + "\n" for harm in harms)
