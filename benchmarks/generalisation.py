"""Does a recipe cling to its calibration text? Calibrate on the shipped speeches, score on text of other kinds.

    python benchmarks/generalisation.py
    python benchmarks/generalisation.py --calibration ids.jsonl --samples 8

prose-en    held-out speeches, the kind that calibrated
fiction     Alice's Adventures in Wonderland
french      Candide, in French: a language that the model hardly knows
scripture   verses of the King James Bible
code        Python's standard library, of the interpreter that runs this: MODULES below

Mean KL in nats from the original, and its ratio to the KL on the held-out speeches. The shipped claim: on every other
kind of text `awq-int4` stays below `gptq-int4`; `int4-best` stands beside them. The difference is taken position by
position, so its standard error is far smaller than that of either side.
"""

from __future__ import annotations

import platform
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from harness.process import THREADS, compiled, scored
from harness.record import parsing, record, sha256, show, verdicts

HERE = Path(__file__).resolve().parent / "texts"
TEXTS = {"fiction": "alice.txt", "french": "candide.txt", "scripture": "king-james.txt"}
MODULES = ["json/decoder.py", "textwrap.py"]
HOME = "prose-en"
SUBJECT, AGAINST, BEST = "awq-int4", "gptq-int4", "int4-best"


def code(place: Path) -> Path:
    """Some modules of the standard library, one after the other."""
    root = Path(sysconfig.get_path("stdlib"))
    path = place / "code.txt"
    path.write_text("".join((root / module).read_text() for module in MODULES))
    return path


def main() -> int:
    parser = parsing(__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--recipes", nargs="+", default=[AGAINST, SUBJECT, BEST])
    parser.add_argument("--calibration", help="a set's name or a path; default: the recipe's own")
    parser.add_argument("--samples", type=int, help="calibration sequences; default: the recipe's own")
    options = parser.parse_args()

    change = ["--calibration", options.calibration] if options.calibration else []
    change += ["--set", f"calibration.samples={options.samples}"] if options.samples else []
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        files = {kind: HERE / file for kind, file in TEXTS.items()} | {"code": code(place)}
        folders = {}
        for recipe in options.recipes:
            compiled(options.model, recipe, place / recipe, "--no-speed", *change)
            folders[recipe] = str(place / recipe / "model")
        texts = {HOME: {"set": HOME}, **{kind: {"file": str(file)} for kind, file in files.items()}}
        rows = scored(options.model, folders, texts, paired=AGAINST if AGAINST in folders else None)
        hashes = {kind: sha256(file) for kind, file in files.items()}
    found = {(row["candidate"], row["text"]): row for row in rows}
    for row in rows:
        row["ratio"] = row["kl"] / found[row["candidate"], HOME]["kl"]

    table: list[dict[str, Any]] = []
    for kind in texts:
        row = found[options.recipes[0], kind]
        line = {"text": kind, "n": row["n"], "perplexity_reference": row["perplexity_reference"]}
        for recipe in options.recipes:
            line |= {f"{recipe} {key}": found[recipe, kind][key] for key in ("kl", "kl_se", "ratio")}
            line[f"{recipe} less"] = found[recipe, kind].get("kl_less")
            line[f"{recipe} less_se"] = found[recipe, kind].get("kl_less_se")
        table.append(line)
    columns = {"text": "text", "n": "positions:d", "perplexity_reference": "perplexity of the original:.2f"}
    for recipe in options.recipes:
        columns |= {
            f"{recipe} kl": f"{recipe} KL:.4f",
            f"{recipe} kl_se": "± se:.4f",
            f"{recipe} ratio": f"/ {HOME}:.2f",
        }
        if recipe != AGAINST and AGAINST in folders:
            columns |= {f"{recipe} less": f"less {AGAINST}:+.4f", f"{recipe} less_se": "± se:.4f"}
    show(f"{options.model}, calibrated on {options.calibration or HOME}", table, columns)
    settings = (
        {"model": options.model, "threads": THREADS}
        | {"calibration": Path(options.calibration).name if options.calibration else HOME}
        | {"samples": options.samples, "texts_sha256": hashes}
        | {"code": {"python": platform.python_version(), "modules": MODULES}}
    )
    claim = f"on text of other kinds the KL of {SUBJECT} stays below that of {AGAINST}"
    label = "generalisation-ids" if options.calibration else "generalisation"
    record(label, claim, rows, settings)
    if not {SUBJECT, AGAINST} <= folders.keys():
        return 0
    checks = {}
    for kind in files:
        mine, other = found[SUBJECT, kind]["kl"], found[AGAINST, kind]["kl"]
        checks[f"{kind}: {SUBJECT} {mine:.4f} < {AGAINST} {other:.4f}"] = mine < other
    return verdicts(checks)


if __name__ == "__main__":
    raise SystemExit(main())
