"""Count the prose of README, docs and guides that has to be read twice.

A sentence stands between two full stops of a paragraph or a list item. Tables, code, headings and comments are none.
Colons and semicolons end no sentence.
"""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
# written for one reader once, or generated from records
_NO_GUIDES = {"CHANGELOG.md", "PENDING.md", "SETTLED.md", "matrix.md", "models.md"}
LONGEST_SENTENCE, LONGEST_PARAGRAPH = 35, 90
_CLAUSE = re.compile(r"[^\w(]*(what|whatever|who|whoever|whose|whether|of (?:what|whom|which))\b[^?]*$", re.I)
# a full stop ends a sentence before a capital, a figure, code, or a name that is written small
_STOP = re.compile(r"(?<=[.!?])(?:\*\*|\))?\s+(?=[\W_]*(?:[A-Z0-9`]|quantkit|transformers|torch|vLLM|llama|onnx))")
_USERS = ("acme_quant/", "onnx/", "engine/", "gguf/", "openvino/", "model/config", "results/", "nightly/page/")
_FOLDERS = ("docs", "recipes", "calibration", "export", "benchmarks")
_LINK = re.compile(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\([^)]*\)")


@cache
def pages() -> list[Path]:
    """List the documents that people read."""
    found = [
        *ROOT.glob("*.md"),
        *(path for name in (*_FOLDERS, "quantkit") for path in sorted((ROOT / name).rglob("*.md"))),
    ]
    return [path for path in found if path.name not in _NO_GUIDES]


def paragraphs(text: str) -> Iterator[str]:
    """Yield paragraphs and list items, without fences, tables, headings and the addresses of links."""
    text = re.sub(r"^[ \t]*```.*?^[ \t]*```[ \t]*$", "\n", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->", "\n", text, flags=re.DOTALL)
    text = re.sub(r"^[ \t]*[|#].*$", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"^[ \t]*(?:[-*]|\d+\.) ", "\n", text, flags=re.MULTILINE)
    for block in re.split(r"\n\s*\n", text):
        if plain := " ".join(_LINK.sub(r"(\1)", block).split()):
            yield plain


def sentences(paragraph: str) -> list[str]:
    """Split a paragraph at full stops that a capital, a figure or a quotation follows."""
    return _STOP.split(re.sub(r"\b(e\.g|i\.e|et al|vs)\.", r"\1", paragraph))


def _words(text: str) -> int:
    return len(re.findall(r"[^\s]*\w[^\s]*", text))


def _listed(text: str, path: Path) -> str:
    return f"{path.relative_to(ROOT)}: {text[:110]}"


def _paragraphs() -> Iterator[tuple[Path, str]]:
    for path in pages():
        for paragraph in paragraphs(path.read_text(encoding="utf-8")):
            yield path, paragraph


def _sentences() -> Iterator[tuple[Path, str]]:
    for path, paragraph in _paragraphs():
        for sentence in sentences(paragraph):
            yield path, sentence


def long_sentences() -> list[str]:
    """List sentences of more than 35 words."""
    return [_listed(sentence, path) for path, sentence in _sentences() if _words(sentence) > LONGEST_SENTENCE]


def long_paragraphs() -> list[str]:
    """List paragraphs of more than 90 words."""
    return [_listed(paragraph, path) for path, paragraph in _paragraphs() if _words(paragraph) > LONGEST_PARAGRAPH]


def clauses_first() -> list[str]:
    """List sentences whose subject is a clause: "What is read is ..."."""
    return [_listed(sentence, path) for path, sentence in _sentences() if opens_with_clause(sentence)]


def opens_with_clause(sentence: str) -> bool:
    """Return whether the first word opens a clause; a question, and the title of a link, may."""
    return _CLAUSE.match(sentence) is not None


def dead_links() -> list[str]:
    """List links to files or headings that do not exist."""
    dead = []
    for path in pages():
        for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", path.read_text("utf-8"), flags=re.DOTALL)):
            if re.match(r"[a-z]+:", link):
                continue
            name, _, heading = link.partition("#")
            there = (path.parent / name).resolve() if name else path
            if not there.exists() or (heading and heading not in _headings(there)):
                dead.append(_listed(link, path))
    return dead


@cache
def _headings(path: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def dead_paths() -> list[str]:
    """List names of source files in code font, whole or from a folder on, that the repository does not have."""
    folders = (*_FOLDERS, "quantkit", "tests")
    there = "".join(f"/{path.relative_to(ROOT)}\n" for name in folders for path in (ROOT / name).rglob("*.*"))
    return [
        _listed(name, path)
        for path in pages()
        for name in re.findall(r"`([a-z_][\w/.-]*/[\w.-]+\.(?:py|yaml|md|jsonl?|toml|txt))`", path.read_text("utf-8"))
        if f"/{name}\n" not in there and not name.startswith(_USERS) and not re.search("NAME|YYYY", name)
    ]
