"""The one place that calls transformers' `from_pretrained`: local files, safetensors, and no code of the model's own.

Where transformers is not told, it asks on standard input whether it may run what lies in the folder, and an answer
runs it. Here it is told each time: no, unless the user has said `--trust-remote-code` for a model of theirs. A bundle
is never trusted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quantkit import limits
from quantkit.errors import InputError


def config(folder: Path, *, trust: bool = False) -> Any:
    """The config of a folder, as transformers reads it.

    Args:
        folder: with `config.json`.
        trust: run the folder's own config class.

    Raises:
        InputError: `remote-code`, for a class that is not transformers' own, or for attention from the hub.
        Exception: of many types, whatever transformers makes of a damaged file.
    """
    from transformers import AutoConfig

    with _no_code(folder):
        found = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust)
    attention = getattr(found, "_attn_implementation", None)
    if not trust and isinstance(attention, str) and "/" in attention:
        raise _remote_code(folder, f"attention from {attention}")
    return found


def tokenizer(folder: Path, *, trust: bool = False) -> Any:
    """The tokenizer of a folder; `trust` and errors as for `config`."""
    from transformers import AutoTokenizer

    with _no_code(folder):
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust)


def network(model_class: Any, folder: Path | None, *, trust: bool = False, **options: Any) -> Any:
    """A model of a class, from the folder's safetensors, or from the `state_dict` among the options.

    Args:
        model_class: a class, not its name: `auto_map` has no say.
        folder: None where `state_dict` and `config` are given.
        trust: as for `config`.
        options: of `from_pretrained`: dtype, config, state_dict, output_loading_info, ...

    Returns:
        the model, or (model, loading info) where `output_loading_info` asks for it.
    """
    with _no_code(folder):
        return model_class.from_pretrained(
            folder, **{"local_files_only": True, "use_safetensors": True, "trust_remote_code": trust, **options}
        )


def demand_layers(config: dict[str, Any], where: str) -> None:
    """Refuse a `config.json` of too many layers, which would be built for hours: `over-limit`."""
    for key, value in config.items():
        if isinstance(value, dict):
            demand_layers(value, where)
        elif isinstance(value, int) and ("layer" in key or "block" in key):
            limits.LAYERS.demand(value, f"{where}: {key}")


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
        remedy="read it, then give --trust-remote-code where a model is compiled; a bundle has no code",
    )
