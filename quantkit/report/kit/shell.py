"""The shell of every page: one base template, one style sheet, one policy for what a page may do, one way to write it.

What comes from models and data is untrusted: Jinja escapes it in the text, JSON in a script element is escaped besides,
and each page's own policy lets no other script run and no request leave. A report is one file: plotly is embedded once,
gzipped. The pages of a site share their style and script, which lie beside them.
"""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit import machine
from quantkit.bundle.disk import write_atomic
from quantkit.errors import InputError, MissingDependency
from quantkit.report.kit import words

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

_TEMPLATES = Path(__file__).with_name("templates")
# plotly and the drawings of the site set styles on elements: hence one `unsafe-inline`; a browser takes `'self'` for a
# web server's files, `file:` for those of a disk
_POLICY = (
    "default-src 'none'; script-src {scripts}; style-src {styles}'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'"
)
_BESIDE = "'self' file:"


def demand() -> None:
    """Refuse to begin without what a page needs. Raises MissingDependency: plotly, extra `report`."""
    if not machine.has("plotly"):
        raise MissingDependency("plotly", extra="report", purpose="the page")


def write(path: Path, text: str) -> None:
    """Write a page, whole or not at all. Raises InputError: `file-unwritable`."""
    try:
        write_atomic(path, text.encode())
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError("file-unwritable", where=str(path), value=reason, remedy="check the folder") from None


def rendered(template: str, **values: Any) -> str:
    """A report from one of its templates: one file with its style, its script and plotly.

    Raises:
        MissingDependency: plotly, extra `report`.
    """
    from markupsafe import Markup

    library, script = _library(), read("page.js")
    hashes = (base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in (script, library))
    policy = _POLICY.format(scripts=" ".join(f"'sha256-{digest}'" for digest in hashes), styles="")
    # these three are this package's own and plotly's; everything else is escaped
    own = {"style": read("page.css"), "script": script, "library": _packed(library)}
    return _filled(_TEMPLATES, template, policy, **values, **{name: Markup(text) for name, text in own.items()})  # noqa: S704


def fragment(template: str, **values: Any) -> str:
    """A part of somebody else's page, from one of the templates, everything in it escaped."""
    return _environment(_TEMPLATES).get_template(template).render(**values)


def page_of_site(folder: Path, template: str, **values: Any) -> str:
    """A page whose style and script lie beside it, from a template in `folder` that extends the shell."""
    return _filled(folder, template, _POLICY.format(scripts=_BESIDE, styles=f"{_BESIDE} "), **values)


def read(name: str) -> str:
    """What all pages share: `page.css`, `page.js`."""
    return (_TEMPLATES / name).read_text(encoding="utf-8")


def _filled(folder: Path, template: str, policy: str, **values: Any) -> str:
    return _environment(folder).get_template(template).render(**values, policy=policy).strip("\n") + "\n"


@functools.cache
def _environment(folder: Path) -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader([folder, _TEMPLATES]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"plural": words.plural, "sentence": words.sentence, "visible": words.visible, "coded": _coded}
    made.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return made


def _coded(text: str) -> Markup:
    """Escaped text, what stands between backticks as code."""
    from markupsafe import Markup, escape

    parts = text.split("`")
    if len(parts) % 2 == 0:  # a backtick without its other one is a backtick
        return escape(text)
    return Markup("").join(Markup("<code>{}</code>").format(p) if i % 2 else escape(p) for i, p in enumerate(parts))


def _library() -> str:
    try:
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]
    except ImportError:
        raise MissingDependency("plotly", extra="report", purpose="the report page") from None
    return str(get_plotlyjs())


@functools.cache
def _packed(library: str) -> str:
    # a third of its size; browsers unpack it themselves (DecompressionStream)
    return base64.b64encode(gzip.compress(library.encode(), mtime=0)).decode()
