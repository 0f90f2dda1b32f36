"""The request for a compile, validated as a whole before torch is imported; models that are float ONNX graphs.

A torch module is exported into the user's cache, under a name made from its content. Its bundle records `module:CLASS`
and the hash of the exported graph; `quantkit measure` finds the graph in the cache by that hash.
"""

from __future__ import annotations

import platform
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit import content, given, machine, plugins
from quantkit.bundle import Decision
from quantkit.bundle.build import exists_already
from quantkit.content import cache_dir
from quantkit.errors import InputError, MissingDependency, one
from quantkit.exporters import LayerSpec, load_exporter
from quantkit.graph.open import is_graph
from quantkit.kinds import Kind
from quantkit.model.device import CPU, demand_name
from quantkit.model.sight import demand_no_adapter, demand_possible
from quantkit.model.source.adapter import Adapter
from quantkit.model.source.alias import ALIASES, Alias, materialize
from quantkit.model.source.files import file_sha256
from quantkit.model.source.weights import disk_errors
from quantkit.passes import NOTE, decision
from quantkit.planning import support
from quantkit.planning.support import Support
from quantkit.recipe import CalibrationChoice, ExportStep, Recipe
from quantkit.runtimes import timed
from quantkit.target import Target

if TYPE_CHECKING:
    from torch import Tensor, nn

DEFAULT_MODEL = "smollm2-135m"
# what joins a model and its adapters
PLUS = " + "
REF = "module:"


@dataclass(frozen=True)
class Request:
    """Request for one compile.

    Attributes:
        model: alias, folder, `hf:org/name` or .onnx file.
        adapters: adapters to merge into the model, in their order: folders or `hf:org/name`.
        out: name of the bundle; None takes `./<model>--<recipe>`, then `-2`, ...
        resume: True to continue an unfinished build.
        strict: True to make a decision that was not asked for an error.
        speed: True to time the result against the float model, if the target is this machine.
        vllm: True to run the checkpoint in vLLM, if the target has cells of it and it was added.
        left_out: exports of the recipe that no runtime of the target reads.
        module: class of the torch module that was exported to the .onnx file.
        as_shipped: True if the exports are those of a shipped recipe; then the target may add the export of its own
            runtime.
        gates_asked: gates named by a user's own recipe or change. A shipped recipe's gates are for several kinds of
            models, so some may not apply.
        device: device of the computation: `cpu`, `cuda`, `cuda:N`, or `auto`.
        tf32: True to let a GPU round the inputs of float32 products.
        taken: departures from the recipe before the compile began.
    """

    model: str
    recipe: Recipe
    target: Target
    out: Path | None = None
    resume: bool = False
    strict: bool = False
    trust_remote_code: bool = False
    speed: bool = True
    vllm: bool = True
    left_out: tuple[str, ...] = ()
    module: str | None = None
    as_shipped: bool = False
    gates_asked: frozenset[str] = frozenset()
    device: str = CPU
    tf32: bool = False
    taken: tuple[Decision, ...] = ()
    adapters: tuple[str, ...] = ()

    @cached_property
    def support(self) -> Support:
        """Support for the recipe on the target. Raises InputError, that of `planning.support.ask`."""
        return support.ask(self.recipe, self.target, kind_of(self.model))

    @classmethod
    def of(
        cls,
        model: str = DEFAULT_MODEL,
        *,
        recipe: str | Path | Recipe | Mapping[str, Any] = "awq-int4",
        target: str | Path | Target | None = None,
        calibration: str | Path | None = None,
        out: str | Path | None = None,
        changes: Sequence[str] = (),
        resume: bool = False,
        strict: bool = False,
        trust_remote_code: bool = False,
        allow_code: bool = False,
        speed: bool = True,
        vllm: bool = True,
        device: str = CPU,
        tf32: bool = False,
        adapters: str | Path | Sequence[str | Path] = (),
    ) -> Request:
        """Read and check recipe, target and calibration set. Nothing heavy is imported.

        Args:
            recipe: of a mapping, as a recipe's YAML has it, `name` is `own` where it says nothing.
            calibration: name or path; replaces the recipe's set. None takes a shipped encoder's own set instead of the
                text that recipes name unless they say otherwise.
            allow_code: run the files that the recipe's passes name.
            adapters: adapters to merge, in their order; opened by `demand_model`.

        Raises InputError: anything that is not what it has to be.
        """
        flags: dict[str, Any] = {
            "resume": resume,
            "strict": strict,
            "trust_remote_code": trust_remote_code,
            "speed": speed,
            "vllm": vllm,
        }
        given.flags(**flags, allow_code=allow_code, tf32=tf32)
        given.demand("device", device, (str,), "cpu, cuda, cuda:N or auto")
        if demand_name(device) == CPU and tf32:
            rule = "it sets how a GPU multiplies float32; a processor has no such setting"
            remedy = "--device cuda or auto; or without --tf32"
            raise InputError("usage", where="--tf32", value="--device cpu", rule=rule, remedy=remedy)
        chosen = _recipe(recipe, changes, allow_code=allow_code)
        shipped = isinstance(recipe, str) and not content.is_path(recipe)
        if calibration is None and shipped and not _names(changes, "calibration.set"):
            alias = ALIASES.get(model)
            # an encoder is scored on pairs, where the recipe names nothing but the default
            if alias and alias.kind == "encoder" and chosen.calibration.set == CalibrationChoice().set:
                calibration = alias.calibration
        if calibration is not None:
            kept = chosen.calibration.model_copy(update={"set": given.model(calibration, "calibration")})
            chosen = chosen.model_copy(update={"calibration": kept})
        content.find("calibration", chosen.calibration.set)
        if chosen.calibration.pictures is not None:
            content.find("calibration", chosen.calibration.pictures)
        aimed = target if isinstance(target, Target) else Target.load(this_machine() if target is None else target)
        kind, merged = kind_of(model), tuple(given.texts(adapters, "adapters"))
        if merged and kind == "network":
            rule = "an adapter is merged into a model of transformers"
            raise InputError("usage", "--adapter", f"with {model}, a float graph", rule, "leave it out")
        if kind is not None:
            # which of the two a graph is, its file says, and that is opened by the compile
            kinds: Sequence[Kind] = ("encoder", kind) if is_graph(model) else (kind,)
            support.demand_kind(chosen, aimed, kinds, model, "an ONNX graph" if is_graph(model) else one(kind))
        answer = support.ask(chosen, aimed, kind)
        where = given.path(out, "out")
        if where is not None and where.exists() and not resume:
            raise exists_already(where)
        limits = chosen.gates.model_dump().items()
        asked = (gate for gate, limit in limits if limit is not None)
        return cls(
            model,
            answer.recipe,
            aimed,
            where,
            **flags,
            left_out=answer.left_out,
            as_shipped=shipped and not _names(changes, "export"),
            gates_asked=frozenset(gate for gate in asked if not shipped or _names(changes, f"gates.{gate}")),
            device=device,
            tf32=tf32,
            adapters=merged,
        )


def _recipe(recipe: str | Path | Recipe | Mapping[str, Any], changes: Sequence[str], *, allow_code: bool) -> Recipe:
    if isinstance(recipe, Mapping):
        name = str(recipe.get("name", "own"))
        return Recipe.from_dict(dict(recipe), name=name, changes=changes, allow_code=allow_code)
    if not isinstance(recipe, Recipe):
        given.demand("recipe", recipe, (str, Path), "a name, a path, a Recipe, or a mapping as in its YAML")
        return Recipe.load(recipe, changes, allow_code=allow_code)
    if not changes:
        return recipe
    allow_code = allow_code or bool(recipe.code)
    return Recipe.from_dict(recipe.as_dict(), name=recipe.name, changes=changes, allow_code=allow_code)


def demand_model(model: str, adapters: Sequence[str] = ()) -> None:
    """Refuse an unfit model or adapter, before torch is imported.

    A night's plan may be read on a machine without its models, so that `Request.of` does not check this.

    Raises InputError: `adapter-unmerged`, those of `model.sight`; of an adapter's folder, those of `Adapter.open`.
    """
    if content.is_path(model):
        demand_no_adapter(Path(model), model)
        demand_possible(model)
    for adapter in adapters:
        if not adapter.startswith("hf:"):
            Adapter.at(adapter, model)


def _names(changes: Sequence[str], key: str) -> bool:
    """Tell whether a change sets that key, a part of it, or a parent of it."""
    paths = [change.partition("=")[0].strip() for change in changes]
    return any(path == key or path.startswith((f"{key}.", f"{key}[")) or key.startswith(f"{path}.") for path in paths)


def this_machine() -> str:
    """Name the shipped target of this machine's processor."""
    return "cpu-arm" if platform.machine().lower() in ("aarch64", "arm64") else "cpu-x86"


def runs_here(target: Target) -> bool:
    """Tell whether a target's runtime can be timed here: on a CPU of its kind, with the instructions it names."""
    vendors = {"cpu-x86": {"x86", "intel", "amd"}, "cpu-arm": {"arm", "apple"}}[this_machine()]
    named = target.arch.isa if isinstance(target.arch.isa, list) else []
    able = target.arch.vendor in vendors and set(named) <= set(machine.isa_features())
    return target.kind == "cpu" and able and not set(timed(target.runtimes)).isdisjoint(target.runtimes)


def kind_of(model: str) -> Kind | None:
    """Return the kind of a model by its name alone; None if it has to be opened. Every graph, whatever its inputs, is
    compiled as networks are.
    """
    alias = ALIASES.get(model)
    return "network" if is_graph(model) else None if alias is None else alias.kind


def with_own_runtime(request: Request, kind: str) -> Request:
    """Add an ONNX export for encoders in 8-bit integers where that is what computes in them: on a CPU torch expands a
    checkpoint's weights to floats, ONNX Runtime does not.

    Args:
        request: one whose exports are a shipped recipe's is changed, no other.
        kind: of the model.
    """
    recipe, target = request.recipe, request.target
    integers = recipe.scheme.activations is not None and recipe.scheme.activations.format == "int8"
    graph = plugins.exporters_that_store("graph")[0]
    if not (request.as_shipped and kind == "encoder" and integers) or graph in [step.name for step in recipe.export]:
        return request
    if target.kind != "cpu" or not set(load_exporter(graph).runtimes) & set(target.runtimes):
        return request
    steps = [ExportStep(name=graph), *recipe.export]
    return replace(request, recipe=support.ask(recipe.model_copy(update={"export": steps}), target).recipe)


def for_target(request: Request, asked: LayerSpec) -> tuple[Request, dict[str, str]]:
    """Settle options of the exports that depend on the target; with export -> how, of those."""
    from quantkit.measurement.timing.speed import compared

    trial = partial(compared, threads=machine.cores()) if runs_here(request.target) else None
    steps: list[ExportStep] = []
    reasons: dict[str, str] = {}
    for step in request.recipe.export:
        changes, reason = load_exporter(step.name).for_target(step.settings, request.target, asked, trial)
        steps.append(step.model_copy(update={"options": {**step.options, **changes}}))
        reasons |= {step.name: reason} if reason else {}
    return replace(request, recipe=request.recipe.model_copy(update={"export": steps})), reasons


def default_out(model: str, recipe: str, *, resume: bool) -> Path:
    """Return `./<model>--<recipe>`, with `-2`, `-3`, ... if that exists; to resume, the latest unfinished one."""
    base = f"{model}--{recipe}"
    if resume:
        ours = re.compile(rf"{re.escape(base)}(-\d+)?\.partial")
        unfinished = [path for path in Path().iterdir() if ours.fullmatch(path.name)]
        if unfinished:
            return Path(max(unfinished, key=lambda path: path.stat().st_mtime).name.removesuffix(".partial"))
    number, path = 1, Path(base)
    while path.exists() or Path(f"{path}.partial").exists():
        number += 1
        path = Path(f"{base}-{number}")
    return path


def parted(model: str) -> list[str]:
    """Split `MODEL + ADAPTER + ...`."""
    return [part.strip() for part in model.split(PLUS)]


def place(sha256: str) -> Path:
    """Tell where the graph of a module is kept."""
    return cache_dir() / "modules" / f"{sha256}.onnx"


def with_module(request: Request, module: nn.Module, example_inputs: Any, tokenizer: Any = None) -> Request:
    """Save a model of transformers, or export any other module, and put the result into the request as its model.

    Args:
        module: a `PreTrainedModel`, saved in its own dtype; or tensors to tensors, in float32, exported to ONNX. With
            `example_inputs` a `PreTrainedModel` is exported too.
        tokenizer: as of `save_in_memory`.
        example_inputs: a tensor, several in their order, or by name: [n, ...] each. All sizes but n are fixed in the
            graph; n is free, unless the module fixes it.

    Raises InputError: `module-kind`, `module-inputs`, `module-export`; MissingDependency: torch.
    """
    try:
        import onnx_ir as ir
        from torch import nn
    except ImportError as problem:
        raise MissingDependency(str(problem.name), extra="compile", purpose="exporting a module") from None
    from quantkit.model.to_onnx import write_onnx

    name = type(module).__name__
    if not isinstance(module, nn.Module):
        value, rule = one(name), "a model is a name, a path or a torch.nn.Module"
        remedy = "check the argument"
        if isinstance(module, Mapping):
            remedy = "weights alone are no model: load them into one first, model.load_state_dict(...)"
        raise InputError("module-kind", where="model", value=value, rule=rule, remedy=remedy)
    if example_inputs is None and "PreTrainedModel" in [base.__name__ for base in type(module).__mro__]:
        from quantkit.model.source.places import has_tokenizer, save_in_memory

        saved, taken = save_in_memory(module, tokenizer), request.taken
        if tokenizer is None and has_tokenizer(saved):
            came_from = Path(str(module.name_or_path))
            origin = came_from.name if came_from.is_dir() else str(came_from)
            reason = f"none was given: the one of {origin}, where the model was loaded from, is taken"
            taken = (*taken, decision("open", NOTE, "tokenizer", reason))
        return replace(request, model=str(saved), taken=taken)
    if tokenizer is not None:
        rule = "a module that is exported to ONNX takes tensors"
        raise InputError("usage", "tokenizer", f"given with {one(name)}", rule, "leave it out")
    if request.adapters:
        rule = "an adapter is merged into a model of transformers"
        raise InputError("usage", "adapters", f"given with {one(name)}", rule, "leave them out")
    examples = _examples(example_inputs, name)
    home = place("").parent
    with disk_errors(home):
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home) as folder:
            file = Path(folder) / "model.onnx"
            try:
                write_onnx(module, examples, file)
                model = ir.load(file)
                for node in model.graph.all_nodes():
                    node.metadata_props.clear()  # paths of whoever exported it
                ir.save(model, file)
            except Exception as problem:  # of the module itself, or whatever torch's exporter raises
                cause = problem.__cause__ or problem
                lines = (line.strip() for line in str(cause).splitlines())
                reason = next((line for line in lines if line), type(cause).__name__)
                value = f"{type(cause).__name__}: {reason[:300]}"
                rule = "torch.onnx.export(module, example_inputs, dynamo=True) makes a graph of it"
                remedy = "correct the module, or export it yourself and give the .onnx file"
                raise InputError("module-export", name, value, rule, remedy) from None
            kept = place(file_sha256(file))
            file.replace(kept)
    return replace(request, model=str(kept), module=name)


def _examples(inputs: Any, name: str) -> list[Tensor] | dict[str, Tensor]:
    """Take inputs by position or by name, two samples at least: of one, the exporter takes it that there is never
    another."""
    import torch

    by_name = isinstance(inputs, Mapping)
    tensors = dict(inputs) if by_name else dict(enumerate(inputs if isinstance(inputs, Sequence) else [inputs]))
    if not tensors or not all(isinstance(tensor, torch.Tensor) and tensor.ndim for tensor in tensors.values()):
        value = "no example_inputs" if inputs is None else f"example_inputs are {one(type(inputs).__name__)}"
        rule = "example_inputs are the arguments of a call: a tensor, several, or a dict of them, [n, ...] each"
        raise InputError("module-inputs", name, value, rule, "example_inputs=torch.randn(2, 3, 224, 224)")
    doubled = {str(key): torch.cat([own, own]) if len(own) == 1 else own for key, own in tensors.items()}
    return doubled if by_name else list(doubled.values())


@dataclass(frozen=True)
class Located:
    """File of a graph.

    Attributes:
        ref: reference in the manifest.
        name: stem of the bundle's name.
        alias: alias of a shipped model; it names a calibration set and the preprocessing of its images.
    """

    path: Path
    ref: str
    name: str
    alias: Alias | None = None


def takes_graph(model: str) -> bool:
    """Tell whether a model is compiled as a float ONNX graph: a file of one, or a shipped network."""
    alias = ALIASES.get(model)
    return is_graph(model) or (alias is not None and alias.kind == "network")


def located(request: Request) -> Located:
    """Locate the graph of a request; a shipped one is materialized."""
    alias = ALIASES.get(request.model)
    if alias is not None:
        return Located(materialize(alias) / "model.onnx", f"alias:{alias.name}", alias.name, alias)
    path = Path(request.model).expanduser()
    ref = f"{REF}{request.module}" if request.module else f"path:{path.name}"
    return Located(path, ref, request.module or path.stem)
