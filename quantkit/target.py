"""`Target`: where a model will run. Hardware figures with their source, formats by runtime, shapes to build for.

The schema is closed, as a recipe's is. A figure of value `auto` is measured, not stated: `quantkit doctor --write`
stores it in the user's cache, and `Target.load` reads it there. Until then it stays `auto` and is reported as
unmeasured; no figure is guessed.

The target's own table states whether a runtime computes in a format. The tables of all targets form the matrix of
formats and hardware.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self

from pydantic import (
    Field,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from quantkit import content, given, plugins
from quantkit.bundle.disk import write_atomic
from quantkit.content import Closed, read_yaml, validated
from quantkit.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from quantkit.scheme import ActivationScheme, WeightScheme

State = Literal["native", "emulated", "absent"]
# parts of a model that can be in a format: weights, inputs of products whose weights are in it too, keys and values,
# packed weights of experts
Part = Literal["weights", "inputs", "kv_cache", "experts"]
# types that arithmetic units multiply; not storage formats: float32 weights may be computed in tf32
ComputeType = Literal["fp32", "tf32", "bf16", "fp16", "fp8_e4m3", "fp4", "int8", "int4"]
# formats and runtimes that quantkit does not implement itself, but that a target may name; files in `formats/` and
# `runtimes/` add their names
_FLOATS = ("float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2", "nf4", "mxfp4", "mxfp8", "nvfp4")
_INTEGERS = ("int8", "int4", "int3", "int2")
_RUNTIMES = ("torch", "onnxruntime", "tensorrt", "tensorrt_rtx", "vllm", "llama_cpp")


def known_formats() -> list[str]:
    """List the formats for tables of targets."""
    return sorted({*_FLOATS, *_INTEGERS, *plugins.FORMATS.names()})


def known_runtimes() -> list[str]:
    """List the runtimes for tables of targets."""
    return sorted({*_RUNTIMES, *plugins.RUNTIMES.names()})


class Figure(Closed):
    """One number about the hardware, with its source.

    Args:
        value: number in `unit`; `auto` until `quantkit doctor --write` has measured it.
        unit: `B`, `B/s`, `W`, `flop/s` (floating point) or `op/s` (integers); a multiply-add counts as two.
        source: document, or method of measurement.
    """

    value: Annotated[float, Field(gt=0, allow_inf_nan=False)] | Literal["auto"]
    unit: Literal["B", "B/s", "flop/s", "op/s", "W"]
    source: str = Field(min_length=1)
    _measured: bool = PrivateAttr(default=False)

    @property
    def number(self) -> float | None:
        """Value, or None if it is unmeasured."""
        return None if self.value == "auto" else self.value

    @property
    def state(self) -> Literal["stated", "measured", "unmeasured"]:
        """State of the value: stated in the target's file, measured on this machine, or unmeasured."""
        return "unmeasured" if self.value == "auto" else "measured" if self._measured else "stated"

    def demand(self, name: str, unit: str) -> None:
        """Require this unit; raises ValueError for another."""
        if self.unit != unit:
            raise ValueError(f"{name} is in {unit}, not {self.unit}")

    def measured(self, value: float, source: str) -> Figure:
        """Return a copy with a measured value."""
        figure = Figure(value=value, unit=self.unit, source=source)
        figure._measured = True
        return figure


class Arch(Closed):
    """Kind of machine.

    Args:
        vendor: maker, or the instruction set of a generic CPU.
        sm: CUDA compute capability of an NVIDIA GPU: "8.9".
        isa: instruction set that a CPU's kernels may use, as `quantkit doctor` names it; `auto` is the machine's own.
    """

    vendor: Literal["nvidia", "amd", "intel", "x86", "arm", "apple"]
    sm: Annotated[str, Field(pattern=r"^\d+\.\d$")] | None = None
    isa: list[str] | Literal["auto"] | None = None


class Memory(Closed):
    """Memory that holds the weights: size, read bandwidth, and the cache before it."""

    capacity: Figure
    read_bandwidth: Figure
    last_level_cache: Figure

    @model_validator(mode="after")
    def _units(self) -> Self:
        for name, unit in (("capacity", "B"), ("read_bandwidth", "B/s"), ("last_level_cache", "B")):
            getattr(self, name).demand(name, unit)
        return self


class Use(Closed):
    """Support of a format for inputs, for keys and values or for experts; `state` and `source` as in `Cell`."""

    state: State
    source: str = Field(min_length=1)


class Cell(Closed):
    """Support of one format by one runtime on this target.

    Args:
        state: support for weights. `native`: a kernel reads the stored form. `emulated`: it runs, but the weights are
            expanded to floats first, which gains no speed. `absent`: it does not run.
        symmetric_only: whether zero points are refused, in weights and in inputs.
        source: evidence for the state.
        pairs: granularities of weights and of their inputs that run together; empty: all, and weights alone.
        inputs: support for products whose weights and inputs are both in it; None if unknown.
        kv_cache: support for keys and values; None if unknown.
        experts: support for packed weights of experts, where it differs from that of other weights.
    """

    state: State
    symmetric_only: bool = False
    source: str = Field(min_length=1)
    pairs: list[tuple[str, str]] = Field(default=[])
    inputs: Use | None = None
    kv_cache: Use | None = None
    experts: Use | None = None

    @model_serializer(mode="wrap")
    def _without_empty(self, dumped: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in dumped(self).items() if name not in ("pairs", "experts") or value}

    def of(self, part: Part) -> Use | None:
        """Return the support for a part of a model."""
        return Use(state=self.state, source=self.source) if part == "weights" else getattr(self, part)


class Stored(NamedTuple):
    """One thing that a recipe stores: its format, whether it is symmetric, and which part of the model it is."""

    format: str
    symmetric: bool
    part: Part = "weights"

    @property
    def words(self) -> str:
        """`int4 weights`."""
        return f"{self.format} {self.part.replace('kv_cache', 'KV cache')}"


class Profile(Closed):
    """Range of shapes that an engine is built for, each as minimum, optimum, maximum.

    `{name: decode, batch: [1, 8, 64], length: [1, 1, 1], context: [1, 512, 2048]}`: one new token at a time, up to 64
    sequences, up to 2048 tokens before it.
    """

    name: str
    batch: tuple[int, int, int]
    length: tuple[int, int, int]
    context: tuple[int, int, int]

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        for name, least in (("batch", 1), ("length", 1), ("context", 0)):
            low, best, high = getattr(self, name)
            if not least <= low <= best <= high:
                raise ValueError(f"{name} is [minimum, optimum, maximum], from {least} up, got {[low, best, high]}")
        return self


class Target(Closed):
    """Machine that will run a model. `name` is the stem of the file; `power` is the limit of the whole board."""

    schema_: Annotated[Literal[1], Field(alias="schema")] = 1
    name: str = ""
    summary: str
    kind: Literal["gpu", "cpu"]
    arch: Arch
    memory: Memory
    power: Figure | None = None
    compute: dict[ComputeType, Figure] = Field(min_length=1)
    formats: dict[str, dict[str, Cell]] = Field(min_length=1)
    runtimes: list[str] = Field(min_length=1)
    baseline: Literal["fp32", "bf16", "fp16"]
    build: dict[str, dict[str, bool | int | float | str]] = Field(default={})
    profiles: list[Profile] = Field(default=[])
    batches: list[Annotated[int, Field(gt=0)]] = Field(min_length=1)

    @field_validator("formats")
    @classmethod
    def _known_formats(cls, value: dict[str, dict[str, Cell]]) -> dict[str, dict[str, Cell]]:
        for name, cells in value.items():
            if name not in known_formats():
                raise ValueError(f"no format is called {name!r}; {did_you_mean(name, known_formats())}")
            for runtime in cells:
                _known_runtime(runtime)
        return value

    @field_validator("runtimes", "build")
    @classmethod
    def _known_runtimes(cls, value: Any) -> Any:
        for runtime in value:
            _known_runtime(runtime)
        if len(set(value)) != len(value):
            raise ValueError("a runtime is named twice")
        return value

    @field_validator("compute")
    @classmethod
    def _compute_units(cls, value: dict[ComputeType, Figure]) -> dict[ComputeType, Figure]:
        for name, figure in value.items():
            figure.demand(name, "op/s" if name.startswith("int") else "flop/s")
        return value

    @field_validator("batches")
    @classmethod
    def _rising(cls, value: list[int]) -> list[int]:
        if sorted(set(value)) != value:
            raise ValueError("batches rise, and none is named twice")
        return value

    @model_validator(mode="after")
    def _arch_of_kind(self) -> Self:
        if (self.arch.vendor == "nvidia") != (self.arch.sm is not None):
            raise ValueError("arch: `sm` goes with `vendor: nvidia`, and only with it")
        if (self.kind == "cpu") != (self.arch.isa is not None):
            raise ValueError("arch: `isa` goes with `kind: cpu`, and only with it")
        if self.power is not None:
            self.power.demand("power", "W")
        if self.baseline not in self.compute:
            raise ValueError(f"baseline {self.baseline} has no figure in compute: {', '.join(sorted(self.compute))}")
        return self

    @classmethod
    def load(cls, reference: str | Path) -> Target:
        """Read a shipped target by name or a file by path, validate it, and fill in measured figures.

        Raises:
            InputError: unknown name, unreadable YAML, unknown key, wrong value or unit: one line, with a did-you-mean.
        """
        given.demand("target", reference, (str, Path), "a name, a path or a Target")
        path = content.find("export", content.as_reference(reference))
        target = cls.from_dict(read_yaml(path), name=path.stem, where=str(reference))
        return target.resolve(read_measured(target.name))

    @classmethod
    def from_dict(cls, data: Any, *, name: str, where: str = "target") -> Target:
        """Validate a mapping as a target, without measured figures. Raises InputError `target-invalid`."""
        # keys in between are free (a compute type, a format, a runtime), so keys of nested tables are listed by hand
        keys = {f"compute.{key}": list(Figure.model_fields) for key in _mapping(_mapping(data).get("compute"))}
        for key, cells in _mapping(_mapping(data).get("formats")).items():
            keys |= {f"formats.{key}.{runtime}": list(Cell.model_fields) for runtime in _mapping(cells)}
        rule = "a target is a YAML mapping"
        return validated(cls, data, where=where, code="target-invalid", rule=rule, keys=keys, name=name)

    def as_dict(self) -> dict[str, Any]:
        """Return the form in the manifest, which `from_dict` reads."""
        return {"schema": 1, **self.model_dump(mode="json", by_alias=True, exclude={"schema_"})}

    def figures(self) -> dict[str, Figure]:
        """Map the dotted place of every figure to it: `memory.read_bandwidth`, `compute.int8`, ..."""
        memory = {f"memory.{name}": getattr(self.memory, name) for name in Memory.model_fields}
        power = {} if self.power is None else {"power": self.power}
        return {**memory, **power, **{f"compute.{name}": figure for name, figure in self.compute.items()}}

    def unmeasured(self) -> list[str]:
        """List the places of figures that `quantkit doctor --write` has yet to measure.

        Of the float types only the baseline counts; `served_by` may change it.
        """
        others = {f"compute.{kind}" for kind in ("fp32", "tf32", "bf16", "fp16") if kind != self.baseline}
        return [place for place, one in self.figures().items() if one.state == "unmeasured" and place not in others]

    def served_by(self, runtime: str | None, cores: int | None = None) -> Target:
        """Return the target for the runtime of a question, which may be in its table alone and not in `runtimes`.

        On a CPU, vLLM computes in bfloat16, other runtimes in float32. vLLM reserves a core for its scheduler.

        Args:
            cores: number of cores behind measured figures of a CPU, if known.
        """
        if runtime is None or runtime in self.runtimes:
            return self
        if all(self.supports(name, runtime).state == "absent" for name in self.formats):
            return self
        changes: dict[str, Any] = {"runtimes": [*self.runtimes, runtime]}
        if runtime == "vllm" and "bf16" in self.compute:
            changes |= {
                "baseline": "bf16",
                "compute": {name: _but_one(one, cores) for name, one in self.compute.items()},
            }
        return self.model_copy(update=changes)

    def resolve(self, measured: Mapping[str, Any]) -> Target:
        """Return a copy with `auto` figures replaced by the result of `read_measured`."""
        values, source = measured.get("figures", {}), str(measured.get("source", "measured"))
        new = {
            place: figure.measured(float(values[place]), source)
            for place, figure in self.figures().items()
            if figure.value == "auto" and values.get(place) is not None
        }
        changes = {place.removeprefix("memory."): new[place] for place in new if place.startswith("memory.")}
        memory = self.memory.model_copy(update=changes)
        compute = {name: new.get(f"compute.{name}", figure) for name, figure in self.compute.items()}
        isa = measured.get("isa") if self.arch.isa == "auto" else None
        arch = self.arch.model_copy(update={"isa": isa}) if isa else self.arch
        return self.model_copy(update={"memory": memory, "compute": compute, "arch": arch})

    def supports(self, format: str, runtime: str | None = None) -> Cell:  # noqa: A002 (the word of the contract)
        """Look up the cell of a format and a runtime, by default the target's first; a missing cell is absent."""
        runtime = runtime or self.runtimes[0]
        cell = self.formats.get(format, {}).get(runtime)
        return cell or Cell(state="absent", source=f"the table of {self.name or 'the target'} has no such cell")

    def use(self, stored: Stored, runtime: str | None = None) -> Use:
        """Look up a runtime's support for something that is stored; a missing cell is absent."""
        missing = f"the table of {self.name or 'the target'} says nothing of {stored.words}"
        return self.supports(stored.format, runtime).of(stored.part) or Use(state="absent", source=missing)

    def check(self, formats: Iterable[Stored | tuple[str, bool]], runtime: str | None = None) -> list[Stored]:
        """Refuse a recipe if this target cannot run it.

        Args:
            formats: everything that the recipe stores; a pair (format, symmetric) means weights.
            runtime: name of a runtime; the default is the target's first.

        Returns:
            everything that the runtime only emulates: stored in the format, computed in floats.

        Raises:
            InputError: `target-cannot-run`, with the cell's source and the formats that do run.
        """
        runtime = runtime or self.runtimes[0]

        def refused(value: str, rule: str, remedy: str) -> InputError:
            return InputError("target-cannot-run", where=self.name or "target", value=value, rule=rule, remedy=remedy)

        if runtime not in self.runtimes:
            remedy = did_you_mean(runtime, self.runtimes)
            raise refused(f"runtime {runtime}", "a target runs the runtimes it lists", remedy)
        emulated = []
        for stored in (Stored(*form) for form in formats):
            use = self.use(stored, runtime)
            what = f"{stored.words} do not run in {runtime}"
            if use.state == "absent":
                remedy = self._instead(stored, runtime)
                raise refused(what.replace("cache do", "cache does"), f"source: {use.source}", remedy)
            if self.supports(stored.format, runtime).symmetric_only and not stored.symmetric:
                inputs = "where inputs are quantized, --set scheme.activations.symmetric=true"
                remedy = f"--set scheme.weights.symmetric=true and, {inputs}"
                raise refused(f"asymmetric {what}", f"only symmetric ones do; source: {use.source}", remedy)
            if use.state == "emulated":
                emulated.append(stored)
        return emulated

    def demand_pair(self, weights: WeightScheme, inputs: ActivationScheme | None, runtime: str) -> None:
        """Refuse weights by their granularity and that of their inputs. Raises InputError `target-cannot-run`."""
        cell = self.supports(weights.format, runtime)
        if not cell.pairs or (inputs and (weights.granularity, inputs.granularity) in cell.pairs):
            return
        beside = f"inputs by {inputs.granularity}" if inputs else "inputs in floats"
        value = f"{weights.format} weights by {weights.granularity}, {beside}: they do not run in {runtime}"
        able = ", ".join(f"weights by {left} and inputs by {right}" for left, right in cell.pairs)
        remedy = self._instead(Stored(weights.format, weights.symmetric), runtime)
        raise InputError("target-cannot-run", self.name or "target", value, f"{able}; source: {cell.source}", remedy)

    def demand_experts(self, form: str, runtime: str) -> None:
        """Refuse packed experts where only other weights run. Raises InputError `target-cannot-run`."""
        use = self.supports(form, runtime).experts
        if use is not None and use.state == "absent":
            value = f"experts in {form}: they do not run in {runtime}, other weights do"
            remedy = "an override with `weights: null` for them, or --set 'export=[{checkpoint: {layout: dense}}]'"
            raise InputError("target-cannot-run", self.name or "target", value, f"source: {use.source}", remedy)

    def _instead(self, stored: Stored, runtime: str) -> str:
        native = [name for name in self.formats if self.use(stored._replace(format=name), runtime).state == "native"]
        others = [other for other in self.runtimes if self.use(stored, other).state != "absent"]
        parts = [f"{runtime} computes natively in {', '.join(native)}" if native else ""]
        parts.append(f"{stored.format} runs in {', '.join(others)}" if others else "")
        return "; or: ".join(part for part in parts if part) or "choose another target"


def _known_runtime(name: str) -> None:
    if name not in known_runtimes():
        raise ValueError(f"no runtime is called {name!r}; {did_you_mean(name, known_runtimes())}")


def _but_one(figure: Figure, cores: int | None) -> Figure:
    """Return a rate measured on so many cores without one of them."""
    if figure.value == "auto" or figure.state != "measured" or cores is None or cores < 2:
        return figure
    source = f"{figure.source}; on {cores - 1} of {cores} cores, since vLLM reserves one"
    return figure.measured(figure.value * (cores - 1) / cores, source)


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def measured_path(name: str) -> Path:
    """Return the file of measured figures of a target: `<cache>/doctor/<name>.json`."""
    return content.cache_dir() / "doctor" / f"{name}.json"


def read_measured(name: str) -> dict[str, Any]:
    """Read the result of `write_measured`: `figures` (place -> value), `isa`, `source`; empty if nothing was measured.

    An unreadable file counts as not measured: the doctor writes it again.
    """
    try:
        data = json.loads(measured_path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(data, dict) or data.get("schema") != 1:
        return {}
    figures = {
        place: value
        for place, value in _mapping(data.get("figures")).items()
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")
    }
    return {**data, "figures": figures}


def write_measured(name: str, data: Mapping[str, Any]) -> Path:
    """Write the measured figures atomically: a reader sees the old file or the new one.

    Raises:
        InputError: `cache-unwritable`.
    """
    path = measured_path(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps({"schema": 1, **data}, indent=1, allow_nan=False).encode())
    except OSError as error:
        remedy = "set QUANTKIT_CACHE to a writable folder"
        raise InputError("cache-unwritable", where=str(path), value=str(error), remedy=remedy) from None
    return path
