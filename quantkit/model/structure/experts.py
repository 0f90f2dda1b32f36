"""Splitting of merged experts into linears.

transformers merges the experts of a layer in parameters such as [experts, N, K], while checkpoints may store a linear
for each. Here the merged parameters of such a module are replaced by linears, and its own forward runs on them:

    y = Σ_e  p_e · down_e( act(gate_e x) · (up_e x) )      over the experts on the route of token x

The forward is traced for the layout of each parameter (`stacked.py`): which slice is multiplied by what, transposed or
not, in halves or interleaved. So nothing here depends on a particular model. A rule of transformers that stacks
`experts.*.NAME.weight` gives the names of the linears; without one they follow from the parameter's name:

    gate_up_proj [E, 2N, K], used in halves     ->  experts.0.gate_proj [N, K], experts.0.up_proj [N, K], ...
    gate_up_proj [E, K, 2N], interleaved        ->  experts.0.gate_up_proj [2N, K], ...

`prove` compares both forms in float64.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.errors import InputError
from quantkit.model.structure.stacked import CALLS, Cut, Form, Stack, own_forward, trace_form
from quantkit.model.structure.traced import InDouble, set_parameter

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

    def __init__(self, sizes: Mapping[str, tuple[int, int]]) -> None:
        super().__init__()
        for name, (rows, columns) in sizes.items():
            self.add_module(name, nn.Linear(columns, rows, bias=False))


class Experts(nn.Module):
    """Mixin of a module with its merged parameters replaced by linears `NUMBER.NAME`; see `split`.

    Attributes:
        cuts: merged parameter -> its linears.
        by_rule: merged parameters that transformers makes from the linears of the files.
        form: call form of the forward, a key of `CALLS`.
        least: least number of experts of a token; the same one may be several.
        every: True to run each expert on every token and add its output, so that a trace or a proof reaches all.
        forced: experts that run on every token first, for observers of their inputs; the output is unchanged.
    """

    cuts: dict[str, Cut]
    by_rule: frozenset[str]
    form: str
    least: int
    every: bool
    forced: frozenset[int]
    plain: type[nn.Module]

    def __getattr__(self, name: str) -> Any:
        if (cut := self.__dict__.get("cuts", {}).get(name)) is not None:
            return Stack.of(self, name, cut.shape)
        return super().__getattr__(name)

    def __len__(self) -> int:
        return max(cut.shape[0] for cut in self.cuts.values())

    @property
    def routed(self) -> bool:
        """True if the forward takes the experts of each token."""
        return self.form == "routed"

    def product(self, name: str, number: int, x: Tensor, transposed: bool) -> Tensor:
        """Multiply inputs [..., K] by one expert's part of a merged parameter: [..., N]."""
        cut = self.cuts[name]
        if transposed != cut.transposed:
            raise _unclear(type(self).__name__, f"{name} is used both as it is and transposed")
        outputs = [self.get_submodule(f"{number}.{leaf}")(x) for leaf in cut.names]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the class's own loop over the experts."""
        own = own_forward(self.plain)
        result = None
        if self.routed and (self.every or self.forced):
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            tokens = hidden.reshape(-1, hidden.shape[-1]).shape[0]
            for number in range(len(self)) if self.every else sorted(self.forced):
                # a copy, so that experts do not seem to share an input
                shape = tokens, self.least
                index = torch.full(shape, number, dtype=torch.int64, device=hidden.device)
                output = own(self, hidden.clone(), index, hidden.new_full(shape, 1 / len(self) / self.least))
                if self.every:
                    result = output if result is None else result + output
        output = own(self, *args, **kwargs)
        return output if result is None else result + output

    def whole(self, name: str, read: Callable[[str], Tensor]) -> Tensor:
        """Make a merged parameter from its linears' weights; `read` takes their names in this module."""
        return self.cuts[name].whole(lambda number, leaf: read(f"{number}.{leaf}{_WEIGHT}"))


class _Holder(nn.Module):
    """Mixin of a module inside of experts, whose parameters are those experts'."""

    hosts: list[Experts]
    prefix: str

    def __getattr__(self, name: str) -> Any:
        hosts = self.__dict__.get("hosts")
        if hosts and (cut := hosts[0].cuts.get(self.prefix + name)) is not None:
            return Stack.of(hosts[0], self.prefix + name, cut.stored)
        return super().__getattr__(name)


@functools.cache
def _mixed(kind: type[nn.Module], mixin: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of a class with a mixin, of the same name."""
    body = {"plain": kind} if mixin is Experts else {"forward": kind.forward}
    return type(kind.__name__, (mixin, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__, **body})


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
    return expert_of(one, module) != expert_of(other, module)


def expert_of(name: str, module: nn.Module) -> str | None:
    """Return the path of the expert around a module of a block; None outside of experts."""
    path = next((path for path in found_in(module) if name.startswith(f"{path}.")), None)
    return None if path is None else ".".join(name.split(".")[: path.count(".") + 2])


def is_merged(module: nn.Module) -> bool:
    """Tell whether a module has several linears' weights in 3-D parameters, as unsplit experts do."""
    return sum(value.dim() == 3 for _, value in _own(module)) > 1


def routers(model: nn.Module) -> set[str]:
    """Return linears for choosing or weighing experts.

    These are linears beside experts with one value per expert or a router's name, and linears with a router's or gate's
    path
    and one value per expert of the config. Other linears beside experts, such as projections into a latent space, are
    none.
    """
    layers = found_in(model)
    # with identity experts there are more of them than the config's experts
    counts = _counts(getattr(model, "config", None)) | {len(beside) for beside in layers.values()}
    paths = {
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module.out_features in counts
        and not {*path.split(".")[-2:]}.isdisjoint(_ROUTES)
    }
    for path, beside in layers.items():
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


def has_experts(config: Any) -> bool:
    """Tell whether a config states a number of experts."""
    return bool(_counts(config))


def split(model: nn.Module, rules: Sequence[Any]) -> None:
    """Replace merged experts in place, in a model on the meta device, wherever their forward is understood."""
    counts = _counts(getattr(model, "config", None))
    for path, module in list(model.named_modules()):
        if isinstance(module, Experts | _Holder | nn.Linear | nn.Embedding):
            continue
        for shapes in _candidates(module, counts):
            form = _traced(module, tuple(shapes.items()))
            if form is not None:
                _replace(module, form, _names(path, module, form, rules))
                break


def split_loaded(model: nn.Module, rules: Sequence[Any]) -> None:
    """Split the merged experts of a model with values in place; each linear receives its part."""
    held = {name: value for name, value in model.named_parameters() if value.dim() > 1}
    split(model, rules)
    for whole, (experts, _, name) in wholes(model).items():
        cut = experts.cuts[name]
        for number, matrix in enumerate(held.pop(whole).detach().reshape(cut.shape)):
            for leaf in cut.names:
                set_parameter(experts.get_submodule(f"{number}.{leaf}"), "weight", cut.part(matrix, leaf))


def _candidates(module: nn.Module, counts: Collection[int]) -> Iterator[dict[str, tuple[int, int, int]]]:
    """Yield possible merged parameters of a module: name -> [experts, ...]."""
    cubes = [(name, value) for name, value in _own(module) if value.dim() == 3]
    stacked = {name: tuple(value.shape) for name, value in cubes if min(value.shape[1:]) > 1}
    named = "expert" in type(module).__name__.lower()
    if stacked and (named or len({shape[0] for shape in stacked.values()}) == 1):
        # identity experts have rows in one parameter and none in another
        if named or next(iter(stacked.values()))[0] in counts:
            yield stacked  # type: ignore[misc]
        return
    for name, child in module.named_children() if named else ():
        flat = {f"{name}.{leaf}": value.shape for leaf, value in _own(child) if value.dim() == 2}
        if len(flat) > 1 and not isinstance(child, nn.Linear | nn.Embedding):
            for count in counts:
                if all(shape[0] % count == 0 for shape in flat.values()):
                    yield {leaf: (count, shape[0] // count, shape[1]) for leaf, shape in flat.items()}


_FORMS: dict[Any, Form | None] = {}


def _traced(module: nn.Module, shapes: tuple[tuple[str, tuple[int, int, int]], ...]) -> Form | None:
    """Trace a module's forward, once for modules of one class and size."""
    key = type(module), shapes
    if key not in _FORMS:

        def recording(recorder: Any) -> nn.Module:
            other = copy.deepcopy(module)
            for name, value in list(other.named_parameters()):
                if name not in recorder.cuts:
                    owner, _, leaf = name.rpartition(".")
                    setattr(other.get_submodule(owner), leaf, nn.Parameter(torch.zeros(value.shape), False))
            _replace(other, None, {name: Cut(shape, shape, (), False) for name, shape in shapes}, recorder)
            return other

        stored = {name: tuple(module.get_parameter(name).shape) for name, _ in shapes}
        _FORMS[key] = trace_form(recording, dict(shapes), stored)
    return _FORMS[key]


def _replace(module: nn.Module, form: Form | None, cuts: Mapping[str, Cut], recorder: Any = None) -> None:
    """Replace merged parameters by linears on the meta device; with a recorder, by nothing."""
    for name in cuts:
        owner, _, leaf = name.rpartition(".")
        holder = module.get_submodule(owner)
        del holder._parameters[leaf]
        if owner and not isinstance(holder, _Holder):
            holder.__class__ = _mixed(type(holder), _Holder)  # type: ignore[arg-type]
            holder.hosts, holder.prefix = [recorder or module], f"{owner}."  # type: ignore[assignment]
    if recorder is not None:
        recorder.__dict__["cuts"] = cuts
        module.__class__ = _mixed(type(module), _Recorded)  # type: ignore[arg-type]
        module.recorder = recorder
        return
    assert form is not None
    module.__class__ = _mixed(type(module), Experts)  # type: ignore[arg-type]
    assert isinstance(module, Experts)
    module.cuts, module.form, module.least = dict(cuts), form.call, form.least
    module.every, module.forced = False, frozenset()
    with torch.device("meta"):
        for number in range(len(module)):
            sizes = {leaf: cut.size for cut in cuts.values() if number < cut.shape[0] for leaf in cut.names}
            module.add_module(str(number), Expert(sizes))


class _Recorded(nn.Module):
    """Mixin of a module that is traced: its merged parameters are a recorder's."""

    recorder: Any

    def __getattr__(self, name: str) -> Any:
        recorder = self.__dict__.get("recorder")
        if recorder is not None and (cut := recorder.cuts.get(name)) is not None:
            return Stack.of(recorder, name, cut.shape)
        return super().__getattr__(name)


def _names(path: str, module: nn.Module, form: Form, rules: Sequence[Any]) -> dict[str, Cut]:
    """Name the linears of each merged parameter, and note those that transformers makes from such linears."""
    cuts, ruled = dict[str, Cut](), set[str]()
    for name, cut in form.cuts.items():
        rule = next((rule for rule in rules if _makes(rule, f".{path}.{name}")), None)
        names = [name.rpartition(".")[2]]
        if rule is not None:
            names = [pattern.rpartition(_PLACE)[2].removesuffix(_WEIGHT) for pattern in rule.source_patterns]
            ruled.add(name)
        elif name in form.halves and (two := re.fullmatch(r"([a-z]+)_([a-z]+)(_proj)", names[0])):
            names = [two[1] + two[3], two[2] + two[3]]
        elif names == ["weight"]:  # loaders match the first `weight` in a name
            names = ["proj"]
        cuts[name] = cut.named(names)
    module.by_rule = frozenset(ruled)  # type: ignore[assignment]
    return cuts


def other_rules(model: nn.Module, rules: Sequence[Any]) -> list[Any]:
    """Return the rules except those for split experts."""
    merged = [f".{path}.{name}" for path, experts in found_in(model).items() for name in experts.cuts]
    return [rule for rule in rules if not any(_makes(rule, name) for name in merged)]


def stacks(rule: Any) -> bool:
    """Tell whether a rule stacks linears to one parameter."""
    return all(_PLACE in source and source.endswith(_WEIGHT) for source in rule.source_patterns)


def wholes(model: nn.Module) -> dict[str, tuple[Experts, str, str]]:
    """Map each merged parameter of a model -> its experts, their path, and its name there."""
    return {
        f"{path}.{name}" if path else name: (experts, path, name)
        for path, experts in found_in(model).items()
        for name in experts.cuts
    }


def parts_of(experts: Experts, path: str, name: str) -> list[str]:
    """List the full names of a merged parameter's linears' weights."""
    cut = experts.cuts[name]
    return [f"{path}.{number}.{leaf}{_WEIGHT}" for number in range(cut.shape[0]) for leaf in cut.names]


def joined(model: nn.Module, names: Collection[str]) -> dict[str, list[str]]:
    """Map merged parameters without a rule of transformers -> their linears' weights, if all are in `names`."""
    parts = {
        whole: parts_of(experts, path, name)
        for whole, (experts, path, name) in wholes(model).items()
        if name not in experts.by_rule
    }
    held = set(names)
    return {whole: listed for whole, listed in parts.items() if held.issuperset(listed)}


def loadable(model: nn.Module, names: Collection[str], read: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """Read a model's tensors under names that its class loads: merged experts as one."""
    merged = joined(model, names)
    inside = {part for parts in merged.values() for part in parts}
    state = {name: read(name) for name in names if name not in inside}
    for whole in merged:
        experts, path, name = wholes(model)[whole]
        state[whole] = experts.whole(name, lambda leaf, path=path: read(f"{path}.{leaf}"))  # type: ignore[misc]
    return state


def prove(experts: Experts) -> float:
    """Return the difference between both forms on a few experts, relative to the largest value, in float64."""
    size = len(experts)
    count = min(_EXPERTS, size)
    ours = copy.copy(experts)  # only a few are copied: all may be larger than the memory
    ours._modules = {name: child for name, child in experts._modules.items() if not name.isdigit() or int(name) < count}
    ours._parameters = dict(experts._parameters)
    ours = copy.deepcopy(ours)
    ours.cuts = {name: cut.of(count) for name, cut in ours.cuts.items()}
    for name, value in list(vars(ours).items()):
        if value == size and "expert" in name and isinstance(value, int):
            setattr(ours, name, count)
    for name, value in list(ours.named_parameters(recurse=False)):  # biases of all experts
        setattr(ours, name, nn.Parameter(value[:count] if value.dim() > 1 and len(value) == size else value, False))
    ours.double()
    theirs = copy.deepcopy(ours)
    values = {name: theirs.whole(name, lambda leaf: theirs.get_parameter(leaf).detach()) for name in theirs.cuts}
    theirs.__class__ = experts.plain  # type: ignore[assignment]
    for name, value in values.items():
        owner, _, leaf = name.rpartition(".")
        holder = theirs.get_submodule(owner)
        if isinstance(holder, _Holder):
            holder.__class__ = type(holder).__mro__[2]
        setattr(holder, leaf, nn.Parameter(value, requires_grad=False))
    generator = torch.Generator().manual_seed(0)
    width = experts.cuts[next(iter(experts.cuts))].size[1]
    args = CALLS[experts.form](width, count, _TOKENS, min(_CHOSEN, count), generator, torch.float64)
    with torch.no_grad(), InDouble():  # type: ignore[no-untyped-call]
        # the class's own loop, not a faster replacement
        expected = own_forward(experts.plain)(theirs, *args)
        actual = ours(*args)
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-300))


def demand_equal(block: nn.Module, name: str) -> None:
    """Refuse experts unless their linears compute the same. Raises InputError (`architecture-unsupported`)."""
    for path, experts in found_in(block).items():
        difference = prove(experts)
        if difference > TOLERANCE:
            raise _unclear(f"{name}.{path}", f"its experts as linears differ by {difference:.1e} in float64")


def _unclear(where: str, value: str) -> InputError:
    rule, remedy = "experts are linears, merged", "this model cannot be quantized"
    return InputError("architecture-unsupported", where, value, rule, remedy)


def _own(module: nn.Module) -> list[tuple[str, Tensor]]:
    """List the parameters of a module itself."""
    return [(name, value) for name, value in module._parameters.items() if value is not None]


def _makes(rule: Any, name: str) -> bool:
    """Tell whether a rule stacks the linears of experts to this parameter (with a dot in front)."""
    return stacks(rule) and any(name.endswith("." + target.lstrip(".")) for target in rule.target_patterns)
