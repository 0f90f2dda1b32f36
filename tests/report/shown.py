"""Trees as a reader gets them: a bundle's page, and what a terminal of some width shows."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

import pytest

from quantkit.report.bundle.document import document
from quantkit.report.kit import html
from quantkit.report.kit.screen import write


def page(*args: Any, **options: Any) -> str:
    return html.page(document(*args, **options))


def printed(parts: Iterable[Any], monkeypatch: pytest.MonkeyPatch, width: int = 80) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    stream = io.StringIO()
    write(parts, stream)
    return stream.getvalue()
