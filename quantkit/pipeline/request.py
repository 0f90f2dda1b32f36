"""What is asked of a compile, validated as a whole before torch is imported."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from quantkit import content, given, machine, plugins
from quantkit.bundle import Decision
from quantkit.errors import InputError, one
from quantkit.exporters import LayerSpec, load_exporter
from quantkit.graph.open import is_graph
from quantkit.kinds import Kind
from quantkit.model.device import CPU, demand_name
from quantkit.model.sight import demand_possible
from quantkit.model.source import adapter
from quantkit.model.source.alias import ALIASES
from quantkit.planning import support
from quantkit.planning.support import Support
from quantkit.recipe import CalibrationChoice, ExportStep, Recipe
from quantkit.runtimes import timed
from quantkit.target import Target

DEFAULT_MODEL = "smollm2-135m"


@dataclass(frozen=True)
class Request:
    """One compile.

    Args:
        model: alias, folder, `hf:org/name` or .onnx file.
        recipe: validated.
        target: validated.
        out: the bundle's name; None chooses `./<model>--<recipe>`, then `-2`, ...
        resume: go on with an unfinished build.
        strict: a decision that was not asked for is an error.
        trust_remote_code: allow a model's own code to run.
        speed: time the result against the float model, where the target is this machine.
        left_out: exports of the recipe that no runtime of the target reads.
        module: class of the torch module that the .onnx file was exported from.
        as_shipped: whether the exports are those of a shipped recipe, which says what it does, not to whom: an export
            for the target's own runtime may be added to them.
        device: where it computes: `cpu`, `cuda`, `cuda:N`, or `auto`.
        tf32: whether products of float32 round their inputs, on a GPU.
        taken: what was done otherwise than the recipe says, before the compile began.
        gates_asked: gates that a recipe of one's own or a change names; a shipped recipe's are for several kinds of
            models, and not all of them for each.
    """

    model: str
    recipe: Recipe
    target: Target
    out: Path | None = None
    resume: bool = False
    strict: bool = False
    trust_remote_code: bool = False
    speed: bool = True
    left_out: tuple[str, ...] = ()
    module: str | None = None
    as_shipped: bool = False
    gates_asked: frozenset[str] = frozenset()
    device: str = CPU
    tf32: bool = False
    taken: tuple[Decision, ...] = ()

    @cached_property
    def support(self) -> Support:
        """What the recipe can have on the target. Raises InputError, that of `planning.support.ask`."""
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
        device: str = CPU,
        tf32: bool = False,
    ) -> Request:
        """Read and check recipe, target and calibration set. Nothing heavy is imported.

        Args:
            recipe: of a mapping, as a recipe's YAML has it, `name` is `own` where it says nothing.
            calibration: name or path; replaces the recipe's set. None takes a shipped encoder's own set instead of the
                text that recipes name unless they say otherwise.
            allow_code: run the files that the recipe's passes name.

        Raises:
            InputError: anything that is not what it has to be.
        """
        given.flags(
            resume=resume,
            strict=strict,
            trust_remote_code=trust_remote_code,
            allow_code=allow_code,
            speed=speed,
            tf32=tf32,
        )
        given.demand("device", device, (str,), "cpu, cuda, cuda:N or auto")
        if demand_name(device) == CPU and tf32:
            raise InputError(
                "usage",
                where="--tf32",
                value="--device cpu",
                rule="it says how a GPU multiplies float32; a processor does it in float32",
                remedy="--device cuda or auto; or without --tf32",
            )
        if isinstance(recipe, Mapping):
            name = str(recipe.get("name", "own"))
            chosen = Recipe.from_dict(dict(recipe), name=name, changes=changes, allow_code=allow_code)
        elif not isinstance(recipe, Recipe):
            given.demand("recipe", recipe, (str, Path), "a name, a path, a Recipe, or a mapping as in its YAML")
            chosen = Recipe.load(recipe, changes, allow_code=allow_code)
        elif changes:
            allow_code = allow_code or bool(recipe.code)
            chosen = Recipe.from_dict(recipe.as_dict(), name=recipe.name, changes=changes, allow_code=allow_code)
        else:
            chosen = recipe
        shipped = isinstance(recipe, str) and not content.is_path(recipe)
        if calibration is None and shipped and not _names(changes, "calibration.set"):
            calibration = _own_set(model, chosen)
        if calibration is not None:
            kept = chosen.calibration.model_copy(update={"set": given.model(calibration, "calibration")})
            chosen = chosen.model_copy(update={"calibration": kept})
        content.find("calibration", chosen.calibration.set)
        aimed = target if isinstance(target, Target) else Target.load(this_machine() if target is None else target)
        kind = kind_of(model)
        if kind is not None:
            # which of the two a graph is, its file says, and that is opened by the compile
            file = is_graph(model)
            support.demand_kind(
                chosen, aimed, ("encoder", kind) if file else (kind,), model, "an ONNX graph" if file else one(kind)
            )
        answer = support.ask(chosen, aimed, kind)
        where = given.path(out, "out")
        if where is not None and where.exists() and not resume:
            raise InputError(
                "out-exists",
                where=str(where),
                value="exists already",
                rule="nothing is overwritten",
                remedy="choose another --out, or delete it",
            )
        return cls(
            model,
            answer.recipe,
            aimed,
            where,
            resume,
            strict,
            trust_remote_code,
            speed,
            answer.left_out,
            as_shipped=shipped and not _names(changes, "export"),
            gates_asked=frozenset(
                gate
                for gate, limit in chosen.gates.model_dump().items()
                if limit is not None and (not shipped or _names(changes, f"gates.{gate}"))
            ),
            device=device,
            tf32=tf32,
        )


def demand_model(model: str) -> None:
    """Refuse a model that cannot be compiled, before torch is imported.

    A night's plan is read where its models need not lie, so that `Request.of` does not ask.

    Raises:
        InputError: `adapter-unmerged`, those of `model.sight`.
    """
    if content.is_path(model):
        adapter.demand_none(Path(model), model)
        demand_possible(model)


def _names(changes: Sequence[str], key: str) -> bool:
    """Whether a change is of that key, or of what lies in it or around it."""
    paths = [change.partition("=")[0].strip() for change in changes]
    return any(path == key or path.startswith((f"{key}.", f"{key}[")) or key.startswith(f"{path}.") for path in paths)


def _own_set(model: str, recipe: Recipe) -> str | None:
    """The set of a shipped encoder, where the recipe names none but the default; an encoder is scored on pairs."""
    alias = ALIASES.get(model)
    if alias is None or alias.kind != "encoder" or recipe.calibration.set != CalibrationChoice().set:
        return None
    return alias.calibration


def this_machine() -> str:
    """The shipped target of this machine's processor."""
    return "cpu-arm" if platform.machine().lower() in ("aarch64", "arm64") else "cpu-x86"


def runs_here(target: Target) -> bool:
    """Whether a target's runtime can be timed on this machine: a CPU of its kind, with the instructions it names."""
    vendors = {"cpu-x86": {"x86", "intel", "amd"}, "cpu-arm": {"arm", "apple"}}[this_machine()]
    named = target.arch.isa if isinstance(target.arch.isa, list) else []
    able = target.arch.vendor in vendors and set(named) <= set(machine.isa_features())
    return target.kind == "cpu" and able and not set(timed(target.runtimes)).isdisjoint(target.runtimes)


def kind_of(model: str) -> Kind | None:
    """What its name alone says of a model; None where it has to be opened. A graph, whatever it takes, is compiled as
    networks are."""
    alias = ALIASES.get(model)
    return "network" if is_graph(model) else None if alias is None else alias.kind


def with_own_runtime(request: Request, kind: str) -> Request:
    """The request with an ONNX export, for encoders in 8-bit integers where that is what computes in them: on a CPU
    torch expands a checkpoint's weights to floats, ONNX Runtime does not.

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
    """The request with options of its exports settled that depend on the target; export -> how, of those.

    Args:
        asked: the layers of the model.
    """
    from quantkit.measurement.timing.speed import compared

    trial = partial(compared, threads=machine.cores()) if runs_here(request.target) else None
    steps: list[ExportStep] = []
    said: dict[str, str] = {}
    for step in request.recipe.export:
        changes, reason = load_exporter(step.name).for_target(step.settings, request.target, asked, trial)
        steps.append(step.model_copy(update={"options": {**step.options, **changes}}))
        said |= {step.name: reason} if reason else {}
    return replace(request, recipe=request.recipe.model_copy(update={"export": steps})), said


def default_out(model: str, recipe: str, *, resume: bool) -> Path:
    """`./<model>--<recipe>`, or with `-2`, `-3`, ... where that is taken; when resuming, the latest unfinished one."""
    base = f"{model}--{recipe}"
    if resume:
        ours = re.compile(rf"{re.escape(base)}(-\d+)?\.partial")
        unfinished = [path for path in Path().iterdir() if ours.fullmatch(path.name)]
        unfinished.sort(key=lambda path: path.stat().st_mtime)
        if unfinished:
            return Path(unfinished[-1].name.removesuffix(".partial"))
    number = 1
    while True:
        path = Path(base if number == 1 else f"{base}-{number}")
        if not path.exists() and not Path(f"{path}.partial").exists():
            return path
        number += 1
