"""What the compile of a graph has done, step by step in the build's journal, so that a resume does none of it twice.

    ranges              of every tensor with a pair
    codes-0007          codes, scales and biases of the seventh product, counted from 0, and what was decided of it
    alone-0007          its harm alone, where some products may be kept high
    kept-0002-0007      the same product, solved again with two others kept
    point-0002          the harm of that point; dropped-0002: its codes, once they cannot be chosen any more

Numbers stand in the journal, codes in files beside it, which together are as large as the weights of the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from quantkit.bundle import Build, Decision

if TYPE_CHECKING:
    from quantkit.formats import QuantTensor
    from quantkit.graph.pairs.qdq import Codes, Range
    from quantkit.scheme import WeightScheme


T = TypeVar("T")


class Form(Protocol[T]):
    """How one product's codes lie in a file."""

    def write(self, codes: T, path: Path) -> None:
        """Write them."""

    def read(self, path: Path) -> T:
        """Read them again, bit by bit what was written."""


class Steps:
    """The steps of one compile.

    Args:
        build: whose journal they stand in. None: nothing is kept, for what wants codes alone.
    """

    def __init__(self, build: Build | None = None) -> None:
        self.build = build
        self.done: dict[str, Mapping[str, Any]] = {**build.done()} if build is not None else {}
        # processor seconds of steps that another process has done
        self.cpu_before = sum(record["cpu_seconds"] for record in self.done.values())
        self._since = time.process_time()

    def once(self, key: str, make: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        """A step of numbers alone: as it stands in the journal, or made and committed."""
        if key not in self.done:
            self.commit(key, make(), {})
        return self.done[key]

    def ranges(self, make: Callable[[], Mapping[str, Range]]) -> dict[str, Range]:
        """The ranges of activations, observed at most once."""
        from quantkit.graph.pairs.qdq import Range

        def told() -> dict[str, Any]:
            return {"ranges": {name: [own.scale, own.zero, own.signed] for name, own in make().items()}}

        return {name: Range(*own) for name, own in self.once("ranges", told)["ranges"].items()}

    def products(self, stem: str, names: Sequence[str], form: Form[T]) -> Products[T]:
        """The products of one solve."""
        return Products(self, {name: f"{stem}-{place:04}" for place, name in enumerate(names)}, form)

    def drop(self, key: str, stem: str) -> None:
        """Remove the files of a solve whose codes nothing will ask for any more."""
        if self.build is not None and key not in self.done:
            files = [self.path(each) for each in self.done if each.startswith(f"{stem}-")]
            self.commit(key, {}, {}, remove=files)

    def commit(
        self, key: str, record: Mapping[str, Any], files: Mapping[Path, Path], *, remove: Iterable[Path] = ()
    ) -> None:
        """Make a step permanent, with the processor seconds since the one before it."""
        now = time.process_time()
        made = {**record, "cpu_seconds": now - self._since}
        if self.build is not None:
            self.build.commit(key, made, files, remove=remove)
        self.done[key], self._since = made, now

    def path(self, key: str) -> Path:
        """Where a step's codes lie."""
        assert self.build is not None
        return self.build.steps / f"{key}.safetensors"


class Products(Generic[T]):
    """The products of one solve; `again` has the codes of those that were solved before an interruption, `decisions`
    what was decided of each that is solved.

    Args:
        steps: of the compile.
        keys: by the products' names.
        form: of the files.
    """

    def __init__(self, steps: Steps, keys: Mapping[str, str], form: Form[T]) -> None:
        self._steps, self._keys, self._form = steps, keys, form
        there = {name: key for name, key in keys.items() if key in steps.done}
        self.again: dict[str, T] = {name: form.read(steps.path(key)) for name, key in there.items()}
        self.decisions: dict[str, list[Decision]] = {
            name: [Decision.model_validate(each) for each in steps.done[key]["decisions"]]
            for name, key in there.items()
        }

    def keep(self, name: str, codes: T, decisions: Sequence[Decision] = ()) -> None:
        """Commit a product."""
        self.decisions[name] = list(decisions)
        if self._steps.build is None:
            return
        key, written = self._keys[name], self._steps.build.temporary("codes.safetensors")
        self._form.write(codes, written)
        said = [each.as_dict() for each in decisions]
        self._steps.commit(key, {"product": name, "decisions": said}, {written: self._steps.path(key)})


class IntegerForm:
    """Codes of integer products, with the biases that make up for their rounding."""

    def write(self, codes: Codes, path: Path) -> None:
        """As arrays of their own names."""
        import numpy as np
        from safetensors.numpy import save_file

        parts = {"codes": codes.codes, "scale": codes.scale, "bias": codes.bias, "alone": codes.alone}
        save_file({name: np.ascontiguousarray(part) for name, part in parts.items() if part is not None}, path)

    def read(self, path: Path) -> Codes:
        """What is not there is None."""
        from safetensors.numpy import load_file

        from quantkit.graph.pairs.qdq import Codes

        return Codes(**load_file(path))


@dataclass(frozen=True)
class WeightForm:
    """Weights alone, in any format.

    Args:
        scheme: of all of them.
    """

    scheme: WeightScheme

    def write(self, codes: QuantTensor, path: Path) -> None:
        """As a block's linears are."""
        from quantkit.model import finished

        finished.save(path, {"product": codes}, {})

    def read(self, path: Path) -> QuantTensor:
        """With its scheme."""
        from quantkit.model.finished import Finished

        return Finished([path], {"product": self.scheme}).quantized("product")
