"""What `quantkit tax` can be asked about on an NVIDIA GPU: our kernels and torch's operators, against bfloat16."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit import content, machine
from quantkit.errors import InputError, MissingDependency
from quantkit.kernels import GPUS, too_old
from quantkit.model.sizes.shapes import LinearShapes
from quantkit.pipeline.tax.cpu import absent
from quantkit.target import Target

RUNTIME = "torch"


@dataclass(frozen=True)
class Graphics:
    """A GPU, that products are timed on.

    Args:
        target: whose figures stand beside the measured ones.
        name: as the driver gives it.
        sm: compute capability: 90.
    """

    target: Target
    name: str
    sm: int

    runtime = RUNTIME
    baseline = "bfloat16"

    @classmethod
    def of(cls, target: str | None) -> Graphics:
        """The first GPU of this machine.

        Raises:
            InputError: `device-absent`, no GPU, or another than the target; `device-unsupported`, one that is too old;
                `target-unknown`, no shipped target goes by its name.
            MissingDependency: triton.
        """
        found, reason = machine.gpus()
        if not found:
            raise InputError(
                "device-absent",
                where="--device cuda",
                value=f"no GPU here: {reason}",
                rule="kernels are timed on the device that they are for",
                remedy="run it where there is one, with pip install 'quantkit[gpu]'; --device cpu times this processor",
            )
        name, capability = str(found[0]["name"]), str(found[0]["sm"])
        sm = int(capability.replace(".", ""))
        if too_old(capability):
            raise InputError("device-unsupported", where=name, value=f"SM {capability}", rule=GPUS)
        if not machine.has("triton"):
            raise MissingDependency("triton", extra="gpu", purpose="timing products on a GPU")
        aimed = Target.load(target) if target else target_of(name)
        if aimed.kind != "gpu" or aimed.arch.sm != capability:
            what = f"a GPU of SM {aimed.arch.sm}" if aimed.kind == "gpu" else "a processor"
            raise InputError(
                "device-absent",
                where="--target",
                value=f"{aimed.name} is {what}; here is {name}, SM {capability}",
                rule="the tax is measured on the machine at hand",
                remedy="run it there, or leave --target out",
            )
        return cls(aimed, name, sm)

    @property
    def formats(self) -> tuple[str, ...]:
        """Those that are timed if none is named: FP8 products need SM 8.9."""
        return ("int4", "int8.dynamic", *(["fp8_e4m3.dynamic"] if self.sm >= 89 else []), "nf4")

    def threads(self, asked: Sequence[int]) -> list[int]:
        """One run, of no threads. Raises InputError `usage`."""
        if asked:
            raise InputError("usage", where="--threads", value="threads of a GPU", rule="they are a processor's")
        return [0]

    def names(self) -> list[str]:
        """Of all variants."""
        from quantkit.measurement.cuda.weights import known
        from quantkit.measurement.operators import foreign
        from quantkit.measurement.operators.cuda import torch_names

        return [*known(), *torch_names(), *foreign.known()]

    def usual(self, name: str, found: LinearShapes) -> str:
        """int4 in the largest group that fits the shapes, nf4 with doubled scales. Raises InputError for no format."""
        if name == "int4":
            fitting = [size for size in (128, 64, 32) if all(linear.K % size == 0 for linear in found.linears)]
            return f"int4.g{fitting[0]}" if fitting else "int4.channel"
        if name == "nf4":
            return "nf4.g64.double"
        raise absent(name, self.names(), "our kernels or an operator of torch on a GPU")

    def own(self, scheme: Mapping[str, Any], activations: Mapping[str, Any] | None) -> str:
        """The variant that a bundle's scheme is, or the format where it is none of them."""
        from quantkit.measurement.operators import foreign

        for other in foreign.known().values():
            if other.stands_for(scheme, activations):
                return other.name
        form, granularity = str(scheme.get("format")), scheme.get("granularity")
        symmetric = scheme.get("symmetric", True)
        group = f"g{scheme.get('group')}" if granularity == "group" else "channel"
        parts = [form]
        if form in ("int4", "nf4"):
            parts.append(group)
        if not symmetric:
            parts.append("zeros")
        if scheme.get("scale") == "double":
            parts.append("double")
        if activations is not None and activations.get("dynamic") and activations.get("granularity") == "token":
            parts.append("dynamic")
        name = ".".join(parts)
        return name if name in self.names() else form

    def check(self, name: str, found: LinearShapes) -> None:
        """Refuse a variant that this GPU cannot multiply, or that does not fit a shape. Raises InputError."""
        from quantkit.kernels.native import require
        from quantkit.measurement.cuda.weights import FormatVariant
        from quantkit.measurement.operators import foreign
        from quantkit.measurement.operators.cuda import check_shape, variant_of

        variant = foreign.known().get(name) or variant_of(name)
        if isinstance(variant, FormatVariant) and variant.native:
            require(variant.kind, self.sm)
        for linear in found.linears:
            check_shape(variant, linear)


def target_of(name: str) -> Target:
    """The shipped target of a GPU by the driver's name for it: `NVIDIA A100-SXM4-80GB` is `a100`.

    Raises:
        InputError: `target-unknown`.
    """
    said = name.lower().replace(" ", "-")
    targets = [Target.load(each) for each in content.names("export")]
    graphics = [target for target in targets if target.kind == "gpu"]
    for target in graphics:
        if re.search(rf"(?<![a-z0-9]){re.escape(target.name)}(?![a-z0-9])", said):
            return target
    raise InputError(
        "target-unknown",
        where="--device cuda",
        value=f"no target is called like {name}",
        rule="its figures stand beside the measured ones",
        remedy=f"name one of its architecture, or a file of your own: --target {', '.join(t.name for t in graphics)}",
    )
