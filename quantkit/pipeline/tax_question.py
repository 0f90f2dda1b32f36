"""What `quantkit tax` is asked, checked before anything is timed: shapes, formats, batches, traffic, device."""

from __future__ import annotations

import fnmatch
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quantkit import content, registry
from quantkit.bundle import Bundle
from quantkit.bundle.manifest import MANIFEST
from quantkit.errors import InputError, did_you_mean, unknown_name
from quantkit.model.alias import ALIASES
from quantkit.pipeline.request import this_machine
from quantkit.plan import machine, shapes
from quantkit.plan.shapes import Shapes
from quantkit.target import Target

RUNTIME = "onnxruntime"
BASELINE = "float32"
DEFAULT_FORMATS = ("int4", "int8", "int8.dynamic", "nf4")


@dataclass(frozen=True)
class Question:
    """What is asked, as it was typed.

    Args:
        model: a bundle, a folder with a config or weights, a `config.json`, or a shipped name; None: `shapes`.
        shapes: `4096x14336`, ...
        formats: names of formats or variants (`int4`, `int4.g32.level0`), patterns (`int4*`), `all`.
        batches: M; empty: those of the target.
        traffic: batch -> share of the steps; its batches are timed too.
        device: `cpu` or `cuda`.
        runtime: `onnxruntime`.
        threads: one run each; empty: all cores.
        seconds: for all of it.
        target: name or path; None: this processor.
        seed: of weights and of the order of steps.
    """

    model: str | None = None
    shapes: Sequence[str] = ()
    formats: Sequence[str] = ()
    batches: Sequence[int] = ()
    traffic: Mapping[int, float] | None = None
    device: str = "cpu"
    runtime: str = RUNTIME
    threads: Sequence[int] = ()
    seconds: float = 300.0
    target: str | None = None
    seed: int = 0


@dataclass(frozen=True)
class Plan:
    """What will be timed, all of it known to fit.

    Args:
        shapes: the linears.
        variants: without the baseline.
        subject: the variant that a bundle's own format is; "" where none is asked about.
        batches: rising.
        traffic: as asked.
        threads: one run each.
        target: whose figures stand beside the measured ones.
        seconds: for all runs.
        seed: as asked.
    """

    shapes: Shapes
    variants: Sequence[str]
    subject: str
    batches: Sequence[int]
    traffic: Mapping[int, float] | None
    threads: Sequence[int]
    target: Target
    seconds: float
    seed: int


def prepare(asked: Question) -> Plan:
    """Check all that is asked. Raises InputError, one line each."""
    target = Target.load(asked.target or this_machine())
    _check_device(asked, target)
    found, own = _shapes(asked)
    batches = sorted({*(asked.batches or ([] if asked.traffic else target.batches)), *(asked.traffic or {})})
    if not batches or batches[0] < 1:
        raise InputError("usage", where="--batch", value=batches, rule="batches are numbers from 1 up")
    names = list(asked.formats) or ([own] if own else list(DEFAULT_FORMATS))
    variants = _variants([*([own] if own else []), *names], found, target)
    threads = list(dict.fromkeys(asked.threads)) or [machine.cores()]
    if min(threads) < 1 or max(threads) > machine.cores():
        raise InputError(
            "threads-invalid",
            where="--threads",
            value=max(threads, key=lambda n: (n > machine.cores(), -n)),
            rule=f"from 1 to the {machine.cores()} cores of this machine: more would wait for one another",
        )
    return Plan(found, variants, own, batches, asked.traffic, threads, target, asked.seconds, asked.seed)


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


def traffic_of(text: str) -> dict[int, float]:
    """What `--traffic` says: `1:0.7,8:0.2,64:0.1`, batch and share of the steps.

    Raises:
        InputError: `traffic-invalid`; shares that do not add up to 1 are not guessed at.
    """
    found: dict[int, float] = {}
    for part in text.split(","):
        batch, colon, share = part.strip().partition(":")
        try:
            value = float(share)
        except ValueError:
            value = math.nan
        if not (batch.isdecimal() and int(batch) > 0 and colon and value >= 0) or int(batch) in found:
            rule = "batch:share for each batch, once each: 1:0.7,8:0.2,64:0.1"
            raise InputError("traffic-invalid", where="--traffic", value=text, rule=rule)
        found[int(batch)] = value
    total = sum(found.values())
    if not abs(total - 1) < 0.005:
        scaled = (
            ",".join(f"{batch}:{share / total:.3g}" for batch, share in found.items()) if 0 < total < math.inf else ""
        )
        raise InputError(
            "traffic-invalid",
            where="--traffic",
            value=f"shares add up to {total:g}",
            rule="shares of the steps add up to 1",
            remedy=f"if you mean their proportions: --traffic {scaled}" if scaled else "",
        )
    return found


def _check_device(asked: Question, target: Target) -> None:
    if asked.device not in ("cpu", "cuda"):
        raise InputError(
            "unknown-device", where="--device", value=asked.device, remedy=did_you_mean(asked.device, ["cpu", "cuda"])
        )
    if asked.device == "cuda":
        graphics, reason = machine.gpus()
        raise InputError(
            "device-absent",
            where="--device cuda",
            value="this machine's GPU cannot be timed from here yet" if graphics else f"no GPU here: {reason}",
            rule="kernels are timed on the device that they are for",
            remedy="benchmarks/gpu times the GPU kernels where there is one; --device cpu times this processor",
        )
    if target.kind != "cpu":
        raise InputError(
            "device-absent",
            where="--target",
            value=f"{target.name} is a GPU",
            rule="the tax is measured on the machine at hand",
            remedy=f"run it there, or use --target {this_machine()}",
        )
    if asked.runtime != RUNTIME:
        known = registry.names("runtimes")
        remedy = f"use {RUNTIME}" if asked.runtime in known else did_you_mean(asked.runtime, [RUNTIME])
        raise InputError(
            "runtime-unsupported",
            where="--runtime",
            value=asked.runtime,
            rule="on a CPU single products are timed in ONNX Runtime",
            remedy=remedy,
        )


def _shapes(asked: Question) -> tuple[Shapes, str]:
    """(the linears, the variant of a bundle's own format or "")."""
    if (asked.model is None) == (not asked.shapes):
        raise InputError(
            "usage",
            where="quantkit tax",
            value="a model and --shape" if asked.model else "neither a model nor --shape",
            rule="one of them says which linears are timed",
            remedy=f"quantkit tax --shape 4096x14336, or one of {', '.join(shapes.names())}",
        )
    if asked.model is None:
        return shapes.typed(asked.shapes), ""
    if not content.is_path(asked.model):
        if asked.model in shapes.names():
            return shapes.shipped(asked.model), ""
        if asked.model.startswith("hf:"):
            remedy = "name its config.json, a folder with its weights, or --shape KxN"
            raise InputError("model-remote", where=asked.model, value="not fetched for its shapes alone", remedy=remedy)
        raise unknown_name("model", asked.model, {*shapes.names(), *ALIASES})
    path = Path(asked.model).expanduser()
    if (path / MANIFEST).is_file():
        return _of_bundle(Bundle.load(path))
    return _of_folder(path), ""


def _of_bundle(bundle: Bundle) -> tuple[Shapes, str]:
    """The quantized linears of a bundle, and the variant that its scheme is."""
    layers = bundle.manifest.layers
    if not layers:
        raise InputError(
            "no-linears", where=str(bundle.path), value="nothing in it is quantized", remedy="name its model"
        )
    stored = {f"{layer.name}.weight": layer.shape for layer in layers}
    found = shapes.from_tensors(stored, bundle.manifest.model.name)
    schemes = [layer.scheme for layer in layers]
    scheme = max(schemes, key=schemes.count)
    name, group = str(scheme.get("format")), scheme.get("group")
    if name in ("int4", "int8") and isinstance(group, int):
        from quantkit.export._single_op import GROUPS

        level = Target.load(this_machine()).build.get(RUNTIME, {}).get("accuracy_level", 4)
        fitting = [size for size in GROUPS if group % size == 0]
        if fitting:
            return found, f"{name}.g{max(fitting)}.level{level}"
    return found, name


def _of_folder(path: Path) -> Shapes:
    """From stored weights where there are some, else from the config."""
    from quantkit.model.weights import Weights

    config_file = path if path.is_file() else path / "config.json"
    if not config_file.is_file():
        raise InputError(
            "file-missing",
            where=str(path),
            value="no bundle and no config.json there",
            remedy="name a bundle, a model's folder or its config.json, or --shape KxN",
        )
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError("config-invalid", where=str(config_file), value=str(error)) from None
    if not isinstance(config, dict):
        raise InputError("config-invalid", where=str(config_file), value="not an object")
    name = (path.parent if path.is_file() else path).resolve().name
    if path.is_dir() and any(path.glob("*.safetensors")):
        stored = {tensor: entry.shape for tensor, entry in Weights.open(path).entries.items()}
        return shapes.from_tensors(stored, name, tied_head=bool(config.get("tie_word_embeddings")))
    return shapes.from_config(config, name)


def _variants(names: Iterable[str], found: Shapes, target: Target) -> list[str]:
    """The variants that names, patterns and formats mean, each once, every one of them fit for every shape."""
    from quantkit.export import _single_op as single

    known = single.names()
    build = target.build.get(RUNTIME, {})
    level = int(build.get("accuracy_level", 4))
    chosen: dict[str, None] = {}
    for name in names:
        if name == "all" or any(letter in name for letter in "*?["):
            matching = known if name == "all" else fnmatch.filter(known, name)
            fitting = [each for each in matching if _fits(each, found)]
            if not fitting:
                raise InputError("unknown-variant", where="--format", value=name, remedy=did_you_mean(name, known))
            chosen |= dict.fromkeys(fitting)
            continue
        if name in known:
            chosen[name] = None
            continue
        block = int(build.get("block", 128))
        usual = single.usual(name, block=_group(found, block), level=level)
        if usual not in known:
            raise _unknown(name, known)
        chosen[usual] = None
    chosen.pop(BASELINE, None)
    if not chosen:
        raise InputError(
            "usage", where="--format", value="float32 alone", rule="it is the baseline", remedy="name another"
        )
    for name in chosen:
        variant = single.variant(name)
        target.check([(variant.format, variant.scheme.symmetric if variant.scheme else True)], RUNTIME)
        for linear in found.linears:
            single.check_shape(variant, linear.K, linear.N)
    return list(chosen)


def _fits(name: str, found: Shapes) -> bool:
    from quantkit.export import _single_op as single

    try:
        for linear in found.linears:
            single.check_shape(single.variant(name), linear.K, linear.N)
    except InputError:
        return False
    return True


def _group(found: Shapes, block: int) -> int:
    """The largest group up to the target's block that divides every K; the block itself if none does."""
    from quantkit.export._single_op import GROUPS

    fitting = [size for size in GROUPS if size <= block and all(linear.K % size == 0 for linear in found.linears)]
    return max(fitting, default=block)


def _unknown(name: str, known: Sequence[str]) -> InputError:
    """The error for a format that this runtime cannot be given, or for no format at all."""
    if name not in registry.names("formats"):
        return unknown_name("format", name, {*registry.names("formats"), *known}, where="--format")
    having = []
    for target in (Target.load(each) for each in content.names("export")):
        native = [runtime for runtime, cell in target.formats.get(name, {}).items() if cell.state == "native"]
        having += [f"{target.name} ({', '.join(native)})"] if native else []
    return InputError(
        "format-absent",
        where="--format",
        value=f"{name} does not run in {RUNTIME} on a CPU",
        rule="emulating it would not measure it",
        remedy=f"computed natively by {'; '.join(having)}" if having else "no target that is known computes in it",
    )
