"""The site of a store, written: what changed and nothing else, every file whole, the first page last.

    index.html    all cells           loads style.css and site.js, and nothing else
    cells/*.html  a page a cell       the same two
    style.css, site.js

It stands on files alone, so it opens from a disk as well as from any web server. What comes from models and data is
untrusted: Jinja escapes it, and each page's own policy lets no other script run and no request leave.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quantkit._version import __version__
from quantkit.bundle.disk import stopping_when_full
from quantkit.errors import InputError
from quantkit.nightly.page import cell, data, index, say
from quantkit.nightly.store import Store
from quantkit.report.kit import html, words
from quantkit.report.kit.tree import Code, Part, Remark, Styled

_FOLDER = Path(__file__).parent
# by which a page of this site is known
MARK = '<meta name="generator" content="quantkit nightly page">'


@dataclass(frozen=True)
class Written:
    """What `write` did.

    Args:
        path: of the first page.
        files: how many there are.
        changed: how many files were written; the others were as they should be.
        cells: how many cells the grid shows.
        verdict: the first page's sentence.
        warnings: what is odd about the data.
    """

    path: Path
    files: int
    changed: int
    cells: int
    nights: int
    verdict: str
    warnings: list[str]

    def as_dict(self) -> dict[str, Any]:
        """Make JSON of it."""
        return {**dataclasses.asdict(self), "path": str(self.path)}

    def terminal(self) -> list[Part]:
        """Build what a terminal shows."""
        size = f"{words.plural(self.cells, 'cell')}, {words.plural(self.nights, 'night')}"
        about = f"  {size}; {words.plural(self.changed, 'file')} of {self.files} written"
        return [Remark(Styled(f"{self.verdict}.", "strong")), Remark(about, "caption"), Code("", f"  {self.path}")]


def write(store: Store, out: str | Path) -> Written:
    """Write the site of a store, or what changed of it.

    Args:
        out: its folder; made where there is none.

    Raises:
        InputError: `out-exists`, another page lies there; `file-unwritable`; what the store raises.
        Stopped: `disk-full`.
        MissingDependency: duckdb, pyarrow or scipy, extra `nightly`.
    """
    folder = Path(out).expanduser()
    _check(folder)
    found = data.read(store, now=datetime.now(UTC))
    details = data.details(store, found)
    front = index.page(found, details, store.warnings)
    assets = {"style.css": html.read("page.css") + "\n" + _read("site.css"), "site.js": _read("site.js")}
    stamp = hashlib.sha256("".join(assets.values()).encode()).hexdigest()[:12]
    changed = sum(_put(folder / name, text) for name, text in assets.items())
    lines = [line for group in front["groups"] for line in group.lines]
    order = [*dict.fromkeys([*(tile.key for line in lines for tile in line.tiles if tile), *found.cells])]
    places = {key: i for i, key in enumerate(found.cells)}
    for i, key in enumerate(order):
        around = {"before": order[i - 1] if i else "", "after": order[i + 1] if i + 1 < len(order) else ""}
        links = {name: index.href(each).removeprefix("cells/") if each else "" for name, each in around.items()}
        values = cell.page(found, places[key], details[key])
        text = _rendered("cell.html.j2", root="../", stamp=stamp, **links, **values)
        changed += _put(folder / index.href(key), text)
    changed += _put(folder / "index.html", _rendered("index.html.j2", root="", stamp=stamp, **front))
    return Written(
        folder / "index.html",
        1 + len(assets) + len(order),
        changed,
        len(found.current),
        len(found.nights),
        front["answer"],
        [*found.notes, *store.warnings],
    )


def _check(folder: Path) -> None:
    """Refuse to write over somebody's own page."""
    place = folder / "index.html"
    try:
        strange = place.exists() and MARK not in place.read_text(encoding="utf-8", errors="replace")[:2000]
    except OSError as error:
        raise _unwritable(place, error) from None
    if strange:
        value, rule = "a page of something else", "the site has a folder of its own"
        raise InputError(
            "out-exists", where=str(place), value=value, rule=rule, remedy="choose another folder with --out"
        )


def _put(path: Path, text: str) -> bool:
    """Write a file unless it is so already; whether it was written."""
    data = text.encode()
    try:
        if path.is_file() and path.stat().st_size == len(data) and path.read_bytes() == data:
            return False
        with stopping_when_full(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # two may write at once
            # renamed whole, but not waited for until it is on the disk: the store has it all, and there are hundreds
            try:
                temporary.write_bytes(data)
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from None
    return True


def _unwritable(path: Path, error: OSError) -> InputError:
    reason, remedy = error.strerror or str(error), "check the folder's permissions"
    return InputError("file-unwritable", where=str(path), value=reason, remedy=remedy)


def _rendered(template: str, **values: Any) -> str:
    return html.page_of_site(_FOLDER, template, date=say.date, version=__version__, **values)


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")
