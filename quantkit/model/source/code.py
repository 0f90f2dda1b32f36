"""A model's own code: the Python files beside its config, which `auto_map` names, and whether the user trusts them.

    {"auto_map": {"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": "modeling_x.XForCausalLM"}}

Trust is given to content: what `--trust-remote-code` let run once may run again wherever the very same files lie, as in
a bundle of that model. It is kept on the user's side alone, <cache>/trusted/<sha256 of names and contents>; what a
folder says of itself does not count.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quantkit import limits
from quantkit.bundle.disk import write_atomic
from quantkit.content import cache_dir
from quantkit.errors import InputError
from quantkit.model.source.weights import checked_file, disk_errors

# what names code, beside the weights
NAMING = ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")
_KEY = "auto_map"
_PLAIN = re.compile(r"\w+\.\w+")


def files(folder: Path) -> list[Path]:
    """All code beside the config: transformers imports no other, whatever its files import from each other."""
    return [checked_file(folder, path.name) for path in sorted(folder.glob("*.py"))]


def is_offered(folder: Path) -> bool:
    """Tell whether the folder names code, of its own or of another."""
    return any(_references(folder))


def named(folder: Path, what: str, place: str = "config.json") -> str | None:
    """A class of the folder's own, as `module.Class`, by its key in an `auto_map`; None: transformers' own will do.

    Args:
        what: AutoConfig, AutoTokenizer, ... Of several classes the last is taken, a fast tokenizer.
        place: a file of `NAMING`.
    """
    value = _map(folder, place).get(what)
    offered = [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str)]
    return _plain(offered[-1]) if offered else None


def load(reference: str, folder: Path) -> Any:
    """Run the code that a class is in. Only for a folder that is trusted."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    return get_class_from_dynamic_module(reference, folder, local_files_only=True)


def settled(config: dict[str, Any], folder: Path, *, trusted: bool) -> dict[str, Any]:
    """A config as it goes along: it names the code that goes along with it, in its own folder, and no other."""
    if not isinstance(config.get(_KEY), dict):
        return config
    there = {path.stem for path in files(folder)} if trusted else set()
    kept: dict[str, Any] = {}
    for key, value in config[_KEY].items():
        many = [one if one is None else _plain(str(one)) for one in (value if isinstance(value, list) else [value])]
        if all(one is None or one.partition(".")[0] in there for one in many):
            kept[key] = many if isinstance(value, list) else many[0]
    rest = {key: value for key, value in config.items() if key != _KEY}
    return {**config, _KEY: kept} if kept else rest


def trust(folder: Path) -> None:
    """Let the folder's code run, here and wherever the same files lie.

    Raises:
        InputError: `remote-code`, a class whose file is not there; `file-unreadable`. Stopped: `disk-full`.
    """
    there = {path.stem for path in files(folder)}
    for place, reference in _references(folder):
        if _plain(reference).partition(".")[0] not in there and "--" in reference:
            repository = reference.partition("--")[0]
            raise InputError(
                "remote-code",
                where=f"{folder.name}: {place}",
                value=f"{reference} lies in another repository",
                rule="the code that is trusted lies beside the config",
                remedy=f"put the .py files of {repository} into {folder}",
            )
    place_of = _proof(folder)
    with disk_errors(place_of.parent):
        place_of.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(place_of, b"")


def is_trusted(folder: Path) -> bool:
    """Tell whether the folder names code of its own, and it is what the user has let run before."""
    references = list(_references(folder))
    if not references or not all(_PLAIN.fullmatch(reference) for _, reference in references):
        return False
    proof = _proof(folder)
    try:
        kept = [proof.lstat(), proof.parent.lstat()]
    except OSError:
        return False
    own = all(entry.st_uid == os.getuid() and not entry.st_mode & (stat.S_IWGRP | stat.S_IWOTH) for entry in kept)
    return own and stat.S_ISREG(kept[0].st_mode)


def _proof(folder: Path) -> Path:
    lines = [f"{path.name} {hashlib.sha256(limits.read(path)).hexdigest()}\n" for path in files(folder)]
    return cache_dir() / "trusted" / hashlib.sha256("".join(lines).encode()).hexdigest()


def _references(folder: Path) -> Iterator[tuple[str, str]]:
    """(file, class) of all that the folder names."""
    for place in NAMING:
        for value in _map(folder, place).values():
            yield from ((place, one) for one in (value if isinstance(value, list) else [value]) if isinstance(one, str))


def _map(folder: Path, place: str) -> dict[str, Any]:
    if not (folder / place).is_file():
        return {}
    try:
        stated = json.loads(limits.read(checked_file(folder, place)))
    except (ValueError, RecursionError):  # whoever opens the file says so
        return {}
    found = stated.get(_KEY) if isinstance(stated, dict) else None
    return found if isinstance(found, dict) else {}


def _plain(reference: str) -> str:
    """Without the repository that a class was first loaded from, `org/name--module.Class`."""
    return reference.rpartition("--")[2]
