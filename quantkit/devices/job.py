"""What a device is asked, and the lines in which it answers.

A job is one JSON document; its id is the hash of what it asks, so that the same question finds the work that is already
under way. It is done cell by cell: a shape, a stretch of positions, an operation. Each answer is one line of
`rows.jsonl`, written whole, so that what is on the disk there is what need not be done again.

    WORKDIR/bundles/NAME/...   what jobs read: a `Place` is a path below WORKDIR
    WORKDIR/store/SHA256       files by their content: what was carried, and what a job made that goes back
    WORKDIR/jobs/ID/job.json   the job
                   /rows.jsonl the answers: line n is answer n
                   /pid        of the process group that is at work

A line is a stranger's data: it is never executed, it names no file, and it has a limit.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, TypeAdapter

from quantkit.bundle import LayerEntry
from quantkit.content import Closed, validated
from quantkit.errors import InputError

# bytes of one line; bytes of all lines of a job
LINE, ANSWER = 1 << 20, 1 << 28
_MANY = 10_000
# that are timed in rounds: a round is a line
SHAPES = 500
# how the cells of products begin, and those of rounds
LINEAR, ROUND = "linear-", "round-"
_PLACE = re.compile(r"[A-Za-z0-9._/-]+")


def _below(place: str) -> str:
    parts = PurePosixPath(place).parts
    if not _PLACE.fullmatch(place) or place.startswith("/") or ".." in parts:
        raise ValueError("a path below the workdir, of letters, digits, '.', '_', '-' and '/'")
    return place


# a path below WORKDIR on the device
Place = Annotated[str, Field(min_length=1, max_length=512), AfterValidator(_below)]
Words = Annotated[str, Field(max_length=2000)]
Share = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Count = Annotated[int, Field(gt=0, le=1 << 20)]
# of an encoder's last hidden states: see `measurement.accuracy.purpose`
Pooling = tuple[Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"], ...]


class PlacedModel(Closed):
    """A model there.

    Args:
        place: a folder with `model.onnx` or `model.gguf`, or a graph's file.
        subject: its identity in the rows.
        format: of its weights.
        weight_bytes: of all constants, of a graph.
        built: of what holds executable code, an engine, the hashes that it has to have, by paths below `place`.
        saved_bytes: of an engine, that its weights take less than in 16 bits.
    """

    place: Place
    subject: str
    format: str
    weight_bytes: float = 0.0
    built: dict[Place, Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]] = Field(default={}, max_length=20)
    saved_bytes: float = 0.0


class PlacedSamples(Closed):
    """What a graph is run on: see `measurement.timing.speed.Samples`."""

    place: Place
    macs: float
    outputs: float


class ShapeCell(Closed):
    """See `measurement.timing.shapes.Shape`."""

    kind: Literal["decode", "prefill"]
    batch: Count
    size: Count

    @property
    def cell(self) -> str:
        """Its name among a job's answers."""
        return f"{self.kind}-{self.batch}-{self.size}"


class Measure(Closed):
    """Times of two models, shape by shape, interleaved; what each takes in memory, unless they are graphs or on a GPU.

    Args:
        runtime: of what is judged; `floats` is that of the float model.
        shapes: none: memory alone.
        graphs: a folder of `ceilings.write_graphs`; None on a GPU.
        layers: of a checkpoint on quantkit's kernels, how each is stored, as its manifest has it.
        threads: of both; None: as many as the device has cores.
        seconds: for all shapes together.
    """

    kind: Literal["measure"] = "measure"
    ours: PlacedModel
    theirs: PlacedModel
    runtime: str
    floats: str
    shapes: tuple[ShapeCell, ...] = Field(max_length=_MANY)
    graphs: Place | None
    threads: Count | None = None
    seconds: Seconds = 300.0
    cell_seconds: Seconds = 120.0
    rounds: Annotated[int, Field(ge=1, le=100)] = 5
    seed: int = 0
    samples: PlacedSamples | None = None
    layers: tuple[LayerEntry, ...] = Field(default=(), max_length=1 << 17)


class Rounds(Closed):
    """Raw times of two models that are loaded anew in every round: see `measurement.timing.rounds`. A round is a cell.

    Args:
        runtimes: of ours and of theirs.
    """

    kind: Literal["rounds"] = "rounds"
    ours: PlacedModel
    theirs: PlacedModel
    runtimes: tuple[str, str] = ("onnxruntime", "onnxruntime")
    shapes: tuple[ShapeCell, ...] = Field(min_length=1, max_length=SHAPES)
    threads: Count | None = None
    seconds: Seconds = 60.0
    seed: int = 0
    samples: PlacedSamples | None = None


class ScoreBeside(Closed):
    """What a model says where the float model's answer is known, or is worked out beside it.

    Of a decoder both are run over the same tokens, and what tells them apart is kept of each position: the same numbers
    as `measurement.accuracy.positions` keeps, without a logit on its way. An encoder gives its pooled vectors, a
    graph what comes out of it; these are compared where the job came from.

    Args:
        theirs: the float model, of a decoder.
        data: an .npz below WORKDIR: `ids` [n, T], of an encoder's texts `lengths` [n] too, or the inputs of a graph.
        pooling, skip: how an encoder's vectors are pooled, and from which token on: `measurement.accuracy.purpose`.
    """

    kind: Literal["accuracy"] = "accuracy"
    of: Literal["decoder", "encoder", "network"]
    ours: PlacedModel
    theirs: PlacedModel | None = None
    runtime: str
    floats: str = ""
    data: Place
    threads: Count | None = None
    pooling: Pooling = ("mean",)
    skip: Annotated[int, Field(ge=0)] = 0


class ScoreStreamed(Closed):
    """What a checkpoint says in torch, or an engine, beside the float model, which torch runs block by block.

    The answers are those of `ScoreBeside`: of a decoder numbers of each position, of an encoder its pooled vectors.

    Args:
        ours: a folder with what a bundle has of it: `model/` or `engine/`.
        theirs: a folder with the float model's checkpoint, of a decoder.
        data, pooling, skip: see `ScoreBeside`.
    """

    kind: Literal["streamed"] = "streamed"
    of: Literal["decoder", "encoder"]
    ours: PlacedModel
    theirs: PlacedModel | None = None
    runtime: str
    data: Place
    pooling: Pooling = ("mean",)
    skip: Annotated[int, Field(ge=0)] = 0


class CarriedLinear(Closed):
    """A linear, K inputs by N outputs, and the folder of its products: see `measurement.operators.onnxruntime`."""

    K: Count
    N: Count
    place: Place


class Tax(Closed):
    """Single products, timed side by side: see `measurement.operators.products`.

    Args:
        linears: distinct shapes.
        small: the folder of the products that say which kernels run.
        graphs: a folder of `ceilings.write_graphs`.
        threads: of one product.
        cache: bytes of the last-level cache, beyond which the weights of a product have to go together.
        seconds: for all linears together.
        rounds: over the batches of each.
    """

    kind: Literal["tax"] = "tax"
    linears: tuple[CarriedLinear, ...] = Field(min_length=1, max_length=_MANY)
    small: Place
    graphs: Place
    baseline: str
    variants: tuple[str, ...] = Field(min_length=1, max_length=_MANY)
    batches: tuple[Count, ...] = Field(min_length=1, max_length=_MANY)
    threads: Count
    cache: Annotated[int, Field(gt=0, le=1 << 40)]
    seconds: Seconds = 60.0
    rounds: Annotated[int, Field(ge=1, le=100)] = 8
    seed: int = 0


class Generate(Closed):
    """Goes on with a prompt: tokens in, tokens out, so that the device needs no tokenizer."""

    kind: Literal["generate"] = "generate"
    ours: PlacedModel
    runtime: str
    ids: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1, max_length=1 << 20)
    ends: tuple[int, ...] = ()
    new_tokens: Count = 64
    sample: bool = False
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    seed: int = 0
    threads: Count | None = None


class Verify(Closed):
    """Hashes a bundle's files and loads what the runtimes there read.

    Args:
        loads: runtime -> what it opens, a folder or a graph's file.
        graphs: whether it is no transformer.
    """

    kind: Literal["verify"] = "verify"
    bundle: Place
    loads: dict[str, Place] = Field(default={}, max_length=20)
    graphs: bool = False


class Doctor(Closed):
    """Measures the ceilings of the device; `size` is the side of the matrices whose product is timed."""

    kind: Literal["doctor"] = "doctor"
    graphs: Place
    size: Count = 1024
    runs: Annotated[int, Field(ge=1, le=100)] = 15
    threads: Count | None = None


class NightTimes(Closed):
    """Times of a nightly cell: see `measurement.timing.anew`.

    Args:
        sides: `candidate`, and what it is set against.
        samples: of graphs, an .npz below WORKDIR.
    """

    kind: Literal["night"] = "night"
    sides: dict[Literal["candidate", "baseline", "release"], PlacedModel] = Field(min_length=1)
    runtime: str
    batch: Count
    rounds: Count
    blocks: Count | None = None
    seconds: Seconds | None = None
    seed: int = 0
    samples: Place | None = None
    threads: Count | None = None


class BuildEngine(Closed):
    """Builds an engine from a network: see `exporters.tensorrt.engine.EngineJob`. What comes of it lies in the store,
    and goes back by its hash.

    Args:
        network: a folder with `network.onnx`.
        sm: compute capabilities, of a build ahead of time.
        gpu: name of the GPU that it is built on; empty ahead of time.
        profiles: shapes, as `profiles.ProfileShapes` has them.
        flags: of the builder.
        seconds: after which it is given up.
    """

    kind: Literal["engine"] = "engine"
    network: Place
    library: Literal["tensorrt_rtx", "tensorrt"]
    sm: tuple[Annotated[str, Field(pattern=r"^\d{1,2}\.\d$")], ...] = Field(max_length=8)
    gpu: Annotated[str, Field(max_length=200)] = ""
    profiles: tuple[dict[str, Any], ...] = Field(min_length=1, max_length=64)
    flags: dict[str, float | bool] = Field(default={}, max_length=20)
    seconds: Seconds | None = None


Work = Annotated[
    Measure | Rounds | ScoreBeside | ScoreStreamed | Tax | Generate | Verify | Doctor | NightTimes | BuildEngine,
    Field(discriminator="kind"),
]


class Job(Closed):
    """What a device is asked."""

    schema_: Annotated[Literal[1], Field(alias="schema")] = 1
    work: Work

    @property
    def id(self) -> str:
        """Of what is asked: the same question has the same id."""
        return hashlib.sha256(self.text().encode()).hexdigest()[:24]

    def text(self) -> str:
        """`job.json`: sorted, on one line."""
        return json.dumps(self.model_dump(mode="json", by_alias=True), sort_keys=True, allow_nan=False)

    @classmethod
    def read(cls, text: str) -> Job:
        """Of a `job.json`. Raises InputError `job-invalid`."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as problem:
            raise InputError("job-invalid", where="job.json", value=str(problem)[:80], rule="one JSON object") from None
        return validated(cls, data, where="job.json", code="job-invalid", rule="a job is an object")


class _Answer(Closed):
    n: Annotated[int, Field(ge=0)]


class At(_Answer):
    """How much is done, and what is being done."""

    kind: Literal["progress"] = "progress"
    share: Share
    words: Words = ""


class Note(_Answer):
    """Something worth a line."""

    kind: Literal["note"] = "note"
    words: Words


class Found(_Answer):
    """What a cell gave: it is not done again.

    Args:
        cell: what was done; once in a job.
        rows: of what JSON has; whoever reads them validates each as what he asked for.
    """

    kind: Literal["row"] = "row"
    cell: Annotated[str, Field(max_length=200)]
    rows: tuple[dict[str, Any], ...] = Field(max_length=_MANY)


class Failed(_Answer):
    """What ended the work: the five fields of an error, and its exit code."""

    kind: Literal["error"] = "error"
    code: Annotated[str, Field(pattern=r"^[a-z0-9-]{1,64}$")]
    where: Words = ""
    value: Words = ""
    rule: Words = ""
    remedy: Words = ""
    exit: Literal[1, 2, 3, 75] = 2


class Done(_Answer):
    """All cells have answered."""

    kind: Literal["done"] = "done"


Line = Annotated[At | Note | Found | Failed | Done, Field(discriminator="kind")]
_LINES: TypeAdapter[At | Note | Found | Failed | Done] = TypeAdapter(Line)


def parse(line: bytes, *, where: str) -> At | Note | Found | Failed | Done:
    """One line of a device's answer.

    Args:
        line: without its line feed.
        where: the device, for the error.

    Raises:
        InputError: `answer-invalid`, it is too long or not as the protocol says.
    """
    rule = f"a line of at most {LINE} bytes, as this version writes them"
    try:
        if len(line) > LINE:
            raise ValueError(f"{len(line)} bytes")
        return _LINES.validate_python(json.loads(line, parse_constant=_refuse))
    except (ValueError, RecursionError):
        raise InputError(
            "answer-invalid",
            where=where,
            value=repr(line[:80]),
            rule=rule,
            remedy="run it again; if it stays, what runs there is not this version's",
        ) from None


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON number")
