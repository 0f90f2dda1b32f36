"""A search for mixed precision as a tree: harm against bits, and where in the model the harm is.

Made from `front.json` and the recipe alone. Of the figures, the front is the predicted harm times the factor that was
measured; what was compiled and scored stands on it as points.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quantkit.bundle import Decision
from quantkit.report.bundle.figures import DecisionLine, decisions_table
from quantkit.report.kit import axes, charts, words
from quantkit.report.kit.charts import ORIGINAL, QUANTIZED, Curve, Figure, Mark
from quantkit.report.kit.tree import (
    Code,
    Conclusion,
    Document,
    Exhibit,
    FigureTile,
    On,
    Part,
    Plot,
    Remark,
    Section,
    Sheet,
    Styled,
    Tiles,
)

Data = Mapping[str, Any]

_HEAD = ("", "bits", "size", "KL expected", "KL measured", "units")
_CHOSEN = "chosen"
# a scheme with at least this share of a mixture's bits is compared with it at equal bits
_NEAR = 0.97
# points of the front on a screen, and room for ticks such as 0.0001
_SHOWN, _LEFT = 8, 76
# of the bars: kinds of units, in the order in which a block runs them
_SHADES = (QUANTIZED, "quantized-soft", ORIGINAL, "rest")


def document(data: Data, recipe: str = "", *, code: bool = False) -> Document:
    """Build the tree of a search.

    Args:
        data: content of `front.json`.
        recipe: text of the recipe.
        code: whether a pass of it stands in a file of the user's, which has to be allowed.
    """
    tone, answer, because = verdict(data)
    allowed = " --allow-code" if code else ""
    ref = data["model"]["ref"]
    lines = [
        [Styled(cell, "strong" if line[0] == _CHOSEN else "") for cell in line[:-1]] for line in _thinned(_lines(data))
    ]
    decided = [DecisionLine.of(Decision.model_validate(each)) for each in data["decisions"]]
    front: list[Part] = [
        Sheet(_HEAD[:-1], lines, on=On.SCREEN),
        *(Remark(note, "note", On.PAGE) for note in data["notes"]),
    ]
    if not data["timings"]:
        front.append(Remark("No timings were given: speed took no part in the choice.", "caption", On.SCREEN))
    how = [
        Remark("This compiles it, in the folder that holds this page.", on=On.PAGE),
        Code("the command", f"quantkit compile {_model(ref)} --recipe ./tuned.yaml{allowed}", on=On.PAGE),
        Code("the recipe", recipe.rstrip("\n"), "yaml", folded=True, on=On.PAGE),
    ]
    return Document(
        f"{data['model']['name']} in mixed precision",
        [f"{ref}, tuned from {data['base']} for {data['target']} within {_limits(data)}"],
        [Conclusion(answer, tone, because), Tiles(_tiles(data))],
        [
            Section("The front", [*front, _pareto(data)], "front"),
            Section("Harm by depth", [_harm(data), _chosen(data)], "harm"),
            Section("The recipe", how, "recipe"),
            *([Section("Decisions", [decisions_table(decided)], "decisions", on=On.PAGE)] if decided else []),
        ],
        _facts(data),
        f"Made by quantkit {data['quantkit']} from front.json.",
    )


def _model(ref: str) -> str:
    """A model as a command names it; of a user's own folder only the name is known."""
    kind, _, name = ref.partition(":")
    return {"alias": name, "path": f"./{name}"}.get(kind, ref)


# --- the answer ------------------------------------------------------------------------------------------------------


def verdict(data: Data) -> tuple[str, str, list[str]]:
    """(tone, sentence, reasons): whether the mixture is better than one scheme for all."""
    chosen, uniform = data["chosen"], data["uniform"]
    units = ", ".join(f"{words.plural(count, 'unit')} in {name}" for name, count in chosen["units"].items())
    because = [f"{words.figure(chosen['bits'], 4)} bits a weight, {words.size(chosen['bytes'])} of weights: {units}."]
    if chosen["measured"] is None:
        because.append(f"The harms of its units add up to {_kl(chosen['predicted'])} nats a token.")
        return "open", "Not compiled yet: the KL is a prediction", because
    because.append(f"Its KL is {_kl(chosen['measured'])} nats a token{_held_out(chosen)}.")
    limit = data["budget"].get("kl")
    if limit is not None and chosen["measured"] > limit:
        because.append(f"That is above {limit:g}; the last of {len(data['checks'])} compiles.")
        return "bad", "The limit on KL was not met", because
    if uniform is None:
        return "open", "The best mixture within the budget", because
    against = f"All units in {uniform['name']}, at {words.figure(uniform['bits'], 4)} bits, have"
    because.append(f"{against} {_kl(uniform['measured'])}{_held_out(uniform)}.")
    if chosen["measured"] < uniform["measured"] and uniform["bits"] < _NEAR * chosen["bits"]:
        because.append("It has fewer bits, so this is no comparison at equal size.")
        return "open", "The best mixture within the budget; no single scheme has as many bits", because
    if chosen["measured"] < uniform["measured"]:
        less = 1 - chosen["measured"] / uniform["measured"]
        return "good", f"Mixed precision is better by {words.percent(less, 0)} of the KL", because
    return "bad", f"A mixture is no better than {uniform['name']} throughout", because


def _held_out(scored: Data) -> str:
    held = scored.get("held_out")
    return f" ({_kl(held)} on text that guided nothing)" if held is not None else ""


def _kl(value: float) -> str:
    return words.figure(value, 3)


def _limits(data: Data) -> str:
    return ", ".join(f"{kind}={value:g}" for kind, value in data["budget"].items())


def _tiles(data: Data) -> list[FigureTile]:
    chosen = data["chosen"]
    found = [FigureTile(words.figure(chosen["bits"], 3), "bits a weight", f"{words.size(chosen['bytes'])} in all")]
    if chosen["measured"] is None:
        return [*found, FigureTile(_kl(chosen["predicted"]), "sum of harms, nats", "predicted, not compiled")]
    held = chosen["held_out"]
    detail = f"{_kl(held)} on held-out text" if held is not None else "compiled and scored"
    found.append(FigureTile(_kl(chosen["measured"]), "KL, nats a token", detail))
    detail = f"sum of harms {_kl(chosen['predicted'])}"
    return [*found, FigureTile(words.times(data["factor"] or 1.0), "measured over predicted", detail)]


# --- the front -------------------------------------------------------------------------------------------------------


def _lines(data: Data) -> list[list[str]]:
    """Every point as text: name, bits, size, expected and measured KL, units."""

    def line(name: str, entry: Data, measured: float | None) -> list[str]:
        units = ", ".join(f"{count} {candidate}" for candidate, count in entry["units"].items())
        bits, size = words.figure(entry["bits"], 4), words.size(entry["bytes"])
        return [name, bits, size, _kl(entry["expected"]), words.or_dash(measured, _kl), units]

    found = [(entry["bits"], line("", entry, None)) for entry in data["front"]]
    found.append((data["chosen"]["bits"], line(_CHOSEN, data["chosen"], data["chosen"]["measured"])))
    found += [(entry["bits"], line(entry["name"], entry, None)) for entry in data["alone"] if entry["predicted"] > 0]
    uniform = data["uniform"]
    if uniform:
        entry = [f"{uniform['name']}, compiled", words.figure(uniform["bits"], 4), words.size(uniform["file_bytes"])]
        found.append((uniform["bits"], [*entry, "–", _kl(uniform["measured"]), "all"]))
    return [text for _, text in sorted(found, key=lambda each: each[0])]


def _thinned(lines: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    """For a screen: what has a name, and of the rest of the front only so many."""
    unnamed = [i for i, line in enumerate(lines) if not line[0]]
    step = -(-len(unnamed) // _SHOWN) or 1
    kept = set(unnamed[step // 2 :: step])
    return [line for i, line in enumerate(lines) if line[0] or i in kept]


def _pareto(data: Data) -> Exhibit:
    points = [entry for entry in data["front"] if entry["expected"] > 0]
    chosen = data["chosen"]
    factor = "expected" if data["factor"] else "predicted"
    front = Curve(
        "mixtures",
        QUANTIZED,
        [entry["bits"] for entry in points],
        [entry["expected"] for entry in points],
        [f"{words.figure(each['bits'], 4)} bits, KL {_kl(each['expected'])} {factor}" for each in points],
    )
    curves = [front]
    for entry in data["alone"]:
        if entry["expected"] > 0:
            hover = f"{entry['name']} throughout, KL {_kl(entry['expected'])} {factor}"
            curves.append(Curve("", "muted", [entry["bits"]], [entry["expected"]], [hover]))
    uniform = data["uniform"]
    if uniform:
        hover = f"{uniform['name']} throughout, KL {_kl(uniform['measured'])} measured"
        curves.append(Curve("", ORIGINAL, [uniform["bits"]], [uniform["measured"]], [hover]))
    if chosen["measured"] is not None:
        hover = f"the choice, KL {_kl(chosen['measured'])} measured"
        curves.append(Curve("", "ink", [chosen["bits"]], [chosen["measured"]], [hover]))
    bits = [x for curve in curves for x in curve.x]
    harms = [y for curve in curves for y in curve.y]
    x = axes.straight_axis("bits a weight", bits)
    y = axes.log_axis("KL, nats a token", harms)
    figure = charts.lines(curves, x, y, height=400, marks=[Mark(chosen["bits"], "chosen")])
    figure["layout"]["margin"]["l"] = _LEFT
    _label_points(figure, [(entry["name"], entry["bits"], entry["expected"]) for entry in data["alone"]])
    keys = [(QUANTIZED, f"mixtures, {factor}"), ("muted", f"one scheme for all, {factor}")]
    if uniform:
        keys.append((ORIGINAL, "one scheme for all, compiled and scored"))
    if chosen["measured"] is not None:
        keys.append(("ink", "the choice, compiled and scored"))
    said = ["Each point is the mixture with the least harm for its bits, proved so by the solver."]
    if data["factor"]:
        said.append(
            f"The harms of units add up to {_kl(chosen['predicted'])} for the choice; compiled, it has"
            f" {_kl(chosen['measured'])}. The front is drawn with that factor of {words.figure(data['factor'], 3)}."
        )
    seen = data["texts"]["harm"]
    caption = (
        f"Harm: each unit quantized alone, KL over {seen['items']:,} positions of {seen['set']} ({seen['split']})."
    )
    captions = [caption]
    if data["anchor"]:
        captions.append(f"Measured in {data['anchor']}; the other candidates by their error, relative to its.")
    if data["texts"]["check"]:
        scored = data["texts"]["check"]
        captions.append(f"Measured: over {scored['items']:,} positions of {scored['set']} ({scored['split']}).")
    if not data["timings"]:
        captions.append("No timings were given, so speed took no part in the choice.")
    panel = Plot("KL against bits", "KL divergence falls as bits a weight grow.", figure, wide=True)
    return Exhibit(said, [panel], captions, Sheet(_HEAD, _lines(data), remarks=1), keys=keys)


def _label_points(figure: Figure, points: Sequence[tuple[str, float, float]]) -> None:
    """Names beside single points, which have no end of a line to stand at."""
    import math

    for name, x, y in points:
        if y > 0:
            figure["layout"]["annotations"].append(
                {
                    **{"x": x, "y": math.log10(y), "xref": "x", "yref": "y", "xshift": 8, "text": charts.plain(name)},
                    **{"xanchor": "left", "yanchor": "bottom", "showarrow": False},
                    "font": {"size": 12.5, "color": "var(--muted)"},
                }
            )


# --- harm by depth ---------------------------------------------------------------------------------------------------


def _kind(unit: Data) -> str:
    """What a unit is called in every block: `q_proj k_proj v_proj`."""
    return " ".join(str(member).rpartition(".")[2] for member in unit["members"])


def _shown(data: Data) -> str:
    """The candidate whose harm is drawn: the one that most weights are in, or the first with a harm."""
    harms = [name for name in data["units"][0]["harm"] if any(unit["harm"].get(name, 0) > 0 for unit in data["units"])]
    most = data["chosen"]["units"]
    shown: str = max(harms, key=lambda name: most.get(name, 0))
    return shown


def _harm(data: Data) -> Exhibit:
    name = _shown(data)
    kinds = list(dict.fromkeys(_kind(unit) for unit in data["units"]))
    blocks = sorted({unit["block"] for unit in data["units"]})
    values = {
        kind: [
            sum(u["harm"].get(name, 0.0) for u in data["units"] if u["block"] == block and _kind(u) == kind)
            for block in blocks
        ]
        for kind in kinds
    }
    total = sum(sum(each) for each in values.values()) or 1.0
    worst = max(data["units"], key=lambda unit: unit["harm"].get(name, 0.0))
    figure = _bars(blocks, values)
    said = [
        f"What each unit does to the output when it alone is in {name}; most of all {_kind(worst)} of block"
        f" {worst['block']}, {words.percent(worst['harm'].get(name, 0.0) / total, 0)} of the sum."
    ]
    head = ["block", "unit", *data["units"][0]["harm"], "chosen"]
    rows = [
        [
            str(unit["block"]),
            _kind(unit),
            *(words.or_dash(unit["harm"].get(c), _kl) for c in head[2:-1]),
            unit["chosen"],
        ]
        for unit in data["units"]
    ]
    keys = [(shade, kind) for shade, kind in zip(_cycled(len(kinds)), kinds, strict=True)]
    panel = Plot(f"Harm in {name}", f"Bars of KL by block, for each kind of unit in {name}.", figure, wide=True)
    return Exhibit(said, [panel], [], Sheet(head, rows, remarks=1), keys=keys)


def _cycled(count: int) -> list[str]:
    return [_SHADES[i % len(_SHADES)] for i in range(count)]


def _bars(blocks: Sequence[int], values: Mapping[str, Sequence[float]]) -> Figure:
    """Upright bars, one a block, of several parts."""
    data = []
    for shade, (kind, heights) in zip(_cycled(len(values)), values.items(), strict=True):
        data.append(
            {
                "type": "bar",
                "x": list(blocks),
                "y": list(heights),
                "marker": {"color": f"var(--{shade})", "line": {"width": 0}},
                "hoverinfo": "text",
                "hovertext": [
                    f"block {block}, {charts.plain(kind)}: {_kl(height)}"
                    for block, height in zip(blocks, heights, strict=True)
                ],
            }
        )
    tops = [sum(parts) for parts in zip(*values.values(), strict=True)]
    shown = blocks[:: -(-len(blocks) // 10)]
    x = axes.Axis("block", shown, list(map(str, shown)), (blocks[0] - 0.6, blocks[-1] + 0.6), log=False)
    y = axes.straight_axis("KL, nats a token", [0.0, max(tops)])
    figure = charts.lines([], x, y, height=300, right=14)
    figure["layout"]["margin"]["l"] = _LEFT
    figure["layout"] |= {"barmode": "stack", "bargap": 0.25}
    return {**figure, "data": data}


def _chosen(data: Data) -> Exhibit:
    """Which unit got how many bits."""
    bits = {entry["name"]: entry["bits"] for entry in data["alone"]}
    kinds = list(dict.fromkeys(_kind(unit) for unit in data["units"]))
    blocks = sorted({unit["block"] for unit in data["units"]})
    at = {(unit["block"], _kind(unit)): bits.get(unit["chosen"]) for unit in data["units"]}
    values = [[at.get((block, kind)) for block in blocks] for kind in kinds]
    figure = charts.heat([str(block) for block in blocks], kinds, values)
    figure["data"][0]["colorbar"]["tickformat"] = ".2f"
    counts = data["chosen"]["units"]
    units = ", ".join(f"{words.plural(count, 'unit')} in {name}" for name, count in counts.items())
    said = [f"{words.sentence(units)}."]
    panel = Plot("Bits by unit and block", "A table of bits a weight, as colours.", figure, wide=True)
    sheet = Sheet(["candidate", "units"], [[name, str(count)] for name, count in counts.items()])
    # where all units have the same bits there is nothing to see
    return Exhibit(said, [panel] if len(set(at.values())) > 1 else [], [], sheet, title="What was chosen")


# --- where it is from ------------------------------------------------------------------------------------------------


def _facts(data: Data) -> list[tuple[str, str]]:
    model = data["model"]
    found = [("source", f"{model['ref']}, {model['dtype']}"), ("sha256 of the source", model["sha256"])]
    for what, text in (("harm", data["texts"]["harm"]), ("scored", data["texts"]["check"])):
        if text:
            found.append(
                (f"{what} on", f"{text['set']} ({text['split']}), {text['samples']} × {text['tokens']} tokens")
            )
            found.append(("sha256 of its token ids", text["sha256"]))
    found.append(("candidates", ", ".join(each["name"] for each in data["candidates"])))
    found += [("took", words.duration(data["seconds"])), ("made at", data["created"])]
    return found
