"""The tables and the picture against llama-quantize say what the records say."""

import importlib.util
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
_SPEC = importlib.util.spec_from_file_location("gguf_table", ROOT / "benchmarks" / "gguf_table.py")
assert _SPEC is not None and _SPEC.loader is not None
table = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = table
_SPEC.loader.exec_module(table)


def test_the_page_and_the_picture_are_of_the_records() -> None:
    rows = table.records()
    page = table.PAGE.read_text(encoding="utf-8")
    assert table.rendered(page, rows) == page, "run python benchmarks/gguf_table.py"
    assert table.picture(rows) == table.PICTURE.read_text(encoding="utf-8"), "run python benchmarks/gguf_table.py"


def test_every_recorded_loss_is_told() -> None:
    page = table.PAGE.read_text(encoding="utf-8")
    latest = {}
    for path in sorted((ROOT / "benchmarks" / "results").glob("gguf-peers-*-*.json")):
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            latest[row["model"], row["type"], row["text"]] = row
    assert latest
    for row in latest.values():
        assert f"| {row['text']} | {row['kl']:.3f} ± {row['kl_half']:.3f} | {row['kl_llama']:.3f} ±" in page
        assert f"| **{row['ratio']:.2f}** (" in page
