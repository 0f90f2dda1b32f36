"""What `quantkit tax` is asked, checked before anything is timed: shapes, formats, batches, traffic, device.

**How a bundle multiplies** (`BundleWays`): its blocks, its head, and where its graph has a second way, many rows. A
head that is stored otherwise than the blocks has a variant of its own. A graph with `prefill: int8` multiplies fewer
than `ROWS` rows by its codes, and more in integers; which of both a batch takes follows from its rows alone.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quantkit import content, limits
from quantkit.bundle import Bundle
from quantkit.bundle.manifest import MANIFEST
from quantkit.errors import InputError, did_you_mean, unknown_name
from quantkit.exporters.onnx.integers import ROWS
from quantkit.measurement.operators.rows import ALL
from quantkit.measurement.rows import Row
from quantkit.model.sizes import configs, shapes
from quantkit.model.sizes.shapes import LinearShapes
from quantkit.model.source.alias import ALIASES
from quantkit.pipeline.tax.cpu import Graphics, Processor, demand_runtime
from quantkit.report.kit import words
from quantkit.target import Target

DEVICES = ("cpu", "cuda")


# what products are timed on
On = Processor | Graphics


@dataclass(frozen=True)
class Question:
    """What is asked, as it was typed.

    Args:
        model: a bundle, a folder with a config or weights, a `config.json`, or a shipped name; None: `shapes`.
        shapes: `4096x14336`, ...
        formats: names of formats or variants (`int4`, `int4.g32.level0`), patterns (`int4*`), `all`.
        batches: M; empty: those of the target.
        traffic: batch -> share of the steps; its batches are timed too.
        device: `cpu` or `cuda`; "": that of the target.
        runtime: `onnxruntime` on a CPU, `torch` on a GPU; "": that.
        threads: one run each; empty: all cores.
        seconds: for all of it.
        target: name or path; None: this processor.
        seed: of weights and of the order of steps.
        cores: of what products are timed on, where that is another machine.
    """

    model: str | None = None
    shapes: Sequence[str] = ()
    formats: Sequence[str] = ()
    batches: Sequence[int] = ()
    traffic: Mapping[int, float] | None = None
    device: str = ""
    runtime: str = ""
    threads: Sequence[int] = ()
    seconds: float = 300.0
    target: str | None = None
    seed: int = 0
    cores: int | None = None


@dataclass(frozen=True)
class TaxPlan:
    """What will be timed, all of it known to fit.

    Args:
        shapes: the linears.
        on: the device.
        bundle: what was asked about, if it is one.
        variants: without the baseline.
        subject: the variant that a bundle's own format is; "" where none is asked about.
        batches: rising.
        traffic: as asked.
        threads: one run each; 0 is a GPU.
        seconds: for all runs.
        seed: as asked.
        ways: how the bundle multiplies, if one is asked about.
    """

    shapes: LinearShapes
    on: On
    bundle: Bundle | None
    variants: Sequence[str]
    subject: str
    batches: Sequence[int]
    traffic: Mapping[int, float] | None
    threads: Sequence[int]
    seconds: float
    seed: int
    ways: BundleWays | None = None

    @property
    def records(self) -> bool:
        """Whether choices of kernels go into the bundle: on a GPU."""
        return self.bundle is not None and 0 in self.threads


def prepare(asked: Question) -> TaxPlan:
    """Check all that is asked. Raises InputError, one line each."""
    on = _timed_on(asked)
    bundle = _bundle(asked)
    found, multiplies = _of_bundle(bundle, on) if bundle is not None else (_shapes(asked), None)
    own = multiplies.body if multiplies is not None else ""
    batches = sorted({*(asked.batches or ([] if asked.traffic else on.target.batches)), *(asked.traffic or {})})
    if not batches or batches[0] < 1:
        raise InputError("usage", where="--batch", value=batches, rule="batches are numbers from 1 up")
    names = list(asked.formats) or ([own] if own else list(on.formats))
    ours = [each for each in multiplies.variants if each == own or _fits(each, found, on)] if multiplies else []
    variants = _variants([*ours, *names], found, on)
    threads = on.threads(asked.threads)
    return TaxPlan(
        found, on, bundle, variants, own, batches, asked.traffic, threads, asked.seconds, asked.seed, multiplies
    )


def batch_range(text: str) -> list[int]:
    """What `--batch` says: `1,8,64` as numbers; `1:4096` doubles from 1 to 4,096. Raises InputError."""
    found: list[int] = []
    for part in (part.strip() for part in text.split(",")):
        ends = part.split(":")
        if not (1 <= len(ends) <= 2 and all(end.isdecimal() and int(end) > 0 for end in ends)):
            rule = "numbers from 1 up, with commas, or a range that doubles: 1,8,64 or 1:4096"
            raise InputError("usage", where="--batch", value=text, rule=rule)
        first, last = int(ends[0]), int(ends[-1])
        if last < first:
            raise InputError("usage", where="--batch", value=text, rule="a range rises")
        while first < last:
            found.append(first)
            first *= 2
        found.append(last)
    return sorted(set(found))


def _timed_on(asked: Question) -> On:
    """The device; without a word that of the target. Raises InputError."""
    device = asked.device
    if not device:
        device = "cuda" if asked.target and Target.load(asked.target).kind == "gpu" else "cpu"
    if device not in DEVICES:
        raise InputError("unknown-device", where="--device", value=device, remedy=did_you_mean(device, DEVICES))
    found: On = Graphics.of(asked.target) if device == "cuda" else Processor.of(asked.target, asked.cores)
    demand_runtime(asked.runtime, found.runtime, "GPU" if device == "cuda" else "CPU")
    return found


def _bundle(asked: Question) -> Bundle | None:
    """The bundle that is asked about, if it is one."""
    if asked.model is None or asked.shapes or not content.is_path(asked.model):
        return None
    path = Path(asked.model).expanduser()
    return Bundle.load(path) if (path / MANIFEST).is_file() else None


def _shapes(asked: Question) -> LinearShapes:
    """The linears of a model that is no bundle, or those that were typed."""
    if (asked.model is None) == (not asked.shapes):
        raise InputError(
            "usage",
            where="quantkit tax",
            value="a model and --shape" if asked.model else "neither a model nor --shape",
            rule="one of them says which linears are timed",
            remedy=f"quantkit tax --shape 4096x14336, or one of {', '.join(shapes.names())}",
        )
    if asked.model is None:
        return shapes.typed(asked.shapes)
    if not content.is_path(asked.model):
        if asked.model in configs.shipped_names():
            return shapes.shipped(asked.model)
        if asked.model.startswith("hf:"):
            remedy = "name its config.json, a folder with its weights, or --shape KxN"
            raise InputError("model-remote", where=asked.model, value="not fetched for its shapes alone", remedy=remedy)
        raise unknown_name("model", asked.model, {*shapes.names(), *ALIASES})
    return _of_folder(Path(asked.model).expanduser())


def _of_bundle(bundle: Bundle, on: On) -> tuple[LinearShapes, BundleWays]:
    """The quantized linears of a bundle, and the variants that they are."""
    layers = bundle.manifest.layers
    if not layers:
        raise InputError(
            "no-linears", where=str(bundle.path), value="nothing in it is quantized", remedy="name its model"
        )
    stored = {f"{layer.name}.weight": layer.shape for layer in layers}
    found = shapes.from_tensors(stored, bundle.manifest.model.name)
    own = [(layer.name, on.own(layer.scheme, layer.activations), (layer.shape[1], layer.shape[0])) for layer in layers]
    return found, ways(bundle, own)


def _of_folder(path: Path) -> LinearShapes:
    """From stored weights where there are some, else from the config."""
    from quantkit.model.source.weights import Weights

    config_file = path if path.is_file() else path / "config.json"
    if not config_file.is_file():
        raise InputError(
            "file-missing",
            where=str(path),
            value="no bundle and no config.json there",
            remedy="name a bundle, a model's folder or its config.json, or --shape KxN",
        )
    try:
        config = json.loads(limits.read(config_file))
    except (OSError, ValueError) as error:
        raise InputError("config-invalid", where=str(config_file), value=str(error)) from None
    if not isinstance(config, dict):
        raise InputError("config-invalid", where=str(config_file), value="not an object")
    name = (path.parent if path.is_file() else path).resolve().name
    if path.is_dir() and any(path.glob("*.safetensors")):
        stored = {tensor: entry.shape for tensor, entry in Weights.open(path).entries.items()}
        return shapes.from_tensors(stored, name, tied_head=bool(config.get("tie_word_embeddings")))
    return shapes.from_config(config, name)


def _variants(names: Iterable[str], found: LinearShapes, on: On) -> list[str]:
    """The variants that names, patterns and formats mean, each once, every one of them fit for every shape."""
    known = on.names()
    chosen: dict[str, None] = {}
    for name in names:
        if name == "all" or any(letter in name for letter in "*?["):
            matching = known if name == "all" else fnmatch.filter(known, name)
            fitting = [each for each in matching if _fits(each, found, on)]
            if not fitting:
                raise InputError("unknown-variant", where="--format", value=name, remedy=did_you_mean(name, known))
            chosen |= dict.fromkeys(fitting)
        elif name in known or name == on.baseline:
            chosen[name] = None
        else:
            chosen[on.usual(name, found)] = None
    chosen.pop(on.baseline, None)
    if not chosen:
        value = f"{on.baseline} alone"
        raise InputError("usage", where="--format", value=value, rule="it is the baseline", remedy="name another")
    for name in chosen:
        on.check(name, found)
    return list(chosen)


def _fits(name: str, found: LinearShapes, on: On) -> bool:
    try:
        on.check(name, found)
    except InputError:
        return False
    return True


# what `exporters/onnx/integers/products.py` does by token
MANY = "int8.token"
_BLOCK = re.compile(r"\.\d+\.")


@dataclass(frozen=True)
class BundleWays:
    """The variants that the products of a bundle are.

    Args:
        body: of most linears.
        head: (K, N) of the head; None where it is not quantized.
        head_variant: of it.
        many: of all but the head, from `ROWS` rows on; "" where there is one way.
    """

    body: str
    head: tuple[int, int] | None
    head_variant: str
    many: str

    @property
    def variants(self) -> list[str]:
        """Each once."""
        return list(dict.fromkeys(each for each in (self.body, self.head_variant, self.many) if each))

    def at(self, rows: int) -> str:
        """What the blocks' products are for so many rows."""
        return self.many if self.many and rows >= ROWS else self.body

    def said(self, rows: Sequence[Row], shapes: LinearShapes, batches: Sequence[int]) -> list[str]:
        """What all products take at each batch, as the bundle multiplies, and the head's share; nothing where that is
        neither several ways nor a head."""
        if len(self.variants) < 2 and self.head is None:
            return []
        timed = {
            ((row.op.K, row.op.N), row.op.M, row.settings.get("variant")): row
            for row in rows
            if row.name == "latency.op" and row.op is not None and row.op.layer != ALL and row.value is not None
        }
        found = []
        for batch in batches:
            ours = theirs = head = 0.0
            for each in shapes.distinct():
                last = self.head == (each.K, each.N)
                row = timed.get(((each.K, each.N), batch, self.head_variant if last else self.at(batch)))
                if row is None or row.baseline is None:
                    break
                ours += each.count * (row.value or 0.0)
                theirs += each.count * row.baseline.value
                head += (row.value or 0.0) if last else 0.0
            else:
                text = f"batch {batch}, as this bundle multiplies ({self.at(batch)}): {words.moment(ours)} of products"
                text += f" against {words.moment(theirs)}, {words.times(theirs / ours)} the speed"
                if self.head is not None:
                    what = f"{self.head[0]}x{self.head[1]}, {self.head_variant}"
                    text += f"; the head ({what}) takes {words.percent(head / ours, 0)}"
                found.append(text)
        return found


def ways(bundle: Bundle, own: Sequence[tuple[str, str, tuple[int, int]]]) -> BundleWays:
    """How a bundle multiplies.

    Args:
        own: (name, variant, (K, N)) of each quantized linear.
    """
    names = [variant for _, variant, _ in own]
    last = next(((variant, shape) for name, variant, shape in own if not _BLOCK.search(name)), None)
    manifest = bundle.manifest
    asked = any(
        (options or {}).get("prefill") == "int8"
        for step in manifest.recipe.get("export") or []
        for options in step.values()
    )
    second = asked and not any(each.code == "prefill-same" for each in manifest.decisions)
    return BundleWays(
        max(names, key=names.count),
        None if last is None else last[1],
        "" if last is None else last[0],
        MANY if second else "",
    )
