"""Adapters (LoRA and its kin), which are no part of a model's own weights until somebody merges them.

A folder that holds one beside a model may be the base and what was trained on it, or what both make together and the
adapter that is left over: the files do not tell. Where peft is installed, transformers goes by `adapter_config.json`
alone and loads the base that it names, whatever weights lie beside it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from quantkit import limits
from quantkit.errors import InputError

CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model*"
# peft's kinds that are tokens or keys in front of a text, and no change of a weight
_PROMPTS = ("PROMPT", "PREFIX", "P_TUNING", "CPT", "ADAPTION")
_AUTO = {
    "SEQ_CLS": "SequenceClassification",
    "TOKEN_CLS": "TokenClassification",
    "QUESTION_ANS": "QuestionAnswering",
    "FEATURE_EXTRACTION": "FeatureExtraction",
}


def demand_none(folder: Path, ref: str) -> None:
    """Refuse a folder with an adapter in it: `adapter-unmerged`. Looks at names, and reads the adapter's config alone.

    Args:
        ref: the model as the user gave it.
    """
    if not (folder / CONFIG).is_file():
        return
    weights = sorted(path.name for path in folder.glob(_WEIGHTS))
    kind, task, base = _stated(folder / CONFIG)
    alone = not (folder / "config.json").is_file()
    where = ref.partition("@")[0].removeprefix("hf:") if ref.startswith("hf:") else ref
    merges = bool(weights) and not any(word in kind for word in _PROMPTS)
    ways = [] if alone else [f"without it, where the weights hold it already: {_left_out(ref, [CONFIG, *weights])}"]
    if merges:
        tokens = where if any(folder.glob("tokenizer*")) else base or "BASE"
        model = f"peft.AutoPeftModelFor{_AUTO.get(task, 'CausalLM')}.from_pretrained({where!r})"
        tokenizer = f"transformers.AutoTokenizer.from_pretrained({tokens!r})"
        merged = f"{model}.merge_and_unload().save_pretrained('./merged'); {tokenizer}.save_pretrained('./merged')"
        ways.append(f"merged, in Python: import peft, transformers; {merged}")
    elif alone:
        ways.append(f"the model that it belongs to: {base or 'see its card'}")
    beside = "alone" if alone else f"beside a model{'' if weights else ', without its weights'}"
    raise InputError(
        "adapter-unmerged",
        where=f"{ref}: {CONFIG}",
        value=f"an adapter ({kind}{f' of {base}' if base else ''}) {beside}",
        rule="weights are quantized as they lie there, of which an adapter is no part",
        remedy="; or ".join(ways),
    )


def _left_out(ref: str, names: Sequence[str]) -> str:
    """Return what to do for a model to be without these files."""
    if ref.startswith("hf:"):
        name, _, revision = ref[3:].partition("@")
        folder = f"./{name.rpartition('/')[2]}"
        chosen = f"{name!r}, revision={revision or 'main'!r}, ignore_patterns='adapter_*', local_dir={folder!r}"
        return f"huggingface_hub.snapshot_download({chosen}), and compile {folder}"
    return f"delete or move {' and '.join(names)} out of the folder"


def _stated(path: Path) -> tuple[str, str, str]:
    """Kind of adapter, task and base, as its config has them; of a damaged one the kind is unknown."""
    try:
        stated = json.loads(limits.read(path))
    except (ValueError, RecursionError, InputError):
        stated = None
    stated = stated if isinstance(stated, dict) else {}
    kind, task, base = (str(stated.get(key) or "") for key in ("peft_type", "task_type", "base_model_name_or_path"))
    return kind or "of no known kind", task, base
