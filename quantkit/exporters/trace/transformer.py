"""Export a transformer as an ONNX graph without reading its weights.

The model's own class runs under `torch.export` with weights that take no memory. Parts that each dialect writes in its
own way become one placeholder node of the domain `quantkit`:

    Linear     {name}                     x -> x Wᵀ          every matrix product with a weight; its bias stays an Add
    RMSNorm    {name, epsilon, offset}    x -> x / rms(x) * (w + offset)
    Attention  {scale, heads, ...}        q, k, v[, past] -> output[, present]

Linears are recognised by their type, norms by the values that they compute, and attention by transformers'
AttentionInterface. So no model is recognised by name.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from quantkit.errors import InputError
from quantkit.exporters import unattended
from quantkit.exporters.trace import CHECKPOINT
from quantkit.exporters.trace import repeat as _repeat
from quantkit.exporters.trace.rewrite import DOMAIN, Traced
from quantkit.model.structure.traced import attention_sizes, find_blocks, is_linear, is_transposed
from quantkit.model.to_onnx import quiet

OPSET = 23
# example sizes: all different, and none 0 or 1, which torch.export treats as constants
BATCH, NEW, PAST = 2, 5, 7
_ATTENTION = "quantkit_traced"
_MODEL = "model."


@dataclass
class _Memory:
    """Part of the cache that attention sees during tracing."""

    past: Mapping[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    mask: Tensor | None = None
    present: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    calls: int = 0

    @contextmanager
    def seen(self) -> Iterator[None]:
        """Make the cache visible to attention."""
        token = _memory.set(self)
        try:
            yield
        finally:
            _memory.reset(token)


# the last traced transformer: skeleton, arguments of `trace`, and graph
_last: list[tuple[nn.Module, tuple[Any, ...], Traced]] = []
_memory: ContextVar[_Memory] = ContextVar("memory")


class PassedOn(Cache):  # type: ignore[misc]
    """Cache that stores nothing: new keys and values go on to attention, which has the old ones."""

    def __init__(self, length: int) -> None:
        self.layers: list[Any] = []
        self.length = length

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, H, S, D] of the new tokens unchanged."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Count the tokens before the new ones."""
        return self.length


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Write the placeholder for [B, H, S, D] queries; transformers' signature. Output [B, S, H, D]."""
    unknown = [name for name in ("s_aux", "position_bias") if options.get(name) is not None]
    if unknown:
        rule = "softmax(q k / scale) v, causal or not, with window and soft cap"
        raise unattended(type(module).__name__, f"attention with {unknown[0]}", rule, CHECKPOINT)
    memory = _memory.get()
    memory.calls += 1
    batch, heads, length, size = query.shape
    attributes: dict[str, Any] = {
        "heads": heads,
        "kv_heads": key.shape[1],
        "scale": float(size**-0.5 if scaling is None else scaling),
        "window": int(sliding_window or -1),
        "softcap": float(softcap or 0.0),
        # an encoder that was made from a decoder may be causal
        "causal": int(bool(getattr(module, "is_causal", False))),
    }
    inputs: list[Tensor | None] = [query, key, value, memory.mask]
    if not memory.past:
        output = torch.onnx.ops.symbolic(
            f"{DOMAIN}::Attention", inputs, attributes, dtype=query.dtype, shape=(batch, length, heads * size)
        )
        return output.reshape(batch, length, heads, size), None
    index: int = module.layer_idx  # type: ignore[assignment]
    if index not in memory.past:
        words, rule = f"layer {index}, in another block than its own", "a layer's cache is that of its block"
        raise unattended(type(module).__name__, words, rule, CHECKPOINT)
    past_key, past_value = memory.past[index]
    expected, shapes = (past_key.shape[1], past_key.shape[3]), {(x.shape[1], x.shape[3]) for x in (key, value)}
    if shapes != {expected}:
        where = f"{type(module).__name__} of layer {index}"
        words = f"keys and values of {sorted(shapes)} heads and columns"
        raise unattended(where, words, f"all have {expected}, as the config says", CHECKPOINT)
    held = past_key.shape[2] + length
    output, present_key, present_value = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::Attention",
        [*inputs, past_key, past_value],
        attributes,
        dtypes=(query.dtype, key.dtype, value.dtype),
        shapes=(
            (batch, length, heads * size),
            (batch, key.shape[1], held, key.shape[3]),
            (batch, value.shape[1], held, value.shape[3]),
        ),
    )
    memory.present[index] = present_key, present_value
    return output.reshape(batch, length, heads, size), None


class _Linear(nn.Module):
    """The placeholder of a matrix product; its bias is added outside, where fusions see it."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__()
        self.name = name
        # for models that read its dtype; as a parameter it would become an unused input
        self.__dict__["weight"] = module.weight
        self.bias = getattr(module, "bias", None)
        shape: tuple[int, ...] = tuple(module.weight.shape)  # type: ignore[union-attr, arg-type]
        self.features = shape[1 if is_transposed(module) else 0]

    def forward(self, x: Tensor) -> Tensor:
        """Multiply [..., K] -> [..., N]."""
        y = torch.onnx.ops.symbolic(
            f"{DOMAIN}::Linear", (x,), {"name": self.name}, dtype=x.dtype, shape=(*x.shape[:-1], self.features)
        )
        return y if self.bias is None else y + self.bias


class _RMSNorm(nn.Module):
    """The placeholder of a root-mean-square norm."""

    def __init__(self, name: str, module: nn.Module, epsilon: float, offset: float) -> None:
        super().__init__()
        self.__dict__["weight"] = module.weight
        self.attributes: dict[str, Any] = {"name": name, "epsilon": epsilon, "offset": offset}

    def forward(self, x: Tensor) -> Tensor:
        """Normalize [..., K]."""
        return torch.onnx.ops.symbolic(f"{DOMAIN}::RMSNorm", (x,), self.attributes, dtype=x.dtype, shape=tuple(x.shape))


@torch.no_grad()
def rms_norm(module: nn.Module) -> tuple[float, float] | None:
    """Return (epsilon, offset) for a module computing x / sqrt(mean(x²) + epsilon) * (weight + offset), else None.

    A copy of the module is run to find out; its name is not used.
    """
    parameters = dict(module.named_parameters())
    weight = parameters.get("weight")
    if set(parameters) != {"weight"} or weight is None or weight.dim() != 1 or next(module.children(), None):
        return None
    probe = copy.deepcopy(module)
    generator = torch.Generator().manual_seed(0)
    scale = torch.rand(weight.shape, generator=generator) + 0.5
    probe.weight = nn.Parameter(scale, requires_grad=False)
    # small inputs, so that epsilon shows
    x = torch.randn((3, weight.shape[0]), generator=generator) * 0.01
    try:
        output = probe(x)
    except (TypeError, RuntimeError, ValueError):
        return None
    small = [value for value in vars(module).values() if isinstance(value, float) and 0 <= value < 0.01]
    for epsilon in small:
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)
        for offset in (0.0, 1.0):
            if isinstance(output, Tensor) and torch.allclose(output, normed * (scale + offset), rtol=1e-4, atol=1e-6):
                return epsilon, offset
    return None


def stand_ins(model: nn.Module) -> None:
    """Replace linears and norms by placeholders, in place."""
    for name, module in list(model.named_modules()):
        stand_in: nn.Module | None = None
        if is_linear(module):
            stand_in = _Linear(name, module)
        elif (norm := rms_norm(module)) is not None:
            stand_in = _RMSNorm(name, module, *norm)
        if stand_in is not None:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, stand_in)


def hollow(model: nn.Module, floats: torch.dtype) -> None:
    """Give every parameter without data one element in place of all; buffers stay float32."""
    for module in model.modules():
        for kind in (module._parameters, module._buffers):
            for name, value in list(kind.items()):
                if value is not None and value.is_meta:
                    own = floats if kind is module._parameters else torch.float32
                    dtype = own if value.is_floating_point() else value.dtype
                    empty = torch.zeros((), dtype=dtype).expand(value.shape)
                    kind[name] = nn.Parameter(empty, requires_grad=False) if kind is module._parameters else empty  # type: ignore[assignment]


class _Decoder(nn.Module):
    def __init__(self, model: nn.Module, layers: Sequence[int]) -> None:
        super().__init__()
        self.model = model
        self.layers = layers

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        past: list[tuple[Tensor, Tensor]],
        positions: Tensor | None = None,
    ) -> Any:
        """Return logits, and keys and values of every traced layer with the new tokens."""
        new, total = input_ids.shape[1], attention_mask.shape[1]
        if positions is None:
            # a token's position is the number of real tokens before it: padding on the left does not count
            positions = (attention_mask.cumsum(1) - 1).clamp(min=0)[:, total - new :]
        memory = _Memory(dict(zip(self.layers, past, strict=True)), attention_mask)
        cache = PassedOn(past[0][0].shape[2])
        with memory.seen():
            answer = self.model(input_ids=input_ids, position_ids=positions, past_key_values=cache, use_cache=True)
        missing = [index for index in self.layers if index not in memory.present]
        if missing:
            value = f"layer {missing[0]} does not go through transformers' AttentionInterface"
            raise unattended(type(self.model).__name__, value, "only then can its cache be exported", CHECKPOINT)
        return answer.logits, [memory.present[index] for index in self.layers]


class _Encoder(nn.Module):
    """Last hidden states, and the outputs of a head after them: all outputs whose names contain logits."""

    def __init__(self, model: nn.Module, extra: Sequence[str], whole: bool) -> None:
        super().__init__()
        self.model = model
        self.extra = extra
        self.whole = whole

    def forward(self, input_ids: Tensor, attention_mask: Tensor, *others: Tensor) -> dict[str, Tensor]:
        """Return the last hidden states, and logits, by their names."""
        memory = _Memory(mask=attention_mask)
        base = getattr(self.model, "base_model", self.model)
        states: list[Tensor] = []
        extra = dict(zip(self.extra, others, strict=True))
        hook = base.register_forward_hook(lambda module, inputs, output: states.append(output[0]))
        with memory.seen():
            try:
                runs = self.model if self.whole else base
                output = runs(input_ids=input_ids, attention_mask=attention_mask, **extra)
            finally:
                hook.remove()
        if not memory.calls:
            value = "attention does not go through transformers' AttentionInterface"
            raise unattended(type(self.model).__name__, value, "only then is its mask exported", CHECKPOINT)
        logits = [name for name in output if name.endswith("logits")] if self.whole else []
        return {"last_hidden_state": states[0], **{name: output[name] for name in logits}}


def trace(
    skeleton: nn.Module,
    kind: str,
    *,
    floats: torch.dtype = torch.float32,
    positions: bool = False,
    head: bool = True,
) -> Traced:
    """Trace the graph of a transformer without weights, or copy the last traced graph if the model equals its model.

    Args:
        skeleton: model on the meta device, which is not changed.
        kind: `decoder` or `encoder`.
        floats: type of its parameters and of the computation.
        positions: True gives a decoder the input `position_ids`; False counts positions from the mask.
        head: True traces an encoder's logits too, unless they are logits of words.

    Raises InputError: `attention-unsupported`, `export-untraceable`.
    """
    how = (kind, floats, positions, head)
    for known, before, traced in _last:
        if how == before and _repeat.alike(known, skeleton):
            return _copied(traced)
    traced = _traced_whole(skeleton, *how)
    _last[:] = [(skeleton, how, _copied(traced))]
    return traced


def _copied(traced: Traced) -> Traced:
    """Copy a graph without values of weights: for `clone` the weights have to be among its inputs."""
    graph = traced.model.graph
    own = {*graph.inputs, *(value for node in graph for value in node.outputs)}
    outside = dict.fromkeys(value for node in graph for value in node.inputs if value is not None)
    weights = [value for value in outside if value not in own and not value.is_initializer()]
    count = len(graph.inputs)
    graph.inputs.extend(weights)
    model = traced.model.clone()
    for copied in (graph, model.graph):
        del copied.inputs[count:]
    return replace(traced, model=model, parameters=dict(traced.parameters))


def _traced_whole(skeleton: nn.Module, kind: str, floats: torch.dtype, positions: bool, head: bool) -> Traced:
    apart: set[int] = set()
    left = "" if kind == "decoder" else _without_head(skeleton, head)
    whole = not left and getattr(skeleton, "base_model", skeleton) is not skeleton
    while True:
        try:
            return replace(_traced(skeleton, kind, floats, positions, whole, apart), left=left)
        except _repeat.CalledOtherwise as block:
            apart.add(block.index)
        except InputError as problem:
            if kind == "decoder" or not whole:
                raise
            # without the head, tracing may succeed
            whole, left = False, f"{type(skeleton).__name__} cannot be traced with its head: {problem.value}"


def _without_head(skeleton: nn.Module, wanted: bool) -> str:
    """Describe why an encoder is traced without its head; "" if it has none, or is traced with it."""
    if getattr(skeleton, "base_model", skeleton) is skeleton:
        return ""
    words = getattr(skeleton, "get_output_embeddings", lambda: None)() is not None
    why = "its logits are of words" if words else "" if wanted else "this dialect gives states alone"
    return why and f"{type(skeleton).__name__} has a head, and the graph ends before it: {why}"


def _traced(
    skeleton: nn.Module, kind: str, floats: torch.dtype, positions: bool, whole: bool, apart: Set[int]
) -> Traced:
    """Trace as `trace`, with separately traced blocks `apart`; raises CalledOtherwise for one more."""
    model = copy.deepcopy(skeleton)
    path = find_blocks(model)
    blocks = model.get_submodule(path)
    assert isinstance(blocks, nn.ModuleList)
    like = _repeat.kinds(blocks)
    hollow(model, floats)
    stand_ins(model)
    layers = _repeat.share(blocks, like, apart)
    AttentionInterface.register(_ATTENTION, _attention)
    model.config._attn_implementation = _ATTENTION  # type: ignore[union-attr]
    decoder = kind == "decoder"
    parts = _decoder(model, floats, positions, layers) if decoder else _encoder(model, whole)
    wrapped, arguments, shapes, names = parts
    with torch.no_grad(), quiet():
        try:
            exported = torch.export.export(wrapped.eval(), arguments, dynamic_shapes=shapes, strict=False)
            program = torch.onnx.export(exported, opset_version=OPSET, optimize=False, verbose=False)
        except (InputError, _repeat.CalledOtherwise):
            raise
        except Exception as problem:
            raise untraceable(skeleton, problem) from problem
    assert program is not None
    if isinstance(wrapped, _Encoder):
        names[1][:] = exported.call_spec.out_spec.context
    named = (skeleton.named_parameters(remove_duplicate=False), skeleton.named_buffers(remove_duplicate=False))
    known = {name for pairs in named for name, _ in pairs}
    return cleaned(program.model, names, decoder, len(blocks) if decoder else 0, path, known)


Parts = tuple[nn.Module, tuple[Any, ...], tuple[Any, ...], tuple[list[str], list[str], dict[str, list[str]]]]
BSP = ("batch_size", "sequence_length", "past_sequence_length", "total_sequence_length")


def _decoder(model: nn.Module, floats: torch.dtype, positions: bool, layers: Sequence[int]) -> Parts:
    """Wrap a decoder with the caches of the traced blocks: copies get theirs later, which saves time."""
    config: Any = model.config
    sizes = [attention_sizes(config, index) for index in layers]
    pasts = [torch.zeros(2, BATCH, heads, PAST, size, dtype=floats) for _, heads, size in sizes]
    ones = torch.ones(BATCH, NEW + PAST, dtype=torch.int64)
    dynamic = torch.export.Dim.DYNAMIC
    first = {0: dynamic, 1: dynamic}
    cache = {0: dynamic, 2: dynamic}
    batch, new, past, total = BSP
    inputs, outputs = ["input_ids", "attention_mask"], ["logits"]
    axes = {"input_ids": [batch, new], "attention_mask": [batch, total], "logits": [batch, new, ""]}
    for index in layers:
        for part in ("key", "value"):
            inputs.append(f"past_key_values.{index}.{part}")
            outputs.append(f"present.{index}.{part}")
            axes[inputs[-1]], axes[outputs[-1]] = [batch, "", past, ""], [batch, "", total, ""]
    arguments: list[Any] = [ones[:, :NEW].clone(), ones, [tuple(past.clone() for past in pair) for pair in pasts]]
    shapes: list[Any] = [first, first, [(cache, cache)] * len(layers)]
    if positions:
        arguments.append(torch.arange(NEW).repeat(BATCH, 1))
        shapes.append(first)
        inputs.append("position_ids")
        axes["position_ids"] = [batch, new]
    return _Decoder(model, layers), tuple(arguments), tuple(shapes), (inputs, outputs, axes)


def _encoder(model: nn.Module, whole: bool) -> Parts:
    parameters = inspect.signature(model.forward).parameters
    typed = "token_type_ids" in parameters and int(getattr(model.config, "type_vocab_size", 0) or 0) > 1
    extra = ["token_type_ids"] if typed else []
    ones = torch.ones(BATCH, NEW, dtype=torch.int64)
    free = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    inputs = ["input_ids", "attention_mask", *extra]
    axes = {name: list(BSP[:2]) for name in inputs}
    axes["last_hidden_state"] = [*BSP[:2], ""]
    arguments = (ones, ones.clone(), *(torch.zeros_like(ones) for _ in extra))
    shapes = (free, free, *([(free,) * len(extra)] if extra else []))
    return _Encoder(model, extra, whole), arguments, shapes, (inputs, ["last_hidden_state"], axes)


def cleaned(
    model: ir.Model,
    names: tuple[list[str], list[str], dict[str, list[str]]],
    decoder: bool,
    layers: int,
    path: str,
    known: Set[str],
) -> Traced:
    """Set readable names and fold constants; hollow parameters (`known`) are not mistaken for zeros."""
    import onnxscript.optimizer
    from onnx_ir.passes import common

    graph = model.graph
    inputs, outputs, axes = names
    called: dict[str, str] = {}
    for values, wanted in ((graph.inputs, inputs), (graph.outputs, outputs)):
        for value, name in zip(values, wanted, strict=True):
            value.name = name
            if value.shape is not None:
                new = axes.get(name, [""] * len(value.shape))
                called.update((str(old), axis) for axis, old in zip(new, value.shape, strict=True) if axis)
                value.shape = ir.Shape([axis or old for axis, old in zip(new, value.shape, strict=True)])
    parameters: dict[str, str] = {}
    real_inputs = len(graph.inputs)
    for value in list(graph.initializers.values()):
        assert value.name is not None
        name = _repeat.plain_name(value.name.removeprefix(_MODEL), path)
        if value.name.startswith(_MODEL) and name in known:
            # as an input it has no value, so nothing is folded into it
            parameters[value.name] = name
            graph.initializers.pop(value.name)
            value.const_value = None
            graph.inputs.append(value)
    onnxscript.optimizer.optimize(model, onnx_shape_inference=False)
    common.ClearMetadataAndDocStringPass()(model)
    del graph.inputs[real_inputs:]
    _repeat.expand(graph, parameters, path)
    for values, first in ((graph.inputs, "past_key_values"), (graph.outputs, "present")):
        # the caches of copies came last: in order of their layers, where the first's are
        cached = [value for value in values if str(value.name).startswith(f"{first}.")]
        at = values.index(cached[0]) if cached else 0
        rest = [value for value in values if value not in cached]
        cached.sort(key=lambda value: (int(str(value.name).split(".")[1]), str(value.name)))
        values.clear()
        values.extend([*rest[:at], *cached, *rest[at:]])
    for value in graph.outputs:  # how many axes a head's have its class alone knows
        if value.shape is not None:
            value.shape = ir.Shape([called.get(str(axis)) or axis for axis in value.shape])
    return Traced(model, parameters, decoder, layers)


def untraceable(skeleton: nn.Module, problem: Exception) -> InputError:
    """Make the error for a forward that cannot be traced."""
    value, rule = str(problem).strip().split("\n", 1)[0][:300], "torch.export traces the model's forward"
    return InputError("export-untraceable", type(skeleton).__name__, value, rule, CHECKPOINT)
