"""All calls of transformers' `from_pretrained`, and the user's trust in a model's own code.

By default transformers asks on standard input whether to run a folder's code, and runs it on a "yes". Here it is always
told: no, unless the user passes `--trust-remote-code`. Trust belongs to contents: code that ran once may run again
wherever the same Python files are beside a config, as in a bundle of that model. It is recorded on the user's side
only,
in <cache>/trusted/<sha256 of names and contents>. A config names the code:

    {"auto_map": {"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": "modeling_x.XForCausalLM"}}
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quantkit import limits
from quantkit.bundle.disk import write_atomic
from quantkit.content import cache_dir
from quantkit.errors import InputError
from quantkit.lazy import torch
from quantkit.model.source.weights import INDEX, checked_file, disk_errors

# files that may name code
NAMING = ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")
# files of a processor of images and text, the newer first
PROCESSORS = ("processor_config.json", "preprocessor_config.json")
_KEY = "auto_map"
_PLAIN = re.compile(r"\w+\.\w+")
# number of a block in the name of its tensors
_NUMBER = re.compile(r"(?:^|\.)(\d+)\.")
# words in the names of layer counts, no sizes (`vocab_size_per_layer_input`); `depths` for networks with stages
_COUNTS = ("layer", "block", "depth", "stage")
_ATTENTION = (None, "eager", "sdpa", "flex_attention")
_OF_TOKENIZERS = ("tokenizer_config.json", "special_tokens_map.json")
# keys of a tokenizer's config that can name a file
_READ = ("vocab", "merges")


def config(folder: Path, *, trust: bool | None = None) -> Any:
    """Read the config of a folder with transformers.

    `trust` lets the folder's own config class run; None for code that was trusted before. Raises InputError
    (`remote-code`
    for another class than transformers' own, or attention from the hub), and any error of transformers on a damaged
    file.
    """
    if (folder / "config.json").is_file():
        stated = json.loads(limits.read(folder / "config.json"))
        demand_layers(stated if isinstance(stated, dict) else {}, f"{folder.name}: config.json")
    trust = is_trusted(folder) if trust is None else trust
    loaded = _auto("AutoConfig", "config.json", folder, trust)
    # only torch's attention: others come from packages, or from the hub
    parts = (getattr(loaded, name, None) for name in getattr(loaded, "sub_configs", None) or ())
    asked = [getattr(part, "_attn_implementation", None) for part in (loaded, *parts)]
    strange = next((name for name in asked if name not in _ATTENTION), None)
    if strange is not None and not trust:
        raise remote_code(str(folder), f"attention from {strange}")
    return loaded


def tokenizer(folder: Path, *, trust: bool | None = None) -> Any:
    """Load a folder's tokenizer; `trust` and errors as for `config`; `tokenizer-damaged` if it names files."""
    for name in _OF_TOKENIZERS:
        if (folder / name).is_file():
            _demand_no_files(json.loads(limits.read(folder / name)), folder / name)
    trust = is_trusted(folder) if trust is None else trust
    return _auto("AutoTokenizer", "tokenizer_config.json", folder, trust)


def processor(folder: Path, *, trust: bool | None = None) -> Any:
    """Load the processor of a folder's images and text; `trust` and errors as for `config`."""
    trust = is_trusted(folder) if trust is None else trust
    return _auto("AutoProcessor", PROCESSORS[0], folder, trust)


def extractor(folder: Path, *, trust: bool | None = None) -> Any:
    """Load the feature extractor of a folder's recordings; `trust` and errors as for `config`."""
    trust = is_trusted(folder) if trust is None else trust
    return _auto("AutoFeatureExtractor", PROCESSORS[1], folder, trust)


def _auto(what: str, place: str, folder: Path, trust: bool) -> Any:
    """Load by the folder's own class if it is trusted, else by transformers' table."""
    import transformers

    offered = _classes(_map(folder, place).get(what)) if trust else []  # the last of several is the fast tokenizer
    with _no_code(folder):
        if offered:
            return load_code(_plain(offered[-1]), folder).from_pretrained(folder, local_files_only=True)
        auto = getattr(transformers, what)
        return auto.from_pretrained(folder, local_files_only=True, trust_remote_code=trust)


def network(
    model_class: Any, folder: Path | None, *, trust: bool | None = None, first: int | None = None, **options: Any
) -> Any:
    """Load a model of a class, from the folder's safetensors, or from the `state_dict` among the options.

    Args:
        model_class: a class, not a name: `auto_map` is ignored.
        folder: None with `state_dict` and `config`.
        first: number of the first blocks, if `config` has only these.
        options: options of `from_pretrained`; with `output_loading_info` the result is (model, loading info).
    """
    if folder is not None and "config" not in options:
        options["config"] = config(folder, trust=trust)
    fixed = {"local_files_only": True, "use_safetensors": True, "trust_remote_code": False}
    with _no_code(folder), _with_first(folder, first) as place:  # its class is known: no code is needed
        return model_class.from_pretrained(place, **{**fixed, **options})


@contextmanager
def _with_first(folder: Path | None, blocks: int | None) -> Iterator[Path | None]:
    """Yield the folder, or one of links without the shards of later blocks: transformers maps each file of an index."""
    if folder is None or blocks is None or not (folder / INDEX).is_file():
        yield folder
        return
    index = json.loads(limits.read(folder / INDEX))
    every = index["weight_map"]
    kept = {name: shard for name, shard in every.items() if (at := _NUMBER.search(name)) is None or int(at[1]) < blocks}
    with tempfile.TemporaryDirectory(prefix="shards-") as place:
        for file in folder.absolute().iterdir():
            if file.name != INDEX and (file.name not in every.values() or file.name in kept.values()):
                (Path(place) / file.name).symlink_to(file)
        (Path(place) / INDEX).write_text(json.dumps({**index, "weight_map": kept}), encoding="utf-8")
        yield Path(place)


def with_generation(model: Any, folder: Path) -> None:
    """Give a model the folder's generation config, as loading it does: it may name the token that begins a text."""
    from transformers import GenerationConfig

    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)


def config_of_gguf(path: Path) -> Any:
    """Read the config of a GGUF file's metadata with transformers; raises as `of_gguf`."""
    from transformers import AutoConfig

    with _no_code(path.parent):
        return AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)


def of_gguf(path: Path, unread: Mapping[str, Any]) -> Any:
    """Load a GGUF file with transformers, float32; `unread` has config values that transformers does not read."""
    from transformers import AutoModelForCausalLM

    loaded = config_of_gguf(path)
    for key, value in unread.items():
        setattr(loaded, key, value)
    options = {"gguf_file": path.name, "local_files_only": True, "config": loaded, "dtype": torch.float32}
    with _no_code(path.parent):
        return AutoModelForCausalLM.from_pretrained(path.parent, **options)


def demand_layers(config: dict[str, Any], where: str) -> None:
    """Refuse a `config.json` of too many layers, whose model would take hours to build: `over-limit`."""
    for key, value in config.items():
        if isinstance(value, dict):
            demand_layers(value, where)
        elif "size" not in key and any(word in key for word in _COUNTS):
            counts = [count for count in (value if isinstance(value, list) else [value]) if isinstance(count, int)]
            limits.LAYERS.demand(max(counts, default=0), f"{where}: {key}")


def _demand_no_files(config: Any, path: Path) -> None:
    """Refuse keys with file names: transformers would open them anywhere, and copy them into the tokenizer."""
    for key, value in config.items() if isinstance(config, dict) else ():
        if isinstance(value, str) and (key in _READ or key.endswith(("_file", "_spm"))):
            rule = "a tokenizer's files are beside its config, under their own names"
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
    """List the Python files beside the config; transformers imports no others."""
    return [checked_file(folder, path.name) for path in sorted(folder.glob("*.py"))]


def offers_code(folder: Path) -> bool:
    """Tell whether the folder names code, its own or other."""
    return any(_references(folder))


def load_code(reference: str, folder: Path) -> Any:
    """Run the code of a class, `module.Class`, in a trusted folder."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    return get_class_from_dynamic_module(reference, folder, local_files_only=True)


def settled(config: dict[str, Any], folder: Path, *, trusted: bool) -> dict[str, Any]:
    """Return a config for a copy of the model: it names only code that is copied too."""
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
    """Let the folder's code run, here and wherever the same files are.

    Raises `remote-code`, `file-unreadable`; as `disk_errors`.
    """
    there = {path.stem for path in code_files(folder)}
    for place, reference in _references(folder):
        if _plain(reference).partition(".")[0] not in there and "--" in reference:
            value, rule = f"{reference} is in another repository", "trusted code must be beside the config"
            remedy = f"put the .py files of {reference.partition('--')[0]} into {folder}"
            raise InputError("remote-code", f"{folder.name}: {place}", value, rule, remedy)
    proof = _proof(folder)
    with disk_errors(proof.parent):
        proof.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(proof, b"")


def is_trusted(folder: Path) -> bool:
    """Tell whether the folder names code of its own, and the user has trusted it before."""
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
    """Yield (file, class) of all code that the folder names."""
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
    except (ValueError, RecursionError):  # opening the file reports the error
        return {}
    named = stated.get(_KEY) if isinstance(stated, dict) else None
    return named if isinstance(named, dict) else {}


def _plain(reference: str) -> str:
    """Drop the repository in `org/name--module.Class`."""
    return reference.rpartition("--")[2]
