"""The one place that calls transformers' `from_pretrained`, and a model's own code: whether the user trusts it.

Where transformers is not told, it asks on standard input whether it may run what lies in the folder, and an answer
runs it. Here it is told each time: no, unless the user has said `--trust-remote-code`. That trust is given to content:
what ran once may run again wherever the very same Python files lie beside a config, as in a bundle of that model. It is
kept on the user's side alone, <cache>/trusted/<sha256 of names and contents>. A config names the code:

    {"auto_map": {"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": "modeling_x.XForCausalLM"}}
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quantkit import limits
from quantkit.bundle.disk import write_atomic
from quantkit.content import cache_dir
from quantkit.errors import InputError
from quantkit.lazy import torch
from quantkit.model.source.weights import checked_file, disk_errors

# what names code, beside the weights
NAMING = ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")
_KEY = "auto_map"
_PLAIN = re.compile(r"\w+\.\w+")
# names of counts of layers; `depths` of networks with stages
_COUNTS = ("layer", "block", "depth", "stage")
_ATTENTION = (None, "eager", "sdpa", "flex_attention")
_OF_TOKENIZERS = ("tokenizer_config.json", "special_tokens_map.json")
# keys of a tokenizer's config that can name a file
_READ = ("vocab", "merges")


def config(folder: Path, *, trust: bool | None = None) -> Any:
    """Read the config of a folder, as transformers does.

    `trust`: run the folder's own config class; None, where its code was trusted before. Raises InputError
    (`remote-code`, a class that is not transformers' own, or attention from the hub), and whatever transformers makes
    of a damaged file.
    """
    if (folder / "config.json").is_file():
        stated = json.loads(limits.read(folder / "config.json"))
        demand_layers(stated if isinstance(stated, dict) else {}, f"{folder.name}: config.json")
    trust = is_trusted(folder) if trust is None else trust
    loaded = _auto("AutoConfig", "config.json", folder, trust)
    # attention is torch's: others come from packages, or from the hub
    parts = (getattr(loaded, name, None) for name in getattr(loaded, "sub_configs", None) or ())
    asked = [getattr(part, "_attn_implementation", None) for part in (loaded, *parts)]
    strange = next((name for name in asked if name not in _ATTENTION), None)
    if strange is not None and not trust:
        raise remote_code(str(folder), f"attention from {strange}")
    return loaded


def tokenizer(folder: Path, *, trust: bool | None = None) -> Any:
    """Load a folder's tokenizer; `trust` and errors as for `config`; `tokenizer-damaged` for one that names files."""
    for name in _OF_TOKENIZERS:
        if (folder / name).is_file():
            _demand_no_files(json.loads(limits.read(folder / name)), folder / name)
    trust = is_trusted(folder) if trust is None else trust
    return _auto("AutoTokenizer", "tokenizer_config.json", folder, trust)


def _auto(what: str, place: str, folder: Path, trust: bool) -> Any:
    """Load by the folder's own class where that is trusted, else by transformers' table."""
    import transformers

    offered = _classes(_map(folder, place).get(what)) if trust else []  # of several the last, a fast tokenizer
    with _no_code(folder):
        if offered:
            return load_code(_plain(offered[-1]), folder).from_pretrained(folder, local_files_only=True)
        auto = getattr(transformers, what)
        return auto.from_pretrained(folder, local_files_only=True, trust_remote_code=trust)


def network(model_class: Any, folder: Path | None, *, trust: bool | None = None, **options: Any) -> Any:
    """Load a model of a class, from the folder's safetensors, or from the `state_dict` among the options.

    Args:
        model_class: a class, not its name: `auto_map` has no say.
        folder: None where `state_dict` and `config` are given.
        options: of `from_pretrained`; with `output_loading_info` the answer is (model, loading info).
    """
    if folder is not None and "config" not in options:
        options["config"] = config(folder, trust=trust)
    fixed = {"local_files_only": True, "use_safetensors": True, "trust_remote_code": False}
    with _no_code(folder):  # its class is at hand: no code is looked for
        return model_class.from_pretrained(folder, **{**fixed, **options})


def config_of_gguf(path: Path) -> Any:
    """Read the config that transformers makes of a GGUF file's metadata; raises as `of_gguf`."""
    from transformers import AutoConfig

    with _no_code(path.parent):
        return AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)


def of_gguf(path: Path, unread: Mapping[str, Any]) -> Any:
    """Load what transformers makes of a GGUF file, float32; `unread`: what it does not read of its config."""
    from transformers import AutoModelForCausalLM

    loaded = config_of_gguf(path)
    for key, value in unread.items():
        setattr(loaded, key, value)
    options = {"gguf_file": path.name, "local_files_only": True, "config": loaded, "dtype": torch.float32}
    with _no_code(path.parent):
        return AutoModelForCausalLM.from_pretrained(path.parent, **options)


def demand_layers(config: dict[str, Any], where: str) -> None:
    """Refuse a `config.json` of too many layers, which would be built for hours: `over-limit`."""
    for key, value in config.items():
        if isinstance(value, dict):
            demand_layers(value, where)
        elif any(word in key for word in _COUNTS):
            counts = [count for count in (value if isinstance(value, list) else [value]) if isinstance(count, int)]
            limits.LAYERS.demand(max(counts, default=0), f"{where}: {key}")


def _demand_no_files(config: Any, path: Path) -> None:
    """Refuse keys that name files: transformers opens these, wherever they lie, and writes them into the tokenizer."""
    for key, value in config.items() if isinstance(config, dict) else ():
        if isinstance(value, str) and (key in _READ or key.endswith(("_file", "_spm"))):
            rule = "a tokenizer's files lie beside its config, under their own names"
            raise InputError("tokenizer-damaged", f"{path}: {key}", value, rule, "leave the key out")


@contextmanager
def _no_code(folder: Path | None) -> Iterator[None]:
    try:
        yield
    except ValueError as problem:
        if "trust_remote_code" not in str(problem):
            raise
        raise remote_code(str(folder), "its class is code in the folder") from None


def remote_code(where: str, value: str) -> InputError:
    """Make the error `remote-code` for code that the user has not trusted."""
    rule = "a model's own code is not run unasked"
    remedy = "read it, then give --trust-remote-code: `quantkit compile`, or `quantkit verify` of a bundle"
    return InputError("remote-code", where, value, rule, remedy)


# --- a model's own code -------------------------------------------------------------------------------------------


def code_files(folder: Path) -> list[Path]:
    """List all code beside the config: transformers imports no other, whatever its files import from each other."""
    return [checked_file(folder, path.name) for path in sorted(folder.glob("*.py"))]


def offers_code(folder: Path) -> bool:
    """Tell whether the folder names code, of its own or of another."""
    return any(_references(folder))


def load_code(reference: str, folder: Path) -> Any:
    """Run the code that a class, `module.Class`, is in. Only for a folder that is trusted."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    return get_class_from_dynamic_module(reference, folder, local_files_only=True)


def settled(config: dict[str, Any], folder: Path, *, trusted: bool) -> dict[str, Any]:
    """Return a config as it goes along: it names code that goes along with it, in its own folder, and no other."""
    if not isinstance(config.get(_KEY), dict):
        return config
    there = {path.stem for path in code_files(folder)} if trusted else set()
    kept: dict[str, Any] = {}
    for key, value in config[_KEY].items():
        many = [name if name is None else _plain(str(name)) for name in (value if isinstance(value, list) else [value])]
        if all(name is None or name.partition(".")[0] in there for name in many):
            kept[key] = many if isinstance(value, list) else many[0]
    return {**config, _KEY: kept} if kept else {key: value for key, value in config.items() if key != _KEY}


def trust(folder: Path) -> None:
    """Let the folder's code run, here and wherever the same files lie.

    Raises `remote-code`, `file-unreadable`; as `disk_errors`.
    """
    there = {path.stem for path in code_files(folder)}
    for place, reference in _references(folder):
        if _plain(reference).partition(".")[0] not in there and "--" in reference:
            value, rule = f"{reference} lies in another repository", "the code that is trusted lies beside the config"
            remedy = f"put the .py files of {reference.partition('--')[0]} into {folder}"
            raise InputError("remote-code", f"{folder.name}: {place}", value, rule, remedy)
    proof = _proof(folder)
    with disk_errors(proof.parent):
        proof.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(proof, b"")


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
    lines = [f"{path.name} {hashlib.sha256(limits.read(path)).hexdigest()}\n" for path in code_files(folder)]
    return cache_dir() / "trusted" / hashlib.sha256("".join(lines).encode()).hexdigest()


def _references(folder: Path) -> Iterator[tuple[str, str]]:
    """List (file, class) of all that the folder names."""
    for place in NAMING:
        for value in _map(folder, place).values():
            yield from ((place, name) for name in _classes(value))


def _classes(value: Any) -> list[str]:
    return [name for name in (value if isinstance(value, list) else [value]) if isinstance(name, str)]


def _map(folder: Path, place: str) -> dict[str, Any]:
    if not (folder / place).is_file():
        return {}
    try:
        stated = json.loads(limits.read(checked_file(folder, place)))
    except (ValueError, RecursionError):  # whoever opens the file says so
        return {}
    named = stated.get(_KEY) if isinstance(stated, dict) else None
    return named if isinstance(named, dict) else {}


def _plain(reference: str) -> str:
    """Drop the repository that a class was first loaded from, `org/name--module.Class`."""
    return reference.rpartition("--")[2]
