"""Trees as a reader gets them: a bundle's page, its figures, and what a terminal of some width shows."""

import io
import json
import re
from collections.abc import Iterable
from typing import Any

import pytest

from quantkit.report.bundle.document import document
from quantkit.report.kit import html
from quantkit.report.kit.screen import write

HOSTILE = "</script><img src=x onerror=alert(1)>\u2028<!--"


def page(*args: Any, **options: Any) -> str:
    return html.page(document(*args, **options))


def text_of(page: str) -> str:
    """The page without the packed library."""
    return re.sub(r'id="plotly">.*?</script>', 'id="plotly"></script>', page, flags=re.DOTALL)


def figures(page: str) -> list[dict[str, Any]]:
    return [json.loads(text) for text in re.findall(r'<script type="application/json">(.*?)</script>', page, re.DOTALL)]


def printed(parts: Iterable[Any], monkeypatch: pytest.MonkeyPatch, width: int = 80) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    stream = io.StringIO()
    write(parts, stream)
    text = stream.getvalue()
    assert "\x1b" not in text and all(line == line.rstrip() for line in text.splitlines())
    return text


def fits(text: str, width: int = 80, besides: str = "quantkit ") -> None:
    """Nothing is wider than the screen but what there is to be copied."""
    assert not [line for line in text.splitlines() if len(line) > width and besides not in line]
