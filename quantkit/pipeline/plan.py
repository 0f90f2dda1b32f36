"""A plan: the model's sizes, a target's figures and what was measured before, for each recipe that is asked about.

Nothing is opened but a config, and nothing heavy is imported: a second for the largest model there is.

What a plan compares: recipes by name, formats that stand for one, and the runtime that would run each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from quantkit import content, machine, plugins
from quantkit.errors import InputError, unknown_name
from quantkit.exporters import load_exporter
from quantkit.kinds import Kind
from quantkit.model.device import CPU
from quantkit.model.sizes import configs
from quantkit.model.sizes.architecture import Architecture
from quantkit.model.sizes.assigned import Assigned, assign_sizes
from quantkit.model.sizes.storage import Storage
from quantkit.pipeline.estimate import unopened
from quantkit.pipeline.request import runs_here, this_machine
from quantkit.planning import efficiency
from quantkit.planning.batching import Server
from quantkit.planning.compiling import Compiling
from quantkit.planning.cost import Bill, Prices, RequestTime, bill
from quantkit.planning.efficiency import Sample
from quantkit.planning.forecast import Served, TimedStep
from quantkit.planning.load import Load, simulate
from quantkit.planning.memory import Footprint, cache_of, storage, taken_by
from quantkit.planning.outlook import (
    Outlook,
    PlannedBatch,
    PlannedCell,
    PlannedMemory,
    PlannedRecipe,
    Workload,
    recommend,
)
from quantkit.planning.roofline import FLOATS, WIDTH, Cache, ModelStep, compute_type, products
from quantkit.planning.support import ask, caveats, demand_kind, fitted, shipped, stored_formats
from quantkit.planning.traffic import OUTPUT, PROMPT, traffic
from quantkit.recipe import Recipe
from quantkit.target import ComputeType, Stored, Target

# decisions that change what is stored, in a way that nobody may expect
_REMARKED = ("kept", "padded", "group-shrunk")
# tokens of a text that an encoder is given, where nobody says
_TEXT = 128
# sequences that one server runs at once, at most: what vLLM takes unless it is told otherwise
_SEQUENCES = 256


@dataclass(frozen=True)
class PlanQuestion:
    """What is asked.

    Args:
        model: shipped name, folder, `config.json` or bundle.
        recipes: by name or path, or formats that stand for one; none: the usual ones.
        target: name or path; None: this machine's processor.
        runtime: that would run them; None: the target's first that computes natively in each.
        batches: sequences at once; none: the target's.
        prompt: tokens that come in; None: 1,024, or half of what the model takes.
        output: tokens that go out; None: 256, or an eighth.
        mix: prompts and outputs of several lengths with their shares, instead: `2000x300:0.7,8000x500:0.3`.
        variation: of the lengths, as a share of their average.
        context: tokens to make room for; None: the longest request.
        rate: requests a second to simulate.
        devices: that share the model; None: as few as hold it.
        prices: a file; None: those that ship.
        measured: files or bundles to learn efficiencies from, besides what is known.
        changes: `PATH=YAML` changes to every recipe.
        allow_code: run the files that the recipes' passes name.
        device: where the compile is to compute, as `--device` of it.
    """

    model: str
    recipes: Sequence[str] = ()
    target: str | Path | Target | None = None
    runtime: str | None = None
    batches: Sequence[int] = ()
    prompt: int | None = None
    output: int | None = None
    mix: str | None = None
    variation: float = 0.0
    context: int | None = None
    rate: float | None = None
    devices: int | None = None
    prices: Path | None = None
    measured: Sequence[Path] = ()
    changes: Sequence[str] = ()
    allow_code: bool = False
    device: str = CPU


def plan(question: PlanQuestion, samples: Sequence[Sample] | None = None) -> Outlook:
    """Answer it.

    Args:
        samples: of efficiencies, instead of those that are known and those that the question names.

    Raises:
        InputError: what is not what it has to be: model, target, sizes. A recipe that cannot be planned is a
            candidate with its problem, unless all stumble over the same; one that nobody knows is an error.
    """
    architecture = configs.read(question.model)
    aimed = question.target
    target = aimed if isinstance(aimed, Target) else Target.load(this_machine() if aimed is None else aimed)
    workload = _workload(question, architecture, target)
    if samples is None:
        samples = [*efficiency.measured(question.measured), *efficiency.own(), *efficiency.shipped()]
    prices = Prices.load(question.prices)
    if question.runtime is not None and question.runtime not in target.runtimes:
        target.check([], question.runtime)  # a slip of the pen is none of the recipes' problem
    asked = labels(question.recipes, architecture.kind, target)
    candidates = [_candidate(label, question, architecture, target, workload, samples, prices) for label in asked]
    problems = [each.problem for each in candidates if each.problem is not None]
    if slip := next((each for each in problems if each.code.startswith("unknown-")), None):
        raise slip  # a name that nothing has is no candidate
    if len(problems) == len(candidates) and (len(candidates) == 1 or len({each.code for each in problems}) == 1):
        raise problems[0]  # all stumble over one thing
    notes = [f"assumed: {each}" for each in (*architecture.assumed, *workload.assumed)]
    if unmeasured := target.unmeasured():
        missing = f"{target.name} has no figure for {', '.join(unmeasured)}"
        notes.append(f"{missing}: on that machine, quantkit doctor --write --target {target.name} measures them")
    return Outlook(architecture, target, workload, candidates, recommend(candidates, workload), notes, question.model)


def _workload(question: PlanQuestion, architecture: Architecture, target: Target) -> Workload:
    if question.devices is not None and question.devices < 1:
        raise InputError("usage", where="--devices", value=question.devices, rule="from 1 up")
    limit, decodes = architecture.max_context, architecture.kind == "decoder"
    _refuse_unused(question, architecture)
    prompt, output, assumed = question.prompt, question.output, []
    if question.mix is None and (limit is not None or not decodes):
        # what is assumed has to fit into the model
        usual = (PROMPT, OUTPUT) if decodes else (_TEXT, 1)
        most = limit or _TEXT
        if prompt is None and architecture.kind == "network":
            prompt = most  # an image has as many patches as it has
        if prompt is None:
            prompt = max(min(usual[0], most // 2 if decodes else most), 1)
            assumed.append(
                f"prompts of {prompt:,} tokens (--prompt)" if decodes else f"texts of {prompt:,} tokens (--prompt)"
            )
        if output is None:
            output = max(min(usual[1], most // 8), 1)
            assumed += [f"outputs of {output:,} tokens (--output)"] if decodes else []
    found = traffic(prompt=prompt, output=output, mix=question.mix, variation=question.variation, rate=question.rate)
    mean = (round(found.prompt), round(found.output) if decodes else 0)
    longest = min(found.longest, limit) if limit is not None and question.variation else found.longest
    longest = longest if decodes else mean[0]
    context = question.context if question.context is not None else longest
    for name, value in (("--context", context), ("--prompt and --output", longest)):
        if limit is not None and value > limit:
            raise InputError(
                "context-too-long",
                where=name,
                value=f"{value:,} tokens",
                rule=f"{architecture.name} was made for {limit:,}",
                remedy=f"--context {limit}, with prompt and output within it",
            )
    if longest > context:
        raise InputError(
            "usage", where="--context", value=context, rule=f"it holds prompt and output, {longest:,} tokens"
        )
    return Workload(question.batches or target.batches, *mean, context, found, [*found.assumed, *assumed])


def _refuse_unused(question: PlanQuestion, architecture: Architecture) -> None:
    """Refuse lengths that a model does not have: they would be passed over in silence."""
    if architecture.kind == "decoder":
        return
    asked: dict[str, object] = {"--output": question.output, "--requests": question.mix}
    asked |= {"--variation": question.variation or None, "--rate": question.rate}
    rule = f"{architecture.name} does not decode"
    if architecture.kind == "network":
        asked |= {"--prompt": question.prompt, "--context": question.context}
        rule = f"{architecture.name} takes whole images"
    for name, value in asked.items():
        if value is not None:
            raise InputError("usage", where=name, value=value, rule=rule, remedy="leave it out")


def _candidate(
    label: str,
    question: PlanQuestion,
    architecture: Architecture,
    target: Target,
    workload: Workload,
    samples: Sequence[Sample],
    prices: Prices,
) -> PlannedRecipe:
    try:
        chosen = choose(
            label,
            architecture.kind,
            target,
            changes=question.changes,
            allow_code=question.allow_code,
            runtime=question.runtime,
        )
        assigned = assign_sizes(chosen.recipe, architecture)
    except InputError as problem:
        return PlannedRecipe(label, label, problem=problem)
    served = _served(chosen, assigned, architecture, target, samples)
    try:
        kept = storage(architecture, chosen.recipe, _export(chosen))
        footprint = _footprint(served, chosen, assigned, kept)
        devices, needed = _devices(footprint, workload, question.devices, label)
    except InputError as problem:
        return PlannedRecipe(label, label, problem=problem)
    served = replace(served, devices=devices)
    memory = _memory(footprint, workload, devices, needed)
    rows = [_row(served, batch, workload, footprint, prices) for batch in _batches(workload, memory)]
    try:
        expected, unknown = _compiling(chosen, architecture, target, question.device)
    except InputError as problem:
        return PlannedRecipe(label, label, problem=problem)
    load, refused = _load(served, workload, memory)
    return PlannedRecipe(
        label,
        chosen.recipe.name,
        chosen.runtime,
        _cells(chosen, target),
        kept.bits,
        kept.total,
        memory,
        rows,
        served,
        load,
        _cost(rows, served, workload, load, prices),
        expected,
        notes=[
            *refused,
            *unknown,
            *_other_floats(label, target),
            *caveats(chosen.recipe, target, [chosen.runtime]),
            *(each.reason for each in assigned.decisions if each.code in ("kept", "padded", "group-shrunk")),
        ],
        code=bool(chosen.recipe.code),
    )


def _other_floats(label: str, target: Target) -> list[str]:
    """That a float was asked for which the target does not compute in."""
    asked, floats = float_of(label), FLOATS[target.baseline]
    return [f"reckoned in {floats}, in which {target.name} computes"] if asked not in (None, floats) else []


def _export(chosen: Chosen) -> str | None:
    """The export that its runtime reads."""
    names = [step.name for step in chosen.recipe.export]
    return next((name for name in names if chosen.runtime in load_exporter(name).runtimes), None)


def _served(
    chosen: Chosen, assigned: Assigned, architecture: Architecture, target: Target, samples: Sequence[Sample]
) -> Served:
    read = _export(chosen)
    level = next((step.options.get("accuracy_level") for step in chosen.recipe.export if step.name == read), None)
    weights, inputs = chosen.recipe.scheme.weights, chosen.recipe.scheme.activations
    base = cast(ComputeType, target.baseline)
    native = weights is not None and _native(Stored(weights.format, weights.symmetric), chosen, target)
    return Served(
        architecture,
        products(architecture, assigned.schemes, assigned.activations, target, chosen.runtime, accuracy_level=level),
        _cache(chosen, target),
        target,
        chosen.runtime,
        weights.format if weights is not None and native else FLOATS[target.baseline],
        compute_type(weights, inputs, target, chosen.runtime, level),
        base,
        samples=samples,
        device=machine.device()["id"] if runs_here(target) else None,
    )


def _native(stored: Stored, chosen: Chosen, target: Target) -> bool:
    return target.use(stored, chosen.runtime).state == "native"


def _cache(chosen: Chosen, target: Target) -> Cache:
    scheme = chosen.recipe.scheme.kv_cache
    native = scheme is not None and _native(Stored(scheme.format, scheme.symmetric, "kv_cache"), chosen, target)
    return cache_of(scheme if native else None, FLOATS[target.baseline])


def _footprint(served: Served, chosen: Chosen, assigned: Assigned, kept: Storage) -> Footprint:
    target, head, read = served.target, served.architecture.head, _export(chosen)
    # a graph is run as it is stored; of a checkpoint a runtime holds floats in the dtype that it computes in
    graph = read is not None and load_exporter(read).stores == "graph"
    return Footprint(
        served.architecture,
        served.products,
        served.cache,
        WIDTH[target.baseline],
        # a head that is quantized is no longer the table of tokens
        served.architecture.tied and (head is None or head.name not in assigned.schemes),
        taken_by(chosen.runtime, target.kind),
        target.memory.capacity.number,
        groups={name: each.group for name, each in assigned.schemes.items() if each.group is not None},
        tables=kept.embeddings if graph else None,
        others=kept.others if graph else None,
    )


def _devices(footprint: Footprint, workload: Workload, asked: int | None, label: str) -> tuple[int, int | None]:
    """(devices to plan for, devices that one request needs): as few as hold one, unless it is said.

    Raises:
        InputError: `devices-uneven`.
    """
    needed = footprint.needed(1, workload.context, prompt=workload.prompt)
    if asked is not None and (why := footprint.why_not(asked)):
        raise InputError(
            "devices-uneven", where=label, value=f"--devices {asked}", rule=why, remedy="a power of two up to the heads"
        )
    return asked or needed or 1, needed


def _batches(workload: Workload, memory: PlannedMemory) -> list[int]:
    """Those that were asked for; and the largest that fits, where some do not: it is what one would run."""
    most = memory.largest_batch
    more = [most] if most and most < max(workload.batches) else []
    return sorted({*workload.batches, *more})


def _memory(footprint: Footprint, workload: Workload, devices: int, needed: int | None) -> PlannedMemory:
    fits = [b for b in workload.batches if footprint.fits(b, workload.context, prompt=workload.prompt, devices=devices)]
    batch = max(fits, default=min(workload.batches))
    runtime = footprint.runtime
    usable = None if footprint.capacity is None else footprint.capacity * runtime.share
    return PlannedMemory(
        footprint.parts(batch, workload.context, prompt=workload.prompt, devices=devices),
        batch,
        usable,
        footprint.cache_per_token,
        footprint.largest_batch(workload.context, prompt=workload.prompt, devices=devices),
        footprint.largest_context(batch, devices=devices),
        devices,
        needed,
        [f"reckoned for the runtime: {runtime.source}"],
    )


def _compiling(
    chosen: Chosen, architecture: Architecture, target: Target, device: str
) -> tuple[Compiling | None, list[str]]:
    """What the compile takes on this machine, which need not be the target. Raises InputError, of the device."""
    try:
        return unopened(architecture, chosen.recipe, speed=runs_here(target), device=device, target=target), []
    except InputError as problem:
        if problem.code in ("device-absent", "device-memory"):
            raise
        return None, [f"what the compile takes is not known: {problem.remedy or problem.value}"]


def _cells(chosen: Chosen, target: Target) -> list[PlannedCell]:
    stored = stored_formats(chosen.recipe) or [Stored(FLOATS[target.baseline], True)]
    found = [(each, target.use(each, chosen.runtime)) for each in stored]
    return [PlannedCell(each.format, each.words, use.state, use.source) for each, use in found]


def _row(served: Served, batch: int, workload: Workload, footprint: Footprint, prices: Prices) -> PlannedBatch:
    decodes = served.architecture.kind == "decoder"
    first = served.timed(ModelStep(batch, workload.prompt))
    step = served.timed(ModelStep(batch, 1, workload.prompt + workload.output // 2)) if decodes else first
    devices = served.devices
    parts = footprint.parts(batch, workload.context, prompt=workload.prompt, devices=devices)
    bounded = footprint.capacity is not None
    fits = footprint.fits(batch, workload.context, prompt=workload.prompt, devices=devices) if bounded else None
    work = _work(first, step, batch, workload, served)
    return PlannedBatch(batch, first if decodes else None, step, parts, fits, _bill(work, served, prices))


def _load(served: Served, workload: Workload, memory: PlannedMemory) -> tuple[Load | None, list[str]]:
    """What the simulation says, or why there is none."""
    if workload.rate is None:
        return None, []
    if served.architecture.kind != "decoder":
        return None, ["no load is simulated: it does not decode"]
    if served.missing:
        return None, ["no load is simulated: no time is known"]
    sequences = _SEQUENCES if memory.largest_batch is None else min(memory.largest_batch, _SEQUENCES)
    if not sequences:
        return None, ["no load is simulated: it does not fit"]
    tokens = workload.context * (sequences if memory.largest_batch is None else memory.largest_batch)
    server = Server.of(
        lambda batch, new, past: served.timed(ModelStep(batch, new, past)).seconds or 0.0,
        longest=workload.context,
        cache_tokens=tokens,
        max_batch=sequences,
    )
    return simulate(server, workload.traffic, limit=served.architecture.max_context), []


def _cost(
    rows: Sequence[PlannedBatch], served: Served, workload: Workload, load: Load | None, prices: Prices
) -> Bill | None:
    """At the batch where a request takes least; under a load, with the hours in which the machine has nothing to do."""
    fitting = [row for row in rows if row.fits is not False]
    works = [_work(row.prefill or row.step, row.step, row.batch, workload, served) for row in fitting]
    best = min((each for each in works if each is not None), key=lambda each: each.request, default=None)
    if best is None or workload.rate is None or load is None or not load.stable:
        return _bill(best, served, prices)
    return _bill(best, served, prices, min(workload.rate * best.request, 1.0))


def _work(first: TimedStep, step: TimedStep, batch: int, workload: Workload, served: Served) -> RequestTime | None:
    if first.seconds is None or step.seconds is None:
        return None
    decoding = step.seconds if served.architecture.kind == "decoder" else 0.0
    return RequestTime.of(
        prefill=first.seconds,
        step=decoding,
        batch=batch,
        prompt=workload.prompt,
        output=workload.output,
        devices=served.devices,
    )


def _bill(work: RequestTime | None, served: Served, prices: Prices, utilisation: float = 1.0) -> Bill | None:
    if work is None:
        return None
    target, power = served.target, served.target.power
    return bill(
        work,
        prices,
        target.name,
        watts=power.number if power is not None else None,
        model=served.architecture.name,
        utilisation=utilisation,
    )


# how people spell the floats that weights are left in
_FLOATS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_UNQUANTIZED = ("bfloat16", "float16", "float32")
# what is compared where nothing is asked for: a recipe of each width, the first of them that the target runs natively
_DEFAULTS: dict[Kind, Sequence[Sequence[str]]] = {
    "decoder": (("fp8",), ("int8-dynamic",), ("awq-int4", "int4-tensorrt")),
    "encoder": (("fp8",), ("int8-dynamic", "int8-tensorrt"), ("awq-int4",)),
    "network": (("int8-tensorrt",),),
}
# they run language models and, some of them, encoders of text
_TEXT_ALONE = ("vllm", "llama_cpp")


@dataclass(frozen=True)
class Chosen:
    """A candidate before anything is reckoned.

    Args:
        label: as it was asked for.
        recipe: what it stands for, with the exports that the target reads.
        runtime: of the target that would run it.
    """

    label: str
    recipe: Recipe
    runtime: str


def labels(asked: Sequence[str], kind: Kind, target: Target) -> list[str]:
    """What to plan: what was asked for, else the usual ones that the target runs."""
    if asked:
        return list(dict.fromkeys(asked))
    usual = (next((each for each in like if _runs(each, kind, target, native=True)), None) for like in _DEFAULTS[kind])
    return ["float", *(label for label in usual if label is not None)]


def choose(
    label: str,
    kind: Kind,
    target: Target,
    *,
    changes: Sequence[str] = (),
    allow_code: bool = False,
    runtime: str | None = None,
) -> Chosen:
    """A recipe (`awq-int4`, `./mine.yaml`, `awq-int4+kv-fp8`) or a format (`int4`, `fp8_e4m3`, `bf16`) by its label.

    A format stands for the first shipped recipe that stores weights so and that the target runs natively; a float for
    the model as it is.

    Raises:
        InputError: `unknown-recipe`, `model-kind`, `target-cannot-run`, and what a recipe raises.
    """
    recipe = _recipe(label, kind, target, changes, allow_code=allow_code)
    demand_kind(recipe, target, (kind,), label)
    judged = runtime is None and recipe.passes
    readable = ask(recipe, target).recipe if judged else fitted(recipe, target)[0]
    return Chosen(label, readable, _runtime(readable, kind, target, runtime))


def float_of(label: str) -> str | None:
    """The float that a label asks for: `float16` for `fp16`; None where it asks for none."""
    name = _FLOATS.get(label, label)
    return name if name in _UNQUANTIZED else None


def _recipe(label: str, kind: Kind, target: Target, changes: Sequence[str], *, allow_code: bool) -> Recipe:
    name = _FLOATS.get(label, label)
    first = name.partition("+")[0]
    if content.is_path(first) or first in content.names("recipes"):
        plain = not changes and not content.is_path(first)
        return shipped(name) if plain else Recipe.load(name, changes, allow_code=allow_code)
    if name in _UNQUANTIZED:
        return Recipe.load("float", changes) if changes else shipped("float")
    storing = _storing(first, kind) if first in plugins.FORMATS else []
    if not storing:
        known = sorted({*content.names("recipes"), *_FLOATS, *plugins.FORMATS.names()})
        raise unknown_name("recipe", label, known)
    chosen = next((each for each in storing if _runs(each.name, kind, target, native=True)), None)
    chosen = chosen or next((each for each in storing if _runs(each.name, kind, target)), storing[0])
    name = name.replace(first, chosen.name, 1)
    return Recipe.load(name, changes) if changes else shipped(name)


def _storing(form: str, kind: Kind) -> list[Recipe]:
    """The shipped recipes whose weights are of that format, the default one first."""
    found = [shipped(name) for name in content.names("recipes")]
    fitting = [each for each in found if each.scheme.weights is not None and each.scheme.weights.format == form]
    fitting = [each for each in fitting if kind in each.models]
    return sorted(fitting, key=lambda each: (each.name != "awq-int4", each.name))


def _runs(name: str, kind: Kind, target: Target, *, native: bool = False) -> bool:
    try:
        recipe = ask(shipped(name), target).recipe
    except InputError:
        return False
    runtime = _runtime(recipe, kind, target, None)
    return not native or all(target.use(each, runtime).state == "native" for each in stored_formats(recipe))


def _runtime(recipe: Recipe, kind: Kind, target: Target, asked: str | None) -> str:
    """The target's first runtime that reads an export and computes natively in what it stores; else the first that
    runs it at all.
    """
    readers = {name for step in recipe.export for name in load_exporter(step.name).runtimes}
    if asked is not None:
        if asked not in target.runtimes:
            target.check([], asked)
        if recipe.passes and asked not in readers:
            raise InputError(
                "usage",
                where=f"--runtime {asked}",
                value=f"recipe {recipe.name} exports {', '.join(step.name for step in recipe.export)}",
                rule=f"which {', '.join(sorted(readers & set(target.runtimes)))} of {target.name} read",
                remedy="one of those, or another recipe",
            )
        target.check(stored_formats(recipe), asked)
        return asked
    reading = [name for name in target.runtimes if name in readers] or list(target.runtimes)
    if kind == "network":
        reading = [name for name in reading if name not in _TEXT_ALONE] or reading
    stored = stored_formats(recipe)

    def states(runtime: str) -> list[str]:
        return [target.use(each, runtime).state for each in stored]

    native = [name for name in reading if all(state == "native" for state in states(name))]
    able = [name for name in reading if "absent" not in states(name)]
    return (native or able or reading)[0]
