"""Report of a search for mixed precision: harm against bits, and the harm of each layer group.

It is made from `front.json` and the recipe alone. The curve of the front is the predicted harm times the measured
factor; compiled and scored mixtures are points on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log10
from typing import Any

from quantkit.bundle import Decision
from quantkit.report.bundle.figures import decisions_table
from quantkit.report.kit import charts, tree, words
from quantkit.report.kit.charts import ORIGINAL, QUANTIZED, Curve, Figure, Mark, Plot
from quantkit.report.kit.tree import Code, Exhibit, FigureTile, On, Part, Remark, Section, Sheet, Styled

Data = Mapping[str, Any]

_HEAD = ("", "bits", "size", "KL expected", "KL measured", "units")
_CHOSEN = "chosen"
# a single scheme with at least this share of the mixture's bits counts as equally large
_NEAR = 0.97
# points of the front on a screen; left margin, with room for ticks such as 0.0001
_SHOWN, _LEFT = 8, 76
# colours of the bars: kinds of units in the order of a block
_SHADES = (QUANTIZED, "quantized-soft", ORIGINAL, "rest")


def document(data: Data, recipe: str = "", *, code: bool = False) -> tree.Document:
    """Build the report of a search.

    Args:
        data: content of `front.json`.
        recipe: text of the recipe.
        code: True if a pass of the recipe is in the user's own file, so that `--allow-code` is needed.
    """
    tone, answer, because = verdict(data)
    allowed, ref = " --allow-code" if code else "", data["model"]["ref"]
    # the model's name for a command; only the name of a user's own folder is known
    kind, _, name = ref.partition(":")
    model = {"alias": name, "path": f"./{name}"}.get(kind, ref)
    shown = _thinned(_lines(data))
    lines = [[Styled(cell, "strong" if line[0] == _CHOSEN else "") for cell in line[:-1]] for line in shown]
    decided = [[Decision.model_validate(decision)] for decision in data["decisions"]]
    front: list[Part] = [Sheet(_HEAD[:-1], lines, on=On.SCREEN)]
    front += [Remark(note, "note", On.PAGE) for note in data["notes"]]
    if not data["timings"]:
        front.append(Remark("No timings were given: speed took no part in the choice.", "caption", On.SCREEN))
    how = [
        Remark("This command compiles it, in the folder of this page.", on=On.PAGE),
        Code("the command", f"quantkit compile {model} --recipe ./tuned.yaml{allowed}", on=On.PAGE),
        Code("the recipe", recipe.rstrip("\n"), "yaml", folded=True, on=On.PAGE),
    ]
    budget = ", ".join(f"{limited}={limit:g}" for limited, limit in data["budget"].items())
    return tree.Document(
        f"{data['model']['name']} in mixed precision",
        [f"{ref}, tuned from {data['base']} for {data['target']} within {budget}"],
        [tree.Conclusion(answer, tone, because), tree.Tiles(_tiles(data))],
        [
            Section("The front", [*front, _pareto(data)], "front"),
            Section("Harm by depth", [_harm(data), _chosen(data)], "harm"),
            Section("The recipe", how, "recipe"),
            *([Section("Decisions", [decisions_table(decided)], "decisions", on=On.PAGE)] if decided else []),
        ],
        _facts(data),
        f"Made by quantkit {data['quantkit']} from front.json.",
    )


# --- the answer ------------------------------------------------------------------------------------------------------


def verdict(data: Data) -> tuple[str, str, list[str]]:
    """Return (tone, sentence, reasons): is the mixture better than one scheme for all?"""
    chosen, uniform = data["chosen"], data["uniform"]
    bits, size = words.figure(chosen["bits"], 4), words.size(chosen["bytes"])
    because = [f"{bits} bits a weight, {size} of weights: {_units(chosen)}."]
    if chosen["measured"] is None:
        because.append(f"The harms of its units add up to {words.short(chosen['predicted'])} nats a token.")
        return "open", "Not compiled yet: the KL is a prediction", because
    because.append(f"Its KL is {words.short(chosen['measured'])} nats a token{_held_out(chosen)}.")
    limit = data["budget"].get("kl")
    if limit is not None and chosen["measured"] > limit:
        because.append(f"That is above the limit of {limit:g}, after {words.plural(len(data['checks']), 'compile')}.")
        return "bad", "The limit on KL was not met", because
    if uniform is None:
        return "open", "The best mixture within the budget", because
    against = f"All units in {uniform['name']}, at {words.figure(uniform['bits'], 4)} bits, have"
    because.append(f"{against} {words.short(uniform['measured'])}{_held_out(uniform)}.")
    if chosen["measured"] >= uniform["measured"]:
        return "bad", f"A mixture is no better than {uniform['name']} throughout", because
    if uniform["bits"] < _NEAR * chosen["bits"]:
        because.append("It has fewer bits, so this is no comparison at equal size.")
        return "open", "The best mixture within the budget; no single scheme has as many bits", because
    less = words.whole(1 - chosen["measured"] / uniform["measured"])
    return "good", f"Mixed precision is better by {less} of the KL", because


def _units(chosen: Data) -> str:
    return ", ".join(f"{words.plural(count, 'unit')} in {name}" for name, count in chosen["units"].items())


def _held_out(scored: Data) -> str:
    held = scored.get("held_out")
    return f" ({words.short(held)} on held-out text)" if held is not None else ""


def _tiles(data: Data) -> list[FigureTile]:
    chosen = data["chosen"]
    size = FigureTile(words.short(chosen["bits"]), "bits a weight", f"{words.size(chosen['bytes'])} in all")
    predicted = words.short(chosen["predicted"])
    if chosen["measured"] is None:
        return [size, FigureTile(predicted, "sum of harms, nats", "predicted, not compiled")]
    held = chosen["held_out"]
    detail = f"{words.short(held)} on held-out text" if held is not None else "compiled and scored"
    return [
        size,
        FigureTile(words.short(chosen["measured"]), "KL, nats a token", detail),
        FigureTile(words.times(data["factor"] or 1.0), "measured over predicted", f"sum of harms {predicted}"),
    ]


# --- the front -------------------------------------------------------------------------------------------------------


def _lines(data: Data) -> list[list[str]]:
    def line(name: str, entry: Data, measured: float | None = None) -> tuple[float, list[str]]:
        units = ", ".join(f"{count} {candidate}" for candidate, count in entry["units"].items())
        bits, size = words.figure(entry["bits"], 4), words.size(entry["bytes"])
        known = [words.short(entry["expected"]), words.or_dash(measured, words.short)]
        return entry["bits"], [name, bits, size, *known, units]

    chosen, uniform = data["chosen"], data["uniform"]
    lines = [line("", entry) for entry in data["front"]]
    lines.append(line(_CHOSEN, chosen, chosen["measured"]))
    lines += [line(entry["name"], entry) for entry in data["alone"] if entry["predicted"] > 0]
    if uniform:
        sizes = [words.figure(uniform["bits"], 4), words.size(uniform["file_bytes"])]
        texts = [f"{uniform['name']}, compiled", *sizes, "–", words.short(uniform["measured"]), "all"]
        lines.append((uniform["bits"], texts))
    return [text for _, text in sorted(lines, key=lambda entry: entry[0])]


def _thinned(lines: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    unnamed = [i for i, line in enumerate(lines) if not line[0]]
    step = -(-len(unnamed) // _SHOWN) or 1
    kept = set(unnamed[step // 2 :: step])
    return [line for i, line in enumerate(lines) if line[0] or i in kept]


def _pareto(data: Data) -> Exhibit:
    chosen, uniform = data["chosen"], data["uniform"]
    factor = "expected" if data["factor"] else "predicted"
    drawn: list[Curve] = []

    def points(label: str, colour: str, known: Sequence[tuple[float, float, str]], basis: str) -> None:
        if known:
            x, y, names = zip(*known, strict=True)
            hover = [f"{name}, KL {words.short(harm)} {basis}" for name, harm in zip(names, y, strict=True)]
            drawn.append(Curve(label, colour, x, y, hover))

    front = [
        (e["bits"], e["expected"], f"{words.figure(e['bits'], 4)} bits") for e in data["front"] if e["expected"] > 0
    ]
    points("mixtures", QUANTIZED, front, factor)
    alone = [entry for entry in data["alone"] if entry["expected"] > 0]
    for entry in alone:
        points("", "muted", [(entry["bits"], entry["expected"], f"{entry['name']} throughout")], factor)
    keys = [(QUANTIZED, f"mixtures, {factor}"), ("muted", f"one scheme for all, {factor}")]
    if uniform:
        points("", ORIGINAL, [(uniform["bits"], uniform["measured"], f"{uniform['name']} throughout")], "measured")
        keys.append((ORIGINAL, "one scheme for all, compiled and scored"))
    if chosen["measured"] is not None:
        points("", "ink", [(chosen["bits"], chosen["measured"], "the choice")], "measured")
        keys.append(("ink", "the choice, compiled and scored"))
    across = charts.straight_axis("bits a weight", [x for curve in drawn for x in curve.x])
    up = charts.log_axis("KL, nats a token", charts.heights(drawn))
    figure = charts.lines(drawn, across, up, height=400, left=_LEFT, marks=[Mark(chosen["bits"], "chosen")])
    # names beside single points, which have no line end
    look = {"xref": "x", "yref": "y", "xshift": 8, "xanchor": "left", "yanchor": "bottom", "showarrow": False}
    look["font"] = {"size": 12.5, "color": "var(--muted)"}
    figure["layout"]["annotations"] += [
        {**look, "x": entry["bits"], "y": log10(entry["expected"]), "text": charts.plain(entry["name"])}
        for entry in alone
    ]
    sentences = ["Each point is the mixture with the least harm for its bits; the solver proves it."]
    if data["factor"]:
        sentences.append(
            f"The harms of the chosen units add up to {words.short(chosen['predicted'])}; the compiled model has a KL"
            f" of {words.short(chosen['measured'])}. The front includes this factor, {words.short(data['factor'])}."
        )
    captions = [f"Harm: KL with one unit quantized alone, over {_positions(data['texts']['harm'])}."]
    if data["anchor"]:
        captions.append(f"Measured in {data['anchor']}; other candidates are scaled by their error relative to it.")
    if data["texts"]["check"]:
        captions.append(f"Measured KL: over {_positions(data['texts']['check'])}.")
    if not data["timings"]:
        captions.append("No timings were given, so speed took no part in the choice.")
    panel = Plot("KL against bits", "KL divergence falls as bits a weight grow.", figure, wide=True)
    return Exhibit(sentences, [panel], captions, Sheet(_HEAD, _lines(data), remarks=1), keys=keys)


def _positions(text: Data) -> str:
    return f"{text['items']:,} positions of {text['set']} ({text['split']})"


# --- harm by depth ---------------------------------------------------------------------------------------------------


def _kind(unit: Data) -> str:
    """Name a unit without its block: `q_proj k_proj v_proj`."""
    return " ".join(str(member).rpartition(".")[2] for member in unit["members"])


def _grid(data: Data) -> tuple[list[str], list[int]]:
    return list(dict.fromkeys(map(_kind, data["units"]))), sorted({unit["block"] for unit in data["units"]})


def _harm(data: Data) -> Exhibit:
    units, (kinds, blocks) = data["units"], _grid(data)
    # of the candidates with a harm, the one most units are in
    harmful = [name for name in units[0]["harm"] if any(unit["harm"].get(name, 0) > 0 for unit in units)]
    name: str = max(harmful, key=lambda name: data["chosen"]["units"].get(name, 0))
    values = {kind: [0.0] * len(blocks) for kind in kinds}
    for unit in units:
        values[_kind(unit)][blocks.index(unit["block"])] += unit["harm"].get(name, 0.0)
    total = sum(map(sum, values.values())) or 1.0
    worst = max(units, key=lambda unit: unit["harm"].get(name, 0.0))
    sentences = [
        f"KL with one unit alone in {name}; the most harmful unit is {_kind(worst)} of block"
        f" {worst['block']}, {words.whole(worst['harm'].get(name, 0.0) / total)} of the sum."
    ]
    head, rows = ["block", "unit", *units[0]["harm"], "chosen"], []
    for unit in units:
        harms = [words.or_dash(unit["harm"].get(candidate), words.short) for candidate in head[2:-1]]
        rows.append([str(unit["block"]), _kind(unit), *harms, unit["chosen"]])
    keys = [(_SHADES[i % len(_SHADES)], kind) for i, kind in enumerate(kinds)]
    alt = f"Bars of KL by block, for each kind of unit in {name}."
    panel = Plot(f"Harm in {name}", alt, _bars(blocks, values), wide=True)
    return Exhibit(sentences, [panel], [], Sheet(head, rows, remarks=1), keys=keys)


def _bars(blocks: Sequence[int], values: Mapping[str, Sequence[float]]) -> Figure:
    data = []
    for i, (kind, heights) in enumerate(values.items()):
        both = zip(blocks, heights, strict=True)
        told = [f"block {block}, {charts.plain(kind)}: {words.short(height)}" for block, height in both]
        marker = {"color": f"var(--{_SHADES[i % len(_SHADES)]})", "line": {"width": 0}}
        trace = {"type": "bar", "x": list(blocks), "y": list(heights), "marker": marker}
        data.append({**trace, "hoverinfo": "text", "hovertext": told})
    tops = [sum(parts) for parts in zip(*values.values(), strict=True)]
    shown = blocks[:: -(-len(blocks) // 10)]
    x = charts.Axis("block", shown, list(map(str, shown)), (blocks[0] - 0.6, blocks[-1] + 0.6), log=False)
    y = charts.straight_axis("KL, nats a token", [0.0, max(tops)])
    figure = charts.lines([], x, y, height=300, left=_LEFT, right=14)
    figure["layout"] |= {"barmode": "stack", "bargap": 0.25}
    return {**figure, "data": data}


def _chosen(data: Data) -> Exhibit:
    bits = {entry["name"]: entry["bits"] for entry in data["alone"]}
    kinds, blocks = _grid(data)
    at = {(unit["block"], _kind(unit)): bits.get(unit["chosen"]) for unit in data["units"]}
    figure = charts.heat(list(map(str, blocks)), kinds, [[at.get((block, kind)) for block in blocks] for kind in kinds])
    figure["data"][0]["colorbar"]["tickformat"] = ".2f"
    panel = Plot("Bits by unit and block", "A table of bits a weight, as colours.", figure, wide=True)
    sheet = Sheet(["candidate", "units"], [[name, str(n)] for name, n in data["chosen"]["units"].items()])
    # equal bits everywhere need no chart
    panels, sentences = [panel] if len(set(at.values())) > 1 else [], [f"{words.sentence(_units(data['chosen']))}."]
    return Exhibit(sentences, panels, [], sheet, title="What was chosen")


def _facts(data: Data) -> list[tuple[str, str]]:
    model, texts = data["model"], data["texts"]
    facts = [("source", f"{model['ref']}, {model['dtype']}"), ("sha256 of the source", model["sha256"])]
    for what, text in (("harm", texts["harm"]), ("scored", texts["check"])):
        if text:
            size = f"{text['samples']} × {text['tokens']} tokens"
            facts.append((f"{what} on", f"{text['set']} ({text['split']}), {size}"))
            facts.append(("sha256 of its token ids", text["sha256"]))
    facts.append(("candidates", ", ".join(candidate["name"] for candidate in data["candidates"])))
    return [*facts, ("took", words.duration(data["seconds"])), ("made at", data["created"])]
