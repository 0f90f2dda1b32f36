"""HTML renderer: turns a tree into a page, with one template, one style sheet and one security policy.

Text of models and data is untrusted. Jinja escapes it in HTML, and JSON in script elements is escaped as well. The
policy of each page allows no other script and no network request. A report is one file with plotly embedded (gzipped);
the pages of a site share the style and the script beside them.
"""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit import machine
from quantkit.bundle.disk import write_atomic
from quantkit.errors import InputError, MissingDependency
from quantkit.report.kit import words
from quantkit.report.kit.tree import Document, Facts, Line, On, Part, Section, only, spans

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

_TEMPLATES = Path(__file__).with_name("templates")
# plotly and the site's drawings set styles on elements, so styles need `unsafe-inline`
_POLICY = (
    "default-src 'none'; script-src {scripts}; style-src {styles}'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'"
)
_BESIDE = "'self' file:"  # files beside the page: of a web server, and on a disk
# facts to look up, folded on a page
_EXACT = {"versions", "seed", "A's content", "B's content"}


def demand() -> None:
    """Check for plotly. Raises MissingDependency: plotly, extra `report`."""
    if not machine.has("plotly"):
        raise MissingDependency("plotly", extra="report", purpose="the page")


def write(path: Path, text: str) -> None:
    """Write a page atomically. Raises InputError: `file-unwritable`."""
    try:
        write_atomic(path, text.encode())
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError("file-unwritable", where=str(path), value=reason, remedy="check the folder") from None


def page(document: Document) -> str:
    """Render a document as one file, with style, script and plotly inside.

    Raises:
        MissingDependency: plotly, extra `report`.
    """
    from markupsafe import Markup

    try:
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]
    except ImportError:
        raise MissingDependency("plotly", extra="report", purpose="the report page") from None
    library, script = str(get_plotlyjs()), read("page.js")
    hashes = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (script, library))
    policy = _POLICY.format(scripts=" ".join(f"'sha256-{digest}'" for digest in hashes), styles="")
    # trusted text of quantkit and plotly; everything else is escaped
    own = {"style": read("page.css"), "script": script, "library": _packed(library)}
    exact = [fact for fact in document.facts if "sha256" in fact[0] or fact[0] in _EXACT]
    facts: list[Part] = [Facts([fact for fact in document.facts if fact not in exact])] if document.facts else []
    facts += [Section("Hashes and versions", [Facts(exact)], folded=True)] if exact else []
    chapters = [*only(document.parts, On.PAGE), Section("Provenance", [*facts, *document.provenance], "provenance")]
    values = {"document": document, "head": only(document.head, On.PAGE), "chapters": chapters}
    return _filled(_TEMPLATES, "page.html.j2", policy, **values, **{name: Markup(text) for name, text in own.items()})  # noqa: S704


def fragment(parts: Sequence[Part]) -> str:
    """Render parts for a foreign page (a notebook), with all text escaped."""
    template = _environment(_TEMPLATES).get_template("parts.html.j2")
    return str(template.module.all(only(parts, On.PAGE), 3))  # type: ignore[attr-defined]


def page_of_site(folder: Path, template: str, **values: Any) -> str:
    """Render a page of a site from a template in `folder`; style and script lie beside the page."""
    return _filled(folder, template, _POLICY.format(scripts=_BESIDE, styles=f"{_BESIDE} "), **values)


def read(name: str) -> str:
    """Read a shared file of all pages: `page.css`, `page.js`."""
    return (_TEMPLATES / name).read_text(encoding="utf-8")


def _filled(folder: Path, template: str, policy: str, **values: Any) -> str:
    return _environment(folder).get_template(template).render(**values, policy=policy).strip("\n") + "\n"


@functools.cache
def _environment(folder: Path) -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader([folder, _TEMPLATES])
    options: dict[str, Any] = {"autoescape": True, "trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(loader=loader, undefined=StrictUndefined, **options)  # noqa: S701
    environment.filters |= {"plural": words.plural, "sentence": words.sentence, "visible": words.visible, "line": _line}
    environment.filters |= {"kind": lambda part: type(part).__name__, "shown": functools.partial(only, on=On.PAGE)}
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment


def _line(line: Line) -> Markup:
    """Render a line: escape it, turn backticks into code, tones into classes, links into anchors."""
    from markupsafe import Markup

    markup = Markup("")
    for text in spans(line):
        inner, tone, href = _coded(text), getattr(text, "tone", ""), getattr(text, "href", "")
        inner = Markup('<a href="{}">{}</a>').format(href, inner) if href else inner
        markup += Markup('<span class="{}">{}</span>').format(f"tone {tone}", inner) if tone else inner
    return markup


def _coded(text: str) -> Markup:
    from markupsafe import Markup, escape

    parts = str(text).split("`")
    if len(parts) % 2 == 0:  # an unpaired backtick stays as it is
        return escape(str(text))
    return Markup("").join(Markup("<code>{}</code>").format(p) if i % 2 else escape(p) for i, p in enumerate(parts))


@functools.cache
def _packed(library: str) -> str:
    # a third of the size; browsers unpack it (DecompressionStream)
    return base64.b64encode(gzip.compress(library.encode(), mtime=0)).decode()
