"""Run a search for a mixed-precision recipe.

    prepare -> candidates -> harm of each unit (cached) -> choose -> compile and score -> refit -> front -> write

The sum of harms only predicts the KL of a choice. So the choice is compiled, loaded again and scored. Harms and this
check both use the `tune` split. The compile also scores the `eval` split; that figure is reported and guides nothing.
"""

from __future__ import annotations

import datetime
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit import machine
from quantkit._version import __version__
from quantkit.bundle import Decision
from quantkit.errors import InputError
from quantkit.exporters import reader
from quantkit.formats import stored_bits
from quantkit.lazy import torch
from quantkit.measurement.rows import Row
from quantkit.measurement.size import weight_bytes
from quantkit.model.sizes.storage import WIDTHS
from quantkit.model.source.alias import demand_no_graph
from quantkit.passes import decision
from quantkit.pipeline.progress import Overall, Progress
from quantkit.pipeline.request import Request, default_out, demand_model
from quantkit.recipe import Recipe
from quantkit.report.kit import words
from quantkit.runtimes import load_runtime
from quantkit.tuning import answer, front
from quantkit.tuning.answer import RECIPE
from quantkit.tuning.candidates import Choices, choices, name_of
from quantkit.tuning.front import Budget, FrontPoint, Tables

if TYPE_CHECKING:
    from quantkit.bundle import Bundle
    from quantkit.calibrate.tokens.ids import TokenSet
    from quantkit.pipeline import Prepared
    from quantkit.scheme import WeightScheme
    from quantkit.tuning.harm import HarmSubject, UnitHarm


# a harm is measured on SAMPLES sequences of TOKENS tokens; calibration uses the first CALIBRATED sequences of its set
SAMPLES, TOKENS, CALIBRATED = 2, 128, 4
# positions on which a compiled choice is scored
CHECKED = 6000
# the most compiles under a limit on KL, and the share of the limit that may stay unused
_ROUNDS, _UNUSED = 3, 0.1


@dataclass(frozen=True)
class TuneQuestion:
    """The settings of a search.

    Args:
        request: the model, the base recipe and the target; its `out` is the folder of the answer.
        formats: names of candidate formats; None tries the usual ones.
        schemes: further candidates, each as the fields that it changes in the recipe's scheme.
        samples: number of sequences on which a harm is measured.
        exact: True measures every candidate at the model's output; False only the recipe's own scheme (see `harm`).
        check: True compiles and scores the choice, and the best single scheme of equal size for comparison.
        timings: measured `latency.op` rows.
        batches: batches of the timings to use; all if empty.
    """

    request: Request
    budget: Budget
    formats: Sequence[str] | None = None
    schemes: Sequence[Mapping[str, Any]] = ()
    samples: int = SAMPLES
    exact: bool = False
    check: bool = True
    timings: Sequence[Row] = ()
    batches: Sequence[int] = ()


@dataclass(frozen=True)
class Tuned:
    """The result of a search; `front` is the content of `front.json`."""

    out: Path
    front: dict[str, Any]
    decisions: list[Decision]
    warnings: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return the field `result` of the `--json` envelope."""
        return {"out": str(self.out), "recipe": str(self.out / RECIPE), **self.front}


def asked(model: str, **how: Any) -> Request:
    """Make a `Request` for a model that can be tuned. Raises InputError: `model-graph`, those of `Request.of`."""
    demand_no_graph(model, "int8-mixed")
    request = Request.of(model, **how)
    demand_model(model, request.adapters)
    return request


def tune(question: TuneQuestion, progress: Progress | None = None) -> Tuned:
    """Choose a scheme for every unit of a model within a budget, and write it as a recipe.

    Measured harms are cached, so the same command continues an interrupted search.

    Raises InputError: `nothing-to-choose`, `budget-unreachable`, `timings-missing`, `model-kind`, those of a compile;
    Stopped: disk full.
    """
    return _Search(question, progress or Progress()).run()


class _Search:
    """One run of a search: its stages and their common state."""

    def __init__(self, question: TuneQuestion, progress: Progress) -> None:
        from quantkit.pipeline.blocks.prepared import prepare

        self.question, self.progress = question, progress
        self.started = time.perf_counter()
        # `out` is the folder of the answer; the checking compile writes to a folder inside it
        self.request = replace(question.request, out=None, speed=False)
        self.prepared: Prepared = prepare(self.request)
        if self.prepared.source.kind != "decoder":
            value = words.article(self.prepared.source.kind)
            rule, remedy = "harm is the KL divergence of next-token probabilities", "tune a decoder"
            raise InputError("model-kind", where=self.prepared.source.ref, value=value, rule=rule, remedy=remedy)
        if question.check:
            recipe = self.prepared.request.recipe
            scored_in([reader(step.name, step.options) for step in recipe.export], recipe.name)
        self.decisions: list[Decision] = list(self.prepared.decisions)
        self.choices: Choices = choices(self.prepared, question.formats, question.schemes)
        self.decisions += self.choices.decisions
        self.out = question.request.out or default_out(self.prepared.source.name, "tuned", resume=False)
        self.work = self.out.with_name(f"{self.out.name}.partial")
        shutil.rmtree(self.work, ignore_errors=True)  # left by a killed search; its harms are in the cache
        self.measured: list[tuple[FrontPoint, ScoredChoice]] = []
        self.scored: TokenSet | None = None
        self.factor = 1.0
        # linears without a measured harm; they keep the recipe's own scheme
        self.unmeasured: dict[str, WeightScheme] = {}

    def run(self) -> Tuned:
        harms = self._harms()
        self._settle(harms)
        tables = self._tables(harms)
        chosen = front.best(tables, self.question.budget)
        uniform = None
        self.work.mkdir(parents=True)
        try:
            if self.question.check:
                chosen = self._checked(tables, chosen)
                uniform = self._uniform(tables, chosen)
            self.progress.at("front", 0.0)
            points = front.sweep(tables)
            measured = [(point, scored.as_dict()) for point, scored in self.measured]
            data = answer.front_of(self._facts(), tables, chosen, measured, uniform, points)
            recipe = self._recipe(tables, chosen, Path(RECIPE).stem)
            answer.write(self.work, recipe, data, harms)
            self.work.rename(self.out)
        finally:
            shutil.rmtree(self.work, ignore_errors=True)
        warnings = list(self.prepared.source.notes)
        if data["chosen"].get("state") == "gate_failed":
            warnings.append(f"the choice, compiled, fails a gate of {self.request.recipe.name}")
        return Tuned(self.out, data, self.decisions, warnings)

    def _facts(self) -> dict[str, Any]:
        """Return the part of `front.json` that does not depend on the choice."""
        source = self.prepared.source
        return {
            "quantkit": __version__,
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "model": {"name": source.name, "ref": source.ref, "sha256": source.sha256, "dtype": source.dtype},
            "base": self.request.recipe.name,
            "target": self.request.target.name,
            "budget": self.question.budget.as_dict(),
            "candidates": [
                {"name": one.name, "scheme": one.scheme.model_dump(mode="json") if one.scheme else None}
                for one in self.choices.candidates
            ],
            "texts": {"harm": answer.text_of(self.text), "check": answer.text_of(self.scored) if self.scored else None},
            "anchor": self._anchor(),
            "factor": self.factor if self.measured else None,
            "decisions": [one.as_dict() for one in self.decisions],
            "notes": list(source.notes),
            "seconds": time.perf_counter() - self.started,
        }

    # --- harms -------------------------------------------------------------------------------------------------------

    def _harms(self) -> list[UnitHarm]:
        from quantkit.tuning import harm

        source = self.prepared.source
        calibration = self.prepared.calibration
        self.text = self._guiding(self.question.samples, TOKENS)
        ids = calibration.ids[:CALIBRATED] if calibration is not None else None
        path = answer.harms_place(self._key(None if ids is None else ids.tolist()))
        known = answer.read_harms(path)
        count = len(self.prepared.stream.block_names)
        start = known[-1].block + 1 if known else 0
        tried = sum(one.scheme is not None for one in self.choices.candidates)
        # a block has about four units, each measured with one candidate or with all
        variants = 4 * (tried if self.question.exact else 1) * (count - start)
        self.progress.note(f"{variants} variants of units to measure: their time is known after the first block")
        self.progress.plan({"harm": 4.0 * count, "check": 2.0 * count * self.question.check, "front": 1.0})
        self.progress.at("harm", start / count, f"{len(known)} known" if known else "")
        if start == count:
            return known
        generator = torch.Generator().manual_seed(self.request.recipe.seed)
        vocabulary = int(self.text.ids.max()) + 1
        subject: HarmSubject = harm.HarmSubject(
            stream=self.prepared.stream,
            steps=self.prepared.steps,
            candidates={one.name: one.layers for one in self.choices.candidates if one.scheme is not None},
            calibration=ids,
            ids=self.text.ids,
            probe_ids=torch.randint(0, vocabulary, (2, 12), generator=generator),
            widest=self.prepared.layers.widest,
            dtype=getattr(torch, source.dtype),
            seed=self.request.recipe.seed,
            anchor=self._anchor(),
        )
        left = 1 - start / count
        for wave in harm.measure(
            subject, start, lambda done: self.progress.at("harm", 1 - left * (1 - done), f"{tried} candidates a unit")
        ):
            known = [*known, *wave]
            answer.keep_harms(path, known)
        self.progress.at("harm", 1.0)
        return known

    def _anchor(self) -> str | None:
        """Return the candidate measured at the output: the recipe's own format, else the first; None measures all."""
        if self.question.exact:
            return None
        base = self.request.recipe.scheme.weights
        quantized = [one for one in self.choices.candidates if one.scheme is not None]
        same = [one for one in quantized if base and one.scheme and one.scheme.format == base.format]
        return (same or quantized)[0].name

    def _guiding(self, samples: int, tokens: int) -> TokenSet:
        from quantkit.pipeline.blocks.tokens import guiding, sequence_length

        length = min(tokens, sequence_length(self.request.recipe.calibration.tokens, self.prepared.source, []))
        decisions: list[Decision] = []
        calibration = self.prepared.calibration
        source, recipe = self.prepared.source, self.request.recipe
        text = guiding(recipe, source, samples=samples, tokens=length, calibration=calibration, decisions=decisions)
        self.decisions += [one for one in decisions if one not in self.decisions]
        return text

    def _key(self, calibrated: list[list[int]] | None) -> dict[str, Any]:
        """Return all inputs of a harm; its hash names the cache file."""
        recipe = self.request.recipe.as_dict()
        relevant = ("torch", "transformers", "numpy")
        return {
            "quantkit": __version__,
            "versions": {name: version for name, version in machine.versions().items() if name in relevant},
            "source": self.prepared.source.sha256,
            "passes": recipe["passes"],
            "seed": recipe["seed"],
            "calibration": calibrated,
            "ids": self.text.sha256,
            "anchor": self._anchor(),
            "candidates": [
                [one.name, sorted({name: scheme.model_dump() for name, scheme in one.layers.items()}.items())]
                for one in self.choices.candidates
            ],
        }

    def _settle(self, harms: Sequence[UnitHarm]) -> None:
        """Fix the scheme of linears that received no token (those of an unused expert): their harm is unknown."""
        seen = {name for harm in harms for name in harm.members}
        own = next(one for one in self.choices.candidates if one.name == (self._anchor() or one.name))
        self.unmeasured = {name: scheme for name, scheme in own.layers.items() if name not in seen}
        if self.unmeasured:
            first = next(iter(self.unmeasured))
            others = f" (and {len(self.unmeasured) - 1} others)" if len(self.unmeasured) > 1 else ""
            reason = f"no token reached it while its block was traced; it is stored in {own.name}"
            self.decisions.append(decision("tune", "not-measured", f"{first}{others}", reason))
            self.choices = replace(self.choices, fixed={**self.choices.fixed, **self.unmeasured})

    # --- the choice --------------------------------------------------------------------------------------------------

    def _tables(self, harms: Sequence[UnitHarm]) -> Tables:
        source = self.prepared.source
        tables = front.tables(
            harms, self.choices, dtype_bits=8 * WIDTHS[source.dtype], total_bytes=source.weights.total_bytes()
        )
        if not self.question.timings:
            return tables
        shapes = [[self.choices.shapes[name] for name in unit.members] for unit in tables.units]
        seconds, missing = front.unit_seconds(
            self.question.timings, shapes, self.choices.candidates, self.question.batches
        )
        for text in missing:
            self.progress.note(f"timings: {text}")
        return replace(tables, seconds=seconds)

    def _recipe(self, tables: Tables, point: FrontPoint, name: str) -> Recipe:
        assignment = {
            linear: self.choices.candidates[int(c)].layers.get(linear)
            for unit, c in zip(tables.units, point.choice, strict=True)
            for linear in unit.members
        }
        assignment |= self.unmeasured
        sizes = {name: rows * columns for name, (rows, columns) in self.choices.shapes.items()}
        budget = ", ".join(f"{kind} {value:g}" for kind, value in self.question.budget.as_dict().items())
        summary = f"{self.request.recipe.name} in mixed precision for {self.prepared.source.name}: {budget}"
        return answer.recipe_of(self.request.recipe, assignment, sizes, name=name, summary=summary)

    def _checked(self, tables: Tables, chosen: FrontPoint) -> FrontPoint:
        """Compile and score the choice; under a limit on KL, correct the predictions and choose again."""
        limit, rounds = self.question.budget.kl, 0
        while True:
            measured = self._compile(self._recipe(tables, chosen, Path(RECIPE).stem), "bundle", rounds)
            self.measured.append((chosen, measured))
            self.factor = measured.kl / chosen.predicted if chosen.predicted > 0 else 1.0
            rounds += 1
            if limit is None or (1 - _UNUSED) * limit <= measured.kl <= limit or rounds == _ROUNDS:
                break
            again = front.best(tables, self.question.budget, self.factor)
            if (again.choice == chosen.choice).all():
                break
            chosen = again
            shutil.rmtree(self.work / "bundle")
        return chosen

    def _uniform(self, tables: Tables, chosen: FrontPoint) -> dict[str, Any] | None:
        """Compile and score the best single scheme within the bits of the choice."""
        base = self.request.recipe.scheme.weights
        options: list[tuple[float, str, Recipe]] = []
        plain = self._plain_bits()
        if base is not None and plain <= chosen.bits * 1.005:
            options.append((plain, name_of(base), self.request.recipe))
        for candidate in self.choices.candidates:
            choice = tables.uniform(candidate.name) if candidate.scheme is not None else None
            if choice is not None and tables.mean_bits(choice) <= chosen.bits * 1.005:
                recipe = self._recipe(tables, front.point(tables, choice), candidate.name.replace(" ", "-"))
                options.append((tables.mean_bits(choice), candidate.name, recipe))
        if not options:
            return None
        bits, name, recipe = max(options, key=lambda option: option[0])
        measured = self._compile(recipe, "uniform", len(self.measured))
        shutil.rmtree(self.work / "uniform")
        return {**measured.as_dict(), "name": name, "bits": bits}

    def _plain_bits(self) -> float:
        """Return bits per weight of the base recipe."""
        schemes = self.prepared.layers.schemes
        wide = 8 * WIDTHS[self.prepared.source.dtype]
        inside = self.prepared.layers.inside
        bits = [
            stored_bits(shape, schemes[name]) if name in schemes else wide * shape[0] * shape[1]
            for name, shape in inside.items()
        ]
        return sum(bits) / sum(rows * columns for rows, columns in inside.values())

    def _compile(self, recipe: Recipe, folder: str, number: int) -> ScoredChoice:
        from quantkit.tuning.search import compile_and_score

        text = self._guiding(-(-CHECKED // (self._length() - 1)), self._length())
        self.scored = text
        start = 1 - 2.0**-number  # the number of compiles is unknown: each takes half of the remaining bar
        within = Overall(lambda share, at: self.progress.at("check", start + share * 2.0 ** -(number + 1), at))
        return compile_and_score(self.request, recipe, self.work / folder, text, within)

    def _length(self) -> int:
        from quantkit.pipeline.blocks.tokens import sequence_length

        return sequence_length(self.request.recipe.calibration.tokens, self.prepared.source, [])


@dataclass(frozen=True)
class ScoredChoice:
    """A compiled and scored choice.

    Args:
        name: name of its recipe.
        bundle: the compiled bundle.
        kl: KL on the `tune` split, nats a token.
        rows: measurements of the compile, among them the KL on the `eval` split and the size.
    """

    name: str
    bundle: Bundle
    kl: float
    rows: list[Row]

    def as_dict(self) -> dict[str, Any]:
        """Return the entry in `front.json`."""
        rows = {row.name: row for row in reversed(self.rows)}
        held_out, bits = rows.get("accuracy.kl"), rows.get("size.bits_per_weight")
        return {
            "name": self.name,
            "measured": self.kl,
            "held_out": held_out.value if held_out else None,
            "held_out_ci95": list(held_out.ci95) if held_out and held_out.ci95 else None,
            "bits_quantized": bits.value if bits else None,
            "file_bytes": weight_bytes(self.bundle.manifest.files),
            "state": self.bundle.manifest.state,
            "content_sha256": self.bundle.manifest.content_sha256,
        }


def scored_in(runtimes: Sequence[str], where: str) -> str:
    """Return the first of `runtimes` that runs on this machine. Raises InputError `tune-unscored` if none does."""
    from quantkit.pipeline.blocks.score import runs_here

    first = next((runtime for runtime in runtimes if runs_here(runtime)), None)
    if first is None:
        value = "; ".join(f"{runtime}: {load_runtime(runtime).why_not_here()}" for runtime in runtimes)
        rule = "the choice is compiled and scored here, so one of its exports must run on this machine"
        remedy = "--set 'export=[{checkpoint: {}}]' (export the engine from the bundle later), or --no-check"
        raise InputError("tune-unscored", where=where, value=value, rule=rule, remedy=remedy)
    return first


def compile_and_score(request: Request, recipe: Recipe, out: Path, text: TokenSet, progress: Progress) -> ScoredChoice:
    """Compile the request with another recipe, and score the bundle on `text`.

    Raises GateError, InputError, Stopped: those of a compile.
    """
    from quantkit.measurement.accuracy import score
    from quantkit.model.source.merged import open_merged
    from quantkit.model.streaming.stream import StreamedModel
    from quantkit.pipeline.blocks.score import torch_threads
    from quantkit.pipeline.compile import compile_model
    from quantkit.pipeline.verdict import runtimes_of

    asked = replace(request, recipe=recipe, out=out, resume=out.with_name(f"{out.name}.partial").exists(), speed=False)
    compiled = compile_model(asked, progress)
    runtime = scored_in(runtimes_of(compiled.bundle.manifest), recipe.name)
    source = open_merged(request.model, request.adapters, trust_remote_code=request.trust_remote_code)
    original = StreamedModel(source).as_it_runs()
    candidate = load_runtime(runtime).open(compiled.bundle.path, torch_threads())
    items = score.score(original, candidate, text)
    return ScoredChoice(recipe.name, compiled.bundle, float(items.kl.mean()), compiled.rows)
