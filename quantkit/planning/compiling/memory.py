"""What is in memory at once in each part of a compile, counted in bytes of tensors; `forecast.py` knows how often.

    prove      the model as plain transformers has it, whole or as much of it as fits anyway
    begin      embeddings and head, and the hidden states before the first block
    quantize   a block with what its widest solve holds, hidden states in and out, what blocks are given beside them,
               the activations of one forward
    check      of a checkpoint a few blocks twice; of a graph its session, and one block of what it is held against
    score      both heads, both models' hidden states, a few positions of logits; of a graph its session
    confirm    of the original and of its export, one after the other, all of it; left out of large models

Embeddings and head, the *ends*, are loaded whole, in 32-bit floats, wherever they are needed: once where a model begins
and where an export is checked, twice where two heads are compared. With a large vocabulary they are most of what there
is, and they are not a matter of fitting. Tensors as large as they go back to the system when they are freed; of what is
smaller, glibc's heap keeps a share, which stays with the parts after it.
"""

from __future__ import annotations

from collections.abc import Mapping

from quantkit.formats import stored_bits
from quantkit.planning.compiling.spec import CompileSpec, elements, needs, shared, stores, storing
from quantkit.planning.compiling.work import LONG, LONG_SEQUENCES, SCORED_TOGETHER
from quantkit.planning.model.architecture import Architecture
from quantkit.planning.model.storage import table_bytes
from quantkit.planning.model.stored import LAYOUTS

# logits of one model that are in memory at one time
_LOGITS = 1 << 23
# bytes of a token in a tokenizer: a byte-level BPE of 24,000 takes 28 MB, benchmarks/harness/tokenizer_side.py
_TOKEN = 1164
# bytes that a package which a layout is loaded with takes beyond transformers: importing bitsandbytes 0.50
_LIBRARY = {"bitsandbytes": 4.8e7}
# a model of so many bytes is held against plain transformers as a whole, whatever else its compile takes
WHOLE = 640 * 2**20
# a larger one is confirmed where that takes so much of what its other parts take
CONFIRMED = 1.25
# bytes from which on hidden states lie in a file
_ON_DISK = 1 << 30

Terms = Mapping[str, float]


def held(spec: CompileSpec) -> dict[str, dict[str, float]]:
    """Part -> what it holds -> bytes; `one` is the interpreter with its libraries, `graph` and `engine` those of
    ONNX and of TensorRT.
    """
    model = spec.architecture
    ends = _ends(model)
    libraries = {
        "one": 1.0,
        "tokenizer": float(_TOKEN * (model.vocabulary or 0)),
        "graph": float(any(stores(name) == "graph" for name in spec.exports)),
        "engine": float(any(stores(name) == "engine" for name in spec.exports)),
    }
    parts: dict[str, dict[str, float]] = {"open": {**libraries, "largest": _largest(model)}}
    parts["prove"] = {**libraries, "whole": min(4.0 * model.parameters, WHOLE)}
    left: dict[str, float] = {}
    if spec.recipe.passes or spec.sequences:
        quantized = _block_held(spec)
        parts["begin"] = {**libraries, "ends": ends, "hidden": quantized["hidden"], "beside": quantized["beside"]}
        parts["quantize"] = {**libraries, **quantized}
        left = {f"left {name}": amount for name, amount in quantized.items()}
    # of a session that was closed, too
    left |= {"left floats": _table(spec)} if libraries["graph"] else {}
    for step in spec.recipe.export:
        layout = str(step.options.get("layout"))
        loaded_with = LAYOUTS.load(layout.replace("-", "_")).libraries if layout in LAYOUTS else ()
        libraries["library"] = libraries.get("library", 0.0) + sum(_LIBRARY.get(name, 0.0) for name in loaded_with)
    for name in spec.exports:
        session = _session(spec) if stores(name) == "graph" else {}
        block = 4.0 * max((elements(layer.matrices) for layer in model.layers), default=0.0)
        parts[f"check {name}"] = {**libraries, "ends": ends, "block": block, **session, **left}
        if stores(name) != "engine":
            tensors = stores(name) == "tensors"
            parts[f"score {name}"] = {
                **libraries,
                "ends": ends * (2 if tensors and model.head is not None else 1),
                **_scored(spec, cache=tensors and spec.recipe.scheme.kv_cache is not None),
                "logits": _logits(spec),
                "block": block,
                **session,
                **left,
            }
            parts["confirm"] = {**libraries, "whole": 4.0 * model.parameters, **left}
    # the float model as a graph, made and loaded; a file is written and read tensor by tensor
    if spec.timed and spec.baseline and stores(spec.timed_export) == "graph":
        whole = 4.0 * model.parameters + _table(spec)
        parts["speed"] = {**libraries, "ends": ends, "whole": whole, **left}
    return parts


def _ends(model: Architecture) -> float:
    """Embeddings and head in 32-bit floats."""
    head = model.head.parameters if model.head is not None and not model.tied else 0
    return 4.0 * (model.embeddings + model.others + head)


def _largest(model: Architecture) -> float:
    """The largest tensor as it is stored."""
    width = 4 if model.dtype == "float32" else 2
    largest = max((matrix.N * matrix.K for matrix in model.inside()), default=0)
    return float(width * max(largest, model.embeddings))


def _block_held(spec: CompileSpec) -> dict[str, float]:
    model = spec.architecture
    layer = max(model.layers, key=lambda layer: elements(layer.matrices))
    groups = shared(layer)
    solving = any("hessian" in needs(step) for step in spec.recipe.passes)
    widest = max(groups, key=lambda group: group[0].K * (group[0].K + sum(matrix.N for matrix in group)))
    at_once = min(spec.chunk, spec.sequences) * spec.length
    features = max((sum(matrix.N for matrix in group) + group[0].K for group in groups), default=0)
    hidden = 4.0 * spec.tokens * model.hidden
    kept = sum(group[0].active * group[0].K for group in groups) if spec.corrected else 0
    return {
        "weights": 4.0 * elements(layer.matrices) * (2 if spec.corrected else 1),
        "solve": 4.0 * sum(matrix.N for matrix in widest) * widest[0].K if solving else 0.0,
        "hessian": 4.0 * widest[0].K ** 2 if solving else 0.0,
        "hidden": 0.0 if hidden > _ON_DISK else hidden * (2 if spec.corrected else 1),
        "activations": 4.0 * at_once * features,
        "originals": 4.0 * at_once * kept,
        "beside": _beside(spec, spec.tokens),
    }


def _beside(spec: CompileSpec, tokens: int) -> float:
    """What blocks are given besides hidden states, of all tokens: from `_ON_DISK` bytes on, the rest lies in files."""
    return min(4.0 * tokens * spec.beside, _ON_DISK)


def _scored(spec: CompileSpec, *, cache: bool) -> dict[str, float]:
    """Hidden states of what is scored, and the activations of one forward; of a quantized cache, at a long context."""
    model = spec.architecture
    tokens, length = spec.scored, spec.scored_length
    if cache:
        length = min(LONG, model.max_context or LONG)
        tokens = max(tokens, LONG_SEQUENCES * length)
    widest = max((sum(matrix.N for matrix in group) for layer in model.layers for group in shared(layer)), default=0)
    together = min(SCORED_TOGETHER * length, tokens)
    return {
        "states": 4.0 * tokens * model.hidden,
        "forward": 4.0 * together * widest,
        "beside": _beside(spec, tokens),
    }


def _session(spec: CompileSpec) -> dict[str, float]:
    """Of ONNX Runtime: packed weights, and the rest in 32-bit floats."""
    return {"packed": packed_bytes(spec), "floats": 4.0 * _kept(spec) + _table(spec) - table_saved(spec)}


def table_saved(spec: CompileSpec) -> float:
    """Bytes that a graph's token embeddings take less than in 32-bit floats."""
    model, graph = spec.architecture, storing("graph")
    stored = next(
        (step.options.get("embedding", "float") for step in spec.recipe.export if step.name == graph), "float"
    )
    coded = model.head is not None and model.head.name in spec.schemes
    return 4.0 * model.embeddings - table_bytes(model, stored, coded=coded)


def _table(spec: CompileSpec) -> float:
    """Bytes of a head that is the embedding as well: a graph looks tokens up in one and multiplies by the other."""
    model = spec.architecture
    return 4.0 * model.head.parameters if model.head is not None and model.tied else 0.0


def packed_bytes(spec: CompileSpec) -> float:
    """Of all codes with their scales and zero points."""
    model = spec.architecture
    matrices = [*model.inside(), *([model.head] if model.head is not None else [])]
    coded = ((matrix, scheme) for matrix in matrices if (scheme := spec.schemes.get(matrix.name)) is not None)
    return sum(matrix.count * stored_bits((matrix.N, matrix.K), scheme) / 8 for matrix, scheme in coded)


def _kept(spec: CompileSpec) -> float:
    """Elements that get no codes."""
    model = spec.architecture
    coded = elements([matrix for matrix in model.inside() if matrix.name in spec.schemes])
    return max(model.parameters - coded, 0.0)


def _logits(spec: CompileSpec) -> float:
    """Of one model, as many positions as are looked at together."""
    head = spec.architecture.head
    if head is None:
        return 0.0
    return 4.0 * head.N * min(max(1, _LOGITS // head.N), spec.scored_length)
