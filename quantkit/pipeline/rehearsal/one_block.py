"""A model of one block, cut out of a large one: what a rehearsal compiles.

Its folder holds the config with one layer, that block's weights under the number 0, and what lies outside the blocks
with a few rows of the vocabulary. So it is opened, quantized, exported and loaded again by the code that will do it to
the whole, in the time and memory of a block.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.errors import InputError
from quantkit.exporters.carried import carried
from quantkit.recipe import Override, Recipe

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.model.streaming.stream import StreamedModel
    from quantkit.pipeline.blocks.prepared import Prepared

# how configs call the number of blocks, and how many of the first ones are without experts
_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_DENSE_FIRST, _DENSE_LISTED = "first_k_dense_replace", "mlp_only_layers"
# rows of the vocabulary that are kept
ROWS = 4096


def cut(prepared: Prepared, index: int, folder: Path) -> None:
    """Write the model of block `index` alone.

    Args:
        prepared: of the whole model; its weights are read here, those of the block and a few others.

    Raises:
        InputError: `weights-nonfinite`, `weights-truncated`; `block-not-alone`, where the config of one layer makes
            another block.
    """
    from safetensors.torch import save_file

    from quantkit.model.streaming.stream import StreamedModel

    source = prepared.original
    # passes that change the whole model do so with the cut one as well
    stream = StreamedModel(source) if prepared.stream.transforms else prepared.stream
    folder.mkdir(parents=True)
    for path, name in carried(source.path, code=source.trust_remote_code):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / name)
    config = _config(source.config, index, len(stream.block_names))
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = dict(_tensors(stream, index, _vocabulary(source.config)))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _demand_same_block(prepared, index, folder)


def alone(recipe: Recipe, prepared: Prepared, index: int) -> Recipe:
    """The recipe for block `index` as the only one: its layers are stored as they will be in the whole model."""
    layers, before = prepared.layers, prepared.stream.block_names[index]
    default = recipe.scheme.weights
    overrides = []
    for name in layers.inside:
        if not name.startswith(f"{before}."):
            continue
        scheme = layers.schemes.get(name)
        if default is not None and scheme != default:
            stored = None if scheme is None else scheme.model_dump(mode="json")
            overrides.append(Override(match=renamed(name, before), weights=stored))
    if layers.head is not None and layers.schemes[layers.head] != default:
        overrides.append(Override(match="lm_head", weights=layers.schemes[layers.head].model_dump(mode="json")))
    keep = [each for each in recipe.keep if each in ("embeddings", "lm_head", "norms")]
    # by which a layer is what its number says
    plain = recipe.scheme.model_copy(update={"mixture": None})
    return recipe.model_copy(update={"overrides": overrides, "keep": keep, "scheme": plain})


def renamed(name: str, block: str) -> str:
    """A name inside a block as it is where that block is number 0."""
    return f"{block.rpartition('.')[0]}.0{name.removeprefix(block)}"


def _config(config: Mapping[str, Any], index: int, count: int) -> dict[str, Any]:
    """With one layer; what is listed by layer keeps the entry of that one."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        inner = isinstance(value, dict) and key.endswith("_config")
        listed = isinstance(value, list) and len(value) == count > 1
        found[key] = _config(value, index, count) if inner else [value[index]] if listed else value
    for key in _COUNTS:
        if found.get(key) == count:
            found[key] = 1
    if isinstance(found.get(_DENSE_FIRST), int):
        found[_DENSE_FIRST] = int(index < found[_DENSE_FIRST])
    if isinstance(config.get(_DENSE_LISTED), list):
        found[_DENSE_LISTED] = [0] if index in config[_DENSE_LISTED] else []
    if isinstance(found.get("vocab_size"), int):
        found["vocab_size"] = min(ROWS, found["vocab_size"])
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if isinstance(found.get(key), int) and found[key] >= ROWS:
            found[key] = 0
    return found


def _vocabulary(config: Mapping[str, Any]) -> int:
    size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    return size if isinstance(size, int) else 0


def _tensors(stream: StreamedModel, index: int, vocabulary: int) -> Iterator[tuple[str, Tensor]]:
    """What the cut model stores, each tensor of the files once."""
    block, seen = stream.block_names[index], set()
    weights = stream.source.weights
    for name, file in stream.files.items():
        inside = name.startswith(f"{block}.")
        if file in seen or (not inside and name.startswith(f"{stream.path}.")):
            continue
        seen.add(file)
        value = (
            weights.beginning(file, ROWS) if not inside and weights.entries[file].shape[:1] == (vocabulary,) else None
        )
        yield renamed(name, block) if inside else name, weights.read(file) if value is None else value


def _demand_same_block(prepared: Prepared, index: int, folder: Path) -> None:
    from quantkit.model.source.open import open_model
    from quantkit.model.streaming.stream import StreamedModel

    mine = prepared.stream.blocks[index]
    theirs = StreamedModel(open_model(str(folder.absolute()), trust_remote_code=None, hashed=False)).blocks[0]
    shapes = [{name: tuple(value.shape) for name, value in block.named_parameters()} for block in (mine, theirs)]
    if shapes[0] != shapes[1] or type(mine) is not type(theirs):
        raise InputError(
            "block-not-alone",
            where=prepared.stream.block_names[index],
            value="a config of one layer makes another block",
            rule="a block is rehearsed as the only one of a model",
        )


def few(ids: Tensor, samples: int) -> Tensor:
    """Ids of the first sequences, in the vocabulary that is kept."""
    return copy.deepcopy(ids[:samples]).remainder(ROWS)
