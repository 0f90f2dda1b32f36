"""The one place that calls transformers' `from_pretrained`: local files, safetensors, and no code of the model's own.

Where transformers is not told, it asks on standard input whether it may run what lies in the folder, and an answer
runs it. Here it is told each time: no, unless the user has said `--trust-remote-code` for a model of theirs, or did so
before for the very same code, which a bundle of that model has (`code.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quantkit import limits
from quantkit.errors import InputError
from quantkit.lazy import torch
from quantkit.model.source import code

# names of counts of layers; `depths` of networks with stages
_COUNTS = ("layer", "block", "depth", "stage")
_ATTENTION = (None, "eager", "sdpa", "flex_attention")
_OF_TOKENIZERS = ("tokenizer_config.json", "special_tokens_map.json")
# keys of a tokenizer's config that can name a file
_READ = ("vocab", "merges")


def config(folder: Path, *, trust: bool | None = None) -> Any:
    """The config of a folder, as transformers reads it.

    Args:
        folder: with `config.json`.
        trust: run the folder's own config class; None, where its code was trusted before.

    Raises:
        InputError: `remote-code`, for a class that is not transformers' own, or for attention from the hub.
        Exception: of many types, whatever transformers makes of a damaged file.
    """
    from transformers import AutoConfig

    if (folder / "config.json").is_file():
        stated = json.loads(limits.read(folder / "config.json"))
        demand_layers(stated if isinstance(stated, dict) else {}, f"{folder.name}: config.json")
    trust = code.is_trusted(folder) if trust is None else trust
    own = code.named(folder, "AutoConfig") if trust else None
    with _no_code(folder):
        if own is not None:
            found = code.load(own, folder).from_pretrained(folder, local_files_only=True)
        else:
            found = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust)
    _demand_own_attention(found, folder, trust)
    return found


def tokenizer(folder: Path, *, trust: bool | None = None) -> Any:
    """The tokenizer of a folder; `trust` and errors as for `config`; `tokenizer-damaged` for one that names files."""
    from transformers import AutoTokenizer

    for name in _OF_TOKENIZERS:
        if (folder / name).is_file():
            _demand_no_files(json.loads(limits.read(folder / name)), folder / name)
    trust = code.is_trusted(folder) if trust is None else trust
    own = code.named(folder, "AutoTokenizer", "tokenizer_config.json") if trust else None
    with _no_code(folder):
        if own is not None:
            return code.load(own, folder).from_pretrained(folder, local_files_only=True)
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust)


def network(model_class: Any, folder: Path | None, *, trust: bool | None = None, **options: Any) -> Any:
    """A model of a class, from the folder's safetensors, or from the `state_dict` among the options.

    Args:
        model_class: a class, not its name: `auto_map` has no say.
        folder: None where `state_dict` and `config` are given.
        trust: as for `config`.
        options: of `from_pretrained`: dtype, config, state_dict, output_loading_info, ...

    Returns:
        the model, or (model, loading info) where `output_loading_info` asks for it.
    """
    if folder is not None and "config" not in options:
        options["config"] = config(folder, trust=trust)
    with _no_code(folder):  # its class is at hand: no code is looked for
        return model_class.from_pretrained(
            folder, **{"local_files_only": True, "use_safetensors": True, "trust_remote_code": False, **options}
        )


def config_of_gguf(path: Path) -> Any:
    """The config that transformers makes of a GGUF file's metadata; raises as `of_gguf`."""
    from transformers import AutoConfig

    with _no_code(path.parent):
        return AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)


def of_gguf(path: Path, unread: Mapping[str, Any]) -> Any:
    """The model that transformers makes of a GGUF file, float32.

    Args:
        unread: of its config what transformers does not read there.

    Raises:
        Exception: of many types, whatever transformers makes of a damaged file.
    """
    from transformers import AutoModelForCausalLM

    options = {"gguf_file": path.name, "local_files_only": True}
    found = config_of_gguf(path)
    for key, value in unread.items():
        setattr(found, key, value)
    with _no_code(path.parent):
        return AutoModelForCausalLM.from_pretrained(path.parent, config=found, dtype=torch.float32, **options)


def demand_layers(config: dict[str, Any], where: str) -> None:
    """Refuse a `config.json` of too many layers, which would be built for hours: `over-limit`."""
    for key, value in config.items():
        if isinstance(value, dict):
            demand_layers(value, where)
        elif any(word in key for word in _COUNTS):
            counts = [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, int)]
            limits.LAYERS.demand(max(counts, default=0), f"{where}: {key}")


def _demand_own_attention(config: Any, folder: Path, trust: bool) -> None:
    """Attention is torch's: others come from packages, or from the hub."""
    asked = [getattr(each, "_attn_implementation", None) for each in (config, *_inner(config))]
    strange = next((each for each in asked if each not in _ATTENTION), None)
    if strange is not None and not trust:
        raise _remote_code(folder, f"attention from {strange}")


def _inner(config: Any) -> list[Any]:
    names = getattr(config, "sub_configs", None) or {}
    return [each for each in (getattr(config, name, None) for name in names) if each is not None]


def _demand_no_files(config: Any, path: Path) -> None:
    """transformers opens what these keys name, wherever it lies, and writes what it finds into the tokenizer."""
    if not isinstance(config, dict):
        return
    for key, value in config.items():
        if isinstance(value, str) and (key in _READ or key.endswith(("_file", "_spm"))):
            raise InputError(
                "tokenizer-damaged",
                where=f"{path}: {key}",
                value=value,
                rule="a tokenizer's files lie beside its config, under their own names",
                remedy="leave the key out",
            )


@contextmanager
def _no_code(folder: Path | None) -> Iterator[None]:
    try:
        yield
    except ValueError as problem:
        if "trust_remote_code" not in str(problem):
            raise
        raise _remote_code(folder, "its class is code in the folder") from None


def _remote_code(folder: Path | None, value: str) -> InputError:
    return InputError(
        "remote-code",
        where=str(folder),
        value=value,
        rule="a model's own code is not run unasked",
        remedy="read it, then give --trust-remote-code: `quantkit compile`, or `quantkit verify` of a bundle",
    )
