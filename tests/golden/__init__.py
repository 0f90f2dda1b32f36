"""What does not change while the code does: contents of bundles, shapes of JSON, words and codes.

Everything stands in `goldens.json`. Write it anew with

    cd tests && python -m golden              contents, words and codes
    QUANTKIT_GOLDEN=record pytest tests       shapes of JSON: those that the run shows are added
"""

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("goldens.json")
RECORDING = os.environ.get("QUANTKIT_GOLDEN") == "record"


@cache
def goldens() -> dict[str, Any]:
    """The file, read once."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def write(part: str, value: Any) -> None:
    """Replaces a part of the file."""
    everything = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    text = json.dumps({**everything, part: value}, indent=1, sort_keys=True, ensure_ascii=False)
    FILE.write_text(text + "\n", encoding="utf-8")
    goldens.cache_clear()
