"""The stages of `run_all.py`, each the work of a process of its own: a job in, rows `[section, data]` out.

Rows are told as they are found, so that a stage that dies leaves what it had. torch and whatever stands on it is
imported in the process of the stage alone: the one that runs them all cannot be hurt by it.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parts.sections import kept
from quantkit.errors import InputError, QuantkitError
from quantkit.runtimes import child

if TYPE_CHECKING:
    import numpy as np
    import torch

    from quantkit.measurement.cuda.device import GpuDevice

SKIPPED = "stage-skipped"
# lines of PENDING.md that a record settles: the stage that does
LINES = {
    **dict.fromkeys(("kernels", "bfloat16", "byte-perm", "nan", "attention"), "correct"),
    **{"split": "race", "graphs": "race", "solvers": "solvers"},
    **dict.fromkeys(("int4-bound", "whole-k", "int4-never-behind", "decoding-hidden"), "sweep"),
    **dict.fromkeys(("speeds", "settings", "peers"), "sweep"),
    **{"tax-page": "tax", "packings": "tax", "steps": "steps", "compile-8b": "model", "compile-same": "model"},
    **{"rtx-hopper": "rtx"},
    **dict.fromkeys(("block-agrees", "passes-agree", "folds-shared", "scales-agree"), "recipes"),
    **dict.fromkeys(("bundle-kernels", "step-graph", "transformers-cuda", "real-agrees"), "real"),
}
# processes that compile; of a machine with more cores one is left for whoever waits
_COMPILERS = 15
# of the tax that the command itself measures, by page; a command that is lost tells nothing, so each has few formats.
# By humming, of int4 its own packing of the same weights
_INT4, _OTHERS = ("int4.g64.zeros", "int4.g128", "int4.g64.zeros.torch"), ("fp8_e4m3", "int8", "nf4.g64.double")
_FOREIGN = ("int4.g64.zeros.humming", "int4.g128.humming", "nvfp4", "mxfp4")
_BATCHES = "1:2048"
# seconds for the settings of a step's products where no sweep chose them
_TUNING = 60.0


def skipped(stage: str, why: str) -> InputError:
    """Raised by a stage that cannot be done here, which loses nothing."""
    return InputError(SKIPPED, where=stage, value=why)


def telling(caller: child.Caller) -> Callable[[str, Any], None]:
    """What tells the caller a section of the record and one entry of it."""

    def give(section: str, data: Any) -> None:
        if section == "settles" and data["line"] not in LINES:
            raise KeyError(data["line"])
        caller.row([section, cleaned(data)])

    return give


@dataclass
class Work:
    """What a stage's process has at hand.

    Args:
        job: as `run_all.py` gives it.
        device: that it runs on.
        dtype: of activations and baseline.
        generator: of resampling.
        deadline: `time.monotonic()` after which nothing new begins.
        give: a section of the record and one entry of it.
    """

    job: dict[str, Any]
    device: GpuDevice
    dtype: torch.dtype
    generator: np.random.Generator
    deadline: float
    give: Callable[[str, Any], None]

    @classmethod
    def begun(cls, job: dict[str, Any], caller: child.Caller) -> Work:
        """Raises InputError `no-gpu`."""
        import numpy as np
        import torch

        from parts.shapes import DTYPES
        from quantkit.measurement.cuda.device import GpuDevice, versions

        # a script beside `parts` is called like a library, and must not be taken for it
        beside = Path(__file__).resolve().parents[1]
        sys.path[:] = [place for place in sys.path if Path(place or ".").resolve() != beside]
        at = "cuda" if torch.cuda.is_available() else "cpu"
        if at == "cpu" and not job["dry"]:
            raise InputError("no-gpu", where="torch", value="torch.cuda.is_available() is False", remedy="--dry")
        device = GpuDevice(at, job["dry"])

        give = telling(caller)
        work = cls(job, device, DTYPES[job["dtype"]], np.random.default_rng(0), _deadline(job), give)
        give("device", device.describe())
        give("versions", versions())
        device.sample(job["stage"])
        return work

    def ended(self) -> None:
        """The clocks, and whether they fell."""
        self.device.sample("end")
        for sample in self.device.clocks:
            self.give("clocks", sample)
        self.give("throttled", not self.device.dry and self.device.throttled())

    def settles(self, line: str, holds: bool, by: str) -> None:
        """That a line of PENDING.md is settled, and by what."""
        if not self.device.dry:
            self.give("settles", {"line": line, "holds": holds, "by": by})

    def checked(self, stage: str, lines: Mapping[str, Callable[[dict[str, Any]], bool]], rows: Iterable[Any]) -> None:
        """Gives rows with `ok`, and settles the lines whose rows were all made: `ok` is None of one that was not."""
        found = []
        for row in rows:
            found.append(row)
            self.give(stage, row)
        for line, mine in lines.items():
            chosen = [row for row in found if mine(row)]
            if chosen and all(row["ok"] is not None for row in chosen):
                self.settles(line, all(row["ok"] for row in chosen), f"{len(chosen)} rows of `{stage}`")

    def earlier(self, stage: str) -> dict[str, Any]:
        """Sections of another stage of these results, if it ran on this kind of device."""
        found = kept(Path(self.job["results"]) / f"{stage}.json")
        sections: dict[str, Any] = found["sections"] if found else {}
        same = [each["name"] for each in sections.get("device", ())] == [self.device.describe()["name"]]
        return sections if same else {}


def compile_kernels(job: dict[str, Any], caller: child.Caller) -> None:
    """All kernels of the asked stages, by processes side by side, into Triton's cache."""
    if job["dry"]:
        raise skipped("compile", "the interpreter compiles nothing")
    from parts.precompile import launches
    from quantkit import machine

    sm = job["sm"] or _sm()
    count = max(1, min(_COMPILERS, machine.cores() - 1))
    wanted = len(launches(job["stages"], job["dtype"]))
    parts = [{**job, "sm": sm, "part": part, "parts": count} for part in range(count)]
    found = {"wanted": wanted, "processes": count, "compiled": 0, "failed": []}

    def one(part: dict[str, Any]) -> list[Any]:
        try:
            return child.run(
                compile_share,
                part,
                where="compile",
                died="process-died",
                remedy="what it had left is compiled when it is launched",
                environment={"TRITON_INTERPRET": "0"},
                # one that hangs ends before all of them would
                seconds=(job["soft"] + job["seconds"]) / 2,
            )
        except QuantkitError as problem:
            return [{"compiled": 0, "failed": [{"launch": f"part {part['part']}", "reason": problem.line()}]}]

    begin = time.monotonic()
    with ThreadPoolExecutor(count) as pool:
        for answer in (row for rows in pool.map(one, parts) for row in rows):
            found["compiled"] += answer["compiled"]
            found["failed"] += answer["failed"]
    caller.row(["compile", {**found, "seconds": time.monotonic() - begin}])


def compile_share(job: dict[str, Any], caller: child.Caller) -> None:
    """One process's share: every so manyth."""
    from parts.precompile import compiled, launches

    wanted = launches(job["stages"], job["dtype"])[job["part"] :: job["parts"]]
    done, failed = compiled(wanted, job["sm"], _deadline(job))
    caller.row({"compiled": done, "failed": failed})


def correct(job: dict[str, Any], caller: child.Caller) -> None:
    """Every kernel against float64."""
    from parts import correct as part

    work = Work.begun(job, caller)
    work.checked("correct", part.LINES, part.checked(work.device, work.deadline))
    work.ended()


def race(job: dict[str, Any], caller: child.Caller) -> None:
    """Every kernel with a split K, launched again and again; `parts.race`."""
    from parts import correct as part

    work = Work.begun(job, caller)
    rows = part.raced_kernels(work.device, work.dtype, work.deadline)
    lines = {"split": lambda row: row.get("how") != "beside", "graphs": lambda row: row.get("how") == "beside"}
    work.checked("race", lines, rows)
    work.ended()


def ceilings(job: dict[str, Any], caller: child.Caller) -> None:
    """What the device can do at best."""
    from quantkit.measurement.cuda import device as part

    work = Work.begun(job, caller)
    for row in part.measured(work.device, job["blocks"], work.generator):
        work.give("ceilings", row)
    work.ended()


def solvers(job: dict[str, Any], caller: child.Caller) -> None:
    """The solvers' kernels: `parts.solvers`, whose `measured(device)` gives rows with `ok`."""
    from parts import solvers as part

    work = Work.begun(job, caller)
    work.checked("solvers", {"solvers": lambda row: True}, part.measured(work.device))
    work.ended()


def sweep(job: dict[str, Any], caller: child.Caller) -> None:
    """Times over shapes, batches and formats; the ceilings first where the results have none, and at the end."""
    from parts import peers
    from parts.sweep import TINY, Sweep, passes
    from quantkit.measurement.cuda import device as part
    from quantkit.measurement.cuda.device import versions

    work = Work.begun(job, caller)
    first = work.earlier("ceilings").get("ceilings")
    if not first:
        first = part.measured(work.device, job["blocks"], work.generator)
        for row in first:
            work.give("ceilings", row)
    swept = Sweep(work.device, first, work.dtype, job["blocks"], work.deadline, versions(), work.give)
    for name in [] if job["dry"] else set(peers.PEERS) - set(peers.installed()):
        work.give("skipped", {"peer": name, "reason": "not installed"})
    for each in [TINY] if job["dry"] else passes():
        swept.run(each)
    work.give("reached", swept.reached)
    if not job["dry"]:
        again = part.measured(work.device, 2, work.generator)
        for kind in ("bf16", "fp16"):
            pair = [part.of(rows, "ceiling.compute", kind) for rows in (first, again)]
            work.give("drift", {"compute_type": kind, "first": pair[0], "last": pair[1]})
        work.give("throttled", part.slower(first, again))
    for line, holds, by in swept.settled():
        work.settles(line, holds, by)
    work.ended()


def profile(job: dict[str, Any], caller: child.Caller) -> None:
    """What the hardware's counters say of the decode kernels: Nsight Compute."""
    if job["dry"]:
        raise skipped("profile", "there are no counters in a dry run")
    from parts import counters as part

    if (tool := part.tool()) is None:
        raise skipped("profile", "Nsight Compute (`ncu`) is not on the PATH")
    give = telling(caller)
    for row in part.profiled(tool, job["dtype"], _deadline(job)):
        give("profile", row)


def rtx(job: dict[str, Any], caller: child.Caller) -> None:
    """Whether TensorRT-RTX builds and runs an engine on this GPU: `parts.rtx`."""
    from quantkit import machine

    if not machine.has("tensorrt_rtx_bindings"):
        raise skipped("rtx", "TensorRT-RTX is not installed: `make gpu-bundle CARRY='--only tensorrt'` carries it")
    from parts import rtx as part

    work = Work.begun(job, caller)
    row = part.tried(work.device.torch_device)
    work.give("rtx", row)
    said = f"{row['version']} on SM {row['capability']}: built {row['built']}, ran {row['ran']}; {row['said'][:1]}"
    work.settles("rtx-hopper", row["ok"], said)
    work.ended()


def tax(job: dict[str, Any], caller: child.Caller) -> None:
    """Break-evens of the linears of Llama-3-8B by `quantkit tax`, whose page is `OUT/tax.html`."""
    if job["dry"]:
        raise skipped("tax", "the command measures a GPU")
    from parts.recipes import answered
    from parts.sections import packings
    from parts.shapes import HEAD, WHOLE_MODEL
    from quantkit import machine

    give, deadline = telling(caller), _deadline(job)
    shapes = [word for rows, columns in (*WHOLE_MODEL, HEAD) for word in ("--shape", f"{columns}x{rows}")]
    # humming compiles a kernel for each shape and range of M, which must not cost the other formats their time
    rows: list[dict[str, Any]] = []
    asked = {"tax.html": _INT4} | ({"humming.html": _FOREIGN} if machine.has("humming") else {})
    asked["others.html"] = _OTHERS
    for number, (name, formats) in enumerate(asked.items()):
        page, left = Path(job["results"]) / name, max(deadline - time.monotonic(), 2.0) / (len(asked) - number)
        words = ["tax", "--device", "cuda", "--format", ",".join(formats), "--batch", _BATCHES, "--html", str(page)]
        # on an H200 the command took up to twice the seconds that it was asked for
        row = answered([*words, *shapes, "--seconds", f"{left / 2:.0f}"], time.monotonic() + left)
        give("commands", row)
        rows += row.get("rows", ())
        if formats is _INT4:
            # 3: intervals are too wide for an advice, and the page says so
            holds = row["exit"] in (0, 3) and page.is_file()
            said = f"exit {row['exit']}, {len(row.get('rows', ()))} rows, {page.name}"
            give("settles", {"line": "tax-page", "holds": holds, "by": said})
    if faster := packings(rows):
        holds = all(len(shapes) == len(WHOLE_MODEL) + 1 for shapes in faster.values())
        give("settles", {"line": "packings", "holds": holds, "by": str(faster)})


def steps(job: dict[str, Any], caller: child.Caller) -> None:
    """Decode steps of the product path, of Llama-3-8B's build: `parts.steps`."""
    from quantkit import machine

    if missing := [name for name in ("transformers", "pydantic") if not machine.has(name)]:
        raise skipped("steps", f"{missing[0]} is not installed: `make gpu-bundle` carries it")
    from parts import steps as part
    from parts.sweep import timing_of
    from quantkit.measurement.cuda.device import versions

    work = Work.begun(job, caller)
    timings: dict[str, list[Any]] = {}
    for each in work.earlier("sweep").get("timings", ()):
        timings.setdefault(each["variant"], []).append(timing_of(each))
    if not timings:
        timings = _tuned(work)
    sizes, cells = (
        (part.TINY, ((2, 3),)) if job["dry"] else (part.LLAMA | {"num_hidden_layers": job["layers"]}, part.CELLS)
    )
    best: dict[str, float] = {}
    for section, data in part.measured(
        sizes,
        cells,
        device=work.device,
        dtype=work.dtype,
        blocks=job["blocks"],
        generator=work.generator,
        timings=timings,
        versions=versions(),
        deadline=work.deadline,
        fuse="aot_eager" if job["dry"] else "inductor",
    ):
        work.give(section, data)
        # of a side without time for a fused step, the one apart says nothing of it
        if section == "rows" and (data["batch"], data["shape"]["context"]) == cells[0] and data["settings"]["fuse"]:
            best[data["settings"]["variant"]] = data["value"]
    if not job["dry"] and part.FIRST in best and job["layers"] == part.LLAMA["num_hidden_layers"]:
        said = ", ".join(f"{side} {1e3 * value:.2f} ms" for side, value in best.items())
        work.settles("steps", best[part.FIRST] <= part.MEANT, f"batch 1, context 512, fused: {said}")
    work.ended()


def _tuned(work: Work) -> dict[str, list[Any]]:
    """Choose the settings of a step's products, as `quantkit tax BUNDLE` would: without it no whole K is taken."""
    from parts.shapes import HEAD, INT4, WHOLE_MODEL
    from parts.steps import BATCHES
    from parts.sweep import TINY, Pass, Sweep
    from quantkit.measurement.cuda.device import versions
    from quantkit.measurement.cuda.sides import known

    inside, head = [known()[name] for name in INT4], [known()["int8"]]
    passes = [Pass("step", WHOLE_MODEL, BATCHES, inside, None), Pass("head", (HEAD,), BATCHES, head, None)]
    deadline = min(work.deadline, time.monotonic() + _TUNING)
    sweep = Sweep(work.device, [], work.dtype, 1, deadline, versions(), work.give)
    found: dict[str, list[Any]] = {}
    for each in [TINY] if work.device.dry else passes:
        found |= sweep.tune(each)
    for variant, timed in found.items():
        for timing in timed:
            work.give("timings", {"variant": variant, **asdict(timing)})
    return found


def model(job: dict[str, Any], caller: child.Caller) -> None:
    """A random model of 8B's shapes, compiled twice on the GPU by the command."""
    _compiling("compile_model", job, caller)


def recipes(job: dict[str, Any], caller: child.Caller) -> None:
    """A small model compiled by recipes, on the GPU and on the processor; then measured."""
    _compiling("recipes", job, caller)


def real(job: dict[str, Any], caller: child.Caller) -> None:
    """A real model compiled by recipes on the GPU, and run there on our kernels; then measured."""
    _compiling("real_model", job, caller)


def _compiling(name: str, job: dict[str, Any], caller: child.Caller) -> None:
    """A part that compiles there, and times nothing itself."""
    if job["dry"]:
        raise skipped(job["stage"], "a dry run has no GPU to compile on")
    _passed_on(import_module(f"parts.{name}"), job, caller)


def _passed_on(part: Any, job: dict[str, Any], caller: child.Caller) -> None:
    give = telling(caller)
    for section, data in part.measured(job, _deadline(job)):
        give(section, data)


def cleaned(value: Any) -> Any:
    """Without NaN and infinity, which JSON has no words for."""
    if isinstance(value, dict):
        return {str(key): cleaned(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [cleaned(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _deadline(job: dict[str, Any]) -> float:
    return time.monotonic() + float(job["soft"])


def _sm() -> int:
    import torch

    major, minor = torch.cuda.get_device_capability(0)
    return 10 * major + minor
