"""Quantize and compile a model, and prove on the target whether it was worth it.

    import quantkit
    bundle = quantkit.compile("smollm2-135m", recipe="awq-int4")
    bundle.measurements

Importing this package is cheap: torch and the rest are imported by what needs them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit._version import __version__ as __version__

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from transformers import PreTrainedTokenizerBase

    from quantkit.bundle import Bundle
    from quantkit.errors import QuantkitError
    from quantkit.measurement.accuracy.drafts import Drafted
    from quantkit.measurement.compared import Compared
    from quantkit.pipeline import Pipeline
    from quantkit.planning.outlook import Outlook
    from quantkit.recipe import Recipe
    from quantkit.target import Target
    from quantkit.tuning.search import Tuned

__all__ = [
    "Bundle",
    "Pipeline",
    "QuantkitError",
    "Recipe",
    "Target",
    "compare",
    "compile",
    "export",
    "judge_draft",
    "load",
    "measure",
    "plan",
    "plan_model",
    "tune",
]

_HOMES = {
    "Bundle": "quantkit.bundle",
    "Pipeline": "quantkit.pipeline",
    "QuantkitError": "quantkit.errors",
    "Recipe": "quantkit.recipe",
    "Target": "quantkit.target",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'quantkit' has no attribute {name!r}")


def compile(  # noqa: A001 (the word of the command line)
    model: str | Path | Module = "smollm2-135m",
    recipe: str | Path | Recipe | Mapping[str, Any] = "awq-int4",
    target: str | Path | Target | None = None,
    *,
    example_inputs: Tensor | Sequence[Tensor] | Mapping[str, Tensor] | None = None,
    tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
    calibration: str | Path | None = None,
    out: str | Path | None = None,
    changes: Sequence[str] = (),
    adapters: str | Path | Sequence[str | Path] = (),
    resume: bool = False,
    strict: bool = False,
    trust_remote_code: bool = False,
    allow_code: bool = False,
    speed: bool = True,
    vllm: bool = True,
    device: str = "cpu",
    tf32: bool = False,
    progress: bool = False,
) -> Bundle:
    """Compile a model into a bundle on disk.

    Args:
        model: an alias, a Hugging Face folder (`./folder`), `hf:org/name`, a float .onnx file, a model of transformers
            in memory, which is saved into the cache in its own dtype, or another torch module, which is exported to
            ONNX. A `Path` is a path, however it is spelt.
        recipe: a shipped name, a path, a `Recipe`, or a mapping as in a recipe's YAML.
        target: a shipped name, a path, or a `Target`; None is this machine's processor.
        example_inputs: what a module is called with: a tensor, several, or by name; [n, ...] each.
        tokenizer: of a model in memory: a tokenizer, or a folder with one; None takes the one where the model was
            loaded from (`model.name_or_path`).
        calibration: a shipped set or a path, instead of the recipe's.
        out: the bundle's folder; None chooses `./<model>--<recipe>`, then `-2`, ...
        changes: `PATH=YAML` changes to the recipe, e.g. `["scheme.weights.group=32"]`.
        adapters: folders of LoRA or DoRA adapters of PEFT, or `hf:org/name`, merged in their order before the passes.
        resume: go on with an unfinished build.
        strict: a decision that the recipe did not ask for is an error.
        trust_remote_code: allow a model's own code to run.
        allow_code: run the files that the recipe's passes name (`./my_pass.py`).
        speed: time the result against the float model, where it has an ONNX graph and the target is this machine.
        vllm: run a decoder's checkpoint in vLLM too, if the target has cells of vLLM and it was added.
        device: where it computes: `cpu`, `cuda`, `cuda:N`, or `auto`, the GPU if a block with its activations fits.
        tf32: let a GPU round the inputs of float32 products to 10 bits of mantissa; the manifest names it.
        progress: show how far it is: a bar on a terminal or in a notebook, else lines on stderr.

    Raises:
        QuantkitError: with code, where, value, rule and remedy.
    """
    from quantkit import given
    from quantkit.pipeline import Request, compile_model
    from quantkit.pipeline.progress import showing
    from quantkit.pipeline.request import demand_model

    module = None if isinstance(model, str | Path) else model
    if module is None and tokenizer is not None:
        raise given.wrong("tokenizer", tokenizer, f"left out: the tokenizer of {model} lies beside it")
    request = Request.of(
        given.model(model) if module is None else type(module).__name__,
        recipe=recipe,
        target=target,
        calibration=calibration,
        out=out,
        changes=changes,
        resume=resume,
        strict=strict,
        trust_remote_code=trust_remote_code,
        allow_code=allow_code,
        speed=speed,
        vllm=vllm,
        device=device,
        tf32=tf32,
        adapters=adapters,
    )
    if module is not None:
        from quantkit.pipeline.request import with_module

        request = with_module(request, module, example_inputs, tokenizer)
    with showing(progress) as shown:
        shown.begin(f"opening {request.module or request.model}")
        demand_model(request.model, request.adapters)
        return compile_model(request, shown).bundle


def plan(
    model: str | Path = "smollm2-135m",
    recipes: str | Path | Sequence[str | Path] = (),
    target: str | Path | Target | None = None,
    *,
    runtime: str | None = None,
    batches: Sequence[int] = (),
    prompt: int | None = None,
    output: int | None = None,
    context: int | None = None,
    rate: float | None = None,
    devices: int | None = None,
    prices: str | Path | None = None,
    changes: Sequence[str] = (),
    allow_code: bool = False,
    device: str = "cpu",
    adapters: str | Path | Sequence[str | Path] = (),
) -> Outlook:
    """Predict memory, speed and cost before any work, as `quantkit plan` does. No torch.

    Args:
        model: a shipped name (`llama-3-8b`), a folder, its `config.json`, or a bundle.
        recipes: names, paths, or formats that stand for one (`int4`); none: the usual ones.
        target: a shipped name, a path, or a `Target`; None is this machine's processor.
        runtime: that would run them; None is the target's first that computes natively in each.
        batches: sequences at once; none: the target's.
        prompt: tokens that come in with a request; None is 1,024, or half of what the model takes.
        output: tokens that go out; None is 256, or an eighth.
        context: tokens to make room for; None is the longest request.
        rate: requests a second to simulate.
        devices: that share the model; None is as few as hold it.
        prices: a file; None is the one that ships.
        changes: `PATH=YAML` changes to every recipe.
        allow_code: run the files that the recipes' passes name.
        device: where the compile is to compute, as of `compile`: whether it fits there.
        adapters: as of `compile`; only their configs are read.

    Returns:
        `candidates` with memory, times by batch and cost of each recipe, and a `recommendation`.

    Raises:
        QuantkitError: with code, where, value, rule and remedy.
    """
    from quantkit import given
    from quantkit.model.device import demand_name
    from quantkit.pipeline.plan import PlanQuestion
    from quantkit.pipeline.plan import plan as answer

    given.flags(allow_code=allow_code)
    given.numbers(prompt=prompt, output=output, context=context, rate=rate, devices=devices)
    return answer(
        PlanQuestion(
            given.model(model),
            recipes=given.texts(recipes, "recipes"),
            target=target,
            runtime=given.word(runtime, "runtime", "a runtime's name"),
            batches=given.batches(batches),
            prompt=prompt,
            output=output,
            context=context,
            rate=rate,
            devices=devices,
            prices=given.path(prices, "prices"),
            changes=changes,
            allow_code=allow_code,
            device=demand_name(device),
            adapters=given.texts(adapters, "adapters"),
        )
    )


# as it was called while `quantkit.plan` was a package
plan_model = plan


def load(path: str | Path) -> Bundle:
    """Open a bundle. Raises InputError if it is none."""
    from quantkit.bundle import Bundle

    return Bundle.load(path)


def _opened(bundle: Bundle | str | Path) -> Bundle:
    """Open a bundle as it is on disk now."""
    from quantkit.bundle import Bundle

    return load(bundle.path if isinstance(bundle, Bundle) else bundle)


def measure(
    bundle: Bundle | str | Path,
    baseline: str | Path | None = None,
    runtime: str | None = None,
    *,
    calibration: str | Path | None = None,
    speed: bool = True,
    quick: bool = False,
    seconds: float | None = None,
    batches: Sequence[int] = (),
    tasks: str | Path | Sequence[str | Path] = (),
    task_data: str | Path | None = None,
    limit: int | None = None,
    chat: bool = False,
    floor: bool = False,
    progress: bool = False,
) -> list[dict[str, Any]]:
    """Measure a bundle's accuracy, size and speed again, or its tasks; the rows also go into its `measurements.jsonl`.

    The timing alone takes about five minutes: `quick=True` or `seconds=60` shortens it, `speed=False` leaves it out.

    Args:
        bundle: or its path.
        baseline: the model to compare with; None is the one it was made from.
        runtime: `torch` or `onnxruntime` (speed too); None is onnxruntime where the bundle has a graph.
        calibration: the set to score on, its `eval` split; None is the bundle's own.
        speed: time it too, where the runtime is onnxruntime.
        quick: time only the few shapes that a compile times.
        seconds: time for all shapes, 1 or more; None is 300, or what `quick` takes.
        batches: sizes to time; none: the target's, up to 32.
        tasks: tasks of lm-eval, files of one's own (`Path("mine.jsonl")`), of a graph functions (`module:function`):
            measure by these alone.
        task_data, limit, chat, floor: as of `pipeline.tasks.TaskQuestion`; with `tasks`.
        progress: show how far it is, as `compile` does.
    """
    from quantkit import given
    from quantkit.pipeline import measure_bundle
    from quantkit.pipeline.measure import timing_plan
    from quantkit.pipeline.progress import showing

    against = None if baseline is None else given.model(baseline, "baseline")
    text = None if calibration is None else given.model(calibration, "calibration")
    runs = given.word(runtime, "runtime", "a runtime's name")
    given.flags(speed=speed, quick=quick, chat=chat, floor=floor)
    given.numbers(seconds=seconds, limit=limit)
    if names := given.texts(tasks, "tasks"):
        from quantkit.pipeline.tasks import TaskQuestion, measure_tasks

        if text is not None or quick or seconds is not None or batches:
            raise given.wrong("tasks", names, "alone: without calibration, quick, seconds and batches")
        question = TaskQuestion(names, given.path(task_data, "task_data"), limit, chat, floor)
        with showing(progress) as shown:
            return [row.as_dict() for row in measure_tasks(_opened(bundle), question, against, shown, runtime=runs)]
    if task_data is not None or limit is not None or chat or floor:
        raise given.wrong("tasks", tasks, "the tasks that task_data, limit, chat and floor are about")
    if seconds is not None and seconds < 1:
        raise given.wrong("seconds", seconds, "a number from 1 up")
    sizes, opened = given.batches(batches), _opened(bundle)
    asked = quick or seconds is not None or sizes
    plan = timing_plan(opened, few=quick, batches=sizes, seconds=seconds) if asked else None
    with showing(progress) as shown:
        shown.begin(f"opening {opened.path.name}")
        rows = measure_bundle(opened, against, shown, runtime=runs, calibration=text, plan=plan, speed=speed)
    return [row.as_dict() for row in rows]


def compare(
    a: Bundle | str | Path,
    b: Bundle | str | Path,
    *,
    measure: bool = False,
    speed: bool = True,
    runtime: str | None = None,
    calibration: str | Path | None = None,
    progress: bool = False,
    accuracy_margin: float | None = None,
    latency_margin: float | None = None,
    size_margin: float = 0.01,
) -> Compared:
    """Set bundle `b` against `a`: by token, by batch, by size, by layer; `verdict` and `exit` of the result say which.

    Args:
        a: a bundle or its path, or the model that `b` was made from.
        b: the same: what is judged.
        measure: time both in one run, in ONNX Runtime; else by what each recorded against one baseline.
        speed: compare times at all.
        runtime: whose scores are compared; None is one that both were scored in.
        calibration: where the scored text is, if it was a file: flipped words are shown in it.
        progress: show how far it is, as `compile` does.
        accuracy_margin: 0.01 is one item in a hundred, 0.01 nats, a perplexity 1 % higher; None is what the gates of
            the recipe of `b` allow.
        latency_margin: 0.05 is 5 % slower; None is that, or what the verdict of `b` ships.
        size_margin: 0.01 is 1 % larger.

    Raises:
        QuantkitError: `models-differ`, `items-differ`, `items-missing`, `hash-mismatch`, ...
    """
    from quantkit import given
    from quantkit.bundle import Bundle
    from quantkit.pipeline.compare import Margins, compare_bundles
    from quantkit.pipeline.progress import showing

    for where, side in (("a", a), ("b", b)):
        given.demand(where, side, (Bundle, str, Path), "a bundle, a path or a name")
    given.flags(measure=measure, speed=speed)
    given.numbers(accuracy_margin=accuracy_margin, latency_margin=latency_margin, size_margin=size_margin)
    text = None if calibration is None else given.model(calibration, "calibration")
    with showing(progress) as shown:
        return compare_bundles(
            a,
            b,
            shown,
            margins=Margins(accuracy_margin, latency_margin, size_margin),
            runtime=given.word(runtime, "runtime", "a runtime's name"),
            calibration=text,
            measure=measure,
            speed=speed,
        )


def judge_draft(
    draft: Bundle | str | Path,
    of: Bundle | str | Path,
    *,
    calibration: str | Path | None = None,
    progress: bool = False,
) -> Drafted:
    """Judge bundle `draft` as the draft of bundle `of` in speculative decoding: `seen` is the acceptance, `gains` the
    expected gain.

    Args:
        draft: the bundle that proposes tokens, or its path.
        of: the bundle that accepts them.
        calibration: another text than the shipped one, by name or path.
        progress: show how far it is, as `compile` does.

    Raises:
        QuantkitError: `not-a-decoder`, `vocabulary-differs`, ...
    """
    from quantkit import given
    from quantkit.bundle import Bundle
    from quantkit.pipeline import drafts
    from quantkit.pipeline.progress import showing

    for where, side in (("draft", draft), ("of", of)):
        given.demand(where, side, (Bundle, str, Path), "a bundle or a path")
    text = None if calibration is None else given.model(calibration, "calibration")
    with showing(progress) as shown:
        return drafts.judge_draft(draft, of, shown, calibration=text)


def tune(
    model: str | Path,
    budget: str | Sequence[str],
    recipe: str | Path | Recipe | Mapping[str, Any] = "gptq-int4",
    target: str | Path | Target | None = None,
    *,
    formats: Sequence[str] | None = None,
    schemes: Sequence[Mapping[str, Any]] = (),
    timings: str | Path | None = None,
    batches: Sequence[int] = (),
    calibration: str | Path | None = None,
    adapters: str | Path | Sequence[str | Path] = (),
    samples: int = 2,
    out: str | Path | None = None,
    changes: Sequence[str] = (),
    exact: bool = False,
    check: bool = True,
    trust_remote_code: bool = False,
    allow_code: bool = False,
    progress: bool = False,
) -> Tuned:
    """Choose a format for every layer within a budget, and write the choice as a recipe: `out`, `front`, `decisions`.

    Args:
        model: as of `compile`.
        budget: `bits=4.25`, `bytes=100MB`, `kl=0.05` or `latency=12ms`; several may hold.
        recipe: to start from.
        target: as of `compile`.
        formats: to choose from, and `float`; None is int3, int4, int8 and float.
        schemes: candidates more, each as the fields that it changes: `{"format": "int4", "group": 32}`.
        timings: a file of measurements with `latency.op` rows, for a budget of latency.
        batches: of the timings that count; none: all.
        calibration, adapters: as of `compile`.
        samples: sequences of 128 tokens that each harm is measured on.
        out: the folder; None chooses `./<model>--tuned`, then `-2`, ...
        changes: `PATH=YAML` changes to the recipe.
        exact: measure every candidate at the output; else one a layer, and the others by it.
        check: compile and score the choice, and one scheme for all beside it.
        trust_remote_code: allow a model's own code to run.
        allow_code: as of `compile`.
        progress: as of `compile`.

    Raises:
        QuantkitError: `budget-unreachable`, `nothing-to-choose`, `timings-missing`, those of `compile`.
    """
    from quantkit import given
    from quantkit.measurement.rows import read_rows
    from quantkit.pipeline.progress import showing
    from quantkit.tuning import search
    from quantkit.tuning.front import Budget

    given.flags(exact=exact, check=check)
    given.numbers(samples=samples)
    request = search.asked(
        given.model(model),
        recipe=recipe,
        target=target,
        calibration=calibration,
        out=out,
        changes=changes,
        trust_remote_code=trust_remote_code,
        allow_code=allow_code,
        adapters=adapters,
    )
    measured = given.path(timings, "timings")
    question = search.TuneQuestion(
        request,
        Budget.parse(given.texts(budget, "budget")),
        formats=None if formats is None else given.texts(formats, "formats"),
        schemes=given.mappings(schemes, "schemes"),
        samples=samples,
        exact=exact,
        check=check,
        timings=read_rows(measured) if measured is not None else (),
        batches=given.batches(batches),
    )
    with showing(progress) as shown:
        shown.begin(f"opening {request.model}")
        return search.tune(question, shown)


def export(
    bundle: Bundle | str | Path, to: str, changes: Sequence[str] = (), *, calibration: str | Path | None = None
) -> Bundle:
    """Add an export to a finished bundle; the bundle with it.

    Args:
        bundle: with a checkpoint, or its path.
        to: an exporter: `onnx`, `tensorrt`.
        changes: `NAME=YAML` options of the exporter.
        calibration: of a network of one's own, the set that it was calibrated on.

    Raises:
        QuantkitError: `export-exists`, `export-unsupported`, `check-failed` (nothing is added), ...
    """
    from quantkit import given
    from quantkit.pipeline.export import export_bundle
    from quantkit.recipe.changes import demand_changes

    given.demand("to", to, (str,), "an exporter's name")
    where = None if calibration is None else given.model(calibration, "calibration")
    return export_bundle(_opened(bundle), to, demand_changes(changes), calibration=where).bundle
