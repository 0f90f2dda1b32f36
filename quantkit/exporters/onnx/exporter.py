"""Export a model as an ONNX graph with a KV cache, for ONNX Runtime.

`onnx/` holds `model.onnx` (the graph), `model.onnx.data` (its weights), the tokenizer and onnxruntime-genai's config.
The graph is traced without weights (`trace/transformer.py`) and rewritten (`dialect.py`). Its weights are written last,
one tensor in memory at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from quantkit import machine
from quantkit.bundle import Check, Decision, LayerEntry, decision
from quantkit.content import Closed
from quantkit.errors import InputError, MissingDependency
from quantkit.exporters import Exporter, LayerSpec, Trial, unheld, without
from quantkit.exporters.onnx.nbits import refuse, refuse_heads, without_kernel
from quantkit.model.structure.kinds import positions
from quantkit.runtimes.text import json_or_empty

if TYPE_CHECKING:
    import onnx_ir as ir

    from quantkit.exporters.onnx.nbits import WeightsByName
    from quantkit.exporters.values import Values
    from quantkit.model.sizes.storage import LaidOver, Storage
    from quantkit.model.source.open import Source
    from quantkit.target import State, Target

FOLDER, MODEL, DATA = "onnx", "model.onnx", "model.onnx.data"
# their second input is the weight
_PRODUCTS = ("MatMul", "FusedMatMul", "MatMulInteger", "MatMulIntegerToFloat")
# instruction sets that multiply bytes several times as fast as floats
_BYTES = ("amx_int8", "avx512_vnni", "avx_vnni", "neon_i8mm")
# tokens of the prompt that times both ways
_TRIED = 256
# operators that read little or nothing of their constants in a step
_FEW = ("Gather", "GatherBlockQuantized", "Reshape", "Slice", "GroupQueryAttention", "MultiHeadAttention")


class OnnxOptions(Closed):
    """Settings of `export: - onnx: {…}`.

    Args:
        dialect: runtime whose operators are used: `onnxruntime`.
        accuracy_level: accuracy of products with quantized weights: 0 computes in float32; 4 rounds activations to
            int8 and is faster.
        merge: True joins linears of one input (q, k, v; gate, up) to one product.
        weight_codes: type of 8-bit weights with quantized inputs. `uint8` is exact on every processor. `int8` is for
            VNNI and Arm; it saturates on other x86 processors, where the check refuses it. Weights in `int7` are
            always signed, exact everywhere, and the fastest without VNNI.
        embedding: storage of token embeddings (`exporters/onnx/ends.py`): `float`, `int8`, or the codes of a tied
            quantized head (`shared`), which `refined` extends by 2 bits.
        prefill: products of prompts, and of batches of 16 rows and more. `same` multiplies as a decode step. `int8`
            multiplies in integers, with the weights rounded again to 8 bits a channel; the file holds both
            (`integers.py`). `auto` is `int8` if the target's processor multiplies bytes fast and, on this machine, a
            timing confirms it.
        head_rows: number of first rows (the most frequent words) of a head in fewer bits that get 8 bits.
    """

    dialect: Literal["onnxruntime"] = "onnxruntime"
    accuracy_level: Literal[0, 1, 4] = 4
    merge: bool = True
    weight_codes: Literal["uint8", "int8"] = "uint8"
    embedding: Literal["float", "int8", "shared", "refined"] = "float"
    # no vocabulary is larger
    head_rows: int = Field(default=0, ge=0, le=1 << 20)
    prefill: Literal["same", "int8", "auto"] = "same"


class Onnx(Exporter):
    """Exporter `onnx`."""

    name = "onnx"
    runtimes = ("onnxruntime", "quantkit_cpu")
    stores = "graph"
    fuses = True
    moves = True
    stacks = 2
    adds = True
    place = FOLDER
    Options = OnnxOptions

    def accepts(self, options: OnnxOptions, asked: LayerSpec) -> None:
        """Refuse unsupported layers. Raises the errors of `Exporter`; InputError `attention-unsupported`."""
        demand_packages("an ONNX export")
        if asked.source is not None and asked.source.has_encoder:
            _demand_windows(asked.source)
            for linear, inputs in asked.activations.items():
                rule = "graphs of an encoder and a decoder have float inputs"
                raise unheld(linear, f"activations in {inputs.format}", rule, "leave `onnx` out of `export`")
            refuse(asked)
            return
        asked.demand_graph(self.name)
        refuse(asked)
        if asked.source is not None and asked.source.kind == "decoder":
            from quantkit.model.source import pretrained

            source = asked.source
            config = pretrained.config(source.path, trust=source.trust_remote_code)
            refuse_heads(config.get_text_config(decoder=True), source.ref)

    def holds(self, options: OnnxOptions, runtime: str, asked: LayerSpec) -> State:
        """Return the support as `Exporter.holds` does."""
        refuse(asked)
        return "native"

    def storage(self, options: OnnxOptions, laid: LaidOver) -> Storage:
        """Predict the bytes as `Exporter.storage` does."""
        return laid.graph(options)

    def for_target(
        self, options: OnnxOptions, target: Target, asked: LayerSpec, trial: Trial | None = None
    ) -> tuple[Mapping[str, Any], str]:
        """Choose `prefill: auto` by the target's processor and, on this machine, by timing both ways.

        `int8` on an unsuitable processor is reported, and products without a kernel.
        """
        changes, way = self._way(options, target, asked, trial)
        return changes, "; ".join(text for text in (way, without_kernel(asked, options.accuracy_level)) if text)

    def _way(
        self, options: OnnxOptions, target: Target, asked: LayerSpec, trial: Trial | None
    ) -> tuple[Mapping[str, Any], str]:
        """Choose how prompts multiply, with a sentence about it or ""."""
        fast = _fast_of(target)
        if options.prefill == "same" or (options.prefill == "int8" and fast):
            return {}, ""
        if options.prefill == "int8":
            saturates = "x86 processors without VNNI saturate in products of signed bytes"
            return {}, f"prompts multiply in integers, and the target has none of {', '.join(_BYTES)}: {saturates}"
        faster, why = fast != "", f"the target has {fast or 'none of ' + ', '.join(_BYTES)}, and was not timed"
        if fast and trial is not None:
            from quantkit.exporters.onnx.trial import block_of, feeds, graphs

            if linears := block_of(asked):
                ways = graphs(linears, options.accuracy_level)
                timed = trial(ways["prompts"], ways["steps"], feeds(linears, _TRIED))
                low, high = timed.ratio_ci95
                faster = low > 1
                why = f"a block's products, timed here on {_TRIED} rows, are {timed.ratio:.2f} times as fast"
                why += f" in integers ({low:.2f} to {high:.2f})"
        way = "in integers of 8 bits" if faster else "as steps do"
        return {"prefill": "int8" if faster else "same"}, f"prompts multiply {way}: {why}"

    def for_prompts(self, options: OnnxOptions, target: Target, layers: Sequence[LayerEntry]) -> str:
        """Name `prefill: int8` if the target gains by it and it is not set yet."""
        from quantkit.exporters.onnx.integers import expandable

        gains = any(layer.activations is None and expandable(str(layer.scheme["format"])) for layer in layers)
        return "onnx.prefill=int8" if _fast_of(target) and gains and options.prefill == "same" else ""

    def for_floats(self, options: OnnxOptions) -> OnnxOptions:
        """Drop the options about codes."""
        return OnnxOptions(**options.model_dump(exclude_unset=True, exclude={"accuracy_level", "weight_codes"}))

    def export(self, folder: Path, values: Values, options: OnnxOptions) -> list[Decision]:
        """Trace, rewrite, and write everything.

        Raises InputError: `attention-unsupported`, `export-untraceable`, `layout-unsupported`; Stopped: `disk-full`;
        MissingDependency: as `demand_packages`.
        """
        demand_packages("an ONNX export")
        from quantkit.exporters.carried import carry
        from quantkit.exporters.onnx.dialect import OrtDialect, PromptDialect
        from quantkit.exporters.onnx.ends import HEAD_ROWS, TABLE, ends
        from quantkit.exporters.onnx.integers import ROWS, both, many_rows
        from quantkit.exporters.trace.rewrite import keep_few, save
        from quantkit.exporters.trace.transformer import trace
        from quantkit.model.source.weights import write_json
        from quantkit.runtimes.onnxruntime.float_products import PROMPT_BYTES, STEP_BYTES
        from quantkit.runtimes.onnxruntime.float_products import ROWS as PROMPT_ROWS

        source = values.source
        kind = "decoder" if source.kind == "decoder" else "encoder"
        context = context_of(source.config)
        if source.has_encoder:
            return _both(folder, values, options, context)
        stored, taken = ends(values, options.embedding, options.head_rows)
        weights, traced = replace(dialect_weights(values), ends=stored), trace(values.skeleton, kind)
        settings: dict[str, Any] = {
            "accuracy_level": options.accuracy_level,
            "positions": context,
            "merge": options.merge,
            "codes": options.weight_codes,
        }
        prompts = None
        many = many_rows(weights, values.stream.head or "")
        why = ""
        if kind != "decoder":
            why = "an encoder has no decode steps"
        elif values.inputs:
            why = "inputs are quantized, so products multiply in integers already"
        elif many.linears == weights.linears:
            why = "no product has codes of 4 or 8 bits"
        asked = options.prefill == "int8" or (options.prefill == "auto" and _fast(machine.isa_features()) != "")
        if asked and why:
            taken.append(decision("onnx", "prefill-same", MODEL, why, "int8", "same"))
        elif asked:
            again = trace(values.skeleton, kind)
            prompts = PromptDialect(again, many, **settings)
        dialect = OrtDialect(traced, weights, **settings)
        model = dialect.apply()
        if kind == "decoder":
            keep_few(model, optional=True)
        level = options.accuracy_level if values.schemes else 0
        notes = {
            "quantkit.kind": kind,
            "quantkit.context": str(context),
            # 4 is int8; 0 is float32
            "quantkit.accuracy_level": str(4 if values.inputs else level),
        }
        notes |= {} if stored.table is None else {TABLE: options.embedding}
        notes |= {} if stored.rows is None else {HEAD_ROWS: str(options.head_rows)}
        model.metadata_props.update(notes | work(model))
        if prompts is not None:
            other = prompts.apply()
            keep_few(other, optional=True)
            model.metadata_props.update({PROMPT_BYTES: work(other)[STEP_BYTES], PROMPT_ROWS: str(ROWS)})
            model = both(model, other)
        folder.mkdir(parents=True, exist_ok=True)
        save(model, folder / MODEL, DATA)
        carry(source, folder)
        if kind == "decoder":
            write_json(folder / "genai_config.json", genai_config(source, model, context))
        return [*taken, *traced.decisions(self.name), *dialect.decisions]

    def check(self, bundle: Path, values: Values | None = None, options: Any = None, **how: Any) -> list[Check]:
        """Compare the whole graph's outputs with the model's; `blocks` is ignored.

        Checks are `onnx.valid`, `onnx.operators`, `onnx.contained`, `reload.onnxruntime`; see `onnx/check.py` for more.
        """
        demand_packages("an ONNX export")
        from quantkit.exporters.check import decided
        from quantkit.exporters.onnx.check import check

        return check(bundle / FOLDER, values or decided(bundle))


def _demand_windows(source: Source) -> None:
    """Refuse an encoder of speech for recordings of any length. Raises InputError `architecture-unsupported`."""
    from quantkit.model.streaming.sounds import hears_windows

    if source.hears and not hears_windows(source.skeleton()):
        rule = "a graph takes features of one length, as Whisper's"
        value = f"{source.architecture} hears recordings of any length"
        raise InputError("architecture-unsupported", source.ref, value, rule, without("onnx"))


def _both(folder: Path, values: Values, options: OnnxOptions, context: int) -> list[Decision]:
    """Write the two graphs of an encoder and a decoder, and return what is asked for that these do not have."""
    from quantkit.exporters.carried import carry
    from quantkit.exporters.onnx.dialect import OrtDialect
    from quantkit.exporters.trace.encoder_decoder import trace_both
    from quantkit.exporters.trace.rewrite import save
    from quantkit.model.streaming.calls import first_token
    from quantkit.runtimes.onnxruntime.encoder_decoder import ENCODER, START

    weights, decisions = dialect_weights(values), list[Decision]()
    how: dict[str, Any] = {"merge": options.merge, "accuracy_level": options.accuracy_level, "positions": context}
    folder.mkdir(parents=True, exist_ok=True)
    for name, traced in zip((ENCODER, MODEL), trace_both(values.skeleton), strict=True):
        model = OrtDialect(traced, weights, **how).apply()
        notes = {"quantkit.kind": "decoder", "quantkit.context": str(2 * context)}
        notes |= {"quantkit.accuracy_level": str(options.accuracy_level if values.schemes else 0)}
        model.metadata_props.update(notes | work(model) | {START: str(first_token(values.skeleton))})
        save(model, folder / name, f"{name}.data")
    carry(values.source, folder)
    asked = {"prefill": (options.prefill, "same"), "embedding": (options.embedding, "float")}
    for key, (wanted, plain) in asked.items():
        if wanted != plain:
            reason = f"graphs of an encoder and a decoder have `{key}: {plain}` alone"
            decisions.append(decision("onnx", f"{key}-{plain}", MODEL, reason, wanted, plain))
    return decisions


def _fast(isa: Sequence[str]) -> str:
    """Return the first of a processor's instruction sets for fast products of bytes; "" if there is none."""
    return next((name for name in isa if name in _BYTES), "")


def _fast_of(target: Target) -> str:
    isa = target.arch.isa
    return _fast(machine.isa_features() if isa == "auto" else isa or [])


def demand_packages(purpose: str) -> None:
    """Raise MissingDependency for the first missing package for writing graphs."""
    for package in ("onnx", "onnx_ir", "onnxscript", "onnxruntime"):
        with MissingDependency.unless_found(package, extra="compile", purpose=purpose):
            __import__(package)


def context_of(config: Mapping[str, Any]) -> int:
    """Return the longest sequence in tokens."""
    return positions(config) or 4096


def dialect_weights(values: Values) -> WeightsByName:
    """Return the model's weights for a dialect: numpy, float32, [N, K]."""
    from quantkit.exporters.onnx.nbits import LinearSpec, WeightsByName
    from quantkit.exporters.values import as_float32

    stream, skeleton = values.stream, values.skeleton
    transposed = values.linears()
    shapes = {name: tuple(value.shape) for name, value in skeleton.named_parameters(remove_duplicate=False)}
    shapes |= {name: tuple(value.shape) for name, value in skeleton.named_buffers(remove_duplicate=False)}
    embeddings = {
        stream.files[name]: name
        for name in stream.rest_names()
        if name.endswith(".weight") and name.removesuffix(".weight") not in transposed and len(shapes[name]) == 2
    }
    linears, inputs = {}, values.inputs
    for name, turned in transposed.items():
        rows, columns = reversed(shapes[f"{name}.weight"]) if turned else shapes[f"{name}.weight"]
        shared = embeddings.get(stream.files[f"{name}.weight"]) if name not in values.schemes else None
        linears[name] = LinearSpec(rows, columns, values.schemes.get(name), shared, inputs.get(name))

    def tensor(name: str) -> Any:
        value = as_float32(values.tensor(name))
        return (value.T if transposed.get(name.removesuffix(".weight")) else value).contiguous().numpy()

    def codes(linear: str) -> Any:
        return values.quantized(linear).codes.numpy()

    def grid(linear: str) -> Any:
        quantized = values.quantized(linear, codes=False)
        return quantized.scale.float().numpy(), None if quantized.zero is None else quantized.zero.numpy()

    return WeightsByName(linears, shapes, tensor, codes, grid)


def work(model: ir.Model) -> dict[str, str]:
    """Count the bytes and operations of a decode step for its roofline, as text for the file's metadata.

    `quantkit.step_bytes`: bytes of weights that every step reads, without the embedding (a step reads single rows);
    `quantkit.prompt_bytes`: the same for the second way to multiply, from `quantkit.prompt_rows` rows on;
    `quantkit.float_bytes`: the part of `step_bytes` that belongs to products in floats;
    `quantkit.flops`: 2 N K of all products but the head; `quantkit.head_flops`: of the head;
    `quantkit.float_head_flops`: of a head in floats; `quantkit.attention_flops`: for each pair of a new token and a
    token that it attends to.
    """
    graph = model.graph
    read: dict[str, int] = {}
    floats: dict[str, int] = {}
    flops = {True: 0, False: 0}
    float_head = attention = 0
    outputs = {value.name for value in graph.outputs}
    decoder = any(str(value.name).startswith("past_key_values.") for value in graph.inputs)
    for node in graph:
        attention += _attention_flops(node, decoder)
        if node.op_type in _FEW:
            continue
        for value in node.inputs:
            if value is not None and value.const_value is not None:
                read[value.name or ""] = value.const_value.nbytes
        for value in node.inputs:  # a head with more bits for its first rows is cut when the session is created
            cut = value.producer() if value is not None else None
            whole = cut.inputs[0] if cut is not None and cut.op_type == "Slice" else None
            if whole is not None and whole.const_value is not None:
                share = node.attributes["N"].as_int() / int(whole.const_value.shape[0])  # type: ignore[arg-type]
                read[f"{whole.name}, cut"] = round(whole.const_value.nbytes * share)
        weight = node.inputs[1] if len(node.inputs) > 1 else None
        unpacked = weight.producer() if weight is not None else None
        if unpacked is not None and unpacked.op_type in ("DequantizeLinear", "Transpose"):
            weight = unpacked.inputs[0]
        if node.op_type == "MatMulNBits":
            size = node.attributes["N"].as_int() * node.attributes["K"].as_int()
        elif node.op_type in _PRODUCTS and weight is not None and weight.const_value is not None:
            size = math.prod(int(length) for length in weight.const_value.shape)  # type: ignore[arg-type, misc]
        else:
            continue
        head = any(value.name in outputs for output in node.outputs for value in _joined(output))
        flops[head] += 2 * size
        kept = weight.const_value if weight is not None and node.op_type != "MatMulNBits" else None
        if kept is not None and kept.dtype.is_floating_point():
            floats[weight.name or ""] = kept.nbytes  # type: ignore[union-attr]
            float_head += 2 * size if head else 0
    return {
        "quantkit.step_bytes": str(sum(read.values())),
        "quantkit.float_bytes": str(sum(floats.values())),
        "quantkit.flops": str(flops[False]),
        "quantkit.head_flops": str(flops[True]),
        "quantkit.float_head_flops": str(float_head),
        "quantkit.attention_flops": str(attention),
    }


def _attention_flops(node: ir.Node, decoder: bool) -> int:
    """Count the operations for a new token and a token that it attends to; twice as many without a causal mask."""
    shapes: list[Any] = [None if value is None else value.shape for value in node.inputs]
    if node.op_type == "GroupQueryAttention":
        return 4 * node.attributes["num_heads"].as_int() * int(shapes[3][3])
    if node.op_type == "Attention" and shapes[0] is not None:
        return (4 if decoder else 8) * int(shapes[0][1]) * int(shapes[0][3])
    if node.op_type == "MultiHeadAttention":
        # rotated queries have no shape; values are as wide
        known = [shape for shape in shapes[:3] if shape is not None]
        return 2 * 4 * int(known[-1][-1])
    return 0


def _joined(value: ir.Value) -> list[ir.Value]:
    """Return a value, and the values into which it is concatenated."""
    return [value, *(use.outputs[0] for use in value.consumers() if use.op_type == "Concat")]


def genai_config(source: Source, model: ir.Model, context: int) -> dict[str, Any]:
    """Return onnxruntime-genai's config of a decoder."""
    config = source.config
    generation = json_or_empty(source.path / "generation_config.json")
    caches = [value.shape for value in model.graph.inputs if (value.name or "").startswith("past_key_values.")]
    _, key_heads, _, size = caches[0]  # type: ignore[misc]
    ends = generation.get("eos_token_id", config.get("eos_token_id"))
    first = ends[0] if isinstance(ends, list) else ends
    pad = config.get("pad_token_id")
    return {
        "model": {
            "bos_token_id": config.get("bos_token_id") or 0,
            "context_length": context,
            "decoder": {
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                "filename": "model.onnx",
                "head_size": int(size),  # type: ignore[arg-type]
                "hidden_size": int(config.get("hidden_size") or config.get("n_embd") or 0),
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
                "num_attention_heads": int(config.get("num_attention_heads") or config.get("n_head") or 1),
                "num_hidden_layers": len(caches) // 2,
                "num_key_value_heads": int(key_heads),  # type: ignore[arg-type]
            },
            "eos_token_id": ends if ends is not None else 0,
            "pad_token_id": pad if pad is not None else (first or 0),
            # any decoder with these inputs and outputs; the name has no other effect
            "type": "llama",
            "vocab_size": int(config["vocab_size"]),
        },
        "search": {
            "diversity_penalty": 0.0,
            "do_sample": bool(generation.get("do_sample", False)),
            "early_stopping": True,
            "length_penalty": 1.0,
            "max_length": context,
            "min_length": 0,
            "no_repeat_ngram_size": 0,
            "num_beams": 1,
            "num_return_sequences": 1,
            "past_present_share_buffer": True,
            "repetition_penalty": float(generation.get("repetition_penalty", 1.0)),
            "temperature": float(generation.get("temperature", 1.0)),
            "top_k": int(generation.get("top_k", 50)),
            "top_p": float(generation.get("top_p", 1.0)),
        },
    }


EXPORT = Onnx()
