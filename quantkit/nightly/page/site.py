"""Writing the site: what changed and nothing else, every file whole, the first page last.

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
from typing import TYPE_CHECKING, Any

from quantkit._version import __version__
from quantkit.bundle.disk import stopping_when_full
from quantkit.errors import InputError
from quantkit.nightly.page import cell, data, index, say
from quantkit.nightly.store import Store
from quantkit.report.kit import html, words

if TYPE_CHECKING:
    from rich.console import RenderableType

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
        nights: how many nights there are.
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
        """For JSON."""
        return {**dataclasses.asdict(self), "path": str(self.path)}

    def terminal(self) -> list[RenderableType]:
        """For people."""
        from rich.text import Text

        size = f"{words.plural(self.cells, 'cell')}, {words.plural(self.nights, 'night')}"
        return [
            Text(f"{self.verdict}.", "bold"),
            Text(f"  {size}; {words.plural(self.changed, 'file')} of {self.files} written", "dim"),
            Text(f"  {self.path}", no_wrap=True),
        ]


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
    assets = {"style.css": _style(), "site.js": _read("site.js")}
    stamp = hashlib.sha256("".join(assets.values()).encode()).hexdigest()[:12]
    changed = sum(_put(folder / name, text) for name, text in assets.items())
    order = [*dict.fromkeys([*(tile.key for group in front["groups"] for tile in _tiles(group)), *found.cells])]
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


def _tiles(group: index.TargetGroup) -> list[index.CellTile]:
    return [tile for line in group.lines for tile in line.tiles if tile is not None]


def _check(folder: Path) -> None:
    """Refuse to write over somebody's own page."""
    place = folder / "index.html"
    try:
        strange = place.exists() and MARK not in place.read_text(encoding="utf-8", errors="replace")[:2000]
    except OSError as error:
        raise _unwritable(place, error) from None
    if strange:
        raise InputError(
            "out-exists",
            where=str(place),
            value="a page of something else",
            rule="the site has a folder of its own",
            remedy="choose another folder with --out",
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
    return InputError(
        "file-unwritable", where=str(path), value=error.strerror or str(error), remedy="check the folder's permissions"
    )


def _rendered(template: str, **values: Any) -> str:
    values |= {"date": say.date, "version": __version__}
    return html.page_of_site(_FOLDER, template, **values)


def _style() -> str:
    """The reports' style, and what this site has besides."""
    return html.read("page.css") + "\n" + _read("site.css")


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")
