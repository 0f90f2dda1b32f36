"""Plan each recipe from the model's sizes, the target's figures and earlier measurements.

Only a config is opened and nothing heavy is imported, so the largest models take a second. Mixtures of experts, blocks
with a state, and models of a family that no table knows take the seconds in which transformers builds their class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from quantkit import content, machine
from quantkit.bundle import Bundle
from quantkit.bundle.manifest import MANIFEST, Manifest
from quantkit.errors import InputError
from quantkit.exporters import LayerSpec, load_exporter
from quantkit.model.device import CPU
from quantkit.model.sizes.architecture import Architecture
from quantkit.model.sizes.storage import Storage
from quantkit.model.source.adapter import planned
from quantkit.model.source.alias import ALIASES
from quantkit.model.structure import built
from quantkit.pipeline import labels
from quantkit.pipeline.estimate import unopened
from quantkit.pipeline.request import runs_here, this_machine
from quantkit.planning import efficiency
from quantkit.planning.assigned import LEFT_OUT, SYMMETRIC, Assigned, assign_sizes
from quantkit.planning.batching import Server
from quantkit.planning.compiling import Compiling
from quantkit.planning.cost import Bill, Prices, RequestTime, bill
from quantkit.planning.efficiency import Sample
from quantkit.planning.forecast import Served, TimedStep
from quantkit.planning.held import HeldFigure, held
from quantkit.planning.load import Load, simulate, visit
from quantkit.planning.memory import BLOCK, Footprint, cache_of, kv_blocks, storage, taken_by
from quantkit.planning.outlook import (
    Outlook,
    PlannedBatch,
    PlannedCell,
    PlannedMemory,
    PlannedRecipe,
    Recommendation,
    Workload,
)
from quantkit.planning.ranking import rank
from quantkit.planning.roofline import FLOATS, WIDTH, ModelStep, compute_type, products
from quantkit.planning.support import ask, caveats, demand_kind, fitted, shipped, stored_formats
from quantkit.planning.traffic import OUTPUT, PROMPT, traffic
from quantkit.recipe import Recipe
from quantkit.report.bundle import usage
from quantkit.target import ComputeType, Stored, Target

# decisions that change what is stored, in a way that nobody may expect
_REMARKED = ("kept", "padded", "group-shrunk")
# tokens of a text that an encoder is given, where nobody says
_TEXT = 128
# sequences that one server runs at once, at most: vLLM's own defaults (0.32, engine/arg_utils.py), on a CPU the second
_SEQUENCES, _CPU_SEQUENCES = 256, 128
# they run an encoder and a decoder; a model that takes images too
_TWO_STACKS, _SEEING = ("onnxruntime", "torch"), ("torch", "vllm")


@dataclass(frozen=True)
class PlanQuestion:
    """Question to `plan`.

    Attributes:
        model: shipped name, folder, `config.json` or bundle.
        recipes: names, paths, or formats that stand for a recipe; none takes the usual ones.
        target: name or path; None takes this machine's processor.
        runtime: runtime to plan for; None takes, for each recipe, the target's first that computes its format natively.
        batches: numbers of concurrent sequences; none takes the target's, and judges the first.
        prompt: tokens of a prompt; None takes 1,024, or half of the model's context.
        output: tokens of an answer; None takes 256, or an eighth of the context.
        mix: prompts and outputs of several lengths with their shares, instead: `2000x300:0.7,8000x500:0.3`.
        variation: spread of the lengths, as a share of their mean.
        context: tokens to make room for; None takes the longest request.
        rate: requests a second to simulate.
        devices: number of devices that share the model; None takes the fewest that hold it.
        prices: file of prices; None takes the shipped one.
        measured: files or bundles to learn efficiencies from, besides the known ones.
        changes: `PATH=YAML` changes to every recipe.
        device: device of the compile, as in `compile --device`.
        adapters: adapters to merge first, as of `compile --adapter`; only their configs are read.
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
    adapters: Sequence[str] = ()


def plan(question: PlanQuestion, samples: Sequence[Sample] | None = None) -> Outlook:
    """Answer a question to `plan`.

    Args:
        samples: of efficiencies, instead of those that are known and those that the question names.

    Raises InputError: what is not what it has to be: model, target, sizes. A recipe that cannot be planned is a
    candidate with its problem, unless all stumble over the same; one that nobody knows is an error.
    """
    architecture, merged = planned(built.read(question.model), question.adapters)
    target = _aimed(question.target)
    target = _able(target.served_by(question.runtime, machine.cores() if runs_here(target) else None), architecture)
    workload = _workload(question, architecture, target)
    samples = [*efficiency.measured(question.measured), *_known()] if samples is None else samples
    prices = Prices.load(question.prices)
    if question.runtime is not None:
        target.check([], question.runtime)  # a slip of the pen is none of the recipes' problem
    kind = architecture.kind
    asked = list(dict.fromkeys(question.recipes)) or ["float", *labels.usual(kind, target)]
    candidates, build = [], cache(partial(built.skeleton, question.model))
    for label in asked:
        try:
            recipe = labels.recipe_of(label, kind, target, question.changes, allow_code=question.allow_code)
            demand_kind(recipe, target, (kind,), label)
            judged = question.runtime is None and recipe.passes
            recipe = ask(recipe, target).recipe if judged else fitted(recipe, target)[0]
            recipe, taken = _as_compiled(recipe, architecture, build)
            runtime = labels.runtime_of(recipe, kind, target, question.runtime)
            planning = _Planning(label, recipe, runtime, question, architecture, target, workload, prices, taken)
            candidates.append(planning.candidate(samples))
        except InputError as problem:
            candidates.append(PlannedRecipe(label, label, problem=problem))
    problems = [candidate.problem for candidate in candidates if candidate.problem is not None]
    if slip := next((problem for problem in problems if problem.code.startswith("unknown-")), None):
        raise slip  # a name that nothing has is no candidate
    if len(problems) == len(candidates) and (len(candidates) == 1 or len({problem.code for problem in problems}) == 1):
        raise problems[0]  # all stumble over one thing
    notes = [*merged, *(f"assumed: {text}" for text in (*architecture.assumed, *workload.assumed))]
    notes += _of_images(architecture, target)
    if unmeasured := target.unmeasured():
        missing = f"{target.name} has no figure for {', '.join(unmeasured)}"
        notes.append(f"{missing}: on that machine, quantkit doctor --write --target {target.name} measures them")
    nothing = Recommendation(None, ())
    named = "" if isinstance(question.target, Target) else str(question.target or "")
    against = list(_held(question, architecture, target, samples))
    outlook = Outlook(
        architecture, target, workload, candidates, nothing, notes, question.model, named, against, question.adapters
    )
    return rank(outlook)[0]


def _held(
    question: PlanQuestion, architecture: Architecture, target: Target, samples: Sequence[Sample]
) -> Iterator[HeldFigure]:
    """Plan the measured load of a bundle on this machine, and compare."""
    place = Path(question.model).expanduser()
    if question.runtime is None or not (content.is_path(question.model) and (place / MANIFEST).is_file()):
        return
    bundle, here = Bundle.load(place), machine.device()["id"]
    rows = [row for row in bundle.measurements if row["name"].startswith("load.")]
    rows = [row for row in rows if row["runtime"] == question.runtime and (row["device"] or {}).get("id") == here]
    if not rows or not runs_here(target):
        return
    shape, prices = rows[0]["shape"], Prices.load(question.prices)
    # a side is visited twice
    counts = {row["settings"]["rate"]: row["n"] // 2 for row in rows if row["name"] == "load.requests"}
    space = next((row["settings"]["cache_gib"] for row in rows if row["settings"].get("cache_gib")), 0)
    size = next((row["settings"]["block_size"] for row in rows if "block_size" in row["settings"]), BLOCK)
    for recipe, original in ((_of_bundle(bundle, target), False), (shipped("float"), True)):
        asked = replace(question, rate=None, mix=None, variation=0.0, context=None, batches=(1,), **shape)
        workload = _workload(asked, architecture, target)
        planning = _Planning(recipe.name, recipe, question.runtime, asked, architecture, target, workload, prices)
        planned = planning.candidate(samples)
        if (served := planned.served) is None or planned.memory is None:
            continue
        server, _ = planning.server(served, planned.memory)
        visits = {rate: visit(server, workload.traffic, rate, count) for rate, count in counts.items() if server}
        blocks = kv_blocks(served.architecture, served.cache, space * 2**30, workload.context, size) if space else None
        yield from held(recipe.name, rows, visits, blocks, original=original)


def _known() -> list[Sample]:
    return [*efficiency.own(), *efficiency.shipped()]


def _of_bundle(bundle: Bundle, target: Target) -> Recipe:
    """Return the recipe of a bundle with the exports that the target reads."""
    return fitted(Recipe.from_dict(bundle.manifest.recipe, name=bundle.manifest.recipe["name"]), target)[0]


def _aimed(target: str | Path | Target | None) -> Target:
    return target if isinstance(target, Target) else Target.load(this_machine() if target is None else target)


def _able(target: Target, architecture: Architecture) -> Target:
    """Return a target with only the runtimes of a model with two stacks, or of one that takes images too.

    Raises InputError `target-cannot-run`.
    """
    if not architecture.has_encoder and not architecture.sees:
        return target
    two = ("an encoder and a decoder", _TWO_STACKS)
    value, runtimes = two if architecture.has_encoder else ("a model that takes images", _SEEING)
    able = [name for name in target.runtimes if name in runtimes]
    if not able:
        rule = f"only {' and '.join(runtimes)} run such a model"
        raise InputError("target-cannot-run", target.name, value, rule, "take a target with one of these runtimes")
    return target.model_copy(update={"runtimes": able})


def _as_compiled(recipe: Recipe, architecture: Architecture, build: Callable[..., Any]) -> tuple[Recipe, list[str]]:
    """Return the recipe as a compile settles it for a mixture of experts, or for blocks with a state, with notes.

    Raises InputError, as it.
    """
    decodes, attentions = architecture.kind == "decoder", [layer.attention for layer in architecture.layers]
    special = any(matrix.count > 1 for matrix in architecture.inside())
    special |= decodes and any(attention is None or attention.kind == "linear" for attention in attentions)
    if not (special and recipe.passes and find_spec("transformers")):
        return recipe, []
    from quantkit.pipeline.blocks.prepared import foreseen

    recipe, taken = foreseen(recipe, architecture, build)
    words = {LEFT_OUT: "leaves {} out", SYMMETRIC: "sets {} to true"}
    return recipe, [f"compile {words[step.code].format(step.where)}: {step.reason}" for step in taken]


def _of_images(architecture: Architecture, target: Target) -> list[str]:
    """Return notes on the cost of images."""
    if not architecture.sees:
        return []
    notes, floats = ["the seconds of the tower of images are not counted"], FLOATS[target.baseline]
    if (tokens := architecture.image_tokens) is not None:
        cache = cache_of(None, floats)
        attentions = (layer.attention for layer in architecture.layers if layer.attention is not None)
        size = f"{tokens * sum(map(cache.bytes, attentions)) / 1e6:.3g} MB of the KV cache in {floats}"
        notes.insert(0, f"an image's {tokens:,} tokens take {size}; count them in --prompt")
    return notes


def planned_steps(bundle: Bundle, target: Target, steps: Sequence[ModelStep]) -> tuple[list[TimedStep | None], str]:
    """Return a bundle's planned steps on one device of a target, and the runtime they are for.

    Raises InputError: a target that cannot run it.
    """
    question = PlanQuestion(str(bundle.path.resolve()), target=target, batches=(1,), devices=1)
    architecture = built.read(question.model)
    target = _able(target, architecture)
    recipe = _of_bundle(bundle, target)
    runtime = labels.runtime_of(recipe, architecture.kind, target, None)
    workload = _workload(question, architecture, target)
    about = (recipe.name, recipe, runtime, question, architecture, target, workload, Prices.load(None))
    served = _Planning(*about).candidate(_known()).served
    return [None if served is None else served.timed(step) for step in steps], runtime


def demand_ranked(model: str) -> None:
    """Refuse a bundle or a network without sizes. Raises InputError: `model-kind` of a network, `already-quantized`."""
    alias, place = ALIASES.get(model), Path(model).expanduser()
    if alias is not None and alias.kind == "network":
        rule = "it has no config.json to read sizes from; for such a network there is the recipe int8-network"
        raise InputError("model-kind", model, "a network", rule, f"quantkit compile {model} --recipe int8-network")
    if content.is_path(model) and (place / MANIFEST).is_file():
        manifest = Manifest.read(place / MANIFEST)
        remedy = usage.recommend(manifest, usage.here(manifest)) or "give the model that it was made from"
        rule = "recommend ranks recipes for a model that is to be compiled"
        raise InputError("already-quantized", model, "a bundle", rule, remedy)


def every(question: PlanQuestion) -> PlanQuestion:
    """Make the question about the float model and all shipped recipes that the target runs for this kind of model."""
    architecture = built.read(question.model)
    kind, target = architecture.kind, _able(_aimed(question.target), architecture)
    quantizing = (
        recipe for recipe in map(shipped, content.names("recipes")) if kind in recipe.models and recipe.passes
    )
    runs = [recipe.name for recipe in quantizing if labels.runs(recipe.name, kind, target)]
    return replace(question, recipes=("float", *runs), batches=question.batches or target.batches[:1])


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
        if prompt is None and architecture.source_positions is not None:
            prompt, most = architecture.source_positions, most - architecture.source_positions
        if prompt is None:
            prompt = max(min(usual[0], most // 2 if decodes else most), 1)
            assumed.append(f"{'prompts' if decodes else 'texts'} of {prompt:,} tokens (--prompt)")
        if output is None:
            output = max(min(usual[1], most // 8), 1)
            assumed += [f"outputs of {output:,} tokens (--output)"] if decodes else []
    load = traffic(prompt=prompt, output=output, mix=question.mix, variation=question.variation, rate=question.rate)
    mean = (round(load.prompt), round(load.output) if decodes else 0)
    longest = min(load.longest, limit) if limit is not None and question.variation else load.longest
    longest = longest if decodes else mean[0]
    context = question.context if question.context is not None else longest
    for name, value in (("--context", context), ("--prompt and --output", longest)):
        if limit is not None and value > limit:
            rule, remedy = f"{architecture.name} was made for {limit:,}", f"--context {limit}, with both within it"
            raise InputError("context-too-long", where=name, value=f"{value:,} tokens", rule=rule, remedy=remedy)
    if longest > context:
        rule = f"it holds prompt and output, {longest:,} tokens"
        raise InputError("usage", where="--context", value=context, rule=rule)
    batches = question.batches or target.batches
    # a server at a rate runs the batch that costs least; alone, somebody waits for one request
    judged = () if question.rate is not None or len(question.batches) > 1 else batches[:1]
    return Workload(batches, *mean, context, load, [*load.assumed, *assumed], judged)


def _refuse_unused(question: PlanQuestion, architecture: Architecture) -> None:
    """Refuse lengths without meaning for a model, instead of ignoring them."""
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


@dataclass(frozen=True)
class _Planning:
    """One recipe, with the exports that the target reads, in its runtime."""

    label: str
    recipe: Recipe
    runtime: str
    question: PlanQuestion
    architecture: Architecture
    target: Target
    workload: Workload
    prices: Prices
    taken: Sequence[str] = ()

    def candidate(self, samples: Sequence[Sample]) -> PlannedRecipe:
        """Plan the recipe. Raises InputError: `devices-uneven`, and refusals of the compile by sizes."""
        recipe, target, workload = self.recipe, self.target, self.workload
        assigned = assign_sizes(recipe, self.architecture)
        self._demand_experts(assigned)
        served = self._served(assigned, samples)
        kept = storage(self.architecture, recipe, self._export())
        footprint = self._footprint(served, assigned, kept)
        needed, asked = footprint.needed(1, workload.context, prompt=workload.prompt), self.question.devices
        if asked is not None and (why := footprint.why_not(asked)):
            value, remedy = f"--devices {asked}", "a power of two up to the number of heads"
            raise InputError("devices-uneven", where=self.label, value=value, rule=why, remedy=remedy)
        served = replace(served, devices=asked or needed or 1)
        memory = self._memory(footprint, served.devices, needed)
        # the largest that fits, too, where some do not: it is what one would run
        most = memory.largest_batch
        batches = {*workload.batches, *([most] if most and most < max(workload.batches) else [])}
        rows = [self._row(served, batch, footprint) for batch in sorted(batches)]
        expected, unknown = self._compiling()
        load, refused = self._load(served, memory)
        # a float may be asked for that the target does not compute in
        floats, other = FLOATS[target.baseline], labels.FLOATS.get(self.label, self.label)
        reckoned = f"reckoned in {floats}, in which {target.name} computes"
        stored = stored_formats(recipe) or [Stored(floats, True)]
        uses = [(form, target.use(form, self.runtime)) for form in stored]
        return PlannedRecipe(
            self.label,
            recipe.name,
            self.runtime,
            [PlannedCell(form.format, form.words, use.state, use.source) for form, use in uses],
            kept.bits,
            kept.total,
            memory,
            rows,
            served,
            load,
            self._cost(rows, served, load),
            expected,
            notes=[
                *refused,
                *unknown,
                *self.taken,
                *([reckoned] if other in labels.UNQUANTIZED and other != floats else []),
                *caveats(recipe, target, [self.runtime]),
                *(taken.reason for taken in assigned.decisions if taken.code in _REMARKED),
            ],
            code=bool(recipe.code),
            changed=bool(self.question.changes) or content.is_path(self.label),
        )

    def _demand_experts(self, assigned: Assigned) -> None:
        """Refuse packed experts if its runtime has no kernel for them. Raises InputError `target-cannot-run`."""
        several = [matrix.name for matrix in self.architecture.inside() if matrix.count > 1]
        schemes = {name: scheme for name, scheme in assigned.schemes.items() if name in several}
        alone, asked = self.target.model_copy(update={"runtimes": [self.runtime]}), LayerSpec(schemes, merged=several)
        for step in self.recipe.export if schemes else ():
            if step.name == self._export():
                load_exporter(step.name).for_target(step.settings, alone, asked)

    def _export(self) -> str | None:
        """Return the export for its runtime."""
        names = [step.name for step in self.recipe.export]
        return next((name for name in names if self.runtime in load_exporter(name).runtimes), None)

    def _native(self, stored: Stored) -> bool:
        return self.target.use(stored, self.runtime).state == "native"

    def _served(self, assigned: Assigned, samples: Sequence[Sample]) -> Served:
        read, target, scheme = self._export(), self.target, self.recipe.scheme
        level = next((step.options.get("accuracy_level") for step in self.recipe.export if step.name == read), None)
        weights, cache = scheme.weights, scheme.kv_cache
        native = weights is not None and self._native(Stored(weights.format, weights.symmetric))
        kept = cache is not None and self._native(Stored(cache.format, cache.symmetric, "kv_cache"))
        return Served(
            self.architecture,
            products(
                self.architecture, assigned.schemes, assigned.activations, target, self.runtime, accuracy_level=level
            ),
            cache_of(cache if kept else None, FLOATS[target.baseline]),
            target,
            self.runtime,
            weights.format if weights is not None and native else FLOATS[target.baseline],
            compute_type(weights, scheme.activations, target, self.runtime, level),
            cast(ComputeType, target.baseline),
            samples=samples,
            device=machine.device()["id"] if runs_here(target) else None,
        )

    def _footprint(self, served: Served, assigned: Assigned, kept: Storage) -> Footprint:
        target, head, read = self.target, self.architecture.head, self._export()
        # a graph is run as it is stored; of a checkpoint a runtime holds floats in the dtype that it computes in
        graph = read is not None and load_exporter(read).stores == "graph"
        return Footprint(
            self.architecture,
            served.products,
            served.cache,
            WIDTH[target.baseline],
            # a head that is quantized is no longer the table of tokens
            self.architecture.tied and (head is None or head.name not in assigned.schemes),
            taken_by(self.runtime, target.kind),
            target.memory.capacity.number,
            groups={name: scheme.group for name, scheme in assigned.schemes.items() if scheme.group is not None},
            tables=kept.embeddings if graph else None,
            others=kept.others if graph else None,
        )

    def _memory(self, footprint: Footprint, devices: int, needed: int | None) -> PlannedMemory:
        batches, context, prompt = self.workload.batches, self.workload.context, self.workload.prompt
        fits = [batch for batch in batches if footprint.fits(batch, context, prompt=prompt, devices=devices)]
        batch, runtime = max(fits, default=min(batches)), footprint.runtime
        return PlannedMemory(
            footprint.parts(batch, context, prompt=prompt, devices=devices),
            batch,
            None if footprint.capacity is None else footprint.capacity * runtime.share,
            footprint.cache_per_token,
            footprint.largest_batch(context, prompt=prompt, devices=devices),
            footprint.largest_context(batch, devices=devices),
            devices,
            needed,
            [f"counted for the runtime: {runtime.source}"],
        )

    def _compiling(self) -> tuple[Compiling | None, list[str]]:
        """Predict the compile on this machine, which need not be the target. Raises InputError, of the device."""
        target, device = self.target, self.question.device
        try:
            speed = runs_here(target)
            return unopened(self.architecture, self.recipe, speed=speed, device=device, target=target), []
        except InputError as problem:
            if problem.code in ("device-absent", "device-memory"):
                raise
            return None, [f"what the compile takes is not known: {problem.remedy or problem.value}"]

    def _row(self, served: Served, batch: int, footprint: Footprint) -> PlannedBatch:
        workload, decodes = self.workload, self.architecture.kind == "decoder"
        first = served.timed(ModelStep(batch, workload.prompt))
        step = served.timed(ModelStep(batch, 1, workload.prompt + workload.output // 2)) if decodes else first
        how = {"prompt": workload.prompt, "devices": served.devices}
        fits = None if footprint.capacity is None else footprint.fits(batch, workload.context, **how)
        parts, cost = (
            footprint.parts(batch, workload.context, **how),
            self._bill(self._work(first, step, batch, served)),
        )
        return PlannedBatch(batch, first if decodes else None, step, parts, fits, cost)

    def _load(self, served: Served, memory: PlannedMemory) -> tuple[Load | None, list[str]]:
        """Simulate the load, or give the reason why not."""
        if self.workload.rate is None:
            return None, []
        server, why = self.server(served, memory)
        if server is None:
            return None, [f"no load is simulated: {why}"]
        return simulate(server, self.workload.traffic, limit=self.architecture.max_context), []

    def server(self, served: Served, memory: PlannedMemory) -> tuple[Server | None, str]:
        """Return the server to simulate, or None with the reason."""
        workload, most = self.workload, memory.largest_batch
        limit = _CPU_SEQUENCES if (self.runtime, self.target.kind) == ("vllm", "cpu") else _SEQUENCES
        sequences = limit if most is None else min(most, limit)
        if self.architecture.kind != "decoder" or served.missing or not sequences:
            why = "no time is known" if served.missing else "it does not fit"
            return None, why if self.architecture.kind == "decoder" else "it does not decode"
        server = Server.of(
            lambda batch, new, past: served.timed(ModelStep(batch, new, past)).seconds or 0.0,
            longest=workload.context,
            cache_tokens=workload.context * (sequences if most is None else most),
            max_batch=sequences,
        )
        return server, ""

    def _cost(self, rows: Sequence[PlannedBatch], served: Served, load: Load | None) -> Bill | None:
        """Bill the batch with the cheapest requests; under a load, include the idle hours."""
        fitting = [row for row in rows if row.fits is not False]
        works = [self._work(row.prefill or row.step, row.step, row.batch, served) for row in fitting]
        best = min((work for work in works if work is not None), key=lambda work: work.request, default=None)
        rate = self.workload.rate if load is not None and load.stable else None
        return self._bill(best, 1.0 if best is None or rate is None else min(rate * best.request, 1.0))

    def _work(self, first: TimedStep, step: TimedStep, batch: int, served: Served) -> RequestTime | None:
        if first.seconds is None or step.seconds is None:
            return None
        decoding = step.seconds if self.architecture.kind == "decoder" else 0.0
        sizes = {"prompt": self.workload.prompt, "output": self.workload.output, "devices": served.devices}
        return RequestTime.of(prefill=first.seconds, step=decoding, batch=batch, **sizes)

    def _bill(self, work: RequestTime | None, utilisation: float = 1.0) -> Bill | None:
        if work is None:
            return None
        power = self.target.power
        watts, model = power.number if power is not None else None, self.architecture.name
        return bill(work, self.prices, self.target.name, watts=watts, model=model, utilisation=utilisation)
