"""Tokenize text with the files beside a model, without transformers."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit import limits
from quantkit.errors import InputError, MissingDependency, reading


class Tokenizer:
    """Tokenizer from a folder's tokenizer.json and the files beside it.

    Raises:
        MissingDependency: tokenizers.
        InputError: `no-tokenizer`.
    """

    def __init__(self, folder: Path) -> None:
        try:
            import tokenizers
        except ImportError:
            raise MissingDependency("tokenizers", extra="onnx", purpose="text in and out") from None
        path = folder / "tokenizer.json"
        if not path.is_file():
            rule = "text needs the model's tokenizer"
            remedy = "compile the model with its tokenizer's files, or use the torch runtime where model/ holds others"
            raise InputError("no-tokenizer", str(path), "no such file", rule, remedy)
        self._where = str(path)
        with reading(self._damaged):
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        # A file may hold a cut and a fill (sentence-transformers' do); transformers applies neither unasked.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.config = json_or_empty(folder / "tokenizer_config.json")
        self.generation = json_or_empty(folder / "generation_config.json")
        self._template = folder / "chat_template.jinja"
        ends = self.generation.get("eos_token_id")
        if ends is None:
            ends = json_or_empty(folder / "config.json").get("eos_token_id")
        self.ends = set(ends if isinstance(ends, list) else [ends]) - {None}

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the token ids of a text."""
        with reading(self._damaged):
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens."""
        with reading(self._damaged):
            text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def _damaged(self, problem: str) -> InputError:
        return InputError("no-tokenizer", self._where, problem, "the tokenizers library reads tokenizer.json")

    def chat(self, prompt: str) -> str:
        """Put a user's message into the model's chat template.

        Raises:
            InputError: `no-chat-template`.
        """
        template = self.config.get("chat_template")
        if self._template.is_file():
            with reading(_no_template):
                template = limits.read(self._template).decode("utf-8")
        if isinstance(template, list):  # several templates, by name
            named = (x for x in template if isinstance(x, dict) and x.get("name") == "default")
            template = next((entry.get("template") for entry in named), None)
        tokens = {
            name: value.get("content") if isinstance(value, dict) else value
            for name, value in self.config.items()
            if name.endswith("_token")
        }
        return rendered(template, prompt, tokens)


def rendered(template: Any, prompt: str, tokens: Mapping[str, Any]) -> str:
    """Render a user's message in a chat template, in Jinja's sandbox (CVE-2024-34359).

    Args:
        template: text of the template; any other type counts as none.
        tokens: special tokens by the names that templates use: `bos_token`.

    Raises:
        InputError: `no-chat-template`.
    """
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    if not isinstance(template, str):
        raise InputError("no-chat-template", where="--chat", value="the model has none", remedy="leave out --chat")

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    # as transformers defines it: some templates write today's date
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    with reading(_no_template), limits.guarded("--chat"):
        return environment.from_string(template).render(
            messages=[{"role": "user", "content": prompt}], add_generation_prompt=True, **tokens
        )


def _no_template(problem: str) -> InputError:
    return InputError("no-chat-template", where="--chat", value=problem, remedy="leave out --chat")


def json_or_empty(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file; {} if there is none."""
    try:
        content = json.loads(limits.read(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
