"""Splitting of merged experts into linears.

transformers merges the experts of a layer in 3-D parameters, [experts, N, K], while checkpoints store a linear for
each.
Here such a module is replaced by one with the linears and names of the files:

    y = Σ_e  p_e · down_e( act(gate_e x) · (up_e x) )      over the experts on the route of token x

Merged parameters are found in transformers' own conversion rules, by structure: a rule that stacks
`experts.*.NAME.weight` to a 3-D parameter. Nothing here depends on a particular model. `prove` compares both forms in
float64.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.errors import InputError

TOLERANCE = 1e-10
# a rule's pattern: place of the expert's number, suffix of a linear's weight
_PLACE, _WEIGHT = ".*.", ".weight"
# names of routers, and of the number of experts in a config
_ROUTES = ("router", "gate", "gating")
_COUNT = re.compile(r"(^|_)(num|n)_((local|routed|moe)_)*experts$")
# proof: experts, tokens, experts per token
_EXPERTS, _TOKENS, _CHOSEN = 4, 16, 2


class Expert(nn.Module):
    """One expert: its linears under their names in the files."""

    def __init__(self, first: Mapping[str, tuple[int, int]], last: str, sizes: tuple[int, int]) -> None:
        super().__init__()
        self.first, self.last = list(first), last
        for name, (rows, columns) in {**first, last: sizes}.items():
            self.add_module(name, nn.Linear(columns, rows, bias=False))


class Experts(nn.Module):
    """The experts of one layer, with the interface of the merged module.

    Args:
        merged: transformers' module, with its parameters on the meta device.
        first: names of the linears on the layer's input, in the order of merging.
        last: name of the linear of its output.

    Attributes:
        every: True to run each expert on every token and add its output, so that a trace or a proof reaches all.
        forced: experts that run on every token first, for observers of their inputs; the output is unchanged.
    """

    def __init__(self, merged: nn.Module, first: Sequence[str], last: str) -> None:
        super().__init__()
        up, down = (value for _, value in _stacked(merged))
        count, rows, columns = up.shape
        sizes = {name: (rows // len(first), columns) for name in first}
        with torch.device("meta"):
            for number in range(count):
                self.add_module(str(number), Expert(sizes, last, (down.shape[1], down.shape[2])))
        # in a list, so that its parameters are not registered here
        self._merged = [merged]
        self.every = False
        self.forced: frozenset[int] = frozenset()

    @property
    def merged(self) -> nn.Module:
        """transformers' module: its activation, and the reference of `prove`."""
        return self._merged[0]

    def __len__(self) -> int:
        return len(self._modules)

    def run(self, number: int, x: Tensor) -> Tensor:
        """Run one expert on tokens [n, K]."""
        expert = self.get_submodule(str(number))
        assert isinstance(expert, Expert)
        inner = torch.cat([expert.get_submodule(name)(x) for name in expert.first], dim=-1)
        gated = len(expert.first) > 1
        inner = self.merged._apply_gate(inner) if gated else self.merged.act_fn(inner)  # type: ignore[operator]
        output: Tensor = expert.get_submodule(expert.last)(inner)
        return output

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute tokens [n, K] with their experts [n, k] and weights [n, k]: [n, K]."""
        result = torch.zeros_like(hidden_states)
        for number in range(len(self)):
            if self.every:
                # a copy, so that experts do not seem to share an input
                result += self.run(number, hidden_states.clone()) / len(self)
            elif number in self.forced:
                self.run(number, hidden_states.clone())
            token, place = torch.where(top_k_index == number)
            if token.numel():
                out = self.run(number, hidden_states[token]) * top_k_weights[token, place, None]
                result.index_add_(0, token, out.to(result.dtype))
        return result


def found_in(module: nn.Module) -> dict[str, Experts]:
    """Map path -> experts of a module."""
    return {path: child for path, child in module.named_modules() if isinstance(child, Experts)}


@contextmanager
def all_running(module: nn.Module) -> Iterator[None]:
    """Run every expert on every token: see `Experts.every`."""
    inside = found_in(module).values()
    for experts in inside:
        experts.every = True
    try:
        yield
    finally:
        for experts in inside:
            experts.every = False


def are_apart(one: str, other: str, module: nn.Module) -> bool:
    """Tell whether no scale can move between two modules of a block, because of experts.

    The input of experts reaches several of them, and their outputs are added up.
    """
    owners = []
    for name in (one, other):
        inside = (path for path in found_in(module) if name.startswith(f"{path}."))
        owners.append(next((name.split(".")[: path.count(".") + 2] for path in inside), None))
    return owners[0] != owners[1]


def is_merged(module: nn.Module) -> bool:
    """Tell whether a module has several linears' weights in 3-D parameters, as unsplit experts do."""
    return sum(value.dim() == 3 for _, value in _stacked(module)) > 1


def routers(model: nn.Module) -> set[str]:
    """Return linears for choosing or weighing experts.

    These are linears beside experts with one value per expert or a router's name, and linears with a router's or gate's
    path
    and one value per expert of the config. Other linears beside experts, such as projections into a latent space, are
    none.
    """
    counts = _counts(getattr(model, "config", None))
    paths = {
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module.out_features in counts
        and not {*path.split(".")[-2:]}.isdisjoint(_ROUTES)
    }
    for path, beside in found_in(model).items():
        owner = path.rpartition(".")[0]
        for name, child in model.get_submodule(owner).named_children():
            # `shared_expert_gate` is a router; `gate_proj` is part of an expert
            named = name.rpartition("_")[2] in _ROUTES
            if isinstance(child, nn.Linear) and (child.out_features == len(beside) or named):
                paths.add(f"{owner}.{name}" if owner else name)
    return paths


def _counts(config: Any) -> set[int]:
    """Return all numbers of experts in a config and its parts."""
    fields = vars(config) if hasattr(config, "__dict__") else {}
    parts = [value for value in fields.values() if hasattr(value, "to_dict")]
    own = {value for name, value in fields.items() if _COUNT.search(name) and isinstance(value, int) and value > 1}
    return own.union(*(_counts(part) for part in parts))


def split(model: nn.Module, rules: Sequence[Any]) -> None:
    """Replace every module of merged experts in place, in a model on the meta device."""
    for path, module in list(model.named_modules()):
        names = _names(path, module, rules)
        if names is not None:
            owner, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(owner), leaf, Experts(module, *names))


def other_rules(model: nn.Module, rules: Sequence[Any]) -> list[Any]:
    """Return the rules except those for split experts."""
    merged = [
        f".{path}.{name}" for path, experts in found_in(model).items() for name, _ in experts.merged.named_parameters()
    ]
    return [rule for rule in rules if not any(_makes(rule, name) for name in merged)]


def stacks(rule: Any) -> bool:
    """Tell whether a rule stacks linears to one parameter."""
    return all(_PLACE in source and source.endswith(_WEIGHT) for source in rule.source_patterns)


def prove(experts: Experts) -> float:
    """Return the difference between both forms on a few experts, relative to the largest value, in float64."""
    count = min(_EXPERTS, len(experts))
    generator = torch.Generator().manual_seed(0)
    ours = copy.deepcopy(experts)
    for number in range(count, len(experts)):
        delattr(ours, str(number))
    ours.double()
    theirs = copy.deepcopy(experts.merged)
    children = [child for child in ours.children() if isinstance(child, Expert)]
    for (name, _), parts in zip(_stacked(theirs), (children[0].first, [children[0].last]), strict=True):
        rows = [torch.cat([child.get_submodule(part).weight for part in parts]) for child in children]  # type: ignore[misc]
        setattr(theirs, name, nn.Parameter(torch.stack(rows).detach(), requires_grad=False))
    if hasattr(theirs, "num_experts"):
        theirs.num_experts = count  # type: ignore[assignment]
    width = _stacked(experts.merged)[0][1].shape[-1]
    x = torch.randn(_TOKENS, width, generator=generator, dtype=torch.float64)
    chosen = min(_CHOSEN, count)
    index = torch.stack([torch.randperm(count, generator=generator)[:chosen] for _ in range(_TOKENS)])
    weights = torch.rand(_TOKENS, chosen, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        # the class's own loop, not a faster replacement
        expected = inspect.unwrap(type(theirs).forward)(theirs, x, index, weights)
        actual = ours(x, index, weights)
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-300))


def demand_equal(block: nn.Module, name: str) -> None:
    """Refuse experts unless their linears compute the same. Raises InputError (`architecture-unsupported`)."""
    for path, experts in found_in(block).items():
        difference = prove(experts)
        if difference > TOLERANCE:
            value = f"its experts as linears differ by {difference:.1e} in float64"
            rule, remedy = "experts are a gated product of two linears, and a third", "this model cannot be quantized"
            raise InputError("architecture-unsupported", f"{name}.{path}", value, rule, remedy)


def _stacked(module: nn.Module) -> list[tuple[str, Tensor]]:
    """List the parameters of merged experts: the first and the last linear."""
    return [(name, value) for name, value in module._parameters.items() if value is not None]


def _names(path: str, module: nn.Module, rules: Sequence[Any]) -> tuple[list[str], str] | None:
    """Return the names of the linears of merged experts; None for other modules, or unclear ones."""
    stacked = _stacked(module)
    if len(stacked) != 2 or any(value.dim() != 3 for _, value in stacked):
        return None
    if stacked[0][1].shape[0] != stacked[1][1].shape[0]:  # some experts have no weights
        return None
    odd = ("is_transposed", "has_bias", "has_post_expert_norm")
    if any(getattr(module, name, False) for name in odd) or not getattr(module, "is_concatenated", True):
        return None
    parts: list[list[str]] = []
    for name, _ in stacked:
        rule = next((rule for rule in rules if _makes(rule, f".{path}.{name}")), None)
        if rule is None:
            return None
        parts.append([pattern.rpartition(_PLACE)[2].removesuffix(_WEIGHT) for pattern in rule.source_patterns])
    first, last = parts
    plain = all("." not in name and "*" not in name for name in [*first, *last])
    if not plain or len(last) != 1 or len(first) != (2 if getattr(module, "has_gate", True) else 1):
        return None
    return first, last[0]


def _makes(rule: Any, name: str) -> bool:
    """Tell whether a rule stacks the linears of experts to this parameter (with a dot in front)."""
    return stacks(rule) and any(name.endswith("." + target.lstrip(".")) for target in rule.target_patterns)
