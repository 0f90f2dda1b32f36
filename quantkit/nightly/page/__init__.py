"""Write the site of a store: only changed files, each one atomically, the first page last.

    index.html    all cells         loads style.css and site.js, and nothing else
    cells/*.html  a page a cell     the same two
    style.css, site.js

The site consists of files alone, so it opens from a disk or any web server. Text from models and data is untrusted:
Jinja escapes it, and each page's content policy blocks other scripts and all requests.
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
# identifies a page of this site
MARK = '<meta name="generator" content="quantkit nightly page">'


@dataclass(frozen=True)
class Written:
    """Result of `write`.

    Args:
        path: path of the first page.
        files: number of files.
        changed: number of files written; the others were up to date.
        cells: number of cells in the grid.
        verdict: sentence at the top of the first page.
        warnings: oddities of the data.
    """

    path: Path
    files: int
    changed: int
    cells: int
    nights: int
    verdict: str
    warnings: list[str]

    def as_dict(self) -> dict[str, Any]:
        """Return its JSON form."""
        return {**dataclasses.asdict(self), "path": str(self.path)}

    def terminal(self) -> list[Part]:
        """Build the lines for a terminal."""
        size = f"{words.plural(self.cells, 'cell')}, {words.plural(self.nights, 'night')}"
        about = f"  {size}; {words.plural(self.changed, 'file')} of {self.files} written"
        return [Remark(Styled(f"{self.verdict}.", "strong")), Remark(about, "caption"), Code("", f"  {self.path}")]


def write(store: Store, out: str | Path) -> Written:
    """Write the changed files of a store's site.

    Args:
        out: its folder; created if missing.

    Raises:
        InputError: `out-exists`, another page is there; `file-unwritable`; errors of the store.
        Stopped: `disk-full`.
        MissingDependency: duckdb, pyarrow or scipy, extra `nightly`.
    """
    folder = Path(out).expanduser()
    _check(folder)
    history = data.read(store, now=datetime.now(UTC))
    details = data.details(store, history)
    front = index.page(history, details, store.warnings)
    assets = {"style.css": html.read("page.css") + "\n" + _read("site.css"), "site.js": _read("site.js")}
    stamp = hashlib.sha256("".join(assets.values()).encode()).hexdigest()[:12]
    changed = sum(_put(folder / name, text) for name, text in assets.items())
    lines = [line for group in front["groups"] for line in group.lines]
    order = [*dict.fromkeys([*(tile.key for line in lines for tile in line.tiles if tile), *history.cells])]
    places = {key: i for i, key in enumerate(history.cells)}
    for i, key in enumerate(order):
        around = {"before": order[i - 1] if i else "", "after": order[i + 1] if i + 1 < len(order) else ""}
        links = {name: index.href(near).removeprefix("cells/") if near else "" for name, near in around.items()}
        values = cell.page(history, places[key], details[key])
        text = _rendered("cell.html.j2", root="../", stamp=stamp, **links, **values)
        changed += _put(folder / index.href(key), text)
    changed += _put(folder / "index.html", _rendered("index.html.j2", root="", stamp=stamp, **front))
    return Written(
        folder / "index.html",
        1 + len(assets) + len(order),
        changed,
        len(history.current),
        len(history.nights),
        front["answer"],
        [*history.notes, *store.warnings],
    )


def _check(folder: Path) -> None:
    """Refuse to overwrite a page of something else."""
    place = folder / "index.html"
    try:
        strange = place.exists() and MARK not in place.read_text(encoding="utf-8", errors="replace")[:2000]
    except OSError as error:
        raise _unwritable(place, error) from None
    if strange:
        value, rule = "another page is there", "the site needs a folder of its own"
        raise InputError(
            "out-exists", where=str(place), value=value, rule=rule, remedy="choose another folder with --out"
        )


def _put(path: Path, text: str) -> bool:
    """Write a file unless it is up to date; return True if written."""
    data = text.encode()
    try:
        if path.is_file() and path.stat().st_size == len(data) and path.read_bytes() == data:
            return False
        with stopping_when_full(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # two processes may write at once
            # atomic, but without fsync: the store has everything, and there are hundreds of files
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
