"""docs/models.md, from the record of a campaign."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from zoo.exceptions import BECAUSE

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "models.md"
# below it, the share of the linear weights that was quantized is shown
_WHOLE = 0.95
_HEAD = """# Models

Written by `make zoo` from `benchmarks/results/{record}`; edit `tests/zoo/page.py` instead.

Does quantkit work on an architecture? A tiny random model of every text architecture in the auto classes of
transformers {version} went through a whole compile: quantized to 4 bits by GPTQ in groups of 32, exported, reloaded,
scored. Its figures were then compared with plain transformers, which knows nothing of quantkit. T5, BART and their
relatives have [a page of their own](encoder-decoders.md), and [vision-language models](vision.md) have one too.
Models of speech are calibrated with recordings. This campaign has none, so Whisper's row is a refusal; its compile is
on [that page](encoder-decoders.md).

- **works**: three things agree.
  - Perplexity of the source, perplexity of the bundle and KL (of a classifier KL, of an encoder the cosine) equal
    those of two plain forwards, `from_pretrained` of the source and of the bundle, to one part in a thousand (largest
    error: {error:.0e}).
  - Run block by block, the source answers at every position as its own forward does.
  - The manifest's weights agree with a count of the parameters.
- **refused**: one line with a code, and no bundle.

{others}\
Not shown here: how well real models of an architecture bear quantization, other recipes and exports, and other
programs that load a bundle. Every compile still compares a real model with its own forward before the first block.
"""


def newest() -> Path:
    """The last recorded campaign."""
    return max((ROOT / "benchmarks" / "results").glob("zoo-*.json"))


def markdown(record: Path) -> str:
    """The page."""
    content = json.loads(record.read_text())
    parts = [part for part in sorted(record.parent.glob("zoo_part-*.json")) if _date(part) >= _date(record)]
    rows = _replaced(content["rows"], [json.loads(part.read_text())["rows"] for part in parts])
    right = [row for row in rows if row["verdict"] == "right"]
    version = content["machine"]["packages"]["transformers"]
    head = _HEAD.format(record=record.name, version=version, error=max(row["error"] for row in right), others=_others())
    if parts:
        named = ", ".join(f"`{part.name}`" for part in parts)
        head += f"\nSome classes were tried again since, one part of them at a time: {named}.\n"
    written = [head, _counts(rows), "\n## Works\n", *_works(right)]
    others = {
        "Refused": ("refused", "Code and reason of each."),
        "Wrong": ("WRONG", "Known, and to be mended."),
        "Broken": ("CRASH", "Known, and to be mended: the compile ends with an error that is not a refusal."),
        "Not tried": ("not here", "Not built here, or no model of token ids."),
    }
    for title, (verdict, words) in others.items():
        found = [row for row in rows if row["verdict"] == verdict]
        if found:
            written.append(f"\n## {title}\n\n{words}\n\n" + _table(found))
    return "".join(written)


def _date(record: Path) -> str:
    return record.stem.rpartition("-")[2]


def _replaced(rows: Sequence[Any], parts: Iterable[Sequence[Any]]) -> list[Any]:
    """The rows of a campaign, with those of later ones in the place of rows of the same name."""
    found = {row["name"]: row for row in rows}
    for part in parts:
        found |= {row["name"]: row for row in part}
    order = list(dict.fromkeys(row["table"] for row in [*rows, *found.values()]))
    return sorted(found.values(), key=lambda row: order.index(row["table"]))


def _others() -> str:
    """A sentence of each other campaign that is recorded: decoders stored as most are, recipes through all dtypes."""
    words = {
        "zoo_half": "Stored in bfloat16 instead of float32, {right} of {all} decoders are right",
        "dtypes": (
            "A tiny Llama in float32, bfloat16 and float16, and SmolLM2-135M in bfloat16, went through a user's steps\n"
            "with every recipe: compile, verify, measure, generate, export. {right} of {all} steps are right,\n"
            "{refused} are refused by a code, {wrong} are wrong"
        ),
    }
    found = []
    for name, sentence in words.items():
        record = max((ROOT / "benchmarks" / "results").glob(f"{name}-*.json"), default=None)
        if record is not None:
            made = [row for row in json.loads(record.read_text())["rows"] if row["verdict"] != "not here"]
            right, refused = (sum(row["verdict"] == each for row in made) for each in ("right", "refused"))
            wrong = len(made) - right - refused
            said = sentence.format(right=right, refused=refused, wrong=wrong, all=len(made))
            found.append(f"{said} (`{record.name}`).\n\n")
    return "".join(found)


def _counts(rows: Sequence[Mapping[str, Any]]) -> str:
    titles = {"right": "works", "refused": "refused", "WRONG": "wrong", "CRASH": "broken", "not here": "not tried"}
    shown = [each for each in titles if each in {row["verdict"] for row in rows} | {"right", "refused"}]
    lines = [
        f"\n| auto class | architectures | {' | '.join(titles[each] for each in shown)} |",
        "|---" * (len(shown) + 2) + "|",
    ]
    for table in [*dict.fromkeys(row["table"] for row in rows), None]:
        mine = [row for row in rows if table in (None, row["table"])]
        found = [sum(row["verdict"] == each for row in mine) for each in shown]
        lines.append(f"| {f'`{table}`' if table else 'all'} | {len(mine)} | {' | '.join(map(str, found))} |")
    return "\n".join(lines) + "\n"


def _works(rows: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    yield (
        "\nA share after a name is the part of its linear weights that the recipe quantized, if below "
        f"{_WHOLE:.0%}. The rest is in\nmatrices that belong to no linear, or in linears whose "
        "inputs no group divides. Every compile\nsays so.\n"
    )
    for table in dict.fromkeys(row["table"] for row in rows):
        mine = sorted((row for row in rows if row["table"] == table), key=lambda row: str(row["name"]).lower())
        yield f"\n**`{table}`**: " + " · ".join(map(_named, mine)) + "\n"


def _named(row: Mapping[str, Any]) -> str:
    cls, _, variant = str(row["name"]).partition(" ")
    share = row["share"]
    some = "" if share is None or share >= _WHOLE else f" {share:.0%}"
    return f"`{cls}`{f' {variant}' if variant else ''}{some}"


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    ordered = sorted(rows, key=lambda row: (row["code"], _reason(row), row["name"]))
    lines = [f"| `{row['name']}` | `{row['code'] or '-'}` | {_reason(row)} |" for row in ordered]
    return "\n".join(["| class | code | reason |", "|---|---|---|", *lines]) + "\n"


def _reason(row: Mapping[str, Any]) -> str:
    """What a refusal says first: the line without its code, its place where that is the class, and its rule."""
    if (why := BECAUSE.get(str(row["name"]))) and row["code"] == "stream-differs":
        return why
    words = str(row["line"]).removeprefix(f"[{row['code']}] ")
    for known in (f"path:{row['name'].partition(' ')[0]}: ", f"{row['name'].partition(' ')[0]}: "):
        words = words.removeprefix(known)
    return words.partition("; ")[0].removeprefix(f"{row['name']} ").replace("|", "\\|")
