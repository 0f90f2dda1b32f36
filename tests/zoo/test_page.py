"""docs/models.md says what the newest campaign found."""

import json
from pathlib import Path

from zoo import page


def test_the_page_is_current() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.markdown(page.newest()), "python benchmarks/zoo.py --page"


def test_every_verdict_has_its_place(tmp_path: Path) -> None:
    common = {"table": "AutoModel", "model_type": "x", "part": "compile", "error": 1e-9, "share": 1.0}
    rows = [
        {**common, "name": "Whole", "verdict": "right", "code": "", "line": ""},
        {**common, "name": "Part (tied)", "verdict": "right", "code": "", "line": "", "share": 0.2},
        {**common, "name": "Eye", "verdict": "refused", "code": "no", "line": "[no] path:Eye: Eye takes a | b; do not"},
        {**common, "name": "Bad", "verdict": "CRASH", "code": "KeyError", "line": "KeyError: x"},
    ]
    record = tmp_path / "zoo-20260101.json"
    record.write_text(json.dumps({"rows": rows, "machine": {"packages": {"transformers": "5"}}}))
    found = page.markdown(record)
    assert "| `AutoModel` | 4 | 2 | 1 | 1 |" in found
    assert "**`AutoModel`**: `Part` (tied) 20% · `Whole`\n" in found
    assert "| `Eye` | `no` | takes a \\| b |" in found
    assert "## Broken" in found
    assert "## Wrong" not in found
