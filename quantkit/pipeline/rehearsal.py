"""Rehearse a compile on its largest block, with the same code, to predict time, memory and failures.

    open without reading the weights -> refuse -> cut out the largest block -> quantize, export and check it on a few
    sequences -> predict time and memory of the whole compile -> list its failures

The block becomes a model of one layer. Its folder holds the config with one layer, the block's weights under the
number 0, and the weights outside the blocks with a few rows of the vocabulary. Its time is measured on one sequence and
on a few, and multiplied. The predicted peak of memory is the block's own, plus the bytes that the whole model needs
beyond it.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit import content, machine
from quantkit.bundle import Build
from quantkit.bundle.disk import not_writable
from quantkit.errors import InputError, QuantkitError
from quantkit.exporters.carried import carried
from quantkit.pipeline.compile import make
from quantkit.pipeline.estimate import demand_disk
from quantkit.pipeline.progress import Progress, Stages
from quantkit.pipeline.request import Request, takes_graph
from quantkit.planning.compiling import CompileSpec, Compiling, elements, peaks
from quantkit.recipe import Override, Recipe
from quantkit.report.kit import words

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.model.streaming.stream import StreamedModel
    from quantkit.pipeline.blocks.prepared import Prepared

# sequences of the longer run; seconds that looking through the other blocks may take
FEW, _LOOKING = 4, 5.0
# seconds of a block below which it is run again: imports and first calls are a good part of the first time
_WARM = 8.0
# stages that go by the number of blocks
_REHEARSED = ("quantize", "export", "check", "build")
# how configs call the number of blocks, and how many of the first ones are without experts
_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_DENSE_FIRST, _DENSE_LISTED = "first_k_dense_replace", "mlp_only_layers"
# rows of the vocabulary that are kept
ROWS = 4096
# stage -> (processor seconds, seconds by the wall clock)
_Taken = dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Finding:
    """One finding of a rehearsal.

    Attributes:
        code: code of the error that the compile would raise.
        line: line for people, with the remedy.
        fails: True if the compile would end with this error.
    """

    code: str
    line: str
    fails: bool = True


@dataclass(frozen=True)
class Rehearsal:
    """Result of a rehearsal.

    Attributes:
        compiling: predicted cost of the whole compile, corrected by the block's; None if the block did not run.
        findings: failures and notes.
        block: name of the block that ran; "" if none did.
        sequences: number of sequences that calibrated it.
        measured: stage -> processor seconds of the block.
        memory_peak_bytes: peak of the process during the rehearsal; None if it had been higher before.
        seconds: duration of the rehearsal.
    """

    compiling: Compiling | None
    findings: Sequence[Finding]
    block: str = ""
    sequences: int = 0
    measured: Mapping[str, float] = field(default_factory=dict)
    memory_peak_bytes: int | None = None
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """True without a finding to end the compile with."""
        return not any(finding.fails for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {
            "ok": self.ok,
            "compiling": self.compiling.as_dict() if self.compiling is not None else None,
            "findings": [asdict(finding) for finding in self.findings],
            "block": self.block or None,
            "sequences": self.sequences,
            "measured_cpu_seconds": dict(self.measured),
            "factors": None,
            "memory_peak_bytes": self.memory_peak_bytes,
            "seconds": self.seconds,
        }


def rehearse(request: Request, progress: Progress | None = None) -> Rehearsal:
    """Rehearse a compile: predict its resources, list its failures, keep nothing.

    Raises InputError: `compile-unknown`, of a graph of images.
    """
    if takes_graph(request.model):
        rule, remedy = "blocks of transformers are rehearsed", "quantkit compile --dry-run says what becomes of a graph"
        raise InputError("compile-unknown", where=request.model, value="a float ONNX graph", rule=rule, remedy=remedy)
    return _Rehearsing(request, progress or Progress()).run()


class _Rehearsing:
    """Steps of one rehearsal; each adds its findings."""

    def __init__(self, request: Request, progress: Progress) -> None:
        self.request, self.progress = request, progress
        self.findings: list[Finding] = []

    def run(self) -> Rehearsal:
        from quantkit.pipeline.blocks.prepared import estimate, prepare

        began = time.perf_counter()
        self.progress.plan({"open": 1.0, "quantize": 3.0, "export": 3.0, "check": 3.0})
        prepared: Prepared | None = None
        with self._noting("rehearsal-failed"):
            prepared = prepare(self.request, whole=False)
        if prepared is None:
            return Rehearsal(None, self.findings, seconds=time.perf_counter() - began)
        ran = self._block(prepared, estimate(prepared))
        self._look_through(prepared)
        if prepared.training is not None:
            line = f"training on {len(prepared.training.ids)} sequences was not run: the seconds are without it"
            self.findings.append(Finding("training-not-run", line, fails=False))
        if ran.compiling is not None:
            self._demand_room(ran.compiling, prepared.out)
        return replace(ran, findings=tuple(self.findings), seconds=time.perf_counter() - began)

    @contextlib.contextmanager
    def _noting(self, instead: str = "") -> Iterator[None]:
        """Turn exceptions inside into findings; a library's own exceptions get the code `instead`."""
        try:
            yield
        except QuantkitError as problem:
            self.findings.append(Finding(problem.code, problem.line()))
        except Exception as problem:  # whatever another library makes of what it is given
            if not instead:
                raise
            reason = " ".join(str(problem).split())[:300] or type(problem).__name__
            self.findings.append(Finding(instead, f"{instead}: {type(problem).__name__}: {reason}"))

    def _block(self, prepared: Prepared, expected: Compiling) -> Rehearsal:
        """Compile the largest block alone."""
        from quantkit.pipeline.blocks.prepared import spec

        index = _largest(prepared)
        name, whole = prepared.stream.block_names[index], spec(prepared)
        few = min(FEW, whole.sequences)
        alone = _as_cut(whole, index, few)
        needed = max(peaks(alone).values())
        if needed > machine.memory_limit():
            line = f"{name} takes about {words.size(needed)} alone: not run, its memory is what sizes say"
            self.findings.append(Finding("block-not-run", line, fails=False))
            return Rehearsal(expected, [])
        before, peak, runs = machine.peak_bytes(), None, list[tuple[int, _Taken]]()
        with self._noting("rehearsal-failed"), self._room(prepared.out) as home:
            try:
                cut(prepared, index, home / "model")
            except InputError as problem:
                if problem.code != "block-not-alone":
                    raise
                self.findings.append(Finding(problem.code, problem.line(), fails=False))
                return Rehearsal(expected, [])
            first = self._compile(prepared, index, home / "cold", home / "model", min(few, 1))
            # what only a first block takes would be multiplied by all
            warm = first["quantize"][0] >= _WARM if "quantize" in first else True
            counts = ([] if warm else [min(few, 1)]) + ([few] if few > 1 else [])
            runs = [(min(few, 1), first)] if warm else []
            for count in counts:
                runs.append((count, self._compile(prepared, index, home / f"on-{count}", home / "model", count)))
            peak = machine.peak_bytes()
        if not runs:
            return Rehearsal(expected, [], block=name, sequences=few)
        own = peak if peak is not None and peak > before else None
        memory = dict(expected.memory)
        if own is not None:  # by as much as it was over what sizes say of the block
            parts = ("open", "begin", *_REHEARSED)
            reckoned = max(size for part, size in peaks(alone).items() if part.partition(" ")[0] in parts)
            memory = {part: size + own - reckoned for part, size in memory.items()}
        layers = whole.architecture.layers
        share = sum(elements(layer.matrices) for layer in layers) / max(elements(layers[index].matrices), 1.0)
        seconds = _multiplied(runs, whole.sequences, share)
        measured = {stage: cpu for stage, (cpu, _) in runs[-1][1].items()}
        return Rehearsal(replace(expected, memory=memory, seconds=seconds), [], name, few, measured, own)

    def _compile(self, prepared: Prepared, index: int, out: Path, model: Path, samples: int) -> _Taken:
        """Quantize, export and check the block, with the seconds of each."""
        from quantkit.pipeline.blocks.prepared import prepare
        from quantkit.pipeline.blocks.subject import TransformerSubject

        recipe = alone(prepared.request.recipe, prepared, index)
        off: dict[str, Any] = dict.fromkeys(("resume", "strict", "speed", "as_shipped"), False)
        request = replace(self.request, model=str(model.absolute()), recipe=recipe, out=out, **off)
        seen = prepared.calibration
        if seen is not None:
            seen = replace(seen, ids=few_of(seen.ids, max(samples, 1)))
        scoring = replace(prepared.scoring, ids=few_of(prepared.scoring.ids, 1), pairs=None)
        watch = Stages("open")
        subject = TransformerSubject(prepare(request, whole=False, seen=(seen, scoring)))
        with Build.open(out, subject.fingerprint(), resume=False) as build:
            subject.begin(build, self.progress, watch)
            make(subject)
        taken: _Taken = {}
        for stage in watch.end():
            if stage.name in _REHEARSED:
                cpu, wall = taken.get(stage.name, (0.0, 0.0))
                taken[stage.name] = (cpu + stage.cpu_seconds, wall + stage.seconds)
        return taken

    @contextlib.contextmanager
    def _room(self, out: Path) -> Iterator[Path]:
        """Make a folder beside the bundle's, removed at the end."""
        parent = next((folder for folder in out.absolute().parents if folder.is_dir()), Path())
        try:
            home = Path(tempfile.mkdtemp(dir=parent, prefix=f".{out.name}-rehearsal-"))
        except OSError as problem:
            raise not_writable(out, problem) from None
        try:
            yield home
        finally:
            shutil.rmtree(home, ignore_errors=True)

    def _look_through(self, prepared: Prepared) -> None:
        """Read weights of other blocks while time remains: NaN, infinity, truncated files."""
        weights, end = prepared.original.weights, time.perf_counter() + _LOOKING
        names = list(weights.entries)
        for done, name in enumerate(names):
            if time.perf_counter() > end:
                line = f"{len(names) - done} of {len(names)} tensors were not looked through; a compile does so first"
                self.findings.append(Finding("weights-unseen", line, fails=False))
                return
            before = len(self.findings)
            with self._noting():
                weights.read(name)
            if len(self.findings) > before:
                if self.findings[-1] in self.findings[:-1]:
                    self.findings.pop()  # the block had it already
                return

    def _demand_room(self, expected: Compiling, out: Path) -> None:
        """Check for enough disk for the bundle and the float model, and for enough memory."""
        import psutil

        with self._noting():
            demand_disk(expected, out)
        cache = content.cache_dir()
        home = next((folder for folder in (cache, *cache.parents) if folder.is_dir()), Path())
        if expected.disk.cache > (free := shutil.disk_usage(home).free):
            line = f"{home}: {words.size(free)} are free, the float model takes {words.size(expected.disk.cache)}"
            self.findings.append(Finding("disk-space", f"{line}: speed would not be measured", fails=False))
        # what this process has now it may use again
        limit, free = machine.memory_limit(), machine.memory_available() + int(psutil.Process().memory_info().rss)
        need = f"it takes about {words.size(expected.peak)} ({expected.at_peak})"
        if expected.peak > limit:
            line = f"{need}, this process may have {words.size(limit)}"
            self.findings.append(Finding("out-of-memory", f"out-of-memory: {line}; fewer --set calibration.samples"))
        elif expected.peak > free:
            line = f"{need}, {words.size(free)} are free now"
            self.findings.append(Finding("memory-short", f"memory-short: {line}", fails=False))


def _largest(prepared: Prepared) -> int:
    """Return the block with the most weights to quantize, or with the most weights if none are quantized."""
    names, layers = prepared.stream.block_names, prepared.layers

    def size(block: str) -> tuple[int, int]:
        inside = {name: n * k for name, (n, k) in layers.inside.items() if name.startswith(f"{block}.")}
        return sum(n for name, n in inside.items() if name in layers.schemes), sum(inside.values())

    return max(range(len(names)), key=lambda index: size(names[index]))


def _multiplied(runs: Sequence[tuple[int, _Taken]], sequences: int, share: float) -> dict[str, float]:
    """Return seconds of the whole: those of the block, in a straight line through what it took on (sequences, seconds),
    times how much larger all blocks are."""
    (few, first), (many, last) = runs[0], runs[-1]
    seconds = {}
    for stage, (_, wall) in last.items():
        slope = max(wall - first[stage][1], 0.0) / (many - few) if many > few and stage == "quantize" else 0.0
        seconds[stage] = share * (wall + slope * (sequences - many))
    return seconds


def _as_cut(whole: CompileSpec, index: int, sequences: int) -> CompileSpec:
    """Describe the compile of one block with the reduced vocabulary."""
    model = whole.architecture
    vocabulary = model.head.N if model.head is not None else model.vocabulary
    model = replace(model, layers=[model.layers[index]])
    if vocabulary and vocabulary > ROWS:
        head = replace(model.head, N=ROWS) if model.head is not None else None
        model = replace(model, embeddings=max(model.embeddings - (vocabulary - ROWS) * model.hidden, 0), head=head)
    return replace(whole, architecture=model, sequences=sequences, scored=whole.scored_length, timed=False)


# --- a model of one block --------------------------------------------------------------------------------------------


def cut(prepared: Prepared, index: int, folder: Path) -> None:
    """Write the model of block `index` alone: its weights are read here, and a few others.

    Raises InputError: `weights-nonfinite`, `weights-truncated`; `block-not-alone`, where the config of one layer makes
    another block.
    """
    from safetensors.torch import save_file

    from quantkit.model.source.open import open_model
    from quantkit.model.streaming.stream import StreamedModel

    source = prepared.original
    # passes that change the whole model do so with the cut one as well
    stream = StreamedModel(source) if prepared.stream.transforms else prepared.stream
    if len(stream.paths) > 1:
        where, rule = stream.block_names[index], "a block is rehearsed as the only one of a model"
        raise InputError("block-not-alone", where, "a block of a decoder reads what the encoder puts out", rule)
    folder.mkdir(parents=True)
    for path, name in carried(source.path, code=source.trust_remote_code):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / name)
    config = _config(source.config, index, len(stream.block_names))
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(dict(_tensors(stream, index)), folder / "model.safetensors", metadata={"format": "pt"})
    mine = prepared.stream.blocks[index]
    theirs = StreamedModel(open_model(str(folder.absolute()), trust_remote_code=None, hashed=False)).blocks[0]
    shapes = [{name: tuple(value.shape) for name, value in block.named_parameters()} for block in (mine, theirs)]
    if shapes[0] != shapes[1] or type(mine) is not type(theirs):
        where, rule = stream.block_names[index], "a block is rehearsed as the only one of a model"
        value = "a config of one layer gives a different block"
        raise InputError("block-not-alone", where=where, value=value, rule=rule)


def alone(recipe: Recipe, prepared: Prepared, index: int) -> Recipe:
    """Return the recipe for block `index` as the only one: its layers are stored as they will be in the whole model."""
    layers, before = prepared.layers, prepared.stream.block_names[index]
    default = recipe.scheme.weights
    overrides = []
    for name in layers.inside:
        scheme = layers.schemes.get(name)
        if name.startswith(f"{before}.") and default is not None and scheme != default:
            stored = None if scheme is None else scheme.model_dump(mode="json")
            overrides.append(Override(match=renamed(name, before), weights=stored))
    if layers.head is not None and layers.schemes[layers.head] != default:
        overrides.append(Override(match="lm_head", weights=layers.schemes[layers.head].model_dump(mode="json")))
    keep = [role for role in recipe.keep if role in ("embeddings", "lm_head", "norms")]
    # by which a layer is what its number says
    plain = recipe.scheme.model_copy(update={"mixture": None})
    return recipe.model_copy(update={"overrides": overrides, "keep": keep, "scheme": plain})


def renamed(name: str, block: str) -> str:
    """Rename tensors inside a block as in the block with number 0."""
    return f"{block.rpartition('.')[0]}.0{name.removeprefix(block)}"


def _config(config: Mapping[str, Any], index: int, count: int) -> dict[str, Any]:
    """Return a config with one layer; what is listed by layer keeps the entry of that one."""
    cut: dict[str, Any] = {}
    for key, value in config.items():
        inner = isinstance(value, dict) and key.endswith("_config") and key != "vision_config"
        listed = isinstance(value, list) and len(value) == count > 1
        cut[key] = _config(value, index, count) if inner else [value[index]] if listed else value
    for key in _COUNTS:
        if cut.get(key) == count:
            cut[key] = 1
    if isinstance(cut.get(_DENSE_FIRST), int):
        cut[_DENSE_FIRST] = int(index < cut[_DENSE_FIRST])
    if isinstance(config.get(_DENSE_LISTED), list):
        cut[_DENSE_LISTED] = [0] if index in config[_DENSE_LISTED] else []
    if isinstance(cut.get("vocab_size"), int):
        cut["vocab_size"] = min(ROWS, cut["vocab_size"])
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if isinstance(cut.get(key), int) and cut[key] >= ROWS:
            cut[key] = 0
    return cut


def _tensors(stream: StreamedModel, index: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the cut model's stored tensors, each tensor of the files once."""
    from quantkit.model.structure.traced import is_inside

    block, seen, config = stream.block_names[index], set(), stream.source.config
    weights, vocabulary = stream.source.weights, config.get("vocab_size") or 0
    vocabulary = vocabulary or (config.get("text_config") or {}).get("vocab_size")
    for name, file in stream.files.items():
        inside = name.startswith(f"{block}.")
        if file in seen or (not inside and is_inside(name, stream.paths)):
            continue
        seen.add(file)
        table = not inside and weights.entries[file].shape[:1] == (vocabulary,)
        value = weights.beginning(file, ROWS) if table else None
        yield renamed(name, block) if inside else name, weights.read(file) if value is None else value


def few_of(ids: Tensor, samples: int) -> Tensor:
    """Return ids of the first sequences, within the reduced vocabulary."""
    return ids[:samples].remainder(ROWS)
