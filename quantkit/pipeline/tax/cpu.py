"""What `quantkit tax` can be asked about on this processor: single products in ONNX Runtime, against float32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit import content, machine, plugins
from quantkit.errors import InputError, did_you_mean, unknown_name
from quantkit.model.sizes.shapes import LinearShapes
from quantkit.pipeline.request import this_machine
from quantkit.target import Target

RUNTIME = "onnxruntime"


@dataclass(frozen=True)
class Processor:
    """A CPU, that products are timed on.

    Args:
        target: whose figures stand beside the measured ones, and whose build settings are the usual ones.
        cores: that it has.
    """

    target: Target
    cores: int

    runtime = RUNTIME
    baseline = "float32"
    formats = ("int4", "int8", "int8.dynamic", "nf4")

    @classmethod
    def of(cls, target: str | None, cores: int | None = None) -> Processor:
        """This machine's, or the one that is named; so are its cores. Raises InputError `device-absent` for a GPU."""
        found = Target.load(target or this_machine())
        if found.kind != "cpu":
            raise InputError(
                "device-absent",
                where="--target",
                value=f"{found.name} is a GPU",
                rule="the tax is measured on the machine at hand",
                remedy=f"run it there with --device cuda, or use --target {this_machine()}",
            )
        return cls(found, cores or machine.cores())

    def threads(self, asked: Sequence[int]) -> list[int]:
        """Each once; all cores where none is asked for. Raises InputError `threads-invalid`."""
        threads = list(dict.fromkeys(asked)) or [self.cores]
        if min(threads) < 1 or max(threads) > self.cores:
            raise InputError(
                "threads-invalid",
                where="--threads",
                value=max(threads, key=lambda n: (n > self.cores, -n)),
                rule=f"from 1 to its {self.cores} cores: more would wait for one another",
            )
        return threads

    def names(self) -> list[str]:
        """Of all variants."""
        from quantkit.exporters.onnx import single_op as single

        return single.names()

    def usual(self, name: str, found: LinearShapes) -> str:
        """What quantkit exports of a format, in a group that fits the shapes. Raises InputError for no format here."""
        from quantkit.exporters.onnx import single_op as single

        build = self._build()
        usual = single.usual(name, block=_group(found, int(build.get("block", 128))), level=self._level())
        if usual not in self.names():
            raise absent(name, self.names(), f"{RUNTIME} on a CPU")
        return usual

    def own(self, scheme: Mapping[str, Any], activations: Mapping[str, Any] | None) -> str:
        """The variant that a bundle's scheme is."""
        from quantkit.exporters.onnx.single_op import GROUPS

        name, group = str(scheme.get("format")), scheme.get("group")
        if name in ("int4", "int8") and isinstance(group, int):
            fitting = [size for size in GROUPS if group % size == 0]
            if fitting:
                return f"{name}.g{max(fitting)}.level{self._level()}"
        return name

    def check(self, name: str, found: LinearShapes) -> None:
        """Refuse a variant that cannot run here or does not fit a shape. Raises InputError."""
        from quantkit.exporters.onnx import single_op as single

        variant = single.variant(name)
        self.target.check([(variant.format, variant.scheme.symmetric if variant.scheme else True)], RUNTIME)
        for linear in found.linears:
            single.check_shape(variant, linear.K, linear.N)

    def _build(self) -> Mapping[str, Any]:
        return self.target.build.get(RUNTIME, {})

    def _level(self) -> int:
        return int(self._build().get("accuracy_level", 4))


def absent(name: str, known: Sequence[str], where: str) -> InputError:
    """The error for a format that cannot be run here, or for no format at all."""
    if name not in plugins.FORMATS:
        return unknown_name("format", name, {*plugins.FORMATS.names(), *known}, where="--format")
    having = []
    for target in (Target.load(each) for each in content.names("export")):
        native = [runtime for runtime, cell in target.formats.get(name, {}).items() if cell.state == "native"]
        having += [f"{target.name} ({', '.join(native)})"] if native else []
    return InputError(
        "format-absent",
        where="--format",
        value=f"{name} does not run in {where}",
        rule="emulating it would not measure it",
        remedy=f"computed natively by {'; '.join(having)}" if having else "no target that is known computes in it",
    )


def demand_runtime(asked: str, own: str, where: str) -> None:
    """Refuse a runtime that is not the one products are timed in. Raises InputError `runtime-unsupported`."""
    if asked and asked != own:
        raise InputError(
            "runtime-unsupported",
            where="--runtime",
            value=asked,
            rule=f"on a {where} single products are timed in {own}",
            remedy=f"use {own}" if asked in plugins.RUNTIMES else did_you_mean(asked, [own]),
        )


def _group(found: LinearShapes, block: int) -> int:
    """The largest group up to the target's block that divides every K; the block itself if none does."""
    from quantkit.exporters.onnx.single_op import GROUPS

    fitting = [size for size in GROUPS if size <= block and all(linear.K % size == 0 for linear in found.linears)]
    return max(fitting, default=block)
