"""The two devices of `quantkit tax`: ONNX Runtime against float32 on this processor, or kernels on a GPU.

On a GPU our kernels, torch's operators and foreign kernels are timed against bfloat16.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit import content, machine, plugins
from quantkit.errors import InputError, MissingDependency, did_you_mean, install, unknown_name
from quantkit.kernels import GPUS, too_old
from quantkit.model.sizes.shapes import LinearShapes
from quantkit.pipeline.request import this_machine
from quantkit.target import Target

RUNTIME = "onnxruntime"


@dataclass(frozen=True)
class Processor:
    """A CPU that times products.

    Attributes:
        target: target whose figures stand beside the measured ones, and whose build settings are the defaults.
    """

    target: Target
    cores: int

    runtime = RUNTIME
    baseline = "float32"
    formats = ("int4", "int8", "int8.dynamic", "nf4")

    @classmethod
    def of(cls, target: str | None, cores: int | None = None) -> Processor:
        """Take this machine's, or the one that is named; so are its cores. Raises InputError `device-absent`."""
        aimed = Target.load(target or this_machine())
        if aimed.kind != "cpu":
            remedy = f"run it there with --device cuda, or use --target {this_machine()}"
            raise _elsewhere("--target", f"{aimed.name} is a GPU", remedy)
        return cls(aimed, cores or machine.cores())

    def threads(self, asked: Sequence[int]) -> list[int]:
        """Return each once; all cores where none is asked for. Raises InputError `threads-invalid`."""
        threads = list(dict.fromkeys(asked)) or [self.cores]
        if min(threads) < 1 or max(threads) > self.cores:
            worst = max(threads, key=lambda n: (n > self.cores, -n))
            rule = f"from 1 to its {self.cores} cores: more would wait for one another"
            raise InputError("threads-invalid", where="--threads", value=worst, rule=rule)
        return threads

    def names(self) -> list[str]:
        """Name all variants."""
        from quantkit.exporters.onnx import single_op as single

        return single.names()

    def usual(self, name: str, linears: LinearShapes) -> str:
        """Return quantkit's exports of a format, in a group that fits the shapes. Raises InputError for none."""
        from quantkit.exporters.onnx import single_op as single

        block = int(self._build().get("block", 128))
        # the largest group up to the target's block that divides every K; the block itself if none does
        groups = [size for size in single.GROUPS if size <= block and _divides(size, linears)]
        usual = single.usual(name, block=max(groups, default=block), level=self._level())
        if usual not in self.names():
            raise absent(name, self.names(), f"{RUNTIME} on a CPU")
        return usual

    def own(self, scheme: Mapping[str, Any], activations: Mapping[str, Any] | None) -> str:
        """Name the variant of a bundle's scheme."""
        from quantkit.exporters.onnx.single_op import GROUPS

        name, group = str(scheme.get("format")), scheme.get("group")
        if name in ("int4", "int8") and isinstance(group, int):
            fitting = [size for size in GROUPS if group % size == 0]
            if fitting:
                return f"{name}.g{max(fitting)}.level{self._level()}"
        return name

    def check(self, name: str, linears: LinearShapes) -> None:
        """Refuse a variant unable to run here, or unfit for a shape. Raises InputError."""
        from quantkit.exporters.onnx import single_op as single

        variant = single.variant(name)
        self.target.check([(variant.format, variant.scheme.symmetric if variant.scheme else True)], RUNTIME)
        for linear in linears.linears:
            single.check_shape(variant, linear.K, linear.N)

    def _build(self) -> Mapping[str, Any]:
        return self.target.build.get(RUNTIME, {})

    def _level(self) -> int:
        return int(self._build().get("accuracy_level", 4))


def _divides(size: int, linears: LinearShapes) -> bool:
    return all(linear.K % size == 0 for linear in linears.linears)


def _elsewhere(where: str, value: str, remedy: str) -> InputError:
    rule = "the tax is measured on this machine"
    return InputError("device-absent", where=where, value=value, rule=rule, remedy=remedy)


def absent(name: str, known: Sequence[str], where: str) -> InputError:
    """Return the error for a format that cannot be run here, or for no format at all."""
    if name not in plugins.FORMATS:
        return unknown_name("format", name, {*plugins.FORMATS.names(), *known}, where="--format")
    having = []
    for target in map(Target.load, content.names("export")):
        native = [runtime for runtime, cell in target.formats.get(name, {}).items() if cell.state == "native"]
        having += [f"{target.name} ({', '.join(native)})"] if native else []
    value, rule = f"{name} does not run in {where}", "emulating it would not measure it"
    remedy = f"computed natively by {'; '.join(having)}" if having else "no known target computes in it"
    return InputError("format-absent", where="--format", value=value, rule=rule, remedy=remedy)


def demand_runtime(asked: str, own: str, where: str) -> None:
    """Refuse a runtime without timed products. Raises InputError `runtime-unsupported`."""
    if asked and asked != own:
        rule = f"on a {where} single products are timed in {own}"
        remedy = f"use {own}" if asked in plugins.RUNTIMES else did_you_mean(asked, [own])
        raise InputError("runtime-unsupported", where="--runtime", value=asked, rule=rule, remedy=remedy)


@dataclass(frozen=True)
class Graphics:
    """A GPU that times products.

    Attributes:
        target: target whose figures stand beside the measured ones.
        name: name that the driver reports.
        sm: compute capability, for example 90.
    """

    target: Target
    name: str
    sm: int

    runtime = "torch"
    baseline = "bfloat16"

    @classmethod
    def of(cls, target: str | None) -> Graphics:
        """Take the first GPU of this machine.

        Raises InputError: `device-absent`, no GPU, or another than the target; `device-unsupported`, one that is too
        old; `target-unknown`, no shipped target goes by its name; MissingDependency: triton.
        """
        gpus, reason = machine.gpus()
        if not gpus:
            value, rule = f"no GPU here: {reason}", "kernels are timed on their own device"
            remedy = f"run it where there is one ({install('gpu')}); --device cpu times this processor"
            raise InputError("device-absent", where="--device cuda", value=value, rule=rule, remedy=remedy)
        name, capability = str(gpus[0]["name"]), str(gpus[0]["sm"])
        if too_old(capability):
            raise InputError("device-unsupported", where=name, value=f"SM {capability}", rule=GPUS)
        if not machine.has("triton"):
            raise MissingDependency("triton", extra="gpu", purpose="timing products on a GPU")
        aimed = Target.load(target) if target else target_of(name)
        if aimed.kind != "gpu" or aimed.arch.sm != capability:
            what = f"a GPU of SM {aimed.arch.sm}" if aimed.kind == "gpu" else "a processor"
            value = f"{aimed.name} is {what}; here is {name}, SM {capability}"
            raise _elsewhere("--target", value, "run it there, or leave --target out")
        return cls(aimed, name, int(capability.replace(".", "")))

    @property
    def formats(self) -> tuple[str, ...]:
        """Formats to time if none is named: FP8 products need SM 8.9."""
        return ("int4", "int8.dynamic", *(["fp8_e4m3.dynamic"] if self.sm >= 89 else []), "nf4")

    def threads(self, asked: Sequence[int]) -> list[int]:
        """Return one run, of no threads. Raises InputError `usage`."""
        if asked:
            raise InputError("usage", where="--threads", value="threads of a GPU", rule="they are a processor's")
        return [0]

    def names(self) -> list[str]:
        """Name all variants."""
        from quantkit.measurement.cuda.sides import known
        from quantkit.measurement.operators.cuda import foreign, torch_names

        return [*known(), *torch_names(), *foreign()]

    def usual(self, name: str, linears: LinearShapes) -> str:
        """Return int4 in the largest group that fits the shapes, nf4 with doubled scales. Raises InputError."""
        if name == "int4":
            fitting = [size for size in (128, 64, 32) if _divides(size, linears)]
            return f"int4.g{fitting[0]}" if fitting else "int4.channel"
        if name == "nf4":
            return "nf4.g64.double"
        raise absent(name, self.names(), "our kernels or an operator of torch on a GPU")

    def own(self, scheme: Mapping[str, Any], activations: Mapping[str, Any] | None) -> str:
        """Name the variant of a bundle's scheme, or the format if it is none of them."""
        from quantkit.kernels.dispatch import OTHER_PACKING
        from quantkit.measurement.operators.cuda import foreign

        for other in foreign().values():
            if not other.name.endswith(OTHER_PACKING) and other.stands_for(scheme, activations):
                return other.name
        form, inputs = str(scheme.get("format")), activations or {}
        parts = [form]
        if form in ("int4", "nf4"):
            parts.append(f"g{scheme.get('group')}" if scheme.get("granularity") == "group" else "channel")
        if not scheme.get("symmetric", True):
            parts.append("zeros")
        if scheme.get("scale") == "double":
            parts.append("double")
        if inputs.get("dynamic") and inputs.get("granularity") == "token":
            parts.append("dynamic")
        name = ".".join(parts)
        return name if name in self.names() else form

    def check(self, name: str, linears: LinearShapes) -> None:
        """Refuse a variant without products on this GPU, or unfit for a shape. Raises InputError."""
        from quantkit.kernels.native import require
        from quantkit.measurement.cuda.sides import FormatVariant
        from quantkit.measurement.operators.cuda import check_shape, foreign, variant_of

        variant = foreign().get(name) or variant_of(name)
        if isinstance(variant, FormatVariant) and variant.native:
            require(variant.kind, self.sm)
        for linear in linears.linears:
            check_shape(variant, linear)


def target_of(name: str) -> Target:
    """Return the shipped target of a GPU by the driver's name for it: `NVIDIA A100-SXM4-80GB` is `a100`.

    Raises InputError: `target-unknown`.
    """
    slug = name.lower().replace(" ", "-")
    graphics = [target for target in map(Target.load, content.names("export")) if target.kind == "gpu"]
    for target in graphics:
        if re.search(rf"(?<![a-z0-9]){re.escape(target.name)}(?![a-z0-9])", slug):
            return target
    value, rule = f"no target has the name {name}", "its figures stand beside the measured ones"
    remedy = f"name one of its architecture, or a file of your own: --target {', '.join(t.name for t in graphics)}"
    raise InputError("target-unknown", where="--device cuda", value=value, rule=rule, remedy=remedy)
