"""Structure of a block, traced by running it: linears with a shared input, and their order.

Linears with the same input tensor share one Hessian, one scale, one fused operation. Nothing depends on a particular
architecture: a batch runs through the block, and hooks record each linear's input.

`Computed` records a block's computation without its values: its operators, with their numbers and the origin of their
tensors. Two blocks with equal records are one function of their weights and inputs. A property proved of that function
at random weights, such as a fold, holds for both, and the second block need not run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from quantkit.errors import InputError
from quantkit.model.streaming.calls import filed, is_in_file
from quantkit.model.structure.kinds import is_pair

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def is_linear(module: nn.Module) -> bool:
    """Tell whether a module is a product with a 2-D weight for quantization: Linear, or GPT-2's Conv1D."""
    weight = getattr(module, "weight", None)
    named = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    return named and isinstance(weight, Tensor) and weight.dim() == 2


def is_transposed(module: nn.Module) -> bool:
    """Tell whether the weight is stored as [K, N], as in Conv1D, instead of [N, K]."""
    return not isinstance(module, nn.Linear)


def weight_of(module: nn.Module) -> Tensor:
    """Return a view of the weight as [N, K]: outputs by inputs; do not change it."""
    weight = module.weight.detach()  # type: ignore[operator, union-attr]
    return weight.T if is_transposed(module) else weight  # type: ignore[union-attr, return-value]


def set_weight(module: nn.Module, weight: Tensor) -> None:
    """Replace a linear's weight by [N, K] values, in its dtype."""
    value = weight.T if is_transposed(module) else weight
    set_parameter(module, "weight", value.to(module.weight.dtype))  # type: ignore[union-attr, arg-type]


def set_parameter(module: nn.Module, name: str, value: Tensor) -> None:
    """Replace a parameter; one in a file is replaced by one in a file."""
    before = getattr(module, name)
    value = filed(value) if isinstance(before, Tensor) and is_in_file(before) else value
    setattr(module, name, nn.Parameter(value.contiguous(), requires_grad=False))


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove hooks of modules at the end."""
    held = list(handles)
    try:
        yield
    finally:
        for handle in held:
            handle.remove()


@dataclass(frozen=True)
class SharedInput:
    """Linears with the same input tensor, in order, by names in the block; `features` is K, `dims` its dimensions."""

    members: tuple[str, ...]
    features: int
    dims: int = 3

    @property
    def name(self) -> str:
        """First member, as the group's name."""
        return self.members[0]


@dataclass(frozen=True)
class Structure:
    """Structure of a block.

    Args:
        groups: shared inputs in order.
        idle: linears that did not run on the traced batch (an expert without tokens).
        order: leaf modules that ran, in order, each once.
    """

    groups: tuple[SharedInput, ...]
    idle: tuple[str, ...] = ()
    order: tuple[str, ...] = ()

    @property
    def linears(self) -> tuple[str, ...]:
        """Linears of all groups, in order."""
        return tuple(member for group in self.groups for member in group.members)


@torch.no_grad()
def trace(block: nn.Module, run: Callable[[], object]) -> Structure:
    """Trace the structure of a block from one run on any input that reaches all of it."""
    leaves = {name: module for name, module in block.named_modules() if not list(module.children())}
    # place of each input (its memory, also for tensors without values; its version shows changes in between) -> the
    # tensor, kept alive so that its memory is not reused, and its readers
    inputs: dict[object, tuple[Tensor, list[str]]] = {}
    order: dict[str, None] = {}

    def note(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            if name not in order and is_linear(module):  # codes are assigned once, by the first input
                value = args[0]
                view = (value.untyped_storage()._cdata, value.storage_offset(), value.shape, value.stride())
                inputs.setdefault((view, value._version), (value, []))[1].append(name)
            order[name] = None

        return hook

    with hooked(module.register_forward_pre_hook(note(name)) for name, module in leaves.items()):
        run()
    groups = tuple(SharedInput(tuple(members), tensor.shape[-1], tensor.dim()) for tensor, members in inputs.values())
    idle = tuple(name for name, module in leaves.items() if is_linear(module) and name not in order)
    return Structure(groups, idle, tuple(order))


def find_blocks(model: nn.Module) -> str:
    """Return the path of the `ModuleList` of blocks, such as `model.layers`.

    It is the list with most parameters among those with children of one class; or the list of several classes around
    it, as for alternating layers with and without attention. Of a vision-language model, only the lists beside the
    table of tokens count. Raises InputError (`blocks-not-found`).
    """
    lists = {path: module for path, module in model.named_modules() if isinstance(module, nn.ModuleList) and module}
    if is_vision_language(model):
        stack = text_stack(model)
        lists = {path: module for path, module in lists.items() if path.startswith(stack)}
    sizes = {path: sum(value.numel() for value in module.parameters()) for path, module in lists.items()}
    alike = [path for path, module in lists.items() if len({type(child) for child in module}) == 1]
    # a block has parts: a list of embeddings is none, however large
    alike = [path for path in alike if any(True for child in lists[path] for _ in child.children())] or alike
    best = max(alike, key=lambda path: sizes[path], default="")
    around = [path for path in lists if path not in alike and (not best or best.startswith(f"{path}."))]
    best = max([*around, best] if best else around, key=lambda path: sizes[path], default="")
    if not best or not sizes[best]:
        rule = "a transformer is a stack of blocks"
        raise InputError("blocks-not-found", type(model).__name__, "no list of like layers", rule)
    return best


def is_vision_language(model: nn.Module) -> bool:
    """Tell whether a model of token ids has a tower of images too."""
    config = getattr(model, "config", None)
    return getattr(config, "vision_config", None) is not None and getattr(config, "text_config", None) is not None


def token_table(model: Any) -> nn.Module | None:
    """Return the embedding of token ids, None for a model without one."""
    try:
        return model.get_input_embeddings()  # type: ignore[no-any-return]
    except (AttributeError, NotImplementedError):  # transformers raises it for a class where it finds none
        return None


def text_stack(model: nn.Module) -> str:
    """Return the prefix of the text stack in a vision-language model: the nearest module around the table of tokens
    with a list in it; `model.language_model.`, or "" for the whole model.
    """
    table = token_table(model)
    path = next((name for name, module in model.named_modules() if module is table), "")
    while path:
        path = path.rpartition(".")[0]
        if any(isinstance(module, nn.ModuleList) for module in model.get_submodule(path).modules()):
            break
    return f"{path}." if path else ""


def of_text(model: Any) -> Iterator[Any]:
    """Yield the modules on the way of a token of text: all but a tower of images and its projector."""
    stack = text_stack(model) if is_vision_language(model) else ""
    head = getattr(model, "get_output_embeddings", lambda: None)()  # packed or not
    yield from (module for name, module in model.named_modules() if name.startswith(stack) or module is head)


def find_stacks(model: nn.Module) -> tuple[str, ...]:
    """Return the paths of a model's lists of blocks, in the order in which its forward calls them.

    It is one list; of a model with an encoder and a decoder, the encoder's and the decoder's. Raises InputError
    (`blocks-not-found`).
    """
    if not is_pair(model):
        return (find_blocks(model),)
    parts = [model.get_encoder(), model.get_decoder()]  # type: ignore[operator]
    owners = [next(path for path, module in model.named_modules() if module is part) for part in parts]
    return tuple(f"{owner}.{find_blocks(part)}" for owner, part in zip(owners, parts, strict=True))


def blocks_of(model: nn.Module, paths: Iterable[str]) -> list[nn.Module]:
    """List the blocks of all lists."""
    return [block for path in paths for block in model.get_submodule(path).children()]


def names_of(model: nn.Module, paths: Iterable[str]) -> list[str]:
    """List the names of the blocks of all lists."""
    return [f"{path}.{name}" for path in paths for name, _ in model.get_submodule(path).named_children()]


def is_inside(name: str, paths: Iterable[str]) -> bool:
    """Tell whether a parameter or module belongs to a block, by its full name."""
    return name.startswith(tuple(f"{path}." for path in paths))


def layer_config(config: Any, index: int) -> Any:
    """Return the config of a layer; that of the model where layers do not differ."""
    # the model's own raises for what differs, as Gemma 4's size of heads
    return config.per_layer_config[index] if getattr(config, "is_heterogeneous", False) else config


def attention_sizes(config: Any, index: int) -> tuple[int, int, int]:
    """Return the heads, the heads of keys and values, and the features of a head in a layer of a text config."""
    own = layer_config(config, index)
    heads = int(own.num_attention_heads)
    shared = int(getattr(own, "num_key_value_heads", None) or heads)
    return heads, shared, int(getattr(own, "head_dim", None) or own.hidden_size // heads)


def find_head(model: nn.Module) -> str | None:
    """Return the path of the linear for logits, such as `lm_head`; None if the model names none."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if not isinstance(head, nn.Linear):
        return None
    return next((path for path, module in model.named_modules() if module is head), None)


def has_interface(model: nn.Module) -> bool:
    """Tell whether the attention of a model's blocks can go through transformers' AttentionInterface.

    A file of classes that uses the interface imports it under some name; other files write attention out in place.
    """
    from transformers import AttentionInterface

    inside = {
        base.__module__
        for block in blocks_of(model, find_stacks(model))
        for module in block.modules()
        for base in type(module).__mro__
    }
    files = [vars(sys.modules[name]) for name in inside if name in sys.modules]
    return any(isinstance(value, AttentionInterface) for names in files for value in names.values())


def other_state(model: PreTrainedModel) -> str:
    """Name the kind of layers that keep a state other than keys and values, such as `layers of conv`; "" for none."""
    from transformers.cache_utils import (
        DYNAMIC_LAYER_TYPE_MAPPING,
        DummyLayer,
        DynamicLayer,
        DynamicSlidingWindowLayer,
        get_layer_types_and_kwargs,
    )

    config = model.config.get_text_config(decoder=True)
    if getattr(config, "layer_types", None) is None:
        return "a cache of its class's own" if getattr(model, "_is_stateful", False) else ""
    plain = (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer)
    kinds = get_layer_types_and_kwargs(config)[0]
    other = [kind for kind in kinds if DYNAMIC_LAYER_TYPE_MAPPING.get(kind) not in plain]
    return f"layers of {other[0]}" if other else ""


class InDouble(TorchDispatchMode):
    """Mode that replaces requests for a shorter float by float64: models compute norms, softmax and sums in explicit
    float32.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace the requested dtype."""
        kwargs = dict(kwargs or {})
        dtype = kwargs.get("dtype")
        if dtype is not None and dtype.is_floating_point:
            kwargs["dtype"] = torch.float64
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype == torch.float64:
            return _grouped(*args)
        return func(*args, **kwargs)


def _grouped(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiply [S, K] x [experts, K, N] -> [S, N]; expert e has the rows up to `ends`[e]; torch lacks a float64
    version.
    """
    starts = [0, *ends.tolist()]
    parts = [rows[starts[e] : starts[e + 1]] @ weight for e, weight in enumerate(weights)]
    return torch.cat([*parts, rows.new_zeros(len(rows) - starts[-1], weights.shape[-1])])


class Computed(TorchDispatchMode):
    """Recorder of the operators that run in it.

    Args:
        named: existing tensors by a descriptive name.
        inputs: inputs of the run, in order; only tensors count.

    Attributes:
        steps: record, equal to another run's only if that computes the same. A tensor of unknown origin equals no
            other: its values are not compared.
    """

    def __init__(self, named: Mapping[str, Tensor], inputs: Iterable[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[Any] = []
        # kept alive, so that ids stay unique
        self._seen: dict[int, tuple[Tensor, str]] = {id(value): (value, name) for name, value in named.items()}
        for number, value in enumerate(inputs):
            if isinstance(value, Tensor):
                self._seen[id(value)] = value, f"given {number}"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record one operator."""
        origins = tree_map(self._origin, (args, kwargs or {}))
        output = func(*args, **(kwargs or {}))
        for number, value in enumerate(tree_leaves(output)):
            if isinstance(value, Tensor):
                self._seen[id(value)] = value, f"{number} of {len(self.steps)}"
        self.steps.append((str(func), origins))
        return output

    def gives(self, output: Tensor) -> None:
        """Record the result."""
        self.steps.append(self._origin(output))

    def _origin(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        known = self._seen.get(id(value))
        return object() if known is None else (known[1], value.dtype, tuple(value.shape), value.stride())
