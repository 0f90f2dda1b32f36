"""Every text architecture of transformers' auto classes, tiny and random: right, or refused by a clear code?

    python benchmarks/zoo.py
    python benchmarks/zoo.py --only llama AutoModelForMaskedLM --no-record
    python benchmarks/zoo.py --only AutoModelForSeq2SeqLM                   # recorded, and laid over the page's rows
    python benchmarks/zoo.py --half                                         # decoders stored in bfloat16
    python benchmarks/zoo.py --dtypes                                       # all recipes on one Llama in three dtypes
    python benchmarks/zoo.py --page

A model of each class is shrunk by what its config class says (`tests/zoo/shrink.py`) and goes through a whole compile;
the manifest's figures are held against two forwards of plain transformers, and every position of the stream against the
model's own forward (`tests/zoo/judge.py`). docs/models.md is written from the record; `--page` writes it again.
Targets: none is wrong and none ends in anything but a refusal; of the decoders at least 90 % are right.

`--dtypes` takes one Llama in float32, bfloat16 and float16 and every shipped recipe for decoders through what a user
does next: compile, verify, measure, generate, export to every other destination (`tests/zoo/dtypes.py`).
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from pathlib import Path

from harness.record import parsing, record, show, verdicts

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

DECODERS, SHARE = "AutoModelForCausalLM", 0.9


def main() -> int:
    """Run, record, and write the page."""
    parser = parsing(__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="classes, model types or auto classes")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--lines", type=Path, help="verdicts as they come; a run goes on where they end")
    parser.add_argument("--half", action="store_true", help="decoders alone, stored in bfloat16, compiled and no more")
    parser.add_argument("--dtypes", action="store_true", help="recipes and dtypes, instead of architectures")
    parser.add_argument("--page", action="store_true", help="write docs/models.md from the newest record, and no more")
    options = parser.parse_args()
    from zoo import campaign, judge, page

    if options.dtypes:
        return _dtypes(options)
    if options.page:
        page.PAGE.write_text(page.markdown(page.newest()), encoding="utf-8")
        return 0
    began = time.monotonic()
    wanted = campaign.chosen([DECODERS] if options.half and not options.only else options.only)
    with tempfile.TemporaryDirectory(prefix="zoo-") as home:
        found = campaign.run(
            "half" if options.half else "both", wanted, options.lines or Path(home) / "lines.jsonl", options.workers
        )
    order = {each.name: number for number, each in enumerate(wanted)}
    rows = sorted(found, key=lambda row: order[row["name"]])
    show(
        "classes",
        [{"auto class": table, "all": counts.total(), **counts} for table, counts in campaign.counts(rows).items()],
        {key: f"{key}:" for key in ("auto class", "all", "right", "refused", "WRONG", "CRASH", "not here")},
    )
    for row in rows:
        if row["verdict"] in ("WRONG", "CRASH"):
            print(f"{row['verdict']} {row['name']} [{row['code']}] {row['line']}")
    decoders = [row for row in rows if row["table"] == DECODERS and row["verdict"] != "not here"]
    share = sum(row["verdict"] == "right" for row in decoders) / max(len(decoders), 1)
    status = verdicts(
        {
            "no class is wrong": not any(row["verdict"] == "WRONG" for row in rows),
            "no class ends in anything but a refusal": not any(row["verdict"] == "CRASH" for row in rows),
            f"at least {SHARE:.0%} of {len(decoders)} decoders are right: {share:.1%}": share >= SHARE or not decoders,
        }
    )
    settings = {"tolerance": judge.TOLERANCE, "workers": options.workers, "seconds": round(time.monotonic() - began)}
    claim = (
        "a tiny model of every text architecture is compiled to figures that plain transformers finds too, or refused"
    )
    name = "zoo_half" if options.half else "zoo"
    name += "_part" if options.only else ""
    path = record(name, claim, rows, settings, write=not options.no_record)
    if path is not None and not options.half:
        page.PAGE.write_text(page.markdown(page.newest()), encoding="utf-8")
    return status


def _dtypes(options: argparse.Namespace) -> int:
    """Run and record every cell; `--only` names dtypes and recipes."""
    from zoo import dtypes

    lines: Path | None = options.lines
    rows = [json.loads(line) for line in lines.read_text().splitlines()] if lines and lines.exists() else []
    done = {(row["model"], row["dtype"], row["recipe"]) for row in rows}
    only, names = set(options.only), dtypes.recipes()
    chosen = [name for name in names if not only & set(names) or name in only]
    asked = [
        (dtypes.model, recipe, dtype)
        for recipe in chosen
        for dtype in dtypes.DTYPES
        if not only & set(dtypes.DTYPES) or dtype in only
    ]
    asked += [(dtypes.real, recipe, "bfloat16") for recipe in dtypes.REAL if recipe in chosen]
    with tempfile.TemporaryDirectory(prefix="dtypes-") as home:
        for make, recipe, dtype in asked:
            about = {"model": "tiny" if make is dtypes.model else dtypes.ALIAS, "dtype": dtype, "recipe": recipe}
            if tuple(about.values()) in done:
                continue
            # a compile looks for garbage often, and what was imported is none
            gc.collect()
            gc.freeze()
            source = make(dtype, Path(home) / "-".join(about.values()))
            made = [{**about, **cell} for cell in dtypes.cells(source, recipe)]
            rows += made
            if lines:
                with lines.open("a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in made)
    steps = list(dict.fromkeys(row["step"] for row in rows))
    keys = ("model", "recipe", "dtype")
    table: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        table.setdefault(tuple(row[key] for key in keys), {})[row["step"]] = row["code"] or row["verdict"]
    shown = [{**dict(zip(keys, about, strict=True)), **codes} for about, codes in table.items()]
    show("recipes and dtypes", shown, {key: f"{key}:" for key in (*keys, *steps)})
    wrong = [row for row in rows if row["verdict"] == "WRONG"]
    for row in wrong:
        print(f"WRONG {row['model']} {row['dtype']} {row['recipe']} {row['step']}: {row['line']}")
    claim = "every shipped recipe for decoders does in each dtype what a user does next, or refuses it"
    record("dtypes", claim, rows, {"dtypes": dtypes.DTYPES}, write=not (options.no_record or only))
    return verdicts({f"none of {len(rows)} cells is wrong": not wrong})


if __name__ == "__main__":
    raise SystemExit(main())
