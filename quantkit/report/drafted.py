"""Report of a draft for a target: acceptance, expected gain by drafted tokens, acceptance by prompt."""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.measurement.accuracy.drafts import WAYS, Drafted, DraftTimes, Gain
from quantkit.report.kit import charts, words
from quantkit.report.kit.charts import ORIGINAL, QUANTIZED, Curve
from quantkit.report.kit.tree import Conclusion, Document, Exhibit, On, Part, Remark, Section, Sheet, Styled

_NAMES = {"greedy": "greedy decoding", "sampling": "sampling at temperature 1"}
_SOURCES = {"measured": "measured", "forecast": "forecast", "bound": "no forecast, but bounds that no device reaches"}
_COLOURS = {"greedy": QUANTIZED, "sampling": ORIGINAL}


def document(data: Drafted, version: str = "") -> Document:
    """Build the tree."""
    gained = [gain for way in WAYS if (gain := data.best(way)) is not None]
    answer, tone = _answer(gained, data.times is not None and data.times.source == "bound")
    notes = [Remark(f"{words.sentence(note)}.", "note") for note in data.notes]
    chapters = [
        ("acceptance", "Acceptance", _acceptance(data)),
        ("gain", "Expected gain", _gains(data.gains, data.times)),
        ("prompts", "By prompt", _prompts(data)),
    ]
    sides = (("draft", data.draft), ("target", data.target))
    return Document(
        f"{data.draft['name']} as the draft of {data.target['name']}",
        [(Styled(word, "strong"), f" {side['name']}") for word, side in sides],
        [Conclusion(answer, tone, [_sentence(data, way) for way in WAYS], label="verdict"), *notes],
        [Section(title, parts, place) for place, title, parts in chapters if parts],
        [*((f"content of the {word}", side["content_sha256"]) for word, side in sides), ("read", data.data)],
        footer=f"Made by quantkit {version} from both checkpoints and their recorded times.".replace("  ", " "),
    )


def _answer(gained: Sequence[Gain], bounds: bool) -> tuple[str, str]:
    """Give the verdict on the expected gain in greedy decoding, and its tone; bounds alone decide nothing."""
    if not gained:
        return "the acceptance alone: no times are known", "inconclusive"
    first = gained[0]
    low, high = first.ci95 or (0.0, first.gain)
    if bounds:
        return f"a gain is not decided: {words.times(first.gain)} the speed if both ran at their bounds", "inconclusive"
    if low > 1:
        tokens = words.listed([first.k]) + (" drafted token" if first.k == 1 else " drafted tokens")
        return f"expected {words.times(first.gain)} the speed with {tokens}", "good"
    no = f"do not draft here: at best {words.times(first.gain)} the speed is expected"
    return (no, "bad") if high <= 1 else ("a gain is not decided", "inconclusive")


def _sentence(data: Drafted, way: str) -> str:
    mean, best = data.seen.mean(way), data.best(way)
    sure = f" ({words.between(mean.ci95, words.percent)})" if mean.ci95 else ""
    text = f"{words.sentence(_NAMES[way])}: {words.percent(mean.value)} of the tokens accepted{sure}"
    if best is None:
        return f"{text}."
    interval = f" ({words.between(best.ci95, words.times)})" if best.ci95 else ""
    return f"{text}; {words.times(best.gain)} the speed{interval} with {best.k} drafted."


def _acceptance(data: Drafted) -> list[Part]:
    rows = []
    for way in WAYS:
        mean = data.seen.mean(way)
        shares, sure = data.seen.by_prompt(way), words.between(mean.ci95, words.percent)
        of_prompts = words.between((min(shares), max(shares)), words.percent)
        rows.append([_NAMES[way], words.percent(mean.value), sure, of_prompts])
    table = Sheet(["", "accepted", "95\u00a0% interval", "of a prompt"], rows)
    return [Remark(f"{words.sentence(data.data)}; intervals are over prompts.", "caption"), table]


def _gains(gains: Sequence[Gain], times: DraftTimes | None) -> list[Part]:
    if times is None or not gains:
        return []
    by = {way: [gain for gain in gains if gain.way == way] for way in WAYS}
    rows = []
    for pair in zip(*by.values(), strict=True):
        cells = [cell for gain in pair for cell in (words.short(gain.tokens), words.times(gain.gain), _sure(gain))]
        rows.append([str(pair[0].k), words.moment(times.passes[pair[0].k + 1]), *cells])
    head = ["drafted", "pass"] + [f"{way}\n{what}" for way in WAYS for what in ("tokens", "speed", "interval")]
    about = f"Step of the target {words.moment(times.step)}, of the draft {words.moment(times.draft)}; "
    about += f"{_SOURCES[times.source]}: {times.about}."
    curves = []
    for way, listed in by.items():
        band = [gain.ci95 for gain in listed if gain.ci95 is not None]
        hover = [f"{gain.k} drafted: {words.times(gain.gain)} ({_sure(gain)})" for gain in listed]
        ks, ratios = [float(gain.k) for gain in listed], [gain.gain for gain in listed]
        curves.append(Curve(_NAMES[way], _COLOURS[way], ks, ratios, hover, band if len(band) == len(listed) else ()))
    alt = "Expected speed over the target alone by drafted tokens, with the interval of the acceptance"
    title = "Expected speed, by drafted tokens"
    chart = charts.over(title, alt, curves, "drafted tokens", "speed / target alone", form=words.ratio, also=[1.0])
    return [Remark(about, "caption"), Sheet(head, rows), Exhibit([], [chart], [], Sheet([], []))]


def _sure(gain: Gain) -> str:
    return words.between(gain.ci95, words.times) if gain.ci95 else ""


def _prompts(data: Drafted) -> list[Part]:
    shares = zip(*(data.seen.by_prompt(way) for way in WAYS), strict=True)
    rows = [[str(number), *map(words.percent, both)] for number, both in enumerate(shares, start=1)]
    return [
        Sheet(
            ["prompt", *(_NAMES[way] for way in WAYS)], rows, folded=True, title="Acceptance of each prompt", on=On.PAGE
        )
    ]
